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

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch

from specheads.config.training import DRAFT_LOSSES
from specheads.measure.clock import prompts_of
from specheads.measure.drafts import Alpha, measure_alpha
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.draft import load_draft
from specheads.system import hardware
from specheads.system.files import tinycode_dir

DATA = ("documents", "corpus", "regenerated", "on_policy")
CALIBRATION = tinycode_dir() / "calibration.jsonl"
COMMON = (
    *("evaluate.every=0", "evaluate.num_prompts=2", "evaluate.max_new_tokens=32"),
    *("log.wandb=disabled", "checkpoint.every=1000"),
)


@dataclass
class Settings:
    """What is compared, and where the runs are.

    Attributes:
        draft: settings of the draft model
        rows: of 512 tokens, per step
        tuning_steps: for the table's rate
        train_only: one seed each, and no more
    """

    runs: Path = harness.ROOT / "runs" / "distill_table"
    out: Path = harness.ROOT / "benchmarks" / "tinycode_distill.json"
    answers: Path = harness.ROOT / "runs" / "answers_t1.jsonl"
    losses: tuple[str, ...] = DRAFT_LOSSES
    data: tuple[str, ...] = DATA
    draft: tuple[str, ...] = ()
    rows: int = 8
    steps: int = 300
    tuning_steps: int = 100
    tuning_rates: tuple[str, ...] = ("3e-3", "6e-3", "1.2e-2")
    rates: tuple[str, ...] = ("1.5e-3", "3e-3", "6e-3")
    seeds: tuple[int, ...] = (0, 1, 2)
    num_prompts: int = 48
    max_new_tokens: int = 128
    train_only: bool = False

    def __post_init__(self) -> None:
        self.runs, self.answers = self.runs.resolve(), self.answers.resolve()
        unknown = {*self.losses, *self.data} - {*DRAFT_LOSSES, *DATA}
        if unknown:
            raise ValueError(f"no such loss or data: {', '.join(sorted(unknown))}")


Arm = tuple[str, str]  # a loss, and the data


def arms(given: Settings) -> list[Arm]:
    """Return the arms; the labels of its own answers would teach a draft nothing.

    Documents are what labels are learned from where nobody has thought of prompts.
    """
    return [
        (loss, data)
        for loss in given.losses
        for data in given.data
        if data != ("on_policy" if loss == "labels" else "documents")
    ]


def overrides(arm: Arm, given: Settings) -> list[str]:
    """Return what trains ``arm``, but for rate, length and seed."""
    loss, kind = arm
    data: tuple[str, ...] = harness.CORPUS
    if kind == "regenerated":
        data = ("data=jsonl", f"data.path={given.answers}", f"data.eval_path={CALIBRATION}")
    elif kind == "documents":
        data = (*harness.CORPUS, "data.documents=0.5")
    mix = ["draft.on_policy=0.5"] if kind == "on_policy" else []
    rows = [f"data.rows={given.rows}", "draft.layers=1"]
    return ["+recipe=distill", f"draft.loss={loss}", *data, *mix, *rows, *given.draft]


def trained(arm: Arm, given: Settings, rate: str, steps: int, seed: int) -> Path:
    """Train one draft model; return its folder."""
    length = [*harness.training_length(steps, seed), f"optim.lr={rate}"]
    run = given.runs / "-".join([*arm, rate, str(steps), str(seed)])
    return harness.train(run, [*overrides(arm, given), *COMMON, *length])


def alphas(export: Path, prompts: Path, given: Settings) -> dict[str, Any]:
    """Return alpha at both temperatures, over all prompts and per kind; kept beside the export."""
    name = f"alphas-{prompts.stem}-{given.num_prompts}-{given.max_new_tokens}.json"
    return harness.kept(export.parent / name, partial(measure_alphas, export, prompts, given))


@torch.inference_mode()
def measure_alphas(export: Path, prompts: Path, given: Settings) -> dict[str, Any]:
    """Measure what :func:`alphas` returns."""
    hardware.quiet_loading()
    base = load_base_model("tinycode", dtype=torch.float32)
    tokenizer = load_tokenizer("tinycode")
    draft = load_draft(str(export), tokenizer=tokenizer, where="draft", dtype=torch.float32)
    limit, number = given.max_new_tokens, given.num_prompts
    texts, _ = prompts_of(base, tokenizer, prompts, number, limit)
    kinds, eos = sorted({text.kind for text in texts}), end_tokens(base, tokenizer)
    found: dict[str, Any] = {"parameters": sum(each.numel() for each in draft.parameters())}
    for temperature in (0.0, 1.0):
        measured = measure_alpha(
            base,
            draft,
            [text.input_ids for text in texts],
            max_new_tokens=limit,
            eos_token_ids=eos,
            temperature=temperature,
            seed=0,
        )
        pairs = list(zip(measured.texts, texts, strict=True))
        of_kind = {
            kind: [Alpha([one]).alpha for one, text in pairs if text.kind == kind] for kind in kinds
        }
        found[f"t{temperature:g}"] = {
            "alpha": round(measured.alpha, 4),
            "num_tokens": measured.num_tokens,
            "chain_of_4": round(measured.chain(4).accept_length, 4),
            "per_kind": {kind: round(statistics.mean(of), 4) for kind, of in of_kind.items()},
        }
    return found


def tune(arm: Arm, rates: Sequence[str], steps: int, given: Settings) -> dict[str, Any]:
    """Return the rate with the highest alpha at T=1 on other prompts, and what each one gave."""
    tried = []
    for rate in rates if len(rates) > 1 else ():
        export = trained(arm, given, rate, steps, given.seeds[0])
        alpha = alphas(export, CALIBRATION, given)["t1"]["alpha"]
        tried.append({"rate": rate, "steps": steps, "alpha": alpha})
        print(f"{'-'.join(arm)} at {rate}, {steps} steps: alpha {alpha:.4f}", flush=True)
    best = max(tried, key=lambda each: each["alpha"], default={"rate": rates[0]})
    return {"rate": best["rate"], "tried": tried}


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, train, measure, write."""
    given = harness.parse(Settings, argv)
    given.runs.mkdir(parents=True, exist_ok=True)
    if "regenerated" in given.data and not given.train_only:
        harness.regenerate(given.answers, temperature=1)

    def row(arm: Arm, rate: str, seed: int, part: str) -> dict[str, Any]:
        export = trained(arm, given, rate, given.steps, seed)
        found = alphas(export, tinycode_dir() / "prompts.jsonl", given)
        at = f"{'-'.join(arm)} at {rate}, seed {seed}"
        print(f"{at}: alpha {found['t1']['alpha']:.4f}", flush=True)
        names = {"part": part, "loss": arm[0], "data": arm[1], "rate": rate, "seed": seed}
        return names | found

    tuned = {"table": tune(("forward_kl", "corpus"), given.tuning_rates, given.tuning_steps, given)}
    first = [row(arm, tuned["table"]["rate"], given.seeds[0], "table") for arm in arms(given)]
    if given.train_only:
        return
    best = max(first, key=lambda each: float(each["t1"]["alpha"]) * (each["loss"] != "labels"))
    claimed = []
    for arm in (*(("labels", data) for data in DATA[:2]), (best["loss"], best["data"])):
        tuned["-".join(arm)] = found = tune(arm, given.rates, given.steps, given)
        claimed += [row(arm, found["rate"], seed, "claim") for seed in given.seeds]
    about = {"common": COMMON, "tokens_per_step": given.rows * 512}
    harness.publish(given, first + claimed, about, tuned=tuned)


if __name__ == "__main__":
    main()
