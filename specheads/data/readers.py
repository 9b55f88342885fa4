"""Read raw rows, from any place on: a file of JSON lines, a JSON list, parquet files, the hub.

A row that cannot even be parsed is a bad record. What makes the whole no data set at all is an
error: a file that is missing or no parquet, columns of which no record can be made, a hub that
cannot be reached.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from specheads.config import ConfigError, DataConfig
from specheads.data.schema import CONTENTS, EXPECTED, RecordError, columns_advice, one_line, wanted

MAX_DEPTH = 64  # of objects and lists in a row; what reads them by recursion has a limit
_BATCH = 256  # rows of a table that are converted at a time
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its place for messages, the id it has if it brings none, and what it holds."""

    where: str
    name: str
    value: object  # a RecordError where it could not even be parsed


@dataclass(frozen=True, slots=True)
class Raw:
    """A row, and where its reader finds the next one (plain JSON).

    Lines are parsed only when they are asked for, so that ranks which share a file parse their own.
    """

    parse: Callable[[], Row]
    place: list[int] | None = None


class Reader(Protocol):
    """A data set that is read in order, from any row on, again and again.

    Attributes:
        identity: changes when the data set does, as far as can be seen without reading it.
    """

    identity: str

    def read(self, row: int = 0, place: list[int] | None = None) -> Iterator[Raw]:
        """Yield the rows from number ``row`` on.

        Args:
            row: rows to leave out, blank lines not counted.
            place: ``Raw.place`` of the row before, with which ``row`` is found at once.

        Raises:
            ConfigError: if the data set as a whole cannot be read.
        """
        ...


def open_reader(data: DataConfig, split: str) -> Reader:
    """Return the reader of ``path``, or for ``heldout`` of ``eval_path`` or ``eval_split``.

    The source is one of jsonl, parquet and hub.

    Raises:
        ConfigError: if there are no such files, or it is a pipe or a device.
    """
    assert data.path is not None  # DataConfig checks it
    if data.source == "hub":
        part = data.split if split == "train" else data.eval_split
        return HubReader(data, part or data.split)
    path = Path(data.path if split == "train" or not data.eval_path else data.eval_path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path} is no regular file, and data is read more than once")
    if data.source == "parquet":
        return ParquetReader(path, data.columns, data.max_row_bytes)
    return json_reader(path, data.max_row_bytes)


def json_reader(path: Path, max_bytes: int) -> LineReader | ListReader:
    """Return the reader of a file of JSON lines, or of a .json that holds a list.

    Raises:
        ConfigError: if a .json cannot be read.
    """
    if path.suffix != ".json":
        return LineReader(path, max_bytes)
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    # many a .json holds lines; only a list has to be read in one piece
    listed = start.removeprefix(_BOM).lstrip().startswith(b"[")
    return ListReader(path, max_bytes) if listed else LineReader(path, max_bytes)


class LineReader:
    """The lines of a file that are not blank, each of them JSON."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Take the file; a line of more than ``max_bytes`` is never held, nor parsed."""
        self.path, self.max_bytes, self.identity = path, max_bytes, _names_and_sizes(path)

    def read(self, row: int = 0, place: list[int] | None = None) -> Iterator[Raw]:
        """Yield the lines; a place is a byte and the number of lines before it."""
        offset, number = place or (0, 0)
        try:
            with self.path.open("rb", buffering=1 << 20) as file:
                file.seek(offset)
                while line := file.readline(self.max_bytes + 2):  # a line end may be two bytes
                    size = len(line)
                    # the rest of a line that is much too long is passed over piece by piece
                    while not line.endswith(b"\n") and (more := file.readline(1 << 20)):
                        line, size = more, size + len(more)
                    offset, number = offset + size, number + 1
                    if number == 1:
                        line = line.removeprefix(_BOM)
                    if not line.strip() and size <= self.max_bytes:
                        continue
                    if row and place is None:
                        row -= 1
                        continue
                    yield Raw(partial(self._row, line, size, number), [offset, number])
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _row(self, line: bytes, size: int, number: int) -> Row:
        where, content = f"{self.path}:{number}", line.rstrip(b"\r\n")
        value: object
        if size > self.max_bytes + 2 or len(content) > self.max_bytes:
            value = _too_large(where, size, self.max_bytes)
        else:
            value = _parsed(content, where)
        return Row(where, f"{self.path.name}:{number}", value)


