"""Measure memory and time of a training step of Medusa heads: ours beside the naive loss.

    python scripts/bench_memory.py --out benchmarks/memory.json

A step is two micro-batches and an AdamW step, with every .grad already there. The base's trunk is
left out (its hidden states are given): whatever it takes is the same for any number of heads and
would only bring the ratios nearer to 1. Every case runs in processes of its own: one under torch's
profiler for the peak of the allocator, one without for the peak of its resident memory. Times are
taken in one further process, the cases taking turns; on a machine that is not idle, trust the
processor time (with --threads 1) rather than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from specheads.config.training import LossConfig
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer
from specheads.system.hardware import environment, peak_memory, pin_threads
from specheads.training.objectives import HeadsObjective

MIB = 2**20
NUM_MICRO_BATCHES = 2


@dataclass(frozen=True)
class Case:
    """One configuration; see the command line for the sizes."""

    recipe: str  # medusa1 (base frozen) or medusa2
    lm_head: str
    implementation: str
    num_heads: int
    vocab: int
    hidden: int
    tokens: int
    chunk_size: int
    threads: int

    def owned_bytes(self) -> int:
        """Bytes that come with each head anyway: parameters, .grad, Adam's two, V * d buffer."""
        matrix = self.vocab * self.hidden if self.lm_head == "own" else 0
        blocks = self.hidden * (self.hidden + 1)
        buffer = matrix if self.implementation != "naive" else 0
        return 4 * self.num_heads * (4 * (matrix + blocks) + buffer)


