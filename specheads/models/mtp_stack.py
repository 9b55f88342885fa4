"""Layers of MTP heads side by side: a single product makes all their queries, keys and values.

Shapes: B rows, T new positions, n layers, H key heads of width h in each with G queries each, d
hidden size, I inner size. Activations lie columnwise, [..., d, columns], because a product
``weight @ columns`` takes half the time of ``columns @ weight.T`` where there are few columns (246
to 436 us for seven [1376, 256] matrices and one column on one core).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from specheads.models.mtp import MtpLayer
    from specheads.models.mtp_keys import Step

_JOINT = 16  # columns; beyond, queries of positions that nobody asks about are not computed


@dataclass(frozen=True)
class Stack:
    """The weights of n layers that read the same. Those of norms are multiplied into what follows.

    Attributes:
        read: [(2 + G) * n * H * h, d], rows for all values, then keys, then queries.
        read_bias: [(2 + G) * n * H * h, 1].
        turned_norm: [(1 + G) * n * H, h, 1], norms of keys and queries.
        out: [n, d, G * H * h]; ``out_bias`` [n, d, 1].
        up: [n, 2 * I, d], gate and up; ``up_bias`` [n, 2 * I, 1].
        down: [n, d, I]; ``down_bias`` [n, d, 1].
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
            turned_norm = torch.cat(norms)[..., None]
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
        self, columns: Tensor, step: Step, keys: Tensor, values: Tensor, *, every: bool
    ) -> Tensor:
        """Remember new positions, and return what the layers make of them, before the last norm.

        Args:
            columns: [d, B * T], what they read.
            step: where they go.
            keys: [B, n * H, C, h], of these layers; written to.
            values: likewise.
            every: return [n, d, B * T], and not [n, d, B] at the last positions.
        """
        last = slice(None) if every else step.last
        normed = self._normed(columns)
        size = self.num_keys * self.width
        if every or columns.shape[1] <= _JOINT:
            read = self._read(normed, 0, None)
            turned = self._turned(read[size:], step.waves, 0)
            new_keys, queries = turned[: self.num_keys], turned[self.num_keys :][..., last]
        else:
            read = self._read(normed, 0, 2 * size)
            new_keys = self._turned(read[size:], step.waves, 0)
            queries = self._read(normed[:, last], 2 * size, None)
            queries = self._turned(queries, step.waves[..., last], self.num_keys)
        step.store(values, read[:size].unflatten(0, (self.num_keys, self.width)))
        step.store(keys, new_keys)
        output = self._attend(queries, step, keys, values, every=every)
        output = torch.baddbmm(columns[:, last][None], self.out, output)
        if self.out_bias is not None:
            output = output + self.out_bias
        inner = _product(self.up, self._normed(output), self.up_bias)
        gate, up = inner.chunk(2, dim=1)
        output = torch.baddbmm(output, self.down, self.activate(gate) * up)
        return output if self.down_bias is None else output + self.down_bias

    def finish(self, output: Tensor) -> Tensor:
        """Return what the output matrices read, [n, B, d], of the layers' output [n, d, B]."""
        normed = F.rms_norm(output.transpose(1, 2), output.shape[1:2], eps=self.epsilon)
        return normed * self.norm

    def _normed(self, columns: Tensor) -> Tensor:
        """Return columns [..., d, columns] at unit root mean square."""
        rows = columns.transpose(-1, -2)
        return F.rms_norm(rows, rows.shape[-1:], eps=self.epsilon).transpose(-1, -2)

    def _read(self, normed: Tensor, first: int, end: int | None) -> Tensor:
        weight = self.read[first:end]
        if self.read_bias is None:
            return weight @ normed
        return torch.addmm(self.read_bias[first:end], weight, normed)

    def _turned(self, read: Tensor, waves: Tensor, first: int) -> Tensor:
        """Return keys or queries [heads, h, columns], normed and rotated.

        Args:
            read: [heads * h, columns].
            waves: [2, h, columns].
            first: the place of the first of them among all keys and queries.
        """
        shaped = read.unflatten(0, (-1, self.width))
        if self.turned_norm is not None:
            shaped = self._normed(shaped) * self.turned_norm[first : first + len(shaped)]
        return torch.addcmul(shaped * waves[0], shaped.roll(self.width // 2, 1), waves[1])

    def _attend(
        self, queries: Tensor, step: Step, keys: Tensor, values: Tensor, *, every: bool
    ) -> Tensor:
        """Return what queries [n * H * G, h, columns] read, [n, G * H * h, columns].

        The queries that share a key head lie one behind the other in the query's length.
        """
        groups = len(queries) // self.num_keys
        queries = queries.view(self.num_keys, groups, self.width, step.num_rows, -1)
        queries = queries.permute(3, 0, 1, 4, 2)  # [B, n * H, G, queries, h]
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
        return together.permute(1, 2, 4, 0, 3).reshape(len(self.out), self.out.shape[2], -1)


def _product(weight: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(weight, columns) if bias is None else torch.baddbmm(bias, weight, columns)


def _weights(parts: Sequence[nn.Linear]) -> Tensor:
    return torch.stack([part.weight for part in parts])


def _bias(*kinds: Sequence[nn.Linear], flat: bool = False) -> Tensor | None:
    """Return the biases of n layers, [n, outputs of all kinds, 1]; None if there are none.

    Args:
        kinds: per kind of product the n layers'.
        flat: return [n * outputs, 1] instead, one kind after the other.
    """
    if all(part.bias is None for parts in kinds for part in parts):
        return None
    found = [torch.stack([_bias_of(part) for part in parts]) for parts in kinds]
    if flat:
        return torch.cat([each.flatten() for each in found])[:, None]
    return torch.cat(found, dim=1)[..., None]


def _bias_of(part: nn.Linear) -> Tensor:
    return part.weight.new_zeros(part.out_features) if part.bias is None else part.bias
