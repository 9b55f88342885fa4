"""Figures about decoded text."""

from statistics import median

import pytest

from specheads.measure.identity import first_difference
from specheads.measure.rows import mean_accept_length, ratio_ci95, rep8


def test_rep8_counts_repeats_and_nothing_else() -> None:
    """Counting distinct tokens instead of 8-grams would call ordinary code a loop."""
    assert rep8(list(range(100))) == 0
    assert rep8([1, 2] * 4) == 0  # one 8-gram has not been seen before
    assert rep8([1, 2] * 50) == pytest.approx(1 - 2 / 93)
    assert rep8(list(range(50)) * 2) == pytest.approx(1 - 50 / 93)
    assert rep8([1, 1, 1]) == 0  # too short to repeat


def test_mean_accept_length_weighs_steps() -> None:
    """A mean of per-prompt means lets one short lucky prompt stand for many steps."""
    assert mean_accept_length([[5], [1, 1, 1]]) == 2
    assert mean_accept_length([[], []]) == 0


def test_median() -> None:
    """Taking the upper middle would report the slower of two repeats."""
    assert median([3.0, 1.0, 2.0]) == 2
    assert median([1.0, 2.0]) == 1.5


def test_interval_pairs_the_prompts() -> None:
    """Independent draws for numerator and denominator would widen a constant ratio."""
    tokens = [float(n) for n in range(1, 41)]
    low, high = ratio_ci95([[2 * n for n in tokens]], [tokens])
    assert low == pytest.approx(2) and high == pytest.approx(2)


def test_interval_covers_and_narrows() -> None:
    """An interval over the wrong axis neither contains the ratio nor shrinks with more prompts."""
    top = [1.0 + n % 4 for n in range(400)]
    ones = [1.0] * 400
    low, high = ratio_ci95([top], [ones])
    assert low < 2.5 < high
    wide_low, wide_high = ratio_ci95([top[:16]], [ones[:16]])
    assert wide_high - wide_low > 2 * (high - low)
    assert high - low == pytest.approx(2 * 1.96 * 1.118 / 20, rel=0.2)


def test_interval_of_a_speedup_multiplies_ratios() -> None:
    """A flipped fraction reports a slow-down as a speed-up."""
    tokens, fast, slow = [10.0] * 8, [1.0] * 8, [3.0] * 8
    assert ratio_ci95([tokens, slow], [fast, tokens]) == pytest.approx((3, 3))


def test_interval_refuses_unequal_lists() -> None:
    """Zipped lists of unequal length would drop prompts in silence."""
    with pytest.raises(ValueError, match="length 2 .*got 3"):
        ratio_ci95([[1.0, 2.0]], [[1.0, 2.0, 3.0]])


@pytest.mark.parametrize(
    "left,right,expected",
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None)],
)
def test_first_difference(left: list[int], right: list[int], expected: int | None) -> None:
    """Zipping alone calls a text that stopped early identical to the longer one."""
    assert first_difference(left, right) == expected
