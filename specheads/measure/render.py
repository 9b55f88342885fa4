"""The rows of bench.json as tables of plain text.

A bench as a page: its sections, whatever they are written in.

A bench's page as Markdown.

A bench's page as one file of HTML: pictures inside, nothing fetched from anywhere.

What quality found, as lines of text.

Which of the compared draft models to take, in words, and what the rule of thumb was worth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from specheads.measure.plots import draw
from specheads.measure.rows import (
    DRIFT_LIMIT,
    crossovers,
    failures,
    format_pairs,
    in_order,
    is_static_tree,
    series_of,
)
from specheads.system.hardware import SHARE_LIMIT

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


_MEANINGS = {
    "plain": "our own loop of one token per step, the baseline of every speed-up",
    "plain_eager": "plain without compiled passes",
    "one_by_one": "plain over the prompts of a batch one after the other",
    "hf_generate": "transformers' generate, prompts of a batch padded to the longest",
    "hf_compiled": "generate with a static cache and compiled passes",
    "hf_assisted": "generate with the draft model as assistant, one prompt at a time",
    "hf_lookup": "generate with prompt lookup, one prompt at a time",
    "prompt_lookup": "our loop, copying behind repeated n-grams",
    "tree": "the export's heads in its static tree",
    "tree_dynamic": "the export's heads in trees grown at each step",
}


@dataclass(frozen=True)
class Table:
    """Cells of text under a head, all rows as long as it."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        text: paragraphs.
        items: a list below them.
        table: below that.
        figure: an SVG below that; empty where there is none.
        block: text of fixed width, last.
    """

    title: str
    text: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    table: Table | None = None
    figure: str = ""
    block: str = ""


def sections(result: Mapping[str, Any], figures: Mapping[str, str] | None = None) -> list[Section]:
    """Return the page of a bench.

    Args:
        result: the content of bench.json. What an older one lacks is left out.
        figures: SVG by name, of :func:`specheads.measure.plots.draw`; None for a page of text.
    """
    drawn = figures or {}
    rows: list[dict[str, Any]] = result["rows"]
    found = [
        Section("Result", (headline_line(result),), figure=drawn.get("speed", "")),
        _warnings(result),
        Section(
            "Methods",
            items=tuple(
                f"{name}: {_meaning(name, drafter, nodes)}"
                for name, drafter, nodes in in_order(rows, "method", "drafter", "tree_nodes")
            ),
        ),
        Section("One prompt at a time", (_PAGE_COLUMNS,), table=speed_table(rows)),
        Section("By kind of prompt", table=kinds_table(rows), figure=drawn.get("kinds", "")),
    ]
    if len({row["batch"] for row in rows}) > 1:
        found.append(
            Section(
                "In batches",
                ("Tokens per second, and speed-up over plain decoding in batches of that size.",),
                tuple(crossover_lines(rows)),
                batches_table(rows),
                drawn.get("batches", ""),
            )
        )
    if result.get("pairs"):
        lines = format_pairs(result["pairs"]).splitlines()
        found.append(Section("Side by side (95%)", items=tuple(lines)))
    if any("accept_lengths" in row for row in rows):
        found.append(
            Section(
                "Accept lengths",
                ("Share of verify steps, at batch 1, that gained so many tokens.",),
                table=lengths_table(rows),
                figure=drawn.get("lengths", ""),
            )
        )
    if result.get("heads"):
        found += _heads(result, drawn)
    if sizes := sizes_table(rows):
        found.append(Section("Size of the tree", table=sizes, figure=drawn.get("sizes", "")))
    if divergences := format_divergences(dict(result)):
        found.append(Section("Where outputs differ", block=divergences))
    found += [
        Section("Settings", block=_lines(result["settings"])),
        Section("Environment", block=_lines(result["environment"])),
    ]
    return [each for each in found if each != Section(each.title)]


_PAGE_COLUMNS = (
    "Speed-up: tokens per second over plain decoding's, with a 95% interval (bootstrap over"
    " prompts). Prefill: milliseconds per prompt up to the first token; decode: without them."
    " Accept: tokens per verify step. Same: outputs that are plain decoding's token by token, and"
    " in brackets those that first differ where rounding decides."
)


def _meaning(method: str, drafter: str | None, nodes: int) -> str:
    """Return what a row is, in words."""
    if method in _MEANINGS:
        return _MEANINGS[method]
    if is_static_tree(method):
        return f"the export's heads in a static tree of {nodes} nodes"
    other, _, tree = method.partition("/")
    if tree in _MEANINGS:
        return f"{_MEANINGS[tree].replace('the export', other)}, other heads on the same base"
    rule = method.removeprefix("tree_")
    if rule.startswith("lossy"):
        return f"tree, accepting by {rule}"
    return f"our loop with {drafter or 'no drafter'}, up to {nodes} nodes per step"


def _warnings(result: Mapping[str, Any]) -> Section:
    items = disturbance_lines(result)
    items += [f"Rounding does not explain that {line}" for line in failures(dict(result))]
    lossy = [name for (name,) in in_order(result["rows"], "method") if "lossy" in name]
    items += [f"{name} does not keep the base model's distribution" for name in lossy]
    return Section("Warnings", items=tuple(items))


def speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows of batch 1."""
    head = (
        "T", "method", "nodes", "tokens/s", "speed-up (95%)", "vs generate", "prefill ms",
        "decode tokens/s", "decode speed-up (95%)", "accept (95%)", "rep8", "same",
        "peak MiB", "extra parameters",
    )  # fmt: skip
    return Table(head, tuple(_speed_cells(row) for row in rows if row["batch"] == 1))


