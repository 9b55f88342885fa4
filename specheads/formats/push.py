"""What follows a written folder: its card, the commands that serve it, and the upload if asked.

``push=organisation/name`` uploads it to the hub. The token comes from the environment or from
``hf auth login``, never from a setting, which would stand in shell histories and in what a run
writes about itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, RunError
from specheads.formats import card
from specheads.formats.serving import lines
from specheads.formats.write import commands
from specheads.models.manifest import first_line
from specheads.models.names import is_hub_error

_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?/[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?")
_LONGEST = 96  # characters of a name, as the hub limits it
_REFUSED = {
    401: "the hub does not accept the token: set HF_TOKEN, or run `hf auth login`",
    403: "the token may not write there: it needs the write permission for that organisation",
}


def finish(
    folder: Path, form: str, info: dict[str, Any], *, push: str = "", private: bool = False
) -> None:
    """Write the card of a folder, print how it is served, and upload it if asked.

    Args:
        folder: that was just written, whole.
        form: its format, a key of ``FORMATS``.
        info: the config.json of the native export that it was made of, or the specheads.json of a
            draft model.
        push: ``organisation/name`` on the hub, see :func:`check`; empty: nowhere.
        private: of a repository that is made for it.

    Raises:
        RunError: if the upload fails, or the disk is full; the folder stays.
    """
    card.write(folder, form, info, name=push)
    print("\n".join(lines(commands(form, folder, info))))
    if push:
        print(f"uploaded to {upload(folder, push, private=private)}")


def check(push: str) -> None:
    """Check the name, and that the hub knows who is asking, before anything is written.

    Args:
        push: ``organisation/name``.

    Raises:
        ConfigError: one line, if the name is none, nobody is logged in, the login is refused, or
            the hub cannot be reached.
    """
    if not _NAME.fullmatch(push) or len(push) > _LONGEST or "--" in push or ".." in push:
        raise ConfigError(f"push is {push!r:.120}, expected organisation/name, as the hub has it")
    if push.endswith(".git"):
        raise ConfigError(f"push is {push!r}: a repository's name must not end with .git")
    try:
        _hub().whoami()
    except Exception as error:
        raise ConfigError(f"push={push}: {_reason(error)}") from None


def upload(folder: str | Path, push: str, *, private: bool = False) -> str:
    """Make the repository if there is none, and upload a folder in one commit.

    Args:
        folder: whole; it stays as it is.
        push: ``organisation/name``.
        private: of a repository that is made; one that is there stays as it is.

    Returns:
        Where it can be seen.

    Raises:
        RunError: one line, if the hub refuses or cannot be reached.
    """
    hub = _hub()
    try:
        hub.create_repo(push, private=private, repo_type="model", exist_ok=True)
        hub.upload_folder(
            repo_id=push,
            folder_path=str(folder),
            repo_type="model",
            commit_message="Export of specheads",
            ignore_patterns=[".*", "**/.*"],  # what editors and systems leave behind
        )
    except Exception as error:
        reason = _reason(error)
        raise RunError(f"{folder} is written, but was not uploaded to {push}: {reason}") from None
    return f"https://huggingface.co/{push}"


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _reason(error: Exception) -> str:
    """Return what went wrong in one line, without what a server says at length.

    An error that the hub's client does not raise is a mistake of ours, and raised again.
    """
    from huggingface_hub.errors import LocalTokenNotFoundError

    if not is_hub_error(error):
        raise error
    if isinstance(error, LocalTokenNotFoundError):
        return "nobody is logged in: set HF_TOKEN, or run `hf auth login`"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return _REFUSED.get(status, f"the hub answered {status}")
    if {"TransportError", "ConnectionError"} & {kind.__name__ for kind in type(error).__mro__}:
        return "the hub cannot be reached"
    return first_line(error)
