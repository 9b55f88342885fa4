"""What a draft model learns: the data's tokens, or the distribution of its base model.

Distillation for speculative decoding (arXiv:2310.08461): the teacher is the base that the draft is
going to draft for, and what counts in the end is the acceptance, sum_x min(base, draft).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.config.training import DraftConfig, LossConfig
from specheads.losses.cross_entropy import Output, check_implementation
from specheads.losses.distill import SoftLoss, StoredTeacher, Teacher, linear_soft_loss
from specheads.models.adapters import require_grad
from specheads.models.output import OutputLayer, output_layer
from specheads.training.objectives import (
    Batch,
    Metrics,
    hidden_states,
    next_labels,
    next_token_loss,
)

LABELS = "labels"


class DraftObjective(nn.Module):
    """Loss of a draft model, with a frozen base as its teacher, stored or run beside it.

    A batch is that of ``objectives.py``. It may carry ``teacher_ids`` [B, T, k], the base's k
    most likely next tokens at every position, best first, and ``teacher_log_probs`` [B, T, k],
    their log-probabilities at temperature 1 (``data/teacher_cache.py``): the base is then not run,
    and the distance is taken over these k tokens and one bucket for all others.

    Where the output matrices have unequal sizes, padded ones say, both distributions are taken
    over the first ``vocab_size`` tokens and renormalised there.

    Args:
        draft: the draft model, all of it trained.
        base: the base model; frozen, in eval mode, run without gradients. None if every batch
            carries a stored teacher, or the loss needs none (``labels``, which with a base still
            reports the acceptance).
        draft_config: ``loss``: ``labels``, the cross entropy of the data's tokens, or a distance
            from the base's distribution, ``forward_kl`` or a kind of
            :class:`specheads.losses.distill.SoftLoss`; ``jsd_beta``. The defaults if None.
        loss: ``temperature``, ``top_k`` and ``lk_eta`` of the distance; how losses are computed.
        vocab_size: tokens to compare; None: all, of two models with equally many.
        output: the draft's output layer; None finds it.
        base_output: the base's; None finds it.

    Attributes:
        engine_scale: what the engine divides the loss by; the engine sets it.

    Raises:
        ValueError: if the output matrices have unequal sizes and no ``vocab_size`` is given, or one
            of them has fewer tokens; for a loss that is infinite with its top_k.
    """

    num_heads = 0

    def __init__(
        self,
        draft: PreTrainedModel,
        base: PreTrainedModel | None = None,
        draft_config: DraftConfig | None = None,
        loss: LossConfig | None = None,
        *,
        vocab_size: int | None = None,
        output: OutputLayer | None = None,
        base_output: OutputLayer | None = None,
    ) -> None:
        super().__init__()
        wanted, self.loss = draft_config or DraftConfig(), loss or LossConfig()
        self.draft, self.base, self.kind = draft, base, wanted.loss
        self.output = output or output_layer(draft)
        self.base_output = base_output or (None if base is None else output_layer(base))
        self.vocab_size = _compared(self.output, self.base_output, vocab_size)
        self.soft_loss = SoftLoss("tv", compare=True)  # for labels: a teacher is compared with only
        if wanted.loss != LABELS:
            self.soft_loss = SoftLoss(
                "soft" if wanted.loss == "forward_kl" else wanted.loss,
                self.loss.top_k,
                self.loss.temperature,
                self.loss.lk_eta,
                wanted.jsd_beta,
                compare=True,
            )
        check_implementation(self.loss.implementation, self.output.softcap)
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
        teacher = self._teacher(batch)  # first, or the base's activations meet the draft's graph
        hidden = hidden_states(self.draft, batch)[0].flatten(0, 1)
        sums: dict[str, Tensor] = {}
        if self.kind == LABELS:
            loss, stats, num_valid = next_token_loss(hidden, self.output.parts(), batch, self.loss)
            sums = {"draft/loss": stats[0, 0], "lm/loss": stats[0, 0], "lm/top1": stats[0, 1]}
            if teacher is not None:  # in a pass of its own, which forms no gradient
                with torch.no_grad():
                    _, measured, _ = self._soft(hidden, batch, teacher)
                sums[_alpha_name(teacher)] = measured[0, 4]
        else:
            if teacher is None:
                raise ValueError(
                    f"loss {self.kind} needs a base model, or teacher_ids and teacher_log_probs"
                    " in the batch"
                )
            loss, stats, num_valid = self._soft(hidden, batch, teacher)
            names = ("draft/loss", "lm/top1", None, "lm/loss", _alpha_name(teacher))
            sums = {name: s for name, s in zip(names, stats[0], strict=True) if name}
        share = 1.0 / num_valid[0].clamp_min(1.0)
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
        assert self.base_output is not None
        hidden = hidden_states(self.base, batch)[0].flatten(0, 1)
        return Teacher(hidden, _first(self.base_output, self.vocab_size))

    def _soft(
        self, hidden: Tensor, batch: Batch, teacher: Teacher | StoredTeacher
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, its statistics [1, 5], see ``linear_soft_loss``, and num_valid [1]."""
        labels, row_weight, num_valid = next_labels(batch)
        output = _first(self.output, self.vocab_size)
        found = linear_soft_loss(
            hidden, output, teacher, labels, row_weight, self.soft_loss, self.loss.chunk_size
        )
        return *found, num_valid


def _first(layer: OutputLayer, size: int) -> Output:
    """Return the output of the first tokens; the matrix itself where these are all: no copy."""
    output = layer.parts()
    if output.weight.shape[0] == size:
        return output
    bias = None if output.bias is None else output.bias[:size]
    return replace(output, weight=output.weight[:size], bias=bias)


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
