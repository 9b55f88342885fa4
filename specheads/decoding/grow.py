"""Grow the static trees that measured hits would have hit most."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from specheads.decoding.hits import MISS, NUM_RANKS, Hits
from specheads.tree import Choice, Tree

_PRIOR = 16.0  # positions by which a rate measured over all paths outweighs that of one path
_TYPICAL_NODES = 8  # of the tree whose steps' positions all sizes are grown on
_ROUNDS = 3


def grow_order(ranks: Tensor, max_nodes: int) -> list[tuple[Choice, float]]:
    """Order nodes by the probability that they are accepted; every prefix is the best of its size.

    Best-first as :func:`specheads.tree.grow_tree`, with hit rates measured given the very path
    above a node: after a second-best guess the third token is harder than after the best. Paths
    seen rarely borrow from the rate of that rank at that depth after any hit.

    Args:
        ranks: of all texts together, [S, K].
        max_nodes: root included; there are fewer where too few nodes are useful.

    Returns:
        The nodes below the root, each with its probability.
    """
    num_heads = ranks.shape[1]
    pooled: list[Tensor] = []  # per depth [R]: rate of each rank where the tokens before were hit
    alive = torch.ones(len(ranks), dtype=torch.bool)
    for depth in range(num_heads):
        pooled.append(_counts(ranks[alive, depth]).double() / max(int(alive.sum()), 1))
        alive &= ranks[:, depth] < NUM_RANKS
    nodes: list[tuple[Choice, float]] = []
    order = itertools.count()  # breaks ties without comparing tensors
    frontier: list[tuple[float, int, Choice, Tensor]] = []

    def offer_children(node: Choice, value: float, seen: Tensor) -> None:
        depth = len(node)
        if depth == num_heads:
            return
        rates = (_counts(seen[:, depth]) + _PRIOR * pooled[depth]) / (len(seen) + _PRIOR)
        for rank, rate in enumerate(rates.tolist()):
            if rate > 0:
                below = seen[seen[:, depth] == rank]
                heapq.heappush(frontier, (-value * rate, next(order), (*node, rank), below))

    offer_children((), 1.0, ranks)
    while frontier and len(nodes) + 1 < max_nodes:
        negative, _, node, below = heapq.heappop(frontier)
        nodes.append((node, -negative))
        offer_children(node, -negative, below)
    return nodes


def _counts(ranks: Tensor) -> Tensor:
    return torch.bincount(ranks.clamp(max=NUM_RANKS), minlength=NUM_RANKS + 1)[:NUM_RANKS]


def static_sizes(order: Sequence[Choice], ranks: Tensor) -> Tensor:
    """Return how large a static tree must be to hold the path that came.

    Args:
        order: the tree of N nodes holds the first N - 1 of these.
        ranks: of one text, [S, K].

    Returns:
        [S, K] long: the least N that accepts the token at depth d + 1; ``MISS`` if none does.
    """
    size_with = {node: index + 2 for index, node in enumerate(order)}
    rows = [
        [size_with.get(tuple(row[: depth + 1]), MISS) for depth in range(len(row))]
        for row in ranks.tolist()
    ]
    return torch.tensor(rows, dtype=torch.long).view(ranks.shape)


def step_ranks(order: Sequence[Choice], hits: Sequence[Sequence[Hits]], num_nodes: int) -> Tensor:
    """Return the ranks [R, K] at those positions only where a step of this tree would start.

    They are harder than others: a step starts where the tree did not reach, and misses come close
    together.

    Args:
        order: the tree of ``num_nodes`` nodes holds the first ``num_nodes - 1`` of these.
        hits: per prompt, per text.
        num_nodes: root included.
    """
    kept = []
    for text in (text for texts in hits for text in texts):
        gained = (static_sizes(order, text.ranks) <= num_nodes).sum(1).add(1).tolist()
        starts, root = [], 0
        while root < len(gained):
            starts.append(root)
            root += gained[root]
        kept.append(text.ranks[starts])
    return torch.cat(kept)


def grow_nodes(hits: Sequence[Sequence[Hits]], max_nodes: int) -> list[Choice]:
    """Order nodes for static trees of all sizes, as :func:`grow_order`, where steps start.

    Which positions these are depends on the tree, so the nodes are ordered again for those at which
    the tree found before starts its steps. (On the embedded model trees of 6 nodes gain 4.6% from
    it, those of 8 nodes 1.8%, larger ones nothing.)

    Args:
        hits: per prompt, per text.
        max_nodes: root included.
    """
    ranks = torch.cat([text.ranks for texts in hits for text in texts])
    found: list[tuple[int, list[Choice]]] = []
    for _ in range(_ROUNDS):
        nodes = [node for node, _ in grow_order(ranks, max_nodes)]
        ranks = step_ranks(nodes, hits, _TYPICAL_NODES)
        found.append((len(ranks), nodes))
    return min(found, key=lambda each: each[0])[1]  # the fewest steps for the same texts


def grow_static(hits: Sequence[Sequence[Hits]], num_nodes: int) -> Tree:
    """Grow the tree of ``num_nodes`` nodes that gains most; smaller if too few are useful."""
    return Tree.from_choices(grow_nodes(hits, num_nodes))


def acceptance(tree: Tree, hits: Sequence[Sequence[Hits]]) -> list[float]:
    """Return per choice of a tree the share of its verify steps that accept it.

    One more than their sum is the accept length, but for steps at the end of a text.
    """
    ranks = step_ranks(tree.choices, hits, tree.num_nodes)
    paths = Counter(
        tuple(row[:depth]) for row in ranks.tolist() for depth in range(1, len(row) + 1)
    )
    return [paths[choice] / max(len(ranks), 1) for choice in tree.choices]
