"""Multi-token prediction from command line to decoding: from scratch, and on a base that exists."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specheads.bench import run as bench
from specheads.config import (
    BenchConfig,
    ConfigError,
    DecodeConfig,
    GenerateConfig,
    TrainConfig,
    TreeSearchConfig,
)
from specheads.decoding.exported import exported_drafter
from specheads.decoding.loop import decode, plain_decode
from specheads.generate import run as generate
from specheads.models.checkpoint import Export, load_export, read_config
from specheads.models.mtp import VARIANTS
from specheads.train import train as train_by
from specheads.training.setup import new_base
from specheads.tree_search import run as tree_search
from specheads.verification.sampling import Sampler
from tests.composed import changed, composed
from tests.end_to_end.commands import SHORT, on_files, start

# four layers, of which two become heads
SCRATCH = (
    "+recipe=mtp",
    "mtp.num_heads=3",
    "tokenizer=byte",
    "autocast=none",
    "evaluate.max_new_tokens=8",
    "evaluate.num_prompts=1",
    "data.documents=0",
    "data.growth=[]",
    "model.init={model_type: llama, vocab_size: 0, hidden_size: 32, intermediate_size: 64,"
    " num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,"
    " max_position_embeddings: 512, tie_word_embeddings: false}",
    "+model.init.initializer_range=0.1",
)
FINETUNE = (
    "+recipe=mtp_finetune", "mtp.num_heads=3", "evaluate.max_new_tokens=8",
    "evaluate.num_prompts=1",
)  # fmt: skip
MODES: dict[str, tuple[str, ...]] = {
    "parallel": SCRATCH,
    "causal": (*SCRATCH, "mtp.variant=causal", "mtp.lm_head=shared"),
    "sequential": (*SCRATCH, "+recipe=mtp_sequential", "mtp.num_heads=3"),
    "on_top": (*SCRATCH, "mtp.parity=false", "mtp.variant=sequential", "mtp.hidden_first=true"),
    "frozen": (*FINETUNE, "mtp.variant=causal", "mtp.lm_head=own", "loss.heads=soft"),
    "frozen_sequential": (*FINETUNE, "mtp.variant=sequential", "mtp.start=random"),
    "quantised": (*FINETUNE, "model.quantization=nf4"),
    "tuned": (*FINETUNE, "mtp.train_base=true", "model.gradient_checkpointing=true"),
    "distilled": (
        *FINETUNE, "mtp.train_base=true", "adapter=lora", "loss.base=distill", "mtp.variant=causal",
    ),
    "qlora": (
        *FINETUNE, "mtp.train_base=true", "adapter=lora", "model.quantization=nf4",
        "adapter.rank=4", "mtp.variant=sequential",
    ),
}  # fmt: skip


def words_of(mode: str, model: Path, records: Path, run_dir: Path) -> list[str]:
    """Return the command's arguments; what a mode says later counts, of the recipe's all."""
    found: dict[str, str] = {"+recipe": ""}
    for word in (*on_files(model, records, run_dir), *SHORT, *MODES[mode]):
        found[word.partition("=")[0]] = word
    return list(found.values())


def train(
    monkeypatch: pytest.MonkeyPatch, mode: str, model: Path, records: Path, run_dir: Path,
    *more: str,
) -> Path:  # fmt: skip
    """Train; return the run directory."""
    words = {word.partition("=")[0]: word for word in more}
    kept = words_of(mode, model, records, run_dir)
    kept = [word for word in kept if word.partition("=")[0] not in words]
    assert start(monkeypatch, *kept, *words.values()) == 0
    return run_dir


@cache
def settings_of(mode: str, model: Path, records: Path) -> TrainConfig:
    """Return a mode's settings, composed once; the run directory is to be given."""
    words = words_of(mode, model, records, Path())
    cfg: TrainConfig = composed("train", [word for word in words if "hydra" not in word])
    return cfg


