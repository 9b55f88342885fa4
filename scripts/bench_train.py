"""Measure training of Medusa heads: ours beside the reference's loss, same weights, same batch.

    python scripts/bench_train.py --out benchmarks/train.json

The reference is Medusa's own trainer (medusa/train/train_legacy.py) with the heads of the paper:
the frozen base under no_grad, the logits of all heads stacked to [K, B, T, V], then for each head
a cross entropy over what the shift leaves, averaged over its labels, and its top-1. Ours is
``HeadsObjective`` as the recipe medusa1 uses it, top-1 and top-5 counted, with decay 1, since the
reference knows none; before anything is timed, losses and gradients of the two are compared.

A step is forward, backward, clipping and a fused AdamW step. Times are taken in one process, the
two taking turns; the ratio is of neighbouring steps. They are taken twice: with the allocator as
the system has it, where a step's large temporaries are fetched from the system anew, and with
freed memory kept, as ``specheads.train`` sets it for whatever it runs (glibc only). Peak memory is
that of a step in a process of its own: of torch's allocator (parameters, gradients and the
optimizer's state included), and of the resident process above Python with torch loaded. On a
machine that is not idle, trust the processor time (with --threads 1) rather than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.config.training import LossConfig
from specheads.losses.cross_entropy import IGNORE
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.system.hardware import environment, peak_memory, pin_threads
from specheads.train import keep_freed_memory
from specheads.training.objectives import HeadsObjective

MIB = 2**20
SPEED_TARGET, MEMORY_TARGET = 1.1, 0.5
SIDES = ("ours", "reference")


@dataclass(frozen=True)
class Case:
    """One configuration; see the command line for the sizes."""

    vocab: int
    hidden: int
    base_layers: int
    num_heads: int
    num_layers: int
    rows: int
    seq_len: int
    learned: float
    chunk_size: int
    threads: int


class Reference(nn.Module):
    """The loss of train_legacy.py over our heads' very parameters."""

    def __init__(self, base: LlamaForCausalLM, heads: MedusaHeads) -> None:
        super().__init__()
        self.base, self.heads = base, heads
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORE)

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return the logits [K, B, T, V] of all heads."""
        with torch.no_grad():
            hidden = self.base.model(input_ids=input_ids, use_cache=False)[0]
        made = []
        for head in self.heads.heads:
            x = hidden
            for block in head.blocks:
                x = x + nn.functional.silu(nn.functional.linear(x, block.weight, block.bias))
            made.append(nn.functional.linear(x, head.lm_head.weight))
        return torch.stack(made)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Return the sum of the heads' mean losses, and what the reference logs."""
        logits, labels = self.logits(batch["input_ids"]), batch["labels"]
        total: Tensor = torch.zeros(())
        log: dict[str, Any] = {}
        for i in range(len(logits)):
            shifted = logits[i, :, : -(2 + i)].contiguous().view(-1, logits.shape[-1])
            target = labels[..., 2 + i :].contiguous().view(-1)
            loss = self.loss(shifted, target)
            total = total + loss
            log[f"head_{i}/loss"] = loss.item()
            valid = target.ne(IGNORE)
            _, top = shifted.topk(1, dim=-1)
            hits = top[valid].eq(target[valid].unsqueeze(-1)).any(-1)
            log[f"head_{i}/top1"] = hits.float().mean().item()
        return total, log


