"""Files that may be damaged, or a stranger's: JSON, manifests, safetensors, folders of models.

What is read is bounded, and nothing leaves the folder. A manifest lists every file of an export
with its size and sha256. A header of safetensors is some kilobytes, whatever it claims, and is held
to what is expected before a tensor is read; safetensors checks that its offsets lie in the file. A
``.pt`` is pickle, which is read only where the user says so, and then by torch's restricted
unpickler: tensors and containers, no code; its archive must not be larger unpacked than it is, and
its tensors not larger than their storage.

Of base and draft models the weights are safetensors or nothing, and a config is held to them before
memory is taken: a damaged or hostile size in it would otherwise be allocated and filled with random
numbers. What specheads itself has written (``base/`` of an export, draft models) is looked at more
closely.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from specheads.config import ConfigError, InterruptedRunError, RunError
from specheads.models.digest import SHA256, check_recorded, file_sha256, weight_files


@contextlib.contextmanager
def one_line(problem: str) -> Iterator[None]:
    """Turn what a library raises about a file or a model into one line; for its calls alone.

    transformers, peft and tokenizers meet a damaged config wherever they first trip over it, with
    whatever that raises: tokenizers with a bare ``Exception`` or a panic. So does a model's own
    code. Where memory is used up, nothing is wrong with either.

    Args:
        problem: the beginning of the line.

    Raises:
        ConfigError: ``problem`` and the first line of the error.
    """
    try:
        yield
    except (ConfigError, RunError, InterruptedRunError, torch.OutOfMemoryError):
        raise
    except BaseException as error:
        given_up = type(error).__name__ == "PanicException"  # a library in Rust
        if not (given_up or isinstance(error, Exception)):
            raise
        raise ConfigError(f"{problem}: {first_line(error)}") from error


@contextlib.contextmanager
def said_of(what: object, *others: type[Exception]) -> Iterator[None]:
    """Put ``what`` and a colon in front of what a check says: a ValueError, or one of ``others``.

    Raises:
        ConfigError: in place of it.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        yield
    except kinds as error:
        raise ConfigError(f"{what}: {error}") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, its kind where there is none; bounded."""
    if isinstance(error, StrictDataclassError) and error.__cause__:
        error = error.__cause__  # its own first line only names a validator
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    if line.endswith(":"):  # what it announces comes on the lines below
        line = " ".join(lines)
    if isinstance(error, KeyError):
        line = f"there is no {line}"
    return line if len(line) <= 400 else f"{line[:400]} ..."


def expect(fits: bool, key: str, value: object, expected: object) -> None:
    """Raise ConfigError unless a stranger's value ``fits``: key, what it is, what was expected."""
    _hold(fits, f"{key} is {value!r:.80}", expected)


def _hold(fits: bool, found: str, expected: object) -> None:
    if not fits:
        raise ConfigError(f"{found}, expected {expected}")


def check_ids(what: str, ids: Tensor, vocab_size: int, number: int) -> None:
    """Hold token ids to a vocabulary; ``what`` they are begins the message.

    Raises:
        ConfigError: unless there are ``number`` different ones of 0 to ``vocab_size - 1``.
    """
    different, low, high = len(ids.unique()), int(ids.min()), int(ids.max())
    fits = len(ids) == different == number and low >= 0 and high < vocab_size
    found = f"{what} holds {different} different tokens, {low} to {high}"
    _hold(fits, found, f"{number} of 0 to {vocab_size - 1}")


