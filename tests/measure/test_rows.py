"""Rows as users have them become records, and those that do not are left out by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specheads.config import ConfigError, RunError
from specheads.data import schema as dropped_module
from specheads.data.schema import Dropped, RecordError, Tally, check_columns, to_record, usable


def say(*turns: str) -> list[dict[str, str]]:
    """ShareGPT turns from ``speaker:text``."""
    return [dict(zip(("from", "value"), turn.split(":", 1), strict=True)) for turn in turns]


def read(row: object, columns: dict[str, str] | None = None) -> dict[str, Any]:
    """Read one row at place f:1."""
    return to_record(row, "f:1", "f#1", columns or {}, Dropped())


def test_conversations_become_messages() -> None:
    """A speaker taken for another makes the model learn the questions."""
    turns = say("system:s", "human:q", "gpt:a", "user:r", "chatgpt:b", "HUMAN:t", "bing:c")
    record = read({"id": 5, "conversations": turns, "extra": 1})
    assert record == {
        "id": "5",
        "kind": "chat",
        "extra": 1,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "r"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "t"},
            {"role": "assistant", "content": "c"},
        ],
    }
    assert read({"messages": turns})["messages"] == record["messages"]
    beside = read({"system": "s", "conversations": turns[1:]})
    assert beside["messages"] == record["messages"]
    tools = read({"conversations": say("human:q", "gpt:call", "tool:x", "tool:y", "gpt:a")})
    assert [m["role"] for m in tools["messages"]] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]


def test_an_answer_without_a_question_is_left_out_and_counted() -> None:
    """ShareGPT's long conversations were cut into parts, many of which begin with an answer."""
    dropped = Dropped()
    turns = say("system:s", "gpt:x", "gpt:y", "human:q", "gpt:a")
    record = to_record({"conversations": turns}, "f:1", "f#1", {}, dropped)
    assert [m["content"] for m in record["messages"]] == ["s", "q", "a"]
    assert "1 conversations began with an answer" in dropped.summary()
    assert not dropped.rows


@pytest.mark.parametrize(
    ("turns", "reason", "complaint"),
    [
        (say("human:q", "human:r"), "whose roles do not alternate", "turn 1 of .* user after user"),
        (say("gpt:x", "human:q", "gpt:a", "gpt:b"), "whose roles do not alternate", "turn 3 "),
        (say("human:q", "system:s"), "whose roles do not alternate", "puts system after user"),
        (say("human:q", "tool:s"), "whose roles do not alternate", "puts tool after user"),
        (say("gpt:x"), "without a user's turn", "no turn of a user"),
        (say("alien:x"), "with an unknown role", r"conversations\[0\].from must be one of human"),
        ([{"from": "human", "value": None}], "with a value that is no string", "got None"),
        ([{"from": 3, "value": "x"}], "with an unknown role", "got 3"),
        (["x"], "with a turn that is no object", "must be an object, got 'x'"),
        ([], "without turns", "at least one turn"),
        ("x", "without turns", "must be a list"),
    ],
)
def test_bad_conversations_are_named(turns: object, reason: str, complaint: str) -> None:
    """Templates answer such conversations with an error in mid-run, or render them wrongly."""
    with pytest.raises(RecordError, match=complaint) as caught:
        read({"conversations": turns})
    assert caught.value.reason == reason
    assert str(caught.value).startswith("f:1: ")


ROLES = st.sampled_from(["human", "gpt", "system", "tool"])


@given(st.lists(ROLES, max_size=7))
def test_what_is_accepted_alternates(roles: list[str]) -> None:
    """The state machine against a plain statement of what a conversation is."""
    try:
        record = read(
            {"conversations": [{"from": r, "value": str(i)} for i, r in enumerate(roles)]}
        )
    except RecordError:
        record = None
    text = "".join(role[0] for role in roles)  # h, g, s, t
    head, rest = (text[:1], text[1:]) if text.startswith("s") else ("", text)
    rest = rest.lstrip("g")
    pairs = [rest[i : i + 2] for i in range(len(rest) - 1)]
    good = rest.startswith("h") and all(p in ("hg", "gh", "gt", "tt", "tg") for p in pairs)
    assert (record is not None) == good
    if record is not None:
        short = {"user": "h", "assistant": "g", "system": "s", "tool": "t"}
        assert "".join(short[m["role"]] for m in record["messages"]) == head + rest


