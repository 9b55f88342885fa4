"""The cache: rows of their own lengths, commit, growth, pooling, turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specheads.attention.cache import BLOCK, TreeCache
from specheads.attention.tree import RowTrees, Tree
from specheads.models.forward import ModelPass, pad_rows
from tests.scripted import build

WIDTHS = {"pooled": (4, 4), "separate": (4, 6)}  # head sizes per layer


def write(
    cache: TreeCache,
    num_tokens: int,
    batch_size: int = 1,
    widths: Sequence[int] = (4, 4),
    seed: int = 0,
) -> list[Tensor]:
    """Write random keys behind every row, values their negative; return the keys per layer."""
    generator = torch.Generator().manual_seed(seed)
    written = []
    for layer, width in enumerate(widths):
        keys = torch.randn(batch_size, 2, num_tokens, width, generator=generator)
        cache.update(keys, -keys, layer)
        written.append(keys)
    return written


def rows_of(cache: TreeCache) -> list[list[Tensor]]:
    """Return copies of the live keys, [layer][row], after checking that values go with them."""
    found = []
    for layer in cache.layers:
        assert layer.buffers[1].equal(-layer.buffers[0])
        found.append([layer.buffers[0][row, :, :n].clone() for row, n in enumerate(cache.lengths)])
    return found


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("grown", [False, True])
def test_commit_keeps_each_rows_path_and_nothing_else(widths: Sequence[int], grown: bool) -> None:
    """Prevents refused guesses staying in the cache, and one row's path being used for all."""
    for counts, paths in (
        ([3], [[0, 2, 5]]),
        ([1], [[0, -1, -1]]),
        ([3, 2, 0, 1], [[0, 2, 5], [0, 4, -1], [0, 1, 3], [0, 3, 6]]),
    ):
        batch_size = len(counts)
        cache = TreeCache()
        cache.reserve(batch_size, 10)
        prefill = write(cache, 10, batch_size, widths)
        lengths = [10 - 3 * row for row in range(batch_size)]
        cache.extend(lengths)
        cache.reserve(batch_size, 7)
        if grown:  # what is written does not fit into what was reserved
            more = write(cache, BLOCK, batch_size, widths, seed=5)
            cache.extend([BLOCK - 5] * batch_size)
            prefill = [
                torch.stack([
                    torch.cat([old[row, :, :n], new[row, :, : BLOCK - 5],
                               torch.zeros(2, 10 - n, width)], dim=1)
                    for row, n in enumerate(lengths)
                ])
                for old, new, width in zip(prefill, more, widths, strict=True)
            ]  # fmt: skip
            lengths = [n + BLOCK - 5 for n in lengths]
        tree = write(cache, 7, batch_size, widths, seed=1)
        cache.commit(torch.tensor(paths), counts)
        assert cache.lengths == [n + count for n, count in zip(lengths, counts, strict=True)]
        for layer, rows in enumerate(rows_of(cache)):
            for row, keys in enumerate(rows):
                kept = paths[row][: counts[row]]
                wanted = [prefill[layer][row, :, : lengths[row]], tree[layer][row][:, kept]]
                assert keys.equal(torch.cat(wanted, dim=1))