def nested(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value of nested objects with the keys that lead to it; those of a list each."""
    if isinstance(values, dict):
        pairs = [((*path, str(key)), value) for key, value in values.items()]
    else:
        pairs = [(path, value) for value in values] if isinstance(values, list) else []
    for where, value in pairs:
        if where:
            yield where, value
        yield from nested(value, where)


MANIFEST = "manifest.json"
_LARGEST = 64 << 20  # bytes of a JSON file that is read whole: a config has some thousand
_DEEPEST = 64  # objects and lists in one another
# what transformers, peft or tokenizers would load if it lay in the folder
_LOADED = {
    ".json", ".safetensors", ".jinja", ".model", ".tiktoken", ".py",
    ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx",
}  # fmt: skip


def check_manifest(path: Path) -> dict[str, Any]:
    """Check every listed file's size and sha256 (cached per file), and return the manifest.

    Raises:
        ConfigError: if a file is missing, truncated or changed, names it with both numbers; if
            there is one that would be loaded and is not listed; if one lies elsewhere.
    """
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        file = check_size(path, name, entry, inside=True)
        check_sha256(file, file_sha256(file), entry)
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
        loaded = file.suffix in _LOADED or file.name in ("merges.txt", "vocab.txt")
        if loaded and not hidden and name not in (MANIFEST, *manifest["files"]):
            raise ConfigError(
                f"{path} holds {name}, which its {MANIFEST} does not list: it was not saved with it"
            )
    return manifest


def check_size(folder: Path, name: str, entry: Mapping[str, Any], *, inside: bool = False) -> Path:
    """Check that a listed file is there and has its size; return where it lies.

    Args:
        folder: whose manifest lists it.
        name: of the file.
        entry: what the manifest says about it.
        inside: links are followed, and must not lead elsewhere, see :func:`check_inside`.

    Raises:
        ConfigError: naming the file, and both numbers.
    """
    file = folder / name
    if not file.is_file():
        raise ConfigError(f"{folder} lacks {name}, which its {MANIFEST} lists")
    if inside:
        check_inside(folder, file)
    if (size := file.stat().st_size) != entry["size"]:
        raise ConfigError(
            f"{file} has {size} bytes, {MANIFEST} says {entry['size']}: an incomplete copy?"
        )
    return file


def check_sha256(file: Path, found: str, entry: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the sha256 that was found is what the manifest says of the file."""
    if found != entry["sha256"]:
        raise ConfigError(
            f"{file} was changed after it was saved: sha256 {found[:12]},"
            f" {MANIFEST} says {entry['sha256'][:12]}"
        )


def read_manifest(path: Path, what: str = "export") -> dict[str, Any]:
    """Read the manifest of a folder, an export say; no file that it lists is looked at.

    Raises:
        ConfigError: if there is none, or it lists what cannot be a file of the folder.
    """
    manifest = read_json(path / MANIFEST, f"{path} is not a whole {what}")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise ConfigError(f"{path / MANIFEST} must hold an object 'files'")
    for name, entry in files.items():
        plain = PurePosixPath(name)
        odd = plain.is_absolute() or ".." in plain.parts or not plain.parts or "\\" in name
        if odd or str(plain) != name or "\0" in name:
            raise ConfigError(
                f"{path / MANIFEST} lists {name!r:.80}, which is no file of that folder"
            )
        sized = isinstance(entry, dict) and type(entry.get("size")) is int
        digest = entry.get("sha256") if sized else None
        if not (isinstance(digest, str) and SHA256.fullmatch(digest)):
            raise ConfigError(f"{path / MANIFEST} must give {name} a size and a sha256")
    return manifest


def check_inside(folder: Path, file: Path) -> None:
    """Check that ``file`` lies in ``folder`` when links are followed.

    Models in the hub's cache are links, from ``snapshots/<commit>/`` to ``blobs/`` beside it: those
    are theirs.

    Raises:
        ConfigError: if it lies elsewhere.
    """
    lies = file.resolve()
    root = folder.resolve()
    cache = [up.parent / "blobs" for up in (root, *root.parents) if up.name == "snapshots"]
    if not any(lies.is_relative_to(allowed) for allowed in (root, *cache)):
        raise ConfigError(f"{file} is a link to {lies}, outside of {folder}")


def write_manifest(folder: Path) -> None:
    """List every file below ``folder`` in its manifest.json, except texts such as a model card."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".md")
    files = [file for file in files if file != folder / MANIFEST]
    entries = {file.relative_to(folder).as_posix(): manifest_entry(file) for file in files}
    write_json(folder / MANIFEST, {"files": entries})


def manifest_entry(file: Path) -> dict[str, Any]:
    """Return what a manifest says about one file."""
    return {"size": file.stat().st_size, "sha256": file_sha256(file)}


def read_json(file: Path, problem: str, *, strict: bool = True) -> dict[str, Any]:
    """Read a JSON object; ``problem`` is what it means when there is no such file.

    Args:
        file: at most 64 MiB.
        problem: the beginning of the message.
        strict: refuse NaN, Infinity, and a key that is twice in one object: what is no JSON, or is
            read in two ways. Configs of others' models may have them.

    Raises:
        ConfigError: if the file is missing, holds something else, or is nested too deeply.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if strict and len(found) < len(pairs):  # others would take the first, or the last
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {twice!r:.40} is there twice")
        return found

    def number(text: str) -> float:
        value = float(text)
        if strict and not math.isfinite(value):
            raise ValueError(f"{text:.20} is not a finite number")
        return value

    try:
        if not file.is_file() and file.exists():
            raise ValueError("it is no file")
        if (size := file.stat().st_size) > _LARGEST:
            raise ValueError(f"it has {size} bytes, at most {_LARGEST} do")
        content = json.loads(
            file.read_text(encoding="utf-8"),
            object_pairs_hook=unique,
            parse_float=number,
            parse_constant=number,
        )
        if depth(content) > _DEEPEST:  # more than what is done with it can follow
            raise RecursionError
    except FileNotFoundError:
        raise ConfigError(f"{problem}: there is no {file}") from None
    except RecursionError:
        raise ConfigError(f"cannot read {file}: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold an object, found {type(content).__name__}")
    return content


def depth(content: Any) -> int:
    """Return how many objects and lists are in one another; RecursionError where it is hundreds."""
    inside = content.values() if isinstance(content, dict) else content
    return 1 + max(map(depth, inside), default=0) if isinstance(content, dict | list) else 0


def write_json(file: Path, content: dict[str, Any], *, strict: bool = True) -> None:
    """Write a JSON object and flush it to the disk; ``strict``: NaN and infinities as null."""
    if strict:  # a figure that could not be measured must not keep the rest from being written
        content = json.loads(json.dumps(content), parse_constant=lambda name: None)
    with file.open("w", encoding="utf-8") as out:
        json.dump(content, out, indent=2, ensure_ascii=False)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())


