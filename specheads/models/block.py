"""Block heads: one pass over a block of slots guesses all tokens of a step.

A few layers run over K slots behind the text. What they know of the text are the base's hidden
states at several of its layers (taps), joined to one context state per position, of which every
layer makes keys and values: the text itself never passes through the layers, and its keys are made
once. Inside the block attention goes both ways, so that there is no loop over depths.

Two forms:

``published`` (DFlash, arXiv:2602.06036): the block is the embedding of the root, the token already
certain, and that of a mask token for every further slot. With ``sample_from_anchor`` slot k guesses
the token behind its own position (DSpark, arXiv:2607.05147), so that the root's slot guesses too;
without, slot k + 1 fills in its own, and the root's slot guesses nothing.
``joined``: slot k starts as the base's final state at the last certain position, to which a linear
map of its own adds what the taps there and the root's embedding say; at the start nothing, so that
all slots then say what the base said there.

DSpark's low-rank bias from the token drafted before (``markov_rank``) is that of the other heads,
one for all slots; joined, with rows for the tokens that are drafted alone. Head i reads slot i, or
i + 1 where slots fill in.

Shapes: K heads, S slots of a block, L layers, d hidden size, n taps, B rows, T positions, A blocks
of a row (anchors), H key heads of width h in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.config.declared import at_least, one_of
from specheads.losses.cross_entropy import IGNORE
from specheads.models.blocks import Markov, ZeroLinear, normalised
from specheads.models.head_cache import RowCache, Slots, last_places, rows_at, visible
from specheads.models.heads import Steps
from specheads.models.kinds import Begin, given
from specheads.models.layer_step import LayerStep
from specheads.models.output import OutputLayer, layers_of
from specheads.models.tapped import Norm, TappedForm, TappedHeads, TappedLayer, attended
from specheads.system.errors import check

# from the slots' own keys and values to those that they attend to, the text's and their own
Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_TOGETHER = 32  # blocks of a row that attend in one call: more would mask away what they compute


@dataclass
class BlockForm(TappedForm):
    """The form of block heads; the first attributes are those of :class:`TappedForm`.

    Attributes:
        form: ``joined`` or ``published``.
        window: a slot sees so many positions before the root; 0 for all.
        sample_from_anchor: of the published form, see the module.
        mask_token_id: of the published form, the token whose embedding further slots are; the
            base's padding where a recipe does not say.
        injection_rank: of the joined form, the inner size of what is added to the slots; 0: full.
    """

    form: str = one_of("joined", "published")
    window: int = at_least(0, 0)
    sample_from_anchor: bool = True
    mask_token_id: int = at_least(0, 0)
    injection_rank: int = at_least(0, 0)


def published_taps(num_base: int, num_taps: int) -> tuple[int, ...]:
    """Return the layers that DFlash taps: evenly spaced from the second to the fourth-last.

    Layer ``round(1 + i * (n - 4) / (num_taps - 1))`` of n (specforge and speculators alike); a base
    too shallow for as many distinct ones gives fewer. Never the last, whose state transformers
    counts behind the final norm and engines before it.
    """
    last = max(num_base - 3, 1)
    places = [round(1 + i * (last - 1) / max(num_taps - 1, 1)) for i in range(num_taps)]
    return tuple(sorted({max(min(place, num_base - 2), 0) for place in places}))


def joined_taps(num_base: int, num_taps: int) -> tuple[int, ...]:
    """Return evenly spaced layers and, behind them, -1, the base's final state."""
    places = [round((i + 1) * num_base / num_taps) - 1 for i in range(num_taps - 1)]
    return (*sorted({min(max(place, 0), num_base - 2) for place in places if num_base > 1}), -1)


