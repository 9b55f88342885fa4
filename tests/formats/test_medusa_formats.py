"""Medusa heads in the formats of other programs, read back by their rules, not by ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from specheads.config import AdapterConfig, ConfigError, ExportConfig
from specheads.config.training import LM_HEADS
from specheads.formats import card, write
from specheads.formats.medusa import write_heads
from specheads.models.adapters import adapter_parameters, add_adapter, merge_adapter
from specheads.models.base import load_base_model
from specheads.models.checkpoint import load_export, origin
from specheads.models.draft import save_draft
from specheads.models.heads import MedusaHeads
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import OutputLayer
from tests.medusa_exports import HEADS, SIZE, VOCAB, made, medusa, save
from tests.readers import original_medusa
from tests.toys import full_logits

HIDDEN = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(1))
CLOSE = {"rtol": 0, "atol": 1e-6}


@torch.no_grad()
def ours(heads: MedusaHeads, output: OutputLayer | Path, hidden: Tensor = HIDDEN) -> Tensor:
    """Return what native heads say, over the whole vocabulary."""
    if isinstance(output, Path):
        output = OutputLayer(load_base_model(str(output)).get_output_embeddings())
    return full_logits(heads, heads.logits(hidden, output))


@pytest.fixture(scope="module")
def natives(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Path]:
    """A native export for every form of output matrix; ``deep`` has two blocks, ``flat`` none."""
    root = tmp_path_factory.mktemp("natives")
    kinds = {name: medusa(name) for name in LM_HEADS}
    kinds |= {"deep": medusa("own", 2), "flat": medusa("own", 0)}
    return {name: save(root / name, heads, tiny_model_dir) for name, heads in kinds.items()}


KINDS = {name: (name, 1) for name in LM_HEADS}
KINDS |= {"deep": ("own", 2), "flat": ("own", 0)}


@pytest.mark.parametrize("kind", ["own", "shared", "low_rank", "deep", "flat"])
def test_the_original_layout_gives_the_same_logits(
    kind: str, natives: dict[str, Path], tiny_model_dir: Path, tmp_path: Path
) -> None:
    """A matrix at the wrong place of the sequence is a block to the reader, and loads or not."""
    folder = made(natives[kind], tmp_path / "made", format="fasterdecoding-v1")
    expected = ours(medusa(*KINDS[kind]), tiny_model_dir)
    found = original_medusa.logits(original_medusa.v1(folder), HIDDEN)
    torch.testing.assert_close(found, expected, **CLOSE)
    config = json.loads((folder / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_dir)
    assert "version" not in config and (folder / "tokenizer.json").is_file()


def test_version_2_shares_the_matrix(
    natives: dict[str, Path], tiny_model_dir: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Written of heads with matrices of their own, version 2 would drop these without a word."""
    folder = made(natives["shared"], tmp_path / "made", format="fasterdecoding-v2")
    base = load_base_model(str(tiny_model_dir))
    found = original_medusa.logits(original_medusa.v2(folder, base.lm_head), HIDDEN)
    torch.testing.assert_close(found, ours(medusa("shared"), tiny_model_dir), **CLOSE)
    rows = made(natives["shared_pruned"], tmp_path / "rows", format="fasterdecoding-v2")
    found = original_medusa.logits(original_medusa.v2(rows, base.lm_head), HIDDEN)
    kept = medusa("shared_pruned").token_map
    expected = ours(medusa("shared_pruned"), tiny_model_dir)
    torch.testing.assert_close(found[..., kept], expected[..., kept], **CLOSE)
    assert "among all 272 tokens there, among 40 of them here" in capsys.readouterr().out
    for kind in ("own", "low_rank", "pruned", "deep"):
        with pytest.raises(ConfigError, match=r"share the base's .*: use fasterdecoding_v1") as no:
            made(natives[kind], tmp_path / "v2", format="fasterdecoding_v2")
        assert "\n" not in str(no.value) and not (tmp_path / "v2").exists()


