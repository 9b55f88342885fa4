"""Draw a tree with what it is expected to gain: as text for a terminal, and as SVG.

In both, a line is as wide (or a bar as long) as the probability that its node is accepted. In the
picture a node's width splits among its children; what is not passed on is where steps end there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from specheads.tree import Choice, Tree

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
    _draw(root, shapes)
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


def _draw(node: _Node, shapes: list[str]) -> None:
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
        _draw(child, shapes)
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
