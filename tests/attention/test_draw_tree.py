"""The tree as text and as a picture."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from specheads.attention.tree import Tree
from specheads.measure.plots import tree_svg, tree_text

TREE = Tree.from_choices([(0,), (3,), (0, 0), (0, 1), (0, 0, 0)])
ACCEPTANCE = [0.6, 0.1, 0.4, 0.1, 0.2]


def test_text_shows_every_node_under_its_parent() -> None:
    """A node drawn under another parent would show a tree that nobody decodes with."""
    lines = tree_text(TREE, ACCEPTANCE).split("\n")
    assert [line.split()[0] for line in lines] == ["root", "├─0", "│", "│", "│", "└─3"]
    assert lines[2].startswith("│ ├─0 ") and lines[3].startswith("│ │ └─0 ")
    assert lines[4].startswith("│ └─1 ") and lines[5].endswith(" 0.10")
    bars = {line[-4:]: line.count("█") for line in lines[1:]}
    assert bars == {"0.60": 24, "0.40": 16, "0.20": 8, "0.10": 4}
    assert tree_text(Tree.chain(0), []) == "root"


def test_edges_are_as_wide_as_they_are_probable() -> None:
    """The picture's only message is the width of its edges."""
    svg = ElementTree.fromstring(tree_svg(TREE, ACCEPTANCE, title="5 < 6 nodes & more"))
    space = "{http://www.w3.org/2000/svg}"
    assert svg.findall(f"{space}text")[0].text == "5 < 6 nodes & more"
    paths = [each.get("d", "") for each in svg.findall(f"{space}path")]
    widths = sorted(float(re.search(r"v([\d.]+)", path).group(1)) for path in paths)  # type: ignore[union-attr]
    assert widths == pytest.approx([150 * share for share in sorted(ACCEPTANCE)], abs=0.1)
    heights = sorted(
        float(each.get("height", "0")) for each in svg.findall(f"{space}rect[@class='node']")
    )
    assert heights == pytest.approx([*widths, 150.0], abs=0.1)  # the root is certain
    for each in svg.findall(f"{space}text"):  # nothing beyond the edge
        assert float(each.get("x", "0")) < float(svg.get("width", "0"))
        assert float(each.get("y", "0")) < float(svg.get("height", "0"))


@pytest.mark.parametrize(
    "title", ["2 nodes", "runs/a/folder/of/somebody/with/a/long/name: 2 nodes, T=0"]
)
def test_nothing_is_cut_off(title: str) -> None:
    """A tree of one level was narrower than the words above it, whose ends nobody could read."""
    svg = ElementTree.fromstring(tree_svg(Tree.chain(1), [0.5], title=title))
    for each in svg.findall("{http://www.w3.org/2000/svg}text"):
        wide = 9.0 if each.get("class") == "title" else 6.5  # of bold letters of 15 px, and of 12
        end = float(each.get("x", "0")) + wide * len("".join(each.itertext()))
        assert end < float(svg.get("width", "0"))


def test_every_node_needs_its_probability() -> None:
    """Probabilities of another tree would be drawn onto this one."""
    with pytest.raises(ValueError, match="shorter than"):
        tree_text(TREE, ACCEPTANCE[:4])
