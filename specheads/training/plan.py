"""What a run will need, found out before it is paid: ``dry_run=true``, and a run's first lines.

Counted: parameters and memory by part. Measured: a few micro-batches, forward and backward on real
data, after which everything is as it was.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specheads.config import TrainConfig
from specheads.data.pack import GrowingBatches, PackedBatches
from specheads.data.teacher_cache import readable
from specheads.losses.fused import rows_at_once
from specheads.system import dist
from specheads.system.hardware import peak_memory
from specheads.training.capacity import (
    RESERVED,
    SPREADS,
    Load,
    Need,
    Spread,
    need,
    optimizer_per_number,
)
from specheads.training.checkpoints import same_random_state
from specheads.training.engine import TorchEngine
from specheads.training.loop import Stage, gather

if TYPE_CHECKING:
    from specheads.training.setup import Data

TIMED = 3  # micro-batches, after one that warms up


@dataclass(frozen=True)
class StagePlan:
    """What one stage of a run needs.

    Attributes:
        name: the stage's name.
        num_steps: its optimizer steps.
        parameters: part -> number of trained and of frozen ones.
        memory: part -> bytes on this rank; ``activations`` is None where they cannot be measured.
        peak: bytes on this rank at one time, without activations that cannot be measured.
        seconds: how long an optimizer step's forward and backward passes take, as each timed
            micro-batch would have it.
        trained_bytes: bytes of the trained weights.
        optimizer_bytes: bytes of the optimizer's state, over all ranks.
        choices: values of ``deepspeed`` -> what each of ``choice_ranks`` would need with it.
        choice_ranks: as many as this run has, or 8.
    """

    name: str
    num_steps: int
    parameters: dict[str, tuple[int, int]]
    memory: dict[str, float | None]
    peak: float
    seconds: list[float]
    trained_bytes: int
    optimizer_bytes: int
    choices: dict[str, Need] = field(default_factory=dict)
    choice_ranks: int = 8

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds of a step."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps."""
        return self.num_steps * self.seconds_per_step


def plan_stage(
    stage: Stage, cfg: TrainConfig, parts: Mapping[str, nn.Module], output_weight: Tensor
) -> StagePlan:
    """Count and time a stage; weights, gradients, data, modes and random generators stay as found.

    The optimizer takes no step: its time is left out, its memory is counted.

    Args:
        stage: what it trains, and on what. One that is a whole run is named after what it trains.
        cfg: the run's settings.
        parts: ``base``, ``heads``: all that lies in memory, run at every step or not.
        output_weight: the base's output matrix [V, d].
    """
    trained = [p for group in stage.groups for p in group["params"]]
    modules = [stage.objective, *parts.values()]
    logits = _logits_bytes(cfg, stage.objective, output_weight)
    world, accumulation = dist.world_size(), cfg.optim.accumulation
    seconds, extra = _time_micro_batches(stage, cfg)

    def load(spread: Spread) -> Load:
        found = _load(cfg, spread, modules, trained, output_weight)
        # what a micro-batch added is activations, and gradients that are formed in forward
        measured = max(0.0, (extra or 0.0) - logits - found.formed)
        return replace(found, activations=measured, logits=logits)

    spread = Spread.from_config(cfg.deepspeed)
    optimizer = sum(optimizer_bytes(group, cfg) for group in stage.groups)
    found = need(load(spread), spread, world)
    if not spread.offload_optimizer:  # Muon and AdamW side by side are counted by group
        found = replace(found, optimizer=optimizer / (world if spread.stage else 1))
    memory: dict[str, float | None] = {
        "weights": found.weights,
        "gradients": found.gradients,
        f"optimizer ({cfg.optim.name})": found.optimizer,
        "logits of one chunk": found.logits,
        "activations": None if extra is None else found.activations,
    }
    if found.buckets or found.gathered:
        memory["communication"] = found.buckets + found.gathered
    if found.host:
        memory["main memory"] = found.host
    ranks = world if world > 1 else 8
    return StagePlan(
        name=stage.groups[0]["name"].removesuffix("_muon") if stage.name == "train" else stage.name,
        num_steps=(stage.last_step or cfg.steps) - stage.first_step,
        parameters=_parameters(parts, {id(parameter) for parameter in trained}),
        memory=memory,
        peak=found.peak,
        seconds=[each * accumulation for each in seconds],
        trained_bytes=tensor_bytes(trained),
        optimizer_bytes=optimizer,
        choices={
            key: need(load(each), each, ranks)
            for key, each in SPREADS.items()
            # what many processes can train with these settings
            if each.deepspeed
            and cfg.optim.name == "adamw"
            and (cfg.model.quantization == "none" or each.stage < 3)
        },
        choice_ranks=ranks,
    )


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters, shared ones once, quantised ones as before they were."""
    return sum(map(_numel, module.parameters()))


def _numel(parameter: Tensor) -> int:
    state = getattr(parameter, "quant_state", None)  # bitsandbytes packs two numbers into a byte
    shape = getattr(state, "shape", None)
    return parameter.numel() if shape is None else torch.Size(shape).numel()


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of ``tensors``, each once."""
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def _load(
    cfg: TrainConfig,
    spread: Spread,
    modules: Iterable[nn.Module],
    trained: Iterable[Tensor],
    output_weight: Tensor,
) -> Load:
    """Return the weights that a run has, and which of them it trains."""
    learned = {id(parameter): parameter for parameter in trained}
    named = {p: name for m in modules for name, p in (*m.named_parameters(), *m.named_buffers())}
    counts: Counter[int] = Counter()
    for parameter in learned.values():
        counts[_width(parameter, cfg, spread)] += parameter.numel()
    frozen = [tensor for tensor in named if id(tensor) not in learned]
    matrices = [
        parameter
        for parameter, name in named.items()
        if parameter is output_weight or (parameter.dim() == 2 and "lm_head" in name)
    ]
    fused = [p for p in matrices if id(p) in learned and cfg.loss.implementation == "fused"]
    return Load(
        trained=counts,
        frozen=sum(tensor.numel() for tensor in frozen),
        frozen_bytes=sum(_width(tensor, cfg, spread) * tensor.numel() for tensor in frozen),
        formed=sum(_width(p, cfg, spread) * p.numel() for p in fused),
        optimizer=cfg.optim.name,
        accumulation=cfg.optim.accumulation,
        outer=sum(p.numel() for p in matrices),
    )


