"""What of a data set could not be used: which records, why, and when that is too much."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, RunError
from specheads.system.files import whole_file
from specheads.system.redact import redact

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
        self.rows[error.where] = _entry(error, row)

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
            total = sum(self.read.values())
            parts.append(f"{len(self.rows):,} of {total:,} records dropped: {why}")
        parts += [f"{len(places):,} {what}" for what, places in self.notes.items()]
        return "; ".join(parts + self.remarks)

    def write(self, path: Path) -> None:
        """Write the records that were left out, one JSON object per line; long ones are cut.

        Raises:
            RunError: if the disk is full.
        """
        with whole_file(path) as fresh, fresh.open("w", encoding="utf-8") as lines:
            lines.writelines(map(_line, self.rows.values()))


def _entry(error: RecordError, row: object) -> dict[str, Any]:
    """Return what a quarantine file says of a row, which is a cut text if long or no JSON."""
    try:
        text = json.dumps(row, default=str, allow_nan=False)
        shown = row if len(text) <= LONGEST_ROW else text[:LONGEST_ROW]
    except (ValueError, TypeError, RecursionError):  # not a number, keys of a table, nested
        try:
            shown = repr(row)[:LONGEST_ROW]
        except RecursionError:
            shown = "nested too deeply to be shown"
    return {"where": error.where, "reason": error.reason, "error": str(error), "row": shown}


def _line(entry: dict[str, Any]) -> str:
    about = redact(entry) | {"row": entry["row"]}  # which is the user's to see as it is
    return json.dumps(about, default=str) + "\n"


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


class Quarantine:
    """A file with one JSON object per bad row, as ``Dropped.write`` writes it.

    First come the rows that were found bad before training. The file is cut back to where a resumed
    run goes on, so that no row is in it twice.

    Attributes:
        dropped: of the rows that were looked at before training.
        written: rows added since.
    """

    def __init__(self, dropped: Dropped, *, first: bool = True) -> None:
        """Take what was found before training; ``first``: its rows belong into this file."""
        self.dropped, self.first, self.written = dropped, first, 0
        self._path: Path | None = None
        self._waiting: list[str] = []  # rows that came before there was a file
        self._open = False

    def write_to(self, path: Path) -> None:
        """Choose the file; it is written when the first batch is taken, or a place gone to."""
        self._path, self._open = path, False

    def add(self, error: RecordError, row: object) -> None:
        """Append a row, unless it was known before training.

        Raises:
            RunError: if it cannot be written.
        """
        if error.where in self.dropped.rows:
            return
        self.written += 1
        self._waiting.append(_line(_entry(error, row)))
        if self._open:
            self._flush()

    def start(self) -> None:
        """Begin the file anew, unless it is open already."""
        if self._open or self._path is None:
            return
        if self.first and self.dropped.rows:
            self.dropped.write(self._path)
        else:
            self._path.unlink(missing_ok=True)
        self._open = True
        self._flush()

    def go_back(self, written: int) -> None:
        """Take back all but the first ``written`` rows that were added."""
        self.written = written
        if self._path is None:
            del self._waiting[written:]
            return
        self._waiting.clear()
        if not self._path.is_file():
            self.start()
            return
        kept = written + (len(self.dropped.rows) if self.first else 0)
        with whole_file(self._path) as fresh, fresh.open("wb") as new, self._path.open("rb") as old:
            for number, line in enumerate(old):
                if number == kept or not line.endswith(b"\n"):
                    break
                new.write(line)
        self._open = True

    def _flush(self) -> None:
        assert self._path is not None
        if not self._waiting:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)  # on another host than the first
            with self._path.open("ab") as file:
                file.write("".join(self._waiting).encode())
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror}") from None
        self._waiting.clear()
