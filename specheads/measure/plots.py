"""The plots of a bench, as SVG to be set into a page; matplotlib is loaded when they are drawn.

Draw a tree with what it is expected to gain: as text for a terminal, and as SVG.

In both, a line is as wide (or a bar as long) as the probability that its node is accepted. In the
picture a node's width splits among its children; what is not passed on is where steps end there.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from specheads.attention.tree import Choice, Tree
from specheads.config import ConfigError
from specheads.measure.rows import is_static_tree

_BAR = 40  # characters of a certain node
_WIDE = 150.0  # pixels of a certain node
_ROW = 15.0  # least height of a node, for its label
_GAP = 4.0
_COLUMN = 118.0
_LEFT, _TOP, _MARGIN = 24.0, 84.0, 28.0
_BLOCKS = " ▏▎▍▌▋▊▉█"  # eighths of a character


@dataclass
class _Node:
    """A node and where it is drawn; ``height`` is that of everything below it together."""

    choice: Choice
    chance: float
    children: list[_Node] = field(default_factory=list)
    top: float = 0.0
    height: float = 0.0


def _nested(tree: Tree, acceptance: Sequence[float]) -> _Node:
    if len(acceptance) != len(tree.choices):
        raise ValueError(f"{len(acceptance)} probabilities for {len(tree.choices)} choices")
    root = _Node((), 1.0)
    nodes: dict[Choice, _Node] = {(): root}
    for choice, chance in zip(tree.choices, acceptance, strict=True):
        nodes[choice] = _Node(choice, chance)
        nodes[choice[:-1]].children.append(nodes[choice])
    return root


def tree_text(tree: Tree, acceptance: Sequence[float]) -> str:
    """Draw a tree as lines of text: the rank of every guess, a bar, and its probability.

    Args:
        tree: what to draw.
        acceptance: per choice the probability that it is accepted.

    Raises:
        ValueError: if their numbers differ.
    """
    rows: list[tuple[str, float]] = []

    def add(node: _Node, prefix: str) -> None:
        for child in node.children:
            last = child is node.children[-1]
            rows.append((f"{prefix}{'└─' if last else '├─'}{child.choice[-1]} ", child.chance))
            add(child, prefix + ("  " if last else "│ "))

    add(_nested(tree, acceptance), "")
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
    root = _nested(tree, acceptance)
    _measure(root)
    _place(root, _TOP)
    width = max(_LEFT + _COLUMN * (tree.max_depth + 1), 520.0)
    height = _TOP + root.height + _MARGIN
    shapes: list[str] = []
    _draw_tree(root, shapes)
    heads = [
        f'<text class="quiet" x="{_x(depth):.0f}" y="{_TOP - 14:.0f}">'
        + ("root" if depth == 0 else f"head {depth - 1}")
        + "</text>"
        for depth in range(tree.max_depth + 1)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            "<style>text { font: 12px system-ui, sans-serif; fill: #1f2933 } "
            ".title { font-size: 15px; font-weight: 600 } .quiet { fill: #66727f } "
            ".rank { font-weight: 600 } .label { paint-order: stroke; stroke: #fff; "
            "stroke-width: 3px; stroke-opacity: .6; stroke-linejoin: round } "
            ".edge { fill: #2f7ebc; fill-opacity: .38 } .node { fill: #17527f }</style>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text class="title" x="{_LEFT:.0f}" y="28">{escape(title)}</text>',
            f'<text class="quiet" x="{_LEFT:.0f}" y="47">Width: probability that the guess is '
            "accepted. Bold: its rank among the head's guesses.</text>",
            *heads,
            *shapes,
            "</svg>",
            "",
        ]
    )


def _x(depth: int) -> float:
    return _LEFT + _COLUMN * depth


def _measure(node: _Node) -> None:
    for child in node.children:
        _measure(child)
    below = sum(child.height for child in node.children) + _GAP * max(len(node.children) - 1, 0)
    node.height = max(_WIDE * node.chance, _ROW, below)


def _place(node: _Node, top: float) -> None:
    node.top = top
    for child in node.children:
        _place(child, top)
        top += child.height + _GAP


def _draw_tree(node: _Node, shapes: list[str]) -> None:
    x, thick = _x(len(node.choice)), _WIDE * node.chance
    start = node.top
    for child in node.children:
        wide = _WIDE * child.chance
        right = _x(len(child.choice))
        middle = (x + right) / 2
        shapes.append(
            f'<path class="edge" d="M{x + 4:.1f} {start:.1f}C{middle:.1f} {start:.1f} '
            f"{middle:.1f} {child.top:.1f} {right:.1f} {child.top:.1f}v{wide:.1f}"
            f"C{middle:.1f} {child.top + wide:.1f} {middle:.1f} {start + wide:.1f} "
            f'{x + 4:.1f} {start + wide:.1f}z"/>'
        )
        start += wide
        _draw_tree(child, shapes)
    shapes.append(
        f'<rect class="node" x="{x:.1f}" y="{node.top:.1f}" width="4" '
        f'height="{max(thick, 1):.1f}"/>'
    )
    if node.choice:
        middle = node.top + max(thick / 2, 4) + 4
        shapes.append(
            f'<text class="label" x="{x + 8:.1f}" y="{middle:.1f}">'
            f'<tspan class="rank">{node.choice[-1]}</tspan>'
            f'<tspan dx="5">{node.chance:.2f}</tspan></text>'
        )


# beside each other on white, and told apart by people who do not see red or green
_COLORS = (
    "#2f6f9f", "#e0b15e", "#4b9b86", "#b0578d", "#7fb0d3", "#c4653a", "#6b6ecf", "#8c8c2f",
    "#66727f", "#111111",
)  # fmt: skip
_BASELINE = "#9aa5b1"
_BASELINES = {"plain": ("#111111", "-"), "one_by_one": ("#66727f", ":")}


def check_plots(key: str, value: str) -> None:
    """Refuse a page with plots where they cannot be drawn.

    Args:
        key: the setting that asks for it.
        value: its value.

    Raises:
        ConfigError: without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{key}={value} needs matplotlib, which is not installed:"
            " python -m pip install 'specheads[plots]'"
        )


