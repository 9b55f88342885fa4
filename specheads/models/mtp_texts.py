"""What sequential MTP heads remember of texts: keys and values of each module at certain tokens.

At token position p module k reads the token's embedding and G^{k-1}_{p-1}, what the module before
made of the position before; G^{-1} is the base's final hidden state (arXiv:2412.19437, equations
21 to 24). Unrolled, G^k_p needs the base's hidden state at p - 1 - k and the tokens from there on.
So everything up to the root (the last certain token, whose hidden state is not known yet) follows
from certain tokens and true hidden states, and is computed from nothing else: what was drafted and
refused leaves no trace. The layers are transformers' own, whatever they are made of, and take
:class:`Pass` for their cache. Position p lies in slot p - 1 of every module; module k has nothing
at positions up to k, and its first k slots are masked. Shapes: B rows, K modules, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from specheads.models.mtp import Embed, MtpHeads

BLOCK = 256  # slots; capacity is a multiple of it


class Slots:
    """Room for what the layers hand to their caches, and the rotary waves of every slot.

    Writing happens in place, and several memories of one text share it: each knows by its lengths
    what is its own. What lies behind belongs to nobody, and nodes of trees are put there.

    Args:
        heads: sequential ones.

    Attributes:
        kept: per module what its layer calls keys and values, [B, H, C, h] each, of any H and h;
            nothing before it has run.
    """

    def __init__(self, heads: MtpHeads) -> None:
        self._heads = heads
        self.kept: list[list[Tensor]] = [[] for _ in range(heads.num_heads)]
        self._capacity = 0
        self._waves: Any = None

    def reserve(self, size: int) -> None:
        """Make room for ``size`` slots."""
        if size <= self._capacity:
            return
        capacity = -(-max(size, 2 * self._capacity) // BLOCK) * BLOCK
        added = capacity - self._capacity
        self.kept = [[F.pad(each, (0, 0, 0, added)) for each in layer] for layer in self.kept]
        self._capacity = capacity
        weight = next(self._heads.parameters())
        positions = torch.arange(capacity, device=weight.device)[None]
        self._waves = self._heads.waves(weight, positions)

    def waves(self, places: Tensor) -> Any:
        """Return the position embeddings [B, T, ...] of the slots ``places`` [B, T]."""
        if isinstance(self._waves, tuple):
            return tuple(each[0, places] for each in self._waves)
        return self._waves[0, places]

    def write(self, module: int, pair: Sequence[Tensor], where: Any) -> list[Tensor]:
        """Put [B, H, T, h] each into the slots ``where``, and return all there is of the module."""
        if not self.kept[module]:
            self.kept[module] = [
                each.new_zeros(*each.shape[:2], self._capacity, each.shape[3]) for each in pair
            ]
        for kept, new in zip(self.kept[module], pair, strict=True):
            if isinstance(where, slice):
                kept[:, :, where] = new
            else:
                kept[where[0], :, where[1]] = new.transpose(1, 2)
        return self.kept[module]

    def select(self, rows: Tensor) -> Slots:
        """Return a copy of the rows ``rows`` [R] (long), in that order."""
        found = Slots(self._heads)
        found.kept = [[each[rows.to(each.device)] for each in layer] for layer in self.kept]
        found._capacity, found._waves = self._capacity, self._waves
        return found


@dataclass(frozen=True)
class Pass:
    """What the layer of one module takes for its cache, in one pass.

    Attributes:
        slots: where its keys and values are kept.
        module: which one it is.
        where: the slots of the new ones: a slice that all rows share, or rows [B, 1] and
            slots [B, T].
        seen: the layer looks at the first so many slots, those of ``where`` among them.
    """

    slots: Slots
    module: int
    where: Any
    seen: int

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int = 0, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep what is new, and return all up to ``seen``, as transformers' caches do."""
        kept = self.slots.write(self.module, (keys, values), self.where)
        return kept[0][:, :, : self.seen], kept[1][:, :, : self.seen]


