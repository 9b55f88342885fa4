"""Rows of many clients: each with the tokens that ``generate`` gives it, whatever others do."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.config import ConfigError, DecodeConfig
from specheads.config.commands import TextSettings
from specheads.decoding.exported import Subject, choose_drafter, load_subject
from specheads.decoding.generate import SpecDecoder, decode_prompts
from specheads.serve.engine import BusyError, Engine, Step, Ticket, frequency_penalty

HYDRA = "data/checkpoints/hydra"


@cache
def subject() -> Subject:
    """Return tinycode with the heads that ship, float32."""
    return load_subject(HYDRA, device="cpu")


@cache
def decoders() -> dict[str, SpecDecoder]:
    """Return decoders by name; all share the base."""
    loaded, found = subject(), {}
    for name in ("heads", "suffix"):
        decode = DecodeConfig(drafter=name)
        found[name] = SpecDecoder.of(loaded, decode, choose_drafter(loaded, decode).drafter)
    return found | {"plain": SpecDecoder.of(loaded, DecodeConfig(), None)}


def started(**changes: Any) -> Engine:
    """Return a running engine."""
    options: dict[str, Any] = {"batch_size": 4, "queue": 64, "piece": 16, "prefix_tokens": 0}
    engine = Engine(decoders(), **(options | changes))
    engine.start()
    return engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Return a running engine, and stop it."""
    made = started()
    yield made
    made.stop()


class Client:
    """Hears what a ticket is told."""

    def __init__(self, ids: list[int], settings: TextSettings, drafter: str, **more: Any) -> None:
        self.steps: queue.Queue[Step] = queue.Queue()
        self.ticket = Ticket(ids, settings, drafter, self.steps.put, **more)

    def wait(self) -> tuple[list[int], str, str]:
        """Return tokens, what finished them, and the error."""
        tokens: list[int] = []
        while True:
            step = self.steps.get(timeout=60)
            tokens += step.tokens
            if step.finish or step.error:
                return tokens, step.finish, step.error


def alone(client: Client) -> list[int]:
    """Return what generate gives."""
    ticket = client.ticket
    more = {"stop_strings": list(ticket.stop)} if ticket.stop else {}
    if ticket.processors:
        more["logits_processor"] = list(ticket.processors)
    decoder = decoders()["plain"]
    return decode_prompts(decoder, ticket.settings, [ticket.ids], ticket.limit, **more).new_tokens


def asked(temperature: float, seed: int, **more: Any) -> TextSettings:
    """Return settings."""
    return TextSettings(checkpoint="", temperature=temperature, seed=seed, **more)


@pytest.mark.parametrize("prefix_tokens", [0, 600])
def test_everybody_gets_what_generate_gives(prefix_tokens: int) -> None:
    """Prevents a text that depends on who else is served, or on what was served before.

    Prompts of 1 to 120 tokens, three drafters, five ways to draw, stop strings, penalties; they
    come in bursts, and a third hangs up.
    """
    chance = random.Random(5)
    tokenizer = subject().tokenizer
    source = "def area(width, height):\n    return width * height\n\n\nclass Box:\n    def __init__"
    ids = tokenizer(source * 3).input_ids
    engine = started(prefix_tokens=prefix_tokens)
    clients, gone = [], []
    ways: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 1.2}, {}]
    for i in range(36):
        start = chance.choice([0, 0, 5, 11])
        prompt = ids[start : start + chance.choice([1, 3, 20, 40, 120])]
        settings = asked(chance.choice([0, 0, 0.8]), chance.randrange(1 << 40), **ways[i % 5])
        more: dict[str, Any] = {"limit": chance.choice([1, 5, 24])}
        if i % 7 == 3:
            more["stop"] = ["\n", "self"]
        if i % 9 == 4:
            more["processors"] = [frequency_penalty(len(prompt), 0.5, 0.3)]
        client = Client(prompt, settings, chance.choice(list(decoders())), **more)
        clients.append(client)
        engine.submit([client.ticket])
        if i % 3 == 0:
            gone.append(client)
        if i % 4 == 0:
            time.sleep(0.03)
        for each in gone[:-2]:
            each.ticket.cancelled = True
    for client in clients:
        tokens, finish, error = client.wait()
        if client.ticket.cancelled:
            assert alone(client)[: len(tokens)] == tokens
        else:
            assert (tokens, error) == (alone(client), "")
            assert finish in ("stop", "length")
    engine.stop()
    assert engine.num_running == engine.num_waiting == 0


def test_settings_of_one_kind_and_other_numbers_are_not_shared(engine: Engine) -> None:
    """Prevents that whoever comes second draws at the temperature of whoever came first."""
    heats = (0.3, 0.9, 1.6)
    clients = [Client([5, 6, 7], asked(heat, 4), "plain", limit=20) for heat in heats]
    engine.submit([client.ticket for client in clients])
    found = [client.wait()[0] for client in clients]
    assert found == [alone(client) for client in clients]
    assert len(set(map(tuple, found))) == len(heats)


