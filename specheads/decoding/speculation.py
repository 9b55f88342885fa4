"""What drafting a chain with a draft model brings: formulas, and the clocked costs they need.

Costs are in plain steps of the base model on the machine at hand. Leviathan's formula takes a
verify step for as cheap as a plain one; with the clocked cost T(n + 1) in its place it holds on
machines where that is not so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.cost import CostCurve, clock_steps, ratios, runner
from specheads.decoding.stats import median
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
        draft: of one draft pass, its choice of a token and its bookkeeping included (c).
        steps: of whole steps that were clocked, by their guesses.
    """

    verify: CostCurve
    draft: float
    steps: dict[int, float]

    def step(self, num_tokens: int) -> float:
        """Return the cost of drafting and verifying ``num_tokens`` guesses."""
        return num_tokens * self.draft + self.verify.at(num_tokens + 1)

    def to_json(self) -> dict[str, Any]:
        """Return the costs as JSON."""
        return {
            "c": round(self.draft, 4),
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
    costs = ratios(clock_steps(runs, repeats=repeats))
    blank = {n + 1: cost for n, cost in zip(lengths, costs[1 : 1 + len(lengths)], strict=True)}
    verify = CostCurve.through({1: costs[0], **blank})
    found = {}
    for i, name in enumerate(makes, start=1):
        own = costs[1 + i * len(lengths) : 1 + (i + 1) * len(lengths)]
        steps = {n: median(cost) for n, cost in zip(lengths, own, strict=True)}
        found[name] = DraftCosts(verify, draft_cost(steps, verify), steps)
    return found


def draft_cost(steps: Mapping[int, float], verify: CostCurve) -> float:
    """Return the cost of one draft pass that explains whole steps best, at least 0.

    The line through the origin with the least squares: long chains, whose difference from the
    verify step is the clearest, count most.

    Args:
        steps: cost of a whole step by its guesses.
        verify: cost of a verify step by its nodes.
    """
    over = sum(n * (cost - verify.at(n + 1)) for n, cost in steps.items())
    return max(0.0, over / sum(n * n for n in steps))


def best_length(speedups: Sequence[float]) -> int:
    """Return the number of guesses with the largest speed-up; of equals the smallest.

    Args:
        speedups: of 1, 2, ... guesses.
    """
    return 1 + max(range(len(speedups)), key=speedups.__getitem__)
