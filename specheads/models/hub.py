"""Whether the hub answers: found out once, as every file of a model would be tried for a minute."""

from __future__ import annotations

import socket
import sys
from functools import lru_cache
from urllib.parse import urlsplit
from urllib.request import getproxies

_PATIENCE = 5.0  # seconds for a connection


def keep_to_the_cache_if_unreachable() -> None:
    """Use only what is in the hub's cache from now on if the hub cannot be reached; say so once.

    Behind a proxy nothing is tried, as only the proxy can tell.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode() or getproxies() or _answers(constants.ENDPOINT):
        return
    # what HF_HUB_OFFLINE=1 sets where it is said before the start
    constants.HF_HUB_OFFLINE = True
    print(
        f"specheads: {constants.ENDPOINT} cannot be reached; using what is in the hub's cache",
        file=sys.stderr,
    )


def is_hub_error(error: BaseException) -> bool:
    """Return whether an error is one that asking the hub may end with.

    Its client raises errors of the network library below it, which has changed more than once; they
    have no base in common with its own.
    """
    libraries = {"huggingface_hub", "httpx", "httpx2", "requests"}
    return isinstance(error, OSError | ValueError | RuntimeError) or any(
        kind.__module__.split(".")[0] in libraries for kind in type(error).__mro__
    )


@lru_cache(maxsize=8)
def _answers(endpoint: str) -> bool:
    found = urlsplit(endpoint)
    port = found.port or (80 if found.scheme == "http" else 443)
    try:
        socket.create_connection((found.hostname or "", port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True
