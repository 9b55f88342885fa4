"""An export of a tiny random model with untrained heads, for the programs that load one."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specheads.attention.tree import default_tree
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import origin, save_export
from specheads.models.heads import MedusaHeads
from tests import processes

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def _made_export(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = load_base_model(str(tiny_model_dir), dtype="float32")
    output = base.get_output_embeddings().weight
    heads = MedusaHeads(3, 1, output.shape[1], output.shape[0])
    with torch.no_grad():
        heads.init_from_output(output)
    path = tmp_path_factory.mktemp("exports") / "export"
    info = origin(str(tiny_model_dir), {"recipe": "none", "steps": 0})
    tokenizer = load_tokenizer(str(tiny_model_dir))
    save_export(path, heads, tokenizer, default_tree(3, 6), info)
    return path


@pytest.fixture
def tiny_export(_made_export: Path, tmp_path: Path) -> Path:
    """Return the folder of an export over ``tiny_model_dir``; heads give the base's own logits."""
    return shutil.copytree(_made_export, tmp_path / "export")


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Return a .jsonl of prompts of two kinds."""
    path = tmp_path / "prompts.jsonl"
    records = [
        {"id": f"{kind}-{i}", "kind": kind, "prompt": f"def f{i}(x):\n    ", "completion": "pass"}
        for kind in ("body", "edit")
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Return a function that runs ``python -m specheads.<name> <arguments>`` in an empty folder."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        return processes.run("-m", f"specheads.{name}", *arguments, cwd=folder)

    return run
