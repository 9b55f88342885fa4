"""What of the installation is there, what is missing, and the command that adds it.

Nothing heavy is imported here: packages are looked up, and tried out in a process of their own,
where one that crashes takes nobody along. So it works where hardly anything is installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specheads.system.files import tinycode_dir


@dataclass(frozen=True)
class Part:
    """One part of the installation.

    Attributes:
        name: of the package, or of the tool.
        use: what needs it.
        found: its version, or where it is; empty where it is missing.
        problem: why it cannot be used although it is there, or is not for this machine.
        command: adds or mends it; empty where there is nothing to do.
        required: nothing works without it.
    """

    name: str
    use: str
    found: str = ""
    problem: str = ""
    command: str = ""
    required: bool = False

    @property
    def ok(self) -> bool:
        """Whether it can be used."""
        return bool(self.found) and not self.problem

    @property
    def wanting(self) -> bool:
        """Whether there is something to do about it."""
        return not self.ok and bool(self.command)

    def line(self) -> str:
        """Return it in words."""
        if self.ok:
            return self.found
        missing = "" if self.found else "missing"
        state = ", ".join(filter(None, (self.found, self.problem or missing)))
        return f"{'WRONG: ' if self.required else ''}{state} (for {self.use})"


@dataclass(frozen=True)
class Package:
    """A package of Python's, by the names of its module and its distribution."""

    module: str
    name: str
    use: str
    required: bool = False
    needs_gpu: bool = False
    quick: bool = True  # imported in seconds


PACKAGES = (
    Package("torch", "torch", "everything", required=True),
    Package("transformers", "transformers", "everything", required=True),
    Package("tokenizers", "tokenizers", "everything", required=True),
    Package("safetensors", "safetensors", "everything", required=True),
    Package("hydra", "hydra-core", "the command line", required=True),
    Package("tqdm", "tqdm", "progress bars", required=True),
    Package("datasets", "datasets", "data=hub, data=parquet"),
    Package("peft", "peft", "adapter=lora"),
    Package("bitsandbytes", "bitsandbytes", "model.quantization=nf4, optim=adamw8bit"),
    Package("deepspeed", "deepspeed", "deepspeed=zero0 to zero3"),
    Package("ninja", "ninja", "DeepSpeed's offload"),
    Package("accelerate", "accelerate", "device_map=, deepspeed=zero3, adapter=lora"),
    Package("wandb", "wandb", "log.wandb"),
    Package("gguf", "gguf", "model=<file>.gguf, model=smollm2"),
    Package("matplotlib", "matplotlib", "bench report=, plots"),
    Package("fastapi", "fastapi", "specheads serve"),
    Package("uvicorn", "uvicorn", "specheads serve"),
    Package("prometheus_client", "prometheus-client", "specheads serve"),
    Package("flash_attn", "flash-attn", "model.attn=flash_attention_2", needs_gpu=True),
    Package("lm_eval", "lm-eval", "lm-evaluation-harness through our decoder", quick=False),
    Package("vllm", "vllm", "specheads.vllm_proposer in vLLM", needs_gpu=True, quick=False),
)
# where the package's own metadata, which pip keeps, is not there or says nothing
_REQUIREMENTS = {"vllm": "vllm>=0.32", "lm-eval": "lm-eval[hf]"}
_TRIAL = """
import importlib, sys
try:
    for name in sys.argv[1:]:
        importlib.import_module(name)
except BaseException as error:
    sys.exit(f"\\0{type(error).__name__}: {error}")
"""
_CPP = "#include <concepts>\n#include <span>\nint main() { return 0; }\n"


def examine_installation(*, imports: bool = True) -> list[Part]:
    """Look at Python, packages, compiler, headers and GPU.

    Args:
        imports: try to import what is installed; takes some seconds.
    """
    gpu, compiler = _gpu(), _compiler()
    python = Part("python", "everything", f"{platform.python_version()} at {sys.executable}")
    wanted = {each.name: each.name for each in PACKAGES} | requirements()
    packages = {each: _package(each, wanted[each.name], gpu.ok) for each in PACKAGES}
    usable = [each.module for each, part in packages.items() if part.ok and each.quick]
    tried = try_imports(usable) if imports else {}
    for each, part in packages.items():
        if reason := tried.get(each.module):
            command = pip(f"--force-reinstall {shlex.quote(wanted[each.name])}")
            problem = f"cannot be imported: {reason}"
            packages[each] = replace(part, problem=problem, command=command)
    found = packages.values()
    return [python, *found, compiler, _headers(), gpu, _embedded()]


