"""Answer files in Spec-Bench's format: written question by question, taken up again, read.

A line holds ``question_id``, ``category``, ``answer_id``, ``model_id``, ``choices`` and ``tstamp``;
a choice ``index``, and per turn ``turns`` (texts), ``decoding_steps``, ``new_tokens`` and
``wall_time``, and over all turns ``accept_lengths``. The format has no place for more, so what else
there is to know of an answer lies in ``details/`` beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specheads.config import ConfigError
from specheads.data.suites import Question
from specheads.files import whole_file

Answer = dict[str, Any]  # a line of an answer file

_SCORED = ("turns", "new_tokens", "wall_time", "accept_lengths")  # speed.py reads no more


@dataclass(frozen=True)
class Turn:
    """What one turn was answered with.

    Attributes:
        text: decoded without special tokens, stripped.
        new_tokens: of the answer; the token that ends it is not among them.
        num_passes: forward passes of the base model, the prefill included.
        accept_lengths: tokens gained by each verify step; for plain decoding, by each pass.
        wall_time: seconds, prefill included.
        prefill_time: seconds until the first token was there.
        num_emitted: tokens that were decoded, the one that ends the answer included.
        num_prompt_tokens: before the answer.
        limit: of ``num_emitted``.
    """

    text: str
    new_tokens: int
    num_passes: int
    accept_lengths: list[int]
    wall_time: float
    prefill_time: float
    num_emitted: int
    num_prompt_tokens: int
    limit: int


def as_answer(question: Question, turns: Sequence[Turn], model_id: str) -> Answer:
    """Return the line of an answer file."""
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [turn.num_passes for turn in turns],
        "new_tokens": [turn.new_tokens for turn in turns],
        "wall_time": [turn.wall_time for turn in turns],
        "accept_lengths": [length for turn in turns for length in turn.accept_lengths],
    }
    return {
        "question_id": question.id,
        "category": question.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
    }


class AnswerFile:
    """``<folder>/<model_id>.jsonl``, its settings and details, to be gone on with.

    Args:
        folder: of the answers; made where it is missing.
        model_id: name of the file.
        settings: all that decides the answers; those of an earlier run must be the same.

    Raises:
        ConfigError: if the file was written with other settings, or not by this class.
    """

    def __init__(self, folder: Path, model_id: str, settings: Mapping[str, Any]) -> None:
        self.path, self.model_id = folder / f"{model_id}.jsonl", model_id
        self.details_path = details_of(self.path)
        self._check_settings(folder / "details" / f"{model_id}.settings.json", dict(settings))
        _drop_torn_line(self.path)
        _drop_torn_line(self.details_path)
        self.answers = {a["question_id"]: a for a in read_answers(self.path)} if self._any() else {}
        self.details = read_details(self.details_path)

    def _check_settings(self, path: Path, settings: dict[str, Any]) -> None:
        if self._any():
            if not path.exists():
                raise ConfigError(
                    f"{self.path} holds answers of another program: give another name or folder"
                )
            before = json.loads(path.read_text())
            for key in sorted(before.keys() | settings.keys()):
                if before.get(key) != settings.get(key):
                    raise ConfigError(
                        f"{self.path} was begun with {key}={before.get(key)!r}, now it is"
                        f" {settings.get(key)!r}: give another name or folder"
                    )
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as fresh:
            fresh.write_text(json.dumps(settings, indent=1) + "\n")

    def _any(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def has(self, question: Question) -> bool:
        """Return whether the question is answered.

        Raises:
            ConfigError: if another question of that id is.
        """
        if question.id not in self.answers:
            return False
        known = self.details.get(question.id)
        if known and known["question"] != question_digest(question):
            raise ConfigError(
                f"{self.path} answers another question {question.id!r} than the one asked now:"
                " give another name or folder"
            )
        return True

    def append(self, question: Question, turns: Sequence[Turn]) -> None:
        """Write an answer behind the others, at once and for good."""
        columns = ("prefill_time", "num_emitted", "num_prompt_tokens", "limit")
        rows = [asdict(turn) for turn in turns]
        details = {
            "question_id": question.id,
            "question": question_digest(question),
            **{key: [row[key] for row in rows] for key in columns},
        }
        answer = as_answer(question, turns, self.model_id)
        # the answer last: a question counts as answered once it is there
        _append(self.details_path, details)
        _append(self.path, answer)
        self.details[question.id], self.answers[question.id] = details, answer

    def reorganise(self) -> None:
        """Sort by question, the last of several answers to one kept, as Spec-Bench does at last."""
        for path, rows in ((self.path, self.answers), (self.details_path, self.details)):
            if rows:
                ordered = sorted(rows, key=lambda name: (isinstance(name, str), name))
                with whole_file(path) as fresh:
                    fresh.write_text("".join(json.dumps(rows[name]) + "\n" for name in ordered))


def details_of(path: Path) -> Path:
    """Return what lies beside an answer file of ours."""
    return path.parent / "details" / path.name


def question_digest(question: Question) -> str:
    """Return a short digest of all that is asked."""
    content = json.dumps([question.category, question.system, question.turns])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_answers(path: Path) -> list[Answer]:
    """Read an answer file, of any program.

    Raises:
        ConfigError: if it is missing, empty, or a line lacks what is scored; names the line.
    """
    answers = [_checked(value, where) for where, value in _lines(path)]
    if not answers:
        raise ConfigError(f"{path} holds no answers")
    return answers


def read_details(path: Path) -> dict[int | str, dict[str, Any]]:
    """Read what lies beside an answer file; empty where there is nothing."""
    found = [value for _, value in _lines(path)] if path.exists() else []
    return {each["question_id"]: each for each in found}


def _lines(path: Path) -> list[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read {path}: {reason}") from None
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append((f"{path}:{number}", json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
    return found


def _checked(value: object, where: str) -> Answer:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object, got {type(value).__name__}")
    for key, kind in (("question_id", int | str), ("category", str), ("choices", list)):
        if not isinstance(value.get(key), kind):
            raise ConfigError(f"{where}: {key} is missing or wrong, got {value.get(key)!r:.60}")
    choice: Any = value["choices"][0] if value["choices"] else None
    for key in _SCORED:
        given = choice.get(key) if isinstance(choice, dict) else None
        kind = str if key == "turns" else int | float
        if not isinstance(given, list) or not all(isinstance(each, kind) for each in given):
            raise ConfigError(f"{where}: choices[0].{key} is missing or wrong, got {given!r:.60}")
    if sum(choice["wall_time"]) <= 0:
        raise ConfigError(f"{where}: choices[0].wall_time must be above 0 seconds")
    return value


def _append(path: Path, value: object) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(value) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed run left behind the last line break."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
