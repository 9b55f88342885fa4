"""Every kind of drafter on equal terms: the same base, texts, stored hidden states and minutes.

Each kind is trained for as many minutes, by the pace of a few steps on this machine, with that of
three learning rates whose short run is the most accurate on held-out text; the best kinds with
three seeds. All read one store of hidden states, made once. Chains and trees grown in each step are
decoded on a quarter of the questions; on them each kind's shape is chosen, the one with the most
tokens per second. Half of the questions, which no setting was looked at on, is what the clock and
the table's accept lengths are of.

What is finished lies in a file of its own (``--out``, a cell for each kind and seed) and is not
made again, so that the script can be stopped and started:

    python scripts/bench_equal.py --base smollm2 --train-only
    python scripts/bench_equal.py --base smollm2
    python scripts/bench_equal.py --base tinycode

A GPU trains as many steps as the minutes of another machine hold, if that one's ``*-pace.json`` lie
in the folder of the runs; copied back, the runs are measured where the pace was clocked.
"""

import json
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import harness
import torch
from bench_step import FORWARD, HEADS, Phases
from omegaconf import OmegaConf

from specheads.attention.tree import Tree
from specheads.config import DecodeConfig, TrainConfig
from specheads.config.compose import composed
from specheads.decoding.exported import (
    Subject,
    choose_drafter,
    exported_drafter,
    load_subject,
    num_parameters,
)
from specheads.decoding.loop import decode
from specheads.drafters.contract import Drafter
from specheads.drafters.heads import heads_drafter
from specheads.measure.bench import Contest
from specheads.measure.clock import Method, Prompt, prompts_of
from specheads.models.base import end_tokens, load_config
from specheads.models.checkpoint import read_config
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.training.setup import heads_of, load_base, load_data, read_data
from specheads.training.teachers import cached_features

CHAIN, NUM_NODES = "chain", (8, 16, 32)
DEPTH = 5  # of chains, and heads that every kind has
RESCORED = 4  # questions along which rounding is measured, which takes as long as decoding
PROFILED = 6  # questions on which the parts of a step are clocked
TEMPERATURES = (0.0, 1.0)
PROBE = 12  # steps whose pace decides how many fit into the minutes
DRAFT, LOOKUP = "draft", "prompt_lookup"
HELD = "heldout/head_0/top1"
TRAINING = (
    *("optim=muon", "optim.schedule=wsd", "optim.decay_fraction=0.5", "data.rows=8"),
    *("evaluate.num_prompts=2", "evaluate.minutes=0.1", "log.every=1", "log.wandb=disabled"),
    f"tree.num_nodes={NUM_NODES[0]}",
)


@dataclass
class Settings:
    """What is compared, and where the runs are.

    Attributes:
        base: smollm2 or tinycode
        kinds: only these
        seeds: of the runs
        num_prompts: half of them are reported on, a quarter chooses the shapes
        train_only: measure later, when it is quiet
        out: folder of the cells
    """

    base: Literal["smollm2", "tinycode"] = "smollm2"
    runs: Path = harness.ROOT / "runs" / "equal"
    out: Path = harness.ROOT / "benchmarks" / "equal"
    kinds: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    num_prompts: int = 96
    max_new_tokens: int = 64
    train_only: bool = False


