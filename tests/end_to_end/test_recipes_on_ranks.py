"""Every recipe, from command line to export, on two ranks as on one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specheads.decoding.exported import is_plain_model
from specheads.models.base import load_tokenizer
from specheads.models.checkpoint import load_export
from specheads.models.draft import load_draft
from tests.end_to_end.commands import SHORT, on_files
from tests.end_to_end.test_recipes import OWN
from tests.processes import ROOT
from tests.states_server import StatesServer

ALONE = ["-m"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
# passes --local_rank=N on
DEEPSPEED = ["-m", "deepspeed.launcher.runner", "--num_gpus=2", "--master_port=PORT", "--module"]
TUNED = (
    "optim=adamw",
    "optim.grad_clip=0.5",
    "autocast=none",
    "evaluate.max_new_tokens=8",
    "log.every=1",
    "data.rows=1",
)
LORA = ("adapter=lora", "adapter.rank=4", "adapter.dropout=0")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "medusa1": ("zero3", ("+recipe=medusa1",)),
    "cached": ("zero1", ("+recipe=medusa1", "features.dir=CACHE")),
    "served": ("zero2", ("+recipe=medusa1", "features.endpoint=SERVER")),
    "streamed": ("zero2", ("+recipe=medusa1", "data.streaming=true")),
    "hydra": ("zero3", ("+recipe=hydra", "features.dir=CACHE")),
    "medusa2": ("zero3", ("+recipe=medusa2",)),
    "lora": ("zero3", ("+recipe=medusa2", *LORA)),
    "distilled": ("zero2", ("+recipe=medusa2_distilled", *LORA)),
    "pretrain": ("zero2", ("+recipe=pretrain", *OWN["pretrain"])),
    "mtp": ("zero3", ("+recipe=mtp", "mtp.lm_head=shared", *OWN["mtp"])),
    "mtp_finetune": ("zero3", ("+recipe=mtp_finetune", *OWN["mtp_finetune"])),
    "draft": ("zero3", ("+recipe=distill", "draft.hidden=16")),
    "stored": ("zero2", ("+recipe=distill", "draft.hidden=16", "draft.stored=CACHE")),
    "on_policy": ("zero2", ("+recipe=distill", "draft.on_policy=0.5", "draft.on_policy_tokens=6")),
}
# stop after two steps, with a base of which every rank has a part, and go on
RESUMED = {"medusa2", "lora"}
# drawn by each rank for itself, or read in another order
NOT_THE_SAME = {"on_policy", "streamed"}


def run(run_dir: Path, launcher: list[str], *words: str) -> list[dict[str, Any]]:
    """Train; return the rows of its steps."""
    settings: dict[str, str] = {}
    for word in (*SHORT, *words):  # what is said later counts
        word = word.replace("CACHE", str(run_dir / "cache"))
        settings[word.partition("=")[0]] = word
    done = subprocess.run(
        [sys.executable, *launcher, "specheads.train", *settings.values()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "reads the base whole" not in done.stdout
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/loss" in row]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_recipes_on_two_ranks(
    case: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path
) -> None:
    """Rows that both ranks take, or none, give a loss that falls as well."""
    stage, words = CASES[case]
    one, two = tmp_path / "one", tmp_path / "two"
    server = StatesServer(tmp_path / "shared", tiny_model_dir, [2])
    words = (*TUNED, *(word.replace("SERVER", server.url) for word in words))
    port = str(20_000 + os.getpid() % 10_000)
    launcher = [word.replace("PORT", port) for word in DEEPSPEED]
    launcher = launcher if case == "medusa1" else TORCHRUN
    files = on_files(tiny_model_dir, tiny_jsonl, two)
    words_of_two = (*files, *words, f"deepspeed={stage}")
    if case in RESUMED:
        run(two, launcher, *words_of_two, "max_steps=2")
        words_of_two = (*words_of_two, "resume=auto")
    after = run(two, launcher, *words_of_two)
    assert [row["step"] for row in after] == [1, 2, 3, 4]
    if case not in NOT_THE_SAME:
        alone = (*on_files(tiny_model_dir, tiny_jsonl, one), *words, "optim.accumulation=2")
        before = run(one, ALONE, *alone)
        for key in ("train/loss", "train/grad_norm"):
            expected = [row[key] for row in before]
            assert [row[key] for row in after] == pytest.approx(expected, rel=1e-5), key
        stored = load_file(one / "export" / "model.safetensors")
        found = load_file(two / "export" / "model.safetensors")
        assert stored.keys() == found.keys()
        for name, value in stored.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
    server.close()
    export = two / "export"
    if is_plain_model(str(export)):
        load_draft(str(export), tokenizer=load_tokenizer(str(export)), where="export")
    else:
        load_export(export)
