"""Python packages that something here may ask for: there, missing, too old, or broken.

Nothing heavy is imported here: packages are looked up, and tried out in a process of their own,
where one that crashes takes nobody along. So it works where hardly anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path


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
    Package("wandb", "wandb", "log.wandb"),
    Package("matplotlib", "matplotlib", "bench report=, plots"),
    Package("liger_kernel", "liger-kernel", "loss.implementation=liger", needs_gpu=True),
    Package("flash_attn", "flash-attn", "model.attn=flash_attention_2", needs_gpu=True),
    Package("lm_eval", "lm-eval", "lm-evaluation-harness through our decoder", quick=False),
    Package("vllm", "vllm", "specheads.vllm_proposer in vLLM", needs_gpu=True, quick=False),
)
# where the package's own metadata, which pip keeps, is not there or says nothing
_REQUIREMENTS = {"vllm": "vllm>=0.32"}
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


def look_up(*, has_gpu: bool, imports: bool) -> list[Part]:
    """Return a part for each of PACKAGES.

    Args:
        has_gpu: whether packages that need a GPU can be used.
        imports: try to import what is installed; takes some seconds.
    """
    wanted = requirements()
    parts = [_package(each, wanted.get(each.name, each.name), has_gpu) for each in PACKAGES]
    if not imports:
        return parts
    modules = {each.name: each.module for each in PACKAGES if each.quick}
    tried = try_imports([modules[each.name] for each in parts if each.ok and each.name in modules])
    for i, part in enumerate(parts):
        if reason := tried.get(modules.get(part.name, ""), ""):
            parts[i] = replace(
                part,
                problem=f"cannot be imported: {reason}",
                command=pip(f"--force-reinstall {quoted(wanted.get(part.name, part.name))}"),
            )
    return parts


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


def requirements() -> dict[str, str]:
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


def _package(package: Package, requirement: str, has_gpu: bool) -> Part:
    flags = " --no-build-isolation" if package.name == "flash-attn" else ""
    command = pip(quoted(requirement) + flags)
    use, required = package.use, package.required
    try:
        found = importlib.metadata.version(package.name)
        if importlib.util.find_spec(package.module) is None:
            found = ""
    except (importlib.metadata.PackageNotFoundError, ValueError):
        found = ""
    if found and not _new_enough(found, requirement):
        return Part(package.name, use, found, f"needs {requirement}", command, required)
    if package.needs_gpu and not has_gpu:
        problem = "needs a GPU" if found else "missing, and needs a GPU"
        return Part(package.name, use, found, problem, "" if found else command)
    return Part(package.name, use, found, "", "" if found else command, required)


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


def quoted(requirement: str) -> str:
    """Return a requirement as a shell takes it."""
    return requirement if re.fullmatch(r"[\w.-]+", requirement) else f"'{requirement}'"
