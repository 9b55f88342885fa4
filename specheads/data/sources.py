"""Where rows come from: a file of JSON lines, a JSON list, parquet files, a data set of the hub.

A row that is not even JSON counts as a bad record. What makes the whole no data set at all is an
error: a file that is missing, empty or not UTF-8, columns of which no record can be made, a hub
that cannot be reached.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, DataConfig
from specheads.data.dropped import Dropped, RecordError, check_share
from specheads.data.rows import CONTENTS, EXPECTED, Record, check_columns, to_record, wanted


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its place for messages, the id it has if it brings none, and what it holds."""

    where: str
    name: str
    value: object  # a RecordError where it could not even be parsed


def read_part(data: DataConfig, split: str, dropped: Dropped) -> list[Record]:
    """Return the records of ``path``, or for ``heldout`` of ``eval_path`` or ``eval_split``.

    A streamed data set of the hub is read up to ``max_records`` rows. The source is one of jsonl,
    parquet and hub.

    Raises:
        ConfigError: if there is no such data set, or too many of its records cannot be used.
    """
    assert data.path is not None  # DataConfig checks it
    check_columns(data.columns)
    if data.source == "hub":
        part = data.split if split == "train" else data.eval_split
        rows = hub_rows(data, part or data.split)
        if data.streaming and data.max_records:
            rows = islice(rows, data.max_records)
        what = f"{data.path} ({part})"
    else:
        what = data.path if split == "train" or not data.eval_path else data.eval_path
        if data.source == "jsonl":
            rows = json_rows(Path(what))
        else:
            rows = parquet_rows(Path(what), data.columns)
    return collect(rows, what, data.columns, data.max_bad_fraction, dropped)


def collect(
    rows: Iterable[Row], what: str, columns: Mapping[str, str], allowed: float, dropped: Dropped
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
    for row in rows:
        total += 1
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


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the lines of ``path`` that are not blank; of a .json file the items of its list.

    Raises:
        ConfigError: if the file cannot be read, is not UTF-8, or a .json file is not JSON.
    """
    try:
        with path.open(encoding="utf-8-sig") as lines:
            if path.suffix == ".json" and (items := _listed(path, lines.read())) is not None:
                for i, item in enumerate(items):
                    yield Row(f"{path}[{i}]", f"{path.name}[{i}]", item)
                return
            lines.seek(0)
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield Row(where, f"{path.name}:{number}", _parsed(line, where))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None


def _listed(path: Path, text: str) -> list[Any] | None:
    # many a .json holds lines; only a list has to be read in one piece
    if not text.lstrip().startswith("["):
        return None
    try:
        return list(json.loads(text))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None


def _parsed(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        detail = f"not JSON: {error.msg} (column {error.colno}) in {line.strip():.60}"
        return RecordError(where, "not JSON", detail)


def parquet_rows(path: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of a parquet file, or of all below a folder in the order of their names.

    Only the columns that records are made of are read.

    Raises:
        ConfigError: if there is no such file, it is not parquet, or has no usable columns.
    """
    from pyarrow import ArrowException, parquet

    paths = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not paths:
        raise ConfigError(f"{path} holds no .parquet file")
    for file in paths:
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        try:
            with parquet.ParquetFile(file) as table:
                names = _usable(table.schema_arrow.names, columns, str(file))
                number = 0
                for batch in table.iter_batches(columns=names):
                    for row in batch.to_pylist():
                        number += 1
                        yield Row(f"{file}:{number}", f"{name}:{number}", _without_nulls(row))
        except OSError as error:  # ArrowInvalid is a ValueError, ArrowIOError an OSError
            raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
        except ArrowException as error:
            raise ConfigError(f"cannot read {file}: {_first_line(error)}") from None


def hub_rows(data: DataConfig, split: str) -> Iterator[Row]:
    """Yield the rows of a data set of the Hugging Face hub, or of a folder that datasets reads.

    Code of the data set is never run.

    Raises:
        ConfigError: if the hub cannot be reached, or it has no such data set, subset or split.
    """
    import datasets

    assert data.path is not None
    what = f"data.path={data.path}"
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(
            data.path,
            name=data.subset,
            split=split,
            revision=data.revision,
            streaming=data.streaming,
        )
        names = found.column_names
        if names is not None:  # a stream may not know them
            found = found.select_columns(_usable(names, data.columns, what))
        keep = wanted(data.columns)
        for number, row in enumerate(found, 1):
            place = f"{data.path}/{split}:{number}"
            value = {key: row[key] for key in row if key in keep}
            yield Row(place, place, _without_nulls(value))
    except ConfigError:
        raise
    except Exception as error:
        if not _is_expected(error):
            raise
        cause = error.__cause__ or error
        raise ConfigError(
            f"{what}, data.subset={data.subset}, data.split={split}: {_first_line(cause)}"
        ) from error


def _is_expected(error: Exception) -> bool:
    # what load_dataset answers to a wrong name, subset or split, and to a network that fails: its
    # errors come from four libraries, and have no common base
    libraries = {"datasets", "huggingface_hub", "httpx", "pyarrow", "fsspec", "aiohttp"}
    return isinstance(error, OSError | ValueError | RuntimeError) or any(
        kind.__module__.split(".")[0] in libraries for kind in type(error).__mro__
    )


def _usable(names: list[str], columns: Mapping[str, str], what: str) -> list[str]:
    keep = wanted(columns)
    missing = {name for theirs in columns.values() for name in theirs.split("+")[:1] if name} - set(
        names
    )
    if missing:
        raise ConfigError(
            f"{what} has no column {', '.join(sorted(missing))}, which data.columns names;"
            f" there are {', '.join(names)}"
        )
    if not columns and not any(keys <= set(names) for keys in CONTENTS):
        raise ConfigError(
            f"{what} has the columns {', '.join(names)}; {EXPECTED}:"
            " say which is which, e.g. data.columns={prompt: instruction, completion: output}"
        )
    return [name for name in names if name in keep]


def _without_nulls(value: Any) -> Any:
    # tables write null where a row, or an object in it, lacks a key that others have
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        if value and isinstance(value[0], int | float | str):
            return value
        return [_without_nulls(item) for item in value]
    return value


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
