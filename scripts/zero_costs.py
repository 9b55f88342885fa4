"""What training a known model needs of memory and time, for bases that are not on this machine.

What a decoder of Llama's kind keeps for backward says ``specheads/training/shapes.py``, how ZeRO
divides it ``specheads/training/plan.py``.

Of the time of a step, nothing is taken to overlap, so that a figure is an upper bound: arithmetic,
the traffic of arXiv:1910.02054, section 7, and the bytes that Adam moves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from specheads.training.engine import Spread
from specheads.training.plan import Load
from specheads.training.shapes import Shape, decoder_activations


@dataclass(frozen=True)
class Brought(Load):
    """A load with the arithmetic and the traffic of its micro-batches.

    Attributes:
        flops: floating-point operations of a micro-batch, forward and backward.
        gathers: how often stage 3 gathers all weights for a micro-batch: 1, or 2 with a backward
            pass through them.
    """

    flops: float = 0.0
    gathers: int = 2


# Llama 2's.
LLAMA_7B = Shape(4096, 32, 11008, 4096, 32000, 4096)
LLAMA_13B = Shape(5120, 40, 13824, 5120, 32000, 5120)
LLAMA_70B = Shape(8192, 80, 28672, 1024, 32000, 8192)


def lora_parameters(shape: Shape, rank: int) -> int:
    """Return the parameters of adapters on every linear layer of a decoder."""
    d, m, key = shape.hidden, shape.intermediate, shape.key_width
    return shape.layers * rank * (2 * (d + shape.query_width) + 2 * (d + key) + 3 * (d + m))


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


def load_of(shape: Shape, kind: str, **options: Any) -> Brought:
    """Return what training on a base of ``shape`` brings to a rank; options are ``Work``'s."""
    work = Work(kind, **options)
    size, head_size = work.size, work.head_size or work.size
    d, full = shape.hidden, kind == "full"
    matrix, blocks = shape.vocab * d, work.num_heads * (d * d + d)
    matrices = work.num_heads * matrix if work.own_heads else 0
    adapters = lora_parameters(shape, work.rank) if kind == "lora" else 0
    trained = Counter({head_size: blocks + matrices + adapters})
    trained[size] += shape.parameters if full else 0
    return Brought(
        trained={width: count for width, count in trained.items() if count},
        frozen=0 if full else shape.parameters,
        frozen_bytes=0.0 if full else float(size * shape.parameters),
        activations=float(work.tokens * _activations_per_token(shape, work)),
        logits=float(shape.vocab * min(work.tokens, work.chunk) * (4 + (size if size < 4 else 0))),
        formed=float(head_size * matrices + (size * matrix if full else 0)),
        accumulation=work.accumulation,
        flops=work.tokens * _flops_per_token(shape, work),
        outer=matrix * (1 + full + (work.num_heads if work.own_heads else 0)),  # an embedding, too
        held=0
        if kind == "frozen"
        else shape.layer_matrices * (1 if work.checkpointed else shape.layers),
        small=2 * shape.layers * d,
        largest=matrix,
        layers=float(size * shape.layers * (shape.layer_matrices + 2 * d)),
        piece=float(size * (shape.layer_matrices + 2 * d)),
        gathers=1 if kind == "frozen" else 2,
    )


def _activations_per_token(shape: Shape, work: Work) -> float:
    size, head_size = work.size, work.head_size or work.size
    heads = work.num_heads * shape.hidden * 2 * head_size  # a matrix's input, and its gradient
    adapter = head_size if work.kind == "lora" else 0
    return heads + decoder_activations(
        shape, size, trained=work.kind != "frozen", adapter=adapter, rank=work.rank,
        checkpointed=work.checkpointed,
    )  # fmt: skip


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
    adapters = lora_parameters(shape, work.rank) if kind == "lora" else 0
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


def sent_bytes(load: Brought, spread: Spread, world: int) -> float:
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


def seconds(load: Brought, spread: Spread, world: int, machine: Machine) -> Times:
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
