"""Exports of multi-token-prediction heads: what is written, and that the same comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specheads.attention.tree import Tree
from specheads.config import AdapterConfig, ConfigError
from specheads.models.adapters import adapter_parameters, add_adapter
from specheads.models.base import load_base_model
from specheads.models.checkpoint import load_export, load_heads, origin, read_config, save_export
from specheads.models.manifest import write_manifest
from specheads.models.mtp import VARIANTS, MtpHeads, block_config
from specheads.models.output import TRUNK, packed_taps

TREE = Tree.from_choices([[0], [1], [0, 0]])


def mtp_heads(base: PreTrainedModel, **settings: Any) -> MtpHeads:
    """Return two heads for ``base``, every tensor drawn, norms too."""
    torch.manual_seed(3)
    heads = MtpHeads(2, block_config(base.config), base.config.vocab_size, **settings)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.2)
    return heads.eval()


def save(
    path: Path, heads: MtpHeads, model_dir: Path | None, tokenizer: Any, **settings: Any
) -> Path:
    """Write an export over the model in ``model_dir``, None for one trained from scratch."""
    name = "" if model_dir is None else str(model_dir)
    info = origin(name, {"recipe": "none", "steps": 0})
    save_export(path, heads, tokenizer, TREE, info, **settings)
    return path


@pytest.fixture
def export(
    tmp_path: Path, tiny_model_dir: Path, tiny_llama: PreTrainedModel,
    byte_tokenizer: PreTrainedTokenizerFast,
) -> Path:  # fmt: skip
    """An export of sequential heads with own output matrices."""
    heads = mtp_heads(tiny_llama, variant="sequential", lm_head="own")
    return save(tmp_path / "export", heads, tiny_model_dir, byte_tokenizer)


def read(heads: Any, hidden: Tensor, tokens: Tensor, base: PreTrainedModel) -> Tensor:
    """Return what the output matrices read of two packed documents."""
    heads.read_through(base)
    places = torch.cat([torch.arange(8), torch.arange(5)]).expand(2, -1)
    with torch.no_grad():
        found: Tensor = heads.contextual(hidden, places, tokens)
    return found


@pytest.mark.parametrize("lm_head", ["shared", "own"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_comes_back(
    tmp_path: Path, tiny_model_dir: Path, tiny_llama: PreTrainedModel,
    byte_tokenizer: PreTrainedTokenizerFast, variant: str, lm_head: str,
) -> None:  # fmt: skip
    """A variant that loads as another has the same tensors, and drafts like untrained heads."""
    order = variant == "sequential"
    heads = mtp_heads(tiny_llama, variant=variant, lm_head=lm_head, hidden_first=order)
    path = save(tmp_path / "e", heads, tiny_model_dir, byte_tokenizer)
    export = load_export(path)
    loaded = export.heads
    assert isinstance(loaded, MtpHeads)
    assert not loaded.training
    for key in ("variant", "lm_head", "hidden_first", "num_heads", "vocab_size", "kind"):
        assert getattr(loaded, key) == getattr(heads, key), key
    assert loaded.block == heads.block
    expected = heads.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(v, expected[k]) for k, v in loaded.state_dict().items())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 13, 32, generator=generator)
    tokens = torch.randint(0, 272, (2, 13), generator=generator)
    found = read(loaded, hidden, tokens, tiny_llama)
    assert torch.equal(found, read(heads, hidden, tokens, tiny_llama)), "a table that no file holds"
    assert torch.equal(found, read(load_heads(path).eval(), hidden, tokens, tiny_llama))


def test_the_schema_is_whole(export: Path) -> None:
    """Other tools read these keys and names; a missing one breaks them, not us."""
    config = read_config(export)
    assert list(config) == [
        "format_version", "kind", "num_heads", "variant", "lm_head", "hidden_first", "block",
        "hidden_size", "vocab_size", "base", "tokenizer", "tree", "training",
    ]  # fmt: skip
    assert (config["kind"], config["num_heads"]) == ("mtp", 2)
    assert config["block"]["model_type"] == "llama"
    assert config["block"]["num_hidden_layers"] == 1
    names = set(load_file(export / "model.safetensors"))
    assert all(name.startswith(("mtp.layers.0.", "mtp.layers.1.")) for name in names)
    assert {
        f"mtp.layers.1.{name}.weight"
        for name in ("block.self_attn.q_proj", "norm", "enorm", "hnorm", "eh_proj", "lm_head")
    } <= names


def test_a_model_trained_from_scratch_is_its_own_base(
    tmp_path: Path, tiny_model_dir: Path, make_tiny_llama: Callable[..., PreTrainedModel],
    byte_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An empty name is the current folder to most functions: some other model would be loaded."""
    base = make_tiny_llama(seed=7)
    monkeypatch.chdir(tiny_model_dir)
    path = save(tmp_path / "e", mtp_heads(base), None, byte_tokenizer, tuned_base=base)
    export = load_export(path)
    info = export.config["base"]
    assert (info["name"], info["tuned"], info["digest"]) == ("", True, "")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(export.base(ids).logits, base(ids).logits)
    with pytest.raises(ConfigError, match="brings its own tuned base"):
        load_export(path, base=str(tiny_model_dir))
    with pytest.raises(ValueError, match="base.name is empty, and there is no tuned_base"):
        save(tmp_path / "other", mtp_heads(base), None, byte_tokenizer)


