"""A KV cache for tree decoding: preallocated, grown in blocks, compacted in place, ragged.

transformers' DynamicCache copies every layer's whole cache at each step (torch.cat) and can only be
cut at its end. Here a step writes its N nodes behind the live part of each row, and the commit
moves the few accepted ones to the front of them. Rows have lengths of their own, and the token at
position p of a row always lies in slot p: rows of a batch need no holes and no re-packing, and what
lies behind a row's end is hidden by the mask (:mod:`specheads.attention.mask`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

BLOCK = 256  # slots; capacity is a multiple of it


def grown_capacity(needed: int, capacity: int = 0) -> int:
    """Return a capacity of at least ``needed`` slots, twice the present one or more.

    Doubling keeps the copies linear in the tokens ever written.
    """
    return -(-max(needed, 2 * capacity) // BLOCK) * BLOCK


class RowEnds:
    """Where the rows of a cache end; one object, shared by all its layers.

    Attributes:
        lengths: per row the committed tokens; empty before the first forward pass.
        fixed_slots: [B, T], where the pass at hand writes, see :meth:`TreeCache.fix`; else None.
        fixed_width: likewise, how many slots it sees; else 0.
        multiple: of which the number of slots is that a pass sees, a divisor of ``BLOCK``.
    """

    def __init__(self, multiple: int = 1) -> None:
        self.multiple = multiple
        self.lengths: list[int] = []
        self.fixed_slots: Tensor | None = None
        self.fixed_width = 0
        self._known: dict[tuple[object, ...], Tensor] = {}

    def set(self, lengths: Sequence[int]) -> None:
        """Set the lengths."""
        self.lengths = list(lengths)
        self._known.clear()

    @property
    def longest(self) -> int:
        """The longest row's length, 0 where there are no rows."""
        return max(self.lengths, default=0)

    def seen(self, num_tokens: int) -> int:
        """Return how many slots a pass sees that writes ``num_tokens`` behind every row."""
        return self.fixed_width or -(-(self.longest + num_tokens) // self.multiple) * self.multiple

    @property
    def uniform(self) -> bool:
        """Whether all rows have one length."""
        return len(set(self.lengths)) <= 1

    def on(self, device: torch.device) -> Tensor:
        """Return the lengths as [B] long on ``device``."""
        key = (device,)
        if key not in self._known:
            self._known[key] = torch.tensor(self.lengths, device=device)
        return self._known[key]

    def slots(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the next ``num_tokens`` slots of each row, [B, T]."""
        key = (device, num_tokens)
        if key not in self._known:
            ahead = torch.arange(num_tokens, device=device)
            self._known[key] = self.on(device)[:, None] + ahead
        return self._known[key]


class TreeLayer(DynamicLayer):
    """One layer: ``keys`` and ``values`` are views of the front of larger buffers.

    Full length even for sliding-window layers, whose window the mask takes care of.

    Attributes:
        buffers: of keys and of values [B, H, capacity, d]; empty before the first update.
    """

    def __init__(self, rows: RowEnds, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = rows
        self.buffers: tuple[Tensor, ...] = ()

    @property
    def capacity(self) -> int:
        """Slots there is room for."""
        return self.buffers[0].shape[2] if self.buffers else 0

    def use_buffers(self, keys: Tensor, values: Tensor) -> None:
        """Move what is there into other buffers [B, H, capacity, d]."""
        end = self.rows.longest
        for old, new in zip(self.buffers, (keys, values), strict=False):
            new[:, :, :end] = old[:, :, :end]
        self.buffers = keys, values
        self.show(keys.shape[2])

    def join(self, other: TreeLayer) -> None:
        """Put the rows of ``other``, whose pass has been, behind those here."""
        size = max(self.capacity, other.capacity)
        both = zip(self.buffers, other.buffers, strict=True)
        padded = ([F.pad(each, (0, 0, 0, size - each.shape[2])) for each in pair] for pair in both)
        self.buffers = tuple(map(torch.cat, padded))

    def show(self, num_slots: int) -> None:
        """Let ``keys`` and ``values`` be the first slots of the buffers."""
        keys, values = self.buffers
        self.keys, self.values = keys[:, :, :num_slots], values[:, :, :num_slots]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device; the buffers come with the first update."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, d] behind each row's end; return keys and values as far as any reaches.

        Rows do not grow by it: :meth:`TreeCache.extend` or :meth:`TreeCache.commit` says by how
        much.
        """
        if self.rows.fixed_slots is not None:
            return self._write(key_states, value_states, self.rows.fixed_slots)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, num_tokens = self.rows.longest, key_states.shape[2]
        end = start + num_tokens
        if end > self.capacity:
            # zeros: a slot that the mask hides still enters the weighted sum, and 0 * nan is nan
            num_slots = grown_capacity(end, self.capacity)
            keys, values = (
                states.new_zeros(*states.shape[:2], num_slots, states.shape[3])
                for states in (key_states, value_states)
            )
            self.use_buffers(keys, values)
        self.show(self.rows.seen(num_tokens))
        assert self.keys is not None and self.values is not None
        if self.rows.uniform:
            self.keys[:, :, start:end] = key_states
            self.values[:, :, start:end] = value_states
            return self.keys, self.values
        return self._write(key_states, value_states, self.rows.slots(num_tokens, key_states.device))

    def _write(
        self, key_states: Tensor, value_states: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, d] to slots [B, T]: tensors alone decide, so that it compiles."""
        assert self.keys is not None and self.values is not None
        if slots.shape[0] == 1:
            self.keys.index_copy_(2, slots[0], key_states)
            self.values.index_copy_(2, slots[0], value_states)
        else:
            row = torch.arange(slots.shape[0], device=slots.device)[:, None]
            self.keys[row, :, slots] = key_states.transpose(1, 2)
            self.values[row, :, slots] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the longest row's length: transformers asks for one number."""
        return self.rows.longest if self.is_initialized else 0


class TreeCache(Cache):
    """The cache of all layers, made by ``TreeCache()`` and given to the model as it is.

    Args:
        room: rows to make room for, so that :meth:`join` copies those that come and no others.
        multiple: show passes slots up to a multiple of it, all that are nobody's masked.

    Attributes:
        tokens: per row the token ids in its slots; whoever decodes keeps them, so that a later
            turn of a conversation can see how much of it is already here.
        sides: of a position threshold of the model's, on which the keys were made; kept by the
            passes of a model that has one.
    """

    def __init__(self, room: int = 0, multiple: int = 1) -> None:
        self.rows, self.room = RowEnds(multiple), room
        super().__init__(layer_class_to_replicate=partial(TreeLayer, self.rows))  # type: ignore[arg-type]
        self.tokens: list[list[int]] = []
        self.sides: set[int] = set()
        self._pool: Tensor | None = None  # [L, 2, B, H, capacity, d]: one copy commits all layers
        self._poolable = True

    @property
    def lengths(self) -> list[int]:
        """Per row the number of committed tokens; empty before the first forward pass."""
        return self.rows.lengths

    @property
    def capacity(self) -> int:
        """Slots there is room for; 0 before the first forward pass."""
        return min((layer.capacity for layer in self._live_layers()), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many keys a layer's pass will see, from slot 0 on."""
        return self.rows.seen(query_length), 0

    def _live_layers(self) -> list[TreeLayer]:
        return [x for x in self.layers if isinstance(x, TreeLayer) and x.is_initialized]

    def reserve(self, batch_size: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` more in every row; called before each forward pass.

        Layers of equal shape move into one buffer, so that :meth:`commit` is one gather.

        Raises:
            ValueError: if the cache has another number of rows.
        """
        self._take_rows(batch_size)
        self._make_room(batch_size, self.rows.longest + num_tokens)

    def _make_room(self, num_rows: int, num_slots: int) -> None:
        """Let the common buffer hold so many rows and slots, where layers are of equal shape."""
        num_held, held = (0, 0) if self._pool is None else self._pool.shape[2:5:2]
        layers = self._live_layers()
        enough = num_rows <= num_held and num_slots <= held
        if not self._poolable or enough or not layers:
            return
        buffers = [t for layer in layers for t in layer.buffers]
        # layers that differ or are spread over devices keep and grow their own buffers
        self._poolable = len({(*t.shape[:2], t.shape[3], t.dtype, t.device) for t in buffers}) == 1
        if not self._poolable:
            return
        if num_slots > held:
            capacities = (each.capacity for each in layers)
            num_slots = grown_capacity(max(num_slots, *capacities), held)
        there, num_heads, _, width = buffers[0].shape
        shape = (max(num_rows, self.room), num_heads, max(num_slots, held), width)
        self._pool = buffers[0].new_zeros(len(layers), 2, *shape)
        for layer, (keys, values) in zip(layers, self._pool, strict=True):
            layer.use_buffers(keys[:there], values[:there])

    def _take_rows(self, num_rows: int) -> None:
        """Take so many rows where there are none yet; raise ValueError for another number."""
        if not self.lengths:
            self.rows.set([0] * num_rows)
        if len(self.lengths) != num_rows:
            raise ValueError(f"the cache has {len(self.lengths)} rows, the batch {num_rows}")

    @contextlib.contextmanager
    def fix(self, num_tokens: int, width: int) -> Iterator[None]:
        """While open, a forward pass writes T tokens to given slots of views of a given width.

        What changes from step to step is then in tensors only, and a compiled pass is compiled
        once. There must have been a pass before, and room (:meth:`reserve`).

        Args:
            num_tokens: T.
            width: slots that keys and values show.
        """
        layers = self._live_layers()
        for layer in layers:
            layer.show(width)
            for view in (layer.keys, layer.values):
                if view is not None and view.is_cuda:
                    # else CUDA graphs would be skipped: they copy inputs, but these are written to
                    torch._dynamo.mark_static_address(view, guard=False)
        self.rows.fixed_slots = self.rows.slots(num_tokens, layers[0].device)
        self.rows.fixed_width = width
        try:
            yield
        finally:
            self.rows.fixed_slots, self.rows.fixed_width = None, 0

    def extend(self, counts: Sequence[int]) -> None:
        """Keep the first ``counts[b]`` of the tokens that were written behind row b."""
        before = self.lengths or [0] * len(counts)
        self.rows.set([n + count for n, count in zip(before, counts, strict=True)])

    def commit(self, path: Tensor, counts: Sequence[int]) -> None:
        """Keep, of the tree written behind each row, the accepted path, in its order.

        Args:
            path: [B, D+1] long, nodes from the root (node 0), padded with -1.
            counts: per row the nodes to keep, from the front of its path; 0 forgets the tree.
        """
        num_kept = max(counts)
        if num_kept > 1:  # the root lies where it belongs
            nodes = path[:, 1:num_kept].clamp(min=0)
            for buffer in self._buffers():
                self._move(buffer, nodes.to(buffer.device))
        self.extend(counts)

    def _buffers(self) -> list[Tensor]:
        """Return the buffers [n, B, H, capacity, d] that together hold everything."""
        layers = self._live_layers()
        pool = self._pool
        if pool is not None and all(layer.capacity == pool.shape[4] for layer in layers):
            return [pool[:, :, : len(self.lengths)].flatten(0, 1)]
        return [t[None] for layer in layers for t in layer.buffers]

    def _move(self, buffer: Tensor, nodes: Tensor) -> None:
        """Move ``nodes`` [B, a] of every row's tree to the slots behind its root."""
        num_rows, num_moved = nodes.shape
        if num_rows == 1:
            start = self.lengths[0]
            kept = buffer.index_select(-2, nodes[0] + start)
            buffer[..., start + 1 : start + 1 + num_moved, :] = kept
            return
        row = torch.arange(num_rows, device=buffer.device)[:, None]
        slot = self.rows.slots(1 + num_moved, buffer.device)
        source = slot[:, :1] + nodes
        # index tensors apart by a slice: their dimensions come first, [B, a, n, H, d]
        buffer[:, row, :, slot[:, 1:]] = buffer[:, row, :, source]

    def shorten(self, lengths: Sequence[int]) -> None:
        """Forget what lies behind ``lengths[b]`` tokens of row b.

        Raises:
            ValueError: if a row is shorter than that.
        """
        for row, (length, wanted) in enumerate(zip(self.lengths, lengths, strict=True)):
            if not 0 <= wanted <= length:
                raise ValueError(f"row {row} has {length} tokens, cannot keep {wanted}")
        self.rows.set(lengths)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every row (transformers' convention).

        Raises:
            ValueError: for a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be at most 0, got {tokens_to_remove}")
        self.shorten([length + tokens_to_remove for length in self.lengths])

    def align(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Keep of every row what ``texts`` [B] begins with; return how many tokens that is.

        At least one token of a text is left to be read, for its logits. An empty cache takes any
        texts.

        Raises:
            ValueError: if there are rows, but not one for each text.
        """
        self._take_rows(len(texts))
        held = self.tokens or [[]] * len(texts)
        # commonprefix is made for paths, and takes any lists; a text's last token is read again
        # even where it is known, for its logits
        rows = zip(texts, held, self.lengths, strict=True)
        known = [len(commonprefix([tokens[:n], list(text[:-1])])) for text, tokens, n in rows]
        self.shorten(known)
        return known

    def select(self, rows: Tensor, ahead: int = 0) -> None:
        """Keep the rows ``rows`` [R] (long), in that order; only rows that move are copied.

        Args:
            rows: one may come several times.
            ahead: tokens of a pass that was not committed yet, which move along.
        """
        kept, end = rows.tolist(), self.rows.longest + ahead
        moved = [(row, place) for place, row in enumerate(kept) if row != place]
        if len(kept) > len(self.lengths):
            for layer in self._live_layers():
                layer.buffers = tuple(t.index_select(0, rows.to(t.device)) for t in layer.buffers)
            self._pool = None  # made again with the next pass
        elif moved:
            sources, places = map(list, zip(*moved, strict=True))
            with torch.inference_mode():  # what a decoding step has made takes no change elsewhere
                for buffer in self._buffers():
                    live = buffer[..., :end, :]
                    live[:, places] = live[:, sources]
        for layer in self._live_layers():
            layer.buffers = tuple(t[: len(kept)] for t in layer.buffers)
        self.rows.set([self.lengths[row] for row in kept])
        if self.tokens:
            self.tokens = [self.tokens[row] for row in kept]

    def join(self, other: TreeCache) -> None:
        """Take over the rows of ``other``, of the same model; they come behind the rows here."""
        start, end = len(self.lengths), other.rows.longest
        stop = start + len(other.lengths)
        self._make_room(stop, end)
        layers = zip(self._live_layers(), other._live_layers(), strict=True)
        for number, (layer, more) in enumerate(layers):
            if self._pool is None:  # layers that differ have buffers of their own
                layer.join(more)
                continue
            layer.buffers = tuple(self._pool[number, :, :stop])
            for mine, theirs in zip(layer.buffers, more.buffers, strict=True):
                mine[start:, :, :end] = theirs[:, :, :end]
                mine[start:, :, end:] = 0  # what a row left here that had it before
        self.rows.set([*self.lengths, *other.lengths])
        self.tokens += other.tokens

    def copy_of(self, row: int) -> TreeCache:
        """Return a cache with a copy of one row, no longer than it is."""
        found, length = TreeCache(multiple=self.rows.multiple), self.lengths[row]
        for layer in self.layers:
            assert isinstance(layer, TreeLayer)
            found.layers.append(own := TreeLayer(found.rows))
            if layer.is_initialized:
                parts = [each[row : row + 1, :, :length].clone() for each in layer.buffers]
                own.lazy_initialization(*parts)
                own.buffers = tuple(parts)
        found.rows.set([length])
        found.sides = set(self.sides)
        return found

    def reset(self) -> None:
        """Forget everything, the number of rows too."""
        self.layers, self.tokens = [], []
        self._pool, self._poolable = None, True
        self.rows.set([])
