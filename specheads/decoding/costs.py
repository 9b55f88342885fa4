"""What drafting and verifying cost on this machine, in plain steps of the base model.

Leviathan's formula of the speed-up takes a verify step to be as cheap as a plain one. With the
clocked cost T(n + 1) of a step of n + 1 nodes in its place it holds on machines where that is not
so. Where settings leave lengths open, costs are clocked briefly before decoding.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config.commands import DRAFTERS
from specheads.decoding.loop import decode
from specheads.drafters.contract import Drafter
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.growing import OneTree, TextRows
from specheads.drafters.length import FixedLength, StepCosts
from specheads.drafters.lookup import CopyDrafter
from specheads.drafters.merge import HybridDrafter
from specheads.models.base import input_device, input_embedding
from specheads.verification.sampling import Sampler


@dataclass(frozen=True)
class CostCurve:
    """Measured costs, and the line through them that never falls.

    Attributes:
        sizes: numbers of nodes that were clocked, ascending.
        clocked: the median of each one's costs, in plain steps.
        smoothed: the non-decreasing costs closest to all that was clocked.
    """

    sizes: tuple[int, ...]
    clocked: tuple[float, ...]
    smoothed: tuple[float, ...]

    @staticmethod
    def through(clocked: Mapping[int, Sequence[float]]) -> CostCurve:
        """Build the curve from the costs of some sizes, each clocked some times."""
        sizes = tuple(sorted(clocked))
        costs = [clocked[size] for size in sizes]
        return CostCurve(sizes, tuple(map(median, costs)), tuple(never_falling(costs)))

    def at(self, num_nodes: int) -> float:
        """Return the cost of any size: linear in between, and like the nearest size outside."""
        return float(np.interp(num_nodes, self.sizes, self.smoothed))


def never_falling(groups: Sequence[Sequence[float]]) -> list[float]:
    """Return the non-decreasing numbers, one per group, with the least distance to all values.

    More nodes never make a step cheaper; where they seem to, the clock was disturbed, and
    neighbours that contradict each other share their values' median (pool adjacent violators, for
    the sum of absolute distances, which a few wild values do not move).
    """
    blocks: list[tuple[list[float], int]] = []  # values, and how many groups they come from
    for group in groups:
        values, count = list(group), 1
        while blocks and median(blocks[-1][0]) > median(values):
            before, num = blocks.pop()
            values, count = before + values, count + num
        blocks.append((values, count))
    return [median(values) for values, count in blocks for _ in range(count)]


def clock_steps(
    base: PreTrainedModel,
    drafters: Sequence[Drafter | None],
    input_ids: Tensor,
    *,
    repeats: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    enough: Callable[[], bool] = lambda: False,
) -> tuple[list[list[float]], list[list[float]]]:
    """Clock decoding with drafters against each other, in turn, so that a slow minute hits all.

    A step's figure of one repeat is the lower quartile of one text's steps: without the prefill,
    and without the moments in which the machine did something else, which only ever add time.

    Args:
        base: base model.
        drafters: propose; None decodes plainly.
        input_ids: [B, P]; equal rows take equally many steps, so that the batch stays whole.
        repeats: number of rounds.
        max_new_tokens: of a text, which nothing else ends.
        temperature: of the sampling, whose noise costs time at every node.
        enough: asked after every round, whether it is to be the last one.

    Returns:
        Seconds per step, and seconds before the first one (the prefill, and a drafter's reading of
        the prompt), both [drafters][rounds].
    """
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampler": Sampler(temperature)}

    def run(drafter: Drafter | None) -> list[float]:
        """Return the times of the start and behind every pass."""
        times = [time.perf_counter()]

        def tick(row: int, tokens: list[int]) -> None:
            if row == 0:
                times.append(time.perf_counter())

        decode(base, drafter, input_ids, on_tokens=tick, **how)
        return times

    for drafter in drafters:
        run(drafter)
    seconds: list[list[float]] = [[] for _ in drafters]
    starts: list[list[float]] = [[] for _ in drafters]
    for repeat in range(repeats):
        first = repeat % len(drafters)  # none always runs on a warmer cache than the others
        for index in (*range(first, len(drafters)), *range(first)):
            times = run(drafters[index])
            # the first call ends the prefill
            steps = [after - before for before, after in itertools.pairwise(times[1:])]
            ordered = sorted(steps or [times[-1] - times[0]])
            step = ordered[len(ordered) // 4]
            seconds[index].append(step)
            # drafters read the prompt in the first step
            starts[index].append(max(0.0, times[:3][-1] - times[0] - step))
        if enough():
            break
    return seconds, starts


def ratios(seconds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Divide all by the first, repeat by repeat: what drifts slowly cancels out."""
    return [[own / first for own, first in zip(each, seconds[0], strict=True)] for each in seconds]


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


class Blank(CopyDrafter):
    """Proposes chains of nothing: what they cost is the verify step alone."""

    begin = list[int]

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def trees(self, state: TextRows) -> list[OneTree]:
        """Return the roots and padding, which is read like any token and never accepted."""
        chain = range(-1, self.num_tokens)
        return [([text[-1], *[-1] * self.num_tokens], chain) for text in state.rows]


