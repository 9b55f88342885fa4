"""Write a model as a Hugging Face folder, in another dtype if asked."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.models.adapters import has_adapter, merged_state
from specheads.models.manifest import read_json, write_json
from specheads.models.quantize import as_if_plain


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
    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)  # to unwrap the model accelerate imports deepspeed: it warns
    try:
        with plain:
            model.save_pretrained(folder, state_dict=cast_tensors(state, dtype))
    finally:
        logging.disable(silenced)
    if dtype is not None:
        config = read_json(folder / "config.json", "")
        config["dtype"] = str(dtype).removeprefix("torch.")
        write_json(folder / "config.json", config)
    tokenizer.save_pretrained(folder)


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
