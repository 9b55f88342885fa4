"""The folders ``checkpoints/step-*/`` of a run: written whole, found, verified, removed.

A checkpoint has a ``manifest.json`` with the size and sha256 of every file. It is written last,
before the folder gets its name; a folder without one, or with a file of another size or content,
is damaged and not a checkpoint. ``state.py`` knows what the files hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from specheads import dist
from specheads.config import ConfigError, TrainConfig
from specheads.files import aside, flush_folder, publish, writing
from specheads.models.manifest import MANIFEST, read_json, write_json
from specheads.training.state import accumulation_here, check_settings, read_state

Only = Callable[[str, int], bool]  # from a file's name and size, whether its content is read

_SMALL = 1 << 20  # bytes; every rank hashes these files itself, the larger ones are shared out


def step_of(path: Path) -> int:
    """Return the optimizer step that the folder ``path`` is named after, -1 for another name."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first; a torn copy among them too."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir()]
    return sorted((path for path in found if step_of(path) >= 0), key=step_of)


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Return what the manifest of checkpoint ``path`` lists: name -> size (bytes) and sha256.

    Raises:
        ConfigError: if there is none, or it lists something that cannot be a file of it.
    """
    listed = read_json(path / MANIFEST, f"{path} is not a whole checkpoint").get("files")
    if not isinstance(listed, dict):
        raise ConfigError(f"{path / MANIFEST} must hold an object 'files'")
    for name, entry in listed.items():
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise ConfigError(f"{path / MANIFEST} lists {name!r}, which is not below its folder")
        known = isinstance(entry, dict) and isinstance(entry.get("sha256"), str)
        if not known or type(entry.get("size")) is not int:
            raise ConfigError(f"{path / MANIFEST} must give {name} a size and a sha256")
    return listed


def check_whole(path: Path, only: Only = lambda name, size: True) -> None:
    """Check that every file of checkpoint ``path`` has its size, and its sha256, and is listed.

    Args:
        path: a checkpoint.
        only: which files are read, all unless given.

    Raises:
        ConfigError: naming the file and both numbers.
    """
    listed = read_manifest(path)
    for name, entry in listed.items():
        file = path / name
        if not file.is_file():
            raise ConfigError(f"{path} lacks {name}, which its {MANIFEST} lists")
        if (size := file.stat().st_size) != entry["size"]:
            raise ConfigError(
                f"{file} has {size} bytes, {MANIFEST} says {entry['size']}: an incomplete copy?"
            )
    _refuse_unlisted(path, listed)
    for name, entry in sorted(listed.items()):
        if only(name, entry["size"]) and (found := _known_sha256(path / name)) != entry["sha256"]:
            raise ConfigError(
                f"{path / name} was changed after it was saved: sha256 {found[:12]},"
                f" {MANIFEST} says {entry['sha256'][:12]}"
            )


def verify(path: Path, *, only: Only | None = None) -> None:
    """Check checkpoint ``path``; ranks share the contents of large files out.

    Args:
        path: a checkpoint.
        only: instead, every rank reads these files.

    Raises:
        ConfigError: naming the file and both numbers, and an earlier checkpoint if there is one.
    """
    turns = itertools.cycle(range(dist.world_size()))
    try:
        check_whole(path, only or (lambda _, size: next(turns) == dist.rank() or size <= _SMALL))
    except ConfigError as error:
        if (earlier := whole_before(path)) is None:
            raise
        raise ConfigError(f"{error}; the one before it: resume={earlier}") from None


def whole_before(path: Path) -> Path | None:
    """Return the newest whole checkpoint of the same run before ``path``."""
    for found in reversed(checkpoints_of(path.parent.parent)):
        if step_of(found) < step_of(path):
            with contextlib.suppress(ConfigError):
                check_whole(found)
                return found
    return None


def _refuse_unlisted(path: Path, listed: dict[str, Any]) -> None:
    for file in path.rglob("*"):
        name = file.relative_to(path).as_posix()
        # DeepSpeed takes whatever lies in its folder, and it is pickle
        harmless = file.suffix == ".md" or file.name.startswith(".") or name == MANIFEST
        if file.is_dir() or name in listed or (harmless and not name.startswith("deepspeed/")):
            continue
        raise ConfigError(f"{path} holds {name}, which its {MANIFEST} does not list")


def _known_sha256(file: Path) -> str:
    stat = file.stat()
    return _sha256(file.resolve(), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)  # a run of several stages asks again
def _sha256(file: Path, size: int, time: int) -> str:
    del size, time
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def checkpoint_to_resume(cfg: TrainConfig, say: Callable[[str], None] | None = None) -> Path | None:
    """Return the checkpoint that ``cfg.resume`` means, None to start from the beginning.

    Of one that is named its state.json has been verified, and the sizes of the other files:
    :func:`verify` before they are loaded. ``resume=auto`` has verified all of it on every rank, as
    all must choose the same one before they can talk.

    Args:
        cfg: the run's settings.
        say: told of each damaged checkpoint that ``resume=auto`` passes over.

    Raises:
        ConfigError: if there is none, if it is damaged, if it was written with other settings, or
            if it holds pickle of another run and ``resume_trust`` is not set.
    """
    if not cfg.resume:
        return None
    path = _newest_whole(Path(cfg.run_dir), say) if cfg.resume == "auto" else Path(cfg.resume)
    if path is None:
        return None
    if not path.is_dir():
        raise ConfigError(f"resume={cfg.resume}: no checkpoint at {path}")
    verify(path, only=lambda name, _: name == "state.json")
    _refuse_foreign_pickle(path, cfg)
    check_settings(path, read_state(path), cfg)
    return path


def ready_to_resume(cfg: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
    """Check what ``cfg.resume`` means, all of it, before a model is loaded.

    Args:
        cfg: the run's settings.
        say: told of damaged checkpoints, and of what another number of ranks changes.

    Returns:
        ``cfg``, on another number of ranks than before with the ``optim.accumulation`` that keeps
        the global batch.

    Raises:
        ConfigError: if it cannot be resumed; see :func:`checkpoint_to_resume`, :func:`verify`.
    """
    path = checkpoint_to_resume(cfg, say)
    if path is None:
        return cfg
    verify(path)
    state = read_state(path)
    if state["world_size"] == dist.world_size():
        return cfg
    needed = accumulation_here(path, state)
    say(
        f"{path} was written by {state['world_size']} processes, this run has {dist.world_size()}: "
        f"optim.accumulation={needed} keeps the global batch, the random generators are seeded anew"
    )
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, accumulation=needed))


def _newest_whole(run_dir: Path, say: Callable[[str], None] | None) -> Path | None:
    found = checkpoints_of(run_dir)
    torn = []
    for path in reversed(found):
        try:
            check_whole(path)
        except ConfigError as error:
            torn.append(str(error))
            continue
        for line in torn if say else []:
            say(f"passing over {line}")  # type: ignore[misc]
        return path
    if torn:  # starting anew would throw the run away
        raise ConfigError(
            f"resume=auto: none of the {len(found)} checkpoints of {run_dir} is whole: {torn[0]}; "
            "remove them to start from the beginning"
        )
    return None


def _refuse_foreign_pickle(path: Path, cfg: TrainConfig) -> None:
    # links are followed: what counts is where the files lie
    inside = path.resolve().is_relative_to(Path(cfg.run_dir).resolve())
    if (path / "deepspeed").exists() and not inside and not cfg.resume_trust:
        raise ConfigError(
            f"{path} is not below this run's directory {cfg.run_dir}, and DeepSpeed's state is "
            "pickle, which can run any code when it is loaded; if you trust who wrote it, add "
            "resume.trust=true"
        )


@contextlib.contextmanager
def new_checkpoint(run_dir: Path, step: int) -> Iterator[Path]:
    """Write ``checkpoints/step-<step>`` from all ranks; it appears whole or not at all.

    Yields:
        The folder to write into, before the manifest is.

    Raises:
        RunError: if the disk is full; earlier checkpoints are untouched.
    """
    path = run_dir / "checkpoints" / f"step-{step:07d}"
    with writing(path) as folder:
        if dist.is_main():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        yield folder
        dist.barrier()
        flush_folder(folder)  # what this rank's machine still holds back
        dist.barrier()
        _write_manifest(folder)
        if dist.is_main():
            publish(path)
        dist.barrier()


def _write_manifest(folder: Path) -> None:
    """List every file of a checkpoint; the ranks share the hashing out."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".md")
    dist.barrier()  # all ranks have listed the same files before the first part is written
    entries = {
        file.relative_to(folder).as_posix(): {
            "size": file.stat().st_size,
            "sha256": _sha256.__wrapped__(file, 0, 0),
        }
        for file in files[dist.rank() :: dist.world_size()]
    }
    parts = [folder / f".manifest-{rank}.json" for rank in range(dist.world_size())]
    if len(parts) > 1:
        write_json(parts[dist.rank()], entries)
        dist.barrier()
    if dist.is_main():
        if len(parts) > 1:
            for part in parts:
                entries |= read_json(part, f"{folder} is incomplete")
                part.unlink()
        write_json(folder / MANIFEST, {"files": dict(sorted(entries.items()))})


def prune(run_dir: Path, keep: int, *, newest: int | None = None, best: int = 0) -> None:
    """Remove old checkpoints, and what killed runs left half-written.

    Args:
        run_dir: the run's directory.
        keep: how many of the newest to keep.
        newest: step of the one just saved. Later ones are of a continuation that was given up by
            ``resume=path``: they go, or ``resume=auto`` would take them for this run's.
        best: step of one to keep beside them, 0 for none.
    """
    if not dist.is_main():
        return
    found = checkpoints_of(run_dir)
    now = [path for path in found if newest is None or step_of(path) <= newest]
    kept = {*now[-keep:], *(path for path in now if best and step_of(path) == best)}
    for path in found:
        if path not in kept:
            # renamed first: a half-removed checkpoint must not look like a whole one
            path.rename(aside(path))
    for pattern in (".step-*.tmp", ".step-*.old"):
        for path in (run_dir / "checkpoints").glob(pattern):
            shutil.rmtree(path)
