"""What of the installation is there, what is missing, and the command that adds it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from specheads.assets import tinycode_dir
from specheads.packages import Part, look_up, pip, quoted, requirements

_CPP = "#include <concepts>\n#include <span>\nint main() { return 0; }\n"


def examine(*, imports: bool = True) -> list[Part]:
    """Look at Python, packages, compiler, headers and GPU.

    Args:
        imports: try to import what is installed; takes some seconds.
    """
    gpu, compiler = _gpu(), _compiler()
    python = Part("python", "everything", f"{platform.python_version()} at {sys.executable}")
    found = look_up(has_gpu=gpu.ok, imports=imports)
    return [python, *found, compiler, _headers(), _flex(compiler), gpu, _embedded()]


def _compiler() -> Part:
    name, use = "C++ compiler", "decode.compile, DeepSpeed's offload"
    command = _system("g++", "gcc-c++", "g++", "xcode-select --install")
    given = os.environ.get("CXX", "")
    path = next(filter(None, map(shutil.which, (given, "c++", "g++", "clang++"))), None)
    if path is None:
        return Part(name, use, command=command)
    try:
        done = subprocess.run(
            [path, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
            input=_CPP,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Part(name, use, path, f"cannot be run: {error}", command)
    return Part(name, use, path, "compiles no C++20" if done.returncode else "", command)


def _headers() -> Part:
    folder = Path(sysconfig.get_path("include"))
    found = str(folder) if (folder / "Python.h").is_file() else ""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = _system(f"python{version}-dev", f"python{version}-devel", "python3-dev", "")
    use = "DeepSpeed's offload, compiled passes"
    return Part("Python headers", use, found, "" if found else f"no Python.h in {folder}", command)


def _flex(compiler: Part) -> Part:
    """Return what torch has of flex_attention, which it compiles: on a CPU by the compiler."""
    name, use = "flex_attention", "model.attn=flex_attention"
    try:
        from torch.nn.attention import flex_attention
    except (ImportError, OSError):
        return Part(name, use, command=pip(quoted(requirements().get("torch", "torch"))))
    found = f"in torch, as {flex_attention.__name__}"
    if compiler.ok:
        return Part(name, use, found)
    return Part(name, use, found, "runs without being compiled on a CPU: no compiler")


def _gpu() -> Part:
    name, use = "GPU", "models of more than some hundred million parameters"
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        return Part(name, use, problem=f"cannot be looked at without torch: {reason}")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        return Part(name, use, f"{count} x {torch.cuda.get_device_name()}, {built}{_driver()}")
    if not has_nvidia_device():
        return Part(name, use, problem="none in this machine; everything runs on the CPU, slower")
    if torch.version.cuda is None:
        problem = "there is one, but torch was built without CUDA"
        return Part(name, use, problem=problem, command=pip("--force-reinstall torch"))
    driver = "sudo ubuntu-drivers install" if shutil.which("ubuntu-drivers") else ""
    problem = f"there is one, but its driver does not work with CUDA {torch.version.cuda}"
    return Part(name, use, problem=problem, command=driver or _system("nvidia-driver", "", "", ""))


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    text = path.read_text(errors="replace") if path.is_file() else ""
    found = re.search(r"Module.*?\s(\d+\.[\d.]+)\s", text)
    return f", driver {found.group(1)}" if found else ""


def has_nvidia_device(folder: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Return whether the machine has a device of NVIDIA's, whatever drives it."""
    if Path("/proc/driver/nvidia/version").is_file() or shutil.which("nvidia-smi"):
        return True
    for vendor in folder.glob("*/vendor"):
        kind = vendor.with_name("class")
        try:  # class 3 is a display controller; others are sound and USB of the same card
            if vendor.read_text().strip() == "0x10de" and kind.read_text().startswith("0x03"):
                return True
        except OSError:
            continue
    return False


def _embedded() -> Part:
    folder = tinycode_dir()
    found = str(folder) if (folder / "model.safetensors").is_file() else ""
    command = pip("--force-reinstall --no-deps specheads")
    return Part("tinycode", "the first try without a network", found, command=command)


def _system(apt: str, dnf: str, apk: str, mac: str) -> str:
    """Return how this system installs a tool; empty where we do not know."""
    sudo = "" if getattr(os, "geteuid", lambda: 1)() == 0 else "sudo "
    for tool, package in (("apt-get", apt), ("dnf", dnf), ("apk", apk)):
        if package and shutil.which(tool):
            return f"{sudo}{tool} {'add' if tool == 'apk' else 'install -y'} {package}"
    return mac if sys.platform == "darwin" else ""
