"""What the faults of chaos.py share: tiny models and data, runs to hurt, and what they left.

Every run is ``python -m specheads.train`` in a process of its own, with a recipe file of the user's
that is medusa1 and, where the variable ``CHAOS`` says so, a slow disk, slow steps, or a record
whose loss is not finite. A run that was hurt is resumed and compared with one that was not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from chaos_runs import ROOT, Ended, Run, SmallDisk, Stable, Wrong
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.data.tokenizers import byte_tokenizer

STEPS, SAVED_EVERY = 40, 8
POISON = "pair/mul"  # the record whose loss can be made not finite
CHANGING = ("train/tokens_per_second", "train/peak_memory")  # from run to run
SETTINGS = [
    "name=chaos", f"steps={STEPS}", f"checkpoint.every={SAVED_EVERY}", "log.every=1",
    "log.wandb=disabled", "data=jsonl", "data.seq_len=64", "data.rows=2", "heads.num_heads=2",
    "loss.lambda_0=1.0", "optim.warmup_steps=1", "tree.choices=[[0],[1],[0,0]]",
    "evaluate.num_prompts=2", "evaluate.max_new_tokens=8", "evaluate.loss_rows=2",
]  # fmt: skip

RECIPE = '''"""Medusa-1, hurt as the variable CHAOS says, e.g. CHAOS=nan,fsync=0.2,step=0.1."""

import os
import time

import torch

from specheads.train import load_recipe
from specheads.training.objectives import HeadsObjective

wanted = dict(part.partition("=")[::2] for part in os.environ.get("CHAOS", "").split(",") if part)
plain, flush = HeadsObjective.forward, os.fsync


def forward(self, batch):
    time.sleep(float(wanted.get("step", 0)))
    loss, metrics = plain(self, batch)
    if self.training and POISON in batch["ids"]:
        if "nan" in wanted:
            loss = loss * float("nan")
        if "inf" in wanted:  # a finite loss with gradients that are not
            loss.register_hook(lambda grad: grad * float("inf"))
    return loss, metrics


def slow_flush(handle):
    time.sleep(float(wanted.get("fsync", 0)))
    flush(handle)


if wanted:
    HeadsObjective.forward, os.fsync = forward, slow_flush
run = load_recipe("medusa1")
'''.replace("POISON", repr(POISON))


@dataclass
class Seen:
    """A row of the table: what the user saw, with which exit code, and what was lost."""

    saw: str
    code: int | None
    lost: str


@dataclass
class Workshop:
    """What all faults use: a base model, records, and the runs that nobody hurt.

    Attributes:
        folder: where everything is written.
    """

    folder: Path
    whole: dict[int, Path] = field(default_factory=dict)  # by number of ranks
    lock: Lock = field(default_factory=Lock)
    stable: Stable = field(default_factory=Stable)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        sizes = {
            "vocab_size": 272, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        }  # fmt: skip
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(self.base)
        byte_tokenizer(512).save_pretrained(self.base)
        self.recipe.write_text(RECIPE)
        settings = self.folder / "conf" / "recipe" / "hurt.yaml"
        settings.parent.mkdir(parents=True)
        settings.write_text(f"# @package _global_\nrecipe: {self.recipe}\n")
        self.records.write_text("".join(json.dumps(row) + "\n" for row in records()))

    @property
    def base(self) -> Path:
        """The base model."""
        return self.folder / "base"

    @property
    def recipe(self) -> Path:
        """The user's own recipe."""
        return self.folder / "medusa1_hurt.py"

    @property
    def records(self) -> Path:
        """The records that are trained on."""
        return self.folder / "records.jsonl"

    def unhurt(self, ranks: int) -> Path:
        """Return the directory of a run that nothing happened to; trained once."""
        with self.lock:
            if ranks not in self.whole:
                lab = Lab(self, f"unhurt-{ranks}", ranks)
                lab.train().must(0)
                self.whole[ranks] = lab.run_dir
        return self.whole[ranks]


def records() -> list[dict[str, str]]:
    """Return 48 short records, of which one is ``POISON``."""
    names = ["add", "sub", "mul", "neg", "inc", "dec", "sqr", "idt"]
    names += [f"{name}{number}" for number in range(5) for name in names]
    return [
        {"id": f"pair/{n}", "prompt": f"def {n}(a, b):\n", "completion": f"    return {n} + a"}
        for n in names
    ]


