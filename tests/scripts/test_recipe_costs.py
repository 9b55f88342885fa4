"""What a recipe took, read from a run's own files."""

import json
from pathlib import Path

import pytest

from tests.script_modules import ROOT, load_script

recipe_costs = load_script("recipe_costs")


def write_run(folder: Path) -> Path:
    """Write the two files of a run of three rows."""
    folder.mkdir()
    rows = [
        {"step": 10, "train/tokens_per_second": 100.0, "train/peak_memory": 1e9},
        {"step": 20, "train/tokens_per_second": 300.0, "train/peak_memory": 3e9},
        {"step": 30, "train/tokens_per_second": 110.0, "train/peak_memory": 2e9},
        {"step": 30, "heldout/head_0/top1": 0.5},
        {"step": 30, "final/accept_length/t0": 2.25},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    started = {
        "time": "2026-11-21T00:00:00+0000",
        "argv": ["/home/me/train.py", "+recipe=hydra", "optim.lr=1e-3", "run_dir=/home/me/x"],
        "packages": {"torch": "2.13.0"},
        "hardware": {"threads": 2},
    }
    again = {**started, "time": "2026-12-01T00:00:00+0000"}
    (folder / "provenance.json").write_text(json.dumps([started, again]))
    return folder


def test_costs_of_a_run(tmp_path: Path) -> None:
    """One row that waited for something would pull a mean down; half a run would leave holes."""
    run = write_run(tmp_path / "hydra")
    assert recipe_costs.cost(run) == {
        "run": "hydra",
        "command": "python -m specheads.train +recipe=hydra optim.lr=1e-3",
        "date": "2026-11-21",
        "threads": 2,
        "torch": "2.13.0",
        "steps": 30,
        "tokens_per_second": 110,
        "peak_memory_gb": 3.0,
        "measured": {"heldout/head_0/top1": 0.5, "final/accept_length/t0": 2.25},
    }
    for name in ("provenance.json", "metrics.jsonl"):
        (run / name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            recipe_costs.cost(run)


def test_published_costs_name_no_machine() -> None:
    """A command line from somebody's folder cannot be typed by anybody else."""
    text = (ROOT / "benchmarks" / "recipes.json").read_text()
    assert not any(place in text for place in ("/home/", "/tmp/", "/root/", str(ROOT)))
