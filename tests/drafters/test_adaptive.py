"""Adaptive draft length: the length that pays, from rates that a censored record does not bend."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.drafters.length import PRIOR, AdaptiveLength, StepCosts, TextRates, best_length

RATES = st.lists(st.floats(0, 1), min_size=1, max_size=6)
NEVER_FADING = 1e12


def tokens_per_step(rates: list[float], length: int) -> float:
    """Return the expected tokens of a step: every outcome, times what it gains."""
    expected = 0.0
    for right in range(length + 1):
        probability = math.prod(rates[:right])
        if right < length:
            probability *= 1 - rates[right]
        expected += probability * (right + 1)
    return expected


@given(RATES, st.floats(0, 1), st.lists(st.floats(0.5, 3), min_size=7, max_size=7))
@settings(max_examples=100)
def test_no_length_is_faster(rates: list[float], draft: float, verify: list[float]) -> None:
    """A formula that is off by one node or one pass picks a slower length on every step."""
    costs = StepCosts(draft, [0.0, *verify])
    speeds = [tokens_per_step(rates, n) / (n * draft + verify[n]) for n in range(len(rates) + 1)]
    length, speed = best_length(rates, costs)
    assert speed == pytest.approx(max(speeds))
    assert speeds[length] == pytest.approx(max(speeds))


@pytest.mark.parametrize("alpha,cost", [(0.3, 0.05), (0.8, 0.1), (0.9, 0.3)])
def test_flat_costs_give_the_published_formula(alpha: float, cost: float) -> None:
    """Speed-ups that cannot be compared with anybody's (arXiv:2211.17192, theorem 3.8)."""
    costs = StepCosts(cost, [0.0] + [1.0] * 12)
    published = [(1 - alpha ** (n + 1)) / ((1 - alpha) * (n * cost + 1)) for n in range(11)]
    length, speed = best_length([alpha] * 10, costs)
    assert length == published.index(max(published))
    assert speed == pytest.approx(max(published))


@given(RATES, st.lists(st.integers(0, 6), min_size=1, max_size=8))
@settings(max_examples=60)
def test_short_drafts_and_refusals_bend_no_rate(rates: list[float], lengths: list[int]) -> None:
    """Counting what was not tried as wrong makes deep guesses look bad, and drafts ever shorter.

    All outcomes of each step, weighted: the hits over the trials are then the rates themselves.
    """
    depth = len(rates)
    hits, trials = [0.0] * depth, [0.0] * depth
    for length in (min(length, depth) for length in lengths):
        for right in range(length + 1):
            weight = math.prod(rates[:right])
            if right < length:
                weight *= 1 - rates[right]
            rule = AdaptiveLength(StepCosts(0, [0] + [1] * (depth + 1)), depth)
            seen = rule.observe(rule.start(), length, right)
            for d in range(depth):
                hits[d] += weight * seen.hits.get(d, 0)
                trials[d] += weight * seen.trials.get(d, 0)
    for d in range(depth):
        assert hits[d] == pytest.approx(rates[d] * trials[d], abs=1e-9)


def test_each_depth_is_learned() -> None:
    """One rate for all depths drafts on where the second guess is always wrong."""
    seen = TextRates()
    for _ in range(50):
        seen = seen.after({0: True, 1: False}, NEVER_FADING)
    first, second, third, fourth = seen.estimate([0.7] * 4, weight=2.0)
    assert first > 0.95 and second < 0.05
    # what was never reached is what was foreseen, scaled by how the text does on the whole
    assert third == fourth == pytest.approx(0.7 * (50 + 2) / (100 * 0.7 + 2))


def test_the_prior_rules_until_something_is_seen() -> None:
    """A text would start with drafts as if nothing, or everything, were ever accepted."""
    prior = [0.9, 0.5, 0.2]
    assert TextRates().estimate(prior, weight=4.0) == prior
    seen = TextRates().after(dict.fromkeys(range(3), True), NEVER_FADING)
    certain = seen.estimate([0.9] * 3, weight=0.1)
    assert max(certain) <= 1


def test_drafting_follows_the_text() -> None:
    """A rule that never moves, or is stuck: where nothing is drafted, nothing is seen."""
    length = AdaptiveLength(StepCosts(0.3, [0, 1, 1.1, 1.2, 1.3, 1.4, 1.5]), 5)
    state = length.start()
    assert length.limit(state) == 5
    for _ in range(30):
        state = length.observe(state, length.limit(state), length.limit(state))
    assert length.limit(state) == 5
    for _ in range(30):
        state = length.observe(state, length.limit(state), 0)
    assert length.limit(state) == 0
    tried = 0
    for _ in range(100):
        tried += length.limit(state) > 0
        state = length.observe(state, length.limit(state), 0)
    assert 1 <= tried <= 50


def test_a_state_is_a_value() -> None:
    """Rows that share their first state would learn from each other."""
    length = AdaptiveLength(StepCosts(0.1, [0] + [1] * 6), 4)
    state = length.start()
    length.observe(state, 4, 0)
    assert state == length.start()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
@settings(max_examples=60)
def test_a_token_is_drafted_where_it_is_worth_its_cost(probs: list[float]) -> None:
    """A bar at the wrong token, or one that forgets the tokens before."""
    costs = StepCosts(0.2, [0, 1, 1.1, 1.2, 1.3, 1.5, 2, 3])
    length = AdaptiveLength(costs, 6)
    right = 1.0
    for prob in probs:
        right *= prob
    num = len(probs)
    more_tokens = right * PRIOR
    more_cost = costs.of_chain(num + 1) - costs.of_chain(num)
    speed = best_length([PRIOR] * 6, costs)[1]
    if more_tokens != pytest.approx(speed * more_cost):
        assert length.goes_on(probs) == (more_tokens > speed * more_cost)


def test_wrong_settings_are_refused() -> None:
    """Costs read beyond what was measured, or rates that are none, give lengths all the same."""
    costs = StepCosts(0.1, [0, 1, 1.1])
    with pytest.raises(ValueError, match="measured up to 3 nodes for max_tokens 2, got 2"):
        AdaptiveLength(costs, 2)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        AdaptiveLength(costs, 0)
    with pytest.raises(ValueError, match="costs must be finite and at least 0"):
        StepCosts(-0.1, [0, 1])
    with pytest.raises(ValueError, match="cost of 1 node"):
        StepCosts(0.1, [1])


def test_with_confidence_the_limit_only_says_whether_to_draft() -> None:
    """Rates of tokens that were sure enough, read as those of all, cut confident drafts short."""
    length = AdaptiveLength(StepCosts(0.3, [0] + [1] * 7), 5)
    state = length.start()
    assert 0 < best_length(length.prior, length.costs)[0] < 5 == length.limit(state)
    for _ in range(30):
        state = length.observe(state, 3, 0)
    assert length.limit(state) == 0


def test_an_unmeasured_draft_model_is_taken_at_its_word() -> None:
    """A bar that is too low drafts on where the draft model itself has doubts."""
    length = AdaptiveLength(StepCosts(0.3, [0] + [1] * 7), 5)
    bar = best_length(length.prior, length.costs)[1] * 0.3 / PRIOR
    assert length.goes_on([bar + 0.02]) and not length.goes_on([bar - 0.02])