class Setup:
    """One side of a case, ready to step."""

    def __init__(self, case: Case, side: str) -> None:
        pin_threads(case.threads)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=case.vocab,
            hidden_size=case.hidden,
            intermediate_size=8 * case.hidden // 3,
            num_hidden_layers=case.base_layers,
            num_attention_heads=max(1, case.hidden // 64),
            num_key_value_heads=max(1, case.hidden // 64),
            max_position_embeddings=case.seq_len,
            tie_word_embeddings=False,
        )
        base = LlamaForCausalLM(config).eval().requires_grad_(False)
        output = output_layer(base)
        self.heads = MedusaHeads(case.num_heads, case.num_layers, case.hidden, case.vocab, "own")
        self.heads.init_from_output(output.weight)
        self.objective: nn.Module
        if side == "ours":
            self.objective = HeadsObjective(
                base,
                self.heads,
                LossConfig(decay=1.0, chunk_size=case.chunk_size),
                train_base=False,
                output=output,
            )
        else:
            self.objective = Reference(base, self.heads)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, case.vocab, (case.rows, case.seq_len))
        labels = ids.clone()  # what is not learned stands first, as a prompt does
        labels[:, : round((1 - case.learned) * case.seq_len)] = IGNORE
        self.batch = {
            "input_ids": ids,
            "labels": labels,
            "position_ids": torch.arange(case.seq_len).expand_as(ids),
            "segment_ids": torch.ones_like(ids),
        }

    def step(self) -> float:
        """Run one optimizer step; return the loss."""
        loss, _ = self.objective(self.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def compare_losses(case: Case) -> dict[str, float]:
    """Return by how much losses and gradients differ, relative to the reference's.

    Raises:
        SystemExit: if they are not the same loss.
    """
    found: dict[str, tuple[float, list[Tensor]]] = {}
    for side in SIDES:
        setup = Setup(case, side)
        loss, _ = setup.objective(setup.batch)
        loss.backward()
        grads = [p.grad for p in setup.heads.parameters() if p.grad is not None]
        found[side] = (float(loss.detach()), grads)
    (loss, grads), (expected, expected_grads) = found["ours"], found["reference"]
    pairs = list(zip(grads, expected_grads, strict=True))
    errors = {
        "loss": abs(loss - expected) / expected,
        "gradient": max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs),
    }
    if not (errors["loss"] < 1e-5 and errors["gradient"] < 1e-3):
        raise SystemExit(f"not the same loss: ours {loss}, the reference's {expected}, {errors}")
    return {"value": loss, **errors}


def allocator_peak(case: Case, side: str) -> int:
    """Return the most bytes that tensors occupy at one time during a step, all of them counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        setup = Setup(case, side)
        setup.step()  # Adam's state comes into being
        begin = time.time_ns()
        setup.step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    peak = current = 0
    for when, change in changes:
        current += change
        peak = max(peak, current) if when >= begin else 0
    return peak


def resident_peak(case: Case, side: str) -> int:
    """Return the peak of resident memory during a step above that of Python with torch loaded."""
    pin_threads(case.threads)
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    cpu = torch.device("cpu")
    loaded = peak_memory(cpu, reset=True) and peak_memory(cpu)
    setup = Setup(case, side)
    setup.step()
    peak_memory(cpu, reset=True)
    setup.step()
    return peak_memory(cpu) - loaded


def in_subprocess(measure: str, case: Case, side: str) -> int:
    """Run ``measure`` in a fresh process."""
    # Freed blocks go back to the system at once, so that resident memory is memory in use.
    returning = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    arguments = ["--measure", measure, "--side", side, "--case", json.dumps(asdict(case))]
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, **returning},
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.splitlines()[-1])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def take_times(case: Case, repeats: int) -> dict[str, Any]:
    """Time ``repeats`` steps of both sides, taking turns."""
    setups = {side: Setup(case, side) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    processor: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(-1, repeats):
        for side in SIDES if repeat % 2 else SIDES[::-1]:
            start = time.perf_counter(), time.process_time()
            setups[side].step()
            if repeat >= 0:  # the first one warms up
                seconds[side].append(time.perf_counter() - start[0])
                processor[side].append(time.process_time() - start[1])
    tokens = case.rows * case.seq_len
    row: dict[str, Any] = {"seconds": seconds, "processor_seconds": processor}
    for side in SIDES:
        row[f"{side}_tokens_per_second"] = tokens / statistics.median(seconds[side])
    for name, taken in (("speed", seconds), ("processor_speed", processor)):
        pairs = zip(taken["ours"], taken["reference"], strict=True)
        row[f"{name}_ratio"] = spread([theirs / ours for ours, theirs in pairs])
    return row


def measure(case: Case, allocator: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return everything about one case."""
    row: dict[str, Any] = {
        **asdict(case),
        "allocator": allocator,
        "difference": compare_losses(case),
    }
    if args.repeats:
        row |= take_times(case, args.repeats)
        row["speed_kept"] = row["speed_ratio"]["median"] >= SPEED_TARGET
    if not args.no_memory and allocator == args.allocators[0]:  # in processes of their own
        for kind in ("allocator", "resident"):
            peaks = {side: in_subprocess(kind, case, side) for side in SIDES}
            row[f"{kind}_peak"] = peaks
            row[f"{kind}_ratio"] = peaks["ours"] / peaks["reference"]
        row["memory_kept"] = max(row["allocator_ratio"], row["resident_ratio"]) <= MEMORY_TARGET
    return row


