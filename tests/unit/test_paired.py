"""Two methods beside each other: ratios over the same prompts."""

from __future__ import annotations

from specheads.measure.clock import Decoded, Runs
from specheads.measure.rows import format_pairs, pairs, rivals, versus


def runs_of(seconds: list[list[float]], lengths: list[int]) -> Runs:
    """Return runs of prompts that got so many tokens."""
    return Runs(seconds, [Decoded([1] * n, [n - 1], False) for n in lengths])


def test_the_ratio_is_of_tokens_per_second() -> None:
    """Prevents a faster method that is one because its sampled texts were shorter."""
    runs = {
        "draft": runs_of([[1.0, 2.0], [9.0, 2.0], [1.0, 2.0]], [10, 20]),
        "hf_assisted": runs_of([[2.0, 4.0]], [5, 10]),
    }
    found = versus(runs, "draft", "hf_assisted")
    assert found["speedup"] == (30 / 3) / (15 / 6) == 4.0
    assert found["ci95"] == [4.0, 4.0], "the prompts are alike"


def test_merged_drafters_meet_their_members_under_the_names_they_have_alone() -> None:
    """Prevents a hybrid that is only compared with the weaker of its members."""
    names = [
        "plain",
        "prompt_lookup",
        "tree",
        "tree_dynamic",
        "suffix",
        "heads+suffix",
        "hf_lookup",
    ]
    assert rivals(names) == [
        ("prompt_lookup", "hf_lookup"),
        ("suffix", "hf_lookup"),
        ("heads+suffix", "tree"),
        ("heads+suffix", "tree_dynamic"),
        ("heads+suffix", "suffix"),
    ]
    speeds = {"tree": 2.0, "suffix": 1.0, "heads+suffix": 0.5}
    clocked = {(0.0, 1): {name: runs_of([[s, s]], [8, 8]) for name, s in speeds.items()}}
    found = pairs(clocked)
    assert [(row["other"], row["speedup"], row["best_member"]) for row in found] == [
        ("tree", 4.0, False),
        ("suffix", 2.0, True),
    ]
    assert "heads+suffix is 2.00x (2.00-2.00) as fast as suffix, its best member" in format_pairs(
        found
    )
