"""From the rows of a data set to its records, each with an id of its own.

Mix data sets by weight: each has its share of the records, and no record comes twice.

Read training records: what a user's files or the hub hold, or what ``data=pycode`` makes.

A record is a dict with ``id``, ``kind`` and one of three contents: ``messages`` (roles; only the
assistant's answers are learned), ``prompt`` and ``completion`` (only the completion is learned),
or ``text`` (everything is learned). It may bring its token ids along, see
:mod:`specheads.data.schema`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from specheads.config import ConfigError, DataConfig, mixture_parts
from specheads.data.dropped import Dropped, RecordError, check_share
from specheads.data.readers import Raw, json_reader, open_reader
from specheads.data.schema import Record, check_columns, to_record


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
        columns: see :mod:`specheads.data.schema`.
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


@dataclass(frozen=True)
class Part:
    """One data set of a mixture, both of its splits read; ``weight`` None: of all or of none."""

    name: str
    weight: float | None
    splits: dict[str, list[Record]]


def shares(sizes: Sequence[int], weights: Sequence[float], limit: int = 0) -> list[int]:
    """Return how many records of each part a mixture takes.

    The total is the largest at which every part has its share without repeating a record, and at
    most ``limit`` (0: none). What rounding down leaves goes to the largest remainders.
    """
    whole = sum(weights)
    filled = [n * whole / w for n, w in zip(sizes, weights, strict=True) if w]
    total = math.floor(min(filled, default=0) + 1e-9)
    total = min(total, limit) if limit else total
    exact = [total * w / whole for w in weights]
    taken = [min(n, math.floor(x + 1e-9)) for n, x in zip(sizes, exact, strict=True)]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (taken[i] - exact[i], i))
    for i in by_remainder:
        if sum(taken) < total and taken[i] < sizes[i]:
            taken[i] += 1
    return taken


def mix(
    parts: Sequence[Part],
    split: str,
    rank: Callable[[Record], int],
    limit: int,
    dropped: Dropped,
) -> list[Record]:
    """Return the records of ``split``, part after part, each in its order.

    Which ones are left out is decided by ``rank``, so that the choice depends on nothing else. A
    record that one part holds out is not trained on from another. Ids get the part's number.

    Args:
        parts: with both splits, ids unique within each.
        split: train or heldout.
        rank: a place for each record that depends only on its content.
        limit: of the records of all parts; 0: none.
        dropped: is told which part was too small, and what is left out.

    Raises:
        ConfigError: if a part has no records of this split.
    """
    found = [part.splits[split] for part in parts]
    if split == "train":
        heldout = {rank(r) for part in parts for r in part.splits["heldout"]}
        found = [without(records, heldout, rank, dropped) for records in found]
    sizes = [len(records) for records in found]
    if 0 in sizes:
        empty = sizes.index(0)
        raise ConfigError(f"data.mixture[{empty}] ({parts[empty].name}) has no {split} records")
    # without weights every part counts by its size, so that all of it can be taken
    given = [part.weight for part in parts if part.weight is not None]
    weights = given or [float(size) for size in sizes]
    taken = shares(sizes, weights, limit)
    used, available = sum(taken), sum(sizes)
    if used < min(available, limit or available):
        short = min(range(len(parts)), key=lambda i: sizes[i] / weights[i])
        dropped.remark(
            f"data.mixture: {used:,} of {available:,} {split} records used, since part {short}"
            f" ({parts[short].name}) has only {sizes[short]:,} for its weight of"
            f" {weights[short]:g}"
        )
    mixed: list[Record] = []
    for number, (records, n) in enumerate(zip(found, taken, strict=True)):
        chosen = lowest(records, n, rank)
        mixed += [{**record, "id": f"{number}:{record['id']}"} for record in chosen]
    return mixed


def lowest(records: list[Record], n: int, rank: Callable[[Record], int]) -> list[Record]:
    """Return the ``n`` records of lowest rank, in the order in which they stand."""
    if n >= len(records):
        return records
    kept = {id(record) for record in sorted(records, key=rank)[:n]}
    return [record for record in records if id(record) in kept]


def without(
    records: list[Record], heldout: set[int], rank: Callable[[Record], int], dropped: Dropped
) -> list[Record]:
    """Return the records whose content is not held out, and tell ``dropped`` of the others."""
    kept = []
    for record in records:
        if rank(record) in heldout:
            dropped.note("not trained on, since they are held out too", record["id"])
        else:
            kept.append(record)
    return kept


__all__ = ["SPLITS", "load_records", "read_jsonl"]

SPLITS = ("train", "heldout")


def read_jsonl(path: str | Path) -> list[Record]:
    """Read and check a file with one JSON object per line; blank lines are skipped.

    A .json file may hold a list instead. A record without ``id`` gets ``<file name>:<line>``; one
    without ``kind`` gets ``chat``, ``completion`` or ``text``, after its content. Other keys are
    kept.

    Raises:
        ConfigError: if the file is missing, empty, or a line is not a record; names file and line.
    """
    rows = json_reader(Path(path), DataConfig().max_row_bytes).read()
    return collect(rows, str(path), None, 0, Dropped())


def load_records(data: DataConfig, split: str, *, dropped: Dropped | None = None) -> list[Record]:
    """Return the records of ``split`` that the settings ask for; deterministic.

    Files and data sets of the hub: ``eval_path`` or ``eval_split`` is the held-out part where it
    is given, and records that stand in both are not trained on; else ``eval_fraction`` is held out
    by a hash of each record's content, so that duplicates stay together and a record keeps its
    side when others are added. ``pycode``: held out by module path, see
    :mod:`specheads.data.pycode`. ``mixture``: each part by its own rule, then by weight, see
    :mod:`specheads.data.load`. ``max_records`` keeps an evenly spread sample of each split.

    Args:
        data: the settings.
        split: ``train`` or ``heldout``.
        dropped: is told of records that cannot be used; one for both splits counts each once.

    Raises:
        ConfigError: if a file is wrong, too many records are, or nothing is left.
        ValueError: if ``split`` is neither ``train`` nor ``heldout``.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    dropped = Dropped() if dropped is None else dropped
    if data.source == "mixture":
        parts = [
            Part(_name(part), weight, _both(part, dropped)) for part, weight in mixture_parts(data)
        ]
        records = mix(parts, split, content_rank, data.max_records, dropped)
    elif data.source == "pycode":
        records = _load_pycode(data, split)
    else:
        records = _split(data, dropped)[split]
    if data.max_records:
        records = lowest(records, data.max_records, content_rank)
    if not records:
        raise ConfigError(f"data.source={data.source} gives no {split} records with these settings")
    return records