def print_row(row: dict[str, Any]) -> None:
    """Print one case."""
    print(
        f"\nV={row['vocab']:,} d={row['hidden']} K={row['num_heads']},"
        f" {row['rows']} x {row['seq_len']} tokens, {row['learned']:.0%} learned, allocator"
        f" {row['allocator']}; loss"
        f" {row['difference']['value']:.5f}, differs by {row['difference']['loss']:.1e}"
        f" (gradients {row['difference']['gradient']:.1e})"
    )
    if "seconds" in row:
        for side in SIDES:
            taken, used = spread(row["seconds"][side]), spread(row["processor_seconds"][side])
            print(
                f"  {side:<10}{row[f'{side}_tokens_per_second']:>9,.0f} tokens/s,"
                f" {taken['median']:.3f} s/step ({taken['min']:.3f}-{taken['max']:.3f}),"
                f" processor {used['median']:.3f} s"
            )
        ratio, used = row["speed_ratio"], row["processor_speed_ratio"]
        print(
            f"  speed     {ratio['median']:.2f}x ({ratio['min']:.2f}-{ratio['max']:.2f}),"
            f" by processor time {used['median']:.2f}x (aim: {SPEED_TARGET}"
            f"{'' if row['speed_kept'] else '; MISSED'})"
        )
    if "memory_kept" in row:
        for kind in ("allocator", "resident"):
            ours, theirs = (row[f"{kind}_peak"][side] / MIB for side in SIDES)
            print(f"  {kind:<10}{ours:,.0f} of {theirs:,.0f} MiB: {row[f'{kind}_ratio']:.2f}x")
        print(f"  (aim: {MEMORY_TARGET}{'' if row['memory_kept'] else '; MISSED'})")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--base-layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=1, help="residual blocks per head")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument(
        "--learned", type=float, nargs="+", default=[1.0, 0.5], help="share of tokens with a label"
    )
    parser.add_argument(
        "--allocators",
        nargs="+",
        default=["system", "kept"],
        help="freed memory goes back to the system, or is kept; kept comes last",
    )
    parser.add_argument("--chunk-size", type=int, default=0, help="rows of logits at one time")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps; 0: none")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--measure", choices=["allocator", "resident"], help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.allocators not in (["system"], ["kept"], ["system", "kept"]):
        parser.error("--allocators must be system, kept, or both in this order")
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out is {args.out}, but there is no folder {args.out.parent}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print table and JSON."""
    args = parse(argv)
    if args.measure:
        case = Case(**json.loads(args.case))
        print((allocator_peak if args.measure == "allocator" else resident_peak)(case, args.side))
        return
    threads = pin_threads(args.threads)
    report: dict[str, Any] = {"environment": environment(), "rows": []}
    print(json.dumps(report["environment"]))
    hidden = ("measure", "side", "case", "out")
    report["settings"] = {k: v for k, v in vars(args).items() if k not in hidden}
    for allocator in args.allocators:
        if allocator == "kept":
            keep_freed_memory()
        for learned in args.learned:
            case = Case(
                args.vocab,
                args.hidden,
                args.base_layers,
                args.heads,
                args.layers,
                args.rows,
                args.seq_len,
                learned,
                args.chunk_size,
                threads,
            )
            report["rows"].append(measure(case, allocator, args))
            print_row(report["rows"][-1])
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
