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

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.config.training import LossConfig
from specheads.models.mtp import MtpHeads, block_config
from specheads.system.hardware import pin_threads
from specheads.train import keep_freed_memory
from specheads.training.objectives import HeadsObjective, LMObjective

SIDES = ("ours", "naive")
ALLOCATORS = ("kept", "system")


@dataclass
class Settings:
    """Sizes; heads are counted with the next-token head.

    Attributes:
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
    variant: Literal["parallel", "causal", "sequential"] = "parallel"
    heads: tuple[int, ...] = (1, 2, 4, 8)
    timed_heads: int = 4
    repeats: int = 5
    no_memory: bool = False
    threads: int = 0
    out: Path | None = None


class Setup:
    """Model and batch of a case, ready to step."""

    def __init__(self, case: dict[str, Any]) -> None:
        pin_threads(case["threads"])
        self.case, num_heads = case, case["num_heads"]
        config = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
        self.base: Any = harness.llama(case["vocab"], case["hidden"], 2, **config)
        self.heads: MtpHeads | None = None
        loss = LossConfig(chunk_size=case["chunk_size"], decay=1.0, lambda_0=1.0)
        if num_heads > 1:
            sizes = num_heads - 1, block_config(self.base.config), case["vocab"]
            self.heads = MtpHeads(*sizes, variant=case["variant"])
            self.objective = HeadsObjective(self.base, self.heads, loss, train_base=True)
        else:
            self.objective = LMObjective(self.base, loss)
        self.objective.train(case["side"] == "ours")  # in eval mode the heads make nothing again
        for parameter in self.objective.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.batch = harness.batch_of(torch.randint(0, case["vocab"], (1, case["tokens"])))

    def step(self) -> dict[str, float]:
        """Run forward and backward; return the loss, and the bytes that the heads own.

        Those are of their parameters and gradients.
        """
        loss = self.objective(self.batch)[0] if self.case["side"] == "ours" else self.naive()
        loss.backward()
        parameters = () if self.heads is None else self.heads.parameters()
        owned = sum(2 * p.numel() * p.element_size() for p in parameters)
        return {"loss": float(loss.detach()), "owned_bytes": owned}

    def naive(self) -> Tensor:
        """Return the same loss as everybody writes it first."""
        ids, positions = self.batch["input_ids"], self.batch["position_ids"]
        output = self.base.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        found = [output.last_hidden_state[0]]
        if self.heads is not None:
            final = self.case["variant"] == "sequential"
            read = output.last_hidden_state if final else output.hidden_states[-2]
            found += self.heads.contextual(read, positions, ids)[:, 0]
        logits = [self.base.lm_head(hidden) for hidden in found]  # of all heads
        losses = [F.cross_entropy(each[: -1 - i], ids[0, 1 + i :]) for i, each in enumerate(logits)]
        return torch.stack(losses).sum()


def peak(case: dict[str, Any]) -> dict[str, float]:
    """Return the allocator's peak in a step of a case, its loss, and the heads' own bytes."""
    found, of_step = harness.allocator_peak(lambda: Setup(case).step)
    return {"allocator_peak": found, **of_step}


def add_growth(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row the growth of what the heads do not own over its side's fewest heads."""
    for row in rows:
        first = next(each for each in rows if each["side"] == row["side"])
        row["growth"] = (row["allocator_peak"] - row["owned_bytes"]) / first["allocator_peak"] - 1


def take_times(cases: Sequence[dict[str, Any]], repeats: int, allocator: str) -> dict[str, Any]:
    """Time steps of some sides, which take turns, with an allocator of ``ALLOCATORS``."""
    if allocator == "kept":
        keep_freed_memory()
    ways = {case["side"]: Setup(case).step for case in cases}
    found: dict[str, Any] = harness.take_turns(ways, repeats)
    for kind in ("seconds", "processor_seconds"):
        pairs = zip(found["ours"][kind], found["naive"][kind], strict=True)
        found[f"{kind}_vs_naive"] = statistics.median(ours / naive for ours, naive in pairs)
    return {"allocator": allocator, "num_heads": cases[0]["num_heads"], **found}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    settings = harness.parse(Settings, argv)
    shared = {"threads": pin_threads(settings.threads)}
    for name in ("variant", "vocab", "hidden", "tokens", "chunk_size"):
        shared[name] = getattr(settings, name)
    rows: list[dict[str, Any]] = []
    if not settings.no_memory:
        counts = sorted(settings.heads)
        rows = [{"side": s, "num_heads": count, **shared} for s in SIDES for count in counts]
    for number, row in enumerate(rows, 1):
        print(f"\rmemory {number}/{len(rows)}", end="", file=sys.stderr, flush=True)
        row |= harness.in_fresh_process(peak, row)
    add_growth(rows)
    timed = [{"side": s, "num_heads": settings.timed_heads, **shared} for s in SIDES]
    times = [
        harness.in_fresh_process(take_times, timed, settings.repeats, allocator)
        for allocator in ALLOCATORS * bool(settings.repeats)
    ]
    print()
    harness.publish(settings, rows, times=times)
    print(harness.describe({"times": times}))


if __name__ == "__main__":
    main()
