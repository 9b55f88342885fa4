"""The licence of a base model, as its own card or config states it; never guessed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from specheads.assets import tinycode_dir
from specheads.config import ConfigError
from specheads.models.hub import is_hub_error, keep_to_the_cache_if_unreachable
from specheads.models.manifest import read_json

UNKNOWN = "unknown"  # which the hub knows as a licence of its own
_IDENTIFIER = re.compile(r"[A-Za-z0-9][\w.+-]{0,60}")
_MOST = 1 << 20  # characters of a card that are read


class Licence(NamedTuple):
    """What is known.

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
        name: a folder, a name on the hub, ``tinycode``; empty where there is no original.
        revision: of the hub's.
    """
    if not name:
        return Licence(UNKNOWN)
    folder = tinycode_dir() if name == "tinycode" else Path(name).expanduser()
    if folder.is_dir():
        return _of_card(folder / "README.md") or _of_config(folder / "config.json")
    if folder.is_absolute():
        return Licence(UNKNOWN)
    card = _card_on_the_hub(name, revision)
    return (_of_card(card) if card else None) or Licence(UNKNOWN)


def _card_on_the_hub(name: str, revision: str | None) -> Path | None:
    """Return the card of a model on the hub: from the cache, or fetched if the hub answers."""
    from huggingface_hub import hf_hub_download

    keep_to_the_cache_if_unreachable()
    try:
        return Path(hf_hub_download(name, "README.md", revision=revision))
    except Exception as error:
        if not is_hub_error(error):
            raise
        return None  # no card, no access, no network: the licence stays unknown


def _of_card(file: Path) -> Licence | None:
    """Return what the YAML at the head of a card says; None if it does not say it."""
    import yaml

    try:
        with file.open(encoding="utf-8") as card:
            text = card.read(_MOST)
    except (OSError, UnicodeDecodeError):
        return None
    found = re.match(r"---\s*\n(.*?\n)---\s*(\n|$)", text, re.DOTALL)
    if not found:
        return None
    try:
        about = yaml.safe_load(found[1])
    except (yaml.YAMLError, RecursionError):
        return None
    return _checked(about, file)


def _of_config(file: Path) -> Licence:
    try:
        about = read_json(file, "no config", strict=False)
    except ConfigError:
        return Licence(UNKNOWN)
    return _checked(about, file) or Licence(UNKNOWN)


def _checked(about: Any, file: Path) -> Licence | None:
    """Return the licence in a mapping of keys; a stranger's words are not copied as they are."""
    if not isinstance(about, dict):
        return None
    identifier = about.get("license")
    if isinstance(identifier, list) and len(identifier) == 1:
        identifier = identifier[0]
    if not isinstance(identifier, str) or not _IDENTIFIER.fullmatch(identifier):
        return None
    name, link = about.get("license_name"), about.get("license_link")
    name = name if isinstance(name, str) and _IDENTIFIER.fullmatch(name) else ""
    plain = isinstance(link, str) and re.fullmatch(r"https://[\w./%+-]{1,200}", link)
    return Licence(identifier.lower(), name, str(link) if plain else "", f"its {file.name}")
