"""A server that is busy, broken, slow or gone, played by a thread of the test."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from typing import Any

import pytest

from specheads.config import ConfigError, RunError
from specheads.regeneration import endpoint
from specheads.regeneration.answers import Outcome, Sampling, record_seed
from specheads.regeneration.dialogue import dialogue
from specheads.regeneration.endpoint import ask_server
from specheads.system import client as client_module
from specheads.system.client import Client, ServerError

# what a server does with its nth request (from 0): status, body, headers; None: it never answers
Script = Callable[[int, str, dict[str, Any]], tuple[int, Any, dict[str, str]] | None]


@dataclass
class Drip:
    """Bytes of an answer, its header among them, and the seconds between them."""

    pieces: Iterable[bytes]
    pause: float = 0.0


class Server:
    """A scripted server; ``seen`` holds path, body and headers of every request."""

    def __init__(self, script: Script) -> None:
        self.seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.at_once = self.most_at_once = self.sent = 0
        self.closing = threading.Event()
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"{}")
                with lock:
                    number = len(outer.seen)
                    outer.seen.append((self.path, body, dict(self.headers)))
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                try:
                    found = script(number, self.path, body)
                finally:
                    with lock:  # before the answer, behind which the next request may come at once
                        outer.at_once -= 1
                self.reply(found)

            do_GET = do_POST  # noqa: N815

            def reply(self, found: tuple[int, Any, dict[str, str]] | None) -> None:
                if found is None:
                    outer.closing.wait(600)
                    return
                status, content, headers = found
                if isinstance(content, Drip):
                    self.drip(content)
                    return
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for key, value in ({"Content-Length": str(len(data))} | headers).items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(data)

            def drip(self, content: Drip) -> None:
                with contextlib.suppress(OSError):  # the client has gone
                    for piece in content.pieces:
                        self.wfile.write(piece)
                        outer.sent += len(piece)
                        outer.closing.wait(content.pause)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop; requests that hang are let go."""
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Script], Server]]:
    """Return a function that starts a scripted server."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    servers: list[Server] = []

    def start(script: Script) -> Server:
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ok(body: dict[str, Any], reason: str = "stop") -> tuple[int, Any, dict[str, str]]:
    """Return a good answer: to which messages or prompt it was given, in words."""
    usage = {"completion_tokens": 7}
    if "prompt" in body:
        choice: dict[str, Any] = {"text": f"<{body['prompt']}>"}
    else:
        said = " ".join(m["content"] for m in body["messages"])
        choice = {"message": {"role": "assistant", "content": f"<{said}>"}}
    return 200, {"choices": [choice | {"finish_reason": reason}], "usage": usage}, {}


def fails(code: int, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Return an error."""
    return code, {"error": {"message": f"error {code}"}}, headers


def client_of(server: Server, **settings: Any) -> Client:
    """Return a client that does not wait for long."""
    return Client(server.url, **({"timeout": 5.0, "retries": 3, "pause": 0.01} | settings))


def chats(*questions: str) -> list[dict[str, Any]]:
    """Return records with one question each."""
    return [
        {"id": q, "kind": "chat", "messages": [{"role": "user", "content": q}]} for q in questions
    ]


def ask(
    server: Server, records: list[dict[str, Any]], concurrency: int = 2, **settings: Any
) -> Outcome:
    """Answer all records and return everything that became of them."""
    sampling = Sampling(0.5, 0, 0.9, seed=3, max_new_tokens=11)
    client, total = client_of(server, **settings), Outcome()
    for outcome in ask_server(client, "m", sampling, records, {"model": "m"}, concurrency):
        total.answered += outcome.answered
        total.quarantined += outcome.quarantined
        total.num_tokens += outcome.num_tokens
    return total


def test_settings_reach_the_server(serve: Callable[[Script], Server]) -> None:
    """Without them a server answers with its own temperature and stops where it likes."""
    server = serve(lambda n, path, body: ok(body))
    pair = {"id": "p", "kind": "completion", "prompt": "def", "completion": "old"}
    total = ask(server, [*chats("a"), pair])
    answered = {record["id"]: record for record in total.answered}
    assert answered["p"]["completion"] == "<def>"
    assert answered["a"]["messages"][-1] == {"role": "assistant", "content": "<a>"}
    assert answered["a"]["generation"] == {
        "model": "m", "finish_reason": ["stop"], "num_tokens": [7],
    }  # fmt: skip
    assert total.num_tokens == 14 and not total.quarantined
    sent = {path: body for path, body, _ in server.seen}
    common = {"model": "m", "temperature": 0.5, "top_p": 0.9, "max_tokens": 11, "stream": True}
    common["stream_options"] = {"include_usage": True}
    assert sent["/v1/chat/completions"] == common | {
        "seed": record_seed(3, "a"), "messages": [{"role": "user", "content": "a"}],
    }  # fmt: skip
    assert sent["/v1/completions"] == common | {"seed": record_seed(3, "p"), "prompt": "def"}


