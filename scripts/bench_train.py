"""Measure training of four kinds of heads: ours beside reference trainers in plain torch.

    python scripts/bench_train.py --repeats 3 --out benchmarks/train.json

``medusa1`` and ``hydra`` have heads with matrices of their own on a frozen base, ``dflash`` block
heads of the published form that share the base's matrix, and ``mtp`` parallel heads that share it
and are trained with the base from scratch; heads of mtp are counted with the next-token head. The
references compute the loss as the authors' trainers do, see ``references.py``; ``fused`` is the
same with ``torch.nn.functional.linear_cross_entropy`` of torch 2.13 in place of whole logits. Ours
is ``HeadsObjective`` with the weights of the losses that the reference knows, and counts top-1 and
top-5 hits of every head. Nobody reads stored hidden states: each step runs the base.

All sides have the same weights, batch, dtype (float32) and threads, and a step is forward,
backward, clipping and a fused AdamW step. Before anything is timed, losses and gradients are
compared, with noise on the weights, as much of a head's inside has no gradient where it starts.

Times are taken in one process, the sides taking turns; ratios are of neighbouring steps. They are
taken twice: with the allocator as the system has it, where a step's large temporaries are fetched
from the system anew, and with freed memory kept, as ``specheads.train`` sets it for whatever it
runs (glibc only). Peak memory is that of a step in a process of its own: of torch's allocator
(parameters, gradients and the optimizer's state included), and of the resident process above Python
with torch loaded. On a machine that is not idle, trust the processor time (with --threads 1) rather
than the clock.

Accuracy is top-1 of each head on held-out text after as many steps of every side, from the same
first weights on the same batches: bytes of this project's sources, on the embedded tinycode or, for
mtp, on a new model of the sizes given. Seeds choose the batches and whatever is drawn at the start.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import harness
import references
import torch
from torch import Tensor, nn

from specheads.config.training import HeadsConfig, LossConfig, MtpConfig
from specheads.losses.cross_entropy import IGNORE
from specheads.models.base import load_base_model
from specheads.models.block import BlockHeads
from specheads.models.heads import MedusaHeads
from specheads.models.mtp import MtpHeads
from specheads.models.output import output_layer
from specheads.system.hardware import pin_threads, quiet_loading
from specheads.train import keep_freed_memory
from specheads.training.objectives import HeadsObjective

SPEED_TARGET, MEMORY_TARGET = 1.1, 0.5
OURS, REFERENCE, FUSED = SIDES = ("ours", "reference", "fused")
TINYCODE = 272  # its vocabulary: bytes, and a few more
NOISE = 0.02  # on all weights that learn, where steps are compared or timed
HELDOUT_ROWS, HELDOUT_FILE = 16, 10  # every so many files are held out


@dataclass
class Settings:
    """Sizes, and what is measured.

    Attributes:
        layers: residual blocks per head of medusa1 and hydra
        block_layers: layers of dflash
        anchors: of dflash, per row
        learned: share of tokens with a label; mtp learns all
        allocators: freed memory goes back to the system, or is kept from then on
        chunk_size: rows of logits at one time
        repeats: timed steps; 0: none
        no_memory: measure no peaks
        steps: of the trainings whose accuracy is compared; 0: none
        seeds: of these
        lr: of all steps
        threads: 0: all
        out: write the JSON there
    """

    kinds: tuple[Literal["medusa1", "hydra", "dflash", "mtp"], ...] = (
        "medusa1",
        "hydra",
        "dflash",
        "mtp",
    )
    vocab: int = 32000
    hidden: int = 256
    base_layers: int = 4
    heads: int = 4
    layers: int = 1
    block_layers: int = 2
    anchors: int = 128
    rows: int = 2
    seq_len: int = 512
    learned: tuple[float, ...] = (1.0, 0.5)
    allocators: tuple[Literal["system", "kept"], ...] = ("system", "kept")
    chunk_size: int = 0
    repeats: int = 9
    no_memory: bool = False
    steps: int = 60
    seeds: tuple[int, ...] = (0, 1, 2)
    lr: float = 1e-3
    threads: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if list(self.allocators) not in (["system"], ["kept"], ["system", "kept"]):
            raise ValueError("--allocators must be system, kept, or both in this order")


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    Attributes:
        heads: their class.
        settings: of the heads, from the sizes of a case.
        reference: the loss as its authors' trainer computes it.
        decay: of the heads' losses, where the reference has one.
        train_base: the base learns too.
    """

    heads: Any
    settings: Callable[[Mapping[str, Any]], Any]
    reference: type[references.Reference]
    decay: float = 1.0
    train_base: bool = False


def residual(case: Mapping[str, Any], **more: Any) -> HeadsConfig:
    """Return the settings of Medusa or Hydra heads with matrices of their own."""
    sizes = {"num_heads": case["num_heads"], "num_layers": case["num_layers"]}
    return HeadsConfig(lm_head="own", **sizes, **more)


