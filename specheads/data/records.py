"""Read training records: what a user's .jsonl holds, or what ``data=pycode`` makes.

A record is a dict with ``id``, ``kind`` and one of three contents: ``messages`` (roles; only the
assistant's answers are learned), ``prompt`` and ``completion`` (only the completion is learned),
or ``text`` (everything is learned). It may bring its token ids along, see
:mod:`specheads.data.stored`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, DataConfig
from specheads.data.stored import check_tokens

Record = dict[str, Any]
Progress = Callable[[str, int, int], None]

SPLITS = ("train", "heldout")
_CONTENTS = ({"messages"}, {"prompt", "completion"}, {"text"})


def read_jsonl(path: str | Path) -> list[Record]:
    """Read and check a file with one JSON object per line; blank lines are skipped.

    A record without ``id`` gets ``<file name>:<line>``; one without ``kind`` gets ``chat``,
    ``completion`` or ``text``, after its content. Other keys are kept.

    Raises:
        ConfigError: if the file is missing, empty, or a line is not a record; names file and line.
    """
    path = Path(path)
    records: list[Record] = []
    seen: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                record = _parse(line, f"{path}:{number}")
                record["id"] = str(record.get("id", f"{path.name}:{number}"))
                if first := seen.get(record["id"]):
                    raise ConfigError(
                        f"{path}:{number}: id {record['id']!r} is already on line {first}"
                    )
                seen[record["id"]] = number
                records.append(record)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from None
    if not records:
        raise ConfigError(f"{path} holds no records")
    return records


def load_records(data: DataConfig, split: str, *, progress: Progress | None = None) -> list[Record]:
    """Return the records of ``split`` that the settings ask for; deterministic.

    ``jsonl``: ``eval_path`` is the held-out part where it is given; else ``eval_fraction`` of
    ``path`` is held out by a hash of each record's content, so that duplicates stay together and
    a record keeps its side when others are added. ``pycode``: held out by module path, see
    :mod:`specheads.data.pycode`. ``max_records`` keeps an evenly spread sample of each split.

    Raises:
        ConfigError: if a file is wrong, or nothing is left.
        ValueError: if ``split`` is neither ``train`` nor ``heldout``.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if data.source == "pycode":
        records = _load_pycode(data, split, progress)
    else:
        records = _load_jsonl(data, split)
    if data.max_records:
        chosen = {id(r) for r in sorted(records, key=_content_rank)[: data.max_records]}
        records = [record for record in records if id(record) in chosen]
    if not records:
        raise ConfigError(f"data.source={data.source} gives no {split} records with these settings")
    return records


def _parse(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} (column {error.colno})") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected an object, got {type(record).__name__}")
    found = [keys for keys in _CONTENTS if keys <= record.keys()]
    if len(found) != 1:
        raise ConfigError(
            f"{where}: a record holds messages, or prompt and completion, or text;"
            f" found {', '.join(sorted(map(str, record))) or 'nothing'}"
        )
    for key in found[0] - {"messages"}:
        if not isinstance(record[key], str):
            raise ConfigError(f"{where}: {key} must be a string, got {record[key]!r:.60}")
    if "messages" in found[0]:
        _check_messages(record["messages"], where)
    default = {"messages": "chat", "completion": "completion", "text": "text"}
    record.setdefault("kind", next(kind for key, kind in default.items() if key in found[0]))
    if not isinstance(record["kind"], str):
        raise ConfigError(f"{where}: kind must be a string, got {record['kind']!r:.60}")
    if "tokens" in record:
        check_tokens(record["tokens"], where)
    return record


def _check_messages(messages: object, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages must be a list with at least one message")
    for position, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise ConfigError(
                    f"{where}: messages[{position}].{key} must be a string, got {message!r:.60}"
                )


def _load_jsonl(data: DataConfig, split: str) -> list[Record]:
    assert data.path is not None  # DataConfig checks it
    if data.eval_path:
        return read_jsonl(data.path if split == "train" else data.eval_path)
    records = read_jsonl(data.path)
    ranks = {_content_rank(record) for record in records}
    if len(ranks) < 2:
        raise ConfigError(
            f"{data.path} holds {len(ranks)} distinct record; holding some out needs 2,"
            " or set data.eval_path"
        )
    # at least one on each side, however small the file
    limit = max(min(ranks), min(round(data.eval_fraction * 2**64), max(ranks) - 1))
    return [r for r in records if (_content_rank(r) <= limit) == (split == "heldout")]


def _load_pycode(data: DataConfig, split: str, progress: Progress | None) -> list[Record]:
    from specheads.data import pycode  # walks the machine's Python source: only when asked for

    packages = tuple(data.packages) or pycode.DEFAULT_PACKAGES
    if unknown := sorted(set(data.kinds) - set(pycode.KINDS)):
        raise ConfigError(
            f"data.kinds: unknown {', '.join(unknown)}; there are {', '.join(pycode.KINDS)}"
        )
    pairs: list[Record] = []
    if data.documents < 1:
        kinds = tuple(data.kinds) or pycode.KINDS
        pairs = pycode.pairs(split, kinds, packages, progress)
    if data.documents == 0:
        return pairs
    documents = pycode.documents(split, packages, progress)
    if data.documents == 1:
        return documents
    # characters stand for tokens: documents make up the asked share of the sum
    budget = _size(pairs) * data.documents / (1 - data.documents)
    chosen: list[Record] = []
    for document in sorted(documents, key=_content_rank):
        if budget <= 0:
            break
        budget -= _size([document])
        chosen.append(document)
    return pairs + chosen


def _size(records: Iterable[Record]) -> int:
    texts = (m["content"] for r in records for m in r.get("messages", ()))
    return sum(map(len, texts)) + sum(len(r.get("text", "")) for r in records)


def _content_rank(record: Record) -> int:
    # a place in [0, 2**64) that depends on what is learned, not on names or line numbers
    content = {k: record[k] for k in ("messages", "prompt", "completion", "text") if k in record}
    line = json.dumps(content, sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(line.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")
