"""Read raw rows, from any place on: a file of JSON lines, a JSON list, parquet files, the hub.

A row that cannot even be parsed is a bad record. What makes the whole no data set at all is an
error: a file that is missing or no parquet, columns of which no record can be made, a hub that
cannot be reached.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, DataConfig
from specheads.data.schema import RecordError, check_columns, naming, one_line, usable, wanted
from specheads.models.manifest import depth, first_line
from specheads.system.errors import need
from specheads.system.hub import is_hub_error

MAX_DEPTH = 64  # of objects and lists in a row; what reads them by recursion has a limit
_BATCH = 256  # rows of a table that are converted at a time
_BOM = b"\xef\xbb\xbf"
_BETWEEN = re.compile(r"[\s,]*")  # the items of a list


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data set.

    Attributes:
        where: its place, for messages.
        name: the id that it has if it brings none.
        load: returns what it holds, or raises RecordError.
        place: where its reader finds the next one (plain JSON), None if its number says so.
    """

    where: str
    name: str
    load: Callable[[], object]
    place: list[int] | None = None

    def parse(self) -> object:
        """Return what it holds; only here is it parsed: ranks that share a file share the work.

        Raises:
            RecordError: if it cannot be read.
        """
        with naming(self.where):
            return self.load()


@dataclass(frozen=True)
class Reader:
    """A data set that is read in order, from any row on, again and again.

    Attributes:
        name: what it is called in messages.
        identity: changes when the data set does, as far as can be seen without reading it.
        read: yields the rows from number ``row`` on, blank lines not counted; with ``place``, that
            of the row before, it is found at once. Raises ConfigError if the data set as a whole
            cannot be read.
        in_one_piece: whether all of it is held while it is read.
    """

    name: str
    identity: str
    read: Callable[..., Iterator[Row]]
    in_one_piece: bool = False


def open_reader(data: DataConfig, split: str) -> Reader:
    """Return the reader of ``path``, or for ``heldout`` of ``eval_path`` or ``eval_split``.

    The source is one of jsonl, parquet and hub.

    Raises:
        ConfigError: if there are no such files, it is a pipe or a device, or ``columns`` names what
            records do not have.
    """
    assert data.path is not None  # DataConfig checks it
    check_columns(data.columns)
    heldout = split == "heldout"
    if data.source == "hub":
        part = (heldout and data.eval_split) or data.split
        identity = f"{data.path} {data.subset} {part} {data.revision}"
        return Reader(f"{data.path} ({part})", identity, partial(_hub_rows, data, part))
    path = Path((heldout and data.eval_path) or data.path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path} is no regular file, and data is read more than once")
    if data.source == "parquet":
        return parquet_reader(path, data.columns, data.max_row_bytes)
    return json_reader(path, data.max_row_bytes)


def json_reader(path: Path, max_bytes: int = DataConfig.max_row_bytes) -> Reader:
    """Return the reader of a file of JSON lines, or of a .json that holds a list.

    Raises:
        ConfigError: if a .json cannot be read.
    """
    listed = False
    if path.suffix == ".json":  # many a .json holds lines; only a list is read in one piece
        with _reading(path), path.open("rb") as file:
            listed = file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
    rows = partial(_items if listed else json_lines, path, max_bytes)
    return Reader(str(path), _names_and_sizes(path), rows, in_one_piece=listed)


def parquet_reader(path: Path, columns: Mapping[str, str], max_bytes: int) -> Reader:
    """Return the reader of a parquet file, or of all below a folder in the order of their names.

    Raises:
        ConfigError: if a folder holds no .parquet file.
    """
    paths = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not paths:
        raise ConfigError(f"{path} holds no .parquet file")
    names = [file.relative_to(path).as_posix() if path.is_dir() else file.name for file in paths]
    rows = partial(_table_rows, dict(zip(paths, names, strict=True)), columns, max_bytes)
    return Reader(str(path), _names_and_sizes(*paths), rows)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say in one line why a file cannot be read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: not UTF-8 at byte {error.start + 1}") from None
    except (OSError, EOFError, zlib.error) as error:  # the last two from what gzip did not write
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {said}") from None


def json_lines(
    path: Path, max_bytes: int, row: int = 0, place: list[int] | None = None
) -> Iterator[Row]:
    """Yield the lines of a file that are not blank; none longer than ``max_bytes`` is held.

    One called .gz is unpacked. A place is a byte and the number of lines before it.
    """
    offset, number = place or (0, 0)
    packed = path.suffix == ".gz"
    with _reading(path), gzip.open(path) if packed else path.open("rb", 1 << 20) as file:
        file.seek(offset)
        while line := file.readline(max_bytes + 2):  # a line end may be two bytes
            passed = 0
            # the rest of a line that is much too long is passed over piece by piece
            while not line.endswith(b"\n") and (more := file.readline(1 << 20)):
                line, passed = more, passed + len(line)
            offset, number = offset + passed + len(line), number + 1
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip() and passed + len(line) <= max_bytes:
                continue
            if row and place is None:
                row -= 1
                continue
            content = line.rstrip(b"\r\n")
            parse = partial(_line, content, passed + len(content), max_bytes)
            yield Row(f"{path}:{number}", f"{path.name}:{number}", parse, [offset, number])


def text_lines(path: Path) -> Iterator[Row]:
    """Yield the lines of a .txt that are not blank, each a prompt."""
    with _reading(path):
        text = path.read_text(encoding="utf-8-sig")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            value = {"prompt": line.rstrip("\r")}
            yield Row(f"{path}:{number}", f"{path.name}:{number}", partial(dict, value))


