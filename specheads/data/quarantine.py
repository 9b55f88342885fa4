"""The rows of a stream that cannot be used: appended to a file as they are met."""

from __future__ import annotations

import json
import os
from pathlib import Path

from specheads.config import RunError
from specheads.data.dropped import Dropped, RecordError, shown
from specheads.files import whole_file
from specheads.redact import redact


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
        values = {
            "where": redact(error.where),
            "reason": error.reason,
            "error": redact(str(error)),
            "row": shown(row),
        }
        self._waiting.append(json.dumps(values, default=str) + "\n")
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
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                data = "".join(self._waiting).encode()
                while data:
                    data = data[os.write(file, data) :]
            finally:
                os.close(file)
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror}") from None
        self._waiting.clear()
