"""The file of answers: nothing lost, doubled or half-written, whenever its writer was killed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from specheads.config import ConfigError, RunError
from specheads.data.schema import RecordError
from specheads.regeneration import answers as module
from specheads.regeneration.answers import AnswerFile
from specheads.system.files import cut_torn_line

SETTINGS = {"model_digest": "a" * 64, "temperature": 0.0, "max_new_tokens": 8}


def chat(name: str, answer: str = "y", question: str = "x") -> dict[str, Any]:
    """Return a record with one answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"id": name, "kind": "chat", "messages": messages}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


RECORDS = [chat("a", "é\n…"), chat("b", "\U0001f600 {}"), chat("ü/3", "ß\u2028last")]


def test_a_torn_line_is_cut_wherever_it_tore(tmp_path: Path) -> None:
    """Half a line would be read as damage for ever, or glued to the next record and lose both."""
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, SETTINGS) as answers:
        answers.append(RECORDS)
    whole = path.read_bytes()
    before = whole[: whole.rstrip(b"\n").rfind(b"\n") + 1]
    for end in range(len(before), len(whole) + 1):
        path.write_bytes(whole[:end])
        with AnswerFile(path, SETTINGS) as answers:
            complete = end == len(whole)
            assert answers.num_cut == (0 if complete else end - len(before))
            assert path.read_bytes() == (whole if complete else before)
            left = answers.left(RECORDS)
            assert [r["id"] for r in left] == ([] if complete else ["ü/3"])
            answers.append(left)
        assert path.read_bytes() == whole
        assert lines_of(path) == RECORDS


def test_a_torn_quarantine_is_cut_wherever_it_tore(tmp_path: Path) -> None:
    """A half-written reason must not keep a record from ever being answered or quarantined."""
    path = tmp_path / "out.jsonl"
    bad = [RecordError("truncated", "é: too long", row=record) for record in RECORDS[:2]]
    with AnswerFile(path, SETTINGS) as answers:
        answers.append([], bad)
    whole = answers.bad_path.read_bytes()
    before = whole[: whole.index(b"\n") + 1]
    for end in range(len(before), len(whole)):
        answers.bad_path.write_bytes(whole[:end])
        with AnswerFile(path, SETTINGS) as answers:
            assert answers.bad == {"a": "truncated"}
            answers.append([], bad[1:])
        assert answers.bad_path.read_bytes() == whole


def test_long_lines_are_cut_whole(tmp_path: Path) -> None:
    """The last line break is looked for in pieces, and a line may be longer than a piece."""
    path = tmp_path / "file"
    for kept in (b"", b"x" * 70_000 + b"\n", b"\n"):
        for torn in (b"", b"y", b"y" * (1 << 16), b"y" * ((1 << 17) + 1)):
            path.write_bytes(kept + torn)
            assert cut_torn_line(path) == len(torn)
            assert path.read_bytes() == kept
    assert cut_torn_line(tmp_path / "missing") == 0


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that was cut short must neither pass for done nor hurt what was there."""
    path = tmp_path / "out.jsonl"
    real = os.write

    def short(file: int, data: bytes) -> int:
        if len(data) > 10:
            return real(file, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with AnswerFile(path, SETTINGS) as answers:
        answers.append(RECORDS[:1])
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "write", short)
            with pytest.raises(RunError, match="no room to write .*out.jsonl"):
                answers.append(RECORDS[1:])
    with AnswerFile(path, SETTINGS) as answers:
        assert answers.done.keys() == {"a", "b"} and answers.num_cut > 0
    assert lines_of(path) == RECORDS[:2]


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    """Two processes would answer everything twice, in one file."""
    path = tmp_path / "new" / "out.jsonl"
    message = r"another process is writing .*out\.jsonl"
    with AnswerFile(path, SETTINGS), pytest.raises(ConfigError, match=message):
        AnswerFile(path, SETTINGS)
    AnswerFile(path, SETTINGS).__exit__(None, None, None)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    """Half the answers would be of one model or temperature, half of another, and none would say.

    The message has to name the setting and both of its values.
    """
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, SETTINGS) as answers:
        answers.append(RECORDS)
    other = SETTINGS | {"temperature": 0.7, "model_digest": "b" * 64, "seed": 1}
    with pytest.raises(ConfigError) as caught:
        AnswerFile(path, other)
    text = str(caught.value)
    assert "temperature (0.0 there, 0.7 here)" in text and "seed (None there, 1 here)" in text
    assert f"model_digest ({'a' * 12} there, {'b' * 12} here)" in text and "max_new" not in text
    with pytest.raises(ConfigError, match="temperature .0.0 there, None here"):
        AnswerFile(path, {k: v for k, v in SETTINGS.items() if k != "temperature"})
    assert lines_of(path) == RECORDS


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """``output=`` with the name of a data set would append answers to it."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(chat("a")))  # without a line break: not to be cut off either
    with pytest.raises(ConfigError, match=r"no data\.jsonl\.json beside it"):
        AnswerFile(path, SETTINGS)
    assert path.read_text() == json.dumps(chat("a"))
    with pytest.raises(ConfigError, match="cannot write"):
        AnswerFile(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"out\.jsonl:2 is damaged"),
        (b"[1]", r"out\.jsonl:2 is damaged: it holds no object"),
        (b'{"id": "x"}', r"out\.jsonl:2 is not a record that regenerate wrote"),
        (b"\0" * 20, r"out\.jsonl:2 is damaged"),
        (b"[" * 200_000, r"out\.jsonl:2 is damaged"),
        (json.dumps(chat("a")).encode(), r"out\.jsonl:2: id 'a' is there twice"),
    ],
)
def test_damage_before_the_end_is_said(tmp_path: Path, line: bytes, message: str) -> None:
    """Only the last line can be torn; skipping any other would lose records without a word."""
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, SETTINGS) as answers:
        answers.append(RECORDS)
    first, *others = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([first, line, b"\n", *others])
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match=message):
        AnswerFile(path, SETTINGS)
    assert path.read_bytes() == damaged


