"""What of the installation is there, what is missing, and the command that adds it.

Nothing heavy is imported here: packages are looked up, and tried out in a process of their own,
where one that crashes takes nobody along. So it works where hardly anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specheads.assets import tinycode_dir


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
    Package("wandb", "wandb", "log.wandb"),
    Package("matplotlib", "matplotlib", "bench report=, plots"),
    Package("liger_kernel", "liger-kernel", "loss.implementation=liger", needs_gpu=True),
    Package("flash_attn", "flash-attn", "model.attn=flash_attention_2", needs_gpu=True),
    Package("lm_eval", "lm-eval", "lm-evaluation-harness through our decoder", quick=False),
    Package("vllm", "vllm", "specheads.vllm_proposer in vLLM 0.33", needs_gpu=True, quick=False),
)
# where the package's own metadata, which pip keeps, is not there or says nothing
_REQUIREMENTS = {"vllm": "vllm>=0.33"}
_TRIAL = """
import importlib, sys
for name in sys.argv[1:]:
    print("try", name, flush=True)
    try:
        importlib.import_module(name)
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        print("bad", name, text, flush=True)
    else:
        print("good", name, flush=True)
"""
_CPP = "#include <concepts>\n#include <span>\nint main() { return 0; }\n"


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


def examine(*, imports: bool = True) -> list[Part]:
    """Look at Python, packages, compiler, headers and GPU.

    Args:
        imports: try to import what is installed; takes some seconds.
    """
    gpu = _gpu()
    wanted = _requirements()
    parts = [Part("python", "everything", f"{platform.python_version()} at {sys.executable}")]
    parts += [_package(each, wanted.get(each.name, each.name), gpu) for each in PACKAGES]
    if imports:
        modules = {each.name: each.module for each in PACKAGES if each.quick}
        tried = try_imports(
            [modules[part.name] for part in parts if part.ok and part.name in modules]
        )
        parts = [
            Part(
                part.name,
                part.use,
                part.found,
                f"cannot be imported: {tried[modules[part.name]]}",
                _pip(f"--force-reinstall {_quoted(wanted.get(part.name, part.name))}"),
                part.required,
            )
            if tried.get(modules.get(part.name, ""))
            else part
            for part in parts
        ]
    return [*parts, _compiler(), _headers(), gpu, _embedded()]


def try_imports(modules: Sequence[str]) -> dict[str, str]:
    """Import modules in another process; return module -> why not, empty where it works."""
    found: dict[str, str] = {}
    left = list(modules)
    while left:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, *left],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        begun = ""
        for line in done.stdout.splitlines():
            word, _, rest = line.partition(" ")
            name, _, reason = rest.partition(" ")
            if name not in left:
                continue  # something that an import has printed
            if word == "try":
                begun = name
            elif word in ("good", "bad"):
                found[name] = reason
        if begun in left and begun not in found:
            found[begun] = f"the process ended with {done.returncode}"
        elif not begun:
            return found | dict.fromkeys(left, "no process can be started")
        left = [name for name in left if name not in found]
    return found


def _requirements() -> dict[str, str]:
    """Return distribution -> requirement, as the package's metadata or the clone says."""
    try:
        listed = importlib.metadata.requires("specheads") or []
    except importlib.metadata.PackageNotFoundError:  # a clone that was never installed
        project = Path(__file__).parents[1] / "pyproject.toml"
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


def _package(package: Package, requirement: str, gpu: Part) -> Part:
    flags = " --no-build-isolation" if package.name == "flash-attn" else ""
    command = _pip(_quoted(requirement) + flags)
    use, required = package.use, package.required
    try:
        found = importlib.metadata.version(package.name)
        if importlib.util.find_spec(package.module) is None:
            found = ""
    except (importlib.metadata.PackageNotFoundError, ValueError):
        found = ""
    if found and not _new_enough(found, requirement):
        return Part(package.name, use, found, f"needs {requirement}", command, required)
    if package.needs_gpu and not gpu.ok:
        problem = "needs a GPU" if found else "missing, and needs a GPU"
        return Part(package.name, use, found, problem, "" if found else command)
    return Part(package.name, use, found, "", "" if found else command, required)


def _new_enough(found: str, requirement: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return True
    return Requirement(requirement).specifier.contains(found, prereleases=True)


def _compiler() -> Part:
    name, use = "C++ compiler", "decode.compile, flex_attention on a CPU, DeepSpeed's offload"
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
        return Part(name, use, f"{count} x {torch.cuda.get_device_name()}, {built}")
    if not has_nvidia_device():
        return Part(name, use, problem="none in this machine; everything runs on the CPU, slower")
    if torch.version.cuda is None:
        problem = "there is one, but torch was built without CUDA"
        return Part(name, use, problem=problem, command=_pip("--force-reinstall torch"))
    driver = "sudo ubuntu-drivers install" if shutil.which("ubuntu-drivers") else ""
    problem = f"there is one, but its driver does not work with CUDA {torch.version.cuda}"
    return Part(name, use, problem=problem, command=driver or _system("nvidia-driver", "", "", ""))


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
    command = _pip("--force-reinstall --no-deps specheads")
    return Part("tinycode", "the first try without a network", found, command=command)


def _pip(arguments: str) -> str:
    python = sys.executable
    first = shutil.which("python")
    if first and Path(first).absolute() == Path(python).absolute():
        python = "python"
    if importlib.util.find_spec("pip") is None and shutil.which("uv"):
        return f"uv pip install --python {python} {arguments}"
    return f"{python} -m pip install {arguments}"


def _quoted(requirement: str) -> str:
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f"'{requirement}'"


def _system(apt: str, dnf: str, apk: str, mac: str) -> str:
    """Return how this system installs a tool; empty where we do not know."""
    sudo = "" if getattr(os, "geteuid", lambda: 1)() == 0 else "sudo "
    for tool, package in (("apt-get", apt), ("dnf", dnf), ("apk", apk)):
        if package and shutil.which(tool):
            return f"{sudo}{tool} {'add' if tool == 'apk' else 'install -y'} {package}"
    return mac if sys.platform == "darwin" else ""
