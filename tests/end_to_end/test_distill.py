"""A draft model from command line to decoding, and its export read by transformers alone."""

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
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.config import ConfigError, TrainConfig
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import FixedLength
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.draft import load_draft
from specheads.models.manifest import read_provenance
from specheads.models.names import base_digest
from specheads.train import train as train_by
from tests import processes
from tests.composed import changed, composed
from tests.conftest import build_byte_tokenizer, build_tiny_llama
from tests.end_to_end.commands import SHORT, on_files, start

DISTILL = (
    "+recipe=distill", "autocast=none", "optim.lr=1e-2", "evaluate.max_new_tokens=8",
    "evaluate.temperatures=[0,1]",
)  # fmt: skip
MODES: dict[str, tuple[str, ...]] = {
    "new": ("draft.hidden=16", "draft.loss=lk_lambda"),
    "pruned": ("draft.start=base", "draft.keep=[1]", "draft.loss=jsd", "draft.jsd_beta=0.3"),
    "given": ("draft.start=GIVEN", "draft.loss=reverse_kl", "draft.learn_prompts=false"),
    "texts": ("draft.loss=labels", "optim=adamw"),
    "on_policy": ("draft.on_policy=0.5", "draft.on_policy_tokens=6", "draft.loss=tv"),
    "stored": ("draft.stored=STORED", "draft.stored_top_k=8"),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a smaller model with the base's tokenizer and fewer padded outputs."""
    path = tmp_path_factory.mktemp("models") / "given"
    build_tiny_llama(seed=4, num_hidden_layers=1, vocab_size=264).save_pretrained(path)
    build_byte_tokenizer().save_pretrained(path)
    return path


def words_of(mode: str, model: Path, records: Path, given: Path, run_dir: Path, *more: str) -> Any:
    """Return the command's arguments. What is said later counts."""
    words = {"+recipe": ""}
    for word in (*on_files(model, records, run_dir), *SHORT, *DISTILL, *MODES[mode], *more):
        word = word.replace("GIVEN", str(given)).replace("STORED", str(run_dir.parent / "stored"))
        words[word.partition("=")[0]] = word
    return words.values()


@cache
def settings_of(mode: str, model: Path, records: Path, given: Path) -> TrainConfig:
    """Return a mode's settings, composed once; the run directory is to be given."""
    words = words_of(mode, model, records, given, Path("none"))
    cfg: TrainConfig = composed("train", [word for word in words if "hydra" not in word])
    return cfg


def train(
    monkeypatch: pytest.MonkeyPatch, mode: str, model: Path, records: Path, given: Path,
    run_dir: Path, *more: str,
) -> int:  # fmt: skip
    """Train; return the exit code."""
    return start(monkeypatch, *words_of(mode, model, records, given, run_dir, *more))


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return all rows of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", MODES)
def test_trains_exports_and_drafts(
    mode: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, given: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A part that is trained and not saved, or a base that is trained along, only shows in use."""
    run_dir = tmp_path / "run"
    assert train(monkeypatch, mode, tiny_model_dir, tiny_jsonl, given, run_dir) == 0
    printed = capsys.readouterr().out
    rows = rows_of(run_dir)
    steps = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(0 < row["train/loss"] < 20 and row["train/grad_norm"] > 0 for row in steps)
    alpha = {"texts": set(), "stored": {"train/draft/alpha_top"}}.get(mode, {"train/draft/alpha"})
    assert {key for key in steps[0] if "alpha" in key} == alpha
    assert "times as small as its base" in printed and "held-out alpha" in printed
    export = run_dir / "export"
    tokenizer = load_tokenizer(str(tiny_model_dir))
    draft = load_draft(str(export), tokenizer=tokenizer)
    base = load_base_model(str(tiny_model_dir))
    before = load_file(tiny_model_dir / "model.safetensors")
    assert all(torch.equal(before[name], each) for name, each in base.state_dict().items())
    sizes = {"new": (1, 16, 272), "given": (1, 32, 264)}.get(mode, (1, 32, 272))
    config = draft.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == sizes
    found = read_provenance(export)
    assert found is not None and found["base"]["digest"] == base_digest(str(tiny_model_dir))
    assert found["base"]["name"] == str(tiny_model_dir.resolve())
    training, measured = found["training"], found["measured"]
    assert training["draft"]["loss"] == next(
        (word[11:] for word in MODES[mode] if word.startswith("draft.loss=")), "forward_kl"
    )
    assert (training["steps"], training["positions"]) == (4, 4 * 128)
    assert 0 < training["heldout"]["alpha"] < 1 and training["heldout"]["loss"] > 0
    assert 0 < measured["final/alpha/t1"] < 1 <= measured["final/accept_length/t1"]
    assert measured["final/identical/t0"] == measured["final/compared/t0"] > 0
    assert {**rows[-1], **measured} == rows[-1]
    prompt = torch.tensor([tokenizer("def add(a, b):").input_ids])
    tokens = decode(
        base, DraftModelDrafter(draft, FixedLength(3)), prompt, max_new_tokens=16
    ).new_tokens
    assert tokens == plain_decode(base, prompt, max_new_tokens=16).new_tokens


def test_a_base_that_is_its_own_draft_is_always_right(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, given: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Figures that are measured against the wrong text or model are plausible, and worthless."""
    more = ("draft.keep=[0, 1]", "optim.lr=1e-12", "evaluate.every=2", "steps=2")
    run_dir = tmp_path / "run"
    assert train(monkeypatch, "pruned", tiny_model_dir, tiny_jsonl, given, run_dir, *more) == 0
    (evaluated,) = [row for row in rows_of(run_dir) if "eval/alpha" in row]
    for key in ("eval/alpha", "heldout/alpha"):
        assert evaluated[key] == pytest.approx(1, abs=1e-4)
    assert evaluated["eval/chain/t0/depth_3/acceptance"] == 1
    assert evaluated["eval/accept_length"] > 3
    final = rows_of(run_dir)[-1]
    assert final["final/alpha/t0"] == 1 and final["final/alpha/t1"] == pytest.approx(1, abs=1e-4)


def test_the_best_draft_is_exported(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, given: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A run that gets worse at the end would export the worse weights."""
    more = (
        "evaluate.every=1", "steps=3", "evaluate.temperatures=[0.0]", "optim.lr=3.0",
        "optim.grad_clip=1000",
    )  # fmt: skip
    run_dir = tmp_path / "run"
    assert train(monkeypatch, "pruned", tiny_model_dir, tiny_jsonl, given, run_dir, *more) == 0
    lengths = {
        row["step"]: row["eval/accept_length"]
        for row in rows_of(run_dir) if "eval/accept_length" in row
    }  # fmt: skip
    found = read_provenance(run_dir / "export")
    assert found is not None
    best = found["training"]["best"]
    assert lengths[best["step"]] == max(lengths.values())
    assert found["training"]["heldout"]["alpha"] == pytest.approx(best["metrics"]["heldout/alpha"])


def test_transformers_alone_drafts_with_it(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, given: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Other programs have the folder and no specheads; what only we can load is no product."""
    run_dir = tmp_path / "run"
    assert train(monkeypatch, "new", tiny_model_dir, tiny_jsonl, given, run_dir) == 0
    program = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "base, draft = (AutoModelForCausalLM.from_pretrained(p) for p in sys.argv[1:3])\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])\n"
        "asked = [{'role': 'user', 'content': 'def add(a, b):'}]\n"
        "ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True,"
        " return_tensors='pt', return_dict=True)\n"
        "limit = {'max_new_tokens': 12, 'do_sample': False}\n"
        "plain = base.generate(**ids, **limit)\n"
        "assisted = base.generate(**ids, **limit, assistant_model=draft)\n"
        "assert torch.equal(plain, assisted), (plain, assisted)\n"
        "assert not any(name.startswith('specheads') for name in sys.modules)\n"
    )
    folders = (str(tiny_model_dir), str(run_dir / "export"))
    done = processes.run("-c", program, *folders, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert AutoTokenizer.from_pretrained(run_dir / "export").eos_token_id == 258
    assert AutoModelForCausalLM.from_pretrained(run_dir / "export").dtype == torch.float32


@pytest.mark.parametrize("mode", ["on_policy", "stored"])
def test_a_dry_run_prints_the_plan_and_leaves_nothing(
    mode: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, given: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A plan without the draft's export is half the bill; a stored teacher takes the disk."""
    run_dir = tmp_path / "run"
    dry = "dry_run=true"
    assert train(monkeypatch, mode, tiny_model_dir, tiny_jsonl, given, run_dir, dry) == 0
    printed = capsys.readouterr().out
    assert "4 steps of 128 tokens" in printed
    assert re.search(r"a pass of the draft model costs \d+\.\d\d plain steps .* 0\.9\n", printed)
    assert re.search(r"draft 0\.\d+ M trained", printed)
    assert re.search(r"export (?!0 )\d", printed)
    assert ("stored" in printed) == (mode == "stored")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "more", "complaint"),
    [
        ("pruned", "draft.hidden=16", "draft.hidden=16 makes a new model .* got base"),
        ("new", "draft.keep=[0]", r"draft.keep=\[0\] names layers of the base, .* got random"),
        ("pruned", "draft.keep=[2]", r"draft.keep is \[2\], expected rising layers .* 0 to 1"),
        ("pruned", "model.quantization=nf4", "draft.start=base copies layers .*nf4 packs"),
        ("new", "draft.layers=3", "draft.layers is 3, the base model has 2 layers"),
        ("new", "draft.hidden=20", "draft.hidden is 20, which holds no whole heads"),
        ("on_policy", "draft.loss=labels", "draft.on_policy=0.5 needs the base's distribution"),
        ("stored", "draft.loss=labels", "draft.stored=.* needs the base's distribution"),
        ("stored", "draft.on_policy=0.5", "draft.stored must be empty with draft.on_policy"),
        ("stored", "data.growth=[[32, 0.5]]", "draft.stored needs rows of one length"),
        (
            "new",
            "adapter.kind=lora",
            "adapter.kind=lora tunes the base; distill trains a",
        ),
        ("new", "features.dir=f", "features.dir=f keeps hidden states for heads"),
        ("new", "draft.loss=kl", "draft.loss must be one of labels, forward_kl"),
        ("new", "evaluate.max_new_tokens=500", "no held-out record has a prompt that leaves room"),
        ("given", "draft.start=/no/such", "draft.start=/no/such: there is no such folder"),
        ("new", "tokenizer=byte", "tokenizer=byte is for models trained from scratch"),
    ],
)
def test_contradictions_are_one_line(
    mode: str, more: str, complaint: str, tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path,
    given: Path,
) -> None:  # fmt: skip
    """A setting that is passed over in silence trains something else than was asked for."""
    cfg = settings_of(mode, tiny_model_dir, tiny_jsonl, given)
    with pytest.raises(ConfigError, match=complaint) as caught:
        train_by(changed(replace(cfg, run_dir=str(tmp_path / "run")), more))
    assert "\n" not in str(caught.value) and not list((tmp_path / "run").rglob("*"))


def test_a_model_of_other_tokens_is_no_draft_model(
    tmp_path: Path, tiny_model_dir: Path, tiny_jsonl: Path, given: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It would train for a night towards an acceptance of nothing."""
    longer = build_byte_tokenizer()
    longer.add_tokens(["<more>"])
    build_tiny_llama(num_hidden_layers=1).save_pretrained(tmp_path / "other")
    longer.save_pretrained(tmp_path / "other")
    more = f"draft.start={tmp_path / 'other'}"
    run_dir = tmp_path / "run"
    assert train(monkeypatch, "given", tiny_model_dir, tiny_jsonl, given, run_dir, more) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "its tokenizer is not the base model's: 1 of 262 tokens differ, first '<more>'" in last
