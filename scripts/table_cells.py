"""Cells and rows that the tables of BENCHMARKS.md share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

from figure_expressions import load

Bench = dict[str, Any]


def line(*cells: object) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def cells_of(text: str) -> list[str]:
    """Return the cells of a line, without the spaces around them."""
    return [cell.strip() for cell in text.strip().strip("|").split("|")]


def of(folder: Path, name: str) -> Any:
    """Return a file's content."""
    return load(folder / f"{name}.json")


def rows_of(bench: Bench) -> dict[tuple[str, float, int], Bench]:
    """Return rows by method, temperature and batch."""
    return {(r["method"], r["temperature"], r["batch"]): r for r in bench["rows"]}


def interval(row: Bench, unit: str = "") -> str:
    """Return a speed-up with its interval."""
    low, high = row["speedup_vs_plain_ci95"]
    return f"{row['speedup_vs_plain']:.2f}{unit} ({low:.2f}-{high:.2f})"
