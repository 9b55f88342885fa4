"""From one row, as users have it, to a checked record, or to the list of those that are none.

Read are our own contents (:mod:`specheads.data.load`), ShareGPT's ``conversations`` with
``from`` and ``value``, and rows whose columns have other names: ``data.columns`` maps our names to
theirs. There, ``user``, ``assistant`` and ``system`` name columns that become messages, and
``instruction+input`` joins columns by a blank line, leaving out empty ones.

A record may carry ``"tokens": {"ids": [...], "answers": [[start, stop], ...], "tokenizer": "..."}``
beside its content: the token ids, whose they are, and which of them an assistant produced. Decoding
and encoding a generated text need not give the ids back that were generated, so these are trained
on as they are, wherever the tokenizer is still the same one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, RunError
from specheads.system.files import whole_file
from specheads.system.redact import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = dict[str, Any]

LONGEST_ROW = 1 << 16  # characters of a row that a quarantine file shows
_LONGEST_LINE = 400

CONTENTS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"text"})
_TURNS = {"system", "user", "assistant"}  # only by data.columns
KNOWN = {"id", "kind", "tokens", *set().union(*CONTENTS)}
EXPECTED = "a record holds messages, or conversations, or prompt and completion, or text"

# what others call a prompt and its completion, the more telling names first
_QUESTIONS = ("prompt", "question", "instruction", "query", "problem", "input", "user", "source")
_ANSWERS = (
    "completion", "answer", "response", "output", "solution", "reply", "assistant", "target",
)  # fmt: skip

# ShareGPT names speakers after the services its conversations come from
_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "assistant", "chatgpt", "bing", "bard", "claude", "model", "bot", "chatbot"),
        "assistant",
    ),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
_MAY_FOLLOW = {
    "user": {"start", "system", "assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}
BEGAN_WITH_ANSWER = "conversations began with an answer, which is left out"


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ConfigError if ``columns`` names a key that records do not have."""
    ours = sorted(KNOWN | _TURNS)
    for key in columns:
        if key not in ours:
            close = difflib.get_close_matches(key, ours, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(ours)}"
            raise ConfigError(f"data.columns: unknown key {key}; {hint}")
    if columns.keys() & _TURNS and not columns.keys() >= {"user", "assistant"}:
        raise ConfigError("data.columns: user and assistant belong together")


def columns_advice(names: Iterable[object]) -> str:
    """Return the setting that says which of ``names`` are question and answer.

    Common names are recognised; only these are repeated, so that nothing has to be quoted.
    """
    by_word = {name.lower(): name for name in names if isinstance(name, str)}
    asked = next((by_word[word] for word in _QUESTIONS if word in by_word), "<column>")
    answered = next((by_word[word] for word in _ANSWERS if word in by_word), "<column>")
    if asked.lower() == "instruction" and "input" in by_word:
        asked += f"+{by_word['input']}"
    return f"say which is which: 'data.columns={{prompt: {asked}, completion: {answered}}}'"


def wanted(columns: Mapping[str, str]) -> set[str]:
    """Return the names of the columns that a record can be made of."""
    return KNOWN | {name for theirs in columns.values() for name in theirs.split("+") if name}


class RecordError(ConfigError):
    """One record that cannot be used. Its message names the place; ``reason`` is for counting.

    Both are one line, whatever the record holds. ``detail`` is the message without the place.
    """

    def __init__(self, where: str, reason: str, detail: str = "") -> None:
        self.where, self.reason = one_line(where), one_line(reason)
        self.detail = one_line(detail) or self.reason
        super().__init__(f"{self.where}: {self.detail}")


