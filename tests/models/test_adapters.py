"""Adapters and quantised bases: what is trained, what stays, what comes back."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from specheads.config import AdapterConfig, ConfigError
from specheads.models.adapters import (
    adapter_parameters,
    add_adapter,
    check_tunable,
    has_adapter,
    in_float32,
    load_adapter,
    merge_adapter,
    original,
    plain_copy,
    require_grad,
    save_adapter,
)
from specheads.models.base import checkpoint_layers, load_base_model
from specheads.models.output import FINAL, capture_hidden, output_layer, packed_hidden
from specheads.models.quantize import quantization_of
from tests import zoo

IDS = torch.arange(10, 30)[None]
LORA = AdapterConfig(kind="lora", rank=4, dropout=0.0)


@pytest.fixture(params=["none", "nf4", "int8"])
def base(request: pytest.FixtureRequest, tiny_model_dir: Path) -> PreTrainedModel:
    """The tiny model, plain and quantised."""
    return load_base_model(str(tiny_model_dir), quantization=request.param)


def logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Return the logits without gradients."""
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


def shake(model: PreTrainedModel, std: float = 0.2, seed: int = 1) -> None:
    """Draw the adapter anew, as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    """Return a loss that depends on every logit."""
    loss: torch.Tensor = model(IDS).logits.logsumexp(-1).sum()
    return loss


def test_the_adapter_starts_as_nothing_and_off_is_the_original(base: PreTrainedModel) -> None:
    """A teacher that is not the original, or an adapter left off, shows in no loss curve."""
    before = logits(base)
    add_adapter(base, AdapterConfig(kind="lora", rank=4, dropout=0.5))
    base.train()
    assert torch.equal(logits(base), before), "B is zero, whatever dropout draws"
    base.eval()
    shake(base)
    tuned = logits(base)
    assert not torch.allclose(tuned, before, atol=0.1)
    first = next(iter(adapter_parameters(base).values())).requires_grad_(False)
    wanted = {name: p.requires_grad for name, p in base.named_parameters()}
    with pytest.raises(KeyError), original(base):
        assert torch.equal(logits(base), before)
        raise KeyError
    with original(base), original(base):
        pass
    assert torch.equal(logits(base), tuned)
    assert {name: p.requires_grad for name, p in base.named_parameters()} == wanted
    assert not first.requires_grad


def test_without_an_adapter_there_is_no_original(tiny_llama: PreTrainedModel) -> None:
    """A fully tuned base taken for its own teacher gives a loss of zero."""
    with pytest.raises(ValueError, match="it has none"), original(tiny_llama):
        pass
    with pytest.raises(ValueError, match="no adapter to merge"):
        merge_adapter(tiny_llama)
    assert not has_adapter(tiny_llama)
    assert adapter_parameters(tiny_llama) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_only_the_adapter_is_trained_in_float32(
    tiny_model_dir: Path, quantization: str, dtype: str
) -> None:
    """Adapters in bfloat16 lose small steps; a base that moves too is no adapter."""
    base = load_base_model(str(tiny_model_dir), quantization=quantization, dtype=dtype)
    assert base.get_output_embeddings().weight.dtype == getattr(torch, dtype)
    add_adapter(base, LORA)
    adapter = adapter_parameters(base)
    assert len(adapter) == 2 * 7 * 2, "A and B of seven matrices in two layers"
    assert {p.dtype for p in adapter.values()} == {torch.float32}
    assert {n for n, p in base.named_parameters() if p.requires_grad} == set(adapter)
    assert not any("lm_head" in name for name in adapter)
    frozen = {n: p.detach().clone() for n, p in base.named_parameters() if n not in adapter}
    optimizer = torch.optim.AdamW(adapter.values(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = loss_of(base.train()).float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0]
    assert all(torch.equal(p, base.get_parameter(n)) for n, p in frozen.items())


@pytest.mark.parametrize("name", sorted(zoo.TREE_MODELS))
def test_every_architecture_is_reached(name: str, tmp_path: Path) -> None:
    """A layer whose adapter never runs stays at zero, and nobody is told."""
    model = zoo.build(name)
    ids = torch.arange(3, 23)[None]
    before = logits(model, ids)
    add_adapter(model, LORA)
    assert torch.equal(logits(model, ids), before)
    model(ids).logits.logsumexp(-1).sum().backward()
    second = {n: p for n, p in adapter_parameters(model).items() if ".lora_B." in n}
    assert second
    assert [n for n, p in second.items() if p.grad is None or not p.grad.any()] == []
    with capture_hidden(model) as captured:
        after = logits(model, ids)
    torch.testing.assert_close(output_layer(model)(captured[FINAL]), after, atol=1e-4, rtol=1e-4)
    shake(model)
    save_adapter(tmp_path / "a", model, name, None)
    again = zoo.build(name)
    load_adapter(again, tmp_path / "a")
    tuned = logits(model, ids)
    assert torch.equal(logits(again, ids), tuned)
    merge_adapter(model)  # GPT-2 keeps its matrices the other way round
    torch.testing.assert_close(logits(model, ids), tuned, atol=2e-3, rtol=1e-3)


def test_the_start_is_drawn_from_its_own_seed(make_tiny_llama: Callable[..., Any]) -> None:
    """A resumed run adds the adapter at another place of torch's stream than the first one did."""
    found = []
    for seed in (0, 0, 1):
        model = make_tiny_llama()
        torch.manual_seed(len(found))
        state = torch.get_rng_state()
        add_adapter(model, LORA, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(torch.cat([p.flatten() for p in adapter_parameters(model).values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    with pytest.raises(ValueError, match="has an adapter already"):
        add_adapter(model, LORA)


def test_targets_are_checked(make_tiny_llama: Callable[..., Any]) -> None:
    """A target that matches nothing trains nothing; an adapter on the output matrix is not read."""
    model = make_tiny_llama()
    wrong = AdapterConfig(kind="lora", targets=["q_proj", "qproj"])
    with pytest.raises(ConfigError, match="no linear layer qproj; it has down_proj, .*, v_proj$"):
        add_adapter(model, wrong)
    for name in ("lm_head", "head"):
        with pytest.raises(ConfigError, match="adapter.targets: ") as caught:
            add_adapter(model, AdapterConfig(kind="lora", targets=[name]))
        assert "\n" not in str(caught.value)
        assert ("is the output matrix" in str(caught.value)) == (name == "lm_head")
    assert not has_adapter(model)
    add_adapter(model, AdapterConfig(kind="lora", targets=["q_proj", "model.layers.1.mlp.up_proj"]))
    wrapped = {name.split(".lora_")[0] for name in adapter_parameters(model)}
    assert wrapped == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"]])
def test_merging_gives_the_tuned_model(base: PreTrainedModel, targets: list[str]) -> None:
    """An adapter merged twice, unscaled or transposed decodes, badly."""
    add_adapter(base, AdapterConfig(kind="lora", rank=4, alpha=3.0, targets=targets))
    shake(base)
    before, method = logits(base), (quantization_of(base) or {}).get("method")
    state = plain_copy(base, torch.float32).state_dict()
    assert torch.equal(logits(base), before), "the caller's model stays as it is"
    merge_adapter(base)
    assert not has_adapter(base)
    assert quantization_of(base) is None
    # int8 products round the activations too: there merging is not the same model
    tolerance = 0.2 if method == "int8" else 1e-4
    torch.testing.assert_close(logits(base), before, atol=tolerance, rtol=tolerance)
    assert base.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in base.state_dict().items())
    assert base.to(torch.float64).dtype == torch.float64, "an ordinary model again"


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_the_reference_in_float32(tiny_model_dir: Path, quantization: str, adapted: bool) -> None:
    """Near-ties are judged against it; transformers refuses to cast what is quantised."""
    base = load_base_model(str(tiny_model_dir), quantization=quantization, dtype="bfloat16")
    if adapted:
        add_adapter(base, LORA)
        shake(base)
    before = logits(base)
    reference = in_float32(base)
    assert {p.dtype for p in reference.parameters()} == {torch.float32}
    assert not has_adapter(reference)
    assert torch.equal(logits(base), before)
    difference = (logits(reference) - before.float()).norm() / before.float().norm()
    assert 0 < difference < 0.05


def test_an_adapter_comes_back_and_peft_reads_it(
    base: PreTrainedModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """An adapter that lost a tensor, or that only we can read, is found out by whoever serves."""
    from peft import PeftModel

    method = (quantization_of(base) or {"method": "none"})["method"]
    add_adapter(base, AdapterConfig(kind="lora", rank=4, alpha=3.0, targets=["q_proj", "up_proj"]))
    shake(base)
    save_adapter(tmp_path / "adapter", base, str(tiny_model_dir), None)
    again = load_base_model(str(tiny_model_dir), quantization=method)
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(base))
    assert not any(p.requires_grad for p in again.parameters())
    assert not again.training
    plain = load_base_model(str(tiny_model_dir), quantization=method)
    theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert torch.equal(logits(theirs), logits(base))
    assert not list((tmp_path / "adapter").glob("*.bin"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_dir)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda t: t.pop(sorted(t)[0]), "lacks 1 of 28 tensors, first base_model"),
        (lambda t: t.update(extra=torch.zeros(1)), "29 tensors .*; unexpected: extra"),
        (lambda t: t.update({sorted(t)[0]: torch.zeros(2, 2)}), r"the tensors have \[2, 4\]"),
        (lambda t: t.update({sorted(t)[1]: torch.zeros(2, 2)}), r"has shape \[2, 2\], expected"),
    ],
)
def test_a_wrong_adapter_file_is_refused(
    make_tiny_llama: Callable[..., Any], tmp_path: Path, damage: Callable[[Any], Any],
    complaint: str,
) -> None:  # fmt: skip
    """Tensors that are skipped leave layers of the original between tuned ones."""
    model = make_tiny_llama()
    add_adapter(model, LORA)
    save_adapter(tmp_path / "a", model, "tiny", None)
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_adapter(make_tiny_llama(), tmp_path / "a")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="of another model: the base has no model.layers.1"):
        load_adapter(make_tiny_llama(num_hidden_layers=1), tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match="is damaged"):
        load_adapter(make_tiny_llama(), tmp_path / "a")