def clocked_lengths(max_tokens: int) -> list[int]:
    """Return the draft lengths to clock: 1, 2, 4, ... and ``max_tokens``."""
    powers = {1 << i for i in range(max_tokens.bit_length())}
    return sorted({n for n in powers if n < max_tokens} | {max_tokens})


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
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    clocked, starts = clock_steps(base, drafters, prompt, repeats=repeats, **how)
    plain, *costs = ratios(clocked)
    start, *units = map(median, ratios([clocked[0], *starts])[1:])
    blank = {n + 1: cost for n, cost in zip(lengths, costs[: len(lengths)], strict=True)}
    verify = CostCurve.through({1: plain, **blank})
    found = {}
    for i, name in enumerate(makes, start=1):
        own = slice(i * len(lengths), (i + 1) * len(lengths))
        steps = dict(zip(lengths, map(median, costs[own]), strict=True))
        draft, overhead = drafting_costs(steps, verify)
        draft_start = max(0.0, median(units[own]) - start)
        found[name] = DraftCosts(verify, draft, steps, overhead, start, draft_start)
    return found


def drafting_costs(steps: Mapping[int, float], verify: CostCurve) -> tuple[float, float]:
    """Return what one draft pass costs, and what drafting costs besides, both at least 0.

    The line with the least squares through what whole steps cost beyond the verify step.

    Args:
        steps: cost of a whole step by its guesses.
        verify: cost of a verify step by its nodes.
    """
    sizes, over = list(steps), [cost - verify.at(n + 1) for n, cost in steps.items()]
    # one length does not tell the two apart: all of it is the passes
    slope, overhead = linear_regression(sizes, over) if len(sizes) > 1 else (0.0, -1.0)
    if slope < 0:
        return 0.0, max(0.0, fmean(over))
    if overhead < 0:  # a line through the origin
        products = sum(n * each for n, each in zip(sizes, over, strict=True))
        return max(0.0, products / sum(n * n for n in sizes)), 0.0
    return slope, overhead


_NUM_TOKENS, _REPEATS, _PROMPT = 16, 5, 16


def step_costs(base: PreTrainedModel, draft: PreTrainedModel, max_tokens: int) -> StepCosts:
    """Clock briefly, on tokens that mean nothing, what drafting and verifying cost here.

    Args:
        base: base model.
        draft: draft model.
        max_tokens: longest chain.
    """
    costs = clock_drafts(
        base,
        {"draft": lambda n: DraftModelDrafter(draft, FixedLength(n))},
        _prompt(base, draft),
        max_tokens=max_tokens,
        max_new_tokens=_NUM_TOKENS,
        repeats=_REPEATS,
    )
    return costs["draft"].by_nodes(max_tokens)


def verify_costs(base: PreTrainedModel, max_nodes: int) -> list[float]:
    """Clock briefly what verify steps cost, in plain steps: of n nodes at index n, up to the most.

    Args:
        base: base model.
        max_nodes: largest tree, root included.
    """
    lengths = clocked_lengths(max(1, max_nodes - 1))
    costs = _clocked(base, [None, *map(Blank, lengths)])
    curve = CostCurve.through({n + 1: cost for n, cost in zip((0, *lengths), costs, strict=True)})
    return [curve.at(max(1, n)) for n in range(max_nodes + 1)]


def member_costs(
    base: PreTrainedModel,
    names: Sequence[str],
    drafters: Sequence[Drafter],
    sizes: Sequence[int],
    draft: PreTrainedModel | None,
    *,
    max_nodes: int,
) -> list[StepCosts]:
    """Clock briefly what each of several drafters costs: where it copies, the verify step alone.

    Args:
        base: base model.
        names: as in ``decode.drafter``.
        drafters: their drafters.
        sizes: nodes of their largest trees.
        draft: the draft model, if one of them runs it.
        max_nodes: most that is verified in one step, root included.
    """
    verify = verify_costs(base, max_nodes)
    found = []
    for name, drafter, size in zip(names, drafters, sizes, strict=True):
        per_level = 0.0
        if DRAFTERS[name] == "draft":
            assert draft is not None
            per_level = step_costs(base, draft, 2).draft
        elif DRAFTERS[name] == "heads":
            # merging the guesses of heads with others' costs time as well
            whole = median(_clocked(base, [None, HybridDrafter([drafter])])[1])
            # all levels at once: what one of them costs depends on how many there are
            per_level = max(0.0, whole - verify[size]) / max(1, getattr(drafter, "max_depth", 1))
        found.append(StepCosts(per_level, verify))
    return found


def _clocked(base: PreTrainedModel, drafters: Sequence[Drafter | None]) -> list[list[float]]:
    """Return what steps with each drafter cost, over those with the first, round by round."""
    how: dict[str, Any] = {"repeats": _REPEATS, "max_new_tokens": _NUM_TOKENS}
    return ratios(clock_steps(base, drafters, _prompt(base), **how)[0])


def _prompt(*models: PreTrainedModel) -> Tensor:
    """Return tokens that mean nothing, [1, P], for the first of some models."""
    vocab_size = min(input_embedding(model).shape[0] for model in models)
    return torch.arange(_PROMPT, device=input_device(models[0]))[None] % vocab_size
