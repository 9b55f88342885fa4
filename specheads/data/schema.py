"""From one row, as users have it, to a checked record, or to the list of those that are none.

Read are our own contents (:mod:`specheads.data.load`), ShareGPT's ``conversations`` with
``from`` and ``value``, and rows whose columns have other names: ``data.columns`` maps our names to
theirs. There, ``user``, ``assistant`` and ``system`` name columns that become messages, and
``instruction+input`` joins columns by a blank line, leaving out empty ones.

A record may carry ``"tokens": {"ids": [...], "answers": [[start, stop], ...], "tokenizer": "..."}``
beside its content: the token ids, whose they are, and which of them an assistant produced. Decoding
and encoding a generated text need not give the ids back that were generated, so these are trained
on as they are, wherever the tokenizer is still the same one. ``"top": {"k": k, "ids": "...",
"log_probs": "..."}`` in it says which k tokens were likeliest at each of these, best first, and
their log-probabilities at temperature 1: base64 of little-endian int32 and float32, a row of k for
every token of the answers, in order.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from specheads.config import ConfigError, RunError
from specheads.models.manifest import read_json
from specheads.system.errors import did_you_mean
from specheads.system.files import cut_torn_line, whole_file, write_whole
from specheads.system.redact import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Record = dict[str, Any]
T = TypeVar("T")
U = TypeVar("U")

LONGEST_ROW = 1 << 16  # characters of a row that a quarantine file shows
_LONGEST_LINE = 400

CONTENTS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"text"})
_TURNS = {"system", "user", "assistant"}  # only by data.columns
KEYS = {key for keys in CONTENTS for key in keys}
KNOWN = {"id", "kind", "tokens", *KEYS}
EXPECTED = "a record holds messages, or conversations, or prompt and completion, or text"

# what others call a prompt and its completion, the more telling names first
_QUESTIONS = ("prompt", "question", "instruction", "query", "problem", "input", "user", "source")
_ANSWERS = (
    "completion", "answer", "response", "output", "solution", "reply", "assistant", "target",
)  # fmt: skip

# ShareGPT names speakers after the services its conversations come from
_BOTS = ("gpt", "assistant", "chatgpt", "bing", "bard", "claude", "model", "bot", "chatbot")
_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(_BOTS, "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
_MAY_FOLLOW = {
    "user": {"start", "system", "assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise ConfigError if ``columns`` names a key that records do not have."""
    ours = sorted(KNOWN | _TURNS)
    for key in columns:
        if key not in ours:
            hint = did_you_mean(key, ours, f"there are {', '.join(ours)}")
            raise ConfigError(f"data.columns: unknown key {key}{hint}")
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


def usable(names: list[str], columns: Mapping[str, str], what: str) -> list[str]:
    """Return the names of the columns to read.

    Raises:
        ConfigError: if no record can be made of them; names ``what``.
    """
    keep, there = wanted(columns), one_line(", ".join(names))
    missing = {theirs.split("+")[0] for theirs in columns.values() if theirs} - set(names)
    if missing:
        raise ConfigError(
            f"{what} has no column {', '.join(sorted(missing))}, which data.columns names;"
            f" there are {there}"
        )
    if not columns and not any(keys <= set(names) for keys in CONTENTS):
        raise ConfigError(f"{what} has the columns {there}; {EXPECTED}: {columns_advice(names)}")
    return [name for name in names if name in keep]


class RecordError(ConfigError):
    """One record that cannot be used: the reason, for counting, its place, and the row as read.

    Its texts are one line, whatever the record holds. Who finds the fault need not know place and
    row: :func:`naming` adds them.
    """

    def __init__(self, reason: str, detail: str = "", where: str = "", row: Any = None) -> None:
        self.reason, self.where, self.row = one_line(reason), one_line(where), row
        self.detail = one_line(detail) or self.reason
        super().__init__(self.detail)

    def __str__(self) -> str:
        return f"{self.where}: {self.detail}" if self.where else self.detail


@contextlib.contextmanager
def naming(where: str, row: Any = None) -> Iterator[None]:
    """Let a RecordError of the block be of this place and this row; the outermost block decides."""
    try:
        yield
    except RecordError as error:
        error.where, error.row = one_line(where), row
        raise


