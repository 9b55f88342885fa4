"""Read a data set while training on it: in which order, by which rank, and what is held out.

The rows of all epochs form one endless order. It is made window by window, each of
``data.shuffle_buffer`` rows that are shuffled by seed, epoch and place, so that a place in it is a
few numbers. Row ``k`` of the order belongs to rank ``k % world``: every rank reads all windows, and
uses its own rows.

The documents of one rank are packed pool by pool: as many as fill some batches, or as are left in
the epoch, so that rows become nearly as full as if all were packed together. The place is that of
the pool's first row and the number of its rows that are behind; to go on, the pool is read anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from specheads.config import ConfigError, DataConfig, RunError
from specheads.data.chat import Documents, Encoded
from specheads.data.load import content_rank, heldout_limit, read_part
from specheads.data.pack import Batch, check_same, collate, digest_of, number_of, pack_lengths
from specheads.data.readers import Reader, Row, open_reader
from specheads.data.schema import Dropped, Quarantine, Record, Tally, naming, to_record

LOOKED_AT = 1000  # rows that are checked before a model is loaded
_HELD_OUT = 1000  # records that are looked for in the data set itself
_FAR = 50_000  # rows that are searched for them


@dataclass(frozen=True)
class Place:
    """A place in the order of rows; plain numbers.

    Attributes:
        epoch: counted from 0.
        row: rows of this epoch before the window.
        at: the reader's own place of the window; None if ``row`` says it.
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
) -> Iterator[tuple[Row, Place]]:
    """Yield the rows of one rank without end, each with the place behind it.

    Within an epoch, no row comes twice and none is left out, over all ranks.

    Args:
        reader: the reader of the data set.
        place: the place to begin at.
        buffer: rows of a window; the first window of an epoch is shorter by lot, so that other rows
            meet in every epoch.
        seed: decides the order.
        rank: the rank of this process.
        world: the number of processes.
        limit: the data set ends after so many rows; 0: it does not.

    Raises:
        ConfigError: if the data set cannot be read, or holds no rows.
    """
    while True:
        rows = reader.read(place.row, place.at)
        if limit:
            rows = islice(rows, limit - place.row)
        size = buffer if place.row else 1 + number_of(seed, place.epoch, -1) % buffer
        while window := list(islice(rows, size)):
            generator = torch.Generator().manual_seed(number_of(seed, place.epoch, place.row))
            order = torch.randperm(len(window), generator=generator).tolist()
            # counted over all epochs: else a rank could end every one of them a row short
            for position in range(place.taken, len(window)):
                if (place.before + position) % world == rank:
                    yield window[order[position]], replace(place, taken=position + 1)
            row, before = place.row + len(window), place.before + len(window)
            place, size = Place(place.epoch, row, window[-1].place, before=before), buffer
        if not place.row:
            raise ConfigError(f"the training data holds no rows any more: {reader.identity}")
        place = Place(place.epoch + 1, before=place.before)


