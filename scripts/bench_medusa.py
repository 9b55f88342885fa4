"""Compare ways to train heads on equal terms, on the embedded model: the table in BENCHMARKS.md.

Every arm sees the same number of tokens of the same prompts, tunes its own learning rates by the
heads' held-out loss (on shorter runs where the base is frozen), is trained with three seeds at the
best, and decodes the same prompts with a static tree of the same size, grown from its own hits.
Every run is a command of its own, and what is there already is not made again, so the script can be
stopped and started, and two can work on different arms. Heads on the frozen base train from one
feature cache, which gives the same losses; how fast training is without it is clocked apart
(``--clock``), on a quiet machine.

    python scripts/bench_medusa.py --train-only
    python scripts/bench_medusa.py --clock
    python scripts/bench_medusa.py
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness

from specheads.measure.bench import Contest
from specheads.models.checkpoint import read_config
from specheads.system import hardware

CALIBRATION = harness.ROOT / "data" / "tinycode" / "calibration.jsonl"
NUM_HEADS, NUM_NODES = 5, 16
STEPS, TUNING_STEPS = 500, 100
SEEDS = (0, 1, 2)
TEMPERATURES = (0.0, 1.0)
MAX_NEW_TOKENS = 128
COMMON = (
    *(f"heads.num_heads={NUM_HEADS}", f"tree.num_nodes={NUM_NODES}", "data.rows=8"),
    *("autocast=bfloat16", "optim=muon", "optim.schedule=wsd", "optim.decay_fraction=0.5"),
    *("evaluate.num_prompts=12", "evaluate.max_new_tokens=64", "log.every=25"),
    "log.wandb=disabled",
)
KL_LIMIT, LOSS_LIMIT = 0.01, 1.01  # of a tuned base: nats per token; times the original's loss
HEAD_RATES = tuple((f"optim.lr={rate}",) for rate in ("3e-3", "6e-3", "1.2e-2", "2.4e-2"))
# weight of the heads' loss, the base's learning rate, share of the steps for the heads alone
JOINT = (
    *(("1.0", "7e-4", "0.2"), ("0.3", "7e-4", "0.2")),
    *(("0.55", "7e-4", "0.1"), ("0.4", "1.4e-3", "0.1")),
)
DISTILLED = (
    *(("0.75", "5e-4", "0.2"), ("0.4", "4e-4", "0.2")),
    *(("0.3", "5e-4", "0.2"), ("0.2", "3e-4", "0.2")),
)


@dataclass
class Settings:
    """What is measured, and where the runs are.

    Attributes:
        regenerated: the base's own answers to the training prompts
        arms: only these
        clocked_prompts: of them, for speed-ups
        repeats: of the clocks; 0: accept length only
        train_only: measure later, when it is quiet
        clock: only clock the training of each arm
    """

    runs: Path = harness.ROOT / "runs" / "table"
    out: Path = harness.ROOT / "benchmarks" / "tinycode_heads.json"
    regenerated: Path = harness.ROOT / "runs" / "own_answers.jsonl"
    arms: tuple[str, ...] = ()
    num_prompts: int = 48
    clocked_prompts: int = 24
    repeats: int = 2
    train_only: bool = False
    clock: bool = False


@dataclass(frozen=True)
class Arm:
    """One row of the table.

    Attributes:
        name: of the row.
        overrides: what makes it.
        rates: per setting to tune the values to try, all settings together: overrides.
        limit: what a tuned base must keep: ``loss``, ``kl`` or nothing.
        regenerated: it is trained on the base's own answers.
        cached: it trains from a feature cache of this name.
        tuning_steps: of the runs that choose the rates. Whether a tuned base keeps its limit shows
            in a whole run only.
        seeds: of its runs; one where no difference is claimed.
    """

    name: str
    overrides: tuple[str, ...]
    rates: tuple[tuple[str, ...], ...] = HEAD_RATES
    limit: str = ""
    regenerated: bool = False
    cached: str = "corpus"
    tuning_steps: int = TUNING_STEPS
    seeds: tuple[int, ...] = SEEDS


def joint_rates(values: Sequence[tuple[str, str, str]]) -> tuple[tuple[str, ...], ...]:
    """Return the settings of tuned bases."""
    return tuple(
        (f"loss.lambda_0={w}", "optim.lr=6e-3", f"optim.base_lr={rate}", f"warmup_heads={share}")
        for w, rate, share in values
    )


def arms(regenerated: Path) -> list[Arm]:
    """Return the arms; ``regenerated`` are the base's own answers to the training prompts."""
    own = ("data=jsonl", f"data.path={regenerated}", f"data.eval_path={CALIBRATION}")
    heads = ("+recipe=medusa1", *harness.CORPUS)
    tuned = {"cached": "", "tuning_steps": STEPS}
    distilled = {**tuned, "regenerated": True, "seeds": SEEDS[:1]}
    recipe = "+recipe=medusa2_distilled"
    return [
        Arm("medusa1", heads),
        *(Arm(kind, (*heads, f"heads={kind}")) for kind in ("hydra", "hydra_plus", "markov")),
        Arm("regenerated", ("+recipe=medusa1", *own), regenerated=True, cached="own"),
        Arm("medusa2", ("+recipe=medusa2", *harness.CORPUS), joint_rates(JOINT), "loss", **tuned),
        Arm("self_distilled", (recipe, *own), joint_rates(DISTILLED), "kl", **distilled),
    ]