class GivenStates(nn.Module):
    """A base model whose last hidden states are a constant times a gain that can be trained."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.register_buffer("states", torch.randn(1, case.tokens, case.hidden))
        self.gain = nn.Parameter(torch.ones(case.hidden))
        self.lm_head = nn.Linear(case.hidden, case.vocab, bias=False)

    def base_model(self, **_: Any) -> SimpleNamespace:
        """Return hidden states as a transformers model does."""
        return SimpleNamespace(last_hidden_state=self.states * self.gain)


class Setup:
    """Objective, optimizer and batch of a case, ready to step."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        pin_threads(case.threads)
        base = GivenStates(case)
        output = OutputLayer(base.lm_head)
        heads = MedusaHeads(case.num_heads, 1, case.hidden, case.vocab, case.lm_head)
        heads.init_from_output(output.weight)
        self.objective = HeadsObjective(
            base,
            heads,
            LossConfig(chunk_size=case.chunk_size, implementation=case.implementation),
            train_base=case.recipe == "medusa2",
            output=output,
        )
        trained = [p for p in self.objective.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        ids = torch.randint(0, case.vocab, (1, case.tokens))
        ones = torch.ones_like(ids)
        self.optimizer.step()  # Adam's state comes into being
        num_valid = [NUM_MICRO_BATCHES * (case.tokens - 1 - i) for i in range(case.num_heads + 1)]
        self.batch: dict[str, Tensor] = {
            "input_ids": ids,
            "labels": ids,
            "position_ids": torch.arange(case.tokens)[None],
            "segment_ids": ones,
            "num_valid": torch.tensor(num_valid, dtype=torch.float32),
        }

    def step(self) -> None:
        """Run one optimizer step."""
        for _ in range(NUM_MICRO_BATCHES):
            loss, _metrics = self.objective(self.batch)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def allocator_peak(case: Case) -> int:
    """Return the most bytes that tensors occupy at one time during a step, all of them counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        setup = Setup(case)
        begin = time.time_ns()
        setup.step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = current = 0
    for when, change in changes:
        current += change
        peak = max(peak, current) if when >= begin else 0
    return peak


def resident_peak(case: Case) -> int:
    """Return the peak of resident memory during a step above that of Python with torch loaded."""
    pin_threads(case.threads)
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    loaded = peak_memory(torch.device("cpu"), reset=True) and peak_memory(torch.device("cpu"))
    setup = Setup(case)
    peak_memory(torch.device("cpu"), reset=True)
    setup.step()
    return peak_memory(torch.device("cpu")) - loaded


def in_subprocess(measure: str, case: Case) -> int:
    """Run ``measure`` for ``case`` in a fresh process."""
    # Freed blocks go back to the system at once, so that resident memory is memory in use.
    returning = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", measure, "--case", json.dumps(asdict(case))],
        env={**os.environ, **returning},
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.splitlines()[-1])


def take_times(cases: list[Case], rows: list[dict[str, Any]], repeats: int) -> None:
    """Time ``repeats`` steps of every case, the cases taking turns."""
    setups = [Setup(case) for case in cases]
    for setup, row in zip(setups, rows, strict=True):
        setup.step()
        row |= {"seconds": [], "processor_seconds": []}
    for _ in range(repeats):
        for setup, row in zip(setups, rows, strict=True):
            start = time.perf_counter(), time.process_time()
            setup.step()
            row["seconds"].append(time.perf_counter() - start[0])
            row["processor_seconds"].append(time.process_time() - start[1])


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row its ratios to the fewest heads and to the naive loss."""
    same = ("recipe", "lm_head", "implementation", "num_heads")
    by_key = {tuple(row[key] for key in same): row for row in rows}
    fewest = min(row["num_heads"] for row in rows)
    for row in rows:
        key = tuple(row[name] for name in same)
        one, naive = by_key[(*key[:3], fewest)], by_key.get((*key[:2], "naive", key[3]))
        for kind in ("allocator", "resident"):
            if (peak := row.get(f"{kind}_peak")) is not None:
                # own heads bring matrices of their own; shared ones are held to everything
                less = {id(r): r["owned_bytes"] * (r["lm_head"] == "own") for r in (row, one)}
                rest = one[f"{kind}_peak"] - less[id(one)]
                row[f"{kind}_ratio"] = (peak - less[id(row)]) / rest
        for kind in ("seconds", "processor_seconds"):
            if kind in row and naive:
                ours, theirs = statistics.median(row[kind]), statistics.median(naive[kind])
                row[f"{kind}_vs_naive"] = ours / theirs


def table(rows: list[dict[str, Any]]) -> str:
    """Lay the rows out as text."""
    titles = (
        "recipe", "lm_head", "loss", "heads", "allocator MiB", "ratio", "resident MiB", "ratio",
        "s/step", "vs naive", "processor s", "vs naive",
    )  # fmt: skip
    lines = [titles]
    for row in rows:
        clock, used = (
            statistics.median(row[kind]) if kind in row else None
            for kind in ("seconds", "processor_seconds")
        )
        cells: tuple[tuple[Any, str], ...] = (
            (row.get("allocator_peak", 0) / MIB or None, ".1f"),
            (row.get("allocator_ratio"), ".3f"),
            (row.get("resident_peak", 0) / MIB or None, ".1f"),
            (row.get("resident_ratio"), ".3f"),
            (clock, ".3f"),
            (row.get("seconds_vs_naive"), ".3f"),
            (used, ".3f"),
            (row.get("processor_seconds_vs_naive"), ".3f"),
        )
        shown = ["" if value is None else format(value, spec) for value, spec in cells]
        names = (row["recipe"], row["lm_head"], row["implementation"], str(row["num_heads"]))
        lines.append((*names, *shown))
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def main() -> None:
    """Parse the command line, measure, print table and JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="per micro-batch")
    parser.add_argument("--chunk-size", type=int, default=0, help="rows of logits at one time")
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--recipes", nargs="+", default=["medusa1", "medusa2"])
    parser.add_argument("--lm-heads", nargs="+", default=["shared", "own"])
    parser.add_argument("--implementations", nargs="+", default=["fused", "naive"])
    parser.add_argument("--repeats", type=int, default=5, help="timed steps; 0: none")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--measure", choices=["allocator", "resident"], help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        case = Case(**json.loads(args.case))
        print(allocator_peak(case) if args.measure == "allocator" else resident_peak(case))
        return

    threads = pin_threads(args.threads)
    sizes = (args.vocab, args.hidden, args.tokens, args.chunk_size, threads)
    cases = [
        Case(recipe, lm_head, implementation, num_heads, *sizes)
        for recipe in args.recipes
        for lm_head in args.lm_heads
        for implementation in args.implementations
        for num_heads in sorted(args.heads)
    ]
    rows: list[dict[str, Any]] = [{**asdict(c), "owned_bytes": c.owned_bytes()} for c in cases]
    if not args.no_memory:
        for number, (case, row) in enumerate(zip(cases, rows, strict=True), 1):
            print(f"\rmemory {number}/{len(cases)}", end="", file=sys.stderr, flush=True)
            row["allocator_peak"] = in_subprocess("allocator", case)
            row["resident_peak"] = in_subprocess("resident", case)
        print(file=sys.stderr)
    if args.repeats:
        take_times(cases, rows, args.repeats)
    compare(rows)
    settings = {k: v for k, v in vars(args).items() if k not in ("measure", "case", "out")}
    report = {"environment": environment(), "settings": settings, "rows": rows}
    text = json.dumps(report, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(table(rows))
    print(
        "ratio: to the fewest heads; for own, less the heads' parameters, gradients, optimizer\n"
        "state and one V * d buffer per head (the naive loss holds no such buffer)."
    )
    print(text)


if __name__ == "__main__":
    main()
