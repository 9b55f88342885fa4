"""How far a tuned base model has moved: held-out loss beside the original's, and the KL.

Tuning changes the base in place, and a second copy of a large model may not fit. So before
training the original's final hidden states at the held-out labels are kept, with a copy of its
output layer: all that its predictions there need.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.losses.cross_entropy import IGNORE, kl_divergence, shift_labels
from specheads.models.output import OutputLayer, packed_hidden

Batch = dict[str, Any]


@dataclass(frozen=True)
class Original:
    """The original base at the held-out labels: per batch hidden [N, d], and the output layer."""

    hidden: list[Tensor]
    output: OutputLayer


@torch.no_grad()
def _hidden_at_labels(base: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the hidden states [N, d] that predict a learned token, and those tokens [N]."""
    device = base.device
    labels = shift_labels(batch["labels"], batch["segment_ids"], 1)
    hidden = packed_hidden(base, batch["input_ids"].to(device), batch["position_ids"].to(device))
    chosen = (labels != IGNORE).to(device)
    return hidden[chosen], labels.to(device)[chosen]


def remember_original(
    base: PreTrainedModel, output: OutputLayer, batches: Sequence[Batch]
) -> Original:
    """Keep what the original base predicts on ``batches``; call it before training."""
    training = base.training
    base.eval()
    hidden = [_hidden_at_labels(base, batch)[0].cpu() for batch in batches]
    base.train(training)
    return Original(hidden, copy.deepcopy(output))


@torch.no_grad()
def heldout_loss(
    base: PreTrainedModel,
    output: OutputLayer,
    batches: Sequence[Batch],
    original: Original | None = None,
    *,
    chunk_size: int = 1024,
) -> dict[str, float]:
    """Return the mean loss over the held-out labels, in nats per token.

    Args:
        base: the model as it is now.
        output: its output layer.
        batches: packed held-out rows (``data/pack.py``).
        original: from ``remember_original`` on the same batches; adds ``original_loss`` and
            ``kl``, the mean KL(original || now).
        chunk_size: tokens whose logits exist at one time.

    Raises:
        ValueError: if no held-out token has a label.
    """
    training = base.training
    base.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    num_tokens = 0
    for index, batch in enumerate(batches):
        hidden, labels = _hidden_at_labels(base, batch)
        before = original.hidden[index].to(hidden.device) if original else hidden
        for start in range(0, len(labels), chunk_size):
            part = slice(start, start + chunk_size)
            logits = output(hidden[part]).float()
            sums[0] += F.cross_entropy(logits, labels[part], reduction="sum").cpu()
            if original:
                expected = original.output(before[part]).float()
                sums[1] += F.cross_entropy(expected, labels[part], reduction="sum").cpu()
                sums[2] += kl_divergence(expected, logits).double().sum().cpu()
        num_tokens += len(labels)
    base.train(training)
    if not num_tokens:
        raise ValueError(f"batches hold no learned token in {len(batches)} batches")
    loss, original_loss, kl = (sums / num_tokens).tolist()
    found = {"loss": loss, "num_tokens": float(num_tokens)}
    return found | ({"original_loss": original_loss, "kl": kl} if original else {})
