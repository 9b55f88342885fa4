"""Write held-out prompts about Python code, as many of a kind as asked for.

    python scripts/pycode_prompts.py --per-kind 32 --out prompts.jsonl

``data/tinycode`` holds 20 of a kind to measure with and 10 to calibrate on; those of
``calibration.jsonl`` are left out here. Which there are depends on the packages of this machine,
so the file's digest is printed.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import harness

from specheads.data import pycode
from specheads.system.files import tinycode_dir


@dataclass
class Settings:
    """How many, and where to.

    Attributes:
        per_kind: prompts
        out: the file
    """

    per_kind: int = 32
    out: Path = Path("prompts.jsonl")


def main() -> None:
    """Choose and write them.

    Raises:
        SystemExit: if there are fewer of a kind.
    """
    given = harness.parse(Settings)
    lines = (tinycode_dir() / "calibration.jsonl").read_text().splitlines()
    taken = {json.loads(line)["messages"][0]["content"] for line in lines}
    left = dict.fromkeys(pycode.KINDS, given.per_kind)
    chosen = []
    for record in pycode.pairs("heldout", pycode.KINDS, pycode.DEFAULT_PACKAGES):
        if left[record["kind"]] and record["messages"][0]["content"] not in taken:
            left[record["kind"]] -= 1
            chosen.append(record)
    if missing := {kind: num for kind, num in left.items() if num}:
        raise SystemExit(f"too few held-out prompts on this machine: {missing}")
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in chosen)
    given.out.write_text(text, encoding="utf-8")
    print(f"{given.out}: {dict(Counter(each['kind'] for each in chosen))}")
    print(f"sha256 {hashlib.sha256(text.encode()).hexdigest()}")


if __name__ == "__main__":
    main()