class RecordStream:
    """The training part of a data set that is not held in memory, and its held-out records.

    Held out is what ``eval_path`` or ``eval_split`` holds, read whole; else, as without streaming,
    a share of ``eval_fraction`` by a hash of each record's content, of which at most the first
    1,000 are looked for.

    Attributes:
        data: the settings.
        reader: the reader of the training part.
        dropped: the records that were found not to be usable.
        heldout: the held-out records.
    """

    def __init__(self, data: DataConfig, dropped: Dropped) -> None:
        """Look at the first 1,000 rows, or as many as it takes to find held-out records.

        Args:
            data: the settings; the source is one of jsonl, parquet and hub.
            dropped: the collection to which unusable records are added.

        Raises:
            ConfigError: if there is no such data set, it cannot be read row by row, or too many of
                the rows that were looked at cannot be used.
        """
        self.data, self.reader, self.dropped = data, open_reader(data, "train"), dropped
        if self.reader.in_one_piece:
            raise ConfigError(
                f"{data.path} holds a list, which is read in one piece; data.streaming=true needs"
                " one object per line"
            )
        self._limit = -1  # records of a content rank up to it are held out
        given = data.eval_split or data.eval_path
        self.heldout = read_part(data, "heldout", dropped) if given else []
        self._apart = {content_rank(record) for record in self.heldout}
        self._look(search=not given)

    def record(self, row: Row, value: object, dropped: Dropped) -> Record | None:
        """Return the record of a row that holds ``value``, None if it is held out.

        Raises:
            RecordError: if the row is no record.
        """
        record = to_record(value, row.where, row.name, self.data.columns, dropped)
        rank = content_rank(record)
        return None if rank <= self._limit or rank in self._apart else record

    def _look(self, *, search: bool) -> None:
        data, name, whole = self.data, self.reader.name, True
        wanted = round(data.eval_fraction * 2**64)
        tally = Tally(data.max_bad_fraction, self.dropped)
        found: list[tuple[int, Record]] = []  # held out
        ends: list[tuple[int, Record]] = []  # of lowest and of highest rank
        for row in islice(self.reader.read(), data.max_records or None):
            enough = not search or len(found) >= _HELD_OUT or (found and tally.total >= _FAR)
            if tally.total >= LOOKED_AT and enough:
                whole = False
                break
            record = tally.take(lambda row: self.record(row, row.parse(), self.dropped), row)
            if tally.total == LOOKED_AT:
                tally.check(f"the start of {name}")
            if record is None or not search:
                continue
            ranked = content_rank(record), record
            by_rank = sorted([*ends, ranked], key=itemgetter(0))
            ends = [by_rank[0], by_rank[-1]]
            if ranked[0] <= wanted:
                found.append(ranked)
        tally.check(name)
        self.dropped.read[name if whole else f"the start of {name}"] = tally.total
        if not search:
            return
        if whole:
            wanted = heldout_limit(data, name, {rank for rank, _ in ends})
            found = [each for each in found if each[0] <= wanted] or ends[:1]
        self._limit, self.heldout = wanted, [record for _, record in found]


_EPOCHS = 8  # without a single document: there will be none


