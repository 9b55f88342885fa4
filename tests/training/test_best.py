"""Which evaluation was the best, its weights, and when to stop waiting for a better one."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specheads.config import ConfigError, TrainConfig
from specheads.runs.log import RunLog
from specheads.training import loop
from specheads.training.best import chosen
from specheads.training.checkpoints import checkpoints_of
from specheads.training.engine import TorchEngine, param_groups
from specheads.training.loop import Stage, fit
from tests.toys import ToyBatches, ToyObjective, toy_config
from tests.training.test_loop import assert_same, rows_of

KEY = "eval/accept_length"
LENGTHS = {2: 1.5, 4: 3.0, 6: 2.0, 8: 2.5}


class Evaluated:
    """A run whose evaluations find given accept lengths, and which remembers its weights."""

    def __init__(self, lengths: Mapping[int, float] = LENGTHS) -> None:
        self.lengths = lengths
        self.objective = ToyObjective(dropout=0.3)
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def evaluate(self, step: int) -> dict[str, float]:
        """Find the accept length of ``step``, and disturb whatever an evaluation could disturb."""
        self.weights[step] = {k: v.clone() for k, v in self.objective.state_dict().items()}
        self.objective.eval()
        torch.rand(3), random.random(), np.random.rand()
        return {KEY: self.lengths[step]}

    def fit(self, cfg: TrainConfig, **options: Any) -> int:
        """Train."""
        groups = param_groups(cfg.optim, heads=(self.objective, cfg.optim.lr))
        with RunLog(cfg) as log:
            stage = Stage(self.objective, ToyBatches(), groups, **options)
            return fit(stage, cfg, log, self.evaluate)

    def assert_weights_of(self, step: int) -> None:
        """Compare bit by bit with what was evaluated at ``step``."""
        for name, tensor in self.objective.state_dict().items():
            assert torch.equal(tensor, self.weights[step][name]), name


def best_folders(run_dir: Path) -> list[str]:
    """Return the names of the kept weights."""
    return sorted(path.name for path in (run_dir / "best").glob("*step*"))


def test_the_best_weights_come_back(tmp_path: Path) -> None:
    """Exporting the last weights throws away what the evaluations were paid for."""
    run = Evaluated()
    assert run.fit(toy_config(tmp_path, evaluate__every=2)) == 8
    run.assert_weights_of(4)
    figures = chosen(tmp_path)
    assert figures is not None and figures["step"] == 4 and figures["metrics"][KEY] == 3.0
    assert best_folders(tmp_path) == ["step-0000004"]
    rows = [row for row in rows_of(toy_config(tmp_path)) if KEY in row]
    assert [row["eval/best/step"] for row in rows] == [2, 4, 4, 4]


def test_of_equal_evaluations_the_last_counts(tmp_path: Path) -> None:
    """Heads whose guesses are never accepted yet would be exported as they were at first."""
    run = Evaluated(dict.fromkeys((2, 4, 6, 8), 1.0))
    run.fit(toy_config(tmp_path, evaluate__every=2))
    run.assert_weights_of(8)


def test_the_last_step_takes_part(tmp_path: Path) -> None:
    """Where the steps are no multiple of evaluate.every, the last weights were never compared."""
    run = Evaluated({3: 1.0, 6: 2.0, 8: 3.0})
    run.fit(toy_config(tmp_path, evaluate__every=3))
    assert sorted(run.weights) == [3, 6, 8]
    run.assert_weights_of(8)


@pytest.mark.parametrize("keep", [False, True])
def test_evaluation_changes_no_training_number(tmp_path: Path, keep: bool) -> None:
    """A generator that evaluation moves on gives other dropout, and runs that do not compare."""
    plain = Evaluated()
    plain.fit(toy_config(tmp_path / "plain"))
    run = Evaluated()
    cfg = toy_config(tmp_path / "run", evaluate__every=2, evaluate__keep_best=keep)
    run.fit(cfg)
    last = run.objective if not keep else ToyObjective()
    if keep:
        last.load_state_dict(run.weights[8])
    assert_same(plain.objective, last)
    rows = [row for row in rows_of(cfg) if "train/loss" in row]
    assert rows == rows_of(toy_config(tmp_path / "plain"))
    assert (tmp_path / "run" / "best").exists() == keep


@pytest.mark.parametrize("stop_at", [0, 2, 3, 4, 5, 6])
def test_patience_ends_the_run_and_survives_a_resume(tmp_path: Path, stop_at: int) -> None:
    """A counter that starts anew with every resume never ends a run on a short queue."""
    settings = {"evaluate__every": 2, "evaluate__patience": 1, "steps": 20}
    if stop_at:
        Evaluated().fit(toy_config(tmp_path, max_steps=stop_at, **settings))
    run = Evaluated()
    cfg = toy_config(tmp_path, resume="auto" if stop_at else "", **settings)
    assert run.fit(cfg) == 6
    first = Evaluated()
    assert first.fit(toy_config(tmp_path / "whole", **settings)) == 6
    assert_same(first.objective, run.objective)
    stops = [row["step"] for row in rows_of(cfg) if row.get("eval/best/stopped")]
    assert stops == [6]
    assert [row["step"] for row in rows_of(cfg) if "train/loss" in row][-1] == 6
    again = Evaluated()  # a run that has stopped stays stopped
    assert again.fit(toy_config(tmp_path, resume="auto", **settings)) == 6
    assert not again.weights
    assert_same(first.objective, again.objective)


def test_weights_that_a_checkpoint_calls_best_are_kept(tmp_path: Path) -> None:
    """A run that goes back to a checkpoint would find the best weights overwritten by later ones.

    Here the later ones come from a future that the resumed run does not have.
    """
    lengths = {2: 2.0, 4: 1.0, 6: 3.0, 8: 1.0}
    settings = {"evaluate__every": 2, "checkpoint__every": 2, "checkpoint__keep": 3}
    Evaluated(lengths).fit(toy_config(tmp_path, **settings))
    kept = checkpoints_of(tmp_path)
    assert [path.name for path in kept] == ["step-0000004", "step-0000006", "step-0000008"]
    assert best_folders(tmp_path) == ["step-0000002", "step-0000006"]
    (tmp_path / "best" / ".step-0000003.tmp").mkdir()  # of a killed run
    for path in kept[1:]:
        shutil.rmtree(path)
    run = Evaluated(lengths)
    run.fit(toy_config(tmp_path, resume="auto", max_steps=5, **settings))
    reference = Evaluated(lengths)
    reference.fit(toy_config(tmp_path / "short", steps=8, max_steps=2, evaluate__every=2))
    assert_same(run.objective, reference.objective)
    assert best_folders(tmp_path) == ["step-0000002"]


def test_only_the_last_stage_goes_back(tmp_path: Path) -> None:
    """The best of an earlier stage had another base: its accept length compares with nothing."""
    cfg = toy_config(tmp_path, evaluate__every=1)
    run = Evaluated({1: 9.0, 2: 8.0, 3: 7.0, 4: 1.0, 5: 3.0, 6: 2.0, 7: 2.0, 8: 2.0})
    for stage, first, last in (("heads", 0, 3), ("joint", 3, 8)):
        options: dict[str, Any] = {"name": stage, "first_step": first, "last_step": last}
        if stage == "joint":
            cfg = toy_config(tmp_path, evaluate__every=1, resume="auto")
            run.assert_weights_of(3)
        run.fit(cfg, **options)
    run.assert_weights_of(5)
    figures = chosen(tmp_path)
    assert figures is not None and (figures["stage"], figures["step"]) == ("joint", 5)


@pytest.mark.parametrize("stop_at", [3, 5, 7])
def test_a_stage_that_ends_early_is_followed_by_the_next(tmp_path: Path, stop_at: int) -> None:
    """A resume that trains the ended stage to its planned end continues another run."""
    lengths = {1: 2.0, 2: 3.0, 3: 1.0, 4: 9.0, **dict.fromkeys(range(5, 9), 4.0)}

    def both(run_dir: Path, **changes: Any) -> Evaluated:
        settings = {"evaluate__every": 1, "evaluate__patience": 1, "checkpoint__every": 1}
        cfg = toy_config(run_dir, **settings, **changes)
        run, batches = Evaluated(lengths), ToyBatches()
        with RunLog(cfg) as log:
            for place in (("heads", 0, 4), ("joint", 4, 8)):
                groups = param_groups(cfg.optim, heads=(run.objective, cfg.optim.lr))
                fit(Stage(run.objective, batches, groups, *place), cfg, log, run.evaluate)
        return run

    whole = both(tmp_path / "whole")
    assert sorted(whole.weights) == [1, 2, 3, 5, 6]
    both(tmp_path / "halves", max_steps=stop_at)
    assert_same(whole.objective, both(tmp_path / "halves", resume="auto").objective)


def test_engines_that_take_the_groups_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed puts flat tensors into the groups; by them nothing would be kept."""

    def open_engine(objective: Any, groups: list[dict[str, Any]], cfg: TrainConfig) -> TorchEngine:
        engine = TorchEngine(objective, [dict(group) for group in groups], cfg)
        for group in groups:
            group.update(initial_lr=group["lr"], params=[torch.cat([torch.zeros(3)])])
        return engine

    monkeypatch.setattr(loop, "open_engine", open_engine)
    run = Evaluated()
    run.fit(toy_config(tmp_path, evaluate__every=2))
    run.assert_weights_of(4)


