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

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import harness
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specheads.config.training import LossConfig
from specheads.losses.cross_entropy import IGNORE
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.system.hardware import pin_threads
from specheads.train import keep_freed_memory
from specheads.training.objectives import HeadsObjective

SPEED_TARGET, MEMORY_TARGET = 1.1, 0.5
SIDES = ("ours", "reference")


@dataclass
class Settings:
    """Sizes, and what is measured.

    Attributes:
        layers: residual blocks per head
        learned: share of tokens with a label
        allocators: freed memory goes back to the system, or is kept from then on
        chunk_size: rows of logits at one time
        repeats: timed steps; 0: none
        no_memory: time only
        threads: 0: all
        out: write the JSON there
    """

    vocab: int = 32000
    hidden: int = 256
    base_layers: int = 4
    heads: int = 4
    layers: int = 1
    rows: int = 2
    seq_len: int = 512
    learned: tuple[float, ...] = (1.0, 0.5)
    allocators: tuple[Literal["system", "kept"], ...] = ("system", "kept")
    chunk_size: int = 0
    repeats: int = 9
    no_memory: bool = False
    threads: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if list(self.allocators) not in (["system"], ["kept"], ["system", "kept"]):
            raise ValueError("--allocators must be system, kept, or both in this order")


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
        total, log = torch.zeros(()), {}
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

    def __init__(self, case: dict[str, Any], side: str) -> None:
        pin_threads(case["threads"])
        vocab, hidden, chunk_size = case["vocab"], case["hidden"], case["chunk_size"]
        base = harness.llama(vocab, hidden, case["base_layers"]).eval().requires_grad_(False)
        output = output_layer(base)
        self.heads = MedusaHeads(case["num_heads"], case["num_layers"], hidden, vocab, "own")
        self.heads.init_from_output(output.weight)
        self.objective: nn.Module = Reference(base, self.heads)
        if side == "ours":
            loss = LossConfig(decay=1.0, chunk_size=chunk_size)
            options = {"train_base": False, "output": output}
            self.objective = HeadsObjective(base, self.heads, loss, **options)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=1e-4, fused=True)
        self.batch = harness.batch_of(torch.randint(0, vocab, (case["rows"], case["seq_len"])))
        labels = self.batch["labels"].clone()  # what is not learned stands first, as a prompt does
        labels[:, : round((1 - case["learned"]) * case["seq_len"])] = IGNORE
        self.batch["labels"] = labels

    def step(self) -> None:
        """Run one optimizer step."""
        loss, _ = self.objective(self.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def compare_losses(case: dict[str, Any]) -> dict[str, float]:
    """Return by how much losses and gradients differ, relative to the reference's.

    Raises:
        SystemExit: if they are not the same loss.
    """
    losses, grads = [], []
    for side in SIDES:
        setup = Setup(case, side)
        loss, _ = setup.objective(setup.batch)
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append([p.grad for p in setup.heads.parameters() if p.grad is not None])
    ours, expected = losses
    pairs = zip(*grads, strict=True)
    away = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)
    errors = {"loss": abs(ours - expected) / expected, "gradient": away}
    if not (errors["loss"] < 1e-5 and errors["gradient"] < 1e-3):
        raise SystemExit(f"not the same loss: ours {ours}, the reference's {expected}, {errors}")
    return {"value": ours, **errors}


def warmed_up(case: dict[str, Any], side: str) -> Callable[[], None]:
    """Return a step of one side whose optimizer's state has come into being."""
    setup = Setup(case, side)
    setup.step()
    return setup.step


def allocator_peak(case: dict[str, Any], side: str) -> int:
    """Return the allocator's peak in a step of a side."""
    return harness.allocator_peak(lambda: warmed_up(case, side))[0]


def resident_peak(case: dict[str, Any], side: str) -> int:
    """Return the process's peak in a step of a side."""
    return harness.resident_peak(lambda: warmed_up(case, side))


def take_times(case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Time steps of both sides, which take turns."""
    taken = harness.take_turns({side: Setup(case, side).step for side in SIDES}, repeats)
    row: dict[str, Any] = {}
    for kind, name in (("seconds", "speed_ratio"), ("processor_seconds", "processor_speed_ratio")):
        ours, theirs = (taken[side][kind] for side in SIDES)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        row[kind] = dict(zip(SIDES, (ours, theirs), strict=True))
        row[name] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    for side in SIDES:
        taken_by_a_step = statistics.median(row["seconds"][side])
        row[f"{side}_tokens_per_second"] = case["rows"] * case["seq_len"] / taken_by_a_step
    return row | {"speed_kept": row["speed_ratio"]["median"] >= SPEED_TARGET}


def take_peaks(case: dict[str, Any]) -> dict[str, Any]:
    """Measure the memory of both sides in processes of their own."""
    row: dict[str, Any] = {}
    for kind, measure in (("allocator", allocator_peak), ("resident", resident_peak)):
        peaks = {s: harness.in_fresh_process(measure, case, s, **harness.RETURNING) for s in SIDES}
        row |= {f"{kind}_peak": peaks, f"{kind}_ratio": peaks["ours"] / peaks["reference"]}
    largest = max(row["allocator_ratio"], row["resident_ratio"])
    return row | {"memory_kept": largest <= MEMORY_TARGET}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    given = harness.parse(Settings, argv)
    same = ("vocab", "hidden", "base_layers", "rows", "seq_len", "chunk_size")
    sizes = {name: getattr(given, name) for name in same}
    sizes |= {"num_heads": given.heads, "num_layers": given.layers}
    sizes["threads"] = pin_threads(given.threads)
    rows = []
    for allocator in given.allocators:
        if allocator == "kept":
            keep_freed_memory()
        for learned in given.learned:
            case = {**sizes, "learned": learned}
            row = {**case, "allocator": allocator, "difference": compare_losses(case)}
            if given.repeats:
                row |= take_times(case, given.repeats)
            if not given.no_memory and allocator == given.allocators[0]:
                row |= take_peaks(case)
            rows.append(row)
    harness.publish(given, rows)


if __name__ == "__main__":
    main()
