"""OpenAI's own client against the server: what it is told, and the errors that it raises."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from specheads.config import RunError, ServeConfig
from specheads.config.commands import TextSettings
from specheads.data.chat import Encoder
from specheads.decoding.accept import Acceptance
from specheads.decoding.conversation import text_of
from specheads.decoding.generate import decode_prompts
from specheads.serve import listening
from tests.serve.serving import served
from tests.serve.test_engine import decoders, subject

CODE = "def area(width, height):\n    return"
TALK: Any = [{"role": "user", "content": "Add type hints:\ndef f(a): return a"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Return the address of a server."""
    with served(max_body=20_000, body_seconds=1.0, deadline=60) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    """Return OpenAI's client."""
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


def expected(ids: list[int], limit: int, temperature: float = 0, seed: int = 0) -> list[int]:
    """Return what generate writes."""
    settings = TextSettings(checkpoint="", temperature=temperature, seed=seed)
    return decode_prompts(decoders()["plain"], settings, [ids], limit).new_tokens


def words(tokens: list[int]) -> str:
    """Return their text."""
    return text_of(subject().tokenizer, tokens)


def prompt_ids() -> list[int]:
    """Return the tokens of CODE."""
    return Encoder(subject().tokenizer).prompt({"id": "p", "kind": "prompt", "text": CODE})


def test_models(client: openai.OpenAI) -> None:
    """Prevents that clients which ask for a model first find none."""
    (model,) = client.models.list().data
    assert model.id == "hydra"
    assert model.model_extra is not None
    assert model.model_extra["drafters"] == ["heads", "suffix", "plain"]


@pytest.mark.parametrize("drafter", ["heads", "suffix", "plain"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_completion_is_what_generate_gives(
    client: openai.OpenAI, drafter: str, temperature: float
) -> None:
    """Prevents tokens that are another seed's, and usage that is charged wrongly."""
    ids = prompt_ids()
    more = {"drafter": drafter}
    found = client.completions.create(
        model="hydra", prompt=CODE, max_tokens=30, temperature=temperature, seed=7, extra_body=more
    )
    tokens = expected(ids, 30, temperature, 7)
    (choice,) = found.choices
    assert choice.text == words(tokens)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), len(tokens))
    assert choice.finish_reason == ("length" if len(tokens) == 30 else "stop")
    streamed = client.completions.create(
        model="hydra", prompt=ids, max_tokens=30, temperature=temperature, seed=7, stream=True,
        stream_options={"include_usage": True}, extra_body=more,
    )  # fmt: skip
    events = list(streamed)
    assert "".join(e.choices[0].text for e in events if e.choices) == words(tokens)
    assert events[-1].usage == found.usage


def test_a_chat(client: openai.OpenAI) -> None:
    """Prevents another prompt than the template's, and a stream without its role or its end."""
    encoder = Encoder(subject().tokenizer)
    ids = encoder.prompt({"id": "c", "messages": TALK})
    tokens = expected(ids, 40)
    found = client.chat.completions.create(
        model="hydra", messages=TALK, temperature=0, max_tokens=40
    )
    assert found.choices[0].message.content == words(tokens)
    stream = client.chat.completions.create(
        model="hydra", messages=TALK, temperature=0, max_completion_tokens=40, stream=True
    )
    events = [event.choices[0] for event in stream]
    assert events[0].delta.role == "assistant"
    assert "".join(event.delta.content or "" for event in events) == words(tokens)
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason in ("stop", "length")


def test_choices_are_seeds_that_follow(client: openai.OpenAI) -> None:
    """Prevents n equal answers, and answers under one another's number."""
    found = client.completions.create(
        model="hydra", prompt=[CODE, "class A:"], max_tokens=12, temperature=0.9, seed=3, n=2
    )
    ids = Encoder(subject().tokenizer).prompt({"id": "p", "kind": "prompt", "text": "class A:"})
    wanted = [expected(p, 12, 0.9, s) for p in (prompt_ids(), ids) for s in (3, 4)]
    assert [choice.text for choice in found.choices] == list(map(words, wanted))
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_not_shown(client: openai.OpenAI, stream: bool) -> None:
    """Prevents that a stop string, or a piece of one, reaches the reader of a stream."""
    whole = words(expected(prompt_ids(), 40))
    stop = whole[8:13]
    found: Any = client.completions.create(
        model="hydra", prompt=CODE, max_tokens=40, temperature=0, stop=[stop, "§"], stream=stream
    )
    if stream:
        events = list(found)
        text, reason = (
            "".join(e.choices[0].text for e in events),
            events[-1].choices[0].finish_reason,
        )
    else:
        text, reason = found.choices[0].text, found.choices[0].finish_reason
    assert text == whole[: whole.find(stop)]
    assert reason == "stop"


