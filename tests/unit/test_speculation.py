"""The formulas of speculative decoding, and how its costs are clocked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specheads.decoding import costs as speculation
from specheads.decoding.costs import (
    Blank,
    CostCurve,
    DraftCosts,
    best_length,
    clock_drafts,
    clocked_lengths,
    drafting_costs,
    expected_tokens,
    leviathan_speedup,
)
from specheads.measure.clock import Decoded, Runs
from specheads.measure.drafts import Agreement, Alpha, figures, num_proposed, predictions
from specheads.measure.render import advice, format_compared, recommended
from tests.zoo import build

FLAT = CostCurve.through({1: [1.0], 9: [1.0]})


def test_expected_tokens_are_the_published_ones() -> None:
    """Off by one in the exponent, and every draft looks one token better."""
    for alpha, values in {
        0.8: (1.80, 2.44, 2.95, 3.36, 3.69),
        0.6: (1.60, 1.96, 2.18, 2.31, 2.38),
        0.9: (1.90, 2.71, 3.44, 4.10, 4.69),
    }.items():
        for n, value in enumerate(values, start=1):
            assert expected_tokens(alpha, n) == pytest.approx(value, abs=0.006)
            closed = (1 - alpha ** (n + 1)) / (1 - alpha)
            assert expected_tokens(alpha, n) == pytest.approx(closed)
            assert leviathan_speedup(alpha, 0.1, n) == pytest.approx(closed / (0.1 * n + 1))
    assert expected_tokens(1.0, 4) == 5  # where the closed form divides by zero
    assert expected_tokens(0.0, 4) == 1


def test_some_draft_pays_just_where_alpha_exceeds_its_cost() -> None:
    """Leviathan et al., corollary 3.9: then one guess gains (1 + alpha) / (1 + c)."""
    for alpha in (0.1, 0.5, 0.9):
        for cost in (0.05, 0.3, 0.6, 0.95):
            speedups = [leviathan_speedup(alpha, cost, n) for n in range(1, 40)]
            assert (max(speedups) > 1) == (alpha > cost)
            assert max(speedups) >= (1 + alpha) / (1 + cost) or alpha <= cost
            assert speedups[best_length(speedups) - 1] == max(speedups)


def test_costs_come_apart_into_draft_and_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a draft that looks free, as its cost was counted as the verify step's."""
    clocked = {"plain": 2.0, "blank": {1: 2.2, 2: 2.4, 4: 2.8}, "c": 0.5}

    def clock(runs: list[Any], *, repeats: int) -> tuple[list[list[float]], list[list[float]]]:
        seconds = [clocked["plain"], *clocked["blank"].values()]  # type: ignore[attr-defined]
        starts = [6.0] * 4
        for each in (0.5, 1.5):  # seconds of a draft pass of two models, and 0.2 of any drafting
            seconds += [blank + n * each + 0.2 for n, blank in clocked["blank"].items()]  # type: ignore
            starts += [6.0 + 4 * each] * 3
        assert len(runs) == len(seconds)
        return [[value] * repeats for value in seconds], [[value] * repeats for value in starts]

    monkeypatch.setattr(speculation, "clock_texts", clock)
    base = build("llama")
    makes = {"small": Blank, "large": Blank}
    found = clock_drafts(base, makes, torch.tensor([[1, 2]]), max_tokens=4)
    assert found["small"].draft == pytest.approx(0.25)
    assert found["large"].draft == pytest.approx(0.75)
    assert found["small"].verify.at(5) == pytest.approx(1.4)
    assert found["large"].overhead == pytest.approx(0.1)
    assert found["small"].step(4) == pytest.approx(4 * 0.25 + 0.1 + 1.4)
    assert found["small"].step(3) == pytest.approx(3 * 0.25 + 0.1 + 1.3), "in between, a line"
    assert found["small"].step(0) == pytest.approx(1.0), "a step that drafts nothing is a plain one"
    rule = found["small"].by_nodes(4)
    assert [rule.of_chain(n) for n in range(5)] == pytest.approx(
        [found["small"].step(n) for n in range(5)]
    )
    assert (found["small"].start, found["small"].draft_start) == pytest.approx((3.0, 1.0))
    assert clocked_lengths(1) == [1]
    assert clocked_lengths(8) == [1, 2, 4, 8]
    assert clocked_lengths(5) == [1, 2, 4, 5]
    assert drafting_costs({1: 0.9}, FLAT) == (0, 0), "no pass costs less than nothing"
    assert drafting_costs({1: 1.4}, FLAT) == pytest.approx((0.4, 0)), "one length: all of it"
    assert drafting_costs({1: 1.5, 2: 1.4}, FLAT) == pytest.approx((0, 0.45))
    assert drafting_costs({1: 1.1, 4: 1.7}, FLAT)[1] == 0, "no overhead below nothing"


def test_prefills_dilute_a_speedup() -> None:
    """On short texts a prediction without prefills promises what nobody ever sees."""
    costs = DraftCosts(FLAT, 0.25, {}, overhead=0.5, start=3.0, draft_start=1.0)
    # 10 texts: 30 + 100 plain steps against 40 + 40 steps of 1 + 0.5 + 2 * 0.25
    assert costs.speedup(10, 40, 100, 2) == pytest.approx(130 / 120)


def alpha_of(kept: list[float]) -> Alpha:
    """Return the agreement of one text."""
    return Alpha.of([Agreement(kept, kept, [each > 0.5 for each in kept], len(kept))])