def _speed_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    prefill = row.get("prefill_seconds")
    decode = row.get("decode_tokens_per_second")
    return (
        f"{row['temperature']:g}",
        row["method"],
        str(row["tree_nodes"]),
        f"{row['tokens_per_second']:.1f}",
        with_bounds(row["speedup_vs_plain"], row["speedup_vs_plain_ci95"], "x"),
        f"{row['speedup_vs_hf_generate']:.2f}x",
        f"{1000 * median(prefill) / row['num_prompts']:.1f}" if prefill else "",
        "" if decode is None else f"{decode:.1f}",
        with_bounds(
            row.get("decode_speedup_vs_plain"), row.get("decode_speedup_vs_plain_ci95"), "x"
        ),
        with_bounds(row["accept_length"], row["accept_length_ci95"]),
        f"{row['rep8']:.2f}",
        same_cell(row),
        f"{row['peak_memory'] / 2**20:.0f}",
        str(row["extra_parameters"]),
    )


def same_cell(row: Mapping[str, Any]) -> str:
    """Return how many outputs are plain decoding's, and how many others first differ at a near-tie.

    Args:
        row: of bench.json; the cell is empty where its outputs were compared with nothing.
    """
    if row["identical"] is None:
        return ""
    ties = f" (+{row['near_ties']})" if row["near_ties"] else ""
    return f"{row['identical']}/{row['compared']}{ties}"


def with_bounds(value: float | None, bounds: Sequence[float] | None, unit: str = "") -> str:
    """Return a value with its interval in brackets; nothing where either is missing."""
    if value is None or bounds is None:
        return ""
    return f"{value:.2f}{unit} ({bounds[0]:.2f}-{bounds[1]:.2f})"


def kinds_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return accept length and speed-up per kind of prompt, drafted methods at batch 1."""
    drafted = [row for row in rows if row["drafter"] and row["batch"] == 1]
    kinds = sorted({kind for row in drafted for kind in row["per_kind"]})
    cells = []
    for row in drafted:
        of = [row["per_kind"].get(kind) for kind in kinds]
        texts = [
            f"{each['accept_length']:.2f}, {each['speedup_vs_plain']:.2f}x" if each else ""
            for each in of
        ]
        cells.append((f"{row['temperature']:g}", row["method"], *texts))
    return Table(("T", "method", *kinds), tuple(cells))


def batches_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return every method's speed per batch size."""
    sizes = sorted({row["batch"] for row in rows})
    by_key = {(row["temperature"], row["method"], row["batch"]): row for row in rows}
    cells = []
    for temperature, method in in_order(list(map(dict, rows)), "temperature", "method"):
        of = [by_key.get((temperature, method, size)) for size in sizes]
        texts = [
            f"{each['tokens_per_second']:.0f} ({each['speedup_vs_plain']:.2f}x)" if each else ""
            for each in of
        ]
        cells.append((f"{temperature:g}", method, *texts))
    return Table(("T", "method", *(f"batch {size}" for size in sizes)), tuple(cells))


