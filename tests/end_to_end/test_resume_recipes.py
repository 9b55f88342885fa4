"""Every recipe that carries a state of its own goes on bit-identically after it was stopped."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specheads.training.checkpoints import checkpoints_of
from tests.end_to_end.commands import SHORT, on_files, start
from tests.end_to_end.test_mtp_recipes import SCRATCH

# what a clock or the memory decides
MEASURED = re.compile(r"tokens_per_second|peak_memory|speedup|seconds|_ms|time")
EVALUATED = ("evaluate.every=2", "evaluate.max_new_tokens=8")
DISTILL = ("+recipe=distill", "autocast=none", "optim.lr=1e-2", *EVALUATED)
MODES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "cached": (("+recipe=medusa1", "features.dir=CACHE", *EVALUATED), (3,)),
    "on_policy": (
        (*DISTILL, "draft.on_policy=0.5", "draft.on_policy_tokens=6", "optim.accumulation=3"), (3,),
    ),
    "stored": ((*DISTILL, "draft.stored=CACHE", "draft.stored_top_k=8"), (3,)),
    "growing": ((*SCRATCH, "data.growth=[[32, 0.5]]", *EVALUATED), (1, 3, 5)),
    "patience": (
        ("+recipe=medusa2", "warmup_heads=0.5", "evaluate.patience=1", *EVALUATED), (2, 3, 4),
    ),
    "lora": (
        ("+recipe=mtp_finetune", "mtp.num_heads=3", "mtp.train_base=true", "adapter=lora",
         "adapter.dropout=0.2", *EVALUATED), (1, 4),
    ),
    "muon": (("+recipe=pretrain", *SCRATCH[3:], "tokenizer=byte", "optim=muon"), (2,)),
}  # fmt: skip


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return all rows of metrics.jsonl, without what a clock or the memory decides."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not MEASURED.search(k)} for row in rows]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors below a folder, by file and name."""
    return {
        f"{path.relative_to(folder)}/{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize(
    "mode",
    [
        name if name in ("cached", "on_policy") else pytest.param(name, marks=pytest.mark.slow)
        for name in MODES
    ],
)
def test_stopped_and_resumed_is_bit_identical(
    mode: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A place that is not saved (of answers, of lengths, of the best) shows in later steps only.

    Compared are weights, optimizer, generators and data position at the end, the export, and every
    row of metrics.jsonl, those of the final evaluation too.
    """
    arguments, stops = MODES[mode]

    def run(name: str, *more: str) -> None:
        found: dict[str, str] = {}
        every = (*SHORT, *on_files(tiny_model_dir, tiny_jsonl, tmp_path / name), "steps=6")
        for word in (*every, *arguments, "log.every=4", *more):
            found[word.partition("=")[0]] = word.replace("CACHE", str(tmp_path / "cache"))
        assert start(monkeypatch, *found.values()) == 0

    run("whole")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # written anew it must be the same
    for stop in stops:
        run("halves", f"max_steps={stop}", "resume=auto")
    run("halves", "resume=auto")
    for part in ("export", "checkpoints"):
        whole, halves = (weights_of(tmp_path / name / part) for name in ("whole", "halves"))
        if part == "checkpoints":  # the halves have those of the stops beside it
            last = checkpoints_of(tmp_path / "whole")[-1].name
            halves = {key: tensor for key, tensor in halves.items() if key.startswith(last)}
        assert whole.keys() == halves.keys() and whole
        for name, tensor in whole.items():
            assert torch.equal(tensor, halves[name]), name
    whole_rows, found = rows_of(tmp_path / "whole"), rows_of(tmp_path / "halves")
    more = [row for row in found if row not in whole_rows]
    assert [row for row in found if row in whole_rows] == whole_rows
    assert {row["step"] for row in more} <= set(stops)  # one where it stopped
