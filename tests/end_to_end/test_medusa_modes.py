"""Every way to train heads, from command line to an export that decodes like its own base."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.config import ConfigError, RunError, TrainConfig
from specheads.decoding.exported import exported_drafter
from specheads.decoding.loop import decode, plain_decode
from specheads.models.checkpoint import Export, load_export
from specheads.train import train
from specheads.verification.sampling import Sampler
from tests.composed import changed, composed
from tests.end_to_end.commands import SHORT, on_files, start

ALONE = ("evaluate.max_new_tokens=8", "evaluate.num_prompts=1", "autocast=none")
MODES: dict[str, tuple[str, ...]] = {
    "hydra": ("+recipe=medusa1", "heads=hydra"),
    "hydra_plus": ("+recipe=medusa1", "heads=hydra_plus"),
    "markov": ("+recipe=medusa1", "heads=markov", "heads.markov_rank=4"),
    "low_rank": ("+recipe=medusa1", "heads=low_rank", "heads.rank=8"),
    "pruned": ("+recipe=medusa1", "heads=pruned", "heads.num_kept=40"),
    "soft": ("+recipe=medusa1", "loss.heads=soft", "loss.top_k=20"),
    "lk_lambda": ("+recipe=medusa1", "loss.heads=lk_lambda", "loss.lk_eta=10"),
    "joint": ("+recipe=medusa2", "warmup_heads=0", "loss.lambda_schedule=linear"),
    "lora": ("+recipe=medusa2", "adapter=lora", "adapter.rank=4"),
    "lora_apart": ("+recipe=medusa2", "adapter=lora", "adapter.rank=4", "adapter.merge=false"),
    "distilled": ("+recipe=medusa2_distilled", "adapter.rank=4", "heads=hydra"),
    "qlora": ("+recipe=medusa2", "adapter=lora", "adapter.rank=4", "model.quantization=nf4"),
    "quantised": ("+recipe=medusa1", "model.quantization=int8"),
    "checkpointed": ("+recipe=medusa2", "model.gradient_checkpointing=true"),
    "eight_bit": ("+recipe=medusa1", "optim=adamw8bit"),
}


def run_mode(
    mode: str, tmp_path: Path, model: Path, records: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Train; return the run directory."""
    run_dir = tmp_path / mode
    arguments = [*MODES[mode], *on_files(model, records, run_dir), *SHORT, *ALONE]
    assert start(monkeypatch, *arguments) == 0
    return run_dir


@cache
def settings_of(recipe: str, model: Path, records: Path) -> TrainConfig:
    """Return a recipe's settings, composed once; the run directory is to be given."""
    files = on_files(model, records, Path())[:-1]
    cfg: TrainConfig = composed("train", [recipe, *files, *SHORT])
    return cfg


def decodes_like_its_base(export: Export) -> None:
    """Assert that trees give the tokens of plain decoding, greedy and sampled."""
    prompt = torch.tensor([export.tokenizer("def add(a, b):").input_ids])
    for sampler in (Sampler(), Sampler(temperature=1.0, seed=3)):
        options: dict[str, Any] = {"max_new_tokens": 12, "sampler": sampler}
        plain = plain_decode(export.base, prompt, **options)
        tree = decode(export.base, exported_drafter(export), prompt, **options)
        assert tree.new_tokens == plain.new_tokens


