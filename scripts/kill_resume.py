"""Kill a run with -9 again and again, resume it each time, and compare it with one left alone.

    python scripts/kill_resume.py
    python scripts/kill_resume.py --ranks 2 --deepspeed zero2 --json kills.json

The run is medusa2 with LoRA and dropout on a tiny random model: two stages, evaluations whose best
weights are kept, a checkpoint every two steps. A third of the kills comes while a checkpoint is
being written (proven by the half-written folder that is left), the others at random moments from
the start of the process on, all ranks at once. One process must end bit-identical to the run left
alone, weights and rows of metrics.jsonl; two ranks to 1e-6. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a clone need not be installed

from specheads.data.tokenizers import byte_tokenizer  # noqa: E402

# what a clock or the memory decides
MEASURED = re.compile(r"tokens_per_second|peak_memory|speedup|seconds|_ms|time")
MOMENTS = ("save", "step", "start")
LONGEST_SAVE = 0.05  # seconds after a save has begun within which the kill comes


@dataclass
class Kill:
    """One kill and what it left.

    Attributes:
        moment: save, step or start; where it was meant to come.
        step: of the last row of metrics.jsonl.
        checkpoint: step of the newest checkpoint, 0 for none.
        inside_save: whether a half-written checkpoint was left.
    """

    moment: str
    step: int
    checkpoint: int
    inside_save: bool


@dataclass
class Trial:
    """A kind of run, in processes of its own.

    Attributes:
        folder: where everything goes.
        ranks: processes.
        deepspeed: config group, e.g. zero2.
        steps: optimizer steps.
        kills: made so far.
    """

    folder: Path
    ranks: int
    deepspeed: str
    steps: int
    kills: list[Kill] = field(default_factory=list)

    def prepare(self) -> None:
        """Write a tiny model with its tokenizer, and records to train on."""
        torch.manual_seed(0)
        tokenizer = byte_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(self.folder / "model")
        tokenizer.save_pretrained(self.folder / "model")
        rows = [
            {"prompt": f"add({a}, {b}) is ", "completion": f"{a + b}, {'so ' * (a % 4)}done"}
            for a in range(12)
            for b in range(4)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self.folder / "data.jsonl").write_text(text, encoding="utf-8")

    def start(self, name: str) -> list[subprocess.Popen[bytes]]:
        """Start the processes of run ``name``, each with a file for what it prints."""
        command = [
            sys.executable, "-m", "specheads.train", "+recipe=medusa2", "name=kill",
            f"model={self.folder / 'model'}", "data=jsonl", f"data.path={self.folder}/data.jsonl",
            f"hydra.run.dir={self.folder / name}", f"steps={self.steps}", "warmup_heads=0.3",
            f"deepspeed={self.deepspeed}", "adapter=lora", f"optim.accumulation={4 // self.ranks}",
            "optim.warmup_steps=2", "data.seq_len=64", "data.rows=2", "heads.num_heads=2",
            "tree.choices=[[0],[1],[0,0]]", "evaluate.every=5", "evaluate.num_prompts=2",
            "evaluate.max_new_tokens=8", "evaluate.loss_rows=2", "log.every=1",
            "log.wandb=disabled", "checkpoint.every=2", "resume=auto",
            *(() if self.deepspeed == "none" else ("optim=adamw",)),  # ZeRO flattens matrices
        ]  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = []
        for rank in range(self.ranks):
            world = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks,
                "LOCAL_WORLD_SIZE": self.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                **({key: str(value) for key, value in world.items()} if self.ranks > 1 else {}),
            }  # fmt: skip
            with (self.folder / f"{name}-{rank}.log").open("ab") as out:
                started.append(
                    subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=ROOT)
                )
        return started

    def finish(self, name: str) -> float:
        """Let run ``name`` end by itself; return the seconds until its first step.

        Raises:
            RuntimeError: with what a process printed, if one fails.
        """
        processes, begin, first = self.start(name), time.monotonic(), 0.0
        try:
            while any(process.poll() is None for process in processes):
                if not first and self.last_step(name):
                    first = time.monotonic() - begin
                if time.monotonic() - begin > 600:
                    raise RuntimeError(f"not at its end after 600 s:\n{self.printed(name, 0)}")
                time.sleep(0.02)
            for rank, process in enumerate(processes):
                if code := process.wait():
                    printed = self.printed(name, rank)
                    raise RuntimeError(f"rank {rank} ended with {code}:\n{printed}")
        finally:
            for process in processes:
                process.kill()  # nothing, where it has ended
        return first

    def printed(self, name: str, rank: int) -> str:
        """Return the end of what a rank printed."""
        return (self.folder / f"{name}-{rank}.log").read_text(errors="replace")[-3000:]

    def hurt(self, name: str, moment: str, draw: random.Random, seconds: float) -> None:
        """Start run ``name``, kill all its processes at a moment, and record what that left.

        Args:
            name: of the run.
            moment: save, step or start.
            draw: for the exact moment.
            seconds: latest moment of a kill that is meant for the start.

        Raises:
            RuntimeError: if a process fails by itself.
        """
        run = self.folder / name
        checkpoints, metrics = run / "checkpoints", run / "metrics.jsonl"
        patience = seconds * draw.random()
        goal = self.newest_checkpoint(name) + draw.randint(1, 3)
        times = {path: path.stat().st_mtime_ns for path in checkpoints.glob(".step-*.tmp")}
        earlier = metrics.stat().st_ino if metrics.exists() else 0
        processes, begin = self.start(name), time.monotonic()
        try:
            while all(process.poll() is None for process in processes):
                if moment == "start" and time.monotonic() - begin > patience:
                    break
                # a resumed run puts the rows that it keeps into a new file
                begun = metrics.exists() and metrics.stat().st_ino != earlier
                if moment == "step" and begun and self.last_step(name) >= goal:
                    time.sleep(draw.uniform(0, 0.3))
                    break
                half = checkpoints.glob(".step-*.tmp")
                if moment == "save" and any(_changed(path, times) for path in half):
                    time.sleep(draw.uniform(0, LONGEST_SAVE))
                    break
                time.sleep(0.001 if moment == "save" else 0.01)
        finally:
            order = draw.sample(processes, len(processes))
            for process in order:
                process.send_signal(signal.SIGKILL)
            codes = [process.wait() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (0, -signal.SIGKILL):
                raise RuntimeError(f"rank {rank} ended with {code}:\n{self.printed(name, rank)}")
        if any(code == -signal.SIGKILL for code in codes):
            inside = any(_changed(path, times) for path in checkpoints.glob(".step-*.tmp"))
            left = self.newest_checkpoint(name)
            self.kills.append(Kill(moment, self.last_step(name), left, inside))

    def newest_checkpoint(self, name: str) -> int:
        """Return the step of the newest checkpoint, 0 without one."""
        found = (self.folder / name / "checkpoints").glob("step-*")
        return max((int(path.name.removeprefix("step-")) for path in found), default=0)

    def last_step(self, name: str) -> int:
        """Return the step of the last row of metrics.jsonl, 0 without one."""
        return max((row.get("step", 0) for row in self.rows(name)), default=0)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, without what a clock or the memory decides."""
        path = self.folder / name / "metrics.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            if line.endswith("}"):  # the last one may be on its way
                found.append({k: v for k, v in json.loads(line).items() if not MEASURED.search(k)})
        return found

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of the export: heads and tuned base."""
        export = self.folder / name / "export"
        base = load_file(export / "base" / "model.safetensors")
        return load_file(export / "model.safetensors") | {f"base.{k}": v for k, v in base.items()}


def _changed(path: Path, before: dict[Path, int]) -> bool:
    try:
        return path.stat().st_mtime_ns != before.get(path)
    except FileNotFoundError:
        return False


def differences(trial: Trial, tolerance: float) -> list[str]:
    """Return how the hurt run differs from the one left alone, one line each."""
    found = []
    whole, hurt = trial.weights("whole"), trial.weights("hurt")
    if whole.keys() != hurt.keys():
        found.append(f"tensors in one export only: {sorted(whole.keys() ^ hurt.keys())[:3]}")
    for name in whole.keys() & hurt.keys():
        furthest = float((whole[name].double() - hurt[name].double()).abs().max())
        if furthest > tolerance or whole[name].shape != hurt[name].shape:
            found.append(f"{name} differs by {furthest:.3g}")
    ours, theirs = trial.rows("whole"), trial.rows("hurt")
    if len(ours) != len(theirs):
        found.append(f"{len(theirs)} rows in metrics.jsonl, {len(ours)} without the kills")
    for one, other in zip(ours, theirs, strict=False):
        if one.keys() != other.keys():
            found.append(f"step {one['step']}: keys in one row only: {one.keys() ^ other.keys()}")
            continue
        for key, value in one.items():
            far = abs(value - other[key]) > tolerance * max(1.0, abs(value))
            if far or (tolerance == 0 and value != other[key]):
                found.append(f"step {one['step']}: {key} is {other[key]}, not {value}")
    return found


HEADER = "kill  meant for  at step  checkpoint left  inside a save"


def line(number: int, kill: Kill) -> str:
    """Return a line of the table."""
    inside = "yes" if kill.inside_save else "no"
    return f"{number:4d}  {kill.moment:9s}  {kill.step:7d}  {kill.checkpoint:15d}  {inside:>13s}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one trial; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--deepspeed", default="", help="default: none, or zero2 with more ranks")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="keep everything in this new folder")
    parser.add_argument("--json", help="write kills and differences to this file")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way
    folder = Path(given.out or tempfile.mkdtemp(prefix="kill-resume-"))
    folder.mkdir(parents=True, exist_ok=True)
    deepspeed = given.deepspeed or ("none" if given.ranks == 1 else "zero2")
    trial = Trial(folder.resolve(), given.ranks, deepspeed, given.steps)
    try:
        trial.prepare()
        seconds = 1.1 * trial.finish("whole")  # while it loads, and sometimes a little later
        draw = random.Random(given.seed)
        starts = 0
        print(HEADER, flush=True)
        while len(trial.kills) < given.kills and starts < 3 * given.kills:
            before = len(trial.kills)
            trial.hurt("hurt", MOMENTS[starts % len(MOMENTS)], draw, seconds)
            starts += 1
            for kill in trial.kills[before:]:
                print(line(len(trial.kills), kill), flush=True)
        trial.finish("hurt")
        found = differences(trial, 0.0 if given.ranks == 1 else 1e-6)
    finally:
        if not given.out:
            shutil.rmtree(folder)
    inside = sum(kill.inside_save for kill in trial.kills)
    if len(trial.kills) < given.kills or not inside:
        found.append(f"only {len(trial.kills)} kills, {inside} of them inside a save")
    tolerance = "bit-identical" if given.ranks == 1 else "equal to 1e-6"
    print(
        f"{given.ranks} ranks, deepspeed={deepspeed}: {len(trial.kills)} kills, {inside} inside a "
        f"save; weights and rows of metrics.jsonl {'differ' if found else tolerance}"
    )
    for difference in found[:20]:
        print(f"  {difference}")
    if given.json:
        report = {"kills": [asdict(kill) for kill in trial.kills], "differences": found}
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