# as safetensors calls them
_FLOATS = ("F64", "F32", "BF16", "F16")
_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32",
}  # fmt: skip
Header = dict[str, tuple[tuple[int, ...], str]]  # shape and dtype by name


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; for the library's calls alone.

    Raises:
        ConfigError: if the file is missing or damaged.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error}") from None


def read_header(file: Path) -> Header:
    """Return shape and dtype (as safetensors calls it) of every tensor; none is read.

    Raises:
        ConfigError: if the file is missing or damaged.
    """
    with _opened(file) as opened:
        found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {k: (tuple(s.get_shape()), str(s.get_dtype())) for k, s in found.items()}


def check_header(file: Path, wanted: Mapping[str, Tensor], *, exact: bool = False) -> None:
    """Check the names, shapes and kinds of the tensors of ``file``; none is read.

    Args:
        file: safetensors.
        wanted: tensors of these shapes, on any device, meta too.
        exact: floating-point numbers have the same precision, too.

    Raises:
        ConfigError: one line with both numbers.
    """
    found = read_header(file)
    if missing := sorted(wanted.keys() - found.keys()):
        raise ConfigError(
            f"{file} lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]}"
        )
    if extra := sorted(found.keys() - wanted.keys()):
        raise ConfigError(
            f"{file} has {len(found)} tensors where {len(wanted)} are expected;"
            f" unexpected: {extra[0]}"
        )
    for name, tensor in wanted.items():
        shape, dtype = found[name]
        size = list(tensor.shape)
        _hold(list(shape) == size, f"{file}: {name} has shape {list(shape)}", size)
        free = tensor.is_floating_point() and not exact
        kinds = _FLOATS if free else (_CODES.get(tensor.dtype, str(tensor.dtype)),)
        _hold(dtype in kinds, f"{file}: {name} holds {dtype}", " or ".join(kinds))


