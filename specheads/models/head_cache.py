"""What layers of heads remember of texts while decoding: keys and values, one pass per verify step.

:class:`LayerCache` is for layers that read hidden states alone: the prefix layer of Hydra++ heads,
parallel and causal MTP heads. transformers' own layers would be called one by one, at several times
the small ops, and would compute outputs that nobody reads. Here layers that read the same hidden
states are run side by side (:class:`Stack`), and what follows their keys and values is made for the
last position only. Of layers one behind the other all but the last need outputs at all new
positions. Positions are counted from the first one that is remembered: rotary attention knows
distances only.

Shapes: B rows, T new positions, A of them that are asked, n layers side by side (a dimension in
front, of one layer none), H key heads of width h in each with G queries each, C slots, d hidden
size, K heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from specheads.attention.cache import RowEnds, TreeLayer, grown_capacity
from specheads.attention.mask import attend_folded
from specheads.models.layer_step import LayerStep, Pick, signed
from specheads.models.manifest import first_line
from specheads.models.packed import Kept

_SPAN = 512  # positions that attend at once: bounds the mask of a long prompt
WINDOWED = ("full_attention", "sliding_attention")  # kinds of attention that the caches know
# (block, the norm behind it or None) per layer, in groups that read the same hidden states
Groups = Sequence[Sequence[tuple[nn.Module, nn.Module | None]]]


def attention_of(config: PreTrainedConfig) -> tuple[str, int | None]:
    """Return a layer's kind of attention, and how many positions it sees, itself included.

    Args:
        config: of one layer.

    Returns:
        transformers' name of the kind, and the window, None where there is none.
    """
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    kind = kinds[0] if kinds else "full_attention" if window is None else "sliding_attention"
    if not kinds and window is None and getattr(config, "attention_chunk_size", None):
        kind = "chunked_attention"
    return kind, (window or None) if kind == "sliding_attention" else None


class Stack:
    """Layers that read the same, with their weights as they are now, and the norms behind them.

    Args:
        layers: each with the norm behind it, or None.

    Attributes:
        step: runs them.
        dtype: of the weights.
    """

    def __init__(self, layers: Sequence[tuple[nn.Module, nn.Module | None]]) -> None:
        first = cast(Any, layers[0][0])
        self._scale, self._epsilon = first.self_attn.scaling, first.input_layernorm.variance_epsilon
        width, activate = first.self_attn.head_dim, first.mlp.act_fn
        self.step = LayerStep([block for block, _ in layers], width, self._epsilon, activate)
        self.dtype: torch.dtype = self.step.before.dtype
        norms = [cast(Any, norm).weight for _, norm in layers if norm is not None]
        self._norm = torch.stack(norms)[:, None] if norms else None  # [n, 1, d]

    def finish(self, output: Tensor) -> Tensor:
        """Return what heads read, [n, B, d], of the layers' output [..., B, d]."""
        output = output.reshape(-1, *output.shape[-2:])
        if self._norm is None:
            return output
        return F.rms_norm(output, output.shape[-1:], eps=self._epsilon) * self._norm

    def attend(
        self,
        layer: TreeLayer,
        window: int | None,
        asked: Pick | None,
        places: Tensor | None,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Remember new positions; return what queries read of a text, [..., B, G * H, A, h].

        Args:
            layer: keys and values [B, n * H, C, h] of these layers; written to.
            window: a position sees so many, itself included; None for all before it.
            asked: picks the new positions whose queries are answered; None for all.
            places: [B, A], their slots; None where they see all slots.
            queries: [..., B, G * H, T, h].
            keys: [..., B, H, T, h].
            values: likewise.
        """

        def by_row(states: Tensor) -> Tensor:
            return states.transpose(0, 1).flatten(1, 2) if several else states

        several, num_heads = queries.dim() == 5, queries.shape[-3]
        queries, found = by_row(queries), []
        keys, values = layer.update(by_row(keys), by_row(values))
        if asked is not None:
            queries = asked(queries)
        for first in range(0, queries.shape[2], _SPAN):
            some, mask = slice(first, first + _SPAN), None
            if places is not None:
                mask = visible(places[:, some], keys.shape[2], window)[:, None]
            part = queries[:, :, some]
            found.append(attend_folded(part, keys, values, mask, self._scale, {}))
        whole = found[0] if len(found) == 1 else torch.cat(found, dim=2)
        return whole.unflatten(1, (-1, num_heads)).transpose(0, 1) if several else whole


class Slots:
    """Room for what layers hand to their caches, and the rotary waves of every slot.

    Writing happens in place, and several caches of one text share it: each knows by its lengths
    what is its own, and says so before it is used. What lies behind belongs to nobody, and nodes of
    trees are put there.

    Args:
        num_layers: how many there are.
        table: makes the waves of so many slots.

    Attributes:
        rows: where the rows end.
        layers: per layer what it calls keys and values, of any number and width of heads.
        waves: of as many slots as there is room for.
    """

    def __init__(self, num_layers: int, table: Callable[[int], Any]) -> None:
        self._table, self._capacity = table, 0
        self.rows = RowEnds()
        self.layers = [TreeLayer(self.rows) for _ in range(num_layers)]
        self.waves: Any = None

    def reserve(self, lengths: Sequence[int], num_new: int) -> int:
        """Say where the rows end; return how many slots there are with ``num_new`` more."""
        self.rows.set(lengths)
        size = self.rows.longest + num_new
        if size > self._capacity:
            self._capacity = grown_capacity(size, self._capacity)
            self.waves = self._table(self._capacity)
        return size

    def select(self, rows: Tensor) -> Slots:
        """Return a copy of the rows ``rows`` [R] (long), in that order."""
        found = Slots(len(self.layers), self._table)
        for mine, theirs in zip(found.layers, self.layers, strict=True):
            if theirs.buffers:
                mine.lazy_initialization(*theirs.buffers)
                mine.buffers = tuple(each[rows.to(each.device)] for each in theirs.buffers)
        return found

    def join(self, other: Slots, num_rows: int) -> Slots:
        """Return a copy of the ``num_rows`` rows here and, behind them, those of ``other``."""
        found = self.select(torch.arange(num_rows))
        for mine, theirs in zip(found.layers, other.layers, strict=True):
            mine.join(theirs)
        return found


@dataclass(frozen=True)
class RowCache:
    """What every cache of heads is: slots, and how many of them each row's text takes.

    Attributes:
        slots: keys and values; slots behind a row's length hold nothing.
        lengths: per row the positions read.
    """

    slots: Slots
    lengths: tuple[int, ...]

    def select(self, rows: Tensor) -> Self:
        """Keep the rows ``rows`` [R] (long), in that order."""
        lengths = tuple(self.lengths[row] for row in rows.tolist())
        return replace(self, slots=self.slots.select(rows), lengths=lengths)

    def join(self, other: Self) -> Self:
        """Return the rows of both; something of all texts was read."""
        slots = self.slots.join(other.slots, len(self.lengths))
        return replace(self, slots=slots, lengths=self.lengths + other.lengths)

    def waves(self, lengths: Sequence[int], num: int) -> Tensor:
        """Return the waves [2, B, num, h] of ``num`` positions behind so many in each row."""
        waves = self.slots.waves
        if len(lengths) == 1:
            return waves[:, None, lengths[0] : lengths[0] + num]
        starts = torch.tensor(lengths, device=waves.device)[:, None]
        return waves[:, starts + torch.arange(num, device=waves.device)]

    def grown(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths with ``counts[b]`` positions more in each row."""
        return tuple(n + count for n, count in zip(self.lengths, counts, strict=True))


@dataclass(frozen=True)
class RootCache(RowCache):
    """The cache of layers that go down a tree from what they made of each row's last position.

    Attributes:
        root: [..., B, d], what was made of the last positions.
    """

    root: Tensor

    @cached_property
    def ends(self) -> Tensor:
        """The lengths, [B] long where the heads lie."""
        return torch.tensor(self.lengths, device=self.root.device)

    def select(self, rows: Tensor) -> Self:
        """Keep the rows ``rows`` [R] (long), in that order."""
        here = rows.to(self.root.device)
        return replace(super().select(here), root=self.root[..., here, :])

    def join(self, other: Self) -> Self:
        """Return the rows of both; something of all texts was read."""
        return replace(super().join(other), root=torch.cat([self.root, other.root], dim=-2))

    def moved(self, counts: Sequence[int], root: Tensor) -> Self:
        """Return this cache with ``counts[b]`` positions more in each row, of which ``root`` came.

        Args:
            counts: per row; where it is 0, the root stays what it was.
            root: [..., B, d], what was made of each row's last position.
        """
        if min(counts) == 0:
            new = torch.tensor(counts, device=root.device)
            root = torch.where(new[:, None] > 0, root, self.root)
        return replace(self, lengths=self.grown(counts), root=root)

    def as_it_was(self, lengths: Sequence[int], every: Tensor) -> Self:
        """Return this cache of one row as it was when the root stood elsewhere, one row for each.

        Args:
            lengths: of the rows to come, how many positions were read.
            every: [..., 1, T, d], what was made of them, as ``read`` returned it.
        """
        ends = torch.tensor(lengths, device=self.root.device)
        cache, root = self.select(torch.zeros_like(ends)), every[..., 0, ends - 1, :]
        return replace(cache, lengths=tuple(lengths), root=root)


class RootWalk:
    """One step's way down a tree behind what a cache remembers; under ``torch.no_grad()``.

    Args:
        root: [B], the last certain tokens.
        memory: of the texts up to there.

    Attributes:
        depth: of the nodes at hand.
        tokens: [B, n], the nodes' own.
    """

    _memory: RootCache

    def __init__(self, root: Tensor, memory: RootCache) -> None:
        self._memory = memory
        self.depth, self.tokens = 0, root[:, None]
        # [B, n, N]: which nodes have which other, without the root, for ancestor or are the same
        self._lines = torch.ones(len(root), 1, 0, dtype=torch.bool, device=root.device)

    def go_to(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Go to nodes one deeper; return the places [B, n'] of their parents, as ``descend``."""
        num_rows, num_new = tokens.shape
        parents = parents.expand(num_rows, -1)
        own = torch.eye(num_new, dtype=torch.bool, device=tokens.device).expand(num_rows, -1, -1)
        self._lines = torch.cat([rows_at(self._lines, parents), own], dim=2)
        self.depth, self.tokens = self.depth + 1, tokens
        return parents

    def seen(self, certain: Tensor, lines: Tensor) -> Tensor:
        """Return which slots nodes see, [B, n, L]: of a text, and of the tree behind it.

        Args:
            certain: [B, 1 or n, L], of the text.
            lines: [B, n, N], of the tree's nodes.
        """
        ends = self._memory.ends[:, None]
        behind = ends + torch.arange(lines.shape[2], device=ends.device)
        certain = certain.expand(-1, lines.shape[1], -1)
        return certain.scatter(2, behind[:, None].expand_as(lines), lines)


def last_places(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the places [B, 1] of the last of ``counts[b]`` positions; the first where none is."""
    return torch.tensor([max(count, 1) - 1 for count in counts], device=device)[:, None]


def last_ones(counts: Sequence[int], device: torch.device) -> Pick:
    """Return what picks of states [B, ..., T, w] the last of ``counts[b]`` positions, T = 1."""
    if len(counts) == 1:
        return lambda states: states.narrow(-2, max(counts[0], 1) - 1, 1)
    places = last_places(counts, device)
    return lambda states: states.take_along_dim(places.view(-1, *[1] * (states.dim() - 1)), -2)


def visible(places: Tensor, num_slots: int, window: int | None = None) -> Tensor:
    """Return which slots of a text are seen from ``places`` [B, Q], [B, Q, num_slots].

    Args:
        places: slots, whose own and earlier ones are seen.
        num_slots: there are.
        window: how many of these are seen, the own included; None for all.
    """
    behind = places[..., None] - torch.arange(num_slots, device=places.device)
    seen = behind >= 0
    return seen & (behind < window) if window else seen


def rows_at(states: Tensor, places: Tensor) -> Tensor:
    """Return states [B, A, d] at places [B, A] of states [B, T, d]."""
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))


@dataclass(frozen=True)
class LayerCache(RowCache):
    """Keys and values of the rows' texts, as they are after the last :meth:`append`.

    Keys are rotated, and those of a stack [B, n * H, C, h]. The waves of the slots are cosines, and
    sines with their sign, [2, C, h].

    Attributes:
        stacks: the layers' weights as they were when the text began; those of one stack read the
            same hidden states, and each stack reads what the one before made.
        window: a position sees so many, itself included; None for all before it.
        single: there is one layer, in front of all heads, which read [B, d] and not [K, B, d].
    """

    stacks: tuple[Stack, ...]
    window: int | None
    single: bool

    @staticmethod
    @torch.no_grad()
    def empty(
        owner: nn.Module,
        groups: Groups,
        rotary: nn.Module,
        num_rows: int,
        *,
        window: int | None = None,
        single: bool = False,
    ) -> LayerCache:
        """Return the cache of rows of which nothing was read yet.

        It holds a copy of the layers' weights, for training may change them between texts; layers
        that do not learn (``requires_grad_(False)``, as exports are loaded) are copied once.

        Args:
            owner: the module whose parameters these are.
            groups: the layers, all of parts that :func:`odd_part` has nothing against.
            rotary: makes cosines and sines from positions.
            num_rows: B.
            window: of the layers' attention.
            single: see the class.
        """
        stacks, table = _copies(owner, groups, rotary)
        return LayerCache(Slots(len(stacks), table), (0,) * num_rows, stacks, window, single)

    @torch.no_grad()
    def append(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor | None = None
    ) -> tuple[LayerCache, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's hidden states, at the heads' taps, of the positions that
                follow, right-padded.
            counts: per row how many of the T are real; where it is 0, the output means nothing.
            tokens: not read.

        Returns:
            The cache with them, and what the heads read, [K, B, d] or [B, d], at each row's last
            position: ``heads.contextual`` of the whole text there.
        """
        num_new = hidden.shape[1]
        self.slots.reserve(self.lengths, num_new)
        waves, last = self.waves(self.lengths, num_new), last_ones(counts, hidden.device)
        every = final = None
        # else one row's last position asks, behind which there is nothing
        if len(self.stacks) > 1 or self.window or list(counts) != [num_new]:
            starts = torch.tensor(self.lengths, device=hidden.device)[:, None]
            every = starts + torch.arange(num_new, device=hidden.device)
            final = last(every[..., None])[..., 0]
        source, found = hidden.to(self.stacks[0].dtype), []
        for stack, layer in zip(self.stacks, self.slots.layers, strict=True):
            chained = stack is not self.stacks[-1]
            asked, places = (None, every) if chained else (last, final)
            attend = partial(stack.attend, layer, self.window, asked, places)
            output = stack.step(source, waves, attend, asked)
            if chained:
                source, output = output, last(output)
            found.append(stack.finish(output[..., 0, :]))
        features = found[0] if len(found) == 1 else torch.cat(found)
        cache = replace(self, lengths=self.grown(counts))
        return cache, features[0] if self.single else features


Copies = tuple[tuple[Stack, ...], Callable[[int], Tensor]]  # and what makes their waves
_kept: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()


def _copies(owner: nn.Module, groups: Groups, rotary: nn.Module) -> Copies:
    """Return the layers' weights as they are now; of layers that do not learn they are copied once.

    Engines write to weights that learn behind autograd's back, so those are copied for every text:
    half of what a short prompt costs the heads of a small model.
    """

    def copied() -> Copies:
        stacks = tuple(map(Stack, groups))
        return stacks, lru_cache(maxsize=None)(partial(_waves, rotary, stacks[0].step.before))

    tensors = [*owner.parameters(), *rotary.buffers()]
    return cast(Copies, _kept.setdefault(owner, Kept()).of(tensors, copied))


def _waves(rotary: nn.Module, like: Tensor, capacity: int) -> Tensor:
    """Return cosines, and sines with their sign, of all positions, [2, C, h]."""
    positions = torch.arange(capacity, device=like.device)[None]
    return signed(*rotary(like, positions))[:, 0]


_NEEDED = {
    "input_layernorm.weight", "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}  # fmt: skip
_OPTIONAL = re.compile(r"self_attn\.([qkvo]_proj\.bias|[qk]_norm\.weight)|mlp\.\w+_proj\.bias")
_PLACES = 7  # compared: a prompt of three, then two steps


def odd_part(config: PreTrainedConfig, block: nn.Module) -> str | None:
    """Return what a :class:`Stack` cannot compute of a layer, as its parts say; None for nothing.

    transformers has hundreds of kinds of layers. What is not built from the known parts is refused
    by their names, lest it be zero while it is tried and learn later. What uses known parts
    otherwise (norms around 1, multipliers, layers without rotation) shows in its numbers, see
    :func:`odd_numbers`.
    """
    names = {name for name, _ in block.named_parameters()}
    if missing := sorted(_NEEDED - names):
        return f"they have no {missing[0]}"
    if extra := sorted(name for name in names - _NEEDED if not _OPTIONAL.fullmatch(name)):
        return f"they have {extra[0]}"
    kind = attention_of(config)[0]
    return None if kind in WINDOWED else f"they attend by {kind}"


@torch.no_grad()
def odd_numbers(
    whole: Callable[[Tensor, Tensor], Tensor], empty: Callable[[int], LayerCache], hidden_size: int
) -> str | None:
    """Return what is wrong about a cache of layers whose names are known; None if it is right.

    Args:
        whole: transformers' way: hidden states [1, T, d] and position ids [1, T] to [K, 1, T, d].
        empty: makes the cache of so many rows.
        hidden_size: d.
    """
    generator = torch.Generator().manual_seed(0)  # the decoding's own draws must not move
    hidden, found = torch.randn(1, _PLACES, hidden_size, generator=generator), []
    try:
        cache = empty(1)
        hidden = hidden.to(cache.stacks[0].step.before)
        for first, end in ((0, 3), (3, 4), (4, _PLACES)):
            cache, features = cache.append(hidden[:, first:end], [end - first])
            found.append(features[:, 0].float())
    except (AttributeError, RuntimeError) as error:  # what a layer has not, or has in other sizes
        return f"they are of an unknown kind ({first_line(error)})"
    positions = torch.arange(_PLACES, device=hidden.device)[None]
    wanted = whole(hidden, positions)[:, 0, [2, 3, _PLACES - 1]].float()  # [K, 3, d]
    off = float((torch.stack(found, dim=1) - wanted).norm() / wanted.norm().clamp_min(1e-30))
    if off <= max(1e-4, 10 * torch.finfo(hidden.dtype).eps):  # the sums are in another order
        return None
    return f"what is computed here differs from transformers by {off:.2g} of it"
