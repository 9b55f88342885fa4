"""Trainings that chaos.py hurts: started, watched, signalled, and compared when they are over."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import harness
from harness import ROOT, NotRun
from safetensors.torch import load_file

from specheads.data.tokenizers import byte_tokenizer

STEPS, SAVED_EVERY = 40, 8
PATIENCE = 150.0  # seconds after which a run counts as hung
POISON = "pair/mul"  # the record whose loss can be made not finite
# what a clock decides, or settings that may change between runs
MEASURED = re.compile(r"tokens_per_second|peak_memory|speedup|seconds|_ms|time|^final/")
COMMON = """log.every=1 log.wandb=disabled data=jsonl data.seq_len=64 data.rows=2 heads.num_heads=2
    tree.choices=[[0],[1],[0,0]] evaluate.num_prompts=2 evaluate.max_new_tokens=8
    evaluate.loss_rows=2"""
MEDUSA1 = f"""+recipe=medusa1 name=chaos steps={STEPS} checkpoint.every={SAVED_EVERY}
    loss.lambda_0=1.0 optim.warmup_steps=1"""
# of the process from which runs are forked, and of every run
QUIET = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
QUIET |= {"HF_HUB_OFFLINE": "1", "WANDB_SILENT": "true"}
QUIET["PYTHONWARNINGS"] = "ignore::UserWarning"  # of semaphores that a killed run leaves
# A run of one process is forked from one that has imported everything, which saves the seconds
# that importing takes; apart from that, and from how it is hurt, it is python -m specheads.train.
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = ["transformers.models.llama.modeling_llama", "specheads.train"]
IMPORTED += ["specheads.decoding.loop", "specheads.training.loop"]
IMPORTED += ["specheads.training.objectives", "hydra._internal.hydra"]
LOCK = Lock()  # two threads that ask for the end of one fork would each get half of the answer


def play(argv: list[str], environ: dict[str, str], log: Path, namespace: int, hurt: Any) -> None:
    """Become ``python -m specheads.train`` in a fork.

    Args:
        argv: its arguments.
        environ: its environment.
        log: where it prints, with the suffixes ``.out`` and ``.err``.
        namespace: a process in whose user and mount namespaces it runs; 0 for its own.
        hurt: seconds that every ``step`` and ``fsync`` takes longer, and what the ``loss`` of
            ``POISON``, or its ``gradient``, is multiplied with.
    """
    for number, kind in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log.with_suffix(kind), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    for kind in ("user", "mnt") if namespace else ():
        handle = os.open(f"/proc/{namespace}/ns/{kind}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(handle, 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(ROOT)
    sys.argv = ["train", *argv]
    from specheads import train
    from specheads.training.objectives import HeadsObjective

    plain, flush = HeadsObjective.forward, os.fsync

    def forward(self: Any, batch: Any) -> Any:
        time.sleep(hurt.get("step", 0))
        loss, metrics = plain(self, batch)
        if self.training and POISON in batch["ids"]:
            loss = loss * hurt.get("loss", 1)
            if "gradient" in hurt:  # of a loss that is finite
                loss.register_hook(lambda grad: grad * hurt["gradient"])
        return loss, metrics

    def slow_flush(handle: int) -> None:
        time.sleep(hurt.get("fsync", 0))
        flush(handle)

    if hurt:
        HeadsObjective.forward, os.fsync = forward, slow_flush
    train.main()


def descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, itself included, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


class Run:
    """A running command; what it prints goes into files, so that nothing blocks."""

    def __init__(self, process: Any, log: Path) -> None:
        self.process, self.log = process, log

    def printed(self, *kinds: str) -> str:
        """Return what it printed so far, ``out`` or ``err``."""
        paths = [self.log.with_suffix(f".{kind}") for kind in kinds or ("out", "err")]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    @property
    def line(self) -> str:
        """The line that specheads stopped with; of two ranks there may be several."""
        said = [line for line in self.printed("err").splitlines() if line.startswith("specheads: ")]
        said = said or [line for line in self.printed("out").splitlines() if "specheads: " in line]
        return said[-1] if said else "(nothing)"

    def said(self, text: str) -> str:
        """Return the first line with ``text``; there must be one."""
        found = [line for line in self.printed().splitlines() if text in line]
        assert found, f"nothing said of {text!r}"
        return found[0]

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal, None while it runs."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll()
        with LOCK:
            return self.process.exitcode

    def until(self, what: Callable[[], Any], name: str) -> Run:
        """Wait until ``what()`` is true; it is asked a thousand times a second."""
        end = time.monotonic() + PATIENCE
        while not what():
            code = self.poll()
            assert code is None, f"ended with {code} before {name}: {self.printed('err')[-300:]}"
            assert time.monotonic() <= end, f"{name} did not come within {PATIENCE:.0f} s"
            time.sleep(0.001)
        return self

    def at(self, step: int) -> Run:
        """Wait until the console says ``step`` or a later one."""
        steps = re.compile(r"^step +(\d+)/", re.MULTILINE)
        come = lambda: any(int(n) >= step for n in steps.findall(self.printed("out")))  # noqa: E731
        return self.until(come, f"step {step}")

    def send(self, number: int, rank: int | None = None) -> Run:
        """Send a signal to the process that was started, or to a rank below the launcher."""
        pids = [self.process.pid] if self.poll() is None else []
        if rank is not None:
            variable = b"RANK=%d" % rank
            below = descendants(self.process.pid)[1:]
            environs = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in below}
            pids = [pid for pid, each in environs.items() if variable in each.split(b"\0")][:1]
        for pid in pids:
            os.kill(pid, number)
        return self

    def ends(self, *codes: int, says: Sequence[str] = (), seconds: float = PATIENCE) -> Run:
        """Wait for the end, and look at it.

        Args:
            codes: it must end with one of these.
            says: patterns that must stand in what it printed.
            seconds: within which it must end.

        Raises:
            AssertionError: if something of this is not so, or a traceback was shown.
        """
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() <= end, f"still running {seconds:.0f} s later"
            time.sleep(0.005)
        text = self.printed()
        tail = " | ".join((self.printed("err") or text).strip().splitlines()[-3:])[-500:]
        for block in text.split("Traceback (most recent")[1:]:
            assert "torch/distributed/run.py" in block, f"a traceback, exit code {code}: {tail}"
        assert code in codes, f"exit code {code}, not {codes[0]}: {tail}"
        for each in says:
            assert re.search(each, text), f"nothing said of {each!r}: {tail}"
        return self

    def kill(self) -> None:
        """Kill it and everything below it."""
        if self.poll() is None:
            for pid in descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.001)


class SmallDisk:
    """A disk in memory, in a mount namespace of its own: really full, or really read-only.

    Raises:
        NotRun: where users may not have namespaces.
    """

    def __init__(self, at: Path, size: str) -> None:
        at.mkdir(parents=True, exist_ok=True)
        shell = f"mount -t tmpfs -o size={size} none '{at}' && echo ready && exec cat"
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:  # it ends with this process, which holds the other end of its stdin
            self.holder = subprocess.Popen(command, text=True, **pipes)
            ready = self.holder.stdout.readline().strip() == "ready"
        except OSError:
            ready = False
        if not ready:
            raise NotRun("no small disk here: unshare or mount is not there, or not allowed")
        self.at, self.inside = at, Path(f"/proc/{self.holder.pid}/root{at}")  # seen from outside

    def remount(self, options: str) -> None:
        """Change its size (``size=8m``), or make it read-only (``ro``) or writable (``rw``)."""
        enter = ["nsenter", f"--target={self.holder.pid}", "--user", "--mount"]
        command = [*enter, "--preserve-credentials", "mount", "-o", f"remount,{options}"]
        subprocess.run([*command, str(self.at)], check=True)

    def fill(self) -> None:
        """Use up what is free."""
        with contextlib.suppress(OSError), (self.inside / "filler").open("wb", buffering=0) as out:
            while True:
                out.write(bytes(4096))

    def empty(self) -> None:
        """Make room again."""
        self.remount("rw,size=64m")
        (self.inside / "filler").unlink()


class Workshop:
    """What all faults use: a base model, records, and the runs that nobody hurt.

    Args:
        folder: where everything is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.base, self.records = folder, folder / "base", folder / "records.jsonl"
        self.whole: dict[int, Lab] = {}  # by number of ranks
        self.lock = Lock()
        more = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
        harness.llama(272, 32, 2, intermediate_size=64, **more).save_pretrained(self.base)
        byte_tokenizer(512).save_pretrained(self.base)
        names = ["add", "sub", "mul", "neg", "inc", "dec", "sqr", "idt"]
        with self.records.open("w") as lines:
            for name in [*names, *(f"{each}{number}" for number in range(5) for each in names)]:
                pair = {"prompt": f"def {name}(a, b):\n", "completion": f"    return {name} + a"}
                print(json.dumps({"id": f"pair/{name}"} | pair), file=lines)

    def unhurt(self, ranks: int) -> Lab:
        """Return a run that nothing happened to; trained once."""
        with self.lock:
            if ranks not in self.whole:
                self.whole[ranks] = Lab(self, f"unhurt-{ranks}", ranks)
                self.whole[ranks].start().ends(0)
        return self.whole[ranks]


