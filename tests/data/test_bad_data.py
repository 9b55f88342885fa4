"""Five hundred malformed data files: each ends in one line or in quarantine, never otherwise.

The reference beside the reader judges every row by itself, slowly and obviously.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from specheads.config import ConfigError, DataConfig
from specheads.data.chat import Documents, encode_records
from specheads.data.load import load_records
from specheads.data.readers import MAX_DEPTH, open_reader
from specheads.data.schema import Dropped, RecordError, Tally
from specheads.data.stream import RecordStream, StreamedBatches
from tests.conftest import build_byte_tokenizer

LARGEST = 3000  # data.max_row_bytes
CHUNKS, PER_CHUNK = 10, 50


ASKED = [("human", "q"), ("gpt", "a")]


def good(i: int) -> dict[str, Any]:
    """A record of one of the kinds."""
    turns = [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": f"ä {i}"}]
    kinds: list[dict[str, Any]] = [
        {"id": f"r{i}", "messages": turns},
        {"id": f"r{i}", "prompt": f"p {i}", "completion": f"c {i}"},
        {"text": f"t {i} \u2028"},
        {
            "id": i,
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        },
    ]
    return kinds[i % 4]


# what a line may be instead; none of them is a record
BAD_ROWS: list[Any] = [
    None, True, 3, "text", [], {}, [{"text": "a"}], {"text": None}, {"text": 3}, {"text": ["a"]},
    {"texts": "a"}, {"text": "a", "prompt": "b", "completion": "c"}, {"prompt": "a"},
    {"messages": []}, {"messages": {}}, {"messages": "hi"}, {"messages": [None]},
    {"messages": [{"role": "user"}]}, {"messages": [{"role": 1, "content": "a"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"conversations": [{"from": "gpt", "value": "a"}]}, {"conversations": [3]},
    {"conversations": [{"from": "alien", "value": "a"}]}, {"text": "a", "kind": 3},
    {"text": "a", "id": {"a": 1}}, {"text": "a", "id": [1]}, {"text": "a", "id": True},
    {"text": "a", "id": "\ud83d"}, {"text": "\udc00"}, {"text": "a", "kind": "\ud83d"},
    {"text": "a", "tokens": 3}, {"text": "a", "tokens": {"ids": [-1], "answers": [[0, 1]]}},
    {"text": "a", "tokens": {"ids": [1], "answers": [[0, 9]], "tokenizer": "x"}},
    {"text": "x" * LARGEST}, {"text": "a", "more": "ä" * LARGEST},
]  # fmt: skip
BAD_LINES: list[bytes] = [
    b"\xff\xfe{\x00", b'{"text": "\xff"}', b'{"text": "a"', b'"text"}', b"\x00" * 40, b"{" * 99_999,
    b"[" * 99_999 + b"]" * 99_999, b'{"text": "a", "x": ' + b"[" * 999 + b"]" * 999 + b"}",
    b'{"text": NaN}', b'{"text": "a", "x": -Infinity}', b'{"text": "a", "text": "b"}',
    b'{"text": "a"} {"text": "b"}', b'{"text": "a\tb"}', b'{"text": "a\x00b"}', b"{'text': 'a'}",
    b'{"text": "a", "x": ' + b"9" * 2999 + b"}" + b" " * 99, b'{"text": "\xed\xa0\x80"}', b"text",
    b'{"text": "a",}', b"\xef\xbb\xbf" + b'{"text": "a"}', b'{"text": "a"}\r{"text": "b"}',
    b'{"a": {"text": "a", "a": {}, "a": 1}, "text": "b"}', b"nan", b'{"text": "\\ud800"}',
    b'{"text": "a", "x": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
]  # fmt: skip


def judged(line: bytes) -> dict[str, Any] | None:
    """The reference: what a line holds if it is a record, else None."""
    if len(line.rstrip(b"\r\n")) > LARGEST:
        return None
    faults: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        faults.extend("twice" for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        return dict(pairs)

    try:
        row = json.loads(line.decode(), object_pairs_hook=once, parse_constant=faults.append)
    except (ValueError, RecursionError):
        return None
    return row if not faults and judged_value(row) else None


def judged_value(row: Any) -> bool:
    """Whether a parsed row is a record."""
    if not isinstance(row, dict) or depth(row) > MAX_DEPTH:
        return False
    contents = ["messages", "conversations", "text"]
    found = [key for key in contents if key in row]
    found += ["pair"] if {"prompt", "completion"} <= row.keys() else []
    if len(found) != 1 or not is_text(row.get("kind", "")) or "tokens" in row:
        return False
    name = row.get("id")
    if not (name is None or is_text(name) or type(name) in (int, float)):
        return False
    if found == ["pair"]:
        return is_text(row["prompt"]) and is_text(row["completion"])
    if found == ["text"]:
        return is_text(row["text"])
    turns = row[found[0]]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
        return False
    if found == ["messages"] and not ("from" in turns[0] and "role" not in turns[0]):
        return all(is_text(turn.get(key)) for turn in turns for key in ("role", "content"))
    speakers = [turn.get("from", turn.get("role")) for turn in turns]
    texts = [turn.get("value", turn.get("content")) for turn in turns]
    return speakers == ["human", "gpt"] and all(map(is_text, texts))


def depth(value: Any) -> int:
    """How many objects and lists are in each other."""
    found, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        found += 1
        level = [x for each in level for x in (each.values() if isinstance(each, dict) else each)]
    return found


def is_text(value: object) -> bool:
    """Whether a string can be written as UTF-8."""
    return isinstance(value, str) and not any(0xD800 <= ord(c) < 0xE000 for c in value)


def malformed_lines(draw: random.Random) -> bytes:
    """A .jsonl in which something is wrong."""
    lines = [json.dumps(good(i), ensure_ascii=draw.random() < 0.5).encode() for i in range(12)]
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(lines))
        kind = draw.randrange(6)
        if kind == 0:
            lines[at] = json.dumps(draw.choice(BAD_ROWS)).encode()
        elif kind == 1:
            lines[at] = draw.choice(BAD_LINES)
        elif kind == 2:
            lines[at] = flipped(draw, lines[at])
        elif kind == 3:
            lines[at] = lines[at][: draw.randint(0, len(lines[at]))]
        elif kind == 4:
            lines.insert(at, draw.choice([b"", b"  ", lines[0], b"\x00", b"\r"]))
        else:
            lines[at] += draw.choice([b"\r", b"\x00", b"}", b" " * 5000, b"\xc3"])
    whole = draw.choice([b"\n", b"\n", b"\r\n"]).join(lines) + draw.choice([b"", b"\n"])
    if draw.random() < 0.2:
        whole = b"\xef\xbb\xbf" + whole
    if draw.random() < 0.2:
        whole = whole[: draw.randint(0, len(whole))]
    return flipped(draw, whole) if draw.random() < 0.3 else whole


def flipped(draw: random.Random, data: bytes) -> bytes:
    """Some bytes changed."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8) if changed else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def expected_of_lines(data: bytes) -> list[int]:
    """The numbers of the lines that are records, each id once."""
    kept, ids = [], set()
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        row = judged(line)
        if row is None:
            continue
        name = f"d.jsonl:{number}" if row.get("id") is None else str(row["id"])
        if name not in ids:
            ids.add(name)
            kept.append(number)
    return kept