def test_turns_follow_each_other(serve: Callable[[Script], Server]) -> None:
    """A second question is about the new first answer; the old one was another model's."""
    server = serve(lambda n, path, body: ok(body))
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)]
    total = ask(server, [{"id": "x", "kind": "chat", "messages": messages}])
    said = [m["content"] for m in total.answered[0]["messages"]]
    assert said == ["0", "1", "<0 1>", "3", "<0 1 <0 1> 3>"]
    assert total.answered[0]["generation"]["num_tokens"] == [7, 7]


def test_requests_run_at_one_time(serve: Callable[[Script], Server]) -> None:
    """One request after the other would take a server's whole speed away."""
    gate = threading.Barrier(4, timeout=600)

    def script(n: int, path: str, body: dict[str, Any]) -> Any:
        gate.wait()  # let go only when four are there
        return ok(body)

    server = serve(script)
    questions = [f"q{i}" for i in range(12)]
    total = ask(server, chats(*questions), concurrency=4)
    assert sorted(r["id"] for r in total.answered) == sorted(questions)
    assert server.most_at_once == 4 and len(server.seen) == 12


@pytest.mark.parametrize(
    "failure",
    [fails(429), fails(503), (200, b"<html>busy</html>", {}), (200, [], {}), None],
    ids=["429", "503", "no JSON", "no object", "silence"],
)
def test_what_may_pass_is_tried_again(
    serve: Callable[[Script], Server], failure: tuple[int, Any, dict[str, str]] | None
) -> None:
    """A busy minute of a server must not cost a record."""
    server = serve(lambda n, path, body: failure if n < 2 else ok(body))
    total = ask(server, chats("a"), concurrency=1, timeout=0.5 if failure is None else 600)
    assert len(total.answered) == 1 and not total.quarantined
    # on a busy machine the right answer may come too late as well, and be asked for again
    assert len(server.seen) == 3 or (failure is None and len(server.seen) > 3)


def test_pauses_grow_and_obey(serve: Callable[[Script], Server]) -> None:
    """Without growing pauses a crowd of clients keeps a struggling server down."""
    pauses: list[float] = []

    class Noting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            return False

    server = serve(lambda n, path, body: fails(429, **({"Retry-After": "9"} if n == 2 else {})))
    client = client_of(server, pause=1.0, retries=3)
    client.stopped = Noting()
    with pytest.raises(ServerError, match="HTTP 429 .*error 429"):
        client.call("/x")
    assert len(pauses) == 3 and len(server.seen) == 4
    assert 0.5 <= pauses[0] <= 1.5 and 1 <= pauses[1] <= 3 and pauses[2] == 9
    del pauses[:]
    client.retries = 12
    with pytest.raises(ServerError):
        client.call("/x")
    assert 30 <= pauses[-1] <= 90  # some bound


def test_a_record_that_fails_goes_to_quarantine(serve: Callable[[Script], Server]) -> None:
    """One poisoned record must neither end a run of days nor vanish from the count."""

    def script(n: int, path: str, body: dict[str, Any]) -> Any:
        question = body["messages"][0]["content"]
        if question == "long":
            return ok(body, "length")
        if question == "filtered":
            return ok(body, "content_filter")
        if question == "empty":
            return 200, {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}, {}
        if question == "shapeless":
            return 200, {"choices": []}, {}
        return {"broken": fails(500), "bad": fails(400)}.get(question, ok(body))

    server = serve(script)
    names = ["one", "long", "filtered", "empty", "shapeless", "broken", "bad", "two"]
    system = {"id": "alone", "kind": "chat", "messages": [{"role": "system", "content": "x"}]}
    total = ask(server, [*chats(*names), system], retries=1)
    assert sorted(r["id"] for r in total.answered) == ["one", "two"]
    assert {q.row["id"]: q.reason for q in total.quarantined} == {
        "long": "truncated",
        "filtered": "unfinished",
        "empty": "empty",
        "shapeless": "refused",
        "broken": "server",
        "bad": "refused",
        "alone": "role",
    }
    asked = [body["messages"][0]["content"] for _, body, _ in server.seen]
    assert asked.count("broken") == 2 and asked.count("bad") == 1


