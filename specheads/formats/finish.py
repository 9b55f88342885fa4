"""What follows a written folder: its card, the commands that serve it, and the upload if asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads.formats import card
from specheads.formats import push as hub
from specheads.formats.serving import commands, lines


def finish(
    folder: Path, form: str, info: dict[str, Any], *, push: str = "", private: bool = False
) -> None:
    """Write the card of a folder, print how it is served, and upload it if asked.

    Args:
        folder: that was just written, whole.
        form: its format: ``native``, ``plain``, ``vllm_medusa``, ...
        info: what the config.json of the native export holds that it was made of; of a draft model,
            what its specheads.json holds.
        push: ``organisation/name`` on the hub, see :func:`specheads.formats.push.check`; empty:
            nowhere.
        private: of a repository that is made for it.

    Raises:
        RunError: if the upload fails, or the disk is full; the folder stays.
    """
    card.write(folder, form, info, name=push)
    print("\n".join(lines(commands(form, folder, info))))
    if push:
        where = hub.upload(folder, push, private=private)
        print(f"uploaded to {where}")
