"""vLLM's Medusa (0.28 to 0.32), restated: what it makes of a folder, from its rules alone.

Written from vLLM's own model and config files; nothing of specheads is used. Where vLLM passes over
something without a word, so does this; what it would leave uninitialised is an error here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


class Medusa:
    """The heads of ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.config = renamed(json.loads((folder / "config.json").read_text()))
        if self.config["model_type"] != "medusa":
            raise AssertionError("vLLM takes another class for this model_type")
        self.vocab_size = self.config["vocab_size"]
        self.kept = self.config.get("truncated_vocab_size") or self.vocab_size
        self.shared = self.config.get("original_lm_head", False)
        self.token_map: Tensor | None = None
        self.parameters: dict[str, Tensor] = {}
        self._load(load_file(folder / "model.safetensors"))

    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters that the module has, with their shapes."""
        size = self.config["hidden_size"]
        found: dict[str, tuple[int, ...]] = {}
        for i in range(self.config["num_heads"]):
            for j in range(self.config["num_hidden_layers"]):
                found[f"blocks.{i}.layers.{j}.weight"] = (size, size)
                if self.config.get("medusa_fc_bias", False):
                    found[f"blocks.{i}.layers.{j}.bias"] = (size,)
            if not self.shared:
                # whatever truncated_vocab_size says: a matrix of fewer rows ends in an assertion
                found[f"lm_heads.{i}.weight"] = (self.vocab_size, size)
        if self.shared:
            found["lm_head.weight"] = (self.kept, size)
        return found

    def _load(self, tensors: dict[str, Tensor]) -> None:
        wanted, taken = self.wanted(), {}
        for name, tensor in tensors.items():
            name = name.replace("medusa_heads.", "")
            if name == "token_map":
                if self.kept < self.vocab_size:
                    self.token_map = tensor
            elif name in wanted:
                taken[name] = tensor
            elif self.shared and name == "lm_heads.0.weight":
                taken["lm_head.weight"] = tensor
            else:
                raise AssertionError(f"vLLM would pass over {name}")
        for name, tensor in taken.items():
            of_head = "lm_head" in name and self.token_map is not None
            if of_head and len(tensor) > len(self.token_map):  # type: ignore[arg-type]
                tensor = tensor[self.token_map]
            if tuple(tensor.shape) != wanted[name]:
                raise AssertionError(f"{name} has shape {tuple(tensor.shape)}")
            self.parameters[name] = tensor
        if missing := wanted.keys() - self.parameters.keys():
            raise AssertionError(f"vLLM would leave {sorted(missing)} uninitialised")
        if self.kept < self.vocab_size and self.token_map is None:
            raise AssertionError("vLLM asserts a token map")

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [K, ..., V] for hidden states [..., d]; -inf for tokens that are not guessed."""
        found = []
        for i in range(self.config["num_heads"]):
            x = hidden
            for j in range(self.config["num_hidden_layers"]):
                product = x @ self.parameters[f"blocks.{i}.layers.{j}.weight"].T
                bias = self.parameters.get(f"blocks.{i}.layers.{j}.bias")
                product = product if bias is None else product + bias
                x = x + torch.nn.functional.silu(product)
            matrix = self.parameters["lm_head.weight" if self.shared else f"lm_heads.{i}.weight"]
            logits = (x @ matrix.T) * self.config.get("logit_scale", 1.0)
            if self.token_map is not None:
                whole = torch.full((*logits.shape[:-1], self.vocab_size), -torch.inf)
                whole[..., self.token_map] = logits
                logits = whole
            found.append(logits)
        return torch.stack(found)


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM's config class makes of a config: what sounds like a count is renamed."""
    found = dict(config)
    for key in list(found):
        if "num" in key and "heads" in key:
            found["num_heads"] = found.pop(key)
        elif "num" in key and "layers" in key:
            found["num_hidden_layers"] = found.pop(key)
    return found
