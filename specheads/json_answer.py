"""One JSON object on standard output, for a command called with ``json=true``.

What a command prints on its way (tables, progress, text as it appears) then goes to standard error,
so that ``... json=true | jq .headline`` reads the object and nothing else. Where a command fails,
standard output stays empty, or holds the object if it was complete; the exit code tells.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, TextIO, TypeVar


class _Asked(Protocol):
    json: bool


C = TypeVar("C", bound=_Asked)

_stdout: ContextVar[TextIO | None] = ContextVar("specheads_json_answer", default=None)


def answers_json(run: Callable[[C], None]) -> Callable[[C], None]:
    """Decorate a command's ``run``: with ``json=true`` only :func:`answer` reaches stdout."""

    @functools.wraps(run)
    def wrapped(config: C) -> None:
        if not config.json:
            run(config)
            return
        token = _stdout.set(sys.stdout)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                run(config)
        finally:
            _stdout.reset(token)

    return wrapped


def answer(found: Mapping[str, Any]) -> None:
    """Print the command's object, on one line, if it was asked for; call it once.

    Args:
        found: of JSON's types. A figure that is not finite becomes null, as JSON has no other word.
    """
    if (out := _stdout.get()) is not None:
        out.write(json.dumps(_finite(found), allow_nan=False) + "\n")
        out.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return value
