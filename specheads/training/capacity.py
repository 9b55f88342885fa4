"""What a rank needs of memory and time: ZeRO's arithmetic, as DeepSpeed really does it.

Rajbhandari et al., arXiv:1910.02054: with Adam in mixed precision a parameter costs 2 bytes as a
weight, 2 as a gradient and K = 12 in the optimizer (float32 weight, two moments); stages 1, 2, 3
divide the optimizer, then the gradients, then the weights by the number of ranks. What DeepSpeed
0.19 keeps beside that (buckets, gathered weights, a float32 copy of float32 weights) was read in
its source and is measured by ``scripts/bench_zero.py``.

What a decoder of Llama's kind brings to a rank is counted for transformers' modules as they are
(tests/unit/test_shapes.py holds them to what autograd really saves): a norm keeps its float32
input, its normalised input and its output; sdpa its q, k, v and output; the MLP its gate, the
gate's activation, the other factor and the product. A frozen matrix keeps no input; an adapter
keeps its own, after dropout, and dropout its mask.

Of the time of a step, nothing is taken to overlap, so that a figure is an upper bound: arithmetic,
the traffic of arXiv:1910.02054, section 7, and the bytes that Adam moves.
"""

from __future__ import annotations

from collections import Counter
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
        stage, overlap = int(zero.get("stage", 0)), zero.get("overlap_comm")
        optimizer, parameters = (
            str((zero.get(f"offload_{what}") or {}).get("device") or "none") != "none"
            for what in ("optimizer", "param")
        )
        return cls(
            bool(deepspeed),
            stage,
            optimizer,
            parameters,
            int(float(zero.get("reduce_bucket_size", cls.bucket))),
            stage == 3 if overlap is None else bool(overlap),
            int(float(zero.get("stage3_max_live_parameters", cls.max_live))),
            int(float(zero.get("stage3_prefetch_bucket_size", cls.prefetch))),
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
        frozen_bytes: bytes of the weights that are not trained.
        frozen: numbers that are not trained.
        activations: bytes kept for backward, or the largest temporary of a frozen model.
        logits: bytes of the logits that exist at one time.
        formed: bytes of gradients that the fused loss forms in forward, whole on every rank.
        optimizer: adamw, adamw8bit or muon.
        accumulation: micro-batches per step.
        flops: floating-point operations of a micro-batch, forward and backward.
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
        load: what the run brings.
        spread: its DeepSpeed settings.
        world: the number of ranks.
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
    buckets = gathered = 0.0
    if spread.deepspeed and stage:
        buckets = float(size * spread.bucket * (2 if spread.overlap and stage < 3 else 1))
    if stage == 3:  # whole weights: recent ones, those fetched ahead, and outer ones
        everything = numbers + load.frozen
        width = (whole + load.frozen_bytes) / everything
        gathered = width * min(everything, spread.max_live + spread.prefetch + load.outer)
    return Need(
        weights, gradients, optimizer, buckets, gathered, load.activations, load.logits,
        formed, reducing, stepping, loading, host,
    )  # fmt: skip


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
        """All parameters."""
        d = self.hidden
        matrices = self.vocab * d * (1 if self.tied else 2)
        return self.layers * (self.layer_matrices + 2 * d) + d + matrices

    def lora_parameters(self, rank: int) -> int:
        """Parameters of adapters on every linear layer of the decoder."""
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
        shape: the model's sizes.
        size: bytes of a number of the base, 2 or 4.
        adapter: bytes of a number of its LoRA adapter, which has dropout; 0: the base is trained.
        rank: the adapter's rank.
        mask: bytes of an element of a dropout mask: 1 on a GPU, 4 on a CPU.
    """
    d, m, key = shape.hidden, shape.intermediate, shape.key_width
    attention = 2 * size * (d + key)
    small = 2 * 4  # the norms' scale
    if not adapter:
        return 2 * (4 + 2 * size) * d + attention + 4 * size * m + small
    own = (adapter + mask) * (6 * d + m) + 7 * adapter * rank
    return 2 * 4 * d + attention + 3 * size * m + own + small


@dataclass(frozen=True)
class Work:
    """What is trained, and on what, for :func:`load_of`.

    Attributes:
        kind: ``frozen`` (medusa1), ``lora`` (medusa2 with an adapter) or ``full`` (medusa2).
        tokens: tokens of a micro-batch.
        size: bytes of a number of the base.
        head_size: bytes of a number of the heads and adapters; 0: the base's, as DeepSpeed makes
            them.
        num_heads: drafting heads of one block each; 0: the base alone.
        own_heads: whether each has an output matrix of its own.
        rank: the adapter's rank.
        checkpointed: whether the base's layers are computed again in backward.
        accumulation: micro-batches per step.
        seq_len: tokens of a row, for attention's arithmetic.
        chunk: rows of logits at one time.

    Raises:
        ValueError: for another kind.
    """

    kind: str
    tokens: int
    size: int = 2
    head_size: int = 0
    num_heads: int = 4
    own_heads: bool = True
    rank: int = 32
    checkpointed: bool = True
    accumulation: int = 1
    seq_len: int = 2048
    chunk: int = 1024

    def __post_init__(self) -> None:
        if self.kind not in ("frozen", "lora", "full"):
            raise ValueError(f"kind must be frozen, lora or full, got {self.kind!r}")


def load_of(shape: Shape, kind: str, **options: Any) -> Load:
    """Return what training on a base of ``shape`` brings to a rank; options are ``Work``'s."""
    work = Work(kind, **options)
    size, head_size = work.size, work.head_size or work.size
    d, full = shape.hidden, kind == "full"
    matrix, blocks = shape.vocab * d, work.num_heads * (d * d + d)
    matrices = work.num_heads * matrix if work.own_heads else 0
    adapters = shape.lora_parameters(work.rank) if kind == "lora" else 0
    trained = Counter({head_size: blocks + matrices + adapters})
    trained[size] += shape.parameters if full else 0
    return Load(
        trained={width: count for width, count in trained.items() if count},
        frozen=0 if full else shape.parameters,
        frozen_bytes=0.0 if full else float(size * shape.parameters),
        activations=float(work.tokens * _activations_per_token(shape, work)),
        logits=float(shape.vocab * min(work.tokens, work.chunk) * (4 + (size if size < 4 else 0))),
        formed=float(head_size * matrices + (size * matrix if full else 0)),
        accumulation=work.accumulation,
        flops=work.tokens * _flops_per_token(shape, work),
        outer=matrix * (1 + full + (work.num_heads if work.own_heads else 0)),  # an embedding, too
        gathers=1 if kind == "frozen" else 2,
    )


def _activations_per_token(shape: Shape, work: Work) -> float:
    d, m, size, head_size = shape.hidden, shape.intermediate, work.size, work.head_size or work.size
    heads = work.num_heads * d * 2 * head_size  # what a head's matrix reads, and its gradient
    last = (4 + 2 * size) * d  # the final norm
    if work.kind == "frozen":  # nothing is kept: the largest temporaries, those of an MLP
        return size * 3 * (m + d) + last + heads
    adapter = head_size if work.kind == "lora" else 0
    layer = layer_activations(shape, size, adapter=adapter, rank=work.rank)
    backward = size * 2 * m  # gradients of a layer's widest tensors, while they are formed
    kept = shape.layers * size * d + layer if work.checkpointed else shape.layers * layer
    return kept + backward + last + heads


def _flops_per_token(shape: Shape, work: Work) -> float:
    """Return multiplications and additions: 2 per weight and pass, backward twice forward."""
    kind, d = work.kind, shape.hidden
    attention = 4 * work.seq_len * d  # no part of the mask is skipped
    forward = shape.layers * (2 * shape.layer_matrices + attention)
    matrix, blocks = shape.vocab * d, work.num_heads * (d * d + d)
    learned = work.own_heads or kind == "full"  # a frozen matrix gets no gradient of its own
    # blocks run again in backward
    heads = work.num_heads * (6 if learned else 4) * matrix + 8 * blocks
    passes = {"frozen": 1, "lora": 2, "full": 3}[kind] + (work.checkpointed and kind != "frozen")
    own = {"frozen": 0, "lora": 4, "full": 6}[kind] * matrix  # the base's own loss
    adapters = shape.lora_parameters(work.rank) if kind == "lora" else 0
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
