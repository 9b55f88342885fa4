"""The README's figures as Markdown, each block rendered from a file of benchmarks/.

A block stands between ``<!-- figures: NAME -->`` and ``<!-- figures: end -->``; what is between
them is written by ``scripts/plot_readme.py`` and held to the files by ``scripts/check_figures.py``.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Bench = dict[str, Any]

END = "<!-- figures: end -->"
ABSENT = "Not measured yet; `make bench` does."
BLOCK = re.compile(r"(<!-- figures: (?!end )(\S+) -->\n)(.*?)(<!-- figures: end -->)", re.DOTALL)
MIB = 2**20
NAMES = {
    "plain": "plain, one token at a time",
    "hf_generate": "transformers' `generate`",
    "hf_assisted": "transformers' assisted generation, same draft model",
    "hf_lookup": "transformers' prompt lookup",
    "prompt_lookup": "prompt lookup (ours)",
    "tree": "Medusa-1 heads, static tree",
    "tree_dynamic": "Medusa-1 heads, tree of each step",
    "hydra/tree": "Hydra heads, static tree",
    "hydra/tree_dynamic": "Hydra heads, tree of each step",
    "one_by_one": "plain, one prompt after the other",
    "draft": "draft model, chain of 4",
    "draft_tree": "draft model, tree",
    "lookahead": "lookahead",
    "suffix": "suffix copies",
    "heads+suffix": "Medusa-1 heads + suffix copies",
    "draft+suffix": "draft model + suffix copies",
}
MTP_NAMES = NAMES | {
    "tree": "its own heads, static tree",
    "tree_dynamic": "its own heads, tree of each step",
    "heads+suffix": "its own heads + suffix copies",
}
BASELINES = ("plain", "hf_generate")
KINDS = ("tree", "hydra/tree", "draft_tree", "suffix", "heads+suffix")  # of the table by kind


def alone(bench: Bench) -> dict[tuple[str, float], Bench]:
    """Return the rows of batch 1 by method and temperature."""
    return {(r["method"], r["temperature"]): r for r in bench["rows"] if r["batch"] == 1}


def temperatures(bench: Bench) -> list[float]:
    """Return the temperatures that were measured."""
    return sorted({row["temperature"] for row in bench["rows"]})


def ranked(bench: Bench) -> list[str]:
    """Return all methods, the fastest at the lowest temperature first, batches' own ones last."""
    first = temperatures(bench)[0]
    rows = [r for r in bench["rows"] if (r["batch"], r["temperature"]) == (1, first)]
    order = [r["method"] for r in sorted(rows, key=lambda r: -r["speedup_vs_plain"])]
    return list(dict.fromkeys([*order, *(row["method"] for row in bench["rows"])]))


def count_steps(method: str) -> bool:
    """Return whether a method says how many steps it took; transformers' loops do not."""
    return not method.startswith("hf_") and method != "plain"


def same(row: Bench) -> str:
    """Return how many outputs are plain decoding's, and how many of the others are near-ties."""
    if row["identical"] is None:
        return ""
    ties = f" (+{row['near_ties']})" if row["near_ties"] else ""
    return f"{row['identical']}/{row['compared']}{ties}"


def place_of(bench: Bench, row: Bench) -> str:
    """Return prompts, limits, dtype, machine and date, as a table's last line says them."""
    settings, place = bench["settings"], bench["environment"]
    repeats = f"{settings['repeats']} repeat" + "s" * (settings["repeats"] > 1)
    busy = ""
    if place["contended"]:
        busy = f" The machine was disturbed: plain decoding varied {place['baseline_drift']:.2f}x"
        if others := place.get("largest_other_share"):
            busy += f" between repeats, others took up to {others:.0%} of the processors"
        busy += "."
    return (
        f"{row['num_prompts']} held-out prompts of up to {settings['max_new_tokens']} new tokens,"
        f" {repeats}, {row['dtype']}, {place['processor']}, {settings['threads']} threads, torch"
        f" {place['torch'].split('+')[0]}, {place['date']}.{busy}"
    )


def speed_table(bench: Bench, names: dict[str, str]) -> str:
    """Return speed-ups over plain decoding, accept lengths and identity, a line per method."""
    rows, heats = alone(bench), temperatures(bench)
    first, last = heats[0], heats[-1]
    speeds = " | ".join(f"T={t:g}: speed-up (95%)" if t == first else f"T={t:g}" for t in heats)
    lines = [
        f"| drafter | {speeds} | accept length, T={first:g} / {last:g} | rep8 | same |",
        "|---" * (len(heats) + 4) + "|",
    ]
    for method in ranked(bench):
        cells = []
        for heat in heats:
            row = rows[method, heat]
            low, high = row["speedup_vs_plain_ci95"]
            cells.append(f"{row['speedup_vs_plain']:.2f} ({low:.2f}-{high:.2f})")
        if method == "plain":
            cells = ["1"] * len(heats)
        greedy, warm = rows[method, first], rows[method, last]
        steps = f"{greedy['accept_length']:.2f} / {warm['accept_length']:.2f}"
        cells.append(steps if count_steps(method) else "")
        cells += [f"{greedy['rep8']:.2f}", same(greedy)]
        lines.append(f"| {names.get(method, method)} | {' | '.join(cells)} |")
    plain = ", ".join(f"{rows['plain', t]['tokens_per_second']:.0f}" for t in heats)
    at = ", ".join(f"{t:g}" for t in heats)
    lines += [
        "",
        f"Plain decoding: {plain} tokens per second at T={at}. rep8 (share of repeated 8-grams) and"
        f" same (outputs equal to plain decoding's, token by token; in brackets those that first"
        f" differ at a near-tie) are at T={first:g}. {place_of(bench, rows['plain', first])}",
    ]
    return "\n".join(lines)