def lengths_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return which share of a drafted method's verify steps gained 1, 2, ... tokens."""
    chosen = [each for each in rows if each["drafter"] and each["batch"] == 1]
    chosen = [each for each in chosen if each.get("accept_lengths")]
    longest = max((int(key) for row in chosen for key in row["accept_lengths"]), default=0)
    cells = []
    for row in chosen:
        counts = row["accept_lengths"]
        total = sum(counts.values())
        shares = [f"{counts.get(str(n), 0) / total:.3f}" for n in range(1, longest + 1)]
        cells.append((f"{row['temperature']:g}", row["method"], str(total), *shares))
    return Table(("T", "method", "steps", *map(str, range(1, longest + 1))), tuple(cells))


def sizes_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Return speed by the static tree's size; None where only one was measured."""
    chosen = sorted(
        (row for row in rows if row["batch"] == 1 and is_static_tree(row["method"])),
        key=lambda row: (row["temperature"], row["tree_nodes"]),
    )
    if len({row["tree_nodes"] for row in chosen}) < 2:
        return None
    return Table(
        ("T", "nodes", "accept length", "tokens/s", "speed-up (95%)"),
        tuple(
            (
                f"{row['temperature']:g}",
                str(row["tree_nodes"]),
                f"{row['accept_length']:.2f}",
                f"{row['tokens_per_second']:.1f}",
                with_bounds(row["speedup_vs_plain"], row["speedup_vs_plain_ci95"], "x"),
            )
            for row in chosen
        ),
    )


def _heads(result: Mapping[str, Any], drawn: Mapping[str, str]) -> list[Section]:
    cells = []
    for name, measured in result["heads"].items():
        for each in measured:
            for head in each["heads"]:
                top = head["top"]
                shares = [f"{top[k - 1]:.3f}" if top else "" for k in (1, 2, 3, 5, 10)]
                positions = str(head["num_positions"])
                temperature = f"{each['temperature']:g}"
                cells.append((name, temperature, str(head["head"]), positions, *shares))
    head = ("heads of", "T", "head", "positions", "top 1", "top 2", "top 3", "top 5", "top 10")
    found = [
        Section(
            "What the heads guess",
            (
                "Share of positions, along the texts that plain decoding wrote, at which the token"
                " that came is among a head's first guesses. Head i guesses the token i + 2"
                " positions ahead; sequential heads are told the tokens before it.",
            ),
            table=Table(head, tuple(cells)),
            figure=drawn.get("heads", ""),
        )
    ]
    if drawn.get("tree"):
        found.append(Section("The tree", figure=drawn["tree"]))
    return found


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
    )


def markdown_page(result: Mapping[str, Any]) -> str:
    """Return all figures of a bench as Markdown, without plots.

    Args:
        result: the content of bench.json.
    """
    parts = [f"# Bench of {_text(str(result['settings'].get('checkpoint', 'a model')))}", ""]
    for section in sections(result):
        parts += _section(section)
    return "\n".join(parts)


def _section(section: Section) -> list[str]:
    lines = [f"## {_text(section.title)}", ""]
    for paragraph in section.text:
        lines += [_text(paragraph), ""]
    if section.items:
        lines += [*(f"- {_text(item)}" for item in section.items), ""]
    if section.table:
        lines += [*_table(section.table), ""]
    if section.block:
        fence = "```"
        while fence in section.block:
            fence += "`"
        lines += [fence, section.block, fence, ""]
    return lines


def _table(table: Table) -> list[str]:
    rows = (table.head, ("---",) * len(table.head), *table.rows)
    return ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in rows]


def _text(text: str) -> str:
    """Return ``text`` as Markdown that shows it: names of methods hold underscores, paths more."""
    for sign in "\\`*_{}[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ")


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff;
  max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
nav a { margin-right: 1em }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25em .7em; border-bottom: 1px solid #d9dee4; text-align: left;
  white-space: nowrap }
