"""From the rows of a data set to its records, each with an id of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from specheads.config import ConfigError, DataConfig
from specheads.data.dropped import Dropped, RecordError, check_share
from specheads.data.readers import Raw, open_reader
from specheads.data.rows import Record, check_columns, to_record


def read_part(data: DataConfig, split: str, dropped: Dropped) -> list[Record]:
    """Return the records of ``path``, or for ``heldout`` of ``eval_path`` or ``eval_split``.

    A streamed data set of the hub is read up to ``max_records`` rows. The source is one of jsonl,
    parquet and hub.

    Raises:
        ConfigError: if there is no such data set, or too many of its records cannot be used.
    """
    check_columns(data.columns)
    rows: Iterable[Raw] = open_reader(data, split).read()
    if data.source == "hub" and data.streaming and data.max_records:
        rows = islice(rows, data.max_records)
    return collect(rows, name_of(data, split), data.columns, data.max_bad_fraction, dropped)


def name_of(data: DataConfig, split: str) -> str:
    """Return what a part of a data set is called in messages."""
    if data.source == "hub":
        part = data.split if split == "train" else data.eval_split
        return f"{data.path} ({part})"
    return str(data.path if split == "train" or not data.eval_path else data.eval_path)


def collect(
    rows: Iterable[Raw],
    what: str,
    columns: Mapping[str, str] | None,
    allowed: float,
    dropped: Dropped,
) -> list[Record]:
    """Turn rows into records with different ids.

    Args:
        rows: in order.
        what: the name of their data set.
        columns: see :mod:`specheads.data.rows`.
        allowed: share of the rows that may be no records; with 0 the first of them is raised.
        dropped: is told of them.

    Raises:
        ConfigError: if there are no rows, or too many that are no records.
    """
    records: list[Record] = []
    seen: dict[str, str] = {}
    errors: list[RecordError] = []
    total = 0
    for raw in rows:
        total += 1
        row = raw.parse()
        try:
            if isinstance(row.value, RecordError):
                raise row.value
            record = to_record(row.value, row.where, row.name, columns, dropped)
            first = seen.setdefault(record["id"], row.where)
            if first != row.where:
                raise RecordError(
                    row.where,
                    "with the id of an earlier one",
                    f"id {record['id']!r} is already at {first}",
                )
            records.append(record)
        except RecordError as error:
            if allowed == 0:
                raise
            errors.append(error)
            dropped.add(error, None if isinstance(row.value, RecordError) else row.value)
    if not total:
        raise ConfigError(f"{what} holds no records")
    dropped.read[what] = total
    check_share(errors, total, allowed, what)
    return records
