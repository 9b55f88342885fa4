"""What a run will need, found out before it is paid: ``dry_run=true``, and a run's first lines.

Counted: parameters and memory by part. Measured: a few micro-batches, forward and backward on real
data, after which everything is as it was.

How memory is divided is ZeRO's arithmetic, as DeepSpeed really does it. Rajbhandari et al.,
arXiv:1910.02054: with Adam in mixed precision a parameter costs 2 bytes as a weight, 2 as a
gradient and K = 12 in the optimizer (float32 weight, two moments); stages 1, 2, 3 divide the
optimizer, then the gradients, then the weights by the number of ranks. What DeepSpeed 0.19 keeps
beside that (buckets, gathered weights, a float32 copy of float32 weights) was read in its source
and is measured by ``scripts/bench_zero.py``.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.config import TrainConfig
from specheads.data.pack import GrowingBatches, PackedBatches
from specheads.data.teacher_cache import readable
from specheads.losses.fused import rows_at_once
from specheads.models.forward import undisturbed
from specheads.models.output import layers_of
from specheads.system import dist
from specheads.system.hardware import peak_memory
from specheads.training.checkpoints import same_random_state
from specheads.training.engine import Groups, Spread, TorchEngine
from specheads.training.loop import Stage, gather
from specheads.training.setup import Data

RESERVED = 6e9  # bytes of a GPU for CUDA's context, NCCL and fragmentation: assumed, not measured
FLATTENED = 500_000_000  # numbers that stage 0 copies together to reduce them, whatever is set
SUB_GROUP = 1_000_000_000  # numbers that stage 3 steps at one time
SMALL = 100_000  # DeepSpeed's stage3_param_persistence_threshold
TIMED = 3  # micro-batches, after one that warms up

Parts = Mapping[str, nn.Module]  # of a run: base, heads, draft
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
class Work:
    """What a stage trains, and with what; tensors may be without memory.

    Attributes:
        parts: ``base``, ``heads``, ``draft``: all that lies in memory, run at every step or not.
        groups: the optimizer's, which say what learns.
        output: the output matrix [V, d] of the loss.
    """

    parts: Mapping[str, Any]
    groups: Groups
    output: Tensor

    @property
    def trained(self) -> dict[int, Tensor]:
        """What learns, by its ``id``."""
        return {id(p): p for group in self.groups for p in group["params"]}


@dataclass(frozen=True)
class Load:
    """What a run brings to a rank before anything is divided; bytes, and numbers of parameters.

    Attributes:
        trained: bytes per number (2 or 4) -> numbers that are trained.
        frozen_bytes: bytes of the weights that are not trained.
        frozen: numbers that are not trained.
        activations: bytes kept for backward, or the largest temporary of a frozen model.
        logits: bytes of the logits that exist at one time.
        formed: bytes of gradients that the fused loss forms in forward, whole on every rank.
        accumulation: micro-batches per step.
        outer: numbers that stage 3 keeps whole for the length of a pass: the matrices that the
            objective itself reads.
        held: numbers of linear layers through which gradients flow: under stage 3 autograd keeps
            their gathered weights from forward until backward comes to them.
        small: numbers of tensors below stage 3's ``param_persistence_threshold``, kept whole.
        largest: numbers of the largest parameter that is trained.
        layers: bytes of layers that are loaded in parts under stage 3.
        piece: bytes of the largest of them, which is whole while it has its turn.
    """

    trained: Mapping[int, int]
    frozen_bytes: float = 0.0
    frozen: int = 0
    activations: float = 0.0
    logits: float = 0.0
    formed: float = 0.0
    accumulation: int = 1
    outer: int = 0
    held: int = 0
    small: int = 0
    largest: int = 0
    layers: float = 0.0
    piece: float = 0.0

    @property
    def numbers(self) -> int:
        """Parameters that are trained."""
        return sum(self.trained.values())

    @property
    def trained_bytes(self) -> float:
        """Bytes of the trained weights."""
        return float(sum(size * count for size, count in self.trained.items()))


@dataclass(frozen=True)
class Need:
    """Bytes on one rank.

    Attributes:
        weights: this rank's share of the weights.
        gradients: its share of the gradients, as they stay until the step.
        optimizer: its share of the optimizer's state, float32 weights of DeepSpeed among it.
        buckets: the buffers of communication.
        gathered: weights of other ranks; some of them are still there in the optimizer's step.
        activations: what is kept for backward, as in :class:`Load`.
        logits: the logits that exist at one time, as in :class:`Load`.
        formed: gradients that exist when backward begins.
        held: gathered weights that exist then beside ``gathered``, as in :class:`Load`.
        reducing: gradients and their copies when backward ends.
        stepping: gradients, their copies and Adam's temporaries in the optimizer.
        loading: peak before training: every rank loads the whole model, under stage 3 its share of
            the layers, one of them whole, and what is outside of them.
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
    held: float
    reducing: float
    stepping: float
    loading: float
    host: float

    @property
    def training(self) -> float:
        """The peak of a step: where backward begins, where it ends, or in the optimizer."""
        computing = self.activations + self.logits + self.formed + self.held
        fixed = self.weights + self.optimizer + self.buckets + self.gathered
        return fixed + max(computing, self.reducing, self.stepping)

    @property
    def peak(self) -> float:
        """The most there is at one time."""
        return max(self.training, self.loading)

    def fits(self, memory: float) -> bool:
        """Say whether ``memory`` bytes of a GPU do, less :data:`RESERVED`."""
        return self.peak <= memory - RESERVED


