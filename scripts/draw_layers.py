"""Draw the packages and who imports whom into docs/architecture.md, from the imports themselves.

    python scripts/draw_layers.py            # write the drawing anew
    python scripts/draw_layers.py --check    # exit code 1 where the page shows another one

An arrow points from a package to one that it imports. Arrows that follow from others are left out:
where commands import measure and measure imports decoding, no arrow says that commands import
decoding as well.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers: python scripts/draw_layers.py -->", "<!-- end of layers -->"
COMMANDS = "commands"  # every module at the root of the package that is none of these
SHARED = "pipeline", "stages"
APART = {"__init__"}  # a door: it imports what it is asked for


def part_of(name: str) -> str:
    """Return the box in which a dotted name below ``specheads`` stands."""
    first = name.split(".")[1]
    return first if (ROOT / "specheads" / first).is_dir() or first in SHARED else COMMANDS


def imports() -> dict[str, set[str]]:
    """Return the packages that each package imports, itself left out."""
    found: dict[str, set[str]] = {}
    files = [*sorted((ROOT / "specheads").rglob("*.py")), *sorted((ROOT / "recipes").glob("*.py"))]
    for path in files:
        names = path.relative_to(ROOT).with_suffix("").parts
        if names[1] in APART:
            continue
        own = "recipes" if names[0] == "recipes" else part_of(".".join(names))
        targets = found.setdefault(own, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specheads."):
                targets.add(part_of(node.module or ""))
        targets.discard(own)
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the arrows that do not follow from others; ``graph`` must hold no circle."""

    def below(part: str) -> set[str]:
        return {each for target in graph[part] for each in (target, *below(target))}

    return {
        part: targets - {each for target in targets for each in below(target)}
        for part, targets in graph.items()
    }


def drawing() -> str:
    """Return the marked block: a Mermaid flowchart, highest packages first."""
    graph = reduced(imports())
    lines = [f"    {part} --> {target}" for part in sorted(graph) for target in sorted(graph[part])]
    return "\n".join([BEGIN, "```mermaid", "flowchart TD", *lines, "```", END])


def main() -> None:
    """Entry point."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    fresh = before + drawing() + rest.split(END, 1)[1]
    if sys.argv[1:] == ["--check"]:
        raise SystemExit(fresh != page and f"{PAGE.name} shows other imports: run {sys.argv[0]}")
    PAGE.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
