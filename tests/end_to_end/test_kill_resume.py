"""A few kills of scripts/kill_resume.py; the script itself makes twenty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.test_distributed import missing
from tests.scripts import load_script


@pytest.mark.slow
def test_three_kills(tmp_path: Path) -> None:
    """What is saved half, or forgotten, shows only when nothing has had the time to clean up."""
    report = tmp_path / "kills.json"
    arguments = ["--kills", "3", "--steps", "12", "--json", str(report)]
    assert load_script("kill_resume").main([*arguments, "--out", str(tmp_path / "runs")]) == 0
    found = json.loads(report.read_text())
    assert [kill["moment"] for kill in found["kills"]] == ["save", "step", "start"]
    assert found["kills"][0]["inside_save"] and not found["differences"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(bool(missing()), reason=f"DeepSpeed cannot compile without {missing()}")
def test_two_kills_of_two_ranks(tmp_path: Path) -> None:
    """A rank's own part of a checkpoint that is not there leaves the ranks in two places."""
    arguments = ["--ranks", "2", "--kills", "2", "--steps", "8", "--out", str(tmp_path / "runs")]
    assert load_script("kill_resume").main(arguments) == 0