@pytest.mark.parametrize("kind", ["own", "shared", "low_rank"])
def test_one_folder_holds_base_and_heads(
    kind: str, natives: dict[str, Path], tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Copies of one matrix look like tied ones to the writer, which keeps the first and drops K."""
    folder = made(natives[kind], tmp_path / "made", format="merged")
    base, heads = original_medusa.merged(folder)
    expected = ours(medusa(kind), tiny_model_dir)
    torch.testing.assert_close(original_medusa.logits(heads, HIDDEN), expected, **CLOSE)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)(ids).logits
        assert torch.equal(base(ids).logits, plain)


def test_a_factor_of_the_base_is_not_lost(tmp_path: Path) -> None:
    """Cohere and Granite multiply their logits: another temperature, and other thresholds."""
    layer = OutputLayer(nn.Linear(SIZE, VOCAB, bias=False), scale=0.0625)
    for kind in ("own", "shared"):
        heads, folder = medusa(kind), tmp_path / kind
        folder.mkdir()
        write_heads("fasterdecoding_v1", folder, heads, layer, None)
        found = original_medusa.logits(original_medusa.v1(folder), HIDDEN)
        torch.testing.assert_close(found, ours(heads, layer), **CLOSE)


def test_what_a_matrix_cannot_hold_is_said(tmp_path: Path) -> None:
    """Phi's output layer adds a bias to all logits: dropped, the best guess is another."""
    heads = medusa()
    biased = OutputLayer(nn.Linear(SIZE, VOCAB, bias=True))
    with pytest.raises(ConfigError, match="without a bias, but the base model's"):
        write_heads("fasterdecoding_v1", tmp_path, heads, biased, None)
    capped = OutputLayer(nn.Linear(SIZE, VOCAB, bias=False), softcap=30.0)
    notes = write_heads("fasterdecoding_v1", tmp_path, heads, capped, None)
    assert sum("caps its logits at 30" in note for note in notes) == 1
    found = original_medusa.logits(original_medusa.v1(tmp_path), HIDDEN)
    assert torch.equal(found.argmax(-1), ours(heads, capped).argmax(-1))


def test_a_map_of_all_tokens_is_none(tmp_path: Path) -> None:
    """Pruned to nothing less, matrices are whole, but their rows may be in another order."""
    heads = medusa("pruned", num_kept=VOCAB)
    assert heads.token_map is not None
    heads.token_map.copy_(torch.randperm(VOCAB))
    layer = OutputLayer(nn.Linear(SIZE, VOCAB, bias=False))
    write_heads("fasterdecoding_v1", tmp_path, heads, layer, None)
    found = original_medusa.logits(original_medusa.v1(tmp_path), HIDDEN)
    torch.testing.assert_close(found, ours(heads, layer), **CLOSE)


@pytest.mark.parametrize("form", ["fasterdecoding_v1", "fasterdecoding_v2", "merged"])
def test_heads_that_a_format_has_no_place_for(
    form: str, tiny_model_dir: Path, tiny_llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Written without what they read, heads guess at random, and nobody is told."""
    block = block_config(tiny_llama.config)
    kinds: dict[str, tuple[Any, str]] = {
        "mtp": (MtpHeads(2, block, VOCAB, variant="sequential"), "Medusa heads.*is mtp, which"),
        "hydra": (medusa("shared", condition=True), "is hydra, heads which read the tokens"),
        "markov": (medusa("shared", markov_rank=3), r"correct their logits .* \(markov_rank\)"),
        "prefix": (
            medusa("shared", prefix={
                "hidden_size": SIZE, "intermediate_size": 64, "num_attention_heads": 4,
            }), r"an attention layer of their own \(prefix_layer\)",
        ),
    }  # fmt: skip
    for name, (heads, message) in kinds.items():
        if not (path := tmp_path / name).exists():
            save(path, heads, tiny_model_dir)
        with pytest.raises(ConfigError, match=message) as refused:
            made(path, tmp_path / "made", format=form)
        assert "\n" not in str(refused.value) and not (tmp_path / "made").exists()
    for kind in ("pruned", "shared_pruned"):
        pruned = save(tmp_path / kind, medusa(kind), tiny_model_dir)
        if form not in ("fasterdecoding_v1", "merged"):
            continue
        with pytest.raises(ConfigError, match="pruned to 40 of 272, which vllm_heads can hold"):
            made(pruned, tmp_path / "made", format=form)


@pytest.mark.parametrize("merge", [True, False])
def test_a_tuned_base_comes_along(
    merge: bool, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads of a tuned base over the original: fewer guesses are right, nothing else is seen."""
    base = load_base_model(str(tiny_model_dir))
    add_adapter(base, AdapterConfig(kind="lora", rank=4))
    with torch.no_grad():
        for parameter in adapter_parameters(base).values():
            parameter.normal_(std=0.1)
    if merge:
        merge_adapter(base)
    native = save(tmp_path / "native", medusa(), tiny_model_dir, tuned_base=base)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = load_export(native).base(ids).logits
    for form in ("fasterdecoding_v1", "merged"):
        folder = made(native, tmp_path / form, format=form)
        place = folder if form == "merged" else folder / "base"
        with torch.no_grad():
            found = AutoModelForCausalLM.from_pretrained(place)(ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        printed = capsys.readouterr().out
        if form != "merged":
            assert f"the tuned base model, which is in {place}" in printed
    config = json.loads((tmp_path / "fasterdecoding_v1" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "fasterdecoding_v1" / "base")


def test_dtype_is_that_of_the_files_alone(natives: dict[str, Path], tmp_path: Path) -> None:
    """A token map in half precision would name other tokens from 2,048 on."""
    folder = made(natives["shared_pruned"], tmp_path / "made", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert kinds.pop("token_map") == torch.int64 and set(kinds.values()) == {torch.bfloat16}
    halves = made(natives["own"], tmp_path / "merged", format="merged", dtype="bfloat16")
    kinds = {name: each.dtype for name, each in load_file(halves / "model.safetensors").items()}
    assert set(kinds.values()) == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(halves).dtype == torch.bfloat16


def test_a_draft_model_alone(
    tiny_model_dir: Path, tmp_path: Path, make_tiny_llama: Callable[..., LlamaForCausalLM],
    byte_tokenizer: Any,
) -> None:  # fmt: skip
    """What only specheads reads would make engines and the hub take it for something else."""
    draft = make_tiny_llama(seed=2)
    info = origin(str(tiny_model_dir), {"recipe": "distill", "steps": 3})
    save_draft(tmp_path / "trained", draft, byte_tokenizer, info | {"measured": {"alpha": 0.5}})
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = draft(ids).logits
    for form in ("draft", "plain"):
        folder = made(tmp_path / "trained", tmp_path / form, format=form)
        assert not (folder / "specheads.json").exists() and not (folder / "manifest.json").exists()
        with torch.no_grad():
            found = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        assert torch.equal(found, expected)
    half = made(tmp_path / "trained", tmp_path / "half", dtype="bfloat16")
    about = [
        json.loads((path / "specheads.json").read_text()) for path in (tmp_path / "trained", half)
    ]
    assert about[0] == about[1] and load_base_model(str(half), dtype="bfloat16")
    for settings, message in (
        (
            {"format": "merged"},
            "=merged holds .* heads, .* is a draft model, which format=draft",
        ),
        ({"dtype": "bfloat16", "merge": True}, "is a draft model: lm_head= and merge= are for"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(tmp_path / "trained", tmp_path / "made", **settings)
    native = save(tmp_path / "native", medusa(), tiny_model_dir)
    with pytest.raises(ConfigError, match="=draft holds a draft model, .* is medusa; plain"):
        made(native, tmp_path / "made", format="draft")


def test_a_folder_that_cannot_be_uploaded_is_not_written(
    natives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of writing, and then it turns out that nobody was logged in."""
    for settings in ({"format": "plain"}, {}, {"dtype": "bfloat16"}):
        with pytest.raises(ConfigError, match="push is 'nobody', expected organisation/name"):
            made(natives["own"], tmp_path / "made", push="nobody", **settings)
        assert not (tmp_path / "made").exists()
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(write, "check_push", lambda name: None)
    monkeypatch.setattr(
        card, "upload", lambda folder, name, *, private: sent.append((folder, name, private))
    )
    folder = made(natives["own"], tmp_path / "made", push="org/name", private=True)
    assert sent == [(folder, "org/name", True)] and load_export(folder).heads.num_heads == HEADS


def test_formats_are_named_with_either_stroke(tmp_path: Path) -> None:
    """vllm-heads is how vLLM's users say it; refused for a stroke, a user gives up."""
    assert ExportConfig(format="vllm-heads").format == "vllm_heads"
    with pytest.raises(ConfigError, match="format must be one of native, plain, draft, hf, "):
        made(tmp_path / "native", tmp_path / "made", format="vllm-eagle")
