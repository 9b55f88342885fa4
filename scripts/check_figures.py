"""Hold the figures of the documents to the files of benchmarks/: exit code 1 where they differ.

    python scripts/check_figures.py [PAGE ...] [--power]

Three ways, the strictest that applies to a line:

- marked blocks and the tables of BENCHMARKS.md are made again and must be equal, letter by letter;
- a phrase listed in benchmarks/derived.json is computed from the paths given there, is quoted from
  a source named there, is a setting, or comes from no file for a reason given there;
- every other number with a decimal point, a percent sign or an x must be found, rounded as it is
  written, in a file that its section names (a link to benchmarks/, or a command that writes one).

The last is a weak check where files are large, so ``--power`` says how many of its figures would be
caught with another last digit. Code, links, versions and dates are no figures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

from benchmark_tables import TABLES
from figure_expressions import ExpressionError, evaluate, load
from figure_text import NO_FIGURE, Figure, any_figures, blanked, figures, spaced
from readme_blocks import BLOCK, differing
from table_cells import cells_of

ROOT = Path(__file__).resolve().parents[1]
LEDGER = "derived.json"
KINDS = ("derived", "quoted", "settings", "without_json")


@dataclass(frozen=True)
class Section:
    """Text between two headings, and the files of benchmarks/ that it names."""

    title: str
    start: int
    end: int
    files: tuple[str, ...]


def sections(page: str, root: Path = ROOT) -> list[Section]:
    """Return the parts of ``page`` between headings; code is not looked at for those."""
    outside = blanked(page, re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE))
    marks = [(m.start(), m[1].strip()) for m in re.finditer(r"^#+ (.*)$", outside, re.MULTILINE)]
    marks = [(0, ""), *marks] if not marks or marks[0][0] else marks
    ends = [start for start, _ in marks[1:]] + [len(page)]
    found = []
    for (start, title), end in zip(marks, ends, strict=True):
        named = re.findall(r"benchmarks/([\w/]+(?:\.jsonl?)?)", page[start:end])
        files = []
        for name in dict.fromkeys(named):
            path = root / "benchmarks" / name
            if path.is_dir():
                files += [str(p.relative_to(root / "benchmarks")) for p in sorted(path.iterdir())]
            else:
                files.append(name)
        kept = tuple(f for f in files if f.endswith((".json", ".jsonl")))
        found.append(Section(title, start, end, kept))
    return found


def leaves(value: Any) -> Iterator[float]:
    """Yield every number in ``value``."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each)


@cache
def pool(path: Path) -> tuple[float, ...]:
    """Return the numbers of a file that a document could mean."""
    return tuple(sorted(set(leaves(load(path)))))


