"""Two ranks under torchrun, and what happens to them: signals, failures, deaths, stand-still."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specheads.training.checkpoints import checkpoints_of
from tests.end_to_end.test_distributed import missing
from tests.processes import Process

RECIPE = Path(__file__).with_name("toy_recipe.py")


class Started(Process):
    """A running training command, which prints its errors among the rest."""

    def pid_of(self, rank: int) -> int:
        """Return the process id that a rank printed."""
        return int(self.wait_for(rf"loading on rank {rank} of \d: (\d+)")[1])

    def end(self, seconds: float = 600) -> int:
        """Wait for the end; return the exit code."""
        code = self.wait(seconds)
        assert "Traceback" not in self.stdout, self.stdout
        return code

    @property
    def lines(self) -> list[str]:
        """The lines that are for the user."""
        return [line for line in self.stdout.splitlines() if line.startswith("specheads: ")]


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the toy's training, on as many ranks as asked for."""
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "toy.yaml").write_text(
        f"# @package _global_\nrecipe: {RECIPE}\nname: toy\n"
    )
    started: list[Started] = []

    def run(run_dir: str, *settings: str, toy: str = "", ranks: int = 1) -> Started:
        launcher = ["-m", "specheads.torchrun", "--standalone", f"--nproc-per-node={ranks}"]
        command = [
            *(launcher if ranks > 1 else []), "-m", "specheads.train",
            "--config-dir", str(tmp_path / "conf"), "+recipe=toy", "data=jsonl", "data.path=none",
            f"hydra.run.dir={tmp_path / run_dir}", "log.wandb=disabled", "log.every=2",
            "optim.warmup_steps=2", *(["deepspeed=zero2"] if ranks > 1 else []), *settings,
        ]  # fmt: skip
        settings_of = {"TOY": toy, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}
        log = tmp_path / f"log-{len(started)}"
        started.append(Started(*command, env=settings_of, log=log))
        return started[-1]

    yield run
    for each in started:
        for pid in re.findall(r"loading on rank \d of \d: (\d+)", each.stdout):
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        each.kill()


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return what the toy's run exported."""
    return load_file(run_dir / "toy" / "model.safetensors")


def assert_equal(one: Path, two: Path) -> None:
    """Compare the exports of two runs to 1e-6."""
    expected = weights(one)
    for name, tensor in weights(two).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps of the training rows in metrics.jsonl."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    return [row["step"] for row in rows if "train/loss" in row]


@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_while_loading_ends_at_once(start: Start, number: signal.Signals) -> None:
    """There is nothing to save: minutes of loading would use up what the scheduler grants."""
    run = start("run", toy="load=9999")
    os.kill(run.pid_of(0), number)
    assert run.end() == 75
    assert [line for line in run.lines if "nothing was lost" in line] == run.lines[-1:]


@pytest.mark.slow
def test_a_signal_while_measuring_loses_nothing(start: Start, tmp_path: Path) -> None:
    """The last checkpoint is there: the run goes on with measuring, and exports."""
    run = start("run", "steps=4", toy="measure=9999")
    run.wait_for("^measuring")
    run.send_signal(signal.SIGTERM)
    assert run.end() == 75
    assert not (tmp_path / "run" / "toy").exists()
    assert start("run", "steps=4", "resume=auto").end() == 0
    assert weights(tmp_path / "run")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "engine"), [("launcher", ""), ("rank 1", ""), ("launcher", "deepspeed")]
)
def test_sigterm_to_two_ranks_saves_and_goes_on(
    start: Start, tmp_path: Path, target: str, engine: str
) -> None:
    """A signal that one rank alone acts on leaves the other in a collective; both must save."""
    if engine and missing():
        pytest.skip(f"DeepSpeed needs {missing()}")
    run = start("run", "steps=30", toy=f"sleep=0.2,{engine}", ranks=2)
    run.wait_for("^step +4/")
    begin = time.monotonic()
    os.kill(run.pid if target == "launcher" else run.pid_of(1), signal.SIGTERM)
    assert run.end(30) == 75
    assert time.monotonic() - begin < 20
    assert sum("stopped after step" in line for line in run.lines) == 1
    (saved,) = checkpoints_of(tmp_path / "run")
    assert start("run", "steps=30", "resume=auto", toy=engine, ranks=2).end() == 0
    assert start("whole", "steps=30", toy=engine, ranks=2).end() == 0
    assert_equal(tmp_path / "whole", tmp_path / "run")
    assert int(saved.name.removeprefix("step-")) < 30


