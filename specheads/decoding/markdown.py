"""A bench's page as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specheads.decoding.page import Section, Table, sections


def markdown_page(result: Mapping[str, Any]) -> str:
    """Return all figures of a bench as Markdown, without plots.

    Args:
        result: the content of bench.json.
    """
    parts = [f"# Bench of {_text(str(result['settings'].get('checkpoint', 'a model')))}", ""]
    for section in sections(result):
        parts += _section(section)
    return "\n".join(parts)


def _section(section: Section) -> list[str]:
    lines = [f"## {_text(section.title)}", ""]
    for paragraph in section.text:
        lines += [_text(paragraph), ""]
    if section.items:
        lines += [*(f"- {_text(item)}" for item in section.items), ""]
    if section.table:
        lines += [*_table(section.table), ""]
    if section.block:
        fence = "```"
        while fence in section.block:
            fence += "`"
        lines += [fence, section.block, fence, ""]
    return lines


def _table(table: Table) -> list[str]:
    rows = (table.head, ("---",) * len(table.head), *table.rows)
    return ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in rows]


def _text(text: str) -> str:
    """Return ``text`` as Markdown that shows it: names of methods hold underscores, paths more."""
    for sign in "\\`*_{}[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ")
