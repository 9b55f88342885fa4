"""JSON files and the manifest of an export: every file with its size and sha256.

Both may come from a stranger: what is read is bounded, and no name leaves the folder.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from specheads.config import ConfigError
from specheads.models.digest import file_sha256

MANIFEST = "manifest.json"
_LARGEST = 64 << 20  # bytes of a JSON file that is read whole: a config has some thousand
_DEEPEST = 64  # objects and lists in one another
_SHA256 = re.compile(r"[0-9a-f]{64}")
# what transformers, peft or tokenizers would load if it lay in the folder
_LOADED = {
    ".json", ".safetensors", ".jinja", ".model", ".tiktoken", ".py",
    ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx",
}  # fmt: skip


def check_manifest(path: Path) -> dict[str, Any]:
    """Check every listed file's size and sha256 (cached per file), and return the manifest.

    Raises:
        ConfigError: if a file is missing, truncated or changed, names it with both numbers; if
            there is one that would be loaded and is not listed; if one lies elsewhere.
    """
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise ConfigError(f"{path} lacks {name}, which its {MANIFEST} lists")
        check_inside(path, file)
        if (size := file.stat().st_size) != expected["size"]:
            raise ConfigError(
                f"{file} has {size} bytes, {MANIFEST} says {expected['size']}: an incomplete copy?"
            )
        if (found := file_sha256(file)) != expected["sha256"]:
            raise ConfigError(
                f"{file} was changed after it was saved: sha256 {found[:12]},"
                f" {MANIFEST} says {expected['sha256'][:12]}"
            )
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
        loaded = file.suffix in _LOADED or file.name in ("merges.txt", "vocab.txt")
        if hidden or not loaded or name in (MANIFEST, *manifest["files"]):
            continue
        raise ConfigError(
            f"{path} holds {name}, which its {MANIFEST} does not list: it was not saved with it"
        )
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a folder; no file that it lists is looked at.

    Raises:
        ConfigError: if there is none, or it lists what cannot be a file of the folder.
    """
    manifest = read_json(path / MANIFEST, f"{path} is not a whole export")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise ConfigError(f"{path / MANIFEST} must hold an object 'files'")
    for name, entry in files.items():
        plain = PurePosixPath(name)
        odd = plain.is_absolute() or ".." in plain.parts or not plain.parts or "\\" in name
        if odd or str(plain) != name or "\0" in name:
            raise ConfigError(
                f"{path / MANIFEST} lists {name!r:.80}, which is no file of that folder"
            )
        if not (
            isinstance(entry, dict)
            and type(entry.get("size")) is int
            and isinstance(entry.get("sha256"), str)
            and _SHA256.fullmatch(entry["sha256"])
        ):
            raise ConfigError(f"{path / MANIFEST} must give {name} a size and a sha256")
    return manifest


def check_inside(folder: Path, file: Path) -> None:
    """Check that ``file`` lies in ``folder`` when links are followed.

    Models in the hub's cache are links, from ``snapshots/<commit>/`` to ``blobs/`` beside it: those
    are theirs.

    Raises:
        ConfigError: if it lies elsewhere.
    """
    lies = file.resolve()
    root = folder.resolve()
    cache = [up.parent / "blobs" for up in (root, *root.parents) if up.name == "snapshots"]
    if not any(lies.is_relative_to(allowed) for allowed in (root, *cache)):
        raise ConfigError(f"{file} is a link to {lies}, outside of {folder}")


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


def read_json(file: Path, problem: str, *, strict: bool = True) -> dict[str, Any]:
    """Read a JSON object; ``problem`` is what it means when there is no such file.

    Args:
        file: at most 64 MiB.
        problem: the beginning of the message.
        strict: refuse NaN, Infinity, and a key that is twice in one object: what is no JSON, or is
            read in two ways. Configs of others' models may have them.

    Raises:
        ConfigError: if the file is missing, holds something else, or is nested too deeply.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if strict and len(found) < len(pairs):  # others would take the first, or the last
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {twice!r:.40} is there twice")
        return found

    def number(text: str) -> float:
        value = float(text)
        if strict and not math.isfinite(value):
            raise ValueError(f"{text:.20} is not a finite number")
        return value

    try:
        if not file.is_file() and file.exists():
            raise ConfigError(f"cannot read {file}: it is no file")
        if (size := file.stat().st_size) > _LARGEST:
            raise ConfigError(f"cannot read {file}: it has {size} bytes, at most {_LARGEST} do")
        content = json.loads(
            file.read_text(encoding="utf-8"),
            object_pairs_hook=unique,
            parse_float=number,
            parse_constant=number,
        )
    except FileNotFoundError:
        raise ConfigError(f"{problem}: there is no {file}") from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"cannot read {file}: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    if _depth(content) > _DEEPEST:  # more than what is done with it can follow
        raise ConfigError(f"cannot read {file}: it is nested too deeply")
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold an object, found {type(content).__name__}")
    return content


def _depth(content: Any) -> int:
    depth, level = 0, [content]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [
            value for each in level for value in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def write_json(file: Path, content: dict[str, Any], *, strict: bool = True) -> None:
    """Write a JSON object and flush it to the disk; ``strict``: NaN and infinities as null."""
    with file.open("w", encoding="utf-8") as out:
        json.dump(_finite(content) if strict else content, out, indent=2, ensure_ascii=False)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())


def _finite(content: Any) -> Any:
    # a figure that could not be measured must not keep what was trained from being written
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
