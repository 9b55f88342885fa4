"""Model cards: ``README.md`` with the hub's YAML, beside everything that is exported.

Their words stand in card.md.j2; what they say is gathered here. What was measured stands between
two marks. Only that part is replaced when it is measured again: whatever is written around it by
hand stays. The licence is that of the base model, as its own card or config states it, and never
guessed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import metadata_load

from specheads.config import ConfigError, RunError
from specheads.formats import serving
from specheads.formats.write import FORMATS, commands, upload
from specheads.models.checkpoint import read_config
from specheads.models.manifest import one_line, read_json, read_provenance, said_of
from specheads.models.names import OURS
from specheads.system.files import filled, write_whole
from specheads.system.hub import fetched, keep_to_the_cache_if_unreachable

CARD = "README.md"
BEGIN = "<!-- specheads: measured. This part is rewritten; write elsewhere. -->"
END = "<!-- specheads: end of measured -->"
_BENCH = "bench.json"
# per kind of export: what it is, and its tag on the hub
_KINDS = {
    "medusa": ("Medusa heads", "medusa"),
    "hydra": ("Hydra heads", "hydra"),
    "block": ("Block heads", "dflash"),
    "eagle3": ("An EAGLE-3 head", "eagle3"),
    "mtp": ("Multi-token-prediction heads", "multi-token-prediction"),
    "draft": ("A draft model", "draft-model"),
    "base": ("A base model", ""),
}
# methods of a bench that say something about the folder
_METHODS = ("plain", "hf_generate", "prompt_lookup", "tree", "tree_dynamic")


def write(
    folder: str | Path,
    form: str,
    info: Mapping[str, Any],
    *,
    final: Mapping[str, float] | None = None,
    name: str = "",
) -> None:
    """Write the card of a folder that was just written; one that lies there is replaced.

    Args:
        folder: where it goes. A ``bench.json`` in it is taken for what was measured.
        form: its format, a key of ``FORMATS``.
        info: the config.json of the native export it was made of, the specheads.json of a draft
            model, or nothing of a kind for a plain model trained from scratch.
        final: ``final/...`` of a recipe's last evaluation, made on this machine now.
        name: ``organisation/name`` where it is uploaded to; empty: commands name the folder.

    Raises:
        ConfigError: if a ``bench.json`` in the folder cannot be read.
        RunError: if the disk is full.
    """
    from specheads.system import hardware

    folder, info = Path(folder), dict(info)
    about, is_draft = info.get("base", {}), info.get("kind") == "draft"
    base = str(about.get("name") or "")
    licence = licence_of(base, about.get("revision"))
    if (folder / _BENCH).is_file():
        figures = _by_bench(read_json(folder / _BENCH, "no bench"), folder / _BENCH)
    else:
        found = final or (info.get("measured") if is_draft else None) or {}
        figures = _by_training(form, info, found, hardware.environment() if final else {})
    place = name or folder.resolve().name
    if form == "native" and not is_draft:  # heads are loaded from a folder, not from the hub
        place = place.rpartition("/")[2]
    training, kind = info.get("training") or {}, info.get("kind", "base")
    data = training.get("data")
    data = data if isinstance(data, Mapping) else {}
    text = _rendered(
        "whole",
        front=_front_matter(form, info, licence),
        form=form,
        holds=FORMATS[form].holds,
        kind=kind,
        what=_KINDS.get(kind, (f"{kind} heads", ""))[0],
        num_heads=info.get("num_heads"),
        # of a folder only its own name
        base=Path(base).name if Path(base).is_absolute() else base,
        tuned=about.get("tuned"),
        without=_without_heads(form, info),
        training={"draft": {}, **training},
        heldout=training.get("heldout") or {},
        data=data,
        source=_source(data),
        measured=f"{BEGIN}\n{figures}\n{END}",
        place=place,
        download=name if place != name else "",
        served=commands(form, place, info, base=_moved(base, about.get("tuned"))),
        licence=licence,
    )
    _save(folder / CARD, text + "\n")


def _source(data: Mapping[str, Any]) -> str:
    """Return where data came from: of a folder of this machine only its own name."""
    source, path = data.get("source") or "", str(data.get("path") or "")
    shown = path if source == "hub" else Path(path).name
    return f"{source} {shown}".strip() if source else ""


def finish(
    folder: Path, form: str, info: dict[str, Any], *, push: str = "", private: bool = False
) -> None:
    """Write the card of a folder, print how it is served, and upload it if asked.

    Args:
        folder: that was just written, whole.
        form: its format, a key of ``FORMATS``.
        info: the config.json of the native export that it was made of, or the specheads.json of a
            draft model.
        push: ``organisation/name`` on the hub, see :func:`check_push`; empty: nowhere.
        private: of a repository that is made for it.

    Raises:
        RunError: if the upload fails, or the disk is full; the folder stays.
    """
    write(folder, form, info, name=push)
    print("\n".join(serving.lines(commands(form, folder, info))))
    if push:
        print(f"uploaded to {upload(folder, push, private=private)}")


def check(folder: str | Path) -> None:
    """Check that :func:`measured` will find a card whose part it can replace, or can write one.

    Raises:
        ConfigError: if it cannot.
    """
    folder = Path(folder)
    if (folder / CARD).exists():
        _split(folder)
    else:
        _about(folder)


def measured(folder: str | Path, result: Mapping[str, Any] | None = None) -> None:
    """Replace the measured part of a folder's card; an export without one is given one.

    Args:
        folder: with a card, or a native export.
        result: what ``specheads.bench`` writes. None: what the folder's config.json says of its
            tree, which a tree search has just replaced.

    Raises:
        ConfigError: if there is neither, the card has lost its marks, or ``result`` is none.
        RunError: if the disk is full.
    """
    folder = Path(folder)
    if not (folder / CARD).exists():
        write(folder, "native", _about(folder))
    before, after = _split(folder)
    if result is None:
        info = read_json(folder / "config.json", f"{folder} is no export")
        text = _by_training("native", info, {}, {})
    else:
        text = _by_bench(result, folder / _BENCH)
    _save(folder / CARD, f"{before}{BEGIN}\n{text}\n{END}{after}")


def refresh(folder: str | Path) -> bool:
    """Let the card of an export say what its new tree is expected to do, in place of old figures.

    Returns:
        whether it has a card with a part for that; one without is left alone.

    Raises:
        RunError: if the disk is full.
    """
    with contextlib.suppress(ConfigError):
        if (Path(folder) / CARD).exists():
            measured(folder)
            return True
    return False


def _about(folder: Path) -> dict[str, Any]:
    """Return what an export without a card says of itself."""
    with said_of(f"{folder} has no {CARD}, and none can be written"):
        return read_provenance(folder) or read_config(folder)


def _split(folder: Path) -> tuple[str, str]:
    """Return what stands before and after the measured part."""
    file = folder / CARD
    with one_line(f"cannot read {file}"):
        text = file.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        missing = END if begin else BEGIN
        raise ConfigError(f"{file} lacks the line {missing!r}: measured figures go between the two")
    return before, after


def _save(file: Path, text: str) -> None:
    try:
        write_whole(file, text)
    except PermissionError as error:
        raise RunError(f"cannot write {file}: {error}") from None


def _on_the_hub(base: str) -> bool:
    """Return whether a recorded base is a name on the hub: folders are recorded by full paths."""
    return bool(base) and base not in OURS and not Path(base).is_absolute()


def _moved(base: str, tuned: object) -> str:
    """Return how commands call a base that no path of this machine may name; else nothing."""
    if tuned or not base or _on_the_hub(base):
        return ""
    return {"tinycode": "data/tinycode", "smollm2": "smollm2"}.get(base, "BASE")


def _without_heads(form: str, info: Mapping[str, Any]) -> bool:
    """Return whether a format leaves out the heads of the export it is made of."""
    return form == "plain" and info.get("kind", "draft") != "draft"


def _front_matter(form: str, info: Mapping[str, Any], licence: Licence) -> str:
    """Return the YAML that the hub reads; every string is quoted as JSON, which YAML includes."""
    kind, base = info.get("kind"), str(info.get("base", {}).get("name") or "")
    without = _without_heads(form, info)
    relation = "" if without or kind == "draft" else "adapter"
    start = ((info.get("training") or {}).get("draft") or {}).get("start")
    if info.get("base", {}).get("tuned") or (kind == "draft" and start == "base"):
        relation = "finetune"
    tags = [] if without or kind is None else [_KINDS.get(kind, ("", kind))[1]]
    hub = _on_the_hub(base)
    values = {
        "license": licence.identifier,
        "license_name": licence.name,
        "license_link": licence.link,
        "base_model": base if hub else "",
        "base_model_relation": relation if hub else "",
        "library_name": "transformers" if FORMATS[form].loads else "specheads",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", *tags],
    }
    lines = [f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in values.items() if v]
    return "\n".join(lines)


def _rendered(part: str, **said: Any) -> str:
    """Return a part of a card: the whole, what a bench measured, or what training did."""
    text = filled(Path(__file__).with_name("card.md.j2"), part=part, **said)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _by_training(
    form: str, info: Mapping[str, Any], final: Mapping[str, float], machine: Mapping[str, Any]
) -> str:
    """Return what the recipe measured itself: the chosen tree, and its last evaluation."""
    tree = info.get("tree") or {}
    on = tree.get("measured_on") or {}
    found: dict[str, dict[str, Any]] = {}  # by temperature
    for key, value in sorted(final.items()):
        if key.startswith("final/"):
            name, _, at = key.removeprefix("final/").rpartition("/")
            found.setdefault(at.removeprefix("t"), {})[name] = value
    return _rendered(
        "training",
        without=_without_heads(form, info),
        tree=tree,
        on={"dynamic": {}, **on},
        chain=_chain(tree) if on and FORMATS[form].chain else 0.0,
        final=[{"at": at, **each} for at, each in sorted(found.items()) if "accept_length" in each],
        machine=", ".join(filter(None, (info.get("base", {}).get("dtype"), _machine(machine)))),
    )


def _chain(tree: Mapping[str, Any]) -> float:
    """Return the expected accept length of the tree's first choices alone; 0 if it is unknown."""
    chances, choices = tree["measured_on"].get("acceptance") or [], tree["choices"]
    if len(chances) != len(choices):
        return 0.0
    # a path of ranks that are all 0 takes every head's best guess
    first = [chance for path, chance in zip(choices, chances, strict=True) if not any(path)]
    return 1 + sum(first) if first else 0.0


def _by_bench(result: Mapping[str, Any], file: Path) -> str:
    """Return the table of a bench's rows at batch 1.

    Raises:
        ConfigError: if ``result``, which may be read from ``file``, is none.
    """
    try:
        methods = {*_METHODS, (result.get("headline") or {}).get("method")}
        rows = [row for row in result["rows"] if row["batch"] == 1 and row["method"] in methods]
        about, settings = result["environment"], result["settings"]
        return _rendered(
            "bench",
            rows=sorted(rows, key=itemgetter("temperature")),
            dtypes=", ".join(sorted({row["dtype"] for row in rows})),
            num_prompts=settings["num_prompts"],
            max_new_tokens=settings["max_new_tokens"],
            machine=_machine(about),
            about=about,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is no result of specheads.bench: {error!r:.100}") from None


def _machine(about: Mapping[str, Any]) -> str:
    """Return hardware and date in a few words."""
    device = about.get("device", "cpu")
    found = [device, about.get("date")]
    if device == "cpu":
        threads = f"{about['threads']} threads" if about.get("threads") else None
        found = [about.get("processor") or "cpu", threads, about.get("date")]
    return ", ".join(str(each) for each in found if each) or "machine unknown"


UNKNOWN = "unknown"  # which the hub knows as a licence of its own
_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.+-]{0,60}")
_LINK = re.compile(r"https://[\w./%+-]{1,200}")


