"""Questions of public suites: Spec-Bench, MT-bench, SPEED-Bench, and plain files of prompts.

A question has one or more turns, which a model answers one after the other. Read are

- ``.jsonl`` or ``.json``: objects with ``turns`` (a list of strings: Spec-Bench, MT-bench,
  SPEED-Bench), ``prompt`` (a string, or such a list), ``messages`` (what the users say in them) or
  ``text``, and ``question_id`` (or ``id``) and ``category`` (or ``kind``), which may be missing;
- ``.parquet``: columns ``turns``, ``question_id`` and ``category``, as SPEED-Bench comes;
- ``.txt``: a prompt per line.

Answers that stand in such a file are not looked at. No suite is part of this package: SPEED-Bench's
licence forbids handing it on, and the others are a download away.

A question becomes a prompt by the tokenizer's chat template, Vicuna's, one from a file, or none.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specheads.config import ConfigError, DataConfig
from specheads.data.chat import Encoder, conversation
from specheads.data.load import read_jsonl
from specheads.data.readers import Row, json_reader, parquet_reader, text_lines
from specheads.data.schema import Record, RecordError, check_text, naming, one_line, text_digest
from specheads.models import manifest

# SPEED-Bench is published with this in place of the texts that its licence keeps elsewhere
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
_COLUMNS = {"prompt": "turns", "id": "question_id", "kind": "category"}  # of parquet files
_OURS = {"completion", "messages", "conversations", "text"}  # keys of records
_EXPECTED = "a question holds turns, or prompt, or messages, or text"


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: the file's own id, whole number or string; else the question's number, from 1 on.
        category: the file's own category; else ``prompt``.
        turns: what is asked, one after the other; at least one, none empty.
        system: a first message before them, where the file has one.
    """

    id: int | str
    category: str
    turns: tuple[str, ...]
    system: str = ""


def read_questions(path: str | Path, begin: int = 0, end: int = 0) -> list[Question]:
    """Read a file of questions.

    Args:
        path: see the module's docstring.
        begin: leave out the questions before this place, counted from 0.
        end: and from this place on; 0 keeps them.

    Raises:
        ConfigError: if the file is missing, empty or holds something else; names file and line.
    """
    path = Path(path).expanduser()
    found = [_question(row, number) for number, row in _rows(path)]
    if not found:
        raise ConfigError(f"{path} holds no questions")
    ((name, times),) = Counter(str(question.id) for question in found).most_common(1)
    if times > 1:
        raise ConfigError(f"{path} has question_id {name} twice")
    chosen = found[begin : end or None]
    if not chosen:
        raise ConfigError(f"{path} holds {len(found)} questions, none from begin={begin} on")
    return chosen


def prompt_records(path: str | Path, *, chat: bool) -> list[Record]:
    """Return the records of a file of prompts, whether it is a suite's or of ours.

    Of a question only the first turn: a later one would need the answer before it.

    Args:
        path: a suite's file, see :func:`read_questions`, or what ``read_jsonl`` reads.
        chat: make messages of questions, for a tokenizer with a chat template; else texts.

    Raises:
        ConfigError: as these two do.
    """
    path = Path(path).expanduser()
    if not _is_suite(path):
        return read_jsonl(path)
    return [
        {"id": str(question.id), "kind": question.category}
        | ({"messages": messages(question)} if chat else {"text": question.turns[0]})
        for question in read_questions(path)
    ]


