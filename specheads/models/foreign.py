"""Errors of the libraries that read files which may be damaged, or a stranger's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from huggingface_hub.errors import StrictDataclassError

from specheads.config import ConfigError, InterruptedRunError, RunError


@contextlib.contextmanager
def one_line(problem: str) -> Iterator[None]:
    """Turn what a library raises about a file into one line; for its calls alone.

    transformers, peft and tokenizers meet a damaged config wherever they first trip over it, with
    whatever that raises: tokenizers with a bare ``Exception`` or a panic.

    Args:
        problem: the beginning of the line.

    Raises:
        ConfigError: ``problem`` and the first line of the error.
    """
    try:
        yield
    except (ConfigError, RunError, InterruptedRunError):
        raise
    except Exception as error:
        raise ConfigError(f"{problem}: {first_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a library in Rust gave up
            raise
        raise ConfigError(f"{problem}: {first_line(error)}") from error


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
