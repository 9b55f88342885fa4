"""Reading .jsonl records, splitting them, and saying what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specheads.config import ConfigError, DataConfig
from specheads.data import pycode
from specheads.data.load import load_records, read_jsonl, read_prompts

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def _write(path: Path, *lines: object) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_the_three_contents(tmp_path: Path) -> None:
    """Records without id or kind still get ones that name their place and content."""
    path = _write(
        tmp_path / "d.jsonl",
        {"messages": CHAT},
        "",
        {"id": 7, "prompt": "p", "completion": "c", "kind": "edit", "source": "x"},
        {"text": "t"},
    )
    chat, pair, text = read_jsonl(path)
    assert (chat["id"], chat["kind"]) == ("d.jsonl:1", "chat")
    assert (pair["id"], pair["kind"], pair["source"]) == ("7", "edit", "x")
    assert (text["id"], text["kind"]) == ("d.jsonl:4", "text")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object, got list"),
        ({"prompt": "p"}, "found prompt"),
        ({"text": "t", "messages": CHAT}, "a record holds messages, or"),
        ({"text": 3}, "text must be a string"),
        ({"prompt": "p", "completion": None}, "completion must be a string"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a string"),
        ({"messages": ["hello"]}, r"messages\[0\].role must be a string"),
        ({"text": "t", "kind": 3}, "kind must be a string"),
        ({"id": "a", "text": "t"}, "id 'a' is already at .*d.jsonl:1$"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, complaint: str) -> None:
    """A malformed record is not skipped or half-read: file and line are in the message."""
    path = _write(tmp_path / "d.jsonl", {"id": "a", "text": "ok"}, line)
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_jsonl(path)
    assert f"{path}:2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    """An empty file is an error, not an empty training run."""
    with pytest.raises(ConfigError, match="holds no records"):
        read_jsonl(_write(tmp_path / "d.jsonl", "", ""))
    with pytest.raises(ConfigError, match="cannot read .*No such file"):
        read_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_jsonl(tmp_path / "b.jsonl")


def test_splits_are_disjoint_and_keep_duplicates_together(tmp_path: Path) -> None:
    """A copy of a held-out record in the training part would flatter every held-out figure."""
    lines = [{"text": f"text {i % 60}"} for i in range(120)]
    path = _write(tmp_path / "d.jsonl", *lines)
    data = DataConfig(source="jsonl", path=str(path), eval_fraction=0.2)
    train, heldout = load_records(data, "train"), load_records(data, "heldout")
    assert len(train) + len(heldout) == 120
    assert not {r["text"] for r in train} & {r["text"] for r in heldout}
    assert 8 <= len(heldout) <= 48


def test_a_record_keeps_its_side_when_others_come(tmp_path: Path) -> None:
    """Adding data must not move earlier held-out records into the training part."""
    lines = [{"text": f"text {i}"} for i in range(200)]
    few = DataConfig(source="jsonl", path=str(_write(tmp_path / "a.jsonl", *lines[:100])))
    more = DataConfig(source="jsonl", path=str(_write(tmp_path / "b.jsonl", *lines[::-1])))
    before = {r["text"] for r in load_records(few, "heldout")}
    after = {r["text"] for r in load_records(more, "heldout")}
    assert before <= after


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_no_side_is_empty(tmp_path: Path, fraction: float) -> None:
    """Two records suffice; one is refused with a way out."""
    path = _write(tmp_path / "d.jsonl", {"text": "a"}, {"text": "b"})
    data = DataConfig(source="jsonl", path=str(path), eval_fraction=fraction)
    assert len(load_records(data, "train")) == len(load_records(data, "heldout")) == 1
    one = DataConfig(source="jsonl", path=str(_write(tmp_path / "one.jsonl", {"text": "a"})))
    with pytest.raises(ConfigError, match="1 distinct record.*eval_path"):
        load_records(one, "train")


def test_eval_path_and_max_records(tmp_path: Path, tiny_jsonl: Path) -> None:
    """A given held-out file is used whole, and the training file is then not split."""
    other = _write(tmp_path / "e.jsonl", {"text": "held out"})
    data = DataConfig(source="jsonl", path=str(tiny_jsonl), eval_path=str(other))
    assert len(load_records(data, "train")) == 32
    assert [r["text"] for r in load_records(data, "heldout")] == ["held out"]
    many = _write(tmp_path / "d.jsonl", *({"text": str(i)} for i in range(200)))
    few = DataConfig(source="jsonl", path=str(many), eval_path=str(other), max_records=20)
    chosen = [int(r["text"]) for r in load_records(few, "train")]
    assert len(chosen) == 20
    assert chosen == sorted(chosen)
    assert chosen[-1] > 100, "a sample, not the head of the file"


def test_pycode_mixes_documents_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """data.documents is a share of the text, not of the number of records."""
    messages = [{"role": "user", "content": "q" * 60}, {"role": "assistant", "content": "a" * 40}]
    pairs = [{"id": f"p{i}", "kind": "next", "messages": messages} for i in range(30)]
    documents = [{"id": f"d{i}", "kind": "document", "text": f"{i:0500d}"} for i in range(40)]
    asked: list[tuple[str, ...]] = []

    def make_pairs(split: str, kinds: Sequence[str], *_rest: object) -> list[dict[str, Any]]:
        asked.append((split, *kinds))
        return pairs

    monkeypatch.setattr(pycode, "pairs", make_pairs)
    monkeypatch.setattr(pycode, "documents", lambda *_args: documents)
    assert load_records(DataConfig(), "heldout") == pairs
    assert asked == [("heldout", *pycode.KINDS)]
    mixed = load_records(DataConfig(documents=0.5, kinds=["next"]), "train")
    assert asked[1] == ("train", "next")
    assert sum(r["kind"] == "document" for r in mixed) == 6  # 3,000 characters each
    assert load_records(DataConfig(documents=1.0), "train") == documents
    assert len(asked) == 2, "pairs are not made where none are wanted"
    with pytest.raises(ConfigError, match="data.kinds: unknown nxet; there are body"):
        load_records(DataConfig(kinds=["nxet"]), "train")


def test_prompts_alone_are_what_messages_give(tmp_path: Path) -> None:
    """A prompt that became another record would be drawn with another seed, or not be read."""
    texts = ["What is this?", " two  words ", "é\u2028\u00a0x", '{"prompt": 1}']
    turns = [[{"role": "user", "content": text}] for text in texts]
    (tmp_path / "p.txt").write_bytes(
        ("\ufeff" + "\r\n".join([texts[0], "", *texts[1:]]) + "\n \n").encode()
    )
    lines = [1, 3, 4, 5]
    expected = [
        {"id": f"p.txt:{number}", "kind": "chat", "messages": messages}
        for number, messages in zip(lines, turns, strict=True)
    ]
    assert read_prompts(tmp_path / "p.txt", chat=True) == expected
    for each in ({"prompt": 0}, {"prompt": 0, "kind": "k", "id": "a"}):
        given = [each | {"prompt": text} for text in texts[:1]]
        meant = [{k: v for k, v in each.items() if k != "prompt"} | {"messages": turns[0]}]
        files = []
        for name, rows in (("a", given), ("b", meant)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            files.append(read_prompts(tmp_path / name / "p.jsonl", chat=True))
        assert files[0] == files[1] == read_jsonl(tmp_path / "b" / "p.jsonl")
    bare = read_prompts(tmp_path / "a" / "p.jsonl", chat=False)
    assert bare == [{"id": "a", "kind": "k", "prompt": texts[0], "completion": ""}]
    pair = {"prompt": "x", "completion": "y"}
    (tmp_path / "pair.jsonl").write_text(json.dumps(pair) + "\n")
    for chat in (True, False):
        (record,) = read_prompts(tmp_path / "pair.jsonl", chat=chat)
        assert record == pair | {"id": "pair.jsonl:1", "kind": "completion"}
    for content, complaint in (
        (b'{"prompt": 3}', r"\.jsonl:1: messages\[0\]\.content must be a string"),
        (b'{"turns": ["x"]}', "a record holds messages"),
    ):
        (tmp_path / "wrong.jsonl").write_bytes(content)
        with pytest.raises(ConfigError, match=complaint):
            read_prompts(tmp_path / "wrong.jsonl", chat=True)
    for content, complaint in ((b" \n", "holds no records"), (b"\xff", "not UTF-8 at byte 1")):
        (tmp_path / "wrong.txt").write_bytes(content)
        with pytest.raises(ConfigError, match=complaint):
            read_prompts(tmp_path / "wrong.txt", chat=True)
