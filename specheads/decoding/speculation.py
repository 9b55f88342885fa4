"""What drafting a chain with a draft model brings: formulas, and the clocked costs they need.

Costs are in plain steps of the base model on the machine at hand. Leviathan's formula takes a
verify step for as cheap as a plain one; with the clocked cost T(n + 1) in its place it holds on
machines where that is not so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.cost import CostCurve, clock_texts, ratios, runner
from specheads.drafters.adaptive import StepCosts
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.tree import Tree

Make = Callable[[int], Drafter]  # from the number of guesses per step to the drafter


def expected_tokens(alpha: float, num_tokens: int) -> float:
    """Return the tokens per step of a chain whose guesses are accepted independently.

    (1 - alpha^(n + 1)) / (1 - alpha), arXiv:2211.17192, equation 1.

    Args:
        alpha: probability that a guess is accepted, in [0, 1].
        num_tokens: n, guesses per step.
    """
    return sum(alpha**i for i in range(num_tokens + 1))


def leviathan_speedup(alpha: float, cost: float, num_tokens: int) -> float:
    """Return the expected speed-up over plain decoding, arXiv:2211.17192, theorem 3.8.

    (1 - alpha^(n + 1)) / ((1 - alpha) (n c + 1)): a verify step costs what a plain step costs.

    Args:
        alpha: see :func:`expected_tokens`.
        cost: c, of one draft pass, in plain steps.
        num_tokens: n.
    """
    return expected_tokens(alpha, num_tokens) / (num_tokens * cost + 1)


@dataclass(frozen=True)
class DraftCosts:
    """Clocked costs of drafting a chain and verifying it, in plain steps.

    Attributes:
        verify: of a verify step, by its nodes, the root included.
        draft: of one more draft pass, its choice of a token included (c). 0 where the clock was
            disturbed: longer drafts seemed no dearer than shorter ones, which cannot be.
        steps: of whole steps that were clocked, by their guesses.
        overhead: of a step that drafts, however much: noise, the acceptance rule, two caches.
        start: of a text before its first plain step, the prefill above all.
        draft_start: what the draft model adds to that.
    """

    verify: CostCurve
    draft: float
    steps: dict[int, float]
    overhead: float = 0.0
    start: float = 1.0
    draft_start: float = 0.0

    def step(self, num_tokens: int) -> float:
        """Return the cost of drafting and verifying ``num_tokens`` guesses."""
        drafting = self.overhead + num_tokens * self.draft if num_tokens else 0.0
        return drafting + self.verify.at(num_tokens + 1)

    def by_nodes(self, max_tokens: int) -> StepCosts:
        """Return the costs as rules of draft length read them: overhead comes with a first guess.

        Args:
            max_tokens: longest chain.
        """
        alone = [self.verify.at(1)] * 2  # of no node and one
        drafting = [self.verify.at(n) + self.overhead for n in range(2, max_tokens + 2)]
        return StepCosts(self.draft, alone + drafting)

    def speedup(self, num_texts: int, num_steps: float, num_tokens: float, length: int) -> float:
        """Return how much sooner texts are written than by plain decoding, prefills included.

        Args:
            num_texts: number of texts, each of which begins with a prefill.
            num_steps: verify steps of all texts, as expected.
            num_tokens: what those steps gained, which takes plain decoding a step each.
            length: guesses per step.
        """
        plain = num_texts * self.start + num_tokens
        return plain / (num_texts * (self.start + self.draft_start) + num_steps * self.step(length))

    def to_json(self) -> dict[str, Any]:
        """Return the costs as JSON; c is None where it could not be measured."""
        return {
            "c": round(self.draft, 4) if self.draft > 0 else None,
            "overhead": round(self.overhead, 4),
            "start": round(self.start, 4),
            "draft_start": round(self.draft_start, 4),
            "step": {str(n): round(cost, 4) for n, cost in self.steps.items()},
        }


class Blank:
    """Proposes chains of nothing: what they cost is the verify step alone."""

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def start(self, prefill: Prefill) -> Tensor:
        """Return the roots."""
        return prefill.root

    def propose(self, state: Tensor) -> Candidates:
        """Return the root and padding, which is read like any token and never accepted."""
        padding = state.new_full((len(state), self.num_tokens), -1)
        return Candidates(torch.cat([state[:, None], padding], dim=1), Tree.chain(self.num_tokens))

    def observe(self, state: Tensor, result: StepResult) -> Tensor:
        """Return the new roots."""
        return result.next_root

    def select(self, state: Tensor, rows: Tensor) -> Tensor:
        """Keep some rows."""
        return state[rows]


def clocked_lengths(max_tokens: int) -> list[int]:
    """Return the draft lengths to clock: 1, 2, 4, ... and ``max_tokens``."""
    return sorted(
        {1 << i for i in range(max_tokens.bit_length()) if 1 << i < max_tokens} | {max_tokens}
    )


def clock_drafts(
    base: PreTrainedModel,
    makes: Mapping[str, Make],
    prompt: Tensor,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    max_new_tokens: int = 48,
    repeats: int = 3,
) -> dict[str, DraftCosts]:
    """Clock plain steps, verify steps and whole steps of several draft models, in turn.

    Args:
        base: base model.
        makes: by the draft model's name, the drafter of a chain of some length.
        prompt: [1, P], continued in every run.
        max_tokens: longest chain.
        temperature: of the sampling.
        max_new_tokens: of every run.
        repeats: number of rounds.

    Returns:
        Costs by name.
    """
    lengths = clocked_lengths(max_tokens)
    drafters: list[Drafter | None] = [None, *map(Blank, lengths)]
    drafters += [make(n) for make in makes.values() for n in lengths]
    runs = [
        runner(base, each, prompt, max_new_tokens=max_new_tokens, temperature=temperature)
        for each in drafters
    ]
    clocked, starts = clock_texts(runs, repeats=repeats)
    costs = ratios(clocked)
    units = [median(each) for each in ratios([clocked[0], *starts])[1:]]
    blank = {n + 1: cost for n, cost in zip(lengths, costs[1 : 1 + len(lengths)], strict=True)}
    verify = CostCurve.through({1: costs[0], **blank})
    found = {}
    for i, name in enumerate(makes, start=1):
        own = costs[1 + i * len(lengths) : 1 + (i + 1) * len(lengths)]
        steps = {n: median(cost) for n, cost in zip(lengths, own, strict=True)}
        draft, overhead = drafting_costs(steps, verify)
        own_starts = units[1 + i * len(lengths) : 1 + (i + 1) * len(lengths)]
        draft_start = max(0.0, median(own_starts) - units[0])
        found[name] = DraftCosts(verify, draft, steps, overhead, units[0], draft_start)
    return found


def drafting_costs(steps: Mapping[int, float], verify: CostCurve) -> tuple[float, float]:
    """Return what one draft pass costs, and what drafting costs besides, both at least 0.

    The line with the least squares through what whole steps cost beyond the verify step.

    Args:
        steps: cost of a whole step by its guesses.
        verify: cost of a verify step by its nodes.
    """
    over = {n: cost - verify.at(n + 1) for n, cost in steps.items()}
    mean, rise = sum(over) / len(over), sum(over.values()) / len(over)
    spread = sum((n - mean) ** 2 for n in over)
    slope = sum((n - mean) * (each - rise) for n, each in over.items()) / spread if spread else 0.0
    if slope < 0:
        return 0.0, max(0.0, rise)
    if not spread or rise < slope * mean:  # a line through the origin
        return max(0.0, sum(n * each for n, each in over.items()) / sum(n * n for n in over)), 0.0
    return slope, rise - slope * mean


def best_length(speedups: Sequence[float]) -> int:
    """Return the number of guesses with the largest speed-up; of equals the smallest.

    Args:
        speedups: of 1, 2, ... guesses.
    """
    return 1 + max(range(len(speedups)), key=speedups.__getitem__)
