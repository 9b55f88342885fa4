"""Tokens per second of engines on one machine, plainly and with what we export, beside our own.

    python scripts/bench_engines.py --base smollm2

vLLM, OpenVINO GenAI, llama.cpp, transformers and specheads answer the same prompts greedily in
bfloat16 with all processors, one by one and 16 together; llama.cpp also with the 4 bits that the
base is published in, in a server that is built here. A round is every way once, each engine in a
process of its own; every other round is in reversed order. A way's gain is over the same engine's
plain answers of the same round. Drafters are those of ``make engine-exports``.

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
from bench_equal import DEPTH, DRAFT, Contender
from engines import DFLASH, EAGLE3, Case, Engine

import specheads
from specheads.config import DecodeConfig
from specheads.decoding.exported import choose_drafter, draft_model, load_subject
from specheads.measure.bench import LOOKUP_NGRAM, LOOKUP_TOKENS, Contest
from specheads.measure.clock import Method, Prompt, make_batches
from specheads.system import hardware

PLAIN = "plain"
BATCHES = (1, 16)
CLOCKED: Mapping[str, tuple[str, ...]] = {  # by engine, its formats beside plain decoding
    "vllm": ("draft", "vllm_medusa", "vllm_heads_medusa1", "vllm_heads_block", "suffix"),
    "openvino": ("draft", "eagle3_native", "dflash_native"),
    "llamacpp_f32": ("draft", "eagle3_native", "dflash_native", "ngram_simple", "ngram_mod"),
    "llamacpp_q4_1": ("draft", "eagle3_native", "dflash_native", "ngram_simple", "ngram_mod"),
}
BLOCK_NODES = 8  # of the tree that the comparison chose for block heads on both bases


@dataclass
class Settings:
    """What is clocked.

    Attributes:
        base: tinycode or smollm2
        only: engines, all if empty: the names of engines.py, and transformers and specheads
        num_prompts: over all kinds
        rounds: of every way
        runs: folder of trainings and written formats
        environments: folder of the engines
        out: folder of the result
    """

    base: Literal["tinycode", "smollm2"] = "smollm2"
    only: tuple[str, ...] = ()
    num_prompts: int = 16
    max_new_tokens: int = 64
    rounds: int = 3
    runs: Path = harness.ROOT / "runs" / "equal"
    environments: Path = harness.ROOT / ".engines"
    out: Path = harness.ROOT / "benchmarks" / "engines"


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
    cases = [case for case in engine.cases if case.name in CLOCKED[engine.name]]
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


def of_ours(given: engines.Settings, prompts: Sequence[Prompt]) -> Iterator[Way]:
    """Yield the ways of transformers and specheads."""

    @cache
    def plain() -> tuple[Any, Contest]:
        subject = replace(load_subject(given.base, dtype="bfloat16"), export=None)
        return subject, Contest.of(subject, given.max_new_tokens)

    def drafted(name: str) -> Method:
        subject, contest = plain()
        decode = DecodeConfig(drafter=name, draft=str(engines.export_of(DRAFT, given)))
        decode = replace(decode, draft_tokens=DEPTH)
        if name == "assistant":
            return contest.assisted(draft_model(subject, decode), DEPTH)  # type: ignore[arg-type]
        chosen = choose_drafter(subject, decode)
        return contest.ours(name, chosen.drafter, chosen.num_nodes)

    def heads(kind: str) -> Method:
        subject = load_subject(str(engines.export_of(kind, given)), dtype="bfloat16")
        contender = Contender(subject, DecodeConfig(), prompts, given.max_new_tokens)
        (method,) = contender.methods(f"tree_{BLOCK_NODES}")
        return method

    ways: dict[str, dict[str, Callable[[], Method]]] = {
        "transformers": {
            PLAIN: lambda: plain()[1].generate(),
            "draft": lambda: drafted("assistant"),
            "prompt_lookup": lambda: plain()[1].lookup(LOOKUP_TOKENS, LOOKUP_NGRAM),
        },
        "specheads": {
            PLAIN: lambda: plain()[1].ours(),
            "draft": lambda: drafted("draft"),
            "suffix": lambda: drafted("suffix"),
            "eagle3": lambda: heads(EAGLE3),
            "dflash": lambda: heads(DFLASH),
            "block": lambda: heads("block"),
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
    asked = engines.Settings(
        base=given.base, num_prompts=given.num_prompts, max_new_tokens=given.max_new_tokens,
        runs=given.runs, environments=given.environments,
    )  # fmt: skip
    ids = engines.asked_of(asked)
    prompts = [Prompt(str(number), "", torch.tensor([each])) for number, each in enumerate(ids)]
    ways = [way for way in of_ours(asked, prompts) if not given.only or way.engine in given.only]
    for kind in engines.ENGINES:
        if given.base in kind.bases and (not given.only or kind.name in given.only):
            engine = kind(asked, timed=True)
            engine.install()
            ways += of_engine(engine, ids)
    kept = given.runs / given.base / f"clocked-{given.num_prompts}-{given.max_new_tokens}"
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
