"""Mix data sets by weight: each has its share of the records, and no record comes twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specheads.config import ConfigError
from specheads.data.dropped import Dropped
from specheads.data.rows import Record


@dataclass(frozen=True)
class Part:
    """One data set of a mixture, both of its splits read; ``weight`` None: of all or of none."""

    name: str
    weight: float | None
    splits: dict[str, list[Record]]


def shares(sizes: Sequence[int], weights: Sequence[float], limit: int = 0) -> list[int]:
    """Return how many records of each part a mixture takes.

    The total is the largest at which every part has its share without repeating a record, and at
    most ``limit`` (0: none). What rounding down leaves goes to the largest remainders.
    """
    whole = sum(weights)
    filled = [n * whole / w for n, w in zip(sizes, weights, strict=True) if w]
    total = math.floor(min(filled, default=0) + 1e-9)
    total = min(total, limit) if limit else total
    exact = [total * w / whole for w in weights]
    taken = [min(n, math.floor(x + 1e-9)) for n, x in zip(sizes, exact, strict=True)]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (taken[i] - exact[i], i))
    for i in by_remainder:
        if sum(taken) < total and taken[i] < sizes[i]:
            taken[i] += 1
    return taken


def mix(
    parts: Sequence[Part],
    split: str,
    rank: Callable[[Record], int],
    limit: int,
    dropped: Dropped,
) -> list[Record]:
    """Return the records of ``split``, part after part, each in its order.

    Which ones are left out is decided by ``rank``, so that the choice depends on nothing else. A
    record that one part holds out is not trained on from another. Ids get the part's number.

    Args:
        parts: with both splits, ids unique within each.
        split: train or heldout.
        rank: a place for each record that depends only on its content.
        limit: of the records of all parts; 0: none.
        dropped: is told which part was too small, and what is left out.

    Raises:
        ConfigError: if a part has no records of this split.
    """
    found = [part.splits[split] for part in parts]
    if split == "train":
        heldout = {rank(r) for part in parts for r in part.splits["heldout"]}
        found = [without(records, heldout, rank, dropped) for records in found]
    sizes = [len(records) for records in found]
    if 0 in sizes:
        empty = sizes.index(0)
        raise ConfigError(f"data.mixture[{empty}] ({parts[empty].name}) has no {split} records")
    # without weights every part counts by its size, so that all of it can be taken
    given = [part.weight for part in parts if part.weight is not None]
    weights = given or [float(size) for size in sizes]
    taken = shares(sizes, weights, limit)
    used, available = sum(taken), sum(sizes)
    if used < min(available, limit or available):
        short = min(range(len(parts)), key=lambda i: sizes[i] / weights[i])
        dropped.remark(
            f"data.mixture: {used:,} of {available:,} {split} records used, since part {short}"
            f" ({parts[short].name}) has only {sizes[short]:,} for its weight of"
            f" {weights[short]:g}"
        )
    mixed: list[Record] = []
    for number, (records, n) in enumerate(zip(found, taken, strict=True)):
        chosen = lowest(records, n, rank)
        mixed += [{**record, "id": f"{number}:{record['id']}"} for record in chosen]
    return mixed


def lowest(records: list[Record], n: int, rank: Callable[[Record], int]) -> list[Record]:
    """Return the ``n`` records of lowest rank, in the order in which they stand."""
    if n >= len(records):
        return records
    kept = {id(record) for record in sorted(records, key=rank)[:n]}
    return [record for record in records if id(record) in kept]


def without(
    records: list[Record], heldout: set[int], rank: Callable[[Record], int], dropped: Dropped
) -> list[Record]:
    """Return the records whose content is not held out, and tell ``dropped`` of the others."""
    kept = []
    for record in records:
        if rank(record) in heldout:
            dropped.note("not trained on, since they are held out too", record["id"])
        else:
            kept.append(record)
    return kept
