"""How many tokens of a chain to draft.

What ends a chain may depend on the tokens drafted so far, which are all proposed, and on what was
accepted in earlier steps. It may not take back a token that was drawn: that would be a choice among
samples, and the output would no longer be the base model's
(:func:`specheads.verification.acceptance.block`).

:class:`AdaptiveLength` drafts as many tokens as pay. A draft of n tokens gains
``1 + sum_d prod_{j <= d} rate_j`` tokens, where rate_j is how often the j-th is accepted once those
before it were, and costs n passes of the draft model and a verify step of n + 1 nodes. Their ratio
is the speed, with the measured cost of the step in place of the usual assumption that it costs what
a plain step costs (Leviathan et al., arXiv:2211.17192, theorem 3.8). The rates are learned from
each text while it is written.

Every row of a batch has a state of its own, and gets the lengths that it would get alone. A rule
has ``max_tokens``, than which no draft is longer, and ``asks``: whether ``goes_on`` is to be called
after every token, which needs the draft's probabilities on the host, a synchronisation on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from specheads.system.errors import at_least, check


@dataclass
class FixedLength:
    """Always as many tokens.

    Args:
        max_tokens: per step, at least 1.

    Raises:
        ConfigError: if it is less.
    """

    max_tokens: int

    asks = False

    def __post_init__(self) -> None:
        at_least(self, max_tokens=1)

    def start(self) -> None:
        """Nothing is remembered."""

    def limit(self, state: None) -> int:
        """Return the longest draft."""
        return self.max_tokens

    def goes_on(self, probs: Sequence[float]) -> bool:
        """Never stop early."""
        return True

    def observe(self, state: None, num_proposed: int, num_accepted: int) -> None:
        """Learn nothing."""


PRIOR = 0.7  # acceptance to start from where nothing was measured
WEIGHT = 4.0  # observations that a prior counts as
MEMORY = 40.0  # steps after which an observation has faded to 1/e


@dataclass(frozen=True)
class StepCosts:
    """What drafting and verifying cost on this machine, in units of a plain step.

    Attributes:
        draft: of one more drafted token: of one pass of the draft model; 0 for copied ones.
        verify: ``verify[n]`` is a verify step of n nodes, the root included; ``verify[0]`` is not
            looked at. Larger steps than were measured are taken to cost what the largest does.

    Raises:
        ConfigError: for a negative cost, or no cost of a step of 1 node.
    """

    draft: float
    verify: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "verify", tuple(self.verify))
        costs = (self.draft, *self.verify[1:])
        check(len(costs) > 1, "verify", self.verify, "long enough to hold the cost of 1 node")
        in_range = all(0 <= cost < math.inf for cost in costs)
        check(in_range, "draft and verify costs", costs, "finite and at least 0")

    def of_chain(self, num_tokens: int) -> float:
        """Return the cost of drafting and verifying a chain."""
        return self.draft * num_tokens + self.verify[min(num_tokens + 1, len(self.verify) - 1)]


def best_length(rates: Sequence[float], costs: StepCosts) -> tuple[int, float]:
    """Return the draft length with the most tokens per cost, and how many that are.

    Args:
        rates: per depth, how often a token is accepted once those before it were.
        costs: of a step; at most ``len(rates)`` tokens are drafted, and the fewest where lengths
            tie.
    """
    best, speed = 0, 1 / costs.of_chain(0)
    reached = expected = 1.0
    for length, rate in enumerate(rates, start=1):
        reached *= rate
        expected += reached
        if (found := expected / costs.of_chain(length)) > speed:
            best, speed = length, found
    return best, speed


@dataclass(frozen=True)
class TextRates:
    """How often one text's guesses of each depth were right; a value, never changed in place.

    Attributes:
        hits: by depth, how often a guess was right; old steps fade.
        trials: by depth, how often one was tried behind right ones.
    """

    hits: Mapping[int, float] = field(default_factory=dict)
    trials: Mapping[int, float] = field(default_factory=dict)

    def after(self, outcomes: Mapping[int, bool], memory: float) -> TextRates:
        """Return the rates after one more step, every step before it faded a little.

        They fade at steps that try nothing too: what was learned long ago is forgotten in favour of
        the prior, so that a text on which drafting did not pay is tried again.

        Args:
            outcomes: by depth whether a guess was right, of those behind right ones only: a guess
                that followed a wrong one says nothing.
            memory: steps after which an observation counts 1/e of a new one.
        """
        kept = math.exp(-1 / memory)
        depths = {**self.trials, **outcomes}
        return TextRates(
            {d: self.hits.get(d, 0.0) * kept + outcomes.get(d, False) for d in depths},
            {d: self.trials.get(d, 0.0) * kept + (d in outcomes) for d in depths},
        )

    def estimate(self, prior: Sequence[float], weight: float) -> list[float]:
        """Return the rate of every depth.

        The prior is first scaled by how this text did on the whole, all depths together, and then
        corrected depth by depth, where something was seen.

        Args:
            prior: the rates before anything is seen.
            weight: observations that each counts as.
        """
        foreseen = sum(trials * prior[depth] for depth, trials in self.trials.items())
        factor = (sum(self.hits.values()) + weight) / (foreseen + weight)
        return [
            (self.hits.get(depth, 0.0) + weight * min(1.0, rate * factor))
            / (self.trials.get(depth, 0.0) + weight)
            for depth, rate in enumerate(prior)
        ]


class AdaptiveLength:
    """Drafts as many tokens as pay.

    Every row of a batch learns alone. The draft model's confidence ends drafts: a token is drafted
    only where its chance to be reached, times ``PRIOR``, is worth more than it costs at the speed
    that this rate promises. What was accepted lately decides whether to draft at all, and not how
    much: it was accepted of tokens that had been sure enough, so that it says little of what a
    draft without regard to confidence would gain.

    Args:
        costs: of drafting and verifying.
        max_tokens: longest draft.

    Raises:
        ConfigError: if a number is out of range, or a cost that is needed was not measured.
    """

    asks = True

    def __init__(self, costs: StepCosts, max_tokens: int) -> None:
        self.costs, self.max_tokens = costs, max_tokens
        self.prior = (PRIOR,) * max_tokens
        at_least(self, max_tokens=1)
        measured = len(costs.verify) - 1
        reach = f"measured up to {max_tokens + 1} nodes for max_tokens {max_tokens}"
        check(measured > max_tokens, "costs.verify", measured, reach)
        # per number of tokens drafted, how likely all must be right for one more to pay
        _, speed = best_length(self.prior, costs)
        chains = [costs.of_chain(n) for n in range(max_tokens + 1)]
        self._bars = [speed * (after - before) / PRIOR for before, after in pairwise(chains)]
        self._bars.append(math.inf)

    def start(self) -> TextRates:
        """Return the state of a row before its first step."""
        return TextRates()

    def limit(self, state: TextRates) -> int:
        """Return how many tokens the row may be proposed next.

        ``max_tokens``, or 0 where no draft gives the most expected tokens per cost.
        """
        length, _ = best_length(state.estimate(self.prior, WEIGHT), self.costs)
        return self.max_tokens if length else 0

    def goes_on(self, probs: Sequence[float]) -> bool:
        """Say, after a token was drafted for a row, whether one more is worth its cost.

        The draft model is taken at its word: a token is right as often as it says.

        Args:
            probs: of each token drafted in this step, the draft's probability for it; the newest
                one is the last. At temperature 0 those of temperature 1.
        """
        return math.prod(probs) > self._bars[len(probs)]

    def observe(self, state: TextRates, num_proposed: int, num_accepted: int) -> TextRates:
        """Return the state of a row after a step for which it was asked.

        Args:
            state: before the step.
            num_proposed: guesses on which the step has decided: where ``num_accepted`` is smaller,
                the guess after the accepted ones was refused, and about later ones nothing is
                known. Guesses that nobody verified, as near the token limit, do not count. It is 0
                after a limit of 0.
            num_accepted: 0..num_proposed.
        """
        tried = range(min(num_accepted + 1, num_proposed))
        return state.after({depth: depth < num_accepted for depth in tried}, MEMORY)


Length = FixedLength | AdaptiveLength