def decodes_like_its_base(export: Export) -> None:
    """Assert that trees give the tokens of plain decoding, greedy and sampled."""
    prompt = torch.tensor([export.tokenizer("def add(a, b):").input_ids])
    for sampler in (Sampler(), Sampler(temperature=1.0, seed=3)):
        options: dict[str, Any] = {"max_new_tokens": 12, "sampler": sampler}
        plain = plain_decode(export.base, prompt, **options)
        tree = decode(export.base, exported_drafter(export), prompt, **options)
        assert tree.new_tokens == plain.new_tokens


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    """Return all rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_trains_exports_and_decodes(
    mode: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A part that is trained and not saved, or saved and not trained, only shows in use."""
    run_dir = train(monkeypatch, mode, tiny_model_dir, tiny_jsonl, tmp_path / "run")
    printed = capsys.readouterr().out
    rows = rows_of(run_dir)
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 4 and all(0 < loss < 80 for loss in losses)
    export = load_export(run_dir / "export")
    heads, info = export.heads, export.config["base"]
    scratch, words = MODES[mode][0] == "+recipe=mtp", " ".join(MODES[mode])
    assert (heads.kind, heads.num_heads) == ("mtp", 2)
    decodes_like_its_base(export)
    final = [row for row in rows if "final/accept_length/t0" in row]
    assert final[-1]["final/identical/t0"] == final[-1]["final/compared/t0"]
    heldout = export.config["training"]["heldout"]
    assert {"head_0/loss", "head_1/top5"} <= heldout.keys()
    tuned = scratch or "train_base=true" in words
    apart = mode == "qlora"
    assert (info["tuned"], info["adapter"]) == (tuned, apart)
    assert ("train/lm/loss" in rows[0]) == ("loss" in heldout) == tuned
    if scratch:
        assert info["name"] == "" and (run_dir / "export" / "base").is_dir()
        assert "kl" not in heldout and "held-out loss" in printed
        layers = 4 if "parity=false" in words else 2
        assert export.base.config.num_hidden_layers == layers
        assert export.base.config.vocab_size == 320 and export.tokenizer.eos_token_id == 258
        plain = AutoModelForCausalLM.from_pretrained(run_dir / "export" / "base")
        ids = torch.arange(20)[None]
        with torch.no_grad():
            assert torch.equal(plain.eval()(ids).logits, export.base(ids).logits)
    elif tuned:
        assert heldout["kl"] > 0 and "KL(original || tuned)" in printed
    else:
        before = load_file(tiny_model_dir / "model.safetensors")
        if "quantization" not in words:
            for name, tensor in export.base.state_dict().items():
                assert torch.equal(before[name], tensor), name
        assert not (run_dir / "export" / "base").exists()


