"""How answers are asked for, of whichever engine, and what became of the records."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from specheads.data.rows import Record


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        top_p: 1 keeps all.
        seed: each record's own is made from it, see :func:`record_seed`.
        max_new_tokens: of one answer.
        keep_truncated: keep answers that reached the limit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 512
    keep_truncated: bool = False


def record_seed(seed: int, record_id: str) -> int:
    """Return the seed of one record's answers, in [0, 2**31): servers take no larger ones."""
    digest = hashlib.sha256(f"{seed}\0{record_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True)
class Quarantined:
    """A record without an answer that could be used.

    Attributes:
        record: as it was read.
        reason: one word, by which they are counted.
        detail: what happened.
        transient: whether it may go well another time; such records are tried again.
    """

    record: Record
    reason: str
    detail: str
    transient: bool = False


@dataclass
class Outcome:
    """What became of some records.

    Attributes:
        answered: records with their new answers.
        quarantined: those without.
        num_tokens: generated for all of them, as far as anybody counted.
    """

    answered: list[Record] = field(default_factory=list)
    quarantined: list[Quarantined] = field(default_factory=list)
    num_tokens: int = 0
