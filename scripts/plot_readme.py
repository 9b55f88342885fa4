"""Draw the README's figures and write marked blocks: ``python scripts/plot_readme.py``.

Reads benchmarks/readme/; writes docs/speed.svg, docs/batches.svg and what stands between the marks
of README.md and BENCHMARKS.md. ``scripts/bench_mtp_memory.py`` draws docs/mtp_memory.svg itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

from readme_blocks import NAMES, alone, blocks_of, fill, ranked, read, temperatures

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "readme"
FIGURES = ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "BENCHMARKS.md")
SHADES = ("#2f6f9f", "#6fa3c7", "#e0b15e", "#c9ced6")  # from the lowest temperature on
LINES = ("#2f6f9f", "#7fb0d3", "#e0b15e", "#b5651d", "#6b8e23", "#9aa5b1", "#8e5ea2", "#333333")


def pyplot() -> Any:
    """Return matplotlib's pyplot, set to draw the same file from the same figures."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "specheads"
    from matplotlib import pyplot as plt

    return plt


def draw_speed(bench: dict[str, Any], path: Path) -> None:
    """Draw every method's speed-up by temperature, and accept length by kind of prompt."""
    plt = pyplot()
    rows, heats = alone(bench), temperatures(bench)
    methods = [method for method in ranked(bench) if method != "plain"][::-1]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 0.36 * len(methods) + 1.4), layout="constrained", width_ratios=(3, 2)
    )
    width = 0.8 / len(heats)
    for index, heat in enumerate(heats):
        places = [n + ((len(heats) - 1) / 2 - index) * width for n in range(len(methods))]
        found = [rows[method, heat] for method in methods]
        speeds = [row["speedup_vs_plain"] for row in found]
        bounds = [row["speedup_vs_plain_ci95"] for row in found]
        errors = [
            [max(0.0, speed - low) for speed, (low, _) in zip(speeds, bounds, strict=True)],
            [max(0.0, high - speed) for speed, (_, high) in zip(speeds, bounds, strict=True)],
        ]
        color = SHADES[index % len(SHADES)]
        style = {"ecolor": "#555555", "elinewidth": 0.7}
        left.barh(
            places, speeds, width, xerr=errors, color=color, label=f"T={heat:g}", error_kw=style
        )
    left.axvline(1, color="#333333", linewidth=1)
    names = [NAMES.get(method, method).replace("`", "") for method in methods]
    left.set_yticks(range(len(methods)), names, fontsize=8)
    left.set_xlabel("speed-up over plain decoding (95%)")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    kinds = sorted(rows["plain", heats[0]]["per_kind"])
    shown = [m for m in ("hydra/tree", "suffix", "heads+suffix") if (m, heats[0]) in rows]
    for index, method in enumerate(shown):
        places = [n + (index - (len(shown) - 1) / 2) * 0.8 / len(shown) for n in range(len(kinds))]
        lengths = [rows[method, heats[0]]["per_kind"][kind]["accept_length"] for kind in kinds]
        right.bar(places, lengths, 0.8 / len(shown), color=LINES[index], label=NAMES[method])
    right.axhline(1, color="#333333", linewidth=1)
    right.set_xticks(range(len(kinds)), kinds, rotation=25, fontsize=8)
    right.set_ylabel(f"accept length at T={heats[0]:g}")
    right.margins(y=0.22)  # room for the legend
    right.legend(frameon=False, fontsize=8, loc="upper left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_batches(bench: dict[str, Any], path: Path) -> None:
    """Draw speed-ups over the batch size; at 1 plain decoding in such batches is as fast."""
    plt = pyplot()
    heats = temperatures(bench)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    for axes, heat in zip(panels, (heats[0], heats[-1]), strict=True):
        for index, method in enumerate(m for m in ranked(bench) if m != "plain"):
            found = [r for r in bench["rows"] if (r["method"], r["temperature"]) == (method, heat)]
            found.sort(key=lambda row: row["batch"])
            sizes = [row["batch"] for row in found]
            speeds = [row["speedup_vs_plain"] for row in found]
            color, name = LINES[index % len(LINES)], NAMES.get(method, method).replace("`", "")
            axes.plot(sizes, speeds, "o-", color=color, label=name, markersize=3)
        axes.axhline(1, color="#333333", linewidth=1)
        axes.set_xscale("log", base=2)
        ticks = sorted({row["batch"] for row in bench["rows"]})
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.set_xlabel(f"batch, T={heat:g}")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("speed-up over plain decoding\nin batches of that size")
    panels[1].legend(frameon=False, fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def render(folder: Path, figures: Path, pages: Sequence[Path]) -> list[str]:
    """Draw and fill what was measured; return a line for each thing written or missing."""
    lines = []
    for name, draw, source in (
        ("speed.svg", draw_speed, "drafters"),
        ("batches.svg", draw_batches, "batches"),
    ):
        if not (folder / f"{source}.json").is_file():
            lines.append(f"{folder / source}.json is not there: {name} was not drawn")
            continue
        draw(read(folder, source), figures / name)
        lines.append(f"wrote {figures / name}")
    for page in pages:
        text = page.read_text()
        page.write_text(fill(text, folder))
        written = [name for name, _ in blocks_of(text)]
        lines.append(f"wrote {len(written)} blocks of {page}: {', '.join(written)}")
    return lines


def main() -> None:
    """Draw and fill."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the measurements")
    parser.add_argument("--figures", type=Path, default=FIGURES)
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES)
    args = parser.parse_args()
    for line in render(args.folder, args.figures, args.pages):
        print(line)


if __name__ == "__main__":
    main()
