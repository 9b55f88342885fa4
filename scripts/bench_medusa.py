"""Compare ways to train heads on equal terms, on the embedded model: the table in BENCHMARKS.md.

Every arm sees the same number of tokens of the same prompts, tunes its own learning rate on shorter
runs (by held-out loss), is trained with three seeds at the best one, and decodes the same prompts
with a static tree of the same size, grown from its own hits. Every run is a command of its own, and
what is there already is not made again, so the script can be stopped and started, and two can work
on different arms. Heads on the frozen base train from one feature cache, which gives the same
losses; how long training takes without it is clocked apart (``--clock``), on a quiet machine.

    python scripts/bench_medusa.py --train-only
    python scripts/bench_medusa.py --clock
    python scripts/bench_medusa.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specheads import hardware
from specheads.bench import max_prompt_length, prompt_file
from specheads.decoding.benchmark import make_methods, make_rows, rounding_of
from specheads.decoding.measure import Prompt, clock, drafted_method, end_tokens, read_prompts
from specheads.decoding.stats import ratio_ci95
from specheads.drafters.made import static_drafter
from specheads.hardware import environment
from specheads.models.checkpoint import Export, load_export, read_config
from specheads.models.manifest import write_json
from specheads.models.output import output_layer

ROOT = Path(__file__).resolve().parents[1]
CALIBRATION = ROOT / "data" / "tinycode" / "calibration.jsonl"
NUM_HEADS, NUM_NODES = 5, 16
STEPS, TUNING_STEPS = 250, 100
SEEDS = (0, 1, 2)
TEMPERATURES = (0.0, 1.0)
MAX_NEW_TOKENS = 128
COMMON = (
    f"heads.num_heads={NUM_HEADS}",
    f"tree.num_nodes={NUM_NODES}",
    "data.rows=8",
    "autocast=bfloat16",
    "optim=muon",
    "optim.schedule=wsd",
    "optim.decay_fraction=0.5",
    "evaluate.num_prompts=12",
    "evaluate.max_new_tokens=64",
    "log.every=25",
    "log.wandb=disabled",
)
CORPUS = (
    "data=pycode",
    "data.packages=[numpy,accelerate,huggingface_hub,hydra,omegaconf]",
    "data.max_records=6000",
)
KL_LIMIT, LOSS_LIMIT = 0.01, 1.01  # of a tuned base: nats per token; times the original's loss


@dataclass(frozen=True)
class Arm:
    """One row of the table.

    Attributes:
        name: of the row.
        overrides: what makes it.
        rates: per setting to tune the values to try, all settings together: overrides.
        limit: what a tuned base must keep: ``loss``, ``kl`` or nothing.
        needs: a file without which it cannot be trained.
        cached: it trains from a feature cache of this name.
    """

    name: str
    overrides: tuple[str, ...]
    rates: tuple[tuple[str, ...], ...]
    limit: str = ""
    needs: str = ""
    cached: str = ""


def arms(regenerated: Path) -> list[Arm]:
    """Return the arms; ``regenerated`` are the base's own answers to the training prompts."""
    heads = tuple((f"optim.lr={rate}",) for rate in ("3e-3", "6e-3", "1.2e-2", "2.4e-2"))
    joint = tuple(
        (f"optim.lr={rate}", f"optim.base_lr={base_rate}")
        for rate, base_rate in (
            ("3e-3", "3.5e-4"),
            ("3e-3", "7e-4"),
            ("6e-3", "7e-4"),
            ("6e-3", "1.4e-3"),
        )
    )
    distilled = tuple(
        (f"optim.lr={rate}", f"optim.base_lr={base_rate}")
        for rate, base_rate in (
            ("3e-3", "2e-4"),
            ("6e-3", "2e-4"),
            ("6e-3", "5e-4"),
            ("6e-3", "1e-3"),
        )
    )
    own = ("data=jsonl", f"data.path={regenerated}", f"data.eval_path={CALIBRATION}")
    medusa1, medusa2 = (
        ("+recipe=medusa1", *CORPUS),
        ("+recipe=medusa2", "data.documents=0", *CORPUS),
    )
    return [
        Arm("medusa1", medusa1, heads, cached="corpus"),
        Arm("hydra", (*medusa1, "heads=hydra"), heads, cached="corpus"),
        Arm("hydra_plus", (*medusa1, "heads=hydra_plus"), heads, cached="corpus"),
        Arm("markov", (*medusa1, "heads=markov"), heads, cached="corpus"),
        Arm("regenerated", ("+recipe=medusa1", *own), heads, "", str(regenerated), "own"),
        Arm("medusa2", medusa2, joint, "loss"),
        Arm(
            "self_distilled",
            ("+recipe=medusa2_distilled", *own),
            distilled,
            "kl",
            str(regenerated),
        ),
    ]


