"""Several drafters at once: their guesses merged into one tree, which is verified once.

Each member follows the text by itself, whoever proposed what was accepted. Where all are
deterministic, so is their union, and sample-and-walk stays exact: it accepts the longest of what
the members' trees would have given, as long as all their nodes are in.

The guesses of one row meet in a :class:`Trie`, in Python: trees of some tens of nodes, where
tensors would cost more than they compute. :class:`Rates` keeps how often guesses of each kind were
right.

A member that costs something is asked after the free ones, and only where that has paid
(:class:`DrafterValues`). What it can add depends on what is at hand already: its guesses count
where those at hand are all wrong from the first on. So it is kept how many tokens asking promised
for a place that was open, and a step asks if these, as far as the place is open, are worth the
price at the speed without them. What asking promised shows as soon as the guesses are there; where
nobody asks, what is known drifts slowly upwards, so that a text that changes is tried again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult, picked
from specheads.drafters.growing import on_host, pack
from specheads.drafters.length import StepCosts
from specheads.drafters.lookup import CopyDrafter
from specheads.system.errors import check

# A kind of guesses: who proposes them (a bit per drafter), at which depth, with which rank among
# their siblings, the best of those that the drafters give it, and how far the farthest of these
# drafters goes at this step: copies of a long match go far, and are right more often.
Kind = tuple[int, int, int, int]

# What is believed of a guess before anything was seen, given that its better siblings are wrong: of
# a drafter's first choice by how far it goes (FAR: depths from which on that is farther), as copies
# of matches of 1, 2 and 4 tokens do, which were measured on other texts; and of its later choices.
# It counts as much as PRIOR observations; later on, an observation counts for about MEMORY steps,
# and in what is usual in all texts for about LONG.
FAR = (4, 8)
FIRST, LATER = (0.5, 0.65, 0.85), 0.5
PRIOR, MEMORY, LONG = 3, 12, 200


class Rates:
    """How often the guesses of a kind are right of late.

    Given that those above them are, and that none of the siblings before them is: of siblings at
    most one is right, and a guess that competes with a sure one is worth little, whoever made it.

    Args:
        usual: of all texts, from which one that begins starts, and which learns with it. None: from
            what was measured on other texts with other drafters.
        memory: steps that an observation counts for.
    """

    def __init__(self, usual: Rates | None = None, memory: int = MEMORY) -> None:
        self._usual, self._memory = usual, memory
        # as it is now: what rows of a batch learn from each other they would not learn alone
        self._start = {} if usual is None else dict(usual._known)
        self._known: dict[Kind, tuple[float, int]] = {}  # the rate, and how much stands behind it

    def of(self, kind: Kind) -> float:
        """Return the rate of a kind, in 0..1."""
        known = self._known.get(kind) or self._start.get(kind)
        return _prior(kind) if known is None else known[0]

    def learn(self, kind: Kind, right: bool) -> None:
        """Take note of one guess that was right, or not."""
        rate, weight = self._known.get(kind) or (self.of(kind), PRIOR)
        weight = min(weight + 1, self._memory)
        self._known[kind] = rate + (right - rate) / weight, weight
        if self._usual is not None:
            self._usual.learn(kind, right)


@lru_cache(maxsize=1024)
def _prior(kind: Kind) -> float:
    """Return the chance that a guess is right if drafters that agree err independently."""
    members, _, rank, far = kind
    alone = LATER if rank else FIRST[far]
    return float(1 - (1 - alone) ** members.bit_count())


class Trie:
    """Trees with equal prefixes shared. Node 0 is the root; a parent comes before its children.

    Attributes:
        inputs: per node what the base model reads there.
        tokens: likewise, but -1 where that is a probe, which is read and never accepted.
        parents: per node the one above; -1 for the root.
        children: per node its children's numbers, by token; by -1 - token where they are probes.
        kinds: per node what is to be learned about it; None for the root and for probes.
        depths: per node.
    """

    def __init__(self, root: int) -> None:
        self.inputs, self.tokens, self.parents = [root], [root], [-1]
        self.children: list[dict[int, int]] = [{}]
        self.kinds: list[Kind | None] = [None]
        self.depths = [0]

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
                self.depths.append(self.depths[above] + 1)
            where.append(at)
            if not probed:
                rank = ranks[above] = ranks.get(above, -1) + 1
                members, _, best, reach = self.kinds[at] or (0, 0, rank, far)
                self.kinds[at] = members | bit, self.depths[at], min(best, rank), max(reach, far)
        return where

    def values(self, rates: Rates) -> list[float]:
        """Return per node how likely its whole path is to be accepted; 1 for probes."""
        values = [1.0] * len(self.kinds)
        for above, children in enumerate(self.children):
            # at most one sibling is right: a rate counts for what the better ones leave over
            left = values[above]
            for rate, child in self._siblings(children, rates):
                values[child] = left * rate
                left -= left * rate
        return values

    def _siblings(self, nodes: Mapping[int, int], rates: Rates) -> list[tuple[float, int]]:
        """Return rates and numbers of the guesses among siblings, the likeliest first."""
        found = []
        for node in nodes.values():
            if (kind := self.kinds[node]) is not None:
                found.append((rates.of(kind), node))
        if len(found) > 1:
            found.sort(key=lambda each: (-each[0], each[1]))
        return found

    def chance(self, values: Sequence[float]) -> float:
        """Return how likely one of the guesses behind the root is right, of the first nodes."""
        first = (node for node in self.children[0].values() if node < len(values))
        return sum(values[node] for node in first if self.kinds[node] is not None)

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
        free, rest = self._ranked(values)
        if num_nodes:
            del rest[num_nodes - 1 :]
        if costs:
            del rest[self._fastest(values, free, rest, costs)[0] :]
        kept, order = free.union(rest), [0]
        for node in order:  # which grows
            below = [child for child in self.children[node].values() if child in kept]
            order += sorted(below, key=lambda child: -values[child]) if len(below) > 1 else below
        return order

    def best(self, values: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
        """Return expected tokens and cost of the choice with the most tokens per cost.

        Args:
            values: as in :meth:`order`.
            costs: as in :meth:`order`.
        """
        return self._fastest(values, *self._ranked(values), costs)[1:]

    def _ranked(self, values: Sequence[float]) -> tuple[set[int], list[int]]:
        """Return the nodes that are always in, and the others, the most valuable first.

        Always in are probes and what stands above them. Of equally valuable nodes the earlier is
        first, so that none is kept without its parent.
        """
        free: set[int] = set()
        for node in range(1, len(self.kinds)):
            if self.kinds[node] is None:
                while node > 0 and node not in free:
                    free.add(node)
                    node = self.parents[node]
        best = sorted(range(1, len(values)), key=lambda node: (-values[node], node))
        return free, [node for node in best if node not in free]

    def _fastest(
        self,
        values: Sequence[float],
        free: Collection[int],
        rest: Sequence[int],
        costs: Sequence[float],
    ) -> tuple[int, float, float]:
        """Return how many of ``rest`` give the most tokens for the cost, of equals the fewest.

        Returns:
            That number, and the tokens expected then and their cost.
        """
        tokens = 1 + sum(values[node] for node in free if self.kinds[node] is not None)
        num_nodes, last = 1 + len(free), len(costs) - 1
        best = 0, tokens, costs[min(num_nodes, last)]
        for more, node in enumerate(rest[: max(0, last - num_nodes)], start=1):
            tokens += values[node]
            if tokens / costs[num_nodes + more] > best[1] / best[2]:
                best = more, tokens, costs[num_nodes + more]
        return best

    def learn(self, rates: Rates, text: Sequence[int]) -> None:
        """Learn from the text that followed the root, of which no guess below its end is judged.

        Guesses that were left out are judged as well: whether they were right shows in the text.
        """
        node: int | None = 0
        for token in text:
            if node is None:
                break
            children = self.children[node]
            for _, child in self._siblings(children, rates):
                kind, right = self.kinds[child], self.tokens[child] == token
                assert kind is not None
                rates.learn(kind, right)
                if right:
                    break
            node = children.get(token)


USUAL = 1.3  # tokens that heads or a draft model add where nothing is at hand
NEW, SLOW = 0.1, 0.02  # weight of what was seen last, in a text and in what is usual in all
FORGET = 0.01  # how far what is known drifts with each step that does not ask
KEEP = 0.97  # weight of the steps before in the speed of those that follow open places
OPEN = 0.1  # places less open than this teach little


class DrafterValues:
    """Of one text: per drafter what it adds to an open place, and what it costs.

    Args:
        usual: both in all texts, from which one that begins starts, and which learn with it.
    """

    def __init__(self, usual: dict[int, tuple[float, float]] | None = None) -> None:
        self._usual = {} if usual is None else usual
        self._known = dict(self._usual)
        self._tokens = self._cost = 0.0  # of steps that follow an open place, without asking
        self._open = self._asked = self._follows = False

    def pays(self, member: int, tokens: float, cost: float, chance: float) -> bool:
        """Tell whether to ask; the very first time always.

        A token gained is worth the time that it would take otherwise: at the speed of this step, or
        of the one that follows, if that is higher, as where a copy goes on behind a gap.

        Args:
            member: number of the drafter.
            tokens: expected of the step without it.
            cost: of that step.
            chance: that one of the first guesses at hand is right.
        """
        self._open = chance < 1 / 2
        if member not in self._known:
            return True
        gain, price = self._known[member]
        speed = tokens / cost
        later = (self._tokens + speed) / (self._cost + 1)
        pays = gain * (1 - chance) > max(speed, later) * price
        if not pays and gain < USUAL:
            self._known[member] = gain + FORGET * (USUAL - gain), price
        return pays

    def stepped(self, tokens: int, cost: float) -> None:
        """Take note of what the step gave in the end."""
        if self._follows and not self._asked:
            self._tokens = KEEP * self._tokens + tokens
            self._cost = KEEP * self._cost + cost
        self._follows, self._asked = self._open, False

    def learn(self, member: int, gained: float, price: float, chance: float) -> None:
        """Take note of what asking did.

        Args:
            member: number of the drafter.
            gained: expected tokens that its guesses add.
            price: what they cost, drafted and verified.
            chance: that one of the first guesses at hand before was right.
        """
        self._asked = True
        for known, weight in (self._known, NEW), (self._usual, SLOW):
            gain, cost = known.get(member, (USUAL, price))
            if chance <= 1 - OPEN:
                gain += weight * (gained / (1 - chance) - gain)
            known[member] = gain, cost + weight * (price - cost)


@dataclass
class HybridState:
    """The members' states, what each row's text has taught, and the step in between.

    Attributes:
        members: their states.
        rates: per row.
        values: per row, of asking members that cost something.
        device: where candidates go.
        tries: from a proposal to its result: per row all guesses, those that were left out too.
        where: likewise [members][B][n], where each member's nodes stand in the tries; -1 for
            padding.
        places: likewise per row, by nodes of its trie, where they stand in the merged tree; not of
            those that were left out.
        costs: likewise per row, of the step; empty where they are not known.
    """

    members: list[Any]
    rates: list[Rates]
    values: list[DrafterValues]
    device: torch.device
    tries: list[Trie] = field(default_factory=list)
    where: list[list[list[int]]] = field(default_factory=list)
    places: list[dict[int, int]] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)


_UNSAMPLED = (
    "deterministic, to be merged: what was drawn would no longer be distributed as the acceptance"
    " rule assumes"
)


class HybridDrafter:
    """Merges the candidates of its members.

    How likely guesses are to be right is learned while decoding, per row: for each depth and rank,
    for each member, and for members that agree. With a limit, or with costs, the likeliest are
    verified: nodes go to whoever is right of late, as where copying and generating alternate.

    With costs, members are asked the cheapest first, and those that cost something only where they
    have paid: where the text repeats itself, heads do not run at all. A member alone is proposed
    the part of its tree that gives the most tokens for the cost.

    Args:
        members: deterministic drafters; hybrids as well.
        num_nodes: largest tree, root included; 0 verifies all. What members only want read
            (``Candidates.probes``) comes on top and is always in.
        costs: one for each member:
            ``draft`` times the depth of its guesses. A tree then takes as many guesses as give the
            most tokens for the cost, and no more nodes than were measured. Empty: all is free. Rows
            of a batch may with them be proposed other tokens than alone, where a member's rule for
            the length of drafts hears only of the steps for which it was asked.

    Raises:
        ValueError: without members, for one that samples, unequal numbers, or if ``num_nodes`` is
            out of range.
    """

    deterministic = True

    def __init__(
        self, members: Sequence[Drafter], num_nodes: int = 0, *, costs: Sequence[StepCosts] = ()
    ) -> None:
        check(bool(members), "members", members, "at least one member")
        check(num_nodes == 0 or num_nodes > 1, "num_nodes", num_nodes, "0 (all) or at least 2")
        expected = f"one for each of {len(members)} members"
        check(not costs or len(costs) == len(members), "costs", len(costs), expected)
        for member in members:
            name = f"candidates of {type(member).__name__}"
            check(member.deterministic, name, "sampled ones", _UNSAMPLED)
        self.members = tuple(members)
        self.num_nodes = num_nodes
        self._prices = [each.draft for each in costs] or [0.0] * len(members)
        self._order = sorted(range(len(members)), key=self._prices.__getitem__)
        # members verify with the same base: the longest list says most
        self._verify = max((each.verify for each in costs), key=len, default=())
        # what is usual in all texts; without costs a text's steps do not depend on others
        self._rates = Rates(memory=LONG) if costs else None
        self._values: dict[int, tuple[float, float]] = {}
        self.taps = tuple(dict.fromkeys(tap for member in members for tap in member.taps))

    def start(self, prefill: Prefill) -> HybridState:
        """Start every member."""
        states = [member.start(prefill) for member in self.members]
        rates = [Rates(self._rates) for _ in prefill.ids]
        values = [DrafterValues(self._values) for _ in prefill.ids]
        return HybridState(states, rates, values, prefill.root.device)

    def propose(self, state: HybridState) -> Candidates:
        """Ask the members, for each row those that pay; merge.

        Raises:
            ValueError: for sampled candidates.
        """
        state.tries, state.where = [], [[[] for _ in state.rates] for _ in self.members]
        spent, values = [0.0] * len(state.rates), [[1.0] for _ in state.rates]
        follows_noise = False
        for number in self._order:
            price = self._prices[number]
            at_hand = zip(state.values, state.tries, values, spent, strict=False)  # none at first
            asked = [
                not price
                or worth.pays(number, *trie.best(own, self._costs(paid)), trie.chance(own))
                for worth, trie, own, paid in at_hand
            ] or [True] * len(spent)
            if not any(asked):
                continue
            member = self.members[number]
            proposed, follows = _trees(member, state.members[number])
            follows_noise |= follows
            if not state.tries:
                state.tries = [Trie(tokens[0]) for tokens, _, _ in proposed]
            for row, asks in enumerate(asked):
                if not asks:
                    state.where[number][row] = [0] + [-1] * (len(proposed[row][0]) - 1)
                    continue
                trie, before = state.tries[row], values[row]
                own = trie.add(number, *proposed[row])
                state.where[number][row] = own
                values[row] = after = trie.values(state.rates[row])
                if price:
                    few, cheap = trie.best(before, self._costs(spent[row]))
                    spent[row] += price * max(trie.depths[node] for node in own if node >= 0)
                    many, dear = trie.best(after, self._costs(spent[row]))
                    state.values[row].learn(number, many - few, dear - cheap, trie.chance(before))
        return replace(self._merge(state, spent, values), follows_noise=follows_noise)

    def _costs(self, paid: float) -> list[float]:
        """Return the costs of steps of all sizes behind what drafting has cost."""
        return [paid + cost for cost in self._verify]

    def _merge(
        self,
        state: HybridState,
        spent: Sequence[float],
        values: Sequence[Sequence[float]],
    ) -> Candidates:
        """Return what is to be verified; note where in it nodes of the tries stand."""
        rows, inputs = [], []
        state.places, state.costs = [], []
        for trie, paid, each in zip(state.tries, spent, values, strict=True):
            costs = self._costs(paid)
            order = trie.order(each, self.num_nodes, costs)
            if costs:
                state.costs.append(costs[min(len(order), len(costs) - 1)])  # probes are not counted
            place = {node: new for new, node in enumerate(order)}
            state.places.append(place)
            parents = [-1, *(place[trie.parents[node]] for node in order[1:])]
            rows.append(([trie.tokens[node] for node in order], parents))
            inputs.append([trie.inputs[node] for node in order])
        probed = any(tokens != read for (tokens, _), read in zip(rows, inputs, strict=True))
        # on a device shapes are better repeated than small
        num_nodes = 1 if on_host(state.device) else max(self.num_nodes, 1)
        return pack(rows, state.device, inputs=inputs if probed else None, num_nodes=num_nodes)

    def observe(self, state: HybridState, result: StepResult) -> HybridState:
        """Tell every member, and where its nodes were; learn who was right."""
        num_rows, device = len(state.rates), result.tokens.device
        # without a proposal, as where another hybrid has not asked this one, there are no nodes
        # what was left out of the merged tree, or of what was verified of it, stands nowhere
        rows = [
            {node: own[place] for node, place in places.items() if place < len(own)}
            for own, places in zip(result.places, state.places or [{}] * num_rows, strict=True)
        ]
        members = []
        of_members = state.where or [[[]] * num_rows] * len(self.members)
        for member, before, where in zip(self.members, state.members, of_members, strict=True):
            if isinstance(member, CopyDrafter):  # which looks at the text alone
                members.append(member.observe(before, result))
                continue
            pairs = zip(rows, where, strict=True)
            nodes = [[place.get(node, -1) for node in row] for place, row in pairs]
            told = replace(result, own=torch.tensor(nodes, dtype=torch.long, device=device))
            members.append(member.observe(before, told))
        for trie, rates, new in zip(state.tries, state.rates, result.new_tokens, strict=False):
            trie.learn(rates, new)
        for worth, new, cost in zip(state.values, result.new_tokens, state.costs, strict=False):
            worth.stepped(len(new), cost)
        return HybridState(members, state.rates, state.values, state.device)

    def select(self, state: HybridState, rows: Tensor) -> HybridState:
        """Keep some rows."""
        pairs, kept = zip(self.members, state.members, strict=True), rows.tolist()
        members = [member.select(own, rows) for member, own in pairs]
        rates, values = picked(state.rates, kept), picked(state.values, kept)
        return HybridState(members, rates, values, state.device)

    def join(self, state: HybridState, other: HybridState) -> HybridState:
        """Take the rows of both."""
        each = zip(self.members, state.members, other.members, strict=True)
        members = [member.join(*states) for member, *states in each]
        rates, values = state.rates + other.rates, state.values + other.values
        return HybridState(members, rates, values, state.device)


_Proposed = list[tuple[Sequence[int], Sequence[int], Sequence[int]]]


def _trees(member: Drafter, state: Any) -> tuple[_Proposed, bool]:
    """Ask a member; return per row tokens, parents and what is read, see :meth:`Trie.add`.

    And whether its guesses follow the noise of the base model's draws.

    Raises:
        ValueError: for sampled candidates.
    """
    if isinstance(member, CopyDrafter):
        return [(tokens, parents, tokens) for tokens, parents in member.trees(state)], False
    candidates = member.propose(state)
    name = f"candidates of {type(member).__name__}"
    check(candidates.sampling == "none", name, candidates.sampling, _UNSAMPLED)
    parents = candidates.tree.parents.expand_as(candidates.tokens)
    each = candidates.tokens, parents, candidates.inputs
    return list(zip(*(rows.tolist() for rows in each), strict=True)), candidates.follows_noise
