"""What is asked of the hub beside weights: whether it answers, and exports by their names there.

Whether the hub answers is found out once, as every file would be tried for a minute.
"""

from __future__ import annotations

import json
import re
import socket
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from specheads.system.terminal import note

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
    note(f"specheads: {constants.ENDPOINT} cannot be reached; using what is in the hub's cache")


def is_hub_error(error: BaseException) -> bool:
    """Return whether an error is one that asking the hub may end with, for a data set too.

    Its client raises errors of the network library below it, which has changed more than once; they
    have no base in common with its own.
    """
    libraries = {"huggingface_hub", "httpx", "httpx2", "requests"}
    libraries |= {"datasets", "pyarrow", "fsspec", "aiohttp"}
    theirs = any(kind.__module__.split(".")[0] in libraries for kind in type(error).__mro__)
    return theirs or isinstance(error, OSError | ValueError | RuntimeError)


def fetched(repository: str, file: str, revision: str | None = None) -> Path | None:
    """Return a file of a repository on the hub, from the cache or fetched.

    None if it is not there, may not be read, or the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except Exception as error:
        if not is_hub_error(error):
            raise
        return None


@lru_cache(maxsize=8)
def _answers(endpoint: str) -> bool:
    found = urlsplit(endpoint)
    port = found.port or (80 if found.scheme == "http" else 443)
    try:
        socket.create_connection((found.hostname or "", port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?")
_MANIFEST = "manifest.json"  # which exports have, and plain models have not
_BESIDE = ("prompts.jsonl", "README.md")  # what an export's folder may hold beside what it lists


def fetched_export(name: str) -> str:
    """Return the folder of an export on the hub; any other name or path as it is.

    The files that the export's manifest lists are fetched once, and come from the hub's cache ever
    after. Without the hub, what is there is used.

    Args:
        name: ``owner/name``, with ``@revision`` for one commit, branch or tag.
    """
    if not _NAME.fullmatch(name) or Path(name).expanduser().exists():
        return name
    repository, _, revision = name.partition("@")
    keep_to_the_cache_if_unreachable()
    if (manifest := fetched(repository, _MANIFEST, revision or None)) is None:
        return name  # a plain model, or what its loading has a line for
    commit = manifest.parent.name  # a branch may move on between two files
    try:
        listed = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        inside = [each for each in listed if ".." not in each and not each.startswith("/")]
    except (KeyError, TypeError, AttributeError, ValueError, OSError, RuntimeError):
        return name
    if not all(fetched(repository, file, commit) for file in inside):
        return name
    for file in _BESIDE:
        fetched(repository, file, commit)
    return str(manifest.parent)
