"""Parallel and causal MTP heads while decoding: their keys and values, and one pass per step.

transformers' own layers would be called one by one, at several times the small ops, and would
compute outputs that nobody reads. Here the layers of parallel heads, which read the same hidden
states, are one layer of n times the attention heads: a single product makes all queries, keys and
values, and what follows is made for the last position only. Causal heads go one behind the other
through the same code, n = 1; every layer but the last needs outputs at all new positions.

Positions are counted from the first one that is remembered: rotary attention knows distances only.
Shapes: B rows, T new positions, n layers side by side, H key heads of width h in each, C slots, d
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.models.mtp_check import check_layers, window_of
from specheads.models.mtp_stack import Stack

if TYPE_CHECKING:
    from specheads.models.mtp import MtpHeads

BLOCK = 256  # slots; capacity is a multiple of it
_SPAN = 512  # positions that attend at once: bounds the mask of a long prompt


@dataclass(frozen=True)
class MtpKeys:
    """What the heads' layers remember of every row, as it is after the last :meth:`append`.

    Attributes:
        heads: parallel or causal ones.
        stacks: their weights as they were when the text began: those of parallel heads in one
            stack, of causal ones in one stack each.
        keys: per stack [B, n * H, C, h], rotated; slots behind a row's length hold nothing.
        values: likewise.
        waves: cosines, and sines with their sign, of all positions, [2, C, h].
        known_waves: those of other capacities, shared by texts.
        window: a position sees so many, itself included; None for all before it.
        lengths: per row the positions remembered.
    """

    heads: MtpHeads
    stacks: tuple[Stack, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    waves: Tensor
    known_waves: dict[int, Tensor]
    window: int | None
    lengths: tuple[int, ...]

    @staticmethod
    @torch.no_grad()
    def empty(heads: MtpHeads, num_rows: int) -> MtpKeys:
        """Return the memory of rows of which nothing was read yet.

        It holds a copy of the layers' weights, for training may change them between texts; heads
        that do not learn (``requires_grad_(False)``, as exports are loaded) are copied once.

        Raises:
            ConfigError: if the heads' layers are of a kind that is not computed here.
            ValueError: for sequential heads.
        """
        if heads.sequential:
            raise ValueError("sequential heads cannot read a text all at once")
        check_layers(heads, _empty)
        return _empty(heads, num_rows)

    @torch.no_grad()
    def append(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor | None = None
    ) -> tuple[MtpKeys, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's hidden states, at the heads' tap, of the positions that
                follow, right-padded.
            counts: per row how many of the T are real; where it is 0, the output means nothing.
            tokens: not read.

        Returns:
            The memory with them, and what the output matrices read, [K, B, d], at each row's last
            position: ``heads.contextual`` of the whole text there.
        """
        del tokens
        memory = self._with_room(hidden.shape[1])
        step = Step(memory, counts, hidden.shape[1])
        source = hidden.to(memory.waves.dtype).flatten(0, 1)  # [B * T, d]
        found = []
        for stack, keys, values in zip(memory.stacks, memory.keys, memory.values, strict=True):
            chained = stack is not memory.stacks[-1]
            output = stack.run(source, step, keys, values, every=chained)
            if chained:
                source, output = output[0], output[:, step.last]
            found.append(stack.finish(output))
        features = found[0] if len(found) == 1 else torch.cat(found)
        return replace(memory, lengths=step.lengths), features

    def select(self, rows: Tensor) -> MtpKeys:
        """Keep the rows ``rows`` [R] (long), in that order."""
        kept, rows = rows.tolist(), rows.to(self.waves.device)
        return replace(
            self,
            keys=tuple(each[rows] for each in self.keys),
            values=tuple(each[rows] for each in self.values),
            lengths=tuple(self.lengths[row] for row in kept),
        )

    def _with_room(self, num_new: int) -> MtpKeys:
        capacity, needed = self.waves.shape[1], max(self.lengths) + num_new
        if needed <= capacity:
            return self
        added = -(-max(needed, 2 * capacity) // BLOCK) * BLOCK - capacity
        return replace(
            self,
            keys=tuple(F.pad(each, (0, 0, 0, added)) for each in self.keys),
            values=tuple(F.pad(each, (0, 0, 0, added)) for each in self.values),
            waves=self._waves(capacity + added),
        )

    def _waves(self, capacity: int) -> Tensor:
        if capacity not in self.known_waves:
            positions = torch.arange(capacity, device=self.waves.device)[None]
            cos, sin = (each[0] for each in self.heads.rotary_emb(self.waves, positions))
            half = sin.shape[1] // 2
            turned = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], dim=1)])
            self.known_waves[capacity] = turned
        return self.known_waves[capacity]


@dataclass(frozen=True)
class _Kept:
    """What is made of heads that do not learn, as long as their tensors stay as they are."""

    state: list[tuple[int, int]]
    stacks: tuple[Stack, ...]
    waves: dict[int, Tensor]  # by capacity


