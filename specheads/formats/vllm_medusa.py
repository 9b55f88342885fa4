"""Medusa heads for vLLM 0.28 to 0.32: a folder that its ``{"method": "medusa"}`` loads.

Read from vLLM's ``models/medusa.py`` and its config class. It drafts one chain: every head's best
guess, no tree. vLLM 0.33 removed the method. Tensors: ``blocks.{h}.layers.{l}.weight|bias``, and
``lm_heads.{h}.weight``, or one ``lm_head.weight`` for all heads (``original_lm_head``), a copy of
the base's. It skips tensors of other names without a word, and drops biases unless the config has
``medusa_fc_bias``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specheads.formats.parallel import check_output, own_matrix, parallel_heads, stored
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import write_json
from specheads.models.output import OutputLayer

VERSIONS = "0.28 to 0.32"
_COUNTS = ("num_heads", "num_hidden_layers")


def write(
    folder: Path, heads: MedusaHeads, output: OutputLayer, dtype: torch.dtype | None
) -> list[str]:
    """Write config and tensors into ``folder``.

    Args:
        folder: an empty one.
        heads: parallel ones.
        output: the base's output layer.
        dtype: of the tensors; None keeps each as it is.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base's output layer has a bias.
    """
    notes = check_output("vllm_medusa", output)
    shared, pruned = heads.lm_head == "shared", heads.num_outputs < heads.vocab_size
    config: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": heads.num_outputs,
        "num_heads": heads.num_heads,
        # a model of no layers is nothing that engines are made for: one of zeros changes nothing
        "num_hidden_layers": max(heads.num_layers, 1),
        "medusa_fc_bias": True,
        "original_lm_head": shared,
    }
    if output.scale != 1.0:
        config["logit_scale"] = output.scale
    check_keys(config)
    tensors: dict[str, Tensor] = {}
    for i, head in enumerate(parallel_heads(heads)):
        for j, (weight, bias) in enumerate(head.blocks or [_nothing(heads)]):
            tensors[f"blocks.{i}.layers.{j}.weight"] = weight
            tensors[f"blocks.{i}.layers.{j}.bias"] = bias
        if not shared:
            tensors[f"lm_heads.{i}.weight"] = own_matrix(head, output, 1.0)
    if shared:
        tensors["lm_head.weight"] = output.weight
    if pruned:
        assert heads.token_map is not None
        tensors["token_map"] = heads.token_map
    save_file(stored(tensors, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    return [
        f"for vLLM {VERSIONS} alone: 0.33 removed the method; it drafts a chain of the heads' best"
        f" guesses, num_speculative_tokens={heads.num_heads} or fewer, no tree",
        *notes,
    ]


def check_keys(config: dict[str, Any]) -> None:
    """Refuse keys that vLLM would take for another: it renames whatever sounds like a count.

    A key that holds ``num`` and ``heads`` becomes ``num_heads``, one with ``num`` and ``layers``
    becomes ``num_hidden_layers``, so that ``num_attention_heads`` would be the number of heads.

    Raises:
        ValueError: with the first such key.
    """
    for key in config:
        counts = "num" in key and ("heads" in key or "layers" in key)
        if counts and key not in _COUNTS:
            raise ValueError(f"vLLM would take the key {key!r} for the number of heads or layers")


def _nothing(heads: MedusaHeads) -> tuple[Tensor, Tensor]:
    size = heads.hidden_size
    dtype = next(heads.parameters()).dtype
    return torch.zeros(size, size, dtype=dtype), torch.zeros(size, dtype=dtype)