def optimizer_per_number(size: int, name: str, spread: Spread) -> int:
    """Return the optimizer's bytes for one trained number of ``size`` bytes.

    AdamW keeps two numbers in the parameter's dtype, its 8-bit form two bytes, Muon one number.
    DeepSpeed keeps float32 moments and a float32 copy of the weights; of float32 weights too in
    stages 1 to 3. Its partition is a clone in stages 1 and 2; stage 3 means to do without one, but
    compares a ``torch.device`` with a name, which are never equal (``_create_fp32_partitions`` of
    DeepSpeed 0.19.8).
    """
    if spread.deepspeed and (size < 4 or spread.stage):
        return 12
    if name == "muon":
        return size
    return 2 if name == "adamw8bit" else 2 * size


def need(load: Load, spread: Spread, world: int, *, temporaries: int = 1) -> Need:
    """Return what each of ``world`` ranks needs with AdamW.

    Args:
        load: what the run brings.
        spread: its DeepSpeed settings.
        world: the number of ranks.
        temporaries: copies that Adam makes of what it steps at one time: 1 on a GPU; 2 on a CPU,
            where gloo also copies all that a step gathers.
    """
    stage, numbers, whole = spread.stage, load.numbers, load.trained_bytes
    size = max(load.trained, default=4)
    share = numbers / (world if stage >= 1 else 1)
    gradients = whole / (world if stage >= 2 else 1)
    optimizer = sum(
        count * optimizer_per_number(width, "adamw", spread)
        for width, count in load.trained.items()
    ) / (world if stage >= 1 else 1)
    weights = (whole + load.frozen_bytes) / (world if stage >= 3 else 1)
    loading = load.frozen_bytes + whole * (2 if stage in (1, 2) else 1)  # flattened in a copy
    if stage == 3:
        part = 0.0 if spread.offload_parameters else load.layers / world
        loading += load.piece + part - load.layers
    # a first micro-batch's gradients come as its activations go; later ones find them there
    formed = load.formed + (gradients if load.accumulation > 1 else 0.0)
    reducing = gradients + load.formed * (load.accumulation > 1)
    stepping = gradients
    if spread.deepspeed and stage == 0:
        reducing += size * min(numbers, FLATTENED)
        stepping += 4 * numbers * (temporaries == 1) + (4 * numbers if size < 4 else 0)
    elif spread.deepspeed:  # its part is one flat tensor, in float32, beside what it is made of
        reducing += size * share
        most = SUB_GROUP if stage == 3 else share
        stepping = size * share + 4 * min(share, most) * (1 + temporaries)
    host = 0.0
    if spread.offload_optimizer:  # with float32 gradients, and a buffer to copy weights from
        host += optimizer + (4 + size) * share
        optimizer = gradients = 0.0  # gradients leave bucket by bucket
        reducing, formed = 0.0, load.formed
        # what stage 2 gathers at the end of a step
        stepping = whole if temporaries > 1 and stage < 3 else 0.0
    if spread.offload_parameters:
        host += weights
        weights = 0.0
    buckets = gathered = held = 0.0
    if spread.deepspeed and stage:
        buckets = float(size * spread.bucket * (2 if spread.overlap and stage < 3 else 1))
    if spread.offload_optimizer and stage < 3:  # a gradient on its way, at both ends
        buckets += size * load.largest
        host += size * load.largest
    if stage == 3:  # whole weights: recent ones, those fetched ahead, outer and small ones
        everything = numbers + load.frozen
        width = (whole + load.frozen_bytes) / everything
        recent = spread.max_live + spread.prefetch
        gathered = width * min(everything, recent + load.outer + load.small)
        held = width * max(0, min(load.held, everything - load.outer) - recent)
    return Need(
        weights, gradients, optimizer, buckets, gathered, load.activations, load.logits,
        formed, held, reducing, stepping, loading, host,
    )  # fmt: skip