def test_what_cannot_be_done_is_one_line(tmp_path: Path) -> None:
    """Silence would export the last weights, or never stop."""

    class Gone(Evaluated):
        def evaluate(self, step: int) -> dict[str, float]:
            if step == 8:
                shutil.rmtree(tmp_path / "gone" / "best")
            return super().evaluate(step)

    with pytest.raises(ConfigError, match=r"step-0000004 is gone"):
        Gone().fit(toy_config(tmp_path / "gone", evaluate__every=2))

    class Lossy(Evaluated):
        def evaluate(self, step: int) -> dict[str, float]:
            return {"heldout/loss": 1.0}

    with pytest.raises(ConfigError, match=r"patience=2 needs accept lengths, which recipe toy"):
        Lossy().fit(toy_config(tmp_path / "lossy", evaluate__every=2, evaluate__patience=2))
    with pytest.raises(ConfigError, match=r"evaluate.every must be 0 with deepspeed=zero3"):
        toy_config(tmp_path, evaluate__every=2, deepspeed={"zero_optimization": {"stage": 3}})


def test_the_kept_weights_are_safetensors_and_json(tmp_path: Path) -> None:
    """A pickle would run code when somebody else's best weights are looked at."""
    Evaluated().fit(toy_config(tmp_path, evaluate__every=2))
    folder = tmp_path / "best" / "step-0000004"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.json", "manifest.json", "model.safetensors",
    ]  # fmt: skip
    assert json.loads((folder / "best.json").read_text())["metrics"][KEY] == 3.0


