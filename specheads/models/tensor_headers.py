"""Read tensors after their file's header was held to what is expected of them.

A header is some kilobytes, whatever it claims; safetensors checks that its offsets lie in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from specheads.config import ConfigError

_FLOATS = ("F64", "F32", "BF16", "F16")


def read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype (as safetensors calls it) of every tensor; none is read.

    Raises:
        ConfigError: if the file is missing or damaged.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {k: (tuple(s.get_shape()), str(s.get_dtype())) for k, s in found.items()}
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error}") from None


def check_header(file: Path, wanted: Mapping[str, Tensor]) -> None:
    """Check the names, shapes and kinds of the tensors of ``file``; none is read.

    Args:
        file: safetensors.
        wanted: tensors of these shapes, on any device, meta too; of floating-point numbers in any
            precision, or of int64.

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
        if shape != tuple(tensor.shape):
            raise ConfigError(
                f"{file}: {name} has shape {list(shape)}, expected {list(tensor.shape)}"
            )
        if dtype not in (_FLOATS if tensor.is_floating_point() else ("I64",)):
            kind = "floating-point numbers" if tensor.is_floating_point() else "I64"
            raise ConfigError(f"{file}: {name} holds {dtype}, expected {kind}")


def read_tensors(file: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors ``wanted`` and no others, each in the precision it is stored in.

    Raises:
        ConfigError: if the header is another, see :func:`check_header`, or a number is not finite.
    """
    check_header(file, wanted)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    for name, tensor in tensors.items():
        # the extremes are not finite as soon as one number is not
        extremes = torch.aminmax(tensor) if tensor.is_floating_point() and tensor.numel() else ()
        if not all(bound.isfinite() for bound in extremes):
            raise ConfigError(f"{file} is damaged: {name} holds numbers that are not finite")
    return tensors
