"""Layers of MTP heads side by side: a single product makes all their queries, keys and values.

Shapes: B rows, T new positions, N = B * T, n layers, H key heads of width h in each with G queries
each, d hidden size, I inner size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from specheads.models.mtp_keys import Step
    from specheads.models.mtp_layer import MtpLayer

_JOINT = 16  # positions; beyond, queries that nobody asks about are not computed
_FEW = 8  # positions for which float32 products are faster the other way round


@dataclass(frozen=True)
class Stack:
    """The weights of n layers that read the same. Those of norms are multiplied into what follows.

    Attributes:
        read: [(2 + G) * n * H * h, d], rows for all values, then keys, then queries.
        read_bias: [1, (2 + G) * n * H * h].
        turned_norm: [(1 + G) * n * H, h], norms of keys and queries.
        out: [n, d, G * H * h]; ``out_bias`` [n, 1, d].
        up: [n, 2 * I, d], gate and up; ``up_bias`` [n, 1, 2 * I].
        down: [n, d, I]; ``down_bias`` [n, 1, d].
        norm: [n, 1, d], the heads' last.
        num_keys: n * H.
        width: h.
        scale: of the attention's scores.
        epsilon: of all norms.
        activate: the inner activation.
    """

    read: Tensor
    read_bias: Tensor | None
    turned_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    norm: Tensor
    num_keys: int
    width: int
    scale: float
    epsilon: float
    activate: Callable[[Tensor], Tensor]

    @staticmethod
    def of(layers: Sequence[MtpLayer]) -> Stack:
        """Copy the weights as they are now."""
        blocks = [cast(Any, layer.block) for layer in layers]
        attentions, inners = [each.self_attn for each in blocks], [each.mlp for each in blocks]
        read = [[getattr(each, f"{name}_proj") for each in attentions] for name in "vkq"]
        up = [[getattr(each, f"{name}_proj") for each in inners] for name in ("gate", "up")]
        outs, downs = [each.o_proj for each in attentions], [each.down_proj for each in inners]
        before = torch.stack([each.input_layernorm.weight for each in blocks])[:, None]
        within = torch.stack([each.post_attention_layernorm.weight for each in blocks])[:, None]
        first, turned_norm = attentions[0], None
        heads = [part[0].out_features // first.head_dim for part in read]  # H, H, G * H
        if getattr(first, "q_norm", None) is not None:
            norms = [each.k_norm.weight.repeat(heads[1], 1) for each in attentions]
            norms += [each.q_norm.weight.repeat(heads[2], 1) for each in attentions]
            turned_norm = torch.cat(norms)
        return Stack(
            read=torch.cat([(_weights(part) * before).flatten(0, 1) for part in read]),
            read_bias=_bias(*read, flat=True),
            turned_norm=turned_norm,
            out=_weights(outs),
            out_bias=_bias(outs),
            up=torch.cat([_weights(part) for part in up], dim=1) * within,
            up_bias=_bias(*up),
            down=_weights(downs),
            down_bias=_bias(downs),
            norm=torch.stack([cast(Any, layer.norm).weight for layer in layers])[:, None],
            num_keys=heads[1] * len(layers),
            width=first.head_dim,
            scale=first.scaling,
            epsilon=blocks[0].input_layernorm.variance_epsilon,
            activate=inners[0].act_fn,
        )

    def run(
        self, hidden: Tensor, step: Step, keys: Tensor, values: Tensor, *, every: bool
    ) -> Tensor:
        """Remember new positions, and return what the layers make of them, before the last norm.

        Args:
            hidden: [N, d], what they read.
            step: where they go.
            keys: [B, n * H, C, h], of these layers; written to.
            values: likewise.
            every: return [n, N, d], and not [n, B, d] at the last positions.
        """
        last = slice(None) if every else step.last
        normed = self._normed(hidden)
        size = self.num_keys * self.width
        if every or len(hidden) <= _JOINT:
            read = self._read(normed, 0, None)
            turned = self._turned(read[:, size:], step.waves, 0)
            new_keys, queries = turned[:, : self.num_keys], turned[last, self.num_keys :]
        else:
            read = self._read(normed, 0, 2 * size)
            new_keys = self._turned(read[:, size:], step.waves, 0)
            queries = self._read(normed[last], 2 * size, None)
            queries = self._turned(queries, step.waves[:, last], self.num_keys)
        step.store(values, read[:, :size].unflatten(1, (self.num_keys, self.width)))
        step.store(keys, new_keys)
        found = self._attend(queries, step, keys, values, every=every)
        output = _product(self.out, found, hidden[last])
        if self.out_bias is not None:
            output = output + self.out_bias
        inner = _product(self.up, self._normed(output), self.up_bias)
        gate, up = inner.chunk(2, dim=-1)
        output = _product(self.down, self.activate(gate) * up, output)
        return output if self.down_bias is None else output + self.down_bias

    def finish(self, output: Tensor) -> Tensor:
        """Return what the output matrices read, [n, B, d], of the layers' output [n, B, d]."""
        return self._normed(output) * self.norm

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.epsilon)

    def _read(self, normed: Tensor, first: int, end: int | None) -> Tensor:
        """Return rows ``first`` to ``end`` of what is made of ``normed`` [N, d], [N, rows]."""
        bias = None if self.read_bias is None else self.read_bias[:, first:end]
        return _product(self.read[None, first:end], normed[None], bias)[0]

    def _turned(self, read: Tensor, waves: Tensor, first: int) -> Tensor:
        """Return keys or queries [N, heads, h], normed and rotated.

        Args:
            read: [N, heads * h].
            waves: [2, N, h].
            first: the place of the first of them among all keys and queries.
        """
        shaped = read.unflatten(1, (-1, self.width))
        if self.turned_norm is not None:
            norm = self.turned_norm[first : first + shaped.shape[1]]
            shaped = self._normed(shaped) * norm
        cos, sin = waves[:, :, None]
        return torch.addcmul(shaped * cos, shaped.roll(self.width // 2, -1), sin)

    def _attend(
        self, queries: Tensor, step: Step, keys: Tensor, values: Tensor, *, every: bool
    ) -> Tensor:
        """Return what queries [positions, n * H * G, h] read, [n, positions, G * H * h].

        Queries that share a key head lie one behind the other in the query's length.
        """
        groups = queries.shape[1] // self.num_keys
        queries = queries.unflatten(0, (step.num_rows, -1)).unflatten(2, (self.num_keys, groups))
        queries = queries.permute(0, 2, 3, 1, 4).contiguous()  # [B, n * H, G, positions, h]
        found = []
        for places, slots, mask in step.spans(every=every):
            if mask is not None and mask.shape[2] > 1:
                mask = mask.repeat(1, 1, groups, 1)
            read = F.scaled_dot_product_attention(
                queries[:, :, :, places].flatten(2, 3),
                keys[:, :, slots],
                values[:, :, slots],
                attn_mask=mask,
                scale=self.scale,
            )
            found.append(read.unflatten(2, (groups, -1)))
        together = found[0] if len(found) == 1 else torch.cat(found, dim=3)
        together = together.unflatten(1, (len(self.out), -1))  # [B, n, H, G, positions, h]
        return together.permute(1, 0, 4, 2, 3, 5).reshape(len(self.out), -1, self.out.shape[2])


def _product(weight: Tensor, x: Tensor, added: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + added``, [n, N, outputs], per layer.

    Args:
        weight: [n, outputs, inputs].
        x: [n, N, inputs].
        added: [N or 1, outputs] or [n, N or 1, outputs], or None.
    """
    if not _turns(x):
        matrix = weight.transpose(1, 2)
        return torch.bmm(x, matrix) if added is None else torch.baddbmm(added, x, matrix)
    # through a flat view, so that strides of single rows are those by which kernels are chosen
    columns = x.reshape(-1).view(x.shape).transpose(1, 2)
    num_layers, num_outputs, num_inputs = weight.shape
    if num_layers == 1:  # in two halves, for a batch of one is multiplied the slow way
        weight = weight.reshape(2, -1, num_inputs)
        columns = columns.expand(2, -1, -1)
    if added is None:
        found = torch.bmm(weight, columns)
    else:
        added = added.transpose(-1, -2)
        added = added.reshape(-1, weight.shape[1], added.shape[-1])
        found = torch.baddbmm(added, weight, columns)
    return found.reshape(num_layers, num_outputs, -1).transpose(1, 2)


def _turns(x: Tensor) -> bool:
    """Whether ``weight @ x.T`` is faster than ``x @ weight.T``, x [..., N, inputs].

    On a CPU, float32, seven [1376, 256] matrices read from memory: 360 to 704 us for one position,
    926 to 1215 for eight, 2225 to 1423 for twelve; bfloat16 850 to 438 for one.
    """
    return x.shape[-2] <= _FEW and x.device.type == "cpu" and x.dtype.itemsize >= 4


def _weights(parts: Sequence[nn.Linear]) -> Tensor:
    return torch.stack([part.weight for part in parts])


def _bias(*kinds: Sequence[nn.Linear], flat: bool = False) -> Tensor | None:
    """Return the biases of n layers, [n, 1, outputs of all kinds]; None if there are none.

    Args:
        kinds: per kind of product the n layers'.
        flat: return [1, n * outputs] instead, one kind after the other.
    """
    if all(part.bias is None for parts in kinds for part in parts):
        return None
    found = [torch.stack([_bias_of(part) for part in parts]) for parts in kinds]
    if flat:
        return torch.cat([each.flatten() for each in found])[None]
    return torch.cat(found, dim=1)[:, None]


def _bias_of(part: nn.Linear) -> Tensor:
    return part.weight.new_zeros(part.out_features) if part.bias is None else part.bias