def settings_of(folder: Path, source: str, name: str) -> DataConfig:
    """Settings in which everything may be bad, with a held-out file of its own."""
    held = folder / "held.jsonl"
    held.write_text('{"text": "held out"}\n')
    return DataConfig(
        source=source,
        path=str(folder / name),
        eval_path=str(held),
        max_bad_fraction=1.0,
        max_row_bytes=LARGEST,
    )


def read(data: DataConfig) -> tuple[list[dict[str, Any]], Dropped]:
    """The records, none where there is one line of an error, and what was dropped."""
    dropped = Dropped()
    try:
        records = load_records(data, "train", dropped=dropped)
    except ConfigError as error:
        assert str(error).isprintable() and len(str(error)) < 1500, repr(error)
        return [], dropped
    used = encode(records)
    assert all(row["where"].isprintable() and row["reason"] for row in dropped.rows.values())
    assert used + len(dropped.rows) >= 1
    return records, dropped


TOKENIZER = build_byte_tokenizer()


def encode(records: list[dict[str, Any]]) -> int:
    """Encode; whatever a record's other fields hold, it is used or counted."""
    dropped = Dropped()
    try:
        found = encode_records(records, Documents(TOKENIZER, seq_len=128), Tally(1.0, dropped))
    except ConfigError as error:
        assert str(error).isprintable()
        return 0
    counts = found.counts
    kept = len({document.id.split("+")[0] for document in found.documents})
    left_out = counts["unlabelled"] + counts["refused"]
    assert left_out == len(dropped.rows)
    assert kept + left_out + counts["too_long"] == len(records) == counts["records"]
    return kept


