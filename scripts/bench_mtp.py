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

A look at what it does: --steps 4 --tuning-steps 2 --layers 3 --hidden 32
--arms byte-n1 byte-n2-parallel --seeds 0 --num-prompts 2 --max-new-tokens 16 --repeats 1.
"""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from bench_step import HEADS, Phases
from omegaconf import OmegaConf

from specheads.attention.tree import Tree
from specheads.config import DataConfig
from specheads.data.chat import Encoder
from specheads.data.load import load_records
from specheads.data.schema import Record
from specheads.decoding.costs import clock_steps
from specheads.decoding.exported import Subject, load_subject
from specheads.drafters.contract import Drafter
from specheads.drafters.heads import heads_drafter
from specheads.measure.calibrate import calibrate
from specheads.measure.clock import Prompt, prompts_of
from specheads.measure.hits import Texts, collect_hits, grow_static
from specheads.models.base import end_tokens, load_tokenizer
from specheads.models.mtp import VARIANTS
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.system.files import tinycode_dir

# tokenizer, n: tokens that are predicted at each position, and what the heads are
ARMS = (
    *("byte-n1", "byte-n2-parallel", "byte-n4-parallel", "byte-n8-parallel"),
    *("bpe-n1", "bpe-n2-parallel", "bpe-n4-parallel"),
)
TEMPERATURES = (0.0, 1.0)
COMMON = (
    *("autocast=bfloat16", "optim=muon", "optim.schedule=wsd", "optim.decay_fraction=0.4"),
    *("optim.weight_decay=0.01", "evaluate.every=0", "checkpoint.every=250", "log.wandb=disabled"),
)
# the recipe chooses a tree of its own at the end; the trees of this table are grown below
SHORT_END = ("evaluate.num_prompts=2", "evaluate.max_new_tokens=32", "tree.choices=[[0]]")

DRAFTING = (HEADS, "propose", "observe")  # phases of a step that are the heads'


@dataclass
class Settings:
    """What is compared, and where the runs are.

    Attributes:
        arms: as byte-n1, byte-n4-parallel, bpe-n2-causal or bpe-n2-sequential
        train_only: measure later, when it is quiet
        clock: only clock the training of each arm
        layers: of every model, heads included
        rows: per step
        rates: one: it is not tuned
        data: settings of the records
        num_texts: held-out, for the loss
        nodes: of the trees; 0: the fastest here
        dtype: of decoding
        repeats: of the clocks; 0: accept length only
    """

    runs: Path = harness.ROOT / "runs" / "mtp_table"
    out: Path = harness.ROOT / "benchmarks" / "mtp_table.json"
    arms: tuple[str, ...] = ARMS
    train_only: bool = False
    clock: bool = False
    layers: int = 14
    hidden: int = 192
    rows: int = 16
    seq_len: int = 256
    steps: int = 600
    tuning_steps: int = 200
    clock_steps: int = 24
    rates: tuple[str, ...] = ("1.5e-3", "3e-3", "6e-3")
    seeds: tuple[int, ...] = (0, 1, 2)
    bpe_size: int = 4096
    data: tuple[str, ...] = ("data=pycode", "data.documents=0")
    num_texts: int = 400
    num_prompts: int = 48
    max_new_tokens: int = 128
    nodes: int = 0
    dtype: str = "auto"
    repeats: int = 3

    def __post_init__(self) -> None:
        self.runs = self.runs.resolve()
        for tokenizer, num_heads, variant in map(parts_of, self.arms):
            known = tokenizer in ("byte", "bpe") and variant in ("", *VARIANTS)
            if not known or not 0 < num_heads < self.layers or (num_heads > 1) != bool(variant):
                raise ValueError(f"--arms are as {', '.join(ARMS)}, below --layers {self.layers}")
        if not self.repeats and not self.nodes:
            raise ValueError("--repeats 0 needs --nodes: the fastest size is found by clocks")


def parts_of(arm: str) -> tuple[str, int, str]:
    """Return an arm's tokenizer, number of heads n, and their variant, if there are several."""
    tokenizer, number, variant = [*arm.split("-"), ""][:3]
    return tokenizer, int(number.removeprefix("n")), variant


