"""What the names of models mean, and how their weights are recognised.

A name is a folder, a name on the hub, or the embedded model. Whether the hub answers is found out
once, as every file of a model would be tried for a minute. Weights are recognised by the sha256 of
their files, computed once per file and machine, or in milliseconds by a sample of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from transformers.utils import cached_file

from specheads.config import ConfigError
from specheads.system.files import tinycode_dir

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


_HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
_REVISION = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")


def resolve_name(name: str) -> str:
    """Return what transformers calls the model: ``tinycode`` is the embedded one's folder.

    For a name on the hub it is found out whether the hub answers.

    Raises:
        ConfigError: if ``name`` looks like a folder that does not exist, or one without a model.
    """
    if name == "tinycode":
        return str(tinycode_dir())
    path = Path(name).expanduser()
    if path.is_dir():
        if not any(path.glob("*.json")):  # which a tokenizer alone has too
            found = ", ".join(sorted(each.name for each in path.iterdir())[:5])
            raise ConfigError(
                f"model.name={name}: the folder holds no model, which is config.json,"
                " model.safetensors and tokenizer.json as save_pretrained writes them; it holds"
                f" {found or 'nothing'}"
            )
        return str(path)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise ConfigError(f"model.name={name}: there is no such folder")
    keep_to_the_cache_if_unreachable()
    return name


def check_recorded(name: object, revision: object) -> None:
    """Check the base model that a config names which may come from a stranger.

    What is written is a name on the hub, ``tinycode``, or the full path of a folder, which
    :func:`specheads.models.names.base_digest` is asked about before anything of it is loaded. A
    path that starts from wherever the user happens to be is never written.

    Raises:
        ConfigError: one line, if ``name`` is anything else, or ``revision`` no name of one.
    """
    known = isinstance(name, str) and (
        not name or Path(name).is_absolute() or (_HUB_NAME.fullmatch(name) and ".." not in name)
    )
    if not known or (isinstance(name, str) and (".." in Path(name).parts or "\0" in name)):
        raise ConfigError(
            f"base.name is {name!r:.80}, which is neither a name on the hub nor the full path of a"
            " folder"
        )
    if revision is not None and not (
        isinstance(revision, str) and _REVISION.fullmatch(revision) and ".." not in revision
    ):
        raise ConfigError(f"base.revision is {revision!r:.80}, which names no revision")


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


_WHOLE = 8 << 20  # bytes; a smaller file is read whole
_BLOCK, _BLOCKS = 64 << 10, 64


@lru_cache
def base_fingerprint(name: str, revision: str | None = None) -> str:
    """Return a digest of sizes and samples of a model's weight files, empty if they are not found.

    Every file counts with its size, its first MiB (names and shapes) and 64 blocks of 64 KiB spread
    over the rest; small ones whole. Neither a file's name nor its folder's counts: a base that was
    moved or renamed is the same one. A change of few bytes of a large file can go unseen, which
    ``digest.base_digest`` would see, after reading all of it.

    Args:
        name: ``tinycode``, a folder, or a hub name whose files have been downloaded.
        revision: of a hub model.
    """
    try:
        files = weight_files(model_folder(name, revision=revision))
        samples = [_sample(file) for file in files]
    except (ConfigError, OSError):
        return ""
    return hashlib.sha256(b"".join(samples)).hexdigest() if samples else ""


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            found.update(file.read())
        else:
            found.update(file.read(1 << 20))
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK) * (block + 1) // _BLOCKS)
                found.update(file.read(_BLOCK))
    return found.digest()
