"""What a run will need, found out before it is paid: ``dry_run=true``.

Counted: parameters and memory by part. Measured: a few micro-batches, forward and backward on real
data, after which everything is as it was. ``describe.py`` puts it into words.

What a rank needs of memory and time: ZeRO's arithmetic, as DeepSpeed really does it.

Rajbhandari et al., arXiv:1910.02054: with Adam in mixed precision a parameter costs 2 bytes as a
weight, 2 as a gradient and K = 12 in the optimizer (float32 weight, two moments); stages 1, 2, 3
divide the optimizer, then the gradients, then the weights by the number of ranks. What DeepSpeed
0.19 keeps beside that (buckets, gathered weights, a float32 copy of float32 weights) was read in
its source and is measured by ``scripts/bench_zero.py``. ``shapes.py`` says what a model brings.

What a run is going to do and to cost, in words: its first lines, and ``dry_run=true``.

What a decoder of Llama's kind brings to a rank: parameters, activations, arithmetic.

Counted for transformers' modules as they are (tests/unit/test_shapes.py holds them to what
autograd really saves): a norm keeps its float32 input, its normalised input and its output; sdpa
its q, k, v and output; the MLP its gate, the gate's activation, the other factor and the product.
A frozen matrix keeps no input; an adapter keeps its own, after dropout, and dropout its mask.

How long an optimizer step takes on ranks of a known speed, ZeRO 0 to 3.

The arithmetic of ``shapes.py``, the traffic of arXiv:1910.02054, section 7, and the bytes that Adam
moves. Nothing is taken to overlap, so that a figure is an upper bound; ``scripts/bench_zero.py``
holds it to what was measured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.config import TrainConfig
from specheads.data.teacher_cache import readable
from specheads.losses.fused import rows_at_once
from specheads.models.output import packed_hidden
from specheads.system import dist
from specheads.system.hardware import peak_memory
from specheads.training.checkpoints import same_random_state
from specheads.training.engine import TorchEngine
from specheads.training.loop import Batches, gather

if TYPE_CHECKING:
    from specheads.training.setup import Data

RESERVED = 6e9  # bytes of a GPU for CUDA's context, NCCL and fragmentation: assumed, not measured
FLATTENED = 500_000_000  # numbers that stage 0 copies together to reduce them, whatever is set
SUB_GROUP = 1_000_000_000  # numbers that stage 3 steps at one time


@dataclass(frozen=True)
class Spread:
    """How a run is spread over ranks: plain torch, or a stage of ZeRO.

    Attributes:
        deepspeed: whether DeepSpeed runs it; plain torch otherwise, in one process.
        stage: 0 to 3.
        offload_optimizer: whether the optimizer lies in the host's memory.
        offload_parameters: whether the weights do; stage 3 only.
        bucket: numbers that are reduced at one time.
        overlap: a second bucket is filled while the first is sent.
        max_live: numbers of gathered weights that stay for their next use; stage 3.
        prefetch: numbers that are gathered ahead; stage 3.
    """

    deepspeed: bool = False
    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    bucket: int = 500_000_000
    overlap: bool = False
    max_live: int = 1_000_000_000
    prefetch: int = 50_000_000

    @classmethod
    def from_config(cls, deepspeed: Mapping[str, Any]) -> Spread:
        """Read the settings' ``deepspeed`` section, with DeepSpeed's own defaults."""
        zero = deepspeed.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))

        def offloads(what: str) -> bool:
            device = (zero.get(what) or {}).get("device", "none")
            return str(device) != "none"

        overlap = zero.get("overlap_comm")
        return cls(
            deepspeed=bool(deepspeed),
            stage=stage,
            offload_optimizer=offloads("offload_optimizer"),
            offload_parameters=offloads("offload_param"),
            bucket=int(float(zero.get("reduce_bucket_size", cls.bucket))),
            overlap=stage == 3 if overlap is None else bool(overlap),
            max_live=int(float(zero.get("stage3_max_live_parameters", cls.max_live))),
            prefetch=int(float(zero.get("stage3_prefetch_bucket_size", cls.prefetch))),
        )


# The config groups of conf/deepspeed, by name.
SPREADS: dict[str, Spread] = {
    "none": Spread(),
    **{f"zero{n}": Spread(deepspeed=True, stage=n, overlap=n == 3) for n in range(4)},
    "zero2_offload": Spread(deepspeed=True, stage=2, offload_optimizer=True),
    "zero3_offload": Spread(
        deepspeed=True, stage=3, offload_optimizer=True, offload_parameters=True, overlap=True
    ),
}


@dataclass(frozen=True)
class Load:
    """What a run brings to a rank before anything is divided; bytes, and numbers of parameters.

    Attributes:
        trained: bytes per number (2 or 4) -> numbers that are trained.
        frozen_bytes: of weights that are not; ``frozen`` of them.
        frozen: numbers that are not trained.
        activations: bytes kept for backward, or the largest temporary of a frozen model.
        logits: bytes of the logits that exist at one time.
        formed: bytes of gradients that the fused loss forms in forward, whole on every rank.
        optimizer: adamw, adamw8bit or muon.
        accumulation: micro-batches per step.
        flops: of a micro-batch, forward and backward.
        outer: numbers that stage 3 keeps whole for the length of a pass: the matrices that the
            objective itself reads.
        gathers: how often stage 3 gathers all weights for a micro-batch: 1, or 2 with a backward
            pass through them.
    """

    trained: Mapping[int, int]
    frozen_bytes: float = 0.0
    frozen: int = 0
    activations: float = 0.0
    logits: float = 0.0
    formed: float = 0.0
    optimizer: str = "adamw"
    accumulation: int = 1
    flops: float = 0.0
    outer: int = 0
    gathers: int = 2

    @property
    def numbers(self) -> int:
        """Parameters that are trained."""
        return sum(self.trained.values())

    @property
    def trained_bytes(self) -> float:
        """Of the trained weights."""
        return float(sum(size * count for size, count in self.trained.items()))


@dataclass(frozen=True)
class Need:
    """Bytes on one rank.

    Attributes:
        weights: its share of them.
        gradients: likewise, as they stay until the step.
        optimizer: likewise, float32 weights of DeepSpeed among it.
        buckets: of communication.
        gathered: weights of other ranks; some of them are still there in the optimizer's step.
        activations: as in :class:`Load`.
        logits: likewise.
        formed: gradients that exist when backward begins.
        reducing: gradients and their copies when backward ends.
        stepping: gradients, their copies and Adam's temporaries in the optimizer.
        loading: peak before training: every rank loads the whole model, then it is divided.
        host: bytes of the host's memory for this rank.
    """

    weights: float
    gradients: float
    optimizer: float
    buckets: float
    gathered: float
    activations: float
    logits: float
    formed: float
    reducing: float
    stepping: float
    loading: float
    host: float

    @property
    def states(self) -> float:
        """What ZeRO divides: weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def training(self) -> float:
        """The peak of a step: where backward begins, where it ends, or in the optimizer."""
        computing = self.activations + self.logits + self.formed
        fixed = self.weights + self.optimizer + self.buckets + self.gathered
        return fixed + max(computing, self.reducing, self.stepping)

    @property
    def peak(self) -> float:
        """The most there is at one time."""
        return max(self.training, self.loading)

    def fits(self, memory: float) -> bool:
        """Say whether ``memory`` bytes of a GPU do, less :data:`RESERVED`."""
        return self.peak <= memory - RESERVED

    def parts(self) -> dict[str, float]:
        """Return name -> bytes of the parts that people ask for."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "communication": self.buckets + self.gathered,
            "activations": self.activations,
            "logits of one chunk": self.logits,
        }


def optimizer_per_number(size: int, name: str, spread: Spread) -> int:
    """Return the optimizer's bytes for one trained number of ``size`` bytes.

    AdamW keeps two numbers in the parameter's dtype, its 8-bit form two bytes, Muon one number.
    DeepSpeed keeps float32 moments and a float32 copy of the weights; of float32 weights too in
    stages 1 and 2 (its partition is a clone) and where it offloads them.
    """
    if spread.deepspeed and (size < 4 or spread.stage in (1, 2) or spread.offload_optimizer):
        return 12
    if name == "muon":
        return size
    return 2 if name == "adamw8bit" else 2 * size


def need(load: Load, spread: Spread, world: int, *, temporaries: int = 1) -> Need:
    """Return what each of ``world`` ranks needs.

    Args:
        load: of the run.
        spread: its DeepSpeed settings.
        world: ranks.
        temporaries: copies that Adam makes of what it steps at one time: 1 on a GPU, 2 on a CPU.
    """
    stage, numbers, whole = spread.stage, load.numbers, load.trained_bytes
    size = max(load.trained, default=4)
    share = numbers / (world if stage >= 1 else 1)
    gradients = whole / (world if stage >= 2 else 1)
    optimizer = sum(
        count * optimizer_per_number(width, load.optimizer, spread)
        for width, count in load.trained.items()
    ) / (world if stage >= 1 else 1)
    weights = (whole + load.frozen_bytes) / (world if stage >= 3 else 1)
    loading = load.frozen_bytes + whole * (2 if stage in (1, 2) else 1)  # flattened in a copy
    # a first micro-batch's gradients come as its activations go; later ones find them there
    formed = load.formed + (gradients if load.accumulation > 1 else 0.0)
    reducing = gradients + load.formed * (load.accumulation > 1)
    stepping = gradients
    if spread.deepspeed and stage == 0:
        reducing += size * min(numbers, FLATTENED)
        stepping += 4 * numbers * (temporaries == 1) + (4 * numbers if size < 4 else 0)
    elif spread.deepspeed:  # its part is one flat tensor, in float32, beside what it is made of
        reducing += size * share
        stepping = size * share + 4 * min(share, SUB_GROUP if stage == 3 else share) * (
            1 + temporaries
        )
    host = 0.0
    if spread.offload_optimizer:  # with float32 gradients, and a buffer to copy weights from
        host += optimizer + (4 + size) * share
        optimizer = gradients = stepping = 0.0  # gradients leave bucket by bucket
        reducing, formed = 0.0, load.formed
    if spread.offload_parameters:
        host += weights
        weights = 0.0
    return Need(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        buckets=_buckets(spread, size),
        gathered=_gathered(load, spread),
        activations=load.activations,
        logits=load.logits,
        formed=formed,
        reducing=reducing,
        stepping=stepping,
        loading=loading,
        host=host,
    )


def _buckets(spread: Spread, size: int) -> float:
    if not spread.deepspeed or spread.stage == 0:
        return 0.0
    return float(size * spread.bucket * (2 if spread.overlap and spread.stage < 3 else 1))


def _gathered(load: Load, spread: Spread) -> float:
    """Return bytes of whole weights under stage 3: recent ones, those fetched ahead, and outer."""
    if spread.stage < 3:
        return 0.0
    everything = load.numbers + load.frozen
    width = (load.trained_bytes + load.frozen_bytes) / everything
    return width * min(everything, spread.max_live + spread.prefetch + load.outer)


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


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: d, layers, m, width of keys, V.

    Attributes:
        hidden: hidden size d.
        layers: decoder layers.
        intermediate: width m of the MLP.
        key_width: numbers of a key, all heads together; d without grouped queries.
        vocab: tokens V.
        tied: whether the output matrix is the embedding.
    """

    hidden: int
    layers: int
    intermediate: int
    key_width: int
    vocab: int
    tied: bool = False

    @classmethod
    def from_config(cls, config: Any) -> Shape | None:
        """Read a transformers config; None if it is not of this kind."""
        try:
            head_dim = getattr(config, "head_dim", None) or (
                config.hidden_size // config.num_attention_heads
            )
            return cls(
                hidden=config.hidden_size,
                layers=config.num_hidden_layers,
                intermediate=config.intermediate_size,
                key_width=head_dim * config.num_key_value_heads,
                vocab=config.vocab_size,
                tied=bool(config.tie_word_embeddings),
            )
        except AttributeError:
            return None

    @property
    def layer_matrices(self) -> int:
        """Numbers of a layer's matrices."""
        d = self.hidden
        return 2 * d * d + 2 * d * self.key_width + 3 * d * self.intermediate

    @property
    def parameters(self) -> int:
        """All of them."""
        d = self.hidden
        matrices = self.vocab * d * (1 if self.tied else 2)
        return self.layers * (self.layer_matrices + 2 * d) + d + matrices

    def lora_parameters(self, rank: int) -> int:
        """Those of adapters on every linear layer of the decoder."""
        d, m, key = self.hidden, self.intermediate, self.key_width
        return self.layers * rank * (2 * (d + d) + 2 * (d + key) + 3 * (d + m))


