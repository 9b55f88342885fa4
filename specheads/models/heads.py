"""Medusa heads: K small stacks of residual blocks on the base model's last hidden state.

Head i (counted from 0) predicts the token i + 2 positions ahead (arXiv:2401.10774, section 2.1).
Shapes: K heads, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from specheads.models.base import OutputLayer

_MAX_STACKED = 1 << 22  # parameters that a snapshot may copy


class ResBlock(nn.Linear):
    """``x + SiLU(W x + b)``, starting as the identity: W and b are zero."""

    def __init__(self, hidden_size: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, hidden_size, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d] to [..., d]."""
        x = x.to(self.weight.dtype)  # the base may run in a narrower one
        return x + F.silu(super().forward(x))


class MedusaHead(nn.Module):
    """One head: its blocks, and its own output matrix if it has one."""

    def __init__(
        self, num_layers: int, hidden_size: int, vocab_size: int | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(hidden_size, dtype) for _ in range(num_layers))
        self.lm_head: nn.Linear | None = None
        if vocab_size is not None:
            self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map the base's hidden states [..., d] to those the output matrix reads, [..., d]."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class MedusaHeads(nn.Module):
    """K Medusa heads with output matrices of their own, or sharing the base's.

    Args:
        num_heads: K.
        num_layers: residual blocks per head; 0 leaves only the output matrix.
        hidden_size: d of the base model.
        vocab_size: V of the base model.
        lm_head: ``own``, one matrix per head (fill it with ``init_from_output``), or ``shared``.
        dtype: of the parameters; None means torch's default.

    Raises:
        ValueError: for an unknown ``lm_head`` or numbers out of range.
    """

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        hidden_size: int,
        vocab_size: int,
        lm_head: str = "own",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if lm_head not in ("own", "shared"):
            raise ValueError(f"lm_head must be own or shared, got {lm_head!r}")
        if num_heads < 1 or num_layers < 0:
            raise ValueError(
                f"num_heads must be at least 1 and num_layers at least 0, got {num_heads} and "
                f"{num_layers}"
            )
        self.num_heads, self.num_layers = num_heads, num_layers
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.lm_head = lm_head
        own = vocab_size if lm_head == "own" else None
        self.heads = nn.ModuleList(
            MedusaHead(num_layers, hidden_size, own, dtype) for _ in range(num_heads)
        )

    @torch.no_grad()
    def init_from_output(self, weight: Tensor) -> None:
        """Copy the base's output matrix [V, d] into every head's own one; nothing if shared.

        Raises:
            ValueError: if the shapes differ.
        """
        if weight.shape != (self.vocab_size, self.hidden_size):
            raise ValueError(
                f"the output matrix is {tuple(weight.shape)}, the heads were built for "
                f"{(self.vocab_size, self.hidden_size)}"
            )
        if self.lm_head == "own":
            for i in range(self.num_heads):
                self.output_weight(i, weight).copy_(weight)

    def features(self, hidden: Tensor) -> list[Tensor]:
        """Return, for each head, what its output matrix reads: K tensors [..., d]."""
        return [head(hidden) for head in self.heads]

    def output_weight(self, i: int, base_weight: Tensor) -> Tensor:
        """Return the output matrix of head ``i`` [V, d]: its own, or the base's."""
        head = self.heads[i]
        assert isinstance(head, MedusaHead)
        return base_weight if head.lm_head is None else head.lm_head.weight

    def forward(self, hidden: Tensor, output: OutputLayer) -> Tensor:
        """Return the logits of all heads; see ``logits``."""
        return self.logits(hidden, output)

    def logits(self, hidden: Tensor, output: OutputLayer) -> Tensor:
        """Return the logits [K, ..., V] of all heads, computed as the base computes its own.

        Args:
            hidden: [..., d] last hidden states of the base.
            output: the base's output layer; its matrix is used where the heads share it.
        """
        features = self.features(hidden)
        matrices = [self.output_weight(i, output.weight) for i in range(self.num_heads)]
        if self.lm_head == "shared":  # one product reads the matrix once for all heads
            products = F.linear(torch.stack(features).to(matrices[0].dtype), matrices[0])
        else:
            pairs = zip(features, matrices, strict=True)
            products = torch.stack([F.linear(x.to(matrix.dtype), matrix) for x, matrix in pairs])
        return _finish(products, output)

    @torch.no_grad()
    def snapshot(self, output: OutputLayer) -> Callable[[Tensor], Tensor]:
        """Return a function like ``logits``, for decoding: the weights as they are now, stacked.

        One batched product per layer replaces one per head, which is most of the time of small
        heads (146 to 55 us for six of width 256). Large heads are not copied: reading them costs
        what it costs, and the function is ``logits`` itself.
        """
        if sum(parameter.numel() for parameter in self.parameters()) > _MAX_STACKED:
            return lambda hidden: self.logits(hidden, output)

        def stacked(name: str) -> Tensor:
            return torch.stack(
                [self.get_parameter(f"heads.{i}.{name}") for i in range(self.num_heads)]
            )

        blocks = [
            (stacked(f"blocks.{i}.weight").transpose(1, 2), stacked(f"blocks.{i}.bias")[:, None])
            for i in range(self.num_layers)
        ]
        own = stacked("lm_head.weight").transpose(1, 2) if self.lm_head == "own" else None

        @torch.no_grad()
        def logits(hidden: Tensor) -> Tensor:
            x = hidden.reshape(1, -1, hidden.shape[-1]).expand(self.num_heads, -1, -1)
            for weight, bias in blocks:
                x = x.to(weight.dtype)
                x = x + F.silu(torch.baddbmm(bias, x, weight))
            if own is None:
                products = F.linear(x.to(output.weight.dtype), output.weight)
            else:
                products = torch.bmm(x.to(own.dtype), own)
            products = products.view(self.num_heads, *hidden.shape[:-1], self.vocab_size)
            return _finish(products, output)

        return logits


def _finish(products: Tensor, output: OutputLayer) -> Tensor:
    return output.finish(products if output.bias is None else products + output.bias)