def one_line(text: object, longest: int = _LONGEST_LINE) -> str:
    """Return ``text`` as one line of a terminal: spaces joined, other controls escaped, cut."""
    text = str(text)
    cut = text[: 2 * longest]
    line = " ".join(cut.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return line if len(line) <= longest and len(cut) == len(text) else line[:longest] + " ..."


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
    with naming(where, row):
        if not isinstance(row, dict):
            raise RecordError("not an object", f"expected an object, got {type(row).__name__}")
        record, cut = _renamed(row, columns), False
        for key in sorted(_content(record, row, columns)):
            if key in ("messages", "conversations"):
                cut = _check_turns(record, key)
            else:
                check_text(record[key], key)
        kinds = {"messages": "chat", "completion": "completion", "text": "text"}
        kind = next(kind for key, kind in kinds.items() if key in record)
        check_text(record.setdefault("kind", kind), "kind")
        if "tokens" in record and (detail := _wrong_tokens(record["tokens"])):
            raise RecordError("with stored tokens that are wrong", detail)
        value = record.get("id")
        if value is None or value != value:  # a table without nulls writes "not a number"
            value = name
        elif type(value) in (int, float):
            value = str(value)
        record["id"] = check_text(value, "id")
    if cut:
        dropped.note("conversations began with an answer, which is left out", where)
    return record


def _content(record: Record, row: Mapping[str, Any], columns: Mapping[str, str] | None) -> set[str]:
    """Return the keys of the one content that ``record``, made of ``row``, has."""
    found = [keys for keys in CONTENTS if keys <= record.keys()]
    if len(found) == 1:
        return found[0]
    reason, advice = "without a content", columns_advice(row)
    if found:
        meant = ", ".join(f"{key}: {key}" for key in sorted(found[0]))
        reason, advice = "with several contents", f"say which is meant: 'data.columns={{{meant}}}'"
    keys = one_line(", ".join(sorted(map(str, row))) or "nothing", 200)
    advice = "" if columns is None else f"; {advice}"
    raise RecordError(reason, f"{EXPECTED}; found {keys}{advice}")


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str] | None) -> Record:
    if not columns:
        return dict(row)
    mapped = {ours: _column(row, ours, theirs) for ours, theirs in columns.items() if theirs}
    taken = {name for theirs in columns.values() for name in theirs.split("+")}
    asked = next((keys for keys in (*CONTENTS, _TURNS) if keys & mapped.keys()), set())
    others = KEYS - asked if asked else set()  # what is named is what is meant
    rest = {k: v for k, v in row.items() if k not in taken | columns.keys() | others}
    record = rest | mapped
    if asked == _TURNS:
        said = [(r, record.pop(r)) for r in ("system", "user", "assistant") if r in record]
        record["messages"] = [{"role": r, "content": t} for r, t in said if t or r != "system"]
    return record


def _column(row: Mapping[str, Any], ours: str, theirs: str) -> Any:
    first, *more = theirs.split("+")
    if first not in row and ours != "system":
        there = ", ".join(map(str, row))
        detail = f"no column {first}, which data.columns names; found {there}"
        raise RecordError(f"without the column {first}", detail)
    if not more:
        return row.get(first)
    parts = [check_text(row[name], name) for name in (first, *more) if row.get(name) is not None]
    return "\n\n".join(part for part in parts if part)


