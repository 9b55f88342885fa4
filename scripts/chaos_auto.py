"""Kill ``specheads auto`` again and again, and compare it with a run that was left alone.

    python scripts/chaos_auto.py --model smollm2 --minutes 10 --out chaos_auto.json

Kills with -9 come at random moments of every stage; each time the same command goes on. Two things
are decided by the clock, how many questions there are and how many steps: the run that is killed is
stopped where they were decided, and given those of the other, so that the two can be compared. Its
questions, answers, held-out questions and stored hidden states must be bit-equal to the other's,
and no stage that had ended may begin again. Whether the trained weights are equal is said as well.

The program ends with 1 if anything was lost, differed or was repeated.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import ROOT

STAGES = ("doctor", "first questions", "questions and answers", "features", "training", "figures")
DECIDED = {"first questions": "questions", "features": "steps"}  # stage -> what its end decides
DATA = ("answers.jsonl", "answers.jsonl.questions.jsonl", "heldout.jsonl", "features/**/*")
WEIGHTS = "training/export/*.safetensors"


@dataclass
class Settings:
    """What is tried.

    Attributes:
        folder: where both runs are left
        model: any chat model
        minutes: of each run
        kills: in all
        kind: of drafter; empty: what auto takes
        seed: of the moments
        out: write the JSON there
    """

    folder: Path
    model: str = "smollm2"
    minutes: float = 10
    kills: int = 10
    kind: str = ""
    seed: int = 0
    out: Path | None = None


class Auto:
    """The command in a folder of its own, started as often as needed."""

    def __init__(self, given: Settings, name: str) -> None:
        self.place, self.folder = given.folder, given.folder / "runs" / name
        self.place.mkdir(parents=True, exist_ok=True)
        self.command = [sys.executable, "-m", "specheads.auto", f"model={given.model}"]
        self.command += [f"minutes={given.minutes}", f"name={name}"]
        self.command += [f"kind={given.kind}"] if given.kind else []
        self.starts, self.repeated, self.before = 0, list[str](), set[str]()

    @property
    def state(self) -> dict[str, Any]:
        """What auto.json says; nothing before there is one."""
        path = self.folder / "auto.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    @property
    def ended(self) -> dict[str, float]:
        """Seconds of the stages that have ended."""
        return dict(self.state.get("seconds", {}))

    @property
    def log(self) -> Path:
        """Of the latest start."""
        return self.place / f"{self.folder.name}-{self.starts}.log"

    def start(self) -> None:
        """Start it, or go on with it."""
        self.before = set(self.ended)  # which this start is to pass over
        self.starts += 1
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, cwd=self.place, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    def begun(self, stage: str) -> bool:
        """Tell whether the latest start has begun a stage, not passed over it."""
        return any(
            line.startswith(f"specheads: {stage}: ") and "minutes left" in line
            for line in self.log.read_text(errors="replace").splitlines()
        )

    def finish(self) -> int:
        """Wait for its end; note which ended stages it began again."""
        code = self.process.wait()
        self.repeated += [stage for stage in self.before if self.begun(stage)]
        return code

    def kill(self) -> bool:
        """Kill it with all that it started; False if it had come to its end."""
        alive = self.process.poll() is None
        if alive:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.finish()
        return alive

    def digests(self, *patterns: str) -> dict[str, str]:
        """Return the digests of its files."""
        paths = {path for pattern in patterns for path in self.folder.glob(pattern)}
        return {
            str(path.relative_to(self.folder)): hashlib.sha256(in_order(path)).hexdigest()
            for path in sorted(paths)
            if path.is_file()
        }


def in_order(path: Path) -> bytes:
    """Return what a file holds; safetensors writes the keys of its metadata in any order."""
    content = path.read_bytes()
    if path.suffix != ".safetensors":
        return content
    end = 8 + int.from_bytes(content[:8], "little")
    return json.dumps(json.loads(content[8:end]), sort_keys=True).encode() + content[end:]


def left_alone(given: Settings) -> Auto:
    """Run it once, in one go."""
    run = Auto(given, "whole")
    run.start()
    if code := run.finish():
        raise SystemExit(f"the run that was left alone ended with {code}: see {run.log}")
    return run


def killed(given: Settings, whole: Auto) -> tuple[Auto, list[dict[str, Any]]]:
    """Run it with kills, some in every stage, and two where the clock has decided something."""
    draw, run, kills = random.Random(given.seed), Auto(given, "killed"), []
    free = max(given.kills - len(DECIDED), len(STAGES))
    extra = draw.choices(STAGES, [whole.ended[stage] for stage in STAGES], k=free - len(STAGES))
    for stage in STAGES:
        for _ in range(1 + extra.count(stage)):
            run.start()
            while not run.begun(stage) and run.process.poll() is None:
                time.sleep(0.05)
            moment = draw.uniform(0, 0.8 * whole.ended[stage] / (1 + extra.count(stage)))
            end = time.monotonic() + moment
            while time.monotonic() < end and stage not in run.ended:
                time.sleep(0.05)
            if run.kill():
                kills.append({"stage": stage, "seconds": round(moment, 1)})
                print(f"killed {kills[-1]}", flush=True)
        if decided := DECIDED.get(stage):
            run.start()
            while stage not in run.ended and run.process.poll() is None:
                time.sleep(0.01)
            run.kill()
            kills.append({"stage": stage, "seconds": "at its end"})
            state = run.state
            own, state["plan"][decided] = state["plan"][decided], whole.state["plan"][decided]
            (run.folder / "auto.json").write_text(json.dumps(state, indent=1) + "\n")
            print(f"{decided}: {own} of its own, {state['plan'][decided]} to compare", flush=True)
    run.start()
    if code := run.finish():
        raise SystemExit(f"the run that was killed ended with {code}: see {run.log}")
    return run, kills


def main() -> None:
    """Run, kill, compare."""
    given = harness.parse(Settings)
    given.folder = given.folder.absolute()
    whole = left_alone(given)
    print(f"left alone: {whole.ended}", flush=True)
    run, kills = killed(given, whole)
    mine, other = run.digests(*DATA), whole.digests(*DATA)
    differing = sorted(
        name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)
    )
    weights = run.digests(WEIGHTS) == whole.digests(WEIGHTS)
    found = {"kills": kills, "files": len(other), "differing": differing, "repeated": run.repeated}
    found |= {"same_weights": weights, "seconds": {"whole": whole.ended, "killed": run.ended}}
    print(f"{len(kills)} kills; {len(other)} files of data, differing: {differing or 'none'}")
    print(
        f"stages begun again: {run.repeated or 'none'}; weights {'equal' if weights else 'differ'}"
    )
    harness.write(given.out, harness.report(given, **found))
    raise SystemExit(bool(differing or run.repeated or not other))


if __name__ == "__main__":
    main()