class Lab:
    """A run directory, and how to start, resume and look at its run."""

    def __init__(self, shop: Workshop, name: str, ranks: int = 1, settings: str = MEDUSA1) -> None:
        self.shop, self.ranks, self.settings = shop, ranks, settings
        self.folder = shop.folder / re.sub(r"\W+", "-", name)
        self.folder.mkdir()
        self.run_dir = self.seen = self.folder / "run"  # seen: as this process sees it
        self.runs: list[Run] = []
        self.disk: SmallDisk | None = None

    def on_small_disk(self, size: str) -> SmallDisk:
        """Move the run directory, which does not exist yet, to a small disk."""
        self.disk = SmallDisk(self.folder / "disk", size)
        self.run_dir, self.seen = self.disk.at / "run", self.disk.inside / "run"
        return self.disk

    def start(self, *settings: str, env: dict[str, str] | None = None, **hurt: float) -> Run:
        """Start a training.

        Args:
            settings: beside the usual ones.
            env: added to the environment; an empty value removes.
            hurt: see :func:`play`.
        """
        argv = [*self.settings.split(), *COMMON.split(), *(["deepspeed=zero2"] * (self.ranks > 1))]
        argv += [f"model={self.shop.base}", f"data.path={self.shop.records}"]
        argv += [f"hydra.run.dir={self.run_dir}", *settings]
        environ = {**os.environ, **QUIET, "SPECHEADS_CACHE": str(self.shop.folder / "cache")}
        environ = {key: value for key, value in {**environ, **(env or {})}.items() if value}
        log = self.folder / f"log-{len(self.runs)}"
        if self.ranks == 1 and not env:
            namespace = self.disk.holder.pid if self.disk else 0
            process = FORKS.Process(target=play, args=(argv, environ, log, namespace, hurt))
            with LOCK, patch.dict(os.environ, QUIET):
                process.start()
        else:  # libraries that read their variables when they are imported want a process
            launcher = ["-m", "specheads.torchrun", "--standalone"]
            launcher.append(f"--nproc-per-node={self.ranks}")
            command = [sys.executable, *launcher * (self.ranks > 1), "-m", "specheads.train", *argv]
            out, err = (log.with_suffix(f".{kind}").open("w") for kind in ("out", "err"))
            with out, err:
                process = subprocess.Popen(command, stdout=out, stderr=err, env=environ, cwd=ROOT)
        self.runs.append(Run(process, log))
        return self.runs[-1]

    def close(self) -> None:
        """Kill what still runs."""
        for run in self.runs:
            run.kill()
        if self.disk:
            self.disk.holder.kill()
            self.disk.holder.communicate()

    def saved(self) -> int:
        """Return the step of the newest whole checkpoint, 0 for none."""
        saved = (self.seen / "checkpoints").glob("step-*")
        return max((int(path.name.removeprefix("step-")) for path in saved), default=0)

    def half_saved(self) -> set[tuple[Path, int]]:
        """Return the half-written checkpoints, and when they were touched."""
        found = set()
        for path in (self.seen / "checkpoints").glob(".step-*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                found.add((path, path.stat().st_mtime_ns))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, without what a clock or the memory decides."""
        path, found = self.seen / "metrics.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):  # a killed run's last row
                found.append({k: v for k, v in json.loads(line).items() if not MEASURED.search(k)})
        return found

    def reached(self) -> int:
        """Return the last step of metrics.jsonl."""
        return max((row.get("step", 0) for row in self.rows()), default=0)

    def contents(self) -> dict[str, bytes]:
        """Return every file of the run directory, to see that nothing was changed."""
        files = (p for p in self.run_dir.rglob("*") if p.is_file() and p.name != "LOCK")
        return {str(path.relative_to(self.run_dir)): path.read_bytes() for path in files}

    def tensors(self) -> dict[str, Any]:
        """Return the tensors of the export, of its base too, if it has one."""
        files = self.seen.glob("export/**/*.safetensors")
        return {f"{p.parent.name}/{k}": v.double() for p in files for k, v in load_file(p).items()}

    def goes_on(self, *settings: str) -> str:
        """Resume, compare with the run that nothing happened to, and say what was lost."""
        before, kept = self.reached(), self.saved()
        self.start(*(settings or ["resume=auto"])).ends(0)
        self.compare(self.shop.unhurt(self.ranks))
        again = max(before - kept, 0)
        return f"nothing: resumed after step {kept}" + f", {again} steps again" * bool(again)

    def compare(self, whole: Lab) -> None:
        """Check that weights and metrics are those of a run that nothing happened to."""
        close = 0.0 if self.ranks == 1 else 1e-6
        ours, theirs = self.tensors(), whole.tensors()
        alone = sorted(ours.keys() ^ theirs.keys())
        assert not alone, f"tensors of one export only: {alone[:3]}"
        for name, expected in theirs.items():
            away = float((ours[name] - expected).abs().max())
            assert away <= close, f"{name} of the resumed run is off by {away:.1e}"
        rows, expected_rows = self.rows(), whole.rows()
        steps, expected_steps = ([row["step"] for row in each] for each in (rows, expected_rows))
        here, there = (f"{len(each)} rows of {len({*each})}" for each in (steps, expected_steps))
        assert steps == expected_steps, f"metrics.jsonl has {here} steps, not {there}"
        for row, expected in zip(rows, expected_rows, strict=True):
            for key in row.keys() | expected.keys():
                found, true = row.get(key, float("nan")), expected.get(key, float("nan"))
                said = f"{key} of step {row['step']}: {found}, not {true}"
                assert abs(found - true) <= close * max(1, abs(true)), said
