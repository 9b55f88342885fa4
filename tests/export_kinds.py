"""An export of every kind over the tiny model, and what loading one ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specheads.attention.tree import Tree
from specheads.config import AdapterConfig, ConfigError
from specheads.models.adapters import adapter_parameters, add_adapter
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.blocks import prefix_sizes
from specheads.models.checkpoint import load_export, origin, save_export, set_tree
from specheads.models.draft import save_draft
from specheads.models.heads import MedusaHeads
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads, block_config
from tests.conftest import build_byte_tokenizer, build_tiny_llama
from tests.damaged import no_hang

KINDS = ("medusa", "hydra", "mtp", "adapter", "draft")


def build_exports(root: Path, tiny_model_dir: Path) -> dict[str, Path]:
    """Save one export of every kind; its base inside, beside, or adapted."""
    name, tokenizer = str(tiny_model_dir), build_byte_tokenizer()
    base = build_tiny_llama()
    sizes = prefix_sizes(base.config)
    block = block_config(base.config)
    heads: dict[str, Heads] = {
        "medusa": MedusaHeads(2, 1, 32, 272, "pruned", num_kept=40),
        "hydra": MedusaHeads(2, 1, 32, 272, "low_rank", rank=4, condition=True, prefix=sizes),
        "mtp": MtpHeads(2, block, 272, variant="sequential"),
        "adapter": MedusaHeads(2, 1, 32, 272, "shared", markov_rank=3),
    }
    tuned = {"medusa": build_tiny_llama(seed=5), "adapter": load_base_model(str(tiny_model_dir))}
    add_adapter(tuned["adapter"], AdapterConfig(kind="lora", rank=4))
    with torch.no_grad():
        for parameter in adapter_parameters(tuned["adapter"]).values():
            parameter.normal_(std=0.1)
    for kind, each in heads.items():
        tree, info = Tree.from_choices([[0], [1], [0, 0]]), origin(name, {"recipe": "medusa1"})
        save_export(root / kind, each, tokenizer, tree, info, tuned_base=tuned.get(kind))
        set_tree(root / kind, tree, 1.5)
    info = origin(name, {"recipe": "distill"}) | {"measured": {"alpha": 0.5}}
    save_draft(root / "draft", build_tiny_llama(seed=2), tokenizer, info)
    return {kind: root / kind for kind in KINDS}


def load(path: Path) -> Any:
    """Load what ``path`` holds, as generate or a recipe would."""
    with no_hang():
        if path.name == "draft":
            return load_base_model(str(path)), load_tokenizer(str(path))
        return load_export(path)


def refusal(path: Path) -> str | None:
    """Return the line that loading ``path`` ends with, None if it loads."""
    try:
        load(path)
    except ConfigError as error:
        line = str(error)
        assert "\n" not in line and len(line) < 1500, line
        return line
    return None


def files_of(path: Path) -> list[Path]:
    """Return every file of an export."""
    return sorted(file for file in path.rglob("*") if file.is_file())
