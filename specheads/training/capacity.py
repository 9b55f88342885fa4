"""What a rank needs of memory and time: ZeRO's arithmetic, as DeepSpeed really does it.

Rajbhandari et al., arXiv:1910.02054: with Adam in mixed precision a parameter costs 2 bytes as a
weight, 2 as a gradient and K = 12 in the optimizer (float32 weight, two moments); stages 1, 2, 3
divide the optimizer, then the gradients, then the weights by the number of ranks. What DeepSpeed
0.19 keeps beside that (buckets, gathered weights, a float32 copy of float32 weights) was read in
its source and is measured by ``scripts/bench_zero.py``. ``shapes.py`` says what a model brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
