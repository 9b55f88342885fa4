"""Take block heads apart, one choice at a time, on the embedded model: the table of docs/block.md.

Every row is the first one with one thing changed: as many steps on the same text, a few minutes
each. What is counted is the accept length, of chains and of trees grown in each step, on prompts
that no run has seen. Rows for which a difference is claimed have three seeds. Every run is a
command of its own, and what is there already is not made again, so that the script can be stopped
and started.

    python scripts/bench_block.py --train-only
    python scripts/bench_block.py
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
from torch import nn

from specheads.attention.tree import Tree
from specheads.config import DecodeConfig
from specheads.decoding.exported import exported_drafter, num_parameters
from specheads.measure.bench import Contest
from specheads.models.blocks import ZeroLinear
from specheads.models.checkpoint import read_config
from specheads.system import hardware

STEPS = 300
SEEDS = (0, 1, 2)
TEMPERATURES = (0.0, 1.0)
MAX_NEW_TOKENS = 128
NUM_NODES = (8, 16, 24)
COMMON = (
    *harness.CORPUS,
    *(f"steps={STEPS}", "data.rows=8", "autocast=bfloat16", "features.dir=", "log.every=25"),
    *("heads.num_heads=6", "heads.num_layers=1", "heads.lm_head=own", "optim.lr=6e-3"),
    *("heads.options.anchors=160", "evaluate.num_prompts=2", "tree.num_nodes=16"),
    "log.wandb=disabled",
)
JOINED = ("+recipe=block", "heads.options.injection_rank=0", "+heads.options.taps=[1,3,-1]")
PUBLISHED = ("+recipe=dspark", "loss.heads=soft", "heads.markov_rank=96")
ADAMW = ("optim=adamw", "optim.lr=3e-3")
FROM_RANDOM = "--from-random"
RANDOM_START, OWN = "random-start", "data=jsonl"


@dataclass
class Settings:
    """What is measured, and where the runs are.

    Attributes:
        answers: the base's own answers to the training prompts
        rows: only these
        train_only: measure later, when it is quiet
    """

    runs: Path = harness.ROOT / "runs" / "block"
    out: Path = harness.ROOT / "benchmarks" / "block_ablation.json"
    answers: Path = harness.ROOT / "runs" / "own_answers.jsonl"
    rows: tuple[str, ...] = ()
    num_prompts: int = 48
    train_only: bool = False


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: of the row.
        overrides: of the recipe, behind those that all have.
        seeds: of its runs.
        form: the recipe, and what makes it comparable.
    """

    name: str
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS[:1]
    form: tuple[str, ...] = JOINED


def rows(answers: Path) -> list[Row]:
    """Return the rows; ``answers`` are the base's own to the training prompts."""
    own = (OWN, f"data.path={answers}", "data.packages=[]")
    return [
        Row("joined", seeds=SEEDS),
        # what the trial's two rows differed in
        Row("published", seeds=SEEDS, form=PUBLISHED),
        Row("published-adamw", ADAMW, form=PUBLISHED),
        Row(RANDOM_START, seeds=SEEDS),
        Row("adamw", ADAMW, seeds=SEEDS),
        Row("anchors-48", ("heads.options.anchors=48",)),
        Row("no-markov", ("heads.correction=none",), seeds=SEEDS),
        # what else might help
        Row("slots-8", ("heads.num_heads=8",)),
        Row("layers-2", ("heads.num_layers=2",)),
        Row("final-state-alone", ("heads.options.taps=[-1]",)),
        Row("taps-of-all-layers", ("heads.options.taps=[0,1,2,3,-1]",)),
        Row("injection-256", ("heads.options.injection_rank=256",)),
        Row("shared-matrix", ("heads.lm_head=shared",)),
        Row("hard", ("loss.heads=hard",)),
        Row("tv", ("loss.heads=tv",)),
        Row("pace", ("loss.pace=0.5",)),
        Row("own-answers", own),
    ]


def train_from_random(*settings: str) -> None:
    """Train with matrices that start at random where block heads have them start at zero."""
    from specheads import train

    ZeroLinear.reset_parameters = nn.Linear.reset_parameters  # type: ignore[method-assign]
    sys.argv[1:] = settings
    train.main()


def trained(runs: Path, row: Row, seed: int) -> Path:
    """Train one run of a row; return the export."""
    settings = (*row.form, *COMMON, *row.overrides, f"seed={seed}")
    run = runs / f"{row.name}-{seed}"
    if row.name == RANDOM_START:
        return harness.train(run, settings, (__file__, FROM_RANDOM))
    return harness.train(run, settings)


def measure(folder: Path, num_prompts: int) -> dict[str, Any]:
    """Decode with a chain and with grown trees: by temperature, each with its interval.

    How many parameters the heads have stands beside.
    """
    export, prompts, _ = harness.open_export(folder, num_prompts, MAX_NEW_TOKENS)
    contest = Contest.of(export, MAX_NEW_TOKENS)
    chain = replace(
        contest.of_trees(export.heads, [Tree.chain(export.heads.num_heads)])[0], name="chain"
    )
    grown = [
        (n, exported_drafter(export, DecodeConfig(tree="dynamic", num_nodes=n))) for n in NUM_NODES
    ]
    methods = [chain, *(contest.ours(f"tree_{n}", each, n) for n, each in grown)]
    found = harness.accept_lengths(methods, prompts, TEMPERATURES)
    return {"parameters": num_parameters(export.heads), **found}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, write."""
    given = harness.parse(Settings, argv)
    given.runs.mkdir(parents=True, exist_ok=True)
    answers = given.answers.resolve()
    chosen = [row for row in rows(answers) if not given.rows or row.name in given.rows]
    if any(OWN in row.overrides for row in chosen):
        harness.regenerate(answers, temperature=0.7)
    exports = [(row, seed, trained(given.runs, row, seed)) for row in chosen for seed in row.seeds]
    if given.train_only:
        return
    hardware.pin_threads(0)
    found = []
    for row, seed, export in exports:
        config = read_config(export)
        path = export.parent / f"accept-{given.num_prompts}.json"
        accept = harness.kept(path, partial(measure, export, given.num_prompts))
        found.append(
            {
                "row": row.name,
                "seed": seed,
                "overrides": [o for o in row.overrides if not o.startswith("data.path=")],
                "heldout": config["training"]["heldout"],
                "accept": accept,
            }
        )
    harness.publish(
        given, found, {"steps": STEPS, "common": COMMON, "joined": JOINED, "published": PUBLISHED}
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [FROM_RANDOM]:
        train_from_random(*sys.argv[2:])
    else:
        main()
