"""Native exports of Medusa heads over the tiny model, and the export command in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specheads import export
from specheads.attention.tree import default_tree
from specheads.config import ExportConfig
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import origin, save_export
from specheads.models.heads import MedusaHeads, output_matrix

VOCAB, SIZE, HEADS = 272, 32, 3


def medusa(lm_head: str = "own", num_layers: int = 1, **form: Any) -> MedusaHeads:
    """Return heads with every number drawn; pruned ones keep tokens that are not the first."""
    torch.manual_seed(7)
    form = {"rank": 4, "num_kept": 40, **form}
    heads = MedusaHeads(HEADS, num_layers, SIZE, VOCAB, lm_head, **form)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.2)
    if heads.token_map is not None:
        heads.token_map.copy_(torch.randperm(VOCAB)[: len(heads.token_map)].sort().values)
    return heads.eval()


def save(path: Path, heads: Any, model: Path, **options: Any) -> Path:
    """Write an export of ``heads`` over the model in a folder; return its own."""
    info = origin(str(model), {"recipe": "none", "steps": 7})
    tokenizer, tree = load_tokenizer(str(model)), default_tree(heads.num_heads, 6)
    save_export(path, heads, tokenizer, tree, info, **options)
    return path


def made(checkpoint: Path, output: Path, **settings: Any) -> Path:
    """Run the command; return the new folder."""
    export.run(ExportConfig(checkpoint=str(checkpoint), output=str(output), **settings))
    return output


def for_vllm(folder: Path, heads: MedusaHeads, model: Path) -> Path:
    """Write heads over a model as vLLM 0.28 to 0.32 loaded them; return the folder."""
    shared = heads.lm_head.startswith("shared")
    tensors = {
        f"blocks.{i}.layers.{j}.{part}": tensor
        for i in range(heads.num_heads)
        for j, block in enumerate(heads.head(i).blocks)
        for part, tensor in block.state_dict().items()
    }
    if shared:
        matrix = load_base_model(str(model)).get_output_embeddings().weight.detach()
        tensors["lm_head.weight"] = heads.shared_rows(matrix)
    else:
        tensors |= {f"lm_heads.{i}.weight": output_matrix(heads, i) for i in range(heads.num_heads)}
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "truncated_vocab_size": heads.num_outputs,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
