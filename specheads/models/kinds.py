"""The contract of heads, whatever their kind.

Training, decoding and exports ask heads what :class:`Heads` lists, and never which kind they are.
A new kind is one module with an ``nn.Module`` that answers it, an entry in ``KINDS`` of
:mod:`specheads.models.checkpoint`, and one in tests/models/test_heads_contract.py, which holds
every kind to what is written here. The recipes of Medusa heads train it by ``heads.kind``;
docs/adding_a_method.md adds one.

Shapes: K heads, d what the output matrix of the base reads, V vocabulary, V' the tokens that the
heads can guess, B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.losses.cross_entropy import IGNORE
from specheads.models.base import Embed, input_device
from specheads.models.output import OutputLayer
from specheads.system.errors import check

T = TypeVar("T")


def given(value: T | None, name: str) -> T:
    """Return what heads read, ``tokens`` or ``embed``; raise ValueError if it is missing."""
    if value is None:
        raise ValueError(f"these heads read tokens, but {name} is None")
    return value


def multiplied(features: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    """Return the products [K, ..., V'] of K matrices with what they read.

    Where they are one, it is read once for all heads.
    """
    first = matrices[0]
    if all(each is first for each in matrices):
        return F.linear(torch.stack(list(features)).to(first.dtype), first)
    pairs = zip(features, matrices, strict=True)
    return torch.stack([F.linear(each.to(matrix.dtype), matrix) for each, matrix in pairs])


class HeadCache(Protocol):
    """What layers of heads that attend remember of the rows' texts; never changed in place."""

    def append(self, hidden: Tensor, counts: Sequence[int], tokens: Tensor) -> tuple[Self, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's hidden states of the positions that follow, at the heads'
                taps, right-padded.
            counts: per row how many of the T are real; where it is 0, the output means nothing.
            tokens: [B, T], the token that came after each of them, the root at the last one.

        Returns:
            The cache with them, and what the layers make of each row's last position, [..., B, d].
        """

    def select(self, rows: Tensor) -> Self:
        """Return the cache of the rows ``rows`` [R] (long), in that order."""

    def join(self, other: Self) -> Self:
        """Return the cache of the rows of both; something of all texts was read."""


class Walk(Protocol):
    """One step's way down a tree, level by level; called without gradients.

    Attributes:
        depth: of the nodes at hand, from 0, the roots; their children are head ``depth``'s.
        tokens: [B, n], the nodes' own.
    """

    depth: int
    tokens: Tensor

    def logits(self) -> Tensor:
        """Return what head ``depth`` says at the nodes at hand, [B, n, V']."""

    def descend(self, tokens: Tensor, parents: Tensor) -> None:
        """Go to nodes one deeper.

        Args:
            tokens: [B, n'], the tokens of these nodes, which are to have children.
            parents: the places of their parents among the n nodes at hand, [n'] where all rows
                share them, else [B, n'].
        """


# begins a step: from a hidden state [..., B, d], which is what the heads' cache last returned, or
# without a cache the base's that predicted the root; the roots [B]; and that cache, None without
Begin = Callable[..., Walk]


class Heads(Protocol):
    """K heads: head i (from 0) guesses the token i + 2 positions ahead. An ``nn.Module``.

    Training runs :meth:`contextual` over whole texts, then :meth:`features` and
    :meth:`output_weight` of one head at a time, whose product is scored and never formed as a
    whole. Decoding with parallel heads calls :meth:`snapshot`, one pass for the whole tree; with
    sequential heads it goes down the tree with :meth:`steps`, one pass per level. Drafters are made
    from that alone (``heads_drafter`` of specheads.drafters.heads).

    What depends on the map of tokens alone is written here, once for all kinds.

    Weights start as ``from_settings`` and ``init_from_output`` leave them. A kind whose loss is
    no sum over heads of such products brings an objective of its own, beside its recipe. Learning
    rates and memory planning find a head's own output matrix by ``lm_head`` in its tensors' names.

    Attributes:
        config_keys: keys of config.json without which an export of this kind is refused.
        stored: the attributes that ``to_config`` gives beside ``kind``; where a kind does not say,
            those called as its ``config_keys``.
        compressible: the output matrices can be made smaller (``export lm_head=``). What has a
            value here is so unless a kind says otherwise.
        for_draft_model: the heads can guess for a draft model, whose tokens are not certain.
        unseen_settings: attributes that differ between heads whose tensors have the same names and
            shapes; training does not go on with other heads than the settings describe.
        tensor_prefix: how the names of their tensors begin in an export; empty for ``heads.*``.
        num_heads: K.
        num_layers: layers that ``features`` runs, whose activations training makes again in
            backward; 0 where ``contextual`` has run all.
        num_outputs: V'.
        hidden_size: d.
        vocab_size: V.
        lm_head: ``shared``, the base's output matrix; ``shared_pruned``, some of its rows; any
            other word: matrices of their own.
        token_map: [V'] token ids that the heads can guess; None for all.
        markov_rank: of the bias on the logits from the token drafted before; 0 for none.
        condition: a head reads the embeddings of all tokens drafted before its own.
        kind: its name in config.json.
        taps: the hidden states of the base that they read, side by side if several.
        sequential: a head reads tokens drafted before its own.
        needs_embedding: the heads read tokens through the base's input embedding.
        walks_text: the way down a tree starts from the cache of the text, and not from one hidden
            state. Such a cache can also ``read``, and go back to ``as_it_was``, as
            :class:`specheads.models.mtp.TextCache` does.
        one_matrix: all heads multiply by one and the same matrix, the base's own or what
            ``output_weight`` makes. One call can then make all of their losses, with one gradient
            buffer of the matrix.
        anchors: positions of a row at which a step of training asks the heads, where ``contextual``
            costs too much for all: it is then given these ``places``. 0 asks at all.
        embed: the base's input embedding, a function from tokens where the heads lie; None before
            :meth:`read_through`, and where they read no tokens through it.
    """

    config_keys: ClassVar[tuple[str, ...]]
    stored: ClassVar[tuple[str, ...]] = ()
    compressible: ClassVar[bool] = False
    for_draft_model: ClassVar[bool] = False
    unseen_settings: ClassVar[tuple[str, ...]] = ()
    tensor_prefix: ClassVar[str] = ""
    num_heads: int
    num_layers: int
    num_outputs: int
    hidden_size: int
    vocab_size: int
    lm_head: str
    token_map: Tensor | None
    markov_rank: int = 0
    condition: bool = False
    kind: str
    taps: tuple[str, ...]
    sequential: bool
    needs_embedding: bool
    walks_text: bool = False
    one_matrix: bool
    anchors: int = 0
    embed: Embed | None = None
    _known_places: tuple[Tensor, tuple[int, torch.device], Tensor] | None = None

    def take_sizes(
        self, num_heads: int, hidden_size: int, vocab_size: int, lm_head: str, num_kept: int = 0
    ) -> None:
        """Take over the sizes that heads of all kinds have, and begin with the first tokens kept.

        Raises:
            ValueError: if a number is out of range.
        """
        pruned, known = "pruned" in lm_head, f"in 1..{vocab_size}, the vocabulary"
        check(num_heads >= 1, "num_heads", num_heads, "at least 1")
        check(1 <= num_kept <= vocab_size or not pruned, "num_kept", num_kept, known)
        self.num_heads, self.lm_head = num_heads, lm_head
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_outputs = num_kept if pruned else vocab_size
        kept = torch.arange(num_kept) if pruned else None
        cast(Any, self).register_buffer("token_map", kept)

    @classmethod
    def from_settings(cls, settings: Any, base: PreTrainedModel, output: OutputLayer) -> Heads:
        """Build the heads that their section of a recipe's settings describes, for a base model.

        Raises:
            ValueError: one line with the key, without the section's name.
        """

    def read_through(self, base: PreTrainedModel) -> None:
        """Read tokens through the base's input embedding, where heads of this kind read any.

        Raises:
            ValueError: if it has none.
        """
        if not self.needs_embedding:
            return
        module, place = base.get_input_embeddings(), input_device(base)
        if module is None:
            raise ValueError(f"{type(base).__name__} has no input embedding that heads could use")

        def embed(tokens: Tensor) -> Tensor:
            found: Tensor = module(tokens.to(place))
            return found.to(tokens.device)

        self.embed = embed

    def init_from_output(self, weight: Tensor, kept: Tensor | None = None) -> None:
        """Take the tokens that can be guessed, and start from the base's output matrix.

        What is written here takes the tokens alone.

        Args:
            weight: [V, d], that matrix; not used by heads that start without it.
            kept: with a ``token_map``, the [V'] token ids to keep; None keeps the first ones.

        Raises:
            ValueError: if shapes differ, or ``kept`` is not a set of V' tokens.
        """
        if self.token_map is not None and kept is not None:
            tokens = kept.unique()
            fits = len(tokens) == self.num_outputs and 0 <= tokens[0] <= tokens[-1] < len(weight)
            expected = f"{self.num_outputs}, all below {len(weight)}"
            check(bool(fits), "the number of distinct tokens to keep", len(tokens), expected)
            self.token_map.copy_(tokens)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Heads:
        """Build the heads that an export's config.json describes; called on the meta device.

        Every number may come from a stranger: those that :mod:`specheads.models.export_config` does
        not bound are to be bounded here, before anything is built from them.

        Raises:
            ValueError: one line, if there are no such heads.
        """

    def to_config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` builds the same heads from, ``kind`` included; JSON."""
        keys = ("kind", *(self.stored or self.config_keys))
        return {key: getattr(self, key) for key in keys}

    @property
    def num_kept(self) -> int:
        """How many tokens can be guessed where some were pruned, else 0."""
        return 0 if self.token_map is None else self.num_outputs

    @property
    def correction(self) -> str:
        """What corrects the logits by the token drafted before, as settings call it."""
        return "markov" if self.markov_rank else "none"

    def make_tables(self) -> None:
        """Compute the buffers that no file holds (rotary tables), after a build without memory."""
        return  # most kinds have none

    def contextual(
        self, hidden: Tensor, position_ids: Tensor, tokens: Tensor | None = None
    ) -> Tensor:
        """Run what looks at whole texts; return what ``features`` takes, [B, T, d] or [K, B, T, d].

        Heads with ``anchors`` also take ``places`` [B, A], in ascending order, and return [K, B, A,
        d] of these positions alone.

        Args:
            hidden: [B, T, d], the base's, at ``taps``; of several documents in a row if packed.
            position_ids: [B, T], restarting at 0 with every document.
            tokens: [B, T], the texts.
        """

    def features(self, i: int, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return what the output matrix of head ``i`` reads, [..., d_i].

        What is written here is for heads whose ``contextual`` does all of it.

        Args:
            i: the head.
            hidden: what ``contextual`` returned, or some positions of it, [..., d] or [K, ..., d].
            tokens: [..., K], the tokens after the position's own; for sequential heads.
        """
        return hidden[i]

    def output_weight(self, i: int, base_weight: Tensor) -> Tensor:
        """Return the matrix [V', d_i] of head ``i``, the base's own or rows of it where shared."""

    def guessed_rows(self, of: Tensor) -> Tensor:
        """Return those of a tensor [V, ...] that are of the V' tokens; no copy if that is all."""
        # of a whole table, indexing takes seven times as long on a CPU
        kept = self.token_map
        return of if kept is None else of.index_select(0, kept.to(of.device))

    def output_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the entries [V'] of the base's output bias [V] that the heads use."""
        return None if bias is None else self.guessed_rows(bias)

    def map_labels(self, labels: Tensor) -> Tensor:
        """Return the places of token ids among the V'; IGNORE for those that cannot be guessed."""
        if self.token_map is None:
            return labels
        places = self._places(self.token_map, labels.device)
        return torch.where(labels == IGNORE, IGNORE, places[labels.clamp_min(0)])

    def _places(self, kept: Tensor, device: torch.device) -> Tensor:
        """Return each token's place, [V]: made once, as a map is copied into but never trained."""
        state = -1 if kept.is_inference() else kept._version, device
        known = self._known_places
        if known is None or known[0] is not kept or known[1] != state or kept.is_inference():
            places = torch.full((self.vocab_size,), IGNORE, device=device)
            places[kept] = torch.arange(self.num_outputs, device=device)
            self._known_places = known = kept, state, places
        return known[2]

    def token_ids(self, places: Tensor) -> Tensor:
        """Return the token ids of places among the V', of any shape."""
        return places if self.token_map is None else self.token_map[places]

    def logits(self, hidden: Tensor, output: OutputLayer, tokens: Tensor | None = None) -> Tensor:
        """Return the logits [K, ..., V'] of all heads, computed as the base computes its own.

        The arguments are those of ``features``, and the base's output layer.
        """
        heads, base = range(self.num_heads), output.weight
        features = [self.features(i, hidden, tokens) for i in heads]
        products = multiplied(features, [self.output_weight(i, base) for i in heads])
        return self.finish(products, output)

    def finish(self, products: Tensor, output: OutputLayer) -> Tensor:
        """Return logits [..., V'] as the base makes its own: with its bias, scale and softcap."""
        bias = self.output_bias(output.bias)
        return output.finish(products if bias is None else products + bias)

    def memory(self, num_rows: int) -> HeadCache | None:
        """Return the cache of their layers for texts of which nothing was read; None without any.

        Raises:
            ValueError: if the layers are of a kind that cannot draft.
        """

    def snapshot(self, output: OutputLayer) -> Callable[[Tensor], Tensor]:
        """Return a function like ``logits`` of the weights as they are now; for parallel heads.

        Raises:
            ValueError: if the heads are sequential.
        """
        if self.sequential:
            raise ValueError("sequential heads cannot guess all at once")
        products = self.own_products(output)
        return lambda hidden: self.finish(products(hidden), output)

    def own_products(self, output: OutputLayer) -> Callable[[Tensor], Tensor]:
        """Return a function from what ``features`` takes to the products [K, ..., V'].

        They are those of a hidden state alone, before ``finish``.
        """
        heads, base = range(self.num_heads), output.weight
        return lambda hidden: multiplied(
            [self.features(i, hidden) for i in heads], [self.output_weight(i, base) for i in heads]
        )

    def steps(self, output: OutputLayer, depth: int) -> Callable[[], Begin]:
        """Return a function that returns how sequential heads, as they are then, begin a step.

        Args:
            output: the base's output layer.
            depth: how many of the heads will be asked.

        Raises:
            ValueError: for parallel heads.
        """

    # what callers use of nn.Module

    def parameters(self) -> Any:
        """Return the parameters."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors by name."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take over tensors by name."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move or cast, and return itself."""

    def eval(self) -> Any:
        """Go into evaluation mode, and return itself."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Learn or not, and return itself."""