@dataclass(frozen=True)
class Base:
    """What is particular to a base.

    Attributes:
        minutes: of each training, and of each that chooses a learning rate.
        data: the texts.
        kept: tokens that heads guess among; 0: all.
        rates: learning rates that are tried, with Muon and with AdamW.
        questions: that are decoded.
        draft: of the draft model.
    """

    minutes: tuple[float, float]
    data: tuple[str, ...]
    kept: int
    rates: tuple[tuple[str, ...], tuple[str, ...]]
    questions: Path
    draft: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of drafter.

    Attributes:
        name: of its row.
        words: the recipe, and what makes it this kind.
        muon: trained with Muon; else as its recipe says.
    """

    name: str
    words: tuple[str, ...]
    muon: bool = True


def bases() -> dict[str, Base]:
    """Return the bases."""
    data = harness.ROOT / "data"
    return {
        "smollm2": Base(
            (10, 2),
            ("model=smollm2", "data=jsonl", f"data.path={data / 'real' / 'answers.jsonl.gz'}"),
            8192,
            (("1e-3", "2e-3", "4e-3"), ("3e-4", "1e-3", "3e-3")),
            data / "real" / "questions.jsonl",
            ("draft.layers=2", "draft.start=base"),
        ),
        "tinycode": Base(
            (3, 0.5),
            harness.CORPUS,
            0,
            (("3e-3", "6e-3", "1.2e-2"), ("1e-3", "3e-3", "6e-3")),
            data / "tinycode" / "prompts.jsonl",
            ("draft.layers=1",),
        ),
    }


def kinds(base: Base) -> list[Kind]:
    """Return the kinds of drafters for a base."""
    medusa, heads = "+recipe=medusa1", f"heads.num_heads={DEPTH}"
    pruned = ("heads.lm_head=pruned", f"heads.num_kept={base.kept}")
    own = pruned if base.kept else ("heads.lm_head=own",)
    shared = ("heads.lm_head=shared_pruned", pruned[1]) if base.kept else ("heads.lm_head=shared",)
    return [
        Kind("medusa1", (medusa, heads, *own)),
        Kind("markov", (medusa, "heads=markov", heads, *own)),
        Kind("hydra_plus", (medusa, "heads=hydra_plus", heads, *own)),
        Kind(
            "mtp",
            ("+recipe=mtp_finetune", f"mtp.num_heads={DEPTH + 1}", "mtp.variant=sequential"),
            muon=False,
        ),
        Kind("eagle3", ("+recipe=eagle3", heads, *own)),
        Kind("dflash", ("+recipe=dflash", heads, *shared)),
        Kind("dspark", ("+recipe=dspark", heads, *shared)),
        Kind("block", ("+recipe=block", heads, *shared)),
        Kind(DRAFT, ("+recipe=distill", *base.draft)),
    ]


def words_of(kind: Kind, base: Base, runs: Path) -> list[str]:
    """Return the settings of a kind's trainings, but for steps, seed and learning rate."""
    given = [*kind.words, *base.data, *(TRAINING if kind.muon else TRAINING[3:])]
    # a processor without it takes many times as long for bfloat16 as for float32
    native = hardware.has_native_bfloat16()
    given += [] if native else ["model.dtype=float32", "autocast=none"]
    if kind.name == DRAFT:
        return [word for word in given if not word.startswith("tree.")]
    stored = f"features.dir={runs / 'features'}", "features.dtype=bfloat16"
    return [*given, *stored, *(["autocast=bfloat16"] if native else [])]


@cache
def store(base: Base, runs: Path) -> None:
    """Store the hidden states that all kinds read, unless they are there."""
    readers = [kind for kind in kinds(base) if kind.name not in (DRAFT, "mtp")]
    words = ["steps=1", f"run_dir={runs / 'unused'}", "optim.lr=1e-3"]
    asked = [composed("train", TrainConfig, [*words_of(k, base, runs), *words]) for k in readers]
    model, output, tokenizer = load_base(asked[0])
    taps = dict.fromkeys(tap for cfg in asked for tap in heads_of(cfg.heads, model, output).taps)
    data = load_data(asked[0], model, tokenizer, train_base=False, read=read_data(asked[0]))
    cached_features(asked[0], model, data, Told(), list(taps))


class Told:
    """What a store's progress is told to."""

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)

    def doing(self, what: str, share: float = 0.0) -> None:
        """Pass over what is said many times a second."""


