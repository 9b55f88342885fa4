"""Compare models trained to predict one token with models trained to predict k: BENCHMARKS.md.

Every model has L layers and is trained from scratch on equal tokens of the same records, in the
same order per seed: n=1 is a plain language model (``+recipe=pretrain``), n=k one whose k - 1 last
layers are heads (``+recipe=mtp``, arXiv:2404.19737), with the output matrix shared, so that the
parameters are equal but for a norm per head (sequential ones join two inputs: their number is
shown). Each tunes its own learning rate on shorter runs, by the next token's held-out loss, and is
trained with three seeds at the best one. Every run is a command of its own, and what is there
already is not made again, so the script can be stopped and started, and two can work on different
arms.

Measured are the next token's held-out loss, per token and, so that tokenizers compare, per byte of
the same texts; the tokens per forward pass of a static tree, grown on calibration.jsonl, on the
prompts of prompts.jsonl, with prompt lookup and the repetition of the plain text beside them; and,
on a quiet machine, the speed-up over the model's own plain decoding, and where its time goes. How
long training takes and how much memory is clocked apart (``--clock``).

    python scripts/bench_mtp.py --train-only
    python scripts/bench_mtp.py --clock
    python scripts/bench_mtp.py

A look at what it does: --steps 4 --tuning-steps 2 --layers 3 --hidden 32 --heads 2
--seeds 0 --num-prompts 2 --max-new-tokens 16 --repeats 1.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.tree import Tree
from specheads.config import DataConfig
from specheads.data.chat import Encoder
from specheads.data.load import load_records
from specheads.data.schema import Record
from specheads.decoding.costs import clock_steps, runner
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.drafters.heads import static_drafter
from specheads.drafters.lookup import LOOKUP_NGRAM, LOOKUP_TOKENS, NgramDrafter
from specheads.measure.bench import make_methods, make_rows, rounding_of
from specheads.measure.calibrate import calibrate
from specheads.measure.clock import (
    Method,
    Prompt,
    clock,
    drafted_method,
    hf_generate_method,
    plain_method,
    read_prompts,
)
from specheads.measure.hits import Texts, collect_hits, grow_static
from specheads.measure.stats import ratio_ci95, rep8
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.checkpoint import load_export
from specheads.models.kinds import Heads
from specheads.models.manifest import write_json
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.system.files import tinycode_dir

ROOT = Path(__file__).resolve().parents[1]
HEADS = {"byte": (2, 4, 8), "bpe": (2, 4)}  # n of the models to compare with n=1
VARIANTS = ("parallel", "causal", "sequential")
TEMPERATURES = (0.0, 1.0)
RATES = ("1.5e-3", "3e-3", "6e-3")
CORPUS = ("data=pycode", "data.documents=0")
COMMON = (
    "autocast=bfloat16",
    "optim=muon",
    "optim.schedule=wsd",
    "optim.decay_fraction=0.4",
    "optim.weight_decay=0.01",
    "evaluate.every=0",
    "checkpoint.every=250",
    "log.wandb=disabled",
)
# the recipe chooses a tree of its own at the end; the trees of this table are grown below
SHORT_END = ("evaluate.num_prompts=2", "evaluate.max_new_tokens=32", "tree.choices=[[0]]")


@dataclass(frozen=True)
class Arm:
    """One model of the table.

    Attributes:
        tokenizer: ``byte`` or ``bpe``.
        num_heads: n: tokens that it is trained to predict at each position.
        variant: of its heads; none where n is 1.
    """

    tokenizer: str
    num_heads: int
    variant: str = ""

    @property
    def name(self) -> str:
        """Of the row and of its runs."""
        return "-".join(filter(None, (self.tokenizer, f"n{self.num_heads}", self.variant)))


@dataclass(frozen=True)
class Model:
    """A trained model; ``heads`` is None where it predicts one token."""

    base: PreTrainedModel
    heads: Heads | None
    tokenizer: PreTrainedTokenizerBase


def arms(options: argparse.Namespace) -> list[Arm]:
    """Return the models to train: per tokenizer n=1 first."""
    found = []
    for tokenizer in options.tokenizers:
        found.append(Arm(tokenizer, 1))
        for num_heads in options.heads or HEADS[tokenizer]:
            found += [Arm(tokenizer, num_heads, variant) for variant in options.variants]
    return [arm for arm in found if not options.arms or arm.name in options.arms]


def overrides(arm: Arm, options: argparse.Namespace) -> list[str]:
    """Return what trains ``arm``, but for rate, length and seed."""
    width = options.hidden
    init = {
        "model_type": "llama",
        "vocab_size": 0,  # as many as the tokenizer has
        "hidden_size": width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": max(1, width // 64),
        "num_key_value_heads": max(1, width // 64),
        "intermediate_size": -(-8 * width // 3 // 32) * 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": "false",
    }
    rows = [f"data.rows={options.rows}", f"data.seq_len={options.seq_len}", "data.growth=[]"]
    recipe = ["+recipe=pretrain"]
    if arm.num_heads > 1:
        recipe = ["+recipe=mtp", f"mtp.num_heads={arm.num_heads}", f"mtp.variant={arm.variant}"]
        recipe += ["mtp.parity=true", "mtp.lm_head=shared", *SHORT_END]
    return [
        *recipe,
        f"tokenizer={arm.tokenizer}",
        f"tokenizer_size={options.bpe_size}",
        *(f"++model.init.{key}={value}" for key, value in init.items()),
        *options.data,
        *rows,
        *COMMON,
    ]


def rate_overrides(rate: str) -> list[str]:
    """Return one learning rate for all layers, those of the heads included."""
    return [f"optim.lr={rate}", f"optim.base_lr={rate}"]


def length_overrides(steps: int, seed: int) -> list[str]:
    """Return how long to train, and the seed."""
    return [f"steps={steps}", f"seed={seed}", f"optim.warmup_steps={min(50, steps // 5)}"]


def train(run: Path, arguments: Sequence[str]) -> None:
    """Train unless the export is there.

    Raises:
        SystemExit: with the exit code of the training, if it failed.
    """
    if (run / "export" / "config.json").is_file():
        return
    command = [sys.executable, "-m", "specheads.train", *arguments]
    command += [f"name={run.name}", f"run_dir={run}"]
    command += ["resume=auto"] if (run / "config.yaml").is_file() else []
    print("$", *command[1:], flush=True)
    with (run.parent / f"{run.name}.log").open("a") as log:
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=log)
    if done.returncode:
        raise SystemExit(done.returncode)


def trained(
    arm: Arm, options: argparse.Namespace, rate: str, steps: int, seed: int
) -> tuple[Path, dict[str, float]]:
    """Train one model; return its run directory and its held-out loss."""
    run = options.runs / f"{arm.name}-{rate}-{steps}-{seed}"
    train(run, [*overrides(arm, options), *rate_overrides(rate), *length_overrides(steps, seed)])
    kept = run / f"heldout-{options.num_texts}.json"
    if not kept.is_file():
        write_json(kept, heldout_loss(load(run, torch.bfloat16).base.float(), run, options))
    found: dict[str, float] = json.loads(kept.read_text())
    return run, found


def tune(arm: Arm, options: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Return the rate with the least held-out loss of the next token, and what each one gave.

    Both sides are tuned by the same figure, the one in which they are compared.
    """
    if len(options.rates) == 1:
        return options.rates[0], []
    tried = []
    for rate in options.rates:
        _, loss = trained(arm, options, rate, options.tuning_steps, 0)
        tried.append({"rate": rate, **loss})
        print(f"{arm.name} at {rate}: {loss['nats_per_token']:.4f} nats per token", flush=True)
    return min(tried, key=lambda each: float(each["nats_per_token"]))["rate"], tried