class ListReader:
    """The items of the list in a .json file, which is read in one piece."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Take the file."""
        self.path, self.max_bytes, self.identity = path, max_bytes, _names_and_sizes(path)

    def read(self, row: int = 0, place: list[int] | None = None) -> Iterator[Raw]:
        """Yield the items from number ``row`` on."""
        del place
        try:
            text = self.path.read_bytes().decode("utf-8-sig")
            items, _ = _loads(text)
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path} is not UTF-8 text: {error}") from None
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{self.path} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path} is not JSON: {one_line(error)}") from None
        for i, item in enumerate(islice(items, row, None), row):
            where = f"{self.path}[{i}]"
            value = _checked(item, where, item)
            if value is item and len(text) > self.max_bytes:  # else no item can be too large
                size = len(json.dumps(item, ensure_ascii=False))
                if size > self.max_bytes:
                    value = _too_large(where, size, self.max_bytes)
            yield Raw(partial(Row, where, f"{self.path.name}[{i}]", value))


class ParquetReader:
    """The rows of a parquet file, or of all below a folder in the order of their names.

    Only the columns that records are made of are read.
    """

    def __init__(self, path: Path, columns: Mapping[str, str], max_bytes: int) -> None:
        """Take a file or a folder.

        Raises:
            ConfigError: if a folder holds no .parquet file.
        """
        self.path, self.columns, self.max_bytes = path, columns, max_bytes
        self.paths = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not self.paths:
            raise ConfigError(f"{path} holds no .parquet file")
        self.identity = _names_and_sizes(*self.paths)

    def read(self, row: int = 0, place: list[int] | None = None) -> Iterator[Raw]:
        """Yield the rows; groups of rows before ``row`` are not read."""
        del place
        for file in self.paths:
            row = max(0, row - (yield from self._rows(file, row)))

    def _rows(self, file: Path, skipped: int) -> Generator[Raw, None, int]:
        """Yield the rows of one file from number ``skipped`` on; return how many it has."""
        from pyarrow import ArrowException, parquet

        name = file.relative_to(self.path).as_posix() if self.path.is_dir() else file.name
        number = 0
        try:
            # checksums are checked where a writer left them: nothing else finds an altered text
            with parquet.ParquetFile(file, page_checksum_verification=True) as table:
                names = usable(table.schema_arrow.names, self.columns, str(file))
                for group in range(table.num_row_groups):
                    size = table.metadata.row_group(group).num_rows
                    if number + size <= skipped:
                        number += size
                        continue
                    for batch in table.iter_batches(_BATCH, [group], columns=names):
                        for value in self._converted(batch, file, number):
                            number += 1
                            if number > skipped:
                                where = f"{file}:{number}"
                                yield Raw(partial(Row, where, f"{name}:{number}", value))
        except OSError as error:  # ArrowInvalid is a ValueError, ArrowIOError an OSError
            raise ConfigError(f"cannot read {file}: {one_line(error.strerror or error)}") from None
        except (ArrowException, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {first_line(error)}") from None
        return number

    def _converted(self, batch: Any, file: Path, before: int) -> list[object]:
        """Return the rows of a batch as Python's own objects, together where all of them are fine.

        Args:
            batch: an Arrow record batch.
            file: the file that it was read from.
            before: the number of rows of the file before the batch.
        """
        if batch.nbytes <= self.max_bytes:
            try:
                return [without_nulls(row) for row in batch.to_pylist()]
            except (ValueError, OverflowError, RecursionError):  # some row; which one?
                pass
        return [
            self._one(batch.slice(i, 1), f"{file}:{before + i + 1}") for i in range(batch.num_rows)
        ]

    def _one(self, row: Any, where: str) -> object:
        if row.nbytes > self.max_bytes:
            return _too_large(where, row.nbytes, self.max_bytes)
        try:
            return without_nulls(row.to_pylist()[0])
        except UnicodeDecodeError as error:
            return RecordError(where, "not UTF-8", f"not UTF-8: {error}")
        except (ValueError, OverflowError, RecursionError) as error:
            reason = "with a value that cannot be read"
            return RecordError(where, reason, f"cannot be read: {first_line(error)}")


class HubReader:
    """The rows of a data set of the Hugging Face hub, or of a folder that datasets reads.

    Code of the data set is never run.
    """

    def __init__(self, data: DataConfig, split: str) -> None:
        """Take the settings; the hub is asked when the first row is."""
        self.data, self.split = data, split
        self.identity = f"{data.path} {data.subset} {split} {data.revision}"

    def read(self, row: int = 0, place: list[int] | None = None) -> Iterator[Raw]:
        """Yield the rows; a stream still passes over those that are left out."""
        del place
        import datasets

        data, split = self.data, self.split
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
                found = found.select_columns(usable(names, data.columns, what))
            keep = wanted(data.columns)
            if row:
                found = found.skip(row)
            for number, values in enumerate(found, row + 1):
                yield Raw(partial(self._row, values, keep, number))
        except ConfigError:
            raise
        except Exception as error:
            if not _is_expected(error):
                raise
            cause = error.__cause__ or error
            raise ConfigError(
                f"{what}, data.subset={data.subset}, data.split={split}: {first_line(cause)}"
            ) from error

    def _row(self, values: Mapping[str, Any], keep: set[str], number: int) -> Row:
        where = f"{self.data.path}/{self.split}:{number}"
        kept = {key: values[key] for key in values if key in keep}
        size = sum(len(item) for _, item in _nested(kept) if isinstance(item, str | bytes))
        if size > self.data.max_row_bytes:
            return Row(where, where, _too_large(where, size, self.data.max_row_bytes))
        return Row(where, where, without_nulls(kept))


def _is_expected(error: Exception) -> bool:
    # what load_dataset answers to a wrong name, subset or split, and to a network that fails: its
    # errors come from four libraries, and have no common base
    libraries = {"datasets", "huggingface_hub", "httpx", "httpx2", "pyarrow", "fsspec", "aiohttp"}
    return isinstance(error, OSError | ValueError | RuntimeError) or any(
        kind.__module__.split(".")[0] in libraries for kind in type(error).__mro__
    )


def usable(names: list[str], columns: Mapping[str, str], what: str) -> list[str]:
    """Return the names of the columns to read.

    Raises:
        ConfigError: if no record can be made of them; names ``what``.
    """
    keep, there = wanted(columns), one_line(", ".join(names))
    missing = {theirs.split("+")[0] for theirs in columns.values() if theirs} - set(names)
    if missing:
        raise ConfigError(
            f"{what} has no column {', '.join(sorted(missing))}, which data.columns names;"
            f" there are {there}"
        )
    if not columns and not any(keys <= set(names) for keys in CONTENTS):
        raise ConfigError(f"{what} has the columns {there}; {EXPECTED}: {columns_advice(names)}")
    return [name for name in names if name in keep]


def without_nulls(value: Any) -> Any:
    """Return ``value`` without keys that hold null.

    Tables write null where a row, or an object in it, lacks a key that others have.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        if value and isinstance(value[0], int | float | str):
            return value
        return [without_nulls(item) for item in value]
    return value


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, its name where there is none."""
    return one_line(next(iter(str(error).strip().splitlines()), "") or type(error).__name__)


class _Fault(str):
    """Stands in a parsed text for what Python's decoder would let pass."""


def _loads(text: str) -> tuple[Any, bool]:
    """Parse JSON; a repeated key and NaN become a :class:`_Fault` in their place.

    Returns:
        The value, and whether it needs a look by :func:`_checked`.

    Raises:
        ValueError: if it is not JSON.
        RecursionError: if it is nested too deeply for the decoder.
    """
    faults = []

    def fault(what: str) -> _Fault:
        faults.append(what)
        return _Fault(what)

    def once(pairs: list[tuple[str, Any]]) -> object:
        found = dict(pairs)
        return found if len(found) == len(pairs) else fault("with a key twice")

    value = json.loads(
        text,
        object_pairs_hook=once,
        parse_constant=lambda name: fault(f"with {name}, which JSON does not have"),
    )
    return value, bool(faults) or text.count("[") + text.count("{") > MAX_DEPTH


def _parsed(line: bytes, where: str) -> object:
    try:
        text = line.decode()
        value, suspect = _loads(text)
    except json.JSONDecodeError as error:
        detail = f"not JSON: {error.msg} (column {error.colno}) in {one_line(text, 60)}"
        return RecordError(where, "not JSON", detail)
    except UnicodeDecodeError as error:
        byte = line[error.start]
        return RecordError(
            where, "not UTF-8", f"not UTF-8: byte 0x{byte:02x} at {error.start + 1}: {error.reason}"
        )
    except RecursionError:
        return RecordError(where, "nested too deeply", "nested too deeply to be read")
    except ValueError as error:  # a number of thousands of digits
        return RecordError(where, "not JSON", f"not JSON: {one_line(error)}")
    return _checked(value, where, text) if suspect else value


def _checked(value: object, where: str, shown: object) -> object:
    """Return a parsed value, or what is wrong with it."""
    for depth, item in _nested(value):
        if isinstance(item, _Fault):
            return RecordError(where, item, f"{item}: {one_line(shown, 60)}")
        if depth >= MAX_DEPTH and isinstance(item, dict | list):
            return RecordError(
                where, "nested too deeply", f"more than {MAX_DEPTH} objects or lists in each other"
            )
    return value


def _nested(value: object) -> Iterator[tuple[int, object]]:
    """Yield all that a value holds, itself first, each with the number of what is around it."""
    left = [(0, value)]
    while left:
        depth, item = left.pop()
        yield depth, item
        if isinstance(item, dict | list):
            inner = item.values() if isinstance(item, dict) else item
            left += [(depth + 1, each) for each in inner]


def _too_large(where: str, size: int, allowed: int) -> RecordError:
    return RecordError(
        where, "too large", f"{size:,} bytes, more than data.max_row_bytes={allowed:,}"
    )


def _names_and_sizes(*paths: Path) -> str:
    found = [f"{path.name} {path.stat().st_size if path.is_file() else 0}" for path in paths]
    return "; ".join(found)
