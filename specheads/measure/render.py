"""Tables and pages of what was measured: as text, and as one file of HTML.

A column is declared once, as the function that makes a cell of a row of bench.json; a table is
columns over rows; a page is sections, whatever they are written in. A page of HTML holds its
pictures itself and fetches nothing from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from specheads.decoding.result import divergence_said
from specheads.measure.plots import draw
from specheads.measure.rows import (
    DRIFT_LIMIT,
    crossovers,
    failures,
    format_pairs,
    in_order,
    only_copies,
)
from specheads.system.files import filled
from specheads.system.hardware import SHARE_LIMIT

Row = Mapping[str, Any]  # of bench.json


@dataclass(frozen=True)
class Table:
    """Cells of text under a head, all rows as long as it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Return columns of equal width: numbers stand on the right, names on the left."""
        columns = []
        for cells in zip(self.head, *self.rows, strict=True):
            width = max(map(len, cells))
            number = any(cell[:1].isdigit() for cell in cells[1:])
            columns.append([cell.rjust(width) if number else cell.ljust(width) for cell in cells])
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def figure(value: float | None, form: str, missing: str = "") -> str:
    """Return ``value`` with a format and a unit behind it (``.2fx``); ``missing`` for None."""
    if value is None:
        return missing
    return f"{value:{form[:-1]}}x" if form.endswith("x") else f"{value:{form}}"


def interval(bounds: Sequence[float]) -> str:
    """Return the two ends of an interval."""
    return f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def estimate(found: Mapping[str, Any], key: str, form: str = ".2f") -> str:
    """Return a figure with the interval that stands beside it, in words."""
    low, high = found[f"{key}_ci95"]
    return f"{found[key]:{form}} (95%: {low:{form}} to {high:{form}})"


def with_bounds(value: float | None, bounds: Sequence[float] | None, unit: str = "") -> str:
    """Return a figure with its interval behind it; empty where it was not measured."""
    return "" if value is None or bounds is None else f"{value:.2f}{unit} ({interval(bounds)})"


def same_cell(row: Row) -> str:
    """Return how many outputs are plain decoding's, and how many differ first at a near-tie."""
    ties = f" (+{row['near_ties']})" if row["near_ties"] else ""
    return f"{_identical(row)}{ties}"


def _identical(row: Row, missing: str = "") -> str:
    return missing if row["identical"] is None else f"{row['identical']}/{row['compared']}"


def _prefill(row: Row, missing: str = "") -> str:
    """Return milliseconds per prompt up to the first token."""
    seconds = row.get("prefill_seconds")
    return f"{1000 * median(seconds) / row['num_prompts']:.1f}" if seconds else missing


Columns = Mapping[str, Callable[[Row], str]]
_COLUMNS: Columns = {
    "T": lambda row: f"{row['temperature']:g}",
    "method": lambda row: str(row["method"]),
    "nodes": lambda row: str(row["tree_nodes"]),
    "tokens/s": lambda row: f"{row['tokens_per_second']:.1f}",
}
# narrow ones, for a terminal; prefill is in milliseconds, rep8 of each method's own output
TEXT_COLUMNS: Columns = {
    **_COLUMNS,
    "speed-up": lambda row: f"{row['speedup_vs_plain']:.2f}x",
    "95%": lambda row: interval(row["speedup_vs_plain_ci95"]),
    "vs HF": lambda row: figure(row["speedup_vs_hf_generate"], ".2f", "-"),
    "prefill": lambda row: _prefill(row, "-"),
    "decode": lambda row: figure(row.get("decode_speedup_vs_plain"), ".2fx", "-"),
    "accept": lambda row: f"{row['accept_length']:.2f}",
    "rep8": lambda row: f"{row['rep8']:.2f}",
    "identical": lambda row: _identical(row, "-"),
    "ties": lambda row: figure(row["near_ties"], "d", "-"),
}
# an older bench.json lacks some of them
PAGE_COLUMNS: Columns = {
    **_COLUMNS,
    "speed-up (95%)": lambda row: with_bounds(
        row["speedup_vs_plain"], row["speedup_vs_plain_ci95"], "x"
    ),
    "vs generate": lambda row: f"{row['speedup_vs_hf_generate']:.2f}x",
    "prefill ms": _prefill,
    "decode tokens/s": lambda row: figure(row.get("decode_tokens_per_second"), ".1f"),
    "decode speed-up (95%)": lambda row: with_bounds(
        row.get("decode_speedup_vs_plain"), row.get("decode_speedup_vs_plain_ci95"), "x"
    ),
    "accept (95%)": lambda row: with_bounds(row["accept_length"], row["accept_length_ci95"]),
    "rep8": TEXT_COLUMNS["rep8"],
    "same": same_cell,
    "peak MiB": lambda row: f"{row['peak_memory'] / 2**20:.0f}",
    "extra parameters": lambda row: str(row["extra_parameters"]),
}


