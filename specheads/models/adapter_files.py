"""The ``adapter/`` of an export: written and read as peft does, so that others read it too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.models.adapters import NAME, adapter_parameters, inject, require_grad

_TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # peft's, of every tensor


def save_adapter(folder: Path, base: PreTrainedModel, name: str, revision: str | None) -> None:
    """Write the adapter as peft does: adapter_config.json and safetensors.

    Args:
        folder: made here.
        base: carries the adapter.
        name: of the original base.
        revision: of a hub model.
    """
    folder.mkdir()
    config: Any = copy.deepcopy(base.peft_config[NAME])
    config.base_model_name_or_path, config.revision = name, revision
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {
        _PREFIX + name.replace(f".{NAME}.", "."): parameter.detach().cpu().contiguous()
        for name, parameter in adapter_parameters(base).items()
    }
    save_file(tensors, folder / _TENSORS, metadata={"format": "pt"})


def load_adapter(base: PreTrainedModel, folder: Path) -> None:
    """Put the adapter that ``save_adapter`` wrote onto ``base``, frozen.

    Raises:
        ConfigError: if files are damaged, or tensors are missing, unexpected or of another shape.
    """
    from peft import LoraConfig

    try:
        stored = LoraConfig.from_pretrained(str(folder))
        tensors = load_file(folder / _TENSORS)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{folder} is damaged: {str(error).splitlines()[0]}") from None
    names = list(stored.target_modules)
    if odd := sorted(set(names) - {name for name, _ in base.named_modules()}):
        raise ConfigError(f"{folder} is of another model: the base has no {odd[0]}")
    keys = ("r", "lora_alpha", "lora_dropout")
    inject(base, names, **{key: getattr(stored, key) for key in keys})
    wanted = {
        _PREFIX + name.replace(f".{NAME}.", "."): parameter
        for name, parameter in adapter_parameters(base).items()
    }
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        raise ConfigError(
            f"{folder / _TENSORS} has {len(tensors)} tensors where {len(wanted)} are expected;"
            f" in one only: {odd[0]}"
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            if (found := tuple(tensors[name].shape)) != tuple(parameter.shape):
                raise ConfigError(
                    f"{folder / _TENSORS}: {name} has shape {found}, expected"
                    f" {tuple(parameter.shape)}"
                )
            parameter.copy_(tensors[name])
    require_grad(base, False)
    base.eval()
