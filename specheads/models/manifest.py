"""JSON files and the manifest of an export: every file with its size and sha256."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specheads.config import ConfigError
from specheads.models.digest import file_sha256

MANIFEST = "manifest.json"


def check_manifest(path: Path) -> dict[str, Any]:
    """Check every listed file's size and sha256 (cached per file), and return the manifest.

    Raises:
        ConfigError: if a file is missing, truncated or changed; names it with both numbers.
    """
    manifest = read_json(path / MANIFEST, f"{path} is not a whole export")
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise ConfigError(f"{path} lacks {name}, which its {MANIFEST} lists")
        if (size := file.stat().st_size) != expected["size"]:
            raise ConfigError(
                f"{file} has {size} bytes, {MANIFEST} says {expected['size']}: an incomplete copy?"
            )
        if (found := file_sha256(file)) != expected["sha256"]:
            raise ConfigError(
                f"{file} was changed after it was saved: sha256 {found[:12]},"
                f" {MANIFEST} says {expected['sha256'][:12]}"
            )
    return manifest


def write_manifest(folder: Path) -> None:
    """List every file below ``folder`` in its manifest.json, except texts such as a model card."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.suffix != ".md" and file != folder / MANIFEST
    )
    entries = {file.relative_to(folder).as_posix(): manifest_entry(file) for file in files}
    write_json(folder / MANIFEST, {"files": entries})


def manifest_entry(file: Path) -> dict[str, Any]:
    """Return what a manifest says about one file."""
    return {"size": file.stat().st_size, "sha256": file_sha256(file)}


def read_json(file: Path, problem: str) -> dict[str, Any]:
    """Read a JSON object; ``problem`` is what it means when there is no such file.

    Raises:
        ConfigError: if the file is missing or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{problem}: there is no {file}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold an object, found {type(content).__name__}")
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object and flush it to the disk."""
    with file.open("w", encoding="utf-8") as out:
        json.dump(content, out, indent=2, ensure_ascii=False)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
