"""What goes wrong in the user's settings and runs, and the checks of single settings."""

from __future__ import annotations

import re
from typing import Any

MISSING: Any = "???"  # OmegaConf's word for a value that has to be given
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # short names to torch's


class ConfigError(ValueError):
    """A mistake in the user's settings or files; entry points print it as one line, exit code 2."""


class RunError(RuntimeError):
    """A run that cannot go on (NaN loss, full disk); one line at the entry point, exit code 1.

    Attributes:
        on_every_rank: whether all processes raise it alike, so that one of them says it.
    """

    on_every_rank = False


class InterruptedRunError(RuntimeError):
    """A run that was asked to stop and saved its state; one line, exit code 75."""


def check(ok: bool, key: str, value: object, expected: str) -> None:
    """Raise ConfigError unless ``ok``."""
    if not ok:
        raise ConfigError(f"{key} must be {expected}, got {value!r}")


def check_device(device: str) -> None:
    """Raise ConfigError unless ``device`` is a name that :func:`hardware.pick_device` knows."""
    known = re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", device)
    check(known is not None, "device", device, "one of auto, cpu, cuda, cuda:<number>, mps")


def one_of(key: str, value: str, *options: str) -> None:
    """Raise ConfigError unless ``value`` is among ``options``."""
    check(value in options, key, value, "one of " + ", ".join(options))


def dtype_name(key: str, value: str, *others: str) -> str:
    """Return torch's name of the dtype ``value``, or ``value`` if it is one of ``others``.

    Raises:
        ConfigError: if it is neither.
    """
    name = DTYPES.get(value, value)
    one_of(key, name, *others, *DTYPES.values())
    return name


EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 75
