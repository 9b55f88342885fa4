"""Medusa heads that grow a tree of their own at every step, out of their own probabilities.

A static tree spends its nodes on the ranks that hit on average; here they go where the heads are
unsure now. The heads guess in parallel, so a node's value is the product of the heads'
probabilities along its path, and the tree that gains most in expectation holds the most valuable
prefixes: what :func:`specheads.tree.grow_tree` does with rates that were measured beforehand
(DDTree does it with a heap on the host).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.following import Follower, HeadsState
from specheads.tree import RowTrees

if TYPE_CHECKING:
    from specheads.models.kinds import Heads
    from specheads.models.output import OutputLayer

NUM_RANKS = 10  # guesses per head that a tree may use, as measured for static trees
HOSTS = ("cpu",)  # devices where Python need not wait for anything, and small ops cost more


def best_trees(log_probs: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Grow for every row the tree of ``num_nodes`` nodes with the most probable prefixes.

    Level by level: no level can hold more than the nodes that are left once there is one on each
    level above it, and its best come from extending the best of the level above. Of all levels
    together the best are kept, the shallower first where values tie, so that no node stands there
    without its parent. Shapes depend on the arguments' shapes only; nothing waits for the device.

    Args:
        log_probs: [D, B, R], no positive numbers: the R best guesses for each depth, in any order.
        num_nodes: root included; smaller if there are not so many prefixes.

    Returns:
        parents [B, N], -1 for the root, nodes sorted by depth; and slots [B, N - 1]: where each
        node below the root stands in a row's guesses laid end to end, ``d * R + r`` for guess r at
        depth d + 1.

    Raises:
        ValueError: if ``num_nodes`` < 1.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1, got {num_nodes}")
    depth, num_rows, num_ranks = log_probs.shape
    values = log_probs.new_zeros(num_rows, 1)  # of the root
    of_levels, below = [values], [torch.zeros_like(values, dtype=torch.long)]
    for d in range(min(depth, num_nodes - 1)):
        extended = (values[:, :, None] + log_probs[d][:, None]).flatten(1)
        values, flat = extended.topk(min(num_nodes - 1 - d, extended.shape[1]), dim=1)
        of_levels.append(values)
        below.append(flat)  # (place of the parent in its level) * R + rank
    kept, parents, flat = keep_best(of_levels, below, num_ranks, num_nodes)
    _, first = _offsets(tuple(level.shape[1] for level in below), num_ranks, log_probs.device)
    return parents, (first[kept] + flat % num_ranks)[:, 1:]


def keep_best(
    of_levels: Sequence[Tensor], below: Sequence[Tensor], num_ranks: int, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the most valuable nodes of a tree grown level by level.

    Args:
        of_levels: per level, the root's first, the nodes' values [B, n].
        below: likewise ``(place of the parent in its level) * R + rank``.
        num_ranks: R.
        num_nodes: N, root included.

    Returns:
        kept [B, N]: places in the levels laid end to end; parents [B, N], -1 for the root; and what
        ``below`` says of the kept nodes.
    """
    sizes = tuple(level.shape[1] for level in below)
    above, _ = _offsets(sizes, num_ranks, below[0].device)
    # a stable sort, and levels in order: a node never precedes its equally probable parent
    best = torch.cat(list(of_levels), 1).sort(dim=1, descending=True, stable=True).indices
    kept = best[:, :num_nodes].sort(dim=1).values
    flat = torch.cat(list(below), 1).gather(1, kept)
    parents = torch.searchsorted(kept, above[kept] + flat // num_ranks)
    parents[:, 0] = -1
    return kept, parents, flat


@lru_cache(maxsize=64)
def _offsets(sizes: tuple[int, ...], num_ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per place in the levels laid end to end: where the level above and its own guesses start."""
    starts = [sum(sizes[:level]) for level in range(len(sizes))]
    above = [0] + [starts[d] for d, size in enumerate(sizes[1:]) for _ in range(size)]
    first = [0] + [d * num_ranks for d, size in enumerate(sizes[1:]) for _ in range(size)]
    return torch.tensor(above, device=device), torch.tensor(first, device=device)


def best_tree_on_host(
    log_probs: Sequence[Sequence[float]], num_nodes: int
) -> tuple[list[int], list[int]]:
    """Do for one row what :func:`best_trees` does, with a heap: on a CPU at a third of the time.

    Args:
        log_probs: [D][R], each depth's best first.
        num_nodes: root included.

    Returns:
        parents [N] and slots [N - 1], as :func:`best_trees` gives them.
    """
    num_ranks = len(log_probs[0])
    # (minus the value, order of arrival, depth, rank, what the parent is worth, its number)
    frontier: list[tuple[float, int, int, int, float, int]] = []
    if num_nodes > 1:
        frontier.append((-log_probs[0][0], 0, 0, 0, 0.0, 0))
    found: list[tuple[int, int, int, int]] = []  # depth, number, rank, the parent's number
    arrived = 1
    while frontier and len(found) + 1 < num_nodes:
        negative, _, depth, rank, above, parent = heapq.heappop(frontier)
        found.append((depth, len(found) + 1, rank, parent))
        if rank + 1 < num_ranks:
            value = above + log_probs[depth][rank + 1]
            heapq.heappush(frontier, (-value, arrived, depth, rank + 1, above, parent))
        if depth + 1 < len(log_probs):
            value = log_probs[depth + 1][0] - negative
            heapq.heappush(frontier, (-value, arrived + 1, depth + 1, 0, -negative, len(found)))
        arrived += 2
    found.sort()
    place = {number: i for i, (_, number, _, _) in enumerate(found, start=1)}
    place[0] = 0
    parents = [-1, *(place[parent] for _, _, _, parent in found)]
    return parents, [depth * num_ranks + rank for depth, _, rank, _ in found]


def best_guesses(logits: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and indices [..., R] of the best of logits [..., V']."""
    best = logits.topk(num_ranks, dim=-1)
    # a softmax at the best guesses only; torch's own logsumexp takes thrice the small ops
    shifted = best.values - best.values[..., :1]
    log_probs = shifted - (logits - best.values[..., :1]).exp_().sum(-1, keepdim=True).log_()
    return log_probs, best.indices


@dataclass(frozen=True)
class GrownShape:
    """What bounds a tree grown at every step.

    Attributes:
        max_depth: deepest node.
        num_ranks: guesses per node to choose from.
        scales: per depth what logits are multiplied with; None where that changes nothing.
    """

    max_depth: int
    num_ranks: int
    scales: list[float] | None

    @staticmethod
    def of(
        heads: Heads,
        num_nodes: int,
        max_depth: int | None,
        num_ranks: int,
        temperatures: Sequence[float] | None,
    ) -> GrownShape:
        """Check the settings of a drafter, see :class:`DynamicHeadsDrafter`."""
        max_depth = heads.num_heads if max_depth is None else max_depth
        if not 1 <= max_depth <= heads.num_heads:
            raise ValueError(
                f"max_depth must be in 1..{heads.num_heads}, the number of heads, got {max_depth}"
            )
        if num_nodes < 2 or num_ranks < 1:
            raise ValueError(
                f"num_nodes must be at least 2 and num_ranks at least 1, got {num_nodes} and "
                f"{num_ranks}"
            )
        if temperatures is not None:
            if len(temperatures) != heads.num_heads:
                raise ValueError(
                    f"{len(temperatures)} temperatures for {heads.num_heads} heads: one per head"
                )
            if min(temperatures) <= 0:
                raise ValueError(f"temperatures must be positive, got {list(temperatures)}")
        max_depth = min(max_depth, num_nodes - 1)
        scales = None
        if temperatures is not None and any(each != 1 for each in temperatures):
            scales = [1 / each for each in temperatures[:max_depth]]
        # more ranks than nodes can never be used
        return GrownShape(max_depth, min(num_ranks, num_nodes - 1, heads.num_outputs), scales)


class DynamicHeadsDrafter:
    """Fills the tree that the heads themselves find most probable, per row and step.

    The guesses are a function of the prefix, so sample-and-walk stays exact.

    Args:
        heads: parallel ones.
        output: the base model's output layer, which shared heads go through.
        num_nodes: N of every tree, root included.
        max_depth: deepest node; None is the number of heads.
        num_ranks: guesses per head to choose from.
        temperatures: one per head: its logits are divided by it, where it was measured to be too
            sure of itself (above 1) or not sure enough; None leaves them.

    Raises:
        ValueError: if a number is out of range, or the number of temperatures is not that of heads.
    """

    deterministic = True

    def __init__(
        self,
        heads: Heads,
        output: OutputLayer,
        num_nodes: int,
        *,
        max_depth: int | None = None,
        num_ranks: int = NUM_RANKS,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        shape = GrownShape.of(heads, num_nodes, max_depth, num_ranks, temperatures)
        self.heads, self.output = heads, output
        self.num_nodes, self.max_depth = num_nodes, shape.max_depth
        self.num_ranks = shape.num_ranks
        self.taps = (heads.tap,)
        self._follower = Follower(heads, output)
        self._scales: Tensor | None = None
        if shape.scales is not None:
            scales = torch.tensor(shape.scales, device=self._follower.device)
            self._scales = scales[:, None, None]

    def start(self, prefill: Prefill) -> HeadsState:
        """Start from the prompt's last hidden state."""
        return self._follower.start(prefill, self.heads.snapshot(self.output))

    def propose(self, state: HeadsState) -> Candidates:
        """One pass of all heads, one top-k, and a tree from what it found."""
        logits = state.predict(state.hidden)[: self.max_depth].float()  # [D, B, V']
        if self._scales is not None:
            logits = logits * self._scales
        log_probs, indices = best_guesses(logits, self.num_ranks)
        guesses = indices.transpose(0, 1).flatten(1)
        if logits.device.type in HOSTS:
            rows = log_probs.transpose(0, 1).tolist()
            grown = [best_tree_on_host(row, self.num_nodes) for row in rows]
            tree = RowTrees.from_lists([parents for parents, _ in grown], self.max_depth)
            guesses = guesses.gather(1, torch.tensor([slots for _, slots in grown]))
        else:
            parents, slots = best_trees(log_probs, self.num_nodes)
            tree = RowTrees.from_parents(parents, self.max_depth)
            guesses = guesses.gather(1, slots)
        guesses = self.heads.token_ids(guesses).to(state.root.device)
        return Candidates(torch.cat([state.root[:, None], guesses], dim=1), tree)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        return self._follower.observe(state, result)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        return self._follower.select(state, rows)
