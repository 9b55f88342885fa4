"""Which of the compared draft models to take, in words, and what the rule of thumb was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RULE_OF_THUMB = (5.0, 10.0)  # how many times smaller than its base a draft model should be


def recommended(candidates: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the fastest candidate whose interval lies above 1; None: draft with none of them."""
    better = [each for each in candidates if each["measured"]["speedup_ci95"][0] > 1]
    best = max(better, key=_speedup, default=None)
    return None if best is None else str(best["name"])


def advice(candidates: Sequence[Mapping[str, Any]], best: str | None, sampling: str) -> list[str]:
    """Return the recommendation, and the rule of thumb beside what was measured, as lines.

    Args:
        candidates: of compare.json.
        best: the recommended one.
        sampling: how drafts were made.
    """
    fastest = max(candidates, key=_speedup)
    taken = next((each for each in candidates if each["name"] == best), fastest)
    below, above = taken["measured"]["speedup_ci95"]
    figure = f"{_speedup(taken):.2f}x plain decoding (95% {below:.2f} to {above:.2f})"
    if best is None:
        first = f"none: the fastest candidate, {taken['name']}, was measured at {figure}"
    else:
        first = (
            f"{best}: decode.draft={best} decode.draft_tokens={taken['num_tokens']}"
            f" decode.draft_sampling={sampling}, measured at {figure}"
        )
    low, high = RULE_OF_THUMB
    factor = taken["times_smaller"]
    cost = "an unknown number of" if taken["c"] is None else f"{taken['c']:.2f}"
    rule = (
        f"rule of thumb: {low:g} to {high:g} times smaller than the base. This one is"
        f" {factor:.1f} times smaller; a pass of it costs {cost} plain steps where its size alone"
        f" would say {1 / factor:.2f}, and alpha is {taken['alpha']:.2f}"
    )
    lines = [f"recommended: {first}", rule]
    if unknown := [str(each["name"]) for each in candidates if each["c"] is None]:
        lines.append(
            f"c of {', '.join(unknown)} is unmeasured: longer drafts were clocked as no dearer than"
            " shorter ones, which cannot be; measure again on a quiet machine"
        )
    if len(candidates) > 1:
        by_size = sorted(candidates, key=lambda each: float(each["times_smaller"]))
        lines.append(
            "by size, largest first: "
            + ", ".join(
                f"{each['name']} {each['times_smaller']:.1f}x smaller, {_speedup(each):.2f}x"
                + (" (within the rule)" if low <= each["times_smaller"] <= high else "")
                for each in by_size
            )
        )
    return lines


def _speedup(candidate: Mapping[str, Any]) -> float:
    return float(candidate["measured"]["speedup"])
