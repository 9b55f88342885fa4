"""Pictures of what was measured: the plots of a bench as SVG, a tree as SVG or as text.

matplotlib is loaded when plots are drawn. In both pictures of a tree a line is as wide (or a bar as
long) as the probability that its node is accepted; in the SVG a node's width splits among its
children, and what is not passed on is where steps end there.
"""

from __future__ import annotations

import colorsys
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specheads.attention.tree import Choice, Tree
from specheads.measure.rows import in_order, only_copies
from specheads.system.files import filled

_BAR = 40  # characters of a certain node
_WIDE = 150.0  # pixels of a certain node
_ROW = 15.0  # least height of a node, for its label
_GAP = 4.0
_COLUMN = 118.0
_LEFT, _TOP, _MARGIN = 24.0, 84.0, 28.0
_NOTE, _LETTER = 640.0, 9.5  # what the line below the title takes, and a letter of the title
_BLOCKS = " ▏▎▍▌▋▊▉█"  # eighths of a character


Below = dict[Choice, list[tuple[Choice, float]]]  # node -> its children and their probabilities


def _below(tree: Tree, acceptance: Sequence[float]) -> Below:
    below: Below = {choice: [] for choice in ((), *tree.choices)}
    for choice, chance in zip(tree.choices, acceptance, strict=True):
        below[choice[:-1]].append((choice, chance))
    return below


def tree_text(tree: Tree, acceptance: Sequence[float]) -> str:
    """Draw a tree as lines of text: the rank of every guess, a bar, and its probability.

    Args:
        tree: what to draw.
        acceptance: per choice the probability that it is accepted.

    Raises:
        ValueError: if their numbers differ.
    """
    rows: list[tuple[str, float]] = []
    below = _below(tree, acceptance)

    def add(node: Choice, prefix: str) -> None:
        for left, (child, chance) in enumerate(below[node], start=1 - len(below[node])):
            rows.append((f"{prefix}{'├─' if left else '└─'}{child[-1]} ", chance))
            add(child, prefix + ("│ " if left else "  "))

    add((), "")
    width = max((len(label) for label, _ in rows), default=0)
    lines = ["root"]
    for label, chance in rows:
        eighths = max(1, round(chance * _BAR * 8))
        bar = "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")
        lines.append(f"{label.ljust(width)}{bar} {chance:.2f}")
    return "\n".join(lines)


def tree_svg(tree: Tree, acceptance: Sequence[float], *, title: str) -> str:
    """Draw a tree from left to right, every edge as wide as the probability of its node.

    Args:
        tree: what to draw.
        acceptance: per choice the probability that it is accepted.
        title: text above it.

    Raises:
        ValueError: if their numbers differ.
    """
    nodes: list[Shape] = []
    height = _place((), 1.0, _TOP, _below(tree, acceptance), nodes)
    columns = [f"{_x(depth):.0f}" for depth in range(tree.max_depth + 1)]
    return filled(
        Path(__file__).with_name("tree.svg.j2"),
        width=f"{max(_x(tree.max_depth + 1), _NOTE, 2 * _LEFT + _LETTER * len(title)):.0f}",
        height=f"{_TOP + height + _MARGIN:.0f}",
        title=title,
        columns=columns,
        nodes=nodes,
    )


# of a node its left end, top, thickness, rank and probability; of the edges to its children where
# they start and end from above, and their thickness
Shape = tuple[float, float, float, int | None, float, list[tuple[float, float, float]]]


def _x(depth: int) -> float:
    return _LEFT + _COLUMN * depth


def _place(node: Choice, chance: float, top: float, below: Below, nodes: list[Shape]) -> float:
    """Place a node, and those below it beneath each other; return their height together."""
    thick, start, place = _WIDE * chance, top, top
    edges = []
    for child, share in below[node]:
        edges.append((start, place, _WIDE * share))
        start += _WIDE * share
        place += _place(child, share, place, below, nodes) + _GAP
    rank = node[-1] if node else None
    nodes.append((_x(len(node)), top, thick, rank, chance, edges))
    return max(thick, _ROW, place - _GAP - top)


# beside each other on white and on black, and told apart by people who do not see red or green
_COLORS = (
    "#3b82b8", "#e0b15e", "#4b9b86", "#b0578d", "#7fb0d3", "#c4653a", "#7b7ee0", "#9a9a35",
    "#d98fb5", "#8a6b52",
)  # fmt: skip
_BASELINE, _TEXT = "#9aa5b1", "#000000"  # black becomes the page's own colour of text
_BASELINES = {"plain": (_TEXT, "-"), "one_by_one": ("#7d8894", ":")}
_TURN = 0.618034  # of the circle of hues, which so comes nowhere twice


