"""Tell a base model from another one in milliseconds, however large: a sample of its weights."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from specheads.config import ConfigError
from specheads.models.digest import model_folder, weight_files

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
