"""Files that are written whole or not at all, and the folders that ship with specheads.

A folder or file is written aside, flushed, then renamed, so that nobody meets half of one. What
ships lies inside the package in a wheel, and beside it in a clone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specheads.system.errors import ConfigError, RunError

_PACKAGE = Path(__file__).resolve().parents[1]


def _shipped(name: str, beside: str = "") -> Path:
    inside, outside = _PACKAGE / name, _PACKAGE.parent / (beside or name)
    if inside.is_dir():
        return inside
    if outside.is_dir() and (_PACKAGE.parent / "pyproject.toml").is_file():
        return outside
    raise FileNotFoundError(f"specheads has lost its {name} folder; reinstall it")


def conf_dir() -> Path:
    """Return the folder of Hydra configs."""
    return _shipped("conf")


def recipes_dir() -> Path:
    """Return the folder of recipe programs."""
    return _shipped("recipes")


def tinycode_dir() -> Path:
    """Return the folder of the embedded base model."""
    # a clone keeps it under data/, which inside the package is the name of a module
    return _shipped("tinycode", "data/tinycode")


def shipped_export(checkpoint: str) -> str:
    """Return the folder of the heads that ship for ``smollm2``; any other checkpoint as it is."""
    if checkpoint != "smollm2":
        return checkpoint
    return str(_shipped("checkpoints/smollm2", "data/checkpoints/smollm2"))


def check_folder(key: str, path: str | Path) -> Path:
    """Return the path of a file that is to be written.

    Raises:
        ConfigError: naming the setting ``key``, if there is no folder for it.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{key} is {path}, but there is no folder {path.parent}")
    return path


def flush_file(path: Path) -> None:
    """Force one file, or the names in one folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_folder(folder: Path) -> None:
    """Force every file below ``folder``, and the folder itself, onto the disk."""
    for path in sorted(folder.rglob("*")):
        flush_file(path)
    flush_file(folder)


def no_room(error: BaseException) -> bool:
    """Return whether ``error`` says that the disk (or the quota, or the file size) is used up."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    text = str(error)  # safetensors and torch wrap the system's error into their own
    return any(word in text for word in ("No space left", "StorageFull", "File too large"))


@contextlib.contextmanager
def made_for_now(folder: Path) -> Iterator[None]:
    """Make a folder and those above it, and in the end remove of them what is new and empty.

    Raises:
        OSError: if it cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def aside(path: Path) -> Path:
    """Return the place at which the future contents of ``path`` are written."""
    return path.with_name(f".{path.name}.tmp")


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders swap their names at once; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux
    if rename is None:
        return False
    at_cwd, swap = -100, 2
    return bool(rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), swap) == 0)


def publish(path: Path) -> None:
    """Flush the folder written aside and put it in the place of ``path``."""
    fresh, old = aside(path), path.with_name(f".{path.name}.old")
    flush_folder(fresh)
    shutil.rmtree(old, ignore_errors=True)
    if not path.exists():
        fresh.rename(path)
    elif not _exchange(fresh, path):  # killed between these two, there would be neither
        path.rename(old)
        fresh.rename(path)
    flush_file(path.parent)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(fresh, ignore_errors=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Remove what was written aside when writing fails, and say in one line that the disk is full.

    Yields:
        The file or folder to write; ``publish(path)`` makes a folder visible.

    Raises:
        RunError: if there was no room; whatever stood at ``path`` is untouched.
    """
    fresh = aside(path)
    try:
        yield fresh
    except BaseException as error:
        if fresh.is_dir():
            shutil.rmtree(fresh, ignore_errors=True)
        else:
            fresh.unlink(missing_ok=True)
        if no_room(error):
            raise RunError(
                f"no room to write {path} (disk full?); what was saved before is untouched"
            ) from error
        raise


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Write a folder so that it appears whole or not at all, replacing an earlier one.

    Yields:
        The folder to write into.

    Raises:
        RunError: if the disk is full; an earlier folder at ``path`` is untouched.
    """
    with writing(path) as fresh:
        shutil.rmtree(fresh, ignore_errors=True)  # left by a killed run
        fresh.mkdir(parents=True)
        yield fresh
        publish(path)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write a file so that it appears whole or not at all, replacing an earlier one.

    Yields:
        The file to write.

    Raises:
        RunError: if the disk is full; an earlier file at ``path`` is untouched.
    """
    with writing(path) as fresh:
        yield fresh
        flush_file(fresh)
        fresh.replace(path)
        flush_file(path.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a text by :func:`whole_file`."""
    with whole_file(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def cut_torn_line(path: Path) -> int:
    """Cut off what stands behind the last line break; a file that is not there has nothing.

    Returns:
        How many bytes that were.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        kept = sum(len(line) for line in file if line.endswith(b"\n"))
        size = file.tell()
        if kept < size:
            file.truncate(kept)
            os.fsync(file.fileno())
    return size - kept


def filled(template: Path, **values: Any) -> str:
    """Return the text of a Jinja template of ours; what fills one of HTML is escaped."""
    from jinja2 import Environment, FileSystemLoader

    made = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=".html" in template.suffixes,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return made.get_template(template.name).render(**values)


@contextlib.contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Make ``folder`` and hold it locked; the lock dies with its process, others wait for it.

    Raises:
        ConfigError: naming the setting ``key``, if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "LOCK").open("a")
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(f"{key}={folder} cannot be written: {error}") from None
    with handle:
        yield
