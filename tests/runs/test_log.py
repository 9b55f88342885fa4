"""The run directory: one run at a time, nothing lost, nothing written twice."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specheads.config import ConfigError
from specheads.runs.log import RunLog, format_line
from tests.processes import ROOT, Process
from tests.toys import toy_config


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    """Two runs in one directory interleave their metrics and overwrite their checkpoints."""
    code = (
        "import time; from pathlib import Path; from specheads.runs.directory import lock\n"
        f"held = lock(Path({str(tmp_path / 'LOCK')!r}))\n"
        "print('locked', flush=True); time.sleep(600)\n"
    )
    other = Process("-c", code)
    other.wait_for("^locked$")
    with pytest.raises(ConfigError, match=rf"in use by process {other.pid} on"):
        RunLog(toy_config(tmp_path, resume="auto"))
    other.kill()
    with RunLog(toy_config(tmp_path, resume="auto")):  # a killed run's lock does not stay
        assert (tmp_path / "LOCK").exists()
    assert not (tmp_path / "LOCK").exists()


def test_a_used_directory_is_refused_without_resume(tmp_path: Path) -> None:
    """A second run would append to the metrics of the first and replace its export."""
    with RunLog(toy_config(tmp_path)):
        pass
    with pytest.raises(ConfigError, match="holds an earlier run"):
        RunLog(toy_config(tmp_path))
    assert not (tmp_path / "LOCK").exists()
    with RunLog(toy_config(tmp_path, resume="auto", max_steps=3)):
        pass
    assert len(json.loads((tmp_path / "provenance.json").read_text())) == 2


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    """A directory that a dry run marked as used would refuse the real run."""
    with RunLog(toy_config(tmp_path / "run", dry_run=True)):
        pass
    assert not (tmp_path / "run").exists()


def test_a_run_is_never_silent_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes without a line look like a run that hangs, and are killed."""
    monkeypatch.setattr("specheads.runs.log._SILENT", 0.1)
    with RunLog(toy_config(tmp_path, steps=20)) as log:
        log.begin(3)
        assert log.training_seconds() == math.inf
        log.advance()
        assert log.training_seconds() < 20 * 10
        time.sleep(0.5)
        assert "step 4/20, 00:0" in capsys.readouterr().out
        log.doing("measuring trees")
        time.sleep(0.5)
        assert 1 <= capsys.readouterr().out.count("measuring trees, 00:0") <= 5
        log.doing("storing")
        for share in (0.25, 0.5):
            log.doing("storing", share)
            time.sleep(0.3)
        assert re.search(r"storing, 00:0[01], 50%, 00:0[01] left", capsys.readouterr().out)
    time.sleep(0.3)
    assert "measuring" not in capsys.readouterr().out


def test_provenance_says_where_figures_come_from(tmp_path: Path) -> None:
    """Figures without versions, command and commit cannot be checked later."""
    with RunLog(toy_config(tmp_path)):
        pass
    (record,) = json.loads((tmp_path / "provenance.json").read_text())
    assert record["packages"]["torch"]
    assert record["argv"]
    assert record["hardware"]["processors"]
    assert "commit" in record["git"]
    assert "lr: 0.01" in (tmp_path / "config.yaml").read_text()


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    """Steps taken again after a resume would stand in metrics.jsonl twice."""
    with RunLog(toy_config(tmp_path)) as log:
        log.begin(0)
        for step in (2, 4, 6):
            log.metrics(step, {"train/loss": 1.0 / step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "tr')  # a killed run
    with RunLog(toy_config(tmp_path, resume="auto")) as log:
        log.begin(4)
        log.metrics(6, {"train/loss": 0.5})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[-1]["train/loss"] == 0.5


def test_console_lines_are_aligned() -> None:
    """Columns that jump cannot be read while they scroll."""
    values = {
        "train/loss": 2.5,
        "train/head_0/loss": 3.25,
        "train/head_0/top1": 0.123,
        "train/head_0/top5": 0.5,
        "train/grad_norm": 1.0,
        "train/lr/heads": 1e-3,
        "train/tokens_per_second": 9000.0,
        "train/peak_memory": 2.0**30,
    }
    later = {**values, "train/loss": 12.125, "train/head_0/top1": 0.5, "train/grad_norm": 12.5}
    first, second = format_line(5, 300, values), format_line(300, 300, later)
    assert len(first) == len(second)
    assert first.index("head_0") == second.index("head_0")
    assert "12.3%" in first
    assert "top5" not in first


def test_an_evaluation_is_one_short_line() -> None:
    """Thirty figures per evaluation on the console hide the loss between them."""
    values = {
        "eval/accept_length": 2.345678,
        "eval/speedup": 1.5,
        "eval/tree/t0/accept_length": 3.0,
        "eval/tree/t0/head_0/acceptance": 0.5,
        "final/accept_length/t0": 2.5,
        "final/speedup/t0": 1.25,
        "final/accept_length_low/t0": 2.0,
    }
    assert format_line(5, 300, values) == (
        "step   5/300  eval/accept_length 2.346  eval/speedup 1.5  final/accept_length/t0 2.5"
        "  final/speedup/t0 1.25"
    )


def test_output_that_nobody_takes_ends_no_run(tmp_path: Path) -> None:
    """A log file on a full disk, or `| head`, would end a training with a traceback."""
    code = f"""
from pathlib import Path
from specheads.runs.log import RunLog
from tests.processes import ROOT, Process
from tests.toys import toy_config
with RunLog(toy_config(Path({str(tmp_path)!r}))) as log:
    log.begin(0)
    for step in (2, 4):
        log.metrics(step, {{"train/loss": 1.0}})
print("more" * 5000)
"""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=600,
        )
    assert done.returncode == 0
    assert done.stderr == (
        "specheads: standard output is lost (No space left on device); the run goes on, its "
        f"metrics are in {tmp_path / 'metrics.jsonl'}\n"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
