"""SmolLM2 with the heads that ship: ``make real``; such heads again: ``make real-train``.

    python scripts/real.py                      # an answer plain and drafted, and a short bench
    python scripts/real.py --train [--resume]   # the commands of real.toml, up to 100 minutes each

The base is fetched where it is not there yet. The bench asks one question of each kind of
data/real, greedily; the figures of record are those of ``make bench-real``.
"""

import subprocess
import sys
import time
from dataclasses import dataclass

import harness
from bench_real import QUESTIONS
from quickstart import clocked, methods_of, print_tables, run

from specheads.decoding.exported import load_subject
from specheads.measure.clock import prompts_of
from specheads.system import hardware

LIMIT = 100.0  # minutes that each part of the training may take
NUM_QUESTIONS, MAX_NEW_TOKENS = 8, 48
ANSWER = 128  # tokens of the answer that is decoded plainly and drafted
QUESTION = "Explain in simple words how a bicycle stays upright, and give an example."


@dataclass
class Settings(harness.PartsSettings):
    """What can be asked.

    Attributes:
        train: train the heads again
        checkpoint: what answers
    """

    train: bool = False
    checkpoint: str = "smollm2"


def train(given: Settings) -> None:
    """Run the parts of the training.

    Raises:
        SystemExit: if one failed, or took longer than it may.
    """
    parts = harness.read_parts(harness.ROOT / "scripts" / "real.toml")
    record = harness.ROOT / "runs" / "real" / "parts.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    if harness.perform(parts, given, record):
        took = {name: each["seconds"] / 60 for name, each in harness.read_record(record).items()}
        if late := [f"{name} {minutes:.0f}" for name, minutes in took.items() if minutes > LIMIT]:
            raise SystemExit(f"more than {LIMIT:g} minutes: {', '.join(late)}")


def show(checkpoint: str) -> None:
    """Decode an answer plainly and drafted, then clock a few questions.

    Raises:
        SystemExit: with its exit code, if a command failed.
    """
    run("-m", "specheads.doctor", "model=smollm2")
    start = time.perf_counter()  # the base has been fetched
    command = ["-m", "specheads.chat", f"checkpoint={checkpoint}", f"max_new_tokens={ANSWER}"]
    command += ["beside=true", "dtype=auto"]
    print("\n$ python", *command, f"\n> {QUESTION}", flush=True)
    told = subprocess.run([sys.executable, *command], input=QUESTION, text=True, check=False)
    if told.returncode:
        raise SystemExit(told.returncode)
    hardware.pin_threads(0)
    dtype = hardware.pick_dtype("auto", hardware.pick_device())
    subject = load_subject(checkpoint, dtype=dtype)
    if subject.export is None:
        raise SystemExit(f"{checkpoint} has no heads: there is nothing to measure")
    base, tokenizer = subject.base, subject.tokenizer
    prompts, _ = prompts_of(base, tokenizer, QUESTIONS, NUM_QUESTIONS, MAX_NEW_TOKENS)
    print(f"\n{len(prompts)} questions, up to {MAX_NEW_TOKENS} new tokens, greedy:", flush=True)
    found = clocked(methods_of(subject, MAX_NEW_TOKENS), prompts, 0.0)
    print_tables(found, {"all": [*range(len(prompts))]})
    print(f"\n{(time.perf_counter() - start) / 60:.1f} minutes. All figures: make bench-real")


def main() -> None:
    """Train, or show."""
    given = harness.parse(Settings)
    if given.train or given.list:
        train(given)
    else:
        show(given.checkpoint)


if __name__ == "__main__":
    main()
