"""What the memory bench of multi-token prediction measures."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Return scripts/bench_mtp_memory.py as a module."""
    return load_script("bench_mtp_memory")


@pytest.mark.parametrize("variant", ["parallel", "causal", "sequential"])
def test_eight_heads_take_hardly_more_memory_than_one(bench: ModuleType, variant: str) -> None:
    """Logits or activations kept per head grow the peak with the heads; nothing else notices."""
    cases = [bench.Case("ours", variant, n, 8000, 64, 256, 64, 1) for n in (1, 8)]
    rows = bench.take_peaks(cases, bench.allocator_peak)
    assert rows[1]["growth"] <= 0.15
    # what is subtracted is what the heads own, and no more
    assert 0 == rows[0]["owned_bytes"] < rows[1]["owned_bytes"] < 0.3 * rows[1]["allocator_peak"]


@pytest.mark.parametrize("variant", ["parallel", "causal", "sequential"])
def test_both_sides_compute_the_same_loss(bench: ModuleType, variant: str) -> None:
    """Compared with a loop that computes something else, any figure can be had."""
    for num_heads in (1, 3):
        losses = [
            bench.Setup(bench.Case(side, variant, num_heads, 300, 64, 32, 0, 1)).step()
            for side in bench.SIDES
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