def test_a_quantised_base_has_the_gradients_of_its_numbers(tiny_model_dir: Path) -> None:
    """A forward in eval mode makes bitsandbytes repack 4-bit weights where the CPU has AVX512-BF16.

    Gradients then no longer pass them, products are in bfloat16, and the weights read back differ.
    """
    base = load_base_model(str(tiny_model_dir), quantization="nf4")
    state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    output_layer(base)
    logits(base)
    assert all(torch.equal(tensor, state[name]) for name, tensor in base.state_dict().items())
    plain = load_base_model(str(tiny_model_dir), quantization="nf4")
    add_adapter(plain, LORA)
    merge_adapter(plain)  # B is zero: the dequantised model
    for model in (base, plain):
        add_adapter(model, LORA)
        shake(model)
        loss_of(model).backward()
    expected = adapter_parameters(plain)
    for name, parameter in adapter_parameters(base).items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_what_is_trained_is_what_decodes(tiny_model_dir: Path, quantization: str) -> None:
    """8-bit layers leave their activations unrounded while training, on a CPU, if one lets them."""
    base = load_base_model(str(tiny_model_dir), quantization=quantization)
    expected = logits(base)
    copied = copy.deepcopy(base)
    for model in (base, copied):
        model.train()
        assert torch.equal(logits(model), expected)
        assert torch.equal(model(IDS).logits.detach(), expected)
        model.eval()
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_tokens_do_not_see_what_stands_beside_them(quantization: str) -> None:
    """LLM.int8() chooses outlier columns by all tokens of a pass: logits then depend on a draft."""
    base = load_base_model("tinycode", quantization=quantization)
    ids = torch.arange(5, 29)[None]
    whole = logits(base, ids)[0]
    assert logits(base, ids[:, :9])[0].allclose(whole[:9], atol=1e-3)
    assert logits(base, ids[:, :1])[0].allclose(whole[:1], atol=1e-3)


