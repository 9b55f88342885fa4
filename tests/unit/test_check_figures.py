"""Documents are held to the files of benchmarks/: what the check sees, and that it can fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import ROOT, load_script

expressions: Any = load_script("figure_expressions")
tables: Any = load_script("benchmark_tables")
check: Any = load_script("check_figures")

EMPTY: dict[str, list[Any]] = {kind: [] for kind in check.KINDS}
BENCH = {
    "rows": [
        {"method": "tree", "temperature": 0.0, "speed": [1.5, 1.25], "share": 0.123},
        {"method": "tree", "temperature": 0.7, "speed": [2.5, 2.25], "share": -0.004},
        {"method": "heads+suffix", "temperature": 0.7, "speed": [], "odd/key": 7, "kept": True},
    ],
    "learned": 1200,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository with two files of figures."""
    folder = tmp_path / "benchmarks"
    (folder / "run").mkdir(parents=True)
    (folder / "one.json").write_text(json.dumps(BENCH))
    (folder / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "loss": 0.716}\n')
    return tmp_path


def problems(root: Path, page: str, ledger: dict[str, Any] = EMPTY) -> list[str]:
    """Return what the check has to say about a page."""
    checker = check.Checker("page.md", page, ledger, root)
    checker.run()
    found: list[str] = checker.problems
    return found


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("one:learned", 1200),
        ("one:rows[method=tree,temperature=0].share * 100 - 2", 10.3),
        ("2 + 3 * (4 - 6) / 4 - -1", 1.5),
        ("max(one:rows[method=tree].speed)", 2.5),
        ("mean(one:rows[method=tree].share, 1.5e-3)", (0.123 - 0.004 + 0.0015) / 3),
        ("median(one:rows[temperature=0].speed) / 2", 0.6875),
        ("range(one:rows[*].speed) + count(one:rows[*].speed)", 1.25 + 4),
        ("one:rows[-1].'odd/key'", 7),
        ("one:rows[method=heads+suffix].'odd/key' + min(1, 2 - 5)", 4),
        ("run/metrics.jsonl:[-1].loss", 0.716),
    ],
)
def test_expressions(root: Path, expression: str, value: float) -> None:
    """A wrong precedence, or the first of several numbers, gives a figure all the same."""
    assert expressions.evaluate(expression, root / "benchmarks") == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    "expression",
    [
        "one:rows[method=tree].share",  # two numbers
        "one:rows[method=lookahead].share",
        "one:rows[7].share",
        "one:rows[0].method",
        "one:rows[2].kept",
        "two:learned",
        "one:learned one:learned",
        "(1 + 2",
        "1 +",
        "min(1, 2",
        "power(2, 3)",
        "__import__('os')",
    ],
)
def test_expressions_that_say_nothing(root: Path, expression: str) -> None:
    """A path that leads nowhere must not pass for a figure of zero."""
    with pytest.raises(expressions.ExpressionError):
        expressions.evaluate(expression, root / "benchmarks")


def test_what_is_a_figure() -> None:
    """A figure that is not seen is not checked; a version that is seen is never found."""
    text = (
        "1.52x (1.48-1.60), -0.51% of 1,234.5 ms, +10%, .55 and 3e-3 to 2.4e-2; `9.99x`, torch"
        " 2.13.0, Python 3.11, vLLM 0.28 to 0.32, T=0, 0.7, 1; 48 prompts, Llama-3.1-8B,"
        " arXiv:2401.10774, [1.1](a/2.2.json), 95% intervals, 640x480, T=0.7: 3.30x\n"
        "```sh\n4.4x\n```\n"
    )
    found = list(check.figures(check.blanked(text, check.NO_FIGURE)))
    texts = [figure.text for figure in found]
    assert texts == (
        ["1.52x", "1.48", "1.60", "-0.51%", "1,234.5", "+10%", ".55", "2.4e-2", "1.1", "3.30x"]
    )
    values = [figure.value for figure in found]
    assert values == [1.52, 1.48, 1.6, -0.51, 1234.5, 10, 0.55, 0.024, 1.1, 3.3]
    assert [figure.digits for figure in found] == [2, 2, 2, 2, 1, 0, 2, 3, 1, 2]


@pytest.mark.parametrize(
    ("text", "value", "same"),
    [
        ("1.52x", 1.5249, True),
        ("1.52x", 1.5251, False),
        ("1.52x", 1.515, True),  # a tie may be rounded either way
        ("12%", 0.1234, True),
        ("12%", 12.4, True),
        ("12%", 0.1251, False),
        ("0.12", 12.3, False),
        ("2.4e-2", 0.0241, True),
        ("2.4e-2", 0.0246, False),
        ("-0.4%", -0.004, True),
        ("0.4%", -0.004, False),
        ("1,234.5", 1234.46, True),
    ],
)
def test_rounding(text: str, value: float, same: bool) -> None:
    """A tolerance of a whole last digit would let every small mistake through."""
    (figure,) = check.figures(text)
    assert figure.is_value(value) is same