def make_table(rows: Iterable[Row], columns: Columns) -> Table:
    """Return a line for each of ``rows``; columns that none of them fills are left out."""
    rows = list(rows)
    filled_in = [name for name, cell in columns.items() if any(map(cell, rows))]
    return Table(filled_in, [[columns[name](row) for name in filled_in] for row in rows])


def _alone(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["batch"] == 1]


def _drafted(rows: Iterable[Row]) -> list[Row]:
    return [row for row in _alone(rows) if row["drafter"]]


def kinds_table(rows: Sequence[Row]) -> Table:
    """Return accept length and speed-up per kind of prompt, drafted methods at batch 1 only."""

    def cell(row: Row, kind: str) -> str:
        of = row["per_kind"].get(kind)
        return f"{of['accept_length']:.2f} ({of['speedup_vs_plain']:.2f}x)" if of else ""

    drafted = _drafted(rows)
    kinds = sorted({kind for row in drafted for kind in row["per_kind"]})
    lines = [
        [_COLUMNS["T"](row), row["method"], *(cell(row, kind) for kind in kinds)] for row in drafted
    ]
    return Table(["T", "method", *kinds], lines)


def batches_table(rows: Sequence[Row]) -> Table:
    """Return every method's tokens per second and speed-up over plain decoding per batch size."""
    sizes = sorted({row["batch"] for row in rows})
    found = {(row["temperature"], row["method"], row["batch"]): row for row in rows}
    lines = []
    for temperature, method in in_order(rows, "temperature", "method"):
        of = (found.get((temperature, method, size)) for size in sizes)
        cells = (
            f"{row['tokens_per_second']:.0f} ({row['speedup_vs_plain']:.2f}x)" if row else ""
            for row in of
        )
        lines.append([f"{temperature:g}", method, *cells])
    return Table(["T", "method", *(f"batch {size}" for size in sizes)], lines)


def crossover_lines(rows: Sequence[Row]) -> list[str]:
    """Return per drafted method and temperature up to which batch it pays, as a sentence each."""
    lines = []
    for each in crossovers(rows):
        where = f"{each['method']} at T={each['temperature']:g}"
        if each["batch"] is None:
            last = each["largest_measured"]
            lines.append(f"{where}: faster than plain decoding up to batch {last}")
            continue
        lines.append(f"{where}: no faster than plain decoding from batch {each['batch']}")
    return lines


def lengths_table(rows: Sequence[Row]) -> Table:
    """Return which share of a drafted method's verify steps gained 1, 2, ... tokens."""
    chosen = [row for row in _drafted(rows) if row.get("accept_lengths")]
    longest = max((int(key) for row in chosen for key in row["accept_lengths"]), default=0)
    lines = []
    for row in chosen:
        counts = row["accept_lengths"]
        total = sum(counts.values())
        shares = (f"{counts.get(str(n), 0) / total:.3f}" for n in range(1, longest + 1))
        lines.append([_COLUMNS["T"](row), row["method"], str(total), *shares])
    return Table(["T", "method", "steps", *map(str, range(1, longest + 1))], lines)


