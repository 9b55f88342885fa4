"""The machine: device, dtype and threads to use, and what stands beside measured figures.

A bench whose machine also does other work measures that work, so :func:`sample` and :func:`between`
say what other processes took of the processors meanwhile. Load averages count what waits for a
disk, and lag by minutes; Linux's /proc/stat counts the busy time of every processor, so what this
process did not use itself others did, on the very processors that it may run on.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import re
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from specheads.system import __version__, dist
from specheads.system.errors import ConfigError, check_device, refuse
from specheads.system.terminal import note

if TYPE_CHECKING:
    import torch

STAT = Path("/proc/stat")
SHARE_LIMIT = 0.1  # of the processors; above it figures are said to be disturbed
WORTHWHILE = 1.2  # times as fast, or a run that is begun again could choose the other dtype
LEAST_SECONDS = 0.5  # in less the counters, of hundredths of a second, say nothing


@dataclass(frozen=True)
class Sample:
    """Counters at one moment, in seconds since the machine or the process was started.

    Attributes:
        wall: a clock.
        busy: time that all processes, and other virtual machines, took of the processors that this
            one may use; None where the system does not say.
        own: time that this process, its threads and the children it waited for took.
    """

    wall: float
    busy: float | None
    own: float


def processors() -> set[int]:
    """Return the numbers of the processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return set(affinity(0)) if affinity else set(range(os.cpu_count() or 1))


def sample(stat: Path = STAT) -> Sample:
    """Read the counters.

    Args:
        stat: the file, as Linux writes /proc/stat; one that is not there gives no busy time.
    """
    own = sum(os.times()[:4])  # user and system, of this process and its children
    wall, wanted = time.perf_counter(), {f"cpu{number}" for number in processors()}
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = stat.read_text().splitlines()
    rows = [line.split()[1:] for line in lines if line.split(" ", 1)[0] in wanted]
    if len(rows) != len(wanted):  # not Linux, or a sandbox that shows others than it lends
        return Sample(wall, None, own)
    tick = os.sysconf("SC_CLK_TCK")
    # user, nice, system, idle, iowait, irq, softirq, steal; what a guest used is in user as well
    busy = sum(int(row[i]) for row in rows for i in (0, 1, 2, 5, 6, 7) if i < len(row))
    return Sample(wall, busy / tick, own)


def between(first: Sample, last: Sample) -> dict[str, Any]:
    """Return what others used of the processors between two samples.

    Returns:
        ``seconds``; ``other_share``, of other processes and virtual machines, a mean over the time
        between 0 and 1: None where the system does not say, and where the time is too short for its
        counters.
    """
    seconds = max(last.wall - first.wall, 1e-9)
    found: dict[str, Any] = {"seconds": round(seconds, 3), "other_share": None}
    if first.busy is None or last.busy is None or seconds < LEAST_SECONDS:
        return found
    # the counters lag behind each other: a process may seem to have used more than all together
    other = max(last.busy - first.busy - (last.own - first.own), 0.0) / seconds
    return found | {"other_share": round(min(other / len(processors()), 1.0), 4)}


