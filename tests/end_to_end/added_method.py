"""Run in the copy that test_adding_a_method.py makes, where heads, drafter and loss are added."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import specheads
from specheads.config import DecodeConfig
from specheads.decoding.exported import exported_drafter
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.loop import decode, plain_decode
from specheads.models.checkpoint import load_export
from tests.end_to_end.commands import SHORT, on_files, start

ROOT = Path(__file__).parents[2]


def test_added(
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Heads and loss train by the page's commands; what is exported decodes plain text."""
    assert Path(specheads.__file__).is_relative_to(ROOT)
    lines = re.findall(r"^specheads train (.*)$", (ROOT / "page.md").read_text(), re.MULTILINE)
    asked = dict.fromkeys(word for line in lines for word in line.split() if "data" not in word)
    assert {"heads.kind=bottleneck", "+heads.options.width=8", "loss.heads=hellinger"} <= {*asked}
    given = [*asked, *on_files(tiny_model_dir, tiny_jsonl, tmp_path / "run"), *SHORT]
    given += ["steps=6", "data.rows=2", "optim.lr=0.03", "evaluate.num_prompts=2"]
    assert start(monkeypatch, *given, "+heads.options.wide=8") == 2
    assert "heads.options={'width': 8, 'wide': 8}: " in capfd.readouterr().err
    assert start(monkeypatch, *given) == 0
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [row["train/loss"] for row in map(json.loads, rows) if "train/loss" in row]
    assert losses[-1] < losses[0]
    path = str(tmp_path / "run" / "export")
    export = load_export(path, device="cpu")
    assert export.heads.kind == "bottleneck" and export.config["width"] == 8
    assert any(bool(each.any()) for name, each in export.heads.state_dict().items() if "up" in name)
    prompt = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    plain = plain_decode(export.base, prompt, max_new_tokens=32).new_tokens
    drafter = exported_drafter(export)
    assert decode(export.base, drafter, prompt, max_new_tokens=32).new_tokens == plain
    echo = SpecDecoder.from_pretrained(path, DecodeConfig(drafter="echo"), device="cpu")
    assert echo.generate(prompt, 32).new_tokens == plain
