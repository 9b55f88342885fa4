"""How long an optimizer step takes on ranks of a known speed, ZeRO 0 to 3.

The arithmetic of ``shapes.py``, the traffic of arXiv:1910.02054, section 7, and the bytes that Adam
moves. Nothing is taken to overlap, so that a figure is an upper bound; ``scripts/bench_zero.py``
holds it to what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from specheads.training.capacity import Load, Spread

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
