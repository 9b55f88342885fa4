"""Write a model as a Hugging Face folder, in another dtype if asked."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from specheads.models.adapters import has_adapter, merged_state
from specheads.models.manifest import read_json, write_json
from specheads.models.quantize import as_if_plain, quantization_of


def save_hf(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None,
) -> None:
    """Write model and tokenizer so that transformers, and what builds on it, can load them.

    An adapter is merged in what is written, and a quantised base under it dequantised. The caller's
    model stays as it is; ``dtype`` is that of the written tensors, None keeps theirs.
    """
    plain: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if has_adapter(model):
        state, plain = merged_state(model, model.dtype), as_if_plain(model)
    else:
        state = model.state_dict()
    with plain, _quiet():
        model.save_pretrained(folder, state_dict=cast_tensors(state, dtype))
    if dtype is not None:
        _set_dtype(folder, dtype)
    tokenizer.save_pretrained(folder)


def save_as(
    folder: Path,
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    base: PreTrainedModel,
    extra: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None,
) -> None:
    """Write ``base`` and more tensors as a model of class ``kind``, with its names for them.

    An adapter is merged and a quantised base dequantised in what is written. All tensors get one
    dtype, the base's if it is None, but those that the class keeps in float32.

    Raises:
        ConfigError: if the base is quantised in a way that cannot be undone.
    """
    plain = not has_adapter(base) and quantization_of(base) is None
    state = (base.state_dict() if plain else merged_state(base, base.dtype)) | extra
    dtype = dtype or base.dtype
    with torch.device("meta"):
        model: Any = kind(config)  # only its class and config are used
    if base.can_generate():
        model.generation_config = base.generation_config
    exact = {
        name: tensor
        for name, tensor in state.items()
        if any(part in name for part in model._keep_in_fp32_modules_strict)
    }
    with _quiet():
        model.save_pretrained(folder, state_dict=cast_tensors(state, dtype) | exact)
    _set_dtype(folder, dtype)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)  # to unwrap the model accelerate imports deepspeed: it warns
    try:
        yield
    finally:
        logging.disable(silenced)


def _set_dtype(folder: Path, dtype: torch.dtype) -> None:
    config = read_json(folder / "config.json", "", strict=False)
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", config, strict=False)


def cast_tensors(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return ``tensors`` in ``dtype``; what shares memory (tied matrices) stays one tensor."""
    done: dict[tuple[object, ...], Tensor] = {}
    cast = {}
    for name, tensor in tensors.items():
        # tensors without memory of their own (empty ones) are never taken for one another
        key = (tensor.data_ptr() or name, tensor.shape, tensor.stride())
        if key not in done:
            keep = dtype is None or not tensor.is_floating_point()
            done[key] = tensor if keep else tensor.to(dtype)
        cast[name] = done[key]
    return cast