def verdict(rows: Iterable[Row]) -> str:
    """Return in one sentence what is fastest at each temperature, and what copying alone gives.

    Lossy rules are left out, as they write other texts.

    Args:
        rows: of bench.json.
    """
    fair = [row for row in _drafted(rows) if "lossy" not in row["method"]]
    said = []
    for heat in sorted({row["temperature"] for row in fair}):
        here = [row for row in fair if row["temperature"] == heat]
        best = max(here, key=lambda row: row["speedup_vs_plain"])
        name, bounds = best["method"], best["speedup_vs_plain_ci95"]
        speed = f"{best['speedup_vs_plain']:.2f}x"
        words = f"{name} is fastest, {speed} plain decoding's speed (95% {interval(bounds)})"
        if bounds[0] <= 1:
            words = "nothing is surely faster than plain decoding"
            words += f" ({name}: {speed}, 95% {interval(bounds)})"
        # beside copies stands what is trained, and the other way round
        others = [row for row in here if only_copies(row) != only_copies(best)]
        if others:
            other = max(others, key=lambda row: row["speedup_vs_plain"])
            kind = "copying alone" if only_copies(other) else "what is trained"
            words += f", {kind} {other['speedup_vs_plain']:.2f}x ({other['method']})"
        said.append(f"at T={heat:g} {words}")
    return f"{'; '.join(said).replace('at', 'At', 1)}." if said else ""


def headline_line(result: Mapping[str, Any]) -> str:
    """Return the sentence to quote.

    Args:
        result: the content of bench.json.
    """
    first, settings = result["headline"], result["settings"]
    key = (first["method"], first["temperature"])
    of = next(r for r in _alone(result["rows"]) if (r["method"], r["temperature"]) == key)
    decode = of.get("decode_speedup_vs_plain")
    without = "" if decode is None else f" ({decode:.2f}x without the prefill)"
    return (
        f"Headline, {first['method']} at T={first['temperature']:g} (plain greedy rep8 "
        f"{first['rep8_plain_greedy']:.2f}): {first['speedup_vs_plain']:.2f}x plain decoding"
        f"{without}, 95% {interval(first['speedup_vs_plain_ci95'])},"
        f" {first['speedup_vs_hf_generate']:.2f}x generate, accept length"
        f" {first['accept_length']:.2f}; {of['num_prompts']} prompts, {of['dtype']}, "
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


def format_divergences(result: Mapping[str, Any]) -> str:
    """Return every first difference from plain decoding with its margins, as lines of text.

    Args:
        result: the content of bench.json.
    """
    noise = result["settings"]["noise"]
    if noise is None:
        return ""
    dtype = result["rows"][0]["dtype"]
    lines = [
        [
            f"{row['temperature']:g}",
            str(row["batch"]),
            row["method"],
            str(each["index"]),
            figure(each["margin_dtype"], ".5f", "text ended"),
            figure(each["margin_fp32"], ".5f", "text ended"),
            "near-tie" if each["near_tie"] else "NOT ROUNDING",
            each["prompt"],
        ]
        for row in result["rows"]
        for each in row["divergences"]
    ]
    head = ["T", "batch", "method", "token", f"in {dtype}", "in float32", "verdict", "prompt"]
    return (
        f"Where outputs first differ from plain decoding; margins in logits. Noise measured at "
        f"{noise['num_positions']} positions: {noise['shape']:.4f} between shapes in {dtype} "
        f"(median {noise['typical_shape']:.4f}), {noise['dtype']:.4f} between {dtype} and float32\n"
        + Table(head, lines).text()
    )


def bench_text(result: Mapping[str, Any]) -> str:
    """Return what the command prints: tables, and the sentences that belong to them.

    Args:
        result: the content of bench.json.
    """
    rows = result["rows"]
    parts = [
        make_table(_alone(rows), TEXT_COLUMNS).text(),
        f"\nAccept length (speed-up) per kind of prompt\n{kinds_table(rows).text()}",
    ]
    if len(result["settings"]["batch_sizes"]) > 1:
        parts.append("\nTokens/s (speed-up over plain decoding in batches of that size)")
        parts += [batches_table(rows).text(), *crossover_lines(rows)]
    if result["pairs"]:
        parts.append(f"\nSide by side (95%)\n{format_pairs(result['pairs'])}")
    if divergences := format_divergences(result):
        parts.append(f"\n{divergences}")
    if result["headline"]:  # not where too few temperatures were measured for the rule
        parts.append(f"\n{headline_line(result)}")
    return "\n".join([*parts, *disturbance_lines(result)])


# a paragraph, the items of a list, a table, a ``picture`` of ours, or text of ``fixed`` width
Part = str | Sequence[str] | Table | dict[str, str]


def sections(result: Mapping[str, Any], figures: Mapping[str, str]) -> dict[str, list[Part]]:
    """Return the page of a bench: headings, and what stands under each of them.

    Args:
        result: the content of bench.json. What an older one lacks is left out.
        figures: SVG by name, of :func:`specheads.measure.plots.draw`.
    """
    drawn = {name: {"picture": picture} for name, picture in figures.items()}
    rows = result["rows"]
    methods = in_order(rows, "method", "drafter", "tree_nodes")
    speeds = make_table(_alone(rows), PAGE_COLUMNS)
    found: dict[str, Sequence[Any]] = {
        "Result": [verdict(rows), drawn.get("speed"), headline_line(result)],
        "Warnings": [_warnings(result)],
        "Methods": methods,
        "One prompt at a time": [speeds],
        "By kind of prompt": [kinds_table(rows)],
    }
    if len({row["batch"] for row in rows}) > 1:
        table, lines = batches_table(rows), crossover_lines(rows)
        found["In batches"] = [lines, drawn.get("batches"), table]
    if result.get("pairs"):
        found["Side by side (95%)"] = [format_pairs(result["pairs"]).splitlines()]
    if any("accept_lengths" in row for row in rows):
        found["Accept lengths"] = [lengths_table(rows)]
    if differences := format_divergences(result):
        found["Where outputs differ"] = [{"fixed": differences}]
    found["Settings"] = [{"fixed": _lines(result["settings"])}]
    found["Environment"] = [{"fixed": _lines(result["environment"])}]
    left = {title: [part for part in parts if part] for title, parts in found.items()}
    return {title: parts for title, parts in left.items() if parts}


def _warnings(result: Mapping[str, Any]) -> list[str]:
    items = disturbance_lines(result)
    items += [f"Rounding does not explain that {line}" for line in failures(result)]
    for row in result["rows"]:
        if "lossy" in row["method"]:
            name = f"{row['method']} at T={row['temperature']:g}"
            said = divergence_said(row.get("divergence", {}))
            items.append(f"{name} does not keep the base model's distribution: {said}")
    return items


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
    )


