"""A bench as a page: its sections, whatever they are written in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specheads.decoding.paired import format_pairs
from specheads.decoding.report import failures, in_order
from specheads.decoding.stats import median
from specheads.decoding.tables import (
    crossover_lines,
    disturbance_lines,
    format_divergences,
    headline_line,
)

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
        figures: SVG by name, of :func:`specheads.decoding.plots.draw`; None for a page of text.
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
        Section("One prompt at a time", (_COLUMNS,), table=speed_table(rows)),
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


_COLUMNS = (
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


def is_static_tree(method: str) -> bool:
    """Return whether a method is the export's heads in a static tree: ``tree`` or ``tree_<N>``."""
    return method == "tree" or method.removeprefix("tree_").isdecimal()


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