def test_the_best_weights_go_along_into_another_directory(tmp_path: Path) -> None:
    """Without them a run that goes on elsewhere trains to its end and then cannot export."""
    Evaluated().fit(toy_config(tmp_path / "a", evaluate__every=2, max_steps=6))
    (checkpoint,) = checkpoints_of(tmp_path / "a")
    again = Evaluated()
    again.fit(toy_config(tmp_path / "b", evaluate__every=2, resume=str(checkpoint)))
    whole = Evaluated()
    whole.fit(toy_config(tmp_path / "whole", evaluate__every=2))
    assert chosen(tmp_path / "b") == chosen(tmp_path / "whole")
    assert_same(again.objective, whole.objective)
    shutil.rmtree(tmp_path / "a" / "best")
    with pytest.raises(ConfigError, match="step-0000004 is gone, and with it the weights"):
        Evaluated().fit(toy_config(tmp_path / "c", evaluate__every=2, resume=str(checkpoint)))


def test_altered_best_weights_are_named(tmp_path: Path) -> None:
    """They replace what was trained: garbage in them is exported."""
    Evaluated().fit(toy_config(tmp_path, evaluate__every=2, max_steps=6))
    file = tmp_path / "best" / "step-0000004" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="model.safetensors was changed after it was saved"):
        Evaluated().fit(toy_config(tmp_path, evaluate__every=2, resume="auto"))
