"""Find out on the actual model what decoding can promise; ``python -m specheads.doctor`` prints it.

Every finding is measured where it can be: trees against ordinary forward passes over each path,
rows of a batch against the same rows alone, decoded tokens against plain decoding's.

Python packages that something here may ask for: there, missing, too old, or broken.

Nothing heavy is imported here: packages are looked up, and tried out in a process of their own,
where one that crashes takes nobody along. So it works where hardly anything is installed.

What of the installation is there, what is missing, and the command that adds it.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.cache import TreeCache, TreeLayer
from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.lookup import NgramDrafter
from specheads.models.base import (
    check_tokenizer,
    context_length,
    end_tokens,
    input_device,
    input_embedding,
    output_device,
)
from specheads.models.forward import ModelPass, thresholds
from specheads.models.output import output_layer
from specheads.models.support import compare, tree_support
from specheads.system.files import tinycode_dir
from specheads.verification.sampling import ROUNDING

TREES = {
    "chain": Tree.chain(6),
    "wide": Tree.from_choices([*((i,) for i in range(12)), (0, 0), (11, 0)]),
    "bushy": default_tree(4, 24),
}
PROMPT_LENGTHS = (5, 64)
LONGEST_WINDOW = 2048  # a longer one takes a prompt that few machines read in passing
EXACT_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Finding:
    """One line of the report; not ``ok`` where decoding could not be trusted."""

    name: str
    text: str
    ok: bool = True


def examine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Finding]:
    """Yield what is found, the verdict last.

    Args:
        model: in eval mode.
        tokenizer: the one that comes with it, if there is one.
    """
    yield _what(model)
    yield _where(model)
    context = context_length(model)
    yield Finding("context", f"{context:,} tokens" if context else "its config names no limit")
    yield _tokenizer(model, tokenizer)
    yield _output(model)
    try:
        support = tree_support(model)
    except ValueError as error:
        yield Finding("verdict", f"refused: {error}", ok=False)
        return
    yield _cache(model)
    yield Finding("self-test", f"{support.kind}, {_error(support.error, support.limit)}")
    if support.rounding > ROUNDING:
        text = (
            f"{support.rounding:.1e} of the largest logit, more than {ROUNDING:.0e}: closer tokens"
            " are decided by a plain replay, but plain decoding's very tokens are not promised"
        )
        yield Finding("rounding", text)
    if (found := thresholds(model)) is not None:
        text = f"{found.name}: one row at a time may cross it; rows of a batch lie on one side"
        yield Finding("threshold", text)
    lengths, window = _prompt_lengths(model)
    checks = {
        name: partial(_tree, model, name, lengths, chain_only=support.kind == "chain")
        for name in (TREES if support.kind == "tree" else ("chain",))
    }
    if support.kind == "tree":
        checks["batch"] = partial(_rows, model)
    checks["tokens"] = partial(_tokens, model)
    wrong = []
    for name, check in checks.items():
        ok, text = _run(check)
        wrong += [] if ok else [name]
        yield Finding(name, text, ok)
    if window is not None:
        how = (
            "measured beyond it" if window < lengths[-1] else "not reached; its mask rule was seen"
        )
        yield Finding("window", f"{window:,} tokens, {how}")
    if wrong:
        text = f"{support.kind} by the self-test, but {', '.join(wrong)} above contradict it"
        yield Finding("verdict", text, ok=False)
    elif support.kind == "tree":
        yield Finding("verdict", "tree: decodes trees and batches with the base's own output")
    else:
        yield Finding("verdict", f"chain only, 1 row at a time: {support.reason}")


def _run(check: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    try:
        return check()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model or its kernels may raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return False, f"cannot be run: {lines[0]}"


def _what(model: PreTrainedModel) -> Finding:
    config = model.config.get_text_config()
    count = sum(parameter.numel() for parameter in model.parameters())
    return Finding("model", f"{type(model).__name__} ({config.model_type}), {count:,} parameters")


def _where(model: PreTrainedModel) -> Finding:
    first, last = input_device(model), output_device(model)
    spread = getattr(model, "hf_device_map", None)
    place = str(first)
    if spread and len(places := dict.fromkeys(map(str, spread.values()))) > 1:
        place = f"{', '.join(places)} (token ids on {first}, heads on {last})"
    dtype = str(model.dtype).removeprefix("torch.")
    attention = model.config.get_text_config()._attn_implementation
    return Finding("loaded", f"{dtype}, on {place}, {attention} attention")


def _tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Finding:
    if tokenizer is None:
        return Finding("tokenizer", "none comes with the model; token ids can be decoded")
    try:
        check_tokenizer(tokenizer, model)
    except ConfigError as error:
        return Finding("tokenizer", str(error), ok=False)
    ends, num_rows = end_tokens(model, tokenizer), input_embedding(model).shape[0]
    if outside := [token for token in ends if not 0 <= token < num_rows]:
        text = f"ends texts with {outside}, but there are {num_rows} embeddings"
        return Finding("tokenizer", text, ok=False)
    names = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in ends)
    end = f"texts end at {names}" if ends else "no end token: texts end at the token limit only"
    return Finding("tokenizer", f"{len(tokenizer):,} ids for {num_rows:,} embeddings; {end}")


def _output(model: PreTrainedModel) -> Finding:
    try:
        layer = output_layer(model)
    except ConfigError as error:
        return Finding("output", str(error), ok=False)
    rows, columns = layer.weight.shape
    extras = [
        "with bias" if layer.bias is not None else "",
        f"scale {layer.scale:g}" if layer.scale != 1 else "",
        f"softcap {layer.softcap:g}" if layer.softcap else "",
    ]
    text = ", ".join(filter(None, [f"{columns:,} to {rows:,}", *extras]))
    return Finding("output", f"{text}; it explains the logits")


@torch.no_grad()
def _cache(model: PreTrainedModel) -> Finding:
    cache = TreeCache()
    ModelPass(model, cache, chain_only=True).read(_random_ids(model, 1, 4), [4])
    layers = [layer for layer in cache.layers if isinstance(layer, TreeLayer)]
    buffers = [t for x in layers for t in (x.keys, x.values) if t is not None]
    num_bytes = sum(t.shape[1] * t.shape[3] * t.element_size() for t in buffers)
    config = model.config.get_text_config()
    key_heads = buffers[0].shape[1] if buffers else 0
    query_heads = getattr(config, "num_attention_heads", key_heads)
    text = f"{num_bytes:,} bytes per token and row in {len(buffers) // 2} layers"
    if query_heads > key_heads > 0:
        whole = config._attn_implementation == "sdpa"
        how = "without expanding it" if whole else "expanded in every step; attn=sdpa would not"
        text += f"; {query_heads} query heads share {key_heads}, {how}"
    return Finding("cache", text)


def _prompt_lengths(model: PreTrainedModel) -> tuple[list[int], int | None]:
    """Return lengths of prompts to try, beyond the window where that is feasible; the window."""
    longest = (context_length(model) or 1 << 30) - max(t.num_nodes for t in TREES.values()) - 2
    lengths, window = [length for length in PROMPT_LENGTHS if length <= longest], _window(model)
    if window is not None and window <= min(LONGEST_WINDOW, longest - 8):
        lengths = sorted({*lengths, window + 8})
    return lengths, window


def _tree(
    model: PreTrainedModel, name: str, lengths: list[int], *, chain_only: bool
) -> tuple[bool, str]:
    """Compare a verify step over one of TREES with a forward pass over each path."""
    tree, ok, parts = TREES[name], True, []
    for length in lengths:
        found = compare(model, tree, length, chain_only=chain_only)
        parts.append(f"{_error(found.error, found.limit)} behind {length} tokens")
        ok = ok and found.passes
    return ok, f"{tree.num_nodes} nodes: {'; '.join(parts)}"


def _window(model: PreTrainedModel) -> int | None:
    """Return the widest sliding window or chunk, None where all layers see everything."""
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # custom code's configs need not know layers
        return None
    return max((x.sliding_window for x in layers if hasattr(x, "sliding_window")), default=None)


@torch.no_grad()
def _rows(model: PreTrainedModel) -> tuple[bool, str]:
    """Compare a verify step over rows of different lengths with each row's own."""
    tree, lengths = TREES["bushy"], [3, 17, 9]
    prompts = _random_ids(model, len(lengths), max(lengths))
    nodes = _random_ids(model, len(lengths), tree.num_nodes, seed=1)

    def verify(rows: slice) -> Tensor:
        base = ModelPass(model, TreeCache())
        counts = lengths[rows]
        base.read(prompts[rows, : max(counts)], counts)
        return base.verify(nodes[rows], tree).float()

    together = verify(slice(None))
    alone = torch.cat([verify(slice(row, row + 1)) for row in range(len(lengths))])
    limit = tree_support(model).limit
    errors = together - alone
    if model.dtype in EXACT_DTYPES:
        error = float(errors.abs().max())
    else:
        error = float(errors.square().mean(-1).sqrt().mean())
    text = f"{len(lengths)} rows of different lengths against each alone: {_error(error, limit)}"
    return error <= limit, text


