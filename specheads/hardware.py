"""What this machine is: native dtype, threads, and the block that stands beside every figure."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Names under which Linux lists instructions that multiply bfloat16 matrices (x86, then Arm).
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def _cpu_lines() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    pairs = (line.partition(":") for line in lines)
    found: dict[str, str] = {}
    for key, _, value in pairs:
        found.setdefault(key.strip(), value.strip())
    return found


def has_native_bfloat16() -> bool:
    """Say whether this processor multiplies bfloat16; emulating it is slower than float32."""
    cpu = _cpu_lines()
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    return not _BFLOAT16_FLAGS.isdisjoint(flags)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn a dtype's name into the dtype; ``auto`` is bfloat16 where the hardware has it."""
    import torch

    if name == "auto":
        native = torch.cuda.is_bf16_supported() if device.type == "cuda" else has_native_bfloat16()
        name = "bfloat16" if native else "float32"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def pin_threads(threads: int) -> int:
    """Give torch ``threads`` threads (0: one per processor this process may use)."""
    import torch

    if threads == 0:
        affinity = getattr(os, "sched_getaffinity", None)
        threads = len(affinity(0)) if affinity else os.cpu_count() or 1
    torch.set_num_threads(threads)
    return threads


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


def environment() -> dict[str, Any]:
    """Return date, versions, processor, threads and load, as printed beside measured figures."""
    import torch

    packages: dict[str, str] = {}
    for name in ("specheads", "torch", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:  # a clone that was never installed
            from specheads import __version__

            packages[name] = __version__
    cpu = _cpu_lines()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        **packages,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": cpu.get("model name") or platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "native_bfloat16": has_native_bfloat16(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }
