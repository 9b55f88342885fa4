"""``data=pycode``: Python source found on this machine, as documents and as instruction pairs.

``pycode_corpus`` finds the modules and splits them, ``pycode_pairs`` makes the pairs of one module;
here a pair goes where its module goes, and the whole is cached, since making it takes 90 s.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specheads.data.pycode_corpus import (
    DEFAULT_PACKAGES,
    Module,
    find_modules,
    licence_of,
    package_versions,
    say,
    told,
)
from specheads.data.pycode_pairs import KINDS, pairs_of_module, rank

CODE_VERSION = 1  # change it when the corpus or the pairs change: it is part of the cache key
MAX_PAIRS_PER_KIND = 12_000

Record = dict[str, Any]


def make_pairs(modules: Iterable[Module]) -> dict[str, list[Record]]:
    """Split -> pairs, at most ``MAX_PAIRS_PER_KIND`` of each kind; no code is in both splits."""
    modules = sorted(modules, key=lambda module: (module.split, module.path))  # held-out ones first
    taken: dict[tuple[str, str], str] = {}
    found: dict[str, dict[str, list[Record]]] = {
        split: {kind: [] for kind in KINDS} for split in ("heldout", "train")
    }
    for module in told(modules, "making pairs"):
        for pair in pairs_of_module(module.path, module.text):
            owner = taken.setdefault(("code", pair.code), module.split)
            if (
                owner == module.split
                and taken.setdefault((pair.kind, pair.prompt), module.path) == module.path
            ):
                taken[(pair.kind, pair.prompt)] = "done"
                found[module.split][pair.kind].append(
                    _record(module, pair.kind, pair.name, pair.prompt, pair.answer)
                )
    return {
        split: [
            record
            for records in kinds.values()
            for record in in_hash_order(records)[:MAX_PAIRS_PER_KIND]
        ]
        for split, kinds in found.items()
    }


def documents(split: str, packages: Sequence[str] = DEFAULT_PACKAGES) -> list[Record]:
    """``{"id", "kind": "document", "text"}`` for every module of ``train`` or ``heldout``."""
    modules, _ = _load(tuple(packages))
    return [{"id": m.path, "kind": "document", "text": m.text} for m in modules if m.split == split]


def pairs(
    split: str, kinds: Sequence[str] = KINDS, packages: Sequence[str] = DEFAULT_PACKAGES
) -> list[Record]:
    """``{"id", "kind", "messages": [user, assistant]}``: kind after kind, each in hash order."""
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ValueError(f"unknown kind of pair {', '.join(unknown)}; there are {', '.join(KINDS)}")
    _, made = _load(tuple(packages))
    return [record for record in made[split] if record["kind"] in kinds]


def corpus_manifest(packages: Sequence[str] = DEFAULT_PACKAGES) -> dict[str, str]:
    """Module path -> sha256 of its text, for the whole corpus."""
    modules, _ = _load(tuple(packages))
    return {module.path: module.sha256 for module in modules}


def corpus_summary(packages: Sequence[str] = DEFAULT_PACKAGES) -> dict[str, Any]:
    """The corpus in brief: per package its version, licence, size and one hash over its files.

    The hash is over the sorted lines ``path sha256``; held-out modules are listed one by one.
    """
    modules, _ = _load(tuple(packages))
    summary: dict[str, Any] = {}
    for name, version in package_versions(packages).items():
        own = [module for module in modules if module.path.split("/")[0] == name]
        lines = "\n".join(sorted(f"{module.path} {module.sha256}" for module in own))
        summary[name] = {
            "version": version,
            "licence": licence_of(name),
            "files": len(own),
            "bytes": sum(len(module.text.encode()) for module in own),
            "sha256": hashlib.sha256(lines.encode()).hexdigest(),
            "heldout": {module.path: module.sha256 for module in own if module.split == "heldout"},
        }
    return summary


def heldout_prompts(
    n: int,
    kinds: Sequence[str] = KINDS,
    max_answer: int = 110,
    packages: Sequence[str] = DEFAULT_PACKAGES,
    skip: int = 0,
) -> list[Record]:
    """``n`` held-out pairs to measure on: first in hash order, equal numbers per kind, short.

    ``skip`` leaves out the first ``skip`` and every module that they come from: a calibration set
    that shares nothing with the set of ``skip`` prompts.
    """
    made = [
        r
        for r in pairs("heldout", kinds, packages)
        if len(r["messages"][1]["content"].encode()) <= max_answer
    ]

    def first(count: int, records: list[Record]) -> list[Record]:
        each = -(-count // len(kinds))
        by_kind = [
            in_hash_order([r for r in records if r["kind"] == kind])[:each] for kind in kinds
        ]
        return [row[i] for i in range(each) for row in by_kind if i < len(row)][:count]

    if skip:
        modules = {module_of(record) for record in first(skip, made)}
        made = [record for record in made if module_of(record) not in modules]
    return first(n, made)


def prompts_digest(records: Iterable[Record]) -> str:
    """One sha256 over a prompt set: two figures are comparable only where it is the same."""
    lines = (json.dumps(record, sort_keys=True, ensure_ascii=False) for record in records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def module_of(record: Record) -> str:
    """The module path in a record's id: ``kind:path:function:digest``, or the path itself."""
    return str(record["id"]).split(":")[1] if record["kind"] != "document" else str(record["id"])


def in_hash_order(records: Iterable[Record]) -> list[Record]:
    """A fixed shuffle: by a hash of the ids, so that it does not depend on what else there is."""
    return sorted(records, key=lambda record: rank("order", record["id"]))


def _record(module: Module, kind: str, name: str, prompt: str, answer: str) -> Record:
    digest = hashlib.sha256(f"{prompt}\0{answer}".encode()).hexdigest()[:8]
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"id": f"{kind}:{module.path}:{name}:{digest}", "kind": kind, "messages": messages}


_memory: dict[str, tuple[list[Module], dict[str, list[Record]]]] = {}


def _load(packages: tuple[str, ...]) -> tuple[list[Module], dict[str, list[Record]]]:
    """The corpus and its pairs, from memory, from the cache on disk, or made now (90 s)."""
    key = json.dumps([CODE_VERSION, sys.version_info[:3], package_versions(packages)])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    if name in _memory:
        return _memory[name]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specheads"
    file = folder / f"pycode-{name}.json.gz"
    if file.exists():
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            stored = json.load(stream)
        result = [Module(*item) for item in stored["modules"]], stored["pairs"]
    else:
        say(
            "making the built-in corpus (data=pycode) from the Python source on this machine:"
            f" a few minutes, once; it is then kept in {file}"
        )
        modules = find_modules(packages)
        result = modules, make_pairs(modules)
        _store(file, {"modules": [[m.path, m.text] for m in modules], "pairs": result[1]})
    _memory[name] = result
    return result


def _store(file: Path, content: dict[str, Any]) -> None:
    """Write aside, then rename: nobody reads half a file. A full disk costs only time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as aside:
            try:
                with gzip.open(aside, "wt", encoding="utf-8", compresslevel=1) as stream:
                    json.dump(content, stream, ensure_ascii=False)
                aside.flush()
                os.fsync(aside.fileno())
                Path(aside.name).replace(file)
            except BaseException:
                Path(aside.name).unlink()
                raise
    except OSError as error:
        say(
            f"cannot keep it in {file.parent} ({error.strerror}): the next command makes it anew;"
            " XDG_CACHE_HOME names another place"
        )
