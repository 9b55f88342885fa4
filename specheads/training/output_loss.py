"""The loss of one output matrix over packed rows, and the next-token objective made of it.

Every mean is over the valid labels of the whole optimizer step, which the batch carries as
``num_valid``: a micro-batch returns its share, and shares add up.

A batch has ``input_ids``, ``labels`` (unshifted), ``position_ids`` and ``segment_ids`` [B, T], and
``num_valid`` [K + 1] (language model, then heads); without it the batch counts for itself.
Shapes: B T batch, M positions in use, K heads, G groups of labels, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.losses import (
    check_implementation,
    count_valid,
    linear_cross_entropy,
    shift_labels,
)
from specheads.models.adapters import require_grad
from specheads.models.hidden import FINAL, packed_taps
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, output_layer
from specheads.soft_loss import Teacher, linear_soft_loss

Batch = dict[str, Any]
Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class OutputLoss:
    """Cross entropy as the base model's output layer would have it.

    Attributes:
        layer: scale, softcap and bias; the matrix is given at each call.
        chunk_size: rows whose logits exist at one time, 0 for the fastest.
        implementation: see ``losses.linear_cross_entropy``.
        count_hits: report top-1 and top-5.
    """

    layer: OutputLayer
    chunk_size: int = 0
    implementation: str = "fused"
    count_hits: bool = True

    def __post_init__(self) -> None:
        check_implementation(self.implementation, self.layer.softcap)

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        row_weight: Tensor,
        *,
        heads: Heads | None = None,
        **groups: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return ``losses.linear_cross_entropy`` of ``hidden`` [N, d] under ``weight`` [V, d].

        With ``heads`` the matrix is theirs, and may know fewer tokens: labels that it does not
        know are misses in the hits, and add nothing to the loss.
        """
        return linear_cross_entropy(
            hidden,
            weight,
            labels if heads is None else heads.map_labels(labels),
            row_weight,
            bias=self.layer.bias if heads is None else heads.output_bias(self.layer.bias),
            scale=self.layer.scale,
            softcap=self.layer.softcap,
            chunk_size=self.chunk_size,
            count_hits=self.count_hits,
            implementation=self.implementation,
            **groups,
        )

    def soft(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        row_weight: Tensor,
        teacher_hidden: Tensor,
        *,
        kind: str = "soft",
        heads: Heads | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return ``soft_loss.linear_soft_loss`` against the base at ``teacher_hidden`` [N, d]."""
        layer = self.layer
        return linear_soft_loss(
            hidden,
            weight,
            Teacher(teacher_hidden, layer.weight, layer.bias, layer.scale, layer.softcap),
            labels,
            row_weight,
            kind=kind,
            token_map=None if heads is None else heads.token_map,
            bias=layer.bias if heads is None else heads.output_bias(layer.bias),
            scale=layer.scale,
            softcap=layer.softcap,
            chunk_size=self.chunk_size,
            count_hits=self.count_hits,
            **options,
        )


class LMObjective(nn.Module):
    """Next-token loss of the base model alone; for pretraining.

    Args:
        base: the model, all of it trained.
        chunk_size: rows whose logits exist at one time, 0 for the fastest.
        implementation: of the loss, see ``losses.linear_cross_entropy``.
        count_hits: report top-1 and top-5.
        output: the base's output layer; None finds it.
    """

    num_heads = 0

    def __init__(
        self,
        base: PreTrainedModel,
        *,
        chunk_size: int = 0,
        implementation: str = "fused",
        count_hits: bool = True,
        output: OutputLayer | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.output = output or output_layer(base)
        self.loss = OutputLoss(self.output, chunk_size, implementation, count_hits)
        self.engine_scale = 1.0  # what the engine will divide by: world size times accumulation
        require_grad(base, True)

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the mean loss, and of ``lm/loss|top1|top5``."""
        num_valid = num_valid_of(batch, 0)
        labels = shift_labels(batch["labels"], batch["segment_ids"], 1).flatten()
        hidden = hidden_states(self.base, batch)[0].flatten(0, 1)
        row_weight = per_label([1.0], num_valid).expand_as(labels)
        loss, stats = self.loss(hidden, self.output.weight, labels, row_weight)
        metrics = metrics_of(["lm"], loss, stats, num_valid, self.loss.count_hits)
        return loss * self.engine_scale, metrics


def hidden_states(base: PreTrainedModel, batch: Batch, tap: str = FINAL) -> tuple[Tensor, Tensor]:
    """Return the base's final hidden states [B, T, d] of a batch, and those at ``tap``."""
    return packed_taps(base, batch["input_ids"], batch["position_ids"], tap)


def num_valid_of(batch: Batch, num_heads: int) -> Tensor:
    """Return the batch's ``num_valid`` [K + 1], or its own counts where it carries none.

    Raises:
        ValueError: if they were counted for another number of heads.
    """
    num_valid = batch.get("num_valid")
    if num_valid is None:
        num_valid = count_valid(batch["labels"], batch["segment_ids"], num_heads)
    if num_valid.shape != (num_heads + 1,):
        raise ValueError(
            f"num_valid has shape {tuple(num_valid.shape)}, {num_heads} heads need "
            f"({num_heads + 1},)"
        )
    return num_valid.to(torch.float32)


def per_label(factors: Sequence[float], num_valid: Tensor) -> Tensor:
    """Divide each group's factor by its number of labels; 0 for a group without any."""
    share = num_valid.new_tensor(factors) / num_valid.clamp_min(1.0)
    return torch.where(num_valid > 0, share, 0.0)


def metrics_of(
    names: Sequence[str], loss: Tensor, stats: Tensor, num_valid: Tensor, count_hits: bool
) -> Metrics:
    """Return this batch's share of ``loss`` and of ``<name>/loss|top1|top5`` of every group."""
    shares = stats.detach() / num_valid.clamp_min(1.0)[:, None]
    kinds = ("loss", "top1", "top5") if count_hits else ("loss",)
    metrics = {"loss": loss.detach()}
    for name, row in zip(names, shares.unbind(), strict=True):
        metrics |= {f"{name}/{kind}": value for kind, value in zip(kinds, row, strict=False)}
    return metrics
