"""What a stored teacher holds, where, and how large it is, before anything is run.

``top_logits.py`` says what the files hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specheads.config import ConfigError
from specheads.data.chat import Encoded
from specheads.data.feature_plan import (
    INDEX,
    check_made_of,
    digest_of,
    documents_digest,
    readable,
)

KEY = "draft.stored"  # what names the folder in a run's settings
SHARD_BYTES = 256 << 20  # of one shard, which is held in memory while it fills
_TOKEN_BYTES = 8  # an id and a log-probability


@dataclass(frozen=True)
class TopShard:
    """One file: its name, the first document in it and the first behind it, and its tokens."""

    file: str
    documents: tuple[int, int]
    tokens: int


@dataclass(frozen=True)
class TopPlan:
    """Where the stored tokens lie or are going to lie, and what is in there.

    Attributes:
        folder: where.
        made_of: everything that decides the numbers, by name.
        top_k: tokens per position.
        vocab_size: V, the tokens that were chosen from.
        lengths: tokens of each document.
        shards: the files, in order.
    """

    folder: Path
    made_of: dict[str, str]
    top_k: int
    vocab_size: int
    lengths: list[int]
    shards: list[TopShard]

    @property
    def fingerprint(self) -> str:
        """Digest of ``made_of``, which every shard carries."""
        return digest_of(self.made_of)

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are still to be written."""
        files = enumerate(self.shards)
        return [number for number, shard in files if not (self.folder / shard.file).is_file()]

    def num_bytes(self, numbers: Sequence[int]) -> int:
        """Return the bytes of these shards, without their headers."""
        return sum(self.shards[number].tokens for number in numbers) * self.top_k * _TOKEN_BYTES

    def describe(self) -> str:
        """Return one line: what is stored, how large it is, where, and how much is missing."""
        count, missing = len(self.shards), self.missing()
        size = readable(self.num_bytes(range(count)))
        left = f"{readable(self.num_bytes(missing))} still to be written" if missing else "complete"
        return (
            f"stored teacher: {sum(self.lengths):,} tokens x {self.top_k} of {self.vocab_size:,},"
            f" {size} in {count} shard{'' if count == 1 else 's'},"
            f" {self.folder}; {left}"
        )


def plan_top_logits(
    folder: str | Path,
    documents: Sequence[Encoded],
    *,
    base: str,
    computed: str,
    vocab_size: int,
    top_k: int,
    shard_bytes: int = SHARD_BYTES,
) -> TopPlan:
    """Lay the files out before anything is run, or read the layout of those that are there.

    Args:
        folder: of the files.
        documents: what the run trains on, in order.
        base: digest of the base model's weights (``models/digest.py``).
        computed: in words, how the base computes: dtype, quantisation, autocast.
        vocab_size: V, the first tokens of the base's vocabulary that are looked at;
            log-probabilities are over them.
        top_k: tokens per position, below V.
        shard_bytes: of one shard, at most, unless one document has more.

    Raises:
        ConfigError: if ``folder`` holds what was made of something else, naming that; if it is a
            file, or its index is damaged; if ``top_k`` is not in 1..V-1.
    """
    if not 0 < top_k < vocab_size:
        raise ConfigError(f"draft.stored_top_k must be in 1..{vocab_size - 1}, got {top_k}")
    made_of = {
        "base model": base,
        "computation": computed,
        "documents": documents_digest(documents),
        "vocabulary": str(vocab_size),
        "stored_top_k": str(top_k),
    }
    folder = Path(folder).expanduser()
    lengths = [len(document.input_ids) for document in documents]
    plan = TopPlan(folder, made_of, top_k, vocab_size, lengths, [])
    if (folder / INDEX).is_file():
        return _stored_plan(plan)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{KEY}={folder} is a file; a folder is expected")
    first = tokens = 0
    for document, length in enumerate([*lengths, math.inf]):
        if tokens and (tokens + length) * top_k * _TOKEN_BYTES > shard_bytes:
            name = f"top-{len(plan.shards):05d}.safetensors"
            plan.shards.append(TopShard(name, (first, document), tokens))
            first, tokens = document, 0
        tokens += 0 if math.isinf(length) else int(length)
    return plan


def _stored_plan(plan: TopPlan) -> TopPlan:
    """Return the plan in the index of ``plan.folder``, which has to be of the same things."""
    path = plan.folder / INDEX
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        made_of = dict(values["made_of"])
        shards = [
            TopShard(str(s["file"]), (int(s["documents"][0]), int(s["documents"][1])), s["tokens"])
            for s in values["shards"]
        ]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} is no index of a stored teacher ({error!r}); delete the folder"
        ) from None
    check_made_of(f"{KEY}={plan.folder}", made_of, plan.made_of)
    return TopPlan(plan.folder, plan.made_of, plan.top_k, plan.vocab_size, plan.lengths, shards)