@pytest.mark.parametrize("mode", MODES)
def test_trains_exports_and_decodes(
    mode: str,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part that is trained and not saved, or loaded as another one, only shows in use."""
    run_dir = run_mode(mode, tmp_path, tiny_model_dir, tiny_jsonl, monkeypatch)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 4 and all(0 < loss < 50 for loss in losses)
    export = load_export(run_dir / "export")
    assert export.heads.kind == ("hydra" if "heads=hydra" in " ".join(MODES[mode]) else "medusa")
    assert (export.heads.prefix is not None) == (mode == "hydra_plus")
    decodes_like_its_base(export)
    final = [row for row in rows if "final/accept_length/t0" in row]
    assert final[-1]["final/identical/t0"] == final[-1]["final/compared/t0"]
    heldout = export.config["training"]["heldout"]
    assert {"head_0/loss", "head_1/top5"} <= heldout.keys()
    if mode in ("lora", "lora_apart", "distilled", "qlora"):
        assert heldout["kl"] > 0
    apart = mode in ("lora_apart", "qlora")
    assert (run_dir / "export" / "adapter").is_dir() == apart
    assert (run_dir / "export" / "base").is_dir() == (export.config["base"]["tuned"] and not apart)


def test_heads_go_on_from_an_export(
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second stage whose heads start anew shows a high loss and nothing else."""
    first = run_mode("hydra", tmp_path, tiny_model_dir, tiny_jsonl, monkeypatch)
    trained = load_export(first / "export").config["training"]["heldout"]
    files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / "second")
    begun = (f"heads.start={first / 'export'}", "optim.lr=1e-30", "optim.base_lr=1e-30")
    joint = ("+recipe=medusa2", "warmup_heads=0", "heads=hydra", "optim=adamw")
    assert start(monkeypatch, *joint, *files, *SHORT, *ALONE, *begun) == 0
    again = load_export(tmp_path / "second" / "export").config["training"]["heldout"]
    for name, value in trained.items():
        assert again[name] == pytest.approx(value, rel=1e-6), name
    files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / "third")
    capsys.readouterr()
    others = ("+recipe=medusa1", "heads=markov", "heads.markov_rank=4")
    assert start(monkeypatch, *others, *files, *SHORT, *ALONE, *begun) == 2
    assert "holds other heads than heads.* describes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "modes",
    [
        ("+recipe=medusa1", "heads=hydra_plus", "loss.heads=soft"),
        ("+recipe=medusa1", "heads=shared"),
        ("+recipe=mtp_finetune", "mtp.num_heads=3", "loss.heads=soft"),  # reads the trunk
    ],
)
def test_cached_features_train_the_same_heads(
    modes: tuple[str, ...], tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """States of other tokens train heads of another text; a shared matrix must stay frozen."""
    losses = {}
    for name, own in (("online", ()), ("cached", (f"features.dir={tmp_path / 'features'}",))):
        files = on_files(tiny_model_dir, tiny_jsonl, tmp_path / name)
        assert start(monkeypatch, *modes, *files, *SHORT, *ALONE, *own) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        losses[name] = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses["cached"] == pytest.approx(losses["online"], rel=1e-6)
    assert list((tmp_path / "features").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("+recipe=medusa2", "loss.base=distill"), "adapter=lora beside it"),
        (("+recipe=medusa2", "model.quantization=nf4"), "adapter=lora"),
        (("+recipe=medusa1", "heads.lm_head=low_rank", "heads.rank=4000"), "rank must be in 1..32"),
        (
            ("+recipe=medusa1", "heads.lm_head=pruned", "heads.num_kept=300"),
            "num_kept must be in 1..272",
        ),
        (("+recipe=medusa1", "heads.start=/nowhere"), "/nowhere"),
        (
            ("+recipe=medusa1", "heads.kind=mtp"),
            "heads.kind must be one of medusa, block, eagle3, got",
        ),
        (("+recipe=medusa1", "heads.options={width: 3}"), "heads.options must be empty with"),
        (
            ("+recipe=medusa2", "features.dir=f"),
            "features.dir=f keeps hidden states of a frozen base",
        ),
    ],
)
def test_settings_that_cannot_be(
    overrides: tuple[str, ...],
    message: str,
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_jsonl: Path,
) -> None:
    """A wrong combination should cost a line, not a night."""
    recipe, *words = overrides
    cfg = settings_of(recipe, tiny_model_dir, tiny_jsonl)
    with pytest.raises((ConfigError, RunError)) as caught:
        train(reduce(changed, words, replace(cfg, run_dir=str(tmp_path / "run"))))
    error = str(caught.value)
    assert message in error and "\n" not in error
    assert not list((tmp_path / "run").rglob("*"))
