"""The figures of a text: numbers with a decimal point, a percent sign or an x."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

NUMBER = re.compile(
    r"(?<![\w.])(?<![A-Za-z]-)(?P<sign>[-+]?)(?P<digits>(?:\d[\d,]*)?\.?\d+(?:e-?\d+)?)(?P<unit>%|x(?!\w))?"
)
NO_FIGURE = re.compile(
    r"```.*?^```|`[^`]*`"  # code
    r"|\]\([^)]*\)|https?://\S+|arXiv:\S+"
    r"|\d+\.\d+\.\d+\S*"  # versions
    r"|(?:[Pp]ython|torch|transformers|vLLM|SGLang|TensorRT-LLM|CUDA|peft) (?:>= |\| )?\d+\.\d+"
    r"(?:\.\d+\S*)?(?:(?:,| to| and|-) \d+\.\d+)*"
    r"|\bversions? \d+\.\d+|\b95%(?= interval|\)|:| for| \|)"  # and levels of confidence
    r"|T ?= ?[\d.]+(?:(?:, | / |, and | and | to )[\d.]*\d(?![\d.]*[x%]))*",  # temperatures
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Figure:
    """A number as a document writes it.

    Attributes:
        text: with sign and unit.
        value: as written, before its unit counts.
        digits: behind the decimal point.
        unit: ``%``, ``x`` or nothing.
        start: where it stands in the page.
    """

    text: str
    value: float
    digits: int
    unit: str
    start: int

    def is_value(self, value: float) -> bool:
        """Return whether ``value``, rounded, is what is written here."""
        tolerance = 0.5 * 10.0**-self.digits + 1e-9
        scaled = [value, value * 100] if self.unit == "%" else [value]
        return any(abs(each - self.value) <= tolerance for each in scaled)


def figures(text: str, offset: int = 0) -> Iterator[Figure]:
    """Yield the figures of ``text``: numbers with a decimal point, a percent sign or an x."""
    for match in NUMBER.finditer(text):
        digits, unit = match["digits"], match["unit"] or ""
        if "." not in digits and not unit:
            continue
        start = match.start("digits")
        ranged = start > 1 and text[start - 1] == "-" and text[start - 2].isdigit()
        sign = "" if ranged else match["sign"]
        mantissa = digits.split("e")[0]
        places = len(mantissa.split(".")[1]) if "." in mantissa else 0
        power = int(digits.split("e")[1]) if "e" in digits else 0
        value = float(f"{sign}{digits.replace(',', '')}")
        yield Figure(f"{sign}{digits}{unit}", value, places - power, unit, offset + start)


def blanked(page: str, pattern: re.Pattern[str]) -> str:
    """Return ``page`` with every match replaced by spaces, line ends kept."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), page)


def spaced(text: str) -> str:
    """Return a pattern for ``text`` with other spaces and line ends."""
    return "".join(
        r"\s+" if piece.isspace() else re.escape(piece) for piece in re.split(r"(\s+)", text)
    )


def any_figures(text: str) -> str:
    """Return a pattern for ``text`` with other figures in the places of its own."""
    pieces, end = [], 0
    for figure in figures(blanked(text, NO_FIGURE)):
        written = len(figure.text) - figure.text.startswith(("+", "-"))
        pieces += [spaced(text[end : figure.start]), r"[\d.,]*\d(?:e-?\d+)?(?![\d.,]*\d)[%x]?"]
        end = figure.start + written
    return "".join([*pieces, spaced(text[end:])])
