"""What a draft model learns: the data's tokens, or the distribution of its base model.

Distillation for speculative decoding (arXiv:2310.08461): the teacher is the base that the draft is
going to draft for, and what counts in the end is the acceptance, sum_x min(base, draft).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.losses.cross_entropy import shift_labels
from specheads.losses.distill import (
    StoredTeacher,
    Teacher,
    check_options,
    linear_soft_loss,
)
from specheads.models.adapters import require_grad
from specheads.models.output import OutputLayer, output_layer
from specheads.training.objectives import (
    Batch,
    Metrics,
    OutputLoss,
    hidden_states,
    num_valid_of,
    per_label,
)

LABELS = "labels"
# names of draft.loss -> those of specheads.losses.distill
SOFT_KINDS = {
    "forward_kl": "soft",
    "reverse_kl": "reverse_kl",
    "jsd": "jsd",
    "tv": "tv",
    "lk_alpha": "lk_alpha",
    "lk_lambda": "lk_lambda",
}


class DraftObjective(nn.Module):
    """Loss of a draft model, with a frozen base as its teacher, stored or run beside it.

    A batch is that of ``output_loss.py``. It may carry ``teacher_ids`` [B, T, k], the base's k
    most likely next tokens at every position, best first, and ``teacher_log_probs`` [B, T, k],
    their log-probabilities at temperature 1 (``data/top_logits.py``): the base is then not run,
    and the distance is taken over these k tokens and one bucket for all others.

    Where the output matrices have unequal sizes, padded ones say, both distributions are taken
    over the first ``vocab_size`` tokens and renormalised there.

    Args:
        draft: the draft model, all of it trained.
        base: the base model; frozen, in eval mode, run without gradients. None if every batch
            carries a stored teacher, or the loss needs none (``labels``, which with a base still
            reports the acceptance).
        loss: ``labels``, the cross entropy of the data's tokens, or a distance from the base's
            distribution: ``forward_kl``, ``reverse_kl``, ``jsd``, ``tv``, ``lk_alpha``,
            ``lk_lambda``, see :func:`specheads.losses.distill.linear_soft_loss`.
        jsd_beta: of ``jsd``: weight of the base in the mixture.
        top_k: learn the base's k most likely tokens only; 0: all.
        temperature: of the base's distribution in the loss.
        eta: of ``lk_lambda``.
        chunk_size: rows whose logits exist at one time, 0 for the fastest.
        implementation: of the loss of labels, see ``losses.linear_cross_entropy``.
        count_hits: report ``lm/top1``.
        vocab_size: tokens to compare; None: all, of two models with equally many.
        output: the draft's output layer; None finds it.
        base_output: the base's; None finds it.

    Attributes:
        engine_scale: what the engine divides the loss by; the engine sets it.

    Raises:
        ValueError: if the output matrices have unequal sizes and no ``vocab_size`` is given, or one
            of them has fewer tokens; for an unknown loss or numbers out of range.
    """

    num_heads = 0

    def __init__(
        self,
        draft: PreTrainedModel,
        base: PreTrainedModel | None = None,
        *,
        loss: str = "forward_kl",
        jsd_beta: float = 0.5,
        top_k: int = 0,
        temperature: float = 1.0,
        eta: float = 3.0,
        chunk_size: int = 0,
        implementation: str = "fused",
        count_hits: bool = True,
        vocab_size: int | None = None,
        output: OutputLayer | None = None,
        base_output: OutputLayer | None = None,
    ) -> None:
        super().__init__()
        if loss not in (LABELS, *SOFT_KINDS):
            known = ", ".join((LABELS, *SOFT_KINDS))
            raise ValueError(f"loss must be one of {known}, got {loss!r}")
        self.draft, self.base, self.kind = draft, base, loss
        self.output = output or output_layer(draft)
        self.base_output = base_output or (None if base is None else output_layer(base))
        self.vocab_size = _compared(self.output, self.base_output, vocab_size)
        self.options: dict[str, Any] = {
            "kind": SOFT_KINDS.get(loss, "tv"),
            "top_k": top_k,
            "temperature": temperature,
            "eta": eta,
            "jsd_beta": jsd_beta,
        }
        check_options(**self.options)
        if loss == LABELS:  # its teacher is only compared with
            self.options |= {"top_k": 0, "temperature": 1.0}
        self.chunk_size, self.count_hits = chunk_size, count_hits
        self.loss = OutputLoss(self.output, chunk_size, implementation, count_hits)
        self.engine_scale = 1.0
        require_grad(draft, True)
        if base is not None:
            require_grad(base, False)
        self.train(self.training)

    def train(self, mode: bool = True) -> DraftObjective:
        """Set the mode of the draft model; the base stays in eval mode."""
        super().train(mode)
        if self.base is not None:
            self.base.eval()
        return self

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the mean loss, and of each metric.

        Metrics: ``loss``; ``lm/loss``, the cross entropy of the labels, and ``lm/top1``;
        ``draft/loss``, that of ``loss=``; ``draft/alpha``, the mean over the learned positions of
        sum_x min(base, draft) at temperature 1, over all tokens (arXiv:2211.17192). With a stored
        teacher only its k tokens are summed: ``draft/alpha_top``, a lower bound of it.

        Raises:
            ValueError: if the loss needs a teacher, and there is neither a base nor a stored one;
                or what is stored cannot give the distribution that is asked for.
        """
        num_valid = num_valid_of(batch, self.num_heads)
        labels = shift_labels(batch["labels"], batch["segment_ids"], 1).flatten()
        row_weight = per_label([1.0], num_valid).expand_as(labels)
        teacher = self._teacher(batch)  # first, or the base's activations meet the draft's graph
        hidden = hidden_states(self.draft, batch)[0].flatten(0, 1)
        share = 1.0 / num_valid[0].clamp_min(1.0)
        sums: dict[str, Tensor] = {}
        if self.kind == LABELS:
            loss, stats = self.loss(hidden, self.output.weight, labels, row_weight)
            sums = {"draft/loss": stats[0, 0], "lm/loss": stats[0, 0], "lm/top1": stats[0, 1]}
            if teacher is not None:  # in a pass of its own, which forms no gradient
                with torch.no_grad():
                    measured = self._soft(hidden, labels, row_weight, teacher)[1]
                sums[_alpha_name(teacher)] = measured[0, 4]
        else:
            if teacher is None:
                raise ValueError(
                    f"loss {self.kind} needs a base model, or teacher_ids and teacher_log_probs"
                    " in the batch"
                )
            loss, stats = self._soft(hidden, labels, row_weight, teacher)
            names = ("draft/loss", "lm/top1", None, "lm/loss", _alpha_name(teacher))
            sums = {name: s for name, s in zip(names, stats[0], strict=True) if name}
        if not self.count_hits:
            del sums["lm/top1"]
        metrics = {"loss": loss.detach()} | {name: s * share for name, s in sums.items()}
        return loss * self.engine_scale, metrics

    @torch.no_grad()
    def _teacher(self, batch: Batch) -> Teacher | StoredTeacher | None:
        """Return the teacher of all N = B * T positions, where there is one."""
        if "teacher_ids" in batch:
            ids, log_probs = batch["teacher_ids"], batch["teacher_log_probs"]
            return StoredTeacher(ids.flatten(0, 1), log_probs.flatten(0, 1))
        if self.base is None:
            return None
        layer, size = self.base_output, self.vocab_size
        assert layer is not None
        hidden = hidden_states(self.base, batch)[0].flatten(0, 1)
        bias = None if layer.bias is None else _first(layer.bias, size)
        return Teacher(hidden, _first(layer.weight, size), bias, layer.scale, layer.softcap)

    def _soft(
        self, hidden: Tensor, labels: Tensor, row_weight: Tensor, teacher: Teacher | StoredTeacher
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and its statistics [1, 5], see ``linear_soft_loss``."""
        layer, size = self.output, self.vocab_size
        return linear_soft_loss(
            hidden,
            _first(layer.weight, size),
            teacher,
            labels,
            row_weight,
            bias=None if layer.bias is None else _first(layer.bias, size),
            scale=layer.scale,
            softcap=layer.softcap,
            chunk_size=self.chunk_size,
            count_hits=self.count_hits,
            compare=True,
            **self.options,
        )


def _first(tensor: Tensor, size: int) -> Tensor:
    """Return the first rows; the tensor itself where these are all, which costs no copy."""
    return tensor if tensor.shape[0] == size else tensor[:size]


def _alpha_name(teacher: Teacher | StoredTeacher) -> str:
    return "draft/alpha_top" if isinstance(teacher, StoredTeacher) else "draft/alpha"


def _compared(ours: OutputLayer, theirs: OutputLayer | None, vocab_size: int | None) -> int:
    """Return how many tokens two output layers are compared over."""
    draft = ours.weight.shape[0]
    base = draft if theirs is None else theirs.weight.shape[0]
    if vocab_size is None and base != draft:
        raise ValueError(
            f"the base model has {base} outputs, the draft model {draft}: vocab_size is missing"
        )
    size = draft if vocab_size is None else vocab_size
    if not 0 < size <= min(base, draft):
        raise ValueError(
            f"vocab_size is {size}, the base model has {base} outputs, the draft model {draft}"
        )
    return size
