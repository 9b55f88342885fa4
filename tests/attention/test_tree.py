"""The tree's index tensors and the growing of trees."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.attention.tree import Tree, default_tree, grow_tree

MEDUSA = [(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 0, 0, 0), (0, 0, 1)]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Draw trees of up to 12 nodes below the root."""
    nodes: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(0, 12))):
        node = (*draw(st.sampled_from(nodes)), draw(st.integers(0, 3)))
        if node not in nodes:
            nodes.append(node)
    return Tree.from_choices(nodes[1:])


@given(trees())
@settings(max_examples=60)
def test_index_tensors_agree_with_the_choices(tree: Tree) -> None:
    """Prevents a node that attends to a cousin or stands at the wrong position: silent garbage."""
    nodes = [(), *tree.choices]
    assert tree.num_nodes == len(nodes)
    for i, node in enumerate(nodes):
        assert tree.depths[i] == len(node)
        assert tree.parents[i] == (nodes.index(node[:-1]) if node else -1)
        assert tree.ranks[i] == (node[-1] if node else -1)
        for j, other in enumerate(nodes):
            assert tree.tree_mask[i, j] == (node[: len(other)] == other)
        line = [nodes.index(node[:d]) for d in range(len(node) + 1)]
        assert tree.ancestors[i].tolist() == line + [-1] * (tree.max_depth - len(node))
    leaves = [node for node in nodes if not any(o[:-1] == node for o in nodes if o)]
    ends = [nodes[int(path[path >= 0][-1])] for path in tree.paths]
    assert sorted(ends) == sorted(leaves)


@given(trees(), st.integers(0, 4))
@settings(max_examples=60)
def test_trimming_keeps_the_first_nodes(tree: Tree, depth: int) -> None:
    """Prevents tokens that no longer belong to their nodes after a cut at the token limit."""
    trimmed = tree.trim(depth)
    assert trimmed.choices == tree.choices[: trimmed.num_nodes - 1]
    assert trimmed.max_depth <= depth
    assert all(len(choice) > depth for choice in tree.choices[trimmed.num_nodes - 1 :])


def test_json_round_trip_and_order() -> None:
    """Prevents a tree that changes when it is saved; equal trees must be equal keys of caches."""
    tree = Tree.from_choices(MEDUSA)
    again = Tree.from_choices(tree.to_json())
    assert again == tree and hash(again) == hash(tree)
    assert tree.to_json()[:4] == [[0], [1], [2], [0, 0]]
    assert (tree.max_depth, tree.max_rank, tree.num_nodes) == (4, 2, 10)


def test_chains() -> None:
    """Prevents an n-gram chain of the wrong length; the empty one is a plain step."""
    assert Tree.chain(0).num_nodes == 1
    assert Tree.chain(0).max_rank == -1
    assert Tree.chain(3).choices == ((0,), (0, 0), (0, 0, 0))
    assert Tree.chain(3).tree_mask.equal(torch.ones(4, 4).tril().bool())
    with pytest.raises(ValueError, match="depth must be at least 0, got -1"):
        Tree.chain(-1)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([(0,), (1, 0)], r"node \(1, 0\) without its parent \(1,\)"),
        ([(0,), (0,)], r"node \(0,\) twice"),
        ([(-1,)], r"got \(-1,\)"),
        ([()], r"got \(\)"),
    ],
)
def test_bad_choices_are_refused(choices: list[tuple[int, ...]], message: str) -> None:
    """Prevents -1 as a rank, which would index the last guess."""
    with pytest.raises(ValueError, match=message):
        Tree.from_choices(choices)


def brute_force(rates: list[list[float]], num_nodes: int) -> float:
    """Return the best expected accept length over all trees of num_nodes."""
    nodes = [
        node
        for depth in range(1, len(rates) + 1)
        for node in itertools.product(*(range(len(rates[d])) for d in range(depth)))
    ]

    def value(node: tuple[int, ...]) -> float:
        product = 1.0
        for depth, rank in enumerate(node):
            product *= rates[depth][rank]
        return product

    best = 0.0
    for chosen in itertools.combinations(nodes, num_nodes - 1):
        if all(len(node) == 1 or node[:-1] in chosen for node in chosen):
            best = max(best, 1 + sum(map(value, chosen)))
    return best


@st.composite
def hit_rates(draw: st.DrawFn) -> list[list[float]]:
    """Draw rates for few enough paths to try all trees; some equal, some certain."""
    sizes = draw(
        st.sampled_from([(8,), (2, 2), (3, 3), (2, 5), (2, 2, 2), (3, 1, 2), (1, 1, 1, 1)])
    )
    rate = st.sampled_from([0.25, 0.5, 1.0]) | st.floats(0.05, 1)
    return [draw(st.lists(rate, min_size=size, max_size=size)) for size in sizes]


@given(hit_rates(), st.integers(1, 8))
@settings(max_examples=60)
def test_grown_tree_is_the_best_of_all(rates: list[list[float]], num_nodes: int) -> None:
    """Prevents a growth that is right only where rates fall with the rank; measured ones jump."""
    sizes = itertools.accumulate((len(each) for each in rates), lambda a, b: a * b)
    num_nodes = min(num_nodes, 1 + sum(sizes))
    tree, expected = grow_tree(rates, num_nodes)
    assert tree.num_nodes == num_nodes
    assert expected == pytest.approx(brute_force(rates, num_nodes))
    value = {
        choice: math.prod(rates[d][r] for d, r in enumerate(choice)) for choice in tree.choices
    }
    assert expected == pytest.approx(1 + sum(value.values()))


def test_hopeless_nodes_are_left_out() -> None:
    """Prevents paying for guesses that were never right while they were measured."""
    tree, expected = grow_tree([[0.5, 0.0], [0.0, 0.5]], 10)
    assert tree.choices == ((0,), (0, 1))
    assert expected == pytest.approx(1.75)
    with pytest.raises(ValueError, match="num_nodes must be at least 1, got 0"):
        grow_tree([[0.5]], 0)
    with pytest.raises(ValueError, match="hit_rates"):
        grow_tree([[1.5]], 2)


def test_default_tree_fits_the_heads() -> None:
    """Prevents a default tree deeper than the heads."""
    for num_heads in (1, 2, 4):
        tree = default_tree(num_heads, 16)
        assert tree.max_depth <= num_heads
        assert tree.num_nodes == min(16, 11 if num_heads == 1 else 16)
