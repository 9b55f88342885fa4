"""Measure memory and time of a training step of Medusa heads: ours beside the naive loss.

    python scripts/bench_memory.py --out benchmarks/memory.json

A step is two micro-batches and an AdamW step, with every .grad already there. The base's trunk is
left out (its hidden states are given): whatever it takes is the same for any number of heads and
would only bring the ratios nearer to 1. Every case runs in processes of its own: one under torch's
profiler for the peak of the allocator, one without for the peak of its resident memory. Times are
taken in one further process, the cases taking turns; on a machine that is not idle, trust the
processor time (with --threads 1) rather than the clock.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import harness
import references
import torch
from torch import nn

from specheads.config.training import LossConfig
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer
from specheads.system.hardware import pin_threads
from specheads.training.objectives import HeadsObjective

NUM_MICRO_BATCHES = 2


@dataclass
class Settings:
    """Sizes, and the cases.

    Attributes:
        tokens: per micro-batch
        chunk_size: rows of logits at one time
        repeats: timed steps; 0: none
        no_memory: time only
        threads: 0: all
        out: write the JSON there
    """

    vocab: int = 32000
    hidden: int = 256
    tokens: int = 1024
    chunk_size: int = 0
    heads: tuple[int, ...] = (1, 4)
    recipes: tuple[str, ...] = ("medusa1", "medusa2")
    lm_heads: tuple[str, ...] = ("shared", "own")
    implementations: tuple[Literal["fused", "naive"], ...] = ("fused", "naive")
    repeats: int = 5
    no_memory: bool = False
    threads: int = 0
    out: Path | None = None


class GivenStates(nn.Module):
    """A base model whose last hidden states are a constant times a gain that can be trained."""

    def __init__(self, vocab: int, hidden: int, tokens: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.register_buffer("states", torch.randn(1, tokens, hidden))
        self.gain = nn.Parameter(torch.ones(hidden))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def base_model(self, **_: Any) -> SimpleNamespace:
        """Return hidden states as a transformers model does."""
        return SimpleNamespace(last_hidden_state=self.states * self.gain)


def build(case: dict[str, Any]) -> Callable[[], None]:
    """Return an optimizer step of a case, all of its state in being."""
    torch.manual_seed(0)
    pin_threads(case["threads"])
    tokens, num_heads = case["tokens"], case["num_heads"]
    base = GivenStates(case["vocab"], case["hidden"], tokens)
    output = OutputLayer(base.lm_head)
    heads = MedusaHeads(num_heads, 1, case["hidden"], case["vocab"], case["lm_head"])
    heads.init_from_output(output.weight)
    loss = LossConfig(chunk_size=case["chunk_size"])
    tuned = case["recipe"] == "medusa2"
    objective = HeadsObjective(base, heads, loss, train_base=tuned, output=output)
    if case["implementation"] == "naive":
        references.by_all_logits(objective)
    trained = [p for p in objective.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    optimizer.step()  # Adam's state comes into being
    batch = harness.batch_of(torch.randint(0, case["vocab"], (1, tokens)))
    num_valid = [float(NUM_MICRO_BATCHES * (tokens - 1 - i)) for i in range(num_heads + 1)]
    batch["num_valid"] = torch.tensor(num_valid)

    def step() -> None:
        for _ in range(NUM_MICRO_BATCHES):
            loss, _metrics = objective(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def allocator_peak(case: dict[str, Any]) -> int:
    """Return the allocator's peak in a step of a case."""
    return harness.allocator_peak(lambda: build(case))[0]


def resident_peak(case: dict[str, Any]) -> int:
    """Return the process's peak in a step of a case."""
    return harness.resident_peak(lambda: build(case))


def owned_bytes(case: dict[str, Any]) -> int:
    """Return what comes with the heads anyway: parameters, .grad, Adam's two, V * d buffers."""
    matrix = case["vocab"] * case["hidden"] if case["lm_head"] == "own" else 0
    blocks = case["hidden"] * (case["hidden"] + 1)
    buffer = matrix if case["implementation"] != "naive" else 0
    return 4 * case["num_heads"] * (4 * (matrix + blocks) + buffer)


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row its ratios to the fewest heads and to the naive loss."""
    names = ("recipe", "lm_head", "implementation", "num_heads")
    by_key = {tuple(row[name] for name in names): row for row in rows}
    fewest = min(row["num_heads"] for row in rows)
    for (recipe, lm_head, implementation, count), row in by_key.items():
        both = row, by_key[recipe, lm_head, implementation, fewest]
        # own heads bring matrices of their own; shared ones are held to everything
        owned = [each["owned_bytes"] * (lm_head == "own") for each in both]
        for kind in ("allocator", "resident"):
            if f"{kind}_peak" in row:
                ours, one = (r[f"{kind}_peak"] - o for r, o in zip(both, owned, strict=True))
                row[f"{kind}_ratio"] = ours / one
        naive = by_key.get((recipe, lm_head, "naive", count), {})
        for kind in ("seconds", "processor_seconds"):
            if kind in row and kind in naive:
                ours, theirs = (statistics.median(each[kind]) for each in (row, naive))
                row[f"{kind}_vs_naive"] = ours / theirs


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    settings = harness.parse(Settings, argv)
    threads = pin_threads(settings.threads)
    sizes = {name: getattr(settings, name) for name in ("vocab", "hidden", "tokens", "chunk_size")}
    chosen = (settings.recipes, settings.lm_heads, settings.implementations, sorted(settings.heads))
    names = ("recipe", "lm_head", "implementation", "num_heads")
    rows = [dict(zip(names, each, strict=True)) | sizes for each in product(*chosen)]
    for number, row in enumerate(rows, 1):
        row |= {"threads": threads, "owned_bytes": owned_bytes(row)}
        if not settings.no_memory:
            print(f"\rmemory {number}/{len(rows)}", end="", file=sys.stderr, flush=True)
            for measure in (allocator_peak, resident_peak):
                peak = harness.in_fresh_process(measure, row, **harness.RETURNING)
                row[measure.__name__] = peak
    if settings.repeats:
        taken = harness.take_turns(dict(enumerate(map(build, rows))), settings.repeats)
        for row, times in zip(rows, taken.values(), strict=True):
            row |= times
    compare(rows)
    print()
    harness.publish(settings, rows)
    print("ratio: to the fewest heads; for own, less the heads' parameters, gradients, optimizer")
    print("state and one V * d buffer per head (the naive loss holds no such buffer).")


if __name__ == "__main__":
    main()