def overrides(arm: str, given: Settings) -> list[str]:
    """Return what trains ``arm``, but for rate, length and seed."""
    tokenizer, num_heads, variant = parts_of(arm)
    init = {
        "model_type": "llama",
        "vocab_size": 0,  # as many as the tokenizer has
        "hidden_size": given.hidden,
        "num_hidden_layers": given.layers,
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), max(1, given.hidden // 64)),
        "intermediate_size": -(-8 * given.hidden // 3 // 32) * 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": "false",
    }
    rows = [f"data.rows={given.rows}", f"data.seq_len={given.seq_len}", "data.growth=[]"]
    recipe = ["+recipe=pretrain"]
    if num_heads > 1:
        recipe = ["+recipe=mtp", f"mtp.num_heads={num_heads}", f"mtp.variant={variant}"]
        recipe += ["mtp.parity=true", "mtp.lm_head=shared", *SHORT_END]
    tokens = [f"tokenizer={tokenizer}", f"tokenizer_size={given.bpe_size}"]
    model = [f"++model.init.{key}={value}" for key, value in init.items()]
    return [*recipe, *tokens, *model, *given.data, *rows, *COMMON]


def rate_overrides(rate: str) -> list[str]:
    """Return one learning rate for all layers, those of the heads included."""
    return [f"optim.lr={rate}", f"optim.base_lr={rate}"]


def trained(arm: str, given: Settings, rate: str, steps: int, seed: int) -> tuple[Path, Any]:
    """Train one model; return its export and its held-out loss."""
    run = given.runs / f"{arm}-{rate}-{steps}-{seed}"
    length = harness.training_length(steps, seed)
    export = harness.train(run, [*overrides(arm, given), *rate_overrides(rate), *length])
    path = run / f"heldout-loss-{given.num_texts}.json"
    return export, harness.kept(path, partial(heldout_loss, export, given))


def tune(arm: str, given: Settings) -> tuple[str, list[dict[str, Any]]]:
    """Return the rate with the least held-out loss of the next token, and what each one gave.

    Both sides are tuned by the same figure, the one in which they are compared.
    """
    tried = []
    for rate in given.rates if len(given.rates) > 1 else ():
        _, loss = trained(arm, given, rate, given.tuning_steps, 0)
        tried.append({"rate": rate, **loss})
        print(f"{arm} at {rate}: {loss['nats_per_token']:.4f} nats per token", flush=True)
    best = min(tried, key=lambda each: each["nats_per_token"], default={"rate": given.rates[0]})
    return best["rate"], tried


def texts_of(records: Sequence[Record], num_texts: int, most: int) -> list[tuple[Record, int]]:
    """Return the first records of at most ``most`` bytes, each with its number of bytes.

    Their token ids under any tokenizer are hardly more than their bytes: all models read them whole
    and in rows as long as those they were trained on.
    """

    def size(record: Record) -> int:
        parts = [each["content"] for each in record.get("messages", ())]
        parts += [record[key] for key in ("prompt", "completion", "text") if key in record]
        return sum(len(part.encode()) for part in parts)

    sizes = ((record, size(record)) for record in records)
    return [each for each in sizes if 0 < each[1] <= most][:num_texts]


@torch.inference_mode()
def heldout_loss(export: Path, given: Settings) -> dict[str, float]:
    """Return the next token's mean loss on held-out texts, which are the same for all models.

    ``nats_per_token`` is over all tokens but each text's first, the template's own among them;
    ``bits_per_byte`` is the same total over the bytes of the texts themselves.
    """
    hardware.quiet_loading()
    base = load_subject(str(export), dtype="bfloat16", device="cpu").base.float()
    data: Any = OmegaConf.to_container(OmegaConf.load(export.parent / "config.yaml").data)
    records = load_records(DataConfig(**data), "heldout")
    encoder = Encoder(load_tokenizer(str(export)))
    nats, tokens, size = 0.0, 0, 0
    for record, num_bytes in texts_of(records, given.num_texts, given.seq_len - 16):
        ids = torch.from_numpy(encoder(record).input_ids).long()[None]
        logits = base(input_ids=ids, use_cache=False).logits[0, :-1].float()
        nats += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
        size += num_bytes
    if not tokens:
        raise SystemExit(f"no held-out text of at most {given.seq_len - 16} bytes")
    return {
        "nats_per_token": round(nats / tokens, 5),
        "bits_per_byte": round(nats / math.log(2) / size, 5),
        "bytes_per_token": round(size / tokens, 4),
        "num_bytes": size,
    }


def check_same_texts(rows: Sequence[dict[str, Any]]) -> None:
    """Refuse to compare losses on other texts, or in other tokens of the same name.

    Raises:
        SystemExit: naming what differs.
    """
    for name in {"", *(row["tokenizer"] for row in rows)}:
        of = [row["loss"] for row in rows if name in ("", row["tokenizer"])]
        for key in ("num_bytes", "bytes_per_token") if name else ("num_bytes",):
            if len(found := {loss[key] for loss in of}) > 1:
                raise SystemExit(f"held-out texts differ: {name} {key} {sorted(found)}")


def embedded_prompts(model: Subject, name: str, given: Settings) -> list[Prompt]:
    """Return prompts of a file of tinycode's, in the model's own tokens and chat template."""
    limits = given.num_prompts, given.max_new_tokens
    return prompts_of(model.base, model.tokenizer, tinycode_dir() / name, *limits)[0]


@torch.inference_mode()
def grow(model: Subject, num_nodes: int, given: Settings) -> tuple[Tree, dict[str, Any]]:
    """Return the tree to decode with, of the size that is fastest here where none is asked for."""
    prompts = [each.input_ids for each in embedded_prompts(model, "calibration.jsonl", given)]
    texts = Texts(prompts, end_tokens(model.base, model.tokenizer), given.max_new_tokens)
    heads = (model.base, model.export.heads, output_layer(model.base), texts)
    if num_nodes:
        return grow_static(collect_hits(*heads), num_nodes), {}
    found = calibrate(*heads)
    return found.tree, found.measured_on


@torch.inference_mode()
def step_milliseconds(
    model: Subject, tree: Tree | None, prompts: Sequence[Prompt], given: Settings
) -> dict[str, float]:
    """Return ``plain``, and with a tree ``heads`` (drafting) and ``verify`` (the step's rest).

    Milliseconds per step on the longest prompt, greedy, nothing ends the text: the median over
    repeats of each one's lower quartile.
    """
    ids = max((prompt.input_ids for prompt in prompts), key=lambda each: each.shape[1])
    how = {"repeats": given.repeats, "max_new_tokens": given.max_new_tokens}
    drafters: list[Drafter | None] = [None]
    if model.export is not None and tree is not None:
        output = output_layer(model.base)
        drafters.append(heads_drafter(model.base, model.export.heads, output, tree))
    clocked, _ = clock_steps(model.base, drafters, ids, **how)
    plain, *others = (1e3 * statistics.median(each) for each in clocked)
    found = {"plain": plain}
    if others:
        phases = Phases(ids.device)
        with phases.watching(model.base, drafters[1]):
            clock_steps(model.base, drafters[1:], ids, **how)
        drafting = sorted(sum(s[name] for name in DRAFTING) for s in phases.steps) or [0.0]
        heads = 1e3 * drafting[len(drafting) // 4]
        found |= {"step": others[0], "verify": others[0] - heads, "heads": heads}
    return {name: round(value, 4) for name, value in found.items()}


def clock_training(arm: str, given: Settings) -> dict[str, float]:
    """Return seconds per step of the later half of a short run, and the process's peak memory."""
    run = given.runs / f"{arm}-clock"
    steps = [f"steps={given.clock_steps}", "log.every=2", "optim.warmup_steps=2", "seed=0"]
    harness.train(run, [*overrides(arm, given), *rate_overrides(given.rates[0]), *steps])
    lines, tokens = harness.clocked_lines(run), given.rows * given.seq_len
    later = [tokens / line["train/tokens_per_second"] for line in lines[len(lines) // 2 :]]
    peak = max(line["train/peak_memory"] for line in lines)
    return {"seconds_per_step": round(statistics.median(later), 4), "peak_memory": peak}


def measure(row: dict[str, Any], export: Path, num_nodes: int, given: Settings) -> None:
    """Add what decoding with one model gives to its row."""
    dtype = hardware.pick_dtype(given.dtype, harness.CPU)
    model, tree = load_subject(str(export), dtype=dtype, device="cpu"), None
    parts = [model.base, *([model.export.heads] if model.export else [])]
    row["parameters"] = sum(each.numel() for part in parts for each in part.parameters())
    if model.export is not None:
        tree, row["calibration"] = grow(model, num_nodes, given)
        row |= {"tree": tree.to_json(), "num_nodes": tree.num_nodes}
    trees, heads = ([tree], model.export.heads) if model.export else ([], None)
    methods = harness.methods_of(model, heads, trees, given.max_new_tokens)
    prompts = embedded_prompts(model, "prompts.jsonl", given)
    ours = [method for method in methods if method.name != "hf_generate"]
    row["accept"] = harness.accept_lengths(ours, prompts, TEMPERATURES)
    if row["seed"] == given.seeds[0] and given.repeats:
        row["step_ms"] = step_milliseconds(model, tree, prompts, given)
        how = TEMPERATURES, given.repeats
        row["rows"] = harness.clocked_rows(model.base, methods, prompts, *how)


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, train, measure, write."""
    given = harness.parse(Settings, argv)
    given.runs.mkdir(parents=True, exist_ok=True)
    path = given.runs / "clock.json"
    training = json.loads(path.read_text())["training"] if path.is_file() else {}
    if given.clock:
        training |= {arm: clock_training(arm, given) for arm in given.arms}
        harness.write(path, {"environment": hardware.environment(), "training": training})
        print(json.dumps(training, indent=1))
        return
    rows, exports = [], []
    for arm in given.arms:
        rate, tried = tune(arm, given)
        for seed in given.seeds:
            export, loss = trained(arm, given, rate, given.steps, seed)
            found = {"seed": seed, "rate": rate, "tried": tried, "loss": loss}
            names = dict(zip(("tokenizer", "num_heads", "variant"), parts_of(arm), strict=True))
            rows.append({"arm": arm, **names, **found})
            exports.append(export)
            print(f"{arm} seed {seed}: {loss['bits_per_byte']:.4f} bits per byte", flush=True)
    check_same_texts(rows)
    if given.train_only:
        return
    hardware.pin_threads(0)
    num_nodes = dict.fromkeys((row["arm"] for row in rows), given.nodes)
    for row, export in zip(rows, exports, strict=True):
        start = time.perf_counter()
        measure(row, export, num_nodes[row["arm"]], given)
        # the fastest size is clocked with the first seed; the others' trees are as large
        num_nodes[row["arm"]] = max(2, row.get("num_nodes", 0))
        print(f"{row['arm']} seed {row['seed']}: {time.perf_counter() - start:.0f} s")
    about = {"common": COMMON, "tokens": given.steps * given.rows * given.seq_len}
    harness.publish(given, rows, about, training=training)


if __name__ == "__main__":
    main()
