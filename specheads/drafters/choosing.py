"""Learn while decoding which of several drafters to ask.

Copies are cheap and good where a text repeats itself, a draft model is dear and good elsewhere, and
neither is known beforehand. Drafters whose guesses cost nothing are all asked at every step, and
scored by the text that followed whether or not their guesses were verified. Of drafters that cost
something only the one that is asked can be scored: that is a bandit problem, and the choice is made
by upper confidence bounds (BanditSpec, arXiv:2505.15141), with observations that fade because texts
change (discounted UCB, Garivier and Moulines, arXiv:0805.3415).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.drafters.adaptive import MEMORY, PRIOR, WEIGHT, RunningRates, StepCosts
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.drafters.laid import Guesses, Laid, lay_out
from specheads.drafters.packed import pack

EXPLORE = 0.5  # tokens per step by which a drafter that was tried e times in all may surprise
MAX_DEPTH = 16  # acceptance is told apart down to this depth


@dataclass
class Pending:
    """Guesses of a free member that the text has not yet decided about.

    Attributes:
        member: whose.
        guesses: behind the text so far.
        num_right: how many tokens of the text they have foreseen.
    """

    member: int
    guesses: Guesses
    num_right: int = 0


@dataclass
class Arm:
    """What asking a member has brought; all of it fades."""

    times: float = 0.0
    tokens: float = 0.0
    cost: float = 0.0

    def fade(self, kept: float) -> None:
        """Age by a step."""
        self.times, self.tokens, self.cost = (
            kept * each for each in (self.times, self.tokens, self.cost)
        )

    def add(self, tokens: int, cost: float) -> None:
        """Note a step."""
        self.times, self.tokens, self.cost = self.times + 1, self.tokens + tokens, self.cost + cost


@dataclass
class ChoosingRow:
    """What was learned from one text.

    Attributes:
        rates: per member its acceptance per depth; used of the free ones.
        arms: per member what asking it brought; used of the others.
        total: what all steps brought.
        pending: guesses that wait for the text to go on.
        chosen: member that was asked last.
        spent: what that step cost.
    """

    rates: list[RunningRates]
    arms: list[Arm]
    total: Arm = field(default_factory=Arm)
    pending: list[Pending] = field(default_factory=list)
    chosen: int = 0
    spent: float = 0.0


@dataclass
class ChoosingState:
    """The members' states, what the rows learned, and what was proposed last.

    Attributes:
        members: per member its state.
        rows: per row of the batch.
        device: of the candidates.
        asked: member -> its number of nodes, of those that were asked.
        whole: the candidates are one member's own.
    """

    members: list[Any]
    rows: list[ChoosingRow]
    device: torch.device
    asked: dict[int, int] = field(default_factory=dict)
    whole: bool = False


class ChoosingDrafter:
    """Asks, row by row, the member that promises most at this step.

    A member's promise is its expected tokens less its expected cost at the speed of the text so
    far: maximising tokens per cost over a text means to take, at each step, the largest such
    difference and not the largest ratio. Of a free member the expectation is that of the guesses at
    hand (how deep they go, and how often its guesses were right so far); of another one the mean of
    the steps for which it was asked, plus a bonus while those are few. All members follow the text.

    Args:
        members: at least one, all of them deterministic.
        costs: one for each; a member whose ``draft`` is 0 is free. Drafting costs ``draft`` times
            the depth of the guesses: where depth costs nothing, as with parallel heads, divide.
        explore: tokens per step; how much more than seen to expect of members that were hardly
            asked.
        memory: steps after which an observation has faded to 1/e.

    Raises:
        ValueError: for no members, a sampled one, unequal numbers, or a number out of range.
    """

    deterministic = True

    def __init__(
        self,
        members: Sequence[Drafter],
        costs: Sequence[StepCosts],
        *,
        explore: float = EXPLORE,
        memory: float = MEMORY,
    ) -> None:
        if not members:
            raise ValueError("members must hold at least 1 drafter, got 0")
        if len(costs) != len(members):
            raise ValueError(f"{len(costs)} costs for {len(members)} members: one for each")
        for member in members:
            if not member.deterministic:
                raise ValueError(
                    f"members must be deterministic, but {type(member).__name__} samples its "
                    "guesses; a draft model's can be greedy or coupled"
                )
        if explore < 0 or memory <= 0:
            raise ValueError(
                f"explore must be at least 0 and memory positive, got {explore} and {memory}"
            )
        self.members, self.costs = tuple(members), tuple(costs)
        self.explore, self.memory = explore, memory
        self.taps = tuple(sorted({tap for member in members for tap in member.taps}))
        self._free = [i for i, cost in enumerate(costs) if cost.draft == 0]
        self._priced = [i for i, cost in enumerate(costs) if cost.draft > 0]
        self._prior = (PRIOR,) * MAX_DEPTH

    def start(self, prefill: Prefill) -> ChoosingState:
        """Start all members."""
        num = len(self.members)
        rows = [
            ChoosingRow([RunningRates.unseen(MAX_DEPTH)] * num, [Arm() for _ in range(num)])
            for _ in prefill.ids
        ]
        states = [member.start(prefill) for member in self.members]
        return ChoosingState(states, rows, prefill.root.device)

    def propose(self, state: ChoosingState) -> Candidates:
        """Ask the free members, choose, and ask those that were chosen."""
        candidates: dict[int, Candidates] = {}
        laid: dict[int, list[Laid]] = {}

        def ask(member: int) -> None:
            candidates[member] = self.members[member].propose(state.members[member])
            laid[member] = lay_out(candidates[member])

        for member in self._free:
            ask(member)
        for index, row in enumerate(state.rows):
            row.chosen = self._choose(row, {i: laid[i][index] for i in self._free})
        for member in sorted({row.chosen for row in state.rows} - set(self._free)):
            ask(member)
        state.asked = {i: each.tokens.shape[1] for i, each in candidates.items()}
        chosen = [laid[row.chosen][index] for index, row in enumerate(state.rows)]
        for index, (row, own) in enumerate(zip(state.rows, chosen, strict=True)):
            row.spent = self.costs[row.chosen].of_step(own.depth, own.num_read)
            row.pending += [Pending(i, laid[i][index].guesses()) for i in self._free]
        first = state.rows[0].chosen
        state.whole = all(row.chosen == first for row in state.rows)
        if state.whole:
            return candidates[first]
        probed = any(each.inputs != each.tokens for each in chosen)
        return pack(
            [each.tokens for each in chosen],
            [each.parents for each in chosen],
            state.device,
            inputs=[each.inputs for each in chosen] if probed else None,
        )

    def _choose(self, row: ChoosingRow, at_hand: dict[int, Laid]) -> int:
        """Return the member to ask for a row."""
        plain = min(cost.of_chain(0) for cost in self.costs)
        speed = (row.total.tokens + WEIGHT) / (row.total.cost + WEIGHT * plain)
        total = sum(row.arms[i].times for i in self._priced)
        best, most = 0, -math.inf
        for member, costs in enumerate(self.costs):
            if (own := at_hand.get(member)) is not None:
                promise = 1.0 + self._foreseen(row, member, own.depth)
                promise -= speed * costs.of_step(own.depth, own.num_read)
            elif (arm := row.arms[member]).times == 0:
                return member  # nothing is known of it
            else:
                bonus = self.explore * math.sqrt(2 * math.log(max(total, 1.0)) / arm.times)
                promise = arm.tokens / arm.times + bonus - speed * arm.cost / arm.times
            if promise > most:
                best, most = member, promise
        return best

    def _foreseen(self, row: ChoosingRow, member: int, depth: int) -> float:
        """Return how many of a free member's guesses are expected to be right."""
        reached = expected = 0.0
        if depth:
            reached = 1.0
            for rate in row.rates[member].estimate(self._prior, WEIGHT)[:depth]:
                reached *= rate
                expected += reached
        return expected

    def observe(self, state: ChoosingState, result: StepResult) -> ChoosingState:
        """Let all members follow the text, and score those about whom it says something."""
        kept = math.exp(-1 / self.memory)
        for row, new_tokens in zip(state.rows, result.new_tokens, strict=True):
            if not new_tokens:
                continue
            if state.asked:  # which in a hybrid may not be
                for arm in (*row.arms, row.total):
                    arm.fade(kept)
                row.total.add(len(new_tokens), row.spent)
                row.arms[row.chosen].add(len(new_tokens), row.spent)
            row.pending = [each for each in row.pending if not self._settle(row, each, new_tokens)]
        for index, member in enumerate(self.members):
            seen = result
            if not (state.whole and state.rows[0].chosen == index):
                seen = replace(result, own=self._own(state, index, result))
            state.members[index] = member.observe(state.members[index], seen)
        state.asked = {}
        return state

    def _settle(self, row: ChoosingRow, pending: Pending, new_tokens: Sequence[int]) -> bool:
        """Let guesses see the text go on; say whether there is nothing more to learn from them."""
        for token in new_tokens:
            if not pending.guesses:
                break
            below = pending.guesses.get(token)
            if below is None:
                return self._score(row, pending, refused=True)
            pending.guesses = below
            pending.num_right += 1
        return not pending.guesses and self._score(row, pending, refused=False)

    def _score(self, row: ChoosingRow, pending: Pending, *, refused: bool) -> bool:
        right = pending.num_right
        if right or refused:  # else nothing had been guessed
            rates = row.rates[pending.member]
            row.rates[pending.member] = rates.after(right + refused, right, self.memory)
        return True

    def _own(self, state: ChoosingState, member: int, result: StepResult) -> Tensor:
        """Return where in the verified trees a member's nodes stand: where the chosen's do."""
        num_nodes, device = state.asked.get(member, 0), result.tokens.device
        chosen = torch.tensor([row.chosen == member for row in state.rows], device=device)
        places = result.own
        if places is None:
            places = torch.arange(result.tokens.shape[1], device=device).expand(len(chosen), -1)
        # another row's chosen member may have more nodes, or fewer
        own = F.pad(places[:, :num_nodes], (0, max(num_nodes - places.shape[1], 0)), value=-1)
        return own.where(chosen[:, None], -1)

    def select(self, state: ChoosingState, rows: Tensor) -> ChoosingState:
        """Keep some rows, of all members."""
        return ChoosingState(
            [
                member.select(own, rows)
                for member, own in zip(self.members, state.members, strict=True)
            ],
            [state.rows[row] for row in rows.tolist()],
            state.device,
        )
