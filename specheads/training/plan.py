"""What a run will need, found out before it is paid: ``dry_run=true``.

Counted: parameters and memory by part. Measured: a few micro-batches, forward and backward on real
data, after which everything is as it was. ``describe.py`` puts it into words.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads import dist
from specheads.config import TrainConfig
from specheads.fused_loss import rows_at_once
from specheads.hardware import peak_memory
from specheads.models.hidden import packed_hidden
from specheads.training.capacity import SPREADS, Load, Need, Spread, need, optimizer_per_number
from specheads.training.engine import TorchEngine
from specheads.training.loop import Batches, gather
from specheads.training.state import same_random_state

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
        peak: bytes on this rank at one time, without activations that cannot be measured.
        seconds: of an optimizer step's forward and backward passes, as each timed micro-batch
            would have it.
        trained_bytes: of the trained weights.
        optimizer_bytes: of the optimizer's state, over all ranks.
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
        """Mean of the timed ones."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def total_seconds(self) -> float:
        """Of all its steps."""
        return self.num_steps * self.seconds_per_step


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
    logits = _logits_bytes(cfg, objective, output_weight)
    world = dist.world_size()
    seconds, extra = _time_micro_batches(objective, batches, groups, cfg)

    def load(spread: Spread) -> Load:
        found = _load(cfg, spread, modules, trained, output_weight)
        # what a micro-batch added is activations, and gradients that are formed in forward
        measured = max(0.0, (extra or 0.0) - logits - found.formed)
        return replace(found, activations=measured, logits=logits)

    spread = Spread.from_config(cfg.deepspeed)
    optimizer = sum(optimizer_bytes(group, cfg) for group in groups)
    found = need(load(spread), spread, world)
    if not spread.offload_optimizer:  # Muon and AdamW side by side are counted by group
        found = replace(found, optimizer=optimizer / (world if spread.stage else 1))
    parts_of = found.parts()
    memory: dict[str, float | None] = {
        "weights": parts_of["weights"],
        "gradients": parts_of["gradients"],
        f"optimizer ({cfg.optim.name})": parts_of["optimizer"],
        "logits of one chunk": parts_of["logits of one chunk"],
        "activations": None if extra is None else parts_of["activations"],
    }
    if found.buckets or found.gathered:
        memory["communication"] = parts_of["communication"]
    if found.host:
        memory["main memory"] = found.host
    ranks = world if world > 1 else 8
    return StagePlan(
        name,
        num_steps,
        _parameters(parts, {id(parameter) for parameter in trained}),
        memory,
        found.peak,
        [each * cfg.optim.accumulation for each in seconds],
        trained_bytes=tensor_bytes(trained),
        optimizer_bytes=optimizer,
        choices={
            key: need(load(each), each, ranks)
            for key, each in SPREADS.items()
            if _offered(cfg, each)
        },
        choice_ranks=ranks,
    )


def _offered(cfg: TrainConfig, spread: Spread) -> bool:
    """Whether many processes can train these settings like this."""
    quantised = cfg.model.quantization != "none" and spread.stage == 3
    return spread.deepspeed and cfg.optim.name == "adamw" and not quantised


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


class StandInFeatures:
    """Batches with hidden states of zeros: what a feature cache costs that is not written yet."""

    def __init__(self, batches: Batches, hidden_size: int, dtype: torch.dtype) -> None:
        self.batches, self.hidden_size, self.dtype = batches, hidden_size, dtype

    def __next__(self) -> dict[str, Any]:
        """Return the next micro-batch with ``hidden`` [B, T, d]."""
        batch = next(self.batches)
        shape = (*batch["input_ids"].shape, self.hidden_size)
        return {**batch, "hidden": torch.zeros(shape, dtype=self.dtype)}

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place."""
        self.batches.load_state_dict(state)


@torch.no_grad()
def seconds_per_pass(base: PreTrainedModel, batches: Batches) -> float:
    """Return the median time of the base alone on a micro-batch, as a feature cache is written."""
    before, seconds = batches.state_dict(), []
    for _ in range(TIMED + 1):
        batch = next(batches)
        ids, positions = (batch[key].to(base.device) for key in ("input_ids", "position_ids"))
        begin = time.perf_counter()
        packed_hidden(base, ids, positions).sum().item()  # waits for a GPU
        seconds.append(time.perf_counter() - begin)
    batches.load_state_dict(before)
    return sorted(seconds[1:])[TIMED // 2]
