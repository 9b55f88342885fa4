"""A KV cache for tree decoding: preallocated, grown in blocks, compacted in place.

transformers' DynamicCache copies every layer's whole cache at each step (torch.cat) and can only be
cut at its end. Here a step writes its N nodes behind the live part, and the commit moves the few
accepted rows to the front of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

BLOCK = 256  # slots; capacity is a multiple of it


def _round_up(num_slots: int) -> int:
    return -(-num_slots // BLOCK) * BLOCK


class TreeLayer(DynamicLayer):
    """One layer: ``keys`` and ``values`` are views of the live part of larger buffers.

    Full length even for sliding-window layers, whose window the mask takes care of.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_slots = 0
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None

    @property
    def capacity(self) -> int:
        """Slots there is room for."""
        return 0 if self.key_buffer is None else self.key_buffer.shape[2]

    def use_buffers(self, keys: Tensor, values: Tensor) -> None:
        """Move the live part into other buffers [B, H, capacity, d]."""
        if self.key_buffer is not None and self.value_buffer is not None:
            keys[:, :, : self.num_slots] = self.key_buffer[:, :, : self.num_slots]
            values[:, :, : self.num_slots] = self.value_buffer[:, :, : self.num_slots]
        self.key_buffer, self.value_buffer = keys, values
        self.resize(self.num_slots)

    def resize(self, num_slots: int) -> None:
        """Set the number of live slots."""
        assert self.key_buffer is not None and self.value_buffer is not None
        self.num_slots = num_slots
        self.keys = self.key_buffer[:, :, :num_slots]
        self.values = self.value_buffer[:, :, :num_slots]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device; the buffers come with the first update."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, H, T, d] and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.num_slots, self.num_slots + key_states.shape[2]
        if end > self.capacity:  # doubling: the copies stay linear in the tokens ever written
            num_slots = _round_up(max(end, 2 * self.capacity))
            self.use_buffers(
                *(
                    states.new_empty(*states.shape[:2], num_slots, states.shape[3])
                    for states in (key_states, value_states)
                )
            )
        self.resize(end)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of live slots."""
        return self.num_slots

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` slots (transformers' sign convention).

        Raises:
            ValueError: for a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be at most 0, got {tokens_to_remove}")
        if self.is_initialized:
            self.resize(self.num_slots + tokens_to_remove)

    def reset(self) -> None:
        """Forget everything; keep the buffers."""
        if self.is_initialized:
            self.resize(0)


class TreeCache(Cache):
    """The cache of all layers, made by ``TreeCache()`` and given to the model as it is."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TreeLayer)
        self._pool: Tensor | None = None  # [L, 2, B, H, capacity, d]: one copy commits all layers
        self._poolable = True

    @property
    def capacity(self) -> int:
        """Slots there is room for; 0 before the first forward pass."""
        return min((layer.capacity for layer in self._live_layers()), default=0)

    def _live_layers(self) -> list[TreeLayer]:
        return [x for x in self.layers if isinstance(x, TreeLayer) and x.is_initialized]

    def reserve(self, num_slots: int) -> None:
        """Make room for ``num_slots`` in all; called before each forward pass but the first.

        Layers of equal shape move into one buffer, so that :meth:`compact` is one gather.
        """
        if not self._poolable or (self._pool is not None and num_slots <= self._pool.shape[4]):
            return
        layers = self._live_layers()
        if not layers:
            return
        buffers = [t for layer in layers for t in (layer.key_buffer, layer.value_buffer)]
        first = buffers[0]
        assert first is not None
        if self._pool is not None:
            num_slots = max(num_slots, 2 * self._pool.shape[4])
        num_slots = _round_up(max(num_slots, max(layer.capacity for layer in layers)))
        shape = (*first.shape[:2], num_slots, first.shape[3])

        def key(t: Tensor | None) -> tuple[object, ...]:
            assert t is not None
            return (*t.shape[:2], t.shape[3], t.dtype, t.device)

        # layers that differ or are spread over devices keep and grow their own buffers
        self._poolable = all(key(t) == key(first) for t in buffers)
        if not self._poolable:
            return
        pool = first.new_empty(len(layers), 2, *shape)
        for layer, (keys, values) in zip(layers, pool, strict=True):
            layer.use_buffers(keys, values)
        self._pool = pool

    def compact(self, start: int, index: Tensor) -> None:
        """Keep, of the slots from ``start`` on, only those of the accepted path, in its order.

        Args:
            start: slots before the tree.
            index: [B, a] long, nodes to keep, counted from ``start``; they move to ``start`` on
                and everything behind them is forgotten.
        """
        layers = self._live_layers()
        end = start + index.shape[1]
        pool = self._pool
        if pool is not None and all(layer.capacity == pool.shape[4] for layer in layers):
            stop = layers[0].num_slots
            pool[..., start:end, :] = _gather(pool[..., start:stop, :], index)
        else:
            for layer in layers:
                assert layer.keys is not None and layer.values is not None
                for live in (layer.keys, layer.values):
                    live[:, :, start:end] = _gather(live[:, :, start:], index.to(live.device))
        for layer in layers:
            layer.resize(end)


def _gather(slots: Tensor, index: Tensor) -> Tensor:
    """Select [..., B, H, a, d] from [..., B, H, T, d] with index [B, a]."""
    if index.shape[0] == 1:
        return slots.index_select(-2, index[0])
    index = index[:, None, :, None].expand(*slots.shape[:-2], index.shape[1], slots.shape[-1])
    return torch.gather(slots, -2, index)
