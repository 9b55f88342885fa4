"""What every rank of a launcher finds where it runs, told to rank 0.

The ranks meet in a store, not in a process group: a group waits for everybody and then fails
without a name, a store says who has not come.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import time
from importlib.metadata import PackageNotFoundError, version

from specheads.config import ConfigError, RunError
from specheads.data.teacher_cache import readable
from specheads.measure.render import Table
from specheads.models.digest import weight_files
from specheads.models.names import model_folder
from specheads.system import __version__, dist, hardware

ALIKE = ("device", "python", "torch", "deepspeed", "specheads", "model")  # on all ranks
Found = dict[str, str]  # of one rank, for people


def look(model: str, revision: str | None, device: str) -> Found:
    """Look around in this process: host, device, versions, weights, and ``problem``, if any.

    Args:
        model: the base; empty looks for none.
        revision: of a model on the hub.
        device: as ``device=`` says.
    """
    import torch

    found = {
        "rank": str(dist.rank()),
        "host": socket.gethostname(),
        "device": "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": "missing",
        "specheads": __version__,
        "model": "none" if model else "",
        "problem": "",
    }
    with contextlib.suppress(PackageNotFoundError):
        found["deepspeed"] = version("deepspeed")
    try:
        place = hardware.pick_device(device)
        found["device"] = str(place.type)
        if place.type == "cuda":
            free, total = torch.cuda.mem_get_info(place)
            found["device"] = f"{torch.cuda.get_device_name(place)}, {readable(total)}"
            found["free"] = readable(free)
        if model:
            files = weight_files(model_folder(model, revision=revision))
            found["model"] = readable(sum(file.stat().st_size for file in files))
            found["problem"] = "" if files else f"model={model} holds no weights"
    except (ConfigError, RunError) as error:
        found["problem"] = str(error)
    return found


def gather(own: Found, patience: float) -> tuple[list[Found], list[str]]:
    """Return what all ranks found, and what is wrong; both empty on all ranks but the first.

    Args:
        own: what this rank found.
        patience: seconds for the others to answer.

    Raises:
        RunError: on the others, if rank 0 cannot be reached.
    """
    rank = dist.rank()
    # torchrun keeps a store there itself
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    found, missing = [own], []
    try:
        store = dist.meeting_place("doctor", patience, hosts=hosts)
        if rank:
            store.set(str(rank), json.dumps(own))
            store.wait([str(rank)])  # it has arrived
            return [], []
        deadline = time.monotonic() + patience
        for other in range(1, dist.world_size()):
            while not (there := store.check([str(other)])) and time.monotonic() < deadline:
                time.sleep(0.05)
            if there:
                found.append(json.loads(store.get(str(other))))
            else:
                missing.append(f"rank {other} did not answer within {patience:g} s")
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError(
            f"rank {rank} on {own['host']} cannot meet the others at {address}: {first:.200}"
        ) from None
    problems = [f"rank {each['rank']}: {each['problem']}" for each in found if each["problem"]]
    return found, missing + problems + differences(found)


def differences(found: list[Found]) -> list[str]:
    """Return in what the ranks differ that should be alike, the values with their ranks."""
    told = []
    for what in ALIKE:
        values: dict[str, list[str]] = {}
        for each in found:
            values.setdefault(each[what], []).append(each["rank"])
        if len(values) > 1:
            parts = (f"{value} on {', '.join(ranks)}" for value, ranks in values.items())
            told.append(f"{what} differs: {'; '.join(parts)}")
    return told


def table(found: list[Found]) -> str:
    """Return a table, a row for each rank."""
    names = dict.fromkeys(name for each in found for name, value in each.items() if value)
    names.pop("problem", None)
    return Table(list(names), [[each.get(name, "") for name in names] for each in found]).text()
