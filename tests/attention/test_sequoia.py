"""The best fixed shapes, against all shapes there are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.attention.tree import Tree, grow_tree
from specheads.drafters.draft_tree import sequoia_tree

Shape = tuple["Shape", ...]  # a node, by its children
RATES = st.lists(st.floats(0, 1), min_size=0, max_size=4)


@lru_cache
def shapes(num_nodes: int) -> list[Shape]:
    """Return all ordered trees of a size."""
    return list(forests(num_nodes - 1))


def forests(num_nodes: int) -> Iterator[Shape]:
    """Yield all rows of trees that have so many nodes together."""
    if num_nodes == 0:
        yield ()
    for first in range(1, num_nodes + 1):
        for child in shapes(first):
            for others in forests(num_nodes - first):
                yield (child, *others)


def value_of(shape: Shape, rates: list[float]) -> float:
    """Return the accept length that is expected; later children than there are rates never hit."""
    known = zip(shape, rates, strict=False)
    return 1 + sum(rate * value_of(child, rates) for child, rate in known)


def depth_of(shape: Shape) -> int:
    """Return the depth of the deepest node."""
    return max((1 + depth_of(child) for child in shape), default=0)


def value_of_tree(tree: Tree, rates: list[float]) -> float:
    """Return the same of a tree, node by node."""
    total = 1.0
    for choice in tree.choices:
        value = 1.0
        for rank in choice:
            value *= rates[rank]
        total += value
    return total


@given(RATES, st.integers(1, 7), st.integers(0, 4))
@settings(max_examples=40)
def test_no_shape_is_better(rates: list[float], num_nodes: int, max_depth: int) -> None:
    """A table read one node off grows a tree that is merely good, and nothing else shows it."""
    tree, expected = sequoia_tree(rates, num_nodes, max_depth)
    assert tree.num_nodes <= num_nodes and tree.max_depth <= max_depth
    assert value_of_tree(tree, rates) == pytest.approx(expected)
    for choice in tree.choices:  # nobody draws a second child before the first
        assert choice[-1] == 0 or (*choice[:-1], choice[-1] - 1) in tree.choices
    best = max(
        value_of(shape, rates)
        for size in range(1, num_nodes + 1)
        for shape in shapes(size)
        if depth_of(shape) <= max_depth
    )
    assert expected == pytest.approx(best)


def test_falling_rates_need_no_table() -> None:
    """Prevents a limit of the program's own on large trees, where nothing else can be counted."""
    rates = [0.6 * 0.5**rank for rank in range(12)]
    _, expected = sequoia_tree(rates, 64, 7)
    assert expected == pytest.approx(grow_tree([rates] * 7, 64)[1])


def test_rates_that_rise_are_looked_through() -> None:
    """Taking the most valuable node next would stay in the chain of the sampled children."""
    tree, expected = sequoia_tree([0.3, 0.9], 3, 2)
    assert tree.choices == ((0,), (1,)) and expected == pytest.approx(2.2)


def test_settings_are_checked() -> None:
    """Prevents shapes from numbers that mean nothing."""
    with pytest.raises(ValueError, match=r"rates must be in \[0, 1\]"):
        sequoia_tree([1.2], 4, 2)
    with pytest.raises(ValueError, match="num_nodes must be at least 1"):
        sequoia_tree([0.5], 0, 2)
