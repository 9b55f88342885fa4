"""What of a data set could not be used: which records, why, and when that is too much."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specheads.config import ConfigError
from specheads.files import whole_file
from specheads.redact import redact

LONGEST_ROW = 1 << 16  # characters of a row that a quarantine file shows
_LONGEST_LINE = 400


class RecordError(ConfigError):
    """One record that cannot be used. Its message names the place; ``reason`` is for counting.

    Both are one line, whatever the record holds. ``detail`` is the message without the place.
    """

    def __init__(self, where: str, reason: str, detail: str = "") -> None:
        self.where, self.reason = one_line(where), one_line(reason)
        self.detail = one_line(detail) or self.reason
        super().__init__(f"{self.where}: {self.detail}")


def one_line(text: object, longest: int = _LONGEST_LINE) -> str:
    """Return ``text`` as one line of a terminal: spaces joined, other controls escaped, cut."""
    text = str(text)
    cut = text[: 2 * longest]
    line = " ".join(cut.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return line if len(line) <= longest and len(cut) == len(text) else line[:longest] + " ..."


@dataclass
class Dropped:
    """Collects what reading and encoding leave out; the same place counts once.

    Attributes:
        read: records looked at, by the name of their file or data set.
        rows: place -> ``where``, ``reason``, ``error`` and the ``row`` as it was read.
        notes: what was done to records that are used, and the places.
        remarks: whole sentences, e.g. about a mixture whose parts are too small.
    """

    read: dict[str, int] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, set[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.notes or self.remarks)

    def add(self, error: RecordError, row: object) -> None:
        """Count a record that is left out."""
        self.rows[error.where] = {
            "where": error.where,
            "reason": error.reason,
            "error": str(error),
            "row": shown(row),
        }

    def note(self, what: str, where: str) -> None:
        """Count something that was done to a record which is used, or not needed."""
        self.notes.setdefault(what, set()).add(where)

    def remark(self, sentence: str) -> None:
        """Keep a sentence for the summary, once."""
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    @property
    def reasons(self) -> dict[str, int]:
        """How many records were left out, the most frequent reason first."""
        return dict(Counter(row["reason"] for row in self.rows.values()).most_common())

    @property
    def counts(self) -> dict[str, Any]:
        """Return all that is known, as plain JSON, for an export."""
        return {
            "read": sum(self.read.values()),
            "dropped": self.reasons,
            "notes": {what: len(places) for what, places in self.notes.items()},
            "remarks": list(self.remarks),
        }

    def summary(self) -> str:
        """Return one line, empty where every record is used as it is."""
        parts = []
        if self.rows:
            why = ", ".join(f"{n:,} {reason}" for reason, n in self.reasons.items())
            parts.append(
                f"{len(self.rows):,} of {sum(self.read.values()):,} records dropped: {why}"
            )
        parts += [f"{len(places):,} {what}" for what, places in self.notes.items()]
        return "; ".join(parts + self.remarks)

    def write(self, path: Path) -> None:
        """Write the records that were left out, one JSON object per line; long ones are cut.

        Raises:
            RunError: if the disk is full.
        """
        with whole_file(path) as fresh, fresh.open("w", encoding="utf-8") as lines:
            for row in self.rows.values():
                about = redact(row) | {"row": row["row"]}  # which is the user's to see as it is
                lines.write(json.dumps(about, default=str) + "\n")


def shown(row: object) -> object:
    """Return ``row`` as JSON can hold it; as a string, cut, where it is long or is no JSON."""
    try:
        text = json.dumps(row, default=str, allow_nan=False)
    except (ValueError, TypeError, RecursionError):  # not a number, keys of a table, nested
        try:
            text = repr(row)
        except RecursionError:
            return "nested too deeply to be shown"
        return text[:LONGEST_ROW]
    return row if len(text) <= LONGEST_ROW else text[:LONGEST_ROW]


def check_share(errors: list[RecordError], total: int, allowed: float, what: str) -> None:
    """Raise ConfigError if more than the share ``allowed`` of ``total`` records cannot be used."""
    if len(errors) <= allowed * total:
        return
    reason, number = Counter(error.reason for error in errors).most_common(1)[0]
    first = next(error for error in errors if error.reason == reason)
    raise ConfigError(
        f"{what}: {len(errors):,} of {total:,} records cannot be used, more than"
        f" data.max_bad_fraction={allowed:g}; most often ({number:,}) {reason}, first: {first}"
    )
