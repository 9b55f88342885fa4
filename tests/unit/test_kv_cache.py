"""The cache: compaction, growth, pooling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specheads.decoding.loop import commit, verify
from specheads.decoding.plain import step
from specheads.drafters.contract import Candidates, StepResult
from specheads.kv_cache import BLOCK, TreeCache
from specheads.tree import Tree
from tests.scripted import build


def fill(cache: TreeCache, num_slots: int, widths: tuple[int, ...] = (4, 4), seed: int = 0) -> None:
    """Append random slots to every layer; widths are the head sizes per layer."""
    generator = torch.Generator().manual_seed(seed)
    for layer, width in enumerate(widths):
        keys = torch.randn(1, 2, num_slots, width, generator=generator)
        cache.update(keys, -keys, layer)


def contents(cache: TreeCache) -> list[tuple[Tensor, Tensor]]:
    """Return copies of all keys and values."""
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


@pytest.mark.parametrize("widths", [(4, 4), (4, 6)], ids=["pooled", "separate"])
@pytest.mark.parametrize("grown", [False, True])
def test_compact_keeps_the_path_and_nothing_else(widths: tuple[int, ...], grown: bool) -> None:
    """Prevents rows of refused guesses staying in the cache, in either storage layout."""
    cache = TreeCache()
    fill(cache, 10, widths)
    cache.reserve(20)
    if grown:  # the tree does not fit into what was reserved
        fill(cache, BLOCK - 12, widths, seed=5)
    start = cache.get_seq_length()
    fill(cache, 7, widths, seed=1)
    before = contents(cache)
    path = [0, 2, 5]
    cache.compact(start, torch.tensor([path]))
    rows = list(range(start)) + [start + i for i in path]
    for (keys, values), (old_keys, old_values) in zip(contents(cache), before, strict=True):
        assert keys.equal(old_keys[:, :, rows])
        assert values.equal(old_values[:, :, rows])
    assert cache.get_seq_length() == start + 3


def test_rows_are_compacted_each_by_its_own_path() -> None:
    """Prevents the first row's path being used for all: the batch of the engine issue."""
    for pooled in (True, False):
        cache = TreeCache()
        for layer in range(2):
            cache.update(torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 4), layer)
        if pooled:
            cache.reserve(9)
        before = contents(cache)
        index = torch.tensor([[0, 2], [1, 4]])
        cache.compact(4, index)
        for new, old in zip(contents(cache), before, strict=True):
            for row in range(2):
                slots = [0, 1, 2, 3, *(4 + index[row]).tolist()]
                assert new[0][row].equal(old[0][row][:, slots])
                assert new[1][row].equal(old[1][row][:, slots])


def test_growth_keeps_everything() -> None:
    """Prevents lost tokens when the buffers are moved, by reserve or by update itself."""
    cache = TreeCache()
    fill(cache, 3)
    parts = [contents(cache)]
    for part in range(1, 6):
        cache.reserve(cache.get_seq_length() + 1)
        start = cache.get_seq_length()
        fill(cache, BLOCK // 2, seed=part)
        parts.append([(k[:, :, start:], v[:, :, start:]) for k, v in contents(cache)])
    for layer in range(2):
        keys = torch.cat([new[layer][0] for new in parts], dim=2)
        values = torch.cat([new[layer][1] for new in parts], dim=2)
        assert cache.layers[layer].keys.equal(keys)
        assert cache.layers[layer].values.equal(values)
    assert cache.capacity % BLOCK == 0


def test_a_step_does_not_copy_the_cache() -> None:
    """Prevents the torch.cat of DynamicCache from coming back: quadratic cost in long texts."""
    cache = TreeCache()
    fill(cache, 5)
    cache.reserve(40)
    places = [layer.keys.data_ptr() for layer in cache.layers]
    for _ in range(4):
        start = cache.get_seq_length()
        fill(cache, 6)
        cache.compact(start, torch.tensor([[0, 3]]))
    assert places == [layer.keys.data_ptr() for layer in cache.layers]


def test_crop_and_reset() -> None:
    """Prevents a disagreement with transformers' own sign convention."""
    cache = TreeCache()
    fill(cache, 5)
    kept = contents(cache)[0][0][:, :, :3]
    cache.crop(-2)
    assert cache.layers[0].keys.equal(kept)
    with pytest.raises(ValueError, match="at most 0, got 3"):
        cache.crop(3)
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
def test_after_a_commit_the_cache_is_that_of_a_prefill(
    name: str, redraw_weights: Callable[..., None]
) -> None:
    """Prevents a cache that slowly fills with keys of wrong positions or refused guesses."""
    model = build(name, redraw_weights)
    prompt, nodes = torch.randint(64, (1, 11)), torch.randint(64, (1, 5))
    tree = Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])
    path = torch.tensor([[0, 2, 4]])
    with torch.no_grad():
        cache = TreeCache()
        step(model, prompt, cache, 0)
        verify(model, Candidates(nodes, tree), cache, 11)
        result = StepResult(
            tree=tree,
            tokens=nodes,
            base_tokens=nodes,
            hidden={},
            path=path,
            num_accepted=torch.tensor([2]),
            next_root=torch.tensor([0]),
            new_tokens=[[1, 2, 3]],
        )
        commit(cache, 11, result)
        fresh = TreeCache()
        step(model, torch.cat([prompt, nodes[:, path[0]]], dim=1), fresh, 0)
    for (keys, values), (true_keys, true_values) in zip(
        contents(cache), contents(fresh), strict=True
    ):
        torch.testing.assert_close(keys, true_keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, true_values, atol=1e-5, rtol=1e-5)
