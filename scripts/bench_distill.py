"""Compare losses and data for draft models of the embedded base, on equal terms: BENCHMARKS.md.

Every draft model has one layer and is trained from scratch for as many tokens. ``labels`` on the
corpus is what anyone gets who trains a small model on the prompts and their reference answers, and
on documents who trains it as the base was pre-trained, half on whole files of the same packages.
The others learn the base's distribution (arXiv:2310.08461): on the corpus, on the base's own
answers to the corpus's prompts, or half on what the draft itself answers.

The table has one seed of each and one learning rate, ``forward_kl``'s best on short runs. Its best
arm and ``labels`` on either data are then compared over three seeds, each at its own best rate over
the whole length: that is the claim. Rates are chosen by alpha, the mean of sum_x min(base, draft)
at T=1, on the base's own continuations of calibration.jsonl; figures are on prompts.jsonl.

Every run is a command of its own, and what is there already is not made again: the script can be
stopped and started, and two can work on different ``--losses``.

    python scripts/bench_distill.py --train-only
    python scripts/bench_distill.py

A look at what it does: --steps 2 --tuning-steps 1 --losses labels tv --data corpus --seeds 0 1
--rates 3e-3 --tuning-rates 3e-3 --num-prompts 2 --max-new-tokens 8 --rows 1
--draft draft.hidden=64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch

from specheads.config.training import DRAFT_LOSSES
from specheads.measure.clock import read_prompts
from specheads.measure.drafts import measure_alpha
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.draft import load_draft
from specheads.models.manifest import write_json
from specheads.system import hardware
from specheads.system.files import tinycode_dir

ROOT = Path(__file__).resolve().parents[1]
DATA = ("documents", "corpus", "regenerated", "on_policy")
CALIBRATION = tinycode_dir() / "calibration.jsonl"
CORPUS = (
    "data=pycode",
    "data.documents=0",
    "data.packages=[numpy,accelerate,huggingface_hub,hydra,omegaconf]",
    "data.max_records=6000",
)
COMMON = (
    "evaluate.every=0",
    "evaluate.num_prompts=2",
    "evaluate.max_new_tokens=32",
    "log.wandb=disabled",
    "checkpoint.every=1000",
)


@dataclass(frozen=True)
class Arm:
    """A loss on data."""

    loss: str
    data: str

    @property
    def name(self) -> str:
        """Of its runs."""
        return f"{self.loss}-{self.data}"


def arms(options: argparse.Namespace) -> list[Arm]:
    """Return the arms; the labels of its own answers would teach a draft nothing.

    Documents are what labels are learned from where nobody has thought of prompts.
    """
    return [
        Arm(loss, data)
        for loss in options.losses
        for data in options.data
        if data != ("on_policy" if loss == "labels" else "documents")
    ]


def regenerate(options: argparse.Namespace) -> None:
    """Let the base answer the corpus's prompts as it decodes at T=1; goes on where it stopped.

    Raises:
        SystemExit: with its exit code, if it failed.
    """
    command = [sys.executable, "-m", "specheads.regenerate", "model=tinycode", *CORPUS]
    command += [f"output={options.answers}", "temperature=1", "batch_size=64"]
    command += ["max_new_tokens=320"]
    if done := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(done)


def overrides(arm: Arm, options: argparse.Namespace) -> list[str]:
    """Return what trains ``arm``, but for rate, length and seed."""
    data: tuple[str, ...] = CORPUS
    if arm.data == "regenerated":
        data = ("data=jsonl", f"data.path={options.answers}", f"data.eval_path={CALIBRATION}")
    elif arm.data == "documents":
        data = (*CORPUS, "data.documents=0.5")
    mix = ["draft.on_policy=0.5"] if arm.data == "on_policy" else []
    rows = [f"data.rows={options.rows}", "draft.layers=1"]
    return ["+recipe=distill", f"draft.loss={arm.loss}", *data, *mix, *rows, *options.draft]


def trained(arm: Arm, options: argparse.Namespace, rate: str, steps: int, seed: int) -> Path:
    """Train unless the export is there; return the export.

    Raises:
        SystemExit: with the exit code of the training, if it failed.
    """
    run = options.runs / f"{arm.name}-{rate}-{steps}-{seed}"
    if not (run / "export" / "model.safetensors").is_file():
        length = [f"steps={steps}", f"seed={seed}", f"optim.warmup_steps={min(50, steps // 5)}"]
        command = [sys.executable, "-m", "specheads.train", *overrides(arm, options), *COMMON]
        command += [*length, f"optim.lr={rate}", f"name={run.name}", f"run_dir={run}"]
        command += ["resume=auto"] if (run / "config.yaml").is_file() else []
        print("$", *command[1:], flush=True)
        with (run.parent / f"{run.name}.log").open("a") as log:
            done = subprocess.run(command, cwd=ROOT, check=False, stdout=log)
        if done.returncode:
            raise SystemExit(done.returncode)
    return run / "export"


@torch.inference_mode()
def alphas(export: Path, prompts: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return alpha at both temperatures, over all prompts and per kind; kept beside the export."""
    kept = export.parent / f"alpha-{prompts.stem}-{options.num_prompts}-{options.max_new_tokens}"
    kept = kept.with_suffix(".json")
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    hardware.quiet_loading()
    base = load_base_model("tinycode", dtype=torch.float32)
    tokenizer = load_tokenizer("tinycode")
    draft = load_draft(str(export), tokenizer=tokenizer, where="draft", dtype=torch.float32)
    texts, _ = read_prompts(
        prompts, tokenizer, options.num_prompts,
        max_length=2048 - options.max_new_tokens, device=base.device,
    )  # fmt: skip
    found = {}
    for temperature in (0.0, 1.0):
        measured = measure_alpha(
            base,
            draft,
            [text.input_ids for text in texts],
            max_new_tokens=options.max_new_tokens,
            temperature=temperature,
            seed=0,
            eos_token_ids=end_tokens(base, tokenizer),
        )
        kinds = sorted({text.kind for text in texts})
        found[f"t{temperature:g}"] = {
            "alpha": round(measured.alpha, 4),
            "num_tokens": measured.num_tokens,
            "chain_of_4": round(measured.chain(4, sampled=temperature > 0).accept_length, 4),
            "per_kind": {
                kind: round(
                    statistics.mean(
                        alpha
                        for alpha, text in zip(measured.per_prompt, texts, strict=True)
                        if text.kind == kind
                    ),
                    4,
                )
                for kind in kinds
            },
        }
    found["parameters"] = sum(each.numel() for each in draft.parameters())
    write_json(kept, found)
    return found


