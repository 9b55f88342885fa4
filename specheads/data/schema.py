"""From one row, as users have it, to a checked record.

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
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError
from specheads.data.dropped import Dropped, RecordError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = dict[str, Any]

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
        dropped: is told of repairs.

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
