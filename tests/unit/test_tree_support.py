"""Models that must not be given a tree are recognised before decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specheads.tree_support import check_tree_support
from tests.scripted import MODELS, SMALL, build


def small(model_type: str, **changes: object) -> PreTrainedModel:
    """Build a small model of another type."""
    known = CONFIG_MAPPING[model_type]()
    settings = {key: value for key, value in SMALL.items() if hasattr(known, key)} | changes
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings)).eval()


def test_models_that_cannot_branch_are_refused(
    tiny_llama: LlamaForCausalLM, redraw_weights: Callable[..., None]
) -> None:
    """Prevents wrong text without a word: ALiBi, recurrence, local attention, dropout, flash."""
    alibi = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).eval()
    redraw_weights(alibi, std=0.15)
    with pytest.raises(ValueError, match="BloomForCausalLM fails the tree self-test"):
        check_tree_support(alibi)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)).eval()
    with pytest.raises(ValueError, match="recurrent state"):
        check_tree_support(mamba)
    hybrid = small("qwen3_next", layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ValueError, match="recurrent state"):
        check_tree_support(hybrid)
    local = small("gpt_neo", attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4)
    with pytest.raises(ValueError, match="masks keys by slot"):
        check_tree_support(local)
    tiny_llama.train()
    with pytest.raises(ValueError, match="training mode"):
        check_tree_support(tiny_llama)
    tiny_llama.eval()
    tiny_llama.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="uses flash_attention_2 attention"):
        check_tree_support(tiny_llama)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_can_are_not(name: str, redraw_weights: Callable[..., None]) -> None:
    """Prevents a self-test so strict that rounding fails it, in bfloat16 as well."""
    model = build(name, redraw_weights)
    check_tree_support(model)
    check_tree_support(build(name, redraw_weights).to(torch.bfloat16))
