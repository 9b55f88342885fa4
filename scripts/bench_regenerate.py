"""Measure how full ``regenerate`` keeps its batches: its tokens per second beside a raw step's.

    python scripts/bench_regenerate.py --model /path/to/model --prompts questions.jsonl

Answers are drawn as the command draws them. A raw step is ``model(...)`` on one token of every row
behind as many cached tokens as the rows of the run held in the mean, with the greedy choice of a
token and nothing else; rounds of raw steps and of answers come in turn. Tokens are counted until
the last prompt was taken: behind it rows stay empty, which thousands of prompts make nothing of;
the whole round's are printed beside, and the share that counts prompt tokens as well. What does not
depend on the machine is printed too: passes, rows per step, and prompt tokens that were read and
their padding.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import harness
import torch
from torch import Tensor

from specheads.attention.cache import TreeCache
from specheads.data.load import read_prompts
from specheads.data.schema import Record
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.forward import ModelPass
from specheads.regeneration.answering import in_fair_order
from specheads.regeneration.answers import Sampling
from specheads.regeneration.dialogue import TurnEncoder
from specheads.regeneration.engine import Engine
from specheads.system import hardware

SHARE = 0.85  # of a raw step's tokens per second that regenerate is to reach


@dataclass
class Settings:
    """What is measured.

    Attributes:
        model: a folder or a hub name
        prompts: a file as prompts= of regenerate takes it
        num_prompts: of it, in each round
        batch_size: rows
        max_new_tokens: of an answer
        temperature: of the answers
        rounds: of raw steps and of answers, in turn
        steps: raw steps per round
        dtype: auto, float32, bfloat16, float16
        threads: 0: all
        out: write the JSON there
    """

    model: str
    prompts: Path
    num_prompts: int = 512
    batch_size: int = 64
    max_new_tokens: int = 192
    temperature: float = 0.7
    rounds: int = 2
    steps: int = 40
    dtype: str = "auto"
    threads: int = 0
    out: Path | None = None


class Passes:
    """Counts what a model pass is asked to read; in place of ``ModelPass.read``.

    Attributes:
        full: the tokens that were given until the latest prompts were taken, and when that was.
    """

    def __init__(self) -> None:
        self.steps = self.rows = self.context = 0
        self.prefills = self.prompt_tokens = self.padding = self.num_prompts = 0
        self.full = 0, time.perf_counter()

    def reading(self, real: Any) -> Any:
        """Return ``read``, counted."""

        def read(base: ModelPass, tokens: Tensor, counts: Any) -> Tensor:
            if tokens.shape[1] == 1:
                self.steps, self.rows = self.steps + 1, self.rows + len(counts)
                self.context += sum(base.cache.lengths)
            else:
                self.full = self.rows + self.num_prompts, time.perf_counter()
                self.prefills += 1
                self.num_prompts += len(counts)
                self.prompt_tokens += sum(counts)
                self.padding += tokens.numel() - sum(counts)
            return real(base, tokens, counts)

        return read


def answer(engine: Engine, records: list[Record], passes: Passes) -> tuple[float, float]:
    """Answer records; return the tokens per second with full batches, and of all."""
    start, num_tokens = time.perf_counter(), 0
    with patch.object(ModelPass, "read", passes.reading(ModelPass.read)):
        for outcome in engine.answer(records):
            num_tokens += outcome.num_tokens
    given, end = passes.full
    return given / (end - start), num_tokens / (time.perf_counter() - start)


@torch.inference_mode()
def raw_steps(base: Any, batch_size: int, context: int, num: int) -> float:
    """Return the seconds of a raw step of a whole batch."""
    reader = ModelPass(base, TreeCache())
    tokens = torch.randint(5, 1000, (batch_size, max(context - num // 2, 1)))
    step = reader.read(tokens, [tokens.shape[1]] * batch_size).argmax(-1)[:, None]
    times = []
    for _ in range(num):
        start = time.perf_counter()
        step = reader.read(step, [1] * batch_size).argmax(-1)[:, None]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rounds(settings: Settings) -> Iterator[dict[str, float]]:
    """Yield the figures of one round after the other."""
    base = load_base_model(
        settings.model, dtype=hardware.pick_dtype(settings.dtype, harness.CPU), device=harness.CPU
    )
    tokenizer = load_tokenizer(settings.model)
    turns = TurnEncoder(tokenizer, end_tokens(base, tokenizer))
    limit = settings.max_new_tokens
    sampling = Sampling(settings.temperature, max_new_tokens=limit, keep_truncated=True)
    engine = Engine(base, turns, sampling, {}, batch_size=settings.batch_size)
    records = read_prompts(settings.prompts, chat=tokenizer.chat_template is not None)
    records = in_fair_order(records)[: settings.num_prompts]
    for _ in range(settings.rounds):
        passes = Passes()
        per_second, of_all = answer(engine, records, passes)
        context = round(passes.context / passes.rows)
        step = raw_steps(base, settings.batch_size, context, settings.steps)
        share = per_second * step / settings.batch_size
        yield {
            "tokens_per_second": per_second,
            "with_the_tail": of_all,
            "raw_tokens_per_second": settings.batch_size / step,
            "share": share,
            "share_with_prompts": share * (1 + passes.prompt_tokens / passes.full[0]),
            "context": context,
            "steps": passes.steps,
            "rows_per_step": passes.rows / passes.steps,
            "prefills": passes.prefills,
            "prompt_tokens": passes.prompt_tokens,
            "padding": passes.padding,
        }


def main() -> None:
    """Measure, print, write."""
    settings = harness.parse(Settings)
    hardware.quiet_loading()
    hardware.pin_threads(settings.threads)
    found = []
    for figures in rounds(settings):
        print("  ".join(f"{name} {value:,.4g}" for name, value in figures.items()), flush=True)
        found.append(figures)
    share, read = (
        statistics.median(each[name] for each in found) for name in ("share", "share_with_prompts")
    )
    print(f"share of a raw step's tokens per second: {share:.1%} (wanted: {SHARE:.0%}), and")
    print(f"{read:.1%} with the tokens of prompts that were read, each as dear as one written")
    harness.write(settings.out, harness.report(settings, rounds=found, share=share))


if __name__ == "__main__":
    main()
