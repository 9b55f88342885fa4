"""Compare ways to train heads on equal terms, on the embedded model: the table in BENCHMARKS.md.

Every arm sees the same number of tokens, tunes its own learning rate on shorter runs (by held-out
loss), is trained with three seeds at the best one, and decodes the same prompts with a static tree
of the same size, grown from its own hits. Runs are ``python -m specheads.train``; one that is there
already is not made again, so the script can be stopped and started.

    python scripts/bench_medusa.py --runs runs/table --out benchmarks/tinycode_heads.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specheads import hardware
from specheads.bench import max_prompt_length, prompt_file
from specheads.decoding.benchmark import make_methods, make_rows, rounding_of
from specheads.decoding.measure import clock, end_tokens, read_prompts
from specheads.hardware import environment
from specheads.models.base import output_layer
from specheads.models.checkpoint import load_export, read_config
from specheads.models.manifest import write_json

ROOT = Path(__file__).resolve().parents[1]
NUM_HEADS, NUM_NODES = 5, 16
STEPS, TUNING_STEPS = 250, 100
SEEDS = (0, 1, 2)
TEMPERATURES = (0.0, 1.0)
COMMON = (
    f"heads.num_heads={NUM_HEADS}",
    f"tree.num_nodes={NUM_NODES}",
    "data.rows=8",
    "data.packages=[numpy,accelerate,huggingface_hub,hydra,omegaconf]",
    "data.documents=0",
    "autocast=bfloat16",
    "optim=muon",
    "optim.schedule=wsd",
    "optim.decay_fraction=0.5",
    "evaluate.num_prompts=12",
    "evaluate.max_new_tokens=64",
    "log.every=25",
    "log.wandb=disabled",
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
    """

    name: str
    overrides: tuple[str, ...]
    rates: tuple[tuple[str, ...], ...]
    limit: str = ""
    needs: str = field(default="")  # a file without which the arm cannot run


def arms(regenerated: Path) -> list[Arm]:
    """Return the arms; ``regenerated`` are the base's own answers to the training prompts."""
    heads = tuple((f"optim.lr={rate}",) for rate in ("1.5e-3", "3e-3", "6e-3"))
    joint = tuple(
        ("optim.lr=3e-3", f"optim.base_lr={rate}") for rate in ("3.5e-4", "7e-4", "1.4e-3")
    )
    distilled = tuple(
        ("optim.lr=3e-3", f"optim.base_lr={rate}") for rate in ("2e-4", "4e-4", "8e-4")
    )
    own = (f"data.path={regenerated}", "data=jsonl")
    return [
        Arm("medusa1", ("+recipe=medusa1",), heads),
        Arm("medusa2", ("+recipe=medusa2",), joint, "loss"),
        Arm("hydra", ("+recipe=medusa1", "heads=hydra"), heads),
        Arm("markov", ("+recipe=medusa1", "heads=markov"), heads),
        Arm("regenerated", ("+recipe=medusa1", *own), heads, needs=str(regenerated)),
        Arm("self_distilled", ("+recipe=medusa2_distilled",), distilled, "kl"),
    ]


def train(run: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train unless the export is there; return its config, with the seconds that training took.

    Raises:
        SystemExit: with the exit code of the training, if it failed.
    """
    clock_file = run / "seconds.json"
    if not (run / "export" / "manifest.json").is_file():
        command = [sys.executable, "-m", "specheads.train", *overrides, *COMMON]
        command += [f"name={run.name}", f"run_dir={run}"]
        command += ["resume=auto"] if (run / "config.yaml").is_file() else []
        print("$", *command[1:], flush=True)
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(done.returncode)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rates = [r["train/tokens_per_second"] for r in rows if "train/tokens_per_second" in r]
        write_json(clock_file, {"tokens_per_second": rates, "threads": os.cpu_count()})
    return read_config(run / "export")


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
    for number, rates in enumerate(arm.rates):
        overrides = (*arm.overrides, *rates, f"steps={TUNING_STEPS}", "seed=0")
        config = train(runs / f"{arm.name}-tune{number}", overrides)
        tried.append({"rates": list(rates), "score": score(config, arm.limit)})
        print(f"{arm.name} {' '.join(rates)}: {tried[-1]['score']:.4f}", flush=True)
    best = min(range(len(tried)), key=lambda number: float(tried[number]["score"]))
    return arm.rates[best], tried


def measure(export_dir: Path, num_prompts: int, repeats: int) -> list[dict[str, Any]]:
    """Clock plain decoding, transformers' generate, prompt lookup and the tree of an export."""
    device = torch.device("cpu")
    export = load_export(export_dir, dtype=hardware.pick_dtype("auto", device), device=device)
    prompts, _ = read_prompts(
        prompt_file("", str(export_dir), "prompts.jsonl"),
        export.tokenizer,
        num_prompts,
        max_length=max_prompt_length(export, 128),
        device=device,
    )
    methods = make_methods(
        export.base,
        export.heads,
        output_layer(export.base),
        [export.tree],
        eos=end_tokens(export.base, export.tokenizer),
        pad=export.tokenizer.pad_token_id,
        max_new_tokens=128,
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
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--train-only", action="store_true", help="measure later, when it is quiet")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    chosen = [
        arm
        for arm in arms(options.regenerated.resolve())
        if not options.arms or arm.name in options.arms
    ]
    table: list[dict[str, Any]] = []
    for arm in chosen:
        if arm.needs and not Path(arm.needs).is_file():
            raise SystemExit(f"{arm.name} needs {arm.needs}: python -m specheads.regenerate")
        rates, tried = tune(options.runs, arm)
        for seed in SEEDS:
            run = options.runs / f"{arm.name}-seed{seed}"
            overrides = (*arm.overrides, *rates, f"steps={STEPS}", f"seed={seed}")
            config = train(run, overrides)
            table.append({"arm": arm.name, "seed": seed, "run": run, "config": config,
                          "rates": list(rates), "tried": tried})  # fmt: skip
    if options.train_only:
        return
    hardware.pin_threads(0)
    rows = []
    for entry in table:
        start = time.perf_counter()
        measured = measure(entry["run"] / "export", options.num_prompts, options.repeats)
        config = entry["config"]
        rows.append(
            {
                "arm": entry["arm"],
                "seed": entry["seed"],
                "rates": entry["rates"],
                "tried": entry["tried"],
                "heldout": config["training"]["heldout"],
                "training_speed": json.loads((entry["run"] / "seconds.json").read_text()),
                "tree": config["tree"]["choices"],
                "rows": measured,
            }
        )
        print(
            f"{entry['arm']} seed {entry['seed']}: {time.perf_counter() - start:.0f} s", flush=True
        )
    settings = {
        "steps": STEPS,
        "tokens": STEPS * 8 * 512,
        "tuning_steps": TUNING_STEPS,
        "common": list(COMMON),
        "num_nodes": NUM_NODES,
        "num_prompts": options.num_prompts,
        "repeats": options.repeats,
    }
    write_json(options.out, {"environment": environment(), "settings": settings, "rows": rows})
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
