"""Methods beside each other rather than beside plain decoding: what a merged tree adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specheads.decoding.measure import Runs
from specheads.decoding.report import per_batch_seconds
from specheads.decoding.stats import ratio_ci95

# what the parts of a merged drafter's name are called where they are measured alone
_ALONE = {"heads": ("tree", "tree_dynamic"), "lookup": ("lookup", "prompt_lookup")}
_TRANSFORMERS = {
    "draft": "hf_assisted",
    "draft_tree": "hf_assisted",
    "draft_heads": "hf_assisted",
    "prompt_lookup": "hf_lookup",
    "suffix": "hf_lookup",
}


def rivals(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs worth a line: merged drafters and their members, ours and transformers'."""
    found = [(name, other) for name, other in _TRANSFORMERS.items() if {name, other} <= set(names)]
    for name in names:
        if "+" in name:
            alone = [each for part in name.split("+") for each in _ALONE.get(part, (part,))]
            found += [(name, other) for other in alone if other in names]
    return found


def versus(runs: Mapping[str, Runs], name: str, other: str) -> dict[str, Any]:
    """Return how many times as fast ``name`` is as ``other``, in tokens per second.

    Both decoded the same prompts in turn, so the interval is a bootstrap over prompts of the ratio
    itself, which is narrower than what two speeds over plain decoding would let one say.

    Args:
        runs: of all methods at one temperature and batch size.
        name: of a method.
        other: likewise.
    """
    tokens, seconds = {}, {}
    for each in (name, other):
        run = runs[each]
        tokens[each] = [
            float(sum(len(run.decoded[i].tokens) for i in rows)) for rows in run.batches
        ]
        seconds[each] = per_batch_seconds(run)
    ratio = sum(tokens[name]) * sum(seconds[other]) / (sum(seconds[name]) * sum(tokens[other]))
    low, high = ratio_ci95([tokens[name], seconds[other]], [seconds[name], tokens[other]])
    return {
        "method": name,
        "other": other,
        "speedup": round(ratio, 4),
        "ci95": [round(low, 4), round(high, 4)],
    }


def pairs(clocked: Mapping[tuple[float, int], Mapping[str, Runs]]) -> list[dict[str, Any]]:
    """Return :func:`versus` of all :func:`rivals` at every temperature and batch size.

    Of a merged drafter's members the fastest at that temperature is marked ``best_member``.
    """
    found = []
    for (temperature, batch), runs in clocked.items():
        rows = [versus(runs, *pair) for pair in rivals(list(runs))]
        for row in rows:
            of = [each["speedup"] for each in rows if each["method"] == row["method"]]
            row["best_member"] = "+" in row["method"] and row["speedup"] == min(of)
        found += [{"temperature": temperature, "batch": batch, **row} for row in rows]
    return found


def format_pairs(found: Sequence[dict[str, Any]]) -> str:
    """Return a line for every pair."""
    return "\n".join(
        f"T={row['temperature']:g}, batch {row['batch']}: {row['method']} is {row['speedup']:.2f}x"
        f" ({row['ci95'][0]:.2f}-{row['ci95'][1]:.2f}) as fast as {row['other']}"
        + (", its best member" if row["best_member"] else "")
        for row in found
    )