def train(run: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train unless the export is there; return its config.

    Raises:
        SystemExit: with the exit code of the training, if it failed.
    """
    if not (run / "export" / "manifest.json").is_file():
        command = [sys.executable, "-m", "specheads.train", *overrides, *COMMON]
        command += [f"name={run.name}", f"run_dir={run}"]
        command += ["resume=auto"] if (run / "config.yaml").is_file() else []
        print("$", *command[1:], flush=True)
        with (run.parent / f"{run.name}.log").open("a") as log:
            done = subprocess.run(command, cwd=ROOT, check=False, stdout=log)
        if done.returncode:
            raise SystemExit(done.returncode)
    return read_config(run / "export")


def regenerate(path: Path) -> None:
    """Let the base answer the corpus's prompts itself; goes on with a file that was begun.

    Raises:
        SystemExit: with its exit code, if it failed.
    """
    command = [sys.executable, "-m", "specheads.regenerate", "model=tinycode", *CORPUS]
    command += [f"output={path}", "temperature=0.7", "max_new_tokens=320", "batch_size=64"]
    if done := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(done)


def score(config: dict[str, Any], limit: str) -> float:
    """Return what tuning minimises: the heads' held-out loss, infinite outside the limit."""
    heldout = config["training"]["heldout"]
    if limit == "loss" and heldout["loss"] > LOSS_LIMIT * heldout["original_loss"]:
        return float("inf")
    if limit == "kl" and heldout["kl"] > KL_LIMIT:
        return float("inf")
    return sum(0.8 ** (i + 1) * heldout[f"head_{i}/loss"] for i in range(NUM_HEADS))


def tune(runs: Path, arm: Arm) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return the best of the arm's rates, and the score of each."""
    tried = []
    for rates in arm.rates:
        length = (f"steps={TUNING_STEPS}", "seed=0")
        config = train(folder(runs, arm, rates, length), (*overrides(runs, arm), *rates, *length))
        tried.append({"rates": list(rates), "score": score(config, arm.limit)})
        print(f"{arm.name} {' '.join(rates)}: {tried[-1]['score']:.4f}", flush=True)
    best = min(range(len(tried)), key=lambda number: float(tried[number]["score"]))
    return arm.rates[best], tried


def folder(runs: Path, arm: Arm, *settings: tuple[str, ...]) -> Path:
    """Return the run directory of an arm with these settings, which its name tells."""
    values = [each.partition("=")[2] for part in settings for each in part]
    return runs / "-".join([arm.name, *values])


def overrides(runs: Path, arm: Arm) -> tuple[str, ...]:
    """Return the arm's overrides, the cache's folder with them."""
    cached = (f"features.dir={runs / 'features' / arm.cached}",) if arm.cached else ()
    return (*arm.overrides, *cached)


def clock_training(runs: Path, arm: Arm) -> float:
    """Return tokens per second of training without a cache, of the later half of a short run."""
    run = runs / f"{arm.name}-clock"
    steps = ("steps=24", "log.every=2", "warmup_heads=0.4")
    train(run, (*arm.overrides, *arm.rates[0], *steps, "evaluate.num_prompts=2"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("train/tokens_per_second") for line in lines]
    seconds = [1 / rate for rate in rates if rate]  # each line stands for as many tokens
    return len(seconds) / sum(seconds)


def accept_length(export_dir: Path, num_prompts: int) -> dict[str, Any]:
    """Decode with the export's tree alone: ``t0`` and ``t1``, each with its interval."""
    export, prompts, eos = load(export_dir, num_prompts)
    drafter = static_drafter(export.base, export.heads, output_layer(export.base), export.tree)
    method = drafted_method(
        "tree", export.base, drafter, eos, MAX_NEW_TOKENS, tree_nodes=export.tree.num_nodes
    )
    found = {}
    for temperature in TEMPERATURES:
        decoded = clock([method], prompts, temperature, repeats=1)["tree"].decoded
        gained = [float(sum(text.accept_lengths)) for text in decoded]
        steps = [float(len(text.accept_lengths)) for text in decoded]
        found[f"t{temperature:g}"] = {
            "accept_length": round(sum(gained) / sum(steps), 4),
            "ci95": [round(bound, 4) for bound in ratio_ci95([gained], [steps])],
        }
    return found


def load(export_dir: Path, num_prompts: int) -> tuple[Export, list[Prompt], tuple[int, ...]]:
    """Return an export in the dtype of use, the prompts to measure on, and its end tokens."""
    device = torch.device("cpu")
    export = load_export(export_dir, dtype=hardware.pick_dtype("auto", device), device=device)
    prompts, _ = read_prompts(
        prompt_file("", str(export_dir), "prompts.jsonl"),
        export.tokenizer,
        num_prompts,
        max_length=max_prompt_length(export, MAX_NEW_TOKENS),
        device=device,
    )
    return export, prompts, end_tokens(export.base, export.tokenizer)


def measure(export_dir: Path, num_prompts: int, repeats: int) -> list[dict[str, Any]]:
    """Clock plain decoding, transformers' generate, prompt lookup and the tree of an export."""
    export, prompts, eos = load(export_dir, num_prompts)
    methods = make_methods(
        export.base,
        export.heads,
        output_layer(export.base),
        [export.tree],
        eos=eos,
        pad=export.tokenizer.pad_token_id,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    clocked = {
        (temperature, 1): clock(methods, prompts, temperature, repeats=repeats)
        for temperature in TEMPERATURES
    }
    rounding = rounding_of(export.base, methods, prompts, clocked)
    return make_rows(export.base, methods, prompts, clocked, rounding)


def main() -> None:
    """Tune, train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "tinycode_heads.json")
    parser.add_argument("--regenerated", type=Path, default=ROOT / "runs" / "own_answers.jsonl")
    parser.add_argument("--arms", nargs="*", help="only these")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument(
        "--repeats", type=int, default=3, help="of the clocks; 0: accept length only"
    )
    parser.add_argument("--train-only", action="store_true", help="measure later, when it is quiet")
    parser.add_argument("--clock", action="store_true", help="only clock the training of each arm")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    chosen = [
        arm
        for arm in arms(options.regenerated.resolve())
        if not options.arms or arm.name in options.arms
    ]
    if any(arm.needs for arm in chosen):
        regenerate(options.regenerated.resolve())
    if options.clock:
        speeds = {arm.name: round(clock_training(options.runs, arm), 1) for arm in chosen}
        write_json(options.runs / "clock.json", {"environment": environment(), "speeds": speeds})
        print(json.dumps(speeds, indent=1))
        return
    table: list[dict[str, Any]] = []
    for arm in chosen:
        rates, tried = tune(options.runs, arm)
        for seed in SEEDS:
            length = (f"steps={STEPS}", f"seed={seed}")
            run = folder(options.runs, arm, rates, length)
            config = train(run, (*overrides(options.runs, arm), *rates, *length))
            table.append(
                {
                    "arm": arm.name,
                    "seed": seed,
                    "rates": list(rates),
                    "tried": tried,
                    "heldout": config["training"]["heldout"],
                    "tree": config["tree"]["choices"],
                    "run": run,
                }
            )
    if options.train_only:
        return
    hardware.pin_threads(0)
    for entry in table:
        start, export = time.perf_counter(), entry.pop("run") / "export"
        entry["accept"] = accept_length(export, options.num_prompts)
        if entry["seed"] == SEEDS[0] and options.repeats:
            entry["rows"] = measure(export, options.num_prompts, options.repeats)
        print(f"{entry['arm']} seed {entry['seed']}: {time.perf_counter() - start:.0f} s")
    clocked = options.runs / "clock.json"
    settings = {
        "steps": STEPS,
        "tokens": STEPS * 8 * 512,
        "tuning_steps": TUNING_STEPS,
        "common": list(COMMON),
        "corpus": list(CORPUS),
        "num_nodes": NUM_NODES,
        "num_prompts": options.num_prompts,
        "repeats": options.repeats,
        "training_tokens_per_second": json.loads(clocked.read_text()) if clocked.is_file() else {},
    }
    write_json(options.out, {"environment": environment(), "settings": settings, "rows": table})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
