"""Growing static trees from measured hits."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specheads.attention.tree import Tree
from specheads.measure import hits as module
from specheads.measure.hits import (
    MISS,
    Hits,
    acceptance,
    grow_nodes,
    grow_order,
    step_ranks,
)
from tests.enumeration import replay


def choices(ranks: Tensor, num_nodes: int) -> set[tuple[int, ...]]:
    """Return the nodes of the grown tree."""
    return {node for node, _ in grow_order(ranks, num_nodes)}


def hits_of(ranks: Tensor, ended: bool = True) -> Hits:
    """Return hits that hold nothing but ranks."""
    nothing = torch.zeros(0)
    return Hits(ranks, nothing, nothing, nothing, ended)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=20),
    st.integers(2, 8),
)
@settings(max_examples=25)
def test_the_order_is_the_best_of_every_size(rows: list[list[int]], num_nodes: int) -> None:
    """Conditional rates jump from path to path; a greedy growth could miss what lies below."""
    ranks = torch.tensor(rows)
    ranks[ranks == 3] = MISS
    worth = dict(grow_order(ranks, 1 + 3 + 9))  # all nodes that ever hit
    assert all(worth[node] <= worth.get(node[:-1], 1.0) + 1e-12 for node in worth)
    num_nodes = min(num_nodes, len(worth) + 1)
    best = max(
        sum(worth[node] for node in chosen)
        for chosen in itertools.combinations(worth, num_nodes - 1)
        if all(len(node) == 1 or node[:-1] in chosen for node in chosen)
    )
    grown = grow_order(ranks, num_nodes)
    assert sum(value for _, value in grown) == pytest.approx(best)


def test_growth_uses_the_path_above() -> None:
    """Products of marginal rates would buy (0, 0) and (1, 5), which never happen."""
    ranks = torch.tensor([[0, 5], [1, 0]] * 500)
    assert choices(ranks, 5) == {(0,), (1,), (0, 5), (1, 0)}


def test_growth_borrows_where_a_path_is_rare() -> None:
    """One lucky position must not buy a deep node that is seldom right."""
    ranks = torch.tensor([[0, 0]] * 60 + [[0, 1]] * 30 + [[1, 9]])
    assert choices(ranks, 4) == {(0,), (0, 0), (0, 1)}


def test_growth_leaves_out_what_never_hits() -> None:
    """Nodes without hits cost time in every step and gain nothing."""
    ranks = torch.tensor([[0, MISS], [0, MISS]])
    assert choices(ranks, 48) == {(0,)}
    assert grow_nodes([[hits_of(torch.zeros(0, 2, dtype=torch.long))]], 8) == []


def test_growth_counts_where_steps_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Easy runs are passed in one step, however many positions they have; hard ones one by one."""
    monkeypatch.setattr(module, "_TYPICAL_NODES", 3)
    easy, hard = [0, 0], [1, MISS]
    text = hits_of(torch.tensor([easy, easy, easy, hard, hard] * 50))
    everywhere = [node for node, _ in grow_order(text.ranks, 3)]
    assert everywhere == [(0,), (0, 0)]
    assert step_ranks(everywhere, [[text]], 3).tolist()[:4] == [easy, hard, hard, easy]
    nodes = grow_nodes([[text]], 3)
    assert set(nodes) == {(0,), (1,)}
    assert len(step_ranks(nodes, [[text]], 3)) < len(step_ranks(everywhere, [[text]], 3))


def test_acceptance_adds_up_to_the_accept_length() -> None:
    """The widths in the picture, and the length printed beside it, must tell the same story."""
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(0, 3, (size, 3), generator=generator) for size in (40, 7, 90)]
    hits = [[hits_of(ranks, ended=False)] for ranks in texts]
    tree = Tree.from_choices([(0,), (1,), (0, 0), (1, 2), (0, 0, 1)])
    steps = [step for ranks in texts for step in replay(tree, ranks, ended=False)]
    shares = acceptance(tree, hits)
    assert 1 + sum(shares) == pytest.approx(sum(steps) / len(steps))
    assert shares[tree.choices.index((0,))] > shares[tree.choices.index((0, 0))] > 0
