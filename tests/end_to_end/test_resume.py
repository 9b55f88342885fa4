"""A run that was stopped and resumed is the run that was not."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specheads.training.checkpoints import checkpoints_of
from tests.end_to_end.commands import SHORT, on_files, start
from tests.processes import Process

CHANGING = ("train/tokens_per_second", "train/peak_memory")


def export_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of an export."""
    heads = load_file(run_dir / "export" / "model.safetensors")
    return heads | load_file(run_dir / "export" / "base" / "model.safetensors")


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the training rows by step, without what differs from run to run."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {
        row["step"]: {k: v for k, v in row.items() if k not in CHANGING}
        for row in rows
        if "train/loss" in row
    }


def test_medusa2_resumes_bit_identical(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in each stage and between them: weights, exports and metrics must be equal."""

    def run(name: str, *arguments: str) -> None:
        files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / name)
        stages = ("steps=5", "warmup_heads=0.4", "optim.accumulation=2", "log.every=2")
        code = start(monkeypatch, "+recipe=medusa2", *files, *SHORT, *stages, *arguments)
        assert code == 0

    run("whole")
    for stop in (1, 2, 4):
        run("halves", f"max_steps={stop}", *(["resume=auto"] if stop > 1 else []))
        assert checkpoints_of(tmp_path / "halves")[-1].name == f"step-{stop:07d}"
    run("halves", "resume=auto")
    whole, halves = export_of(tmp_path / "whole"), export_of(tmp_path / "halves")
    assert whole.keys() == halves.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, halves[name]), name
    resumed = metrics_of(tmp_path / "halves")
    for step, row in metrics_of(tmp_path / "whole").items():
        assert resumed[step] == row, step


def test_sigterm_saves_and_exits_with_75(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that restarts on 75 needs the state and that very code."""
    files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / "run")
    arguments = ["+recipe=medusa1", *files, *SHORT, "steps=100000"]
    process = Process("-m", "specheads.train", *arguments)
    process.wait_for("^step")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, process.stderr
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("specheads: stopped after step")
    assert "Traceback" not in process.stderr
    (saved,) = checkpoints_of(tmp_path / "run")
    assert int(saved.name.removeprefix("step-")) >= 1
