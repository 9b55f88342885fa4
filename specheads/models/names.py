"""What the names of models mean: a folder, a name on the hub, or the embedded model."""

from __future__ import annotations

import re
from pathlib import Path

from specheads.assets import tinycode_dir
from specheads.config import ConfigError
from specheads.models.hub import keep_to_the_cache_if_unreachable

_HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
_REVISION = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")


def resolve_name(name: str) -> str:
    """Return what transformers calls the model: ``tinycode`` is the embedded one's folder.

    For a name on the hub it is found out whether the hub answers.

    Raises:
        ConfigError: if ``name`` looks like a folder that does not exist, or one without a model.
    """
    if name == "tinycode":
        return str(tinycode_dir())
    path = Path(name).expanduser()
    if path.is_dir():
        if not any(path.glob("*.json")):  # which a tokenizer alone has too
            found = ", ".join(sorted(each.name for each in path.iterdir())[:5])
            raise ConfigError(
                f"model.name={name}: the folder holds no model, which is config.json,"
                " model.safetensors and tokenizer.json as save_pretrained writes them; it holds"
                f" {found or 'nothing'}"
            )
        return str(path)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise ConfigError(f"model.name={name}: there is no such folder")
    keep_to_the_cache_if_unreachable()
    return name


def check_recorded(name: object, revision: object) -> None:
    """Check the base model that a config names which may come from a stranger.

    What is written is a name on the hub, ``tinycode``, or the full path of a folder, which
    :func:`specheads.models.digest.base_digest` is asked about before anything of it is loaded. A
    path that starts from wherever the user happens to be is never written.

    Raises:
        ConfigError: one line, if ``name`` is anything else, or ``revision`` no name of one.
    """
    known = isinstance(name, str) and (
        not name or Path(name).is_absolute() or (_HUB_NAME.fullmatch(name) and ".." not in name)
    )
    if not known or (isinstance(name, str) and (".." in Path(name).parts or "\0" in name)):
        raise ConfigError(
            f"base.name is {name!r:.80}, which is neither a name on the hub nor the full path of a"
            " folder"
        )
    if revision is not None and not (
        isinstance(revision, str) and _REVISION.fullmatch(revision) and ".." not in revision
    ):
        raise ConfigError(f"base.revision is {revision!r:.80}, which names no revision")
