"""The tree of guesses: its shape, the index tensors for decoding, and how to grow a good one.

A tree is given by its *choices*: each node is the path of ranks that leads to it, so ``(0, 2)`` is
the third best guess at depth 2 under the best guess at depth 1. Node 0 is the root, the last token
that is already certain. Nodes are sorted by depth, then by ranks; a shallower tree is therefore
always a prefix of the deeper one it is cut from.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

Choice = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """A fixed shape of guesses; equal trees have equal choices.

    Build it with :meth:`from_choices`, :meth:`chain` or :func:`grow_tree`. N counts the root, D is
    the depth of the deepest node, P the number of leaves.

    Attributes:
        choices: the nodes without the root, sorted, closed under taking parents.
        device: of the tensors.
        parents: [N] long, the node above each node; -1 for the root.
        depths: [N] long, distance from the root.
        ranks: [N] long, which of its head's guesses a node is; -1 for the root.
        tree_mask: [N, N] bool, ``tree_mask[i, j]``: j is i or an ancestor of i.
        ancestors: [N, D+1] long, the nodes from the root to each node, padded with -1.
        paths: [P, D+1] long, the rows of ``ancestors`` that end in leaves.
    """

    choices: tuple[Choice, ...]
    device: torch.device = field(default=torch.device("cpu"), repr=False, compare=False)
    parents: Tensor = field(init=False, repr=False, compare=False)
    depths: Tensor = field(init=False, repr=False, compare=False)
    ranks: Tensor = field(init=False, repr=False, compare=False)
    tree_mask: Tensor = field(init=False, repr=False, compare=False)
    ancestors: Tensor = field(init=False, repr=False, compare=False)
    paths: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index: dict[Choice, int] = {(): 0}
        for choice in self.choices:
            if not choice or min(choice) < 0:
                raise ValueError(f"choices must be paths of ranks from 0 up, got {choice}")
            if choice[:-1] not in index:
                raise ValueError(f"choices has node {choice} without its parent {choice[:-1]}")
            if choice in index:
                raise ValueError(f"choices has node {choice} twice")
            index[choice] = len(index)
        if list(self.choices) != sorted(self.choices, key=lambda c: (len(c), c)):
            raise ValueError("choices must be sorted by depth, then ranks; use Tree.from_choices")
        parents = [-1, *(index[choice[:-1]] for choice in self.choices)]
        rows = RowTrees.from_parents(torch.tensor([parents]), self.max_depth)
        leaves = sorted(set(range(len(parents))) - set(parents))
        same = ("parents", "depths", "tree_mask", "ancestors")
        tensors = {name: getattr(rows, name)[0] for name in same}
        tensors["ranks"] = torch.tensor([-1, *(choice[-1] for choice in self.choices)])
        tensors["paths"] = rows.ancestors[0, leaves]
        for name, tensor in tensors.items():
            object.__setattr__(self, name, tensor.to(self.device))

    @staticmethod
    def from_choices(choices: Iterable[Sequence[int]]) -> Tree:
        """Build a tree from paths of ranks in any order.

        Raises:
            ValueError: if a node lacks its parent, comes twice, or has a negative rank.
        """
        paths = (tuple(int(rank) for rank in choice) for choice in choices)
        return Tree(tuple(sorted(paths, key=lambda choice: (len(choice), choice))))

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(depth: int) -> Tree:
        """Return the tree that is a single line of ``depth`` guesses; depth 0 is the root alone."""
        if depth < 0:
            raise ValueError(f"depth must be at least 0, got {depth}")
        return Tree(tuple((0,) * d for d in range(1, depth + 1)))

    @property
    def num_nodes(self) -> int:
        """N, the root included: the tokens of one verify step."""
        return len(self.choices) + 1

    @property
    def max_depth(self) -> int:
        """D, the number of guesses on the longest path."""
        return len(self.choices[-1]) if self.choices else 0

    @property
    def max_rank(self) -> int:
        """The largest rank, so that every head must offer ``max_rank + 1`` guesses; -1 if none."""
        return max((rank for choice in self.choices for rank in choice), default=-1)

    def trim(self, max_depth: int) -> Tree:
        """Return the tree without the nodes deeper than ``max_depth``; they are its last nodes."""
        if max_depth >= self.max_depth:
            return self
        return _trim(self, max_depth).to(self.device)  # kept by choices alone: of any device

    def to(self, device: torch.device | str) -> Tree:
        """Return the tree with its tensors on ``device``."""
        device = torch.device(device)
        return self if device == self.parents.device else _move(self, device)

    def to_json(self) -> list[list[int]]:
        """Return the choices as JSON lists, of which :meth:`from_choices` builds the tree again."""
        return [list(choice) for choice in self.choices]


@dataclass(frozen=True)
class RowTrees:
    """A tree for every row of a batch, all of one size, as a drafter grows them anew at each step.

    Nodes are sorted by depth within each row and node 0 is the root, as in :class:`Tree`, whose
    attributes these are with a leading batch dimension.

    Attributes:
        parents: [B, N] long, -1 for the root.
        depths: [B, N] long.
        tree_mask: [B, N, N] bool.
        ancestors: [B, N, D+1] long, padded with -1.
        max_depth: D, an upper bound of the depths.
    """

    parents: Tensor
    depths: Tensor
    tree_mask: Tensor
    ancestors: Tensor
    max_depth: int

    @staticmethod
    def from_parents(parents: Tensor, max_depth: int) -> RowTrees:
        """Build the trees from parents [B, N], on their device and without waiting for it.

        Args:
            parents: of nodes sorted by depth; -1 for the root.
            max_depth: no node is deeper.
        """
        num_rows, num_nodes = parents.shape
        above = parents.clamp(min=0)
        nodes = torch.arange(num_nodes, device=parents.device).expand(num_rows, -1)
        upwards = [nodes]  # each node's line to the root, which is its own parent here
        for _ in range(max_depth):
            upwards.append(above.gather(1, upwards[-1]))
        lines = torch.stack(upwards, dim=-1)  # [B, N, D+1]
        depths = (lines != 0).sum(-1)  # a line stays at the root, node 0, once it is there
        mask = torch.zeros(num_rows, num_nodes, num_nodes, dtype=torch.bool, device=parents.device)
        mask.scatter_(2, lines, True)
        steps = depths[..., None] - torch.arange(max_depth + 1, device=parents.device)
        ancestors = lines.gather(2, steps.clamp(min=0)).masked_fill(steps < 0, -1)
        return RowTrees(parents, depths, mask, ancestors, max_depth)

    @staticmethod
    def from_lists(parents: Sequence[Sequence[int]], max_depth: int) -> RowTrees:
        """Do what :meth:`from_parents` does, on the CPU, and keep trees that were built lately.

        The same shapes come again and again.
        """
        return _row_trees(tuple(map(tuple, parents)), max_depth)

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return self.parents.shape[1]

    def select(self, rows: Tensor) -> RowTrees:
        """Return the trees of the rows ``rows`` [R] (long)."""
        return RowTrees.from_parents(self.parents[rows], self.max_depth)


@lru_cache(maxsize=1024)
def _row_trees(parents: tuple[tuple[int, ...], ...], max_depth: int) -> RowTrees:
    return RowTrees.from_parents(torch.tensor(parents), max_depth)


def batched(tree: Tree | RowTrees, tensor: Tensor) -> Tensor:
    """Return one of ``tree``'s tensors with a batch dimension: B, or 1 where rows share a tree."""
    return tensor[None] if isinstance(tree, Tree) else tensor