def read_tensors(file: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors ``wanted`` and no others, each in the precision it is stored in.

    Raises:
        ConfigError: if the header is another, see :func:`check_header`, or a number is not finite.
    """
    check_header(file, wanted)
    return _finite_ones(f"{file} is damaged", load_tensors(file))


def _finite_ones(problem: object, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, tensor in tensors.items():
        # the extremes are not finite as soon as one number is not
        extremes = torch.aminmax(tensor) if tensor.is_floating_point() and tensor.numel() else ()
        if not all(bound.isfinite() for bound in extremes):
            raise ConfigError(f"{problem}: {name} holds numbers that are not finite")
    return tensors


PROVENANCE = "specheads.json"  # beside a draft model of ours
_PICKLED = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.pkl", "*.ckpt")
NEEDS_SAFETENSORS = (
    "specheads loads safetensors alone, since pickle can run any code; save it as safetensors"
    " where you trust it"
)
# what modules may be made for one by one, and how many: widths have other names
_COUNTED = {
    re.compile(r"(num|n)_\w*(layer|block)s?|(\w+_)?(layers|blocks|depth)"): 1024,
    re.compile(r"(num|n)_\w*experts?|(\w+_)?experts"): 1 << 16,
}
_PACKED = 16  # numbers that one of a quantised tensor may stand for: int32 of two bits each
# what would make transformers run other code, or read other files, than those of the folder
_FORBIDDEN = ("auto_map", "quantization_config", "transformers_weights", "per_layer_config")


def check_model_files(name: str, place: str, *, trust_remote_code: bool = False) -> bool:
    """Check a model's folder before it is loaded; a name on the hub is not looked at.

    Args:
        name: as the user gave it, for messages.
        place: what :func:`specheads.models.names.resolve_name` makes of it.
        trust_remote_code: whether code in the folder may be run.

    Returns:
        Whether specheads wrote it, so that nothing may be left over in its files.

    Raises:
        ConfigError: if its weights are pickle, its index names files elsewhere, they are far fewer
            than its config describes, or, if specheads wrote it, a file was changed.
    """
    folder = Path(place)
    if not folder.is_dir():
        return False
    files = weight_files(folder)
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if not files and pickled:
        raise ConfigError(
            f"model.name={name} has no model.safetensors, but {pickled[0]}: {NEEDS_SAFETENSORS}"
        )
    about = read_provenance(folder)
    if about is not None:
        check_manifest(folder)
    elif not (folder.name == "base" and (folder.parent / MANIFEST).is_file()):
        if files and (folder / "config.json").is_file():
            _check_sizes(folder, files, trust_remote_code, f"cannot load model.name={name}")
        return False
    for file in folder.iterdir():
        check_inside(folder.parent if about is None else folder, file)
    if (folder / "adapter_config.json").exists():  # transformers would load it, from anywhere
        raise ConfigError(f"{folder} holds adapter_config.json, which was not saved with it")
    _check_own(folder, files, trust_remote_code)
    return True


def read_provenance(folder: str | Path) -> dict[str, Any] | None:
    """Return what a draft model's folder says about its origin; None for one of other make.

    Raises:
        ConfigError: if it cannot be read, or this version of specheads does not know it.
    """
    file = Path(folder) / PROVENANCE
    if not file.is_file():
        return None
    found = read_json(file, f"{folder} is not a draft model of specheads")
    if (version := found.get("format_version")) != 2 or type(version) is not int:
        raise ConfigError(f"{file} has format version {version!r:.20}, this specheads reads 2")
    expect(found.get("kind") == "draft", f"{file}: kind", found.get("kind"), "'draft'")
    for key in ("base", "training", "measured"):
        expect(isinstance(found.get(key), dict), f"{file}: {key}", found.get(key), "an object")
    base = found["base"]
    with said_of(file):
        check_recorded(base.get("name"), base.get("revision"))
    for key in ("digest", "dtype"):
        expect(isinstance(base.get(key), str), f"{file}: base.{key}", base.get(key), "a string")
    for key, value in found["measured"].items():
        number = value is None or type(value) in (int, float)
        expect(number, f"{file}: measured.{key:.40}", value, "a number")
    return found


def refuse_kernels(name: str, config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
    """Refuse a config that names code on the hub for its attention or its experts.

    Raises:
        ConfigError: unless ``trust_remote_code``.
    """
    for each in (config, *(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))):
        for key in ("_attn_implementation", "_experts_implementation"):
            value = getattr(each, key, None)
            if isinstance(value, str) and "/" in value and not trust_remote_code:
                raise ConfigError(
                    f"model.name={name}: its config asks for the code of {value:.80}; load it with"
                    " trust_remote_code=true if you trust that"
                )


def check_counts(about: object, config: dict[str, Any]) -> None:
    """Refuse numbers of layers and the like that would keep a machine busy for hours.

    Args:
        about: where the config is from, for messages.
        config: as it was read: transformers makes lists from such numbers.

    Raises:
        ConfigError: one line with the key.
    """
    for (*_, key), value in nested(config):
        for counted, most in _COUNTED.items():
            many = type(value) is int and value > most and counted.fullmatch(key)
            expect(not many, f"{about}: {key}", value, f"at most {most}")


def _check_own(folder: Path, files: list[Path], trust_remote_code: bool) -> None:
    """Refuse what specheads would not have written."""
    about = folder / "config.json"
    config = read_json(about, f"{folder} is no model", strict=False)
    if not files:
        raise ConfigError(f"{folder} lacks model.safetensors")
    names = [name for file in files for name in read_header(file)]
    if len(set(names)) < len(names):
        raise ConfigError(f"{folder}: a tensor is in two of its files")
    for (*_, key), _ in nested(config):
        if key in _FORBIDDEN and not (key == "auto_map" and trust_remote_code):
            raise ConfigError(f"{about}: {key} must not be there")
    text = _check_sizes(folder, files, trust_remote_code, f"{about} describes no model")
    _check_generation(folder / "generation_config.json", text.vocab_size)


def _check_sizes(
    folder: Path, files: list[Path], trust_remote_code: bool, problem: str
) -> PreTrainedConfig:
    """Hold the config to the headers of the weights, in numbers of values; nothing is allocated.

    Returns:
        The config of the text model.
    """
    about = folder / "config.json"
    config = read_json(about, problem, strict=False)
    check_counts(about, config)
    shapes = [shape for file in files for shape, _ in read_header(file).values()]
    packed = any(path[-1] == "quantization_config" and value for path, value in nested(config))
    stored = sum(map(math.prod, shapes)) * (_PACKED if packed else 1)
    with one_line(problem):
        known = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        refuse_kernels(str(folder), known, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                known, trust_remote_code=trust_remote_code
            )
    wanted = sum(parameter.numel() for parameter in model.parameters())
    tables = sum(buffer.numel() for buffer in model.buffers())
    if wanted > 2 * stored or tables > max(stored, 1 << 28):
        raise ConfigError(
            f"{about} describes a model of {wanted:,} weights and {tables:,} numbers in tables,"
            f" its files hold {stored:,}"
        )
    return known.get_text_config()


def _check_generation(file: Path, vocab_size: int) -> None:
    """Check what transformers would pass over without a word, and decoding ends by."""
    if not file.is_file():
        return
    found = read_json(file, "", strict=False)
    for key, value in found.items():
        if key.endswith("_token_id"):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            known = all(type(each) is int and -1 <= each < vocab_size for each in ids)
            expect(known, f"{file}: {key}", value, f"0 to {vocab_size - 1}")
    with one_line(f"{file} cannot be used"):
        GenerationConfig.from_dict(found).validate()


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of one or several files.

    Attributes:
        where: the file, or the first one, for messages.
        header: shape and dtype (as safetensors calls it) by name.
        notes: what the user has to know, in lines.
    """

    where: Path
    header: Header
    notes: list[str] = field(default_factory=list)
    _tensors: dict[str, Callable[[], Tensor]] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which must be of floating-point numbers.

        Raises:
            ConfigError: if it holds something else.
        """
        shape, dtype = self.header[name]
        _hold(dtype in _FLOATS, f"{self.where}: {name} holds {dtype}", "floating-point numbers")
        return shape

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, each with memory of its own, in the precision that it is stored in.

        Raises:
            ConfigError: if a file cannot be read, or a number is not finite.
        """
        return _finite_ones(self.where, {name: self._tensors[name]() for name in names})


def _read(file: Path, name: str) -> Tensor:
    with _opened(file) as opened:
        return opened.get_tensor(name)


def open_safetensors(files: list[Path]) -> TensorFiles:
    """Read the headers of safetensors files.

    ``save_model`` of safetensors writes a tensor that several names share once, and the other names
    beside it: they are known here as if they were there.

    Raises:
        ConfigError: if one is damaged, or two hold the same name.
    """
    header: Header = {}
    tensors: dict[str, Callable[[], Tensor]] = {}
    notes = []
    for file in files:
        inside = read_header(file)
        if twice := sorted(inside.keys() & header.keys()):
            raise ConfigError(f"{file}: {twice[0]} is in another file too")
        with _opened(file) as opened:
            also: dict[str, str] = opened.metadata() or {}
        shared = {k: kept for k, kept in also.items() if kept in inside and k not in inside}
        for name, kept in {**{name: name for name in inside}, **shared}.items():
            header[name], tensors[name] = inside[kept], partial(_read, file, kept)
        if shared:
            notes.append(f"{file.name} stores {len(shared)} tensors under another name")
    return TensorFiles(files[0], header, notes, tensors)


def open_pickle(file: Path, *, allow_pickle: bool) -> TensorFiles:
    """Read a ``.pt`` of torch 1.6 or newer that holds tensors by name.

    Args:
        file: to read.
        allow_pickle: that the user wants this.

    Raises:
        ConfigError: unless ``allow_pickle``; if it is no such file, holds anything but tensors, or
            claims to be larger than it is.
    """
    if not allow_pickle:
        raise ConfigError(
            f"{file} is pickle: allow_pickle=true reads it, tensors alone (weights_only)"
        )
    with one_line(f"cannot read {file}"):
        if not zipfile.is_zipfile(file):
            raise ConfigError(f"{file} is no .pt file of torch 1.6 or newer")
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > (size := file.stat().st_size):
            raise ConfigError(f"{file} has {size} bytes, unpacked {unpacked}: no .pt is packed")
        found = torch.load(file, map_location="cpu", weights_only=True)
    named = "tensors by name"
    _hold(isinstance(found, dict), f"{file} holds a {type(found).__name__}", named)
    header = {}
    for name, tensor in found.items():
        known = isinstance(name, str) and type(tensor) in (Tensor, torch.nn.Parameter)
        _hold(known, f"{file}: {name!r:.80} is a {type(tensor).__name__}", named)
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.dtype not in _CODES:
            raise ConfigError(f"{file}: {name} holds {tensor.dtype}, which no head is made of")
        stored = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.element_size() > stored:  # a view that repeats what is stored
            raise ConfigError(f"{file}: {name} is larger than what is stored of it")
        header[name] = (tuple(tensor.shape), _CODES[tensor.dtype])
    return TensorFiles(file, header, [], {k: v.detach().clone for k, v in found.items()})


# of an optimizer's tensors those that are as large as their parameter
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2")


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write ``tensors`` as safetensors, copied to the CPU, none sharing memory with another."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, path, metadata=metadata)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file.

    Raises:
        ConfigError: if the file is missing or damaged.
    """
    with _opened(path) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@torch.no_grad()
def copy_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Copy what was read into the tensors ``wanted``, by their names."""
    for name, tensor in wanted.items():
        tensor.copy_(found[name])


def check_moments(path: Path, trained: Mapping[str, Tensor]) -> None:
    """Check an optimizer's file, tensors named ``parameter/key``, against what is trained.

    Raises:
        ConfigError: naming the tensor, what the file has and what the model has.
    """
    for name, (shape, _) in read_header(path).items():
        parameter, _, key = name.rpartition("/")
        if parameter not in trained:
            raise ConfigError(f"{path} is of another model: {name} belongs to nothing here")
        known = [tuple(trained[parameter].shape)] if key in _MOMENTS else [shape]
        known = [(), (1,)] if key == "step" else known  # counts are one number
        expected = " or ".join(str(list(each)) for each in known)
        _hold(shape in known, f"{path}: {name} has shape {list(shape)}", expected)
