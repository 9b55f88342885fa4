"""An export of a tiny random model with untrained heads, for the programs that load one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specheads.attention.tree import default_tree
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import origin, save_export
from specheads.models.heads import MedusaHeads

ROOT = Path(__file__).parents[2]
Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tiny_export(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """Return the folder of an export over ``tiny_model_dir``; heads give the base's own logits."""
    base = load_base_model(str(tiny_model_dir), dtype="float32")
    output = base.get_output_embeddings().weight
    heads = MedusaHeads(3, 1, output.shape[1], output.shape[0])
    with torch.no_grad():
        heads.init_from_output(output)
    info = origin(str(tiny_model_dir), {"recipe": "none", "steps": 0})
    tokenizer = load_tokenizer(str(tiny_model_dir))
    save_export(tmp_path / "export", heads, tokenizer, default_tree(3, 6), info)
    return tmp_path / "export"


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

    def run(
        name: str, *arguments: str, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-m", f"specheads.{name}", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    return run