def _name(data: DataConfig) -> str:
    return f"{data.source} {data.path}" if data.path else data.source


def _both(data: DataConfig, dropped: Dropped) -> dict[str, list[Record]]:
    if data.source == "pycode":
        splits = {split: _load_pycode(data, split) for split in SPLITS}
    else:
        splits = _split(data, dropped)
    n = data.max_records
    return {s: lowest(r, n, content_rank) if n else r for s, r in splits.items()}


def _split(data: DataConfig, dropped: Dropped) -> dict[str, list[Record]]:
    records = read_part(data, "train", dropped)
    if given := data.eval_split or data.eval_path:
        heldout = read_part(data, "heldout", dropped)
        train = without(records, {content_rank(r) for r in heldout}, content_rank, dropped)
        if not train:
            raise ConfigError(f"every record of {data.path} is held out too, by {given}")
        return {"train": train, "heldout": heldout}
    ranks = {content_rank(record) for record in records}
    if len(ranks) < 2:
        raise ConfigError(
            f"{data.path} holds {len(ranks)} distinct record; holding some out needs 2,"
            f" or set {'data.eval_split' if data.source == 'hub' else 'data.eval_path'}"
        )
    # at least one on each side, however small the file
    limit = max(min(ranks), min(round(data.eval_fraction * 2**64), max(ranks) - 1))
    splits: dict[str, list[Record]] = {"train": [], "heldout": []}
    for record in records:
        splits["heldout" if content_rank(record) <= limit else "train"].append(record)
    return splits


def _load_pycode(data: DataConfig, split: str) -> list[Record]:
    from specheads.data import pycode  # walks the machine's Python source: only when asked for

    packages = tuple(data.packages) or pycode.DEFAULT_PACKAGES
    if unknown := sorted(set(data.kinds) - set(pycode.KINDS)):
        raise ConfigError(
            f"data.kinds: unknown {', '.join(unknown)}; there are {', '.join(pycode.KINDS)}"
        )
    pairs: list[Record] = []
    if data.documents < 1:
        kinds = tuple(data.kinds) or pycode.KINDS
        pairs = pycode.pairs(split, kinds, packages)
    if data.documents == 0:
        return pairs
    documents = pycode.documents(split, packages)
    if data.documents == 1:
        return documents
    # characters stand for tokens: documents make up the asked share of the sum
    budget = _size(pairs) * data.documents / (1 - data.documents)
    chosen: list[Record] = []
    for document in sorted(documents, key=content_rank):
        if budget <= 0:
            break
        budget -= _size([document])
        chosen.append(document)
    return pairs + chosen


def _size(records: Iterable[Record]) -> int:
    texts = (m["content"] for r in records for m in r.get("messages", ()))
    return sum(map(len, texts)) + sum(len(r.get("text", "")) for r in records)


def content_rank(record: Record) -> int:
    # a place in [0, 2**64) that depends on what is learned, not on names or line numbers
    content = {k: record[k] for k in ("messages", "prompt", "completion", "text") if k in record}
    line = json.dumps(content, sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(line.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")