@dataclass(frozen=True)
class StagePlan:
    """What one stage of a run needs.

    Attributes:
        name: the stage's name.
        num_steps: its optimizer steps.
        parameters: part -> number of ``trained`` and of ``frozen`` ones.
        needs: ``as set`` -> bytes on a rank of this run; other values of ``deepspeed`` -> what each
            of ``choice_ranks`` would need with them.
        counted: whether activations are in ``needs``; a processor's cannot be measured.
        seconds: how long an optimizer step's forward and backward passes take, as each timed
            micro-batch would have it.
        trained_bytes: bytes of the trained weights.
        optimizer_bytes: bytes of the optimizer's state, over all ranks.
        choice_ranks: as many as this run has, or 8.
    """

    name: str
    num_steps: int
    parameters: dict[str, dict[str, int]]
    needs: Mapping[str, Need]
    counted: bool
    seconds: list[float]
    trained_bytes: int
    optimizer_bytes: int
    choice_ranks: int = 8

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds of a step."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps."""
        return self.num_steps * self.seconds_per_step


def plan_stage(stage: Stage, cfg: TrainConfig, parts: Parts, output_weight: Tensor) -> StagePlan:
    """Count and time a stage; weights, gradients, data, modes and random generators stay as found.

    The optimizer takes no step: its time is left out, its memory is counted.

    Args:
        stage: what it trains, and on what. One that is a whole run is named after what it trains.
        cfg: the run's settings.
        parts: ``base``, ``heads``: all that lies in memory, run at every step or not.
        output_weight: the base's output matrix [V, d].
    """
    work, world = Work(parts, stage.groups, output_weight), dist.world_size()
    seconds, extra = _time_micro_batches(stage, cfg)
    spread = Spread.from_config(cfg.deepspeed)
    timed = load_of(work, cfg, Spread())
    # what a micro-batch added is activations, and gradients that are formed in forward
    activations = max(0.0, (extra or 0.0) - timed.logits - timed.formed)
    ranks = world if world > 1 else 8
    needs = needs_of(work, cfg, activations, {"as set": spread}, world)
    if cfg.optim.name == "adamw":  # which many processes can train with
        others = {name: each for name, each in SPREADS.items() if each.deepspeed}
        needs |= needs_of(work, cfg, activations, others, ranks)
    return StagePlan(
        name=work.groups[0]["name"].removesuffix("_muon") if stage.name == "train" else stage.name,
        num_steps=(stage.last_step or cfg.steps) - stage.first_step,
        parameters=parameters_of(work),
        needs=needs,
        counted=extra is not None,
        seconds=[each * cfg.optim.accumulation for each in seconds],
        trained_bytes=sum(p.nbytes for p in work.trained.values()),
        optimizer_bytes=sum(optimizer_bytes(group, cfg, spread) for group in work.groups),
        choice_ranks=ranks,
    )


def needs_of(
    work: Work, cfg: TrainConfig, activations: float, spreads: Mapping[str, Spread], world: int
) -> dict[str, Need]:
    """Return what each of ``world`` ranks needs with each of ``spreads``.

    Args:
        work: what is trained.
        cfg: the run's settings.
        activations: bytes kept for backward.
        spreads: names -> settings; those of stage 3 are left out for a quantised base, whose
            weights it cannot spread.
        world: the number of ranks.
    """
    needs = {}
    for name, spread in spreads.items():
        if spread.stage == 3 and cfg.model.quantization != "none":
            continue
        load = replace(load_of(work, cfg, spread), activations=activations)
        needs[name] = need(load, spread, world, temporaries=2 if cfg.device == "cpu" else 1)
        if not spread.deepspeed:  # not AdamW alone
            own = sum(optimizer_bytes(group, cfg, spread) for group in work.groups)
            needs[name] = replace(needs[name], optimizer=float(own))
    return needs


