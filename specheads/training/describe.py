"""What a run is going to do and to cost, in words: its first lines, and ``dry_run=true``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from specheads import dist
from specheads.config import TrainConfig
from specheads.data.feature_plan import readable
from specheads.training.capacity import RESERVED
from specheads.training.plan import TIMED, StagePlan, count_parameters, tensor_bytes

if TYPE_CHECKING:
    from specheads.training.prepare import Data


def describe_run(cfg: TrainConfig, data: Data, **parts: nn.Module) -> str:
    """Return the first lines of every run: parameters by part, steps, tokens, epochs, where to."""
    per_step = tokens_per_step(cfg)
    rows = data.rows_per_epoch
    epochs = "rows streamed"
    if rows:
        epochs = f"{cfg.steps * per_step / cfg.data.seq_len / rows:.2f} epochs of {rows:,} rows"
    lines = [
        f"{name}: {count_parameters(part) / 1e6:.2f} M parameters" for name, part in parts.items()
    ]
    lines.append(
        f"{cfg.steps} steps of {per_step:,} tokens ({cfg.data.rows} rows of {cfg.data.seq_len}"
        f" x {cfg.optim.accumulation} micro-batches x {dist.world_size()} processes),"
        f" {epochs} {100 * data.efficiency:.0f}% full"
    )
    lines.append(f"into {cfg.run_dir}")
    return "\n".join(lines)


def tokens_per_step(cfg: TrainConfig) -> int:
    """Return the positions of all rows of one optimizer step, over all processes."""
    return cfg.data.rows * cfg.data.seq_len * cfg.optim.accumulation * dist.world_size()


def describe_costs(
    cfg: TrainConfig, plans: Sequence[StagePlan], parts: Mapping[str, nn.Module], *notes: str
) -> str:
    """Return the lines of a dry run about parameters, memory, tokens, time and disk.

    Args:
        cfg: the run's settings.
        plans: of all stages.
        parts: ``base``, ``heads`` or ``draft``.
        *notes: more lines about disk, as that of a feature cache.
    """
    checkpoint = max(plan.trained_bytes + plan.optimizer_bytes for plan in plans)
    # one more than is kept exists while the newest is written
    number = cfg.checkpoint.keep + 1 if cfg.checkpoint.every else 1
    disk = [f"checkpoints {number} x {readable(checkpoint)}"]
    if cfg.evaluate.every and cfg.evaluate.keep_best:
        best = max(plan.trained_bytes for plan in plans)
        disk.append(f"best weights {readable(best)} (and those that kept checkpoints count on)")
    disk.append(f"export {readable(export_bytes(cfg, plans, parts))}")
    total = sum(plan.total_seconds for plan in plans)
    return "\n".join(
        [
            *map(_stage, plans),
            f"tokens: {cfg.steps * tokens_per_step(cfg):,} positions in {cfg.steps} steps",
            f"time: {clock(total)} at the least; evaluations and the search for a tree on top",
            f"disk: {', '.join(disk)}",
            *notes,
        ]
    )


def _stage(plan: StagePlan) -> str:
    counts = [
        f"{part} {number / 1e6:.2f} M {kind}"
        for part, numbers in plan.parameters.items()
        for kind, number in zip(("trained", "frozen"), numbers, strict=True)
        if number
    ]
    sizes = [
        f"{part} {'not measured' if size is None else readable(size)}"
        for part, size in plan.memory.items()
    ]
    gpu = gpu_memory()
    low, high = min(plan.seconds), max(plan.seconds)
    return "\n".join(
        [
            f"stage {plan.name}, {plan.num_steps} steps",
            f"  parameters: {', '.join(counts)}",
            f"  memory per process: {', '.join(sizes)}",
            f"  per rank: {readable(plan.peak)} at one time, {verdict(plan.peak, gpu)}",
            *_choices(plan, gpu),
            f"  time: {plan.seconds_per_step:.3g} s a step, {clock(plan.total_seconds)} for all"
            f" ({low:.3g} to {high:.3g} s in {TIMED} timed micro-batches, forward and backward;"
            " the optimizer's own time comes on top)",
        ]
    )


def gpu_memory() -> float:
    """Return the bytes of this rank's GPU, or those of an 80 GB one."""
    if not torch.cuda.is_available():
        return 80e9
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def verdict(peak: float, memory: float) -> str:
    """Say whether a rank's peak fits into a GPU of ``memory`` bytes, some of it taken."""
    fits = "fits" if peak <= memory - RESERVED else "does not fit"
    return f"{fits} in {memory / 1e9:.0f} GB"


def _choices(plan: StagePlan, memory: float) -> list[str]:
    """Return a line about what other values of ``deepspeed`` would need."""
    if not plan.choices:
        return []
    known = "" if plan.memory.get("activations") is not None else ", activations left out"
    shown = [
        f"{name} {readable(need.peak)}{'' if need.fits(memory) else ' (too much)'}"
        for name, need in plan.choices.items()
    ]
    return [f"  on {plan.choice_ranks} ranks, each{known}: {', '.join(shown)}"]


def export_bytes(
    cfg: TrainConfig, plans: Sequence[StagePlan], parts: Mapping[str, nn.Module]
) -> int:
    """Return the size of what is exported, in the dtypes of now: what was made or tuned."""
    tuned = {part for plan in plans for part, (trained, _) in plan.parameters.items() if trained}
    merged = cfg.adapter.merge == "true" or (
        cfg.adapter.merge == "auto" and cfg.model.quantization == "none"
    )
    made = [part for name, part in parts.items() if name in ("heads", "draft")]
    total = tensor_bytes(p for part in made for p in part.parameters())
    if "base" in parts and ("base" in tuned or ("adapter" in tuned and merged)):
        return total + tensor_bytes(
            [p for n, p in parts["base"].named_parameters() if ".lora_" not in n]
        )
    if "adapter" in tuned:
        total += tensor_bytes([p for n, p in parts["base"].named_parameters() if ".lora_" in n])
    return total


def clock(seconds: float) -> str:
    """Return a duration as ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
