"""What a decoder brings to a rank, held to what torch really keeps and computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, LlamaForCausalLM

from specheads.config import AdapterConfig
from specheads.models.adapters import add_adapter
from specheads.models.output import packed_hidden
from specheads.training.objectives import LMObjective
from specheads.training.shapes import layer_activations
from tests.conftest import build_tiny_llama
from tests.script_modules import load_script

costs: Any = load_script("zero_costs")

TOKENS = 48


def build(**sizes: Any) -> tuple[LlamaForCausalLM, Any]:
    """Return a small Llama with grouped queries, and its sizes."""
    given = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    given |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = build_tiny_llama(**{**given, **sizes})
    shape = costs.Shape.from_config(model.config)
    assert shape is not None
    return model, shape


def test_parameters_of_known_models() -> None:
    """Llama 2 as published; a table about other sizes would be about other models."""
    assert costs.LLAMA_7B.parameters == 6_738_415_616
    assert costs.LLAMA_13B.parameters == 13_015_864_320
    assert costs.LLAMA_70B.parameters == 68_976_648_192


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(tied: bool) -> None:
    """A forgotten norm is nothing, a forgotten matrix is gigabytes."""
    model, shape = build(tie_word_embeddings=tied)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    add_adapter(model, AdapterConfig("lora", rank=5))
    adapters = [p for name, p in model.named_parameters() if ".lora_" in name]
    assert costs.lora_parameters(shape, 5) == sum(p.numel() for p in adapters)
    assert costs.Shape.from_config(GPT2Config()) is None


def kept_for_backward(model: LlamaForCausalLM) -> int:
    """Return the bytes of all storages that autograd keeps, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Any] = {}  # the storages themselves, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.arange(TOKENS)[None]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        packed_hidden(model.train(), ids, ids)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(dtype: torch.dtype, lora: bool) -> None:
    """The largest part of long rows; too little is out of memory after an hour of loading."""
    found, options = [], {}
    for layers in (1, 2):
        model, shape = build(num_hidden_layers=layers)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        if lora:
            add_adapter(model, AdapterConfig("lora", rank=3, dropout=0.1))
            options = {"adapter": 4, "rank": 3, "mask": 4}
        found.append(kept_for_backward(model))
    expected = TOKENS * layer_activations(shape, dtype.itemsize, **options)
    assert found[1] - found[0] == pytest.approx(expected, rel=0.01)


def batch() -> dict[str, Tensor]:
    """Return one row."""
    ids = torch.arange(TOKENS)[None] + 7
    return {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.arange(TOKENS)[None],
        "segment_ids": torch.ones_like(ids),
    }


def test_arithmetic_is_what_torch_counts() -> None:
    """MFU is a ratio to this count: too much of it and every machine looks fast."""
    model, shape = build()
    model.set_attn_implementation("eager")  # torch counts no fused attention on a CPU
    counted = FlopCounterMode(display=False)
    with counted, torch.no_grad():
        packed_hidden(model, batch()["input_ids"], batch()["position_ids"])
    frozen = costs.load_of(shape, "frozen", tokens=TOKENS, seq_len=TOKENS, num_heads=0)
    assert counted.get_total_flops() == pytest.approx(frozen.flops, rel=1e-6)
    with FlopCounterMode(display=False) as counted:
        loss, _ = LMObjective(model)(batch())
        loss.backward()
    full = costs.load_of(
        shape, "full", tokens=TOKENS, seq_len=TOKENS, num_heads=0, checkpointed=False
    )
    # attention's backward is five products for its forward's two; the first token has no label
    assert counted.get_total_flops() == pytest.approx(full.flops, rel=0.05)


def test_kinds_train_what_they_say() -> None:
    """A frozen base among the trained weights costs eight times its memory."""
    shape = costs.Shape(8, 2, 16, 4, 50, 8)
    base, block, matrix = shape.parameters, 8 * 8 + 8, 50 * 8
    # per layer 2 * 64 + 2 * 32 + 3 * 128 + 16; a norm, two matrices
    assert base == 2 * (128 + 64 + 384 + 16) + 8 + 2 * matrix
    options: dict[str, Any] = {"tokens": 10, "num_heads": 3, "rank": 2, "chunk": 4}
    frozen, lora, full = (
        costs.load_of(shape, kind, **options) for kind in ("frozen", "lora", "full")
    )
    adapters = 2 * 2 * (2 * 16 + 2 * 12 + 3 * 24)
    assert frozen.trained == {2: 3 * (block + matrix)}
    assert lora.trained == {2: 3 * (block + matrix) + adapters}
    assert full.trained == {2: 3 * (block + matrix) + base}
    assert (frozen.frozen, lora.frozen_bytes, full.frozen) == (base, 2 * base, 0)
    assert (frozen.formed, full.formed) == (2 * 3 * matrix, 2 * 4 * matrix)
    assert frozen.logits == 50 * 4 * (4 + 2)
    mixed = costs.load_of(shape, "full", head_size=4, own_heads=False, **options)
    assert mixed.trained == {4: 3 * block, 2: base}
    assert (frozen.gathers, lora.gathers) == (1, 2)
    assert frozen.flops < lora.flops < full.flops
    shared = costs.load_of(shape, "frozen", own_heads=False, **options)
    assert frozen.flops - shared.flops == 10 * 3 * 2 * matrix  # a frozen matrix learns nothing
    assert (
        frozen.activations < costs.load_of(shape, "lora", checkpointed=False, **options).activations
    )
    with pytest.raises(ValueError, match="kind must be frozen, lora or full"):
        costs.load_of(shape, "qlora", tokens=1)
