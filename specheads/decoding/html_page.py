"""A bench's page as one file of HTML: pictures inside, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from specheads.decoding.page import Section, Table, sections
from specheads.decoding.plots import draw

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff;
  max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
nav a { margin-right: 1em }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25em .7em; border-bottom: 1px solid #d9dee4; text-align: left;
  white-space: nowrap }
th { background: #f2f4f7; position: sticky; top: 0 }
td.long { white-space: normal; min-width: 14em }
tr:hover td { background: #f7f9fb }
pre { background: #f2f4f7; padding: .8em; overflow-x: auto; font-size: 12px }
ul.warnings { background: #fdf0d5; padding: .6em 2em }
svg { max-width: 100%; height: auto }
"""
_LONG = 32  # characters; longer cells may break


def html_page(result: Mapping[str, Any]) -> str:
    """Return all figures of a bench with their plots.

    Args:
        result: the content of bench.json.
    """
    title = f"Bench of {result['settings'].get('checkpoint', 'a model')}"
    parts = sections(result, draw(result))
    links = "".join(f'<a href="#s{n}">{escape(each.title)}</a>' for n, each in enumerate(parts))
    body = "\n".join(_section(n, section) for n, section in enumerate(parts))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n<nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def _section(number: int, section: Section) -> str:
    lines = [f'<h2 id="s{number}">{escape(section.title)}</h2>']
    lines += [f"<p>{escape(paragraph)}</p>" for paragraph in section.text]
    if section.items:
        kind = ' class="warnings"' if section.title == "Warnings" else ""
        items = "".join(f"<li>{escape(item)}</li>" for item in section.items)
        lines.append(f"<ul{kind}>{items}</ul>")
    if section.figure:
        lines.append(f'<div class="wide">{section.figure}</div>')
    if section.table:
        lines.append(_table(section.table))
    if section.block:
        lines.append(f"<pre>{escape(section.block)}</pre>")
    return "\n".join(lines)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>"
    return f'<div class="wide"><table>{body}</table></div>'


def _cell(text: str) -> str:
    kind = ' class="long"' if len(text) > _LONG else ""
    return f"<td{kind}>{escape(text)}</td>"
