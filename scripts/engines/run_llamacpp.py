"""Let llama.cpp answer prompts, one by one and together; runs in an environment of its own.

    python run_llamacpp.py job.json out.json

The job names the base as a GGUF file, its prompts as token ids, the batches, the speculation and,
for timings, a ``llama-server`` that was built for this machine; without one the server is that of
the wheel xllamacpp. What comes out: the version, and per batch the texts, the verify steps and
accepted guesses per position, and the seconds. ``scripts/engines.py`` writes the one and reads the
other. The server says each step in its log (LLAMA_TRACE), which is why that goes into a file.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

CONTEXT = 1024  # tokens of a text
PATIENCE = 120.0  # seconds for a model to load
PORT = 8177  # of a server that was built
LAUNCHED = re.compile(r"task (\d+) \| processing task")
VERIFIED = re.compile(r"task (\d+) \| accepted +(\d+)/ *\d+ draft tokens")


@contextmanager
def serving(job: Mapping[str, Any], batch: int, log: Path) -> Iterator[str]:
    """Run a server for so many texts at once; its address."""
    if job["options"].get("server"):
        with log.open("w") as said:
            words = [job["options"]["server"], *words_of(job, batch)]
            running = subprocess.Popen(words, stdout=said, stderr=said)
        try:
            address = f"http://127.0.0.1:{PORT}"
            wait_for(address)
            yield address
        finally:
            running.terminate()
            running.wait()
        return
    import xllamacpp

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    before = os.dup(2)
    os.dup2(file, 2)
    try:
        server = xllamacpp.Server(params_of(job, batch))
        yield server.listening_address
        del server
    finally:
        os.dup2(before, 2)


def wait_for(address: str) -> None:
    """Wait until a server has loaded its models."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def words_of(job: Mapping[str, Any], batch: int) -> list[str]:
    """Return the command line of ``llama-server``."""
    told, threads = job["options"], str(job["options"]["threads"])
    words = ["-m", job["model"], "-c", str(CONTEXT * batch), "-np", str(batch), "--no-warmup"]
    words += ["-t", threads, "-tb", threads, "--port", str(PORT)]
    if told["float32"]:
        words += ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]
    if told["speculative"]:
        given = told["speculative"]
        words += ["--spec-type", given["method"]]
        for key, value in given["settings"].items():
            words += [f"--spec-{given['method']}-{key}", value]
        if given["model"]:
            words += ["-md", given["model"], "--spec-draft-n-max", str(given["guesses"])]
            words += ["-td", threads, "-tbd", threads]
            if told["float32"]:
                words += ["-ctkd", "f32", "-ctvd", "f32"]
    return words


def params_of(job: Mapping[str, Any], batch: int) -> Any:
    """Return the same for the server of the wheel."""
    import xllamacpp

    told, asked = job["options"], xllamacpp.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_parallel = job["model"], CONTEXT * batch, batch
    asked.warmup, draft = False, asked.speculative.draft
    for part in (asked.cpuparams, asked.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        part.n_threads = told["threads"]
    if told["float32"]:
        asked.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        for place in (asked, draft):
            place.cache_type_k = place.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if told["speculative"]:
        given = told["speculative"]
        name = given["method"].upper().replace("-", "_")
        kinds = xllamacpp.common_speculative_type
        asked.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name}")]
        for key, value in given["settings"].items():
            place = getattr(asked.speculative, given["method"].replace("-", "_"))
            setattr(place, key.replace("-", "_"), int(value))
        if given["model"]:
            draft.mparams.path, draft.n_max = given["model"], given["guesses"]
    return asked


def answered(address: str, ids: Sequence[int], limit: int) -> list[int]:
    """Return the greedy tokens behind a prompt."""
    asked = {
        **{"prompt": ids, "n_predict": limit, "temperature": 0, "top_k": 1},
        **{"cache_prompt": False, "return_tokens": True},
    }
    body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/completion", body, kind)
    with urllib.request.urlopen(request) as answer:
        return [int(each) for each in json.load(answer)["tokens"]]


def lengths_of(log: str, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return how many tokens each verify step gave, text by text in the order of the tasks.

    The first task warms the server, and drafts nothing. A step that no guesses went into says
    nothing. Guesses that were accepted behind the end of a text are left out, as our own decoding
    leaves them out.
    """
    by_task: dict[int, list[int]] = defaultdict(list)
    for task, accepted in VERIFIED.findall(log):
        by_task[int(task)].append(int(accepted) + 1)
    tasks = [int(each) for each in LAUNCHED.findall(log)][-len(texts) :]
    if len(tasks) < len(texts) or by_task.keys() - tasks:
        raise ValueError(f"the log has {len(tasks)} texts, expected {len(texts)}")
    found = [by_task[task] for task in tasks]
    whole = []
    for lengths, text in zip(found, texts, strict=True):
        rest = len(text) - 1  # the first token is the prompt's
        cut = []
        for length in lengths:
            cut.append(min(length, rest))
            rest -= cut[-1]
        whole.append([each for each in cut if each > 0] + [1] * rest)
    return whole


def run(job: Mapping[str, Any], batch: int, log: Path) -> dict[str, Any]:
    """Answer all prompts, so many at a time."""
    texts, seconds, prompts = [], [], job["prompts"]
    with serving(job, batch, log) as address, ThreadPool(batch) as pool:
        answered(address, prompts[0], 1)  # what the first one makes is not clocked
        for first in range(0, len(prompts), batch):
            begin, some = time.perf_counter(), prompts[first : first + batch]
            texts += pool.starmap(answered, [(address, ids, job["limit"]) for ids in some], 1)
            seconds.append(time.perf_counter() - begin)
    found = {"texts": texts, "seconds": seconds}
    if batch > 1:  # tasks are in the order in which they came in
        counted = VERIFIED.findall(log.read_text(errors="replace"))
        return {**found, "steps": [len(counted)], "accepted": []}
    lengths, given = lengths_of(log.read_text(errors="replace"), texts), job["options"]
    guesses = (given["speculative"] or {}).get("guesses", 0)
    flat = [length for each in lengths for length in each]
    accepted = [sum(length > place + 1 for length in flat) for place in range(guesses)]
    return {**found, "steps": [len(each) for each in lengths], "accepted": accepted}


def main() -> None:
    """Load, answer, write."""
    os.environ["LLAMA_TRACE"] = "1"
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    runs = {
        str(batch): run(job, batch, out.with_name(f"{out.stem}_server_{batch}.log"))
        for batch in job["batches"]
    }
    if job["options"].get("server"):
        asked = [job["options"]["server"], "--version"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stderr
        version = said.splitlines()[0]
    else:
        import xllamacpp

        version = f"xllamacpp {xllamacpp.__version__}"
    out.write_text(json.dumps({"version": version, "runs": runs}))


if __name__ == "__main__":
    main()