class BlockHeads(TappedHeads):
    """K heads of one block; their contract is :class:`specheads.models.kinds.Heads`.

    Args:
        *sizes: those of :class:`specheads.models.tapped.TappedHeads`; ``form`` is a
            :class:`BlockForm`.
        num_layers: L.
        markov_rank: of the bias from the token drafted before; 0 for none.
        **more: of ``sizes`` by their names.

    Raises:
        ValueError: for numbers out of range.
    """

    stored: ClassVar[tuple[str, ...]] = (
        "num_heads", "num_layers", "lm_head", "num_kept", "correction", "markov_rank",
        "hidden_size", "vocab_size", "form",
    )  # fmt: skip
    config_keys = tuple(key for key in stored if key != "correction")  # which follows from another
    form_class = BlockForm
    tensor_prefix: ClassVar[str] = "block."
    kind = "block"
    condition = False
    form: BlockForm

    def __init__(self, *sizes: Any, num_layers: int, markov_rank: int = 0, **more: Any) -> None:
        super().__init__(*sizes, **more)
        form, hidden_size, vocab_size = self.form, self.hidden_size, self.vocab_size
        check(num_layers >= 1, "num_layers", num_layers, "at least 1")
        kept = f"in 1..{vocab_size}, the vocabulary"
        check(form.mask_token_id < vocab_size, "mask_token_id", form.mask_token_id, kept)
        fits = form.form == "published" or form.taps[-1] == -1
        check(fits, "taps", list(form.taps), "-1, the final state, at the end of the joined form's")
        self.num_inner, self.markov_rank = num_layers, markov_rank
        self.sequential = markov_rank > 0
        # the slot of head 0, and how many slots there are
        self.first = int(form.form == "published" and not form.sample_from_anchor)
        self.num_slots = self.num_heads + self.first
        self.hidden_norm = Norm(hidden_size, eps=form.rms_norm_eps)
        self.layers: Any = nn.ModuleList(  # as Qwen3's, with norms of queries and keys
            TappedLayer(hidden_size, form, hidden_size, normed=True) for _ in range(num_layers)
        )
        self.inject: nn.Module | None = None
        if form.form == "joined":
            read, made = (len(form.taps) + 1) * hidden_size, self.num_heads * hidden_size
            self.inject = ZeroLinear(read, made, bias=False)
            if rank := form.injection_rank:
                down = nn.Linear(read, rank, bias=False)
                self.inject = nn.Sequential(down, ZeroLinear(rank, made, bias=False))
        self.markov: Markov | None = None
        if markov_rank:  # published tables have a row for every token
            narrow = form.form == "joined" and "pruned" in self.lm_head
            rows = self.num_kept + 1 if narrow else vocab_size
            self.markov = Markov(rows, self.num_outputs, markov_rank)
            self.markov.row_of = self._row_of if narrow else None

    def _row_of(self, tokens: Tensor) -> Tensor:
        """Return the Markov table's rows: one for each token that is drafted, one for all others.

        Of those only a root can be, which the slots have read.
        """
        places = self.map_labels(tokens)
        return torch.where(places == IGNORE, self.num_outputs, places)

    @classmethod
    def from_settings(cls, settings: Any, base: PreTrainedModel, output: OutputLayer) -> BlockHeads:
        """Build the heads of the section ``heads`` of a recipe's settings, for a base.

        Raises:
            ValueError: as the class and :class:`BlockForm` do.
        """
        vocab_size, hidden_size = output.weight.shape
        padding = getattr(base.config.get_text_config(), "pad_token_id", None) or 0
        form = BlockForm.of({"mask_token_id": padding, **settings.options})
        by_rule = joined_taps if form.form == "joined" else published_taps
        form = form.sized(base, hidden_size, partial(by_rule, len(layers_of(base))))
        rank = settings.markov_rank if settings.correction == "markov" else 0
        sizes = settings.num_heads, hidden_size, vocab_size, settings.lm_head, form
        more = {"num_layers": settings.num_layers, "markov_rank": rank}
        found = cls(*sizes, settings.num_kept, **more)
        found.start_from(base)
        return found

    def to_config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` builds the same heads from, as JSON."""
        return super().to_config() | {"num_layers": self.num_inner}

    def contextual(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        tokens: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Run a block behind each of some positions; return what the heads make of its slots.

        Args:
            hidden: [B, T, n * d], the base's, at ``taps``; of several documents in a row if packed.
            position_ids: [B, T], restarting at 0 with every document.
            tokens: [B, T], the texts.
            places: [B, A], positions in ascending order, whose next tokens are the roots; None
                takes all.

        Returns:
            [K, B, A, d].
        """
        (num_rows, num_tokens), tokens = position_ids.shape, given(tokens, "tokens")
        tapped, context = self.context(hidden)
        table = self._table(num_tokens + self.num_slots)
        keys = [layer.keys(context, table[:, position_ids]) for layer in self.layers]
        documents = (position_ids == 0).cumsum(1)
        every = torch.arange(num_tokens, device=hidden.device)
        if places is None:
            places = every.expand(num_rows, -1)
        slots = torch.arange(self.num_slots, device=hidden.device)
        found = []
        for at in places.split(_TOGETHER, dim=1):
            end = int(at.max()) + 1
            seen = (every[:end] <= at[..., None]) & (
                documents[:, None, :end] == documents.gather(1, at)[..., None]
            )  # [B, a, end]
            if self.form.window:
                seen &= every[:end] > at[..., None] - self.form.window
            blocks = torch.arange(at.shape[1], device=at.device).repeat_interleave(self.num_slots)
            own = (blocks[:, None] == blocks).expand(num_rows, -1, -1)
            mask = torch.cat([seen.repeat_interleave(self.num_slots, 1), own], dim=2)[:, None]
            roots = tokens.gather(1, (at + 1).clamp(max=num_tokens - 1))
            x = self.start(rows_at(tapped, at), roots).flatten(1, 2)  # [B, a * S, d]
            positions = (position_ids.gather(1, at)[..., None] + 1 + slots).flatten(1)
            for layer, (k, v) in zip(self.layers, keys, strict=True):
                behind = partial(_behind, (k[:, :, :end], v[:, :, :end]))
                attend = partial(_beside, behind, mask)
                x = layer.run(x, layer.input_layernorm(x), table[:, positions], attend)
            found.append(self.finished(x.unflatten(1, (-1, self.num_slots))))
        return torch.cat(found, dim=2)

    def context(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the taps [..., n * d] as they are read, and the context states [..., d]."""
        hidden = hidden.to(self.fc.weight.dtype)
        if self.form.form == "joined":  # layers differ in scale by orders of magnitude
            hidden = normalised(hidden.unflatten(-1, (len(self.taps), -1))).flatten(-2)
        return hidden, self.hidden_norm(self.fc(hidden))

    def start(self, taps: Tensor, roots: Tensor) -> Tensor:
        """Return the slots [..., S, d] before the first layer.

        Args:
            taps: [..., n * d], as :meth:`context` returns them, at the positions before the roots.
            roots: [...], the tokens that are certain.
        """
        if self.inject is None:  # a token for every slot
            roots = F.pad(roots[..., None], (0, self.num_slots - 1), value=self.form.mask_token_id)
        with torch.no_grad():  # the base's own, which stays as it is
            embedded = given(self.embed, "embed")(roots).to(taps.dtype)
        if self.inject is None:
            return embedded
        added = self.inject(torch.cat([taps, normalised(embedded)], dim=-1))
        return taps[..., None, -self.hidden_size :] + added.unflatten(-1, (self.num_slots, -1))

    def finished(self, x: Tensor) -> Tensor:
        """Return what the heads make of slots [B, a, S, d] behind the last layer, [K, B, a, d]."""
        return self.norm(x[..., self.first :, :]).movedim(-2, 0)

    def features(self, i: int, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return what the output matrix of head ``i`` reads: its slot, and the Markov factor.

        Args:
            i: the head.
            hidden: [K, ..., d], what ``contextual`` returned.
            tokens: [..., K], the root and the tokens behind it; for a Markov correction.
        """
        if self.markov is None:
            return hidden[i]
        return self.markov.behind(hidden[i], given(tokens, "tokens")[..., i])

    def output_weight(self, i: int, base_weight: Tensor) -> Tensor:
        """Return the matrix [V', d_i], the same of all heads."""
        weight = self.shared_rows(base_weight)
        return weight if self.markov is None else self.markov.beside(weight)

    def head(self, i: int) -> SimpleNamespace:
        """Return what a walk asks of head ``i`` beyond its product."""
        return SimpleNamespace(condition=None, markov=self.markov)

    def steps(self, output: OutputLayer, depth: int) -> Callable[[], Begin]:
        """Return how a step is begun from what the cache last returned; for a Markov correction.

        Raises:
            ValueError: without one.
        """
        return Steps(cast(Any, self), output, depth).refresh

    @torch.no_grad()
    def memory(self, num_rows: int) -> BlockCache:
        """Return the cache of rows of which nothing was read yet."""
        slots, epsilon = Slots(self.num_inner, self._table), self.form.rms_norm_eps
        steps = tuple(LayerStep([layer], layer.width, epsilon) for layer in self.layers)
        return BlockCache(slots, (0,) * num_rows, self, steps)


@dataclass(frozen=True)
class BlockCache(RowCache):
    """Keys, rotated, and values of the rows' texts, per layer [B, H, C, h].

    Attributes:
        heads: whose.
        steps: the layers, as a step runs them.
    """

    heads: BlockHeads
    steps: tuple[LayerStep, ...]

    @torch.no_grad()
    def append(self, hidden: Tensor, counts: Sequence[int], tokens: Tensor) -> tuple[Self, Tensor]:
        """Read on, and run the block behind each row's last position.

        Args:
            hidden: [B, T, n * d], the base's at the heads' taps, of the positions that follow,
                right-padded.
            counts: per row how many of the T are real; where it is 0, the output means nothing.
            tokens: [B, T], the token that came after each of them, the root at the last one.

        Returns:
            The cache with them, and what the heads make of their slots, [K, B, d].
        """
        heads, device = self.heads, hidden.device
        num_rows, num_new = tokens.shape
        tapped, context = heads.context(hidden)
        self.slots.reserve(self.lengths, num_new)
        waves = self.waves(self.lengths, num_new).to(context.dtype)
        for layer, cache in zip(heads.layers, self.slots.layers, strict=True):
            cache.update(*layer.keys(context, waves))
        lengths, last = self.grown(counts), last_places(counts, device)
        roots = tokens.gather(1, last)  # [B, 1]
        x = heads.start(rows_at(tapped, last), roots)[:, 0]  # [B, S, d]
        seen, mask = self.slots.reserve(lengths, heads.num_slots), None
        waves = self.waves(lengths, heads.num_slots).to(x.dtype)
        if num_rows > 1 or heads.form.window:
            final = torch.tensor(lengths, device=device)[:, None] + heads.num_slots - 1
            window = heads.form.window and heads.form.window + heads.num_slots
            mask = visible(final, seen, window)[:, None]
        for step, cache in zip(self.steps, self.slots.layers, strict=True):
            x = step(x, waves, partial(_beside, cache.update, mask))
        return replace(self, lengths=lengths), heads.finished(x[:, None])[:, :, 0]


def _beside(
    join: Join, mask: Tensor | None, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Return what slots read of the text and of each other.

    Args:
        join: puts the slots' own keys and values [B, H, Q, h] behind those of the text.
        mask: [B, 1, Q or 1, T + Q], true where a slot may look; None where it may everywhere.
        queries: [B, G * H, Q, h].
        keys: [B, H, Q, h].
        values: likewise.
    """
    return attended(queries, *join(keys, values), mask)


def _behind(text: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of a text, and behind them those of slots, in the length."""
    return torch.cat([text[0], keys], dim=2), torch.cat([text[1], values], dim=2)
