"""Tree attention in unmodified models, and the models it must not be tried on."""

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

from specheads.kv_cache import TreeCache
from specheads.tree import Tree, default_tree
from specheads.tree_mask import causal_tree_mask, check_tree_support, tree_attention
from tests.scripted import MODELS, SMALL, build

TREE = default_tree(3, 9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_cached", [3, 20])
@torch.no_grad()
def test_every_node_sees_its_own_path(
    name: str, num_cached: int, redraw_weights: Callable[..., None]
) -> None:
    """Prevents masks measured in tree slots: wrong beyond a sliding window, right before it."""
    model = build(name, redraw_weights)
    prompt = torch.randint(64, (1, num_cached))
    nodes = torch.randint(64, (1, TREE.num_nodes))
    cache = TreeCache()
    model(
        input_ids=prompt,
        position_ids=torch.arange(num_cached)[None],
        past_key_values=cache,
        use_cache=True,
    )
    with tree_attention(TREE):
        in_tree = model(
            input_ids=nodes,
            position_ids=num_cached + TREE.depths[None],
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
    for node in range(TREE.num_nodes):
        path = TREE.ancestors[node]
        path = path[path >= 0]
        linear = model(torch.cat([prompt, nodes[:, path]], 1), use_cache=False).logits[0, -1]
        torch.testing.assert_close(in_tree[node], linear, atol=1e-4, rtol=1e-4)


def test_prepared_mask_is_the_ancestor_matrix() -> None:
    """Prevents a shift by one in the buffer that all steps share."""
    for num_cached in (0, 1, 1023, 1024, 1025):
        mask = causal_tree_mask(TREE, num_cached, torch.float32, torch.device("cpu"))
        assert mask.shape == (1, 1, TREE.num_nodes, num_cached + TREE.num_nodes)
        assert mask[..., :num_cached].eq(0).all()
        assert mask[0, 0, :, num_cached:].eq(0).equal(TREE.tree_mask)


@torch.no_grad()
def test_a_pass_of_another_size_is_an_error(tiny_llama: LlamaForCausalLM) -> None:
    """Prevents the silent fall-back to a causal mask."""
    with (
        tree_attention(Tree.chain(3)),
        pytest.raises(ValueError, match="tree has 4 nodes, the forward pass 6 tokens"),
    ):
        tiny_llama(torch.randint(200, (1, 6)))


@torch.no_grad()
def test_nothing_changes_while_no_tree_is_active(tiny_llama: LlamaForCausalLM) -> None:
    """Prevents a wrapper that leaks into training or into other people's generate()."""
    ids = torch.randint(200, (1, 6))
    before = tiny_llama(ids).logits
    check_tree_support(tiny_llama)
    assert tiny_llama(ids).logits.equal(before)


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