def test_a_fault_ends_its_own_request(engine: Engine) -> None:
    """Prevents that a processor of one client ends the texts of all others in its batch."""

    def failing(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 12:
            raise ZeroDivisionError("of mine\x1b[2J")
        return scores

    def wrong(input_ids: Tensor, scores: Tensor) -> Any:
        return scores[:, :3]

    ids = subject().tokenizer("def area(width, height):").input_ids
    good = [Client(ids, asked(0.7, seed), "heads", limit=30) for seed in range(3)]
    bad = Client(ids, asked(0.7, 9), "heads", limit=30, processors=[failing])
    worse = Client(ids, asked(0.7, 9), "plain", limit=30, processors=[wrong])
    engine.submit([each.ticket for each in (*good, bad, worse)])
    assert [client.wait()[0] for client in good] == [alone(client) for client in good]
    _, _, error = bad.wait()
    assert error == "function failed: ZeroDivisionError: of mine\\u001b[2J"
    assert "has to answer scores of shape" in worse.wait()[2]


def test_a_long_prompt_keeps_nobody_waiting(engine: Engine) -> None:
    """Prevents that a text stands still while another client's prompt of thousands is read."""
    short = Client([5, 6, 7], asked(0, 0), "plain", limit=40)
    engine.submit([short.ticket])
    first = short.steps.get(timeout=30)
    long = Client([5 + i % 200 for i in range(700)], asked(0, 0), "plain", limit=2)
    engine.submit([long.ticket])
    tokens, _, _ = short.wait()
    assert long.steps.empty()  # 44 pieces take longer than 40 steps
    assert [*first.tokens, *tokens] == alone(short)
    assert long.wait()[0] == alone(long)


def test_what_was_read_for_earlier_turns_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a cache of prefixes that is never met, or grows without bound."""
    from specheads.models.forward import ModelPass

    read: list[int] = []
    plain = ModelPass.read

    def counted(self: ModelPass, tokens: Tensor, counts: Any) -> Tensor:
        read.append(tokens.shape[1])
        return plain(self, tokens, counts)

    monkeypatch.setattr(ModelPass, "read", counted)
    engine = started(prefix_tokens=100)
    text = [5 + i % 200 for i in range(60)]
    client = Client(text, asked(0, 0), "plain", limit=3)
    engine.submit([client.ticket])
    answer = client.wait()[0]
    turn = Client([*text, *answer, 9, 8, 7], asked(0, 0), "heads", limit=3)
    before = sum(read)
    engine.submit([turn.ticket])
    tokens = turn.wait()[0]
    assert (
        sum(read) - before == 1 + 3
    )  # the last token of the answer was never read, and three more
    other = Client([9 + i % 190 for i in range(90)], asked(0, 0), "plain", limit=3)
    engine.submit([other.ticket])
    other.wait()
    engine.stop()
    held = engine.prefixes
    assert held is not None
    assert sum(each.lengths[0] for each in held._held) <= 100
    assert tokens == alone(turn)


def test_queue_and_deadline(engine: Engine) -> None:
    """Prevents a queue without end, and clients that are kept waiting in silence."""
    full = Engine(decoders(), batch_size=1, queue=1, piece=16, prefix_tokens=0)  # not started
    tickets = [Client([5], asked(0, 0), "plain", limit=1).ticket for _ in range(3)]
    full.submit(tickets[:2])
    with pytest.raises(BusyError, match="2 prompts are waiting, and 1 may"):
        full.submit(tickets[2:])
    late = Client([5], asked(0, 0), "plain", limit=900, deadline=time.monotonic() + 0.2)
    engine.submit([late.ticket])
    tokens, _, error = late.wait()
    assert "the time for this request is over" in error
    assert tokens == alone(Client([5], asked(0, 0), "plain", limit=len(tokens) or 1))[: len(tokens)]


def test_settings_are_refused_before_they_are_queued(engine: Engine) -> None:
    """Prevents that a request which decoding refuses ends the thread that serves all."""
    context = subject().base.config.max_position_embeddings
    client = Client([5] * context, asked(0, 0), "plain", limit=9)
    with pytest.raises(ConfigError, match="the base model's context is"):
        engine.submit([client.ticket])
    assert engine.is_alive()


def test_a_broken_pass_ends_its_rows_and_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a server that hangs after memory was full once."""
    heads: Any = decoders()["heads"].drafter

    def full(state: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(type(heads), "propose", lambda self, state: full(state))
    bad = Client([5, 6], asked(0, 0), "heads", limit=20)
    good = Client([5, 6], asked(0, 0), "plain", limit=20)
    engine.submit([bad.ticket, good.ticket])
    assert bad.wait()[2] == "OutOfMemoryError: no room"
    assert good.wait()[0] == alone(good)
