"""Figures that describe decoded text and its speed; pure functions over lists of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rep8(tokens: Sequence[int], n: int = 8) -> float:
    """Return the share of ``n``-grams that have occurred before; loops are easy to draft."""
    total = len(tokens) - n + 1
    if total <= 0:
        return 0.0
    return 1 - len({tuple(tokens[i : i + n]) for i in range(total)}) / total


def mean_accept_length(accept_lengths: Sequence[Sequence[int]]) -> float:
    """Return tokens per verify step over all prompts; every step weighs the same.

    Args:
        accept_lengths: per prompt, the tokens gained by each of its verify steps.
    """
    steps = sum(len(lengths) for lengths in accept_lengths)
    return sum(map(sum, accept_lengths)) / steps if steps else 0.0


def ratio_ci95(
    numerators: Sequence[Sequence[float]],
    denominators: Sequence[Sequence[float]],
    *,
    seed: int = 0,
    samples: int = 2000,
) -> tuple[float, float]:
    """Bootstrap over prompts the 95% interval of a product of ratios of sums.

    Prompts are drawn with replacement, the same draw for every sum, because a prompt that is easy
    for one method is often easy for the other. One pair gives an accept length (tokens over
    steps); two pairs give a speed-up (tokens over seconds, times seconds over tokens).

    Args:
        numerators: lists of one value per prompt, [R][N].
        denominators: as ``numerators``.
        seed: of the draws.
        samples: number of draws.

    Raises:
        ValueError: if the lists differ in length.
    """
    lengths = {len(values) for values in (*numerators, *denominators)}
    if len(lengths) != 1:
        raise ValueError(f"numerators and denominators have unequal lengths {sorted(lengths)}")
    (num_prompts,) = lengths
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(num_prompts, (samples, num_prompts), generator=generator)
    ratio = torch.ones(samples, dtype=torch.float64)
    for top, bottom in zip(numerators, denominators, strict=True):
        ratio *= torch.tensor(top, dtype=torch.float64)[draws].sum(1)
        ratio /= torch.tensor(bottom, dtype=torch.float64)[draws].sum(1).clamp_min(1e-12)
    low, high = ratio.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


Work = tuple[Sequence[float], Sequence[float]]  # tokens and seconds, of each batch or prompt


def speed(work: Work) -> float:
    """Return tokens per second over all of ``work``."""
    return sum(work[0]) / sum(work[1])


def speedup(work: Work, other: Work) -> tuple[float, list[float]]:
    """Return how many times as fast ``work`` is as ``other``, with its 95% interval.

    Both are of the same prompts in turn, so the interval is a bootstrap over prompts of the ratio
    itself, which is narrower than what two speeds with an interval each would let one say.
    """
    bounds = ratio_ci95([work[0], other[1]], [work[1], other[0]])
    return speed(work) / speed(other), list(bounds)


def accept_length_ci95(accept_lengths: Sequence[Sequence[int]]) -> list[float]:
    """Return the 95% interval, over prompts, of :func:`mean_accept_length`."""
    return list(ratio_ci95([list(map(sum, accept_lengths))], [list(map(len, accept_lengths))]))


def rounded(values: Sequence[float]) -> list[float]:
    """Round to the four digits of bench.json."""
    return [round(value, 4) for value in values]


def crossover(
    batch_sizes: Sequence[int], speedups: Sequence[float]
) -> tuple[int | None, float | None]:
    """Return the smallest batch at which a method is no faster than plain decoding.

    Args:
        batch_sizes: measured, ascending.
        speedups: over plain decoding at the same batch size.

    Returns:
        The first measured size whose speed-up is at most 1, None if there is none; and where the
        line from the size before it (over the logarithm of the size) meets 1, None if no size is
        before it.
    """
    before: tuple[int, float] | None = None
    for size, speedup in zip(batch_sizes, speedups, strict=True):
        if speedup <= 1:
            if before is None:
                return size, None
            share = (before[1] - 1) / (before[1] - speedup)
            return size, before[0] * (size / before[0]) ** share
        before = size, speedup
    return None, None


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index where the two differ (one of them may have ended), else None."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
