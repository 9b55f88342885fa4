"""Small arithmetic over the files of benchmarks/: where a figure of a document comes from.

    tinycode_hydra:rows[method=tree,temperature=0].accept_length / 1.88
    max(tinycode_hydra:rows[*].divergences[*].margin_fp32)

A path is a file of benchmarks/ without its ending (with it for .jsonl, whose lines form a list), a
colon, and steps: ``.key`` (``.'odd/key'`` in quotes), ``[3]``, ``[-1]``, ``[key=value,...]`` which
picks from a list the objects that have these values, and ``[*]`` all of a list or object. A path
alone must lead to one number; ``min max mean median sum count range`` take all that it leads to.
Operators are + - * / and brackets.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "sum": sum,
    "count": len,
    "range": lambda values: max(values) - min(values),
}
_STEP = re.compile(r"\.'([^']+)'|\.?([A-Za-z_][\w+]*)|\[([^\]]*)\]")
_TOKEN = re.compile(
    r"\s*(?:(?P<path>[A-Za-z_][\w/]*(?:\.jsonl)?:(?:\.?'[^']*'|\.?[A-Za-z_][\w+]*|\[[^\]]*\])+)"
    r"|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|(?P<name>[a-z]+)|(?P<sign>[-+*/(),]))"
)


class ExpressionError(ValueError):
    """An expression that cannot be read, or a path that leads nowhere."""


@cache
def load(path: Path) -> Any:
    """Return a file's content; of .jsonl the list of its lines.

    Raises:
        ExpressionError: if it is not there.
    """
    if not path.is_file():
        raise ExpressionError(f"there is no {path.name}")
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def file_of(name: str, folder: Path) -> Path:
    """Return the file that a path's first word names."""
    return folder / (name if name.endswith(".jsonl") else f"{name}.json")


def follow(path: str, folder: Path) -> list[Any]:
    """Return all that ``path`` leads to.

    Raises:
        ExpressionError: if some step finds nothing.
    """
    name, _, rest = path.partition(":")
    found, position = [load(file_of(name, folder))], 0
    while position < len(rest):
        match = _STEP.match(rest, position)
        if match is None:
            raise ExpressionError(f"{path}: cannot read {rest[position:]!r}")
        quoted, plain, inside = match.groups()
        found = [value for each in found for value in _step(each, quoted or plain, inside)]
        position = match.end()
        if not found:
            raise ExpressionError(f"{path}: nothing at {rest[:position]!r}")
    return found


def _step(value: Any, key: str | None, inside: str | None) -> list[Any]:
    if key is not None:
        return [value[key]] if isinstance(value, dict) and key in value else []
    assert inside is not None
    if inside == "*":
        return list(value.values()) if isinstance(value, dict) else list(value)
    if re.fullmatch(r"-?\d+", inside):
        number = int(inside)
        inside_of = isinstance(value, list) and -len(value) <= number < len(value)
        return [value[number]] if inside_of else []
    wanted = dict(each.split("=", 1) for each in inside.split(","))
    if isinstance(value, dict):
        value = list(value.values())
    return [
        each
        for each in value
        if isinstance(each, dict) and all(_equal(each.get(k), v) for k, v in wanted.items())
    ]


def _equal(value: Any, text: str) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return str(value) == text


def numbers(path: str, folder: Path) -> list[float]:
    """Return the numbers that ``path`` leads to; those of a list one by one.

    Raises:
        ExpressionError: if it leads to anything else.
    """
    found = []
    for value in follow(path, folder):
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, int | float) or isinstance(each, bool):
                raise ExpressionError(f"{path} leads to {str(each)[:40]!r}, which is no number")
            found.append(float(each))
    return found


def evaluate(expression: str, folder: Path) -> float:
    """Return the value of ``expression``.

    Args:
        expression: as the module describes.
        folder: of the files.

    Raises:
        ExpressionError: if it cannot be read, or a path leads nowhere or to several numbers.
    """
    tokens, position = [], 0
    while position < len(expression.rstrip()):
        match = _TOKEN.match(expression, position)
        if match is None:
            raise ExpressionError(f"cannot read {expression[position:]!r}")
        tokens.append((str(match.lastgroup), match[match.lastgroup or 0]))
        position = match.end()
    parser = _Parser(tokens, folder)
    value = parser.sum()
    if parser.rest:
        raise ExpressionError(f"{expression}: {parser.rest[0][1]!r} is too much")
    return value


class _Parser:
    """Reads tokens from the left: sums of products of values."""

    def __init__(self, tokens: list[tuple[str, str]], folder: Path) -> None:
        self.rest, self.folder = tokens, folder

    def next(self, *signs: str) -> str:
        if self.rest and self.rest[0][0] == "sign" and self.rest[0][1] in signs:
            return self.rest.pop(0)[1]
        return ""

    def need(self, sign: str) -> None:
        if not self.next(sign):
            raise ExpressionError(f"{sign!r} is missing")

    def sum(self) -> float:
        value = self.product()
        while sign := self.next("+", "-"):
            other = self.product()
            value = value + other if sign == "+" else value - other
        return value

    def product(self) -> float:
        value = self.value()
        while sign := self.next("*", "/"):
            other = self.value()
            value = value * other if sign == "*" else value / other
        return value

    def value(self) -> float:
        if self.next("-"):
            return -self.value()
        if self.next("("):
            value = self.sum()
            self.need(")")
            return value
        if not self.rest:
            raise ExpressionError("it ends too early")
        kind, text = self.rest.pop(0)
        if kind == "number":
            return float(text)
        if kind == "path":
            found = numbers(text, self.folder)
            if len(found) != 1:
                raise ExpressionError(f"{text} leads to {len(found)} numbers")
            return found[0]
        if kind == "name" and text in FUNCTIONS:
            return self.call(text)
        raise ExpressionError(f"{text!r} is no value")

    def call(self, name: str) -> float:
        self.need("(")
        values: list[float] = []
        while True:
            if self.rest and self.rest[0][0] == "path" and self.alone():
                values += numbers(self.rest.pop(0)[1], self.folder)
            else:
                values.append(self.sum())
            if not self.next(","):
                break
        self.need(")")
        return float(FUNCTIONS[name](values))

    def alone(self) -> bool:
        """Return whether the path at hand is a whole argument."""
        return len(self.rest) > 1 and self.rest[1] in (("sign", ","), ("sign", ")"))