def try_imports(modules: Sequence[str]) -> dict[str, str]:
    """Import modules in another process, each in its own where together they fail.

    Returns:
        Module -> why not, empty where it works.
    """

    def trouble(*names: str) -> str:
        done = _run([sys.executable, "-c", _TRIAL, *names])
        _, error, said = done.stderr.rpartition("\0")  # an import may print what it likes
        ended = f"the process ended with {done.returncode}" if done.returncode else ""
        return " ".join(said.split())[:300] if error else ended

    together = trouble(*modules)
    alone = {name: together and trouble(name) for name in modules}
    return alone if any(alone.values()) else dict.fromkeys(modules, together)


def _run(
    command: Sequence[str], given: str = "", timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    how: Any = {"capture_output": True, "text": True, "errors": "replace", "check": False}
    return subprocess.run(command, input=given, timeout=timeout, **how)


def requirements() -> dict[str, str]:
    """Return distribution -> requirement, as the package's metadata or the clone says."""
    try:
        listed = importlib.metadata.requires("specheads") or []
    except importlib.metadata.PackageNotFoundError:  # a clone that was never installed
        project = Path(__file__).parents[2] / "pyproject.toml"
        if not project.is_file():
            return dict(_REQUIREMENTS)
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        listed = sum(table.get("optional-dependencies", {}).values(), table["dependencies"])
    found = dict(_REQUIREMENTS)
    for line in listed:
        requirement = line.partition(";")[0].strip()
        if match := re.match(r"[\w.-]+", requirement):
            found.setdefault(match.group(), requirement)
    return found


def _package(package: Package, requirement: str, has_gpu: bool) -> Part:
    flags = " --no-build-isolation" if package.name == "flash-attn" else ""
    found = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
        version = importlib.metadata.version(package.name)
        found = version if importlib.util.find_spec(package.module) else ""
    command, problem = pip(shlex.quote(requirement) + flags), ""
    if found and not _new_enough(found, requirement):
        problem = f"needs {requirement}"
    else:
        command = "" if found else command
        if package.needs_gpu and not has_gpu:
            problem = "needs a GPU" if found else "missing, and needs a GPU"
    return Part(package.name, package.use, found, problem, command, package.required)


def _new_enough(found: str, requirement: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(found, prereleases=True)


def pip(arguments: str) -> str:
    """Return the command by which this Python gets packages."""
    python = sys.executable
    first = shutil.which("python")
    if first and Path(first).absolute() == Path(python).absolute():
        python = "python"
    # not find_spec: looking for pip that way makes setuptools leave distutils alone from then on
    has_pip = any(True for _ in importlib.metadata.distributions(name="pip"))
    if not has_pip and shutil.which("uv"):
        return f"uv pip install --python {python} {arguments}"
    return f"{python} -m pip install {arguments}"


def _compiler() -> Part:
    part = Part("C++ compiler", "decode.compile, flex_attention on a CPU, DeepSpeed's offload")
    command = _system("g++", "gcc-c++", "g++", "xcode-select --install")
    given = os.environ.get("CXX", "")
    path = next(filter(None, map(shutil.which, (given, "c++", "g++", "clang++"))), None)
    if path is None:
        return replace(part, command=command)
    try:
        done = _run([path, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"], _CPP, timeout=60)
        problem = "compiles no C++20" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"cannot be run: {error}"
    return replace(part, found=path, problem=problem, command=command)


def _headers() -> Part:
    folder = Path(sysconfig.get_path("include"))
    use = "DeepSpeed's offload, compiled passes"
    if (folder / "Python.h").is_file():
        return Part("Python headers", use, str(folder))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = _system(f"python{version}-dev", f"python{version}-devel", "python3-dev", "")
    return Part("Python headers", use, problem=f"no Python.h in {folder}", command=command)


def _gpu() -> Part:
    part = Part("GPU", "models of more than some hundred million parameters")
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        return replace(part, problem=f"cannot be looked at without torch: {reason}")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return replace(part, found=f"{torch.cuda.device_count()} x {name}, {built}")
    if not has_nvidia_device():
        return replace(part, problem="none in this machine; everything runs on the CPU, slower")
    if torch.version.cuda is None:
        problem = "there is one, but torch was built without CUDA"
        return replace(part, problem=problem, command=pip("--force-reinstall torch"))
    known = shutil.which("ubuntu-drivers")
    driver = "sudo ubuntu-drivers install" if known else _system("nvidia-driver", "", "", "")
    problem = f"there is one, but its driver does not work with {built}"
    return replace(part, problem=problem, command=driver)


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