def messages(question: Question, answers: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the conversation up to the turn after ``answers``, a chat template's input."""
    turns = [[{"role": "user", "content": turn}] for turn in question.turns]
    if question.system:
        turns[0].insert(0, {"role": "system", "content": question.system})
    return conversation(turns, answers)


def _is_suite(path: Path) -> bool:
    if path.suffix in (".txt", ".parquet") or path.is_dir():
        return True
    try:
        first = next(_rows(path))[1].parse()
    except (StopIteration, RecordError):
        return False  # read_jsonl says what is wrong
    keys = first.keys() if isinstance(first, dict) else set()
    return "turns" in keys or "question_id" in keys or ("prompt" in keys and keys.isdisjoint(_OURS))


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file, each with the number that is its question's where it has none."""
    if path.suffix == ".txt":
        return ((int(row.name.rpartition(":")[2]), row) for row in text_lines(path))
    if path.suffix == ".parquet" or path.is_dir():
        return enumerate(parquet_reader(path, _COLUMNS, DataConfig.max_row_bytes).read(), 1)
    return enumerate(json_reader(path).read(), 1)


def _question(row: Row, number: int) -> Question:
    with naming(row.where):
        value = row.parse()
        if not isinstance(value, dict):
            raise RecordError(f"expected an object, got {type(value).__name__}")
        said = _said(value)
        name = value.get("question_id", value.get("id", number))
        if isinstance(name, bool) or not isinstance(name, int | str) or name == "":
            raise RecordError(f"question_id must be a whole number or a string, got {name!r:.60}")
        category = _text(value.get("category", value.get("kind", "prompt")), "category")
    return Question(name, category, tuple(said["user"]), "\n\n".join(said["system"]))


def _said(value: dict[str, Any]) -> dict[str, list[str]]:
    """Return what is said in a question, by role; answers are left out."""
    key = next((key for key in ("turns", "prompt", "messages", "text") if key in value), None)
    if key is None:
        keys = one_line(", ".join(map(str, value)) or "nothing", 200)
        raise RecordError(f"{_EXPECTED}; found {keys}")
    given = value[key]
    if isinstance(given, str) and key != "turns":
        given = [given]
    if not isinstance(given, list) or not given:
        raise RecordError(f"{key} must be a list with at least one turn, got {given!r:.60}")
    said: dict[str, list[str]] = {"system": [], "user": [], "assistant": []}
    spoken = key == "messages"
    for i, turn in enumerate(given if spoken else [{"role": "user", "content": t} for t in given]):
        role: Any = turn.get("role") if isinstance(turn, dict) else None
        if role not in list(said):  # which takes a role of any type
            roles = "a role of system, user or assistant"
            raise RecordError(f"{key}[{i}] must be an object with {roles}, got {turn!r:.60}")
        if role == "assistant":
            continue
        text = _text(turn.get("content"), f"{key}[{i}].content" if spoken else f"{key}[{i}]")
        said[role].append(text)
        if _PLACEHOLDER in text:
            raise RecordError(
                f"turn {i} stands for a text that SPEED-Bench does not hand on; run its prepare"
                " script, and give the file that it writes"
            )
    if not said["user"]:
        raise RecordError("no message is a user's")
    return said


def _text(value: object, key: str) -> str:
    if not check_text(value, key).strip():
        raise RecordError(f"{key} must be a string that is not empty, got {value!r:.60}")
    return str(value)


KINDS = ("auto", "chat", "vicuna", "none")
# of FastChat's template vicuna_v1.1, by which Spec-Bench asks every model
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant."
    " The assistant gives helpful, detailed, and polite answers to the user's questions."
)


class QuestionPrompts:
    """Gives the token ids before each answer; earlier answers are rendered from their texts.

    Args:
        tokenizer: the base model's tokenizer.
        template: ``chat``, the tokenizer's own; ``vicuna``; ``none``: texts as they stand, an
            answer right behind its turn and the next turn on a new line; ``auto``: ``chat`` where
            the tokenizer has a template, else ``none``; or the path of a file with a template.

    Attributes:
        kind: ``chat``, ``vicuna`` or ``none``; name and digest of the file, where one is given.

    Raises:
        ConfigError: if there is no such template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "auto") -> None:
        if template == "auto":
            template = "none" if tokenizer.chat_template is None else "chat"
        if template not in KINDS:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = text = _read_template(template)
            template = f"{Path(template).name} {text_digest(text).hex()[:12]}"
        elif template == "chat" and tokenizer.chat_template is None:
            raise ConfigError(
                f"template=chat, but the tokenizer {tokenizer.name_or_path} has no chat template;"
                " template=none, vicuna or a file with one"
            )
        self.kind = template
        self.tokenizer = tokenizer
        self._encoder = None if template in ("vicuna", "none") else Encoder(tokenizer)

    def ids(self, question: Question, answers: Sequence[str] = ()) -> list[int]:
        """Return the tokens up to where the answer to turn ``len(answers)`` starts.

        Raises:
            ConfigError: if the chat template refuses the conversation.
        """
        if self._encoder is not None:
            asked = messages(question, answers)
            return self._encoder.prompt({"id": question.id, "messages": asked})
        render = _vicuna if self.kind == "vicuna" else _bare
        return list(self.tokenizer(render(question, answers), verbose=False).input_ids)


def _vicuna(question: Question, answers: Sequence[str]) -> str:
    said = [*(f" {answer}</s>" for answer in answers), ""]
    asked = zip(question.turns, said, strict=False)
    turns = [f"USER: {turn} ASSISTANT:{answer}" for turn, answer in asked]
    return f"{question.system or _VICUNA_SYSTEM} {''.join(turns)}"


def _bare(question: Question, answers: Sequence[str]) -> str:
    said = zip(question.turns, [*answers, ""], strict=False)
    lines = [turn + answer for turn, answer in said]
    return "\n".join([question.system, *lines] if question.system else lines)


def _read_template(template: str) -> str:
    path = Path(template).expanduser()
    expected = "must be auto, chat, vicuna, none or a file with a chat template"
    with manifest.one_line(f"template {expected}; cannot read {template}"):
        text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ConfigError(f"template: {path} is empty")
    return text
