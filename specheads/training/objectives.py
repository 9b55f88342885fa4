"""What is trained: modules whose forward returns one loss and its metrics.

The loss lives in forward, whole, so that any engine trains it with one backward; a backward per
head is silently wrong under ZeRO. Every mean is over the valid labels of the whole optimizer step,
which the batch carries as ``num_valid``: a micro-batch returns its share, and shares add up.

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
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from specheads.losses import (
    IGNORE,
    check_implementation,
    count_valid,
    linear_cross_entropy,
    shift_labels,
)
from specheads.models.base import OutputLayer, output_layer, packed_hidden
from specheads.models.heads import MedusaHeads

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
        self, hidden: Tensor, weight: Tensor, labels: Tensor, row_weight: Tensor, **groups: Any
    ) -> tuple[Tensor, Tensor]:
        """Return ``losses.linear_cross_entropy`` of ``hidden`` [N, d] under ``weight`` [V, d]."""
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            row_weight,
            bias=self.layer.bias,
            scale=self.layer.scale,
            softcap=self.layer.softcap,
            chunk_size=self.chunk_size,
            count_hits=self.count_hits,
            implementation=self.implementation,
            **groups,
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
        _require_grad(base, True)

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the mean loss, and of ``lm/loss|top1|top5``."""
        num_valid = _num_valid(batch, 0)
        labels = shift_labels(batch["labels"], batch["segment_ids"], 1).flatten()
        hidden = _hidden_states(self.base, batch)
        row_weight = _per_label([1.0], num_valid).expand_as(labels)
        loss, stats = self.loss(hidden, self.output.weight, labels, row_weight)
        metrics = _metrics(["lm"], loss, stats, num_valid, self.loss.count_hits)
        return loss * self.engine_scale, metrics