def draw(result: Mapping[str, Any]) -> dict[str, str]:
    """Return all plots that the figures allow, by name.

    Args:
        result: the content of bench.json.

    Returns:
        ``speed`` over temperatures, ``kinds`` of prompts, ``lengths`` that were accepted;
        ``batches`` where several were measured, ``sizes`` of static trees likewise; ``heads`` and
        ``tree`` where heads were.
    """
    rows: list[dict[str, Any]] = result["rows"]
    temperature = result["headline"]["temperature"]
    alone = [row for row in rows if row["batch"] == 1]
    here = [row for row in alone if row["temperature"] == temperature]
    colors = {
        method: _COLORS[i % len(_COLORS)]
        for i, method in enumerate(dict.fromkeys(row["method"] for row in rows if row["drafter"]))
    }
    found = {
        "speed": _draw("speed", _speed(alone, colors), (9.0, 3.8)),
        "kinds": _draw("kinds", _kinds(here, colors, temperature), (9.0, 3.8)),
    }
    if any(row.get("accept_lengths") for row in here):
        found["lengths"] = _draw("lengths", _lengths(here, colors, temperature), (7.0, 3.8))
    if len({row["batch"] for row in rows}) > 1:
        of = [row for row in rows if row["temperature"] == temperature]
        found["batches"] = _draw("batches", _batches(of, colors, temperature), (9.0, 3.8), 2)
    static = [row for row in alone if is_static_tree(row["method"])]
    if len({row["tree_nodes"] for row in static}) > 1:
        found["sizes"] = _draw("sizes", _sizes(static), (7.0, 3.8))
    heads = {
        name: next(each for each in measured if each["temperature"] == temperature)
        for name, measured in result.get("heads", {}).items()
    }
    if heads:
        size = (4.0 * len(heads) + 1, 3.8)
        found["heads"] = _draw("heads", _heads(heads, temperature), size, len(heads))
        found["tree"] = "\n".join(_trees(heads, temperature))
    return found


Painter = Callable[[Sequence[Any]], None]


