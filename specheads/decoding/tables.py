"""The rows of bench.json as tables of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from specheads.contention import SHARE_LIMIT
from specheads.decoding.report import DRIFT_LIMIT, crossovers, in_order, series_of

_COLUMNS = (
    ("T", 4),
    ("method", 0),  # as wide as the longest
    ("nodes", 5),
    ("tokens/s", 8),
    ("speed-up", 8),
    ("95%", 11),
    ("vs HF", 5),
    ("prefill", 7),
    ("decode", 6),
    ("accept", 6),
    ("rep8", 5),
    ("identical", 9),
    ("ties", 4),
)


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of batch 1 as a table; ``rep8`` is of each method's own output.

    ``prefill`` is in milliseconds per prompt; ``decode`` is the speed-up without it.
    """
    longest = _longest_name(rows)
    columns = [(name, longest if name == "method" else width) for name, width in _COLUMNS]
    lines = ["  ".join(name.rjust(width) for name, width in columns)]
    for row in (each for each in rows if each["batch"] == 1):
        low, high = row["speedup_vs_plain_ci95"]
        prefill, decode = row["prefill_seconds"], row["decode_speedup_vs_plain"]
        same = "-" if row["identical"] is None else f"{row['identical']}/{row['compared']}"
        cells = (
            f"{row['temperature']:g}",
            row["method"],
            str(row["tree_nodes"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup_vs_plain']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{row['speedup_vs_hf_generate']:.2f}",
            f"{1000 * median(prefill) / row['num_prompts']:.1f}" if prefill else "-",
            "-" if decode is None else f"{decode:.2f}x",
            f"{row['accept_length']:.2f}",
            f"{row['rep8']:.2f}",
            same,
            "-" if row["near_ties"] is None else str(row["near_ties"]),
        )
        lines.append("  ".join(c.rjust(w) for c, (_, w) in zip(cells, columns, strict=True)))
    return "\n".join(lines)


def _longest_name(rows: Sequence[dict[str, Any]]) -> int:
    return max([len("hf_generate"), *(len(row["method"]) for row in rows)])


def format_kinds(rows: Sequence[dict[str, Any]]) -> str:
    """Return accept length and speed-up per kind of prompt, drafted methods at batch 1 only."""
    drafted = [row for row in rows if row["drafter"] and row["batch"] == 1]
    kinds = sorted({kind for row in drafted for kind in row["per_kind"]})
    width = _longest_name(rows)
    head = f"   T  {'method':<{width}}" + "".join(f"{kind:>18.18}" for kind in kinds)
    lines = [head]
    for row in drafted:
        cells = (
            f"{row['per_kind'][kind]['accept_length']:.2f} "
            f"({row['per_kind'][kind]['speedup_vs_plain']:.2f}x)"
            for kind in kinds
        )
        lines.append(
            f"{row['temperature']:>4g}  {row['method']:<{width}}"
            + "".join(f"{cell:>18}" for cell in cells)
        )
    return "\n".join(lines)


def format_batches(rows: Sequence[dict[str, Any]]) -> str:
    """Return tokens per second and speed-up over plain decoding per batch size, and crossovers."""
    sizes = sorted({row["batch"] for row in rows})
    width = _longest_name(rows)
    head = f"   T  {'method':<{width}}"
    lines = [head + "".join(f"{f'batch {size}':>16}" for size in sizes)]
    for temperature, method in in_order(rows, "temperature", "method"):
        by_size = {row["batch"]: row for row in series_of(rows, method, temperature)}
        cells = (
            f"{by_size[size]['tokens_per_second']:.0f} ({by_size[size]['speedup_vs_plain']:.2f}x)"
            if size in by_size
            else ""
            for size in sizes
        )
        lines.append(f"{temperature:>4g}  {method:<{width}}" + "".join(f"{c:>16}" for c in cells))
    return "\n".join([*lines, *crossover_lines(rows)])


def crossover_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return per drafted method and temperature up to which batch it pays, as a sentence each."""
    lines = []
    for each in crossovers(rows):
        where = f"{each['method']} at T={each['temperature']:g}"
        if each["batch"] is None:
            lines.append(
                f"{where}: faster than plain decoding up to batch {each['largest_measured']}"
            )
        else:
            between = f" (between sizes: {each['interpolated']})" if each["interpolated"] else ""
            lines.append(
                f"{where}: no faster than plain decoding from batch {each['batch']}{between}"
            )
    return lines


def headline_line(result: Mapping[str, Any]) -> str:
    """Return the sentence to quote.

    Args:
        result: the content of bench.json.
    """
    first, settings, rows = result["headline"], result["settings"], result["rows"]
    of = next(
        row
        for row in rows
        if (row["method"], row["temperature"], row["batch"])
        == (first["method"], first["temperature"], 1)
    )
    low, high = first["speedup_vs_plain_ci95"]
    decode = of.get("decode_speedup_vs_plain")
    without = "" if decode is None else f" ({decode:.2f}x without the prefill)"
    return (
        f"Headline, {first['method']} at T={first['temperature']:g} (plain greedy rep8 "
        f"{first['rep8_plain_greedy']:.2f}): {first['speedup_vs_plain']:.2f}x plain decoding"
        f"{without}, 95% {low:.2f}-{high:.2f}, {first['speedup_vs_hf_generate']:.2f}x generate, "
        f"accept length {first['accept_length']:.2f}; {of['num_prompts']} prompts, {of['dtype']}, "
        f"{settings['threads']} threads, batch 1"
    )


def disturbance_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what has to be said about other work on the machine; nothing where there was none.

    Args:
        result: the content of bench.json; an older one knows the drift of plain decoding only.
    """
    place = result["environment"]
    lines = []
    if place["baseline_drift"] > DRIFT_LIMIT:
        lines.append(
            "The machine was busy: plain decoding itself varied "
            f"{place['baseline_drift']:.2f}x between repeats; measure again."
        )
    share = place.get("largest_other_share")
    if share is not None and share > SHARE_LIMIT:
        worst = max(place["watched"], key=lambda each: each["other_share"] or 0.0)
        lines.append(
            f"The machine was busy: other processes took {share:.0%} of the processors while"
            f" T={worst['temperature']:g}, batch {worst['batch']} was measured"
            f" ({place['other_share']:.0%} over all); measure again."
        )
    if "other_share" in place and place["other_share"] is None:
        lines.append(
            "What other processes did meanwhile is unknown: this system does not say, or it was"
            " over too soon."
        )
    if result["settings"].get("repeats") == 1:
        lines.append("One repeat: whether plain decoding itself drifted cannot be seen.")
    return lines


def format_divergences(result: dict[str, Any]) -> str:
    """Return every first difference from plain decoding with its margins, as lines of text.

    Args:
        result: the content of bench.json.
    """
    noise = result["settings"]["noise"]
    if noise is None:
        return ""
    dtype = result["rows"][0]["dtype"]
    lines = [
        f"Where outputs first differ from plain decoding; margins in logits. Noise measured at "
        f"{noise['num_positions']} positions: {noise['shape']:.4f} between shapes in {dtype} "
        f"(median {noise['typical_shape']:.4f}), {noise['dtype']:.4f} between {dtype} and float32",
        f"   T  batch  method          token{f'in {dtype}':>14}{'in float32':>14}"
        f"  {'verdict':<12}  prompt",
    ]
    for row in result["rows"]:
        for each in row["divergences"]:
            margins = "".join(
                "text ended".rjust(14) if margin is None else f"{margin:14.5f}"
                for margin in (each["margin_dtype"], each["margin_fp32"])
            )
            verdict = "near-tie" if each["near_tie"] else "NOT ROUNDING"
            lines.append(
                f"{row['temperature']:>4g}  {row['batch']:>5}  {row['method']:<14}  "
                f"{each['index']:>5}{margins}  {verdict:<12}  {each['prompt']}"
            )
    return "\n".join(lines)


def format_compared(result: dict[str, Any]) -> str:
    """Return what ``compare`` found: a row per candidate, its draft lengths, and the advice.

    Args:
        result: the content of compare.json.
    """
    settings = result["settings"]
    head = (
        f"{'smaller':>8}{'alpha':>7}{'c':>6}{'n':>3}{'Leviathan':>10}{'predicted':>10}"
        f"{'measured':>9}{'95%':>11}{'accept':>7}{'rate':>6}  candidate"
    )
    lines = [head]
    for each in result["candidates"]:
        best, found = each["predicted"], each["measured"]
        low, high = found["speedup_ci95"]
        cost, published = "?", "?"
        if each["c"] is not None:
            cost, published = f"{each['c']:.2f}", f"{best['leviathan']:.2f}x"
        lines.append(
            f"{each['times_smaller']:>7.1f}x{each['alpha']:>7.3f}{cost:>6}"
            f"{each['num_tokens']:>3}{published:>10}{best['predicted']:>9.2f}x"
            f"{found['speedup']:>8.2f}x{f'{low:.2f}-{high:.2f}':>11}"
            f"{found['accept_length']:>7.2f}{found['acceptance_rate']:>6.2f}  {each['name']}"
        )
    kinds = sorted({kind for each in result["candidates"] for kind in each["per_kind"]})
    if len(kinds) > 1:
        lines.append("\nPer kind of prompt: alpha, predicted and measured speed-up, accept length")
        lines += [
            f"{kind:<16.16}{of['alpha']:>7.3f}{of['predicted']:>7.2f}x{of['speedup']:>7.2f}x"
            f"{of['accept_length']:>7.2f}  {each['name']}"
            for each in result["candidates"]
            for kind in kinds
            if (of := each["per_kind"].get(kind))
        ]
    costs = ", ".join(f"{n}: {cost:.2f}" for n, cost in result["verify_cost"].items())
    lines.append(
        f"\nT={settings['temperature']:g}, {settings['sampling']} drafts, {settings['dtype']},"
        f" {settings['threads']} threads, plain rep8 {result['plain']['rep8']:.2f}. Cost of a"
        f" verify step by nodes, in plain steps: {costs}"
    )
    return "\n".join([*lines, *result["advice"], *result["warnings"]])
