"""Sequential heads that grow a tree of their own at every step, out of their own probabilities.

A node's value is the product of the probabilities along its path, each conditional on the tokens
above it, and the tree that gains most in expectation holds the most valuable prefixes: as for
parallel heads (:mod:`specheads.drafters.dynamic`), but what stands below a node is known only once
a head has been asked there. So it is grown level by level, as EAGLE-2 does (arXiv:2406.16858), and
heads are asked only where a child may still come among the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.dynamic import (
    HOSTS,
    NUM_RANKS,
    GrownShape,
    best_guesses,
    keep_best,
)
from specheads.drafters.following import Follower, HeadsState
from specheads.drafters.sequential import steps_of
from specheads.models.mtp_steps import MtpSteps, MtpWalk
from specheads.models.stepwise import Steps, Walk
from specheads.tree import RowTrees

if TYPE_CHECKING:
    from specheads.models.kinds import Heads
    from specheads.models.output import OutputLayer
    from specheads.models.stepwise import Embed

# Nodes of a level below which a head is asked. Trees of up to 32 nodes of Hydra heads on the
# embedded model gain nothing from more, and a thousandth less from 3.
WIDTH = 4


@dataclass(frozen=True)
class Grown:
    """Trees that were grown, nodes sorted by depth.

    Attributes:
        parents: [B, N], -1 for the root.
        tokens: [B, N], the root first.
        values: [B, N], the logarithm of the probability of each node's path.
    """

    parents: Tensor
    tokens: Tensor
    values: Tensor


class DynamicSequentialDrafter:
    """Fills the tree that sequential heads themselves find most probable, per row and step.

    The guesses are a function of the prefix, so sample-and-walk stays exact.

    Args:
        heads: sequential ones.
        output: the base model's output layer, which shared heads go through.
        embed: the base model's input embedding, for heads that read tokens through it; takes and
            returns tensors on the heads' device.
        num_nodes: N of every tree, root included.
        max_depth: deepest node; None is the number of heads.
        num_ranks: guesses per node to choose from.
        temperatures: one per head: its logits are divided by it; None leaves them.
        width: of every level only the so many most valuable nodes may have children.

    Raises:
        ValueError: if a number is out of range, or the number of temperatures is not that of heads.
    """

    deterministic = True

    def __init__(
        self,
        heads: Heads,
        output: OutputLayer,
        embed: Embed | None,
        num_nodes: int,
        *,
        max_depth: int | None = None,
        num_ranks: int = NUM_RANKS,
        temperatures: Sequence[float] | None = None,
        width: int = WIDTH,
    ) -> None:
        shape = GrownShape.of(heads, num_nodes, max_depth, num_ranks, temperatures)
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.heads, self.output = heads, output
        self.num_nodes, self.max_depth = num_nodes, shape.max_depth
        self.num_ranks, self.width = shape.num_ranks, width
        self._scales = shape.scales
        self.taps = (heads.tap,)
        self._follower = Follower(heads, output, embed)
        self._steps = steps_of(heads, output, embed, shape.max_depth)

    def steps(self) -> Steps | MtpSteps:
        """Return the heads as they are now."""
        return self._steps()

    def start(self, prefill: Prefill) -> HeadsState:
        """Start from the prompt's last hidden state."""
        return self._follower.start(prefill, self.steps())

    @torch.no_grad()
    def propose(self, state: HeadsState) -> Candidates:
        """One pass of a head per level, as far down as it may pay."""
        root = state.root
        walk = state.predict.begin(state.hidden, root.to(self._follower.device), state.memory)
        if state.hidden.device.type in HOSTS:
            parents, tokens = self._grow_on_host(walk, root.tolist())
            tree = RowTrees.from_lists(parents, self.max_depth)
            return Candidates(torch.tensor(tokens), tree)
        grown = self.grow(walk)
        tree = RowTrees.from_parents(grown.parents.to(root.device), self.max_depth)
        return Candidates(grown.tokens.to(root.device), tree)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        return self._follower.observe(state, result)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        return self._follower.select(state, rows)

    def _guesses(self, walk: Walk | MtpWalk) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and token ids of the best guesses at the nodes, [B, n, R]."""
        logits = walk.logits().float()
        if self._scales is not None and self._scales[walk.level.depth] != 1:
            logits = logits * self._scales[walk.level.depth]
        log_probs, places = best_guesses(logits, self.num_ranks)
        return log_probs, self.heads.token_ids(places)

    @torch.no_grad()
    def grow(self, walk: Walk | MtpWalk) -> Grown:
        """Grow trees; shapes depend on the arguments' shapes only, nothing waits for the device.

        Args:
            walk: at the roots.
        """
        tokens = [walk.level.tokens]
        values = torch.zeros_like(tokens[0], dtype=torch.float)  # of the nodes that are asked
        of_levels, below = [values], [torch.zeros_like(tokens[0])]
        for depth in range(self.max_depth):
            log_probs, guesses = self._guesses(walk)
            extended = (values[..., None] + log_probs).flatten(1)
            size = min(self.num_nodes - 1 - depth, extended.shape[1])
            best, flat = extended.topk(size, dim=1)
            of_levels.append(best)
            below.append(flat)  # (place of the parent in its level) * R + rank
            tokens.append(guesses.flatten(1).gather(1, flat))
            if depth + 1 < self.max_depth:
                values = best[:, : self.width]
                parents = flat[:, : self.width] // self.num_ranks
                walk.descend(tokens[-1][:, : self.width], parents)
        kept, parents, _ = keep_best(of_levels, below, self.num_ranks, self.num_nodes)
        return Grown(
            parents,
            torch.cat(tokens, dim=1).gather(1, kept),
            torch.cat(of_levels, dim=1).gather(1, kept),
        )

    def _grow_on_host(
        self, walk: Walk | MtpWalk, roots: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Grow the same trees in Python, and stop where no node can come among the best any more.

        Returns:
            parents and tokens, per row.
        """
        rows = [GrowingRow(root, self.num_nodes) for root in roots]
        for depth in range(self.max_depth):
            log_probs, guesses = (each.tolist() for each in self._guesses(walk))
            for row, of_row, tokens in zip(rows, log_probs, guesses, strict=True):
                row.extend(depth, of_row, tokens, self.width)
            widest = max(len(row.asked) for row in rows)
            if widest == 0 or depth + 1 == self.max_depth:
                break
            # rows that ask at fewer nodes ask at one of them, or anywhere, once more
            asked = [[(each.above, each.token) for each in row.asked] or [(0, 0)] for row in rows]
            table = torch.tensor([each + each[:1] * (widest - len(each)) for each in asked])
            walk.descend(table[..., 1], table[..., 0])
        trees = [row.tree() for row in rows]
        return [parents for parents, _ in trees], [tokens for _, tokens in trees]