def _draw(name: str, paint: Painter, size: tuple[float, float], panels: int = 1) -> str:
    """Return a figure's SVG; the same figures give the same bytes."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "specheads", "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
        paint(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # pictures of one page must not share names of parts
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg[svg.index("<svg") :]


def _speed(rows: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> Painter:
    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        by_key = {(row["method"], row["temperature"]): row for row in rows}
        temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
        _bars(
            ax,
            [f"T={each:g}" for each in temperatures],
            {
                method: [by_key.get((method, t)) for t in temperatures]
                for method in dict.fromkeys(row["method"] for row in rows)
                if method != "plain"
            },
            colors,
        )
        ax.set_ylabel("speed-up over plain decoding")
        ax.set_title("One prompt at a time, with 95% intervals", fontsize=10)

    return paint


def _kinds(
    rows: Sequence[Mapping[str, Any]], colors: Mapping[str, str], temperature: float
) -> Painter:
    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        kinds = sorted({kind for row in rows for kind in row["per_kind"]})
        series = {
            row["method"]: [row["per_kind"].get(kind) for kind in kinds]
            for row in rows
            if row["drafter"]
        }
        _bars(ax, kinds, series, colors)
        ax.set_ylabel("speed-up over plain decoding")
        ax.set_title(f"By kind of prompt, T={temperature:g}", fontsize=10)

    return paint


def _bars(
    ax: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Mapping[str, Any] | None]],
    colors: Mapping[str, str],
) -> None:
    """Draw speed-ups side by side, a group per place, with their intervals where there are any."""
    width = 0.84 / max(len(series), 1)
    for index, (name, cells) in enumerate(series.items()):
        shift = (index - (len(series) - 1) / 2) * width
        for place, cell in enumerate(cells):
            if cell is None:
                continue
            label = name if cell is next(each for each in cells if each) else None
            color = colors.get(name, _BASELINE)
            value = cell["speedup_vs_plain"]
            ax.bar(place + shift, value, width, color=color, label=label)
            if bounds := cell.get("speedup_vs_plain_ci95"):
                ax.vlines(place + shift, *bounds, color="#1f2933", linewidth=0.8)
    ax.axhline(1, color=_BASELINE, linewidth=1)
    ax.set_xticks(range(len(groups)), groups, fontsize=8)
    ax.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def _lengths(
    rows: Sequence[Mapping[str, Any]], colors: Mapping[str, str], temperature: float
) -> Painter:
    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        chosen = [row for row in rows if row["drafter"] and row.get("accept_lengths")]
        longest = max((int(key) for row in chosen for key in row["accept_lengths"]), default=1)
        width = 0.84 / max(len(chosen), 1)
        for index, row in enumerate(chosen):
            counts, shift = row["accept_lengths"], (index - (len(chosen) - 1) / 2) * width
            total = sum(counts.values())
            places = [n + shift for n in range(1, longest + 1)]
            shares = [counts.get(str(n), 0) / total for n in range(1, longest + 1)]
            ax.bar(places, shares, width, color=colors[row["method"]], label=row["method"])
        ax.set_xticks(range(1, longest + 1))
        ax.set_xlabel("tokens gained by a verify step")
        ax.set_ylabel("share of verify steps")
        ax.set_title(f"Accept lengths, T={temperature:g}", fontsize=10)
        ax.legend(frameon=False, fontsize=7)

    return paint


def _batches(
    rows: Sequence[Mapping[str, Any]], colors: Mapping[str, str], temperature: float
) -> Painter:
    def paint(axes: Sequence[Any]) -> None:
        left, right = axes
        sizes = sorted({row["batch"] for row in rows})
        for method in dict.fromkeys(row["method"] for row in rows):
            of = sorted((r for r in rows if r["method"] == method), key=lambda row: row["batch"])
            batches = [row["batch"] for row in of]
            color, line = (colors[method], "-") if method in colors else _baseline(method)
            look = {"color": color, "marker": "o", "markersize": 3, "linestyle": line}
            left.plot(batches, [row["tokens_per_second"] for row in of], label=method, **look)
            if method in colors:
                right.plot(batches, [row["speedup_vs_plain"] for row in of], **look)
        right.axhline(1, color=_BASELINE, linewidth=1)
        for ax in axes:
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [str(size) for size in sizes])
            ax.minorticks_off()
            ax.set_xlabel("batch")
        left.set_ylabel("tokens per second")
        right.set_ylabel("speed-up over plain decoding in that batch")
        left.set_title(f"In batches, T={temperature:g}", fontsize=10)
        left.legend(frameon=False, fontsize=7)

    return paint


def _baseline(method: str) -> tuple[str, str]:
    return _BASELINES.get(method, (_BASELINE, "--"))


def _sizes(rows: Sequence[Mapping[str, Any]]) -> Painter:
    def paint(axes: Sequence[Any]) -> None:
        (ax,) = axes
        temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
        for index, temperature in enumerate(temperatures):
            of = sorted(
                (row for row in rows if row["temperature"] == temperature),
                key=lambda row: row["tree_nodes"],
            )
            nodes, values = zip(
                *((r["tree_nodes"], r["speedup_vs_plain"]) for r in of), strict=True
            )
            bounds = [row["speedup_vs_plain_ci95"] for row in of]
            color, shift = _COLORS[index % len(_COLORS)], 0.08 * index  # else intervals coincide
            places = [count + shift for count in nodes]
            look = {"marker": "o", "markersize": 3, "color": color}
            ax.plot(places, values, label=f"T={temperature:g}", **look)
            ax.vlines(places, *zip(*bounds, strict=True), color=color, linewidth=0.8)
        ax.axhline(1, color=_BASELINE, linewidth=1)
        ax.set_xlabel("nodes of the static tree, root included")
        ax.set_ylabel("speed-up over plain decoding")
        ax.set_title("Size of the tree, with 95% intervals", fontsize=10)
        ax.legend(frameon=False, fontsize=7)

    return paint


def _heads(heads: Mapping[str, Mapping[str, Any]], temperature: float) -> Painter:
    def paint(axes: Sequence[Any]) -> None:
        for ax, (name, measured) in zip(axes, heads.items(), strict=True):
            for index, each in enumerate(measured["heads"]):
                ks = range(1, len(each["top"]) + 1)
                look = {"marker": "o", "markersize": 3, "color": _COLORS[index % len(_COLORS)]}
                ax.plot(ks, each["top"], label=f"head {each['head']}", **look)
            ax.set_ylim(0, 1)
            ax.set_xlabel("guesses per head")
            ax.set_ylabel("right token among them")
            ax.set_title(f"{name}, T={temperature:g}", fontsize=10)
            ax.legend(frameon=False, fontsize=7)

    return paint


def _trees(heads: Mapping[str, Mapping[str, Any]], temperature: float) -> list[str]:
    found = []
    for name, measured in heads.items():
        chances = dict(zip(map(tuple, measured["choices"]), measured["acceptance"], strict=True))
        tree = Tree.from_choices(chances)
        title = f"{name}: {tree.num_nodes} nodes, T={temperature:g}"
        found.append(tree_svg(tree, [chances[choice] for choice in tree.choices], title=title))
    return found
