"""Processes that chaos.py hurts: started, watched, signalled, and waited for.

A run of one process is forked from one that has imported everything already (``Stable``), which
saves the seconds that importing takes; apart from that it is ``python -m specheads.train``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 150.0  # seconds after which a run counts as hung


class Wrong(Exception):  # noqa: N818  (what the row says, no mistake of the program)
    """What a fault did that it must not do."""


class NotRun(Exception):  # noqa: N818
    """Why a fault cannot be tried on this machine."""


@dataclass
class Ended:
    """A process that is over."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """The lines that specheads stopped with; of two ranks there may be several."""
        return [line for line in self.err.splitlines() if line.startswith("specheads: ")]

    @property
    def line(self) -> str:
        """The last of them, or of what was printed."""
        said = self.lines or [line for line in self.out.splitlines() if "specheads: " in line]
        return said[-1] if said else ""

    def must(self, code: int, *says: str, one_of: Sequence[int] = ()) -> Ended:
        """Raise Wrong unless it ended with ``code``, said ``says``, and showed no traceback."""
        tail = " | ".join((self.err or self.out).strip().splitlines()[-3:])[-500:]
        for block in (self.out + self.err).split("Traceback (most recent")[1:]:
            if "torch/distributed/run.py" not in block:  # torchrun's own, when a rank fails
                raise Wrong(f"a traceback, exit code {self.code}: {tail}")
        if self.code not in (code, *one_of):
            raise Wrong(f"exit code {self.code}, not {code}: {tail}")
        for text in says:
            if not re.search(text, self.out + self.err):
                raise Wrong(f"nothing said of {text!r}: {tail}")
        return self


class Process(Protocol):
    """What is asked of a process; ``subprocess.Popen`` and :class:`Forked` have it."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        ...


