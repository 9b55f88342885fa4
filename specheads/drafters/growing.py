"""Trees that are grown anew at every step, out of the proposer's own probabilities.

A static tree spends its nodes on the ranks that hit on average; here they go where the proposer is
unsure now. A node's value is the product of the probabilities along its path, and the tree with
the most expected tokens holds the most valuable nodes: what
:func:`specheads.attention.tree.grow_tree` does with rates that were measured beforehand.

Parallel heads guess every depth at once, so that the whole tree is known after one pass
(:func:`best_trees`). Of sequential heads and draft models the guesses below a node are known only
once it has been read, so their trees are grown level by level, as EAGLE-2 does (arXiv:2406.16858):
of each level only the most valuable nodes are read (:func:`grow`, :func:`grow_on_host`).

Functions ``..._on_host`` do in Python what their namesakes do with tensors. On a CPU a few dozen
nodes cost less in Python; on a GPU tensors keep the step free of synchronisation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree
from specheads.drafters.contract import Candidates, Prefill, StepResult, picked

NUM_RANKS = 10  # guesses per node that a tree may use, as measured for static trees
# Nodes of a level below which guesses are asked for. Trees of up to 32 nodes of Hydra heads on the
# embedded model gain nothing from more, and a thousandth less from 3.
WIDTH = 4
HOSTS = ("cpu",)  # devices where Python need not wait for anything, and small ops cost more


def on_host(device: torch.device) -> bool:
    """Whether trees on this device are grown and laid out in Python."""
    return device.type in HOSTS


Nodes = list[list[tuple[int, int]]]  # [B][n]: the place of each node's parent, and its token
OneTree = tuple[Sequence[int], Sequence[int]]  # tokens and parents of one row, the root first
Rows = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Grown:
    """The shape of trees that heads grow anew at every step.

    Attributes:
        num_nodes: N of every tree, root included.
        num_ranks: guesses per node to choose from.
        temperatures: one per head, by which its logits are divided, where the head was measured to
            be too sure of itself (above 1) or not sure enough; None leaves them.
        width: of sequential heads: only so many nodes of each level, the most valuable, may have
            children.
    """

    num_nodes: int
    num_ranks: int = NUM_RANKS
    temperatures: Sequence[float] | None = None
    width: int = WIDTH


def best_guesses(logits: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and indices [..., R] of the best of logits [..., V']."""
    best = logits.topk(num_ranks, dim=-1)
    # a softmax at the best guesses only; torch's own logsumexp takes thrice the small ops
    shifted = best.values - best.values[..., :1]
    log_probs = shifted - (logits - best.values[..., :1]).exp_().sum(-1, keepdim=True).log_()
    return log_probs, best.indices