def seconds_per_step(run: Path) -> float:
    """Return the median seconds of a step of a run that said each of them, the first left out."""
    data = OmegaConf.load(run / "config.yaml").data
    tokens = data["rows"] * data["seq_len"]
    pace = [line["train/tokens_per_second"] for line in harness.clocked_lines(run)][2:]
    return tokens / statistics.median(pace)


def trained(
    kind: Kind, base: Base, runs: Path, rate: str, minutes: float, seed: int
) -> tuple[Path, dict[str, Any]]:
    """Train a kind for some minutes into a folder of runs, and say how many steps these were."""
    words = words_of(kind, base, runs)

    def run(name: str, *length: str) -> Path:
        folder = runs / name
        if kind.name != DRAFT and not (folder / "export" / "config.json").is_file():
            store(base, runs)
        return harness.train(folder, [*words, f"optim.lr={rate}", *length])

    def clocked() -> float:
        probe = run(f"{kind.name}-probe", f"steps={PROBE}", "optim.warmup_steps=1")
        return seconds_per_step(probe.parent)

    # a file of its own, so that another machine can take the steps that this one's minutes hold
    pace = harness.kept(runs / f"{kind.name}-pace.json", clocked)
    steps = max(PROBE, int(60 * minutes / pace))
    name = f"{kind.name}-{rate}-{minutes:g}-{seed}"
    about = {"rate": rate, "steps": steps, "minutes": minutes}
    return run(name, *harness.training_length(steps, seed)), about


def opened(
    kind: Kind, export: Path, given: Settings, *, first: bool, dtype: str = "bfloat16"
) -> "Contender":
    """Load what was trained, and the questions that choose a shape or are reported on."""
    decode = DecodeConfig()
    if kind.name == DRAFT:
        # the heads that smollm2 ships with are no part of this
        subject = replace(load_subject(given.base, dtype=dtype), export=None)
        decode = replace(decode, drafter="draft", draft=str(export))
    else:
        subject = load_subject(str(export), dtype=dtype)
    some = questions(subject, given, first=first)
    return Contender(subject, decode, some, given.max_new_tokens)


def questions(subject: Subject, given: Settings, *, first: bool) -> list[Prompt]:
    """Return the questions that choose a shape, or those that are reported on."""
    path, count, limit = bases()[given.base].questions, given.num_prompts, given.max_new_tokens
    found, _ = prompts_of(subject.base, subject.tokenizer, path, count, limit)
    found.sort(key=lambda prompt: prompt.kind)  # so that each part has as many of every kind
    return found[0::4] if first else found[1::2]


def copied(given: Settings) -> dict[str, Any]:
    """Clock prompt lookup, which trains nothing, on the questions that are reported on."""
    subject = load_subject(given.base, dtype="bfloat16")
    contest = Contest.of(subject, given.max_new_tokens)
    methods = [each for each in contest.baselines() if each.name == LOOKUP]
    asked = questions(subject, given, first=False)
    return {
        "rows": Contender(subject, DecodeConfig(), asked, contest.max_new_tokens).clocked(methods)
    }