def test_logprobs(client: openai.OpenAI) -> None:
    """Prevents probabilities of other tokens than those beside which they stand."""
    ids = prompt_ids()
    tokens = expected(ids, 6, 0.8, 5)
    found = client.completions.create(
        model="hydra", prompt=ids, max_tokens=6, temperature=0.8, seed=5, logprobs=2,
        extra_body={"return_tokens_as_token_ids": True},
    )  # fmt: skip
    said = found.choices[0].logprobs
    assert said is not None
    assert said.tokens == [f"token_id:{token}" for token in tokens]
    import torch

    sequence = torch.tensor([[*ids, *tokens]])
    with torch.inference_mode():
        logits = subject().base(sequence).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    best = logits.topk(2)
    for i, token in enumerate(tokens):
        assert said.token_logprobs is not None
        assert said.top_logprobs is not None
        assert said.token_logprobs[i] == pytest.approx(float(logits[i, token]), abs=1e-4)
        names = {f"token_id:{number}" for number in best.indices[i].tolist()}
        assert set(said.top_logprobs[i]) == names
    chat = client.chat.completions.create(
        model="hydra", messages=TALK, max_tokens=4, temperature=0, logprobs=True, top_logprobs=1
    )
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content.content)


def test_penalties_and_bias(client: openai.OpenAI) -> None:
    """Prevents settings that are taken and ignored."""
    first = expected(prompt_ids(), 1)[0]
    ask: Any = {"model": "hydra", "prompt": CODE, "temperature": 0}
    banned = client.completions.create(**ask, max_tokens=1, logit_bias={str(first): -100})
    assert banned.choices[0].text != words([first])
    repeated = {"prompt": "a b a b a b a b", "max_tokens": 24}
    plain, held = (
        client.completions.create(**(ask | repeated), frequency_penalty=p).choices[0].text
        for p in (0, 2)
    )
    assert len(set(held)) >= len(set(plain))
    assert held != plain


def test_steps_tell_the_tree(url: str) -> None:
    """Prevents a race whose colours are not the steps, or whose tree is another step's."""
    body = {
        "prompt": CODE,
        "max_tokens": 20,
        "temperature": 0,
        "stream": True,
        "return_steps": True,
    }
    lines = httpx.post(url + "/v1/completions", json=body, timeout=60).text.split("\n\n")
    steps = [json.loads(each[6:])["choices"][0]["step"] for each in lines if each[6:7] == "{"]
    assert [t for step in steps for t in step["tokens"]] == expected(prompt_ids(), 20)
    for before, step in zip(steps, steps[1:], strict=False):
        taken = [text for _, text, accepted in step["tree"] if accepted]
        own = [words([token]) for token in [before["tokens"][-1], *step["tokens"][:-1]]]
        assert taken[: len(own)] == own
        assert [above for above, _, _ in step["tree"]][0] == -1


