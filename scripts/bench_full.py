"""Train and measure again all that BENCHMARKS.md reports: ``make bench-full``, about a day.

    python scripts/bench_full.py --list
    python scripts/bench_full.py [--resume] [--only NAME ...]

The parts stand in bench_full.toml and run in their order, trainings first; what is done is written
down after each, and ``--resume`` goes on behind it. Runs go to ``--runs``, figures to benchmarks/,
where the old ones are replaced; the pages are then written from them by ``scripts/render.py``.
Other seeds of the machine give other figures: what BENCHMARKS.md says in words has to be read again
by somebody.
"""

import json
import shutil
from dataclasses import dataclass

import harness
from bench_readme import FOLDER, RECORD, readme_parts

RUNS = "runs/full"
UNSEEN = 48  # prompts that the table of the medusa2 section shows: the others are unseen


@dataclass
class Settings(harness.PartsSettings):
    """What can be asked.

    Attributes:
        runs: folder of the trainings
    """

    runs: str = RUNS


def full_parts(runs: str = RUNS) -> list[harness.Part]:
    """Return all parts; runs go to the folder ``runs``, relative to the repository."""
    readme = readme_parts()
    last = harness.Part(
        "readme",
        (("scripts/bench_readme.py", "--resume"),),
        (f"{FOLDER}/{RECORD}", *(path for part in readme for path in part.outputs)),
        sum(part.minutes for part in readme),
        reads=tuple(dict.fromkeys(folder for part in readme for folder in part.reads)),
        section="tinycode, the checkpoints that ship",
    )
    return [*harness.read_parts(harness.ROOT / "scripts" / "bench_full.toml", runs=runs), last]


def copy(run: str, folder: str) -> None:
    """Copy the settings and metrics of a run."""
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copyfile(harness.ROOT / run / name, harness.ROOT / folder / name)


def write_unseen(path: str) -> None:
    """Write the embedded prompts that a bench of ``UNSEEN`` of them does not decode."""
    lines = (harness.ROOT / "data" / "tinycode" / "prompts.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    most = UNSEEN // len(set(kinds))
    unseen = [line for i, line in enumerate(lines) if kinds[: i + 1].count(kinds[i]) > most]
    (harness.ROOT / path).parent.mkdir(parents=True, exist_ok=True)
    (harness.ROOT / path).write_text("".join(f"{line}\n" for line in unseen))


def write_measured(export: str, path: str) -> None:
    """Write what ``tree_search`` stored in an export: sizes, expectation and measurement."""
    config = json.loads((harness.ROOT / export / "config.json").read_text())
    harness.write(harness.ROOT / path, config["tree"]["measured_on"])


def main() -> None:
    """Train, measure, write down."""
    settings = harness.parse(Settings)
    record = harness.ROOT / settings.runs / RECORD
    if record.is_file() and not (settings.resume or settings.only or settings.list):
        raise SystemExit(f"{record} is of an earlier one: go on with --resume, or give --runs=")
    if harness.perform(full_parts(settings.runs), settings, record):
        print("now write the figures into the pages: python scripts/render.py")


if __name__ == "__main__":
    main()
