"""Judge rules of draft length by replaying what was recorded once, at measured costs.

With deterministic guesses (greedy or coupled ones of a draft model, copies of the text) the tokens
do not depend on how many are drafted: they are plain decoding's. So one recording per prompt, of
the longest draft at every position of the plain text, says what any rule would have gained and
spent there, step by step, and clocks do not blur the comparison. A rule is shown what a real run
would have shown it and nothing else: the confidences of the tokens it drafted, one after the other,
and how many of those verified were accepted. Drafts that are sampled cannot be judged so: what is
accepted of them, and the text itself, depend on the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specheads.decoding.recording import Recording
from specheads.drafters.adaptive import RunningRates, StepCosts

if TYPE_CHECKING:
    from specheads.drafters.length import Length


@dataclass(frozen=True)
class Judged:
    """What a rule made of recordings.

    Attributes:
        accept_lengths: per text, the tokens gained by each of its steps.
        lengths: likewise, the tokens drafted.
        cost: of all steps, in plain steps.
        plain_cost: of the same tokens decoded plainly.
    """

    accept_lengths: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    cost: float
    plain_cost: float

    @property
    def speedup(self) -> float:
        """Over plain decoding, prefills not counted; 1 where there is nothing to decode."""
        return self.plain_cost / self.cost if self.cost else 1.0


def judge(length: Length, recordings: Sequence[Recording], costs: StepCosts) -> Judged:
    """Replay what drafts of ``length`` would have gained and spent on the recorded texts.

    Args:
        length: the rule.
        recordings: of drafts at least as long as the rule's.
        costs: of drafting and verifying.

    Raises:
        ValueError: if the rule may ask for longer drafts than were recorded, or looks at
            confidences where none were.
    """
    gained: list[tuple[int, ...]] = []
    drafted: list[tuple[int, ...]] = []
    cost, num_tokens = 0.0, 0
    for recording in recordings:
        _check(length, recording)
        lengths, accept_lengths, spent = _replay(length, recording, costs)
        drafted.append(tuple(lengths))
        gained.append(tuple(accept_lengths))
        cost += spent
        num_tokens += sum(accept_lengths)
    return Judged(tuple(gained), tuple(drafted), cost, num_tokens * costs.of_chain(0))


def learn_rates(recordings: Sequence[Recording], max_tokens: int) -> list[float]:
    """Return how often each of the first tokens was right once those before it were.

    A prior for texts like the recorded ones; 0 at a depth that was never reached.

    Args:
        recordings: of drafts at least so long.
        max_tokens: number of rates.
    """
    seen = RunningRates.unseen(max_tokens)
    for recording in recordings:
        for right, refused in recording.decided():
            seen = seen.after(right + refused, right, math.inf)
    return [hits / max(trials, 1) for hits, trials in zip(seen.hits, seen.trials, strict=True)]


def learn_chances(recordings: Sequence[Recording], bins: int = 10) -> list[float]:
    """Return how often tokens were right by the probability that the draft model gave them.

    Only tokens behind right ones count. Bins are smoothed by one observation at their middle, and
    made to rise: a surer guess is never taken to be worse.

    Args:
        recordings: with confidences.
        bins: equal ones of [0, 1].
    """
    hits = [(i + 0.5) / bins for i in range(bins)]
    trials = [1.0] * bins
    for recording in recordings:
        for probs, (right, refused) in zip(recording.probs, recording.decided(), strict=True):
            for d, prob in enumerate(probs[: right + refused]):
                place = min(int(prob * bins), bins - 1)
                hits[place] += d < right
                trials[place] += 1
    return _rising(hits, trials)


def _rising(hits: Sequence[float], trials: Sequence[float]) -> list[float]:
    """Return the non-decreasing rates that fit best: neighbours that contradict are pooled."""
    blocks: list[tuple[float, float, int]] = []  # hits, trials, bins
    for hit, trial in zip(hits, trials, strict=True):
        block = (hit, trial, 1)
        while blocks and blocks[-1][0] * block[1] > block[0] * blocks[-1][1]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    return [hit / trial for hit, trial, num in blocks for _ in range(num)]


def _check(length: Length, recording: Recording) -> None:
    if length.max_tokens > recording.max_tokens:
        raise ValueError(
            f"the rule drafts up to {length.max_tokens} tokens, but drafts of "
            f"{recording.max_tokens} were recorded"
        )
    if length.asks and len(recording.probs) < len(recording.num_right):
        raise ValueError("the rule looks at confidences, but none were recorded")


def _replay(
    length: Length, recording: Recording, costs: StepCosts
) -> tuple[list[int], list[int], float]:
    """Return the tokens drafted and gained by each step of one text, and the cost of all."""
    state, at, spent = length.start(), 0, 0.0
    drafted: list[int] = []
    gained: list[int] = []
    while left := recording.num_tokens - 1 - at:
        num_drafted = min(length.limit(state), recording.num_drafted[at])
        if length.asks:
            num_drafted = _stopped(length, recording, at, num_drafted)
        # a step gives one token beside the guesses, and none is verified that may not be kept
        num_verified = min(num_drafted, recording.max_new_tokens - at - 2)
        num_accepted = min(num_verified, recording.num_right[at])
        spent += costs.of_step(num_drafted, num_verified + 1)
        # a guess that was not verified says nothing, unless one before it was refused anyway
        refused = num_accepted < num_verified
        state = length.observe(state, num_drafted if refused else num_accepted, num_accepted)
        drafted.append(num_drafted)
        gained.append(min(num_accepted + 1, left))
        at += gained[-1]
    return drafted, gained, spent


def _stopped(length: Length, recording: Recording, at: int, limit: int) -> int:
    """Return how many of at most ``limit`` tokens are drafted until the rule stops."""
    probs, entropies = recording.probs[at], recording.entropies[at]
    for num in range(1, limit):
        if not length.goes_on(probs[:num], entropies[:num]):
            return num
    return limit
