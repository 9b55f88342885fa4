"""Draw the README's figure and fill its table from a bench: ``python scripts/plot_readme.py``.

Reads benchmarks/tinycode_hydra.json; writes docs/speed.svg and the lines between the table's
marks in README.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "benchmarks" / "tinycode_hydra.json"
FIGURE = ROOT / "docs" / "speed.svg"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
NAMES = {
    "plain": "plain",
    "hf_generate": "transformers generate",
    "prompt_lookup": "prompt lookup",
    "tree": "Hydra heads, static tree",
    "tree_dynamic": "Hydra heads, tree of each step",
}
COLORS = {
    "plain": "#9aa5b1",
    "hf_generate": "#c9ced6",
    "prompt_lookup": "#e0b15e",
    "tree": "#7fb0d3",
    "tree_dynamic": "#2f6f9f",
}


def format_table(bench: dict[str, Any]) -> str:
    """Return the README's table and the line under it, in Markdown."""
    lines = [
        "| T | method | tokens/s | speed-up (95%) | vs generate | accept length | rep8 | same |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in bench["rows"]:
        if row["method"] not in NAMES or row["batch"] > 1:
            continue
        low, high = row["speedup_vs_plain_ci95"]
        same = "" if row["identical"] is None else f"{row['identical']}/{row['compared']}"
        if row["near_ties"]:
            same += f" (+{row['near_ties']} near ties)"
        lines.append(
            f"| {row['temperature']:g} | {NAMES[row['method']]} | {row['tokens_per_second']:.0f} "
            f"| {row['speedup_vs_plain']:.2f} ({low:.2f}-{high:.2f}) "
            f"| {row['speedup_vs_hf_generate']:.2f} | {row['accept_length']:.2f} "
            f"| {row['rep8']:.2f} | {same} |"
        )
    place, settings, head = bench["environment"], bench["settings"], bench["headline"]
    nodes = {row["method"]: row["tree_nodes"] for row in bench["rows"]}
    trees = f"static tree of {nodes['tree']} nodes"
    if "tree_dynamic" in nodes:
        trees += f", trees of each step of {nodes['tree_dynamic']}"
    tree = next(row for row in bench["rows"] if row["method"] == "tree")
    lines += [
        "",
        "Same: outputs identical to plain decoding, token by token. "
        f"{tree['num_prompts']} held-out prompts of up to {settings['max_new_tokens']} new tokens, "
        f"{tree['dtype']}, batch 1, {place['processor']}, {settings['threads']} threads, "
        f"torch {place['torch']}; {trees}. "
        f"Plain greedy output repeats {head['rep8_plain_greedy']:.0%} of its 8-grams, so the "
        f"headline is T={head['temperature']:g}, {NAMES[head.get('method', 'tree')]}: "
        f"{head['speedup_vs_plain']:.2f}x plain decoding.",
    ]
    return "\n".join(lines)


def fill_table(readme: str, table: str) -> str:
    """Return ``readme`` with ``table`` between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def draw(bench: dict[str, Any], path: Path) -> None:
    """Draw tokens per second by temperature, and accept length by kind of prompt."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "specheads"  # same figures, same file
    from matplotlib import pyplot as plt

    alone = [row for row in bench["rows"] if row["batch"] == 1]
    rows = {(row["method"], row["temperature"]): row for row in alone}
    temperatures = bench["settings"]["temperatures"]
    names = {name: NAMES[name] for name in NAMES if (name, temperatures[0]) in rows}
    best = bench["headline"].get("method", "tree")
    width = 0.8 / len(names)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for index, (method, name) in enumerate(names.items()):
        places = [n + (index - (len(names) - 1) / 2) * width for n in range(len(temperatures))]
        speeds = [rows[method, t]["tokens_per_second"] for t in temperatures]
        bars = left.bar(places, speeds, width, color=COLORS[method], label=name)
        if method == best:
            times = [f"{rows[method, t]['speedup_vs_plain']:.2f}x" for t in temperatures]
            left.bar_label(bars, labels=times, fontsize=9)
    left.set_xticks(range(len(temperatures)), [f"T={t:g}" for t in temperatures])
    left.set_ylabel("tokens per second")
    left.margins(y=0.15)
    left.legend(frameon=False, fontsize=8)
    headline = bench["headline"]["temperature"]
    kinds = sorted(rows[best, headline]["per_kind"])
    for index, method in enumerate(("prompt_lookup", best)):
        places = [n + (index - 0.5) * 0.38 for n in range(len(kinds))]
        lengths = [rows[method, headline]["per_kind"][kind]["accept_length"] for kind in kinds]
        right.bar(places, lengths, 0.38, color=COLORS[method], label=NAMES[method])
    right.axhline(1, color="#9aa5b1", linewidth=1)
    right.set_xticks(range(len(kinds)), kinds, rotation=20, fontsize=8)
    right.set_ylabel(f"accept length at T={headline:g}")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Draw and fill."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bench", type=Path, nargs="?", default=BENCH)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    arguments = parser.parse_args()
    bench = json.loads(arguments.bench.read_text())
    draw(bench, arguments.figure)
    readme = arguments.readme.read_text()
    arguments.readme.write_text(fill_table(readme, format_table(bench)))
    print(f"wrote {arguments.figure} and the table of {arguments.readme}")


if __name__ == "__main__":
    main()