@dataclass(eq=False, repr=False)
class StreamedBatches:
    """An endless iterator over one rank's batches whose place can be saved and restored exactly.

    Within an epoch every record is used once, by one of the ranks. Ranks may be in different
    epochs, since their documents differ in length. Bad rows go to the quarantine while they are
    met, in the first epoch.

    Attributes:
        POOL: rows that are packed together, at the least.
        stream: the records.
        documents: the encoder of single records, which knows the row length T.
        rows: rows per batch and rank (B).
        seed: decides the order.
        pad_token_id: fills the rest of a row.
        rank: the rank of this process.
        world: the number of processes.
        counts: what became of this rank's records so far, as ``Documents.counts``.
        efficiency: share of the row positions of the present pool that hold documents.

    Raises:
        ConfigError: if too many records cannot be used, or none can.
    """

    POOL: ClassVar[int] = 64
    stream: RecordStream
    documents: Documents
    _: KW_ONLY
    rows: int
    seed: int
    pad_token_id: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        """Read and pack the first pool."""
        self.seq_len, self.pool = self.documents.seq_len, max(self.POOL, self.rows)
        self.quarantine = Quarantine(self.stream.dropped, first=self.rank == 0)
        self.counts, allowed = self.documents.counts, self.stream.data.max_bad_fraction
        self._tally = Tally(allowed, self.quarantine)  # of the first epoch
        self._go_to(Place())
        self._fill()

    def write_quarantine(self, path: Path) -> None:
        """Choose the file for bad rows; other ranks than the first add their number to its name."""
        if self.rank:
            path = path.with_name(f"{path.stem}-{self.rank}{path.suffix}")
        self.quarantine.path = path

    def __next__(self) -> Batch:
        """Return the next batch (see ``collate``).

        Raises:
            RunError: if the data cannot be read any more, or too many rows of it cannot be used.
        """
        self.quarantine.flush()
        rows = []
        for _ in range(self.rows):
            if self._taken == len(self._packed):
                try:
                    self._fill()
                except ConfigError as error:
                    raise RunError(f"{error}; checkpoints are untouched") from None
            rows.append(self._packed[self._taken])
            self._taken += 1
        return collate(rows, self.seq_len, self.pad_token_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data; plain JSON."""
        return {**self._begin, "taken": self._taken, "digest": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            ConfigError: if the state is of other data or settings, or another number of ranks.
        """
        there, here = state.get("streamed"), self._settings()
        if not isinstance(there, dict):
            raise ConfigError("the checkpoint was made without data.streaming, or of other data")
        if there.get("world") != self.world:
            raise ConfigError(
                f"streamed data was shared by {there.get('world')} processes, this run has"
                f" {self.world}; with data.streaming=true a run goes on with as many as before"
            )
        check_same(there, here)
        self._tally.total = int(state["seen"])
        self._tally.reasons = Counter(state["reasons"])
        self.counts.update(state["counts"])
        self.quarantine.go_on()
        self._go_to(Place(**state["place"]))
        self._fill()
        if self._digest != state["digest"]:
            raise ConfigError(
                f"{self.stream.reader.name} does not hold the rows that it held when the"
                " checkpoint was made, so the order cannot be resumed"
            )
        self._taken = int(state["taken"])

    def _settings(self) -> dict[str, Any]:
        ours = {key: getattr(self, key) for key in ("seed", "seq_len", "rank", "world", "pool")}
        read = {key: getattr(self.stream.data, key) for key in ("shuffle_buffer", "max_records")}
        return {**ours, **read, "data": self.stream.reader.identity}

    def _go_to(self, place: Place) -> None:
        data = self.stream.data
        self._place = self._fruitful = place
        self._ahead: tuple[Row, Place] | None = None  # of the next epoch
        buffer, limit = data.shuffle_buffer, data.max_records
        ours = {"seed": self.seed, "rank": self.rank, "world": self.world}
        self._rows = shuffled(self.stream.reader, place, buffer=buffer, limit=limit, **ours)

    def _fill(self) -> None:
        """Read the next pool and pack it."""
        self._begin = {
            "streamed": self._settings(),
            "place": asdict(self._place),
            "seen": self._tally.total,
            "reasons": dict(self._tally.reasons),
            "counts": dict(self.counts),
        }
        name, later = self.stream.reader.name, Tally(self._tally.allowed, Dropped())
        found: list[Encoded] = []
        tokens = 0
        while tokens < self.pool * self.seq_len:
            row, place = self._ahead or next(self._rows)
            if place.epoch > self._place.epoch:
                if not self._place.epoch and self._tally.total:
                    self._tally.check(name, " read so far")
                if found:  # the epoch's last pool is packed as it is, so that no row repeats one
                    self._ahead = row, place
                    break
            self._place, self._ahead = place, None
            # bad rows are counted once, not in every epoch
            tally = later if place.epoch else self._tally
            if documents := tally.take(self._documents_of, row):
                found += documents
                tokens += sum(len(document.input_ids) for document in documents)
                self._fruitful = place
            if not place.epoch and tally.total >= LOOKED_AT:
                tally.check(name, " read so far")
            if place.epoch - self._fruitful.epoch > _EPOCHS * self.world:
                raise ConfigError(f"{name} has no record that rank {self.rank} learns")
        packed = pack_lengths([len(document.input_ids) for document in found], self.seq_len)
        # a resumed run reads the pool's rows anew and compares: the file may have changed
        self._digest, self._taken = digest_of(found), 0
        # the seed is mixed with the contents, so that no two pools are shuffled alike
        generator = torch.Generator().manual_seed(self.seed ^ int(self._digest[:14], 16))
        order = torch.randperm(len(packed), generator=generator).tolist()
        self._packed = [[found[i] for i in packed[row]] for row in order]
        self.efficiency = tokens / (len(packed) * self.seq_len)

    def _documents_of(self, row: Row) -> list[Encoded]:
        """Return the documents of a row; none if it is held out or too long."""
        value = row.parse()
        with naming(row.where, value):
            record = self.stream.record(row, value, Dropped())  # repairs of all rows: not counted
            return [] if record is None else self.documents.of(record)
