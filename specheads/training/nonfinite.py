"""Steps whose loss or gradients are not finite: what brought them, and how many there were.

They are written to ``nonfinite.jsonl`` of the run directory, one line per step:
``{"step", "what": "loss" | "gradient", "batches": [{"rank", "micro_batch", "ids"}]}``. Of a loss
the micro-batches that had it, of a gradient all that it was summed over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specheads import dist
from specheads.config import RunError
from specheads.files import whole_file
from specheads.training.engine import Batch

_FILE = "nonfinite.jsonl"
_NAMED = 8  # records in the one line that a user sees


def begin(run_dir: Path, step: int) -> int:
    """Go on after ``step``: later lines are dropped.

    Returns:
        The number of steps up to there that were left out, on every rank.
    """
    path, count = run_dir / _FILE, 0
    if dist.is_main() and path.exists():
        rows = path.read_text().splitlines(keepends=True)
        # a killed run may leave half a line
        kept = [r for r in rows if r.endswith("}\n") and json.loads(r)["step"] <= step]
        if kept != rows:
            with whole_file(path) as fresh:
                fresh.write_text("".join(kept))
        count = len(kept)
    return int(dist.sum_over_ranks(torch.tensor([float(count)])))


def report(
    run_dir: Path, step: int, what: str, micro: Sequence[Batch], chosen: Sequence[int]
) -> str:
    """Write down what a step was made of; all ranks call it.

    Args:
        run_dir: the run's directory.
        step: number of the step, from 1.
        what: ``loss`` or ``gradient``.
        micro: this rank's micro-batches of the step.
        chosen: those of them to name.

    Returns:
        ``records a, b ...`` for an error message, of all ranks.

    Raises:
        RunError: if the file cannot be written.
    """
    mine = [
        {"rank": dist.rank(), "micro_batch": i, "ids": [str(n) for n in micro[i].get("ids", [])]}
        for i in chosen
    ]
    batches: list[dict[str, Any]] = sum(map(json.loads, dist.gather_texts(json.dumps(mine))), [])
    if dist.is_main():
        path = run_dir / _FILE
        try:
            with path.open("a") as lines:
                lines.write(json.dumps({"step": step, "what": what, "batches": batches}) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {path}: {error}") from error
    ids = [name for batch in batches for name in batch["ids"]]
    if not ids:
        return "records without ids"
    return f"records {', '.join(ids[:_NAMED])}{' ...' if len(ids) > _NAMED else ''}"
