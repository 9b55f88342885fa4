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

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specheads.drafters.heads import static_drafter
from specheads.measure.bench import make_methods, make_rows, rounding_of
from specheads.measure.clock import (
    Prompt,
    clock,
    drafted_method,
    max_prompt_length,
    prompt_file,
    read_prompts,
)
from specheads.measure.stats import ratio_ci95
from specheads.models.base import end_tokens
from specheads.models.checkpoint import Export, load_export, read_config
from specheads.models.manifest import write_json
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.system.hardware import environment

ROOT = Path(__file__).resolve().parents[1]
CALIBRATION = ROOT / "data" / "tinycode" / "calibration.jsonl"
NUM_HEADS, NUM_NODES = 5, 16
STEPS, TUNING_STEPS = 500, 100
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
        tuning_steps: of the runs that choose the rates. Whether a tuned base keeps its limit shows
            in a whole run only.
        seeds: of its runs; one where no difference is claimed.
    """

    name: str
    overrides: tuple[str, ...]
    rates: tuple[tuple[str, ...], ...]
    limit: str = ""
    needs: str = ""
    cached: str = ""
    tuning_steps: int = TUNING_STEPS
    seeds: tuple[int, ...] = SEEDS


def arms(regenerated: Path) -> list[Arm]:
    """Return the arms; ``regenerated`` are the base's own answers to the training prompts."""
    heads = tuple((f"optim.lr={rate}",) for rate in ("3e-3", "6e-3", "1.2e-2", "2.4e-2"))
    joint = tuple(
        (
            f"loss.lambda_0={weight}",
            "optim.lr=6e-3",
            f"optim.base_lr={base_rate}",
            f"warmup_heads={warmup}",
        )
        for weight, base_rate, warmup in (
            ("1.0", "7e-4", "0.2"),
            ("0.3", "7e-4", "0.2"),
            ("0.55", "7e-4", "0.1"),
            ("0.4", "1.4e-3", "0.1"),
        )
    )
    distilled = tuple(
        (
            f"loss.lambda_0={weight}",
            "optim.lr=6e-3",
            f"optim.base_lr={base_rate}",
            "warmup_heads=0.2",
        )
        for weight, base_rate in (
            ("0.75", "5e-4"),
            ("0.4", "4e-4"),
            ("0.3", "5e-4"),
            ("0.2", "3e-4"),
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
        Arm("medusa2", medusa2, joint, "loss", tuning_steps=STEPS),
        Arm(
            "self_distilled",
            ("+recipe=medusa2_distilled", *own),
            distilled,
            "kl",
            str(regenerated),
            tuning_steps=STEPS,
            seeds=SEEDS[:1],
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


def score(config: dict[str, Any], limit: str) -> tuple[bool, float]:
    """Return whether the base kept its limit, and what tuning minimises: the heads' loss."""
    heldout = config["training"]["heldout"]
    kept = True
    if limit == "loss":
        kept = heldout["loss"] <= LOSS_LIMIT * heldout["original_loss"]
    elif limit == "kl":
        kept = heldout["kl"] <= KL_LIMIT
    return kept, sum(0.8 ** (i + 1) * heldout[f"head_{i}/loss"] for i in range(NUM_HEADS))


def tune(runs: Path, arm: Arm) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return the best of the arm's rates, and the score of each."""
    tried: list[dict[str, Any]] = []
    for rates in arm.rates:
        length = (f"steps={arm.tuning_steps}", "seed=0")
        config = train(folder(runs, arm, rates, length), (*overrides(runs, arm), *rates, *length))
        kept, loss = score(config, arm.limit)
        tried.append({"rates": list(rates), "kept": kept, "score": loss})
        print(f"{arm.name} {' '.join(rates)}: {loss:.4f}{'' if kept else ' (over)'}", flush=True)
    best = min(range(len(tried)), key=lambda n: (not tried[n]["kept"], tried[n]["score"]))
    return arm.rates[best], tried


def folder(runs: Path, arm: Arm, *settings: tuple[str, ...]) -> Path:
    """Return the run directory of an arm with these settings, which its name tells."""
    values = [each.partition("=")[2] for part in settings for each in part]
    return runs / "-".join([arm.name, *values])


def overrides(runs: Path, arm: Arm) -> tuple[str, ...]:
    """Return the arm's overrides, the cache's folder with them."""
    cached = (f"features.dir={runs / 'features' / arm.cached}",) if arm.cached else ()
    return (*arm.overrides, *cached)


def clock_training(runs: Path, arm: Arm) -> list[float]:
    """Return tokens per second of each stage of training without a cache, from a short run."""
    run = runs / f"{arm.name}-clock"
    steps = ("steps=24", "warmup_heads=0.4", "evaluate.num_prompts=2")
    train(run, (*arm.overrides, *arm.rates[0], *steps))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["train/tokens_per_second"] for line in lines if "train/tokens_per_second" in line]


def whole_run(stages: Sequence[float], rates: Sequence[str]) -> float:
    """Return tokens per second of a run whose first stage is as long as ``rates`` say."""
    warmup = [float(each.partition("=")[2]) for each in rates if each.startswith("warmup_heads=")]
    shares = [warmup[0], 1 - warmup[0]] if warmup else [1.0]
    return 1 / sum(share / speed for share, speed in zip(shares, stages, strict=True))


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


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return what ``path`` holds, or make it and keep it there: measuring, too, can be stopped."""
    if not path.is_file():
        write_json(path, {"value": make()})
    return json.loads(path.read_text())["value"]


def load(export_dir: Path, num_prompts: int) -> tuple[Export, list[Prompt], tuple[int, ...]]:
    """Return an export in the dtype of use, the prompts to measure on, and its end tokens."""
    device = torch.device("cpu")
    export = load_export(export_dir, dtype=hardware.pick_dtype("auto", device), device=device)
    prompts, _ = read_prompts(
        prompt_file("", str(export_dir), "prompts.jsonl"),
        export.tokenizer,
        num_prompts,
        max_length=max_prompt_length(export.base, MAX_NEW_TOKENS),
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


def show(table: Sequence[dict[str, Any]], speeds: dict[str, list[float]]) -> None:
    """Print the table for BENCHMARKS.md: means over seeds, lowest and highest beside them."""

    def spread(values: Sequence[float]) -> str:
        mean = sum(values) / len(values)
        return f"{mean:.2f} ({min(values):.2f}-{max(values):.2f})"

    for name in dict.fromkeys(entry["arm"] for entry in table):
        seeds = [entry for entry in table if entry["arm"] == name]
        heldout = [entry["heldout"] for entry in seeds]
        cells = [name, " ".join(each.partition("=")[2] for each in seeds[0]["rates"])]
        for at in ("t0", "t1"):
            cells.append(spread([entry["accept"][at]["accept_length"] for entry in seeds]))
        for kind in ("top1", "top5"):
            means = (
                sum(each[f"head_{i}/{kind}"] for each in heldout) / len(heldout)
                for i in range(NUM_HEADS)
            )
            cells.append(" ".join(f"{mean:.2f}".lstrip("0") for mean in means))
        if "original_loss" in heldout[0]:
            moved = [100 * (each["loss"] / each["original_loss"] - 1) for each in heldout]
            cells.append(f"{spread(moved)}%, KL {max(each['kl'] for each in heldout):.3f}")
        else:
            cells.append("same")
        rows = {
            row["temperature"]: row for row in seeds[0].get("rows", []) if row["method"] == "tree"
        }
        cells += [f"{row['speedup_vs_plain']:.2f}x" for row in rows.values()] or ["", ""]
        cells.append(f"{rows[0.0]['extra_parameters'] / 1e6:.2f} M" if rows else "")
        stages = speeds.get(name)
        cells.append(f"{whole_run(stages, seeds[0]['rates']):,.0f}" if stages else "")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Tune, train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "tinycode_heads.json")
    parser.add_argument("--regenerated", type=Path, default=ROOT / "runs" / "own_answers.jsonl")
    parser.add_argument("--arms", nargs="*", help="only these")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--clocked-prompts", type=int, default=24, help="of them, for speed-ups")
    parser.add_argument(
        "--repeats", type=int, default=2, help="of the clocks; 0: accept length only"
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
        speeds = {arm.name: clock_training(options.runs, arm) for arm in chosen}
        write_json(options.runs / "clock.json", {"environment": environment(), "speeds": speeds})
        print(json.dumps(speeds, indent=1))
        return
    table: list[dict[str, Any]] = []
    for arm in chosen:
        rates, tried = tune(options.runs, arm)
        for seed in arm.seeds:
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
        start, run, count = time.perf_counter(), entry.pop("run"), options.num_prompts
        entry["accept"] = kept(
            run / f"accept-{count}.json", partial(accept_length, run / "export", count)
        )
        if entry["seed"] == SEEDS[0] and options.repeats:
            entry["rows"] = kept(
                run / f"rows-{options.clocked_prompts}-{options.repeats}.json",
                partial(measure, run / "export", options.clocked_prompts, options.repeats),
            )
        print(f"{entry['arm']} seed {entry['seed']}: {time.perf_counter() - start:.0f} s")
    clocked = options.runs / "clock.json"
    clocks = json.loads(clocked.read_text()) if clocked.is_file() else {}
    settings = {
        "steps": STEPS,
        "tokens": STEPS * 8 * 512,
        "tuning_steps": TUNING_STEPS,
        "common": list(COMMON),
        "corpus": list(CORPUS),
        "num_nodes": NUM_NODES,
        "num_prompts": options.num_prompts,
        "clocked_prompts": options.clocked_prompts,
        "repeats": options.repeats,
        "training_tokens_per_second": clocks,
    }
    write_json(options.out, {"environment": environment(), "settings": settings, "rows": table})
    show(table, clocks.get("speeds", {}))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
