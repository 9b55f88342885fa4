"""Tensors of a run as safetensors: written, read, and held to the model by their headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads.config import ConfigError

# as safetensors calls them
_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}
# of an optimizer's tensors those that are as large as their parameter
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` as safetensors, copied to the CPU, none sharing memory with another."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file that ``save_tensors`` wrote.

    Raises:
        ConfigError: if it is missing or no safetensors file.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def check_tensors(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Check names, shapes and dtypes in the header of a safetensors file; no tensor is read.

    Raises:
        ConfigError: naming the tensor, what the file has and what the model has.
    """
    about = _header(path)
    if odd := sorted(about.keys() ^ expected.keys()):
        raise ConfigError(
            f"{path} is of another model: {len(odd)} parameters are in one only, e.g. {odd[0]}"
        )
    for name, tensor in expected.items():
        here = (tuple(tensor.shape), _DTYPES.get(tensor.dtype, str(tensor.dtype)))
        if about[name] != here:
            raise ConfigError(
                f"{path} is of another model: {name} is {list(about[name][0])} {about[name][1]} "
                f"there, {list(here[0])} {here[1]} here"
            )


def check_moments(path: Path, trained: Mapping[str, Tensor]) -> None:
    """Check an optimizer's file, tensors named ``parameter/key``, against what is trained.

    Raises:
        ConfigError: naming the tensor, what the file has and what the model has.
    """
    for name, (shape, _) in _header(path).items():
        parameter, _, key = name.rpartition("/")
        if parameter not in trained:
            raise ConfigError(f"{path} is of another model: {name} belongs to nothing here")
        wanted = trained[parameter].shape
        if key in _MOMENTS and shape != tuple(wanted):
            raise ConfigError(
                f"{path} is of another model: {name} is {list(shape)} there, {list(wanted)} here"
            )
        if key == "step" and shape not in ((), (1,)):
            raise ConfigError(f"{path}: {name} is {list(shape)}, a count of steps is one number")


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> shape and dtype of every tensor of a file, of which no tensor is read."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: (tuple(s.get_shape()), str(s.get_dtype())) for n, s in found.items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
