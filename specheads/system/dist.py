"""Ranks: who am I, how many are we, sums over all of us. Works alike with one process.

Rank and world size come from the environment that torchrun and deepspeed set, so that this
module is cheap to import and usable before a process group exists.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def rank() -> int:
    """Return this process's rank, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's rank on its machine, 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of processes, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return whether this process writes files and prints."""
    return rank() == 0


def set_defaults() -> None:
    """Describe a world of one process to libraries that insist on the launcher's variables."""
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:  # two runs on one machine must not meet
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("RANK", "0")


def _group() -> Any:
    """Return ``torch.distributed`` where this process is one of its group, else None."""
    import torch.distributed as group

    return group if group.is_available() and group.is_initialized() else None


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the elementwise sum of ``values`` over all ranks; every rank must call it."""
    if not (group := _group()):
        return values
    # where tensors have to lie for the group to see them
    place = f"cuda:{local_rank()}" if "nccl" in group.get_backend() else "cpu"
    total = values.detach().to(place, copy=True)
    group.all_reduce(total)
    return total.to(values.device)


def gather_texts(text: str) -> list[str]:
    """Return the ``text`` of every rank, in their order; every rank must call it."""
    if not (group := _group()):
        return [text]
    texts = [""] * world_size()
    group.all_gather_object(texts, text)
    return texts


def meeting_place(name: str, patience: float, *, hosts: bool = False) -> Any:
    """Return the store at ``MASTER_ADDR`` that all ranks share, under a name; needs no group.

    Args:
        name: what its keys are for; they are those of one start, as torchrun's store outlives it.
        patience: seconds after which the store has not answered.
        hosts: keep the store in this process; else another one does.
    """
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=patience)
    store = TCPStore(address, port, is_master=hosts, wait_for_workers=False, timeout=wait)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"{name}/{restarts}", store)


def barrier() -> None:
    """Wait for all ranks."""
    if group := _group():
        group.barrier()


def shutdown() -> None:
    """Leave the process group, if any, together with the other ranks.

    Without the barrier and the destruction some exits abort (DeepSpeed over gloo).
    """
    if group := _group():
        group.barrier()
        group.destroy_process_group()