def test_figures_are_looked_for_in_the_files_of_their_section(root: Path) -> None:
    """A figure of another section's file is no evidence for this one."""
    page = "# A\n[raw](benchmarks/one.json): 2.25x, 12.3%\n\n## B\n[r](benchmarks/run): 0.716\n"
    assert problems(root, page) == []
    (wrong,) = problems(root, page.replace("2.25x", "2.26x"))
    assert wrong.startswith("page.md:2: 2.26x is not in one.json")
    (moved,) = problems(root, page.replace("0.716", "2.25"))
    assert moved.startswith("page.md:5: 2.25 is not in metrics.jsonl")
    (nowhere,) = problems(root, "Text.\n\nIt is 1.5x as fast.\n")
    assert "3: 1.5x is not in any file: its section names none" in nowhere
    assert "is not there" in problems(root, page.replace("one.json", "two.json"))[0]


def test_listed_phrases(root: Path) -> None:
    """A phrase that was reworded leaves a line in the list that checks nothing any more."""
    entry = {"page": "page.md", "text": "grows by 0.6% to 12.3%", "from": ["1 - 0.994", "0.123"]}
    ledger = EMPTY | {"derived": [entry]}
    assert problems(root, "It grows\nby 0.6% to 12.3%.\n", ledger) == []
    (wrong,) = problems(root, "It grows by 0.6% to 12.3%.\n", _with(ledger, ["0.005", "0.123"]))
    assert wrong == "page.md:1: 0.6%, but 0.005 is 0.005"
    assert (
        "has 2 figures" in problems(root, "It grows by 0.6% to 12.3%.\n", _with(ledger, ["1"]))[0]
    )
    assert "there is no two.json" in "".join(
        problems(root, "It grows by 0.6% to 12.3%.\n", _with(ledger, ["two:a", "0.123"]))
    )
    assert "which the page does not have" in problems(root, "It grows.\n", ledger)[0]
    other = EMPTY | {"without_json": [{"page": "page.md", "text": "9.9 s", "why": "by hand"}]}
    assert problems(root, "It took 9.9 s.\n", other) == []
    assert problems(root, "It took 9.9 s, not 9.8 s.\n", other)


def _with(ledger: dict[str, Any], values: list[str]) -> dict[str, Any]:
    return ledger | {"derived": [ledger["derived"][0] | {"from": values}]}


def test_lists_say_why(root: Path) -> None:
    """An exception without a reason is how every figure becomes one."""
    path = root / "benchmarks" / check.LEDGER
    path.write_text(json.dumps(EMPTY | {"settings": [{"page": "a.md", "text": "1%"}]}))
    with pytest.raises(SystemExit, match="must have page, text and why"):
        check.read_ledger(root)
    path.write_text(json.dumps({"derived": []}))
    with pytest.raises(SystemExit, match="must have derived, quoted"):
        check.read_ledger(root)


def test_documents_agree_with_the_files() -> None:
    """What a reader quotes was measured, and stands in a file."""
    ledger, found = check.read_ledger(), []
    for name in check.pages():
        checker = check.Checker(name, (ROOT / name).read_text(), ledger)
        checker.run()
        found += checker.problems
        if name == "BENCHMARKS.md":  # nothing there may rest on being found somewhere in a file
            assert not checker.weak
    assert not found, "\n".join(found)


def test_every_changed_digit_of_the_benchmarks_is_caught() -> None:
    """A check that accepts most figures accepts a wrong one too."""
    page = (ROOT / "BENCHMARKS.md").read_text()
    ledger = check.read_ledger()
    sane = check.Checker("BENCHMARKS.md", page, ledger)
    sane.run()
    plain = {problem.split(":")[1] for problem in sane.problems}
    exempt = [e["text"] for kind in check.KINDS[1:] for e in ledger[kind]]
    text = check.blanked(page, check.NO_FIGURE)
    for phrase in exempt:
        words = r"\s+".join(re.escape(word) for word in phrase.split())
        text = check.blanked(text, re.compile(words))
    text = check.blanked(text, check.BLOCK)
    heads = r"^\|.*\n\|---.*\n"  # of tables
    text = check.blanked(text, re.compile(heads, re.MULTILINE))
    changed, lines = page, set()
    for figure in list(check.figures(text)):
        line = str(page.count("\n", 0, figure.start) + 1)
        if line in lines | plain:
            continue  # one in a line, so that each must be caught by itself
        lines.add(line)
        end = figure.start + len(figure.text.strip("+-%x")) - 1
        if "e" in figure.text:
            end = figure.start
        digit = str((int(page[end]) + 1) % 10)
        changed = changed[:end] + digit + changed[end + 1 :]
    assert len(lines) > 150
    broken = check.Checker("BENCHMARKS.md", changed, ledger)
    broken.run()
    caught = {problem.split(":")[1] for problem in broken.problems} - plain
    missed = lines - caught
    assert not missed, missed


def test_tables_with_other_lines_are_caught(root: Path) -> None:
    """A line that was left out, or typed in, has no counterpart in the file."""
    page = (ROOT / "BENCHMARKS.md").read_text()
    section = "## Memory of multi-token prediction"
    line = next(
        each for each in page[page.index(section) :].splitlines() if each.startswith("| 4 |")
    )

    def found(changed: str) -> list[str]:
        checker = check.Checker("BENCHMARKS.md", changed, check.read_ledger())
        checker.run()
        return [
            each
            for each in checker.problems
            if " tables" in each or "cells" in each or "lines" in each
        ]

    assert found(page) == []
    assert "has 3 lines, its file gives 4" in found(page.replace(line + "\n", ""))[0]
    assert "3 cells" in found(page.replace(line, "| 4 | 209 | 3.6% |"))[0]
    more = page.replace(section, f"{section}\n\n| a |\n|---|\n| 1 |\n\n")
    assert "has 2 tables" in found(more)[0]
