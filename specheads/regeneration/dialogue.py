"""Take the answers out of a record, give them anew one after the other, and put it together again.

An answer is due after every run of messages in which a user speaks, the last one included, whether
or not the record had one there. An assistant that speaks before any user is left out: nobody asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.data.chat import Encoder, conversation, runs
from specheads.data.rendering import render
from specheads.data.schema import Record, RecordError, json_digest, packed_top
from specheads.decoding.conversation import text_of
from specheads.losses.cross_entropy import IGNORE

_ROLES = ("system", "user", "assistant")
_MADE = ("finish_reason", "num_tokens")  # of an answer, kept with the record
STAND_IN = "9a41f0c7-the-answer"  # no text holds it by chance


Likely = Sequence[tuple[int, list[int], list[float]]]


@dataclass(frozen=True)
class Answer:
    """One new answer.

    Attributes:
        text: without the token that ended it.
        finish_reason: ``stop`` at its end, ``length`` at the limit.
        num_tokens: its end token counted; None where nobody counted.
        likely: of every token, where the server was asked: the token, the likeliest ones in its
            place, best first, and their log-probabilities.
    """

    text: str
    finish_reason: str
    num_tokens: int | None = None
    likely: Likely = ()


@dataclass
class Dialogue:
    """A record without its answers, and the new answers so far.

    Attributes:
        record: the record as it was read.
        turns: the messages before each answer that is due; of a record with ``prompt`` and
            ``completion``, one turn without messages.
        answers: the new ones, at most one per turn.
        ids: all tokens so far, prompts and answers; empty where a server answers.
        spans: [start, stop) of the answers in ``ids``.
    """

    record: Record
    turns: list[list[dict[str, Any]]]
    answers: list[Answer] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every turn has its answer."""
        return len(self.answers) == len(self.turns)

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation so far: up to the next answer that is due, or all of it."""
        return conversation(self.turns, [answer.text for answer in self.answers])

    def answered(self, generation: dict[str, Any]) -> Record:
        """Return the record with the new answers, and what is known about their making."""
        left_out = ("messages", "completion", "tokens", "generation")
        record = {key: value for key, value in self.record.items() if key not in left_out}
        if "prompt" in record:
            record["completion"] = self.answers[0].text
        else:
            record["messages"] = self.messages()
        made = {name: [getattr(each, name) for each in self.answers] for name in _MADE}
        return record | {"generation": generation | made}


def check_answerable(records: Iterable[Record]) -> None:
    """Refuse texts.

    Raises:
        ConfigError: names the first record that holds a text.
    """
    for record in records:
        if "text" in record:
            raise ConfigError(
                f"record {record['id']} holds text, in which nothing is an answer; answers can be"
                " given to messages, and to prompt and completion"
            )


def dialogue(record: Record) -> Dialogue:
    """Take the answers out of ``record``, which holds messages, or prompt and completion.

    Raises:
        RecordError: if no user speaks in it, or one with another role does.
    """
    if "messages" not in record:
        return Dialogue(record, [[]])
    turns: list[list[dict[str, Any]]] = [[]]
    for message in record["messages"]:
        role = message["role"]
        if role not in _ROLES:
            raise RecordError("role", f"a message has the role {role!r}")
        if role != "assistant":
            turns[-1].append(message)
        elif _asks(turns[-1]):
            turns.append([])
    while turns and not _asks(turns[-1]):
        turns.pop()
    if not turns:
        raise RecordError("role", "no message is a user's")
    return Dialogue(record, turns)


def _asks(turn: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "user" for message in turn)


def check_answer(talk: Dialogue, keep_truncated: bool) -> None:
    """Refuse the latest answer where nothing should be learned from it.

    Raises:
        RecordError: if it is truncated, empty, or stopped by something else than its end.
    """
    answer, number = talk.answers[-1], len(talk.answers)
    if answer.finish_reason == "length":
        if not keep_truncated:
            of = "" if answer.num_tokens is None else f" of {answer.num_tokens} tokens"
            raise RecordError("truncated", f"answer {number} reached the limit{of} before its end")
    elif answer.finish_reason != "stop":
        raise RecordError("unfinished", f"answer {number} was stopped: {answer.finish_reason}")
    if not answer.text.strip():
        raise RecordError("empty", f"answer {number} is empty")
    try:
        answer.text.encode()
    except UnicodeEncodeError:
        raise RecordError("text", f"answer {number} holds half a character") from None


def tokens_of(record: Record, encoder: Encoder) -> dict[str, Any]:
    """Return the ``tokens`` to store with a record, from its texts.

    They are what training would see without them: the one that made the answers keeps its ids.

    Raises:
        ConfigError: if the template refuses the record.
    """
    encoded = encoder(record)
    spans = [list(span) for span in runs([label != IGNORE for label in encoded.labels])]
    return {"ids": encoded.input_ids.tolist(), "answers": spans, "tokenizer": encoder.digest}


def retold(talk: Dialogue, turns: TurnEncoder) -> dict[str, Any]:
    """Return the ``tokens`` to store with an answered record: those that a server said.

    Raises:
        RecordError: if they are not the tokens of its texts, as of another tokenizer.
    """
    told, rows = dialogue(talk.record), []
    for answer in talk.answers:
        seen = turns.ask(told)
        if told.answers and seen != turns.encoder.prompt({"id": "", "messages": told.messages()}):
            raise RecordError("token", "a server gives the tokens of an earlier answer otherwise")
        ids = [token for token, _, _ in answer.likely]
        ended = answer.finish_reason == "stop" and bool(ids) and ids[-1] in turns.end_tokens
        turns.add(told, ids, ended=ended)
        if told.answers[-1].text.strip() != answer.text.strip():
            problem = "the tokenizer of model= makes another text of the server's tokens"
            raise RecordError("token", f"{problem}: {told.answers[-1].text!r:.60}")
        rows.append([row[1:] for row in answer.likely])
    kept = [
        row
        for (start, stop), of in zip(told.spans, rows, strict=True)
        for row in of[: stop - start]  # an end that the template does not keep is no token of it
    ]
    top = packed_top([ids for ids, _ in kept], [log_probs for _, log_probs in kept])
    return turns.stored(told) | {"top": top}


def prompt_digest(record: Record) -> str:
    """Return a short digest of all that answers depend on; a record's own answers do not count."""
    try:
        content: object = [record.get("prompt"), dialogue(record).turns]
    except RecordError as error:
        content = str(error)
    return json_digest(content).hex()[:16]


