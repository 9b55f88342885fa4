"""Let an OpenAI-compatible server answer records, many at one time."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

from specheads.config import ConfigError, RunError
from specheads.data.schema import Record, RecordError
from specheads.regeneration.answers import Outcome, Sampling, record_seed
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
from specheads.system.client import Client, ServerError, text_of

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
        text = text_of(choice["message"]["content"] if is_chat else choice["text"])
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
            item = next(items)
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