@pytest.mark.parametrize(
    ("row", "columns", "content"),
    [
        (
            {"instruction": "i", "output": "o", "text": "i o"},
            {"prompt": "instruction", "completion": "output"},
            {"prompt": "i", "completion": "o"},
        ),
        ({"i": "a", "n": "b", "o": "c"}, {"prompt": "i+n", "completion": "o"},
         {"prompt": "a\n\nb", "completion": "c"}),
        ({"i": "a", "n": "", "o": "c"}, {"prompt": "i+n", "completion": "o"},
         {"prompt": "a", "completion": "c"}),
        ({"prompt": "c", "completion": "p"}, {"prompt": "completion", "completion": "prompt"},
         {"prompt": "p", "completion": "c"}),
        ({"q": "a", "o": "b"}, {"user": "q", "assistant": "o", "system": "s"},
         {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
        ({"messages": [{"role": "user", "content": "a"}], "text": "t"}, {"text": "text"},
         {"text": "t"}),
        ({"chat": say("human:q", "gpt:a")}, {"conversations": "chat"},
         {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}),
        ({"text": "t", "id": "same", "uuid": "7"}, {"id": "uuid"}, {"text": "t"}),
    ],
)  # fmt: skip
def test_other_names(row: dict[str, Any], columns: dict[str, str], content: dict[str, Any]) -> None:
    """Instruction sets have these columns; one more beside them must not become the content."""
    check_columns(columns)
    before = json.dumps(row)
    record = read(row, columns)
    assert {k: v for k, v in record.items() if k not in ("id", "kind")} == content
    assert json.dumps(row) == before
    assert record["id"] == ("7" if "uuid" in row else "f#1")


def test_an_id_can_be_left_out() -> None:
    """Some data sets have an id column that does not tell rows apart."""
    assert read({"id": "all", "text": "t"}, {"id": ""})["id"] == "f#1"
    assert read({"id": None, "text": "t"})["id"] == "f#1"


def test_wrong_columns_are_named() -> None:
    """A key that nobody reads would leave the prompt out in silence."""
    with pytest.raises(ConfigError, match="unknown key promt; did you mean prompt?"):
        check_columns({"promt": "x"})
    with pytest.raises(ConfigError, match="user and assistant belong together"):
        check_columns({"assistant": "x"})
    with pytest.raises(RecordError, match="no column q, which data.columns names; found a, b"):
        read({"a": "x", "b": "y"}, {"prompt": "q", "completion": "b"})
    with pytest.raises(RecordError, match="n must be a string, got 3"):
        read({"i": "a", "n": 3, "o": "c"}, {"prompt": "i+n", "completion": "o"})
    meant = "found messages, text; say which is meant: 'data.columns={messages: messages}'"
    with pytest.raises(RecordError, match=meant):
        read({"messages": [], "text": "t"})


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        ("question answer id", {"prompt": "question", "completion": "answer"}),
        ("prompt response", {"prompt": "prompt", "completion": "response"}),
        ("Instruction input output", {"prompt": "Instruction+input", "completion": "output"}),
        ("input output", {"prompt": "input", "completion": "output"}),
    ],
)
def test_the_setting_for_unknown_columns_is_written_out(
    names: str, columns: dict[str, str]
) -> None:
    """Nobody guesses `data.columns` from "a record holds prompt and completion"."""
    row = {name: f"the {name}" for name in names.split()}
    with pytest.raises(RecordError, match="found .*") as caught:
        read(row)
    with pytest.raises(ConfigError) as of_a_table:
        usable(list(row), {}, "f")
    for error in (caught.value, of_a_table.value):
        said = re.search(r"'data\.columns=\{(.*)\}'", str(error))
        assert said is not None
        assert dict(pair.split(": ") for pair in said[1].split(", ")) == columns
    record = read(row, columns)
    assert record["completion"] == f"the {columns['completion']}"
    assert record["prompt"].startswith(f"the {columns['prompt'].partition('+')[0]}")
    with pytest.raises(RecordError) as unnamed:
        to_record(row, "f:1", "f#1", None, Dropped())
    assert "data.columns" not in str(unnamed.value), "which a file of prompts does not have"


def test_unknown_names_are_left_to_the_user() -> None:
    """A guess among names that nobody knows would be pasted, and trained on."""
    with pytest.raises(RecordError, match=r"\{prompt: <column>, completion: <column>\}'"):
        read({"a": "x", "b": "y"})


def test_half_a_character_is_named() -> None:
    """JSON may hold half a surrogate pair; tokenizers raise an error that names no record."""
    with pytest.raises(RecordError, match="text holds half of a surrogate pair"):
        read(json.loads('{"text": "é \\ud83d"}'))
    assert read(json.loads('{"text": "\\ud83d\\ude00"}'))["text"] == "\U0001f600"


def test_reasons_are_counted_once_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training and the held-out part are read one after the other, from the same file."""
    dropped = Dropped()
    assert not dropped and dropped.summary() == ""
    dropped.read["f"] = 1200
    for _ in range(2):
        dropped.add(RecordError("not JSON", where="f:1", row="{"))
        dropped.add(RecordError("without a content", "long story", "f:2", {"a": 1}))
        dropped.add(RecordError("not JSON", where="f:3", row="["))
        dropped.note("repaired", "f:4")
        dropped.remark("Part 1 is small")
    assert dropped.summary() == (
        "3 of 1,200 records dropped: 2 not JSON, 1 without a content; 1 repaired; Part 1 is small"
    )
    assert dropped.counts == {
        "read": 1200,
        "dropped": {"not JSON": 2, "without a content": 1},
        "notes": {"repaired": 1},
        "remarks": ["Part 1 is small"],
    }
    dropped.write(tmp_path / "quarantine.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert lines[1] == {
        "where": "f:2",
        "reason": "without a content",
        "error": "f:2: long story",
        "row": {"a": 1},
    }
    assert len(lines) == 3
    monkeypatch.setattr(dropped_module.json, "dumps", lambda *_a, **_k: 1 / 0)
    with pytest.raises((ZeroDivisionError, RunError)):
        dropped.write(tmp_path / "quarantine.jsonl")
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 3


def test_too_many_bad_records_end_the_run() -> None:
    """A file in another format must not train on the few rows that happen to fit."""

    def make(at: tuple[str, str]) -> None:
        raise RecordError(at[1], where=at[0])

    for allowed in (0.1, 0.09):
        tally = Tally(allowed, Dropped())
        for at in (("f:1", "odd"), ("f:2", "not JSON"), ("f:5", "not JSON")):
            assert tally.take(make, at) is None
        tally.total = 30
        if allowed == 0.1:
            tally.check("f")
    with pytest.raises(ConfigError) as caught:
        tally.check("f")
    assert str(caught.value) == (
        "f: 3 of 30 records cannot be used, more than data.max_bad_fraction=0.09;"
        " most often (2) not JSON, first: f:2: not JSON"
    )
