"""Recognise weights: sha256 of files, computed once per file and machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path

from transformers.utils import cached_file

from specheads.config import ConfigError
from specheads.models.names import resolve_name

_CACHED_FROM = 4 << 20  # bytes; smaller files are hashed faster than looked up
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    if hub and _SHA256.fullmatch(path.name):
        return path.name
    stat = path.stat()
    if stat.st_size < _CACHED_FROM:
        return _hash(path)
    key = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
    entry = cache_dir() / "sha256" / hashlib.sha256(key.encode()).hexdigest()
    with contextlib.suppress(OSError):
        known = entry.read_text(encoding="ascii")
        if _SHA256.fullmatch(known):
            return known
    digest = _hash(path)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            file.write(digest)
        Path(file.name).replace(entry)
    return digest


def base_digest(name: str, *, revision: str | None = None) -> str:
    """Return one sha256 over the names and contents of a model's weight files.

    Args:
        name: ``tinycode``, a folder, or a hub name whose files have been downloaded.
        revision: of a hub model.

    Raises:
        ConfigError: if no weight files are found.
    """
    folder = model_folder(name, revision=revision)
    lines = [f"{file.name}\0{file_sha256(file)}\n" for file in weight_files(folder)]
    if not lines:
        raise ConfigError(f"{folder} holds no weights (model.safetensors)")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def model_folder(name: str, *, revision: str | None = None) -> Path:
    """Return the folder with a model's files: itself, or the hub's snapshot in the local cache.

    Raises:
        ConfigError: if it is neither a folder nor a hub model that can be reached.
    """
    resolved = resolve_name(name)
    if Path(resolved).is_dir():
        return Path(resolved)
    try:
        config = cached_file(resolved, "config.json", revision=revision or "main")
    except OSError as error:
        raise ConfigError(f"cannot find model {name}: {str(error).splitlines()[0]}") from None
    assert config is not None
    return Path(config).parent


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