def edit(path: Path, changes: dict[str, Any]) -> None:
    """Change config.json as a wrong tool would, manifest included; None takes a key away."""
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (config[section] if section else config)[name] = value
    kept = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    write_manifest(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kind": "hydra"}, "lacks num_layers"),
        ({"variant": None}, "lacks variant"),
        ({"block": None}, "lacks block"),
        ({"block": 5}, "block is 5, expected dict"),
        ({"block": []}, "block is .., expected dict"),
        ({"block__model_type": "nothing"}, "block.model_type is 'nothing'"),
        ({"block__model_type": "gpt2"}, "block: .*no layers: MTP heads need"),
        ({"block__hidden_size": "wide"}, "block: .*hidden_size"),
        ({"block__num_attention_heads": 0}, "block: "),
        ({"block__hidden_size": 64}, "block.hidden_size is 64, hidden_size 32"),
        ({"block__intermediate_size": 48}, r"has shape \[.*64.*\], expected \[.*48.*\]"),
        ({"variant": "diagonal"}, "variant must be one of parallel, causal, sequential"),
        ({"variant": "causal"}, "28 tensors where 22 .* unexpected: mtp.layers.0.eh_proj.weight"),
        ({"num_heads": 3}, "lacks 14 of 42 tensors, first mtp.layers.2.block"),
        ({"num_heads": 0, "tree__choices": []}, "num_heads is 0, expected 1 to 256"),
        ({"num_heads": "two"}, "num_heads is 'two', expected 1 to 256"),
        ({"lm_head": "shared"}, "28 tensors where 26 .* unexpected: mtp.layers.0.lm_head.weight"),
        ({"vocab_size": 100}, r"lm_head.weight has shape \[272, 32\], expected \[100, 32\]"),
        ({"tree__choices": [[0], [0, 0], [0, 0, 0]]}, "3 deep, but there are 2 heads"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_refused(export: Path, changes: dict[str, Any], complaint: str) -> None:
    """Every disagreement is one line that names the file, before anything is decoded."""
    edit(export, changes)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_export(export)
    assert "\n" not in str(caught.value)
    assert str(export) in str(caught.value)


def test_missing_extra_and_misshaped_tensors_are_refused(export: Path) -> None:
    """A tensor that is skipped leaves a layer untrained: 0% acceptance in production."""
    file = export / "model.safetensors"
    whole = load_file(file)
    norm = "mtp.layers.1.hnorm.weight"
    for change, complaint in (
        ({norm: None}, f"lacks 1 of 28 tensors, first {norm}"),
        ({"mtp.layers.2.norm.weight": torch.ones(32)}, "29 tensors .* unexpected: mtp.layers.2"),
        ({norm: torch.ones(31)}, rf"{norm} has shape \[31\], expected \[32\]"),
        ({norm: None, norm.removeprefix("mtp."): torch.ones(32)}, f"lacks 1 of 28 .*{norm}"),
    ):
        changed = {name: tensor for name, tensor in (whole | change).items() if tensor is not None}
        save_file(changed, file)
        write_manifest(export)
        with pytest.raises(ConfigError, match=complaint) as caught:
            load_export(export)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_heads_of_a_quantised_base_are_not_quantised(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast,
    quantization: str,
) -> None:  # fmt: skip
    """The base's config says how it is quantised; copied along it would be said of the heads."""
    base = load_base_model(str(tiny_model_dir), quantization=quantization)
    path = save(tmp_path / "e", mtp_heads(base), tiny_model_dir, byte_tokenizer)
    assert "quantization_config" not in read_config(path)["block"]
    assert all(p.dtype == torch.float32 for p in load_heads(path).parameters())


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
@pytest.mark.parametrize("adapter", [False, True])
def test_copies_of_the_last_layer_are_what_the_base_computes(
    tiny_model_dir: Path, quantization: str, adapter: bool
) -> None:
    """Packed numbers, or weights without their adapter, would start as another layer, unnoticed."""
    base = load_base_model(str(tiny_model_dir), quantization=quantization)
    if adapter:
        add_adapter(base, AdapterConfig(kind="lora", rank=4))
        with torch.no_grad():
            for parameter in adapter_parameters(base).values():
                parameter.normal_(std=0.1)
    heads = MtpHeads(2, block_config(base.config), 272)
    heads.init_from_base(base)
    ids = torch.arange(40, 60)[None]
    positions = torch.arange(20)[None]
    with torch.no_grad():
        final, trunk = packed_taps(base.eval(), ids, positions, (TRUNK,))
        found = heads.eval().contextual(trunk, positions)
    assert not torch.allclose(final, trunk, atol=1e-2)
    # int8 products round what they multiply, which plain ones do not
    near = {"none": 1e-5, "nf4": 1e-4, "int8": 0.1}[quantization]
    for each in found:
        torch.testing.assert_close(each, final, atol=near, rtol=near)
