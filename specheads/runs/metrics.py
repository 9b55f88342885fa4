"""``metrics.jsonl``: a row of JSON per line, in the system's hands before the next step begins.

A full disk loses no row: what cannot be written is kept, tried again with every later row, and
goes into the checkpoint with which the run then stops.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specheads.system.files import no_room, whole_file

SAVED = "log.json"  # in a checkpoint


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; a line that is no row is passed over.

    A killed run may leave half a row.
    """
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


class MetricsFile:
    """The open file.

    Attributes:
        trouble: one line about why rows wait to be written; empty while all are.
    """

    def __init__(self, path: Path, step: int, checkpoint: Path | None = None) -> None:
        """Go on after ``step``: rows that were written later are dropped.

        Args:
            path: the file; made if it is not there.
            step: the last step whose rows stay.
            checkpoint: the one that the run goes on from; the rows are then exactly those that it
                was saved with, also where several belong to its step.

        Raises:
            RunError: if the disk is full; the earlier rows are untouched.
        """
        rows = [row for row in read_rows(path) if row["step"] <= step]
        saved = checkpoint / SAVED if checkpoint else None
        if saved is not None and saved.is_file():
            state = json.loads(saved.read_text(encoding="utf-8"))
            rows = rows[: state["rows"]] + state["unwritten"]
        with whole_file(path) as fresh:
            fresh.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.path = path
        self.trouble = ""
        self._rows = len(rows)
        self._unwritten: list[dict[str, Any]] = []
        # unbuffered: a buffer would be written again at exit, behind rows that came after it
        self._handle = path.open("ab", buffering=0)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row, and those that wait."""
        self._unwritten.append(dict(row))
        self.flush()

    def flush(self) -> None:
        """Write the rows that wait; says in ``trouble`` why some still do."""
        while self._unwritten:
            data = (json.dumps(self._unwritten[0]) + "\n").encode()
            try:
                end = self._handle.seek(0, os.SEEK_END)
                self._write(data, end)
            except OSError as error:
                reason = "no room (disk full?)" if no_room(error) else error.strerror
                self.trouble = f"{self.path} cannot be written: {reason}"
                return
            self._unwritten.pop(0)
            self._rows += 1
        self.trouble = ""

    def _write(self, data: bytes, end: int) -> None:
        """Append all of ``data`` or nothing."""
        try:
            while data:
                data = data[self._handle.write(data) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._handle.truncate(end)
            raise

    def save(self, checkpoint: Path) -> None:
        """Force the rows onto the disk, and write into a checkpoint how many they are.

        Raises:
            OSError: if the disk is full.
        """
        self.flush()
        os.fsync(self._handle.fileno())
        state = {"rows": self._rows, "unwritten": self._unwritten}
        (checkpoint / SAVED).write_text(json.dumps(state) + "\n", encoding="utf-8")

    def close(self) -> int:
        """Write what waits and close the file; return the number of rows that were lost."""
        self.flush()
        self._handle.close()
        return len(self._unwritten)
