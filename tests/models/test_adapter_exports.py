"""Exports of adapted and of quantised bases: what is written, and that the same comes back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from specheads.attention.tree import Tree
from specheads.config import AdapterConfig, ConfigError
from specheads.models.adapters import adapter_parameters, add_adapter, has_adapter, merge_adapter
from specheads.models.base import load_base_model
from specheads.models.checkpoint import load_export, origin, save_export, save_plain_model
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import check_manifest, write_manifest
from specheads.models.quantize import quantization_of
from tests.conftest import build_tiny_llama

IDS = torch.arange(20)[None]


def tuned(model_dir: Path, quantization: str = "none", dtype: str = "float32") -> PreTrainedModel:
    """Return the tiny model with an adapter that changes it."""
    base = load_base_model(str(model_dir), quantization=quantization, dtype=dtype)
    add_adapter(base, AdapterConfig(kind="lora", rank=4, alpha=3.0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_parameters(base).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return base.eval()


def save(
    path: Path, model_dir: Path, tokenizer: PreTrainedTokenizerFast,
    tuned_base: PreTrainedModel | None = None, **base: Any,
) -> Path:  # fmt: skip
    """Write an export over the tiny model."""
    info, heads = origin(str(model_dir), {}, **base), MedusaHeads(2, 1, 32, 272)
    save_export(path, heads, tokenizer, Tree.chain(2), info, tuned_base=tuned_base)
    return path


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Return the logits without gradients."""
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_is_merged_into_an_ordinary_model(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast, tied: bool,
    make_tiny_llama: Callable[..., PreTrainedModel],
) -> None:  # fmt: skip
    """What serves such an export must not have to know adapters; training may go on meanwhile."""
    make_tiny_llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "m")
    base = tuned(tmp_path / "m")
    before = logits(base)
    save_plain_model(tmp_path / "plain", base, byte_tokenizer)
    assert torch.equal(logits(base), before)
    assert has_adapter(base)
    merge_adapter(base)
    path = save(tmp_path / "e", tmp_path / "m", byte_tokenizer, tuned_base=base)
    export = load_export(path)
    info = export.config["base"]
    assert (info["tuned"], info["adapter"], info["quantization"]) == (True, False, None)
    assert not (path / "adapter").exists()
    assert not has_adapter(export.base)
    torch.testing.assert_close(logits(export.base), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(path / "base")), logits(export.base)
    )
    saved = load_file(path / "base" / "model.safetensors")
    assert ("lm_head.weight" in saved) == (not tied)
    assert torch.equal(logits(base), logits(export.base)), "merged in memory is what is exported"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(plain), logits(base)), "merged on the way to the disk is the same"


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_a_separate_adapter_comes_back_bit_for_bit(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast, quantization: str
) -> None:
    """An adapter over a base that is rounded otherwise than in training is another model."""
    base = tuned(tiny_model_dir, quantization)
    save(tmp_path / "e", tiny_model_dir, byte_tokenizer, build_tiny_llama())  # leaves base/
    path = save(tmp_path / "e", tiny_model_dir, byte_tokenizer, tuned_base=base)
    export = load_export(path)
    info = export.config["base"]
    assert (info["tuned"], info["adapter"]) == (True, True)
    assert (info["quantization"] or {"method": "none"})["method"] == quantization
    assert quantization_of(export.base) == info["quantization"]
    assert not (path / "base").exists()
    assert torch.equal(logits(export.base), logits(base))
    listed = check_manifest(path)["files"]
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= set(listed)
    assert not [name for name in listed if name.endswith((".bin", ".pt"))]


def test_the_original_under_an_adapter_is_checked(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast,
    make_tiny_llama: Callable[..., PreTrainedModel],
) -> None:  # fmt: skip
    """An adapter loads over any model of the same shape, and is of use over one alone."""
    base = tuned(tiny_model_dir, "nf4")
    path = save(tmp_path / "e", tiny_model_dir, byte_tokenizer, tuned_base=base)
    moved = shutil.copytree(tiny_model_dir, tmp_path / "moved")
    assert torch.equal(logits(load_export(path, base=str(moved)).base), logits(base))
    make_tiny_llama(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="trained on other weights"):
        load_export(path, base=str(tmp_path / "other"))
    file = path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="adapter_model.safetensors has"):
        load_export(path)
    write_manifest(path)
    with pytest.raises(ConfigError, match="adapter_model.safetensors is damaged"):
        load_export(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_into_a_quantised_base_dequantises_it(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast, dtype: str
) -> None:
    """Sums rounded to four bits again would be another model; the caller's one stays quantised."""
    base = tuned(tiny_model_dir, "nf4", dtype)
    before = logits(base)
    save_plain_model(tmp_path / "plain", base, byte_tokenizer)
    assert torch.equal(logits(base), before)
    assert quantization_of(base) is not None
    assert base.config.quantization_config is not None
    merge_adapter(base)
    path = save(tmp_path / "e", tiny_model_dir, byte_tokenizer, tuned_base=base)
    export = load_export(path)
    plain = load_base_model(str(tmp_path / "plain"), dtype=dtype)
    assert torch.equal(logits(plain), logits(export.base))
    info = export.config["base"]
    assert (info["tuned"], info["adapter"], info["quantization"]) == (True, False, None)
    assert "quantization_config" not in json.loads((path / "base" / "config.json").read_text())
    assert export.base.dtype == getattr(torch, dtype)
    tolerance = 1e-4 if dtype == "float32" else 0.15
    torch.testing.assert_close(logits(export.base), before, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_heads_of_a_frozen_quantised_base(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast, quantization: str
) -> None:
    """Heads learned the hidden states of the rounded base; those of the original are others."""
    base = load_base_model(str(tiny_model_dir), quantization=quantization)
    found = quantization_of(base)
    path = save(tmp_path / "e", tiny_model_dir, byte_tokenizer, quantization=found)
    export = load_export(path)
    assert quantization_of(export.base) == found
    assert torch.equal(logits(export.base), logits(base))
    assert not export.config["base"]["tuned"]
    config = json.loads((path / "config.json").read_text())
    config["base"]["quantization"] = {"method": "int2"}
    (path / "config.json").write_text(json.dumps(config))
    write_manifest(path)
    with pytest.raises(ConfigError, match="method is 'int2', expected nf4, int8"):
        load_export(path)


def test_heads_of_a_base_that_is_quantised_itself(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Its own files say how; quantising it once more is refused while loading."""
    load_base_model(str(tiny_model_dir), quantization="nf4").save_pretrained(tmp_path / "m")
    base = load_base_model(str(tmp_path / "m"))
    found = quantization_of(base)
    path = save(tmp_path / "e", tmp_path / "m", byte_tokenizer, quantization=found)
    assert torch.equal(logits(load_export(path).base), logits(base))