def one_line(text: object, longest: int = _LONGEST_LINE) -> str:
    """Return ``text`` as one line of a terminal: spaces joined, other controls escaped, cut."""
    text = str(text)
    cut = text[: 2 * longest]
    line = " ".join(cut.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return line if len(line) <= longest and len(cut) == len(text) else line[:longest] + " ..."


class _UnusableError(Exception):
    """Says what is wrong with a row: ``args`` are the reason, for counting, and the detail."""


def to_record(
    row: object, where: str, name: str, columns: Mapping[str, str] | None, dropped: Dropped
) -> Record:
    """Check a row and give it ``id``, ``kind`` and one content.

    Args:
        row: what a line or a row of a table holds; it is not changed.
        where: the row's place, for messages.
        name: the id of a record without one.
        columns: our names to theirs, checked by :func:`check_columns`; ``""`` leaves one out. None
            where the user has no setting for them.
        dropped: the collection in which repairs are noted.

    Raises:
        RecordError: if the row is no record.
    """
    try:
        record, cut = _record(row, name, columns)
    except _UnusableError as error:
        raise RecordError(where, *error.args) from None
    if cut:
        dropped.note(BEGAN_WITH_ANSWER, where)
    return record


def _record(row: object, name: str, columns: Mapping[str, str] | None) -> tuple[Record, bool]:
    """Return the record of a row, and whether an answer at its beginning was left out."""
    if not isinstance(row, dict):
        raise _UnusableError("not an object", f"expected an object, got {type(row).__name__}")
    record, cut = _renamed(row, columns), False
    found = [keys for keys in CONTENTS if keys <= record.keys()]
    if len(found) != 1:
        reason = "with several contents" if found else "without a content"
        meant = ", ".join(f"{key}: {key}" for key in sorted(found[0])) if found else ""
        advice = f"say which is meant: 'data.columns={{{meant}}}'" if found else columns_advice(row)
        keys = one_line(", ".join(sorted(map(str, row))) or "nothing", 200)
        advice = "" if columns is None else f"; {advice}"
        raise _UnusableError(reason, f"{EXPECTED}; found {keys}{advice}")
    if found[0] == {"conversations"}:
        cut = _turns_to_messages(record, "conversations")
    elif found[0] == {"messages"}:
        cut = _check_messages(record)
    for key in found[0] & {"prompt", "completion", "text"}:
        _check_text(record[key], key)
    if "kind" not in record:
        kinds = {"messages": "chat", "completion": "completion", "text": "text"}
        record["kind"] = next(kind for key, kind in kinds.items() if key in record)
    _check_text(record["kind"], "kind")
    if "tokens" in record and (detail := _wrong_tokens(record["tokens"])):
        raise _UnusableError("with stored tokens that are wrong", detail)
    value = record.get("id")
    if value is None or value != value:  # a table without nulls writes "not a number"
        value = name
    elif isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    record["id"] = _check_text(value, "id")
    return record, cut


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str] | None) -> Record:
    if not columns:
        return dict(row)
    mapped = {ours: _column(row, ours, theirs) for ours, theirs in columns.items() if theirs}
    taken = {name for theirs in columns.values() for name in theirs.split("+")}
    asked = next((keys for keys in (*CONTENTS, _TURNS) if keys & mapped.keys()), set())
    others = set().union(*CONTENTS) - asked if asked else set()  # what is named is what is meant
    rest = {k: v for k, v in row.items() if k not in taken | columns.keys() | others}
    record = rest | mapped
    if asked == _TURNS:
        turns = {r: record.pop(r) for r in ("system", "user", "assistant") if r in record}
        record["messages"] = [
            {"role": role, "content": text}
            for role, text in turns.items()
            if text or role != "system"
        ]
    return record


def _column(row: Mapping[str, Any], ours: str, theirs: str) -> Any:
    first, *more = theirs.split("+")
    if first not in row and ours != "system":
        there = ", ".join(map(str, row))
        detail = f"no column {first}, which data.columns names; found {there}"
        raise _UnusableError(f"without the column {first}", detail)
    if not more:
        return row.get(first)
    parts = [_check_text(row[name], name) for name in (first, *more) if row.get(name) is not None]
    return "\n\n".join(part for part in parts if part)