def test_growth_keeps_everything() -> None:
    """Prevents lost tokens when the buffers are moved, by reserve or by update itself."""
    for batch_size in (1, 3):
        cache = TreeCache()
        cache.reserve(batch_size, 3)
        parts = [write(cache, 3, batch_size)]
        cache.extend([3] * batch_size)
        for part in range(1, 6):
            cache.reserve(batch_size, 1)
            parts.append(write(cache, BLOCK // 2, batch_size, seed=part))
            cache.extend([BLOCK // 2] * batch_size)
        for layer, rows in enumerate(rows_of(cache)):
            assert torch.stack(rows).equal(torch.cat([part[layer] for part in parts], dim=2))
        assert cache.capacity % BLOCK == 0


def test_a_step_does_not_copy_the_cache() -> None:
    """Prevents the torch.cat of DynamicCache from coming back: quadratic cost in long texts."""
    cache = TreeCache()
    cache.reserve(1, 5)
    write(cache, 5)
    cache.extend([5])
    cache.reserve(1, 40)
    places = [layer.buffers[0].data_ptr() for layer in cache.layers]
    for _ in range(4):
        write(cache, 6)
        cache.commit(torch.tensor([[0, 3]]), [2])
    assert places == [layer.buffers[0].data_ptr() for layer in cache.layers]


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_rows_that_have_ended_can_be_dropped(widths: Sequence[int]) -> None:
    """Prevents a row continuing on the keys of the neighbour that was dropped."""
    cache = TreeCache()
    cache.reserve(3, 6)
    keys = write(cache, 6, 3, widths)
    cache.extend([6, 4, 5])
    cache.reserve(3, 1)
    cache.tokens = [[1], [2], [3]]
    cache.select(torch.tensor([2, 0]))
    assert cache.lengths == [5, 6] and cache.tokens == [[3], [1]]
    for layer, rows in enumerate(rows_of(cache)):
        assert rows[0].equal(keys[layer][2, :, :5]) and rows[1].equal(keys[layer][0])
    more = write(cache, 2, 2, widths, seed=1)
    cache.commit(torch.tensor([[0, 1], [0, 1]]), [2, 1])
    for layer, rows in enumerate(rows_of(cache)):
        assert rows[0][:, 5:].equal(more[layer][0]) and rows[1][:, 6:].equal(more[layer][1][:, :1])


def test_align_keeps_the_common_beginning() -> None:
    """Prevents a turn that reads its prompt onto keys of another text."""
    cache = TreeCache()
    assert cache.align([[1, 2], [3]]) == [0, 0]
    write(cache, 4, 2)
    cache.extend([4, 3])
    cache.tokens = [[1, 2, 3, 4], [5, 6, 7]]
    assert cache.align([[1, 2, 9, 9], [5, 6, 7]]) == [2, 2]  # one token is left to be read
    assert cache.lengths == [2, 2]
    with pytest.raises(ValueError, match="cache has 2 rows, the batch 1"):
        cache.align([[1]])
    with pytest.raises(ValueError, match="cache has 2 rows, the batch 3"):
        cache.reserve(3, 1)


def test_crop_and_reset() -> None:
    """Prevents a disagreement with transformers' own sign convention."""
    cache = TreeCache()
    kept = write(cache, 5)[0][:, :, :3]
    cache.extend([5])
    cache.crop(-2)
    assert rows_of(cache)[0][0].equal(kept[0])
    with pytest.raises(ValueError, match="at most 0, got 3"):
        cache.crop(3)
    with pytest.raises(ValueError, match="row 0 has 3 tokens, cannot keep 4"):
        cache.shorten([4])
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.lengths


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
@pytest.mark.parametrize("own_trees", [False, True])
@torch.no_grad()
def test_after_a_commit_the_cache_is_that_of_a_prefill(name: str, own_trees: bool) -> None:
    """Prevents a cache that slowly fills with keys of wrong positions or refused guesses.

    Several commits in a row, rows of different lengths, one of which stands still at times.
    """
    model = build(name)
    generator = torch.Generator().manual_seed(0)
    shape = Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])
    paths = torch.tensor([[0, 2, 4], [0, 1, -1], [0, 1, 3]])
    for num_rows in (1, 3):
        texts = [
            torch.randint(64, (n,), generator=generator).tolist() for n in (11, 4, 7)[:num_rows]
        ]
        base = ModelPass(model, TreeCache())
        base.read(pad_rows(texts, base.device), [len(text) for text in texts])
        tree: Tree | RowTrees = shape
        if own_trees:
            tree = RowTrees.from_parents(shape.parents.expand(num_rows, -1), 2)
        for counts in ([3, 2, 0], [2, 1, 3], [1, 2, 1]):
            nodes = torch.randint(64, (num_rows, 5), generator=generator)
            base.verify(nodes, tree)
            base.cache.commit(paths[:num_rows], counts[:num_rows])
            for row, text in enumerate(texts):
                text += nodes[row, paths[row, : counts[row]]].tolist()
        for row, text in enumerate(texts):
            fresh = ModelPass(model, TreeCache())
            fresh.read(torch.tensor([text]), [len(text)])
            for ours, theirs in zip(base.cache.layers, fresh.cache.layers, strict=True):
                for found, true in (
                    (ours.buffers[0], theirs.keys),
                    (ours.buffers[1], theirs.values),
                ):
                    torch.testing.assert_close(
                        found[row, :, : len(text)], true[0], atol=1e-5, rtol=1e-5
                    )


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("room", [0, 4])
def test_rows_come_and_go_in_place(widths: Sequence[int], room: int) -> None:
    """A row that ends or comes must move no other: of 64 rows that copied the cache every step.

    The reference keeps each row's keys beside it.
    """
    chance, cache, live = torch.Generator().manual_seed(1), TreeCache(room), list[list[Tensor]]()
    for turn in range(12):
        other, num = TreeCache(), 1 + turn % 2
        keys = write(other, 5 + 40 * turn, num, widths, seed=turn)
        other.extend([int(torch.randint(1, 5, (1,), generator=chance)) for _ in range(num)])
        rows = [[k[row, :, :n] for k in keys] for row, n in enumerate(other.lengths)]
        if cache.lengths:
            cache.join(other)
        else:
            cache = other
            cache.room = room
        live += rows
        cache.reserve(len(live), 3)
        if len(live) >= 4:
            pointers = [t.data_ptr() for layer in cache.layers for t in layer.buffers]
            kept = torch.randperm(len(live), generator=chance)[: 1 + turn % 3]
            cache.select(kept)
            live = [live[row] for row in kept.tolist()]
            now = [t.data_ptr() for layer in cache.layers for t in layer.buffers]
            assert now == pointers
        for layer, found in enumerate(rows_of(cache)):
            assert all(row.equal(each[layer]) for row, each in zip(found, live, strict=True))


def test_a_newcomers_row_holds_nothing_of_the_row_before() -> None:
    """A row that has overflowed would poison the one that takes its place: 0 times inf is nan."""
    cache, other = TreeCache(2), TreeCache()
    write(cache, 6, 2)
    cache.extend([6, 6])
    cache.reserve(2, 1)
    for layer in cache.layers:
        for buffer in layer.buffers:
            buffer[1] = torch.inf
    cache.select(torch.tensor([0]))
    write(other, 3, 1, seed=2)
    other.extend([3])
    cache.join(other)
    assert all(t[1, :, 3:].eq(0).all() for layer in cache.layers for t in layer.buffers)
