"""What the experiments share: settings and records, turns, peaks, and parts that are resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.script_modules import ROOT, load_script

harness: Any = load_script("harness")


@dataclass
class Settings:
    """Settings.

    Attributes:
        heads: how many of them
    """

    checkpoint: str
    heads: tuple[int, ...] = (1, 4)
    kind: Literal["fused", "naive"] = "fused"
    share: float = 0.5
    quick: bool = False
    out: Path | None = None

    def __post_init__(self) -> None:
        if 0 in self.heads:
            raise ValueError("--heads must be positive")


def test_settings_are_read_as_they_are_declared(capsys: pytest.CaptureFixture[str]) -> None:
    """A number taken for a word, or a typo taken for a setting, measures something else."""
    found = harness.parse(Settings, ["--checkpoint", "x", "--heads", "2", "3", "--out", "a.json"])
    assert found == Settings("x", [2, 3], out=Path("a.json"))  # type: ignore[arg-type]
    for wrong in ([], ["--checkpoint=x", "--kind=other"], ["--checkpoint=x", "--heads", "0"]):
        with pytest.raises(SystemExit) as stopped:
            harness.parse(Settings, wrong)
        assert stopped.value.code == 2
    assert "--heads must be positive" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        harness.parse(Settings, ["--help"])
    assert "how many of them" in capsys.readouterr().out


def test_a_figure_stands_beside_machine_and_settings(tmp_path: Path) -> None:
    """A figure without its machine cannot be compared, one with a person's folders is private."""
    path = tmp_path / "new" / "found.json"
    harness.write(path, harness.report(Settings("x", out=path), rows=[1]))
    found = json.loads(path.read_text())
    assert {"date", "torch", "processor", "threads"} <= found["environment"].keys()
    same = {"checkpoint": "x", "heads": [1, 4], "kind": "fused", "share": 0.5, "quick": False}
    assert found["settings"] == same and found["rows"] == [1]
    assert [each.name for each in path.parent.iterdir()] == ["found.json"]
    assert harness.kept(path.with_name("kept.json"), lambda: 3) == 3
    assert harness.kept(path.with_name("kept.json"), lambda: 4) == 3


def test_turns_begin_with_everyone_alike() -> None:
    """Who always comes second runs on a warm cache, and warm-up rounds are no measurement."""
    called: list[str] = []
    ways = {name: lambda name=name: called.append(name) for name in "ab"}
    found = harness.take_turns(ways, 3, warmup=1)
    assert called in (list("abbaabba"), list("baabbaab"))
    assert all(len(found[name][kind]) == 3 for name in "ab" for kind in found["a"])
    assert harness.spread([4.0, 1.0, 2.0, 3.0]) == {"median": 2.5, "q25": 1.75, "q75": 3.25}


def test_peaks_are_of_the_step() -> None:
    """What is built before the step counts, what was freed before it does not."""
    import torch

    def build() -> Any:
        held, _ = torch.zeros(2**18), torch.zeros(2**20).sum()
        return lambda: float((held + 1).sum())

    peak, result = harness.allocator_peak(build)
    assert result == 2**18 and 2**21 <= peak < 2**21 + 2**16
    assert harness.in_fresh_process(harness.training_length, 10, 3)[0] == "steps=10"
    with pytest.raises(SystemExit, match="training_length failed"):
        harness.in_fresh_process(harness.training_length, 10)


def test_what_fails_costs_its_own_row(capsys: pytest.CaptureFixture[str]) -> None:
    """A failed check behind exit code 0, or one that ends all others, on a machine lent once."""

    def fail(error: Exception) -> None:
        raise error

    assert harness.attempt(lambda: 3) == ("ok", 3)
    assert harness.attempt(lambda: fail(harness.NotRun("no GPU"))) == ("not run", "no GPU")
    assert harness.attempt(lambda: fail(AssertionError("off by 1"))) == ("failed", "off by 1")
    assert harness.attempt(lambda: fail(KeyError("x"))) == ("failed", "KeyError: 'x'")
    assert "KeyError" in capsys.readouterr().err


def test_text_shows_every_figure() -> None:
    """A figure that is left out of what is printed is looked up in no file."""
    row = {"arm": "x", "seconds": [3.0, 1.0, 2.0], "none": None, "deep": {"ratio": 1.23456}}
    row |= {"spread": {"median": 2.0, "q25": 1.0, "q75": 3.0}, "rows": [{"n": 1}, {"n": 2}]}
    expected = (
        "arm x, seconds 2, spread 2 (1-3)\ndeep:\n    ratio 1.235\nrows:\n    n 1\nrows:\n    n 2"
    )
    assert harness.describe(row) == expected


