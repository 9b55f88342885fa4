"""Read training records: what a user's files or the hub hold, or what ``data=pycode`` makes.

A record is a dict with ``id``, ``kind`` and one of three contents: ``messages`` (roles; only the
assistant's answers are learned), ``prompt`` and ``completion`` (only the completion is learned),
or ``text`` (everything is learned). It may bring its token ids along, see
:mod:`specheads.data.stored`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from specheads.config import ConfigError, DataConfig, mixture_parts
from specheads.data import sources
from specheads.data.dropped import Dropped
from specheads.data.mixture import Part, lowest, mix, without
from specheads.data.readers import json_reader
from specheads.data.rows import Record

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
    return sources.collect(rows, str(path), None, 0, Dropped())


def load_records(data: DataConfig, split: str, *, dropped: Dropped | None = None) -> list[Record]:
    """Return the records of ``split`` that the settings ask for; deterministic.

    Files and data sets of the hub: ``eval_path`` or ``eval_split`` is the held-out part where it
    is given, and records that stand in both are not trained on; else ``eval_fraction`` is held out
    by a hash of each record's content, so that duplicates stay together and a record keeps its
    side when others are added. ``pycode``: held out by module path, see
    :mod:`specheads.data.pycode`. ``mixture``: each part by its own rule, then by weight, see
    :mod:`specheads.data.mixture`. ``max_records`` keeps an evenly spread sample of each split.

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
    records = sources.read_part(data, "train", dropped)
    if given := data.eval_split or data.eval_path:
        heldout = sources.read_part(data, "heldout", dropped)
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
