"""What a cache of hidden states holds, where, and its exact size, before anything is run.

One folder: ``index.json`` (what the states were made of, the length of every document, and which
documents each shard holds, in order) and ``features-*.safetensors``. A document's states depend on
its own tokens alone, since packed documents do not see each other; so they are stored once per
token, without padding, and serve any order, row length and mask of labels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specheads.config import ConfigError
from specheads.data.chat import Encoded

INDEX = "index.json"
SHARD_BYTES = 256 << 20  # of hidden states in one shard, which is held in memory while it fills
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8"}
_SHA256_LENGTH = 64


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        file: its name.
        documents: the first document in it, and the first behind it.
        tokens: of these documents together.
        bytes: size of the file.
    """

    file: str
    documents: tuple[int, int]
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Where a cache lies or is going to lie, what is in it, and its exact size.

    Attributes:
        folder: where.
        made_of: everything that decides the numbers, by name; a cache made of anything else is
            refused.
        hidden_size: d.
        dtype: of the stored numbers: float32, bfloat16, or int8 with a float32 scale per token.
        given_as: dtype in which the base model gives its states, and the cache gives them back.
        lengths: tokens of each document.
        shards: the files, in order.
    """

    folder: Path
    made_of: dict[str, str]
    hidden_size: int
    dtype: str
    given_as: str
    lengths: list[int]
    shards: list[Shard]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together, to the byte: shards, their headers, and the index."""
        return len(self.index()) + sum(shard.bytes for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return sum(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Digest of ``made_of``, which every shard carries."""
        return digest_of(self.made_of)

    def index(self) -> bytes:
        """Return the contents of the index."""
        values = {"format_version": 1, **asdict(self)}
        del values["folder"]
        return json.dumps(values).encode() + b"\n"

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are still to be written.

        Raises:
            ConfigError: if one is there with another size than it was written with.
        """
        numbers = []
        for number, shard in enumerate(self.shards):
            path = self.folder / shard.file
            if not path.is_file():
                numbers.append(number)
            elif (found := path.stat().st_size) != shard.bytes:
                raise damaged(path, f"it has {found:,} bytes of {shard.bytes:,}")
        return numbers

    def describe(self) -> str:
        """Return one line: what is stored, how large it is, and where."""
        kind = "int8 with a scale per token" if self.dtype == "int8" else self.dtype
        count = len(self.shards)
        return (
            f"features: {self.num_tokens:,} tokens x {self.hidden_size} as {kind},"
            f" {readable(self.num_bytes)} in {count} shard{'' if count == 1 else 's'},"
            f" {self.folder}"
        )


def readable(num_bytes: float) -> str:
    """Return a size as text, e.g. ``1.6 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def documents_digest(documents: Sequence[Encoded]) -> str:
    """Return a sha256 over the token ids of ``documents``, in order.

    Names and labels are left out: hidden states do not depend on them.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{len(document.input_ids)}\n".encode())
        digest.update(np.ascontiguousarray(document.input_ids, dtype=np.int32).data)
    return digest.hexdigest()


def damaged(path: Path, why: str) -> ConfigError:
    """Return the error about a file of a cache that cannot be used."""
    return ConfigError(f"{path} is damaged: {why}; delete it, and the next run writes it again")


def plan_features(
    folder: str | Path,
    documents: Sequence[Encoded],
    *,
    base: str,
    computed: str,
    hidden_size: int,
    given_as: torch.dtype,
    dtype: str = "auto",
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """Lay a cache out, before anything is run, or read the layout of the one that is there.

    Args:
        folder: of the cache.
        documents: what the run trains on, in order.
        base: digest of the base model's weights (``models/digest.py``).
        computed: in words, how the base computes: dtype, quantisation, autocast.
        hidden_size: d.
        given_as: dtype of the base's hidden states.
        dtype: how they are stored: float32, bfloat16, int8; auto loses nothing.
        shard_bytes: hidden states in one shard, at most, unless one document has more.

    Raises:
        ConfigError: if ``folder`` holds a cache that was made of something else, naming that.
    """
    if dtype == "auto":
        dtype = "bfloat16" if given_as == torch.bfloat16 else "float32"
    made_of = {
        "base model": base,
        "computation": computed,
        "documents": documents_digest(documents),
        "dtype": dtype,
    }
    folder = Path(folder).expanduser()
    lengths = [len(document.input_ids) for document in documents]
    given = str(given_as).removeprefix("torch.")
    plan = Plan(folder, made_of, hidden_size, dtype, given, lengths, [])
    if (folder / INDEX).is_file():
        return _stored_plan(plan)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"features.dir={folder} is a file; a folder is expected")
    row = hidden_size * STORED[dtype].itemsize + (4 if dtype == "int8" else 0)
    first = tokens = 0
    for document, length in enumerate([*lengths, math.inf]):
        if tokens and (tokens + length) * row > shard_bytes:
            name = f"features-{len(plan.shards):05d}.safetensors"
            size = header_bytes(plan, tokens) + tokens * row
            plan.shards.append(Shard(name, (first, document), tokens, size))
            first, tokens = document, 0
        tokens += 0 if math.isinf(length) else int(length)
    return plan


def _stored_plan(plan: Plan) -> Plan:
    """Return the plan in the index of ``plan.folder``, which has to be of the same things."""
    path = plan.folder / INDEX
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        shards = [Shard(s["file"], tuple(s["documents"]), *_sizes(s)) for s in values["shards"]]
        stored = Plan(
            plan.folder,
            dict(values["made_of"]),
            values["hidden_size"],
            values["dtype"],
            values["given_as"],
            list(values["lengths"]),
            shards,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no index of features ({error!r}); delete the folder"
        ) from None
    check_made_of(f"features.dir={plan.folder}", stored.made_of, plan.made_of)
    return stored


def check_made_of(where: str, there: dict[str, str], here: dict[str, str]) -> None:
    """Refuse a cache that was made of something else.

    Raises:
        ConfigError: naming ``where`` it lies and what differs.
    """
    differences = ", ".join(
        f"{key} ({_short(there.get(key))} there, {_short(value)} here)"
        for key, value in here.items()
        if there.get(key) != value
    )
    if differences:
        raise ConfigError(
            f"{where} was made with another {differences}; name another folder, or delete this one"
        )


def _sizes(shard: dict[str, Any]) -> tuple[int, int]:
    return int(shard["tokens"]), int(shard["bytes"])


def _short(value: str | None) -> str:
    digest = value is not None and len(value) == _SHA256_LENGTH and " " not in value
    return str(value)[:12] if digest else str(value)


def digest_of(values: dict[str, str]) -> str:
    """Return a sha256 over what a cache was made of."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def metadata(plan: Plan, sha256: str) -> dict[str, str]:
    """Return what a shard says about itself: its cache, and the digest of its numbers."""
    return {"made_of": plan.fingerprint, "sha256": sha256}


def header_bytes(plan: Plan, tokens: int) -> int:
    """Return the bytes in front of the numbers of a shard, as safetensors writes them."""
    entries: dict[str, Any] = {"__metadata__": metadata(plan, "0" * _SHA256_LENGTH)}
    offset = 0
    shapes = [("hidden", STORED[plan.dtype], [tokens, plan.hidden_size])]
    if plan.dtype == "int8":  # wider numbers are written first, so that all are aligned
        shapes.insert(0, ("scale", torch.float32, [tokens]))
    for name, dtype, shape in shapes:
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(entries, separators=(",", ":")))
    return 8 + -(-length // 8) * 8
