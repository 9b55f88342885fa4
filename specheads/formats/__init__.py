"""Foreign formats: one module each, and one entry each in the table of ``write.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple


class Job(NamedTuple):
    """An export that is to be written in a format.

    Attributes:
        form: the format, a key of ``FORMATS``.
        checkpoint: the export.
        info: what its config.json holds, or the specheads.json of a draft model.
        output: a new folder.
        dtype: of the written tensors; None keeps theirs.
    """

    form: str
    checkpoint: str
    info: dict[str, Any]
    output: Path
    dtype: str | None
