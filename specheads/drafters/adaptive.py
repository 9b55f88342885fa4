"""How many tokens to draft next: as many as pay, from what was accepted lately and what steps cost.

A draft of n tokens gains ``1 + sum_d prod_{j <= d} rate_j`` tokens, where rate_j is how often the
j-th is accepted once those before it were, and costs n passes of the draft model and a verify step
of n + 1 nodes. Their ratio is the speed, with the measured cost of the step in place of the usual
assumption that it costs what a plain step costs (Leviathan et al., arXiv:2211.17192, theorem 3.8).
The rates are learned from each text while it is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PRIOR = 0.7  # acceptance to start from where nothing was measured
WEIGHT = 4.0  # observations that a prior counts as
MEMORY = 40.0  # steps after which an observation has faded to 1/e
# chances for a draft model that is taken at its word: a token is right as often as it says
CALIBRATED = tuple((i + 0.5) / 20 for i in range(20))


@dataclass(frozen=True)
class StepCosts:
    """What drafting and verifying cost on this machine, in units of a plain step.

    Attributes:
        draft: of one more drafted token: of one pass of the draft model; 0 for copied ones.
        verify: ``verify[n]`` is a verify step of n nodes, the root included; ``verify[0]`` is not
            looked at. Larger steps than were measured are taken to cost what the largest does.

    Raises:
        ValueError: for a negative cost, or no cost of a step of 1 node.
    """

    draft: float
    verify: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "verify", tuple(self.verify))
        if len(self.verify) < 2:
            raise ValueError(f"verify must hold the cost of 1 node at index 1, got {self.verify}")
        if not all(0 <= cost < math.inf for cost in (self.draft, *self.verify[1:])):
            raise ValueError(
                f"costs must be finite and at least 0, got draft {self.draft} and verify "
                f"{self.verify[1:]}"
            )

    def of_step(self, num_drafted: int, num_nodes: int) -> float:
        """Return the cost of drafting tokens one after the other and verifying so many nodes."""
        return self.draft * num_drafted + self.verify[min(num_nodes, len(self.verify) - 1)]

    def of_chain(self, num_tokens: int) -> float:
        """Return the cost of drafting and verifying a chain."""
        return self.of_step(num_tokens, num_tokens + 1)


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
class RunningRates:
    """One text's acceptance per depth; a value, never changed in place.

    A draft of which k tokens were accepted says that depths 1 to k were right and, if more had been
    proposed, that depth k + 1 was wrong. Of what lies deeper it says nothing: those tokens followed
    a wrong one, or none were proposed.

    Attributes:
        hits: per depth, how often it was right; old steps fade.
        trials: likewise, how often it was tried.
    """

    hits: tuple[float, ...]
    trials: tuple[float, ...]

    @staticmethod
    def unseen(max_depth: int) -> RunningRates:
        """Return the rates of a text that has not begun."""
        return RunningRates((0.0,) * max_depth, (0.0,) * max_depth)

    def after(self, num_proposed: int, num_accepted: int, memory: float) -> RunningRates:
        """Return the rates after one more step, every step before it faded a little.

        They fade at steps that propose nothing too: what was learned long ago is forgotten in
        favour of the prior, so that a text on which drafting did not pay is tried again.

        Args:
            num_proposed: tokens that the base model verified.
            num_accepted: how many of them were right.
            memory: steps after which an observation counts 1/e of a new one.

        Raises:
            ValueError: if more were accepted than proposed.
        """
        if not 0 <= num_accepted <= num_proposed:
            raise ValueError(f"{num_accepted} tokens accepted of {num_proposed} proposed")
        kept = math.exp(-1 / memory)
        tried = min(num_accepted + 1, num_proposed)
        return RunningRates(
            tuple(hits * kept + (d < num_accepted) for d, hits in enumerate(self.hits)),
            tuple(trials * kept + (d < tried) for d, trials in enumerate(self.trials)),
        )

    def estimate(self, prior: Sequence[float], weight: float) -> list[float]:
        """Return the rate of every depth.

        The prior is first scaled by how this text did on the whole, all depths together, and then
        corrected depth by depth, where something was seen.

        Args:
            prior: rate per depth before anything is seen.
            weight: observations that it counts as.
        """
        foreseen = sum(n * rate for n, rate in zip(self.trials, prior, strict=True))
        factor = (sum(self.hits) + weight) / (foreseen + weight)
        return [
            (hits + weight * min(1.0, rate * factor)) / (trials + weight)
            for hits, trials, rate in zip(self.hits, self.trials, prior, strict=True)
        ]


class AdaptiveLength:
    """Drafts as many tokens as have paid lately; a ``Length`` of :mod:`specheads.drafters.length`.

    Every row of a batch learns alone. With ``chances`` the draft model's confidence ends drafts: a
    token is drafted only where its chance to be reached, times its prior rate, is worth more than
    it costs at the speed that the prior promises. What was accepted lately then decides whether to
    draft at all, and no longer how much: it was accepted of tokens that had been sure enough, so
    that it says little of what a draft without regard to confidence would gain.
    Without ``chances`` a text of some hundred tokens is short to learn from: lengths then wander by
    a token or two around the best one.

    Args:
        costs: of drafting and verifying.
        max_tokens: longest draft.
        prior: acceptance per depth (given that those before were accepted) to start a text from:
            one for all, or one per depth, as measured on other texts.
        weight: observations that the prior counts as.
        memory: steps after which an observation has faded to 1/e.
        chances: how often tokens were accepted, measured on other texts, by the probability that
            the draft model gave them: of equal bins of [0, 1]. ``CALIBRATED`` where nothing was
            measured. Empty: confidence is not looked at.

    Raises:
        ValueError: if a number is out of range, or a cost that is needed was not measured.
    """

    def __init__(
        self,
        costs: StepCosts,
        max_tokens: int,
        *,
        prior: float | Sequence[float] = PRIOR,
        weight: float = WEIGHT,
        memory: float = MEMORY,
        chances: Sequence[float] = (),
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if len(costs.verify) < max_tokens + 2:
            raise ValueError(
                f"costs.verify must reach {max_tokens + 1} nodes for max_tokens {max_tokens}, got "
                f"{len(costs.verify) - 1}"
            )
        rates = [prior] * max_tokens if isinstance(prior, int | float) else list(prior)
        if len(rates) != max_tokens:
            raise ValueError(f"prior has {len(rates)} rates for max_tokens {max_tokens}")
        if not all(0 <= rate <= 1 for rate in (*rates, *chances)):
            raise ValueError(f"prior and chances must lie in [0, 1], got {rates} and {chances}")
        if weight <= 0 or memory <= 0:
            raise ValueError(f"weight and memory must be positive, got {weight} and {memory}")
        self.costs, self.max_tokens = costs, max_tokens
        self.prior, self.weight, self.memory = tuple(rates), weight, memory
        self.chances = tuple(chances)
        self.asks = bool(chances)
        self._bars = self._worth()

    def _worth(self) -> list[float]:
        """Per number of tokens drafted, how likely all must be right for one more to pay."""
        _, speed = best_length(self.prior, self.costs)
        chains = [self.costs.of_chain(n) for n in range(self.max_tokens + 1)]
        more = [speed * (after - before) for before, after in pairwise(chains)]
        return [
            cost / rate if rate else math.inf for cost, rate in zip(more, self.prior, strict=True)
        ]

    def start(self) -> RunningRates:
        """Return the state of a text that begins."""
        return RunningRates.unseen(self.max_tokens)

    def limit(self, state: RunningRates) -> int:
        """Return the draft length with the most expected tokens per cost, 0..max_tokens.

        Where confidence ends drafts, 0 or ``max_tokens``.
        """
        length, _ = best_length(state.estimate(self.prior, self.weight), self.costs)
        return self.max_tokens if length and self.asks else length

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Say whether one more token is worth its cost after those with these probabilities."""
        if not self.chances or len(probs) >= self.max_tokens:
            return len(probs) < self.max_tokens
        bins = len(self.chances)
        right = math.prod(self.chances[min(int(prob * bins), bins - 1)] for prob in probs)
        return right > self._bars[len(probs)]

    def observe(self, state: RunningRates, num_proposed: int, num_accepted: int) -> RunningRates:
        """Return the state after a step.

        Raises:
            ValueError: if more were accepted than proposed.
        """
        return state.after(num_proposed, num_accepted, self.memory)
