"""Tensors in files of others: what they hold is known before anything is read.

safetensors say it in their header. A ``.pt`` is pickle, which is read only where the user says so,
and then by torch's restricted unpickler: tensors and containers, no code. Its archive must not be
larger unpacked than it is, and its tensors not larger than their storage.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specheads.config import ConfigError
from specheads.models.foreign import one_line
from specheads.models.tensor_headers import read_header

FLOATS = ("F64", "F32", "BF16", "F16")
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32",
}  # fmt: skip


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of one or several files.

    Attributes:
        where: the file, or the first one, for messages.
        header: shape and dtype (as safetensors calls it) by name.
        notes: what the user has to know, in lines.
    """

    where: Path
    header: dict[str, tuple[tuple[int, ...], str]]
    notes: list[str] = field(default_factory=list)
    _files: dict[str, tuple[Path, str]] = field(default_factory=dict)  # name -> file, name there
    _loaded: dict[str, Tensor] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which must be of floating-point numbers.

        Raises:
            ConfigError: if it holds something else.
        """
        shape, dtype = self.header[name]
        if dtype not in FLOATS:
            raise ConfigError(
                f"{self.where}: {name} holds {dtype}, expected floating-point numbers"
            )
        return shape

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors, each with memory of its own, in the precision that it is stored in.

        Raises:
            ConfigError: if a file cannot be read, or a number is not finite.
        """
        found: dict[str, Tensor] = {}
        for name in names:
            if name in self._loaded:
                tensor = self._loaded[name].clone()
            else:
                file, there = self._files[name]
                try:
                    with safe_open(file, framework="pt") as opened:
                        tensor = opened.get_tensor(there)
                except (OSError, SafetensorError) as error:
                    raise ConfigError(f"cannot read {file}: {error}") from None
            # the extremes are not finite as soon as one number is not
            ends = torch.aminmax(tensor) if tensor.is_floating_point() and tensor.numel() else ()
            if not all(end.isfinite() for end in ends):
                raise ConfigError(f"{self.where}: {name} holds numbers that are not finite")
            found[name] = tensor
        return found


def open_safetensors(files: list[Path]) -> TensorFiles:
    """Read the headers of safetensors files.

    ``save_model`` of safetensors writes a tensor that several names share once, and the other names
    beside it: they are known here as if they were there.

    Raises:
        ConfigError: if one is damaged, or two hold the same name.
    """
    header: dict[str, tuple[tuple[int, ...], str]] = {}
    places: dict[str, tuple[Path, str]] = {}
    notes = []
    for file in files:
        inside = read_header(file)
        if twice := sorted(inside.keys() & header.keys()):
            raise ConfigError(f"{file}: {twice[0]} is in another file too")
        header |= inside
        places |= {name: (file, name) for name in inside}
        shared = {
            other: kept
            for other, kept in _metadata(file).items()
            if kept in inside and other not in inside
        }
        header |= {other: inside[kept] for other, kept in shared.items()}
        places |= {other: (file, kept) for other, kept in shared.items()}
        if shared:
            notes.append(f"{file.name} stores {len(shared)} tensors under another name")
    return TensorFiles(files[0], header, notes, places)


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
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}, expected tensors by name")
    header = {}
    for name, tensor in found.items():
        if not isinstance(name, str) or type(tensor) not in (Tensor, torch.nn.Parameter):
            raise ConfigError(
                f"{file}: {name!r:.80} is a {type(tensor).__name__}, expected tensors by name"
            )
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.dtype not in _NAMES:
            raise ConfigError(f"{file}: {name} holds {tensor.dtype}, which no head is made of")
        stored = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.element_size() > stored:  # a view that repeats what is stored
            raise ConfigError(f"{file}: {name} is larger than what is stored of it")
        header[name] = (tuple(tensor.shape), _NAMES[tensor.dtype])
    loaded = {name: tensor.detach() for name, tensor in found.items()}
    return TensorFiles(file, header, _loaded=loaded)


def _metadata(file: Path) -> dict[str, str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