def _items(path: Path, max_bytes: int, row: int = 0, place: object = None) -> Iterator[Row]:
    """Yield the items of the list in a .json file, each to be parsed as a line is."""
    with _reading(path):
        text = path.read_bytes().decode("utf-8-sig")
    try:
        number = len(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {one_line(error)}") from None
    decode, end = json.JSONDecoder().raw_decode, text.index("[") + 1
    for i in range(number):
        between = _BETWEEN.match(text, end)
        assert between is not None
        _, end = decode(text, between.end())
        if i >= row:
            content = text[between.end() : end].encode()
            parse = partial(_line, content, len(content), max_bytes)
            yield Row(f"{path}[{i}]", f"{path.name}[{i}]", parse)


def _table_rows(
    files: dict[Path, str], columns: Mapping[str, str], max_bytes: int, row: int = 0, *_: object
) -> Iterator[Row]:
    """Yield the rows of parquet files, by their names, of the columns that records are made of.

    Groups of rows before ``row`` are not read.
    """
    from pyarrow import ArrowException, parquet

    for file, name in files.items():
        number = 0
        try:
            # checksums are checked where a writer left them: nothing else finds an altered text
            with parquet.ParquetFile(file, page_checksum_verification=True) as table:
                names = usable(table.schema_arrow.names, columns, str(file))
                for group in range(table.num_row_groups):
                    size = table.metadata.row_group(group).num_rows
                    if size <= row:
                        row, number = row - size, number + size
                        continue
                    for batch in table.iter_batches(_BATCH, [group], columns=names):
                        for i in range(batch.num_rows):
                            number += 1
                            if row:
                                row -= 1
                                continue
                            parse = partial(_table_row, batch.slice(i, 1), max_bytes)
                            yield Row(f"{file}:{number}", f"{name}:{number}", parse)
        except OSError as error:  # ArrowInvalid is a ValueError, ArrowIOError an OSError
            raise ConfigError(f"cannot read {file}: {one_line(error.strerror or error)}") from None
        except (ArrowException, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {file}: {one_line(first_line(error))}") from None


def _table_row(row: Any, max_bytes: int) -> object:
    """Return the one row of an Arrow batch as Python's own objects."""
    _check_size(row.nbytes, max_bytes)
    try:
        return without_nulls(row.to_pylist()[0])
    except UnicodeDecodeError as error:
        raise RecordError("not UTF-8", f"not UTF-8: {error}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        detail = f"cannot be read: {first_line(error)}"
        raise RecordError("with a value that cannot be read", detail) from None


def _hub_rows(data: DataConfig, split: str, row: int = 0, place: object = None) -> Iterator[Row]:
    """Yield the rows of a data set of the Hugging Face hub, or of a folder that datasets reads.

    A stream still passes over those that are left out. Code of the data set is never run.
    """
    what = f"data.path={data.path}"
    need("datasets", "train", what)
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        how: Any = {"revision": data.revision, "streaming": data.streaming}
        found = datasets.load_dataset(data.path, name=data.subset, split=split, **how)
        names = found.column_names
        if names is not None:  # a stream may not know them
            found = found.select_columns(usable(names, data.columns, what))
        keep = wanted(data.columns)
        if row:
            found = found.skip(row)
        for number, values in enumerate(found, row + 1):
            where = f"{data.path}/{split}:{number}"
            yield Row(where, where, partial(_hub_row, values, keep, data.max_row_bytes))
    except Exception as error:
        if isinstance(error, ConfigError) or not is_hub_error(error):
            raise
        cause = error.__cause__ or error
        raise ConfigError(
            f"{what}, data.subset={data.subset}, data.split={split}: {one_line(first_line(cause))}"
        ) from error


def _hub_row(values: Mapping[str, Any], keep: set[str], max_bytes: int) -> object:
    kept = {key: values[key] for key in values if key in keep}
    _check_size(_length(kept), max_bytes)
    return without_nulls(kept)


def _length(value: Any) -> int:
    """Return the length of all texts in a value."""
    if isinstance(value, str | bytes):
        return len(value)
    inside = value.values() if isinstance(value, dict) else value
    return sum(map(_length, inside)) if isinstance(value, dict | list) else 0


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


def _line(line: bytes, size: int, max_bytes: int) -> object:
    _check_size(size, max_bytes)
    try:
        text = line.decode()
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
        if text.count("[") + text.count("{") > MAX_DEPTH and depth(value) > MAX_DEPTH:
            raise RecursionError
    except UnicodeDecodeError as error:
        raise RecordError("not UTF-8", f"not UTF-8: {error}") from None
    except RecursionError:
        detail = f"more than {MAX_DEPTH} objects or lists in each other"
        raise RecordError("nested too deeply", detail) from None
    except RecordError:
        raise
    except ValueError as error:  # a number of thousands of digits among others
        raise RecordError("not JSON", f"not JSON: {error} in {one_line(text, 60)}") from None
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; a repeated key, which Python lets pass, is a RecordError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise RecordError("with a key twice", f"the key {key!r:.60} stands in one object twice")
    return found


def _refuse_constant(name: str) -> object:
    raise RecordError(f"with {name}, which JSON does not have")


def _check_size(size: int, allowed: int) -> None:
    if size > allowed:
        detail = f"{size:,} bytes, more than data.max_row_bytes={allowed:,}"
        raise RecordError("too large", detail)


def _names_and_sizes(*paths: Path) -> str:
    found = [f"{path.name} {path.stat().st_size if path.is_file() else 0}" for path in paths]
    return "; ".join(found)