def score(config: dict[str, Any], limit: str) -> tuple[bool, float]:
    """Return whether the base kept its limit, and what tuning minimises: the heads' loss."""
    heldout = config["training"]["heldout"]
    kept = {
        "": lambda: True,
        "loss": lambda: heldout["loss"] <= LOSS_LIMIT * heldout["original_loss"],
        "kl": lambda: heldout["kl"] <= KL_LIMIT,
    }[limit]()
    return kept, sum(0.8 ** (i + 1) * heldout[f"head_{i}/loss"] for i in range(NUM_HEADS))


def trained(runs: Path, arm: Arm, rates: Sequence[str], steps: int, seed: int) -> Path:
    """Train one run of an arm, whose folder's name tells its settings; return the export."""
    length = (f"steps={steps}", f"seed={seed}")
    values = [each.partition("=")[2] for each in (*rates, *length)]
    cache = (f"features.dir={runs / 'features' / arm.cached}",) if arm.cached else ()
    run = runs / "-".join([arm.name, *values])
    return harness.train(run, (*arm.overrides, *cache, *rates, *length, *COMMON))


def tune(runs: Path, arm: Arm) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return the best of the arm's rates, and the score of each."""
    tried: list[dict[str, Any]] = []
    for rates in arm.rates:
        export = trained(runs, arm, rates, arm.tuning_steps, 0)
        kept, loss = score(read_config(export), arm.limit)
        tried.append({"rates": list(rates), "kept": kept, "score": loss})
        print(f"{arm.name} {' '.join(rates)}: {loss:.4f}{'' if kept else ' (over)'}", flush=True)
    best = min(range(len(tried)), key=lambda n: (not tried[n]["kept"], tried[n]["score"]))
    return arm.rates[best], tried


def clock_training(runs: Path, arm: Arm) -> list[float]:
    """Return tokens per second of each stage of training without a cache, from a short run."""
    run = runs / f"{arm.name}-clock"
    steps = ("steps=24", "warmup_heads=0.4", "evaluate.num_prompts=2")
    harness.train(run, (*arm.overrides, *COMMON, *arm.rates[0], *steps))
    return [line["train/tokens_per_second"] for line in harness.clocked_lines(run)]


def accept_length(folder: Path, num_prompts: int) -> dict[str, Any]:
    """Decode with the export's tree alone: ``t0`` and ``t1``, each with its interval."""
    export, prompts, _ = harness.open_export(folder, num_prompts, MAX_NEW_TOKENS)
    (method,) = Contest.of(export, MAX_NEW_TOKENS).of_trees(export.heads, [export.tree])
    found = harness.accept_lengths([method], prompts, TEMPERATURES)
    return {temperature: each["tree"] for temperature, each in found.items()}


def measure(folder: Path, num_prompts: int, repeats: int) -> list[dict[str, Any]]:
    """Clock plain decoding, transformers' generate, prompt lookup and the tree of an export."""
    export, prompts, _ = harness.open_export(folder, num_prompts, MAX_NEW_TOKENS)
    methods = harness.methods_of(export, export.heads, [export.tree], MAX_NEW_TOKENS)
    return harness.clocked_rows(export.base, methods, prompts, TEMPERATURES, repeats)


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, train, measure, write."""
    given = harness.parse(Settings, argv)
    runs, answers = given.runs, given.regenerated.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    chosen = [arm for arm in arms(answers) if not given.arms or arm.name in given.arms]
    if any(arm.regenerated for arm in chosen):
        harness.regenerate(answers, temperature=0.7)
    if given.clock:
        speeds = {arm.name: clock_training(runs, arm) for arm in chosen}
        found = {"environment": hardware.environment(), "speeds": speeds}
        harness.write(runs / "clock.json", found)
        print(json.dumps(speeds, indent=1))
        return
    rows, exports = [], []
    for arm in chosen:
        rates, tried = tune(runs, arm)
        for seed in arm.seeds:
            exports.append(trained(runs, arm, rates, STEPS, seed))
            config = read_config(exports[-1])
            row = {"arm": arm.name, "seed": seed, "rates": list(rates), "tried": tried}
            found = {"heldout": config["training"]["heldout"], "tree": config["tree"]["choices"]}
            rows.append(row | found)
    if given.train_only:
        return
    hardware.pin_threads(0)
    for row, export in zip(rows, exports, strict=True):
        start, count, few = time.perf_counter(), given.num_prompts, given.clocked_prompts
        path = export.parent / f"accept-{count}.json"
        row["accept"] = harness.kept(path, partial(accept_length, export, count))
        if row["seed"] == SEEDS[0] and given.repeats:
            path = export.parent / f"rows-{few}-{given.repeats}.json"
            row["rows"] = harness.kept(path, partial(measure, export, few, given.repeats))
        print(f"{row['arm']} seed {row['seed']}: {time.perf_counter() - start:.0f} s")
    clocked = runs / "clock.json"
    clocks = json.loads(clocked.read_text()) if clocked.is_file() else {}
    about = {"steps": STEPS, "tokens": STEPS * 8 * 512, "tuning_steps": TUNING_STEPS}
    about |= {"common": COMMON, "corpus": harness.CORPUS, "num_nodes": NUM_NODES}
    harness.publish(given, rows, about | {"training_tokens_per_second": clocks})


if __name__ == "__main__":
    main()
