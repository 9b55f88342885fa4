"""Verify only that part of a drafter's tree which pays, by what was accepted lately and its costs.

The right size and depth of a tree depend on the text: where guesses are mostly right a deep tree
pays, where they are mostly wrong a few nodes do. A node's value is the product along its path of
how often guesses at that depth and of that rank among their siblings were right; taken in the order
of their values, nodes form a tree at every size, and the size with the most expected tokens per
measured cost is verified. A verified tree tells the truth about every node whose parent was reached
(arXiv:2402.12374, section 3, grows static trees from such rates).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specheads.drafters.adaptive import MEMORY, WEIGHT, StepCosts
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.drafters.packed import pack
from specheads.tree import batched

Rank = tuple[int, int]  # depth from 1 on, place among its siblings from 0 on


@dataclass
class CutRow:
    """One text's acceptance; all of it fades.

    Attributes:
        hits: how often the guess of a rank was right.
        trials: how often one was verified behind a right parent.
    """

    hits: dict[Rank, float] = field(default_factory=dict)
    trials: dict[Rank, float] = field(default_factory=dict)

    def rate(self, rank: Rank, factor: float) -> float:
        """Return how often guesses of a rank are right; the prior scaled by ``factor`` counts."""
        hits, trials = self.hits.get(rank, 0.0), self.trials.get(rank, 0.0)
        return (hits + WEIGHT * min(1.0, prior(rank) * factor)) / (trials + WEIGHT)

    def factor(self) -> float:
        """Return how this text does on the whole, beside the prior."""
        foreseen = sum(trials * prior(rank) for rank, trials in self.trials.items())
        return (sum(self.hits.values()) + WEIGHT) / (foreseen + WEIGHT)

    def fade(self, kept: float) -> None:
        """Age by a step."""
        for numbers in (self.hits, self.trials):
            for rank in numbers:
                numbers[rank] *= kept

    def note(self, rank: Rank, *, hit: bool) -> None:
        """Count a guess about which the base has decided."""
        self.trials[rank] = self.trials.get(rank, 0.0) + 1
        self.hits[rank] = self.hits.get(rank, 0.0) + hit


def prior(rank: Rank) -> float:
    """Return the acceptance rate to start from, that of middling Medusa heads."""
    depth, place = rank
    return 0.6 * 0.97 ** (depth - 1) * 0.3**place


@dataclass
class CutState:
    """The member's state, what the rows learned, and what was verified of the trees.

    Attributes:
        member: its state.
        rows: per row of the batch.
        ranks: per row, of each node that was kept.
        kept: per row the member's nodes that were kept, the root first.
        parents: per row, of the kept nodes.
        probed: per row, which of the kept nodes are probes.
        num_nodes: of the member's candidates.
    """

    member: Any
    rows: list[CutRow]
    ranks: list[list[Rank]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)
    probed: list[list[bool]] = field(default_factory=list)
    num_nodes: int = 0


class CutDrafter:
    """Proposes of a member's tree the part with the most expected tokens per cost.

    Every row learns alone. Probes are always kept.

    Args:
        member: deterministic: of sampled guesses none may be left out by their value.
        costs: ``verify`` by number of nodes; ``draft`` per level of the member's trees, which is
            spent whatever is left out.
        memory: steps after which an observation has faded to 1/e.

    Raises:
        ValueError: for a sampled member, or a memory that is not positive.
    """

    deterministic = True

    def __init__(self, member: Drafter, costs: StepCosts, *, memory: float = MEMORY) -> None:
        if not member.deterministic:
            raise ValueError(
                f"{type(member).__name__} samples its guesses: which of them are verified may not "
                "depend on their values"
            )
        if memory <= 0:
            raise ValueError(f"memory must be positive, got {memory}")
        self.member, self.costs, self.memory = member, costs, memory
        self.taps = member.taps

    def start(self, prefill: Prefill) -> CutState:
        """Start the member."""
        return CutState(self.member.start(prefill), [CutRow() for _ in prefill.ids])

    def propose(self, state: CutState) -> Candidates:
        """Ask the member; keep what pays."""
        candidates = self.member.propose(state.member)
        laid = lay_out(candidates)
        state.num_nodes = candidates.tokens.shape[1]
        state.kept, state.ranks, state.parents, state.probed = [], [], [], []
        for row, tree in zip(state.rows, laid, strict=True):
            ranks = ranks_of(tree)
            kept = self._keep(row, tree, ranks)
            place = {node: i for i, node in enumerate(kept)}
            state.kept.append(kept)
            state.ranks.append([ranks[node] for node in kept])
            state.parents.append([place.get(tree.parents[node], -1) for node in kept])
            state.probed.append([tree.tokens[node] < tree.inputs[node] for node in kept])
        pairs = list(zip(laid, state.kept, strict=True))
        return pack(
            [[tree.tokens[node] for node in kept] for tree, kept in pairs],
            state.parents,
            candidates.tokens.device,
            inputs=None
            if candidates.probes is None
            else [[tree.inputs[node] for node in kept] for tree, kept in pairs],
        )

    def _keep(self, row: CutRow, tree: Laid, ranks: Sequence[Rank]) -> list[int]:
        """Return the nodes that pay, in the member's order."""
        factor = row.factor()
        values = [1.0]
        for node, parent in enumerate(tree.parents[1:], start=1):
            guess = tree.tokens[node] >= 0
            values.append(values[parent] * row.rate(ranks[node], factor) if guess else 0.0)
        always = {0}
        for node, token in enumerate(tree.tokens):
            if token < 0 <= tree.inputs[node]:
                while node not in always:
                    always.add(node)
                    node = tree.parents[node]
        # a stable sort: no node precedes its equally valuable parent
        order = sorted(range(len(values)), key=lambda node: (node not in always, -values[node]))
        order = [node for node in order if node in always or values[node] > 0]
        expected, best, size = 0.0, 0.0, 1
        for num, node in enumerate(order, start=1):
            expected += values[node]
            speed = expected / self.costs.of_step(tree.depth, num)
            if num >= len(always) and speed > best:
                best, size = speed, num
        return sorted(order[:size])

    def observe(self, state: CutState, result: StepResult) -> CutState:
        """Learn from what was decided, and let the member follow."""
        if not state.kept:  # nobody has asked for a proposal
            nowhere = result.tokens.new_empty(len(state.rows), 0)
            state.member = self.member.observe(state.member, replace(result, own=nowhere))
            return state
        fade, num_verified = math.exp(-1 / self.memory), result.tokens.shape[1]
        paths, tokens = result.path.tolist(), result.tokens.tolist()
        theirs = None if result.own is None else result.own.tolist()
        own = []
        for index, row in enumerate(state.rows):
            if theirs is None:
                places = verified_places(state.parents[index], state.probed[index], num_verified)
            else:
                places = theirs[index][: len(state.kept[index])]
            where = [-1] * state.num_nodes
            for node, place in zip(state.kept[index], places, strict=True):
                where[node] = place
            own.append(where)
            if not result.new_tokens[index]:
                continue
            row.fade(fade)
            path = set(paths[index])
            for i, parent in enumerate(state.parents[index][1:], start=1):
                place = places[i]
                if place >= 0 and tokens[index][place] >= 0 and places[parent] in path:
                    row.note(state.ranks[index][i], hit=place in path)
        seen = replace(result, own=torch.tensor(own, device=result.tokens.device))
        state.member = self.member.observe(state.member, seen)
        state.kept = []
        return state

    def select(self, state: CutState, rows: Tensor) -> CutState:
        """Keep some rows."""
        return CutState(
            self.member.select(state.member, rows), [state.rows[row] for row in rows.tolist()]
        )


