"""The training loop on a toy model: counting, stopping, resuming, refusing to go on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.config import InterruptedRunError, RunError, TrainConfig
from specheads.runs.log import RunLog
from specheads.training.checkpoints import checkpoints_of
from specheads.training.engine import param_groups
from specheads.training.loop import Stage, fit
from tests.toys import ToyBatches, ToyObjective, toy_config


def train(
    cfg: TrainConfig,
    *,
    objective: ToyObjective | None = None,
    batches: ToyBatches | None = None,
    evaluate: Any = None,
    **options: Any,
) -> tuple[ToyObjective, int]:
    """Run ``fit`` and return what it trained and the steps taken."""
    objective = objective or ToyObjective(dropout=0.3)
    batches = batches or ToyBatches()
    groups = param_groups(cfg.optim, heads=(objective, cfg.optim.lr))
    with RunLog(cfg) as log:
        steps = fit(Stage(objective, batches, groups, **options), cfg, log, evaluate)
    return objective, steps


def rows_of(cfg: TrainConfig) -> list[dict[str, float]]:
    """Return metrics.jsonl without what differs from run to run."""
    lines = (Path(cfg.run_dir) / "metrics.jsonl").read_text().splitlines()
    changing = ("train/tokens_per_second", "train/peak_memory")
    return [{k: v for k, v in json.loads(line).items() if k not in changing} for line in lines]


def assert_same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Compare all weights bit by bit."""
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def test_micro_batches_give_the_step_of_one_batch(tmp_path: Path) -> None:
    """A mean per micro-batch would weigh rare labels more; only exact counts give one step."""

    class Joined(ToyBatches):
        def __next__(self) -> dict[str, Any]:
            parts = [super(Joined, self).__next__() for _ in range(4)]
            return {
                k: sum((p[k] for p in parts), [])
                if k == "ids"
                else torch.cat([p[k] for p in parts])
                for k in parts[0]
            }

    one, _ = train(
        toy_config(tmp_path / "one", steps=3), objective=ToyObjective(), batches=Joined()
    )
    four, _ = train(
        toy_config(tmp_path / "four", steps=3, optim__accumulation=4), objective=ToyObjective()
    )
    for (name, x), y in zip(one.state_dict().items(), four.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=name)
    assert four.seen_num_valid[0] == four.seen_num_valid[3] == one.seen_num_valid[0]


@pytest.mark.parametrize("stop_at", [1, 4, 5])
def test_stopped_and_resumed_is_bit_identical(tmp_path: Path, stop_at: int) -> None:
    """Losing optimizer state, RNG or data order resumes without an error, into another model."""
    whole, steps = train(toy_config(tmp_path / "whole"))
    assert steps == 8
    cfg = toy_config(tmp_path / "halves", max_steps=stop_at)
    _, steps = train(cfg)
    assert steps == stop_at
    torch.manual_seed(99)
    resumed, steps = train(toy_config(tmp_path / "halves", resume="auto"))
    assert steps == 8
    assert_same(whole, resumed)
    by_step = {row["step"]: row for row in rows_of(cfg)}
    for row in rows_of(toy_config(tmp_path / "whole")):
        assert by_step[row["step"]] == row


def test_resuming_twice_at_one_step_changes_nothing(tmp_path: Path) -> None:
    """A stop right after a resume must keep the checkpoint it came from."""
    train(toy_config(tmp_path / "run", max_steps=3))
    train(toy_config(tmp_path / "run", max_steps=3, resume="auto"))
    resumed, _ = train(toy_config(tmp_path / "run", resume="auto"))
    whole, _ = train(toy_config(tmp_path / "whole"))
    assert_same(whole, resumed)


@pytest.mark.parametrize("stop_at", [2, 3, 5])
def test_two_stages_resume_in_the_right_one(tmp_path: Path, stop_at: int) -> None:
    """A resume that starts the second stage from unrestored weights only looks a little worse."""

    def both(run_dir: Path, **changes: Any) -> ToyObjective:
        cfg = toy_config(run_dir, **changes)
        objective, batches = ToyObjective(dropout=0.3), ToyBatches()
        with RunLog(cfg) as log:
            for place in (("heads", 0, 3), ("joint", 3, 8)):
                objective.embed.requires_grad_(place[0] == "joint")
                groups = param_groups(cfg.optim, heads=(objective, cfg.optim.lr))
                fit(Stage(objective, batches, groups, *place), cfg, log)
        return objective

    whole = both(tmp_path / "whole")
    both(tmp_path / "halves", max_steps=stop_at)
    assert_same(whole, both(tmp_path / "halves", resume="auto"))


def test_nan_stops_before_the_step_and_names_the_records(tmp_path: Path) -> None:
    """A NaN that reaches the optimizer destroys the weights and every later checkpoint."""

    class Poisoned(ToyObjective):
        def forward(self, batch: dict[str, Any]) -> Any:
            loss, metrics = super().forward(batch)
            return (loss * float("nan") if "record-5-0" in batch["ids"] else loss), metrics

    objective = Poisoned()
    cfg = toy_config(tmp_path / "run", optim__accumulation=2, checkpoint__every=2)
    with pytest.raises(RunError, match=r"step 3 .* record-5-0, record-5-1; step 2"):
        train(cfg, objective=objective)
    assert all(torch.isfinite(p).all() for p in objective.parameters())
    assert [path.name for path in checkpoints_of(tmp_path / "run")] == ["step-0000002"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    """Clusters send SIGTERM and then kill: what was not saved by then is lost."""

    class Signalled(ToyBatches):
        def __next__(self) -> dict[str, Any]:
            if self.position == 2:
                os.kill(os.getpid(), number)
            return super().__next__()

    before = signal.getsignal(number)
    with pytest.raises(InterruptedRunError, match="step 3 of 8"):
        train(toy_config(tmp_path / "run"), batches=Signalled())
    assert signal.getsignal(number) == before
    resumed, _ = train(toy_config(tmp_path / "run", resume="auto"))
    whole, _ = train(toy_config(tmp_path / "whole"))
    assert_same(whole, resumed)


def test_evaluate_is_called_and_logged(tmp_path: Path) -> None:
    """Evaluation must not leave the model in eval mode: dropout would be off from then on."""
    cfg = toy_config(tmp_path / "run", evaluate__every=4)
    seen = []

    def evaluate(step: int) -> dict[str, float]:
        seen.append(step)
        objective.eval()
        return {"eval/accept_length": 2.5}

    objective = ToyObjective(dropout=0.3)
    train(cfg, objective=objective, evaluate=evaluate)
    assert seen == [4, 8]
    assert objective.training
    assert [r["step"] for r in rows_of(cfg) if "eval/accept_length" in r] == [4, 8]
    whole, _ = train(toy_config(tmp_path / "whole"))
    assert_same(whole, objective)


def test_metrics_are_means_over_the_window(tmp_path: Path) -> None:
    """Logging one step out of many hides spikes; logging a sum looks like divergence."""
    every, one = toy_config(tmp_path / "one", log__every=1), toy_config(tmp_path / "two")
    train(every)
    train(one)
    steps = {row["step"]: row["train/loss"] for row in rows_of(every)}
    for row in rows_of(one):
        mean = (steps[row["step"]] + steps[row["step"] - 1]) / 2
        assert row["train/loss"] == pytest.approx(mean, rel=1e-12)
        assert row["train/lr/heads"] > 0
        assert row["train/grad_norm"] > 0
