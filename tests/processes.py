"""Run Python programs in processes of their own, without the seconds that torch takes to import.

They are forks of one process that has imported hydra, torch and transformers, and nothing of ours:
what such a process sees, prints, exits with and is killed by is its own. What a program imports,
or how soon it starts, is not seen this way: that needs ``subprocess``.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "hydra.core.hydra_config",
        "torch",
        "torch.distributed",
        "transformers.generation.utils",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)


class Process:
    """A running program; what ``subprocess.Popen`` has, with files in place of pipes.

    Args:
        arguments: those of the interpreter: ``-m module ...``, ``-c code ...`` or ``script ...``.
        cwd: its working folder.
        env: variables beside those of this process; None takes one away.
        stdin: what it can read.
        log: where its output goes, and its errors; None keeps them apart.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path = ROOT,
        env: Mapping[str, str | None] | None = None,
        stdin: str = "",
        log: Path | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        own = Path(self._folder.name)
        self._out, self._err = log or own / "out", log or own / "err"
        (own / "in").write_text(stdin)
        for path in (self._out, self._err):
            path.touch()
        changed = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        variables = {name: value for name, value in changed.items() if value is not None}
        files = [str(path) for path in (own / "in", self._out, self._err)]
        self._process = _FORKS.Process(target=_begin, args=(arguments, str(cwd), variables, files))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has printed as errors so far."""
        return self._err.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout: float = 600) -> re.Match[str]:
        """Wait until a line of its output matches."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.stdout, re.MULTILINE)):
            running = self.poll() is None and time.monotonic() < deadline
            assert running, f"{self.stdout}{self.stderr}"
            time.sleep(0.02)
        return found

    def poll(self) -> int | None:
        """Return its exit code, the negative number of a signal, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float = 900) -> int:
        """Wait for its end; return the exit code."""
        self._process.join(timeout)
        code = self.poll()
        assert code is not None, f"still running after {timeout} s: {self.stdout}{self.stderr}"
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it is still running."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)
        self.wait()


def run(
    *arguments: str,
    cwd: Path = ROOT,
    env: Mapping[str, str | None] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; see :class:`Process`."""
    process = Process(*arguments, cwd=cwd, env=env, stdin=stdin)
    try:
        code = process.wait()
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, code, process.stdout, process.stderr)


def _begin(
    arguments: tuple[str, ...], folder: str, variables: dict[str, str], files: list[str]
) -> None:
    """Be the interpreter that was started with ``arguments``."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for number, (path, flags) in enumerate(
        zip(files, (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND), strict=True)
    ):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False),  # noqa: SIM115
        open(1, "w", closefd=False),  # noqa: SIM115
        open(2, "w", buffering=1, errors="backslashreplace", closefd=False),  # noqa: SIM115
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    what, *rest = arguments
    try:
        if what == "-c":
            sys.argv, code = ["-c", *rest[1:]], rest[0]
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        elif what == "-m":
            sys.argv = rest
            sys.path.insert(0, folder)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(what).resolve().parent))
            runpy.run_path(what, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