def block(case: Mapping[str, Any]) -> HeadsConfig:
    """Return the settings of block heads of the published form, as the recipe dflash has them."""
    form = {"form": "published", "num_taps": 5, "sample_from_anchor": False}
    return HeadsConfig(
        kind="block",
        num_heads=case["num_heads"],
        num_layers=case["block_layers"],
        lm_head="shared",
        options={**form, "anchors": case["anchors"]},
    )


def parallel(case: Mapping[str, Any]) -> MtpConfig:
    """Return the settings of parallel heads that share the base's output matrix."""
    return MtpConfig(num_heads=case["num_heads"], variant="parallel", lm_head="shared")


KINDS = {
    "medusa1": Kind(MedusaHeads, residual, references.Medusa),
    "hydra": Kind(MedusaHeads, lambda case: residual(case, condition=True), references.Hydra),
    "dflash": Kind(BlockHeads, block, references.DFlash, decay=0.7788),
    "mtp": Kind(MtpHeads, parallel, references.Mtp, train_base=True),
}


class Training:
    """One side of a kind of training on a base.

    Attributes:
        ours: our objective over these weights, whichever side learns.
        objective: that of the side.
        learned: the weights that learn, by name.
    """

    def __init__(self, case: Mapping[str, Any], side: str, base: Any) -> None:
        kind, output = KINDS[case["kind"]], output_layer(base)
        heads = kind.heads.from_settings(kind.settings(case), base, output)
        heads.init_from_output(output.weight)
        loss = LossConfig(decay=kind.decay, lambda_0=1.0, chunk_size=case["chunk_size"])
        self.ours = HeadsObjective(base, heads, loss, train_base=kind.train_base, output=output)
        self.objective: nn.Module = self.ours
        if side != OURS:
            self.objective = kind.reference(base, heads, decay=kind.decay, fused=side == FUSED)
        named = self.objective.named_parameters()
        self.learned = {name: each for name, each in named if each.requires_grad}
        self.optimizer = torch.optim.AdamW(self.learned.values(), lr=case["lr"], fused=True)

    @torch.no_grad()
    def disturb(self) -> None:
        """Add noise to all weights that learn."""
        for parameter in self.learned.values():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)

    def step(self, batch: Mapping[str, Tensor]) -> None:
        """Run one optimizer step."""
        loss, _ = self.objective(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.learned.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def accuracy(self, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Return top-1 of every head, and of a base that learns."""
        _, metrics = self.ours.eval()(batch)
        found = {name.partition("/")[0]: value for name, value in metrics.items() if "top1" in name}
        return {name: float(value) for name, value in found.items()}


class Setup(Training):
    """One side of a case, ready to step on its own batch."""

    def __init__(self, case: Mapping[str, Any], side: str) -> None:
        base = harness.llama(case["vocab"], case["hidden"], case["base_layers"])
        super().__init__(case, side, base)
        self.disturb()
        ids = torch.randint(0, case["vocab"], (case["rows"], case["seq_len"]))
        self.batch = harness.batch_of(ids)
        labels = self.batch["labels"].clone()  # what is not learned stands first, as a prompt does
        labels[:, : round((1 - case["learned"]) * case["seq_len"])] = IGNORE
        self.batch["labels"] = labels

    def run(self) -> None:
        """Run one optimizer step."""
        self.step(self.batch)

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        """Return the loss, and the gradient of every weight that learns."""
        loss, _ = self.objective(self.batch)
        loss.backward()
        zero = torch.zeros(())
        grads = {name: zero if p.grad is None else p.grad for name, p in self.learned.items()}
        return float(loss.detach()), grads


def compare_losses(case: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much losses and gradients differ at most, relative to the reference's.

    Raises:
        SystemExit: if they are not the same loss.
    """
    ours, grads = Setup(case, OURS).gradients()
    largest = {"loss": 0.0, "gradient": 0.0}
    for side in (REFERENCE, FUSED):
        expected, theirs = Setup(case, side).gradients()
        pairs = [(grads[name], each) for name, each in theirs.items()]
        away = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)
        errors = {"loss": abs(ours - expected) / expected, "gradient": away}
        if not (errors["loss"] < 1e-5 and errors["gradient"] < 1e-5):
            raise SystemExit(
                f"not the same loss of {case['kind']}: ours {ours}, {side} {expected}, {errors}"
            )
        largest = {name: max(largest[name], error) for name, error in errors.items()}
    return {"value": ours, **largest}


def warmed_up(case: Mapping[str, Any], side: str) -> Callable[[], None]:
    """Return a step of one side whose optimizer's state has come into being."""
    pin_threads(case["threads"])
    setup = Setup(case, side)
    setup.run()
    return setup.run


def allocator_peak(case: Mapping[str, Any], side: str) -> int:
    """Return the allocator's peak in a step of a side."""
    return harness.allocator_peak(lambda: warmed_up(case, side))[0]


def resident_peak(case: Mapping[str, Any], side: str) -> int:
    """Return the process's peak in a step of a side."""
    return harness.resident_peak(lambda: warmed_up(case, side))


def take_times(case: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """Time steps of all sides, which take turns."""
    taken = harness.take_turns({side: Setup(case, side).run for side in SIDES}, repeats)
    row: dict[str, Any] = {}
    for kind, name in (("seconds", "speed_ratio"), ("processor_seconds", "processor_speed_ratio")):
        row[kind] = {side: taken[side][kind] for side in SIDES}
        for side, prefix in ((REFERENCE, ""), (FUSED, "fused_")):
            pairs = zip(row[kind][OURS], row[kind][side], strict=True)
            ratios = [theirs / ours for ours, theirs in pairs]
            bounds = {"min": min(ratios), "max": max(ratios)}
            row[prefix + name] = {"median": statistics.median(ratios), **bounds}
    for side in SIDES:
        taken_by_a_step = statistics.median(row["seconds"][side])
        row[f"{side}_tokens_per_second"] = case["rows"] * case["seq_len"] / taken_by_a_step
    return row | {"speed_kept": row["speed_ratio"]["median"] >= SPEED_TARGET}


def take_peaks(case: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the memory of all sides in processes of their own."""
    row: dict[str, Any] = {}
    for kind, measure in (("allocator", allocator_peak), ("resident", resident_peak)):
        peaks = {s: harness.in_fresh_process(measure, case, s, **harness.RETURNING) for s in SIDES}
        row |= {f"{kind}_peak": peaks, f"{kind}_ratio": peaks[OURS] / peaks[REFERENCE]}
    largest = max(row["allocator_ratio"], row["resident_ratio"])
    return row | {"memory_kept": largest <= MEMORY_TARGET}


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return bytes to learn and bytes held out, of whole files."""
    files = sorted((harness.ROOT / "specheads").rglob("*.py"))
    heldout = files[::HELDOUT_FILE]
    parts = [file for file in files if file not in heldout], heldout
    learned, kept = (b"\n".join(file.read_bytes() for file in part) for part in parts)
    return torch.tensor(list(learned)), torch.tensor(list(kept))


def some_rows(text: Tensor, num_rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """Return a batch of rows that begin anywhere in a text."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length + 1, (num_rows, 1), generator=generator)
    return harness.batch_of(text[starts + torch.arange(length)])


def learn(case: Mapping[str, Any], side: str, steps: int, seed: int) -> dict[str, float]:
    """Train one side for some steps; return top-1 of every head on held-out text."""
    if KINDS[case["kind"]].train_base:
        base: Any = harness.llama(TINYCODE, case["hidden"], case["base_layers"], seed=seed)
    else:
        base = load_base_model("tinycode", dtype="float32", device="cpu")
    torch.manual_seed(seed)
    training, (text, heldout) = Training(case, side, base), texts()
    for step in range(steps):
        seen = seed * steps + step
        training.step(some_rows(text, case["rows"], case["seq_len"], seen))
    return training.accuracy(some_rows(heldout, HELDOUT_ROWS, case["seq_len"], 0))


def compare_accuracy(case: Mapping[str, Any], steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Train every side with some seeds; return top-1 of every head, seed by seed."""
    found: dict[str, Any] = {}
    for side in SIDES:
        each = [learn(case, side, steps, seed) for seed in seeds]
        found[side] = {name: [of_seed[name] for of_seed in each] for name in each[0]}
    return {"kind": case["kind"], "steps": steps, "seeds": list(seeds), "top1": found}


def cases_of(given: Settings) -> list[dict[str, Any]]:
    """Return the sizes of every kind and share of tokens with a label."""
    same = ("vocab", "hidden", "base_layers", "block_layers", "anchors", "rows", "seq_len")
    sizes = {name: getattr(given, name) for name in (*same, "chunk_size", "lr")}
    sizes |= {"num_heads": given.heads, "num_layers": given.layers}
    sizes["threads"] = pin_threads(given.threads)
    return [
        {"kind": kind, **sizes, "learned": learned}
        for kind in given.kinds
        for learned in ((1.0,) if KINDS[kind].train_base else given.learned)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    given, rows = harness.parse(Settings, argv), []
    quiet_loading()
    cases = cases_of(given)
    for allocator in given.allocators:
        if allocator == "kept":
            keep_freed_memory()
        for case in cases:
            row = {**case, "allocator": allocator, "difference": compare_losses(case)}
            if given.repeats:
                row |= take_times(case, given.repeats)
            if not given.no_memory and allocator == given.allocators[0]:
                row |= take_peaks(case)
            rows.append(row)
    first = {case["kind"]: case for case in reversed(cases)} if given.steps else {}
    learned = [compare_accuracy(first[k], given.steps, given.seeds) for k in given.kinds if first]
    harness.publish(given, rows, accuracy=learned)
    print(harness.describe({"accuracy": learned}))


if __name__ == "__main__":
    main()
