"""A user's own recipe file: the toy of the loop's tests, with the faults that ``TOY`` names.

``TOY=sleep=0.1,nan=1:2,evaluate=30`` waits in every batch, makes the loss of rank 1's third batch
not finite, and evaluates for 30 seconds. Started by test_faults.py as
``--config-dir ... +recipe=toy`` of specheads.train; prints what the tests wait for. Several ranks
add their gradients up by themselves, unless ``TOY`` says ``deepspeed``.
"""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as group
from torch import Tensor

from specheads.config import TrainConfig
from specheads.models.manifest import save_tensors
from specheads.runs.log import RunLog
from specheads.system import dist, heartbeat
from specheads.system.files import whole_folder
from specheads.training import loop
from specheads.training.engine import TorchEngine, param_groups
from specheads.training.loop import Stage, fit
from tests.toys import ToyBatches, ToyObjective

WANTED = dict(part.partition("=")[::2] for part in os.environ.get("TOY", "").split(",") if part)


def nap(name: str) -> None:
    """Sleep as long as ``TOY`` says, in parts, as a program that computes is interrupted."""
    end = time.monotonic() + float(WANTED.get(name, 0))
    while time.monotonic() < end:
        time.sleep(0.05)


class Faulty(ToyObjective):
    """The toy, whose loss can be made not finite."""

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics."""
        nap("sleep")
        loss, metrics = super().forward(batch)
        for spot in WANTED.get("nan", "").split("+"):
            if spot and batch["ids"][0] == f"record-{spot}-0":
                loss = loss * float("nan")
        return loss, metrics


class AddingEngine(TorchEngine):
    """Plain torch on several ranks, whose start takes a fraction of DeepSpeed's."""

    def __init__(self, objective: Any, groups: Any, cfg: TrainConfig) -> None:
        super().__init__(objective, groups, cfg)
        if not group.is_initialized():
            group.init_process_group("gloo", timeout=timedelta(seconds=cfg.dist_timeout + 30))
            heartbeat.start(cfg.dist_timeout)

    def step(self, factor: float) -> float:
        """Add the gradients of all ranks up, and step."""
        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad = dist.sum_over_ranks(parameter.grad)
        return super().step(factor)

    def save(self, folder: Path) -> None:
        """Write what all ranks have alike, once."""
        if dist.is_main():
            super().save(folder)


def evaluate(step: int) -> dict[str, float]:
    """Say that it began, and take a while."""
    print(f"evaluating after {step}", flush=True)
    nap("evaluate")
    if WANTED.get("broken") == str(dist.rank()):
        raise OSError("the prompts are gone")
    return {"eval/accept_length": 1.0 + step % 3}


def run(cfg: TrainConfig) -> None:
    """Train the toy and write its weights to ``toy/``."""
    torch.manual_seed(cfg.seed)
    print(f"loading on rank {dist.rank()} of {dist.world_size()}: {os.getpid()}", flush=True)
    nap("load")
    if dist.world_size() > 1 and "deepspeed" not in WANTED:
        loop.open_engine = AddingEngine
    objective = Faulty(dropout=0.3)
    batches = ToyBatches(rank=dist.rank(), world=dist.world_size())
    with RunLog(cfg) as log:
        groups = param_groups(cfg.optim, heads=(objective, cfg.optim.lr))
        steps = fit(Stage(objective, batches, groups), cfg, log, evaluate)
        if not dist.is_main():
            return
        print("measuring", flush=True)
        nap("measure")
        with whole_folder(log.dir / "toy") as folder:
            save_tensors(folder / "model.safetensors", objective.state_dict())
        log.metrics(steps, {"final/steps": float(steps)})
