"""What a run is going to do and to cost, said before it is paid: ``dry_run=true``.

Counted: parameters, memory by part, tokens, disk. Measured: a few micro-batches, forward and
backward on real data, after which everything is as it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specheads import dist
from specheads.config import TrainConfig
from specheads.data.feature_plan import readable
from specheads.fused_loss import rows_at_once
from specheads.hardware import peak_memory
from specheads.training.engine import TorchEngine
from specheads.training.loop import Batches, gather
from specheads.training.state import same_random_state

if TYPE_CHECKING:
    from specheads.training.prepare import Data

TIMED = 3  # micro-batches, after one that warms up

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class StagePlan:
    """What one stage of a run needs.

    Attributes:
        name: of the stage.
        num_steps: optimizer steps.
        parameters: part -> number of trained and of frozen ones.
        memory: part -> bytes on this rank; ``activations`` is None where they cannot be measured.
        seconds: of an optimizer step's forward and backward passes, as each timed micro-batch
            would have it.
        trained_bytes: of the trained weights.
        optimizer_bytes: of the optimizer's state, over all ranks.
    """

    name: str
    num_steps: int
    parameters: dict[str, tuple[int, int]]
    memory: dict[str, float | None]
    seconds: list[float]
    trained_bytes: int
    optimizer_bytes: int

    @property
    def seconds_per_step(self) -> float:
        """Mean of the timed ones."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def total_seconds(self) -> float:
        """Of all its steps."""
        return self.num_steps * self.seconds_per_step

    @property
    def total_bytes(self) -> float:
        """Sum of all parts that are known."""
        return sum(size for size in self.memory.values() if size is not None)


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters, shared ones once, quantised ones as before they were."""
    return sum(map(_numel, module.parameters()))


def _numel(parameter: Tensor) -> int:
    state = getattr(parameter, "quant_state", None)  # bitsandbytes packs two numbers into a byte
    shape = getattr(state, "shape", None)
    return parameter.numel() if shape is None else torch.Size(shape).numel()


def _bytes(tensors: Iterable[Tensor]) -> int:
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def describe_run(cfg: TrainConfig, data: Data, **parts: nn.Module) -> str:
    """Return the first lines of every run: parameters by part, steps, tokens, epochs, where to."""
    per_step = tokens_per_step(cfg)
    rows = data.rows_per_epoch
    epochs = cfg.steps * per_step / cfg.data.seq_len / rows
    lines = [
        f"{name}: {count_parameters(part) / 1e6:.2f} M parameters" for name, part in parts.items()
    ]
    lines.append(
        f"{cfg.steps} steps of {per_step:,} tokens ({cfg.data.rows} rows of {cfg.data.seq_len}"
        f" x {cfg.optim.accumulation} micro-batches x {dist.world_size()} processes),"
        f" {epochs:.2f} epochs of {rows:,} rows {100 * data.efficiency:.0f}% full"
    )
    lines.append(f"into {cfg.run_dir}")
    return "\n".join(lines)


def tokens_per_step(cfg: TrainConfig) -> int:
    """Return the positions of all rows of one optimizer step, over all processes."""
    return cfg.data.rows * cfg.data.seq_len * cfg.optim.accumulation * dist.world_size()


def plan_stage(
    name: str,
    num_steps: int,
    objective: nn.Module,
    batches: Batches,
    groups: Groups,
    cfg: TrainConfig,
    *,
    output_weight: Tensor,
    parts: Mapping[str, nn.Module],
) -> StagePlan:
    """Count and time a stage; weights, gradients, data, modes and random generators stay as found.

    The optimizer takes no step: its time is left out, its memory is counted.

    Args:
        name: of the stage.
        num_steps: its optimizer steps.
        objective: what it trains.
        batches: this rank's micro-batches.
        groups: from ``schedule.param_groups``.
        cfg: the run's settings.
        output_weight: the base's output matrix [V, d].
        parts: ``base``, ``heads``: all that lies in memory, run at every step or not.
    """
    trained = [p for group in groups for p in group["params"]]
    modules = [objective, *parts.values()]
    gradients = _bytes(trained)
    optimizer = sum(optimizer_bytes(group, cfg) for group in groups)
    logits = _logits_bytes(cfg, objective, output_weight)
    stage = int((cfg.deepspeed.get("zero_optimization") or {}).get("stage", 0))
    world = dist.world_size()
    weights = _bytes(p for m in modules for p in (*m.parameters(), *m.buffers()))
    seconds, extra = _time_micro_batches(objective, batches, groups, cfg)
    return StagePlan(
        name,
        num_steps,
        _parameters(parts, {id(parameter) for parameter in trained}),
        {
            "weights": weights / (world if stage >= 3 else 1),
            "gradients": gradients / (world if stage >= 2 else 1),
            f"optimizer ({cfg.optim.name})": optimizer / (world if stage >= 1 else 1),
            "logits of one chunk": logits,
            "activations": None if extra is None else max(0.0, extra - gradients - logits),
        },
        [each * cfg.optim.accumulation for each in seconds],
        trained_bytes=_bytes(trained),
        optimizer_bytes=optimizer,
    )


def _parameters(parts: Mapping[str, nn.Module], trained: set[int]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            key = "adapter" if ".lora_" in name else part
            before = found.setdefault(key, (0, 0))
            more = _numel(parameter)
            found[key] = (
                (before[0] + more, before[1])
                if id(parameter) in trained
                else (before[0], before[1] + more)
            )
    return found


def optimizer_bytes(group: dict[str, Any], cfg: TrainConfig) -> int:
    """Return the bytes of the optimizer's state for one group of parameters.

    AdamW keeps two numbers per parameter in the parameter's dtype, 8 bytes in float32; its 8-bit
    form two bytes; Muon one number. DeepSpeed keeps float32 weights beside narrower ones.
    """
    total = 0
    for parameter in group["params"]:
        size = parameter.element_size()
        if cfg.deepspeed and size < 4:
            total += 12 * parameter.numel()
        elif group["name"].endswith("_muon"):
            total += size * parameter.numel()
        elif cfg.optim.name == "adamw8bit":
            total += 2 * parameter.numel()
        else:
            total += 2 * size * parameter.numel()
    return total


def _logits_bytes(cfg: TrainConfig, objective: nn.Module, output_weight: Tensor) -> int:
    vocab_size = output_weight.shape[0]
    positions = cfg.data.rows * cfg.data.seq_len
    if cfg.loss.implementation == "naive":  # those of every head, all there until backward
        return 4 * vocab_size * positions * (int(getattr(objective, "num_heads", 0)) + 1)
    return 4 * vocab_size * min(positions, cfg.loss.chunk_size or rows_at_once(output_weight))


def _time_micro_batches(
    objective: nn.Module, batches: Batches, groups: Groups, cfg: TrainConfig
) -> tuple[list[float], float | None]:
    """Return seconds of some micro-batches, and by how many bytes the first one raised memory."""
    before, modes = batches.state_dict(), [(part, part.training) for part in objective.modules()]
    device = next(objective.parameters()).device
    num_heads = int(getattr(objective, "num_heads", 0))
    seconds: list[float] = []
    extra: float | None = None
    objective.train()
    with same_random_state():
        engine = TorchEngine(objective, [dict(group) for group in groups], cfg)
        for number in range(TIMED + 1):
            (batch,), _ = gather(batches, 1, num_heads, device)
            start_bytes = peak_memory(device, reset=True) if not number else 0
            begin = time.perf_counter()
            loss, _ = engine.forward(batch)
            engine.backward(loss, last=True)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:
                seconds.append(time.perf_counter() - begin)
            elif start_bytes:
                extra = float(peak_memory(device) - start_bytes)
            engine.close()  # frees the gradients
            del loss
    for part, mode in modes:
        part.training = mode
    batches.load_state_dict(before)
    return seconds, extra


def describe_stage(plan: StagePlan) -> str:
    """Return the lines about one stage's parameters, memory and time."""
    counts = [
        f"{part} {trained / 1e6:.2f} M trained, {frozen / 1e6:.2f} M frozen"
        for part, (trained, frozen) in plan.parameters.items()
    ]
    sizes = [
        f"{part} {'not measured' if size is None else readable(size)}"
        for part, size in plan.memory.items()
    ]
    low, high = min(plan.seconds), max(plan.seconds)
    return "\n".join(
        [
            f"stage {plan.name}, {plan.num_steps} steps",
            f"  parameters: {'; '.join(counts)}",
            f"  memory per process: {', '.join(sizes)}; {readable(plan.total_bytes)} together",
            f"  time: {plan.seconds_per_step:.3g} s a step, {clock(plan.total_seconds)} for all"
            f" ({low:.3g} to {high:.3g} s in {TIMED} timed micro-batches, forward and backward;"
            " the optimizer's own time comes on top)",
        ]
    )


