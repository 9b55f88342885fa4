"""The cost curve: clocked fairly, never falling."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.decoding import costs as module
from specheads.decoding.costs import CostCurve, clock_steps, never_falling, ratios


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
@settings(max_examples=60)
def test_smoothing_is_the_closest_line_that_never_falls(values: list[int]) -> None:
    """A smoothing that only cuts off peaks, or only fills dips, shifts the whole curve."""
    smooth = never_falling([[value] for value in values])
    assert smooth == sorted(smooth)

    def distance(line: tuple[float, ...] | list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(line, values, strict=True))

    best = min(
        distance(line)
        for line in itertools.combinations_with_replacement([n / 2 for n in range(9)], len(values))
    )
    assert distance(smooth) == pytest.approx(best)


def test_one_wild_value_does_not_move_its_neighbours() -> None:
    """A disturbed second at one size would make all larger trees look slow."""
    groups = [[1.0] * 5, [1.1] * 5, [1.2, 1.2, 1.2, 9.0, 9.0], [1.3] * 5, [1.4] * 5]
    assert never_falling(groups) == [1.0, 1.1, 1.2, 1.3, 1.4]
    groups[2] = [9.0] * 5  # even one that lasted: the others outvote it
    assert never_falling(groups)[-1] < 2


def test_costs_between_and_beyond() -> None:
    """A size that was not clocked must cost what its neighbours say."""
    curve = CostCurve.through({4: [1.0, 9.0, 1.0], 8: [2.0], 12: [1.8]})
    assert curve.clocked == (1.0, 2.0, 1.8) and curve.smoothed == (1.0, 1.9, 1.9)
    assert [curve.at(n) for n in (2, 4, 8, 12, 99)] == [1.0, 1.0, 1.9, 1.9, 1.9]
    assert curve.at(5) == pytest.approx(1.225)


Run = Callable[[Callable[[], None]], None]  # decodes; calls its argument after every step


@pytest.fixture(autouse=True)
def decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is given for a drafter be the decoder that is clocked."""

    def decode(base: object, run: Run, input_ids: object, *, on_tokens: Any, **_: Any) -> None:
        run(lambda: on_tokens(0, []))
        on_tokens(1, [])  # another row of the batch is no step of its own

    monkeypatch.setattr(module, "decode", decode)


def clocked(*runs: Run, repeats: int) -> tuple[list[list[float]], list[list[float]]]:
    """Clock decoders."""
    anything: Any = runs
    return clock_steps(anything, anything, anything, repeats=repeats, max_new_tokens=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock of one hand that only moves when it is told to."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def run_of(clock: list[float], prefill: float, steps: Callable[[int], list[float]]) -> Run:
    """Return a decoder whose steps take given times; ``steps`` gets how often it has run."""
    calls = itertools.count()

    def run(after_step: Callable[[], None]) -> None:
        clock[0] += prefill
        after_step()
        for seconds in steps(next(calls)):
            clock[0] += seconds
            after_step()

    return run


def test_steps_leave_out_prefill_and_spikes(clock: list[float]) -> None:
    """A long prompt's prefill, spread over few steps, would favour trees with many steps."""
    run = run_of(clock, 5.0, lambda _: [0.25, 0.25, 7.0, 0.25])
    assert clocked(run, repeats=3)[0] == [[0.25] * 3]
    busy = run_of(clock, 5.0, lambda _: [7.0, 0.25, 7.0, 7.0, 0.25, 7.0])
    assert clocked(busy, repeats=1)[0] == [[0.25]]
    one_step = run_of(clock, 5.0, lambda _: [0.25])
    assert clocked(one_step, repeats=1)[0] == [[0.25]]
    only_prefill = run_of(clock, 5.0, lambda _: [])
    assert clocked(only_prefill, repeats=1)[0] == [[5.0]]


def test_a_machine_that_slows_down_slows_all_alike(clock: list[float]) -> None:
    """Decoders clocked one after the other would be compared across different hours."""
    plain = run_of(clock, 1.0, lambda n: [2.0**n] * 3)
    tree = run_of(clock, 1.0, lambda n: [1.5 * 2.0**n] * 3)
    seconds, _ = clocked(plain, tree, repeats=4)
    assert seconds[0] == [2.0, 4.0, 8.0, 16.0]  # the first run only warms up
    assert ratios(seconds) == [[1.0] * 4, [1.5] * 4]


def test_prefills_are_told_from_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that reads the prompt in its first step would seem to cost that at every step."""
    # the warm-up; then a prefill of 5, a first step of 3, steps of 1
    now = iter([0.0, 0.0, 5.0, 8.0, 9.0, 10.0, 11.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    calls = iter([0, 5])

    def run(after_step: Callable[[], None]) -> None:
        for _ in range(next(calls)):
            after_step()

    assert clocked(run, repeats=1) == ([[1.0]], [[7.0]])


def test_turns_start_with_another_each_time() -> None:
    """One decoder always behind the same other would run on the cache that this one leaves."""
    order: list[int] = []

    def run_as(number: int) -> Callable[[Callable[[], None]], None]:
        return lambda after_step: order.append(number)

    clocked(run_as(0), run_as(1), run_as(2), repeats=3)
    assert order[3:] == [0, 1, 2, 1, 2, 0, 2, 0, 1]