class _Asked(NamedTuple):
    """A node below which a head is asked.

    Attributes:
        value: logarithm of its path's probability.
        number: its place in the row's list of nodes, from 1 on; 0 is the root.
        above: the place of its parent among those that were asked before.
        token: its own.
    """

    value: float
    number: int
    above: int
    token: int


class GrowingRow:
    """One row's tree while it grows on the host, a level at a time.

    Attributes:
        asked: the nodes below which is asked next, the most valuable of the last level.
    """

    def __init__(self, root: int, num_nodes: int) -> None:
        self.root, self.most = root, num_nodes - 1
        self.asked = [_Asked(0.0, 0, 0, root)]
        # (minus the value, depth, place in the level, the parent's number, token), level by level
        self.found: list[tuple[float, int, int, int, int]] = []
        self.best: list[float] = []  # the values of the best nodes so far, negative, ascending

    def extend(
        self,
        depth: int,
        log_probs: Sequence[Sequence[float]],
        tokens: Sequence[Sequence[int]],
        width: int,
    ) -> None:
        """Add the best of the next level, and choose below which of them to ask."""
        full = len(self.best) == self.most
        level: list[tuple[float, int, int]] = []  # minus the value, place of the parent, rank
        for place, asked in enumerate(self.asked):
            for rank, log_prob in enumerate(log_probs[place]):
                negative = -asked.value - log_prob
                if full and negative >= self.best[-1]:
                    break
                level.append((negative, place, rank))
        level.sort()
        del level[self.most - depth :]
        first = len(self.found) + 1
        self.found += [
            (negative, depth, place, self.asked[above].number, tokens[above][rank])
            for place, (negative, above, rank) in enumerate(level)
        ]
        self.best = sorted(self.best + [each[0] for each in level])[: self.most]
        # where the tree is full, children must be worth more than its last node, and so must they
        bar = self.best[-1] if len(self.best) == self.most else math.inf
        self.asked = [
            _Asked(-negative, first + place, above, tokens[above][rank])
            for place, (negative, above, rank) in enumerate(level[:width])
            if negative < bar
        ]

    def tree(self) -> tuple[list[int], list[int]]:
        """Return parents and tokens of the best nodes, sorted by depth."""
        order = sorted(range(len(self.found)), key=self.found.__getitem__)
        kept = sorted(order[: self.most])
        place = {0: 0} | {index + 1: node for node, index in enumerate(kept, start=1)}
        parents = [-1, *(place[self.found[index][3]] for index in kept)]
        return parents, [self.root, *(self.found[index][4] for index in kept)]