def _color(index: int) -> str:
    """Return the colour of the method of this number; no two methods share one."""
    if index < len(_COLORS):
        return _COLORS[index]
    rgb = colorsys.hls_to_rgb(index * _TURN % 1, 0.55, 0.55)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def draw(result: Mapping[str, Any]) -> dict[str, str]:
    """Return all plots that the figures allow, by name.

    Args:
        result: the content of bench.json.

    Returns:
        ``speed`` over temperatures; ``batches`` where several sizes were measured.
    """
    rows: list[dict[str, Any]] = result["rows"]
    temperature = result["headline"]["temperature"]
    here = [row for row in rows if row["temperature"] == temperature]
    alone = [row for row in rows if row["batch"] == 1]
    methods = dict.fromkeys(row["method"] for row in rows if row["drafter"])
    colors = {method: _color(index) for index, method in enumerate(methods)}
    at = f"T={temperature:g}"
    found = {"speed": _draw("speed", lambda axes: _speed(axes, alone, colors))}
    if len({row["batch"] for row in rows}) > 1:
        found["batches"] = _draw("batches", lambda axes: _batches(axes, here, colors, at), 2)
    return found


Axes = Sequence[Any]
Rows = Sequence[Mapping[str, Any]]
Colors = Mapping[str, str]


def _draw(name: str, paint: Callable[[Axes], None], panels: int = 1) -> str:
    """Return a figure's SVG, which the page's colours reach; the same figures, the same bytes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "specheads", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.0, 3.8), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
        paint(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    svg = out.getvalue().replace(_TEXT, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # pictures of one page must not share names of parts
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg[svg.index("<svg") :]


def _label(ax: Any, title: str, y: str, x: str = "") -> None:
    ax.set_title(title, fontsize=10)
    ax.set_ylabel(y)
    ax.set_xlabel(x)


def _speed(axes: Axes, rows: Rows, colors: Colors) -> None:
    """Draw speed-ups side by side, a group per temperature, with their intervals.

    What is trained is filled, what only copies is hatched.
    """
    (ax,) = axes
    temperatures = sorted({row["temperature"] for row in rows})
    methods = [method for (method,) in in_order(rows, "method") if method != "plain"]
    width = 0.84 / max(len(methods), 1)
    for index, method in enumerate(methods):
        of = [row for row in rows if row["method"] == method]
        shift = (index - (len(methods) - 1) / 2) * width
        places = [temperatures.index(row["temperature"]) + shift for row in of]
        color = colors.get(method, _BASELINE)
        look = {"color": color}
        if only_copies(of[0]):
            look = {"facecolor": "none", "edgecolor": color, "hatch": "////"}
        ax.bar(places, [row["speedup_vs_plain"] for row in of], width, label=method, **look)
        bounds = zip(*(row["speedup_vs_plain_ci95"] for row in of), strict=True)
        ax.vlines(places, *bounds, color=_TEXT, linewidth=0.8)
    ax.axhline(1, color=_BASELINE, linewidth=1)
    ax.set_xticks(range(len(temperatures)), [f"T={each:g}" for each in temperatures], fontsize=8)
    ax.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    title = "One prompt at a time, with 95% intervals; hatched: copies, nothing trained"
    _label(ax, title, "speed-up over plain decoding")


def _batches(axes: Axes, rows: Rows, colors: Colors, at: str) -> None:
    left, right = axes
    sizes = sorted({row["batch"] for row in rows})
    for (method,) in in_order(rows, "method"):
        of = sorted((r for r in rows if r["method"] == method), key=lambda row: row["batch"])
        batches = [row["batch"] for row in of]
        color, line = _BASELINES.get(method, (_BASELINE, "-."))
        if method in colors:
            color, line = colors[method], "--" if only_copies(of[0]) else "-"
        look = {"color": color, "marker": "o", "markersize": 3, "linestyle": line}
        left.plot(batches, [row["tokens_per_second"] for row in of], label=method, **look)
        if method in colors:
            right.plot(batches, [row["speedup_vs_plain"] for row in of], **look)
    right.axhline(1, color=_BASELINE, linewidth=1)
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
    _label(left, f"In batches, {at}; dashed: copies", "tokens per second", "batch")
    _label(right, "Speed-up in batches", "over plain decoding in that batch", "batch")
    left.legend(frameon=False, fontsize=7)
