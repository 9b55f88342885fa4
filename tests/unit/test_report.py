"""Interleaving, rows and the rule of the headline."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.decoding.measure import Decoded, Method, Prompt, Runs, clock
from specheads.decoding.report import (
    baseline_drift,
    format_kinds,
    format_table,
    headline,
    make_row,
)


def method(name: str, log: list[str], length: int = 1) -> Method:
    """Return a method that notes when it was called and gains ``length`` tokens per step."""

    def run(input_ids: Tensor, temperature: float, seed: int) -> Decoded:
        log.append(f"{name}{int(input_ids[0, 0])}@{seed}")
        return Decoded(list(range(13)), [length] * (12 // length), ended=False)

    return Method(name, run, drafter="heads" if length > 1 else None)


def prompts() -> list[Prompt]:
    """Return three prompts of two kinds."""
    return [Prompt(str(i), "ab"[i % 2], torch.tensor([[i]])) for i in range(3)]


def test_methods_take_turns_per_prompt() -> None:
    """Measured one after the other, a slow minute of the machine falls on one method alone."""
    log: list[str] = []
    runs = clock([method("x", log), method("y", log)], prompts(), 0.0, repeats=2, seed=5)
    clocked = log[4:]  # after two warm-up texts per method
    assert clocked[:6] == ["x0@5", "y0@5", "y1@6", "x1@6", "x2@7", "y2@7"]
    assert clocked[6:8] == ["y0@5", "x0@5"], "the order must change from repeat to repeat"
    assert len(clocked) == 12
    assert [len(each) for each in runs["x"].seconds] == [3, 3]
    assert len(runs["y"].decoded) == 3


def rows(runs: dict[str, Runs], log: list[str]) -> list[dict[str, Any]]:
    """Return rows of a plain, a generate and a tree method."""
    methods = [method("plain", log), method("hf_generate", log), method("tree", log, 4)]
    return [
        make_row(each, runs, prompts(), 0.0, None, dtype="float32", device="cpu")
        for each in methods
    ]


def test_rows_hold_ratios_of_medians() -> None:
    """Means over repeats would let one disturbed repeat make or break a speed-up."""
    text = Decoded(list(range(13)), [1] * 12, ended=False)
    tree = Decoded(list(range(13)), [4] * 3, ended=False)
    runs = {
        "plain": Runs([[3.0] * 3, [30.0, 3.0, 3.0], [3.0] * 3], [text] * 3),
        "hf_generate": Runs([[6.0] * 3] * 3, [text] * 3),
        "tree": Runs([[1.0] * 3, [1.0, 9.0, 1.0], [1.0] * 3], [tree] * 3),
    }
    found = rows(runs, [])
    row = found[2]
    assert row["speedup_vs_plain"] == pytest.approx(3)
    assert row["speedup_vs_plain_ci95"] == pytest.approx([3, 3])
    assert row["speedup_vs_hf_generate"] == pytest.approx(6)
    assert row["accept_length"] == 4 and found[0]["accept_length"] == 1
    assert row["seconds"] == [3, 11, 3] and row["new_tokens"] == 39
    assert row["identical"] is None and row["compared"] == 0
    assert row["per_kind"]["a"]["num_prompts"] == 2
    assert baseline_drift([runs]) == 4
    assert "3.00x" in format_table(found) and "4.00 (3.00x)" in format_kinds(found)


@pytest.mark.parametrize("rep8,temperature", [(0.24, 0.0), (0.26, 0.7)])
def test_headline_leaves_greedy_where_it_loops(rep8: float, temperature: float) -> None:
    """Loops are easy to draft: a headline at T=0 would then measure the base's weakness."""
    row: dict[str, Any] = dict.fromkeys(
        (
            "speedup_vs_plain",
            "speedup_vs_plain_ci95",
            "speedup_vs_hf_generate",
            "accept_length",
            "accept_length_ci95",
            "identical",
            "compared",
            "near_ties",
        )
    )
    both = [
        {"method": name, "temperature": t, "rep8": rep8, **row}
        for name in ("plain", "tree")
        for t in (0.0, 0.7)
    ]
    assert headline(both)["temperature"] == temperature


def test_headline_needs_its_rows() -> None:
    """Falling back to the temperature that was measured would quote the wrong figure."""
    rows = [{"method": "plain", "temperature": 0.0, "rep8": 0.5}]
    with pytest.raises(ValueError, match="0.7"):
        headline(rows)