def drafters(folder: Path) -> str:
    """Render all drafters on the embedded base."""
    return speed_table(read(folder, "drafters"), NAMES)


def summary(folder: Path) -> str:
    """Render what the table of drafters says, in three lines."""
    bench = read(folder, "drafters")
    rows, heats = alone(bench), temperatures(bench)

    def line(method: str) -> str:
        speeds = [f"{rows[method, t]['speedup_vs_plain']:.2f}x" for t in heats]
        return f"{NAMES.get(method, method)} {', '.join(speeds)}"

    order = [method for method in ranked(bench) if method not in BASELINES]
    trained = [
        m for m in order if m.split("/")[-1] in ("tree", "tree_dynamic", "draft", "draft_tree")
    ]
    slower = [m for m in order if all(rows[m, t]["speedup_vs_plain"] < 1 for t in heats)]
    at = ", ".join(f"{t:g}" for t in heats)
    lines = [
        f"Speed-up over plain decoding at T={at}, on the embedded model:",
        "",
        f"- the fastest of {len(order)}: {line(order[0])};",
        f"- the fastest that is trained and copies nothing: {line(trained[0])};",
        f"- slower than plain decoding at every temperature: "
        f"{'; '.join(line(method) for method in slower) or 'none'}.",
    ]
    return "\n".join(lines)


