"""Run measurements part after part, remember which are done, and say how long each took.

For ``bench_readme.py`` and ``bench_full.py``, which hold the parts. A part is done when all its
commands ended with 0 and its files are there; the record keeps a hash of its commands and of the
checkpoints that they read, so that a part whose settings changed is not taken for done.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DONE = "done"


@dataclass(frozen=True)
class Part:
    """One measurement, or a training that others need.

    Attributes:
        name: what ``--only`` and the record call it.
        commands: each the arguments after ``python``; run in this order, from the repository.
        outputs: files that are there afterwards, relative to the repository.
        minutes: that it took on two cores of an AMD EPYC; a guide, no promise.
        needs: parts whose outputs it reads.
        reads: folders of checkpoints that lie in the repository.
        sections: headings of BENCHMARKS.md whose figures it makes.
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    outputs: tuple[str, ...]
    minutes: float
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()

    def digest(self, root: Path = ROOT) -> str:
        """Return a hash of what is run, and on which shipped files."""
        found = [list(command) for command in self.commands]
        files = [(root / folder / "manifest.json").read_text() for folder in self.reads]
        return hashlib.sha256(json.dumps([found, files]).encode()).hexdigest()[:16]


def shown(command: Sequence[str]) -> str:
    """Return a command as one would type it."""
    return " ".join(["python", *(f'"{word}"' if " " in word else word for word in command)])


def run_command(command: Sequence[str]) -> int:
    """Run ``python`` with ``command`` in the repository; return its exit code."""
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode


def read_record(path: Path) -> dict[str, Any]:
    """Return what earlier runs wrote down; nothing, if there was none."""
    return json.loads(path.read_text()) if path.is_file() else {}


def is_done(part: Part, record: dict[str, Any], root: Path = ROOT) -> bool:
    """Return whether ``part`` ended well with the same settings, and its files are still there."""
    entry = record.get(part.name, {})
    same = entry.get("state") == DONE and entry.get("settings") == part.digest(root)
    return same and all((root / path).exists() for path in part.outputs)


def chosen(parts: Sequence[Part], only: Iterable[str] | None) -> list[Part]:
    """Return the parts named by ``only``, in their order, or all.

    Raises:
        SystemExit: for a name that no part has.
    """
    names = [part.name for part in parts]
    wanted = names if only is None else list(only)
    if unknown := [name for name in wanted if name not in names]:
        raise SystemExit(f"no part is called {unknown[0]}; there are {', '.join(names)}")
    return [part for part in parts if part.name in wanted]


def table(parts: Sequence[Part], record: dict[str, Any], root: Path = ROOT) -> str:
    """List the parts: state, expected minutes, commands, files."""
    lines = []
    for part in parts:
        state = "done" if is_done(part, record, root) else "to do"
        lines.append(f"{part.name}  ({state}, about {part.minutes:g} min)")
        lines += [f"    $ {shown(command)}" for command in part.commands]
        lines += [f"    -> {path}" for path in part.outputs]
    return "\n".join([*lines, f"{sum(part.minutes for part in parts):g} min in all"])


def run_parts(
    parts: Sequence[Part],
    record_file: Path,
    *,
    resume: bool,
    run: Callable[[Sequence[str]], int] = run_command,
    root: Path = ROOT,
) -> list[str]:
    """Run ``parts`` in order; return the names of those that failed or lack what they need.

    The record is written after every part, so that one can stop at any time.

    Args:
        parts: each behind those that it needs.
        record_file: what is done, and how long it took.
        resume: leave out what is done.
        run: gets the arguments after ``python``, returns the exit code.
        root: the repository.
    """
    record, failed = read_record(record_file), []
    for number, part in enumerate(parts, 1):
        where = f"[{number}/{len(parts)}] {part.name}"
        if resume and is_done(part, record, root):
            print(f"{where}: done, {record[part.name]['seconds'] / 60:.1f} min", flush=True)
            continue
        if lacking := [name for name in part.needs if name in failed]:
            print(f"{where}: left out, {lacking[0]} failed", flush=True)
            failed.append(part.name)
            continue
        print(f"{where}: about {part.minutes:g} min", flush=True)
        start, state = time.monotonic(), DONE
        for command in part.commands:
            print(f"$ {shown(command)}", flush=True)
            if code := run(command):
                state = f"exit code {code} of {shown(command)}"
                break
        missing = [path for path in part.outputs if not (root / path).exists()]
        if state == DONE and missing:
            state = f"{missing[0]} was not written"
        if state != DONE:
            failed.append(part.name)
        seconds = time.monotonic() - start
        record[part.name] = {
            "state": state,
            "settings": part.digest(root),
            "seconds": round(seconds, 1),
            "finished": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
        record_file.parent.mkdir(parents=True, exist_ok=True)
        aside = record_file.with_name(f".{record_file.name}.tmp")
        aside.write_text(json.dumps(record, indent=1) + "\n")
        aside.replace(record_file)
        print(f"{where}: {seconds / 60:.1f} min, {state}", flush=True)
    spent = sum(record[part.name]["seconds"] for part in parts if part.name in record)
    print(f"{spent / 60:.1f} min in {len(parts)} parts", flush=True)
    return failed
