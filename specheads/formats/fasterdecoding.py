"""Medusa heads as the original repository and TGI read them: ``medusa_lm_head.safetensors``.

Version 1 (the paper, axolotl, all published weights, TensorRT-LLM's converter): per head the blocks
``{h}.{l}.linear.weight|bias`` and a matrix of its own, ``{h}.{L}.weight``. Version 2 (April 2024):
blocks alone, the base's output matrix makes the logits. ``config.json`` has no ``architectures``:
TGI takes a folder with one for no speculator at all. The number of heads is there in the two
spellings that readers look for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specheads.config import ConfigError
from specheads.formats.parallel import check_output, own_matrix, parallel_heads, stored
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import write_json
from specheads.models.output import OutputLayer

HEADS_FILE = "medusa_lm_head.safetensors"


def check_v1(form: str, checkpoint: str | Path, info: dict[str, Any]) -> None:
    """Refuse what a matrix for all tokens cannot hold, from config.json alone.

    Raises:
        ConfigError: for pruned heads.
    """
    if info["lm_head"] == "pruned" and info["num_kept"] < info["vocab_size"]:
        raise ConfigError(
            f"format={form} has output matrices for all tokens; those of {checkpoint} are pruned to"
            f" {info['num_kept']} of {info['vocab_size']}, which vllm_medusa can hold"
        )


def check_v2(checkpoint: str | Path, info: dict[str, Any]) -> None:
    """Refuse heads with matrices of their own, from config.json alone.

    Raises:
        ConfigError: unless they share the base's.
    """
    if info["lm_head"] != "shared":
        raise ConfigError(
            "format=fasterdecoding_v2 holds heads that share the base's output matrix; those of"
            f" {checkpoint} have their own (lm_head={info['lm_head']}): use fasterdecoding_v1"
        )


def write_v1(
    folder: Path,
    heads: MedusaHeads,
    output: OutputLayer,
    dtype: torch.dtype | None,
    *,
    base: str,
) -> list[str]:
    """Write heads with a matrix each into ``folder``; a shared one is copied for every head.

    Args:
        folder: an empty one.
        heads: parallel ones for the whole vocabulary.
        output: the base's output layer; a factor on its logits goes into the matrices.
        dtype: of the tensors; None keeps each as it is.
        base: name or folder of the base model.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base's output layer has a bias.
    """
    notes = ["for TGI, TensorRT-LLM's old converter, and the original repository"]
    notes += check_output("fasterdecoding_v1", output)
    if heads.lm_head == "shared":
        copies = heads.num_heads * output.weight.numel()
        notes.append(
            f"the base's output matrix was copied for each of {heads.num_heads} heads,"
            f" {copies:,} numbers; fasterdecoding_v2 needs none"
        )
    _write(folder, named_v1(heads, output), _config(heads, base), dtype)
    return notes


def write_v2(
    folder: Path, heads: MedusaHeads, dtype: torch.dtype | None, *, base: str
) -> list[str]:
    """Write heads that share the base's output matrix into ``folder``; as :func:`write_v1`."""
    tensors = _blocks(heads)
    _write(folder, tensors, {**_config(heads, base), "version": "2"}, dtype)
    notes = ["for TGI, which computes the heads' logits by the base model's output matrix"]
    if heads.num_layers > 1:
        notes.append(f"TGI reads such heads with one block each, these have {heads.num_layers}")
    return notes


def named_v1(heads: MedusaHeads, output: OutputLayer) -> dict[str, Tensor]:
    """Return the tensors of heads with a matrix each, by the names that version 1 gives them."""
    tensors = _blocks(heads)
    for i, head in enumerate(parallel_heads(heads)):
        tensors[f"{i}.{heads.num_layers}.weight"] = own_matrix(head, output, output.scale)
    return tensors


def counts(heads: MedusaHeads) -> dict[str, int]:
    """Return the numbers of heads and layers in all the spellings that readers look for."""
    return {
        "medusa_num_heads": heads.num_heads,
        "num_medusa_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "num_medusa_layers": heads.num_layers,
    }


def _blocks(heads: MedusaHeads) -> dict[str, Tensor]:
    tensors = {}
    for i, head in enumerate(parallel_heads(heads)):
        for j, (weight, bias) in enumerate(head.blocks):
            tensors[f"{i}.{j}.linear.weight"] = weight
            tensors[f"{i}.{j}.linear.bias"] = bias
    return tensors


def _config(heads: MedusaHeads, base: str) -> dict[str, Any]:
    return {"base_model_name_or_path": base, **counts(heads)}


def _write(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], dtype: torch.dtype | None
) -> None:
    save_file(stored(tensors, dtype), folder / HEADS_FILE, metadata={"format": "pt"})
    write_json(folder / "config.json", config)
