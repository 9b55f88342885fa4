"""A user's own recipe file: the toy of the loop's tests, with the faults that ``TOY`` names.

``TOY=sleep=0.1,nan=1:2,evaluate=30`` waits in every batch, makes the loss of rank 1's third batch
not finite, and evaluates for 30 seconds. Started by test_faults.py as
``python -m specheads.train recipe=.../toy_recipe.py``; prints what the tests wait for.
"""

import os
import time
from typing import Any

import torch
from torch import Tensor

from specheads import dist
from specheads.config import TrainConfig
from specheads.files import whole_folder
from specheads.log import RunLog
from specheads.training.loop import fit
from specheads.training.schedule import param_groups
from specheads.training.state import save_tensors
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
    objective = Faulty(dropout=0.3)
    batches = ToyBatches(rank=dist.rank(), world=dist.world_size())
    with RunLog(cfg) as log:
        steps = fit(
            objective,
            batches,
            cfg,
            groups=param_groups(cfg.optim, heads=(objective, cfg.optim.lr)),
            run=log,
            evaluate=evaluate,
        )
        if not dist.is_main():
            return
        print("measuring", flush=True)
        nap("measure")
        with whole_folder(log.dir / "toy") as folder:
            save_tensors(folder / "model.safetensors", objective.state_dict())
        log.metrics(steps, {"final/steps": float(steps)})