@dataclass(frozen=True)
class Contender:
    """A drafter that was loaded, and the questions that it is asked.

    Attributes:
        subject: its base, with its heads where it has any.
        decode: the draft model, if it is one.
        prompts: the questions.
        limit: new tokens of each.
    """

    subject: Subject
    decode: DecodeConfig
    prompts: Sequence[Prompt]
    limit: int

    @property
    def parameters(self) -> int:
        """Numbers that were trained."""
        export = self.subject.export
        if export is not None:
            return num_parameters(export.heads)
        return choose_drafter(self.subject, self.decode).extra_parameters

    def shapes(self) -> Mapping[str, tuple[Drafter, int]]:
        """Return what drafts with every shape of its guesses, and the most nodes of a step."""
        export = self.subject.export
        if export is None:
            chain = replace(self.decode, draft_tokens=DEPTH)
            found = {CHAIN: (chain, DEPTH + 1)} | {
                f"tree_{n}": (replace(self.decode, drafter="draft_tree", num_nodes=n), n)
                for n in NUM_NODES
            }
            return {
                name: (choose_drafter(self.subject, asked).drafter, nodes)
                for name, (asked, nodes) in found.items()
            }
        heads, output = export.heads, output_layer(export.base)
        tree = Tree.chain(min(DEPTH, heads.num_heads))
        straight = heads_drafter(export.base, heads, output, tree)
        grown = {n: exported_drafter(export, DecodeConfig(num_nodes=n)) for n in NUM_NODES}
        return {CHAIN: (straight, tree.num_nodes)} | {f"tree_{n}": (d, n) for n, d in grown.items()}

    def methods(self, *names: str) -> list[Method]:
        """Return shapes as methods of a bench: those named, in this order, or all."""
        contest, shapes = Contest.of(self.subject, self.limit), self.shapes()
        return [contest.ours(name, *shapes[name]) for name in names or shapes]

    def parts(self, shape: str) -> dict[str, float]:
        """Return the milliseconds of the base, the guesses and the loop in a greedy step."""
        (drafter, _), base = self.shapes()[shape], self.subject.base
        phases, ends = Phases(base.device), end_tokens(base, self.subject.tokenizer)
        for prompt in self.prompts[:PROFILED]:
            with phases.watching(base, drafter):
                decode(
                    base, drafter, prompt.input_ids, max_new_tokens=self.limit, eos_token_ids=ends
                )
        guesses = ("propose", "observe", HEADS)
        parts = [
            {"base": step[FORWARD], "guesses": sum(step[name] for name in guesses)}
            | {"step": step["step"]}
            for step in phases.steps
        ]
        found = {key: 1e3 * statistics.median(each[key] for each in parts) for key in parts[0]}
        return {**found, "loop": found["step"] - found["base"] - found["guesses"]}

    def chain(self, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """Return a chain's accept lengths by temperature, from ``rows`` where it is among them."""
        clocked = {
            heat: {"accept_length": row["accept_length"], "ci95": row["accept_length_ci95"]}
            for heat, of_heat in rows.items()
            for row in of_heat
            if row["method"] == CHAIN
        }
        if clocked:
            return clocked
        decoded = harness.accept_lengths(self.methods(CHAIN), self.prompts, TEMPERATURES)
        return {heat: figures[CHAIN] for heat, figures in decoded.items()}

    def clocked(self, methods: Sequence[Method]) -> dict[str, list[dict[str, Any]]]:
        """Clock plain decoding and shapes in turn; return rows of bench.json by temperature."""
        plain = Contest.of(self.subject, self.limit).ours()
        rows = harness.clocked_rows(
            self.subject.base, [plain, *methods], self.prompts, TEMPERATURES, 1, most_texts=RESCORED
        )
        by_heat: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_heat.setdefault(f"t{row['temperature']:g}", []).append(row)
        return by_heat


def best(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the method with the greatest product of its speed-ups at all temperatures."""
    product: dict[str, float] = {}
    for of_heat in rows.values():
        for row in of_heat:
            if row["method"] != "plain":
                name = row["method"]
                product[name] = product.get(name, 1.0) * row["speedup_vs_plain"]
    return max(product, key=lambda name: product[name])


def expected(run: Path) -> float:
    """Return a chain's accept length as a run's held-out accuracies have it, head by head."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    held = next(line for line in reversed(list(lines)) if "heldout/loss" in line or HELD in line)
    if HELD in held:
        right = [held[f"heldout/head_{i}/top1"] for i in range(DEPTH)]
    else:
        right = [held["heldout/top1"]] * DEPTH  # a draft model says one figure for all places
    return 1 + sum(accumulate(right, operator.mul))


def tried(kind: Kind, given: Settings, rate: str) -> float:
    """Return what a chain is expected to accept after a short training at a learning rate."""

    def length() -> float:
        base, runs = bases()[given.base], given.runs / given.base
        export, _ = trained(kind, base, runs, rate, base.minutes[1], given.seeds[0])
        return expected(export.parent)

    return harness.kept(given.runs / given.base / f"{kind.name}-rates" / f"{rate}.json", length)


def first_cell(kind: Kind, given: Settings) -> dict[str, Any]:
    """Return what was found with the first seed, whose rate and shape all seeds take, if any."""
    path = given.out / given.base / f"{kind.name}-0.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def chosen_rate(kind: Kind, given: Settings) -> tuple[str, dict[str, float]]:
    """Return the learning rate whose short run promises most, and what each of them gave."""
    rates = bases()[given.base].rates[0 if kind.muon else 1]
    lengths = first_cell(kind, given).get("tried") or {r: tried(kind, given, r) for r in rates}
    return max(lengths, key=lambda rate: lengths[rate]), lengths


def final(kind: Kind, given: Settings, seed: int) -> tuple[Path, dict[str, Any]]:
    """Train a kind for the whole time at its best rate; return the export, and what was tried."""
    rate, lengths = chosen_rate(kind, given)
    base, runs = bases()[given.base], given.runs / given.base
    export, length = trained(kind, base, runs, rate, base.minutes[0], seed)
    began = json.loads((export.parent / "provenance.json").read_text())[0]
    gpus = began["hardware"]["gpus"]
    about = {"kind": kind.name, "seed": seed, "tried": lengths, "trained_on": gpus or ["CPU"]}
    return export, {**about, **length}


def cell(kind: Kind, given: Settings, seed: int) -> dict[str, Any]:
    """Measure what was trained of a kind with a seed; its shape was chosen on other questions."""
    export, about = final(kind, given, seed)
    shape, chosen_on = first_cell(kind, given).get("shape"), {}
    if shape is None:

        def clocked() -> dict[str, list[dict[str, Any]]]:
            choosing = opened(kind, export, given, first=True)
            return choosing.clocked(choosing.methods())

        chosen_on = harness.kept(export.parent / "shapes.json", clocked)
        shape = best(chosen_on)
    reported = opened(kind, export, given, first=False)
    rows = reported.clocked(reported.methods(shape))
    taps = read_config(export).get("form", {}).get("taps", [-1]) if kind.name != DRAFT else []
    width = load_config(given.base).hidden_size
    stored = {*taps, -1} if taps else set()
    return {
        **about,
        "parameters": reported.parameters,
        "bytes_per_token": 2 * len(stored) * width,
        "shape": shape,
        "chosen_on": chosen_on,
        "rows": rows,
        "chain": reported.chain(rows),
        "parts_ms": reported.parts(shape),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Train, measure, write a cell each."""
    given = harness.parse(Settings, argv)
    given.runs.mkdir(parents=True, exist_ok=True)
    (given.runs / given.base).mkdir(exist_ok=True)
    base = bases()[given.base]
    hardware.pin_threads(0)
    torch.manual_seed(0)
    beside = given.out / given.base / f"{LOOKUP}.json"
    if not (given.train_only or beside.is_file()):
        harness.write(beside, harness.report(given, **copied(given)))
    for kind in kinds(base):
        if given.kinds and kind.name not in given.kinds:
            continue
        for seed in given.seeds:
            if given.train_only:
                final(kind, given, seed)
                continue
            path = given.out / given.base / f"{kind.name}-{seed}.json"
            if not path.is_file():
                harness.write(path, harness.report(given, **cell(kind, given, seed)))
            print(harness.describe(told(json.loads(path.read_text()))), flush=True)


def told(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of a cell: accept length and speed-up of the shape that was chosen."""
    lines: dict[str, Any] = {key: found[key] for key in ("kind", "seed", "shape", "steps", "rate")}
    for heat, rows in found["rows"].items():
        row = next(each for each in rows if each["method"] == found["shape"])
        lines[heat] = {key: row[key] for key in ("accept_length", "speedup_vs_plain")}
    return lines


if __name__ == "__main__":
    main()