# Llama 2's.
LLAMA_7B = Shape(4096, 32, 11008, 4096, 32000)
LLAMA_13B = Shape(5120, 40, 13824, 5120, 32000)
LLAMA_70B = Shape(8192, 80, 28672, 1024, 32000)


def layer_activations(
    shape: Shape, size: int, *, adapter: int = 0, rank: int = 0, mask: int = 1
) -> int:
    """Return the bytes that one layer keeps for backward, for each token.

    Attention's matrix is not among them: sdpa does not keep it.

    Args:
        shape: of the model.
        size: bytes of a number of the base, 2 or 4.
        adapter: bytes of a number of its LoRA adapter, which has dropout; 0: the base is trained.
        rank: of the adapter.
        mask: bytes of an element of a dropout mask: 1 on a GPU, 4 on a CPU.
    """
    d, m, key = shape.hidden, shape.intermediate, shape.key_width
    attention = 2 * size * (d + key)
    small = 2 * 4  # the norms' scale
    if not adapter:
        return 2 * (4 + 2 * size) * d + attention + 4 * size * m + small
    own = (adapter + mask) * (6 * d + m) + 7 * adapter * rank
    return 2 * 4 * d + attention + 3 * size * m + own + small


def load_of(
    shape: Shape,
    kind: str,
    *,
    tokens: int,
    size: int = 2,
    head_size: int | None = None,
    num_heads: int = 4,
    own_heads: bool = True,
    rank: int = 32,
    checkpointed: bool = True,
    accumulation: int = 1,
    seq_len: int = 2048,
    chunk: int = 1024,
) -> Load:
    """Return what training of ``kind`` brings to a rank.

    Args:
        shape: of the base.
        kind: ``frozen`` (medusa1), ``lora`` (medusa2 with an adapter) or ``full`` (medusa2).
        tokens: of a micro-batch.
        size: bytes of a number of the base.
        head_size: of the heads and adapters; None: the base's, as DeepSpeed makes them.
        num_heads: drafting heads of one block each; 0: the base alone.
        own_heads: whether each has an output matrix of its own.
        rank: of the adapter.
        checkpointed: whether the base's layers are computed again in backward.
        accumulation: micro-batches per step.
        seq_len: of a row, for attention's arithmetic.
        chunk: rows of logits at one time.

    Raises:
        ValueError: for another kind.
    """
    if kind not in ("frozen", "lora", "full"):
        raise ValueError(f"kind must be frozen, lora or full, got {kind!r}")
    head_size = head_size or size
    d, vocab = shape.hidden, shape.vocab
    matrix = vocab * d
    blocks = num_heads * (d * d + d)
    matrices = num_heads * matrix if own_heads else 0
    adapters = shape.lora_parameters(rank) if kind == "lora" else 0
    trained = Counter({head_size: blocks + matrices + adapters})
    if kind == "full":
        trained[size] += shape.parameters
    base_trained = kind == "full"
    return Load(
        trained={width: count for width, count in trained.items() if count},
        frozen=0 if base_trained else shape.parameters,
        frozen_bytes=0.0 if base_trained else float(size * shape.parameters),
        activations=float(
            tokens
            * _activations_per_token(shape, kind, size, head_size, num_heads, rank, checkpointed)
        ),
        logits=float(vocab * min(tokens, chunk) * (4 + (size if size < 4 else 0))),
        formed=float(head_size * matrices + (size * matrix if base_trained else 0)),
        accumulation=accumulation,
        flops=tokens
        * _flops_per_token(
            shape, kind, num_heads, own_heads, blocks, adapters, seq_len, checkpointed
        ),
        outer=matrix * (1 + base_trained + (num_heads if own_heads else 0)),  # an embedding, too
        gathers=1 if kind == "frozen" else 2,
    )


