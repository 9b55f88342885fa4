"""Train and measure again all that BENCHMARKS.md reports: ``make bench-full``, about a day.

    python scripts/bench_full.py --list
    python scripts/bench_full.py [--resume] [--only NAME ...]

Parts run in order, trainings first; what is done is written down after each, and ``--resume`` goes
on behind it. Runs go to ``--runs``, figures to benchmarks/, where the old ones are replaced; the
pages are then written from them by ``scripts/render.py``. Other seeds of the machine give other
figures: what BENCHMARKS.md says in words has to be read again by somebody.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a test imports this from elsewhere

from bench_parts import ROOT, Part, chosen, read_record, run_parts, table
from bench_readme import FOLDER, RECORD, readme_parts

RUNS = "runs/full"
CORPUS = (
    "data=pycode",
    "data.packages=[numpy,accelerate,huggingface_hub,hydra,omegaconf]",
    "data.max_records=6000",
    "data.rows=8",
)
SHORT = ("optim=muon", "optim.schedule=wsd", "optim.decay_fraction=0.5", "autocast=bfloat16")
DISTILL = ("+recipe=distill", "data.documents=0", "evaluate.num_prompts=2", "optim.warmup_steps=50")
UNSEEN = 48  # prompts that the table of the medusa2 section shows: the others are unseen
HYDRA = "tinycode, Hydra heads, CPU: the quickstart"
HEADS = "Ways to train heads, on equal terms"
MEDUSA2 = "tinycode, medusa2, CPU"
DRAFTS = "Draft models: losses, data, and what they predict"
DRAFTERS = "All drafters in one process"
MTP = "Multi-token prediction from scratch: bytes and BPE"


def full_parts(runs: str = RUNS) -> list[Part]:
    """Return all parts; runs go to the folder ``runs``, relative to the repository."""

    def export(name: str) -> str:
        return f"{runs}/{name}/export"

    def training(
        name: str, minutes: float, *settings: str, trees: tuple[str, ...] | None = None
    ) -> Part:
        # without checkpoints, resume=auto starts from the beginning
        command = ("-m", "specheads.train", *settings, f"run_dir={runs}/{name}", "resume=auto")
        commands = [command]
        if trees is not None:
            commands.append(("-m", "specheads.tree_search", f"checkpoint={export(name)}", *trees))
        outputs = (f"{export(name)}/config.json", f"{runs}/{name}/metrics.jsonl")
        return Part(f"train_{name}", tuple(commands), outputs, minutes)

    def bench(
        name: str,
        run: str,
        minutes: float,
        section: str,
        *settings: str,
        needs: tuple[str, ...] = (),
    ) -> Part:
        out = f"benchmarks/{name}.json"
        command = ("-m", "specheads.bench", f"checkpoint={export(run)}", *settings, f"out={out}")
        needed = tuple(f"train_{each}" for each in (run, *needs))
        return Part(name, (command,), (out,), minutes, needed, sections=(section,))

    def script(
        name: str,
        minutes: float,
        section: str,
        *commands: tuple[str, ...],
        needs: tuple[str, ...] = (),
    ) -> Part:
        outputs = (f"benchmarks/{name}.json",)
        sections = (section,) if section else ()
        return Part(name, commands, outputs, minutes, needs, sections=sections)

    unseen = f"{runs}/unseen.jsonl"
    table_sizes = (
        *("--layers", "12", "--hidden", "128", "--rows", "8", "--seq-len", "256"),
        *("--steps", "300", "--tuning-steps", "80", "--num-prompts", "24", "--repeats", "2"),
        *("--max-new-tokens", "96", "--runs", f"{runs}/mtp_table", "--arms", "byte-n1"),
        *("byte-n4-parallel", "byte-n8-parallel", "bpe-n1", "bpe-n4-parallel"),
    )
    tuned = ("--rates", "3e-3", "6e-3", "1.2e-2")
    heads = ("scripts/bench_medusa.py", "--runs", f"{runs}/table")
    heads += ("--regenerated", f"{runs}/own_answers.jsonl")
    drafts = ("scripts/bench_distill.py", "--runs", f"{runs}/distill_table")
    drafts += ("--answers", f"{runs}/answers_t1.jsonl")
    whole = ("num_prompts=48", "max_new_tokens=128", "repeats=3")
    trainings = [
        training(
            "hydra",
            8,
            "+recipe=hydra",
            trees=("num_prompts=24", "num_measured=24", "max_new_tokens=64", "max_nodes=32"),
        ),
        training(
            "medusa1",
            4,
            "+recipe=medusa1",
            *CORPUS,
            *SHORT,
            "optim.lr=1.2e-2",
            "heads.num_heads=4",
            "steps=300",
            "evaluate.num_prompts=12",
            "evaluate.max_new_tokens=64",
        ),
        training("medusa2", 12, "+recipe=medusa2", trees=()),
        training("distill", 15, *DISTILL, *CORPUS, "steps=700", "optim.lr=6e-3"),
        training(
            "draft128",
            15,
            *(*DISTILL, *CORPUS, "data.rows=2", "draft.hidden=128", "steps=1200", "optim.lr=3e-3"),
        ),
        training("mtp", 30, "+recipe=mtp", "data=pycode", "tokenizer=byte", "mtp.num_heads=8"),
        training(
            "mtp_bpe",
            20,
            *("+recipe=mtp", "data=pycode", "tokenizer=bpe", "mtp.num_heads=4"),
            *("mtp.lm_head=shared", "steps=600"),
        ),
    ]
    copies = [
        Part(
            f"{folder}_run",
            tuple(
                (
                    *("scripts/bench_full.py", "--copy"),
                    *(f"{runs}/{run}/{file}", f"benchmarks/{folder}/{file}"),
                )
                for file in ("config.yaml", "metrics.jsonl")
            ),
            tuple(f"benchmarks/{folder}/{file}" for file in ("config.yaml", "metrics.jsonl")),
            0,
            (f"train_{run}",),
            sections=(MTP,),
        )
        for folder, run in (("mtp_byte", "mtp"), ("mtp_bpe", "mtp_bpe"))
    ]
    benches = [
        bench("tinycode_hydra", "hydra", 6, HYDRA, *whole),
        bench("tinycode_side_medusa2", "medusa2", 1.5, HYDRA, "num_prompts=24", "repeats=1"),
        bench("tinycode_side_hydra", "hydra", 1.5, HYDRA, "num_prompts=24", "repeats=1"),
        bench("tinycode_medusa2", "medusa2", 6, MEDUSA2, *whole),
        Part(
            "tinycode_medusa2_trees",
            (
                (
                    *("scripts/bench_full.py", "--measured", export("medusa2")),
                    "benchmarks/tinycode_medusa2_trees.json",
                ),
            ),
            ("benchmarks/tinycode_medusa2_trees.json",),
            0,
            ("train_medusa2",),
            sections=(MEDUSA2,),
        ),
        Part(
            "tinycode_medusa2_quality",
            (
                (
                    *("-m", "specheads.quality", f"checkpoint={export('medusa2')}"),
                    "out=benchmarks/tinycode_medusa2_quality.json",
                ),
            ),
            ("benchmarks/tinycode_medusa2_quality.json",),
            1,
            ("train_medusa2",),
            sections=(MEDUSA2,),
        ),
        Part(
            "tinycode_medusa2_unseen",
            (
                ("scripts/bench_full.py", "--unseen", unseen),
                (
                    *("-m", "specheads.bench", f"checkpoint={export('medusa2')}"),
                    *(f"prompts={unseen}", "num_prompts=48", "repeats=1"),
                    "out=benchmarks/tinycode_medusa2_unseen.json",
                ),
            ),
            ("benchmarks/tinycode_medusa2_unseen.json",),
            3,
            ("train_medusa2",),
            sections=(MEDUSA2,),
        ),
        bench(
            "tinycode_medusa2_batches",
            "medusa2",
            6,
            MEDUSA2,
            *("num_prompts=48", "repeats=1", "batch_sizes=[1,2,4,8]"),
        ),
        bench(
            "tinycode_medusa2_compiled",
            "medusa2",
            6,
            MEDUSA2,
            *("num_prompts=24", "repeats=2", "decode.compile=true"),
        ),
        bench("tinycode_medusa2_float32", "medusa2", 3, MEDUSA2, *("dtype=float32", "repeats=1")),
        bench(
            "tinycode_drafters",
            "medusa1",
            19,
            DRAFTERS,
            f"exports=[{export('hydra')}]",
            "drafters=[draft_tree,lookahead,suffix,heads+suffix,draft+suffix]",
            f"decode.draft={export('distill')}",
            *("decode.draft_tokens=4", "num_prompts=48", "repeats=2"),
            needs=("hydra", "distill"),
        ),
        bench(
            "mtp_byte/bench_hybrid",
            "mtp",
            6,
            DRAFTERS,
            *("drafters=[suffix,heads+suffix]", "num_prompts=24", "repeats=2"),
        ),
        bench("mtp_byte/bench", "mtp", 7, MTP, *whole, "dtype=bfloat16"),
        bench("mtp_byte/bench_fp32", "mtp", 3, MTP, *whole[:2], "repeats=1", "dtype=float32"),
        bench(
            "mtp_bpe/bench",
            "mtp_bpe",
            4,
            MTP,
            *("num_prompts=48", "max_new_tokens=64", "repeats=2", "dtype=bfloat16"),
        ),
        bench(
            "mtp_bpe/bench_fp32",
            "mtp_bpe",
            2,
            MTP,
            *("num_prompts=48", "max_new_tokens=64", "repeats=1", "dtype=float32"),
        ),
    ]
    programs = [
        script(
            "tinycode_typical",
            6,
            HYDRA,
            (
                *("scripts/bench_typical.py", "--checkpoint", export("hydra")),
                *("--out", "benchmarks/tinycode_typical.json"),
            ),
            needs=("train_hydra",),
        ),
        script(
            "tinycode_step",
            8,
            MEDUSA2,
            (
                *("scripts/bench_step.py", "--checkpoint", export("medusa2")),
                *("--out", "benchmarks/tinycode_step.json"),
            ),
            needs=("train_medusa2",),
        ),
        script("tinycode_heads", 270, HEADS, (*heads, "--train-only"), (*heads, "--clock"), heads),
        script(
            "tinycode_distill",
            270,
            DRAFTS,
            (*drafts, "--train-only"),
            (*drafts, "--out", "benchmarks/tinycode_distill.json"),
        ),
        script(
            "tinycode_compare",
            5,
            DRAFTS,
            (
                *("-m", "specheads.compare", "model=tinycode"),
                f"candidates=[{export('distill')},{export('draft128')}]",
                *("temperature=1", "out=benchmarks/tinycode_compare.json"),
            ),
            needs=("train_distill", "train_draft128"),
        ),
        script(
            "tinycode_adaptive",
            12,
            DRAFTS,
            (
                *("scripts/bench_adaptive.py", "--draft", export("distill")),
                *("--out", "benchmarks/tinycode_adaptive.json"),
            ),
            needs=("train_distill",),
        ),
        script(
            "mtp_table",
            110,
            "Predicting one token or several, on equal terms",
            ("scripts/bench_mtp.py", *table_sizes, *tuned, "--train-only"),
            ("scripts/bench_mtp.py", *table_sizes, "--rates", "6e-3", "--clock"),
            ("scripts/bench_mtp.py", *table_sizes, *tuned),
        ),
        script(
            "memory",
            5,
            "Memory and time of a training step",
            (
                *("scripts/bench_memory.py", "--threads", "1", "--repeats", "3"),
                *("--out", "benchmarks/memory.json"),
            ),
        ),
        script(
            "mtp_memory",
            3,
            "Memory of multi-token prediction",
            (
                "scripts/bench_mtp_memory.py",
                "--threads",
                "1",
                "--out",
                "benchmarks/mtp_memory.json",
            ),
        ),
        script(
            "train",
            3,
            "Training beside the reference loss",
            ("scripts/bench_train.py", "--repeats", "3", "--out", "benchmarks/train.json"),
        ),
        script(
            "features",
            4,
            "Training from stored hidden states",
            ("scripts/bench_features.py", "--out", "benchmarks/features.json"),
        ),
        script(
            "zero",
            8,
            "Memory and time of ZeRO",
            ("scripts/bench_zero.py", "--out", "benchmarks/zero.json"),
        ),
        script(
            "recipes",
            0,
            HYDRA,
            (
                *("scripts/recipe_costs.py", f"{runs}/hydra", f"{runs}/medusa2", f"{runs}/distill"),
                *(f"{runs}/mtp", f"{runs}/mtp_bpe", "--out", "benchmarks/recipes.json"),
            ),
            needs=tuple(f"train_{n}" for n in ("hydra", "medusa2", "distill", "mtp", "mtp_bpe")),
        ),
        script(
            "first_hour",
            6,
            "",
            (
                *("scripts/new_user.py", "--json", "benchmarks/first_hour.json"),
                *("--out", "docs/first_hour.md"),
            ),
        ),
        script(
            "kill_resume",
            12,
            "",
            ("scripts/kill_resume.py", "--json", "benchmarks/kill_resume.json"),
        ),
        script(
            "kill_resume_two_ranks",
            15,
            "",
            (
                *("scripts/kill_resume.py", "--ranks", "2", "--deepspeed", "zero2"),
                *("--json", "benchmarks/kill_resume_two_ranks.json"),
            ),
        ),
        script("chaos", 4, "", ("scripts/chaos.py", "--json", "benchmarks/chaos.json")),
        script(
            "architectures",
            8,
            "",
            (
                *("scripts/sweep_architectures.py", "--json", "benchmarks/architectures.json"),
                *("--page", "docs/architectures.md"),
            ),
        ),
    ]
    readme = readme_parts()
    last = Part(
        "readme",
        (("scripts/bench_readme.py", "--resume"),),
        (f"{FOLDER}/{RECORD}", *(path for part in readme for path in part.outputs)),
        sum(part.minutes for part in readme),
        reads=tuple(dict.fromkeys(folder for part in readme for folder in part.reads)),
    )
    return [*trainings, *copies, *benches, *programs, last]


def write_unseen(path: Path) -> None:
    """Write the embedded prompts that a bench of ``UNSEEN`` of them does not decode."""
    lines = (ROOT / "data" / "tinycode" / "prompts.jsonl").read_text().splitlines()
    kinds = list(dict.fromkeys(json.loads(line)["kind"] for line in lines))
    seen: dict[str, int] = dict.fromkeys(kinds, 0)
    kept = []
    for line in lines:
        kind = json.loads(line)["kind"]
        seen[kind] += 1
        if seen[kind] > UNSEEN // len(kinds):
            kept.append(line)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in kept))


def write_measured(export: Path, path: Path) -> None:
    """Write what ``tree_search`` stored in an export: sizes, expectation and measurement."""
    found = json.loads((export / "config.json").read_text())["tree"]["measured_on"]
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Train, measure, write down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the parts, run nothing")
    parser.add_argument("--resume", action="store_true", help="keep parts that are done")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these alone")
    parser.add_argument("--runs", default=RUNS, help="folder of the trainings")
    parser.add_argument("--unseen", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measured", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--copy", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.unseen:
        write_unseen(args.unseen)
        return
    if args.measured:
        write_measured(*args.measured)
        return
    if args.copy:
        shutil.copyfile(*args.copy)
        return
    parts, record = full_parts(args.runs), ROOT / args.runs / "parts.json"
    if args.list:
        print(table(chosen(parts, args.only), read_record(record)))
        return
    if record.is_file() and not (args.resume or args.only):
        raise SystemExit(
            f"{record} is of an earlier bench-full: go on with --resume, or give other --runs="
        )
    if failed := run_parts(chosen(parts, args.only), record, resume=args.resume):
        raise SystemExit(f"failed: {', '.join(failed)}; go on with --resume")
    print("now write the figures into the pages: python scripts/render.py")


if __name__ == "__main__":
    main()
