"""Tree attention in unmodified models."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.attention.cache import TreeCache
from specheads.attention.mask import causal_tree_mask, tree_attention
from specheads.attention.tree import RowTrees, Tree, default_tree
from specheads.models.forward import ModelPass, pad_rows
from specheads.models.support import tree_support
from tests.scripted import MODELS, build

TREE = default_tree(3, 9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[3], [20], [20, 3, 11]], ids=str)
@pytest.mark.parametrize("shape", ["shared", "own", "run"])
@torch.no_grad()
def test_every_node_sees_its_own_path(name: str, lengths: list[int], shape: str) -> None:
    """Prevents masks measured in tree slots: wrong beyond a sliding window, right before it.

    And, in a batch, rows that see what lies behind their own end, or another row's tree.
    """
    model = build(name)
    tree = Tree.chain(8) if shape == "run" else TREE
    texts = [torch.randint(64, (n,)).tolist() for n in lengths]
    nodes = torch.randint(64, (len(lengths), tree.num_nodes))
    base = ModelPass(model, TreeCache())
    base.read(pad_rows(texts, base.device), lengths)
    active: Tree | RowTrees | None = None if shape == "run" else tree
    if shape == "own":
        active = RowTrees.from_parents(tree.parents.expand(len(lengths), -1), tree.max_depth)
    base.cache.reserve(*nodes.shape)
    with tree_attention(active, base.cache):
        in_tree = model(
            input_ids=nodes,
            position_ids=torch.tensor(lengths)[:, None] + tree.depths,
            past_key_values=base.cache,
            use_cache=True,
        ).logits
    for row, text in enumerate(texts):
        for node in range(tree.num_nodes):
            path = tree.ancestors[node]
            path = path[path >= 0]
            alone = torch.tensor([text + nodes[row, path].tolist()])
            linear = model(alone, use_cache=False).logits[0, -1]
            torch.testing.assert_close(in_tree[row, node], linear, atol=1e-4, rtol=1e-4)


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
        tree_attention(Tree.chain(3), TreeCache()),
        pytest.raises(ValueError, match="tree has 4 nodes, the forward pass 6 tokens"),
    ):
        tiny_llama(torch.randint(200, (1, 6)))


@torch.no_grad()
def test_nothing_changes_while_no_tree_is_active(tiny_llama: LlamaForCausalLM) -> None:
    """Prevents a wrapper that leaks into training or into other people's generate()."""
    ids = torch.randint(200, (1, 6))
    before = tiny_llama(ids).logits
    tree_support(tiny_llama)
    assert tiny_llama(ids).logits.equal(before)
