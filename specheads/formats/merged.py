"""Base model and Medusa heads in one Hugging Face folder, as the medusa-1.0 checkpoints are.

The base's own files, with any adapter merged, and ``medusa_head.{h}.*`` among its tensors in the
names of version 1 (see :mod:`specheads.formats.fasterdecoding`); its config has the number of heads
and layers. Whatever loads the base alone loads this too, and passes over the heads.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.formats.fasterdecoding import counts, named_v1
from specheads.formats.parallel import check_output
from specheads.models.heads import MedusaHeads
from specheads.models.hf import save_as
from specheads.models.output import OutputLayer

PREFIX = "medusa_head."


def write(
    folder: Path,
    base: PreTrainedModel,
    heads: MedusaHeads,
    output: OutputLayer,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None,
) -> list[str]:
    """Write base, heads and tokenizer into ``folder``.

    Args:
        folder: an empty one.
        base: the model; an adapter is merged and a quantised base dequantised in what is written.
        heads: parallel ones for the whole vocabulary.
        output: the base's output layer; a factor on its logits goes into the heads' matrices.
        tokenizer: written beside them.
        dtype: of all tensors; None takes the base's.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base's output layer has a bias, or its quantisation cannot be undone.
    """
    notes = check_output("merged", output)
    config = copy.deepcopy(base.config)
    vars(config).pop("quantization_config", None)
    for key, value in counts(heads).items():
        setattr(config, key, value)
    extra = {PREFIX + name: tensor for name, tensor in named_v1(heads, output).items()}
    save_as(folder, type(base), config, base, extra, tokenizer, dtype)
    return ["base and heads in one folder; what loads the base alone passes over the heads", *notes]