def html_page(result: Mapping[str, Any]) -> str:
    """Return all figures of a bench with their plots.

    Args:
        result: the content of bench.json.
    """
    title = f"Bench of {result['settings'].get('checkpoint', 'a model')}"
    parts = sections(result, draw(result))
    return filled(Path(__file__).with_name("bench.html.j2"), title=title, sections=parts)


def suite_remarks(result: Mapping[str, Any], *, alike: bool) -> list[str]:
    """Return what a reader of a suite's scores has to know, in lines.

    Args:
        result: what ``spec_bench`` writes.
        alike: whether all answer files answer the same questions.
    """
    others = (result["environment"]["contention"] or {}).get("other_share") or 0.0
    busy, long = others > SHARE_LIMIT, len(result["too_long"])
    total, cut = result["num_questions"], result["cut_by_context"]
    different, rule = result["scores"][-1]["different"], result["settings"]["decode"]["acceptance"]
    shown = ", ".join(map(str, different[:5])) + (", ..." if len(different) > 5 else "")
    lines = {
        f"the machine was busy: others took {others:.0%} of the processors meanwhile": busy,
        f"left out, longer than the base model's context: {long} of {total} questions": long,
        f"answers that the context may have cut: {cut}": cut,
        "the files do not answer the same questions: Spec-Bench's formula compares all of each,"
        " the corrected columns those in both": not alike,
        f"answers that differ from plain decoding's: {len(different)} ({shown})": different,
        f"decode.acceptance={rule} is lossy: other answers": rule != "exact",
    }
    return [line for line, due in lines.items() if due]