class Checker:
    """Looks through one page.

    Attributes:
        problems: lines ``page:line: what is wrong``.
        weak: figures that were only looked for in whole files, with the files.
    """

    def __init__(self, name: str, page: str, ledger: dict[str, Any], root: Path = ROOT) -> None:
        self.name, self.page, self.root = name, page, root
        self.folder = root / "benchmarks"
        self.entries = [
            (kind, entry) for kind in KINDS for entry in ledger[kind] if entry["page"] == name
        ]
        self.problems: list[str] = []
        self.weak: list[tuple[Figure, tuple[Path, ...]]] = []
        self.text = blanked(page, NO_FIGURE)
        self.sections = sections(page, root)

    def run(self) -> None:
        """Check blocks, tables, listed phrases, then all that is left."""
        for name in differing(self.page, self.folder / "readme"):
            at = self.page.index(f"<!-- figures: {name} -->")
            self.say(at, f"block {name} is not what its file says: run scripts/plot_readme.py")
        self.text = blanked(self.text, BLOCK)
        self.page = blanked(self.page, BLOCK)
        if self.name == "BENCHMARKS.md":
            self.tables()
        for kind, entry in self.entries:
            self.listed(kind, entry)
        for section in self.sections:
            self.rest(section)

    def say(self, start: int, problem: str) -> None:
        """Note a problem at a place of the page."""
        self.problems.append(f"{self.name}:{self.page.count(chr(10), 0, start) + 1}: {problem}")

    def hide(self, start: int, end: int) -> None:
        """Look no further at a stretch of the page."""
        hidden = re.sub(r"[^\n]", " ", self.text[start:end])
        self.text = self.text[:start] + hidden + self.text[end:]

    def tables(self) -> None:
        """Make the tables again."""
        for section in self.sections:
            body = self.page[section.start : section.end]
            found = list(re.finditer(r"(?:^\|.*\n)+", body, re.MULTILINE))
            makers = TABLES.get(section.title, [])
            if len(found) != len(makers):
                self.say(
                    section.start,
                    f"{section.title} has {len(found)} tables, TABLES of"
                    f" scripts/benchmark_tables.py makes {len(makers)}",
                )
                continue
            for match, maker in zip(found, makers, strict=True):
                self.table(section.start + match.start(), match[0].splitlines(), maker(self.folder))
                self.hide(section.start + match.start(), section.start + match.end())

    def table(self, start: int, lines: Sequence[str], wanted: Sequence[str]) -> None:
        """Compare a table's lines, below its head, with those made from the files."""
        place = start + len(lines[0]) + len(lines[1]) + 2
        if len(lines) - 2 != len(wanted):
            self.say(start, f"the table has {len(lines) - 2} lines, its file gives {len(wanted)}")
            return
        for line, other in zip(lines[2:], wanted, strict=True):
            ours, theirs = cells_of(line), cells_of(other)
            if len(ours) != len(theirs):
                self.say(place, f"{len(ours)} cells, its file gives {other}")
            for cell, made in zip(ours, theirs, strict=False):
                if cell != made:
                    self.say(place, f"{cell!r}, its file gives {made!r}, in: {line}")
            place += len(line) + 1

    def listed(self, kind: str, entry: dict[str, Any]) -> None:
        """Check a phrase of the ledger, wherever it stands, and look no further at it."""
        places = list(re.finditer(spaced(entry["text"]), self.page))
        if not places and kind == "derived":  # with other digits, so that those are said
            places = list(re.finditer(any_figures(entry["text"]), self.page))
        if not places:
            self.say(0, f"{LEDGER} lists {entry['text']!r}, which the page does not have")
        for match in places:
            found = list(figures(self.text[match.start() : match.end()], match.start()))
            if kind == "derived":
                self.derived(match.start(), entry, found)
            self.hide(match.start(), match.end())

    def derived(self, start: int, entry: dict[str, Any], found: Sequence[Figure]) -> None:
        """Compute the figures of a phrase."""
        expressions = entry["from"]
        if len(found) != len(expressions):
            texts = ", ".join(each.text for each in found)
            self.say(
                start,
                f"{entry['text']!r} has {len(found)} figures ({texts}), {LEDGER} gives"
                f" {len(expressions)} values",
            )
            return
        for figure, expression in zip(found, expressions, strict=True):
            try:
                value = evaluate(expression, self.folder)
            except (ExpressionError, ZeroDivisionError) as error:
                self.say(figure.start, f"{LEDGER}, {entry['text']!r}: {error}")
                continue
            if not figure.is_value(value):
                self.say(figure.start, f"{figure.text}, but {expression} is {value:.6g}")

    def rest(self, section: Section) -> None:
        """Look for every figure left in the files that the section names."""
        found = list(figures(self.text[section.start : section.end], section.start))
        if not found:
            return
        paths = tuple(self.folder / name for name in section.files)
        missing = [path for path in paths if not path.is_file()]
        for path in missing:
            self.say(section.start, f"names benchmarks/{path.name}, which is not there")
        paths = tuple(path for path in paths if path not in missing)
        for figure in found:
            if any(figure.is_value(value) for path in paths for value in pool(path)):
                self.weak.append((figure, paths))
                continue
            where = ", ".join(path.name for path in paths) or "any file: its section names none"
            line = self.page[: figure.start].rpartition("\n")[2]
            line += self.page[figure.start :].partition("\n")[0]
            self.say(figure.start, f"{figure.text} is not in {where}: {line.strip()[:120]}")


def read_ledger(root: Path = ROOT) -> dict[str, Any]:
    """Return benchmarks/derived.json.

    Raises:
        SystemExit: if an entry lacks what its kind needs.
    """
    ledger: dict[str, Any] = json.loads((root / "benchmarks" / LEDGER).read_text())
    needed = {"derived": "from", "quoted": "source", "settings": "why", "without_json": "why"}
    if set(ledger) != set(KINDS):
        raise SystemExit(f"{LEDGER} must have {', '.join(KINDS)}, it has {', '.join(ledger)}")
    for kind, key in needed.items():
        for entry in ledger[kind]:
            if not all(entry.get(each) for each in ("page", "text", key)):
                raise SystemExit(f"{LEDGER}, {kind}: {entry} must have page, text and {key}")
    return ledger


def pages(root: Path = ROOT) -> list[str]:
    """Return the documents with figures that were written by hand."""
    written = sorted({*(root / "docs").glob("*.md")} - {root / "docs" / "architectures.md"})
    found = [root / "README.md", root / "BENCHMARKS.md", *written]
    return [str(path.relative_to(root)) for path in found]


def power(weak: Sequence[tuple[Figure, tuple[Path, ...]]]) -> float:
    """Return the share of figures that another last digit would give away, one up and one down."""
    caught = tried = 0
    for figure, paths in weak:
        for shift in (1, -1):
            value = figure.value + shift * 10.0**-figure.digits
            other = Figure("", value, figure.digits, figure.unit, 0)
            tried += 1
            caught += not any(other.is_value(v) for path in paths for v in pool(path))
    return caught / tried if tried else 1.0


def main() -> None:
    """Check, print, exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="relative to the repository")
    parser.add_argument("--power", action="store_true", help="how strict the weakest check is")
    args = parser.parse_args()
    ledger, problems, weak = read_ledger(), [], []
    for name in args.pages or pages():
        checker = Checker(name, (ROOT / name).read_text(), ledger)
        checker.run()
        problems += checker.problems
        weak += checker.weak
    for problem in problems:
        print(problem)
    counts = ", ".join(f"{len(ledger[kind])} {kind.replace('_', ' ')}" for kind in KINDS)
    print(f"{len(problems)} figures differ; {len(weak)} found in files; phrases listed: {counts}")
    if args.power:
        print(f"of those found in files {power(weak):.0%} would be caught with another last digit")
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
