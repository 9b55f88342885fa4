"""Read training records: what a user's files or the hub hold, or what ``data=pycode`` makes.

A mixture takes its share of the records from each data set, and no record comes twice.

A record is a dict with ``id``, ``kind`` and one of three contents: ``messages`` (roles; only the
assistant's answers are learned), ``prompt`` and ``completion`` (only the completion is learned),
or ``text`` (everything is learned). It may bring its token ids along, see
:mod:`specheads.data.schema`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from specheads.config import ConfigError, DataConfig, mixture_parts
from specheads.data.readers import Row, json_reader, open_reader, text_lines
from specheads.data.schema import KEYS, Dropped, Record, RecordError, Tally, json_digest, to_record


def read_part(data: DataConfig, split: str, dropped: Dropped) -> list[Record]:
    """Return the records of ``path``, or for ``heldout`` of ``eval_path`` or ``eval_split``.

    A streamed data set of the hub is read up to ``max_records`` rows. The source is one of jsonl,
    parquet and hub.

    Raises:
        ConfigError: if there is no such data set, or too many of its records cannot be used.
    """
    reader = open_reader(data, split)
    limit = data.max_records if data.source == "hub" and data.streaming else 0
    return _collect(reader.name, islice(reader.read(), limit or None), dropped, data)


def _collect(
    name: str, rows: Iterable[Row], dropped: Dropped, data: DataConfig | None = None
) -> list[Record]:
    """Turn the rows of a file or data set into records with different ids.

    Without ``data`` there are no names for columns, and every row has to be a record.
    """
    columns, allowed = (data.columns, data.max_bad_fraction) if data else (None, 0.0)
    tally = Tally(allowed, dropped)
    seen: dict[str, str] = {}

    def make(row: Row) -> Record:
        value = row.parse()
        record = to_record(value, row.where, row.name, columns, dropped)
        first = seen.setdefault(record["id"], row.where)
        if first != row.where:
            reason, detail = "with the id of an earlier one", f"id {record['id']!r} is already at"
            raise RecordError(reason, f"{detail} {first}", row.where, value)
        return record

    found = [tally.take(make, row) for row in rows]
    dropped.read[name] = tally.total
    tally.check(name)
    return [record for record in found if record is not None]


def content_rank(record: Record) -> int:
    """Return a place in [0, 2**64) that depends on what is learned, not on names or lines."""
    content = {k: record[k] for k in ("messages", "prompt", "completion", "text") if k in record}
    return int.from_bytes(json_digest(content)[:8], "big")


def heldout_limit(data: DataConfig, name: str, ranks: set[int]) -> int:
    """Return the content rank up to which records are held out: on each side is at least one.

    Args:
        data: the settings.
        name: what the data set is called in messages.
        ranks: the content ranks of all records; the lowest and the highest suffice.

    Raises:
        ConfigError: if there are fewer than two.
    """
    if len(ranks) < 2:
        key = "data.eval_split" if data.source == "hub" else "data.eval_path"
        raise ConfigError(
            f"{name} holds {len(ranks)} distinct record; holding some out needs 2, or set {key}"
        )
    # whatever the fraction, the lowest rank is held out and the highest is trained on
    return max(min(ranks), min(round(data.eval_fraction * 2**64), max(ranks) - 1))


def shares(sizes: Sequence[int], weights: Sequence[float], limit: int = 0) -> list[int]:
    """Return how many records of each part a mixture takes.

    The total is the largest at which every part has its share without repeating a record, and at
    most ``limit`` (0: none). What rounding down leaves goes to the largest remainders.
    """
    whole = sum(weights)
    filled = [n * whole / w for n, w in zip(sizes, weights, strict=True) if w]
    # 1e-9, since 10 * 0.7 / 0.7 may be a little less than 10 in floating point
    total = math.floor(min(filled, default=0) + 1e-9)
    total = min(total, limit) if limit else total
    exact = [total * w / whole for w in weights]
    taken = [min(n, math.floor(x + 1e-9)) for n, x in zip(sizes, exact, strict=True)]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (taken[i] - exact[i], i))
    for i in by_remainder:
        if sum(taken) < total and taken[i] < sizes[i]:
            taken[i] += 1
    return taken


def _mix(data: DataConfig, split: str, dropped: Dropped) -> list[Record]:
    """Return the records of a mixture, part after part, each in its order.

    Which ones are left out depends on their content alone. A record that one part holds out is not
    trained on from another. Ids get the part's number.
    """
    configs, given = zip(*mixture_parts(data), strict=True)
    parts = [
        {s: _lowest(records, part.max_records) for s, records in _splits(part, dropped).items()}
        for part in configs
    ]
    names = [f"{part.source} {part.path}" if part.path else part.source for part in configs]
    found = [part[split] for part in parts]
    if split == "train":
        heldout = [record for part in parts for record in part["heldout"]]
        found = [_without(records, heldout, dropped) for records in found]
    sizes = [len(records) for records in found]
    if 0 in sizes:
        empty = sizes.index(0)
        raise ConfigError(f"data.mixture[{empty}] ({names[empty]}) has no {split} records")
    # without weights every part counts by its size, so that all of it can be taken
    weights = [size if w is None else w for size, w in zip(sizes, given, strict=True)]
    taken, available = shares(sizes, weights, data.max_records), sum(sizes)
    if sum(taken) < min(available, data.max_records or available):
        short = min(range(len(parts)), key=lambda i: sizes[i] / weights[i])
        dropped.remark(
            f"data.mixture: {sum(taken):,} of {available:,} {split} records used, since part"
            f" {short} ({names[short]}) has only {sizes[short]:,} for its weight of"
            f" {weights[short]:g}"
        )
    return [
        {**record, "id": f"{number}:{record['id']}"}
        for number, (records, n) in enumerate(zip(found, taken, strict=True))
        for record in (_lowest(records, n) if n else [])
    ]


def _lowest(records: list[Record], n: int) -> list[Record]:
    """Return the ``n`` records of lowest content rank, in order; with 0 all of them."""
    if not 0 < n < len(records):
        return records
    kept = {id(record) for record in sorted(records, key=content_rank)[:n]}
    return [record for record in records if id(record) in kept]


def _without(records: list[Record], heldout: Iterable[Record], dropped: Dropped) -> list[Record]:
    """Return the records whose content is not held out, and tell ``dropped`` of the others."""
    ranks, kept = {content_rank(record) for record in heldout}, []
    for record in records:
        if content_rank(record) in ranks:
            dropped.note("not trained on, since they are held out too", record["id"])
        else:
            kept.append(record)
    return kept


def read_jsonl(path: str | Path) -> list[Record]:
    """Read and check a file with one JSON object per line; blank lines are skipped.

    A .json file may hold a list instead. A record without ``id`` gets ``<file name>:<line>``; one
    without ``kind`` gets ``chat``, ``completion`` or ``text``, after its content. Other keys are
    kept.

    Raises:
        ConfigError: if the file is missing, empty, or a line is not a record; names file and line.
    """
    reader = json_reader(Path(path))
    return _collect(reader.name, reader.read(), Dropped())


def read_prompts(path: str | Path, *, chat: bool) -> list[Record]:
    """Read a file of prompts that are to be answered.

    It holds what :func:`read_jsonl` reads, where answers may be missing: objects with only
    ``prompt`` are taken, and a .txt is a prompt per line, blank lines left out.

    Args:
        path: the file.
        chat: make user's turns of such prompts, for a base with a chat template; else they are
            texts that it goes on with.

    Raises:
        ConfigError: as :func:`read_jsonl`.
    """
    path = Path(path).expanduser()

    def meant(load: Callable[[], object]) -> object:
        value = load()
        if not isinstance(value, dict) or value.keys() & KEYS != {"prompt"}:
            return value
        if not chat:
            return value | {"completion": ""}
        rest = {key: value[key] for key in value if key != "prompt"}
        return rest | {"messages": [{"role": "user", "content": value["prompt"]}]}

    rows = text_lines(path) if path.suffix == ".txt" else json_reader(path).read()
    asked = (replace(row, load=partial(meant, row.load)) for row in rows)
    return _collect(str(path), asked, Dropped())


def load_records(data: DataConfig, split: str, *, dropped: Dropped | None = None) -> list[Record]:
    """Return the records of ``split`` that the settings ask for; deterministic.

    Files and data sets of the hub: ``eval_path`` or ``eval_split`` is the held-out part where it
    is given, and records that stand in both are not trained on; else ``eval_fraction`` is held out
    by a hash of each record's content, so that duplicates stay together and a record keeps its
    side when others are added. ``pycode``: held out by module path, see
    :mod:`specheads.data.pycode`. ``mixture``: each part by its own rule, then by weight.
    ``max_records`` keeps an evenly spread sample of each split.

    Args:
        data: the settings.
        split: ``train`` or ``heldout``.
        dropped: the collection to which unusable records are added; one collection for both
            splits counts each record once.

    Raises:
        ConfigError: if a file is wrong, too many records are, or nothing is left.
    """
    dropped = Dropped() if dropped is None else dropped
    if data.source == "mixture":
        records = _mix(data, split, dropped)
    elif data.source == "pycode":
        records = _load_pycode(data, split)
    else:
        records = _splits(data, dropped)[split]
    records = _lowest(records, data.max_records)
    if not records:
        raise ConfigError(f"data.source={data.source} gives no {split} records with these settings")
    return records


def _splits(data: DataConfig, dropped: Dropped) -> dict[str, list[Record]]:
    if data.source == "pycode":
        return {split: _load_pycode(data, split) for split in ("train", "heldout")}
    records = read_part(data, "train", dropped)
    if given := data.eval_split or data.eval_path:
        heldout = read_part(data, "heldout", dropped)
        train = _without(records, heldout, dropped)
        if not train:
            raise ConfigError(f"every record of {data.path} is held out too, by {given}")
        return {"train": train, "heldout": heldout}
    ranks = [content_rank(record) for record in records]
    limit = heldout_limit(data, str(data.path), set(ranks))
    splits: dict[str, list[Record]] = {"train": [], "heldout": []}
    for record, rank in zip(records, ranks, strict=True):
        splits["heldout" if rank <= limit else "train"].append(record)
    return splits


def _load_pycode(data: DataConfig, split: str) -> list[Record]:
    from specheads.data import pycode  # walks the machine's Python source: only when asked for

    packages = tuple(data.packages) or pycode.DEFAULT_PACKAGES
    if unknown := sorted(set(data.kinds) - set(pycode.KINDS)):
        raise ConfigError(
            f"data.kinds: unknown {', '.join(unknown)}; there are {', '.join(pycode.KINDS)}"
        )
    kinds, share = tuple(data.kinds) or pycode.KINDS, data.documents
    records = list(pycode.pairs(split, kinds, packages)) if share < 1 else []
    documents = pycode.documents(split, packages) if share else []
    if share == 1:
        return documents
    # characters stand for tokens: documents make up the asked share of the sum
    characters = sum(len(m["content"]) for record in records for m in record["messages"])
    budget = characters * share / (1 - share)
    for document in sorted(documents, key=content_rank):
        if budget <= 0:
            break
        budget -= len(document["text"])
        records.append(document)
    return records