def _activations_per_token(
    shape: Shape,
    kind: str,
    size: int,
    head_size: int,
    num_heads: int,
    rank: int,
    checkpointed: bool,
) -> float:
    d, m = shape.hidden, shape.intermediate
    heads = num_heads * d * 2 * head_size  # what a head's matrix reads, and its gradient
    last = (4 + 2 * size) * d  # the final norm
    if kind == "frozen":  # nothing is kept: the largest temporaries, those of an MLP
        return size * 3 * (m + d) + last + heads
    adapter = head_size if kind == "lora" else 0
    layer = layer_activations(shape, size, adapter=adapter, rank=rank)
    backward = size * 2 * m  # gradients of a layer's widest tensors, while they are formed
    kept = shape.layers * size * d + layer if checkpointed else shape.layers * layer
    return kept + backward + last + heads


def _flops_per_token(
    shape: Shape,
    kind: str,
    num_heads: int,
    own_heads: bool,
    blocks: int,
    adapters: int,
    seq_len: int,
    checkpointed: bool,
) -> float:
    """Return multiplications and additions: 2 per weight and pass, backward twice forward."""
    attention = 4 * seq_len * shape.hidden  # no part of the mask is skipped
    forward = shape.layers * (2 * shape.layer_matrices + attention)
    matrix = shape.vocab * shape.hidden
    learned = own_heads or kind == "full"  # a frozen matrix gets no gradient of its own
    heads = num_heads * (6 if learned else 4) * matrix + 8 * blocks  # blocks run again in backward
    passes = {"frozen": 1, "lora": 2, "full": 3}[kind]
    if checkpointed and kind != "frozen":
        passes += 1
    own = {"frozen": 0, "lora": 4, "full": 6}[kind] * matrix  # the base's own loss
    return passes * forward + own + heads + 6 * adapters


