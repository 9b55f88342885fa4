"""Training on data that is read while training, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specheads.models import base as base_models
from tests.end_to_end.commands import SHORT, on_files, start
from tests.end_to_end.test_resume import export_of, metrics_of

STREAM = ("data.streaming=true", "data.shuffle_buffer=8", "data.max_bad_fraction=0.1")


def test_a_streamed_run_resumes_bit_identical(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows after the stop, or rows counted twice: weights, metrics, counts, quarantine."""
    records = tmp_path / "records.jsonl"
    records.write_bytes(tiny_jsonl.read_bytes() + b'{"text": "\xff"}\n')

    def run(name: str, *arguments: str) -> None:
        files = on_files(tiny_model_dir, records, tmp_path / name)
        stages = ("steps=8", "warmup_heads=0.5", "log.every=2", "data.rows=4")
        code = start(monkeypatch, "+recipe=medusa2", *files, *SHORT, *stages, *STREAM, *arguments)
        assert code == 0

    run("whole")
    run("parts", "max_steps=3")
    run("parts", "resume=auto")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tensors = export_of(parts)
    for name, tensor in export_of(whole).items():
        assert torch.equal(tensor, tensors[name]), name
    resumed = metrics_of(parts)
    for step, row in metrics_of(whole).items():
        assert resumed[step] == row, step
    data = [json.loads((p / "export/config.json").read_text())["training"]["data"]
            for p in (whole, parts)]  # fmt: skip
    assert data[0] == data[1] and data[0]["train"]["records"] > 32
    lines = (whole / "quarantine.jsonl").read_text()
    assert lines == (parts / "quarantine.jsonl").read_text()
    (row,) = map(json.loads, lines.splitlines())
    assert row["where"] == f"{records}:33" and row["reason"] == "not UTF-8"


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_bad_data_stops_a_run_before_a_model_is_loaded(
    streaming: str,
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A base of 70 GB loads for minutes, to train on nothing."""
    monkeypatch.setattr(
        base_models, "load_base_model", lambda *_a, **_k: pytest.fail("the model was loaded")
    )
    records = tmp_path / "records.jsonl"
    for text, complaint in (
        ('{"txt": "a"}\n' * 9, "9 of 9 records cannot be used"),
        ("", "holds no records"),
        (None, "No such file"),
    ):
        records.unlink(missing_ok=True)
        if text is not None:
            records.write_text(text)
        files = on_files(tiny_model_dir, records, tmp_path / "run")
        more = (*SHORT, f"data.streaming={streaming}")
        assert start(monkeypatch, "+recipe=medusa1", *files, *more) == 2
        error = capsys.readouterr().err.strip()
        assert complaint in error and len(error.splitlines()) == 1
    assert not list((tmp_path / "run").glob("*"))


def test_a_dry_run_of_a_stream(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It says that nobody knows how long an epoch is, and leaves nothing behind."""
    files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / "run")
    assert start(monkeypatch, "+recipe=medusa1", *files, *SHORT, *STREAM, "dry_run=true") == 0
    said = capsys.readouterr().out
    assert "train: streamed from" in said and "rows streamed" in said
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()
    code = start(
        monkeypatch, "+recipe=medusa1", *files, *SHORT, *STREAM, f"features.dir={tmp_path / 'f'}"
    )
    assert code == 2
    assert "needs all training records at one time" in capsys.readouterr().err
