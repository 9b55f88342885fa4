"""Collect from run directories what their recipes took and gave, for docs/recipes.md.

    python scripts/recipe_costs.py runs/hydra runs/medusa2 runs/distill runs/mtp runs/mtp_bpe \
        --out benchmarks/recipes.json

A run's own ``metrics.jsonl`` and ``provenance.json`` hold all of it; nothing is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# places, machines and names of one person's runs; a reader's are others
PRIVATE = ("run_dir=", "name=", "hydra.run.dir=", "log.", "features.dir=", "checkpoint.every=")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl``."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(rows: Iterable[dict[str, Any]], key: str) -> list[float]:
    """Return a metric's values in order of steps."""
    return [row[key] for row in rows if key in row]


def cost(run: Path) -> dict[str, Any]:
    """Return what one run took and gave."""
    rows = rows_of(run / "metrics.jsonl")
    first = json.loads((run / "provenance.json").read_text())[0]
    last: dict[str, float] = {}
    for row in rows:
        last |= {key: value for key, value in row.items() if key.startswith(("final/", "heldout/"))}
    given = [word for word in first["argv"][1:] if not word.startswith(PRIVATE)]
    return {
        "run": run.name,
        "command": " ".join(["python -m specheads.train", *given]),
        "date": first["time"][:10],
        "threads": first["hardware"]["threads"],
        "torch": first["packages"]["torch"],
        "steps": rows[-1]["step"],
        "tokens_per_second": round(statistics.median(values(rows, "train/tokens_per_second"))),
        "peak_memory_gb": round(max(values(rows, "train/peak_memory")) / 1e9, 2),
        "measured": {key: round(value, 4) for key, value in last.items()},
    }


def main() -> None:
    """Collect, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--out", type=Path, help="the JSON")
    arguments = parser.parse_args()
    found = [cost(run) for run in arguments.runs]
    for each in found:
        print(
            f"{each['run']:<10} {each['steps']:>5} steps  {each['tokens_per_second']:>6} tokens/s"
            f"  {each['peak_memory_gb']:>5.2f} GB  {each['threads']} threads  {each['command']}"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps({"runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