def kinds(folder: Path) -> str:
    """Render accept length and speed-up per kind of prompt."""
    bench = read(folder, "drafters")
    rows, heats = alone(bench), temperatures(bench)
    columns = sorted(rows["plain", heats[0]]["per_kind"])
    lines = [
        f"| T | drafter | {' | '.join(f'`{kind}`' for kind in columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for heat in (heats[0], heats[-1]):
        for method in KINDS:
            found = rows[method, heat]["per_kind"]
            cells = [
                f"{found[kind]['accept_length']:.2f} ({found[kind]['speedup_vs_plain']:.2f}x)"
                for kind in columns
            ]
            lines.append(f"| {heat:g} | {NAMES[method]} | {' | '.join(cells)} |")
    counts = {found["num_prompts"] for found in rows["plain", heats[0]]["per_kind"].values()}
    prompts = " or ".join(f"{count}" for count in sorted(counts))
    lines += ["", f"Accept length (speed-up over plain decoding), {prompts} prompts of each kind."]
    return "\n".join(lines)


def mtp(folder: Path) -> str:
    """Render the byte model that predicts eight tokens at once."""
    return speed_table(read(folder, "mtp_byte"), MTP_NAMES)


def batches(folder: Path) -> str:
    """Render speeds over the batch size, and where plain decoding catches up."""
    bench = read(folder, "batches")
    heats, sizes = temperatures(bench), sorted({row["batch"] for row in bench["rows"]})
    rows = {(r["method"], r["temperature"], r["batch"]): r for r in bench["rows"]}
    lines = [
        "![Speed-up over the batch size](docs/batches.svg)",
        "",
        f"| T | method | {' | '.join(f'batch {s}' if s == 1 else f'{s}' for s in sizes)} |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for heat in (heats[0], heats[-1]):
        for method in ranked(bench):
            cells = []
            for size in sizes:
                row = rows.get((method, heat, size))
                if row is None:
                    cells.append("")  # measured at some sizes only
                    continue
                ratio = "" if method == "plain" else f" ({row['speedup_vs_plain']:.2f}x)"
                cells.append(f"{row['tokens_per_second']:.0f}{ratio}")
            lines.append(f"| {heat:g} | {NAMES.get(method, method)} | {' | '.join(cells)} |")
    caught = [
        f"{NAMES.get(e['method'], e['method'])} at batch {e['batch']} (T={e['temperature']:g})"
        for e in bench["crossover"]
        if e["batch"] is not None
    ]
    found = (
        f"Plain decoding catches up with {'; '.join(caught)}."
        if caught
        else f"Up to batch {sizes[-1]} plain decoding catches up with none of the drafters."
    )
    lines += [
        "",
        f"Tokens per second (speed-up over plain decoding in batches of the same size). {found}"
        f" {place_of(bench, rows['plain', heats[0], 1])}",
    ]
    return "\n".join(lines)


def float32(folder: Path) -> str:
    """Render how many outputs are identical where rounding hardly matters."""
    bench = read(folder, "float32")
    rows, heats = alone(bench), temperatures(bench)
    methods = [m for m in ranked(bench) if count_steps(m)]
    held = [rows[m, t] for m in methods for t in heats if rows[m, t]["identical"] is not None]
    equal, compared = sum(r["identical"] for r in held), sum(r["compared"] for r in held)
    ties = sum(r["near_ties"] for r in held)
    rest = f"; {ties} of the others first differ at a near-tie" if equal < compared else ""
    at = ", ".join(f"{t:g}" for t in heats)
    return (
        f"In float32 {equal} of {compared} outputs of {len(methods)} drafters are plain decoding's,"
        f" token by token (T={at}{rest}). {place_of(bench, rows['plain', heats[0]])}"
    )


def memory(folder: Path) -> str:
    """Render peaks of a training step over the number of heads."""
    report = read(folder, "mtp_memory")
    rows = {(row["side"], row["num_heads"]): row for row in report["rows"]}
    lines = ["| heads | ours, MiB | growth | naive, MiB | growth |", "|---" * 5 + "|"]
    for count in sorted({count for _, count in rows}):
        cells = []
        for side in ("ours", "naive"):
            row = rows[side, count]
            cells += [f"{row['allocator_peak'] / MIB:,.0f}", f"{row['growth']:.1%}"]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    settings, place = report["settings"], report["environment"]
    clocked = [
        f"{statistics.median(each['ours']['seconds']):.2f} s against "
        f"{statistics.median(each['naive']['seconds']):.2f} s "
        + (
            "with freed memory kept"
            if each["allocator"] == "kept"
            else "with the system's allocator"
        )
        for each in report["times"]
    ]
    lines += [
        "",
        f"Peak of the allocator in a training step, and its growth over one head, the heads' own"
        f" parameters and gradients left out; a step with {settings['timed_heads']} heads takes"
        f" {', '.join(clocked)}. Vocabulary of {settings['vocab']:,}, {settings['tokens']:,}"
        f" tokens, float32, {place['processor']}, one thread, {place['date']}.",
    ]
    return "\n".join(lines)


def hydra(folder: Path) -> str:
    """Render the quickstart's heads beside the baselines, a line per method and temperature."""
    bench = read(folder.parent, "tinycode_hydra")
    lines = [
        "| T | method | tokens/s | speed-up (95%) | vs generate | accept length | rep8 | same |",
        "|---" * 8 + "|",
    ]
    names = NAMES | {"tree": NAMES["hydra/tree"], "tree_dynamic": NAMES["hydra/tree_dynamic"]}
    for row in bench["rows"]:
        low, high = row["speedup_vs_plain_ci95"]
        steps = f"{row['accept_length']:.2f}" if count_steps(row["method"]) else ""
        lines.append(
            f"| {row['temperature']:g} | {names[row['method']]} | {row['tokens_per_second']:.0f} "
            f"| {row['speedup_vs_plain']:.2f} ({low:.2f}-{high:.2f}) "
            f"| {row['speedup_vs_hf_generate']:.2f} | {steps} | {row['rep8']:.2f} | {same(row)} |"
        )
    head, plain = bench["headline"], bench["rows"][0]
    lines += [
        "",
        f"Plain greedy output repeats {head['rep8_plain_greedy']:.0%} of its 8-grams, so the"
        f" headline is T={head['temperature']:g}, {names[head['method']]}:"
        f" {head['speedup_vs_plain']:.2f}x plain decoding. {place_of(bench, plain)}",
    ]
    return "\n".join(lines)


RENDERERS: dict[str, Callable[[Path], str]] = {
    "drafters": drafters,
    "summary": summary,
    "kinds": kinds,
    "mtp": mtp,
    "batches": batches,
    "float32": float32,
    "memory": memory,
    "hydra": hydra,  # of BENCHMARKS.md
}


def read(folder: Path, name: str) -> Bench:
    """Return a file of ``folder``."""
    found: Bench = json.loads((folder / f"{name}.json").read_text())
    return found


def rendered(name: str, folder: Path) -> str:
    """Return a block's content; a line that says so where nothing was measured yet.

    Raises:
        SystemExit: if there is no such block.
    """
    if name not in RENDERERS:
        raise SystemExit(f"no block is called {name}; there are {', '.join(RENDERERS)}")
    try:
        return RENDERERS[name](folder)
    except FileNotFoundError:
        return ABSENT


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return name and content of every block of ``page``."""
    return [(name, content.strip()) for _, name, content, _ in BLOCK.findall(page)]


def fill(page: str, folder: Path) -> str:
    """Return ``page`` with every block rendered anew."""
    return BLOCK.sub(lambda m: f"{m[1]}{rendered(m[2], folder)}\n{m[4]}", page)


def differing(page: str, folder: Path) -> Sequence[str]:
    """Return the names of the blocks that are not what their files say."""
    return [name for name, content in blocks_of(page) if content != rendered(name, folder).strip()]
