"""What a command is asked to decode with: an export, or a base model without heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.models.base import check_tokenizer, load_base_model, load_tokenizer
from specheads.models.checkpoint import Export, load_export
from specheads.models.manifest import MANIFEST, read_json
from specheads.models.model_files import PROVENANCE


@dataclass(frozen=True)
class Subject:
    """A base model with its tokenizer, in eval mode, and the export it came with, if any."""

    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    export: Export | None = None


def is_plain_model(checkpoint: str) -> bool:
    """Return whether ``checkpoint`` names a base model rather than an export of specheads.

    ``tinycode``, a folder whose config.json is transformers', or, where there is no such folder, a
    name of the form owner/model.

    Raises:
        ConfigError: if the folder's config.json cannot be read.
    """
    if checkpoint == "tinycode":
        return True
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        export = (path / MANIFEST).is_file() and not (path / PROVENANCE).is_file()
        if export or not (path / "config.json").is_file():
            return False
        config = read_json(path / "config.json", f"{path} is no model", strict=False)
        return "model_type" in config and "format_version" not in config
    return not path.exists() and checkpoint.count("/") == 1 and checkpoint[0] not in "./~"


def load_subject(
    checkpoint: str,
    *,
    base: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
    device_map: str | None = None,
    attn: str = "auto",
    trust_remote_code: bool = False,
) -> Subject:
    """Load an export, or a base model alone.

    Args:
        checkpoint: an export's folder, or what :func:`is_plain_model` knows.
        base: where an export's base model is now, if it was moved.
        dtype: of the weights.
        device: where they go: one of torch's, or what :func:`hardware.pick_device` knows.
        device_map: in place of ``device``, see :func:`specheads.models.base.load_base_model`.
        attn: attention implementation of a base model alone; an export's is its own.
        trust_remote_code: run modelling code that comes with the model.

    Raises:
        ConfigError: if it cannot be found or loaded, or ``base`` is given for a base model.
    """
    if not is_plain_model(checkpoint):
        export = load_export(
            checkpoint,
            base=base or None,
            dtype=dtype,
            device=device,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
        )
        return Subject(export.base, export.tokenizer, export)
    if base:
        raise ConfigError(f"base is {base}, but checkpoint={checkpoint} is a base model itself")
    try:
        tokenizer = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
        model = load_base_model(
            checkpoint,
            dtype=dtype,
            device=device,
            device_map=device_map,
            attn=attn,
            trust_remote_code=trust_remote_code,
        )
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint={checkpoint} is no export, and as a base model: {error}"
        ) from None
    check_tokenizer(tokenizer, model)
    return Subject(model, tokenizer)