def _check_text(value: object, key: str) -> str:
    if not isinstance(value, str):
        reason = f"with a {key.split('.')[-1]} that is no string"
        raise _UnusableError(reason, f"{key} must be a string, got {value!r:.60}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            detail = f"{key} holds half of a surrogate pair"
            raise _UnusableError("with half a character", detail) from None
    return value


def _check_messages(record: Record) -> bool:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise _UnusableError(
            "without messages", "messages must be a list with at least one message"
        )
    if isinstance(messages[0], dict) and "from" in messages[0] and "role" not in messages[0]:
        return _turns_to_messages(record, "messages")
    for position, message in enumerate(messages):
        for key in ("role", "content"):
            place = f"messages[{position}].{key}"
            value = message.get(key) if isinstance(message, dict) else None
            if not isinstance(value, str):
                detail = f"{place} must be a string, got {message!r:.60}"
                raise _UnusableError(f"with a {key} that is no string", detail)
            _check_text(value, place)
    return False


def _turns_to_messages(record: Record, key: str) -> bool:
    """Put ShareGPT's turns as messages into ``record``; return whether an answer began them."""
    turns = record.pop(key)
    if not isinstance(turns, list) or not turns:
        raise _UnusableError("without turns", f"{key} must be a list with at least one turn")
    messages = [_message(turn, f"{key}[{i}]") for i, turn in enumerate(turns)]
    added, system = 0, record.pop("system", None)
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        added = 1
    stop = start = int(messages[0]["role"] == "system")
    while stop < len(messages) and messages[stop]["role"] == "assistant":
        stop += 1
    if stop == len(messages):
        raise _UnusableError("without a user's turn", f"{key} has no turn of a user")
    before = "system" if start else "start"
    for place, message in enumerate(messages[stop:], stop - added):
        if before not in _MAY_FOLLOW.get(message["role"], ()):
            what = f"turn {place} of {key} puts {message['role']} after {before}"
            raise _UnusableError(
                "whose roles do not alternate", f"roles must alternate, but {what}"
            )
        before = message["role"]
    record["messages"] = messages[:start] + messages[stop:]
    return stop > start


def _message(turn: object, place: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        detail = f"{place} must be an object, got {turn!r:.60}"
        raise _UnusableError("with a turn that is no object", detail)
    speaker = turn.get("from", turn.get("role"))
    role = _ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        detail = f"{place}.from must be one of {', '.join(_ROLES)}, got {speaker!r:.60}"
        raise _UnusableError("with an unknown role", detail)
    content = _check_text(turn.get("value", turn.get("content")), f"{place}.value")
    return {"role": role, "content": content}


def _wrong_tokens(tokens: object) -> str:
    """Return what is wrong with the stored tokens of a record, nothing where they are fine."""
    if not isinstance(tokens, dict):
        return f"tokens must be an object, got {tokens!r:.60}"
    ids, answers, tokenizer = (tokens.get(key) for key in ("ids", "answers", "tokenizer"))
    if not isinstance(ids, list) or not all(map(_is_count, ids)):
        return f"tokens.ids must be a list of token ids, got {ids!r:.60}"
    if not isinstance(tokenizer, str):
        return f"tokens.tokenizer must be the digest of the tokenizer, got {tokenizer!r:.60}"
    spans = answers if isinstance(answers, list) else []
    pairs = [isinstance(s, list) and len(s) == 2 and all(map(_is_count, s)) for s in spans]
    if not spans or not all(pairs):
        return f"tokens.answers must be a list of at least one [start, stop], got {answers!r:.60}"
    for start, stop in spans:
        if not start < stop <= len(ids):
            return f"tokens.answers has [{start}, {stop}], which is no span of {len(ids)} ids"
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            return f"tokens.answers must rise without overlap, got {before} before {after}"
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sha256 over all that decides which ids a conversation becomes.

    That is the vocabulary and its rules, the special tokens and the chat template; not the
    folder's name, nor the padding and truncation that the last call asked for.
    """
    special = tokenizer.special_tokens_map.items()
    parts = {
        "vocabulary": _vocabulary(tokenizer),
        # many programs set a missing pad token, which no conversation holds
        "special": {key: str(value) for key, value in special if key != "pad_token"},
        "template": tokenizer.chat_template,
    }
    line = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(line.encode("utf-8", "surrogatepass")).hexdigest()


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> object:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        return [type(tokenizer).__name__, tokenizer.get_vocab()]
    rules = json.loads(backend.to_str())
    return {key: value for key, value in rules.items() if key not in ("truncation", "padding")}


@dataclass
class Dropped:
    """Collects what reading and encoding leave out; the same place counts once.

    Attributes:
        read: records looked at, by the name of their file or data set.
        rows: place -> ``where``, ``reason``, ``error`` and the ``row`` as it was read.
        notes: what was done to records that are used, and the places.
        remarks: whole sentences, e.g. about a mixture whose parts are too small.
    """

    read: dict[str, int] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, set[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.notes or self.remarks)

    def add(self, error: RecordError, row: object) -> None:
        """Count a record that is left out."""
        self.rows[error.where] = _entry(error, row)

    def note(self, what: str, where: str) -> None:
        """Count something that was done to a record which is used, or not needed."""
        self.notes.setdefault(what, set()).add(where)

    def remark(self, sentence: str) -> None:
        """Keep a sentence for the summary, once."""
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    @property
    def reasons(self) -> dict[str, int]:
        """How many records were left out, the most frequent reason first."""
        return dict(Counter(row["reason"] for row in self.rows.values()).most_common())

    @property
    def counts(self) -> dict[str, Any]:
        """Return all that is known, as plain JSON, for an export."""
        return {
            "read": sum(self.read.values()),
            "dropped": self.reasons,
            "notes": {what: len(places) for what, places in self.notes.items()},
            "remarks": list(self.remarks),
        }

    def summary(self) -> str:
        """Return one line, empty where every record is used as it is."""
        parts = []
        if self.rows:
            why = ", ".join(f"{n:,} {reason}" for reason, n in self.reasons.items())
            total = sum(self.read.values())
            parts.append(f"{len(self.rows):,} of {total:,} records dropped: {why}")
        parts += [f"{len(places):,} {what}" for what, places in self.notes.items()]
        return "; ".join(parts + self.remarks)

    def write(self, path: Path) -> None:
        """Write the records that were left out, one JSON object per line; long ones are cut.

        Raises:
            RunError: if the disk is full.
        """
        with whole_file(path) as fresh, fresh.open("w", encoding="utf-8") as lines:
            lines.writelines(map(_line, self.rows.values()))


def _entry(error: RecordError, row: object) -> dict[str, Any]:
    """Return what a quarantine file says of a row, which is a cut text if long or no JSON."""
    try:
        text = json.dumps(row, default=str, allow_nan=False)
        shown = row if len(text) <= LONGEST_ROW else text[:LONGEST_ROW]
    except (ValueError, TypeError, RecursionError):  # not a number, keys of a table, nested
        try:
            shown = repr(row)[:LONGEST_ROW]
        except RecursionError:
            shown = "nested too deeply to be shown"
    return {"where": error.where, "reason": error.reason, "error": str(error), "row": shown}


def _line(entry: dict[str, Any]) -> str:
    about = redact(entry) | {"row": entry["row"]}  # which is the user's to see as it is
    return json.dumps(about, default=str) + "\n"


def check_share(errors: list[RecordError], total: int, allowed: float, what: str) -> None:
    """Raise ConfigError if more than the share ``allowed`` of ``total`` records cannot be used."""
    if len(errors) <= allowed * total:
        return
    reason, number = Counter(error.reason for error in errors).most_common(1)[0]
    first = next(error for error in errors if error.reason == reason)
    raise ConfigError(
        f"{what}: {len(errors):,} of {total:,} records cannot be used, more than"
        f" data.max_bad_fraction={allowed:g}; most often ({number:,}) {reason}, first: {first}"
    )


class Quarantine:
    """A file with one JSON object per bad row, as ``Dropped.write`` writes it.

    First come the rows that were found bad before training. The file is cut back to where a resumed
    run goes on, so that no row is in it twice.

    Attributes:
        dropped: the rows that were found bad before training.
        written: rows added since.
    """

    def __init__(self, dropped: Dropped, *, first: bool = True) -> None:
        """Take what was found before training; ``first``: its rows belong into this file."""
        self.dropped, self.first, self.written = dropped, first, 0
        self._path: Path | None = None
        self._waiting: list[str] = []  # rows that came before there was a file
        self._open = False

    def write_to(self, path: Path) -> None:
        """Choose the file; it is written when the first batch is taken, or a place gone to."""
        self._path, self._open = path, False

    def add(self, error: RecordError, row: object) -> None:
        """Append a row, unless it was known before training.

        Raises:
            RunError: if it cannot be written.
        """
        if error.where in self.dropped.rows:
            return
        self.written += 1
        self._waiting.append(_line(_entry(error, row)))
        if self._open:
            self._flush()

    def start(self) -> None:
        """Begin the file anew, unless it is open already."""
        if self._open or self._path is None:
            return
        if self.first and self.dropped.rows:
            self.dropped.write(self._path)
        else:
            self._path.unlink(missing_ok=True)
        self._open = True
        self._flush()

    def go_back(self, written: int) -> None:
        """Take back all but the first ``written`` rows that were added."""
        self.written = written
        if self._path is None:
            del self._waiting[written:]
            return
        self._waiting.clear()
        if not self._path.is_file():
            self.start()
            return
        kept = written + (len(self.dropped.rows) if self.first else 0)
        with whole_file(self._path) as fresh, fresh.open("wb") as new, self._path.open("rb") as old:
            for number, line in enumerate(old):
                if number == kept or not line.endswith(b"\n"):
                    break
                new.write(line)
        self._open = True

    def _flush(self) -> None:
        assert self._path is not None
        if not self._waiting:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)  # on another host than the first
            with self._path.open("ab") as file:
                file.write("".join(self._waiting).encode())
        except OSError as error:
            raise RunError(f"cannot write {self._path}: {error.strerror}") from None
        self._waiting.clear()