@pytest.mark.distributed
@pytest.mark.slow
def test_a_signal_in_an_evaluation_of_two_ranks(start: Start, tmp_path: Path) -> None:
    """Evaluating to the end would take longer than the launcher waits before it kills."""
    settings = ("steps=6", "evaluate.every=4")
    run = start("run", *settings, toy="evaluate=100", ranks=2)
    run.wait_for("^evaluating after 4")
    run.send_signal(signal.SIGTERM)
    assert run.end(30) == 75
    assert start("run", *settings, "resume=auto", ranks=2).end() == 0
    assert start("whole", *settings, ranks=2).end() == 0
    assert_equal(tmp_path / "whole", tmp_path / "run")
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole") == [2, 4, 6]


@pytest.mark.distributed
@pytest.mark.slow
def test_a_bad_record_of_another_rank_is_named(start: Start, tmp_path: Path) -> None:
    """The error is printed by rank 0, and the record that it needs to name was on rank 1."""
    run = start("run", "steps=6", toy="nan=5", ranks=2)  # rank 1's third batch
    assert run.end() == 1
    (line,) = run.lines
    assert "loss of step 3 is not finite" in line and "record-5-0, record-5-1;" in line
    (row,) = map(json.loads, (tmp_path / "run" / "nonfinite.jsonl").read_text().splitlines())
    assert row["batches"] == [{"rank": 1, "micro_batch": 0, "ids": ["record-5-0", "record-5-1"]}]
    skipping = ("steps=6", "optim.skip_nonfinite=1")
    assert start("run", *skipping, "resume=auto", toy="nan=5", ranks=2).end() == 0
    assert start("whole", *skipping, toy="nan=5", ranks=2).end() == 0
    assert_equal(tmp_path / "whole", tmp_path / "run")


@pytest.mark.distributed
@pytest.mark.slow
def test_a_killed_rank_stops_the_other(start: Start) -> None:
    """What the survivor prints is all that a user has to find the machine with."""
    run = start("run", "steps=1000", "dist_timeout=30", toy="sleep=0.1", ranks=2)
    run.wait_for("^step +4/")
    os.kill(run.pid_of(1), signal.SIGKILL)
    assert run.end() == 1
    assert any("rank 1 was ended by SIGKILL" in line for line in run.lines), run.stdout


@pytest.mark.distributed
@pytest.mark.slow
def test_a_stopped_rank_stops_the_other(start: Start) -> None:
    """Its connections stay open, so that only the heartbeat knows."""
    run = start("run", "steps=1000", "dist_timeout=5", toy="sleep=0.1", ranks=2)
    run.wait_for("^step +4/")
    os.kill(run.pid_of(1), signal.SIGSTOP)
    assert run.end() == 1  # torchrun then waits for the one that is stopped
    late = "rank 0 stops, as rank 1 has not answered for 5 s"
    assert any(late in line for line in run.lines), run.stdout


@pytest.mark.distributed
@pytest.mark.slow
def test_an_evaluation_that_fails_on_one_rank_ends_both(start: Start) -> None:
    """The other one waits for its verdict."""
    settings = ("steps=6", "evaluate.every=2", "dist_timeout=20")
    run = start("run", *settings, toy="broken=1", ranks=2)
    assert run.wait() == 1
    assert "OSError: the prompts are gone" in run.stdout


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_wait_for_rank_0_longer_than_for_a_step(start: Start, tmp_path: Path) -> None:
    """Rank 0 measures and exports alone; the others must not take that for its death."""
    run = start("run", "steps=4", "dist_timeout=5", toy="measure=40", ranks=2)
    assert run.end() == 0
    assert weights(tmp_path / "run")
    assert not run.lines