ADAM_TRAFFIC = 28  # bytes read and written per number by a step of Adam in float32


@dataclass(frozen=True)
class Machine:
    """What one rank can do, per second, and what it has.

    Attributes:
        name: for people.
        memory: bytes of a GPU.
        flops: floating-point operations that a rank really reaches.
        link: bytes a rank sends to its neighbour.
        bandwidth: bytes of its own memory that it reads or writes.
        host_memory: bytes of the host for each rank.
        host_link: bytes between a rank and the host's memory.
        host_bandwidth: bytes of host memory read or written on behalf of one rank.
    """

    name: str
    memory: float
    flops: float
    link: float
    bandwidth: float
    host_memory: float = 0.0
    host_link: float = 1.0
    host_bandwidth: float = 1.0


# One of eight in a host. Data sheet: 312 TFLOPS in bfloat16, NVLink 300 GB/s each way, 2 TB/s.
# Assumed: 40% of the first, 70% of the others, PCIe at 20 GB/s, 1 TB of host memory for all.
A100_OF_8 = Machine(
    "A100 80 GB",
    memory=80e9,
    flops=0.4 * 312e12,
    link=0.7 * 300e9,
    bandwidth=0.7 * 2.0e12,
    host_memory=1e12 / 8,
    host_link=20e9,
    host_bandwidth=200e9 / 8,
)


