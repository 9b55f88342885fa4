"""Two ranks take a step, one with bad gradients, one with a bad loss, and others behind them.

Started by test_distributed.py: ``torchrun --nproc-per-node 2 skipped_steps.py CASE...``; a case is
``STAGE:DTYPE[:offload]``. Weights and DeepSpeed's counters must be those of a run where the two
never happened; either is bad on rank 1 only, and of one micro-batch only.
"""

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from specheads.system import dist
from specheads.training.deepspeed_engine import DeepSpeedEngine
from specheads.training.engine import TorchEngine, param_groups
from specheads.training.loop import gather, run_micro_batches
from tests.toys import NUM_HEADS, ToyBatches, ToyObjective, toy_config

GOOD, BAD, INFINITE = "good", "bad", "infinite"


class Poisoned(ToyObjective):
    """The toy, whose gradients can be made NaN under a finite loss, or its loss infinite alone."""

    poison = GOOD

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics."""
        loss, metrics = super().forward(batch)
        poison, self.poison = self.poison, GOOD  # one micro-batch
        if poison == BAD:
            loss.register_hook(lambda grad: grad * float("nan"))
        return loss + (math.inf if poison == INFINITE else 0.0), metrics


def settings(case: str) -> Any:
    """Return the settings of a case."""
    stage, dtype, *rest = case.split(":")
    zero: dict[str, Any] = {"stage": int(stage)}
    if stage == "3":
        zero["stage3_param_persistence_threshold"] = 0
    if rest:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == "3":
            zero["offload_param"] = {"device": "cpu"}
    cfg = toy_config(
        Path(mkdtemp()),
        deepspeed={"zero_optimization": zero},
        optim__accumulation=4 // dist.world_size(),
        optim__grad_clip=0.05,
    )
    cfg.model.dtype = dtype
    return cfg


def steps(engine: Any, objective: Poisoned, kinds: Iterable[str], world: int) -> list[float]:
    """Take steps; the good ones see the same batches in every run. Return their norms."""
    batches = ToyBatches(rank=dist.rank() if world > 1 else 0, world=world)
    norms = []
    for kind in kinds:
        if kind != GOOD:
            position = batches.state_dict()
        micro, _ = gather(batches, 4 // world, NUM_HEADS, torch.device("cpu"))
        objective.poison = kind if dist.rank() == 1 else GOOD
        _, _, bad_loss, _ = run_micro_batches(engine, micro, lambda: False)
        assert bad_loss == (kind == INFINITE)
        norm = engine.step(0.5)
        assert math.isfinite(norm) == (kind == GOOD), (kind, norm)
        assert not engine.overflowed
        if kind == GOOD:
            norms.append(norm)
        else:
            batches.load_state_dict(position)
    return norms


def run(case: str, kinds: list[str]) -> tuple[dict[str, Tensor], list[float], list[int]]:
    """Return the weights, norms and counters of a run."""
    cfg = settings(case)
    objective = Poisoned()
    groups = param_groups(cfg.optim, heads=(objective, cfg.optim.lr))
    engine = DeepSpeedEngine(objective, groups, cfg)
    norms = steps(engine, objective, kinds, dist.world_size())
    inner = engine.engine
    counters = [inner.global_steps, inner.global_samples, inner.skipped_steps]
    engine.close()
    return {k: v.detach().clone() for k, v in objective.named_parameters()}, norms, counters


def reference() -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights and norms of one process under plain torch."""
    cfg = toy_config(Path(mkdtemp()), optim__accumulation=4, optim__grad_clip=0.05)
    objective = Poisoned()
    engine = TorchEngine(objective, param_groups(cfg.optim, heads=(objective, cfg.optim.lr)), cfg)
    world, counts = dist.world_size(), dist.sum_over_ranks
    dist.sum_over_ranks = lambda values: values  # type: ignore[assignment]
    norms = steps(engine, objective, [GOOD] * 3, 1)
    dist.sum_over_ranks = counts
    assert world == dist.world_size()
    return {k: v.detach() for k, v in objective.named_parameters()}, norms


def half(case: str) -> None:
    """With float16 the first steps overflow, which is no fault, until the scale has come down."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # emulated, and right all the same
    cfg = settings(case)
    cfg.deepspeed["fp16"] = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    objective = Poisoned()
    objective.embed.requires_grad_(False)
    before = {k: v.detach().clone() for k, v in objective.named_parameters()}
    engine = DeepSpeedEngine(
        objective, param_groups(cfg.optim, heads=(objective, cfg.optim.lr)), cfg
    )
    batches, skipped, taken = ToyBatches(rank=dist.rank(), world=2), 0, 0
    first = engine.loss_scale
    for _ in range(24):
        micro, _ = gather(batches, 2, NUM_HEADS, torch.device("cpu"))
        for index, batch in enumerate(micro):
            loss, _ = engine.forward(batch)
            engine.backward(loss, last=index == 1)
        norm = engine.step(1.0)
        assert engine.overflowed == (not math.isfinite(norm)), norm
        skipped, taken = skipped + engine.overflowed, taken + (not engine.overflowed)
    assert skipped and taken and engine.loss_scale < first, (skipped, taken, engine.loss_scale)
    engine.close()
    for name, parameter in objective.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name]) == (name == "embed.weight"), name
        # the masters, not what was rounded to compute with; the frozen one was never rounded
        assert not torch.equal(parameter, parameter.half().float()), name


if __name__ == "__main__":
    expected = None
    for name in sys.argv[1:]:
        if "float16" in name.split(":"):
            half(name)
            if dist.is_main():
                print(name, "ok", flush=True)
            continue
        never, norms, counters = run(name, [GOOD] * 3)
        weights, others, after = run(name, [GOOD, BAD, INFINITE, GOOD, GOOD])
        assert norms == others and counters == after, (name, norms, others, counters, after)
        for key, value in never.items():
            assert torch.equal(value, weights[key]), (name, key)
        if ":float32" in name:
            expected = expected or reference()
            torch.testing.assert_close(norms, expected[1], rtol=1e-5, atol=1e-6)
            for key, value in expected[0].items():
                torch.testing.assert_close(never[key], value, rtol=1e-5, atol=1e-6, msg=key)
        if dist.is_main():
            print(name, "ok", flush=True)
    dist.shutdown()
