"""Readers of the original Medusa layouts, restated from the code of the paper and of TGI.

Nothing of specheads is used. ``v1`` and ``v2`` read ``medusa_lm_head.safetensors``; ``merged`` the
``medusa_head.*`` tensors of a whole model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


class Block(nn.Module):
    """``x + SiLU(linear(x))``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d] to [..., d]."""
        return x + nn.functional.silu(self.linear(x))


def tgi_takes_it_for_medusa(folder: Path) -> dict[str, Any]:
    """Return the config as TGI sees it; it looks for a missing key, as it does."""
    config = json.loads((folder / "config.json").read_text())
    if "architectures" in config:
        raise AssertionError("TGI takes a folder with architectures for no speculator")
    return config


def _heads(tensors: dict[str, Tensor], number: int, layers: int, rows: int | None) -> nn.ModuleList:
    size = tensors["0.0.linear.weight"].shape[0] if layers else tensors["0.0.weight"].shape[1]
    heads = nn.ModuleList()
    for _ in range(number):
        parts: list[nn.Module] = [Block(size) for _ in range(layers)]
        if rows is not None:
            parts.append(nn.Linear(size, rows, bias=False))
        heads.append(nn.Sequential(*parts))
    heads.load_state_dict(tensors, assign=True)  # strict: all of them, and no others
    return heads


def v1(folder: Path) -> nn.ModuleList:
    """Return the heads of a folder of version 1; each maps hidden states to logits."""
    config = tgi_takes_it_for_medusa(folder)
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    layers = config["medusa_num_layers"]
    assert config["num_medusa_heads"] == config["medusa_num_heads"], "TensorRT-LLM reads the other"
    rows = tensors[f"0.{layers}.weight"].shape[0]
    return _heads(tensors, config["medusa_num_heads"], layers, rows)


def v2(folder: Path, lm_head: nn.Module) -> list[nn.Sequential]:
    """Return the heads of version 2; logits come of the base's ``lm_head``."""
    config = tgi_takes_it_for_medusa(folder)
    assert config["version"] == "2"
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    heads = _heads(tensors, config["medusa_num_heads"], config["medusa_num_layers"], None)
    return [nn.Sequential(head, lm_head) for head in heads]


def merged(folder: Path) -> tuple[Any, nn.ModuleList]:
    """Return base and heads of a whole model, as the medusa-1.0 checkpoints are."""
    base = AutoModelForCausalLM.from_pretrained(folder)
    config = base.config
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.startswith("medusa_head."):
                tensors[name.removeprefix("medusa_head.")] = tensor
    rows, layers = base.lm_head.weight.shape[0], config.medusa_num_layers
    return base.eval(), _heads(tensors, config.medusa_num_heads, layers, rows)


def logits(heads: Any, hidden: Tensor) -> Tensor:
    """Return [K, ..., V] of hidden states [..., d]."""
    with torch.no_grad():
        return torch.stack([head(hidden) for head in heads])
