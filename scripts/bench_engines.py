"""Tokens per second of engines on one machine, plainly and with what we export, beside our own.

    python scripts/bench_engines.py --base smollm2

vLLM, OpenVINO GenAI, llama.cpp, transformers and specheads answer the same prompts greedily with
all processors, one by one and 16 together: in bfloat16 where the processors have it, else in
float32; llama.cpp also with the 4 bits that the base is published in, in a server that is built
here. A round is every way once, each engine in a process of its own; every other round is in
reversed order. A way's gain is over the same engine's plain answers, with a paired interval over
prompts where they are answered one by one. Drafters are those of ``make engine-exports``, and the
heads that SmolLM2 ships with.

A round of a way is kept in the folder of the runs, so that the script can be stopped and started.
Nothing else may run meanwhile. What other machines on the same host do is seen by no counter, so a
product of fixed size is clocked before and after every round of a way, and rounds in which it took
longer than it does at best (``--slower``) are clocked anew, up to ``--tries`` times.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import engines
import harness
import torch
import transformers
from bench_equal import CHAIN, DEPTH, DRAFT, Contender
from engines import EAGLE3, SHIPPED, Case, Engine

import specheads
from specheads.config import DecodeConfig
from specheads.decoding.exported import choose_drafter, draft_model, load_subject, model_of
from specheads.measure import rows as report
from specheads.measure.bench import LOOKUP_NGRAM, LOOKUP_TOKENS, Contest
from specheads.measure.clock import Method, Prompt, make_batches
from specheads.system import hardware

PLAIN = "plain"
BATCHES = (1, 16)
CLOCKED: Mapping[str, tuple[str, ...]] = {  # by engine, its formats beside plain decoding
    "vllm": ("draft", "vllm_heads_medusa1", "vllm_heads_shipped", "suffix"),
    "openvino": ("draft", "eagle3_native"),
    "llamacpp_f32": ("draft", "eagle3_native", "ngram_simple", "ngram_mod"),
    "llamacpp_q4_1": ("draft", "eagle3_native", "ngram_simple", "ngram_mod"),
}


@dataclass
class Settings(engines.Asked):
    """What is clocked; transformers and specheads count as engines here.

    Attributes:
        rounds: of every way
        slower: the product of fixed size may take so many times as long as at best
        tries: of rounds in which it took longer; the last one counts, and its figure is reported
    """

    base: Literal["tinycode", "smollm2"] = "smollm2"
    num_prompts: int = 16
    rounds: int = 3
    slower: float = 1.25
    tries: int = 3


@dataclass(frozen=True)
class Way:
    """A way to answer the prompts.

    Attributes:
        engine: its name in ``engines.py``, or transformers or specheads.
        title: of the engine, as its makers write it.
        name: of the format, or ``plain``.
        run: answers all prompts at every size of batch: the version, and texts and seconds by size.
    """

    engine: str
    title: str
    name: str
    run: Callable[[], dict[str, Any]]


def of_engine(engine: Engine, prompts: Sequence[Sequence[int]]) -> Iterator[Way]:
    """Yield plain decoding and formats of an engine; trains and writes what is not there."""
    wanted = engine.given.only or CLOCKED[engine.name]
    base = engine.given.base
    cases = [case for case in engine.cases if case.name in wanted and base in case.bases]
    every: list[Case | None] = [None, *cases]
    for case in every:
        folder = Path()
        if case is not None and case.kind:
            folder = engine.drafter(case, engines.export_of(case.kind, engine.given))[1]
        run = partial(engines.engine_run, engine, case, folder, prompts)
        yield Way(engine.name, engine.title, case.name if case else PLAIN, run)


def here(method: Method, prompts: Sequence[Prompt], version: str) -> dict[str, Any]:
    """Answer the prompts in this process."""
    runs = {}
    for size in BATCHES:
        batches, texts, seconds = make_batches(prompts, size), [], []
        method.decode(batches[0], 0.0, 0)  # what the first one makes is not clocked
        for batch in batches:
            begin = time.perf_counter()
            rows = method.decode(batch, 0.0, 0)
            seconds.append(time.perf_counter() - begin)
            texts += [row.new_tokens for row in rows]
        runs[str(size)] = {"texts": texts, "seconds": seconds}
    return {"version": version, "runs": runs}


def of_ours(given: Settings, prompts: Sequence[Prompt]) -> Iterator[Way]:
    """Yield the ways of transformers and specheads."""
    dtype = "bfloat16" if hardware.has_native_bfloat16() else "float32"

    @cache
    def plain() -> tuple[Any, Contest]:
        subject = replace(load_subject(given.base, dtype=dtype), export=None)
        return subject, Contest.of(subject, given.max_new_tokens)

    def drafted(name: str) -> Method:
        subject, contest = plain()
        export = str(engines.export_of(DRAFT, given)) if name == DRAFT else ""
        chosen = choose_drafter(
            subject, DecodeConfig(drafter=name, draft=export, draft_tokens=DEPTH)
        )
        return contest.ours(name, chosen.drafter, chosen.num_nodes)

    def assisted() -> Method:
        subject, contest = plain()
        decode = DecodeConfig(draft=str(engines.export_of(DRAFT, given)))
        return contest.assisted(model_of(draft_model(subject, decode)), DEPTH)

    def heads(kind: str, shape: str = "") -> Method:
        subject = load_subject(str(engines.export_of(kind, given)), dtype=dtype)
        if not shape:
            chosen = choose_drafter(subject, DecodeConfig())
            contest = Contest.of(subject, given.max_new_tokens)
            return contest.ours(kind, chosen.drafter, chosen.num_nodes)
        contender = Contender(subject, DecodeConfig(), prompts, given.max_new_tokens)
        (method,) = contender.methods(shape)
        return method

    ways: dict[str, dict[str, Callable[[], Method]]] = {
        "transformers": {
            PLAIN: lambda: plain()[1].generate(),
            DRAFT: assisted,
            "prompt_lookup": lambda: plain()[1].lookup(LOOKUP_TOKENS, LOOKUP_NGRAM),
        },
        "specheads": {
            PLAIN: lambda: plain()[1].ours(),
            DRAFT: lambda: drafted(DRAFT),
            "suffix": lambda: drafted("suffix"),
            "eagle3": lambda: heads(EAGLE3),
            "eagle3_chain": lambda: heads(EAGLE3, CHAIN),
            "shipped": lambda: heads(SHIPPED),
            "shipped_chain": lambda: heads(SHIPPED, CHAIN),
        },
    }
    versions = {"transformers": transformers.__version__, "specheads": specheads.__version__}
    for engine, methods in ways.items():
        for name, method in methods.items():
            once = cache(method)

            def run(once: Callable[[], Method] = once, engine: str = engine) -> dict[str, Any]:
                return here(once(), prompts, versions[engine])

            yield Way(engine, engine, name, run)


def gauge() -> float:
    """Return the seconds of products that read 113 MB, and of one that reads little."""
    wide, square = torch.ones(49152, 576), torch.ones(768, 768)
    seconds = []
    for _ in range(15):
        begin = time.perf_counter()
        torch.nn.functional.linear(wide[:1], wide)
        square @ square
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def clocked(way: Way, path: Path, most: float) -> dict[str, Any]:
    """Return a round of a way: what is kept at ``path``, unless the machine was slow then.

    Args:
        way: the way.
        path: where it is kept.
        most: seconds of the gauge with which it counts.
    """

    def run() -> dict[str, Any]:
        before = gauge()
        found = way.run()
        return {**found, "gauge": max(before, gauge())}

    if path.is_file() and harness.kept(path, run)["gauge"] > most:
        path.unlink()
    found: dict[str, Any] = harness.kept(path, run)
    return found


def work_of(rounds: Sequence[Any], size: int) -> report.Work:
    """Return tokens, and the median seconds over rounds, of each batch."""
    texts = rounds[0]["runs"][str(size)]["texts"]
    tokens = [float(sum(map(len, texts[i : i + size]))) for i in range(0, len(texts), size)]
    seconds = zip(*(each["runs"][str(size)]["seconds"] for each in rounds), strict=True)
    return tokens, [statistics.median(column) for column in seconds]


def row_of(way: Way, rounds: Sequence[Any], plain: Sequence[Any]) -> dict[str, Any]:
    """Return what is said of a way, from its rounds and those of its engine's plain answers."""
    row: dict[str, Any] = {"engine": way.title, "key": way.engine, "way": way.name}
    row["version"] = rounds[0]["version"]
    for size in BATCHES:
        own, other = work_of(rounds, size), work_of(plain, size)
        gain, bounds = report.speedup(own, other)
        texts, alone = (each[0]["runs"][str(size)]["texts"] for each in (rounds, plain))
        row[f"batch_{size}"] = {
            "tokens_per_second": report.speed(own),
            "gain": gain,
            "gain_ci95": bounds if len(own[0]) > 1 else None,
            "texts_as_plain": engines.same(texts, alone),
        }
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Make what is missing, clock in turn, print and write."""
    given = harness.parse(Settings, argv)
    hardware.pin_threads(0)
    torch.manual_seed(0)
    ids = engines.asked_of(given)
    prompts = [Prompt(str(number), "", torch.tensor([each])) for number, each in enumerate(ids)]
    ways = list(of_ours(given, prompts))
    for kind in engines.ENGINES:
        if given.base in kind.bases and (not given.engines or kind.name in given.engines):
            engine = kind(given, timed=True)
            engine.install()
            ways += of_engine(engine, ids)
    ways = [way for way in ways if not given.engines or way.engine in given.engines]
    ways = [way for way in ways if not given.only or way.name in (PLAIN, *given.only)]
    kept = given.work / f"clocked-{given.num_prompts}-{given.max_new_tokens}"
    found: dict[tuple[str, str], list[Any]] = {(way.engine, way.name): [] for way in ways}
    least = min(gauge() for _ in range(5))
    for _ in range(given.tries):
        for number in range(given.rounds):
            for way in ways[:: -1 if number % 2 else 1]:
                path = kept / f"{way.engine}-{way.name}-{number}.json"
                result = clocked(way, path, given.slower * least)
                least = min(least, result["gauge"])
                found[way.engine, way.name][number : number + 1] = [result]
                rates = [report.speed(work_of([result], size)) for size in BATCHES]
                said = ", ".join(f"{r:.1f} with {n}" for r, n in zip(rates, BATCHES, strict=True))
                slow = f", the machine at {result['gauge'] / least:.2f} of its best time"
                print(f"{way.engine} {way.name}: {said} at a time, tokens/s{slow}", flush=True)
        if all(each["gauge"] <= given.slower * least for of in found.values() for each in of):
            break
    rows = [row_of(way, found[way.engine, way.name], found[way.engine, PLAIN]) for way in ways]
    for row in rows:
        row["machine"] = max(each["gauge"] for each in found[row["key"], row["way"]]) / least
    print("\n\n".join(map(harness.describe, rows)), flush=True)
    harness.write(given.out / f"speed_{given.base}.json", harness.report(given, rows=rows))


if __name__ == "__main__":
    main()
