"""The prefix layer while decoding: keys and values of what was read, one query per step and row.

Heads read the layer's output at the last position only, and there is but one layer: earlier
positions need keys and values, and no queries. transformers' own model computes all of them and
builds masks anew, at several times the small ops. Positions are counted from the first one that is
remembered: rotary attention knows distances only. Shapes: B rows, H key heads, G queries for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.models.prefix import PrefixLayer

BLOCK = 256  # slots; capacity is a multiple of it


@dataclass(frozen=True)
class PrefixKeys:
    """What the layer remembers of every row, as it is after the last :meth:`append`.

    Attributes:
        layer: the layer.
        keys: [B, H, C, h], rotated; slots behind a row's length hold nothing.
        values: [B, H, C, h].
        waves: cosines and sines of all positions, [2, C, h].
        lengths: per row the positions remembered.
    """

    layer: PrefixLayer
    keys: Tensor
    values: Tensor
    waves: Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def empty(layer: PrefixLayer, num_rows: int) -> PrefixKeys:
        """Return the memory of rows of which nothing was read yet."""
        heads = cast(Any, layer.model).config.num_key_value_heads
        weight = _parts(layer).self_attn.k_proj.weight
        keys = weight.new_zeros(num_rows, heads, 0, weight.shape[0] // heads)
        return PrefixKeys(layer, keys, keys, keys[:0, 0], (0,) * num_rows)

    @torch.no_grad()
    def append(
        self, hidden: Tensor, counts: Sequence[int], tokens: Tensor | None = None
    ) -> tuple[PrefixKeys, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's hidden states of the positions that follow, right-padded.
            counts: per row how many of the T are real; where it is 0, the output means nothing.
            tokens: not read.

        Returns:
            The memory with them, and the layer's output [B, d] at each row's last position.
        """
        del tokens
        memory = self._with_room(hidden.shape[1])
        parts = _parts(self.layer)
        attention = parts.self_attn
        num_rows, num_new = hidden.shape[:2]
        last = [max(count, 1) - 1 for count in counts]
        hidden = hidden.to(attention.o_proj.weight.dtype)
        normed = _norm(parts.input_layernorm, hidden)
        shape = (num_rows, num_new, memory.keys.shape[1], memory.keys.shape[3])
        keys = F.linear(normed, attention.k_proj.weight).view(shape).transpose(1, 2)
        values = F.linear(normed, attention.v_proj.weight).view(shape).transpose(1, 2)
        lengths = tuple(n + count for n, count in zip(self.lengths, counts, strict=True))
        if num_rows == 1:
            start, end = self.lengths[0], self.lengths[0] + num_new
            cos, sin = memory.waves[:, start:end]
            memory.keys[:, :, start:end] = _rotated(keys, cos, sin)
            memory.values[:, :, start:end] = values
            normed = normed[:, last[0] : last[0] + 1]
            residual = hidden[:, last[0] : last[0] + 1]
            cos, sin = cos[last[0]], sin[last[0]]
            mask = None
        else:
            device = hidden.device
            rows = torch.arange(num_rows, device=device)
            before, final, after = torch.tensor([self.lengths, last, lengths], device=device)
            ahead = before[:, None] + torch.arange(num_new, device=device)  # [B, T]
            cos, sin = memory.waves[:, ahead]  # [B, T, h]
            memory.keys[rows[:, None], :, ahead] = _rotated(
                keys, cos[:, None], sin[:, None]
            ).transpose(1, 2)
            memory.values[rows[:, None], :, ahead] = values.transpose(1, 2)
            normed, residual = (each[rows, final][:, None] for each in (normed, hidden))
            cos, sin = (each[rows, final][:, None, None] for each in (cos, sin))
            slots = torch.arange(max(lengths), device=device)
            mask = (slots < after[:, None])[:, None, None]  # [B, 1, 1, L]
        queries = F.linear(normed, attention.q_proj.weight)
        queries = queries.view(num_rows, shape[2], -1, shape[3])  # [B, H, G, h]
        seen = max(lengths)
        read = F.scaled_dot_product_attention(
            _rotated(queries, cos, sin),
            memory.keys[:, :, :seen],
            memory.values[:, :, :seen],
            attn_mask=mask,
        )
        output = residual + F.linear(read.reshape(num_rows, 1, -1), attention.o_proj.weight)
        output = output + parts.mlp(_norm(parts.post_attention_layernorm, output))
        norm = cast(Any, self.layer.model.norm)
        output = output if isinstance(norm, nn.Identity) else _norm(norm, output)
        return replace(memory, lengths=lengths), output[:, 0]

    def select(self, rows: Tensor) -> PrefixKeys:
        """Keep the rows ``rows`` [R] (long), in that order."""
        kept = rows.tolist()
        return replace(
            self,
            keys=self.keys[rows.to(self.keys.device)],
            values=self.values[rows.to(self.values.device)],
            lengths=tuple(self.lengths[row] for row in kept),
        )

    def _with_room(self, num_new: int) -> PrefixKeys:
        capacity, needed = self.keys.shape[2], max(self.lengths) + num_new
        if needed <= capacity:
            return self
        capacity = -(-max(needed, 2 * capacity) // BLOCK) * BLOCK
        added = capacity - self.keys.shape[2]
        rotary = cast(Any, self.layer.model.rotary_emb)
        positions = torch.arange(capacity, device=self.keys.device)[None]
        cos, sin = rotary(self.keys, positions)
        return replace(
            self,
            keys=F.pad(self.keys, (0, 0, 0, added)),
            values=F.pad(self.values, (0, 0, 0, added)),
            waves=torch.cat([cos, sin]),
        )


def _parts(layer: PrefixLayer) -> Any:
    return layer.model.layers[0]


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
