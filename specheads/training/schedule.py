"""Learning rates, the weight of the heads' loss, and which parameters belong to which group.

All are pure functions of the step: nothing here has state that a resume could lose.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from specheads.config import LossConfig, OptimConfig


def lr_factor(step: int, first_step: int, last_step: int, optim: OptimConfig, steps: int) -> float:
    """Return what the learning rates are multiplied with in optimizer step ``step`` (from 0).

    Warm-up restarts with every stage; the decay spans the whole run.

    Args:
        step: the step about to be taken, ``first_step <= step < last_step``.
        first_step: first step of this stage.
        last_step: end of this stage.
        optim: names the schedule.
        steps: optimizer steps of the whole run.
    """
    warmup_steps = min(optim.warmup_steps, (last_step - first_step) // 2)
    warmup = min(1.0, (step - first_step + 1) / (warmup_steps + 1))
    if optim.schedule == "cosine":
        return warmup * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    if optim.schedule == "wsd":
        decay_steps = optim.decay_fraction * steps
        return warmup * min(1.0, (steps - step) / max(decay_steps, 1.0))
    return warmup


def lambda_scale(step: int, first_step: int, last_step: int, loss: LossConfig) -> float:
    """Return the factor of lambda_0 in optimizer step ``step``, by the stage's progress.

    1, the progress, or ``sin(pi/2 * progress)``, where the progress is complete after the share
    ``loss.lambda_ramp`` of the stage. arXiv:2401.10774, section 2.2.2, lets the weight rise. With
    ``step`` it is 1 until then, and what makes lambda_0 ``loss.lambda_end`` from then on, as
    DeepSeek-V3's falls from 0.3 to 0.1 (arXiv:2412.19437, section 4.2).
    """
    if loss.lambda_schedule == "constant":
        return 1.0
    if loss.lambda_schedule == "step":
        early = step - first_step < (last_step - first_step) * loss.lambda_ramp
        return 1.0 if early else loss.lambda_end / loss.lambda_0
    done = (step - first_step + 1) / ((last_step - first_step) * loss.lambda_ramp)
    progress = min(1.0, done)
    return progress if loss.lambda_schedule == "linear" else math.sin(math.pi / 2 * progress)


def _no_hidden_matrix(module: nn.Module) -> set[int]:
    """Ids of parameters that Muon must not touch: embeddings, output matrices, not 2-D."""
    skipped = {id(p) for p in module.parameters() if p.ndim != 2}
    for name, child in module.named_modules():
        # an output matrix in two parts is one still, and so is a Markov correction; orthogonal
        # steps of LoRA's factors are none of their product
        last = name.rsplit(".", 1)[-1]
        if isinstance(child, nn.Embedding) or last in ("lm_head", "markov", "lora_A", "lora_B"):
            skipped |= {id(p) for p in child.parameters()}
    return skipped


def param_groups(optim: OptimConfig, **parts: tuple[nn.Module, float]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: one per part, weights and biases alike.

    With ``optim.name == "muon"`` each part's hidden matrices form a group of their own
    (``<part>_muon``).

    Args:
        optim: the optimizer's settings.
        **parts: name -> (module, learning rate), e.g. ``heads=(heads, optim.lr)``.
    """
    groups: list[dict[str, Any]] = []
    for name, (module, lr) in parts.items():
        trained = [p for p in module.parameters() if p.requires_grad]
        skipped = _no_hidden_matrix(module) if optim.name == "muon" else {id(p) for p in trained}
        for suffix, chosen in (
            ("", [p for p in trained if id(p) in skipped]),
            ("_muon", [p for p in trained if id(p) not in skipped]),
        ):
            if chosen:
                rate = lr * optim.muon_ratio if suffix else lr
                groups.append({"name": name + suffix, "params": chosen, "lr": rate})
    return groups
