"""Several drafters at once: their guesses merged into one tree, which is verified once.

Each member follows the text by itself, whoever proposed what was accepted. Where all are
deterministic, so is their union, and sample-and-walk stays exact: it accepts the longest of what
the members' trees would have given, as long as all their nodes are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specheads.drafters.adaptive import StepCosts
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.drafters.dynamic import HOSTS
from specheads.drafters.packed import pack
from specheads.drafters.trie import Rates, Trie
from specheads.drafters.worth import Worth
from specheads.tree import RowTrees, Tree, batched


@dataclass
class _Step:
    """What was proposed last.

    Attributes:
        tree: the merged one.
        tries: per row all guesses, those that were left out too.
        where: [members][B][n], where each member's nodes stand in the tries; -1 for padding.
        places: per row and node of its trie the place in the merged tree; -1 where left out.
    """

    tree: Tree | RowTrees
    tries: list[Trie]
    where: list[list[list[int]]]
    places: list[list[int]]


@dataclass
class HybridState:
    """The members' states, what each row's text has taught, and the step in between.

    Attributes:
        members: their states.
        rates: per row.
        worth: per row, of asking members that cost something.
        step: from a proposal to its result; else None.
    """

    members: list[Any]
    rates: list[Rates]
    worth: list[Worth]
    step: _Step | None = None


class HybridDrafter:
    """Merges the candidates of its members.

    How likely guesses are to be right is learned while decoding, per row: for each depth and rank,
    for each member, and for members that agree. With a limit, or with costs, the likeliest are
    verified: nodes go to whoever is right of late, as where copying and generating alternate.

    With costs, members are asked the cheapest first, and those that cost something only where they
    have paid: where the text repeats itself, heads do not run at all.

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
        self,
        members: Sequence[Drafter],
        num_nodes: int = 0,
        *,
        costs: Sequence[StepCosts] = (),
    ) -> None:
        if not members:
            raise ValueError("a hybrid needs at least one member, got none")
        if num_nodes < 0 or num_nodes == 1:
            raise ValueError(f"num_nodes must be 0 (all) or at least 2, got {num_nodes}")
        if costs and len(costs) != len(members):
            raise ValueError(f"{len(costs)} costs for {len(members)} members: one for each")
        for member in members:
            if not member.deterministic:
                raise ValueError(_why_not_sampled(member))
        self.members = tuple(members)
        self.num_nodes = num_nodes
        self._prices = [each.draft for each in costs] or [0.0] * len(members)
        self._order = sorted(range(len(members)), key=self._prices.__getitem__)
        # members verify with the same base: the longest list says most
        self._verify = max((each.verify for each in costs), key=len, default=())
        self.taps = tuple(dict.fromkeys(tap for member in members for tap in member.taps))

    def start(self, prefill: Prefill) -> HybridState:
        """Start every member."""
        states = [member.start(prefill) for member in self.members]
        rows = prefill.ids
        return HybridState(states, [Rates() for _ in rows], [Worth() for _ in rows])

    def propose(self, state: HybridState) -> Candidates:
        """Ask the members, for each row those that pay; merge.

        Raises:
            ValueError: for sampled candidates.
        """
        tries: list[Trie] = []
        where: list[list[list[int]]] = [[]] * len(self.members)
        spent = [0.0] * len(state.rates)
        for number in self._order:
            asked = self._asked(number, tries, spent, state)
            if not any(asked):
                where[number] = [[] for _ in asked]
                continue
            member, price = self.members[number], self._prices[number]
            candidates = member.propose(state.members[number])
            if candidates.sampling != "none":
                raise ValueError(_why_not_sampled(member))
            tokens: list[list[int]] = candidates.tokens.tolist()
            inputs = tokens if candidates.probes is None else candidates.probes.tolist()
            parents = batched(candidates.tree, candidates.tree.parents).tolist()
            if len(parents) < len(tokens):
                parents *= len(tokens)
            if not tries:
                tries = [Trie(row[0]) for row in tokens]
                device = candidates.tokens.device
            where[number] = []
            for row, asks in enumerate(asked):
                if not asks:
                    where[number].append([0] + [-1] * (len(tokens[row]) - 1))
                    continue
                trie, rates = tries[row], state.rates[row]
                before = trie.values(rates) if price else []
                own = trie.add(number, tokens[row], parents[row], inputs[row])
                where[number].append(own)
                if price:
                    cost = price * trie.depth(own)
                    spent[row] += cost
                    gained = trie.promise(trie.values(rates)) - trie.promise(before)
                    state.worth[row].learn(number, gained, cost, trie.chance(before))
        merged, places = self._merge(tries, spent, state.rates, device)
        state.step = _Step(merged.tree, tries, where, places)
        return merged

    def _asked(
        self, number: int, tries: Sequence[Trie], spent: Sequence[float], state: HybridState
    ) -> list[bool]:
        """Tell per row whether a member is to be asked."""
        if not tries or not self._prices[number]:
            return [True] * len(spent)
        asked = []
        rows = zip(tries, spent, state.rates, state.worth, strict=True)
        for trie, paid, rates, worth in rows:
            values = trie.values(rates)
            best = trie.best(values, [paid + cost for cost in self._verify])
            asked.append(worth.pays(number, *best, trie.chance(values)))
        return asked

    def _merge(
        self,
        tries: Sequence[Trie],
        spent: Sequence[float],
        rates: Sequence[Rates],
        device: torch.device,
    ) -> tuple[Candidates, list[list[int]]]:
        """Return what is to be verified, and per row and node of its trie the place in it."""
        tokens, parents, inputs, places = [], [], [], []
        probed = False
        for trie, paid, each in zip(tries, spent, rates, strict=True):
            costs = [paid + cost for cost in self._verify]
            order = trie.order(trie.values(each), self.num_nodes, costs)
            place = [-1] * len(trie.inputs)
            for new, node in enumerate(order):
                place[node] = new
            places.append(place)
            parents.append([-1, *(place[trie.parents[node]] for node in order[1:])])
            inputs.append([trie.inputs[node] for node in order])
            tokens.append([trie.tokens[node] for node in order])
            probed = probed or tokens[-1] != inputs[-1]
        merged = pack(
            tokens,
            parents,
            device,
            inputs=inputs if probed else None,
            # where shapes are better repeated than small
            num_nodes=1 if device.type in HOSTS else max(self.num_nodes, 1),
        )
        return merged, places

    def observe(self, state: HybridState, result: StepResult) -> HybridState:
        """Tell every member, and where its nodes were; learn who was right."""
        step, device = state.step, result.tokens.device
        if step is None:  # another hybrid has not asked this one
            step = _Step(result.tree, [], [[[] for _ in state.rates]] * len(self.members), [])
            places: list[list[int]] = [[] for _ in state.rates]
        else:
            places = self._places(step, result)
        for place in places:
            place.append(-1)  # where padding stands: index -1
        members = []
        for member, own, where in zip(self.members, state.members, step.where, strict=True):
            nodes = [[place[at] for at in row] for place, row in zip(places, where, strict=True)]
            told = replace(result, own=torch.tensor(nodes, dtype=torch.long, device=device))
            members.append(member.observe(own, told))
        for i, trie in enumerate(step.tries):
            trie.learn(state.rates[i], result.new_tokens[i])
        return HybridState(members, state.rates, state.worth)

    @staticmethod
    def _places(step: _Step, result: StepResult) -> list[list[int]]:
        """Return per row and node of its trie the place in the tree that was verified."""
        if result.own is not None:
            own = result.own.tolist()
        elif (num_nodes := result.tree.num_nodes) == step.tree.num_nodes:
            return step.places
        else:  # the front of it
            front = [*range(num_nodes), *[-1] * (step.tree.num_nodes - num_nodes)]
            own = [front] * len(step.places)
        return [
            [there[node] if node >= 0 else -1 for node in row]
            for there, row in zip(own, step.places, strict=True)
        ]

    def select(self, state: HybridState, rows: Tensor) -> HybridState:
        """Keep some rows."""
        members = [
            member.select(own, rows)
            for member, own in zip(self.members, state.members, strict=True)
        ]
        kept = rows.tolist()
        return HybridState(
            members, [state.rates[row] for row in kept], [state.worth[row] for row in kept]
        )


def _why_not_sampled(member: Drafter) -> str:
    return (
        f"{type(member).__name__} samples its candidates, and a hybrid merges only deterministic"
        " ones: what was drawn would no longer be distributed as the acceptance rule assumes"
    )