def check_file(folder: Path, draw: random.Random, number: int) -> None:
    """Make one file and read it."""
    kind = number % 3
    if kind == 0:
        data = malformed_lines(draw)
        (folder / "d.jsonl").write_bytes(data)
        settings = settings_of(folder, "jsonl", "d.jsonl")
        records, dropped = read(settings)
        expected = expected_of_lines(data)
        lines = [i for i, x in enumerate(data.split(b"\n"), 1) if is_row(x, i)]
        places = {f"{folder / 'd.jsonl'}:{i}" for i in set(lines) - set(expected)}
        assert set(dropped.rows) == places, (number, set(dropped.rows) ^ places)
        assert len(records) == len(expected), number
        dropped.write(folder / "quarantine.jsonl")
        written = (folder / "quarantine.jsonl").read_text().splitlines()
        assert len([strict(line) for line in written]) == len(places)
        if number % 4 == 0:
            check_stream(settings, len(lines))
    elif kind == 1:
        items = [draw.choice(BAD_ROWS) if draw.random() < 0.3 else good(i) for i in range(9)]
        data = json.dumps(items, indent=draw.choice([None, 1])).encode()
        data = flipped(draw, data) if draw.random() < 0.5 else data
        data = data[: draw.randint(0, len(data))] if draw.random() < 0.2 else data
        (folder / "d.json").write_bytes(data)
        records, dropped = read(settings_of(folder, "jsonl", "d.json"))
        try:
            whole = json.loads(data)
        except ValueError:
            whole = None
        if isinstance(whole, list):
            assert len(records) + len(dropped.rows) == len(whole)
            fine = [i for i in whole if judged_value(i) and len(json.dumps(i)) <= LARGEST]
            assert len(records) <= len(fine)
            assert len(records) >= len({str(item.get("id", id(item))) for item in fine})
    else:
        check_table(folder, draw)


def is_row(line: bytes, number: int) -> bool:
    """Whether a line counts: all but blank ones do."""
    line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    return bool(line.strip()) or len(line.rstrip(b"\r")) > LARGEST


