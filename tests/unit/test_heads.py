"""Medusa heads: what they are at step 0, what they share, and how their logits are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from specheads.models.base import OutputLayer, capture_hidden, output_layer
from specheads.models.heads import MedusaHeads


def build(
    lm_head: str, num_layers: int = 1, dtype: torch.dtype | None = None, seed: int | None = 0
) -> tuple[MedusaHeads, OutputLayer]:
    """Return three heads (random unless ``seed`` is None) and an output layer with everything."""
    torch.manual_seed(0)
    matrix = nn.Linear(8, 20, dtype=dtype)
    heads = MedusaHeads(3, num_layers, 8, 20, lm_head, dtype)
    heads.init_from_output(matrix.weight)
    if seed is not None:
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(std=0.3)
    return heads, OutputLayer(matrix, scale=0.5, softcap=2.0)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_every_head_starts_as_the_base(
    lm_head: str, num_layers: int, make_tiny_llama: Callable[..., LlamaForCausalLM]
) -> None:
    """A bias left at its default or a matrix not copied starts training from noise."""
    base = make_tiny_llama()
    output = output_layer(base)
    heads = MedusaHeads(4, num_layers, 32, base.config.vocab_size, lm_head)
    heads.init_from_output(output.weight)
    with torch.no_grad(), capture_hidden(base) as captured:
        expected = base(input_ids=torch.arange(12)[None]).logits
        assert captured.hidden is not None
        found = heads.logits(captured.hidden, output)
    assert found.shape == (4, *expected.shape)
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_no_parameter_is_shared() -> None:
    """``[block] * n`` trains one block n times over, and nothing looks wrong until loading."""
    heads, output = build("own", num_layers=2, seed=None)
    parameters = list(heads.parameters())
    assert len(parameters) == 3 * (2 * 2 + 1)
    assert len({p.data_ptr() for p in (*parameters, output.weight)}) == len(parameters) + 1
    before = heads.logits(torch.ones(8), output)
    with torch.no_grad():
        heads.get_parameter("heads.1.blocks.1.bias").add_(1.0)
    changed = (heads.logits(torch.ones(8), output) != before).any(-1)
    assert changed.tolist() == [False, True, False]


def test_blocks_start_at_zero_bias_included() -> None:
    """Zero weights under a random bias are not the identity: step 0 is then not the base."""
    heads, _ = build("shared", num_layers=2, seed=None)
    assert all(bool((parameter == 0).all()) for parameter in heads.parameters())


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_tensor_names(lm_head: str, tmp_path: Path) -> None:
    """Other programs read these names; safetensors refuses tensors that share memory."""
    heads, _ = build(lm_head, num_layers=2)
    expected = {
        f"heads.{i}.blocks.{layer}.{kind}"
        for i in range(3)
        for layer in range(2)
        for kind in ("weight", "bias")
    }
    if lm_head == "own":
        expected |= {f"heads.{i}.lm_head.weight" for i in range(3)}
    assert set(heads.state_dict()) == expected
    save_file(heads.state_dict(), tmp_path / "heads.safetensors")
    again, _ = build(lm_head, num_layers=2, seed=None)
    again.load_state_dict(load_file(tmp_path / "heads.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), again.parameters(), strict=1))


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("num_layers", [0, 2])
@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 5, 8)])
def test_logits_by_the_definition(lm_head: str, num_layers: int, shape: tuple[int, ...]) -> None:
    """Heads that skip the base's bias, scale or softcap draft from other probabilities."""
    heads, output = build(lm_head, num_layers)
    hidden = torch.randn(shape)
    expected = []
    for i in range(3):
        x = hidden
        for layer in range(num_layers):
            weight = heads.get_parameter(f"heads.{i}.blocks.{layer}.weight")
            bias = heads.get_parameter(f"heads.{i}.blocks.{layer}.bias")
            x = x + F.silu(x @ weight.T + bias)
        matrix = (
            heads.get_parameter(f"heads.{i}.lm_head.weight") if lm_head == "own" else output.weight
        )
        expected.append(2.0 * torch.tanh(0.5 * (x @ matrix.T + output.bias) / 2.0))
    logits = heads(hidden, output)
    torch.testing.assert_close(logits, torch.stack(expected))
    torch.testing.assert_close(heads.snapshot(output)(hidden), logits)


def test_snapshot_of_large_heads_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacking the output matrices of a real model would double its heads' memory unasked."""
    heads, output = build("own")
    monkeypatch.setattr("specheads.models.heads._MAX_STACKED", 10)
    monkeypatch.setattr(torch, "baddbmm", None)
    hidden = torch.randn(2, 8)
    torch.testing.assert_close(heads.snapshot(output)(hidden), heads.logits(hidden, output))


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_heads_and_base_in_different_dtypes(lm_head: str) -> None:
    """Float32 heads are trained on a bfloat16 base; the product must not raise or round them."""
    heads, _ = build(lm_head)
    _, output = build(lm_head, dtype=torch.bfloat16)
    hidden = torch.randn(2, 8).bfloat16()
    logits = heads.logits(hidden, output)
    assert logits.dtype == (torch.float32 if lm_head == "own" else torch.bfloat16)
    torch.testing.assert_close(heads.snapshot(output)(hidden), logits, rtol=2e-2, atol=2e-2)


def test_misuse_names_both_numbers() -> None:
    """A matrix of the wrong vocabulary could otherwise be copied in part."""
    heads, _ = build("own")
    with pytest.raises(ValueError, match=r"\(21, 8\), the heads were built for \(20, 8\)"):
        heads.init_from_output(torch.zeros(21, 8))
    with pytest.raises(ValueError, match="own or shared, got 'tied'"):
        MedusaHeads(3, 1, 8, 20, "tied")
    with pytest.raises(ValueError, match="got 0 and 1"):
        MedusaHeads(0, 1, 8, 20)
