"""Model cards: ``README.md`` with the hub's YAML, beside everything that is exported.

What was measured stands between two marks. Only that part is replaced when it is measured again:
whatever is written around it by hand stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, RunError
from specheads.files import whole_file
from specheads.formats import card_texts
from specheads.formats.licence import UNKNOWN, Licence, licence_of
from specheads.formats.serving import Serving, commands
from specheads.models.checkpoint import read_config
from specheads.models.draft_files import read_provenance
from specheads.models.manifest import read_json

CARD = "README.md"
BEGIN = "<!-- specheads: measured. This part is rewritten; write elsewhere. -->"
END = "<!-- specheads: end of measured -->"
_PLAIN = ("plain", "hf", "mtp_standard", "merged", "draft")  # which from_pretrained loads
_BENCH = "bench.json"


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
        form: its format.
        info: the config.json of the native export it was made of, the specheads.json of a draft
            model, or nothing for a plain model trained from scratch.
        final: ``final/...`` of a recipe's last evaluation, made on this machine now.
        name: ``organisation/name`` where it is uploaded to; empty: commands name the folder.

    Raises:
        ConfigError: if a ``bench.json`` in the folder cannot be read.
        RunError: if the disk is full.
    """
    from specheads import hardware

    folder = Path(folder)
    info = dict(info)
    licence = _licence(info)
    if (folder / _BENCH).is_file():
        measured = _by_bench(read_json(folder / _BENCH, "no bench"), folder / _BENCH)
    else:
        of_draft = info.get("measured") if info.get("kind") == "draft" else None
        found, machine = final or {}, hardware.environment() if final else {}
        measured = card_texts.measured_by_training(form, info, found or of_draft or {}, machine)
    use = card_texts.serving(_served(form, name or folder.resolve().name, info))
    if name and form == "native" and info.get("kind") != "draft":  # which is loaded from a folder
        use = f"```sh\nhf download {name} --local-dir {_short(name)}\n```\n\n{use}"
    parts = [
        _front_matter(form, info, licence),
        f"# {card_texts.title(form, info)}",
        card_texts.introduction(form, info),
        f"## What the output is\n\n{card_texts.output(form, info)}",
        f"## Training\n\n{card_texts.training(info)}",
        f"## Measured\n\n{BEGIN}\n{measured}\n{END}",
        f"## Use\n\n{use}",
        f"## Licence\n\n{_licence_text(info, licence)}",
    ]
    _save(folder / CARD, "\n\n".join(parts) + "\n")


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
        text = card_texts.measured_by_training("native", info, {}, {})
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
    if not (Path(folder) / CARD).exists():
        return False
    try:
        measured(folder)
    except ConfigError:
        return False
    return True


def _about(folder: Path) -> dict[str, Any]:
    """Return what an export without a card says of itself."""
    try:
        return read_provenance(folder) or read_config(folder)
    except ConfigError as error:
        raise ConfigError(f"{folder} has no {CARD}, and none can be written: {error}") from None


def _split(folder: Path) -> tuple[str, str]:
    """Return what stands before and after the measured part."""
    file = folder / CARD
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        missing = END if begin else BEGIN
        raise ConfigError(f"{file} lacks the line {missing!r}: measured figures go between the two")
    return before, after


def _by_bench(result: Mapping[str, Any], file: Path) -> str:
    try:
        return card_texts.measured_by_bench(result)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is no result of specheads.bench: {error!r:.100}") from None


def _save(file: Path, text: str) -> None:
    with whole_file(file) as fresh:
        try:
            fresh.write_text(text, encoding="utf-8")
        except PermissionError as error:
            raise RunError(f"cannot write {file}: {error}") from None


def _front_matter(form: str, info: Mapping[str, Any], licence: Licence) -> str:
    """Return the YAML that the hub reads; every string is quoted as JSON, which YAML includes."""
    kind, about = info.get("kind", "base"), info.get("base", {})
    base = str(about.get("name") or "")
    values: dict[str, Any] = {"license": licence.identifier}
    if licence.name:
        values["license_name"] = licence.name
    if licence.link:
        values["license_link"] = licence.link
    if _on_the_hub(base):
        values["base_model"] = base
        if relation := _relation(form, info):
            values["base_model_relation"] = relation
    values["library_name"] = "transformers" if form in _PLAIN else "specheads"
    values["pipeline_tag"] = "text-generation"
    words = {"mtp": ["multi-token-prediction"], "draft": ["draft-model"], "base": []}
    heads = [] if card_texts.without_heads(form, info) else words.get(kind, [kind])
    values["tags"] = ["speculative-decoding", *heads]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _relation(form: str, info: Mapping[str, Any]) -> str:
    """Return the hub's word for how this came of its base; empty where it has none."""
    if info.get("base", {}).get("tuned"):
        return "finetune"
    if info.get("kind") == "draft":
        start = ((info.get("training") or {}).get("draft") or {}).get("start")
        return "finetune" if start == "base" else ""
    return "" if form in ("plain", "vllm_custom_class") else "adapter"


def _licence(info: Mapping[str, Any]) -> Licence:
    about = info.get("base", {})
    return licence_of(str(about.get("name") or ""), about.get("revision"))


def _licence_text(info: Mapping[str, Any], licence: Licence) -> str:
    base = card_texts.shown_base(info)
    if not base:
        return (
            "Not set: the model was trained from scratch. Whoever publishes it says under which"
            " licence, here and in `license` above."
        )
    if licence.identifier == UNKNOWN:
        return (
            f"Unknown: neither a card nor the config of {base} names a licence. What is derived"
            " from a model is bound by its licence: look it up before passing this on."
        )
    named = licence.name or licence.identifier
    link = f" ({licence.link})" if licence.link else ""
    return f"{named}{link}: that of the base model {base}, read in {licence.source}."


def _served(form: str, name: str, info: dict[str, Any]) -> list[Serving]:
    """Return the serving commands for a card, where no path of this machine belongs."""
    about = info.get("base", {})
    base = str(about.get("name") or "")
    if form == "native" and info.get("kind") != "draft":
        name = _short(name)
    if about.get("tuned") or not base or _on_the_hub(base):
        return commands(form, name, info)
    return commands(form, name, info, base="data/tinycode" if base == "tinycode" else "BASE")


def _on_the_hub(base: str) -> bool:
    """Return whether a recorded base is a name on the hub: folders are recorded by full paths."""
    return bool(base) and base != "tinycode" and not Path(base).is_absolute()


def _short(name: str) -> str:
    return name.rpartition("/")[2]
