"""Let an OpenAI-compatible server answer records, many at one time."""

from __future__ import annotations

import json
import os
import random
import reprlib
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import TimeoutError as NothingYetError
from multiprocessing.pool import ThreadPool
from typing import Any

import httpx

from specheads.config import ConfigError, RunError
from specheads.data.schema import Record, RecordError
from specheads.regeneration.answers import HELD, Outcome, Sampling, record_seed
from specheads.regeneration.dialogue import (
    Answer,
    Dialogue,
    Likely,
    TurnEncoder,
    check_answer,
    dialogue,
    retold,
    tokens_of,
)
from specheads.system import __version__

_LONGEST_PAUSE = 60.0  # seconds
_MOST_BYTES = 64 << 20  # of a body: more than any answer with its log-probabilities
_BUSY = {408, 409, 425, 429}  # may go well later, as all from 500 on
_HOPELESS = {401, 403, 404, 405, 407}  # no other request would go better


class ServerError(RuntimeError):
    """A request that failed.

    Attributes:
        transient: whether the same request may go well later.
        hopeless: whether no request can go well.
        pause: seconds that the server asks to wait.
    """

    def __init__(
        self, text: str, *, transient: bool = False, hopeless: bool = False, pause: float = 0.0
    ) -> None:
        super().__init__(text)
        self.transient, self.hopeless, self.pause = transient, hopeless, pause