def ranks_of(tree: Laid) -> list[Rank]:
    """Return for every node its depth and its place among its siblings, as they are listed."""
    found: list[Rank] = [(0, 0)]
    children: dict[int, int] = {}
    for node, parent in enumerate(tree.parents[1:], start=1):
        place = children.get(parent, 0)
        found.append((found[parent][0] + 1, place))
        if tree.tokens[node] >= 0:
            children[parent] = place + 1
    return found


def verified_places(parents: Sequence[int], probed: Sequence[bool], num_verified: int) -> list[int]:
    """Return where each of a row's proposed nodes stands in the verified tree, -1 for nowhere.

    Trees are verified as they are, and chains without their end where the limit is near; a model
    that can only read chains verifies the first children of a tree.

    Args:
        parents: of the proposed nodes; -1 for the root.
        probed: which of them are probes.
        num_verified: nodes of the verified tree.
    """
    if num_verified >= len(parents):
        return list(range(len(parents)))
    if all(parent == node - 1 for node, parent in enumerate(parents)):
        return [node if node < num_verified else -1 for node in range(len(parents))]
    places = [-1] * len(parents)
    last, places[0], num = 0, 0, 1
    for node, parent in enumerate(parents):
        if node and parent == last and not probed[node] and num < num_verified:
            last, places[node], num = node, num, num + 1
    return places


@dataclass(frozen=True)
class Laid:
    """One row's candidates as lists over its nodes.

    Attributes:
        tokens: the root first; negative where nothing may be accepted.
        inputs: what the base model reads; negative where nothing.
        parents: -1 for the root.
        depth: of the deepest guess.
        num_read: nodes that are no padding.
    """

    tokens: list[int]
    inputs: list[int]
    parents: list[int]
    depth: int
    num_read: int


def lay_out(candidates: Candidates) -> list[Laid]:
    """Return candidates row by row."""
    parents = batched(candidates.tree, candidates.tree.parents).tolist()
    depths = batched(candidates.tree, candidates.tree.depths).tolist()
    tokens, inputs = candidates.tokens.tolist(), candidates.inputs.tolist()
    found = []
    for row, (own, read) in enumerate(zip(tokens, inputs, strict=True)):
        shape = row if len(parents) > 1 else 0
        nodes = [node for node, token in enumerate(own) if token >= 0]
        found.append(
            Laid(
                own,
                read,
                parents[shape],
                max(depths[shape][node] for node in nodes),
                sum(each >= 0 for each in read),
            )
        )
    return found