BAD: dict[str, tuple[str, Any, int, str]] = {
    "no JSON": ("/v1/completions", b"{", 400, "JSON"),
    "no UTF-8": ("/v1/completions", b'{"prompt": "\xff\xfe"}', 400, "body"),
    "half a pair": ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "prompt"),
    "no object": ("/v1/completions", b"[1]", 400, "body"),
    "no prompt": ("/v1/completions", {}, 400, "prompt"),
    "empty prompt": ("/v1/completions", {"prompt": []}, 400, "prompt"),
    "beyond the vocabulary": ("/v1/completions", {"prompt": [10**9]}, 400, "vocabulary"),
    "another model": (
        "/v1/completions",
        {"prompt": "a", "model": "gpt\x1b[2J"},
        404,
        "is not here",
    ),
    "another drafter": ("/v1/completions", {"prompt": "a", "drafter": "x"}, 400, "drafter"),
    "n=1000": ("/v1/completions", {"prompt": "a", "n": 1000}, 400, "n: "),
    "too many": ("/v1/completions", {"prompt": ["a"] * 9, "n": 2}, 400, "choices"),
    "an unknown key": ("/v1/completions", {"prompt": "a", "tools": []}, 400, "tools"),
    "an empty stop": ("/v1/completions", {"prompt": "a", "stop": ["b", ""]}, 400, "stop"),
    "temperature": ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    "too long": ("/v1/completions", {"prompt": [5] * 5000}, 400, "context"),
    "a role": (
        "/v1/chat/completions",
        {"messages": [{"role": "king", "content": "a"}]},
        400,
        "role",
    ),
    "an order": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "content": "a"}]},
        400,
        "messages",
    ),
    "an image": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "messages",
    ),
    "no messages": ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    "a big body": ("/v1/completions", {"prompt": "a" * 30_000}, 413, "20000 bytes"),
    "a path": ("/v1/embeddings", {"input": "a"}, 404, "Not Found"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(url: str, name: str) -> None:
    """Prevents a traceback, a hang or another form of error than clients can read."""
    path, body, status, part = BAD[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(url + path, content=content, headers=headers, timeout=30)
    error = answer.json()["error"]
    assert (answer.status_code, part in error["message"]) == (status, True), error
    assert "\x1b" not in answer.text
    assert set(error) == {"message", "type", "param", "code"}
    assert httpx.get(url + "/health").json() == {"status": "ok"}


def test_a_body_that_does_not_come(url: str) -> None:
    """Prevents that a client which sends a byte a second holds a connection for good."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
                     b"Content-Type: application/json\r\n\r\n{")  # fmt: skip
        start = time.monotonic()
        assert b"408" in slow.recv(4096)
        assert time.monotonic() - start < 5


def test_the_key_is_asked_for() -> None:
    """Prevents a server that says it is locked and is not."""
    with served("secret") as url:
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.get(url + "/").status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert httpx.get(url + path).status_code == 401
            shown = {"Authorization": "Bearer secret"}
            assert httpx.get(url + path, headers=shown).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0).models.list()


def test_a_full_queue_says_when_to_come_again() -> None:
    """Prevents that a busy server lets clients pile up until memory is full."""
    with served(batch_size=1, queue=0) as url:
        body = {"prompt": CODE, "max_tokens": 400, "stream": True, "temperature": 0}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as first:
            lines = first.iter_lines()
            next(lines)
            answer = httpx.post(url + "/v1/completions", json={"prompt": "a"}, timeout=60)
            assert answer.status_code == 429
            assert answer.headers["Retry-After"] == "1"
        end = time.monotonic() + 10  # the first has hung up: its row is free soon
        while httpx.post(url + "/v1/completions", json={"prompt": "a"}).status_code == 429:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_metrics(client: openai.OpenAI, url: str) -> None:
    """Prevents a dashboard that shows nothing of what the server does."""
    client.completions.create(model="hydra", prompt=CODE, max_tokens=20, temperature=0)
    found = dict(
        line.rsplit(" ", 1)
        for line in httpx.get(url + "/metrics").text.splitlines()
        if not line.startswith("#")
    )
    tokens, steps = (
        float(found[f'specheads_{n}_total{{drafter="heads"}}']) for n in ("tokens", "steps")
    )
    assert tokens > steps > 0
    assert float(found['specheads_requests_total{status="200"}']) > 0
    assert found["specheads_running"] == "0.0"


def test_what_a_lossy_rule_writes_is_called_so() -> None:
    """Prevents answers of another distribution that nobody is told about."""
    rule = Acceptance("lossy_kl", bound=0.05)
    made = {name: replace(each, acceptance=rule) for name, each in decoders().items()}
    with served(made=made) as url:
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["lossy"] == "lossy_kl, bound 0.05"
        for drafter, label in (("heads", "lossy_kl, bound 0.05"), ("plain", None)):
            body = {"prompt": CODE, "max_tokens": 4, "drafter": drafter, "temperature": 1}
            found = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            assert found.get("lossy") == label


def test_a_port_that_is_taken() -> None:
    """Prevents minutes of loading before it shows that the port is another's."""
    with listening(ServeConfig(checkpoint="x", port=0)) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(RunError, match=f"port={port} on host=127.0.0.1 cannot be listened to"):
            listening(ServeConfig(checkpoint="x", port=port))
