"""The guesses of several drafters in one trie, and how often guesses of each kind were right.

Everything here is of one row and in Python: trees of some tens of nodes, where tensors would cost
more than they compute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

# A kind of guesses: who proposes them (a bit per drafter), at which depth, with which rank among
# their siblings, the best of those that the drafters give it, and how far the farthest of these
# drafters goes at this step: copies of a long match go far, and are right more often.
Kind = tuple[int, int, int, int]

# What is believed of a guess before anything was seen, given that its better siblings are wrong: of
# a drafter's first choice by how far it goes (FAR: depths from which on that is farther), as copies
# of matches of 1, 2 and 4 tokens do, which were measured on other texts; and of its later choices.
# It counts as much as PRIOR observations; later on, an observation counts for about MEMORY steps.
FAR = (4, 8)
FIRST, LATER = (0.5, 0.65, 0.85), 0.5
PRIOR, MEMORY = 3, 12


class Rates:
    """How often the guesses of a kind are right of late.

    Given that those above them are, and that none of the siblings before them is: of siblings at
    most one is right, and a guess that competes with a sure one is worth little, whoever made it.
    """

    def __init__(self) -> None:
        self._known: dict[Kind, tuple[float, int]] = {}  # the rate, and how much stands behind it

    def of(self, kind: Kind) -> float:
        """Return the rate of a kind, in 0..1."""
        found = self._known.get(kind)
        return _prior(kind) if found is None else found[0]

    def learn(self, kind: Kind, right: bool) -> None:
        """Take note of one guess that was right, or not."""
        rate, weight = self._known.get(kind) or (_prior(kind), PRIOR)
        weight = min(weight + 1, MEMORY)
        self._known[kind] = rate + (right - rate) / weight, weight


@lru_cache(maxsize=1024)
def _prior(kind: Kind) -> float:
    """Return the chance that a guess is right if drafters that agree err independently."""
    members, _, rank, far = kind
    alone = LATER if rank else FIRST[far]
    return float(1 - (1 - alone) ** members.bit_count())


def _best_size(
    values: Sequence[float], tokens: float, num_nodes: int, costs: Sequence[float]
) -> tuple[int, float]:
    """Return how many more nodes give the most tokens for the cost, and how many; of equals few.

    Args:
        values: of the nodes, falling.
        tokens: expected without them.
        num_nodes: without them.
        costs: of a step of n nodes at index n.
    """
    last = len(costs) - 1
    best, speed = 0, tokens / costs[min(num_nodes, last)]
    for more, value in enumerate(values[: max(0, last - num_nodes)], start=1):
        tokens += value
        if tokens / costs[num_nodes + more] > speed:
            best, speed = more, tokens / costs[num_nodes + more]
    return best, speed


class Trie:
    """Trees with equal prefixes shared. Node 0 is the root; a parent comes before its children.

    Attributes:
        inputs: per node what the base model reads there.
        tokens: likewise, but -1 where that is a probe, which is read and never accepted.
        parents: per node the one above; -1 for the root.
        children: per node its children's numbers, by token; by -1 - token where they are probes.
        kinds: per node what is to be learned about it; None for the root and for probes.
    """

    def __init__(self, root: int) -> None:
        self.inputs, self.tokens, self.parents = [root], [root], [-1]
        self.children: list[dict[int, int]] = [{}]
        self.kinds: list[Kind | None] = [None]
        self._depths = [0]

    def add(
        self, member: int, tokens: Sequence[int], parents: Sequence[int], inputs: Sequence[int]
    ) -> list[int]:
        """Add the tree of drafter number ``member``.

        Args:
            member: its number.
            tokens: [n], the root first; negative ones are padding or probes.
            parents: [n], nodes after their parents.
            inputs: [n], what the base model reads; negative where it is padding.

        Returns:
            [n], where each node now stands; -1 for padding.
        """
        bit, where = 1 << member, [0]
        ranks: dict[int, int] = {}
        levels = [0] * len(tokens)
        for node in range(1, len(tokens)):
            levels[node] = levels[parents[node]] + (inputs[node] >= 0)
        far = bisect_right(FAR, max(levels))
        for node in range(1, len(tokens)):
            above, token = where[parents[node]], inputs[node]
            if above < 0 or token < 0:
                where.append(-1)
                continue
            probed = tokens[node] < 0
            key = -1 - token if probed else token
            at = self.children[above].get(key)
            if at is None:
                at = self.children[above][key] = len(self.tokens)
                self.inputs.append(token)
                self.tokens.append(-1 if probed else token)
                self.parents.append(above)
                self.children.append({})
                self.kinds.append(None)
                self._depths.append(self._depths[above] + 1)
            where.append(at)
            if not probed:
                rank = ranks[above] = ranks.get(above, -1) + 1
                members, _, best, reach = self.kinds[at] or (0, 0, rank, far)
                self.kinds[at] = members | bit, self._depths[at], min(best, rank), max(reach, far)
        return where

    def depth(self, nodes: Sequence[int]) -> int:
        """Return the depth of the deepest of some nodes; -1 stands for none."""
        return max((self._depths[node] for node in nodes if node >= 0), default=0)

    def values(self, rates: Rates) -> list[float]:
        """Return per node how likely its whole path is to be accepted; 1 for probes."""
        values = [1.0] * len(self.kinds)
        for above, children in enumerate(self.children):
            left = values[above]
            for rate, child in self._siblings(children.values(), rates):
                values[child] = left * rate
                left -= left * rate
        return values

    def _siblings(self, nodes: Iterable[int], rates: Rates) -> list[tuple[float, int]]:
        """Return rates and numbers of the guesses among siblings, the likeliest first."""
        found = [(rates.of(kind), node) for node in nodes if (kind := self.kinds[node]) is not None]
        if len(found) > 1:
            found.sort(key=lambda each: (-each[0], each[1]))
        return found

    def promise(self, values: Sequence[float]) -> float:
        """Return the expected accept length of the first nodes, of which these are the values."""
        guesses = zip(values, self.kinds, strict=False)
        return 1 + sum(value for value, kind in guesses if kind is not None)

    def chance(self, values: Sequence[float]) -> float:
        """Return how likely one of the guesses behind the root is right, of the first nodes."""
        return sum(
            values[node]
            for node in self.children[0].values()
            if node < len(values) and self.kinds[node] is not None
        )

    def order(
        self, values: Sequence[float], num_nodes: int = 0, costs: Sequence[float] = ()
    ) -> list[int]:
        """Choose the nodes to verify, sorted by depth, the more valuable siblings first.

        Args:
            values: per node, none above its parent's.
            num_nodes: keep so many, root included, the most valuable; 0 keeps all. Probes, and what
                stands above them, are kept and not counted.
            costs: of a step of n nodes, with n from 1 on at index n: keep as many as give the most
                tokens for the cost, and no more than there are costs for. Empty: do not look at it.
        """
        kept: set[int] | None = None
        if num_nodes or costs:
            free = self._with_probes()
            counted = self._best_first(values, free)
            if num_nodes:
                del counted[num_nodes - 1 :]
            if costs:
                del counted[self._size(values, free, counted, costs)[0] :]
            kept = free.union(counted)
        order = [0]
        for node in order:  # which grows
            below: list[int] = list(self.children[node].values())
            if kept is not None:
                below = [child for child in below if child in kept]
            if len(below) > 1:
                below.sort(key=lambda child: -values[child])
            order += below
        return order

    def best(self, values: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
        """Return expected tokens and cost of the choice with the most tokens per cost.

        Args:
            values: as in ``order``.
            costs: likewise.
        """
        free = self._with_probes()
        counted = self._best_first(values, free)
        size, speed = self._size(values, free, counted, costs)
        cost = costs[min(1 + len(free) + size, len(costs) - 1)]
        return speed * cost, cost

    def _best_first(self, values: Sequence[float], free: Collection[int]) -> list[int]:
        # of equals the earlier: no node is kept without its parent
        best = sorted(range(1, len(values)), key=lambda node: (-values[node], node))
        return [node for node in best if node not in free]

    def _size(
        self,
        values: Sequence[float],
        free: Collection[int],
        counted: Sequence[int],
        costs: Sequence[float],
    ) -> tuple[int, float]:
        taken = 1 + sum(values[node] for node in free if self.kinds[node] is not None)
        return _best_size([values[node] for node in counted], taken, 1 + len(free), costs)

    def _with_probes(self) -> set[int]:
        found: set[int] = set()
        for node in range(1, len(self.kinds)):
            if self.kinds[node] is None:
                while node > 0 and node not in found:
                    found.add(node)
                    node = self.parents[node]
        return found

    def learn(self, rates: Rates, text: Sequence[int]) -> None:
        """Learn from the text that followed the root, of which no guess below its end is judged.

        Guesses that were left out are judged as well: whether they were right shows in the text.
        """
        node: int | None = 0
        for token in text:
            if node is None:
                break
            children = self.children[node]
            for _, child in self._siblings(children.values(), rates):
                kind, right = self.kinds[child], self.tokens[child] == token
                assert kind is not None
                rates.learn(kind, right)
                if right:
                    break
            node = children.get(token)
