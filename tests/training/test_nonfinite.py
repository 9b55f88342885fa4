"""Steps that are not finite are left out or stop the run; nothing of them gets into the weights."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specheads.config import InterruptedRunError, RunError, TrainConfig
from specheads.training.checkpoints import checkpoints_of, load_progress
from specheads.training.engine import Objective, TorchEngine, lr_factor, param_groups
from specheads.training.loop import gather
from tests.toys import ToyBatches, ToyObjective, toy_config
from tests.training.test_loop import assert_same, rows_of, train


class Faulty(ToyObjective):
    """The toy, whose loss or gradients are not finite in given batches."""

    def __init__(self, loss: tuple[int, ...] = (), gradient: tuple[int, ...] = ()) -> None:
        super().__init__(dropout=0.3)
        self.bad_loss, self.bad_gradient = loss, gradient

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics."""
        loss, metrics = super().forward(batch)
        number = int(batch["ids"][0].split("-")[1])
        if number in self.bad_gradient:
            loss.register_hook(lambda grad: grad * float("inf"))
        # infinite alone: the gradients of such a loss are finite, and must not get into the weights
        return (loss + float("inf") if number in self.bad_loss else loss), metrics


def lines_of(cfg: TrainConfig) -> list[dict[str, Any]]:
    """Return nonfinite.jsonl."""
    return [json.loads(x) for x in (Path(cfg.run_dir) / "nonfinite.jsonl").read_text().splitlines()]


def by_hand(cfg: TrainConfig, left_out: tuple[int, ...]) -> ToyObjective:
    """Train as ``fit`` does, and simply do not take the steps ``left_out`` (from 0)."""
    objective, batches = ToyObjective(dropout=0.3), ToyBatches()
    engine = TorchEngine(objective, param_groups(cfg.optim, heads=(objective, cfg.optim.lr)), cfg)
    for step in range(cfg.steps):
        micro, _ = gather(
            batches,
            cfg.optim.accumulation,
            cast(Objective, objective).num_heads,
            torch.device("cpu"),
        )
        for batch in micro:
            loss, _ = engine.forward(batch)
            engine.backward(loss, last=batch is micro[-1])
        if step in left_out:
            objective.zero_grad()
        else:
            engine.step(lr_factor(step, 0, cfg.steps, cfg.optim, cfg.steps))
    return objective


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_steps_left_out_are_as_if_never_taken(tmp_path: Path, what: str) -> None:
    """Clipping turns one infinite gradient into NaN everywhere; a zero step still moves AdamW."""
    cfg = toy_config(tmp_path / "run", optim__accumulation=2, log__every=1)
    cfg.optim.skip_nonfinite = 2
    objective, _ = train(cfg, objective=Faulty(**{what: (5, 8)}))
    assert_same(objective, by_hand(cfg, (2, 4)))
    rows = rows_of(cfg)
    assert [row.get("train/skipped", 0) for row in rows] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [row["step"] for row in rows if "train/loss" not in row] == [3, 5]
    assert all("NaN" not in json.dumps(row) and "Infinity" not in json.dumps(row) for row in rows)
    bad, whole = lines_of(cfg), ["record-4-0", "record-4-1", "record-5-0", "record-5-1"]
    assert [(line["step"], line["what"]) for line in bad] == [(3, what), (5, what)]
    named = [name for batch in bad[0]["batches"] for name in batch["ids"]]
    assert named == (whole if what == "gradient" else whole[2:])


def test_the_next_one_stops_with_the_state_before_it(tmp_path: Path) -> None:
    """A run of hours whose last checkpoint is old must not lose them to one bad record."""
    cfg = toy_config(tmp_path / "run")
    cfg.optim.skip_nonfinite = 1
    objective = Faulty(loss=(2, 5))
    with pytest.raises(RunError, match=r"loss of step 6 .* after 1 left out; .*record-5-0"):
        train(cfg, objective=objective)
    assert all(torch.isfinite(p).all() for p in objective.parameters())
    (saved,) = checkpoints_of(tmp_path / "run")
    assert (load_progress(saved).step, load_progress(saved).skipped) == (5, 1)
    assert [line["step"] for line in lines_of(cfg)] == [3, 6]

    # the very same batch comes again, and the count goes on where it was
    again = toy_config(tmp_path / "run", resume="auto")
    again.optim.skip_nonfinite = 1
    with pytest.raises(RunError, match="loss of step 6 .* after 1 left out"):
        train(again, objective=Faulty(loss=(2, 5)))
    again.optim.skip_nonfinite = 2
    resumed, _ = train(again, objective=Faulty(loss=(2, 5)))
    assert [line["step"] for line in lines_of(cfg)] == [3, 6]

    cfg = toy_config(tmp_path / "whole")
    cfg.optim.skip_nonfinite = 2
    whole, _ = train(cfg, objective=Faulty(loss=(2, 5)))
    assert_same(whole, resumed)
    assert rows_of(cfg) == rows_of(again)


def test_the_count_is_of_the_whole_run(tmp_path: Path) -> None:
    """Counted anew in every stage, a run of two would forgive twice as much as it was told."""
    cfg = toy_config(tmp_path / "run")
    cfg.optim.skip_nonfinite = 1
    from specheads.runs.log import RunLog
    from specheads.training.loop import Stage, fit

    objective, batches = Faulty(loss=(1, 5)), ToyBatches()
    with RunLog(cfg) as log, pytest.raises(RunError, match="step 6 .* after 1 left out"):
        for place in (("heads", 0, 3), ("joint", 3, 8)):
            groups = param_groups(cfg.optim, heads=(objective, cfg.optim.lr))
            fit(Stage(objective, batches, groups, *place), cfg, log)


def test_nothing_to_save_before_the_first_step(tmp_path: Path) -> None:
    """A checkpoint of step 0 would make a run that never began one to be resumed."""
    cfg = toy_config(tmp_path / "run")
    with pytest.raises(RunError, match="step 1 is not finite.*record-0-1$"):
        train(cfg, objective=Faulty(gradient=(0,)))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("stop_at", [4, 8])
def test_an_evaluation_cut_short_is_made_up_for(tmp_path: Path, stop_at: int) -> None:
    """Left out, it would miss from the metrics, and from what patience and keep_best count."""

    def run(name: str, *, stop: bool = False, resume: str = "") -> tuple[ToyObjective, TrainConfig]:
        cfg = toy_config(tmp_path / name, evaluate__every=4, log__every=1, resume=resume)

        def evaluate(step: int) -> dict[str, float]:
            if stop and step == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)
                for _ in range(10**9):
                    pass
            objective.eval()
            return {"eval/accept_length": 3.0 - step / 8}

        objective = ToyObjective(dropout=0.3)
        train(cfg, objective=objective, evaluate=evaluate)
        return objective, cfg

    with pytest.raises(InterruptedRunError, match=f"step {stop_at} of 8"):
        run("halves", stop=True)
    (saved,) = checkpoints_of(tmp_path / "halves")
    assert load_progress(saved).unevaluated
    resumed, halves = run("halves", resume="auto")
    whole, cfg = run("whole")
    assert_same(whole, resumed)
    assert rows_of(cfg) == rows_of(halves)
    assert [row["step"] for row in rows_of(halves) if "eval/accept_length" in row] == [4, 8]