def _parameters(parts: Mapping[str, nn.Module], trained: set[int]) -> dict[str, tuple[int, int]]:
    found: dict[str, list[int]] = {}
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            counts = found.setdefault("adapter" if ".lora_" in name else part, [0, 0])
            counts[id(parameter) not in trained] += _numel(parameter)
    return {part: (learned, frozen) for part, (learned, frozen) in found.items()}


def optimizer_bytes(group: dict[str, Any], cfg: TrainConfig) -> int:
    """Return the bytes of the optimizer's state for one group of parameters, over all ranks."""
    spread = Spread.from_config(cfg.deepspeed)
    name = cfg.optim.name
    if name == "muon" and not group["name"].endswith("_muon"):
        name = "adamw"
    return sum(
        p.numel() * optimizer_per_number(_width(p, cfg, spread), name, spread)
        for p in group["params"]
    )


def _width(tensor: Tensor, cfg: TrainConfig, spread: Spread) -> int:
    """Return the bytes of a number; DeepSpeed casts all weights where they are of 16 bits."""
    size = tensor.element_size()
    halved = "16" in cfg.model.dtype or cfg.autocast == "float16"
    return min(size, 2) if spread.deepspeed and halved else size


def _logits_bytes(cfg: TrainConfig, objective: nn.Module, output_weight: Tensor) -> int:
    vocab_size = output_weight.shape[0]
    positions = cfg.data.rows * cfg.data.seq_len
    if cfg.loss.implementation == "naive":  # those of every head, all there until backward
        return 4 * vocab_size * positions * (int(getattr(objective, "num_heads", 0)) + 1)
    return 4 * vocab_size * min(positions, cfg.loss.chunk_size or rows_at_once(output_weight))


def _time_micro_batches(stage: Stage, cfg: TrainConfig) -> tuple[list[float], float | None]:
    """Return seconds of some micro-batches, and by how many bytes the first one raised memory."""
    objective, batches = stage.objective, stage.batches
    before, modes = batches.state_dict(), [(part, part.training) for part in objective.modules()]
    device = next(objective.parameters()).device
    num_heads = int(getattr(objective, "num_heads", 0))
    seconds: list[float] = []
    extra: float | None = None
    objective.train()
    with same_random_state():
        engine = TorchEngine(objective, [dict(group) for group in stage.groups], cfg)
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


def describe_run(cfg: TrainConfig, data: Data, **parts: nn.Module) -> str:
    """Return the first lines of every run: parameters by part, steps, tokens, epochs, where to."""
    per_step = tokens_per_step(cfg)
    train = data.train.stages[-1][1] if isinstance(data.train, GrowingBatches) else data.train
    epochs = "rows streamed"  # of whose number nobody knows
    if isinstance(train, PackedBatches):
        rows = train.rows_per_epoch
        epochs = f"{cfg.steps * per_step / cfg.data.seq_len / rows:.2f} epochs of {rows:,} rows"
    lines = [
        f"{name}: {count_parameters(part) / 1e6:.2f} M parameters" for name, part in parts.items()
    ]
    lines.append(
        f"{cfg.steps} steps of {per_step:,} tokens ({cfg.data.rows} rows of {cfg.data.seq_len}"
        f" x {cfg.optim.accumulation} micro-batches x {dist.world_size()} processes),"
        f" {epochs} {100 * train.efficiency:.0f}% full"
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
        plans: one for each stage.
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