def load(run: Path, dtype: torch.dtype) -> Model:
    """Return a trained model: a plain folder without heads, or an export with them."""
    hardware.quiet_loading()
    export = run / "export"
    if (export / "model.safetensors").is_file() and "format_version" in json.loads(
        (export / "config.json").read_text()
    ):
        found = load_export(export, dtype=dtype, device="cpu")
        return Model(found.base, found.heads, found.tokenizer)
    base = load_base_model(str(export), dtype=dtype, device="cpu")
    return Model(base, None, load_tokenizer(str(export)))


def texts_of(records: Sequence[Record], num_texts: int, most: int) -> list[tuple[Record, int]]:
    """Return the first records of at most ``most`` bytes, each with its number of bytes.

    Their token ids under any tokenizer are hardly more than their bytes: all models read them whole
    and in rows as long as those they were trained on.
    """
    found = []
    for record in records:
        parts = [each["content"] for each in record.get("messages", ())]
        parts += [record[key] for key in ("prompt", "completion", "text") if key in record]
        size = sum(len(part.encode()) for part in parts)
        if 0 < size <= most:
            found.append((record, size))
        if len(found) == num_texts:
            break
    return found


@torch.inference_mode()
def heldout_loss(base: PreTrainedModel, run: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the next token's mean loss on held-out texts, which are the same for all models.

    ``nats_per_token`` is over all tokens but each text's first, the template's own among them;
    ``bits_per_byte`` is the same total over the bytes of the texts themselves.
    """
    data: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml").data)
    records = load_records(DataConfig(**data), "heldout")
    encoder = Encoder(load_tokenizer(str(run / "export")))
    nats, tokens, size = 0.0, 0, 0
    for record, num_bytes in texts_of(records, options.num_texts, options.seq_len - 16):
        ids = torch.from_numpy(encoder(record).input_ids).long()[None]
        logits = base(input_ids=ids, use_cache=False).logits[0, :-1].float()
        nats += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
        size += num_bytes
    if not tokens:
        raise SystemExit(f"no held-out text of at most {options.seq_len - 16} bytes")
    return {
        "nats_per_token": round(nats / tokens, 5),
        "bits_per_byte": round(nats / math.log(2) / size, 5),
        "bytes_per_token": round(size / tokens, 4),
        "num_bytes": size,
    }


def check_same_texts(entries: Sequence[dict[str, Any]]) -> None:
    """Refuse to compare losses on other texts, or in other tokens of the same name.

    Raises:
        SystemExit: naming what differs.
    """
    for name in {"", *(entry["tokenizer"] for entry in entries)}:
        of = [entry["loss"] for entry in entries if name in ("", entry["tokenizer"])]
        for key in ("num_bytes", "bytes_per_token") if name else ("num_bytes",):
            if len(found := {loss[key] for loss in of}) > 1:
                raise SystemExit(f"held-out texts differ: {name} {key} {sorted(found)}")


def prompts_of(model: Model, name: str, options: argparse.Namespace) -> list[Prompt]:
    """Return prompts of a file of tinycode's, in the model's own tokens and chat template."""
    found, _ = read_prompts(
        tinycode_dir() / name,
        model.tokenizer,
        options.num_prompts,
        max_length=int(model.base.config.max_position_embeddings) - options.max_new_tokens,
        device=model.base.device,
    )
    return found


def grow(model: Model, num_nodes: int, options: argparse.Namespace) -> tuple[Tree, dict[str, Any]]:
    """Return the tree to decode with, of the size that is fastest here where none is asked for."""
    assert model.heads is not None
    prompts = [prompt.input_ids for prompt in prompts_of(model, "calibration.jsonl", options)]
    eos, output = end_tokens(model.base, model.tokenizer), output_layer(model.base)
    texts = Texts(prompts, eos, options.max_new_tokens)
    if num_nodes:
        return grow_static(collect_hits(model.base, model.heads, output, texts), num_nodes), {}
    with torch.inference_mode():
        chosen = calibrate(model.base, model.heads, output, texts)
    return chosen.tree, chosen.measured_on


def methods_of(model: Model, tree: Tree | None, options: argparse.Namespace) -> list[Method]:
    """Return plain decoding, transformers' generate, prompt lookup, and the tree if there is one.

    ``make_methods`` is for models with heads.
    """
    base, limit = model.base, options.max_new_tokens
    eos, pad = end_tokens(base, model.tokenizer), model.tokenizer.pad_token_id
    if model.heads is not None and tree is not None:
        return make_methods(
            base, model.heads, output_layer(base), [tree], eos=eos, pad=pad, max_new_tokens=limit
        )
    lookup = NgramDrafter(max_ngram=LOOKUP_NGRAM, num_tokens=LOOKUP_TOKENS)
    return [
        plain_method(base, eos, limit),
        hf_generate_method(base, eos, pad, limit),
        drafted_method("prompt_lookup", base, lookup, eos, limit, tree_nodes=LOOKUP_TOKENS + 1),
    ]


def accept_length(
    model: Model, tree: Tree | None, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Decode once: per temperature tokens per forward of tree and prompt lookup, and ``rep8``."""
    prompts, found = prompts_of(model, "prompts.jsonl", options), {}
    methods = [m for m in methods_of(model, tree, options) if m.name != "hf_generate"]
    for temperature in TEMPERATURES:
        runs = clock(methods, prompts, temperature, repeats=1)
        figures: dict[str, Any] = {
            "rep8": round(statistics.mean(rep8(each.tokens) for each in runs["plain"].decoded), 4)
        }
        for method in methods[1:]:
            decoded = runs[method.name].decoded
            gained = [float(sum(each.accept_lengths)) for each in decoded]
            steps = [float(len(each.accept_lengths)) for each in decoded]
            figures[method.name] = {
                "accept_length": round(sum(gained) / max(sum(steps), 1), 4),
                "ci95": [round(bound, 4) for bound in ratio_ci95([gained], [steps])],
            }
        found[f"t{temperature:g}"] = figures
    return found


class Clocked:
    """A drafter, and the seconds that it takes at each step: to observe, then to propose."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps, self.deterministic = drafter, drafter.taps, drafter.deterministic
        self.seconds: list[float] = []
        self._observed = 0.0

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        return call(*arguments), time.perf_counter() - start

    def start(self, prefill: Prefill) -> Any:
        """Start, unclocked: that is part of the prefill."""
        self._observed = 0.0
        return self.drafter.start(prefill)

    def propose(self, state: Any) -> Candidates:
        """Propose; one step's figure is complete."""
        found, seconds = self._timed(self.drafter.propose, state)
        if self._observed:  # the first step of a text has observed nothing
            self.seconds.append(self._observed + seconds)
        assert isinstance(found, Candidates)
        return found

    def observe(self, state: Any, result: StepResult) -> Any:
        """Observe."""
        found, self._observed = self._timed(self.drafter.observe, state, result)
        return found

    def select(self, state: Any, rows: torch.Tensor) -> Any:
        """Keep some rows."""
        return self.drafter.select(state, rows)


@torch.inference_mode()
def step_milliseconds(
    model: Model, tree: Tree | None, options: argparse.Namespace
) -> dict[str, float]:
    """Return ``plain``, and with a tree ``heads`` (drafting) and ``verify`` (the step's rest).

    Milliseconds per step on the longest prompt, greedy, nothing ends the text: the median over
    repeats of each one's lower quartile.
    """
    prompts = prompts_of(model, "prompts.jsonl", options)
    ids = max((prompt.input_ids for prompt in prompts), key=lambda each: each.shape[1])
    limit = {"max_new_tokens": options.max_new_tokens}
    runs = [runner(model.base, None, ids, **limit)]
    drafter = None
    if model.heads is not None and tree is not None:
        made = static_drafter(model.base, model.heads, output_layer(model.base), tree)
        drafter = Clocked(made)
        runs += [runner(model.base, made, ids, **limit), runner(model.base, drafter, ids, **limit)]
    seconds = clock_steps(runs, repeats=options.repeats)
    plain, *others = (1e3 * statistics.median(each) for each in seconds)
    if drafter is None:
        return {"plain": round(plain, 4)}
    ordered = sorted(drafter.seconds) or [0.0]
    heads = 1e3 * ordered[len(ordered) // 4]
    found = {"plain": plain, "step": others[0], "verify": others[0] - heads, "heads": heads}
    return {name: round(value, 4) for name, value in found.items()}


def measure_speed(
    model: Model, tree: Tree | None, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Clock all methods; return rows as those of bench.json."""
    prompts, methods = prompts_of(model, "prompts.jsonl", options), methods_of(model, tree, options)
    clocked = {
        (temperature, 1): clock(methods, prompts, temperature, repeats=options.repeats)
        for temperature in TEMPERATURES
    }
    rounding = rounding_of(model.base, methods, prompts, clocked)
    return make_rows(model.base, methods, prompts, clocked, rounding)


def clock_training(arm: Arm, options: argparse.Namespace) -> dict[str, float]:
    """Return seconds per step of the later half of a short run, and the process's peak memory."""
    run = options.runs / f"{arm.name}-clock"
    steps = [f"steps={options.clock_steps}", "log.every=2", "optim.warmup_steps=2", "seed=0"]
    train(run, [*overrides(arm, options), *rate_overrides(options.rates[0]), *steps])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "train/tokens_per_second" in line]
    tokens = options.rows * options.seq_len
    later = [tokens / line["train/tokens_per_second"] for line in lines[len(lines) // 2 :]]
    return {
        "seconds_per_step": round(statistics.median(later), 4),
        "peak_memory": max(line["train/peak_memory"] for line in lines),
    }


def measure(
    entry: dict[str, Any], run: Path, num_nodes: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Add what decoding with one model gives to its entry."""
    dtype = hardware.pick_dtype(options.dtype, torch.device("cpu"))
    model, tree = load(run, dtype), None
    entry["parameters"] = sum(
        each.numel()
        for part in (model.base, model.heads)
        if part is not None
        for each in part.parameters()
    )
    if model.heads is not None:
        tree, entry["calibration"] = grow(model, num_nodes, options)
        entry["tree"] = tree.to_json()
        entry["num_nodes"] = tree.num_nodes
    entry["accept"] = accept_length(model, tree, options)
    if entry["seed"] == options.seeds[0] and options.repeats:
        entry["step_ms"] = step_milliseconds(model, tree, options)
        entry["rows"] = measure_speed(model, tree, options)
    return entry


def table(entries: Sequence[dict[str, Any]], clocked: dict[str, Any]) -> str:
    """Return the results as a table in Markdown: means over seeds, speeds of the first one."""
    head = (
        "| model | parameters | nats per token | bits per byte | tree | T=0: tokens per forward"
        " | speed-up | lookup | rep8 | T=1: tokens per forward | speed-up | lookup"
        " | plain / verify / heads, ms | per token per forward | training: s per step, MiB |"
    )
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for name in dict.fromkeys(entry["arm"] for entry in entries):
        of = [entry for entry in entries if entry["arm"] == name]
        first = of[0]
        speeds = {
            row["temperature"]: row for row in first.get("rows", ()) if row["method"] == "tree"
        }
        cells = [name, f"{first['parameters'] / 1e6:.2f} M"]
        cells += [spread([each["loss"][key] for each in of], 3) for key in LOSSES]
        cells.append(str(first.get("num_nodes", "")))
        for temperature in TEMPERATURES:
            accept = [each["accept"][f"t{temperature:g}"] for each in of]
            drafted = [each["tree"]["accept_length"] for each in accept if "tree" in each]
            row = speeds.get(temperature)
            lookup = statistics.mean(each["prompt_lookup"]["accept_length"] for each in accept)
            cells += [spread(drafted, 2) if drafted else "1", speedup(row), f"{lookup:.2f}"]
            if temperature == 0:
                cells.append(f"{statistics.mean(each['rep8'] for each in accept):.2f}")
        ms = first.get("step_ms", {})
        cells.append(
            " / ".join(f"{ms[key]:.2f}" for key in ("plain", "verify", "heads") if key in ms)
        )
        cells.append(
            f"{speeds[0]['speedup_vs_plain'] / speeds[0]['accept_length']:.2f}" if speeds else ""
        )
        training = clocked.get(name)
        cells.append(
            f"{training['seconds_per_step']:.2f}, {training['peak_memory'] / 2**20:.0f}"
            if training
            else ""
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


LOSSES = ("nats_per_token", "bits_per_byte")


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean with the least and the most, where there are several."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def speedup(row: dict[str, Any] | None) -> str:
    """Return a row's speed-up with its interval."""
    if row is None:
        return ""
    low, high = row["speedup_vs_plain_ci95"]
    return f"{row['speedup_vs_plain']:.2f}x ({low:.2f}-{high:.2f})"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "mtp_table")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "mtp_table.json")
    parser.add_argument("--tokenizers", nargs="+", default=["byte", "bpe"], choices=list(HEADS))
    parser.add_argument("--heads", type=int, nargs="+", help="n; byte: 2 4 8, bpe: 2 4")
    parser.add_argument("--variants", nargs="+", default=["parallel"], choices=VARIANTS)
    parser.add_argument("--arms", nargs="*", help="only these, as byte-n1 or byte-n4-parallel")
    parser.add_argument("--train-only", action="store_true", help="measure later, when it is quiet")
    parser.add_argument("--clock", action="store_true", help="only clock the training of each arm")
    parser.add_argument("--layers", type=int, default=14, help="of every model, heads included")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--rows", type=int, default=16, help="per step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tuning-steps", type=int, default=200)
    parser.add_argument("--clock-steps", type=int, default=24)
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="one: it is not tuned")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bpe-size", type=int, default=4096)
    parser.add_argument("--data", nargs="+", default=list(CORPUS), help="settings of the records")
    parser.add_argument("--num-texts", type=int, default=400, help="held-out, for the loss")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=0, help="of the trees; 0: the fastest here")
    parser.add_argument("--dtype", default="auto", help="of decoding")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of the clocks; 0: accept length only"
    )
    options = parser.parse_args(argv)
    options.runs = options.runs.resolve()
    most = max(options.heads or [each for name in options.tokenizers for each in HEADS[name]])
    if not 1 < min(options.heads or [2]) <= most < options.layers:
        parser.error(
            f"--heads must be from 2 to below --layers {options.layers}, got {options.heads}"
        )
    if not options.repeats and not options.nodes:
        parser.error("--repeats 0 needs --nodes: the fastest size is found by clocks")
    if not options.out.parent.is_dir():
        parser.error(f"--out is {options.out}, but there is no folder {options.out.parent}")
    if not arms(options):
        parser.error(f"--arms names none of these models: {options.arms}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, train, measure, write."""
    options = parse(argv)
    options.runs.mkdir(parents=True, exist_ok=True)
    kept = options.runs / "clock.json"
    clocked = json.loads(kept.read_text())["training"] if kept.is_file() else {}
    if options.clock:
        clocked |= {arm.name: clock_training(arm, options) for arm in arms(options)}
        write_json(kept, {"environment": hardware.environment(), "training": clocked})
        print(json.dumps(clocked, indent=1))
        return
    entries: list[tuple[dict[str, Any], Path]] = []
    for arm in arms(options):
        rate, tried = tune(arm, options)
        for seed in options.seeds:
            run, loss = trained(arm, options, rate, options.steps, seed)
            entry = {
                "arm": arm.name,
                "tokenizer": arm.tokenizer,
                "num_heads": arm.num_heads,
                "variant": arm.variant,
                "seed": seed,
                "rate": rate,
                "tried": tried,
                "loss": loss,
            }
            entries.append((entry, run))
            print(f"{arm.name} seed {seed}: {loss['bits_per_byte']:.4f} bits per byte", flush=True)
    check_same_texts([entry for entry, _ in entries])
    if options.train_only:
        return
    hardware.pin_threads(0)
    num_nodes = dict.fromkeys((entry["arm"] for entry, _ in entries), options.nodes)
    for entry, run in entries:
        start = time.perf_counter()
        measure(entry, run, num_nodes[entry["arm"]], options)
        # the fastest size is clocked with the first seed; the others' trees are as large
        num_nodes[entry["arm"]] = max(2, entry.get("num_nodes", 0))
        print(f"{entry['arm']} seed {entry['seed']}: {time.perf_counter() - start:.0f} s")
    rows = [entry for entry, _ in entries]
    hidden = ("runs", "out", "train_only", "clock", "arms")
    settings = {key: value for key, value in vars(options).items() if key not in hidden}
    settings |= {"common": list(COMMON), "tokens": options.steps * options.rows * options.seq_len}
    write_json(
        options.out,
        {
            "environment": hardware.environment(),
            "settings": settings,
            "training": clocked,
            "rows": rows,
        },
    )
    print(table(rows, clocked))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
