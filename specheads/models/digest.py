"""The files of weights, and how they are recognised; what may be recorded of a base model.

Weights are recognised by the sha256 of their files, computed once per file and machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from specheads.config import ConfigError, RunError
from specheads.system.files import write_whole

_HUB_NAME = re.compile(r"(?!.*\.\.)([\w-][\w.-]*/)?[\w-][\w.-]*")
_REVISION = re.compile(r"(?!.*\.\.)[\w-][\w.-]*(/[\w-][\w.-]*)*")


def check_recorded(name: object, revision: object) -> None:
    """Check the base model that a config names which may come from a stranger.

    What is written is a name on the hub, ``tinycode``, or the full path of a folder, which
    :func:`specheads.models.names.base_digest` is asked about before anything of it is loaded. A
    path that starts from wherever the user happens to be is never written.

    Raises:
        ConfigError: one line, if ``name`` is anything else, or ``revision`` no name of one.
    """
    text = name if isinstance(name, str) else "\0"
    known = not text or Path(text).is_absolute() or _HUB_NAME.fullmatch(text)
    if not known or ".." in Path(text).parts or "\0" in text:
        raise ConfigError(
            f"base.name is {name!r:.80}, which is neither a name on the hub nor the full path of a"
            " folder"
        )
    if revision is not None and not (isinstance(revision, str) and _REVISION.fullmatch(revision)):
        raise ConfigError(f"base.revision is {revision!r:.80}, which names no revision")


_CACHED_FROM = 4 << 20  # bytes; smaller files are hashed faster than looked up
SHA256 = re.compile(r"[0-9a-f]{64}")


def cache_dir() -> Path:
    """Return the folder for what can be computed again: $SPECHEADS_CACHE or ~/.cache/specheads."""
    return Path(os.environ.get("SPECHEADS_CACHE") or Path.home() / ".cache" / "specheads")


def file_sha256(path: str | Path) -> str:
    """Return the sha256 of a file, from the cache if path, size and time are known.

    A file in the hub's cache is a link to a blob that is named by its sha256, so that nothing is
    read at all.
    """
    path = Path(path).resolve()
    hub = path.parent.name == "blobs" and (path.parent.parent / "snapshots").is_dir()
    if hub and SHA256.fullmatch(path.name):
        return path.name
    stat = path.stat()
    if stat.st_size < _CACHED_FROM:
        return _hash(path)
    key = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
    entry = cache_dir() / "sha256" / hashlib.sha256(key.encode()).hexdigest()
    with contextlib.suppress(OSError):
        known = entry.read_text(encoding="ascii")
        if SHA256.fullmatch(known):
            return known
    digest = _hash(path)
    # a cache that cannot be written costs time, nothing else
    with contextlib.suppress(OSError, RunError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_whole(entry, digest)
    return digest


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would load weights from, sorted by name.

    Raises:
        ConfigError: if the index of the files is damaged, or names one outside of ``folder``.
    """
    if (single := folder / "model.safetensors").is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        odd = [name for name in names if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"{index} is damaged: it must hold an object 'weight_map'") from None
    if odd:
        raise ConfigError(f"{index} names {min(odd)!r:.80}, which is no safetensors file beside it")
    return [folder / name for name in sorted(names)]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