@dataclass(frozen=True)
class Times:
    """Seconds of an optimizer step, by what it does."""

    computing: float
    communication: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it, one after another."""
        return self.computing + self.communication + self.optimizer


def sent_bytes(load: Load, spread: Spread, world: int) -> float:
    """Return the bytes that each rank sends in an optimizer step, by ring algorithms.

    Section 7 of arXiv:1910.02054: an all-reduce of the gradients is a reduce-scatter and an
    all-gather, each (N - 1) / N of them; stages 1 and 2 gather weights in place of gradients;
    stage 3 gathers all weights, frozen ones too, for every pass.
    """
    if world == 1 or not spread.deepspeed:
        return 0.0
    share = (world - 1) / world
    trained = load.trained_bytes
    if spread.stage == 3:
        gathered = load.gathers * (trained + load.frozen_bytes)
        return share * load.accumulation * (gathered + trained)
    reduced = load.accumulation if spread.stage == 2 else 1
    return share * trained * (1 + reduced)


def seconds(load: Load, spread: Spread, world: int, machine: Machine) -> Times:
    """Return how long an optimizer step takes on ranks of ``machine``."""
    share = load.numbers / (world if spread.stage >= 1 else 1)
    computing = load.accumulation * load.flops / machine.flops
    sent = sent_bytes(load, spread, world) / machine.link
    stepping = ADAM_TRAFFIC * share / machine.bandwidth
    if spread.offload_optimizer:
        width = load.trained_bytes / max(load.numbers, 1)
        stepping = ADAM_TRAFFIC * share / machine.host_bandwidth
        stepping += 2 * width * share / machine.host_link  # gradients there, weights back
    if spread.offload_parameters:
        whole = (load.trained_bytes + load.frozen_bytes) / world
        sent += load.accumulation * load.gathers * whole / machine.host_link
    return Times(computing, sent, stepping)
