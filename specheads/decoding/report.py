"""Turn clocked runs into the rows of bench.json, and rows into a table of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specheads.decoding.identity import Identity
from specheads.decoding.measure import Method, Prompt, Runs
from specheads.decoding.stats import mean_accept_length, median, ratio_ci95, rep8

REP8_LIMIT = 0.25  # above it greedy text is mostly loops, and its speed says little
LOOPING_HEADLINE = 0.7  # the temperature of the headline then
DRIFT_LIMIT = 1.15  # slowest over fastest repeat of the baseline


def per_prompt_seconds(runs: Runs) -> list[float]:
    """Return the median over repeats of each prompt's seconds."""
    return [median(column) for column in zip(*runs.seconds, strict=True)]


def make_row(
    method: Method,
    runs: dict[str, Runs],
    prompts: Sequence[Prompt],
    temperature: float,
    identity: Identity | None,
    *,
    dtype: str,
    device: str,
) -> dict[str, Any]:
    """Return one row of bench.json: ``method`` at ``temperature``, beside plain decoding.

    Args:
        method: which.
        runs: of all methods at this temperature.
        prompts: those decoded.
        temperature: of the sampling.
        identity: comparison with plain decoding; None where the draws differ by design.
        dtype: of the weights.
        device: of the weights.
    """
    of = _Totals(runs[method.name])
    plain, hf = _Totals(runs["plain"]), _Totals(runs["hf_generate"])
    kinds = sorted({prompt.kind for prompt in prompts})
    chosen = {k: [i for i, prompt in enumerate(prompts) if prompt.kind == k] for k in kinds}
    return {
        "method": method.name,
        "drafter": method.drafter,
        "tree_nodes": method.tree_nodes,
        "dtype": dtype,
        "device": device,
        "batch": 1,
        "temperature": temperature,
        "num_prompts": len(prompts),
        "new_tokens": int(sum(of.tokens)),
        "seconds": [round(sum(repeat), 6) for repeat in runs[method.name].seconds],
        "tokens_per_second": round(of.speed(), 3),
        "speedup_vs_plain": round(of.speed() / plain.speed(), 4),
        "speedup_vs_plain_ci95": [
            round(bound, 4)
            for bound in ratio_ci95([of.tokens, plain.seconds], [of.seconds, plain.tokens])
        ],
        "speedup_vs_hf_generate": round(of.speed() / hf.speed(), 4),
        "accept_length": round(of.accept_length(), 4),
        "accept_length_ci95": [round(b, 4) for b in ratio_ci95([of.gained], [of.steps])],
        "rep8": round(of.rep8(), 4),
        "peak_memory": runs[method.name].peak_memory,
        "extra_parameters": method.extra_parameters,
        "identical": identity.identical if identity else None,
        "compared": identity.compared if identity else 0,
        "near_ties": identity.near_ties if identity else None,
        "gaps": [round(gap, 5) for gap in identity.gaps] if identity else [],
        "ended": sum(each.ended for each in runs[method.name].decoded),
        "per_kind": {
            kind: {
                "num_prompts": len(rows),
                "tokens_per_second": round(of.speed(rows), 3),
                "speedup_vs_plain": round(of.speed(rows) / plain.speed(rows), 4),
                "accept_length": round(of.accept_length(rows), 4),
                "rep8": round(of.rep8(rows), 4),
            }
            for kind, rows in chosen.items()
        },
    }


class _Totals:
    """Per-prompt figures of one method, and their ratios over all prompts or some."""

    def __init__(self, runs: Runs) -> None:
        self.texts = [each.tokens for each in runs.decoded]
        self.tokens = [float(len(text)) for text in self.texts]
        self.seconds = per_prompt_seconds(runs)
        self.lengths = [each.accept_lengths for each in runs.decoded]
        self.gained = [float(sum(each)) for each in self.lengths]
        self.steps = [float(len(each)) for each in self.lengths]

    def speed(self, rows: Sequence[int] | None = None) -> float:
        rows = range(len(self.tokens)) if rows is None else rows
        return sum(self.tokens[i] for i in rows) / sum(self.seconds[i] for i in rows)

    def accept_length(self, rows: Sequence[int] | None = None) -> float:
        rows = range(len(self.tokens)) if rows is None else rows
        return mean_accept_length([self.lengths[i] for i in rows])

    def rep8(self, rows: Sequence[int] | None = None) -> float:
        rows = range(len(self.tokens)) if rows is None else rows
        return sum(rep8(self.texts[i]) for i in rows) / len(rows)


def baseline_drift(runs: Sequence[dict[str, Runs]]) -> float:
    """Return slowest over fastest repeat of plain decoding; well above 1, something interfered.

    Args:
        runs: per temperature, all methods.
    """
    totals = [[sum(repeat) for repeat in each["plain"].seconds] for each in runs]
    return max(max(each) / min(each) for each in totals)


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figure to quote: greedy, or T=0.7 where greedy text repeats itself.

    Raises:
        ValueError: if the rows lack the temperature that the rule asks for.
    """
    by_key = {(row["method"], row["temperature"]): row for row in rows}
    repeated = by_key["plain", 0.0]["rep8"]
    temperature = LOOPING_HEADLINE if repeated > REP8_LIMIT else 0.0
    if ("tree", temperature) not in by_key:
        raise ValueError(f"rows must hold method tree at temperature {temperature}, got none")
    row = by_key["tree", temperature]
    keys = ("speedup_vs_plain", "speedup_vs_plain_ci95", "speedup_vs_hf_generate")
    more = ("accept_length", "accept_length_ci95", "identical", "compared", "near_ties")
    return {
        "temperature": temperature,
        "rep8_plain_greedy": repeated,
        **{key: row[key] for key in (*keys, *more)},
    }


_COLUMNS = (
    ("T", 4),
    ("method", 14),
    ("nodes", 5),
    ("tokens/s", 8),
    ("speed-up", 8),
    ("95%", 11),
    ("vs HF", 5),
    ("accept", 6),
    ("rep8", 5),
    ("identical", 9),
    ("ties", 4),
)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table of plain text; ``rep8`` is of each method's own output."""
    lines = ["  ".join(name.rjust(width) for name, width in _COLUMNS)]
    for row in rows:
        low, high = row["speedup_vs_plain_ci95"]
        same = "-" if row["identical"] is None else f"{row['identical']}/{row['compared']}"
        cells = (
            f"{row['temperature']:g}",
            row["method"],
            str(row["tree_nodes"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup_vs_plain']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{row['speedup_vs_hf_generate']:.2f}",
            f"{row['accept_length']:.2f}",
            f"{row['rep8']:.2f}",
            same,
            "-" if row["near_ties"] is None else str(row["near_ties"]),
        )
        lines.append("  ".join(c.rjust(w) for c, (_, w) in zip(cells, _COLUMNS, strict=True)))
    return "\n".join(lines)


def format_kinds(rows: Sequence[dict[str, Any]]) -> str:
    """Return accept length and speed-up per kind of prompt, drafted methods only."""
    drafted = [row for row in rows if row["drafter"]]
    kinds = sorted({kind for row in drafted for kind in row["per_kind"]})
    head = "   T  method          " + "".join(f"{kind:>18.18}" for kind in kinds)
    lines = [head]
    for row in drafted:
        cells = (
            f"{row['per_kind'][kind]['accept_length']:.2f} "
            f"({row['per_kind'][kind]['speedup_vs_plain']:.2f}x)"
            for kind in kinds
        )
        lines.append(
            f"{row['temperature']:>4g}  {row['method']:<16}" + "".join(f"{c:>18}" for c in cells)
        )
    return "\n".join(lines)
