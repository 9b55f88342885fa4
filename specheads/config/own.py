"""A user's own YAML file of settings, ``config=my.yaml``, as ``specheads init`` begins one.

The file holds what a command line would, ``optim.lr: 1e-3`` or ``optim: {lr: 1e-3}``. What stands
on the command line itself counts more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specheads.system.errors import ConfigError


def hydra_word(value: object) -> str:
    """Return a value as Hydra reads it on a command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {hydra_word(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_word, value)) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = str(value)
    if not isinstance(value, str) or (_PLAIN.fullmatch(text) and not _OTHER.fullmatch(text)):
        return text
    # in front of a quote, and at the end, Hydra takes two backslashes for one
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + m[2].replace("'", "\\'"), text) + "'"


_PLAIN = re.compile(r"[\w./:@~+-]+", re.ASCII)
# what would be read as another type than text
_OTHER = re.compile(r"[-+.\d_e]+|true|false|null|[-+]?(inf|nan)", re.IGNORECASE)


def with_own_file(argv: Sequence[str]) -> list[str]:
    """Return a command line with the settings of the file that ``config=`` names in its place.

    Raises:
        ConfigError: if there is no such file, or it holds no settings; one line.
    """
    others = [word for word in argv if not word.startswith("config=")]
    given = {word.partition("=")[0].lstrip("+~") for word in others}
    found: dict[str, str] = {}
    for word in argv:
        if word.startswith("config="):
            found |= _settings(Path(word.partition("=")[2]).expanduser())
    # recipe= is written +recipe= too, and model.name= where model= would be
    kept = {key: value for key, value in found.items() if key not in given}
    return [*(f"{key}={value}" for key, value in kept.items()), *others]


def _settings(path: Path) -> dict[str, str]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ConfigError(f"config={path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"config={path} is no YAML: {why}") from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"config={path} holds no settings; expected lines like optim.lr: 1e-3")
    return {key: hydra_word(value) for key, value in leaves(values)}


def leaves(values: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings with their whole keys, ``optim.lr`` say; an empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
