"""The ``adapter/`` of an export: written and read as peft does, so that others read it too."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.models.adapters import NAME, adapter_parameters, inject, require_grad
from specheads.models.foreign import one_line
from specheads.models.manifest import read_json
from specheads.models.tensor_headers import read_header, read_tensors

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# of peft's config: what is used here, and what does not change what the adapter computes
_USED = ("r", "lora_alpha", "lora_dropout", "target_modules")
_FREE = ("base_model_name_or_path", "revision", "inference_mode", "peft_version")
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
    about, file = folder / _CONFIG, folder / _TENSORS
    stored = read_json(about, f"{folder} is no adapter")
    names = _targets(about, stored, base)
    # the rank decides how much memory is taken: it must be that of the tensors
    ranks = {shape[:1] for key, (shape, _) in read_header(file).items() if ".lora_A." in key}
    if type(rank := stored.get("r")) is not int or ranks != {(rank,)}:
        found = sorted(number for shape in ranks for number in shape)
        raise ConfigError(f"{about}: r is {rank!r:.40}, the tensors have {found or 'none'}")
    with one_line(f"{about} cannot be used"):
        inject(base, names, **{key: stored.get(key) for key in _USED[:3]})
    _check_others(about, stored, base)
    wanted = {
        _PREFIX + name.replace(f".{NAME}.", "."): parameter
        for name, parameter in adapter_parameters(base).items()
    }
    tensors = read_tensors(file, wanted)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])
    require_grad(base, False)
    base.eval()


def _targets(about: Path, stored: dict[str, Any], base: PreTrainedModel) -> list[str]:
    """Return the names of the wrapped layers, after a look at the other numbers that are used."""
    alpha, dropout = stored.get("lora_alpha"), stored.get("lora_dropout")
    names = stored.get("target_modules")
    if not isinstance(alpha, int | float) or not 0 < alpha <= 1 << 20:
        raise ConfigError(f"{about}: lora_alpha is {alpha!r:.40}, expected a number above 0")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ConfigError(f"{about}: lora_dropout is {dropout!r:.40}, expected 0 to 1")
    if type(names) is not list or not names or not all(type(name) is str for name in names):
        raise ConfigError(f"{about}: target_modules is {names!r:.40}, expected names")
    if odd := sorted(set(names) - {name for name, _ in base.named_modules()}):
        raise ConfigError(f"{about} is of another model: the base has no {odd[0]:.80}")
    return names


def _check_others(about: Path, stored: dict[str, Any], base: PreTrainedModel) -> None:
    """Check that all the rest of the config is what :func:`inject` has made."""
    made: Any = base.peft_config
    plain = json.loads(json.dumps(made[NAME].to_dict(), default=_plain))
    for key, value in stored.items():
        if key in (*_USED, *_FREE):
            continue
        if value != plain.get(key) and (key in plain or value):  # newer versions have more keys
            raise ConfigError(
                f"{about}: {key} is {value!r:.40}, specheads' adapters have {plain.get(key)!r:.40}"
            )


def _plain(value: object) -> object:
    """Return what JSON can hold, as peft writes it."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