def describe_totals(
    cfg: TrainConfig, plans: Sequence[StagePlan], parts: Mapping[str, nn.Module], *notes: str
) -> str:
    """Return the lines about the whole run: tokens, time, disk.

    Args:
        cfg: the run's settings.
        plans: of all stages.
        parts: ``base``, ``heads``.
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
            f"tokens: {cfg.steps * tokens_per_step(cfg):,} positions in {cfg.steps} steps",
            f"time: {clock(total)} at the least; evaluations and the search for a tree on top",
            f"disk: {', '.join(disk)}",
            *notes,
        ]
    )


def export_bytes(
    cfg: TrainConfig, plans: Sequence[StagePlan], parts: Mapping[str, nn.Module]
) -> int:
    """Return the size of what is exported, in the dtypes of now: heads, and what was tuned."""
    tuned = {part for plan in plans for part, (trained, _) in plan.parameters.items() if trained}
    merged = cfg.adapter.merge == "true" or (
        cfg.adapter.merge == "auto" and cfg.model.quantization == "none"
    )
    total = _bytes([*parts["heads"].parameters()]) if "heads" in parts else 0
    if "base" in parts and ("base" in tuned or ("adapter" in tuned and merged)):
        return total + _bytes([p for n, p in parts["base"].named_parameters() if ".lora_" not in n])
    if "adapter" in tuned:
        total += _bytes([p for n, p in parts["base"].named_parameters() if ".lora_" in n])
    return total


def clock(seconds: float) -> str:
    """Return a duration as ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