def check_text(value: object, key: str, around: object = None) -> str:
    """Return ``value`` if it is a text; ``around``: what to show where it is none."""
    if not isinstance(value, str):
        shown = value if around is None else around
        reason = f"with a {key.split('.')[-1]} that is no string"
        raise RecordError(reason, f"{key} must be a string, got {shown!r:.60}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            detail = f"{key} holds half of a surrogate pair"
            raise RecordError("with half a character", detail) from None
    return value


def _check_turns(record: Record, key: str) -> bool:
    """Check the messages of ``record``, or make messages of ShareGPT's turns.

    Returns:
        Whether answers at the beginning, which nobody asked for, were left out.
    """
    turns, one = record[key], "message" if key == "messages" else "turn"
    if not isinstance(turns, list) or not turns:
        raise RecordError(f"without {one}s", f"{key} must be a list with at least one {one}")
    first = turns[0] if isinstance(turns[0], dict) else {}
    if key == "messages" and ("from" not in first or "role" in first):
        for position, message in enumerate(turns):
            for part in ("role", "content"):
                value = message.get(part) if isinstance(message, dict) else None
                check_text(value, f"messages[{position}].{part}", message)
        return False
    del record[key]
    messages = [_message(turn, f"{key}[{i}]") for i, turn in enumerate(turns)]
    added, system = 0, record.pop("system", None)
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        added = 1
    stop = start = int(messages[0]["role"] == "system")
    while stop < len(messages) and messages[stop]["role"] == "assistant":
        stop += 1
    if stop == len(messages):
        raise RecordError("without a user's turn", f"{key} has no turn of a user")
    before = "system" if start else "start"
    for place, message in enumerate(messages[stop:], stop - added):
        if before not in _MAY_FOLLOW.get(message["role"], ()):
            what = f"turn {place} of {key} puts {message['role']} after {before}"
            raise RecordError("whose roles do not alternate", f"roles must alternate, but {what}")
        before = message["role"]
    record["messages"] = messages[:start] + messages[stop:]
    return stop > start


def _message(turn: object, place: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        detail = f"{place} must be an object, got {turn!r:.60}"
        raise RecordError("with a turn that is no object", detail)
    speaker = turn.get("from", turn.get("role"))
    role = _ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        detail = f"{place}.from must be one of {', '.join(_ROLES)}, got {speaker!r:.60}"
        raise RecordError("with an unknown role", detail)
    content = check_text(turn.get("value", turn.get("content")), f"{place}.value")
    return {"role": role, "content": content}


def _wrong_tokens(tokens: object) -> str:
    """Return what is wrong with the stored tokens of a record, nothing where they are fine."""
    if not isinstance(tokens, dict):
        return f"tokens must be an object, got {tokens!r:.60}"
    given: list[Any] = [tokens.get(key) for key in ("ids", "answers", "tokenizer")]
    ids, spans, tokenizer = given
    if not _are_counts(ids):
        return f"tokens.ids must be a list of token ids, got {ids!r:.60}"
    if not isinstance(tokenizer, str):
        return f"tokens.tokenizer must be the digest of the tokenizer, got {tokenizer!r:.60}"
    pairs = isinstance(spans, list) and all(_are_counts(s) and len(s) == 2 for s in spans)
    if not spans or not pairs:
        return f"tokens.answers must be a list of at least one [start, stop], got {spans!r:.60}"
    end = 0
    for start, stop in spans:
        if not end <= start < stop <= len(ids):
            return (
                f"tokens.answers has [{start}, {stop}], which is no span of {len(ids)} ids behind"
                f" {end}; they must rise without overlap"
            )
        end = stop
    if "top" in tokens:
        try:
            likely, log_probs = unpacked_top(tokens["top"], sum(b - a for a, b in spans))
        except (KeyError, TypeError, ValueError) as error:
            return f"tokens.top is wrong: {error!r:.80}"
        if (likely < 0).any():
            return "tokens.top.ids holds negative numbers"
        if not (log_probs <= 1e-3).all() or (np.exp(log_probs).sum(1) > 1.01).any():
            return "tokens.top.log_probs holds numbers that are no log-probabilities"
    return ""


Top = tuple[NDArray[np.int32], NDArray[np.float32]]  # ids and log-probabilities [n, k]


def packed_top(ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]) -> Any:
    """Return the likeliest tokens at n places as JSON, see above."""
    arrays = np.asarray(ids, dtype="<i4"), np.asarray(log_probs, dtype="<f4")
    packed = (base64.b64encode(array.tobytes()).decode() for array in arrays)
    return {"k": len(ids[0]), **dict(zip(("ids", "log_probs"), packed, strict=True))}


def unpacked_top(top: Any, num_tokens: int) -> Top:
    """Return what :func:`packed_top` was given, for so many tokens.

    Raises:
        KeyError, TypeError, ValueError: if it is not that.
    """
    raw = (base64.b64decode(top[name], validate=True) for name in ("ids", "log_probs"))
    ids, log_probs = (np.frombuffer(x, t) for x, t in zip(raw, ("<i4", "<f4"), strict=True))
    shape = num_tokens, int(top["k"])
    return ids.reshape(shape), log_probs.reshape(shape)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def text_digest(text: str) -> bytes:
    """Return a sha256 of a text, which may hold half of a surrogate pair."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def json_digest(value: object) -> bytes:
    """Return a sha256 of JSON, whatever the order of its keys."""
    return text_digest(json.dumps(value, sort_keys=True, ensure_ascii=False))


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return where settings differ, each as ``key (value there, value here)``; digests are cut."""

    def shown(values: Mapping[str, Any], key: str) -> str:
        value = str(values.get(key))
        return value[:12] if re.fullmatch("[0-9a-f]{64}", value) else value

    keys = [key for key in {**here, **there} if there.get(key) != here.get(key)]
    return ", ".join(f"{key} ({shown(there, key)} there, {shown(here, key)} here)" for key in keys)


def keep_settings(file: Path, kept: Path, settings: Mapping[str, Any], cure: str) -> None:
    """Keep in ``kept`` the settings that ``file`` is made with; only with the same it is gone on.

    Raises:
        ConfigError: if it was made with others, or holds something that was made by other means;
            ends with the ``cure``.
    """
    wanted = json.loads(json.dumps(settings))
    if kept.exists():
        found = read_json(kept, f"{file} cannot be gone on with")
        if others := differences(found, wanted):
            raise ConfigError(f"{file} was made with other settings: {others}; {cure}")
    elif file.exists() and file.stat().st_size:
        raise ConfigError(
            f"{file} holds something, but there is no {kept.name} beside it: it was not made by"
            f" this command; {cure}"
        )
    else:
        write_whole(kept, json.dumps(wanted, indent=2) + "\n")


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sha256 over all that decides which ids a conversation becomes.

    That is the vocabulary and its rules, the special tokens and the chat template; not the
    folder's name, nor the padding and truncation that the last call asked for.
    """
    vocabulary: object = [type(tokenizer).__name__, tokenizer.get_vocab()]
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        rules = json.loads(backend.to_str())
        vocabulary = {k: v for k, v in rules.items() if k not in ("truncation", "padding")}
    special = tokenizer.special_tokens_map.items()
    parts = {
        "vocabulary": vocabulary,
        # many programs set a missing pad token, which no conversation holds
        "special": {key: str(value) for key, value in special if key != "pad_token"},
        "template": tokenizer.chat_template,
    }
    return json_digest(parts).hex()


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

    def add(self, error: RecordError) -> None:
        """Count a record that is left out."""
        self.rows[error.where] = _entry(error)

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


def _entry(error: RecordError) -> dict[str, Any]:
    """Return what a quarantine file says of a row, which is a cut text if long or no JSON."""
    shown = error.row
    try:
        text = json.dumps(shown, default=str, allow_nan=False)
    except (ValueError, TypeError):  # not a number, keys of a table
        shown = text = repr(shown)
    shown = shown if len(text) <= LONGEST_ROW else text[:LONGEST_ROW]
    return {"where": error.where, "reason": error.reason, "error": str(error), "row": shown}


def _line(entry: dict[str, Any]) -> str:
    about = redact(entry) | {"row": entry["row"]}  # which is the user's to see as it is
    return json.dumps(about, default=str) + "\n"


class Tally:
    """Counts records, and by reason those that cannot be used.

    Attributes:
        allowed: the share of them that may be of no use; with 0 the first one is raised.
        aside: what collects those.
        total: records so far.
        reasons: how many cannot be used, and why.
    """

    def __init__(self, allowed: float, aside: Dropped | Quarantine) -> None:
        self.allowed, self.aside, self.total = allowed, aside, 0
        self.reasons: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def take(self, make: Callable[[U], T], item: U) -> T | None:
        """Return what ``make`` makes of an item, None where that cannot be used."""
        self.total += 1
        try:
            return make(item)
        except RecordError as error:
            if self.allowed == 0:
                raise
            self.reasons[error.reason] += 1
            self._first.setdefault(error.reason, str(error))
            self.aside.add(error)
            return None

    def check(self, what: str, so_far: str = "") -> None:
        """Raise ConfigError if there were no records, or too many that cannot be used."""
        if not self.total:
            raise ConfigError(f"{what} holds no records")
        bad = self.reasons.total()
        if bad <= self.allowed * self.total:
            return
        reason, number = self.reasons.most_common(1)[0]
        # a run that goes on knows the numbers of the one before, not its messages
        first = f", first: {self._first[reason]}" if reason in self._first else ""
        raise ConfigError(
            f"{what}: {bad:,} of {self.total:,} records{so_far} cannot be used, more than"
            f" data.max_bad_fraction={self.allowed:g}; most often ({number:,}) {reason}{first}"
        )


class Quarantine:
    """A file with one JSON object per bad row, as ``Dropped.write`` writes it.

    First come the rows that were found bad before training. A resumed run meets some rows again; no
    row is in the file twice.

    Attributes:
        path: the file; None keeps rows until it is known.
    """

    def __init__(self, dropped: Dropped, *, first: bool = True) -> None:
        """Take what was found before training; ``first``: its rows belong into this file."""
        self.path: Path | None = None
        self._before = set(dropped.rows)
        self._known = set(self._before)
        self._waiting = list(map(_line, dropped.rows.values())) if first else []
        self._begun = False

    def add(self, error: RecordError) -> None:
        """Append a row, unless it is known.

        Raises:
            RunError: if it cannot be written.
        """
        if error.where in self._known:
            return
        self._known.add(error.where)
        self._waiting.append(_line(_entry(error)))
        if self._begun:
            self.flush()

    def flush(self) -> None:
        """Write what waits for it, the first time into a new file."""
        if self.path is None:
            return
        try:
            if not self._begun:
                self.path.unlink(missing_ok=True)
            if self._waiting:
                self.path.parent.mkdir(parents=True, exist_ok=True)  # on another host
                with self.path.open("ab") as file:
                    file.write("".join(self._waiting).encode())
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from None
        self._waiting, self._begun = [], True

    def go_on(self) -> None:
        """Keep the file, if there is one, and its rows."""
        if self.path is not None and self.path.is_file():
            cut_torn_line(self.path)  # as a kill may leave one
            lines = self.path.read_bytes().splitlines()
            self._known = self._before | {json.loads(line)["where"] for line in lines}
            self._waiting, self._begun = [], True
