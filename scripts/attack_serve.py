"""What clients should not do to a server, and what it answers; run by bench_serve.py."""

import asyncio
import contextlib
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def said(answer: bytes) -> str:
    """Return status and message of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ")[1].decode() if head.startswith(b"HTTP") else "closed"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"{status}: {json.loads(body)['error']['message']}"
    return status


def raw(port: int, content: bytes, wait: float = 10) -> str:
    """Send bytes; return what comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as client:
        found = b""
        with contextlib.suppress(OSError):
            client.sendall(content)
            while part := client.recv(65536):
                found += part
                if b"}}" in found or len(found) > 1 << 16:
                    break
        return said(found)


def posted(port: int, path: str, body: Any) -> str:
    """Post JSON, or bytes; return status and message."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(
        f"http://127.0.0.1:{port}{path}",
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    try:
        found = answer.json()
    except ValueError:
        return f"{answer.status_code}: NO JSON"
    return f"{answer.status_code}: {found['error']['message'] if 'error' in found else 'an answer'}"


def huge(port: int) -> str:
    """Send a body of 1 GB, or begin to."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        found = b""
        with contextlib.suppress(OSError):
            for _ in range(1 << 14):  # 64 KiB each
                client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        with contextlib.suppress(OSError):
            found = client.recv(65536)
        return said(found)


def slow(port: int) -> str:
    """Read an answer a byte a second, for some seconds."""
    body = json.dumps({"prompt": "def f(a):", "max_tokens": 200, "stream": True, "temperature": 0})
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        found = b""
        for _ in range(5):
            found += client.recv(1)
            time.sleep(1)
        return f"{found!r} of an answer, at its pace"


def leaves(port: int) -> str:
    """Hang up in the middle of an answer."""
    body = json.dumps({"prompt": "def f(a):", "max_tokens": 900, "stream": True, "temperature": 0})
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        client.recv(300)
    end = time.monotonic() + 10
    while running(port) and time.monotonic() < end:
        time.sleep(0.05)
    return f"its row was free after {10 - max(0, end - time.monotonic()):.1f} s"


def running(port: int) -> float:
    """Return how many prompts have rows."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
    return next(
        float(line.split()[1])
        for line in text.splitlines()
        if line.startswith("specheads_running ")
    )


async def _many(port: int, num: int) -> Counter[str]:
    gate = asyncio.Semaphore(2000)  # of connections that are being opened

    async def one() -> str:
        async with gate:
            try:
                reader, writer = await asyncio.wait_for(
                    asyncio.open_connection("127.0.0.1", port), 30
                )
                writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                await writer.drain()
                found = await asyncio.wait_for(reader.read(64), 30)
                writer.close()
                return found[9:12].decode() or "closed"
            except (OSError, TimeoutError) as error:
                return type(error).__name__

    return Counter(await asyncio.gather(*(one() for _ in range(num))))


def many(port: int) -> str:
    """Open 10,000 connections."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = asyncio.run(_many(port, 10_000))
    return ", ".join(f"{name}: {count}" for name, count in found.most_common())


def held(port: int) -> str:
    """Hold idle connections; see that others are answered, and that these are closed."""
    idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(900)]
    start = time.monotonic()
    found = httpx.get(f"http://127.0.0.1:{port}/health", timeout=30)
    took, closed = time.monotonic() - start, 0
    for each in idle:
        each.settimeout(15)
        with contextlib.suppress(OSError):
            closed += each.recv(1) == b""
        each.close()
    return f"{found.status_code} to others, after {took:.2f} s; {closed} were closed"


CASES: dict[str, Callable[[int], str]] = {
    "wrong JSON": lambda port: posted(port, "/v1/completions", b'{"prompt": '),
    "invalid UTF-8": lambda port: posted(port, "/v1/completions", b'{"prompt": "\xff\xfe\xfd"}'),
    "half a surrogate pair": lambda port: posted(port, "/v1/completions", b'{"prompt": "\\ud800"}'),
    "a number that is none": lambda port: posted(
        port, "/v1/completions", b'{"prompt": "a", "temperature": NaN}'
    ),
    "nested 100,000 deep": lambda port: posted(port, "/v1/completions", b"[" * 100_000),
    "an unknown role": lambda port: posted(
        port, "/v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}
    ),
    "a role out of turn": lambda port: posted(
        port, "/v1/chat/completions", {"messages": [{"role": "assistant", "content": "a"}]}
    ),
    "a context too long": lambda port: posted(port, "/v1/completions", {"prompt": [5] * 20_000}),
    "no token": lambda port: posted(port, "/v1/completions", {"prompt": [[]]}),
    "n=1000": lambda port: posted(port, "/v1/completions", {"prompt": "a", "n": 1000}),
    "another model": lambda port: posted(
        port, "/v1/completions", {"prompt": "a", "model": "../../etc/passwd\x1b[2J"}
    ),
    "a stop of 10,000 strings": lambda port: posted(
        port, "/v1/completions", {"prompt": "a", "stop": ["x"] * 10_000, "max_tokens": 2}
    ),
    "no length": lambda port: raw(port, HEAD + b"\r\n"),
    "a length that is none": lambda port: raw(port, HEAD + b"Content-Length: many\r\n\r\n"),
    "no HTTP": lambda port: raw(port, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"),
    "a path of 100,000 bytes": lambda port: raw(
        port, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"
    ),
    "a body said to be 1 GB": lambda port: raw(port, HEAD + b"Content-Length: 1073741824\r\n\r\n"),
    "a body of 1 GB": huge,
    "a body that never comes": lambda port: raw(port, HEAD + b"Content-Length: 90\r\n\r\n{", 10),
    "a reader of a byte a second": slow,
    "one that hangs up": leaves,
    "900 idle connections": held,
    "10,000 connections": many,
}


def every(port: int, pid: int) -> dict[str, str]:
    """Try all; after each an ordinary question has to be answered as before."""
    ask = {"prompt": "def area(width, height):", "max_tokens": 12, "temperature": 0}

    def ordinary() -> str:
        url = f"http://127.0.0.1:{port}/v1/completions"
        for _ in range(50):
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.post(url, json=ask, timeout=30)
                if answer.status_code == 200:
                    return str(answer.json()["choices"][0]["text"])
            time.sleep(0.2)
        return "no answer"

    first, found = ordinary(), {}
    for name, case in CASES.items():
        start = time.monotonic()
        answer = case(port)
        if ordinary() != first or not Path(f"/proc/{pid}").exists():
            answer += "; AND THE SERVER IS ANOTHER"
        found[name] = answer
        print(f"{name}: {answer} ({time.monotonic() - start:.1f} s)", flush=True)
    return found