def test_what_a_quantised_base_is(tiny_model_dir: Path) -> None:
    """A base that claims to be quantised and is not costs four times its memory."""
    for method, dtype in (("nf4", torch.uint8), ("int8", torch.int8)):
        base = load_base_model(str(tiny_model_dir), quantization=method, dtype="bfloat16")
        matrices = [p for n, p in base.named_parameters() if "proj" in n]
        assert {p.dtype for p in matrices} == {dtype}
        assert base.get_output_embeddings().weight.dtype == torch.bfloat16
        found = quantization_of(base)
        assert found is not None
        assert found["method"] == method
        assert not base.training
    tied = load_base_model(str(tiny_model_dir))
    assert quantization_of(tied) is None


def test_quantised_weights_are_not_trained(tiny_model_dir: Path) -> None:
    """They have no gradient: full tuning would train norms and embeddings, and say nothing."""
    base = load_base_model(str(tiny_model_dir), quantization="nf4")
    for refuse in (
        lambda: require_grad(base, True),
        lambda: check_tunable("nf4", AdapterConfig()),
    ):
        with pytest.raises(ConfigError, match="nf4: .*; choose adapter=lora") as caught:
            refuse()
        assert "\n" not in str(caught.value)
    check_tunable("nf4", LORA)
    check_tunable("none", AdapterConfig())
    require_grad(base, False)
    assert not any(p.requires_grad for p in base.parameters())
    add_adapter(base, LORA)
    require_grad(base, False)
    require_grad(base, True)
    assert {n for n, p in base.named_parameters() if p.requires_grad} == set(
        adapter_parameters(base)
    )


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        ("gptq", "cannot load model.name=.* GPTQ .*pip install optimum"),
        ("awq", "cannot load model.name=.* AWQ .*pip install gptqmodel"),
        ("aqlm", "cannot load model.name=.*aqlm"),
    ],
)
def test_the_library_of_a_quantised_base_is_named(
    tiny_model_dir: Path, tmp_path: Path, method: str, complaint: str
) -> None:
    """Found out before 40 GB are read: the folder of this test holds no weights at all."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_base_model(str(folder))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=f"nf4: .* is quantised already \\({method}\\)"):
        load_base_model(str(folder), quantization="nf4")


def test_a_base_that_was_saved_quantised(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Such a folder brings its own numbers; it is not quantised again, nor moved."""
    base = load_base_model(str(tiny_model_dir), quantization="nf4")
    base.save_pretrained(tmp_path / "m")
    again = load_base_model(str(tmp_path / "m"))
    assert torch.equal(logits(again), logits(base))
    assert quantization_of(again) == {"method": "bitsandbytes", "own": True}