def test_what_failed_for_a_time_is_tried_again(tmp_path: Path) -> None:
    """A server that was down for a minute must not cost records, nor a bad record every start."""
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, SETTINGS) as answers:
        answers.append(
            [],
            [
                RecordError("server", "HTTP 500", row=RECORDS[0]),
                RecordError("truncated", "...", row=RECORDS[1]),
            ],
        )
        assert answers.left(RECORDS) == RECORDS[2:]
        assert answers.reasons() == "2 in quarantine (server 1, truncated 1)"
    with AnswerFile(path, SETTINGS) as answers:
        assert answers.left(RECORDS) == [RECORDS[0], RECORDS[2]]
        answers.append([RECORDS[0]])
    assert [line["id"] for line in lines_of(answers.bad_path)] == ["b"]
    with AnswerFile(path, SETTINGS) as answers:
        assert answers.done.keys() == {"a"} and answers.bad == {"b": "truncated"}


def test_an_answer_to_another_prompt_is_refused(tmp_path: Path) -> None:
    """An id names another prompt once the input was edited: its old answer is none to it."""
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, SETTINGS) as answers:
        answers.append([chat("a", "new answer")])
        assert answers.left([chat("a", "old answer")]) == []
        with pytest.raises(ConfigError, match="record a, but to another prompt"):
            answers.left([chat("a", question="z")])
        pair = {"id": "a", "kind": "completion", "prompt": "x", "completion": "y"}
        with pytest.raises(ConfigError, match="record a, but to another prompt"):
            answers.left([pair])


def test_text_that_is_no_utf8_survives(tmp_path: Path) -> None:
    """JSON may escape half of a surrogate pair; writing it must not end the run."""
    record = chat("a", "\ud800 x")
    with AnswerFile(tmp_path / "out.jsonl", SETTINGS) as answers:
        answers.append([record])
    assert lines_of(answers.path) == [record]
    with AnswerFile(tmp_path / "out.jsonl", SETTINGS) as answers:
        assert answers.left([record]) == []


def test_the_end_is_in_the_order_of_the_records(tmp_path: Path) -> None:
    """What is trained on must not depend on which answers a killed run had already given."""
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, SETTINGS) as answers:
        answers.append([RECORDS[2], RECORDS[0]])
        answers.append([chat("of a larger limit"), RECORDS[1]])
        answers.sort(RECORDS)
        assert lines_of(path) == [*RECORDS, chat("of a larger limit")]
        with pytest.raises(ConfigError, match="another process is writing"):
            AnswerFile(path, SETTINGS)
        answers.append([chat("more")])
        assert [line["id"] for line in lines_of(path)] == list(answers.done)
    with AnswerFile(path, SETTINGS) as answers:
        assert answers.left(RECORDS) == [] and len(answers.done) == 5
