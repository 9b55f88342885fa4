"""The plots of a bench, as SVG to be set into a page; matplotlib is loaded when they are drawn."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specheads.config import ConfigError
from specheads.decoding.draw_tree import tree_svg
from specheads.decoding.report import is_static_tree
from specheads.tree import Tree

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