def answer(**parts: Any) -> dict[str, Any]:
    """Return a good answer with other parts."""
    message = {"role": "assistant", "content": parts.pop("content", "yes")}
    return {"choices": [{"message": message, "finish_reason": "stop"}], **parts}


MALFORMED: dict[str, Any] = {
    "nested too deeply": b"[" * 200_000,
    "nested almost too deeply": b'{"choices":' + b"[" * 900 + b"]" * 900 + b"}",
    "a digit too many": b'{"choices": ' + b"1" * 5000 + b"}",
    "content: object": answer(content={"text": "yes"}),
    "content: number": answer(content=7),
    "content: false": answer(content=False),
    "parts: words": answer(content=["yes"]),
    "parts: no text": answer(content=[{"type": "text"}]),
    "parts: text of a number": answer(content=[{"type": "text", "text": 7}]),
    "count: text": answer(usage={"completion_tokens": "3"}),
    "count: list": answer(usage={"completion_tokens": [1]}),
    "count: object": answer(usage={"completion_tokens": {}}),
    "count: true": answer(usage={"completion_tokens": True}),
    "count: fraction": answer(usage={"completion_tokens": 1.5}),
    "count: negative": answer(usage={"completion_tokens": -1}),
    "count: beyond a float": answer(usage={"completion_tokens": 10**400}),
    "usage: list": answer(usage=[3]),
    "choices: object": {"choices": {"0": 1}},
    "choices: text": {"choices": ["x"]},
    "message: text": {"choices": [{"message": "yes", "finish_reason": "stop"}]},
    "reason: object": {"choices": [{"message": {"content": "yes"}, "finish_reason": {"a": 1}}]},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_costs_one_record(serve: Callable[[Script], Server], name: str) -> None:
    """One odd answer would end a run of days with a traceback, or be learned as a text."""

    def script(n: int, path: str, body: dict[str, Any]) -> Any:
        odd = body["messages"][0]["content"] == "odd"
        return (200, MALFORMED[name], {}) if odd else ok(body)

    total = ask(serve(script), chats("one", "odd", "two"), retries=1)
    assert sorted(record["id"] for record in total.answered) == ["one", "two"]
    (bad,) = total.quarantined
    assert bad.row["id"] == "odd" and len(bad.detail) < 300
    assert bad.reason in ("server", "refused", "unfinished")
    assert f"{total.num_tokens:,.0f}" == "14"


def test_half_a_character_reaches_the_server(serve: Callable[[Script], Server]) -> None:
    """Half of a surrogate pair, which JSON may hold and UTF-8 may not, would end the run."""
    server = serve(lambda n, path, body: ok({"messages": [{"content": "fine"}]}))
    assert len(ask(server, chats("a\ud83d")).answered) == 1
    assert server.seen[0][1]["messages"][0]["content"] == "a\ud83d"


def test_parts_of_content_are_one_text(serve: Callable[[Script], Server]) -> None:
    """Servers may give an answer in parts; each such record would be lost."""
    parts = [
        {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes, "},
        {"type": "output_text", "text": "I do."},
    ]  # fmt: skip
    server = serve(lambda n, path, body: (200, answer(content=parts), {}))
    total = ask(server, chats("a"))
    assert total.answered[0]["messages"][-1] == {"role": "assistant", "content": "Yes, I do."}


def events(body: dict[str, Any], *parts: Any, reason: str = "stop") -> list[bytes]:
    """Return an answer as servers stream it: the header, an event for every part, and the end.

    Args:
        body: the request.
        parts: texts, or whole events.
        reason: why it ended.
    """
    told, is_chat = [], "messages" in body
    for part in parts:
        said = {"delta": {"content": part}} if is_chat else {"text": part}
        token = {"token": f"token_id:{len(told)}", "logprob": -0.5}
        logprobs: dict[str, Any] = {"content": [token | {"top_logprobs": [token]}]}
        if not is_chat:
            logprobs = {"tokens": [token["token"]], "top_logprobs": [{token["token"]: -0.5}]}
        choice = said | {"logprobs": logprobs, "finish_reason": None}
        told.append({"choices": [choice], "usage": None} if isinstance(part, str) else part)
    last = {"delta": {}} if is_chat else {"text": ""}
    told.append({"choices": [last | {"finish_reason": reason, "logprobs": None}]})
    told.append({"choices": [], "usage": {"completion_tokens": 9}})
    lines = [b"data: %s\n\n" % json.dumps(each).encode() for each in told]
    kind = b"Content-Type: text/event-stream; charset=utf-8\r\n"
    return [b"HTTP/1.1 200 OK\r\n%s\r\n" % kind, *lines, b": kept alive\n\n", b"data: [DONE]\n\n"]


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_streamed_answer_is_as_a_whole_one(
    serve: Callable[[Script], Server], is_chat: bool
) -> None:
    """Answers longer than ``timeout`` would be ended and asked for again, without end."""
    pieces = ["Yes", ", ", "\u2028\u00e9", "\n\ndata: no", "."]

    def script(n: int, path: str, body: dict[str, Any]) -> Any:
        return 200, Drip(events(body, *pieces, reason="length"), pause=0.1), {}

    pair = {"id": "p", "kind": "completion", "prompt": "def", "completion": "old"}
    talk = dialogue(chats("a")[0] if is_chat else pair)
    sampling = Sampling(max_new_tokens=11, logprobs=1)
    client = client_of(serve(script), timeout=0.5, retries=0)
    found = endpoint.next_answer(client, "m", sampling, talk)
    assert found.text == "".join(pieces)
    assert (found.finish_reason, found.num_tokens) == ("length", 9)
    assert list(found.likely) == [(place, [place], [-0.5]) for place in range(5)]


BROKEN: dict[str, Callable[[dict[str, Any]], list[bytes]]] = {
    "no end": lambda body: events(body, "Yes")[:-1],
    "nothing": lambda body: events(body)[:1],
    "an error": lambda body: events(body, "Yes", {"error": {"message": "out of memory"}}),
    "no object": lambda body: events(body, [1]),
    "no choices": lambda body: events(body, {"choices": None}),
    "no text": lambda body: events(body, {"choices": [{"delta": {"content": 7}}]}),
    "no JSON": lambda body: [*events(body, "Yes")[:2], b"data: {\n\n", b"data: [DONE]\n\n"],
    "too deep": lambda body: [events(body)[0], b"data: " + b"[" * 200_000 + b"\n\n"],
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_broke_off_is_asked_for_again(
    serve: Callable[[Script], Server], name: str
) -> None:
    """Half of a sentence, from a server that ran out of memory, would be learned as an answer."""

    def script(n: int, path: str, body: dict[str, Any]) -> Any:
        return 200, Drip(BROKEN[name](body) if n < 2 else events(body, "Yes", ".")), {}

    server = serve(script)
    total = ask(server, chats("a"))
    assert total.answered[0]["messages"][-1]["content"] == "Yes." and len(server.seen) == 3


HEADER = b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HEADER[:20], HEADER])
def test_a_silent_server_ends_a_request(serve: Callable[[Script], Server], sent: bytes) -> None:
    """A server that answers no more would hold a worker, and so the run, for ever."""
    server = serve(lambda n, path, body: (200, Drip([sent, b" "], pause=60), {}))
    with pytest.raises(ServerError, match=r"nothing came for timeout=0\.2 seconds") as caught:
        client_of(server, timeout=0.2, retries=0).call("/x", {})
    assert caught.value.transient


@pytest.mark.parametrize("code", [200, 400])
def test_a_body_is_read_up_to_a_limit(
    serve: Callable[[Script], Server], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A body without end would fill the memory, and the system would end the run."""
    monkeypatch.setattr(client_module, "_MOST_BYTES", 1 << 20, raising=False)
    head = b"HTTP/1.1 %d Well\r\n\r\n" % code
    drip = Drip([head, *repeat(b" " * (1 << 16), 1 << 9)])  # 32 MiB
    server = serve(lambda n, path, body: (200, drip, {}))
    with pytest.raises(ServerError, match="more than 1 MiB came back|HTTP 400") as caught:
        client_of(server, timeout=60).call("/x", {})
    assert server.sent < 1 << 25 and not caught.value.transient and len(server.seen) == 1


def test_a_malformed_redirection_is_refused(serve: Callable[[Script], Server]) -> None:
    """A place that is no address would end the run with a traceback."""
    server = serve(lambda n, path, body: fails(302, Location="http://[bad"))
    with pytest.raises(ServerError, match="HTTP 302") as caught:
        client_of(server).call("/x", {})
    assert caught.value.hopeless


def test_a_server_that_never_answers_ends_the_run(serve: Callable[[Script], Server]) -> None:
    """A wrong port or a dead server would put a whole data set into quarantine, slowly."""
    server = serve(lambda n, path, body: fails(500))
    client, records, outcomes = client_of(server, retries=1), chats(*map(str, range(500))), []
    with pytest.raises(RunError, match=r"never answered: HTTP 500 .*error 500"):
        outcomes += list(ask_server(client, "m", Sampling(), records, {}, 3))
    assert len(server.seen) < 100 and not any(o.quarantined for o in outcomes)
    server.close()
    with pytest.raises(RunError, match="never answered: .*refused"):
        ask(server, chats("a"), retries=0)
    with pytest.raises(RunError, match="/models: .*refused"):
        client_of(server, retries=0).first_model()


def test_a_server_that_dies_ends_the_run(serve: Callable[[Script], Server]) -> None:
    """What is left must stay left: to be asked when the server is back, not quarantined."""
    server = serve(lambda n, path, body: ok(body) if n < 10 else fails(502))
    total, records, client = Outcome(), chats(*map(str, range(500))), client_of(server, retries=0)
    with pytest.raises(RunError, match="stopped answering: HTTP 502"):
        for outcome in ask_server(client, "m", Sampling(), records, {}, 2):
            total.answered += outcome.answered
            total.quarantined += outcome.quarantined
    assert len(total.answered) == 10 and len(server.seen) < 100
    assert all(item.reason == "server" for item in total.quarantined)


@pytest.mark.parametrize("code", [401, 404, 302])
def test_what_will_never_do_ends_the_run_at_once(
    serve: Callable[[Script], Server], code: int
) -> None:
    """With a wrong key or path every record fails alike; and a redirection could take the key."""
    server = serve(lambda n, path, body: fails(code, Location="http://127.0.0.1:9/v1"))
    with pytest.raises(RunError, match=f"refuses all requests: HTTP {code}"):
        ask(server, chats(*map(str, range(50))), concurrency=2)
    assert len(server.seen) <= 2


def test_the_key_is_sent_and_nowhere_else(
    serve: Callable[[Script], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers repeat a wrong key in their message, and messages end in logs and files."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server = serve(lambda n, path, body: (400, {"error": "no sk-secret here"}, {}))
    with pytest.raises(ServerError) as caught:
        client_of(server).call("/x", {})
    assert server.seen[0][2]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in str(caught.value) and "no *** here" in str(caught.value)
    for url in ("localhost:8000", "ftp://x/v1", "http://"):
        with pytest.raises(ConfigError, match="endpoint must be like http"):
            Client(url, timeout=5, retries=0)
    with pytest.raises(ConfigError, match="must not hold a password") as refused:
        Client("http://me:hidden@host/v1", timeout=5, retries=0)
    assert "hidden" not in str(refused.value)


def test_the_first_model_is_asked_for(serve: Callable[[Script], Server]) -> None:
    """A server of one model should not need to be told its long name."""
    server = serve(lambda n, path, body: (200, {"data": [{"id": "org/m"}, {"id": "b"}]}, {}))
    assert client_of(server).first_model() == "org/m" and server.seen[0][0] == "/v1/models"
    odd: list[Any] = [1, "id", None, ["id"], {"id": 7}, {"id": ""}, {"name": "x"}]
    server = serve(lambda n, path, body: (200, {"data": [*odd, {"id": "c"}]}, {}))
    assert client_of(server).first_model() == "c"
    for data in ([], odd, {}, {"0": 1}, "id", None):
        server = serve(lambda n, path, body, data=data: (200, {"data": data}, {}))
        with pytest.raises(RunError, match="lists no models; give endpoint_model="):
            client_of(server).first_model()


def test_stopping_does_not_wait(serve: Callable[[Script], Server]) -> None:
    """Ctrl-C during a pause of a minute, or a slow answer, must not hang."""
    server = serve(lambda n, path, body: ok(body) if n == 0 else None)
    client, start = client_of(server, timeout=600), time.monotonic()
    outcomes = ask_server(client, "m", Sampling(), chats("a", "b", "c"), {}, 2)
    assert len(next(outcomes).answered) == 1
    outcomes.close()  # type: ignore[attr-defined]
    assert client.stopped.is_set() and time.monotonic() - start < 300