class TurnEncoder:
    """Gives the token ids before each answer; the ids of earlier answers stay as they were.

    Tokenizing a whole conversation anew may split the text of a generated answer otherwise than it
    was generated, or rewrite it (templates that drop earlier thoughts). Here what a template puts
    between an answer and the next one is found once with a stand-in for the answer, and set behind
    the very ids that were generated.

    Args:
        tokenizer: the base model's tokenizer.
        end_tokens: ids that end an answer.

    Raises:
        ConfigError: if the tokenizer has no eos token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> None:
        self.encoder = Encoder(tokenizer)
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)

    def ask(self, talk: Dialogue) -> list[int]:
        """Append what stands before the next answer to ``talk.ids``, and return all of them.

        Raises:
            RecordError: if the chat template does not take the conversation.
        """
        is_chat, asked = "messages" in talk.record, {"id": talk.record["id"]}
        asked |= {"messages": talk.messages()} if is_chat else {"text": talk.record["prompt"]}
        try:
            if talk.answers:
                self._go_on(talk)
            else:
                talk.ids = self.encoder.prompt(asked)
        except (ConfigError, TemplateError) as error:
            raise RecordError("template", str(error)) from None
        return talk.ids

    def add(self, talk: Dialogue, new_tokens: Sequence[int], *, ended: bool) -> None:
        """Append an answer's tokens, the one that ended it included.

        Raises:
            RecordError: if a token stands for nothing: embeddings are often padded.
        """
        if (largest := max(new_tokens)) >= len(self.tokenizer):
            raise RecordError("token", f"token {largest} of {len(self.tokenizer)} was generated")
        talk.spans.append([len(talk.ids), len(talk.ids) + len(new_tokens)])
        talk.ids = [*talk.ids, *new_tokens]
        text = text_of(self.tokenizer, new_tokens[:-1] if ended else new_tokens)
        talk.answers.append(Answer(text, "stop" if ended else "length", len(new_tokens)))

    def stored(self, talk: Dialogue) -> dict[str, Any]:
        """Return the ``tokens`` to store with an answered record."""
        return {"ids": talk.ids, "answers": talk.spans, "tokenizer": self.encoder.digest}

    def _go_on(self, talk: Dialogue) -> None:
        between = self._between(talk)
        closing = dropwhile(lambda i: not str(self.tokenizer.decode([i])).strip(), between)
        if talk.answers[-1].finish_reason != "stop":
            talk.ids = talk.ids + between
        elif next(closing, None) == talk.ids[-1]:
            talk.ids = [*talk.ids, *closing]
        else:  # it ended otherwise than the template ends answers: a server would not keep that
            talk.ids = talk.ids[:-1] + between
            talk.spans[-1][1] -= 1

    def _between(self, talk: Dialogue) -> list[int]:
        """Return the ids behind the latest answer's text, up to where the next one starts."""
        stood_in = replace(talk, answers=[Answer(STAND_IN, "stop")] * len(talk.answers))
        text, _ = render(self.tokenizer, stood_in.messages(), add_generation_prompt=True)
        _, found, behind = text.rpartition(STAND_IN)
        if not found:
            raise RecordError("template", "the chat template leaves earlier answers out")
        return self.encoder.plain(behind)
