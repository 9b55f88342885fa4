"""The published Hydra heads, restated from their repository: modules, names, and how they compute.

Nothing of specheads is used. ``state_dict`` of these modules is what their checkpoints hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel


class HydraBlock(nn.Module):
    """``res_connection(x) + SiLU(linear(x))``; without conditions the residual is x itself."""

    def __init__(self, size: int, conditions: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(size * (conditions + 1), size)
        self.res_connection: nn.Module = (
            nn.Linear(size * (conditions + 1), size) if conditions else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., (n + 1) d] to [..., d]."""
        found: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return found


class Hydra(nn.Module):
    """K heads over hidden states and the embeddings of the tokens after them.

    Args:
        num_heads: K.
        num_layers: blocks of a head; those behind the first are one module, repeated.
        size: d.
        vocab_size: V.
        grounded: whether heads read tokens.
        prefix: config of the base, for ``prefix-mlp``; None for ``mlp``.
    """

    def __init__(
        self, num_heads: int, num_layers: int, size: int, vocab_size: int, *,
        grounded: bool = True, prefix: LlamaConfig | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.grounded = grounded
        drop: list[nn.Module] = [] if prefix is None else [nn.Dropout(0.0)]
        self.hydra_mlp = nn.ModuleList()
        for i in range(num_heads):
            first = [*drop, HydraBlock(size, i + 1 if grounded else 0)]
            same = [*drop, HydraBlock(size)]
            again = same if grounded else first
            self.hydra_mlp.append(nn.Sequential(*first, *(again * (num_layers - 1))))
        heads = [nn.Linear(size, vocab_size) for _ in range(num_heads)]
        self.hydra_lm_head = nn.ModuleList(
            head if prefix is None else nn.Sequential(nn.Dropout(0.0), head) for head in heads
        )
        self.prefix_embeding_layer: LlamaModel | None = None
        if prefix is not None:
            values: dict[str, Any] = {**prefix.to_dict(), "num_hidden_layers": 1}
            self.prefix_embeding_layer = LlamaModel(LlamaConfig(**values))

    @torch.no_grad()
    def logits(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return [K, B, T, V] of whole texts.

        Args:
            hidden: [B, T, d], the base's last hidden states.
            embedded: [B, T + K, d], its input embeddings; head i at t reads those of t + 1 to
                t + i + 1.
        """
        length = hidden.shape[1]
        if self.prefix_embeding_layer is not None:
            hidden = self.prefix_embeding_layer(inputs_embeds=hidden).last_hidden_state
        found = []
        for i, (mlp, head) in enumerate(zip(self.hydra_mlp, self.hydra_lm_head, strict=True)):
            after = [embedded[:, j : j + length] for j in range(1, i + 2)] if self.grounded else []
            found.append(head(mlp(torch.cat([hidden, *after], dim=-1))))
        return torch.stack(found)
