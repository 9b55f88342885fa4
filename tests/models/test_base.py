"""The base model: strict loading, its own output layer, hidden states, digests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specheads.config import ConfigError
from specheads.models import base, digest, names
from specheads.models.base import (
    build_from_init,
    check_tokenizer,
    context_length,
    load_base_model,
    load_tokenizer,
)
from specheads.models.output import (
    FINAL,
    TRUNK,
    capture_hidden,
    final_norm,
    output_layer,
    packed_taps,
)
from tests.scripted import build

IDS = torch.arange(10, 30)[None]
SMALL: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def _model(model_type: str, redraw: Callable[..., None], **values: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**SMALL, **values})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    redraw(model)
    return model


def test_loads_what_was_saved(tiny_model_dir: Path, tiny_llama: PreTrainedModel) -> None:
    """The loaded model is the saved one, in the asked dtype and attention, and not training."""
    model = load_base_model(str(tiny_model_dir), attn="eager")
    assert model.config._attn_implementation == "eager"
    assert not model.training
    torch.testing.assert_close(model(IDS).logits, tiny_llama(IDS).logits)
    assert load_base_model(str(tiny_model_dir), dtype="bfloat16").dtype == torch.bfloat16
    assert context_length(model) == 512
    tokenizer = load_tokenizer(str(tiny_model_dir))
    assert tokenizer("é").input_ids == list("é".encode())
    assert tokenizer.chat_template


def test_missing_models_are_one_line(tmp_path: Path) -> None:
    """A typing error in model.name must not end in a page of traceback."""
    for name in (str(tmp_path / "none"), "./none", "a/b/c", "no-such-org/no-such-model"):
        with pytest.raises(ConfigError, match="model.name=") as caught:
            load_base_model(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="the folder holds no model"):
        load_tokenizer(str(tmp_path))


def test_missing_weights_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Transformers fills missing tensors with random numbers and only logs it."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"1 weights are missing in its files, first {name}"):
        load_base_model(str(folder))
    save_file(tensors | {name: torch.zeros(3, 32)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"1 weights are of another shape.*{name}"):
        load_base_model(str(folder))


def test_flash_attention_only_where_it_is(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers would fetch a kernel from the hub or fail deep inside."""
    monkeypatch.setattr(base, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(ConfigError, match="flash_attention_2 needs the flash-attn package"):
        load_base_model(str(tiny_model_dir), attn="flash_attention_2")


def test_attention_that_the_model_lacks(
    tmp_path: Path, redraw_weights: Callable[..., None]
) -> None:
    """What transformers says about an attention the model lacks is cut to one line."""
    config = AutoConfig.for_model("mpt", vocab_size=64, d_model=32, n_heads=4, n_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot load model.name=.*") as caught:
        load_base_model(str(tmp_path), attn="flex_attention")
    assert "\n" not in str(caught.value)


def test_tokenizer_with_more_ids_than_embeddings(
    tiny_model_dir: Path, make_tiny_llama: Callable[..., PreTrainedModel],
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:  # fmt: skip
    """An id beyond the matrix is an index error at best, another model's tokenizer at worst."""
    check_tokenizer(byte_tokenizer, make_tiny_llama())  # 262 ids, 272 rows: padding is normal
    check_tokenizer(byte_tokenizer, make_tiny_llama(vocab_size=262))
    with pytest.raises(ConfigError, match="has 262 token ids, the base model .* 261 embeddings"):
        check_tokenizer(byte_tokenizer, make_tiny_llama(vocab_size=261))


@pytest.mark.parametrize(
    ("model_type", "values", "scale", "softcap"),
    [
        ("llama", {}, 1.0, None),
        ("gemma2", {"final_logit_softcapping": 5.0}, 1.0, 5.0),
        ("gemma2", {"final_logit_softcapping": None}, 1.0, None),
        ("cohere", {"logit_scale": 0.3}, 0.3, None),
        ("granite", {"logits_scaling": 7.0}, 1 / 7, None),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, 1.0, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_layer_gives_the_models_logits(
    redraw_weights: Callable[..., None], model_type: str, values: dict[str, Any],
    scale: float, softcap: float | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Heads that skip a softcap or a scale propose with other probabilities than the base has."""
    model = _model(model_type, redraw_weights, **values).to(dtype)
    output = output_layer(model)
    assert (output.scale, output.softcap) == (scale, softcap)
    assert output.weight is model.get_output_embeddings().weight
    with torch.no_grad(), capture_hidden(model) as captured:
        logits = model(IDS, logits_to_keep=1).logits
        assert captured[FINAL].shape == (1, 20, 32), "all positions, although one row of logits"
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(
            output(captured[FINAL])[:, -1:].float(), logits.float(), atol=tolerance, rtol=tolerance
        )


def test_an_undeclared_scale_is_found_and_nonsense_refused(
    tiny_llama: PreTrainedModel,
) -> None:
    """What multiplies the logits need not stand in the config; other changes are refused."""
    forward = tiny_llama.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits * 0.3
        return out

    tiny_llama.forward = scaled  # type: ignore[method-assign]
    assert output_layer(tiny_llama).scale == pytest.approx(0.3)

    def squared(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits**2
        return out

    tiny_llama.forward = squared  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="not scale and softcap of its output matrix"):
        output_layer(tiny_llama)
    assert not tiny_llama.training


def test_capture_ends_with_its_context(tiny_llama: PreTrainedModel) -> None:
    """A hook that stays keeps the activations of every later forward alive."""
    with capture_hidden(tiny_llama) as captured:
        hidden = tiny_llama.base_model(IDS).last_hidden_state
        assert captured[FINAL] is hidden
    tiny_llama.base_model(IDS[:, :3])
    assert captured[FINAL] is hidden
    with pytest.raises(ValueError, match="no decoder"), capture_hidden(tiny_llama.base_model):
        pass


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt_neox"])
def test_taps_are_the_layers_of_their_numbers(name: str) -> None:
    """Layers counted from another number cost drafters that read them accept length, silently."""
    model = build(name, num_hidden_layers=3)
    taps = ("layer.0", "layer.1", "layer.2", TRUNK, FINAL)
    with torch.no_grad(), capture_hidden(model, taps) as captured:
        every = model(IDS, output_hidden_states=True).hidden_states
        final, tapped = packed_taps(model, IDS, torch.arange(IDS.shape[1])[None], taps[1:3])
    assert torch.equal(captured["layer.0"], every[1])
    assert torch.equal(captured["layer.1"], every[2])
    assert torch.equal(captured[TRUNK], every[2])
    assert torch.equal(captured[FINAL], every[3])
    assert torch.equal(final_norm(model)(captured["layer.2"]), every[3])
    assert torch.equal(final, every[3])
    assert torch.equal(tapped, torch.cat([every[2], captured["layer.2"]], dim=-1))
    hooks = sum(len(module._forward_hooks) for module in model.modules())  # transformers' own
    for tap in ("layer.3", "layer.-1", "layer.", "3"):
        with (
            pytest.raises(ValueError, match=rf"tap '{tap}': expected .* layer.0 to layer.2"),
            capture_hidden(model, (FINAL, tap)),
        ):
            pass
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks


def test_build_from_init() -> None:
    """AutoConfig keeps a mistyped key without a word, and the default size is trained instead."""
    model = build_from_init({"model_type": "llama", **SMALL})
    assert model.config.hidden_size == 32
    with pytest.raises(ConfigError, match="hiden_size is not a setting of a llama model"):
        build_from_init({"model_type": "llama", "hiden_size": 32})
    with pytest.raises(ConfigError, match="model_type=lama is not a type"):
        build_from_init({"model_type": "lama"})
    with pytest.raises(ConfigError, match="model.init: .*30.* is not a multiple"):
        build_from_init({**SMALL, "model_type": "llama", "hidden_size": 30})


def test_digest_is_of_the_weights(
    tiny_model_dir: Path, tmp_path: Path, make_tiny_llama: Callable[..., PreTrainedModel]
) -> None:
    """The same weights elsewhere are the same base; one changed number is another."""
    first = names.base_digest(str(tiny_model_dir))
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    (copy / "README.md").write_text("a card")
    assert names.base_digest(str(copy)) == first
    tensors = load_file(copy / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1e-3
    save_file(tensors, copy / "model.safetensors")
    assert names.base_digest(str(copy)) != first
    make_tiny_llama().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(digest.weight_files(tmp_path / "sharded")) > 1
    names.base_digest(str(tmp_path / "sharded"))
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        names.base_digest(str(copy))


def test_file_hashes_are_cached_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """140 GB are hashed once per machine, and a changed file is never taken for the old one."""
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digest, "_CACHED_FROM", 0)
    calls: list[Path] = []
    read = digest._hash
    monkeypatch.setattr(digest, "_hash", lambda path: calls.append(path) or read(path))
    file = tmp_path / "f"
    file.write_bytes(b"one")
    assert digest.file_sha256(file) == digest.file_sha256(file)
    assert len(calls) == 1
    before = digest.file_sha256(file)
    file.write_bytes(b"three")
    assert digest.file_sha256(file) != before
    assert len(calls) == 2
    monkeypatch.setenv("SPECHEADS_CACHE", "/dev/null/nowhere")
    assert digest.file_sha256(file)


def test_hub_files_are_named_by_their_hash(tmp_path: Path) -> None:
    """Nobody reads a downloaded model again to learn what its file name says."""
    name = "ab" * 32
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "blobs" / name).write_bytes(b"whatever")
    link = tmp_path / "snapshots" / "1" / "model.safetensors"
    link.symlink_to(tmp_path / "blobs" / name)
    assert digest.file_sha256(link) == name


def test_tinycode_is_the_embedded_folder(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default must come from the package, whatever is called tinycode where one works."""
    monkeypatch.setattr(names, "tinycode_dir", lambda: tiny_model_dir)
    monkeypatch.chdir(tiny_model_dir.parent)
    (tiny_model_dir.parent / "tinycode").mkdir(exist_ok=True)
    assert load_base_model("tinycode").config.hidden_size == 32
