"""The file that answers are appended to: it survives a kill at any moment, and is continued by id.

``<output>`` holds one whole record per line, ``<output>.bad.jsonl`` the ids of records that could
not be answered, with the reason, and ``<output>.json`` the settings with which both were made.
How answers are drawn, and what became of the records, is the same for all engines and stands here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Self

from specheads.config import ConfigError, RunError
from specheads.data.schema import Record, RecordError, keep_settings, text_digest
from specheads.models.manifest import one_line
from specheads.regeneration.dialogue import prompt_digest
from specheads.system.files import cut_torn_line, no_room, whole_file
from specheads.verification.sampling import Sampler


@dataclass(frozen=True)
class Sampling(Sampler):
    """How answers are drawn; each record has a seed of its own, see :func:`record_seed`.

    Attributes:
        max_new_tokens: the most tokens of one answer.
        keep_truncated: keep answers that reached the limit.
        logprobs: how many of the likeliest tokens a server is asked for beside each.
    """

    max_new_tokens: int = 512
    keep_truncated: bool = False
    logprobs: int = 0


def record_seed(seed: int, record_id: str) -> int:
    """Return the seed of one record's answers, in [0, 2**31): servers take no larger ones."""
    return int.from_bytes(text_digest(f"{seed}\0{record_id}")[:4], "big") >> 1


@dataclass
class Outcome:
    """What became of some records.

    Attributes:
        answered: records with their new answers.
        quarantined: why others have none that could be used; their ``row`` is the record.
        num_tokens: generated for all of them, as far as anybody counted.
    """

    answered: list[Record] = field(default_factory=list)
    quarantined: list[RecordError] = field(default_factory=list)
    num_tokens: int = 0

    @contextlib.contextmanager
    def quarantining(self, record: Record) -> Iterator[None]:
        """Keep a RecordError of the block, which is about ``record``."""
        try:
            yield
        except RecordError as error:
            error.row = record
            self.quarantined.append(error)


class AnswerFile:
    """The open output; nobody else can have it open.

    Args:
        path: the .jsonl; made with its folder if it is not there.
        settings: JSON of all that decides what answers there are. A file made with others is
            refused.

    Attributes:
        done: id -> digest of the prompt, of every record in the file.
        bad: id -> reason, of the records in quarantine.
        num_cut: bytes of a line that a killed run had not finished, and that were cut off.

    Raises:
        ConfigError: if another process has it open, it was made with other settings or by other
            means, or a line in it is damaged; names file, line or setting.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.bad_path = self.path.with_name(self.path.name + ".bad.jsonl")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _locked(self.path)
        except BlockingIOError:
            raise ConfigError(f"another process is writing {self.path}") from None
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}") from None
        try:
            kept = self.path.with_name(self.path.name + ".json")
            keep_settings(self.path, kept, settings, "choose another output=")
            self.num_cut = cut_torn_line(self.path)
            self.done = self._read_done()
            self.num_cut += cut_torn_line(self.bad_path)
            self.bad = self._read_bad()
        except BaseException:
            self._file.close()
            raise

    def _read_done(self) -> dict[str, str]:
        done: dict[str, str] = {}
        for number, record in read_lines(self.path):
            name = record.get("id")
            if not isinstance(name, str) or not {"messages", "completion"} & record.keys():
                raise ConfigError(f"{self.path}:{number} is not a record that regenerate wrote")
            if name in done:
                raise ConfigError(f"{self.path}:{number}: id {name!r} is there twice")
            done[name] = prompt_digest(record)
        return done

    def _read_bad(self) -> dict[str, str]:
        if not self.bad_path.exists():
            return {}
        lines = [line for _, line in read_lines(self.bad_path)]
        kept = [line for line in lines if not line["transient"] and line["id"] not in self.done]
        if len(kept) < len(lines):  # the others are tried again, and would be there twice
            with whole_file(self.bad_path) as fresh:
                fresh.write_bytes(_lines(kept))
        return {line["id"]: line["reason"] for line in kept}

    def left(self, records: Sequence[Record]) -> list[Record]:
        """Return the records that are neither answered nor in quarantine.

        Raises:
            ConfigError: if a record's answer in the file is one to another prompt.
        """
        for record in records:
            known = self.done.get(record["id"])
            if known is not None and known != prompt_digest(record):
                raise ConfigError(
                    f"{self.path} has an answer for record {record['id']}, but to another prompt"
                    " than the input has now; choose another output="
                )
        return [r for r in records if r["id"] not in self.done and r["id"] not in self.bad]

    def append(self, answered: Sequence[Record], quarantined: Sequence[RecordError] = ()) -> None:
        """Append whole lines to both files; there may be none.

        Raises:
            RunError: if there is no room; what was there before is untouched.
        """
        bad = [
            {"id": error.row["id"], "kind": error.row["kind"], "reason": error.reason}
            # such records are tried again
            | {"detail": error.detail, "transient": error.reason == "server"}
            for error in quarantined
        ]
        self.done |= {record["id"]: prompt_digest(record) for record in answered}
        self.bad |= {line["id"]: line["reason"] for line in bad}
        try:
            if bad:  # first, so that a kill leaves both files in the order of their records
                with self.bad_path.open("ab", buffering=0) as file:
                    _append(file, bad)
            _append(self._file, answered)
        except OSError as error:
            if not no_room(error):
                raise
            raise RunError(
                f"no room to write {self.path} (disk full?); what was written before is kept,"
                " and the same command goes on"
            ) from None

    def sort(self, records: Sequence[Record]) -> None:
        """Put the lines into the order of ``records``, those of no such record behind them.

        In which order answers came depends on when a run was killed; what is trained on must not.
        """
        place = {record["id"]: number for number, record in enumerate(records)}
        lines = self.path.read_bytes().splitlines(keepends=True)
        order = [place.get(name, len(place)) for name in self.done]
        if order == sorted(order):
            return
        ranked = sorted(zip(order, lines, self.done, strict=True), key=lambda line: line[0])
        with whole_file(self.path) as fresh:
            fresh.write_bytes(b"".join(line for _, line, _ in ranked))
            old, self._file = self._file, _locked(fresh)
        old.close()
        self.done = {name: self.done[name] for _, _, name in ranked}

    def reasons(self) -> str:
        """Return how many records are in quarantine and why, as a few words."""
        counts = Counter(self.bad.values())
        why = ", ".join(f"{reason} {n:,}" for reason, n in counts.most_common())
        return f"{len(self.bad):,} in quarantine" + (f" ({why})" if why else "")

    def __enter__(self) -> Self:
        """Return self; the file is already open and locked."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file, which gives the lock back."""
        self._file.close()


def _locked(path: Path) -> FileIO:
    """Open a file for appending, as its only writer; BlockingIOError where there is another."""
    file = path.open("ab", buffering=0)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers, from 1, and the objects of a .jsonl.

    Raises:
        ConfigError: for a line that is not a JSON object; names it.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            with one_line(f"{path}:{number} is damaged"):
                found = json.loads(line)
            if not isinstance(found, dict):
                raise ConfigError(f"{path}:{number} is damaged: it holds no object")
            yield number, found


def _lines(values: Iterable[Mapping[str, Any]]) -> bytes:
    text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    # half of a surrogate pair has no UTF-8, but JSON has an escape for it
    return text.encode("utf-8", "backslashreplace")


def _append(file: FileIO, values: Iterable[Mapping[str, Any]]) -> None:
    data = _lines(values)
    while data:
        data = data[os.write(file.fileno(), data) :]