class Licence(NamedTuple):
    """What is known of a licence.

    Attributes:
        identifier: for the card's ``license``, ``unknown`` where nothing says it.
        name: of an ``other`` one.
        link: to its text.
        source: where it was read.
    """

    identifier: str
    name: str = ""
    link: str = ""
    source: str = ""


def licence_of(name: str, revision: str | None = None) -> Licence:
    """Return the licence of a base model.

    Args:
        name: a folder, a GGUF file, a name on the hub, ``tinycode``, ``smollm2``; empty where there
            is no original.
        revision: of the hub's.
    """
    if not name:
        return Licence(UNKNOWN)
    folder = Path(serving.resolved(name)).expanduser()
    found = None
    if folder.is_dir():
        found = _of_file(folder / CARD) or _of_file(folder / "config.json")
    elif not folder.is_absolute():
        keep_to_the_cache_if_unreachable()
        card = fetched(name, CARD, revision)
        found = _of_file(card) if card else None
    return found or Licence(UNKNOWN)


def _of_file(file: Path) -> Licence | None:
    """Return what the YAML at the head of a card says, or a config; None if it does not say it.

    A stranger's words are not copied as they are.
    """
    import yaml

    try:
        is_card = file.name == CARD
        about = metadata_load(file) if is_card else read_json(file, "no config", strict=False)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(about, dict):
        return None

    def stated(key: str, pattern: re.Pattern[str]) -> str:
        value = about.get(key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        return value if isinstance(value, str) and pattern.fullmatch(value) else ""

    if not (identifier := stated("license", _IDENTIFIER)):
        return None
    name, link = stated("license_name", _IDENTIFIER), stated("license_link", _LINK)
    return Licence(identifier.lower(), name, link, f"its {file.name}")
