"""From one row, as users have it, to a checked record.

Read are our own contents (:mod:`specheads.data.load`), ShareGPT's ``conversations`` with
``from`` and ``value``, and rows whose columns have other names: ``data.columns`` maps our names to
theirs. There, ``user``, ``assistant`` and ``system`` name columns that become messages, and
``instruction+input`` joins columns by a blank line, leaving out empty ones.

Token ids that a record brings along: whose they are, and which of them an assistant produced.

A record may carry ``"tokens": {"ids": [...], "answers": [[start, stop], ...], "tokenizer": "..."}``
beside its content. Decoding and encoding a generated text need not give the ids back that were
generated, so these are trained on as they are, wherever the tokenizer is still the same one.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from typing import TYPE_CHECKING

from specheads.data.dropped import RecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from specheads.config import ConfigError
from specheads.data.dropped import Dropped, one_line


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


def check_tokens(tokens: object, where: str) -> None:
    """Check the stored tokens of a record.

    Raises:
        RecordError: if ids are not token ids, or the answers are not rising spans [start, stop)
            inside them; names ``where``.
    """

    def wrong(detail: str) -> RecordError:
        return RecordError(where, "with stored tokens that are wrong", detail)

    if not isinstance(tokens, dict):
        raise wrong(f"tokens must be an object, got {tokens!r:.60}")
    ids, answers = tokens.get("ids"), tokens.get("answers")
    if not isinstance(ids, list) or not all(_is_count(i) for i in ids):
        raise wrong(f"tokens.ids must be a list of token ids, got {ids!r:.60}")
    if not isinstance(tokens.get("tokenizer"), str):
        raise wrong(
            f"tokens.tokenizer must be the digest of the tokenizer,"
            f" got {tokens.get('tokenizer')!r:.60}"
        )
    spans = answers if isinstance(answers, list) else []
    if not spans or not all(
        isinstance(span, list) and len(span) == 2 and all(map(_is_count, span)) for span in spans
    ):
        raise wrong(
            f"tokens.answers must be a list of at least one [start, stop], got {answers!r:.60}"
        )
    for start, stop in spans:
        if not start < stop <= len(ids):
            raise wrong(f"tokens.answers has [{start}, {stop}], which is no span of {len(ids)} ids")
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            raise wrong(f"tokens.answers must rise without overlap, got {before} before {after}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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


def to_record(
    row: object, where: str, name: str, columns: Mapping[str, str] | None, dropped: Dropped
) -> Record:
    """Check a row and give it ``id``, ``kind`` and one content.

    Args:
        row: what a line or a row of a table holds; it is not changed.
        where: its place, for messages.
        name: the id of a record without one.
        columns: our names to theirs, checked by :func:`check_columns`; ``""`` leaves one out. None
            where the user has no setting for them.
        dropped: is told of repairs.

    Raises:
        RecordError: if the row is no record.
    """
    if not isinstance(row, dict):
        raise RecordError(where, "not an object", f"expected an object, got {type(row).__name__}")
    record = _rename(row, where, columns)
    found = [keys for keys in CONTENTS if keys <= record.keys()]
    if len(found) != 1:
        keys = one_line(", ".join(sorted(map(str, row))) or "nothing", 200)
        meant = ", ".join(f"{key}: {key}" for key in sorted(found[0])) if found else ""
        advice = f"say which is meant: 'data.columns={{{meant}}}'" if found else columns_advice(row)
        raise RecordError(
            where,
            "without a content" if not found else "with several contents",
            f"{EXPECTED}; found {keys}" + ("" if columns is None else f"; {advice}"),
        )
    if found[0] == {"conversations"}:
        _say_as_messages(record, "conversations", where, dropped)
    elif found[0] == {"messages"}:
        _check_messages(record, where, dropped)
    for key in found[0] & {"prompt", "completion", "text"}:
        _check_text(record[key], key, where)
    if "kind" not in record:
        kinds = {"messages": "chat", "completion": "completion", "text": "text"}
        record["kind"] = next(kind for key, kind in kinds.items() if key in record)
    _check_text(record["kind"], "kind", where)
    if "tokens" in record:
        check_tokens(record["tokens"], where)
    record["id"] = _id(record.get("id"), name, where)
    return record


def _id(value: object, name: str, where: str) -> str:
    if value is None or value != value:  # a table without nulls writes "not a number"
        return name
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return _check_text(value, "id", where)


def _rename(row: Mapping[str, Any], where: str, columns: Mapping[str, str] | None) -> Record:
    if not columns:
        return dict(row)
    mapped = {
        ours: _column(row, theirs, where, optional=ours == "system")
        for ours, theirs in columns.items()
        if theirs
    }
    taken = {name for theirs in columns.values() for name in theirs.split("+")}
    asked = next((keys for keys in (*CONTENTS, _TURNS) if keys & mapped.keys()), set())
    others = set().union(*CONTENTS) - asked if asked else set()  # what is named is what is meant
    rest = {k: v for k, v in row.items() if k not in taken | columns.keys() | others}
    record = rest | mapped
    if asked == _TURNS:
        turns = [
            (role, record.pop(role)) for role in ("system", "user", "assistant") if role in record
        ]
        record["messages"] = [
            {"role": role, "content": text} for role, text in turns if text or role != "system"
        ]
    return record


def _column(row: Mapping[str, Any], theirs: str, where: str, *, optional: bool) -> Any:
    first, *more = theirs.split("+")
    if first not in row and not optional:
        raise RecordError(
            where,
            f"without the column {first}",
            f"no column {first}, which data.columns names; found {', '.join(map(str, row))}",
        )
    if not more:
        return row.get(first)
    parts = [(name, row.get(name)) for name in (first, *more)]
    for name, value in parts:
        if value is not None:
            _check_text(value, name, where)
    return "\n\n".join(value for _, value in parts if value)


def _check_text(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise RecordError(
            where,
            f"with a {key.split('.')[-1]} that is no string",
            f"{key} must be a string, got {value!r:.60}",
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RecordError(
                where, "with half a character", f"{key} holds half of a surrogate pair"
            ) from None
    return value


def _check_messages(record: Record, where: str, dropped: Dropped) -> None:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise RecordError(
            where, "without messages", "messages must be a list with at least one message"
        )
    if isinstance(messages[0], dict) and "from" in messages[0] and "role" not in messages[0]:
        _say_as_messages(record, "messages", where, dropped)
        return
    for position, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise RecordError(
                    where,
                    f"with a {key} that is no string",
                    f"messages[{position}].{key} must be a string, got {message!r:.60}",
                )
            _check_text(message[key], f"messages[{position}].{key}", where)


def _say_as_messages(record: Record, key: str, where: str, dropped: Dropped) -> None:
    turns = record.pop(key)
    if not isinstance(turns, list) or not turns:
        raise RecordError(where, "without turns", f"{key} must be a list with at least one turn")
    messages = [_turn(turn, f"{key}[{i}]", where) for i, turn in enumerate(turns)]
    shift = 0
    system = record.pop("system", None)
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        shift = -1
    start = int(messages[0]["role"] == "system")
    stop = start
    while stop < len(messages) and messages[stop]["role"] == "assistant":
        stop += 1
    if stop == len(messages):
        raise RecordError(where, "without a user's turn", f"{key} has no turn of a user")
    before = "system" if start else "start"
    for place, message in enumerate(messages[stop:], stop + shift):
        if before not in _MAY_FOLLOW.get(message["role"], ()):
            raise RecordError(
                where,
                "whose roles do not alternate",
                f"roles must alternate, but turn {place} of {key} puts {message['role']}"
                f" after {before}",
            )
        before = message["role"]
    if stop > start:
        dropped.note(BEGAN_WITH_ANSWER, where)
    record["messages"] = messages[:start] + messages[stop:]


def _turn(turn: object, place: str, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise RecordError(
            where, "with a turn that is no object", f"{place} must be an object, got {turn!r:.60}"
        )
    speaker = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    role = _ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise RecordError(
            where,
            "with an unknown role",
            f"{place}.from must be one of {', '.join(_ROLES)}, got {speaker!r:.60}",
        )
    return {"role": role, "content": _check_text(content, f"{place}.value", where)}
