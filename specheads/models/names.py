"""What the names of models mean, and how their weights are recognised.

A name is a folder, a GGUF file, a name on the hub, or a model that specheads knows. Whether the hub
answers is found out once, as every file of a model would be tried for a minute. Weights are
recognised by the sha256 of their files, or in milliseconds by a sample of them.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from transformers.utils import cached_file

from specheads.config import ConfigError
from specheads.models.digest import file_sha256, weight_files
from specheads.models.gguf import gguf_folder, smollm2_folder
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
    theirs = any(kind.__module__.split(".")[0] in libraries for kind in type(error).__mro__)
    return theirs or isinstance(error, OSError | ValueError | RuntimeError)


@lru_cache(maxsize=8)
def _answers(endpoint: str) -> bool:
    found = urlsplit(endpoint)
    port = found.port or (80 if found.scheme == "http" else 443)
    try:
        socket.create_connection((found.hostname or "", port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True


# models that mean the same weights everywhere, whatever lies in the current folder
OURS = ("tinycode", "smollm2")


def resolve_name(name: str) -> str:
    """Return what transformers calls the model: its folder, or its name on the hub.

    A GGUF file is converted, and ``smollm2`` fetched, where that has not been done yet. For a name
    on the hub it is found out whether the hub answers.

    Raises:
        ConfigError: if ``name`` looks like a folder that does not exist, or one without a model, or
            is a GGUF file that cannot be converted.
        RunError: if the disk is full, or ``smollm2`` cannot be fetched.
    """
    if name == "tinycode":
        return str(tinycode_dir())
    if name == "smollm2":
        return str(smollm2_folder())
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model.name={name}: there is no such file")
        return str(gguf_folder(path))
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