class Client:
    """Sends requests to one server, each again with growing pauses where it fails for a time.

    The key comes from ``OPENAI_API_KEY`` and goes nowhere but into the requests; redirections,
    which might carry it to another host, are not followed.

    Args:
        url: the server's address with its version, e.g. ``http://localhost:8000/v1``.
        timeout: seconds without a byte after which a request has failed.
        retries: how often a failed request is sent again.
        pause: seconds before the first of them; later ones wait twice as long each.

    Raises:
        ConfigError: for a url that is none, or that holds a password: it would be written down.
    """

    def __init__(self, url: str, *, timeout: float, retries: int, pause: float = 1.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"endpoint must be like http://localhost:8000/v1, got {url!r}")
        if parts.username or parts.password:
            raise ConfigError("endpoint must not hold a password; set OPENAI_API_KEY")
        self.url, self.timeout, self.retries, self.pause = url.rstrip("/"), timeout, retries, pause
        self.stopped = threading.Event()
        self.refusal = ""  # what the server said that it will say to every request
        self._key = os.environ.get("OPENAI_API_KEY", "")
        headers = {"User-Agent": f"specheads/{__version__}", "Content-Type": "application/json"}
        headers["Accept-Encoding"] = "identity"  # a body is read as it comes
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        many = httpx.Limits(max_connections=None)
        self._http = httpx.Client(headers=headers, timeout=timeout, limits=many)

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what the server answers; a request without ``body`` is a GET.

        Raises:
            ServerError: after the last retry, or if the client was stopped meanwhile.
        """
        for attempt in range(self.retries + 1):
            try:
                return self._try(path, body)
            except ServerError as error:
                if not error.transient or attempt == self.retries:
                    raise
                pause = min(self.pause * 2 ** min(attempt, 30), _LONGEST_PAUSE)
                # without chance in it, all that failed together would come back together
                wait = max(pause * random.uniform(0.5, 1.5), error.pause)
            if self.stopped.wait(wait):
                break
        raise ServerError("stopped while it waited")

    def _try(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        text = bytearray()
        try:
            method = "GET" if body is None else "POST"
            # in ASCII: half of a surrogate pair has no UTF-8, and httpx's own json= needs it
            content = None if body is None else json.dumps(body)
            with self._http.stream(method, self.url + path, content=content) as response:
                for part in response.iter_raw():
                    text += part
                    if len(text) > _MOST_BYTES:
                        break
        except httpx.TimeoutException:
            problem = f"nothing came for timeout={self.timeout:g} seconds"
            raise ServerError(problem, transient=True) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(str(error) or type(error).__name__, transient=True) from None
        if not response.is_success:
            raise self._http_error(response, text[:300].decode("utf-8", "replace"))
        if len(text) > _MOST_BYTES:
            raise ServerError(f"more than {_MOST_BYTES >> 20} MiB came back")
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            return joined(text)
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ServerError(f"no JSON object came back: {bytes(text[:80])!r}", transient=True)
        return found

    def _http_error(self, response: httpx.Response, body: str) -> ServerError:
        if self._key:
            body = body.replace(self._key, "***")
        code, asked = response.status_code, response.headers.get("Retry-After", "")
        return ServerError(
            f"HTTP {code} {' '.join(body.split())}".strip(),
            transient=code in _BUSY or code >= 500,
            hopeless=code in _HOPELESS or 300 <= code < 400,
            pause=min(float(asked), _LONGEST_PAUSE) if asked.isdecimal() else 0.0,
        )

    def first_model(self) -> str:
        """Return the name of the first model that the server lists.

        Raises:
            RunError: if it does not answer, or lists none.
        """
        try:
            listed = self.call("/models").get("data")
        except ServerError as error:
            raise RunError(f"{self.url}/models: {error}") from None
        for each in listed if isinstance(listed, list) else []:
            if isinstance(each, dict) and isinstance(name := each.get("id"), str) and name:
                return name
        raise RunError(f"{self.url} lists no models; give endpoint_model=")


def joined(events: bytes | bytearray) -> dict[str, Any]:
    """Return the answer that a stream of server-sent events adds up to, as if it had come whole.

    Raises:
        ServerError: if the stream breaks off, reports an error, or is malformed.
    """
    text, reason, usage = "", None, None
    logprobs: dict[str, list[Any]] = {}
    try:
        for line in events.splitlines():
            if not line.startswith(b"data:"):
                continue
            if (data := line[5:].strip()) == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                problem = f"it stopped within an answer: {reprlib.repr(event['error'])}"
                raise ServerError(problem, transient=True)
            usage = event.get("usage") or usage
            for choice in event["choices"][:1]:  # the last event, with the usage, has none
                text += _text(
                    choice["delta"].get("content") if "delta" in choice else choice["text"]
                )
                reason = choice.get("finish_reason") or reason
                for key, some in (choice.get("logprobs") or {}).items():
                    logprobs.setdefault(key, []).extend(some or ())
        else:
            raise ServerError("an answer broke off", transient=True)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ServerError(f"malformed events: {bytes(events[:80])!r}", transient=True) from None
    choice = {"message": {"content": text}, "text": text, "finish_reason": reason}
    return {"choices": [choice | {"logprobs": logprobs}], "usage": usage}


_Settled = Dialogue | RecordError


def next_answer(client: Client, model: str, sampling: Sampling, talk: Dialogue) -> Answer:
    """Ask for the next answer of a dialogue, with the ``logprobs`` likeliest tokens at its places.

    Raises:
        ServerError: if the server gave none.
    """
    is_chat, logprobs = "messages" in talk.record, sampling.logprobs
    body: dict[str, Any] = {
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": record_seed(sampling.seed, talk.record["id"]),
        "max_tokens": sampling.max_new_tokens,
        # a long answer comes as it is made, so that ``timeout`` ends none that is being written
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.top_k:  # not every server knows it
        body["top_k"] = sampling.top_k
    body |= {"messages": talk.messages()} if is_chat else {"prompt": talk.record["prompt"]}
    if logprobs:  # vLLM names tokens by their ids where it is asked to, llama.cpp always does
        body |= {"logprobs": True, "top_logprobs": logprobs} if is_chat else {"logprobs": logprobs}
        body["return_tokens_as_token_ids"] = True
    found = client.call("/chat/completions" if is_chat else "/completions", body)
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
    likely = _likely(choice.get("logprobs"), logprobs) if logprobs else ()
    return Answer(text, f"{reason!s:.40}", num_tokens, likely)


def _likely(said: Any, number: int) -> Likely:
    """Return what a server says of its tokens, in either of the two forms of ``logprobs``.

    Raises:
        ServerError: if it names no ids, or fewer tokens than were asked for.
    """
    rows = []
    try:
        if "content" in said:  # of a chat
            tokens = said["content"]
            tops = [{_id(each): each["logprob"] for each in t["top_logprobs"]} for t in tokens]
        else:
            tokens = [{"token": token} for token in said["tokens"]]
            tops = [{_id({"token": k}): v for k, v in t.items()} for t in said["top_logprobs"]]
        for token, top in zip(tokens, tops, strict=True):
            best = sorted(top, key=lambda each: -float(top[each]))[:number]
            rows.append((_id(token), best, [float(top[each]) for each in best]))
        if not rows or min(len(best) for _, best, _ in rows) < number:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ServerError(
            f"no {number} tokens by their ids in logprobs {reprlib.repr(said)}: the server has to"
            " know return_tokens_as_token_ids, as vLLM does, or name ids, as llama.cpp does, and"
            " to allow so many"
        ) from None
    return rows


def _id(said: Mapping[str, Any]) -> int:
    return int(said["id"]) if "id" in said else int(said["token"].removeprefix("token_id:"))


def _text(content: Any) -> str:
    if isinstance(content, list):  # parts; others than texts are thoughts and the like
        texts = ("text", "output_text")
        return "".join(part["text"] for part in content if part["type"] in texts)
    if not isinstance(content, str | None):
        raise TypeError
    return content or ""


def ask_server(
    client: Client,
    model: str,
    sampling: Sampling,
    records: Sequence[Record],
    generation: dict[str, Any],
    concurrency: int,
    turns: TurnEncoder | None = None,
) -> Iterator[Outcome]:
    """Answer records with a server; yield what became of each as answers come.

    Args:
        client: the client of the server.
        model: the model, as the server calls it.
        sampling: how answers are drawn; each record is asked for with its own seed. With ``turns``
            its ``logprobs`` are stored beside them.
        records: the records to answer.
        generation: JSON about the server, for every answered record.
        concurrency: requests at one time.
        turns: gives the tokens of an answered record, to be stored with it; called here, by one
            thread.

    Raises:
        RunError: if the server refuses all requests, never answered once, or has stopped answering.
    """
    num_threads = min(concurrency, len(records))
    pool = ThreadPool(num_threads)  # of daemons: Ctrl-C must not wait for a slow answer
    held: list[RecordError] = []  # until it is known that it was not the server
    settled, answered, num_failed, last = 0, False, 0, ""  # failed one after the other
    items = pool.imap_unordered(partial(_settle, client, model, sampling), records)
    try:
        while settled < len(records):
            outcome, reason = Outcome(), ""
            try:
                item = items.next(timeout=HELD)
            except NothingYetError:
                yield outcome  # what is held may be written
                continue
            settled += 1
            if isinstance(item, RecordError):
                held.append(item)
                reason = item.reason
            else:
                _add_record(outcome, item, generation, turns)
            if reason == "server" or (reason == "refused" and not answered):
                num_failed, last = num_failed + 1, str(item)
            elif reason not in ("refused", "role"):  # good or bad, an answer came
                answered, num_failed = True, 0
            if not answered and num_failed >= num_threads:
                break
            if num_failed >= max(8, 2 * num_threads):
                last = f"{client.url} has stopped answering: {last.rstrip('.')}"
                raise RunError(f"{last}; the same command goes on")
            if answered:
                outcome.quarantined += held
                held.clear()
            yield outcome
        if settled == len(records):
            yield Outcome(quarantined=held)
        if num_failed and not answered:
            raise RunError(f"{client.url} never answered: {last}")
    finally:
        client.stopped.set()
        pool.terminate()


def _settle(client: Client, model: str, sampling: Sampling, record: Record) -> _Settled:
    if client.refusal:  # other threads must not go on asking until the first one's error is read
        raise RunError(client.refusal)
    try:
        talk = dialogue(record)
        while not talk.finished:
            talk.answers.append(next_answer(client, model, sampling, talk))
            check_answer(talk, sampling.keep_truncated)
        return talk
    except RecordError as error:
        found = error
    except ServerError as error:
        if error.hopeless:
            client.refusal = f"{client.url} refuses all requests: {error}"
            raise RunError(client.refusal) from None
        found = RecordError("server" if error.transient else "refused", str(error))
    found.row = record
    return found


def _add_record(
    outcome: Outcome, talk: Dialogue, generation: dict[str, Any], turns: TurnEncoder | None
) -> None:
    outcome.num_tokens += sum(answer.num_tokens or 0 for answer in talk.answers)
    record = talk.answered(generation)
    with outcome.quarantining(talk.record):
        try:
            if turns is not None:
                told = talk.answers[0].likely
                record["tokens"] = retold(talk, turns) if told else tokens_of(record, turns.encoder)
        except ConfigError as error:
            raise RecordError("template", str(error)) from None
        outcome.answered.append(record)
