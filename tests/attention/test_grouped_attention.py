"""Attention without expanding the cache equals attention with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads.attention import mask as module
from specheads.attention.cache import TreeCache
from specheads.attention.mask import attend_folded, grouped_attention, tree_attention
from specheads.attention.tree import RowTrees, default_tree
from tests.zoo import VOCAB, build

TREE = default_tree(3, 9)
GROUPED = ("llama", "qwen2-window", "qwen3", "mistral-window", "gemma3", "mixtral")


def draw(
    num_rows: int, heads: int, groups: int, num_tokens: int, num_slots: int, value_dim: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random query, key and value."""
    generator = torch.Generator().manual_seed(num_rows + groups)
    shapes = [
        (num_rows, heads * groups, num_tokens, 8),
        (num_rows, heads, num_slots, 8),
        (num_rows, heads, num_slots, value_dim),
    ]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("num_rows,heads,groups", [(1, 2, 4), (3, 1, 8), (2, 4, 2)])
@pytest.mark.parametrize("value_dim", [8, 12])
@pytest.mark.parametrize("kind", ["bool", "additive", "per row", "per head"])
def test_both_forms_equal_the_expanded_one(
    num_rows: int, heads: int, groups: int, value_dim: int, kind: str
) -> None:
    """Prevents query heads that read another group's keys, or another token's mask."""
    query, key, value = draw(num_rows, heads, groups, 5, 21, value_dim)
    generator = torch.Generator().manual_seed(1)
    mask_rows = num_rows if kind in ("per row", "per head") else 1
    mask_heads = heads * groups if kind == "per head" else 1
    seen = torch.rand(mask_rows, mask_heads, 5, 21, generator=generator) < 0.6
    seen[..., 0] = True
    additive = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    mask = seen if kind == "bool" else additive
    expanded = nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, 1),
        value.repeat_interleave(groups, 1),
        mask,
        scale=0.3,
    )
    folded = attend_folded(query, key, value, mask, 0.3, {})
    torch.testing.assert_close(folded, expanded, atol=1e-6, rtol=1e-5)
    layer = nn.Module()
    with grouped_attention():
        ours, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](
            layer, query, key, value, mask, scaling=0.3, dropout=0.0
        )
    assert weights is None
    torch.testing.assert_close(ours, expanded.transpose(1, 2), atol=1e-6, rtol=1e-5)


def verify(name: str, num_rows: int, *, row_trees: bool) -> Tensor:
    """Return the logits of one verify step behind rows of different lengths."""
    model = build(name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (num_rows, 12 + TREE.num_nodes), generator=generator)
    cache = TreeCache()
    cache.reserve(num_rows, 12)
    model(input_ids=ids[:, :12], past_key_values=cache, use_cache=True)
    lengths = [12 - 3 * row for row in range(num_rows)]
    cache.extend(lengths)
    tree = RowTrees.from_parents(TREE.parents.expand(num_rows, -1), 3) if row_trees else TREE
    cache.reserve(num_rows, TREE.num_nodes)
    with tree_attention(tree, cache):
        logits: Tensor = model(
            input_ids=ids[:, 12:],
            position_ids=torch.tensor(lengths)[:, None] + TREE.depths,
            past_key_values=cache,
            use_cache=True,
        ).logits
    return logits


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("num_rows", [1, 3])
@torch.no_grad()
def test_models_give_the_same_logits(
    name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a wrong scale, mask or layout that only a whole model shows; windows as well."""
    calls: list[int] = []

    def no_repeat(states: Tensor, groups: int) -> Tensor:
        calls.append(groups)
        return states.repeat_interleave(groups, 1)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", no_repeat)
    stock = verify(name, num_rows, row_trees=num_rows > 1)
    assert calls, "transformers expands no longer: this module can go"
    calls.clear()
    with grouped_attention():
        folded = verify(name, num_rows, row_trees=num_rows > 1)
    torch.testing.assert_close(folded, stock, atol=2e-5, rtol=1e-5)
    assert not calls, "the cache was expanded"


@torch.no_grad()
def test_nothing_changes_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a wrapper that leaks into training or into other people's generate()."""
    before = verify("llama", 1, row_trees=False)
    with grouped_attention():
        pass
    monkeypatch.setattr(module, "attend_folded", None)
    assert verify("llama", 1, row_trees=False).equal(before)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_no_mask_means_what_it_means_to_transformers(num_tokens: int) -> None:
    """Prevents a prompt whose tokens see those behind them: without a mask it is causal."""
    query, key, value = draw(2, 2, 4, num_tokens, 5)
    attend, layer = ALL_ATTENTION_FUNCTIONS["sdpa"], nn.Module()
    layer.num_key_value_groups = 4  # type: ignore[assignment]
    stock, _ = attend(layer, query, key, value, None)
    with grouped_attention():
        ours, _ = attend(layer, query, key, value, None)
    torch.testing.assert_close(ours, stock, atol=1e-6, rtol=1e-5)


def test_a_mask_is_laid_out_once_per_pass() -> None:
    """Prevents G copies of the mask in every layer, which would eat what is saved."""
    query, key, value = draw(1, 2, 4, 5, 21)
    mask = torch.zeros(1, 1, 5, 21)
    folded: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    attend_folded(query, key, value, mask, None, folded)
    (kept,) = folded.values()
    attend_folded(query, key, value, mask, None, folded)
    assert list(folded.values())[0][1] is kept[1]
    attend_folded(query, key, value, torch.zeros(1, 1, 5, 21), None, folded)
    assert len(folded) == 2


def test_rows_of_a_mask_start_where_kernels_of_gpus_want_them() -> None:
    """Prevents a copy of the mask in every layer on a GPU."""
    folded = module._fold_mask(torch.zeros(1, 1, 5, 21, device="meta"), 4)
    assert folded.shape == (1, 1, 20, 21) and all(n % 8 == 0 for n in folded.stride()[:-1])