th { background: #f2f4f7; position: sticky; top: 0 }
td.long { white-space: normal; min-width: 14em }
tr:hover td { background: #f7f9fb }
pre { background: #f2f4f7; padding: .8em; overflow-x: auto; font-size: 12px }
ul.warnings { background: #fdf0d5; padding: .6em 2em }
svg { max-width: 100%; height: auto }
"""
_LONG = 32  # characters; longer cells may break


def html_page(result: Mapping[str, Any]) -> str:
    """Return all figures of a bench with their plots.

    Args:
        result: the content of bench.json.
    """
    title = f"Bench of {result['settings'].get('checkpoint', 'a model')}"
    parts = sections(result, draw(result))
    links = "".join(f'<a href="#s{n}">{escape(each.title)}</a>' for n, each in enumerate(parts))
    body = "\n".join(_html_section(n, section) for n, section in enumerate(parts))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n<nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def _html_section(number: int, section: Section) -> str:
    lines = [f'<h2 id="s{number}">{escape(section.title)}</h2>']
    lines += [f"<p>{escape(paragraph)}</p>" for paragraph in section.text]
    if section.items:
        kind = ' class="warnings"' if section.title == "Warnings" else ""
        items = "".join(f"<li>{escape(item)}</li>" for item in section.items)
        lines.append(f"<ul{kind}>{items}</ul>")
    if section.figure:
        lines.append(f'<div class="wide">{section.figure}</div>')
    if section.table:
        lines.append(_html_table(section.table))
    if section.block:
        lines.append(f"<pre>{escape(section.block)}</pre>")
    return "\n".join(lines)


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>"
    return f'<div class="wide"><table>{body}</table></div>'


def _cell(text: str) -> str:
    kind = ' class="long"' if len(text) > _LONG else ""
    return f"<td{kind}>{escape(text)}</td>"


def format_quality(result: Mapping[str, Any]) -> str:
    """Return the table.

    Args:
        result: the content of quality.json.
    """
    lines = []
    if (read := result["heldout"]) is not None:
        lines += _heldout(read)
    if (texts := result["texts"]) is not None:
        lines.append(
            f"greedy texts of both: {texts['identical']} of {texts['compared']} identical;"
            f" {_with_interval(texts, 'common_prefix', '.1f')} tokens alike before the first"
            f" difference, of {texts['length']:.1f}"
        )
    if result["original"] is None:
        lines.append(result["why_no_original"])
    if (lossy := result["lossy"]) is not None:
        lines += _lossy(lossy, result["rule"])
    return "\n".join(lines)


def _heldout(read: Mapping[str, Any]) -> list[str]:
    lines = [
        f"held-out answers: {read['num_records']} records, {read['num_tokens']:,} tokens",
        f"  perplexity            {_with_interval(read, 'perplexity', '.4f')}",
    ]
    if "kl" not in read:
        return lines
    worse = read["loss_difference"] / read["original_loss"] if read["original_loss"] else 0.0
    return [
        *lines,
        f"  of the original       {_with_interval(read, 'original_perplexity', '.4f')}",
        f"  loss less original's  {_with_interval(read, 'loss_difference', '+.4f')} nats per token,"
        f" {worse:+.1%} of the original's",
        f"  KL(original || this)  {_with_interval(read, 'kl', '.4f')} nats per token",
        f"  same best token       {_with_interval(read, 'same_best', '.4f')} of the tokens",
    ]


def _lossy(found: Mapping[str, Any], rule: str) -> list[str]:
    lines = [
        f"{rule} at T={found['temperature']:g}, {found['compared']} texts, judged by the base:",
        f"  {'':8}{'perplexity':>12}{'95%':>18}{'rep8':>7}{'accept':>8}{'ended':>7}",
    ]
    for name in ("exact", "lossy"):
        of = found[name]
        low, high = of["perplexity_ci95"]
        lines.append(
            f"  {name:8}{of['perplexity']:>12.4f}{f'{low:.4f}-{high:.4f}':>18}{of['rep8']:>7.2f}"
            f"{of['accept_length']:>8.2f}{of['ended']:>7.0%}"
        )
    difference = _with_interval(found, "loss_difference", "+.4f")
    return [
        *lines,
        f"  loss less that of exact texts {difference} nats per token; below 0 the rule writes what"
        " is likelier, not better",
        f"  {found['identical']} of {found['compared']} texts identical;"
        f" {_with_interval(found, 'common_prefix', '.1f')} tokens alike before the first"
        f" difference, of {found['length']:.1f}",
    ]


def _with_interval(found: Mapping[str, Any], key: str, form: str) -> str:
    low, high = found[f"{key}_ci95"]
    return f"{found[key]:{form}} (95%: {low:{form}} to {high:{form}})"


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
