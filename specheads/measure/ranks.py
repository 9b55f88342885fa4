"""What every rank of a launcher finds where it runs, told to rank 0.

The ranks meet in a store, not in a process group: a group waits for everybody and then fails
without a name, a store says who has not come.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, RunError
from specheads.data.teacher_cache import readable
from specheads.models.digest import weight_files
from specheads.models.names import model_folder
from specheads.system import __version__, dist, hardware

ALIKE = ("device", "python", "torch", "deepspeed", "specheads", "model")  # on all ranks
LATE = 1.0  # seconds by which clocks may differ: two logs are then read in the wrong order


@dataclass(frozen=True)
class Found:
    """What one rank found; texts are for people.

    Attributes:
        rank: its number, and on its machine.
        host: the machine.
        device: the GPU with its memory, or the processor.
        python: its version; ``torch``, ``deepspeed`` and ``specheads`` likewise.
        torch: as ``python``.
        deepspeed: as ``python``.
        specheads: as ``python``.
        memory: free bytes of the device.
        disk: free bytes where runs are written.
        model: size of the base's weights; empty where none was asked for.
        problem: why there is no such device or no such model; empty where all is there.
    """

    rank: str
    host: str
    device: str
    python: str
    torch: str
    deepspeed: str
    specheads: str
    memory: str
    disk: str
    model: str
    problem: str


def look(model: str, revision: str | None, device: str) -> Found:
    """Look around in this process.

    Args:
        model: the base; empty looks for none.
        revision: of a model on the hub.
        device: as ``device=`` says.
    """
    import torch

    free, name, weights, problems = 0, "none", "", []
    try:
        place = hardware.pick_device(device)
        if place.type == "cuda":
            free, total = torch.cuda.mem_get_info(place)
            name = f"{torch.cuda.get_device_name(place)}, {readable(total)}"
        else:
            found = re.search(r"MemAvailable: *(\d+)", _read("/proc/meminfo"))
            free, name = 1024 * int(found[1]) if found else 0, str(place)
    except ConfigError as error:
        problems.append(str(error))
    if model:
        weights = "none"
        try:
            files = weight_files(model_folder(model, revision=revision))
            weights = readable(sum(file.stat().st_size for file in files))
            problems += [] if files else [f"model={model} holds no weights"]
        except (ConfigError, RunError) as error:
            problems.append(str(error))
    runs = Path("runs").absolute()
    there = next(path for path in (runs, *runs.parents) if path.is_dir())
    return Found(
        rank=f"{dist.rank()} ({dist.local_rank()})",
        host=socket.gethostname(),
        device=name,
        python=platform.python_version(),
        torch=_version("torch"),
        deepspeed=_version("deepspeed"),
        specheads=__version__,
        memory=readable(free),
        disk=readable(shutil.disk_usage(there).free),
        model=weights,
        problem="; ".join(problems),
    )


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def gather(own: Found, patience: float) -> tuple[list[Found], list[str]]:
    """Return what all ranks found, and what is wrong; both empty on all ranks but the first.

    Args:
        own: what this rank found.
        patience: seconds for the others to answer.

    Raises:
        RunError: on the others, if rank 0 cannot be reached or says nothing.
    """
    from torch.distributed import DistError, TCPStore

    rank, world = dist.rank(), dist.world_size()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun keeps a store there itself
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    seconds = timedelta(seconds=patience)
    try:
        store = TCPStore(address, port, is_master=hosts, wait_for_workers=False, timeout=seconds)
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        key = f"doctor/{again}"
        store.set(f"{key}/{rank}", json.dumps(asdict(own)))
        if rank:
            store.wait([f"{key}/now"], seconds + timedelta(seconds=patience))
            store.set(f"{key}/clock/{rank}", str(time.time()))
            return [], []
        deadline = time.monotonic() + patience
        waiting = set(range(world))
        while waiting and time.monotonic() < deadline:
            waiting -= {each for each in waiting if store.check([f"{key}/{each}"])}
            time.sleep(0.05)
        there = [each for each in range(world) if each not in waiting]
        found = [Found(**json.loads(store.get(f"{key}/{each}"))) for each in there]
        # all are told at one time, and say what their clocks show
        began = time.time()
        store.set(f"{key}/now", "1")
        clocks = {each: float(store.get(f"{key}/clock/{each}")) - began for each in there if each}
    except (DistError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise RunError(
            f"rank {rank} on {own.host} cannot meet the others at {address}:{port}: {first:.200}"
        ) from None
    wrong = [f"rank {each} did not answer within {patience:g} s" for each in sorted(waiting)]
    wrong += [
        f"the clock of rank {each} is {off:+.1f} s off"
        for each, off in clocks.items()
        if abs(off) > LATE
    ]
    wrong += [
        f"rank {each.rank.partition(' ')[0]}: {each.problem}" for each in found if each.problem
    ]
    return found, wrong + differences(found)


def differences(found: list[Found]) -> list[str]:
    """Return in what the ranks differ that should be alike, the values with their ranks."""
    told = []
    for what in ALIKE:
        values: dict[str, list[str]] = {}
        for each in found:
            values.setdefault(getattr(each, what), []).append(each.rank.partition(" ")[0])
        if len(values) > 1:
            parts = (f"{value} on {', '.join(ranks)}" for value, ranks in values.items())
            told.append(f"{what} differs: {'; '.join(parts)}")
    return told


def table(found: list[Found]) -> list[str]:
    """Return the lines of a table, a row for each rank."""
    rows: list[dict[str, Any]] = [asdict(each) for each in found]
    kept = [key for key in rows[0] if any(row[key] for row in rows) and key != "problem"]
    lines = [kept, *([row[key] for key in kept] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