class Lab:
    """One fault's own run directory, and how to start, resume and look at its run."""

    def __init__(self, shop: Workshop, name: str, ranks: int = 1) -> None:
        self.shop, self.ranks = shop, ranks
        self.folder = shop.folder / re.sub(r"\W+", "-", name)
        self.folder.mkdir()
        self.run_dir = self.folder / "run"
        self.runs: list[Run] = []
        self.disk: SmallDisk | None = None

    @property
    def seen(self) -> Path:
        """The run directory, as this process sees it."""
        return self.disk.inside / "run" if self.disk else self.run_dir

    def on_small_disk(self, size: str) -> SmallDisk:
        """Move the run directory, which does not exist yet, to a small disk."""
        self.disk = SmallDisk(self.folder / "disk", size)
        self.run_dir = self.disk.at / "run"
        return self.disk

    def start(self, *settings: str, **env: str) -> Run:
        """Start a training; ``env`` is added to the environment (an empty value removes)."""
        if self.ranks > 1:
            settings = ("deepspeed=zero2", *settings)
        arguments = ["--config-dir", str(self.shop.folder / "conf"), "+recipe=hurt", *SETTINGS]
        arguments += [f"hydra.run.dir={self.run_dir}"]
        named = {setting.partition("=")[0] for setting in settings}
        for key, value in (("model", self.shop.base), ("data.path", self.shop.records)):
            arguments += [f"{key}={value}"] if key not in named else []
        folder = str(Path(sys.executable).parent)
        variables = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true",
            "HF_HUB_OFFLINE": "1", "SPECHEADS_CACHE": str(self.shop.folder / "cache"),
            "PATH": os.pathsep.join([folder, os.environ.get("PATH", "")]),
            "TOKENIZERS_PARALLELISM": "false", **env,
        }  # fmt: skip
        variables = {key: value for key, value in variables.items() if value}
        log = self.folder / f"log-{len(self.runs)}"
        arguments += settings
        # libraries that read their variables when they are imported want a process of their own
        fresh = self.ranks > 1 or any(key.startswith(("HF_", "WANDB_")) for key in env)
        self.runs.append(Run(self._process(arguments, log, variables, fresh), log))
        return self.runs[-1]

    def _process(self, arguments: list[str], log: Path, env: dict[str, str], fresh: bool) -> Any:
        if not fresh:
            namespace = self.disk.holder.pid if self.disk else 0
            return self.shop.stable.start(arguments, log, env, namespace)
        command = [*(self.disk.enter if self.disk else []), sys.executable]
        if self.ranks > 1:
            command += ["-m", "specheads.torchrun", "--standalone"]
            command += [f"--nproc-per-node={self.ranks}"]
        with log.with_suffix(".out").open("w") as out, log.with_suffix(".err").open("w") as err:
            return subprocess.Popen(
                [*command, "-m", "specheads.train", *arguments],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env, cwd=ROOT,
            )  # fmt: skip

    def train(self, *settings: str, **env: str) -> Ended:
        """Train to the end."""
        return self.start(*settings, **env).wait()

    def close(self) -> None:
        """Kill what still runs."""
        for run in self.runs:
            run.kill()
        if self.disk:
            self.disk.close()

    def saved(self) -> list[int]:
        """Return the steps of the whole checkpoints."""
        names = [path.name for path in (self.seen / "checkpoints").glob("step-*")]
        return sorted(int(name.removeprefix("step-")) for name in names)

    def saving(self) -> bool:
        """Return whether a checkpoint is half-written."""
        return any((self.seen / "checkpoints").glob(".step-*.tmp/*"))

    def reached(self) -> int:
        """Return the last step of metrics.jsonl."""
        return max(metric_rows(self.seen), default=0)

    def goes_on(self, *settings: str, **env: str) -> str:
        """Resume, compare with the run that nothing happened to, and say what was lost."""
        before, kept = self.reached(), max(self.saved(), default=0)
        self.train(*(settings or ["resume=auto"]), **env).must(0)
        self.compare()
        again = max(before - kept, 0)
        return f"nothing: resumed after step {kept}" + (f", {again} steps again" * bool(again))

    def compare(self) -> None:
        """Raise Wrong unless weights and metrics are those of the run that nothing happened to."""
        whole = self.shop.unhurt(self.ranks)
        close = 0.0 if self.ranks == 1 else 1e-6
        ours, theirs = (load_file(f / "export" / "model.safetensors") for f in (self.seen, whole))
        for name, expected in theirs.items():
            away = float((ours[name] - expected).abs().max())
            if not away <= close:
                raise Wrong(f"{name} of the resumed run is off by {away:.1e}")
        rows, expected_rows = metric_rows(self.seen), metric_rows(whole)
        if rows.keys() != expected_rows.keys():
            raise Wrong(f"metrics.jsonl has {len(rows)} steps, not {len(expected_rows)}")
        for step, row in expected_rows.items():
            for key, value in row.items():
                if not abs(rows[step].get(key, float("nan")) - value) <= close * max(1, abs(value)):
                    raise Wrong(f"{key} of step {step} is {rows[step].get(key)}, not {value}")


def metric_rows(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the training rows by step, without what differs from run to run.

    Raises:
        Wrong: if a step comes twice.
    """
    found: dict[int, dict[str, float]] = {}
    path = run_dir / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # a killed run's last row
            row = json.loads(line)
            if "train/loss" in row:
                if row["step"] in found:
                    raise Wrong(f"metrics.jsonl has two rows of step {row['step']}")
                found[row["step"]] = {k: v for k, v in row.items() if k not in CHANGING}
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below ``folder``, to see that nothing was changed."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "LOCK")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@contextlib.contextmanager
def laboratory(shop: Workshop, name: str, ranks: int = 1) -> Iterator[Lab]:
    """Open a :class:`Lab` and leave nothing running behind."""
    lab = Lab(shop, name, ranks)
    try:
        yield lab
    finally:
        lab.close()