def _tokens(model: PreTrainedModel) -> tuple[bool, str]:
    """Compare decoded tokens with plain decoding's."""
    room = context_length(model) or 1 << 30
    half = _random_ids(model, 1, max(1, min(16, room // 4)))
    ids, limit = torch.cat([half, half], dim=1), min(32, room - 2 * half.shape[1])
    plain = plain_decode(model, ids, max_new_tokens=limit).new_tokens
    ours = decode(model, NgramDrafter(), ids, max_new_tokens=limit).new_tokens
    same = next((i for i in range(limit) if plain[i] != ours[i]), limit)
    text = f"{same} of {limit} tokens as plain decoding's, guessed by prompt lookup"
    if same < limit and model.dtype not in EXACT_DTYPES:
        return True, f"{text}; two equally good ones differ by rounding in this dtype"
    return same == limit, text


def _random_ids(model: PreTrainedModel, num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    num_ids = input_embedding(model).shape[0]
    ids = torch.randint(num_ids, (num_rows, num_tokens), generator=generator)
    return ids.to(input_device(model))


def _error(error: float, limit: float) -> str:
    return f"error {error:.1e} (limit {limit:.1e})"


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


_CPP = "#include <concepts>\n#include <span>\nint main() { return 0; }\n"


def examine_installation(*, imports: bool = True) -> list[Part]:
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
