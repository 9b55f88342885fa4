"""A few quick faults of scripts/chaos.py, and losses that it must not miss."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_distributed import missing
from tests.script_modules import load_script

chaos: Any = load_script("chaos")
chaos_runs: Any = load_script("chaos_runs")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, reads /proc")


def lose_row(lab: Any) -> Any:
    """Lose a row of the metrics."""
    lab.start("max_steps=16").ends(0)
    path = lab.run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:]))
    return lab.runs[-1], lab.goes_on()


def lose_state(lab: Any) -> Any:
    """Go on with another optimizer's state than was saved."""
    lab.start("max_steps=16").ends(0)
    newest = max((lab.run_dir / "checkpoints").glob("step-*"))
    older = newest.with_name(f"step-{chaos.SAVED_EVERY:07d}")
    state = newest / "optimizer.safetensors"
    state.write_bytes((older / "optimizer.safetensors").read_bytes())
    manifest = newest / "manifest.json"
    listed = json.loads(manifest.read_text())
    theirs = json.loads((older / "manifest.json").read_text())
    listed["files"][state.name] = theirs["files"][state.name]
    manifest.write_text(json.dumps(listed))
    return lab.runs[-1], lab.goes_on()


def say_nothing(lab: Any) -> Any:
    """End with a code that was not promised."""
    return lab.start("optim.lr=-1").ends(75), ""


def test_quick_faults_lose_nothing_and_losses_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A chaos that cannot fail prints a table of ok whatever the runs lost."""
    losses = {"lose a row": lose_row, "lose state": lose_state, "say nothing": say_nothing}
    for name, fault in losses.items():
        monkeypatch.setitem(chaos.FAULTS, name, fault)
    quick = ["inside a save", "checkpoint altered", "data: empty"]
    out = tmp_path / "chaos.json"
    arguments = ["--jobs", "2", "--keep", str(tmp_path / "runs"), "--json", str(out)]
    assert chaos.main([*arguments, "--only", *quick, *losses]) == 1
    rows = {row["fault"]: row for row in json.loads(out.read_text())["rows"]}
    seen = [rows.pop(name) for name in list(rows) if name not in losses]
    assert [row["verdict"] for row in seen] == ["ok"] * 3, seen
    assert [row["code"] for row in seen] == [-9, 0, 2]
    assert all(row["lost"].startswith("nothing") for row in seen)
    assert [row["verdict"] for row in rows.values()] == ["failed"] * 3
    reasons = "\n".join(row["lost"] for row in rows.values())
    assert "of 39 steps, not" in reasons and "off by" in reasons
    assert "exit code 2, not 75" in reasons
    assert "3 ok, 3 failed, 0 not run" in capsys.readouterr().out
    # nothing is left running
    below = chaos_runs.descendants(os.getpid())[1:]
    commands = [Path(f"/proc/{pid}/cmdline") for pid in below]
    assert not any(b"chaos" in path.read_bytes() for path in commands if path.exists())


def test_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt name that runs nothing looks like a fault that lost nothing."""
    with pytest.raises(SystemExit) as stopped:
        chaos.main(["--only", "meteorite"])
    assert stopped.value.code == 2
    assert "no fault is named like meteorite" in capsys.readouterr().err


WITHOUT = pytest.mark.skipif(
    bool(missing()), reason=f"DeepSpeed cannot compile without {missing()}"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks,steps", [(1, 40), pytest.param(2, 8, marks=[pytest.mark.distributed, WITHOUT])]
)
def test_three_kills(tmp_path: Path, ranks: int, steps: int) -> None:
    """What is saved half, or forgotten, shows only when nothing has had the time to clean up."""
    report = tmp_path / "kills.json"
    arguments = ["--kills", "3", "--ranks", str(ranks), "--steps", str(steps)]
    keep = ["--json", str(report), "--keep", str(tmp_path / "runs")]
    assert chaos.main([*arguments, *keep]) == 0
    found = json.loads(report.read_text())
    assert [kill["moment"] for kill in found["kills"]] == ["save", "step", "start"]
    assert found["kills"][0]["inside_save"] and not found["differences"]