def test_predictions_agree_where_the_assumptions_hold() -> None:
    """With free verification and equal rates the replay is the formula: one checks the other."""
    alpha = alpha_of([0.7] * 6000)
    rows = predictions(alpha, DraftCosts(FLAT, 0.1, {}), 5)
    for n, row in enumerate(rows, start=1):
        assert row["num_tokens"] == n
        assert row["leviathan"] == pytest.approx(leviathan_speedup(0.7, 0.1, n), abs=1e-4)
        assert row["formula_with_costs"] == row["leviathan"]
        assert row["predicted"] == pytest.approx(row["leviathan"], rel=2e-3)
        assert row["accept_length"] == pytest.approx(row["formula_accept_length"], rel=2e-3)
    steep = CostCurve.through({1: [1.0], 9: [5.0]})
    costly = predictions(alpha, DraftCosts(steep, 0.1, {}), 5)
    assert costly[4]["leviathan"] == rows[4]["leviathan"]
    assert costly[4]["predicted"] == pytest.approx(rows[4]["accept_length"] / 4.0, rel=2e-3)


def test_figures_count_what_was_verified() -> None:
    """A rate over guesses that the limit forbade looks worse than the draft model is."""
    text = Decoded(list(range(10)), [4, 4, 1], ended=False)  # limit 10: 3 + 3 + 0 guesses
    assert num_proposed(text, 3, 10) == 6
    runs = Runs(seconds=[[1.0, 3.0]], decoded=[text, Decoded([1, 2], [1], ended=True)])
    plain = Runs(seconds=[[2.0, 2.0]], decoded=[text, Decoded([1, 3], [1], ended=True)])
    found = figures(runs, plain, 3, 10)
    assert found["speedup"] == 1 and found["identical"] == 1
    assert found["acceptance_rate"] == pytest.approx(6 / 9, abs=1e-4)
    alone = figures(runs, plain, 3, 10, [0])
    assert (alone["speedup"], alone["acceptance_rate"], alone["num_prompts"]) == (2, 1, 1)


def candidate(name: str, smaller: float, speedup: float, low: float) -> dict[str, Any]:
    """Return what advice reads of a candidate."""
    measured = {"speedup": speedup, "speedup_ci95": [low, speedup + 0.1]}
    return {
        "name": name,
        "times_smaller": smaller,
        "c": 0.2,
        "alpha": 0.6,
        "num_tokens": 3,
        "measured": measured,
    }


def test_none_is_a_recommendation() -> None:
    """Whoever asks which draft model to use is told to use one, though all make it slower."""
    slow = candidate("slow", 7.0, 0.8, 0.7)
    lucky = candidate("lucky", 3.0, 1.4, 0.9)  # faster on the mean, by chance
    sure = candidate("sure", 12.0, 1.2, 1.1)
    assert recommended([slow]) is None
    assert recommended([slow, lucky]) is None
    assert recommended([slow, lucky, sure]) == "sure"
    none = advice([slow, lucky], None, "greedy")
    assert none[0].startswith("recommended: none: the fastest candidate, lucky")
    lines = advice([slow, lucky, sure], "sure", "sampled")
    assert "decode.draft=sure decode.draft_tokens=3 decode.draft_sampling=sampled" in lines[0]
    assert "5 to 10 times smaller" in lines[1] and "12.0 times smaller" in lines[1]
    assert "where its size alone would say 0.08" in lines[1]
    assert (
        lines[2].count("(within the rule)") == 1 and "slow 7.0x smaller, 0.80x (within" in lines[2]
    )
    assert not any("unmeasured" in line for line in lines)
    assert replace(DraftCosts(FLAT, 0.1, {1: 1.1}), draft=0.2).to_json() == {
        "c": 0.2,
        "overhead": 0.0,
        "start": 1.0,
        "draft_start": 0.0,
        "step": {"1": 1.1},
    }


def test_a_cost_that_cannot_be_is_unmeasured() -> None:
    """A draft pass that costs 0.00 plain steps makes every draft model look free."""
    draft, overhead = drafting_costs({1: 1.5, 2: 1.4}, FLAT)
    costs = DraftCosts(FLAT, draft, {1: 1.5, 2: 1.4}, overhead)
    assert costs.to_json()["c"] is None
    rows = predictions(alpha_of([0.7] * 60), costs, 2)
    assert [row["leviathan"] for row in rows] == [None, None] and rows[0]["predicted"] > 0
    each = {
        **candidate("busy", 7.0, 1.4, 1.2),
        "c": None,
        "predicted": rows[0],
        "per_kind": {},
    }
    each["measured"] |= {"accept_length": 1.7, "acceptance_rate": 0.7}
    lines = advice([each, candidate("quiet", 8.0, 1.1, 1.0)], "busy", "greedy")
    assert "a pass of it costs an unknown number of plain steps" in lines[1]
    assert lines[2].startswith("c of busy is unmeasured: longer drafts were clocked as no dearer")
    result = {
        "settings": {"temperature": 0, "sampling": "greedy", "dtype": "float32", "threads": 1},
        "candidates": [each],
        "verify_cost": {"1": 1.0},
        "plain": {"rep8": 0.0},
        "advice": lines,
        "warnings": ["The machine was busy"],
    }
    shown = format_compared(result).splitlines()
    assert shown[1].split()[2:5] == ["?", "3", "?"] and len(shown[0]) < len(shown[1]) + 10
    assert shown[-1] == "The machine was busy"
