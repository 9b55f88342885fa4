"""Exports of Hydra heads with a prefix layer, of pruned Markov heads, and of tapped ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.attention.tree import default_tree
from specheads.bench import run as bench
from specheads.config import (
    BenchConfig,
    DecodeConfig,
    GenerateConfig,
    HeadsConfig,
    TreeSearchConfig,
)
from specheads.generate import run as generate
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.blocks import prefix_sizes
from specheads.models.checkpoint import KINDS as HEADS
from specheads.models.checkpoint import load_export, origin, read_config, save_export
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.tree_search import run as tree_search

KINDS: dict[str, dict[str, Any]] = {
    "hydra_prefix": {"condition": True},
    "markov_pruned": {"markov_rank": 6, "lm_head": "pruned", "num_kept": 200},
}
TAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "block": ("block", {"form": "joined"}),
    "dspark": ("block", {"form": "published", "mask_token_id": 256, "window": 9}),
    "eagle3": ("eagle3", {"norm_before_residual": True}),
}


@pytest.fixture(params=[*KINDS, *TAPPED])
def export(request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path: Path) -> Path:
    """Return the folder of an export of one kind over ``tiny_model_dir``."""
    base = load_base_model(str(tiny_model_dir), dtype="float32")
    output = base.get_output_embeddings().weight
    heads: Any
    if request.param in TAPPED:
        kind, options = TAPPED[request.param]
        wanted = HeadsConfig(kind, options, 3, 1, "shared", correction="markov", markov_rank=6)
        heads = HEADS[kind].from_settings(wanted, base, output_layer(base))
    else:
        sizes = prefix_sizes(base.config) if "prefix" in request.param else None
        form = KINDS[request.param]
        heads = MedusaHeads(3, 1, output.shape[1], output.shape[0], prefix=sizes, **form)
    with torch.no_grad():
        heads.init_from_output(output)
        for name, parameter in heads.named_parameters():
            if "norm" not in name:
                parameter.add_(0.02 * torch.randn_like(parameter))
    info = origin(str(tiny_model_dir), {"recipe": "none", "steps": 0})
    tokenizer = load_tokenizer(str(tiny_model_dir))
    save_export(tmp_path / "export", heads, tokenizer, default_tree(3, 8), info)
    return tmp_path / "export"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_write_what_plain_decoding_writes(
    export: Path, capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    """A kind that loads as another one, or loses its prefix layer, would still write this text.

    So the kind is read back, too.
    """
    texts = []
    for settings in ({"plain": True}, {}, {"decode": DecodeConfig(tree="dynamic", num_nodes=6)}):
        generate(
            GenerateConfig(
                checkpoint=str(export),
                prompt="def f(x):",
                max_new_tokens=20,
                temperature=temperature,
                seed=3,
                **settings,
            )
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2] and texts[0].strip()
    heads = load_export(export).heads
    assert heads.sequential
    attends = heads.memory(1) is not None
    assert (heads.kind, attends, heads.num_outputs) in (
        ("hydra", True, 272),
        ("medusa", False, 200),
        ("block", True, 272),
        ("eagle3", True, 272),
    )


def test_its_tree_is_searched_and_measured(
    export: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trees counted for parallel heads, or clocked with their drafter, mean nothing for these."""
    small: dict[str, Any] = {"max_new_tokens": 8, "repeats": 1, "dtype": "float32", "threads": 1}
    prompts = {"prompts": str(prompt_file)}
    tree_search(
        TreeSearchConfig(
            checkpoint=str(export),
            num_prompts=4,
            num_measured=2,
            num_nodes=6,
            **prompts,  # type: ignore[arg-type]
            **small,
        )
    )
    measured_on = read_config(export)["tree"]["measured_on"]
    assert measured_on["num_nodes"] <= 6 == measured_on["dynamic"]["num_nodes"]
    assert {"static", "dynamic"} <= measured_on["measured"].keys()
    out = prompt_file.with_name("bench.json")
    bench(
        BenchConfig(
            checkpoint=str(export),
            out=str(out),
            num_prompts=2,
            temperatures=[0.0],
            tree_nodes=[4],
            batch_sizes=[2],
            **prompts,  # type: ignore[arg-type]
            **small,
        )
    )
    rows = json.loads(out.read_text())["rows"]
    drafted = [row for row in rows if row["method"].startswith("tree") and row["compared"]]
    assert {row["method"] for row in drafted} >= {"tree", "tree_4", "tree_dynamic"}
    assert {row["batch"] for row in drafted} == {1, 2}
    for row in drafted:
        assert row["identical"] == row["compared"]
    assert "tree_dynamic" in capsys.readouterr().out
