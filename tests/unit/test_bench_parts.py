"""Measurements in parts: what is done is kept, what changed is not, and failures are said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import ROOT, load_script

parts: Any = load_script("bench_parts")


class Runner:
    """Writes the file that a command names last, or fails."""

    def __init__(self, root: Path, failing: str = "") -> None:
        self.root, self.failing = root, failing
        self.ran: list[str] = []

    def __call__(self, command: Sequence[str]) -> int:
        """Stand in for a process."""
        self.ran.append(command[0])
        if command[0] == self.failing:
            return 3
        if command[-1].endswith(".json"):
            (self.root / command[-1]).write_text("{}")
        return 0


def three() -> list[Any]:
    """Return a training and two measurements, the first of which needs it."""
    return [
        parts.Part("train", (("train",),), (), 1),
        parts.Part("one", (("one", "1.json"),), ("1.json",), 1, needs=("train",)),
        parts.Part("two", (("before",), ("two", "2.json")), ("2.json",), 1),
    ]


def test_resuming_runs_what_is_left(tmp_path: Path) -> None:
    """Forty minutes of measurements that start from nothing after Ctrl-C are not made again."""
    record = tmp_path / "parts.json"
    first = Runner(tmp_path, failing="two")
    assert parts.run_parts(three(), record, resume=False, run=first, root=tmp_path) == ["two"]
    assert first.ran == ["train", "one", "before", "two"]
    assert json.loads(record.read_text())["two"]["state"].startswith("exit code 3")
    again = Runner(tmp_path)
    assert parts.run_parts(three(), record, resume=True, run=again, root=tmp_path) == []
    assert again.ran == ["before", "two"]
    whole = Runner(tmp_path)
    parts.run_parts(three(), record, resume=False, run=whole, root=tmp_path)
    assert len(whole.ran) == 4


def test_what_changed_is_measured_again(tmp_path: Path) -> None:
    """A figure of other settings, or of a checkpoint since replaced, would be kept for good."""
    (tmp_path / "shipped").mkdir()
    manifest = tmp_path / "shipped" / "manifest.json"
    manifest.write_text("old")
    part = parts.Part("one", (("one", "1.json"),), ("1.json",), 1, reads=("shipped",))
    record = tmp_path / "parts.json"
    parts.run_parts([part], record, resume=True, run=Runner(tmp_path), root=tmp_path)

    def ran(asked: Any) -> list[str]:
        runner = Runner(tmp_path)
        parts.run_parts([asked], record, resume=True, run=runner, root=tmp_path)
        return runner.ran

    assert ran(part) == []
    manifest.write_text("new")
    assert ran(part) == ["one"]
    (tmp_path / "1.json").unlink()
    assert ran(part) == ["one"]
    other = parts.Part("one", (("one", "more", "1.json"),), ("1.json",), 1, reads=("shipped",))
    assert ran(other) == ["one"]


def test_failures_are_not_taken_for_done(tmp_path: Path) -> None:
    """A measurement of a model that failed to train is one of an older model."""
    record = tmp_path / "parts.json"
    runner = Runner(tmp_path, failing="train")
    failed = parts.run_parts(three(), record, resume=True, run=runner, root=tmp_path)
    assert failed == ["train", "one"] and "one" not in runner.ran
    silent = [parts.Part("three", (("three",),), ("3.json",), 1)]
    assert parts.run_parts(silent, record, resume=True, run=runner, root=tmp_path) == ["three"]
    assert json.loads(record.read_text())["three"]["state"] == "3.json was not written"
    with pytest.raises(SystemExit, match="no part is called four; there are train, one, two"):
        parts.chosen(three(), ["four"])


def test_make_bench_measures_what_lies_here() -> None:
    """A part that reads runs/ works for whoever trained, and for nobody with a fresh clone."""
    found = load_script("bench_readme").readme_parts()
    assert sum(part.minutes for part in found) < 60
    for part in found:
        assert all((ROOT / folder / "manifest.json").is_file() for folder in part.reads), part.name
        named = [w for c in part.commands for w in c if "data/checkpoints/" in w]
        assert all(any(folder in word for folder in part.reads) for word in named), part.name
        assert not [w for c in part.commands for w in c if "runs/" in w], part.name
        assert f"benchmarks/readme/{part.name}.json" in part.outputs


@pytest.mark.slow
def test_quick_measures_and_renders() -> None:
    """A renamed key of the bench is found after forty minutes otherwise."""
    script = ROOT / "scripts" / "bench_readme.py"
    command = [sys.executable, str(script), "--quick", "--only", "float32", "batches"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "build" / "bench_quick" / "README.md").read_text()
    assert "In float32 " in page and "| 1 | plain, one prompt after the other |  |" in page
