"""Measure memory and time of a training step of multi-token prediction over its number of heads.

    python scripts/bench_mtp_memory.py --threads 1 --out benchmarks/mtp_memory.json

Ours (``HeadsObjective``: layers made again in backward, logits a chunk at a time, one gradient of
the shared output matrix) beside the naive loop: all layers' activations and all heads' logits at
once, torch's cross entropy, one backward. Heads are counted as in arXiv:2404.19737: the next-token
head is the first, the base's own last layer, so that n = 1 is a plain language model.

A step is a micro-batch, forward and backward, with every .grad already there and no optimizer.
From the peak of the allocator only the heads' parameters and their gradients are subtracted,
counted; activations, which grow with the heads too, are not. Embeddings are tied and the trunk is
one layer, as whatever does not grow would only bring the growth nearer to 0.

Peaks are taken in processes of their own. Times are taken in two more, ours and the naive loop
taking turns: with an allocator that keeps what is freed, as our trainer sets it, and with the
system's, where the naive loop waits for the pages of its logits. On a machine that is not idle,
trust the processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.config.training import LossConfig
from specheads.models.mtp import VARIANTS, MtpHeads, block_config
from specheads.system.hardware import environment, pin_threads
from specheads.train import keep_freed_memory
from specheads.training.objectives import HeadsObjective, LMObjective

MIB = 2**20
SIDES = ("ours", "naive")
ALLOCATORS = ("kept", "system")


@dataclass(frozen=True)
class Case:
    """One configuration; ``num_heads`` counts the next-token head."""

    side: str
    variant: str
    num_heads: int
    vocab: int
    hidden: int
    tokens: int
    chunk_size: int
    threads: int


class Setup:
    """Model and batch of a case, ready to step."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        pin_threads(case.threads)
        self.case = case
        config = LlamaConfig(
            vocab_size=case.vocab,
            hidden_size=case.hidden,
            intermediate_size=case.hidden * 8 // 3,
            num_hidden_layers=2,
            num_attention_heads=max(1, case.hidden // 64),
            tie_word_embeddings=True,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.base: Any = LlamaForCausalLM(config)
        self.heads: MtpHeads | None = None
        self.objective: torch.nn.Module
        loss = LossConfig(chunk_size=case.chunk_size, decay=1.0, lambda_0=1.0)
        if case.num_heads > 1:
            self.heads = MtpHeads(
                case.num_heads - 1, block_config(config), case.vocab, variant=case.variant
            )
            self.objective = HeadsObjective(self.base, self.heads, loss, train_base=True)
        else:
            self.objective = LMObjective(self.base, loss)
        self.objective.train(case.side == "ours")  # in eval mode the heads make nothing again
        for parameter in self.objective.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = torch.randint(0, case.vocab, (1, case.tokens))
        self.batch: dict[str, Tensor] = {
            "input_ids": ids,
            "labels": ids,
            "position_ids": torch.arange(case.tokens)[None],
            "segment_ids": torch.ones_like(ids),
        }

    def owned_bytes(self) -> int:
        """Bytes of the heads' parameters and their gradients."""
        parameters = () if self.heads is None else self.heads.parameters()
        return sum(2 * p.numel() * p.element_size() for p in parameters)

    def step(self) -> float:
        """Run forward and backward; return the loss."""
        loss: Tensor
        loss = self.objective(self.batch)[0] if self.case.side == "ours" else self.naive()
        loss.backward()
        return float(loss.detach())

    def naive(self) -> Tensor:
        """Return the same loss as everybody writes it first."""
        ids, positions = self.batch["input_ids"], self.batch["position_ids"]
        output = self.base.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        found = [output.last_hidden_state[0]]
        if self.heads is not None:
            final = self.case.variant == "sequential"
            read = output.last_hidden_state if final else output.hidden_states[-2]
            found += self.heads.contextual(read, positions, ids, self.base.model.embed_tokens)[:, 0]
        logits = [self.base.lm_head(hidden) for hidden in found]  # of all heads
        losses = [F.cross_entropy(each[: -1 - i], ids[0, 1 + i :]) for i, each in enumerate(logits)]
        return torch.stack(losses).sum()


def allocator_peak(case: Case) -> dict[str, float]:
    """Return the most bytes that tensors occupy at one time during a step, all of them counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        setup = Setup(case)
        begin = time.time_ns()
        loss = setup.step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = current = 0
    for when, change in changes:
        current += change
        peak = max(peak, current) if when >= begin else 0
    return {"peak": peak, "owned": setup.owned_bytes(), "loss": loss}


def in_subprocess(*arguments: str) -> dict[str, Any]:
    """Run this program with ``arguments`` in a fresh process; return what it prints."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def fresh_peak(case: Case) -> dict[str, float]:
    """Run :func:`allocator_peak` in a fresh process."""
    return in_subprocess("--case", json.dumps(asdict(case)))


def take_peaks(
    cases: list[Case], measure: Callable[[Case], dict[str, float]]
) -> list[dict[str, Any]]:
    """Return a row per case: peaks in bytes, and growth over the same side's fewest heads."""
    rows = []
    for number, case in enumerate(cases, 1):
        print(f"\rmemory {number}/{len(cases)}", end="", file=sys.stderr, flush=True)
        found = measure(case)
        rows.append(
            {
                **asdict(case),
                "allocator_peak": found["peak"],
                "owned_bytes": found["owned"],
                "loss": found["loss"],
            }
        )
    print(file=sys.stderr)
    for row in rows:
        first = next(each for each in rows if each["side"] == row["side"])
        rest, start = row["allocator_peak"] - row["owned_bytes"], first["allocator_peak"]
        row["growth"] = rest / start - 1
    return rows


def take_times(cases: list[Case], repeats: int, allocator: str) -> dict[str, Any]:
    """Time ``repeats`` steps of every case, the cases taking turns."""
    if allocator == "kept":
        keep_freed_memory()
    setups = {case.side: Setup(case) for case in cases}
    found: dict[str, Any] = {side: {"seconds": [], "processor_seconds": []} for side in setups}
    for setup in setups.values():
        setup.step()
    for _ in range(repeats):
        for side, setup in setups.items():
            start = time.perf_counter(), time.process_time()
            setup.step()
            found[side]["seconds"].append(time.perf_counter() - start[0])
            found[side]["processor_seconds"].append(time.process_time() - start[1])
    for kind in ("seconds", "processor_seconds"):
        ratios = [
            ours / naive
            for ours, naive in zip(found["ours"][kind], found["naive"][kind], strict=True)
        ]
        found[f"{kind}_vs_naive"] = statistics.median(ratios)
    return {"allocator": allocator, "num_heads": cases[0].num_heads, **found}


def table(rows: list[dict[str, Any]], times: list[dict[str, Any]]) -> str:
    """Lay the report out as text."""
    lines = ["side   heads  peak MiB  owned MiB  growth beyond"]
    lines += [
        f"{row['side']:5}  {row['num_heads']:5}  {row['allocator_peak'] / MIB:8.1f}"
        f"  {row['owned_bytes'] / MIB:9.1f}  {row['growth']:13.1%}"
        for row in rows
    ]
    for each in times:
        ours, naive = (statistics.median(each[side]["processor_seconds"]) for side in SIDES)
        lines.append(
            f"{each['num_heads']} heads, {each['allocator']} allocator: {ours:.2f} and {naive:.2f}"
            f" processor seconds per step; ours / naive {each['processor_seconds_vs_naive']:.3f},"
            f" by the clock {each['seconds_vs_naive']:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print table and JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunk-size", type=int, default=0, help="rows of logits at one time")
    parser.add_argument("--variant", choices=VARIANTS, default="parallel")
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--timed-heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps; 0: none")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--times", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(allocator_peak(Case(**json.loads(args.case)))))
        return
    if args.times:
        cases, repeats, allocator = json.loads(args.times)
        print(json.dumps(take_times([Case(**each) for each in cases], repeats, allocator)))
        return

    threads = pin_threads(args.threads)
    sizes = (args.vocab, args.hidden, args.tokens, args.chunk_size, threads)
    cases = [
        Case(side, args.variant, count, *sizes) for side in SIDES for count in sorted(args.heads)
    ]
    timed = [asdict(Case(side, args.variant, args.timed_heads, *sizes)) for side in SIDES]
    rows = [] if args.no_memory else take_peaks(cases, fresh_peak)
    times = [
        in_subprocess("--times", json.dumps([timed, args.repeats, allocator]))
        for allocator in ALLOCATORS
        if args.repeats
    ]
    hidden = ("case", "times", "out")
    settings = {key: value for key, value in vars(args).items() if key not in hidden}
    report = {"environment": environment(), "settings": settings, "rows": rows, "times": times}
    text = json.dumps(report, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(table(rows, times))
    print(text)


if __name__ == "__main__":
    main()
