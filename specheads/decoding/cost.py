"""What a verify step costs on this machine, by number of nodes, in units of a plain step."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.loop import decode
from specheads.decoding.plain import plain_decode
from specheads.drafters.contract import Drafter
from specheads.sampling import Sampler

Run = Callable[[Callable[[], None]], object]  # decodes; calls its argument after every step


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
        """Build the curve from the costs of some sizes, each clocked some times.

        Raises:
            ValueError: if there are none.
        """
        if not clocked:
            raise ValueError("clocked must hold at least 1 size, got 0")
        sizes = tuple(sorted(clocked))
        costs = [clocked[size] for size in sizes]
        return CostCurve(sizes, tuple(map(median, costs)), tuple(never_falling(costs)))

    def at(self, num_nodes: int) -> float:
        """Return the cost of any size: linear in between, and like the nearest size outside."""
        right = bisect_left(self.sizes, num_nodes)
        if right == len(self.sizes):
            return self.smoothed[-1]
        if right == 0 or self.sizes[right] == num_nodes:
            return self.smoothed[right]
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (num_nodes - low) / (high - low)
        return (1 - share) * self.smoothed[right - 1] + share * self.smoothed[right]


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


def clock_steps(runs: Sequence[Run], *, repeats: int) -> list[list[float]]:
    """Clock decoders against each other, in turn, so that a slow minute hits all of them.

    Returns:
        Seconds per step, [runs][repeats], see :func:`clock_texts`.
    """
    return clock_texts(runs, repeats=repeats)[0]


def clock_texts(
    runs: Sequence[Run], *, repeats: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Clock steps, and what comes before them: the prefill, and a drafter's reading of the prompt.

    A step's figure of one repeat is the lower quartile of one text's steps: without the prefill,
    and without the moments in which the machine did something else, which only ever add time.

    Args:
        runs: decode a text and call back after every step.
        repeats: number of rounds.

    Returns:
        Seconds per step and seconds before, both [runs][repeats].
    """
    for run in runs:
        run(lambda: None)
    seconds = [[0.0] * repeats for _ in runs]
    starts = [[0.0] * repeats for _ in runs]
    for repeat in range(repeats):
        first = repeat % len(runs)  # none always runs on a warmer cache than the others
        for index in (*range(first, len(runs)), *range(first)):
            times = [time.perf_counter()]
            runs[index](lambda times=times: times.append(time.perf_counter()))
            # the first call ends the prefill
            steps = [after - before for before, after in itertools.pairwise(times[1:])]
            ordered = sorted(steps or [times[-1] - times[0]])
            seconds[index][repeat] = step = ordered[len(ordered) // 4]
            # drafters read the prompt in the first step
            starts[index][repeat] = max(0.0, times[:3][-1] - times[0] - step)
    return seconds, starts


def ratios(seconds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Divide all by the first, repeat by repeat: what drifts slowly cancels out."""
    return [[own / first for own, first in zip(each, seconds[0], strict=True)] for each in seconds]


def runner(
    base: PreTrainedModel,
    drafter: Drafter | None,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
) -> Run:
    """Return a function for :func:`clock_steps` that decodes to the limit; plainly without drafter.

    Args:
        base: base model.
        drafter: proposes.
        input_ids: [B, P]; equal rows take equally many steps, so that the batch stays whole.
        max_new_tokens: limit.
        temperature: of the sampling, whose noise costs time at every node.
    """
    sampler = Sampler(temperature=temperature)

    def run(after_step: Callable[[], None]) -> None:
        def tick(row: int, tokens: list[int]) -> None:
            if row == 0:
                after_step()

        if drafter is None:
            plain_decode(
                base, input_ids, max_new_tokens=max_new_tokens, sampler=sampler, on_tokens=tick
            )
        else:
            decode(
                base,
                drafter,
                input_ids,
                max_new_tokens=max_new_tokens,
                sampler=sampler,
                on_tokens=tick,
            )

    return run