def load_of(work: Work, cfg: TrainConfig, spread: Spread) -> Load:
    """Return what ``work`` brings to a rank that is spread so, activations left out."""
    trained, parts, output_weight = work.trained, work.parts, work.output
    named = {
        tensor: name
        for part in parts.values()
        for name, tensor in (*part.named_parameters(), *part.named_buffers())
    }
    frozen = [tensor for tensor in named if id(tensor) not in trained]
    matrices = [
        p for p, name in named.items() if p is output_weight or (p.dim() == 2 and "lm_head" in name)
    ]
    at_once = cfg.loss.chunk_size or rows_at_once(output_weight)
    rows = min(cfg.data.rows * cfg.data.seq_len, at_once)
    # products in 16 bits are copied to the float32 ones that the loss reads
    narrow = 2 if "16" in cfg.model.dtype + cfg.autocast else 0

    def num_bytes(tensors: Iterable[Tensor]) -> int:
        return sum(_width(tensor, cfg, spread) * tensor.numel() for tensor in tensors)

    counts: Counter[int] = Counter()
    for parameter in trained.values():
        counts[_width(parameter, cfg, spread)] += parameter.numel()
    # a new model is made whole
    layers = [] if cfg.model.init else _layers(parts.get("base"))
    sizes = [num_bytes(layer.parameters()) for layer in layers]
    return Load(
        trained=counts,
        frozen=sum(tensor.numel() for tensor in frozen),
        frozen_bytes=num_bytes(frozen),
        logits=(4 + narrow) * output_weight.shape[0] * rows,
        formed=num_bytes(p for p in matrices if id(p) in trained),
        accumulation=cfg.optim.accumulation,
        outer=sum(p.numel() for p in matrices),
        held=sum(
            _linear(part, matrices, cfg.model.gradient_checkpointing and name != "heads")
            for name, part in parts.items()
            if any(id(p) in trained for p in part.parameters())
        ),
        small=sum(p.numel() for p in named if p.numel() < SMALL),
        largest=max((p.numel() for p in trained.values()), default=0),
        layers=float(sum(sizes)),
        piece=float(max(sizes, default=0)),
    )


def _layers(model: nn.Module | None) -> list[nn.Module]:
    """Return a decoder's layers; none of a model that has no list of them."""
    with contextlib.suppress(ValueError):
        return list(layers_of(model)) if isinstance(model, PreTrainedModel) else []
    return []


def _linear(part: nn.Module, but: Iterable[Tensor], checkpointed: bool) -> int:
    """Return the numbers of the linear layers, or of one layer's where they are computed again."""
    left_out = set(map(id, but))

    def numbers(module: nn.Module) -> int:
        linear = (each.weight for each in module.modules() if isinstance(each, nn.Linear))
        return sum(w.numel() for w in linear if id(w) not in left_out)

    if not checkpointed:
        return numbers(part)
    return max(map(numbers, _layers(part)), default=0)


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters, shared ones once, quantised ones as before they were."""
    return sum(map(_numel, module.parameters()))


def _numel(parameter: Tensor) -> int:
    if hasattr(parameter, "ds_numel"):  # in parts on the ranks of ZeRO-3
        return int(parameter.ds_numel)
    state = getattr(parameter, "quant_state", None)  # bitsandbytes packs two numbers into a byte
    shape = getattr(state, "shape", None)
    return parameter.numel() if shape is None else torch.Size(shape).numel()


def parameters_of(work: Work) -> dict[str, dict[str, int]]:
    """Return part -> number of ``trained`` and ``frozen`` parameters; adapters are a part."""
    found: dict[str, dict[str, int]] = {}
    for part, module in work.parts.items():
        for name, parameter in module.named_parameters():
            key = "adapter" if ".lora_" in name else part
            counts = found.setdefault(key, {"trained": 0, "frozen": 0})
            counts["trained" if id(parameter) in work.trained else "frozen"] += _numel(parameter)
    return found


def optimizer_bytes(group: dict[str, Any], cfg: TrainConfig, spread: Spread) -> int:
    """Return the bytes of the optimizer's state for one group of parameters, over all ranks."""
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


