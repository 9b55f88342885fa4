"""Tokens per second of engines on one machine, plainly and with what we export, beside our own.

    python scripts/bench_engines.py --base smollm2

vLLM, OpenVINO GenAI, llama.cpp, transformers and specheads answer the same prompts greedily with
all processors, one by one and 16 together: in bfloat16 where the processors have it, else in
float32; llama.cpp also with the 4 bits that the base is published in, in a server that is built
here. A round is every way once, each engine in a process of its own; every other round is in
reversed order. A way's gain is over the same engine's plain answers of the same round. Drafters are
those of ``make engine-exports``, and the heads that SmolLM2 ships with.

A round of a way is kept in the folder of the runs, so that the script can be stopped and started.
Nothing else may run meanwhile.
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
from specheads.measure.bench import LOOKUP_NGRAM, LOOKUP_TOKENS, Contest
from specheads.measure.clock import Method, Prompt, make_batches
from specheads.system import hardware

PLAIN = "plain"
BATCHES = (1, 16)
CLOCKED: Mapping[str, tuple[str, ...]] = {  # by engine, its formats beside plain decoding
    "vllm": ("draft", "vllm_medusa", "vllm_heads_medusa1", "vllm_heads_shipped", "suffix"),
    "openvino": ("draft", "eagle3_native"),
    "llamacpp_f32": ("draft", "eagle3_native", "ngram_simple", "ngram_mod"),
    "llamacpp_q4_1": ("draft", "eagle3_native", "ngram_simple", "ngram_mod"),
}


@dataclass
class Settings(engines.Asked):
    """What is clocked; transformers and specheads count as engines here.

    Attributes:
        rounds: of every way
    """

    base: Literal["tinycode", "smollm2"] = "smollm2"
    num_prompts: int = 16
    rounds: int = 3


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


def rate(found: Mapping[str, Any], size: int) -> float:
    """Return the tokens per second of a round."""
    run = found["runs"][str(size)]
    return sum(map(len, run["texts"])) / sum(run["seconds"])


def row_of(way: Way, rounds: Sequence[Any], plain: Sequence[Any]) -> dict[str, Any]:
    """Return what is said of a way, from its rounds and those of its engine's plain answers."""
    row: dict[str, Any] = {"engine": way.title, "key": way.engine, "way": way.name}
    row["version"] = rounds[0]["version"]
    for size in BATCHES:
        rates = [rate(each, size) for each in rounds]
        gains = [mine / rate(other, size) for mine, other in zip(rates, plain, strict=True)]
        texts, alone = (each[0]["runs"][str(size)]["texts"] for each in (rounds, plain))
        row[f"batch_{size}"] = {
            "tokens_per_second": {
                "median": statistics.median(rates),
                "min": min(rates),
                "max": max(rates),
            },
            "gain": {"median": statistics.median(gains), "min": min(gains), "max": max(gains)},
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
    for number in range(given.rounds):
        for way in ways[:: -1 if number % 2 else 1]:
            path = kept / f"{way.engine}-{way.name}-{number}.json"
            result = harness.kept(path, way.run)
            found[way.engine, way.name].append(result)
            said = ", ".join(f"{rate(result, size):.1f} with {size}" for size in BATCHES)
            print(f"{way.engine} {way.name}: {said} at a time, tokens/s", flush=True)
    rows = [row_of(way, found[way.engine, way.name], found[way.engine, PLAIN]) for way in ways]
    print("\n\n".join(map(harness.describe, rows)), flush=True)
    harness.write(given.out / f"speed_{given.base}.json", harness.report(given, rows=rows))


if __name__ == "__main__":
    main()