Run = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs parts whose commands write the file that they name last, or fail."""

    def run_parts(parts: list[Any], *, resume: bool = True, failing: str = "") -> Any:
        ran: list[str] = []

        def command(words: Sequence[str]) -> int:
            ran.append(words[0])
            if words[0] != failing and words[-1].endswith(".json"):
                (tmp_path / words[-1]).write_text("{}")
            return 3 * (words[0] == failing)

        monkeypatch.setattr(harness, "ROOT", tmp_path)
        monkeypatch.setattr(harness, "run_command", command)
        return harness.run_parts(parts, tmp_path / "parts.json", resume=resume), ran

    return run_parts


def three() -> list[Any]:
    """Return a training and two measurements, the first of which needs it."""
    return [
        harness.Part("train", (("train",),), (), 1),
        harness.Part("one", (("one", "1.json"),), ("1.json",), 1, needs=("train",)),
        harness.Part("two", (("before",), ("two", "2.json")), ("2.json",), 1),
    ]


def test_resuming_runs_what_is_left(tmp_path: Path, run: Run) -> None:
    """Forty minutes of measurements that start from nothing after Ctrl-C are not made again."""
    first = run(three(), resume=False, failing="two")
    assert first == (["two"], ["train", "one", "before", "two"])
    record = json.loads((tmp_path / "parts.json").read_text())
    assert record["two"]["state"].startswith("exit code 3")
    assert run(three()) == ([], ["before", "two"])
    assert len(run(three(), resume=False)[1]) == 4


def test_what_changed_is_measured_again(tmp_path: Path, run: Run) -> None:
    """A figure of other settings, or of a checkpoint since replaced, would be kept for good."""
    (tmp_path / "shipped").mkdir()
    manifest = tmp_path / "shipped" / "manifest.json"
    manifest.write_text("old")
    part = harness.Part("one", (("one", "1.json"),), ("1.json",), 1, reads=("shipped",))
    assert run([part])[1] == ["one"] and run([part])[1] == []
    manifest.write_text("new")
    assert run([part])[1] == ["one"]
    (tmp_path / "1.json").unlink()
    assert run([part])[1] == ["one"]
    other = harness.Part("one", (("one", "more", "1.json"),), ("1.json",), 1, reads=("shipped",))
    assert run([other])[1] == ["one"]


def test_failures_are_not_taken_for_done(tmp_path: Path, run: Run) -> None:
    """A measurement of a model that failed to train is one of an older model."""
    failed, ran = run(three(), failing="train")
    assert failed == ["train", "one"] and "one" not in ran
    silent = [harness.Part("three", (("three",),), ("3.json",), 1)]
    assert run(silent)[0] == ["three"]
    record = json.loads((tmp_path / "parts.json").read_text())
    assert record["three"]["state"] == "3.json was not written"
    with pytest.raises(SystemExit, match="no part is called four; there are train, one, two"):
        harness.chosen(three(), ["four"])


def test_make_bench_measures_what_lies_here() -> None:
    """A part that reads runs/ works for whoever trained, and for nobody with a fresh clone."""
    readme = load_script("bench_readme")
    found = readme.readme_parts()
    assert sum(part.minutes for part in found) < 60
    assert found[0].reads == tuple(f"data/checkpoints/{n}" for n in ("medusa1", "hydra", "draft"))
    for part in found:
        assert all((ROOT / folder / "manifest.json").is_file() for folder in part.reads), part.name
        assert not [word for c in part.commands for word in c if "runs/" in word], part.name
        assert f"benchmarks/readme/{part.name}.json" in part.outputs
    quick = readme.readme_parts("build/bench_quick/readme", quick=True)
    for part in quick:
        assert "repeats=1" in part.commands[0] or part.commands[0][-2:] == ("--repeats", "1")


@pytest.mark.slow
def test_quick_measures_and_renders() -> None:
    """A renamed key of the bench is found after forty minutes otherwise."""
    words = ["scripts/bench_readme.py", "--quick", "--only", "float32", "batches"]
    assert harness.run_command(words) == 0
    page = (ROOT / "build" / "bench_quick" / "README.md").read_text()
    assert "In float32 " in page and "| 1 | plain, one prompt after the other |  |" in page