class Forked:
    """A process that :class:`Stable` forked; its exit code comes through a file."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid, self.code = pid, code

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal, None while it runs."""
        return int(self.code.read_text()) if self.code.exists() else None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: after ``timeout`` seconds.
        """
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Stable:
    """The process from which runs are forked."""

    def __init__(self) -> None:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        variables |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables,
        )  # fmt: skip
        self.lock = Lock()

    def start(
        self, arguments: Sequence[str], log: Path, env: Mapping[str, str], namespace: int
    ) -> Forked:
        """Fork ``python -m specheads.train ARGUMENTS``, in the namespaces of a process if not 0."""
        files = {kind: str(log.with_suffix(f".{kind}")) for kind in ("out", "err", "code")}
        for kind in ("out", "err"):
            Path(files[kind]).touch()
        asked = {"argv": list(arguments), "env": dict(env), "namespace": namespace, **files}
        assert self.process.stdin is not None and self.process.stdout is not None
        with self.lock:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            pid = int(self.process.stdout.readline())
        return Forked(pid, Path(files["code"]))

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def serve() -> None:
    """Import what training needs, then fork a run for every line of stdin."""
    import torch

    from specheads.train import load_recipe

    torch.set_num_threads(1)
    import transformers.models.llama.modeling_llama  # noqa: F401

    load_recipe("medusa1")
    codes: dict[int, str] = {}
    while True:
        ready = select.select([0], [], [], 0.005)[0]
        for pid in list(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = Path(codes.pop(pid))
                aside = code.with_suffix(".aside")
                aside.write_text(str(os.waitstatus_to_exitcode(status)))
                aside.replace(code)
        if ready:
            line = b""
            while not line.endswith(b"\n"):  # unbuffered, so that select sees what is left
                if not (read := os.read(0, 1)):
                    return
                line += read
            asked = json.loads(line)
            pid = os.fork()
            if not pid:
                play(asked)
            codes[pid] = asked["code"]
            print(pid, flush=True)


def play(asked: dict[str, Any]) -> None:
    """Become the run that is asked for."""
    code = 1
    try:
        for number, kind in ((1, "out"), (2, "err")):
            handle = os.open(asked[kind], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if asked["namespace"]:
            for kind in ("user", "mnt"):
                handle = os.open(f"/proc/{asked['namespace']}/ns/{kind}", os.O_RDONLY)
                if ctypes.CDLL(None, use_errno=True).setns(handle, 0):
                    raise OSError(ctypes.get_errno(), "setns")
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(ROOT)
        sys.argv = ["train", *asked["argv"]]
        from specheads import train

        train.main()
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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

    def __init__(self, process: Process, log: Path) -> None:
        self.files = log.with_suffix(".out"), log.with_suffix(".err")
        self.since = time.monotonic()
        self.process = process

    @property
    def out(self) -> str:
        """What it printed so far."""
        return self.files[0].read_text(errors="replace")

    def until(self, what: Callable[[], Any], name: str) -> Run:
        """Wait until ``what()`` is true; it is asked a thousand times a second."""
        end = time.monotonic() + PATIENCE
        while not what():
            if self.process.poll() is not None:
                ended = self.wait()
                raise Wrong(f"ended with {ended.code} before {name}: {ended.err[-300:]}")
            if time.monotonic() > end:
                self.kill()
                raise Wrong(f"{name} did not come within {PATIENCE:.0f} s")
            time.sleep(0.001)
        return self

    def at(self, step: int) -> Run:
        """Wait until the console says ``step`` or a later one."""
        printed = re.compile(r"^step +(\d+)/", re.MULTILINE)
        return self.until(
            lambda: any(int(found) >= step for found in printed.findall(self.out)), f"step {step}"
        )

    def send(self, number: signal.Signals) -> Run:
        """Send a signal to the process that was started (a launcher, with two ranks)."""
        self.process.send_signal(number)
        return self

    def rank(self, number: int) -> int:
        """Return the process of a rank below torchrun."""
        for pid in descendants(self.process.pid)[1:]:
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if b"RANK=%d" % number in variables:
                    return pid
        raise Wrong(f"there is no rank {number} below the launcher")

    def wait(self, seconds: float = PATIENCE) -> Ended:
        """Wait for the end.

        Raises:
            Wrong: if it does not come; everything that was started is then killed.
        """
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Wrong(f"still running {seconds:.0f} s later") from None
        texts = [path.read_text(errors="replace") for path in self.files]
        return Ended(code, *texts, time.monotonic() - self.since)

    def kill(self) -> None:
        """Kill it and everything below it."""
        if self.process.poll() is not None:
            return
        for pid in descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class SmallDisk:
    """A disk in memory, in a mount namespace of its own: really full, or really read-only.

    Raises:
        NotRun: where users may not have namespaces.
    """

    def __init__(self, at: Path, size: str) -> None:
        at.mkdir(parents=True, exist_ok=True)
        self.at = at
        shell = f"mount -t tmpfs -o size={size} none '{at}' && echo ready && exec cat"
        try:
            self.holder = subprocess.Popen(
                ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )  # fmt: skip  (it ends with this process, which holds the other end of its stdin)
        except OSError as error:
            raise NotRun(f"no small disk here: {error}") from None
        assert self.holder.stdout is not None
        if self.holder.stdout.readline().strip() != "ready":
            raise NotRun("no small disk here: unshare or mount is not allowed")
        self.enter = ["nsenter", f"--target={self.holder.pid}", "--user", "--mount"]
        self.enter += ["--preserve-credentials"]

    @property
    def inside(self) -> Path:
        """The folder, as it is seen from outside."""
        return Path(f"/proc/{self.holder.pid}/root{self.at}")

    def remount(self, options: str) -> None:
        """Change its size (``size=8m``), or make it read-only (``ro``) or writable (``rw``)."""
        command = [*self.enter, "mount", "-o", f"remount,{options}", str(self.at)]
        subprocess.run(command, check=True)

    def fill(self) -> None:
        """Use up what is free."""
        filler = self.inside / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as out:
            while True:
                out.write(bytes(4096))

    def close(self) -> None:
        """Let the disk go."""
        self.holder.kill()
        self.holder.communicate()


def need_deepspeed() -> None:
    """Raise NotRun where DeepSpeed cannot compile."""
    folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([folder, os.environ.get("PATH", "")])
    missing = [name for name in ("ninja", "g++") if not shutil.which(name, path=path)]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing.append("Python.h")
    if missing:
        raise NotRun(f"DeepSpeed cannot compile without {', '.join(missing)}")


if __name__ == "__main__":
    serve()
