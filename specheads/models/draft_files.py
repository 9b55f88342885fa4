"""A draft model's export: a plain Hugging Face folder, and where it comes from.

``config.json``, safetensors, tokenizer, chat template and generation config, as everything that
loads models reads them; beside them ``specheads.json`` and ``manifest.json``, which nothing but
specheads looks at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from specheads.files import whole_folder
from specheads.models.base import torch_dtype
from specheads.models.hf import save_hf
from specheads.models.manifest import write_json, write_manifest
from specheads.models.model_files import PROVENANCE
from specheads.models.model_files import read_provenance as read_ours
from specheads.redact import redact

FORMAT_VERSION = 2  # 1 had no manifest


def save_draft(
    path: str | Path,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    base_name: str,
    base_digest: str,
    base_dtype: str | torch.dtype,
    training: dict[str, Any],
    measured: dict[str, float],
    base_revision: str | None = None,
    dtype: str | torch.dtype | None = None,
) -> None:
    """Write a draft model, whole or not at all; an earlier one at ``path`` is replaced at the end.

    Args:
        path: the folder.
        draft: to save.
        tokenizer: the base model's, saved with its chat template.
        base_name: the base model it was trained for, as the user gave it.
        base_digest: see :func:`specheads.models.digest.base_digest`.
        base_dtype: of the base while training.
        training: JSON: recipe, loss, steps, data, held-out figures.
        measured: alpha and accept length by temperature, as the recipe found them.
        base_revision: hub revision of the base.
        dtype: of the saved tensors; None keeps each as it is.

    Raises:
        RunError: if the disk is full.
    """
    provenance = {
        "format_version": FORMAT_VERSION,
        "kind": "draft",
        "base": {
            "name": _findable(base_name),
            "revision": base_revision,
            "digest": base_digest,
            "dtype": str(base_dtype).removeprefix("torch."),
        },
        "training": redact(training),
        "measured": measured,
    }
    with whole_folder(Path(path)) as folder:
        save_hf(folder, draft, tokenizer, None if dtype is None else torch_dtype(dtype))
        write_json(folder / PROVENANCE, provenance)
        write_manifest(folder)


def read_provenance(path: str | Path) -> dict[str, Any] | None:
    """Return what a draft model's folder says about its origin; None for one of other make.

    Raises:
        ConfigError: if it cannot be read, or this version of specheads does not know it.
    """
    return read_ours(Path(path)) if (Path(path) / PROVENANCE).is_file() else None


def take_end_tokens(draft: PreTrainedModel, base: PreTrainedModel) -> None:
    """Let ``draft`` begin, pad and end its texts as ``base`` does, in its generation settings.

    The base's other settings are not taken over: how tokens are drawn is the user's to say, and
    what is wrong among them would keep the draft model from being saved.
    """
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    places: list[Any] = [base.generation_config, base.config.get_text_config()]
    ids = {}
    for key in keys:
        found = (getattr(place, key, None) for place in places)
        ids[key] = next((value for value in found if value is not None), None)
    own: Any = draft
    own.generation_config = GenerationConfig(**ids)


def _findable(name: str) -> str:
    # a relative path would mean another folder for whoever reads this
    folder = Path(name).expanduser()
    return str(folder.resolve()) if name != "tinycode" and folder.is_dir() else name
