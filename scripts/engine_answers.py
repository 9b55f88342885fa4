"""Let vLLM answer records over HTTP while it is refused, killed and started again.

    python scripts/engine_answers.py

``regenerate endpoint=`` asks vLLM's server as ``vllm serve`` starts it, in float32, through a proxy
that refuses every seventh request with 429. When a third of the answers is there, the server is
killed; the command ends, or waits, and is started again when the server is back. What it wrote is
held to the answers that ``regenerate`` gives with the same base here, greedily: every record once,
and the same texts.
"""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import engines
import harness

REFUSED = 7  # every so many-th request
HEADERS = ("Content-Type", "Accept-Encoding", "User-Agent")


@dataclass
class Settings(engines.Asked):
    """What is asked.

    Attributes:
        num_records: that are answered
        most: texts that may differ from our own
    """

    num_records: int = 200
    most: int = 3


@contextmanager
def refusing(port: int) -> Iterator[tuple[str, Counter[int]]]:
    """Run a proxy for a server of this machine; its address, and how often it gave which code."""
    said: Counter[int] = Counter()
    number = count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.command == "POST" and next(number) % REFUSED == 0:
                self.answer(429, {"Retry-After": "1"}, b"{}")
                return
            there = http.client.HTTPConnection("127.0.0.1", port)
            headers = {name: self.headers[name] for name in HEADERS if name in self.headers}
            try:
                there.request(self.command, self.path, body or None, headers)
                found = there.getresponse()
                kind = {"Content-Type": found.headers.get("Content-Type", "")}
                self.answer(found.status, kind, b"")
                while part := found.read1(1 << 16):
                    self.wfile.write(part)
                    self.wfile.flush()
            except (OSError, http.client.HTTPException):
                said[0] += 1  # gone: the connection ends here too
            finally:
                there.close()
                self.close_connection = True

        do_GET = do_POST  # noqa: N815

        def answer(self, code: int, headers: dict[str, str], body: bytes) -> None:
            said[code] += 1
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}/v1", said
    finally:
        proxy.shutdown()
        proxy.server_close()


def answers(path: Path) -> dict[str, str]:
    """Return the answers that a file holds, by the ids of their records."""
    text = path.read_text() if path.is_file() else ""
    records = [json.loads(line) for line in text.split("\n")[:-1]]  # the last is being written
    return {
        each["id"]: each.get("completion") or each["messages"][-1]["content"] for each in records
    }


def started(words: Sequence[str]) -> "subprocess.Popen[str]":
    """Start ``regenerate``."""
    command = [sys.executable, "-m", "specheads.regenerate", *words]
    return subprocess.Popen(command, cwd=harness.ROOT, stderr=subprocess.PIPE, text=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, kill, ask on, compare, write; return the exit code."""
    given = harness.parse(Settings, argv)
    engine = engines.Vllm(given)
    work = given.work / "answers"
    work.mkdir(parents=True, exist_ok=True)
    there, here = work / "endpoint.jsonl", work / "own.jsonl"
    there.unlink(missing_ok=True)
    asked = [
        *("data=pycode", f"limit={given.num_records}", f"max_new_tokens={given.max_new_tokens}"),
        *("keep_truncated=true", "temperature=0"),
    ]
    own = started([f"model={given.base}", "dtype=float32", f"output={here}", *asked])
    if own.wait():
        raise SystemExit(own.stderr.read() if own.stderr else "regenerate failed")
    served = ["vllm", "serve", engine.base(), "--dtype", "float32", "--max-model-len", "1024"]
    begin = time.monotonic()
    with refusing(engines.PORT) as (url, said):
        words = [f"endpoint={url}", "concurrency=16", f"output={there}", *asked]
        with engines.listening(engine, served, work):
            running = started(words)
            while running.poll() is None and len(answers(there)) < given.num_records // 3:
                time.sleep(0.1)
        before = len(answers(there))
        code, told = running.wait(), running.stderr.read() if running.stderr else ""
        ended = told.strip().splitlines()[-1] if told.strip() else ""
        with engines.listening(engine, served, work):
            again = started(words).wait()
    mine, theirs = answers(here), answers(there)
    num_lines = len(there.read_text().splitlines())
    same = sum(theirs.get(name) == text for name, text in mine.items())
    failed = []
    if not code or not before < given.num_records or again:
        failed.append("the server's end did not end the command, or the second one failed")
    if num_lines != len(theirs) or theirs.keys() != mine.keys():
        failed.append("a record was lost, or answered twice")
    if len(mine) - same > given.most:
        failed.append("too many texts differ from our own")
    if not said[429]:
        failed.append("nothing was refused")
    found = {
        "engine": engine.title,
        "records": len(mine),
        "answered_before_the_end": before,
        "exit_then": code,
        "said_then": ended.replace(url, "URL"),
        "answered_in_the_end": len(theirs),
        "as_our_own": same,
        "refused": said[429],
        "broken_off": said[0],
        "seconds": time.monotonic() - begin,
        "failed": failed,
    }
    print(harness.describe(found), flush=True)
    path = given.out / given.base / f"{engine.name}_answers.json"
    harness.write(path, harness.report(given, **found))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