def strict(line: str) -> Any:
    """Parse JSON that others can read too."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def check_stream(settings: DataConfig, rows: int) -> None:
    """The same file as a stream: every row is seen, in one epoch, and nothing escapes."""
    settings.streaming, settings.shuffle_buffer = True, 5
    try:
        stream = RecordStream(settings, Dropped())
        documents = Documents(TOKENIZER, seq_len=128)
        batches = StreamedBatches(stream, documents, rows=1, seed=0, pad_token_id=256)
        while not batches._place.epoch:
            next(batches)
    except ConfigError as error:
        assert str(error).isprintable()
        return
    assert batches._tally.total == rows


def table(draw: random.Random) -> pa.Table:
    """A table, of which some rows or columns may be wrong."""
    n = draw.randint(1, 12)
    text = pa.array([f"t {i}" for i in range(n)])
    broken = pa.Array.from_buffers(
        pa.string(), n, [None, text.buffers()[1], pa.py_buffer(b"\xff" * 200)]
    )
    columns = [
        text, broken, pa.array(range(n)), pa.array([None] * n, pa.string()),
        pa.array([[f"t {i}"] for i in range(n)], pa.list_(pa.string())),
        pa.array([b"\xff\x00"] * n, pa.binary()), pa.array(["x" * LARGEST] * n),
        pa.array([float("nan")] * n), pa.array([10**18] * n, pa.timestamp("us")),
        pa.array([[{"role": "user", "content": None}]] * n),
        pa.array([[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]] * n),
        text.dictionary_encode(), text.cast(pa.large_string()),
    ]  # fmt: skip
    names = draw.sample(
        ["text", "messages", "prompt", "completion", "id", "kind", "conversations", "t\nx"],
        draw.randint(1, 4),
    )
    found = pa.table({name: draw.choice(columns) for name in names})
    return found[:0] if draw.random() < 0.1 else found


def check_table(folder: Path, draw: random.Random) -> None:
    """A parquet file whose contents, or whose bytes, are wrong."""
    path = folder / "d.parquet"
    settings = settings_of(folder, "parquet", "d.parquet")
    if draw.random() < 0.5:
        found = table(draw)
        parquet.write_table(found, path, row_group_size=5)
        records, dropped = read(settings)
        assert len(records) + len(dropped.rows) in (found.num_rows, 0)
        return
    whole = pa.table(
        {"text": [f"text {i} " * 9 for i in range(40)], "id": [f"r{i}" for i in range(40)]}
    )
    parquet.write_table(whole, path, write_page_checksum=True, row_group_size=10)
    data = path.read_bytes()
    kind = draw.randrange(4)
    if kind == 0:
        data = flipped(draw, data)
    elif kind == 1:
        data = data[: draw.randint(0, len(data))]
    elif kind == 2:
        at = draw.randrange(len(data))
        data = data[:at] + b"\x00" * draw.randint(1, 200) + data[at:]
    else:
        footer = len(data) - draw.randint(1, 600)
        data = data[:footer] + flipped(draw, data[footer:])
    path.write_bytes(data)
    records, dropped = read(settings)
    for record in records:  # altered pages are found by their checksums
        assert record["text"] in whole["text"].to_pylist()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_malformed_files_end_in_one_line_or_in_quarantine(chunk: int, tmp_path: Path) -> None:
    """A traceback at row 40 million loses a night, a bad row that is used spoils the model."""
    for number in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        check_file(tmp_path, random.Random(number), number)


@pytest.mark.parametrize("row", [*BAD_ROWS, *BAD_LINES], ids=lambda row: repr(row)[:40])
def test_every_kind_of_bad_row_is_set_aside(row: object, tmp_path: Path) -> None:
    """One of them among good rows: exactly it is left out, with a reason."""
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    around = [json.dumps(good(i)).encode() for i in range(8)]
    (tmp_path / "d.jsonl").write_bytes(b"\n".join([*around[:4], line, *around[4:]]) + b"\n")
    records, dropped = read(settings_of(tmp_path, "jsonl", "d.jsonl"))
    assert len(records) == 8
    (where,) = dropped.rows
    assert where == f"{tmp_path / 'd.jsonl'}:5"
    assert 0 < len(dropped.rows[where]["reason"]) < 80


def test_fields_of_odd_types_do_not_escape_the_template(
    tmp_path: Path, make_byte_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> None:
    """Templates read fields that no check knows; what their expressions raise has many names."""
    tokenizer = make_byte_tokenizer(
        "{% for m in messages %}{{ m.role + m.content }}"
        "{% for call in m.tool_calls %}{{ call['name'] + 1 // call['n'] }}{% endfor %}{% endfor %}"
    )
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    odd: list[Any] = [3, [3], [{"name": "x", "n": 0}], [{"name": "x", "n": "y"}], True, ["\ud800"]]
    records = [{"id": f"o{i}", "kind": "c", "messages": [turns[0], turns[1] | {"tool_calls": call}]}
               for i, call in enumerate(odd)]  # fmt: skip
    records.append({"id": "fine", "kind": "c", "messages": turns})
    dropped = Dropped()
    encoded = encode_records(records, Documents(tokenizer, seq_len=64), Tally(0.9, dropped))
    assert {row["where"] for row in dropped.rows.values()} == {f"record o{i}" for i in range(6)}
    assert [document.id for document in encoded.documents] == ["fine"]
    dropped.write(tmp_path / "quarantine.jsonl")
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 6


def test_a_huge_line_is_not_held(tmp_path: Path) -> None:
    """A file without line ends, as large as the memory, must not be read into it."""
    path = tmp_path / "d.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "first"}\n')
        file.truncate(1 << 28)  # a hole: no disk is used
        file.seek(0, 2)
        file.write(b'\n{"text": "last"}\n')
    data = settings_of(tmp_path, "jsonl", "d.jsonl")
    rows = list(open_reader(data, "train").read())
    assert [row.name for row in rows] == ["d.jsonl:1", "d.jsonl:2", "d.jsonl:3"]
    with pytest.raises(RecordError, match="more than data.max_row_bytes=3,000"):
        rows[1].parse()
    assert rows[2].parse() == {"text": "last"}


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    """Opening a pipe waits for a writer, who may never come."""
    os.mkfifo(tmp_path / "d.jsonl")
    with pytest.raises(ConfigError, match="is no regular file"):
        load_records(settings_of(tmp_path, "jsonl", "d.jsonl"), "train")