def tune(
    arm: Arm, rates: Sequence[str], steps: int, options: argparse.Namespace
) -> tuple[str, list[dict[str, Any]]]:
    """Return the rate with the highest alpha at T=1 on other prompts, and what each one gave."""
    if len(rates) == 1:
        return rates[0], []
    tried = []
    for rate in rates:
        export = trained(arm, options, rate, steps, options.seeds[0])
        alpha = alphas(export, CALIBRATION, options)["t1"]["alpha"]
        tried.append({"rate": rate, "steps": steps, "alpha": alpha})
        print(f"{arm.name} at {rate}, {steps} steps: alpha {alpha:.4f}", flush=True)
    return max(tried, key=lambda each: each["alpha"])["rate"], tried


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results in Markdown: alpha at T=1, T=0."""
    data = list(dict.fromkeys(row["data"] for row in rows))
    lines = ["| loss | " + " | ".join(data) + " |", "|" + "---|" * (len(data) + 1)]
    for loss in dict.fromkeys(row["loss"] for row in rows):
        of = {row["data"]: row for row in rows if row["loss"] == loss}
        cells = [
            f"{of[each]['t1']['alpha']:.3f}, {of[each]['t0']['alpha']:.3f}" if each in of else ""
            for each in data
        ]
        lines.append(f"| {loss} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def claim(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line per arm: the mean alpha of its seeds, their range, the last one's lead."""
    alpha = {
        name: [row["t1"]["alpha"] for row in rows if (row["loss"], row["data"]) == name]
        for name in dict.fromkeys((row["loss"], row["data"]) for row in rows)
    }
    best = statistics.mean(list(alpha.values())[-1])
    return "\n".join(
        f"{loss} on {data}: {statistics.mean(of):.4f} ({min(of):.4f} to {max(of):.4f}) at T=1;"
        f" the best is {best / statistics.mean(of) - 1:+.1%}"
        for (loss, data), of in alpha.items()
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "distill_table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "tinycode_distill.json")
    parser.add_argument("--answers", type=Path, default=ROOT / "runs" / "answers_t1.jsonl")
    parser.add_argument("--losses", nargs="+", default=list(DRAFT_LOSSES), choices=DRAFT_LOSSES)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--draft", nargs="*", default=[], help="settings of the draft model")
    parser.add_argument("--rows", type=int, default=8, help="of 512 tokens, per step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tuning-steps", type=int, default=100, help="for the table's rate")
    parser.add_argument("--tuning-rates", nargs="+", default=["3e-3", "6e-3", "1.2e-2"])
    parser.add_argument("--rates", nargs="+", default=["1.5e-3", "3e-3", "6e-3"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--train-only", action="store_true", help="one seed each, and no more")
    options = parser.parse_args(argv)
    options.runs, options.answers = options.runs.resolve(), options.answers.resolve()
    if not options.out.parent.is_dir():
        parser.error(f"--out is {options.out}, but there is no folder {options.out.parent}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, train, measure, write."""
    options = parse(argv)
    options.runs.mkdir(parents=True, exist_ok=True)
    if "regenerated" in options.data and not options.train_only:
        regenerate(options)
    rows: list[dict[str, Any]] = []

    def add(arm: Arm, rate: str, seed: int, part: str) -> dict[str, Any]:
        export = trained(arm, options, rate, options.steps, seed)
        found = alphas(export, tinycode_dir() / "prompts.jsonl", options)
        row = {"part": part, "loss": arm.loss, "data": arm.data, "rate": rate, "seed": seed}
        rows.append(row | found)
        at = f"{arm.name} at {rate}, seed {seed}"
        print(f"{at}: alpha {found['t1']['alpha']:.4f}", flush=True)
        return rows[-1]

    chosen = Arm("forward_kl", "corpus")
    rate, tried = tune(chosen, options.tuning_rates, options.tuning_steps, options)
    tuned = {"table": {"rate": rate, "tried": tried}}
    firsts = [add(arm, rate, options.seeds[0], "table") for arm in arms(options)]
    if options.train_only:
        return
    best = max(firsts, key=lambda row: float(row["t1"]["alpha"]) * (row["loss"] != "labels"))
    compared = [Arm("labels", data) for data in DATA[:2]] + [Arm(best["loss"], best["data"])]
    for arm in compared:
        rate, tried = tune(arm, options.rates, options.steps, options)
        tuned[arm.name] = {"rate": rate, "tried": tried}
        for seed in options.seeds:
            add(arm, rate, seed, "claim")
    hidden = ("runs", "out", "answers", "train_only")
    settings = {key: value for key, value in vars(options).items() if key not in hidden}
    settings |= {"common": list(COMMON), "tokens_per_step": options.rows * 512}
    write_json(
        options.out,
        {
            "environment": hardware.environment(),
            "settings": settings,
            "tuned": tuned,
            "rows": rows,
        },
    )
    print(table([row for row in rows if row["part"] == "table"]))
    print(claim([row for row in rows if row["part"] == "claim"]))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
