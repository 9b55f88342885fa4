"""Ask a server of specheads as many clients do: texts, memory, times beside other servers.

    python scripts/bench_serve.py --part texts      # 200 at once, a third hangs up, float32
    python scripts/bench_serve.py --part soak --minutes 60
    python scripts/bench_serve.py --part clock --dtype bfloat16 --base smollm2
    python scripts/bench_serve.py --part attack     # what clients should not do

Each part starts the server as a user does, in a process of its own. ``texts`` compares every text
with ``generate`` alone; ``soak`` watches the process's resident memory; ``clock`` gives the time to
the first token and tokens per second beside ``transformers serve`` and, where its environment is
there (`make test-engines` makes it), vLLM for the CPU, the same questions one after the other for
each; ``attack`` prints a table of answers, and is bounded in time.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import harness
import httpx

CHECKPOINTS = {"tinycode": "data/checkpoints/hydra", "smollm2": "smollm2"}
START = 180.0  # seconds for a server to load


@dataclass
class Settings:
    """What is asked.

    Attributes:
        part: of this script
        base: tinycode or smollm2
        dtype: of the weights
        clients: at once
        requests: of the soak at least
        minutes: of the soak
        rates: requests that are under way together in the part that clocks
        questions: that each server is asked at each rate, eight of them in turn
        max_tokens: of an answer
        out: write the JSON there
    """

    part: Literal["texts", "soak", "clock", "attack"] = "texts"
    base: Literal["tinycode", "smollm2"] = "tinycode"
    dtype: str = "float32"
    clients: int = 200
    requests: int = 2000
    minutes: float = 0.0
    rates: tuple[int, ...] = (1, 4, 8)
    questions: int = 32
    max_tokens: int = 64
    out: Path | None = None


def free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], port: int, path: str, **environ: str) -> Iterator[int]:
    """Start a server, wait until it answers, yield its process id, and stop it."""
    log = Path(harness.ROOT / "build" / f"serve-{port}.log")
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, **environ}, start_new_session=True
        )
        try:
            end = time.monotonic() + START
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2).status_code == 200:
                        break
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield process.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ours(given: Settings, port: int, *more: str) -> list[str]:
    """Return the command of our server."""
    return [
        *(sys.executable, "-m", "specheads.serve", f"checkpoint={CHECKPOINTS[given.base]}"),
        *(f"port={port}", f"dtype={given.dtype}", *more),
    ]


def resident(pid: int) -> float:
    """Return MiB of memory that a process holds."""
    (line,) = (
        each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in each
    )
    return int(line.split()[1]) / 1024


def sources() -> list[str]:
    """Return prompts of many lengths."""
    text = Path(harness.ROOT / "specheads" / "attention" / "tree.py").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    chance = random.Random(1)
    starts = [chance.randrange(len(lines) - 60) for _ in range(60)]
    return ["".join(lines[at : at + chance.choice([1, 2, 5, 12, 30])]).strip() for at in starts]


def requests_of(given: Settings, num: int) -> list[dict[str, Any]]:
    """Return bodies: drafters, temperatures, lengths, seeds, all mixed."""
    chance, prompts = random.Random(2), sources()
    return [
        {
            "prompt": chance.choice(prompts) or "def",
            "max_tokens": chance.choice([1, 8, given.max_tokens, given.max_tokens]),
            "temperature": chance.choice([0, 0, 0.7, 1]),
            "seed": chance.randrange(1 << 40),
            "drafter": chance.choice(["heads", "heads", "plain"]),
            "stream": bool(number % 2),
            **({"stop": ["\n\n"]} if number % 5 == 0 else {}),
        }
        for number in range(num)
    ]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], leave: float) -> tuple[str, str]:
    """Return what became of a request, and its text; ``leave`` hangs up after so many seconds."""
    text = ""

    async def answered() -> tuple[str, str]:
        nonlocal text
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return str(answer.status_code), ""
            if not body["stream"]:
                found = json.loads(await answer.aread())
                return "whole", found["choices"][0]["text"]
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return "error", text
                    text += event["choices"][0]["text"]
            return "whole", text

    while True:
        try:
            found = await asyncio.wait_for(answered(), leave or None)
        except TimeoutError:
            return "left", text
        if found[0] != "429":
            return found
        await asyncio.sleep(0.2 + random.random())


async def crowd(url: str, bodies: Sequence[dict[str, Any]], at_once: int) -> list[tuple[str, str]]:
    """Send all requests, so many at once; every third hangs up early."""
    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(600)
    gate, chance = asyncio.Semaphore(at_once), random.Random(3)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client:

        async def one(number: int, body: dict[str, Any]) -> tuple[str, str]:
            async with gate:
                return await ask(client, body, chance.uniform(0.05, 3) if number % 3 == 2 else 0)

        return await asyncio.gather(*(one(*each) for each in enumerate(bodies)))


def texts(given: Settings) -> dict[str, Any]:
    """Compare the texts of a crowd with those of ``generate``."""
    import torch

    from specheads.config import DecodeConfig
    from specheads.config.commands import TextSettings
    from specheads.data.chat import Encoder
    from specheads.decoding.conversation import text_of
    from specheads.decoding.exported import load_subject
    from specheads.decoding.generate import SpecDecoder, decode_prompts
    from specheads.system.files import shipped_export

    bodies, port = requests_of(given, given.clients), free_port()
    with running(ours(given, port, "queue=1000"), port, "/health"):
        start = time.monotonic()
        found = asyncio.run(crowd(f"http://127.0.0.1:{port}", bodies, given.clients))
        seconds = time.monotonic() - start
    dtype = getattr(torch, given.dtype)
    subject = load_subject(shipped_export(CHECKPOINTS[given.base]), dtype=dtype, device="cpu")
    decoder, encoder = SpecDecoder.of(subject, DecodeConfig(), None), Encoder(subject.tokenizer)
    became, wrong = Counter(name for name, _ in found), 0
    for body, (name, text) in zip(bodies, found, strict=True):
        settings = TextSettings(checkpoint="", temperature=body["temperature"], seed=body["seed"])
        ids = encoder.prompt({"id": "p", "kind": "prompt", "text": body["prompt"]})
        more = {"stop_strings": body["stop"]} if "stop" in body else {}
        tokens = decode_prompts(decoder, settings, [ids], body["max_tokens"], **more).new_tokens
        whole = text_of(subject.tokenizer, tokens)
        if "stop" in body and "\n\n" in whole:
            whole = whole[: whole.find("\n\n")]
        right = text == whole if name == "whole" else whole.startswith(text)
        wrong += not right
    print(f"{dict(became)} of {given.clients} at once in {seconds:.0f} s; wrong texts: {wrong}")
    return {"became": became, "wrong": wrong, "seconds": seconds, "clients": given.clients}


def soak(given: Settings) -> dict[str, Any]:
    """Watch the memory of a server that is asked on and on."""
    port, held, became = free_port(), list[dict[str, float]](), Counter[str]()
    with running(ours(given, port), port, "/health") as pid:
        start, number = time.monotonic(), 0
        while number < given.requests or time.monotonic() - start < 60 * given.minutes:
            bodies = requests_of(given, 100)
            chance = random.Random(number)
            for body in bodies:
                body["seed"] = chance.randrange(1 << 40)
            became += Counter(
                n for n, _ in asyncio.run(crowd(f"http://127.0.0.1:{port}", bodies, 16))
            )
            number += len(bodies)
            held.append(
                {"requests": number, "seconds": time.monotonic() - start, "mib": resident(pid)}
            )
            print(
                f"{number} requests, {held[-1]['seconds']:.0f} s, {held[-1]['mib']:.0f} MiB",
                flush=True,
            )
        alive = httpx.get(f"http://127.0.0.1:{port}/health").json()["status"]
    quarter = [each["mib"] for each in held[len(held) // 4 :]]
    growth = quarter[-1] - quarter[0]
    print(f"after the first quarter: {growth:+.0f} MiB; {dict(became)}; {alive}")
    return {"held": held, "became": became, "growth_mib": growth}


async def timed(url: str, body: dict[str, Any], path: str) -> tuple[float, float, int]:
    """Return seconds to the first token, to the last, and tokens."""
    start = time.perf_counter()
    first, events = 0.0, 0
    async with (
        httpx.AsyncClient(base_url=url, timeout=600) as client,
        client.stream("POST", path, json=body) as answer,
    ):
        if answer.status_code != 200:
            raise SystemExit(f"{url}: {await answer.aread()!r:.300}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", []):
                if (choice.get("delta") or {}).get("content"):
                    first = first or time.perf_counter() - start
                    events += 1
            if event.get("usage"):
                events = event["usage"]["completion_tokens"]
    return first, time.perf_counter() - start, events


@dataclass
class Server:
    """One that is clocked.

    Attributes:
        name: for the table.
        command: that starts it.
        port: that it listens to.
        model: what it calls the model.
        more: what its requests say beside.
        environ: of its process.
    """

    name: str
    command: Sequence[str]
    port: int
    model: str
    more: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)

    def answer(self, questions: Sequence[str], rate: int, max_tokens: int) -> dict[str, Any]:
        """Ask all questions, so many under way together; return times and tokens per second."""
        gate = asyncio.Semaphore(rate)

        async def one(question: str) -> tuple[float, float, int]:
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.more,
            }
            async with gate:
                return await timed(f"http://127.0.0.1:{self.port}", body, "/v1/chat/completions")

        async def every() -> list[tuple[float, float, int]]:
            return await asyncio.gather(*map(one, questions))

        start = time.perf_counter()
        times = asyncio.run(every())
        seconds = time.perf_counter() - start
        tokens = sum(num for _, _, num in times)
        return {"first": [first for first, _, _ in times], "rate": tokens / seconds}


def servers(given: Settings) -> Iterator[Server]:
    """Yield what is compared: ours with several drafters, and those of others that are here."""
    from specheads.models.names import resolve_name

    folder, port, drafters = str(resolve_name(given.base)), free_port(), ("heads", "heads+suffix")
    command = ours(given, port, f"drafters=[{','.join(drafters)}]")
    for name in (*drafters, "plain"):
        yield Server(f"specheads, {name}", command, port, "", {"drafter": name})
    start = [str(Path(sys.executable).parent / "transformers"), "serve", folder, "--device", "cpu"]
    for name, more in (("", []), (" --continuous-batching", ["--continuous-batching"])):
        port = free_port()
        told = [*start, "--port", str(port), "--dtype", given.dtype, *more]
        yield Server(f"transformers serve{name}", told, port, folder)
    vllm = harness.ROOT / ".engines" / "vllm" / "bin" / "vllm"
    if not vllm.exists():
        print("vLLM is not here: make test-engines installs it")
        return
    port = free_port()
    start = [str(vllm), "serve", folder, "--port", str(port), "--dtype", given.dtype]
    start += ["--max-model-len", "2048"]
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environ["OMP_NUM_THREADS"] = str(os.cpu_count())  # it takes one of two unless told
    yield Server("vLLM", start, port, folder, environ=environ)


def clock(given: Settings) -> dict[str, Any]:
    """Clock servers with the same questions, a few of them at each in turn."""
    path = harness.ROOT / "data" / "real" / "questions.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    questions = [line["messages"][-1]["content"] for line in lines if "messages" in line]
    parts = [questions[i : i + 8] for i in range(0, given.questions, 8)]
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        every, started = list(servers(given)), dict[int, float]()
        for each in every:
            if each.port not in started:
                begun = running(each.command, each.port, "/health", **each.environ)
                pid = stack.enter_context(begun)
                started[each.port] = resident(pid)
            each.answer(questions[-4:], max(given.rates), given.max_tokens)
        for rate in given.rates:
            said: dict[str, list[dict[str, Any]]] = {each.name: [] for each in every}
            for part in parts:
                for each in every:
                    said[each.name].append(each.answer(part, rate, given.max_tokens))
            print(f"{rate} under way")
            for name, answers in said.items():
                firsts = sorted(first for answer in answers for first in answer["first"])
                beside = zip(answers, said["transformers serve"], strict=True)
                found.setdefault(name, {})[str(rate)] = kept = {
                    "first_p50": statistics.median(firsts),
                    "first_p99": firsts[int(0.99 * len(firsts))],
                    "tokens_per_second": harness.spread([answer["rate"] for answer in answers]),
                    "ratio": harness.spread([ours["rate"] / hf["rate"] for ours, hf in beside]),
                }
                print(f"  {name}: {json.dumps(kept)}", flush=True)
    return found


def attack(given: Settings) -> dict[str, Any]:
    """Do what clients should not; after each, ask an ordinary question."""
    import attack_serve

    port = free_port()
    more = ("max_body=200000", "body_seconds=3", "deadline=30")
    with running(ours(given, port, *more), port, "/health") as pid:
        return attack_serve.every(port, pid)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a part."""
    given = harness.parse(Settings, argv)
    part = {"texts": texts, "soak": soak, "clock": clock, "attack": attack}[given.part]
    found = part(given)
    if given.out is not None:
        harness.write(given.out, harness.report(given, found=found))


if __name__ == "__main__":
    main()
