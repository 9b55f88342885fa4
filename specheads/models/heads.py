"""Heads on the base model's last hidden state: Medusa heads, and what makes Hydra heads of them.

Head i (counted from 0) predicts the token i + 2 positions ahead (Medusa, arXiv:2401.10774, section
2.1). Parallel heads guess from the hidden state alone. Sequential ones also read the tokens drafted
before their own: all of them (``condition``, Hydra, arXiv:2402.05109), or the last one through a
low-rank bias on the logits (``markov_rank``).

Sequential heads go down a tree level by level (:class:`Walk`), each head once for all nodes of its
level. Head i is asked at nodes of depth i, whose path from the root down gives the i + 1 tokens
that it reads. What it makes of the path above is carried down and not computed again. Where the
vocabulary is small, what a token adds is looked up in a table instead of computed.

The output matrices of trained heads can be made smaller (:func:`low_rank_heads`,
:func:`pruned_heads`); more training can follow.

Shapes: K heads, d hidden size, V vocabulary, V' the tokens that the heads can guess (V unless they
are pruned), B rows, n nodes of a level, D heads in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.config.training import LM_HEADS, HeadsConfig
from specheads.losses.cross_entropy import IGNORE
from specheads.models import blocks
from specheads.models.head_cache import LayerCache, rows_at
from specheads.models.kinds import Begin, Heads, given, multiplied
from specheads.models.output import FINAL, OutputLayer
from specheads.models.packed import product
from specheads.system.errors import check, one_of

_MAX_STACKED = 1 << 22  # parameters that a snapshot may copy
# numbers in the tables of one kind; beyond, products are computed: of five Hydra heads on the
# embedded base a walk takes 0.5 ms with tables and 1.6 without
MAX_TABLE = 1 << 23
_SIZES = ("num_heads", "num_layers", "hidden_size", "vocab_size", "lm_head")


class MedusaHeads(nn.Module, Heads):
    """K Medusa or Hydra heads; their contract is :class:`specheads.models.kinds.Heads`.

    Args:
        num_heads: K.
        num_layers: residual blocks per head; 0 leaves only the output matrix.
        hidden_size: d of the base model.
        vocab_size: V of the base model.
        lm_head: ``own``, one matrix per head (fill it with ``init_from_output``); ``shared``, the
            base's; ``low_rank``, one ``up @ down`` per head; ``pruned``, own ones for some tokens;
            ``shared_pruned``, the base's rows of some tokens, of which only the map is stored.
        rank: low_rank: the inner size.
        num_kept: pruned, shared_pruned: V', the number of tokens (choose them with
            ``init_from_output``).
        markov_rank: inner size of the bias from the token drafted before; 0 for none.
        condition: read the tokens drafted before (Hydra).
        joined: read them as published Hydra heads do, side by side with the hidden state; only with
            ``condition``.
        prefix: sizes of one attention layer in front of all heads, see ``blocks.PrefixLayer``.

    Attributes:
        token_map: [V'] token ids that the heads can guess; None for all.

    Raises:
        ValueError: for an unknown ``lm_head`` or numbers out of range.
    """

    config_keys: ClassVar[tuple[str, ...]] = _SIZES
    stored: ClassVar[tuple[str, ...]] = (
        "num_heads", "num_layers", "lm_head", "rank", "num_kept", "correction", "markov_rank",
        "prefix_layer", "prefix", "hidden_size", "vocab_size",
    )  # fmt: skip
    compressible: ClassVar[bool] = True
    for_draft_model: ClassVar[bool] = True
    taps = (FINAL,)
    token_map: Tensor | None  # a buffer

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        lm_head: str = "own",
        *,
        rank: int = 0,
        num_kept: int = 0,
        markov_rank: int = 0,
        condition: bool = False,
        joined: bool = False,
        prefix: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        most = min(hidden_size, vocab_size)
        low_rank, shared = lm_head == "low_rank", lm_head in ("shared", "shared_pruned")
        one_of("lm_head", lm_head, *LM_HEADS)
        self.take_sizes(num_heads, hidden_size, vocab_size, lm_head, num_kept)
        check(num_layers >= 0, "num_layers", num_layers, "at least 0")
        check(condition or not joined, "condition", condition, "true where joined is")
        check(markov_rank >= 0, "markov_rank", markov_rank, "at least 0")
        sizes = f"in 1..{most}, the sizes of the matrix"
        check(1 <= rank <= most or not low_rank, "rank", rank, sizes)
        self.num_layers, self.condition, self.markov_rank = num_layers, condition, markov_rank
        self.joined, self.needs_embedding = joined, condition
        self.kind = "hydra" if condition else "medusa"
        self.sequential = condition or markov_rank > 0
        self.one_matrix = lm_head == "shared" and not markov_rank
        self.rank = rank if low_rank else 0

        def own_matrix() -> nn.Linear | blocks.LowRank | None:
            if low_rank:
                return blocks.LowRank(vocab_size, rank, hidden_size)
            return None if shared else nn.Linear(hidden_size, self.num_outputs, bias=False)

        def reader(num_tokens: int) -> blocks.ZeroLinear | blocks.Joined | None:
            if joined:
                return blocks.Joined(num_tokens, hidden_size)
            return blocks.ZeroLinear(num_tokens * hidden_size, hidden_size) if condition else None

        def correction() -> blocks.Markov | None:
            return blocks.Markov(vocab_size, self.num_outputs, markov_rank) if markov_rank else None

        self.heads = nn.ModuleList(
            blocks.MedusaHead(num_layers, hidden_size, own_matrix(), correction(), reader(i + 1))
            for i in range(num_heads)
        )
        self.prefix_layer = bool(prefix)
        self.prefix = blocks.PrefixLayer(prefix) if prefix else None

    @classmethod
    def from_settings(
        cls, settings: HeadsConfig, base: PreTrainedModel, output: OutputLayer
    ) -> MedusaHeads:
        """Build the heads that the section ``heads`` of a recipe's settings describes.

        Raises:
            ValueError: as the class does.
        """
        vocab_size, hidden_size = output.weight.shape
        return cls(
            settings.num_heads,
            settings.num_layers,
            hidden_size,
            vocab_size,
            settings.lm_head,
            rank=settings.rank,
            num_kept=settings.num_kept,
            markov_rank=settings.markov_rank if settings.correction == "markov" else 0,
            condition=settings.condition,
            prefix=blocks.prefix_sizes(base.config) if settings.prefix_layer else None,
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MedusaHeads:
        """Build the heads that an export's config.json describes; exports of 0.1 have fewer keys.

        Raises:
            ValueError: if there are no such heads.
        """
        known = (*_SIZES, "rank", "num_kept", "markov_rank", "joined", "prefix")
        sizes = {key: config[key] for key in known if key in config}
        return cls(**sizes, condition=config["kind"] == "hydra")

    def to_config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` builds the same heads from, as JSON."""
        prefix = None if self.prefix is None else self.prefix.sizes
        joined = {"joined": True} if self.joined else {}
        return super().to_config() | {"prefix": prefix} | joined

    def make_tables(self) -> None:
        """Compute the prefix layer's rotary table, which no file holds."""
        if self.prefix is not None:
            model = cast(Any, self.prefix.model)
            model.rotary_emb = type(model.rotary_emb)(config=model.config)

    def memory(self, num_rows: int) -> LayerCache | None:
        """Return what the prefix layer remembers of texts while decoding, before any was read."""
        if self.prefix is None:
            return None
        model = cast(Any, self.prefix.model)
        norm = None if isinstance(model.norm, nn.Identity) else model.norm
        groups = [[(model.layers[0], norm)]]
        return LayerCache.empty(self.prefix, groups, model.rotary_emb, num_rows, single=True)

    def head(self, i: int) -> blocks.MedusaHead:
        """Return head ``i``."""
        return cast(blocks.MedusaHead, self.heads[i])

    @torch.no_grad()
    def init_from_output(self, weight: Tensor, kept: Tensor | None = None) -> None:
        """Make every head's output matrix the base's [V, d], or as near to it as its form allows.

        Low rank takes the nearest matrix of that rank (truncated SVD); shared ones only take
        ``kept``.

        Args:
            weight: the base's output matrix.
            kept: where pruned, the [V'] token ids to keep; None keeps the first ones.

        Raises:
            ValueError: if shapes differ, or ``kept`` is not a set of V' tokens.
        """
        shape, own = tuple(weight.shape), (self.vocab_size, self.hidden_size)
        check(shape == own, "the shape of the output matrix", shape, f"{own}, as the heads have it")
        super().init_from_output(weight, kept)
        if self.lm_head == "low_rank":
            up, down = blocks.low_rank_factors(weight, self.rank)
        for head in map(self.head, range(self.num_heads)):
            if self.lm_head == "low_rank":
                head.get_parameter("lm_head.up.weight").copy_(up)
                head.get_parameter("lm_head.down.weight").copy_(down)
            elif head.lm_head is not None:
                head.get_parameter("lm_head.weight").copy_(self.guessed_rows(weight))

    def contextual(
        self, hidden: Tensor, position_ids: Tensor, tokens: Tensor | None = None
    ) -> Tensor:
        """Return what the heads read: ``hidden`` [B, T, d] behind the prefix layer, if any.

        Args:
            hidden: last hidden states of whole documents, several in a row if packed.
            position_ids: [B, T], restarting at 0 with every document.
            tokens: not read here.
        """
        return hidden if self.prefix is None else self.prefix(hidden, position_ids)

    def features(self, i: int, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return what the output matrix of head ``i`` reads, [..., d_i].

        Args:
            i: the head.
            hidden: [..., d], behind the prefix layer if there is one.
            tokens: [..., >= i + 1], the tokens after the hidden state's own, the root first; for
                sequential heads.
        """
        head = self.head(i)
        if self.condition:
            with torch.no_grad():  # the base's own; Hydra leaves it as it is
                before = self.embedded(given(tokens, "tokens")[..., : i + 1]).flatten(-2)
            hidden = head.conditioned(hidden, before)
        found = head(hidden)
        if head.markov is None:
            return found
        return head.markov.behind(found, given(tokens, "tokens")[..., i])

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return how the heads read tokens [...], as [..., d]."""
        found = given(self.embed, "embed")(tokens)
        return found if self.joined else blocks.normalised(found)

    def output_weight(self, i: int, base_weight: Tensor) -> Tensor:
        """Return the matrix [V', d_i] that head ``i`` multiplies its features with.

        With a Markov correction this joins two matrices into a new one.
        """
        return self.head(i).output_weight(self.shared_rows(base_weight))

    def shared_rows(self, base_weight: Tensor) -> Tensor:
        """Return the rows [V', d] of the base's output matrix [V, d] that heads without own read.

        Some of them are a copy, through which gradients go. Decoding makes one for a text, never
        for a step (9 MB of 8,192 rows of 576 in bfloat16): so no copy of other weights is used.
        """
        return self.guessed_rows(base_weight) if self.lm_head == "shared_pruned" else base_weight

    def steps(self, output: OutputLayer, depth: int) -> Callable[[], Begin]:
        """Return a function that returns how the heads, as they are then, begin a step.

        Raises:
            ValueError: as :class:`Steps` does.
        """
        return Steps(self, output, depth).refresh

    @torch.no_grad()
    def own_products(self, output: OutputLayer) -> Callable[[Tensor], Tensor]:
        """Return a function from hidden states [..., d] to what all heads make of them alone.

        That is [K, ..., V'], before ``finish`` and without a Markov correction; heads with a
        condition make nothing of a hidden state alone.

        One batched product per layer replaces one per head, which is most of the time of small
        heads (146 to 55 us for six of width 256). Large heads are not copied: reading them costs
        what it costs.
        """
        heads, shared = list(map(self.head, range(self.num_heads))), self.shared_rows(output.weight)
        if sum(parameter.numel() for parameter in self.heads.parameters()) > _MAX_STACKED:
            weights = [head.own_weight(shared) for head in heads]
            return torch.no_grad()(lambda x: multiplied([head(x) for head in heads], weights))

        def stacked(name: str) -> Tensor:
            return torch.stack([head.get_parameter(name) for head in heads])

        layers = [
            (stacked(f"blocks.{i}.weight").transpose(1, 2), stacked(f"blocks.{i}.bias")[:, None])
            for i in range(self.num_layers)
        ]
        names = {"low_rank": ["lm_head.down.weight", "lm_head.up.weight"]}
        own = [] if heads[0].lm_head is None else names.get(self.lm_head, ["lm_head.weight"])
        matrices = [stacked(name).transpose(1, 2) for name in own]

        @torch.no_grad()
        def all_at_once(hidden: Tensor) -> Tensor:
            x = hidden.reshape(1, -1, hidden.shape[-1]).expand(self.num_heads, -1, -1)
            for weight, bias in layers:
                x = x.to(weight.dtype)
                x = x + F.silu(torch.baddbmm(bias, x, weight))
            for matrix in matrices:
                x = torch.bmm(x.to(matrix.dtype), matrix)
            if not matrices:
                x = F.linear(x.to(shared.dtype), shared)
            return x.view(self.num_heads, *hidden.shape[:-1], self.num_outputs)

        return all_at_once


class Steps:
    """Sequential heads as they are for one text, ready to go down trees.

    Args:
        heads: sequential ones.
        output: the base's output layer.
        depth: D.

    Raises:
        ValueError: for parallel heads.
    """

    def __init__(self, heads: MedusaHeads, output: OutputLayer, depth: int) -> None:
        if not heads.sequential:
            raise ValueError("these heads are parallel: they need not be asked level by level")
        self.heads, self.output, self.depth = heads, output, depth
        parts = [heads.head(i) for i in range(depth)]
        # of what tables are made; joined heads have none, as what a token adds there depends on the
        # hidden state beside it
        fits = heads.vocab_size * heads.hidden_size * depth * (depth + 1) // 2 <= MAX_TABLE
        self._conditions = [x.condition for x in parts if x.condition is not None and fits]
        # what each token adds to the inputs of heads j, ..., for all tokens of the vocabulary: per
        # place j of a path [V, (D - j) * d]
        self.conditions: list[Tensor] = []
        self._sources: list[Tensor] = []  # what the tables were made of
        self.offset: Tensor | None = None  # [D * d], the conditions' own biases
        self.products: Callable[[Tensor], Tensor] | None = None
        self._markov = [x.markov for x in parts if x.markov is not None]
        self.added: list[Callable[[Tensor], Tensor]] = []  # from Markov factors to logits, per head
        self.rows: Tensor | None = None  # of the base's output matrix, where heads share them

    @torch.no_grad()
    def refresh(self) -> Begin:
        """Take the weights as they are now, and return :meth:`begin`."""
        if self.heads.condition:  # the products of others hold them
            self.rows = self.heads.shared_rows(self.output.weight)
        conditions = self._conditions
        sources = [each.weight for each in conditions]
        if conditions:
            ids = torch.arange(self.heads.vocab_size, device=self.output.weight.device)
            sources.append(self.heads.embedded(ids))  # not joined: they have no table
            self.offset = _wide(torch.cat([each.bias for each in conditions]))
        elif not self.heads.condition:
            self.products = self.heads.own_products(self.output)
        markov = {id(each): each for each in self._markov}
        made = {key: product(each.up.weight) for key, each in markov.items()}
        self.added = [made[id(each)] for each in self._markov]
        # training writes weights in ways that no version counter sees, so that they are compared
        if len(sources) == len(self._sources) and all(map(torch.equal, sources, self._sources)):
            return self.begin
        if conditions:
            self.conditions = tabulated(sources[-1], [each.weight for each in conditions])
        self._sources = [source.clone() for source in sources]
        return self.begin

    def begin(self, hidden: Tensor, root: Tensor, memory: object = None) -> Walk:
        """Start at the roots.

        Args:
            hidden: [B, d], behind the prefix layer if there is one.
            root: [B], the tokens that the base chose from there.
            memory: not used: what the prefix layer remembers is in ``hidden``.
        """
        return Walk(self, hidden, root[:, None])


class Walk:
    """One step's way down the tree; to be called under ``torch.no_grad()``.

    Attributes:
        depth: of the nodes at hand, and thereby the head that guesses their children.
        tokens: [B, n], the nodes' own.
    """

    def __init__(self, steps: Steps, hidden: Tensor, root: Tensor) -> None:
        self._steps, self._hidden = steps, hidden[:, None]
        self._own = None if steps.products is None else steps.products(hidden)
        self.depth, self.tokens = 0, root
        # [B, n, ...]: with tables of a condition, the inputs of heads ``depth`` and below, side by
        # side; without, the embeddings of the path; nothing without a condition
        self._carried: Tensor | None = None
        if steps.conditions:
            assert steps.offset is not None
            start = hidden.to(steps.offset.dtype).repeat(1, steps.depth) + steps.offset
            self._carried = start[:, None] + F.embedding(root, steps.conditions[0])
        elif steps.heads.condition:
            self._carried = steps.heads.embedded(root)

    def logits(self) -> Tensor:
        """Return what the head of this level says at its nodes, [B, n, V']."""
        steps, head = self._steps, self._steps.heads.head(self.depth)
        if self._own is not None:
            products = self._own[self.depth][:, None]  # the same at all nodes
        else:
            assert self._carried is not None
            if steps.conditions:
                x = self._carried[..., : steps.heads.hidden_size]
            else:
                x = head.conditioned(self._hidden, self._carried)
            products = head.own_product(x, cast(Tensor, steps.rows))
        if head.markov is not None:
            added = steps.added[self.depth](head.markov(self.tokens))
            products = products + added.to(products.dtype)
        return steps.heads.finish(products, steps.output)

    def descend(self, tokens: Tensor, parents: Tensor) -> None:
        """Go to nodes one deeper.

        Args:
            tokens: [B, n'], the tokens of these nodes.
            parents: the places of their parents among the n nodes at hand, [n'] where all rows
                share them, else [B, n'].
        """
        steps, carried = self._steps, self._carried
        self.depth, self.tokens = self.depth + 1, tokens
        if carried is None:
            return
        carried = rows_at(carried, parents.expand(len(carried), -1))
        if steps.conditions:
            below = carried[..., steps.heads.hidden_size :]
            self._carried = below + F.embedding(tokens, steps.conditions[self.depth])
        else:
            self._carried = torch.cat([carried, steps.heads.embedded(tokens)], dim=-1)

    def alone(self, num: int) -> Tensor:
        """Return what the first ``num`` heads say whatever is drafted, [num, B, V'].

        Before scale and softcap; the first with what the root adds. For heads that read of the
        path its last token alone.
        """
        steps = self._steps
        assert self._own is not None and self.depth == 0
        found = self._own[:num].to(torch.float32, copy=True)
        bias = steps.heads.output_bias(steps.output.bias)
        if bias is not None:
            found = found + bias
        markov = cast(blocks.Markov, steps.heads.head(0).markov)
        found[0] += steps.added[0](markov(self.tokens[:, 0]))
        return found

    def added(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return what tokens add to the logits of the heads behind them, at some places.

        Args:
            tokens: [D, B, n], drafted by heads 0 to D - 1.
            places: [D, B, m], among the V' of the heads 1 to D.

        Returns:
            [D, B, n, m].
        """
        heads = self._steps.heads
        numbers = range(1, 1 + len(tokens)) or (0,)
        parts = [cast(blocks.Markov, heads.head(i).markov) for i in numbers]
        if all(part is parts[0] for part in parts):
            parts, tokens, places = parts[:1], tokens[None], places[None]
        found = [
            part(above).float() @ F.embedding(at, part.up.weight).float().transpose(-1, -2)
            for part, above, at in zip(parts, tokens, places, strict=True)
        ]
        return found[0] if len(found) == 1 else torch.stack(found)


def tabulated(embeddings: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return per place j of a path what every token there adds to the heads that read it.

    Args:
        embeddings: [V, d].
        weights: of the conditions of heads 0, 1, ..., [d, (i + 1) * d].

    Returns:
        Per place [V, (D - j) * d].
    """
    width, wide = embeddings.shape[1], list(map(_wide, weights))
    embeddings = embeddings.to(wide[0].dtype)
    found = []
    for j in range(len(weights)):
        parts = [weight[:, j * width : (j + 1) * width] for weight in wide[j:]]
        found.append(torch.cat([embeddings @ part.T for part in parts], dim=1))
    return found


def _wide(weight: Tensor) -> Tensor:
    """Return the weight in a dtype in which sums of a few products do not round."""
    return weight if weight.dtype == torch.float64 else weight.float()


@torch.no_grad()
def low_rank_heads(heads: MedusaHeads, rank: int) -> MedusaHeads:
    """Return heads whose output matrices are the nearest ones of ``rank`` to those of ``heads``.

    Everything else is copied; see ``blocks.low_rank_factors``.

    Args:
        heads: with matrices of their own, whole or of low rank.
        rank: the inner size of the new ones.

    Raises:
        ValueError: if ``heads`` share the base's matrix or are pruned, or ``rank`` is out of range.
    """
    own = "own or low_rank, a matrix for all tokens, to be made low_rank"
    check(heads.lm_head in ("own", "low_rank"), "lm_head of the heads", heads.lm_head, own)
    state = _rest(heads)
    for i in range(heads.num_heads):
        matrix = output_matrix(heads, i)
        up, down = blocks.low_rank_factors(matrix, rank)
        state[f"heads.{i}.lm_head.up.weight"] = up.to(matrix.dtype)
        state[f"heads.{i}.lm_head.down.weight"] = down.to(matrix.dtype)
    return _remade(heads, state, "low_rank", rank=rank)


@torch.no_grad()
def pruned_heads(heads: MedusaHeads, token_ids: Tensor) -> MedusaHeads:
    """Return heads that guess only the tokens ``token_ids``, with the rows that they have now.

    Everything else is copied. Their logits are those of ``heads`` at these tokens.

    Args:
        heads: with matrices of their own, for all tokens or pruned before.
        token_ids: distinct ids to keep, in any order; the new heads have them sorted.

    Raises:
        ValueError: if ``heads`` share the base's matrix or are of low rank, or cannot guess one of
            the tokens.
    """
    own = "own or pruned, a whole matrix, to be made pruned"
    check(heads.lm_head in ("own", "pruned"), "lm_head of the heads", heads.lm_head, own)
    tokens = token_ids.to(output_matrix(heads, 0).device).sort().values
    rows = heads.map_labels(tokens)
    if gone := int((rows == IGNORE).sum()):
        raise ValueError(f"{gone} of the tokens to keep were pruned from these heads before")
    state = _rest(heads)
    for i in range(heads.num_heads):
        state[f"heads.{i}.lm_head.weight"] = output_matrix(heads, i)[rows].clone()
        if heads.markov_rank:
            name = f"heads.{i}.markov.up.weight"
            state[name] = state[name][rows].clone()
    state["token_map"] = tokens
    return _remade(heads, state, "pruned", num_kept=len(tokens))


def output_matrix(heads: MedusaHeads, i: int) -> Tensor:
    """Return what head ``i`` multiplies the output of its blocks with, [V', d]; no correction.

    Raises:
        ValueError: if it shares the base's.
    """
    layer = heads.head(i).lm_head
    if layer is None:
        raise ValueError("heads that share the base's output matrix have none of their own")
    if isinstance(layer, blocks.LowRank):
        return (layer.up.weight @ layer.down.weight).detach()
    return layer.weight.detach()


def _remade(heads: MedusaHeads, state: dict[str, Tensor], lm_head: str, **size: int) -> MedusaHeads:
    """Return heads like others but for their output matrices, with the tensors ``state``."""
    config = heads.to_config() | {"lm_head": lm_head, "rank": 0, "num_kept": 0} | size
    with torch.device("meta"):  # every weight is replaced, and drawing them costs
        smaller = MedusaHeads.from_config(config)
    smaller.make_tables()
    smaller.load_state_dict(state, assign=True)
    return smaller.to(output_matrix(heads, 0).device).train(heads.training)


def _rest(heads: MedusaHeads) -> dict[str, Tensor]:
    """Return copies of all tensors but the output matrices and the token map."""
    return {
        name: tensor.detach().clone()
        for name, tensor in heads.state_dict().items()
        if ".lm_head." not in name and name != "token_map"
    }