@lru_cache(maxsize=256)
def _trim(tree: Tree, max_depth: int) -> Tree:
    return Tree(tuple(choice for choice in tree.choices if len(choice) <= max_depth))


@lru_cache(maxsize=256)
def _move(tree: Tree, device: torch.device) -> Tree:
    return Tree(tree.choices, device)


def grow_tree(hit_rates: Sequence[Sequence[float]], num_nodes: int) -> tuple[Tree, float]:
    """Grow the tree of at most ``num_nodes`` nodes with the largest expected accept length.

    Best-first: a node's value is the probability that its whole path is accepted, the product of
    the hit rates along it. Values never rise from parent to child, so taking the most valuable
    node that is left gives the best tree of every size at once (Medusa, arXiv:2401.10774, 2.3.3,
    grows the same tree). Nodes that can never be accepted are left out.

    Args:
        hit_rates: ``hit_rates[d][r]``, the probability that the guess of rank r at depth d + 1 is
            right; measured given that its parent was right, or over all positions.
        num_nodes: size, the root included.

    Returns:
        The tree and its expected accept length, 1 + the sum of the values of its nodes.

    Raises:
        ValueError: if ``num_nodes`` < 1 or a rate lies outside [0, 1].
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1, got {num_nodes}")
    if any(not 0 <= rate <= 1 for rates in hit_rates for rate in rates):
        raise ValueError("hit_rates must lie in [0, 1]")
    nodes: list[Choice] = []
    expected = 0.0
    frontier: list[tuple[float, int, Choice]] = [(-1.0, 0, ())]
    while frontier and len(nodes) < num_nodes:
        negative, depth, node = heapq.heappop(frontier)
        nodes.append(node)
        expected -= negative
        # all ranks at once: noisy rates need not fall with the rank
        for rank, rate in enumerate(hit_rates[depth] if depth < len(hit_rates) else ()):
            if rate > 0:
                heapq.heappush(frontier, (negative * rate, depth + 1, (*node, rank)))
    return Tree.from_choices(nodes[1:]), expected


def default_tree(num_heads: int, num_nodes: int) -> Tree:
    """Return a reasonable tree for heads whose hit rates nobody has measured yet."""
    rates = [[0.6 * 0.97**depth * 0.3**rank for rank in range(10)] for depth in range(num_heads)]
    return grow_tree(rates, num_nodes)[0]