_kept: WeakKeyDictionary[MtpHeads, _Kept] = WeakKeyDictionary()


def _made_of(heads: MtpHeads) -> _Kept:
    """Return the layers' weights as they are now; of heads that do not learn they are copied once.

    Engines write to weights that learn behind autograd's back, so those are copied for every text:
    half of what a short prompt costs the heads of a small model.
    """
    layers = [heads.layer(i) for i in range(heads.num_heads)]
    groups = [layers] if heads.variant == "parallel" else [[layer] for layer in layers]
    tensors = list(heads.parameters())
    if any(each.requires_grad or each.is_inference() for each in tensors):
        return _Kept([], tuple(map(Stack.of, groups)), {})
    tensors += heads.rotary_emb.buffers()
    state = [(each.data_ptr(), each._version) for each in tensors]
    known = _kept.get(heads)
    if known is None or known.state != state:
        known = _kept[heads] = _Kept(state, tuple(map(Stack.of, groups)), {})
    return known


def _empty(heads: MtpHeads, num_rows: int) -> MtpKeys:
    made = _made_of(heads)
    stacks = made.stacks
    keys = tuple(each.down.new_zeros(num_rows, each.num_keys, 0, each.width) for each in stacks)
    waves = stacks[0].down.new_zeros(2, 0, stacks[0].width)
    window = window_of(heads.config)
    return MtpKeys(heads, stacks, keys, keys, waves, made.waves, window, (0,) * num_rows)


class Step:
    """Where the positions of one ``append`` go, and what they see.

    Args:
        memory: with room for them.
        counts: per row how many are real.
        num_new: T.

    Attributes:
        last: places of the rows' last ones among all.
        waves: [2, B * T, h], theirs.
        lengths: per row the positions remembered afterwards.
    """

    def __init__(self, memory: MtpKeys, counts: Sequence[int], num_new: int) -> None:
        before, device = memory.lengths, memory.waves.device
        final = [max(count, 1) - 1 for count in counts]
        self.num_new, self.num_rows = num_new, len(before)
        self.lengths = tuple(n + count for n, count in zip(before, counts, strict=True))
        self._window, self._most = memory.window, max(before) + num_new
        self._start = before[0]
        self._spans: list[tuple[slice, slice, Tensor | None]] | None = None
        self.last: slice | Tensor
        if self.num_rows == 1:
            self._position = before[0] + final[0]
            self.last = slice(final[0], final[0] + 1)
            self.waves = memory.waves[:, before[0] : before[0] + num_new]
            return
        self._rows = torch.arange(self.num_rows, device=device)[:, None]
        starts, ends = torch.tensor([before, final], device=device)
        self._ahead = starts[:, None] + torch.arange(num_new, device=device)  # [B, T]
        self._ends = (starts + ends)[:, None]
        self.last = self._rows[:, 0] * num_new + ends
        self.waves = memory.waves[:, self._ahead.flatten()]

    def store(self, buffer: Tensor, new: Tensor) -> None:
        """Write ``new`` [B * T, n * H, h] into ``buffer`` [B, n * H, C, h]."""
        if self.num_rows == 1:
            buffer[0, :, self._start : self._start + self.num_new] = new.transpose(0, 1)
        else:
            buffer[self._rows, :, self._ahead] = new.unflatten(0, (self.num_rows, self.num_new))

    def spans(self, *, every: bool) -> list[tuple[slice, slice, Tensor | None]]:
        """Return who attends to what: places among a row's queries, slots, and their mask.

        Masks are [B or 1, 1, queries, slots]; None where all slots are seen.

        Args:
            every: all new positions ask, and not each row's last one only.
        """
        if self.num_rows == 1 and (self.num_new == 1 or not every):
            return [(slice(0, 1), self._seen(self._position, self._position + 1), None)]
        if not every:
            return [self._span(slice(0, 1), self._ends, 0, self._most)]
        if self._spans is None:  # the same for all layers
            self._spans = []
            for first in range(0, self.num_new, _SPAN):
                places = slice(first, min(first + _SPAN, self.num_new))
                if self.num_rows == 1:
                    first, end = self._start + first, self._start + places.stop
                    at = torch.arange(first, end, device=self.waves.device)[None]
                    self._spans.append(self._span(places, at, first, end))
                else:
                    self._spans.append(self._span(places, self._ahead[:, places], 0, self._most))
        return self._spans

    def _seen(self, first: int, end: int) -> slice:
        """Return the slots before ``end`` that a position at ``first`` or later may see."""
        return slice(0 if self._window is None else max(0, first + 1 - self._window), end)

    def _span(
        self, places: slice, positions: Tensor, first: int, end: int
    ) -> tuple[slice, slice, Tensor]:
        seen = self._seen(first, end)
        slots = torch.arange(seen.start, end, device=positions.device)
        mask = slots <= positions[..., None]
        if self._window is not None:
            mask &= slots > positions[..., None] - self._window
        return places, seen, mask[:, None]