def test_a_missing_bitsandbytes_is_one_line(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers answers with a page about CUDA."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else real(name)
    )
    with pytest.raises(ConfigError, match="quantization=nf4 needs bitsandbytes: pip install"):
        load_base_model(str(tiny_model_dir), quantization="nf4")


@pytest.mark.parametrize("kind", ["full", "none", "nf4"])
def test_checkpointed_layers_have_the_same_gradients(tiny_model_dir: Path, kind: str) -> None:
    """Reentrant checkpoints cut the graph where the embeddings are frozen, with a warning only."""
    found = []
    for checkpointed in (False, True):
        base = load_base_model(str(tiny_model_dir), quantization="none" if kind == "full" else kind)
        if kind != "full":
            add_adapter(base, AdapterConfig(kind="lora", rank=4, dropout=0.2))
            shake(base)
        else:
            require_grad(base, True)
        if checkpointed:
            checkpoint_layers(base)
        calls = []
        layer = base.get_submodule("model.layers.0.self_attn")
        layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(5)
        positions = torch.arange(IDS.numel()).view_as(IDS)
        base.train()
        if kind != "full":
            assert not base.get_input_embeddings()(IDS).requires_grad
        packed_hidden(base, IDS, positions).square().sum().backward()
        assert len(calls) == 1 + checkpointed
        found.append({n: p.grad for n, p in base.named_parameters() if p.requires_grad})
    plain, again = found
    assert plain.keys() == again.keys()
    assert any(grad is not None for grad in plain.values())
    for name, grad in plain.items():
        assert (grad is None) == (again[name] is None)
        assert grad is None or torch.equal(grad, again[name]), name


def test_a_model_without_checkpointing_is_one_line(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' own error names a method that no setting is called like."""
    monkeypatch.setattr(type(tiny_llama), "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="model.gradient_checkpointing=true: LlamaFor"):
        checkpoint_layers(tiny_llama)
