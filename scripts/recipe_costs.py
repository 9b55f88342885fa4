"""Collect from run directories what their recipes took and gave, for docs/recipes.md.

    python scripts/recipe_costs.py runs/hydra runs/medusa2 runs/distill runs/mtp runs/mtp_bpe \
        --out benchmarks/recipes.json

A run's own ``metrics.jsonl`` and ``provenance.json`` hold all of it; nothing is run.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

MEASURED = ("final/", "heldout/")
# places, machines and names of one person's runs; a reader's are others
PRIVATE = ("run_dir=", "name=", "hydra.run.dir=", "log.", "features.dir=", "checkpoint.every=")


def cost(run: Path) -> dict[str, Any]:
    """Return what one run took and gave."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = json.loads((run / "provenance.json").read_text())[0]
    last = {key: value for row in rows for key, value in row.items()}
    given = [word for word in first["argv"][1:] if not word.startswith(PRIVATE)]
    speeds = [row["train/tokens_per_second"] for row in rows if "train/tokens_per_second" in row]
    peaks = [row["train/peak_memory"] for row in rows if "train/peak_memory" in row]
    return {
        "run": run.name,
        "command": " ".join(["python -m specheads.train", *given]),
        "date": first["time"][:10],
        "threads": first["hardware"]["threads"],
        "torch": first["packages"]["torch"],
        "steps": rows[-1]["step"],
        "tokens_per_second": round(statistics.median(speeds)),
        "peak_memory_gb": round(max(peaks) / 1e9, 2),
        "measured": {k: round(v, 4) for k, v in last.items() if k.startswith(MEASURED)},
    }


def main() -> None:
    """Collect, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--out", type=Path, help="the JSON; printed where none is given")
    given = parser.parse_args()
    text = json.dumps({"runs": [cost(run) for run in given.runs]}, indent=1)
    given.out.write_text(text + "\n") if given.out else print(text)


if __name__ == "__main__":
    main()
