"""What a run logs about its own decoding is what the bench measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from specheads.bench import run as bench
from specheads.config import BenchConfig, TrainConfig, to_config
from specheads.data.chat import Encoder
from specheads.measure.clock import read_prompts
from specheads.measure.evaluate import Heldout, final_evaluation
from specheads.models.base import context_length, end_tokens
from specheads.models.checkpoint import load_export
from specheads.training.setup import load_base, load_data, prompt_records
from tests.end_to_end.commands import SHORT, on_files, start


@pytest.mark.parametrize(("recipe", "dtype"), [("medusa1", "float32"), ("medusa2", "bfloat16")])
def test_the_final_accept_length_is_the_benchs(
    recipe: str,
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
    sure = ("steps=12", "warmup_heads=0.2", "optim.base_lr=1e-2", "optim.lr=1e-2")
    assert start(monkeypatch, f"+recipe={recipe}", *files, *SHORT, *extra, *sure) == 0
    cfg = to_config(OmegaConf.load(run_dir / "config.yaml"), TrainConfig)
    base, _, tokenizer = load_base(cfg)
    data = load_data(cfg, base, tokenizer, train_base=False)
    context = context_length(base)
    export = load_export(run_dir / "export")
    assert str(export.base.dtype) == f"torch.{dtype}"
    path = run_dir / "prompts.jsonl"
    read, _ = read_prompts(path, export.tokenizer, 5, max_length=512, device=torch.device("cpu"))
    given = [Encoder(tokenizer).prompt(r) for r in prompt_records(cfg, data, tokenizer, context)]
    assert [each.input_ids[0].tolist() for each in read] == given

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    (final,) = [row for row in map(json.loads, lines) if "final/accept_length/t0" in row]
    assert final["step"] == cfg.steps
    ends = end_tokens(export.base, export.tokenizer)
    heldout = Heldout(export.base, read, cfg.evaluate, ends)
    again = final_evaluation(heldout, export.tokenizer, export).figures  # of what a user loads
    bench(
        BenchConfig(
            checkpoint=str(run_dir / "export"),
            out=str(tmp_path / "bench.json"),
            prompts=str(path),
            num_prompts=cfg.evaluate.num_prompts,
            max_new_tokens=cfg.evaluate.max_new_tokens,
            temperatures=cfg.evaluate.temperatures,
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
        assert final[f"final/accept_length/{at}"] == row["accept_length"]
        assert again[f"final/accept_length/{at}"] == row["accept_length"] >= 1
        interval = [final[f"final/accept_length_{end}/{at}"] for end in ("low", "high")]
        assert interval == row["accept_length_ci95"]
        assert final[f"final/identical/{at}"] == row["identical"]
        assert final[f"final/rep8/{at}"] == plain[temperature]["rep8"]
    assert of[0.0]["accept_length"] > 1
    assert of[0.0]["accept_length"] != of[1.0]["accept_length"]


def test_the_export_holds_the_heads_of_the_best_evaluation(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are put back after the export was written, or into a copy, help nobody."""
    run_dir = tmp_path / "run"
    files = on_files(tiny_model_dir, tiny_jsonl, run_dir)
    # from perfect guesses of the wrong token, steps as large as these only lead away
    extra = ("evaluate.every=1", "evaluate.temperatures=[0,1]", "optim.lr=0.3", "optim=adamw")
    assert start(monkeypatch, "+recipe=medusa1", *files, *SHORT, *extra) == 0
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "eval/accept_length" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    best = max(rows, key=lambda row: (row["eval/accept_length"], row["step"]))
    shapes = {(shape, at) for shape in ("tree", "chain") for at in ("t0", "t1")}
    keys = {f"eval/{shape}/{at}/accept_length_low" for shape, at in shapes}
    assert keys | {"eval/t0/rep8", "eval/tree/t0/head_0/acceptance"} <= best.keys()
    kept = load_file(run_dir / "best" / f"step-{best['step']:07d}" / "model.safetensors")
    exported = load_file(run_dir / "export" / "model.safetensors")
    assert {name.removeprefix("heads."): 0 for name in kept}.keys() == exported.keys()
    for name, tensor in kept.items():
        assert torch.equal(tensor, exported[name.removeprefix("heads.")]), name
    training = json.loads((run_dir / "export" / "config.json").read_text())["training"]
    assert (training["steps"], training["best"]["step"]) == (4, best["step"])