@dataclass(frozen=True)
class MtpTexts:
    """What the modules remember of every row, as it is after the last :meth:`append`.

    Attributes:
        heads: sequential ones.
        embed: the base's input embedding.
        slots: keys and values; slots behind a row's length hold nothing.
        lengths: per row the position of the root, which is the number of slots in use.
        ends: the same, [B] long where the heads lie.
        root: [K, B, d], G^k at the root; where the text is too short for it, anything finite.
    """

    heads: MtpHeads
    embed: Embed
    slots: Slots
    lengths: tuple[int, ...]
    ends: Tensor
    root: Tensor

    @staticmethod
    def empty(heads: MtpHeads, num_rows: int, embed: Embed | None) -> MtpTexts:
        """Return the memory of rows of which nothing was read yet.

        Raises:
            ValueError: without an embedding, or if the layers' attention is neither full nor that
                of a sliding window.
        """
        if embed is None:
            raise ValueError("these heads read tokens through embed, which is None")
        window_of(heads.config)
        weight = next(heads.parameters())
        ends = torch.zeros(num_rows, dtype=torch.long, device=weight.device)
        root = weight.new_zeros(heads.num_heads, num_rows, heads.hidden_size)
        return MtpTexts(heads, embed, Slots(heads), (0,) * num_rows, ends, root)

    def append(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor
    ) -> tuple[MtpTexts, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's final hidden states of the positions that follow,
                right-padded.
            counts: per row how many of the T are real; where it is 0, nothing changes.
            tokens: [B, T], the token that came after each of them, the root at the last one.

        Returns:
            The memory with them, and G^k at each row's root, [K, B, d].
        """
        memory, _ = self.read(hidden, counts, tokens)
        return memory, memory.root

    @torch.no_grad()
    def read(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor
    ) -> tuple[MtpTexts, Tensor]:
        """Do what :meth:`append` does; return G^k at every new token, [K, B, T, d]."""
        heads, device = self.heads, self.ends.device
        num_rows, num_new = tokens.shape
        start = max(self.lengths)
        seen = start + num_new
        self.slots.reserve(seen)
        ahead = torch.arange(num_new, device=device)
        places = self.ends[:, None] + ahead  # [B, T]
        where: Any = slice(start, seen)
        if min(self.lengths) < start:
            where = torch.arange(num_rows, device=device)[:, None], places
        distances = places[..., None] - torch.arange(seen, device=device)  # [B, T, L]
        allowed = distances >= 0
        if (window := window_of(heads.config)) is not None:
            allowed &= distances < window
        mask = additive(allowed, self.root.dtype)
        waves = self.slots.waves(places)
        embedded = self.embed(tokens).to(self.root.dtype)
        before = hidden.to(self.root.dtype)
        found: list[Tensor] = []
        for i in range(heads.num_heads):
            if i:
                # what was before the first token of this module is no part of it
                hide(mask[:, 0, :, i - 1], places >= i)
                before = torch.cat([self.root[i - 1, :, None], found[-1][:, :-1]], dim=1)
            cache = Pass(self.slots, i, where, seen)
            joined = heads.layer(i).join(before, embedded, hidden_first=heads.hidden_first)
            found.append(heads.attend(i, joined, mask, places, waves, cache)[1])
        every = torch.stack(found)
        lengths = tuple(n + count for n, count in zip(self.lengths, counts, strict=True))
        if num_rows == 1:
            ends = self.ends + counts[0]
            root = every[:, :, counts[0] - 1] if counts[0] else self.root
        else:
            new = torch.tensor(counts, device=device)
            ends = self.ends + new
            rows = torch.arange(num_rows, device=device)
            root = every[:, rows, (new - 1).clamp(min=0)]
            if min(counts) == 0:
                root = torch.where(new[:, None] > 0, root, self.root)
        return replace(self, lengths=lengths, ends=ends, root=root), every

    def select(self, rows: Tensor) -> MtpTexts:
        """Keep the rows ``rows`` [R] (long), in that order."""
        here = rows.to(self.ends.device)
        return replace(
            self,
            slots=self.slots.select(here),
            lengths=tuple(self.lengths[row] for row in rows.tolist()),
            ends=self.ends[here],
            root=self.root[:, here],
        )

    def as_it_was(self, lengths: Sequence[int], every: Tensor) -> MtpTexts:
        """Return this memory of one row as it was when the root stood elsewhere, one row for each.

        Args:
            lengths: of the rows to come: positions of the root.
            every: [K, 1, T, d], G^k at the positions from 1 on, as :meth:`read` returned them.
        """
        ends = torch.tensor(lengths, device=self.ends.device)
        memory = self.select(torch.zeros_like(ends))
        return replace(memory, lengths=tuple(lengths), ends=ends, root=every[:, 0, ends - 1])


def window_of(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a layer looks back upon, itself included; None for all.

    Raises:
        ValueError: for attention of another kind.
    """
    kinds = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    kind = kinds[0] if kinds else "full_attention" if window is None else "sliding_attention"
    if not kinds and window is None and getattr(config, "attention_chunk_size", None):
        kind = "chunked_attention"
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"sequential MTP heads with {kind} cannot draft: their layers must have"
            " full_attention or sliding_attention"
        )
    return window if kind == "sliding_attention" else None


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [B, 1, T, L] that layers add to their scores, of bools [B, T, L]."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return hide(zeros, ~allowed)[:, None]


def hide(mask: Tensor, which: Tensor) -> Tensor:
    """Mask more of an additive mask, in place."""
    return mask.masked_fill_(which, torch.finfo(mask.dtype).min)