def _time_micro_batches(stage: Stage, cfg: TrainConfig) -> tuple[list[float], float | None]:
    """Return seconds of some micro-batches, and by how many bytes the first one raised memory."""
    objective, batches = stage.objective, stage.batches
    before = batches.state_dict()
    device = stage.groups[0]["params"][0].device
    seconds: list[float] = []
    extra: float | None = None
    with same_random_state(), undisturbed(objective):
        objective.train()
        engine = TorchEngine(objective, [dict(group) for group in stage.groups], cfg)
        for number in range(TIMED + 1):
            (batch,), _ = gather(batches, 1, objective.num_heads, device)
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
    counts = {name: count_parameters(part) / 1e6 for name, part in parts.items()}
    lines = [f"{name}: {millions:.2f} M parameters" for name, millions in counts.items()]
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


def describe_costs(cfg: TrainConfig, plans: Sequence[StagePlan], parts: Parts, *notes: str) -> str:
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
    disk.append(f"export {readable(export_bytes(plans, parts))}")
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
    low, high = min(plan.seconds), max(plan.seconds)
    return "\n".join(
        [
            f"stage {plan.name}, {plan.num_steps} steps",
            f"  parameters: {describe_parameters(plan.parameters)}",
            f"  memory per rank: as set, and on {plan.choice_ranks} ranks with AdamW otherwise",
            *describe_needs(plan.needs, gpu_memory(), counted=plan.counted),
            f"  time: {plan.seconds_per_step:.3g} s a step, {clock(plan.total_seconds)} for all"
            f" ({low:.3g} to {high:.3g} s in {TIMED} timed micro-batches, forward and backward;"
            " the optimizer's own time comes on top)",
        ]
    )


def describe_parameters(parameters: Mapping[str, Mapping[str, int]]) -> str:
    """Return how many millions each part has, trained and frozen."""
    return ", ".join(
        f"{part} {number / 1e6:,.2f} M {kind}"
        for part, numbers in parameters.items()
        for kind, number in numbers.items()
        if number
    )


def describe_needs(needs: Mapping[str, Need], memory: float, *, counted: bool) -> list[str]:
    """Return the lines of a table of what ranks need, and whether ``memory`` bytes do.

    Args:
        needs: values of ``deepspeed`` -> bytes of a rank.
        memory: bytes of a GPU.
        counted: whether ``needs`` know the activations.
    """
    head = ["deepspeed", "weights", "gradients", "optimizer", "communication", "activations"]
    lines = [[*head, "a step's peak", "while loading", "main memory", ""]]
    for name, each in needs.items():
        sizes = (
            each.weights, each.gradients, each.optimizer, each.buckets + each.gathered,
            each.activations + each.logits + each.formed + each.held,
            each.training, each.loading, each.host,
        )  # fmt: skip
        fits = f"{'fits' if each.fits(memory) else 'too much'} in {memory / 1e9:.0f} GB"
        lines.append([name, *map(readable, sizes), fits])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  " + "  ".join(map(str.rjust, line, widths)).rstrip() for line in lines]
    return table + ([] if counted else ["  activations are left out: they are not counted here"])


def gpu_memory() -> float:
    """Return the bytes of this rank's GPU, or those of an 80 GB one."""
    if not torch.cuda.is_available():
        return 80e9
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def export_bytes(plans: Sequence[StagePlan], parts: Parts) -> int:
    """Return the most that is exported, in the dtypes of now: what was made or tuned.

    An adapter that is not merged takes less than its base, which is counted.
    """
    whole = any(
        plan.parameters[name]["trained"]
        for plan in plans
        for name in plan.parameters.keys() & {"base", "adapter"}
    )
    made = [part for name, part in parts.items() if whole or name != "base"]
    return sum(p.nbytes for part in made for p in part.parameters())


def clock(seconds: float) -> str:
    """Return a duration as ``h:mm:ss``, with days before it."""
    return str(timedelta(seconds=round(seconds)))