class MedusaObjective(nn.Module):
    """Loss of Medusa heads, with or without the base model (arXiv:2401.10774, sections 2.2).

    ``train_base=False`` (Medusa-1): sum_i decay^(i+1) L_i; the base, output matrix included, is
    frozen and runs in eval mode without gradients. ``train_base=True`` (Medusa-2):
    L_LM + lambda_0 * lambda_scale * sum_i decay^(i+1) L_i. L_i is the mean cross entropy of
    head i over its own valid labels; a head that has none adds 0.

    Args:
        base: the base model.
        heads: its heads.
        train_base: whether the base is trained too.
        decay: weight of each head's loss relative to the head before.
        lambda_0: weight of the heads' losses beside the base's; unused if the base is frozen.
        chunk_size: rows whose logits exist at one time, 0 for the fastest.
        implementation: of the loss, see ``losses.linear_cross_entropy``.
        count_hits: report top-1 and top-5.
        output: the base's output layer; None finds it.

    Attributes:
        lambda_scale: further factor of lambda_0, for a schedule; the loop sets it.
        engine_scale: what the engine divides the loss by; the engine sets it.

    Raises:
        ValueError: if the heads were built for another hidden size or vocabulary.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        heads: MedusaHeads,
        *,
        train_base: bool,
        decay: float = 0.8,
        lambda_0: float = 0.2,
        chunk_size: int = 0,
        implementation: str = "fused",
        count_hits: bool = True,
        output: OutputLayer | None = None,
    ) -> None:
        super().__init__()
        self.base, self.heads = base, heads
        self.output = output or output_layer(base)
        expected, found = tuple(self.output.weight.shape), (heads.vocab_size, heads.hidden_size)
        if expected != found:
            raise ValueError(f"the heads are for an output matrix {found}, the base has {expected}")
        self.loss = OutputLoss(self.output, chunk_size, implementation, count_hits)
        self.num_heads, self.train_base = heads.num_heads, train_base
        self.decay, self.lambda_0 = decay, lambda_0
        self.lambda_scale = self.engine_scale = 1.0
        _require_grad(base, train_base)
        self.train(self.training)

    def train(self, mode: bool = True) -> MedusaObjective:
        """Set the mode of heads and base; a frozen base stays in eval mode."""
        super().train(mode)
        if not self.train_base:
            self.base.eval()
        return self

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the loss, and of each metric.

        Metrics: ``loss``, ``head_{i}/loss|top1|top5``, and ``lm/...`` where the base is trained.
        """
        factors = [self.decay ** (i + 1) for i in range(self.num_heads)]
        if self.train_base:
            factors = [1.0, *(self.lambda_0 * self.lambda_scale * factor for factor in factors)]
        num_groups = len(factors)  # the heads, behind the language model where it is trained
        num_valid = _num_valid(batch, self.num_heads)[-num_groups:]
        per_label = _per_label(factors, num_valid)
        offsets = range(self.num_heads + 2 - num_groups, self.num_heads + 2)
        labels = torch.stack(
            [shift_labels(batch["labels"], batch["segment_ids"], o).flatten() for o in offsets]
        )

        with torch.set_grad_enabled(self.train_base and torch.is_grad_enabled()):
            hidden = _hidden_states(self.base, batch)
        used = (labels != IGNORE).any(0).nonzero().squeeze(1)
        if used.numel() < hidden.shape[0]:  # blocks need not run where nothing is learned
            hidden, labels = hidden.index_select(0, used), labels.index_select(1, used)

        together = self.heads.lm_head == "shared" and self.train_base
        loss, stats = (self._one_matrix if together else self._one_by_one)(
            hidden, labels, per_label
        )
        names = [f"head_{i}" for i in range(self.num_heads)]
        names = ["lm", *names] if self.train_base else names
        metrics = _metrics(names, loss, stats, num_valid, self.loss.count_hits)
        return loss * self.engine_scale, metrics

    def _one_matrix(
        self, hidden: Tensor, labels: Tensor, per_label: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All groups in one call, so that one gradient buffer of the shared matrix exists."""
        num_groups, num_rows = labels.shape
        rows = torch.cat([hidden, *(self._features(i, hidden) for i in range(self.num_heads))])
        groups = torch.arange(num_groups, device=hidden.device).repeat_interleave(num_rows)
        return self.loss(
            rows,
            self.output.weight,
            labels.flatten(),
            per_label.repeat_interleave(num_rows),
            groups=groups,
            num_groups=num_groups,
        )

    def _one_by_one(
        self, hidden: Tensor, labels: Tensor, per_label: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Each group by itself: its matrix is its own, or frozen and has no gradient to share."""
        shared = self.output.weight
        parts: list[tuple[Tensor, Tensor]] = []
        for i in range(-1 if self.train_base else 0, self.num_heads):
            group = len(parts)
            features = hidden if i < 0 else self._features(i, hidden)
            weight = shared if i < 0 else self.heads.output_weight(i, shared)
            row_weight = per_label[group].expand_as(labels[group])
            parts.append(self.loss(features, weight, labels[group], row_weight))
            del features  # not held while the next head's logits exist
        losses, stats = zip(*parts, strict=True)
        return torch.stack(losses).sum(), torch.cat(stats)

    def _features(self, i: int, hidden: Tensor) -> Tensor:
        """Head i's blocks on ``hidden`` [M, d]; what they keep for backward is made again there."""
        head = self.heads.heads[i]
        if not torch.is_grad_enabled() or self.heads.num_layers == 0:
            return head(hidden)
        return checkpoint(head, hidden, use_reentrant=False, preserve_rng_state=False)


def _require_grad(base: nn.Module, value: bool) -> None:
    for parameter in base.parameters():  # the output matrix is among them
        if parameter.is_floating_point():  # quantised weights cannot be asked for a gradient
            parameter.requires_grad_(value)


def _hidden_states(base: PreTrainedModel, batch: Batch) -> Tensor:
    return packed_hidden(base, batch["input_ids"], batch["position_ids"]).flatten(0, 1)


def _num_valid(batch: Batch, num_heads: int) -> Tensor:
    num_valid = batch.get("num_valid")
    if num_valid is None:
        num_valid = count_valid(batch["labels"], batch["segment_ids"], num_heads)
    if num_valid.shape != (num_heads + 1,):
        raise ValueError(
            f"num_valid has shape {tuple(num_valid.shape)}, {num_heads} heads need "
            f"({num_heads + 1},)"
        )
    return num_valid.to(torch.float32)


def _per_label(factors: Sequence[float], num_valid: Tensor) -> Tensor:
    """Divide each group's factor by its number of labels; 0 for a group without any."""
    share = num_valid.new_tensor(factors) / num_valid.clamp_min(1.0)
    return torch.where(num_valid > 0, share, 0.0)


def _metrics(
    names: Sequence[str], loss: Tensor, stats: Tensor, num_valid: Tensor, count_hits: bool
) -> Metrics:
    shares = stats.detach() / num_valid.clamp_min(1.0)[:, None]
    kinds = ("loss", "top1", "top5") if count_hits else ("loss",)
    metrics = {"loss": loss.detach()}
    for name, row in zip(names, shares.unbind(), strict=True):
        metrics |= {f"{name}/{kind}": value for kind, value in zip(kinds, row, strict=False)}
    return metrics
