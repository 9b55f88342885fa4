"""What a run logs about its own decoding is what the bench measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from specheads.bench import run as bench
from specheads.config import BenchConfig, TrainConfig, to_config
from specheads.decoding.evaluate import final_evaluation, write_prompts
from specheads.decoding.measure import read_prompts
from specheads.models.base import context_length
from specheads.models.checkpoint import load_export
from specheads.training.prepare import (
    calibration_prompts,
    load_base,
    load_data,
    prompt_records,
)
from tests.end_to_end.commands import SHORT, on_files, start


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_final_accept_length_is_the_benchs(
    dtype: str,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other prompts, seeds, limits or weights would make the logged figure nobody's figure."""
    run_dir = tmp_path / "run"
    files = on_files(tiny_model_dir, tiny_jsonl, run_dir)
    extra = (f"model.dtype={dtype}", "evaluate.num_prompts=5", "evaluate.temperatures=[0,1]")
    # a base this small hits at T=1 too if it is sure of itself: its own training makes it so
    extra += ("data.eval_fraction=0.3",)
    sure = ("steps=12", "warmup_heads=0", "optim.base_lr=1e-2", "optim.lr=1e-2")
    assert start(monkeypatch, "+recipe=medusa2", *files, *SHORT, *extra, *sure) == 0
    cfg = to_config(OmegaConf.load(run_dir / "config.yaml"), TrainConfig)
    base, _, tokenizer = load_base(cfg)
    data = load_data(cfg, base, tokenizer, train_base=False)
    context = context_length(base)
    export = load_export(run_dir / "export")
    assert str(export.base.dtype) == f"torch.{dtype}"
    path = run_dir / "heldout.jsonl"
    write_prompts(path, prompt_records(cfg, data, tokenizer, context))
    read, _ = read_prompts(path, export.tokenizer, 5, max_length=512, device=torch.device("cpu"))
    given = calibration_prompts(cfg, data, tokenizer, base.device, context)
    assert [each.input_ids.tolist() for each in read] == [ids.tolist() for ids in given]

    final = final_evaluation(export, path, cfg.evaluate)
    bench(
        BenchConfig(
            checkpoint=str(run_dir / "export"),
            out=str(tmp_path / "bench.json"),
            prompts=str(path),
            num_prompts=cfg.evaluate.num_prompts,
            max_new_tokens=cfg.evaluate.max_new_tokens,
            repeats=1,
            dtype=dtype,
            threads=1,
        )
    )
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    of = {row["temperature"]: row for row in rows if row["method"] == "tree"}
    plain = {row["temperature"]: row for row in rows if row["method"] == "plain"}
    for temperature in (0.0, 1.0):
        at, row = f"t{temperature:g}", of[temperature]
        assert row["num_prompts"] == 5
        assert final[f"final/accept_length/{at}"] == row["accept_length"] > 1
        interval = [final[f"final/accept_length_{end}/{at}"] for end in ("low", "high")]
        assert interval == row["accept_length_ci95"]
        assert final[f"final/identical/{at}"] == row["identical"]
        assert final[f"final/rep8/{at}"] == plain[temperature]["rep8"]
    assert of[0.0]["accept_length"] != of[1.0]["accept_length"]
