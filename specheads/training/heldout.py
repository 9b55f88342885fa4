"""Figures over packed held-out rows: of heads, of a draft model, and of how far a base has moved.

Tuning changes the base in place, and a second copy of a large model may not fit. So before
training the original's final hidden states at the held-out labels are kept, with a copy of its
output layer: all that its predictions there need.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.data.pack import Batch, on_device
from specheads.losses.cross_entropy import IGNORE, count_valid, linear_cross_entropy, shift_labels
from specheads.losses.distill import SoftLoss, Teacher, linear_soft_loss
from specheads.models.forward import undisturbed
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer, packed_hidden
from specheads.models.sharded import runnable
from specheads.training.objectives import DraftObjective, HeadsObjective

Rows = Sequence[Batch]  # packed held-out rows (``data/pack.py``)


@dataclass(frozen=True)
class Original:
    """The original base at the held-out labels: per batch hidden [N, d], and the output layer."""

    hidden: list[Tensor]
    output: OutputLayer


@torch.no_grad()
def _hidden_at_labels(base: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the hidden states [N, d] that predict a learned token, and those tokens [N]."""
    batch = on_device(batch, base.device)
    labels = shift_labels(batch["labels"], batch["segment_ids"], 1)
    with undisturbed(base):
        hidden = packed_hidden(base, batch["input_ids"], batch["position_ids"])
    return hidden[labels != IGNORE], labels[labels != IGNORE]


def remember_original(base: PreTrainedModel, output: OutputLayer, batches: Rows) -> Original:
    """Keep what the original base predicts on ``batches``; call it before training."""
    with runnable(base):
        hidden = [_hidden_at_labels(base, batch)[0].cpu() for batch in batches]
    return Original(hidden, copy.deepcopy(output))


def _num_valid(batches: Rows, num_heads: int) -> Tensor:
    """Return the numbers of labels [num_heads + 1] of all batches together.

    Raises:
        ConfigError: if there is none.
    """
    found = torch.zeros(num_heads + 1, dtype=torch.long)
    for batch in batches:
        found += count_valid(batch["labels"], batch["segment_ids"], num_heads)
    if not found.any():
        raise ConfigError(f"no held-out token is learned, in {len(batches)} batches of them")
    return found


@torch.no_grad()
def heldout_loss(
    base: PreTrainedModel, output: OutputLayer, batches: Rows, original: Original | None = None
) -> dict[str, float]:
    """Return the mean loss over the held-out labels, in nats per token.

    Args:
        base: the model as it is now.
        output: its output layer.
        batches: packed held-out rows (``data/pack.py``).
        original: from ``remember_original`` on the same batches; adds ``original_loss`` and
            ``kl``, the mean KL(original || now).

    Raises:
        ConfigError: if no held-out token has a label.
    """
    num_tokens, total = int(_num_valid(batches, 0)), Counter[str]()
    for index, batch in enumerate(batches):
        hidden, labels = _hidden_at_labels(base, batch)
        rows = labels, torch.ones_like(labels, dtype=torch.float32)
        found = {"loss": linear_cross_entropy(hidden, output.parts(), *rows)}
        if original:
            teacher = Teacher(original.hidden[index].to(hidden.device), original.output.parts())
            found |= {
                "original_loss": linear_cross_entropy(teacher.hidden, teacher.output, *rows),
                "kl": linear_soft_loss(hidden, output.parts(), teacher, *rows, SoftLoss("soft")),
            }
        total.update({name: float(stats[0, 0]) for name, (_, stats) in found.items()})
    means = {name: value / num_tokens for name, value in total.items()}
    return {"loss": means["loss"], "num_tokens": float(num_tokens), **means}


@torch.no_grad()
def _means(objective: HeadsObjective | DraftObjective, batches: Rows) -> dict[str, float]:
    """Return the metrics of an objective over held-out rows, each a mean over its own labels."""
    # with the labels of all batches in it a batch returns its share of the mean, and shares add up
    num_valid, total = _num_valid(batches, objective.num_heads), Counter[str]()
    with undisturbed(objective):
        for batch in batches:
            # of a base that is spread over devices the heads lie at the end
            device = list(objective.parameters())[-1].device
            placed = on_device({**batch, "num_valid": num_valid}, device)
            _, metrics = objective(placed)
            total.update({name: float(value) for name, value in metrics.items()})
    return dict(total)


def heads_accuracy(
    base: PreTrainedModel, heads: Heads, output: OutputLayer, batches: Rows
) -> dict[str, float]:
    """Return ``head_{i}/loss|top1|top5`` over held-out rows, each a mean over its own labels.

    The loss is cross entropy with the data's tokens, whatever the heads were trained with.

    Args:
        base: the base model as it is exported; not run where the batches carry ``hidden``.
        heads: its heads.
        output: its output layer.
        batches: packed held-out rows (``data/pack.py``).
    """
    objective = HeadsObjective(base, heads, train_base=False, output=output).eval()
    found = _means(objective, batches)
    return {name: value for name, value in found.items() if name.startswith("head_")}


def heldout_agreement(objective: DraftObjective, batches: Rows) -> dict[str, float]:
    """Return the draft model's mean figures over held-out rows.

    Args:
        objective: with the base model.
        batches: packed held-out rows (``data/pack.py``).

    Returns:
        ``loss`` and ``top1``, cross entropy and hits of the labels; ``alpha``, the mean over the
        labels of sum_x min(base, draft) at temperature 1; ``distance``, the trained loss.
    """
    found = _means(objective, batches)
    names = {"loss": "lm/loss", "top1": "lm/top1", "alpha": "draft/alpha", "distance": "draft/loss"}
    return {name: found[key] for name, key in names.items()}
