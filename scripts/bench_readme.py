"""Measure every figure of the README again, from the shipped checkpoints: ``make bench``.

    python scripts/bench_readme.py [--resume] [--only drafters ...]
    python scripts/bench_readme.py --quick      # minutes of nonsense, to see that it works

Each part writes a file of benchmarks/readme/. When all went well, ``scripts/render.py`` draws the
figures in docs/ and writes the marked blocks of the pages anew. The machine should do nothing else
meanwhile: about 50 minutes on two cores. ``--quick`` writes to build/bench_quick/ only.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

from bench_parts import ROOT, Part, chosen, read_record, run_parts, table
from render import FIGURES, PAGES, render

FOLDER, QUICK_FOLDER = "benchmarks/readme", "build/bench_quick/readme"
RECORD = "parts.json"
SHIPPED = "data/checkpoints"
# what --quick asks for instead; the methods stay, so that every one of them is tried
QUICK = ("num_prompts=2", "max_new_tokens=8", "repeats=1")


def readme_parts(folder: str = FOLDER, *, quick: bool = False) -> list[Part]:
    """Return the parts; their files go to ``folder``, relative to the repository."""

    def bench(name: str, checkpoint: str, minutes: float, *settings: str) -> Part:
        asked = dict(setting.split("=", 1) for setting in settings)
        asked |= dict(setting.split("=", 1) for setting in QUICK) if quick else {}
        if quick and "batch_sizes" in asked:
            asked["batch_sizes"] = "[1,2]"
        read = [
            f"{SHIPPED}/{each}"
            for each in (checkpoint, *(("hydra", "draft") * (name == "drafters")))
        ]
        command = ["-m", "specheads.bench", f"checkpoint={SHIPPED}/{checkpoint}"]
        command += [f"{key}={value}" for key, value in asked.items()]
        out = f"{folder}/{name}.json"
        return Part(name, ((*command, f"out={out}"),), (out,), minutes, reads=tuple(read))

    memory = f"{folder}/mtp_memory.json"
    sizes = ("--vocab", "512", "--hidden", "64", "--tokens", "64", "--heads", "1", "2")
    small = (*sizes, "--timed-heads", "2", "--repeats", "1") if quick else ()
    return [
        bench(
            "drafters",
            "medusa1",
            23,
            f"exports=[{SHIPPED}/hydra]",
            "drafters=[draft_tree,lookahead,suffix,heads+suffix,draft+suffix]",
            f"decode.draft={SHIPPED}/draft",
            "decode.draft_tokens=4",
            "temperatures=[0,0.3,0.7,1]",
            "num_prompts=48",
            "repeats=2",
        ),
        bench(
            "mtp_byte",
            "mtp_byte",
            9,
            "drafters=[suffix,heads+suffix]",
            "temperatures=[0,0.7,1]",
            "num_prompts=36",
            "repeats=2",
        ),
        bench(
            "batches",
            "medusa1",
            9,
            "drafters=[heads+suffix]",
            "batch_sizes=[1,2,4,8,16]",
            "temperatures=[0,0.7,1]",
            "num_prompts=32",
            "repeats=1",
        ),
        bench(
            "float32",
            "medusa1",
            4,
            "drafters=[suffix,heads+suffix]",
            "dtype=float32",
            "temperatures=[0,0.7,1]",
            "num_prompts=24",
            "repeats=1",
        ),
        Part(
            "mtp_memory",
            (("scripts/bench_mtp_memory.py", "--threads", "1", *small, "--out", memory),),
            (memory,),
            3,
        ),
    ]


def main() -> None:
    """Measure, draw, fill."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resume", action="store_true", help="keep parts that are done")
    parser.add_argument("--only", nargs="+", metavar="PART", help="measure these alone")
    parser.add_argument("--list", action="store_true", help="print the parts, measure nothing")
    parser.add_argument("--quick", action="store_true", help=f"tiny, into {QUICK_FOLDER}/")
    args = parser.parse_args()
    folder = QUICK_FOLDER if args.quick else FOLDER
    parts = readme_parts(folder, quick=args.quick)
    record = ROOT / folder / RECORD
    if args.list:
        print(table(parts, read_record(record)))
        return
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    whole, pages, figures = (ROOT / folder).parent, PAGES, FIGURES
    if args.quick:
        pages, figures = tuple(Path(shutil.copy(page, whole)) for page in PAGES), whole
    if failed := run_parts(chosen(parts, args.only), record, resume=args.resume):
        raise SystemExit(f"failed: {', '.join(failed)}; nothing was drawn, see --resume")
    print("\n".join(render(whole, figures, pages)))


if __name__ == "__main__":
    main()