def best_trees(num_nodes: int, log_probs: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Grow for every row the tree of ``num_nodes`` nodes with the most probable prefixes.

    Args:
        num_nodes: root included; the tree is smaller if there are not so many prefixes.
        log_probs: [D, B, C, R], no positive numbers: per depth the R best guesses below each of the
            C candidates of the depth above; below the root those of the first.
        places: likewise, which candidate of its depth each guess is.

    Returns:
        parents [B, N], -1 for the root, nodes sorted by depth; slots [B, N - 1]: where each node
        below the root stands in a row's candidates laid end to end, ``d * C + c`` for candidate c
        of depth d + 1; and values [B, N], see :func:`grow`.

    """
    depth, num_rows, width, num_ranks = log_probs.shape
    levels = iter(range(depth))

    def ask(nodes: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        level = next(levels)
        of_level, own = log_probs[level], places[level] + level * width
        if nodes is None:
            return of_level[:, :1], own[:, :1]
        at = (nodes[0] - (level - 1) * width)[..., None].expand(-1, -1, num_ranks)
        return of_level.gather(1, at), own.gather(1, at)

    roots = torch.zeros(num_rows, dtype=torch.long, device=log_probs.device)
    parents, slots, values = grow(ask, roots, num_nodes, min(depth, num_nodes - 1))
    return parents, slots[:, 1:], values


def grow(
    ask: Callable[[tuple[Tensor, Tensor] | None], tuple[Tensor, Tensor]],
    roots: Tensor,
    num_nodes: int,
    max_depth: int,
    width: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Grow trees level by level; shapes depend on the arguments' shapes only.

    No level can hold more than the nodes that are left once there is one on each level above it,
    and its best come from extending the best of the level above. Of all levels together the best
    are kept, the shallower first where values tie, so that no node stands there without its parent.

    Args:
        ask: returns log-probabilities and tokens [B, n, R] of the best guesses below n nodes. It
            is given their tokens [B, n] and the places [B, n] of their parents among the nodes
            asked before; None for the roots.
        roots: [B], their tokens.
        num_nodes: N, root included.
        max_depth: of the deepest node.
        width: most nodes of a level that are asked; None asks all.

    Returns:
        Of the nodes sorted by depth, each [B, N]: parents, -1 for the root; tokens; values, the
        logarithms of their paths' probabilities.
    """
    tokens = [roots[:, None]]
    values = torch.zeros_like(tokens[0], dtype=torch.float)  # of the nodes that are asked
    of_levels, below = [values], [torch.zeros_like(tokens[0])]
    nodes, num_ranks = None, 1
    for depth in range(max_depth):
        log_probs, guesses = ask(nodes)
        num_ranks = log_probs.shape[-1]
        extended = (values[..., None] + log_probs).flatten(1)
        best, flat = extended.topk(min(num_nodes - 1 - depth, extended.shape[1]), dim=1)
        of_levels.append(best)
        below.append(flat)  # (place of the parent in its level) * R + rank
        tokens.append(guesses.expand(*values.shape, -1).flatten(1).gather(1, flat))
        values = best[:, :width]
        nodes = tokens[-1][:, :width], flat[:, :width] // num_ranks
    every = torch.cat(of_levels, dim=1)
    # a stable sort, and levels in order: a node never precedes its equally probable parent
    kept = every.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes].sort(dim=1).values
    above = _starts_above(tuple(level.shape[1] for level in below), roots.device)
    flat = torch.cat(below, dim=1).gather(1, kept)
    # kept is ascending, so that bisection finds each parent's new place; it is kept for certain,
    # since no child is worth more than its parent
    parents = torch.searchsorted(kept, above[kept] + flat // num_ranks)
    parents[:, 0] = -1
    return parents, torch.cat(tokens, dim=1).gather(1, kept), every.gather(1, kept)


@lru_cache(maxsize=64)
def _starts_above(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return for each place in the levels laid end to end where the level above it starts."""
    starts = [sum(sizes[:level]) for level in range(len(sizes))]
    above = [0] + [starts[d] for d, size in enumerate(sizes[1:]) for _ in range(size)]
    return torch.tensor(above, device=device)


def best_tree_on_host(num_nodes: int, log_probs: Sequence[Rows], places: Sequence[Rows]) -> OneTree:
    """Do for one row what :func:`best_trees` does, with a heap: on a CPU at a third of the time.

    Args:
        num_nodes: root included.
        log_probs: [D][C][R], of the guesses below each candidate of the depth above, best first.
        places: likewise, which candidate of its depth each guess is.

    Returns:
        parents [N] and slots [N - 1], as :func:`best_trees` gives them: ``d * C + c`` for candidate
        c of depth d + 1.
    """
    width = len(log_probs[0])
    # minus the value, order of arrival, depth, candidate above, rank, its value, its number
    frontier = [(-log_probs[0][0][0], 0, 0, 0, 0, 0.0, 0)]
    found = [(0, 0, 0, -1)]  # depth, number, the parent's number, slot
    arrived = 1
    while frontier and len(found) < num_nodes:
        negative, _, depth, place, rank, above, parent = heapq.heappop(frontier)
        number, guesses, own = len(found), log_probs[depth][place], places[depth][place][rank]
        found.append((depth + 1, number, parent, depth * width + own))
        if rank + 1 < len(guesses):
            value = above + guesses[rank + 1]
            heapq.heappush(frontier, (-value, arrived, depth, place, rank + 1, above, parent))
        if depth + 1 < len(log_probs):
            value = log_probs[depth + 1][own][0] - negative
            heapq.heappush(frontier, (-value, arrived + 1, depth + 1, own, 0, -negative, number))
        arrived += 2
    slots, parents = by_depth(found)
    return parents, slots[1:]


def by_depth(found: Iterable[tuple[int, int, int, int]]) -> OneTree:
    """Sort the nodes of a tree that were found in another order, parents before children.

    Args:
        found: of every node its depth, its number, its parent's number, and a token or the like;
            the root has number 0.

    Returns:
        The tokens, and the parents' places, -1 for the root.
    """
    nodes = sorted(found)
    place = {number: i for i, (_, number, _, _) in enumerate(nodes)}
    parents = [-1, *(place[above] for _, _, above, _ in nodes[1:])]
    return [token for *_, token in nodes], parents


def grow_on_host(
    ask: Callable[[Nodes | None], tuple[Tensor, Tensor]],
    roots: Sequence[int],
    limits: Sequence[int],
    num_nodes: int,
    width: int,
    min_gain: float = 0.0,
) -> list[OneTree]:
    """Do what :func:`grow` does in Python, and stop where no node can come among the best any more.

    Args:
        ask: returns log-probabilities and tokens [B, n, R] of the best guesses below n nodes per
            row; None for the roots.
        roots: [B], their tokens.
        limits: [B], the deepest node of each row.
        num_nodes: N, root included.
        width: most nodes of a level that are asked.
        min_gain: a row's tree ends where its next level could not gain so many tokens: the sum of
            the probabilities of the paths that it would continue.

    Returns:
        Per row tokens and parents.
    """
    rows = [_GrowingRow(root, num_nodes, width) for root in roots]
    nodes: Nodes | None = None
    for depth in range(1, max(limits) + 1):
        log_probs, guesses = (each.tolist() for each in ask(nodes))
        for row, limit, of_row, tokens in zip(rows, limits, log_probs, guesses, strict=True):
            if depth <= limit:
                row.extend(depth, of_row, tokens)
            gain = sum(math.exp(-row.found[number][0]) for number, _ in row.asked)
            if depth >= limit or gain < min_gain:
                row.asked = []
        widest = max(len(row.asked) for row in rows)
        if widest == 0:
            break
        # rows that ask at fewer nodes ask at one of them, or anywhere, once more
        asked = [[(above, row.found[number][-1]) for number, above in row.asked] for row in rows]
        nodes = [each + (each or [(0, 0)])[:1] * (widest - len(each)) for each in asked]
    return [row.tree() for row in rows]


class _GrowingRow:
    """One row's tree while it grows on the host, a level at a time.

    Attributes:
        found: of every node that was found, by its number: minus the logarithm of its path's
            probability, its depth, its place in the level, the parent's number, and its token.
            Number 0 is the root.
        asked: the nodes below which is asked next, the most valuable of the last level: their
            numbers, and the places of their parents among those that were asked before.
    """

    def __init__(self, root: int, num_nodes: int, width: int) -> None:
        self.most, self.width = num_nodes - 1, width
        self.found: list[tuple[float, int, int, int, int]] = [(0.0, 0, 0, 0, root)]
        self.asked = [(0, 0)]
        self.best: list[float] = []  # the values of the best nodes so far, negative, ascending

    def extend(
        self, depth: int, log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Add the best of the level at ``depth``, and choose below which of them to ask."""
        full = len(self.best) == self.most
        level: list[tuple[float, int, int]] = []  # minus the value, place of the parent, rank
        for place, (number, _) in enumerate(self.asked):
            value = self.found[number][0]
            for rank, log_prob in enumerate(log_probs[place]):
                if full and value - log_prob >= self.best[-1]:
                    break
                level.append((value - log_prob, place, rank))
        level.sort()
        del level[self.most + 1 - depth :]
        first = len(self.found)
        self.found += [
            (negative, depth, place, self.asked[above][0], tokens[above][rank])
            for place, (negative, above, rank) in enumerate(level)
        ]
        self.best = sorted(self.best + [each[0] for each in level])[: self.most]
        # children of a full tree must be more valuable than its last node, hence their parents too
        bar = self.best[-1] if len(self.best) == self.most else math.inf
        best = enumerate(level[: self.width], start=first)
        self.asked = [(number, above) for number, (negative, above, _) in best if negative < bar]

    def tree(self) -> OneTree:
        """Return tokens and parents of the best nodes, sorted by depth."""
        order = sorted(range(len(self.found)), key=self.found.__getitem__)[: self.most + 1]
        nodes = ((number, *self.found[number]) for number in order)
        return by_depth(
            (depth, number, above, token) for number, _, depth, _, above, token in nodes
        )


@dataclass(frozen=True)
class TextRows:
    """Where the rows of a batch stand, for drafters that follow their texts in Python.

    Attributes:
        rows: what is known of each row's text; its ``extend`` is told the tokens that follow.
        device: where candidates go.
    """

    rows: list[Any]
    device: torch.device


class TextDrafter:
    """What drafters have in common that follow their texts in Python, each row by itself.

    Attributes:
        begin: makes a row without text.
    """

    taps: tuple[str, ...] = ()
    deterministic = True
    begin: Callable[[], Any]

    def start(self, prefill: Prefill) -> TextRows:
        """Read the prompts."""
        rows = [self.begin() for _ in prefill.ids]
        for row, ids, root in zip(rows, prefill.ids, prefill.root.tolist(), strict=True):
            row.extend([*ids, root])
        return TextRows(rows, prefill.root.device)

    def observe(self, state: TextRows, result: StepResult) -> TextRows:
        """Read the tokens gained."""
        for row, new_tokens in zip(state.rows, result.new_tokens, strict=True):
            row.extend(new_tokens)
        return state

    def select(self, state: TextRows, rows: Tensor) -> TextRows:
        """Keep some rows."""
        return TextRows(picked(state.rows, rows.tolist()), state.device)

    def join(self, state: TextRows, other: TextRows) -> TextRows:
        """Take the rows of both."""
        return TextRows([*state.rows, *other.rows], state.device)


def pack(
    rows: Sequence[OneTree],
    device: torch.device,
    *,
    inputs: Sequence[Sequence[int]] | None = None,
    num_nodes: int = 1,
) -> Candidates:
    """Return candidates of trees that were made in Python, all rows padded to the largest.

    Args:
        rows: [B] times tokens and parents [n], per row its own n; nodes sorted by depth.
        device: where the candidates go.
        inputs: [B][n], what the base model reads, where that is more than the tokens.
        num_nodes: pad to at least so many, where steps of one size are wanted.
    """
    width = max(num_nodes, *(len(parents) for _, parents in rows))
    chained = (parent == node - 1 for _, row in rows for node, parent in enumerate(row))
    # the mask of a chain is prepared once for all steps; what is only read branches sooner or later
    if inputs is None and all(chained):
        tree: Tree | RowTrees = Tree.chain(width - 1).to(device)
    else:
        # padding stands beside the last node, so that nodes stay sorted by depth
        parents = [[*row, *[max(row[-1], 0)] * (width - len(row))] for _, row in rows]
        depth = max(map(_depth_of_last, parents))
        if on_host(device):
            tree = RowTrees.from_lists(parents, depth)
        else:
            tree = RowTrees.from_parents(torch.tensor(parents, device=device), depth)
    tokens = padded([row for row, _ in rows], width).to(device)
    probes = None if inputs is None else padded(inputs, width).to(device)
    return Candidates(tokens, tree, probes=probes)


def padded(rows: Iterable[Sequence[int]], width: int) -> Tensor:
    """Return rows [B, width], padded with -1 on the right."""
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])


def _depth_of_last(parents: Sequence[int]) -> int:
    depth, node = 0, parents[-1]
    while node >= 0:
        depth, node = depth + 1, parents[node]
    return depth
