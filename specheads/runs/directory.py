"""One run's directory: who holds it, whether it can be written, and where its figures come from.

``runs/<name>/``: ``LOCK`` (held while the run lives), ``config.yaml``, ``provenance.json``, and
what others fill: ``samples.jsonl``, ``tree.svg``, ``checkpoints/``, ``export/``.

``metrics.jsonl`` has a row of JSON per line, in the system's hands before the next step begins. A
full disk loses no row: what cannot be written is kept, tried again with every later row, and goes
into the checkpoint with which the run then stops.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from specheads.config import ConfigError, RunError
from specheads.system import dist
from specheads.system.files import made_for_now, no_room, write_whole
from specheads.system.hardware import environment
from specheads.system.redact import redact

USED = ("config.yaml", "metrics.jsonl", "checkpoints", "export")
PACKAGES = ("torch", "transformers", "safetensors", "deepspeed", "hydra-core", "wandb")

# what a start writes before its first step
_FIRST = ("config.yaml", "provenance.json", "metrics.jsonl", "wandb", "tokenizer")
SAVED = "log.json"  # in a checkpoint: which rows of metrics belong to it
_PROBE = 1 << 16  # bytes: with less room than this not even the metrics of a run fit
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def is_used(run_dir: Path) -> bool:
    """Return whether an earlier run left something in ``run_dir``."""
    return any((run_dir / name).exists() for name in USED)


def refuse_used(run_dir: Path, resume: str) -> None:
    """Raise ConfigError if an earlier run left something and ``resume`` is empty."""
    if is_used(run_dir) and not resume:
        raise ConfigError(
            f"run directory {run_dir} holds an earlier run; choose another name=, "
            "continue it with resume=auto, or delete it"
        )


def lock(path: Path) -> IO[str]:
    """Return the open, locked file ``path``; the lock dies with this process.

    Where the file system has no locks (some NFS mounts), a line says so and the run goes on.

    Raises:
        ConfigError: if another process, on any host that shares the file system, holds it.
    """
    while True:
        handle = path.open("a+")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                print(
                    f"specheads: the file system of {path.parent} has no locks; "
                    "nothing here keeps a second run out of this directory",
                    flush=True,
                )
                break
            handle.seek(0)
            holder = handle.read().strip() or "another process"
            handle.close()
            raise ConfigError(f"run directory {path.parent} is in use by {holder}") from None
        # the holder before us may have removed the file between our open and our lock, or now
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle.fileno()), path.stat()):
                break
        handle.close()
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {platform.node()} since {time.ctime()}\n")
    handle.flush()
    return handle


def unlock(run_dir: Path, handle: IO[str]) -> None:
    """Give the directory free."""
    (run_dir / "LOCK").unlink(missing_ok=True)
    handle.close()


def discard(run_dir: Path, before: Collection[Path]) -> None:
    """Remove what a start wrote that came to no step, so that the directory is as it was.

    Records that brought a loss which is not finite stay, and whatever is not of our making.

    Args:
        run_dir: the run's directory; left alone where a run has left steps or an export.
        before: what it held before this start.
    """
    if any((run_dir / name).exists() for name in ("checkpoints", "export")):
        return
    for pattern in (*_FIRST, "quarantine*.jsonl"):
        for path in set(run_dir.glob(pattern)).difference(before):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


@contextlib.contextmanager
def leaving_nothing(run_dir: Path, made: Path, began: float) -> Iterator[None]:
    """Remove what is left of a run that comes to nothing, and a directory that stays empty.

    Args:
        run_dir: the run's directory.
        made: the directory that Hydra has made.
        began: time of the start: if ``made`` is younger, it was made for this run.
    """
    before = set(run_dir.iterdir()) if run_dir.is_dir() else set()
    is_new = made.stat().st_ctime >= began
    try:
        yield
    except BaseException:
        if dist.is_main() and not is_used(run_dir):
            discard(run_dir, before)
        raise
    finally:
        if is_new and dist.is_main():
            with contextlib.suppress(OSError):  # it holds something
                made.rmdir()


def check_run_dir(run_dir: Path, resume: str) -> None:
    """Refuse a run directory that cannot serve, before anything is loaded. Leaves no trace.

    Raises:
        ConfigError: if the directory is in use, used and ``resume`` is empty, or not writable.
        RunError: if its disk is full.
    """
    if not dist.is_main():
        return
    probe = run_dir / f".room-{os.getpid()}"
    try:
        if run_dir.exists() and not run_dir.is_dir():
            raise ConfigError(f"run directory {run_dir} is a file; choose another run_dir=")
        with made_for_now(run_dir):
            held = lock(run_dir / "LOCK")
            try:
                refuse_used(run_dir, resume)
                probe.write_bytes(bytes(_PROBE))
            finally:
                probe.unlink(missing_ok=True)
                unlock(run_dir, held)
    except OSError as error:
        if no_room(error):
            raise RunError(
                f"no room to write into run directory {run_dir} (disk full?); nothing was started"
            ) from error
        raise ConfigError(
            f"run directory {run_dir} cannot be written: {error.strerror or error}; "
            "choose another run_dir="
        ) from error


def _git_state() -> dict[str, Any]:
    here = str(Path(__file__).resolve().parent)
    words = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(["git", "-C", here, *words], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None}  # an installed wheel
    commit, changed, _ = done.stdout.decode().strip().partition("-dirty")
    return {"commit": commit, "modified": bool(changed)}


def package_version(package: str) -> str | None:
    """Return the version of a package that is installed, else None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(run_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Write ``config.yaml``, unless it is there, and add this start to ``provenance.json``.

    Args:
        run_dir: the locked directory.
        settings: all settings of the run, as nested dicts, without secrets.

    Returns:
        What is needed to know where this start's figures come from.

    Raises:
        ConfigError: if the provenance of earlier starts cannot be read.
        RunError: if the disk is full.
    """
    import torch
    from omegaconf import OmegaConf

    if not (run_dir / "config.yaml").exists():
        write_whole(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(settings)))
    record = run_dir / "provenance.json"
    try:
        history = json.loads(record.read_text(encoding="utf-8")) if record.exists() else []
    except ValueError as error:
        raise ConfigError(f"{record} is damaged ({error}); move it away to go on") from None
    mine = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": redact(sys.argv),
        "git": _git_state(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "hardware": {
            **environment(),
            "processors": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "world_size": dist.world_size(),
        },
    }
    write_whole(record, json.dumps([*history, mine], indent=2) + "\n")
    return mine


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; a line that is no row is passed over.

    A killed run may leave half a row.
    """
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def keep_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Let a metrics file hold these rows and no others."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


class MetricsFile:
    """The open file.

    Attributes:
        trouble: one line about why rows wait to be written; empty while all are.
    """

    def __init__(self, path: Path, step: int, checkpoint: Path | None = None) -> None:
        """Go on after ``step``: rows that were written later are dropped.

        Args:
            path: the file; made if it is not there.
            step: the last step whose rows stay.
            checkpoint: the one that the run goes on from; the rows are then exactly those that it
                was saved with, also where several belong to its step.

        Raises:
            RunError: if the disk is full; the earlier rows are untouched.
        """
        rows = [row for row in read_rows(path) if row["step"] <= step]
        if checkpoint and (saved := checkpoint / SAVED).is_file():
            state = json.loads(saved.read_text(encoding="utf-8"))
            rows = rows[: state["rows"]] + state["unwritten"]
        keep_rows(path, rows)
        self.path = path
        self.trouble = ""
        self._rows = len(rows)
        self._unwritten: list[dict[str, Any]] = []
        # unbuffered: a buffer would be written again at exit, behind rows that came after it
        self._handle = path.open("ab", buffering=0)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row, and those that wait."""
        self._unwritten.append(dict(row))
        self.flush()

    def flush(self) -> None:
        """Write the rows that wait; says in ``trouble`` why some still do."""
        while self._unwritten:
            data = (json.dumps(self._unwritten[0]) + "\n").encode()
            end = self._handle.seek(0, os.SEEK_END)
            try:
                while data:
                    data = data[self._handle.write(data) :]
            except OSError as error:
                with contextlib.suppress(OSError):  # all of a row, or nothing
                    self._handle.truncate(end)
                reason = "no room (disk full?)" if no_room(error) else error.strerror
                self.trouble = f"{self.path} cannot be written: {reason}"
                return
            self._unwritten.pop(0)
            self._rows += 1
        self.trouble = ""

    def save(self, checkpoint: Path) -> None:
        """Force the rows onto the disk, and write into a checkpoint how many they are.

        Raises:
            OSError: if the disk is full.
        """
        self.flush()
        os.fsync(self._handle.fileno())
        state = {"rows": self._rows, "unwritten": self._unwritten}
        (checkpoint / SAVED).write_text(json.dumps(state) + "\n", encoding="utf-8")

    def close(self) -> int:
        """Write what waits and close the file; return the number of rows that were lost."""
        self.flush()
        self._handle.close()
        return len(self._unwritten)
