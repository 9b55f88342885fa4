"""Choosing a tree from counted hits and clocked steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.attention.tree import Tree
from specheads.measure import calibrate as module
from specheads.measure.calibrate import Calibration, Kind, Search, calibrate
from specheads.measure.clock import Budget
from specheads.measure.hits import Gains, Hits, Texts, static_gains
from tests.conftest import Medusa
from tests.conftest import three_prompts as prompts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], list[int]]:
    """Return a function that fixes the cost of a tree by its nodes; returns the sizes clocked."""

    def install(cost: Callable[[int], float]) -> list[int]:
        clocked: list[int] = []

        def fake_clock(
            base: Any, drafters: Sequence[Any], input_ids: Tensor, *, repeats: int, **_: Any
        ) -> Any:
            sizes = [each.num_nodes for each in drafters[1:]]
            clocked.extend(sizes)
            costs = [1.0, *map(cost, sizes)]
            return [[0.002 * len(input_ids) * each] * repeats for each in costs], []

        monkeypatch.setattr(module, "decode", lambda *_, **__: None)  # it takes no time
        monkeypatch.setattr(module, "clock_steps", fake_clock)
        return clocked

    return install


def find(medusa: Medusa, **settings: Any) -> Calibration:
    """Calibrate on the prompts."""
    base, heads, output = medusa
    texts = Texts(prompts(), max_new_tokens=settings.pop("max_new_tokens", 40))
    return calibrate(
        base, heads, output, texts, Search(**{"max_nodes": 20, "repeats": 2, **settings})
    )


@pytest.mark.parametrize(("slope", "expected"), [(0.0, 20), (1.0, 2)])
def test_gain_is_weighed_against_time(
    medusa: Medusa, clock: Callable[..., list[int]], slope: float, expected: int
) -> None:
    """The longest accept length alone always buys the largest tree, however slow."""
    clocked = clock(lambda nodes: 1 + slope * nodes)
    found = find(medusa)
    lengths = [size["accept_length"] for size in found.measured_on["sizes"]]
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0] >= 1
    if slope:
        assert found.tree.num_nodes == expected
    else:  # the smallest of those that gain most
        assert found.expected_accept_length == max(lengths)
    assert set(clocked) >= {2, 4, 6, 8, 12, 16, 20}
    assert found.measured_on["plain_step_ms"] == 2


def test_little_time_takes_fewer_prompts_and_sizes(
    medusa: Medusa, clock: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven minutes of measuring after ten of training; and prompts that were not decoded."""
    monkeypatch.setattr("specheads.measure.hits.ROWS", 1)
    monkeypatch.setattr(module, "SIZES", (2, 4, 6, 8))
    clocked = clock(lambda nodes: 1 + 0.1 * nodes)
    same = prompts()
    monkeypatch.setattr("tests.measure.test_calibrate.prompts", lambda: same)
    whole, all_sizes = find(medusa), [*clocked]
    enough = find(medusa, budget=Budget(1e9))
    assert enough.tree == whole.tree and enough.measured_on == whole.measured_on
    clocked.clear()
    ticks = itertools.count()
    short = find(medusa, budget=Budget(2, lambda: float(next(ticks))))
    assert whole.measured_on["num_prompts"] == len(same)
    assert short.measured_on["num_prompts"] == 1
    assert set(clocked) < set(all_sizes) and 4 not in clocked
    assert short.tree.num_nodes > 1


@pytest.mark.parametrize("knee", [5, 10, 19])
def test_sizes_between_the_clocked_ones_are_found_and_clocked(
    medusa: Medusa,
    clock: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    knee: int,
) -> None:
    """The best size would be missed, or bought at a price that was never measured."""
    gains = Gains(torch.arange(2, 21)[None] + 10, torch.full((1, 19), 10))  # + 0.1 per node
    monkeypatch.setattr("specheads.measure.hits.static_gains", lambda hits, most: gains)
    clocked = clock(lambda nodes: 1.0 + 0.5 * max(nodes - knee, 0))
    found = find(medusa)
    assert found.tree.num_nodes == knee and knee in clocked
    assert found.expected_accept_length == pytest.approx(1 + knee / 10)


def test_slow_trees_are_advised_against(medusa: Medusa, clock: Callable[..., list[int]]) -> None:
    """Users would decode more slowly than without heads, and believe the opposite."""
    clock(lambda nodes: 9.0)
    found = find(medusa)
    assert found.measured_on["speedup"] < 1
    assert found.measured_on["speculate"] is False
    clock(lambda nodes: 1.0)
    assert find(medusa).measured_on["speculate"]


def test_heads_that_never_hit_give_no_tree(medusa: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    """A division by no steps, or a tree of noise."""
    monkeypatch.setattr("specheads.measure.hits.grow_nodes", lambda hits, most: [])
    found = find(medusa)
    assert found.tree == Tree.chain(0) and not found.measured_on["speculate"]
    assert found.expected_accept_length == 1


def test_the_size_asked_for_is_given(medusa: Medusa) -> None:
    """A pinned tree size must not be replaced by the fastest one. Clocks really."""
    found = find(medusa, num_nodes=7, max_new_tokens=24)
    assert found.tree.num_nodes == 7 == found.measured_on["dynamic"]["num_nodes"]
    assert [size["num_nodes"] for size in found.measured_on["sizes"]] == [7]
    assert found.expected_accept_length == found.measured_on["sizes"][0]["accept_length"]
    assert len(found.measured_on["acceptance"]) == 6
    assert found.measured_on["plain_step_ms"] > 0
    low, high = found.measured_on["accept_length_ci95"]
    assert low <= found.expected_accept_length <= high


def test_batches_and_dynamic_trees_are_clocked(
    medusa: Medusa, clock: Callable[..., list[int]]
) -> None:
    """A tree chosen for one row is too large for many, where every node counts B times."""
    clocked = clock(lambda nodes: 1 + 0.05 * nodes)
    found = find(medusa, batch_size=4)
    assert found.measured_on["plain_step_ms"] == 8 and found.measured_on["batch_size"] == 4
    assert clocked.count(8) == 2, "static and dynamic"
    dynamic = found.measured_on["dynamic"]
    assert len(dynamic["temperatures"]) == 3
    assert {"num_nodes", "accept_length", "speedup", "speculate", "sizes"} <= dynamic.keys()


def test_the_fastest_of_all_sizes() -> None:
    """An index off by one names the neighbour of the fastest."""

    def kind(*tokens: int) -> Kind:
        gains = Gains(torch.tensor([tokens]), torch.full((1, len(tokens)), 10))
        return Kind(gains, lambda size: None, {2: [1.0], 4: [1.0], 6: [2.0]})  # type: ignore[arg-type,return-value]

    assert kind(15, 16, 17, 18, 19).fastest()[0] == 4
    assert kind(15, 15, 15).fastest()[0] == 2, "of equals the smallest"
    assert kind(15, 16, 17, 40).fastest()[0] == 5
    assert kind(15, 16, 17, 40).worth_clocking() == [4, 5]


def test_expectations_come_from_prompts_that_were_not_grown_from() -> None:
    """A tree fits the chance of the texts it was grown from; the larger, the better it looks."""
    generator = torch.Generator().manual_seed(0)
    nothing = torch.zeros(0)
    hits = [
        [Hits(torch.randint(0, 10, (6, 1), generator=generator), nothing, nothing, True)]
        for _ in range(10)
    ]
    lengths = static_gains(hits, 11).lengths()
    alone = static_gains([[each[0] for each in hits]], 11).lengths()  # one prompt: its own texts
    assert lengths[2] < 0.95 * alone[2]
