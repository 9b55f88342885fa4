"""Clocking methods against each other."""

from __future__ import annotations

import pytest
import torch

from specheads.measure.clock import Batch, Decoded, Method, Prompt, clock


@pytest.mark.parametrize("compiled", [False, True])
def test_compilation_is_not_clocked(compiled: bool) -> None:
    """Prevents a speed-up that is the time a compiler took for a length that came for the first."""
    calls: list[int] = []

    def decode(batch: Batch, temperature: float, seed: int) -> list[Decoded]:
        calls.append(batch.first)
        return [Decoded([1, 2], [1], False)]

    methods = [Method("plain", decode, compiled=compiled), Method("tree", decode)]
    prompts = [Prompt(str(i), "kind", torch.tensor([[i]])) for i in range(4)]
    runs = clock(methods, prompts, 0.0, repeats=1)
    clocked = len(methods) * len(prompts)
    before = calls[: len(calls) - clocked]
    assert set(before) == (set(range(4)) if compiled else {0, 3})
    assert [len(runs[name].seconds[0]) for name in ("plain", "tree")] == [4, 4]