PROCESS = Path("/proc/self")
# proc(5) and cgroups(7): of a mount its root, its place, 2 or nothing, and the controllers
_CGROUP_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*- cgroup(2?) \S+ (\S+)$", re.MULTILINE)
_CGROUP = re.compile(r"^\d+:([^:\n]*):(.*)$", re.MULTILINE)
# Names under which Linux lists instructions that multiply bfloat16 matrices (x86, then Arm).
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def _cpu_lines() -> dict[str, str]:
    """Return what Linux says of the first processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    pairs = (line.partition(":") for line in reversed(lines))
    return {key.strip(): value.strip() for key, _, value in pairs}


def has_native_bfloat16() -> bool:
    """Say whether this processor multiplies bfloat16; emulating it is slower than float32."""
    cpu = _cpu_lines()
    return not _BFLOAT16_FLAGS.isdisjoint((cpu.get("flags") or cpu.get("Features") or "").split())


@lru_cache
def is_amd() -> bool:
    """Say whether AMD made this processor, for which MKL chooses slower kernels."""
    return "AMD" in (_cpu_lines().get("vendor_id") or platform.processor())


@lru_cache
def faster_dtype(device: torch.device, *, rows: int = 512, width: int = 1024) -> torch.dtype:
    """Return the dtype, float32 or bfloat16, in which many rows at a time are multiplied faster.

    On a GPU that is bfloat16 where it has it. Processors differ, whatever their flags say: with AMX
    bfloat16 takes a fraction of the time, with AVX-512 BF16 alone up to 1.7 times as long. So both
    are clocked, which takes some 50 ms, once per process.

    Args:
        device: where.
        rows: that are multiplied at a time.
        width: of the rows, and of what is made of them.
    """
    import torch

    native = pick_dtype("auto", device)
    if device.type != "cpu" or native == torch.float32:
        return native
    took = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, matrix = (torch.zeros(size, width, dtype=dtype) for size in (rows, width))
        seconds = []
        for _ in range(6):
            begin = time.perf_counter()
            torch.nn.functional.linear(x, matrix)
            seconds.append(time.perf_counter() - begin)
        took[dtype] = statistics.median(seconds[1:])  # the first one makes the kernel
    faster = WORTHWHILE * took[torch.float32] < took[torch.bfloat16]
    return torch.float32 if faster else torch.bfloat16


def pick_device(asked: str = "auto") -> torch.device:
    """Return the device that ``device=`` asks for; a GPU becomes torch's current one as well.

    Args:
        asked: ``auto`` (a GPU where there is one, else the CPU), ``cpu``, ``cuda`` (also ROCm's; of
            several processes on one machine each takes its own), ``cuda:<number>``, or ``mps``.

    Raises:
        ConfigError: if it is no such name, there is no such device, or there are more processes on
            this machine than GPUs.
    """
    import torch

    check_device(asked)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = asked.partition(":")
    if asked == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device=mps, but torch finds no Apple GPU here: device=cpu or auto")
    if kind in ("cpu", "mps") or (asked == "auto" and not gpus):
        return torch.device("cpu" if asked == "auto" else asked)
    index, world = int(number or dist.local_rank()), dist.world_size()
    last = f" to cuda:{gpus - 1}" if gpus > 1 else ""
    refuse({
        f"device={asked}, but torch finds no GPU here (`specheads doctor` says why): device=cpu or"
        " auto": not gpus,
        f"device={asked} is one GPU for {world} processes: with device=cuda each takes its own": (
            number and world > 1
        ),
        f"device={asked}, but this process sees cuda:0{last}: choose among these": (
            number and index >= gpus
        ),
        f"LOCAL_RANK is {index}, but this process sees {gpus} GPUs: start as many processes per"
        " machine as it has GPUs, or set device=cpu": index >= gpus,
    })  # fmt: skip
    torch.cuda.set_device(index)  # kernels, random state and memory figures that name no device
    return torch.device("cuda", index)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn a dtype's name into the dtype; ``auto`` is bfloat16 where the hardware has it."""
    import torch

    if name == "auto":
        native = torch.cuda.is_bf16_supported() if device.type == "cuda" else has_native_bfloat16()
        name = "bfloat16" if native else "float32"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def keep_freed_memory() -> None:
    """Tell glibc to keep large blocks instead of returning them to the system after each use.

    Every step allocates the same temporaries; fetching their pages anew costs about a fifth of a
    small training step on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        mmap_max, trim_threshold = -4, -1
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)


def cpu_quota() -> float | None:
    """Return how many processors' time the cgroups of this process may use; None: no limit.

    Of a cgroup and of those above it the tightest counts (cgroups(7)): ``cpu.max`` in version 2,
    ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us`` in version 1.
    """
    try:
        mounts = _CGROUP_MOUNT.findall((PROCESS / "mountinfo").read_text())
        member = _CGROUP.findall((PROCESS / "cgroup").read_text())
    except OSError:  # not Linux
        return None
    paths = {name: path for names, path in member for name in names.split(",")}
    found: list[float] = []  # processors
    for root, mount, second, options in mounts:
        if not second and "cpu" not in options.split(","):  # another controller's
            continue
        own = PurePosixPath(paths.get("" if second else "cpu", root))
        # a container may see its own part of the tree alone, and still the names of the whole
        inside = own.is_relative_to(root) and ".." not in own.parts
        below = own.relative_to(root) if inside else PurePosixPath()
        for folder in (below, *below.parents):
            found += _quota_of(Path(mount) / folder)
    return min(found, default=None)


def _quota_of(cgroup: Path) -> list[float]:
    try:
        if (cgroup / "cpu.max").is_file():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / f"cpu.cfs_{x}_us").read_text() for x in ("quota", "period"))
        return [int(quota) / int(period)] if int(quota) > 0 else []
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return []


def pin_threads(threads: int | None) -> int:
    """Set torch's number of threads, and say in a line on standard error which it is and why.

    Args:
        threads: 0 takes what ``OMP_NUM_THREADS``, the CPU quota of the container and the processors
            that this process may use all allow. None keeps torch's own number without a line, which
            heeds the variable, unless the quota is below it.
    """
    import torch

    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    limits = {"OMP_NUM_THREADS": int(wanted) if wanted.isdecimal() else 0, "CPU quota": cpu_quota()}
    limits["processors"] = len(processors())
    known = {name: number for name, number in limits.items() if number}
    fitting = max(1, int(min(known.values())))
    if threads is None and torch.get_num_threads() <= max(1, known.get("CPU quota", math.inf)):
        return torch.get_num_threads()
    count = threads or fitting
    why = f"as threads={threads} says; there are" if threads else "the least of"
    shown = ", ".join(f"{name} {number:g}" for name, number in known.items())
    plural = "s" if count > 1 else ""
    note(f"specheads: {count} thread{plural}, {why}: {shown}")
    torch.set_num_threads(count)
    return count


def prepare(
    device: str, dtype: str, threads: int | None = None
) -> tuple[torch.device, torch.dtype, int]:
    """Get ready to load a model; return the device, the dtype and the number of threads.

    Args:
        device: see :func:`pick_device`.
        dtype: see :func:`pick_dtype`.
        threads: see :func:`pin_threads`.

    Raises:
        ConfigError: if there is no such device.
    """
    place = pick_device(device)
    count = pin_threads(threads)
    quiet_loading()
    return place, pick_dtype(dtype, place), count


def quiet_loading() -> None:
    """Keep transformers' bars about loading weights out of a program's output."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def peak_memory(device: torch.device, *, reset: bool = False) -> int:
    """Return the most bytes in use since the last reset: of the device, or this process's RSS."""
    if device.type == "cuda":
        import torch

        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        try:  # Linux: writing 5 makes VmHWM start over
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return 0
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return date, versions, processor, threads and load, as printed beside measured figures.

    Args:
        device: that was measured on; None is the GPU where there is one.
    """
    import torch

    cpu = _cpu_lines()
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "specheads": __version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": cpu.get("model name") or platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name(device) if on_gpu else str(device or "cpu"),
        "threads": torch.get_num_threads(),
        "native_bfloat16": has_native_bfloat16(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }
