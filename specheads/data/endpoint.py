"""Let an OpenAI-compatible server answer records, many at one time."""

from __future__ import annotations

import queue
import reprlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specheads.config import ConfigError, RunError
from specheads.data.client import Client, ServerError, StoppedError
from specheads.data.dialogue import Answer, Dialogue, UnusableRecordError, check_answer, dialogue
from specheads.data.outcome import Outcome, Quarantined, Sampling, record_seed
from specheads.data.rows import Record

_ANSWERED = (
    "truncated",
    "empty",
    "unfinished",
    "text",
)  # reasons of quarantine: the server did answer
_FAILED = ("server", "refused")
_AT_ONCE = 64  # records that are handed on together


def next_answer(client: Client, model: str, sampling: Sampling, talk: Dialogue) -> Answer:
    """Ask for the next answer of a dialogue.

    Raises:
        ServerError: if the server gave none.
    """
    body: dict[str, Any] = {
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": record_seed(sampling.seed, talk.id),
        "max_tokens": sampling.max_new_tokens,
    }
    if sampling.top_k:  # not every server knows it
        body["top_k"] = sampling.top_k
    is_chat = "messages" in talk.record
    if is_chat:
        found = client.call("/chat/completions", body | {"messages": talk.messages()})
    else:
        found = client.call("/completions", body | {"prompt": talk.record["prompt"]})
    try:
        choice = found["choices"][0]
        text = _text(choice["message"]["content"] if is_chat else choice["text"])
        reason = choice["finish_reason"]
        num_tokens = (found.get("usage") or {}).get("completion_tokens")
        counted = num_tokens is None or (type(num_tokens) is int and 0 <= num_tokens < 1 << 32)
        if not counted or not isinstance(reason, str | None):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ServerError(f"no answer in {reprlib.repr(found)}") from None
    return Answer(text, f"{reason!s:.40}", num_tokens)


def _text(content: Any) -> str:
    if isinstance(content, list):  # parts; others than texts are thoughts and the like
        texts = ("text", "output_text")
        return "".join(part["text"] for part in content if part["type"] in texts)
    if not isinstance(content, str | None):
        raise TypeError
    return content or ""


class Asking:
    """Answers records with a server, several at one time.

    Args:
        client: of the server.
        model: as the server calls it.
        sampling: how answers are drawn; each record is asked for with its own seed.
        concurrency: requests at one time.
        encode: gives the tokens of an answered record, to be stored with it; called here, by one
            thread.
    """

    def __init__(
        self,
        client: Client,
        model: str,
        sampling: Sampling,
        *,
        concurrency: int,
        encode: Callable[[Record], dict[str, Any]] | None = None,
    ) -> None:
        self.client = client
        self.model = model
        self.sampling = sampling
        self.concurrency = concurrency
        self.encode = encode

    def answer(self, records: Sequence[Record], generation: dict[str, Any]) -> Iterator[Outcome]:
        """Answer records; yield what became of them, some at a time, as answers come.

        Args:
            records: to answer.
            generation: JSON about the server, for every answered record.

        Raises:
            RunError: if the server refuses all requests, never answered once, or has stopped
                answering.
        """
        todo: queue.SimpleQueue[Record] = queue.SimpleQueue()
        done: queue.SimpleQueue[Dialogue | Quarantined | BaseException] = queue.SimpleQueue()
        for record in records:
            todo.put(record)
        num_threads = min(self.concurrency, len(records))
        for _ in range(num_threads):
            threading.Thread(target=self._work, args=(todo, done), daemon=True).start()
        health = _Health(self.client.url, num_threads)
        held: list[Quarantined] = []  # until it is known that it was not the server
        settled, failure = 0, None
        try:
            while settled < len(records) and failure is None:
                outcome = Outcome()
                try:
                    for item in _take(done):
                        settled += 1
                        health.look_at(item)
                        if isinstance(item, Quarantined):
                            held.append(item)
                        elif isinstance(item, Dialogue):
                            self._collect(item, generation, outcome)
                    if settled == len(records):
                        health.check_end()
                except RunError as error:
                    failure = error  # what else has come is kept
                if health.answered or settled == len(records):
                    outcome.quarantined += held
                    held.clear()
                yield outcome
        finally:
            self.client.stopped.set()
        if failure is not None:
            raise failure

    def _collect(self, talk: Dialogue, generation: dict[str, Any], outcome: Outcome) -> None:
        outcome.num_tokens += sum(answer.num_tokens or 0 for answer in talk.answers)
        record = talk.answered(generation, None)
        if self.encode is not None:
            try:
                record["tokens"] = self.encode(record)
            except ConfigError as error:
                outcome.quarantined.append(Quarantined(talk.record, "template", str(error)))
                return
        outcome.answered.append(record)

    def _work(
        self,
        todo: queue.SimpleQueue[Record],
        done: queue.SimpleQueue[Dialogue | Quarantined | BaseException],
    ) -> None:
        try:
            while not self.client.stopped.is_set():
                done.put(self._settle(todo.get_nowait()))
        except (queue.Empty, StoppedError):
            return
        except BaseException as error:  # raised again by whoever waits for answers
            done.put(error)

    def _settle(self, record: Record) -> Dialogue | Quarantined:
        try:
            talk = dialogue(record)
            while not talk.finished:
                talk.answers.append(next_answer(self.client, self.model, self.sampling, talk))
                check_answer(talk, self.sampling.keep_truncated)
        except UnusableRecordError as error:
            return Quarantined(record, error.reason, str(error))
        except ServerError as error:
            if error.hopeless:
                raise RunError(f"{self.client.url} refuses all requests: {error}") from None
            reason = "server" if error.transient else "refused"
            return Quarantined(record, reason, str(error), error.transient)
        return talk


class _Health:
    """Tells a server that is down from records that it cannot answer."""

    def __init__(self, url: str, num_threads: int) -> None:
        self.url = url
        self.answered = False
        self.num_failed = 0  # one after the other
        self.num_threads = num_threads
        self.last = ""

    def look_at(self, item: Dialogue | Quarantined | BaseException) -> None:
        """Count, and give up where it is hopeless.

        Raises:
            RunError: if the server never answered, or has stopped answering.
        """
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, Dialogue) or item.reason in _ANSWERED:
            self.answered, self.num_failed = True, 0
        elif item.reason in _FAILED and (item.transient or not self.answered):
            self.num_failed, self.last = self.num_failed + 1, item.detail
        if not self.answered and self.num_failed >= self.num_threads:
            self.check_end()
        if self.num_failed >= max(8, 2 * self.num_threads):
            raise RunError(
                f"{self.url} has stopped answering: {self.last}; the same command goes on"
            )

    def check_end(self) -> None:
        """Raise RunError if no request ever went well."""
        if self.num_failed and not self.answered:
            raise RunError(f"{self.url} never answered: {self.last}")


def _take(
    done: queue.SimpleQueue[Dialogue | Quarantined | BaseException],
) -> Iterator[Dialogue | Quarantined | BaseException]:
    """Wait for one item, then yield it and those that are there already."""
    yield done.get()
    for _ in range(_AT_ONCE - 1):
        try:
            yield done.get_nowait()
        except queue.Empty:
            return
