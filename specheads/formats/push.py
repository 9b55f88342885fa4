"""Upload a written folder to the hub: ``push=organisation/name``.

The token comes from the environment or from ``hf auth login``, never from a setting, which would
stand in shell histories and in what a run writes about itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specheads.config import ConfigError, RunError
from specheads.models.foreign import first_line
from specheads.models.hub import is_hub_error

_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?/[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?")
_LONGEST = 96  # characters of a name, as the hub limits it


def check(push: str) -> None:
    """Check the name, and that the hub knows who is asking, before anything is written.

    Args:
        push: ``organisation/name``.

    Raises:
        ConfigError: one line, if the name is none, nobody is logged in, the login is refused, or
            the hub cannot be reached.
    """
    name = push.partition("/")[2]
    if not _NAME.fullmatch(push) or len(push) > _LONGEST or "--" in push or ".." in push:
        raise ConfigError(f"push is {push!r:.120}, expected organisation/name, as the hub has it")
    if name.endswith(".git"):
        raise ConfigError(f"push is {push!r}: a repository's name must not end with .git")
    try:
        _hub().whoami()
    except Exception as error:
        if not is_hub_error(error):
            raise
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
        if not is_hub_error(error):
            raise
        raise RunError(
            f"{folder} is written, but was not uploaded to {push}: {_reason(error)}"
        ) from None
    return f"https://huggingface.co/{push}"


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _reason(error: Exception) -> str:
    """Return what went wrong in one line, without what a server says at length."""
    from huggingface_hub.errors import LocalTokenNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError):
        return "nobody is logged in: set HF_TOKEN, or run `hf auth login`"
    if status == 401:
        return "the hub does not accept the token: set HF_TOKEN, or run `hf auth login`"
    if status == 403:
        return "the token may not write there: it needs the write permission for that organisation"
    if status is not None:
        return f"the hub answered {status}"
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"TransportError", "ConnectionError"}:
        return "the hub cannot be reached"
    return first_line(error)
