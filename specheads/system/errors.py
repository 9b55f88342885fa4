"""The errors that end a program with one line, and the checks of settings that raise them."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from typing import Any

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 75
MISSING: Any = "???"  # OmegaConf's word for a value that has to be given
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # as accelerate names them
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # short names to torch's


class ConfigError(ValueError):
    """A mistake in the user's settings or files."""

    exit_code = EXIT_USAGE
    on_every_rank = False


class RunError(RuntimeError):
    """A run that cannot go on, for a NaN loss or a full disk say.

    Attributes:
        on_every_rank: whether all processes raise it alike, so that only rank 0 has to say it.
    """

    exit_code = EXIT_FAILED
    on_every_rank = False


class InterruptedRunError(RuntimeError):
    """A run that was asked to stop and has saved its state; all ranks stop alike."""

    exit_code = EXIT_INTERRUPTED
    on_every_rank = True


def check(ok: bool, key: str, value: object, expected: str) -> None:
    """Raise ConfigError unless ``ok``."""
    if not ok:
        raise ConfigError(f"{key} must be {expected}, got {value!r}")


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error about an unknown ``word``: the closest known one, if any is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    said = f"did you mean {close[0]}?" if close else otherwise
    return said and f"; {said}"


def need(module: str, extra: str, what: str) -> None:
    """Raise ConfigError with the command that installs a package, if it is missing.

    Args:
        module: as it is imported.
        extra: of specheads, that brings it.
        what: needs it; a setting, say.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{what} needs {module}: pip install 'specheads[{extra}]'")


def refuse(problems: Mapping[str, object]) -> None:
    """Raise ConfigError with the first of these messages whose problem is there."""
    for problem, there in problems.items():
        if there:
            raise ConfigError(problem)


def at_least(settings: object, section: str = "", **bounds: float) -> None:
    """Raise ConfigError where a field of ``settings``, or a number in its list, is below its bound.

    Args:
        settings: a dataclass of settings.
        section: what stands before its fields in a key, ``optim.`` say.
        **bounds: the smallest value of each field, under the field's name.
    """
    for name, bound in bounds.items():
        value = getattr(settings, name)
        for each in value if isinstance(value, list) else [value]:
            check(each >= bound, section + name, each, f"at least {bound}")


def within(settings: object, section: str = "", **intervals: str) -> None:
    """Raise ConfigError where a field of ``settings`` is outside its interval.

    Args:
        settings: a dataclass of settings.
        section: what stands before its fields in a key, ``optim.`` say.
        **intervals: under the field's name, as mathematics writes it: ``(0, 1]`` leaves out 0.
    """
    for name, interval in intervals.items():
        value = getattr(settings, name)
        low, high = map(float, interval[1:-1].split(","))
        above = value >= low if interval[0] == "[" else value > low
        below = value <= high if interval[-1] == "]" else value < high
        check(above and below, section + name, value, f"in {interval}")


def check_device(device: str) -> None:
    """Raise ConfigError unless ``device`` is a name that :func:`hardware.pick_device` knows."""
    known = re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", device)
    check(known is not None, "device", device, "one of auto, cpu, cuda, cuda:<number>, mps")


def one_of(key: str, value: object, *options: str) -> None:
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