@pytest.mark.parametrize("mode", ["sequential", "tuned"])
def test_a_stopped_run_ends_as_one_that_was_not(
    mode: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A base or heads drawn anew on resuming, or moments lost, train on without a word."""
    found = []
    for name, stops in (("whole", [0]), ("halves", [2, 0])):
        for stop in stops:
            more = ("optim.accumulation=2", f"max_steps={stop}")
            resume = ("resume=auto",) if stop != stops[0] else ()
            run_dir = tmp_path / name
            train(monkeypatch, mode, tiny_model_dir, tiny_jsonl, run_dir, *more, *resume)
        tensors = load_file(run_dir / "export" / "model.safetensors")
        if (run_dir / "export" / "base").is_dir():
            tensors |= load_file(run_dir / "export" / "base" / "model.safetensors")
        found.append(tensors)
    whole, halves = found
    assert whole.keys() == halves.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, halves[name]), name


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_programs_take_its_export(
    mode: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, prompt_file: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """An export without an original, of heads that have no blocks, breaks who reads both."""
    long = ("steps=12", "optim.lr=2e-2", "optim.base_lr=2e-2")  # until guesses hit
    run_dir = train(monkeypatch, mode, tiny_model_dir, tiny_jsonl, tmp_path / "run", *long)
    export = run_dir / "export"
    capsys.readouterr()
    texts = []
    for settings in ({"plain": True}, {}, {"decode": DecodeConfig(tree="dynamic", num_nodes=6)}):
        asked = GenerateConfig(
            checkpoint=str(export), prompt="def f(x):", max_new_tokens=16, temperature=0.8,
            seed=3, **settings,
        )  # fmt: skip
        generate(asked)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and texts[0].strip()
    small: dict[str, Any] = {
        "checkpoint": str(export), "prompts": str(prompt_file), "max_new_tokens": 8, "repeats": 1,
        "dtype": "float32", "threads": 1,
    }  # fmt: skip
    tree_search(TreeSearchConfig(num_prompts=3, num_measured=2, num_nodes=6, **small))
    assert read_config(export)["tree"]["measured_on"]["dynamic"]["num_nodes"] == 6
    out = tmp_path / "bench.json"
    bench(BenchConfig(out=str(out), num_prompts=2, temperatures=[0.0], batch_sizes=[2], **small))
    drafted = [row for row in json.loads(out.read_text())["rows"] if row["method"] == "tree"]
    assert {row["batch"] for row in drafted} == {1, 2}
    assert all(row["identical"] == row["compared"] > 0 for row in drafted)
    assert all(row["accept_length"] > 1 for row in drafted)


@pytest.mark.parametrize("mode", ["parallel", "distilled", "frozen_sequential"])
def test_a_dry_run_prints_the_plan_and_leaves_nothing(
    mode: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A plan that leaves out the base of a joint run, or its heads, is half the bill."""
    more = ["dry_run=true"]
    if mode == "frozen_sequential":
        more.append(f"features.dir={tmp_path / 'features'}")
    train(monkeypatch, mode, tiny_model_dir, tiny_jsonl, tmp_path / "run", *more)
    printed = capsys.readouterr().out
    assert "4 steps of 128 tokens" in printed and "it pays above an accept length of" in printed
    trained = {"parallel": "base", "distilled": "adapter"}
    for part in {"heads", trained.get(mode, "heads")}:
        assert re.search(rf"{part} 0\.\d+ M trained", printed), part
    assert ("features: " in printed) == (mode == "frozen_sequential")
    assert not (tmp_path / "run").exists() and not (tmp_path / "features").exists()


def test_a_feature_cache_trains_sequential_heads_as_the_base_would(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored states of another place, or without the tokens beside them, still lower the loss."""
    losses = []
    for name, more in (("plain", ""), ("cached", f"features.dir={tmp_path / 'features'}")):
        run_dir = tmp_path / name
        mode = "frozen_sequential"
        words = (more,) if more else ()
        train(monkeypatch, mode, tiny_model_dir, tiny_jsonl, run_dir, *words)
        losses.append([row["train/loss"] for row in rows_of(run_dir) if "train/loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "more", "complaint"),
    [
        ("parallel", "mtp.num_heads=4", "layers is 4, of which 3 become heads .*: 1 left"),
        ("parallel", "model.dtype=bfloat16", "mtp keeps float32 weights"),
        ("parallel", "adapter.kind=lora", "adapter.kind=lora starts from a model that exists"),
        ("parallel", "features.dir=f", "features.dir=f keeps hidden states of a frozen base"),
        ("frozen", "adapter.kind=lora", "mtp.train_base=false freezes: set mtp.train_base=true"),
        ("tuned", "features.dir=f", "mtp_finetune trains it"),
        ("tuned", "model.quantization=nf4", "quantised weights cannot be trained themselves"),
        ("frozen", "tokenizer=byte", "tokenizer=byte is for models trained from scratch"),
        ("frozen", "mtp.variant=diagonal", "mtp.variant must be one of parallel, causal, seq"),
    ],
)  # fmt: skip
def test_contradictions_are_one_line(
    mode: str, more: str, complaint: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path
) -> None:
    """A setting that is passed over in silence trains something else than was asked for."""
    cfg = settings_of(mode, tiny_model_dir, tiny_jsonl)
    with pytest.raises(ConfigError, match=complaint) as caught:
        train_by(changed(replace(cfg, run_dir=str(tmp_path / "run")), more))
    assert "\n" not in str(caught.value) and not list((tmp_path / "run").rglob("*"))


def test_a_new_model_has_to_be_described() -> None:
    """A recipe that falls back on some model would train for a night what nobody asked for."""
    with pytest.raises(ConfigError, match="mtp builds its model from model.init, which is empty"):
        new_base(TrainConfig(recipe="mtp", run_dir="unused"))


def test_heads_start_from_an_export_of_the_same_kind(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Parallel heads and causal ones have the same tensors, and mean different things by them."""
    first = train(monkeypatch, "frozen", tiny_model_dir, tiny_jsonl, tmp_path / "a") / "export"
    again = f"heads.start={first}"
    second = train(monkeypatch, "frozen", tiny_model_dir, tiny_jsonl, tmp_path / "b", again)
    losses = [
        [row["train/head_0/loss"] for row in rows_of(run) if "train/loss" in row]
        for run in (tmp_path / "a", second)
    ]
    assert losses[1][0] < losses[0][0]
    words = words_of("frozen", tiny_model_dir, tiny_jsonl, tmp_path / "c")
    words = [word for word in words if "variant" not in word]
    assert start(monkeypatch, *words, again) != 0
    assert "holds heads of mtp.variant=causal, not parallel" in capsys.readouterr().err


def test_all_variants_are_tried() -> None:
    """A fourth one would be trained by nobody here."""
    assert set(VARIANTS) <= MODES.keys()
