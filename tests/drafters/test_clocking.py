"""Costs that are clocked where the settings leave them open."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specheads.decoding import costs as clocking
from specheads.drafters.length import StepCosts
from specheads.drafters.merge import HybridDrafter
from tests.zoo import build


def test_each_member_costs_what_it_adds_to_the_verify_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents heads, or a draft model, that are asked at every step as if they were free."""
    clocked: list[Any] = []

    def clock(base: Any, drafters: list[Any], prompt: Any, **options: Any) -> Any:
        clocked.extend(drafters)
        costs = [1.0, 2.5] if len(drafters) == 2 else [1.0 + 0.1 * i for i in range(len(drafters))]
        return [[cost] for cost in costs], []

    monkeypatch.setattr(clocking, "clock_steps", clock)
    monkeypatch.setattr(
        clocking, "step_costs", lambda base, draft, n: StepCosts(0.25, [1.0] * (n + 2))
    )
    base = build("llama")
    heads: Any = SimpleNamespace(max_depth=4, deterministic=True, taps=())
    drafters: list[Any] = [None, heads, None]
    names, sizes = ["suffix", "heads", "draft"], [3, 9, 5]
    suffix, by_heads, draft = clocking.member_costs(
        base, names, drafters, sizes, base, max_nodes=max(sizes)
    )
    assert suffix.draft == 0 and draft.draft == 0.25
    assert by_heads.draft == pytest.approx((2.5 - by_heads.verify[9]) / 4)
    assert suffix.verify == by_heads.verify == draft.verify and len(suffix.verify) == 10
    assert isinstance(clocked[-1], HybridDrafter), "merging their guesses costs time as well"
    assert clocked[-1].members == (heads,)


def test_what_is_clocked_is_real() -> None:
    """Prevents costs that no clock has seen."""
    costs = clocking.verify_costs(build("llama"), 5)
    assert len(costs) == 6 and all(cost > 0 for cost in costs)
    assert costs == sorted(costs), "a larger step never costs less"
