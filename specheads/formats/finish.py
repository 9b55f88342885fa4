"""What follows a written folder: its card, the commands that serve it, and the upload if asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def finish(
    folder: Path, form: str, info: dict[str, Any], *, push: str = "", private: bool = False
) -> None:
    """Write the card of a folder, print how it is served, and upload it if asked.

    Args:
        folder: that was just written, whole.
        form: its format: ``native``, ``plain``, ``vllm_medusa``, ...
        info: what the config.json of the native export holds that it was made of.
        push: ``organisation/name`` on the hub; empty: nowhere.
        private: of a repository that is made for it.

    Raises:
        ConfigError: if the upload cannot be done; the folder stays.
    """
    raise NotImplementedError
