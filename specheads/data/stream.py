"""Read a data set while training on it: in which order, by which rank, and what is held out.

The rows of all epochs form one endless order. It is made window by window, each of
``data.shuffle_buffer`` rows that are shuffled by seed, epoch and place, so that a place in it is a
few numbers. Row ``k`` of the order belongs to rank ``k % world``: every rank reads all windows, and
parses its own rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch

from specheads.config import ConfigError, DataConfig
from specheads.data.dropped import Dropped, RecordError, check_share
from specheads.data.readers import ListReader, Raw, Reader, Row, open_reader
from specheads.data.records import content_rank
from specheads.data.rows import Record, check_columns, to_record
from specheads.data.sources import name_of, read_part

LOOKED_AT = 1000  # rows that are checked before a model is loaded
_HELD_OUT = 1000  # records that are looked for in the data set itself
_FAR = 50_000  # rows that are searched for them


@dataclass(frozen=True)
class Place:
    """A place in the order of rows; plain numbers.

    Attributes:
        epoch: counted from 0.
        row: rows of this epoch before the window.
        at: where the reader finds the window; None if ``row`` says it.
        taken: rows of the shuffled window that are behind, of all ranks.
        before: rows of all earlier windows and epochs.
    """

    epoch: int = 0
    row: int = 0
    at: list[int] | None = None
    taken: int = 0
    before: int = 0


def shuffled(
    reader: Reader,
    place: Place,
    *,
    buffer: int,
    seed: int,
    rank: int = 0,
    world: int = 1,
    limit: int = 0,
) -> Iterator[tuple[Raw, Place]]:
    """Yield the rows of one rank without end, each with the place behind it.

    Within an epoch, no row comes twice and none is left out, over all ranks.

    Args:
        reader: of the data set.
        place: where to begin.
        buffer: rows of a window; the first window of an epoch is shorter by lot, so that other rows
            meet in every epoch.
        seed: of the order.
        rank: of this process.
        world: number of processes.
        limit: the data set ends after so many rows; 0: it does not.

    Raises:
        ConfigError: if the data set cannot be read, or holds no rows.
    """
    while True:
        rows = reader.read(place.row, place.at)
        if limit:
            rows = islice(rows, limit - place.row)
        while window := list(islice(rows, _window(seed, place, buffer))):
            generator = torch.Generator().manual_seed(_number(seed, place.epoch, place.row))
            order = torch.randperm(len(window), generator=generator).tolist()
            for position in range(place.taken, len(window)):
                if (place.before + position) % world == rank:
                    yield window[order[position]], replace(place, taken=position + 1)
            place = Place(
                place.epoch,
                place.row + len(window),
                window[-1].place,
                before=place.before + len(window),
            )
        if not place.row:
            raise ConfigError(f"the training data holds no rows any more: {reader.identity}")
        place = Place(place.epoch + 1, before=place.before)


def _window(seed: int, place: Place, buffer: int) -> int:
    return buffer if place.row else 1 + _number(seed, place.epoch, -1) % buffer


def _number(*numbers: int) -> int:
    """Return a number below 2^63 that depends on all of ``numbers``."""
    text = ":".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


class RecordStream:
    """The training part of a data set that is not held in memory, and its held-out records.

    Held out is what ``eval_path`` or ``eval_split`` holds, read whole; else, as without streaming,
    a share of ``eval_fraction`` by a hash of each record's content, of which at most the first
    1,000 are looked for.

    Attributes:
        data: the settings.
        reader: of the training part.
        heldout: the held-out records.
    """

    def __init__(self, data: DataConfig, dropped: Dropped) -> None:
        """Look at the first 1,000 rows, or as many as it takes to find held-out records.

        Args:
            data: the settings; the source is one of jsonl, parquet and hub.
            dropped: is told of records that cannot be used.

        Raises:
            ConfigError: if there is no such data set, it cannot be read row by row, or too many of
                the rows that were looked at cannot be used.
        """
        check_columns(data.columns)
        self.data, self.name, self.reader = data, name_of(data, "train"), open_reader(data, "train")
        if isinstance(self.reader, ListReader):
            raise ConfigError(
                f"{data.path} holds a list, which is read in one piece; data.streaming=true needs"
                " one object per line"
            )
        self._limit = -1  # records of a content rank up to it are held out
        self._apart: set[int] = set()  # content ranks of the held-out part
        self.heldout: list[Record] = []
        given = data.eval_split or data.eval_path
        if given:
            self.heldout = read_part(data, "heldout", dropped)
            self._apart = {content_rank(record) for record in self.heldout}
        self._look(dropped, search=not given)

    def record(self, row: Row, dropped: Dropped) -> Record | None:
        """Return the record of a row, None if it is held out.

        Raises:
            RecordError: if the row is no record.
        """
        if isinstance(row.value, RecordError):
            raise row.value
        record = to_record(row.value, row.where, row.name, self.data.columns, dropped)
        rank = content_rank(record)
        return None if rank <= self._limit or rank in self._apart else record

    def _look(self, dropped: Dropped, *, search: bool) -> None:
        data, errors, total, whole = self.data, list[RecordError](), 0, True
        wanted = round(data.eval_fraction * 2**64)
        found: list[tuple[int, Record]] = []  # held out
        lowest: tuple[int, Record] | None = None
        highest = -1
        for raw in islice(self.reader.read(), data.max_records or None):
            enough = not search or len(found) >= _HELD_OUT or (found and total >= _FAR)
            if total >= LOOKED_AT and enough:
                whole = False
                break
            total, row = total + 1, raw.parse()
            try:
                record = self.record(row, dropped)
            except RecordError as error:
                if data.max_bad_fraction == 0:
                    raise
                errors.append(error)
                dropped.add(error, None if isinstance(row.value, RecordError) else row.value)
                record = None
            if total == LOOKED_AT:
                check_share(errors, total, data.max_bad_fraction, f"the start of {self.name}")
            if record is None or not search:
                continue
            rank = content_rank(record)
            highest = max(highest, rank)
            if lowest is None or rank < lowest[0]:
                lowest = rank, record
            if rank <= wanted:
                found.append((rank, record))
        if not total:
            raise ConfigError(f"{self.name} holds no records")
        dropped.read[self.name if whole else f"the start of {self.name}"] = total
        check_share(errors, total, data.max_bad_fraction, self.name)
        if not search:
            return
        if whole:  # at least one on each side, however small the file
            if lowest is None or lowest[0] == highest:
                raise ConfigError(
                    f"{self.name} holds {int(lowest is not None)} distinct record; holding some out"
                    f" needs 2, or set data.{'eval_split' if data.source == 'hub' else 'eval_path'}"
                )
            wanted = max(lowest[0], min(wanted, highest - 1))
            found = [each for each in found if each[0] <= wanted] or [lowest]
        self._limit, self.heldout = wanted, [record for _, record in found]
