"""A base's layers as decoding runs them are transformers', whatever happens to their parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import default_tree
from specheads.models import adapters, packed
from specheads.models.forward import ModelPass
from specheads.models.layer_step import _KINDS, LayerStep, SteppedLayer, pack_model

SIZES = {
    "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 150, "max_position_embeddings": 256,
}  # fmt: skip


def _base(kind: str, dtype: torch.dtype, redraw: Callable[..., None], **more: Any) -> Any:
    config = AutoConfig.for_model(kind, **SIZES, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    redraw(model, std=0.3)
    model.eval().requires_grad_(False)
    pack_model(model)
    assert all(isinstance(layer, SteppedLayer) for layer in model.model.layers)
    return model


def _plain(model: Any) -> Any:
    """Return a copy whose layers are transformers'."""
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.__class__ = type(layer).__mro__[2]
    return other


@torch.inference_mode()
def _logits(model: PreTrainedModel) -> list[Tensor]:
    """Return the logits of two ragged prompts, of a tree behind them, and of single tokens."""
    base = ModelPass(model, TreeCache())
    found = [base.read(torch.arange(26).reshape(2, 13), [13, 9])]
    for num_nodes in (6, 1):
        tree = default_tree(3, num_nodes)
        tokens = torch.arange(2 * num_nodes).reshape(2, num_nodes)
        found.append(base.verify(tokens, tree))
        base.cache.extend([1, 1])
    return found


def _same(model: PreTrainedModel) -> bool:
    """Tell whether the model computes what its copy with transformers' layers does."""
    pairs = list(zip(_logits(model), _logits(_plain(model)), strict=True))
    if model.dtype == torch.bfloat16:
        return all(torch.equal(one, other) for one, other in pairs)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_step_is_the_layer(
    kind: str, dtype: torch.dtype, redraw_weights: Callable[..., None]
) -> None:
    """Prevents a base that decodes otherwise than transformers computes it: in 16 bits each bit."""
    if not packed._has_kernel(dtype):
        pytest.skip(f"oneDNN has no {dtype} here")
    more = {"sliding_window": 8} if kind == "mistral" else {}
    model = _base(kind, dtype, redraw_weights, **more)
    assert _same(model)
    made = [layer._as_it_is() for layer in model.model.layers]
    assert all(isinstance(each, LayerStep) for each in made), "nothing was compared"


def _scaled(layer: Any) -> None:
    layer.self_attn.k_proj.weight.mul_(-2)


def _renormed(layer: Any) -> None:
    layer.post_attention_layernorm.weight = nn.Parameter(
        layer.post_attention_layernorm.weight + 1, requires_grad=False
    )


def _unbiased(layer: Any) -> None:
    layer.self_attn.q_proj.bias.mul_(-3)


def _replaced(layer: Any) -> None:
    layer.mlp.up_proj = nn.Linear(96, 128, bias=False).requires_grad_(False)


def _hooked(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output + 1)


@pytest.mark.parametrize("change", [_scaled, _renormed, _unbiased, _replaced, _hooked])
def test_a_changed_part_is_seen(
    change: Callable[[Any], None], redraw_weights: Callable[..., None]
) -> None:
    """Prevents decoding with the weights that a layer had before, or past what was put into it."""
    model = _base("qwen2", torch.float32, redraw_weights)
    before = _logits(model)
    with torch.no_grad():
        change(model.model.layers[1])
    assert _same(model)
    assert not torch.allclose(_logits(model)[0], before[0])


def test_an_adapter_is_not_passed_over(redraw_weights: Callable[..., None]) -> None:
    """Prevents a tuned base from decoding as the original."""
    model = _base("llama", torch.float32, redraw_weights)
    before = _logits(model)
    adapters.inject(model, ["model.layers.1.self_attn.q_proj"], r=2, lora_alpha=4)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    adapters.require_grad(cast(Any, model), False)
    assert _same(model)
    assert not torch.allclose(_logits(model)[0], before[0])
