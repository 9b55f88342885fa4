"""``python -m specheads.bench`` and ``tree_search`` on a tiny model."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specheads.bench import run as bench
from specheads.config import BenchConfig, ConfigError, TreeSearchConfig
from specheads.decoding.measure import read_prompts
from specheads.models.base import load_tokenizer
from specheads.models.checkpoint import load_export
from specheads.tree_search import run as tree_search

Program = Callable[..., subprocess.CompletedProcess[str]]
KEYS = {
    "method", "drafter", "tree_nodes", "dtype", "device", "batch", "temperature", "num_prompts",
    "new_tokens", "seconds", "tokens_per_second", "speedup_vs_plain", "speedup_vs_plain_ci95",
    "speedup_vs_hf_generate", "accept_length", "accept_length_ci95", "rep8", "peak_memory",
    "extra_parameters", "identical", "compared", "near_ties",
}  # fmt: skip


def test_bench_writes_every_row(tiny_export: Path, prompt_file: Path, program: Program) -> None:
    """A table without its baselines, or with outputs that differ, proves nothing."""
    out = prompt_file.with_name("bench.json")
    done = program(
        "bench",
        f"out={out}",
        f"checkpoint={tiny_export}",
        f"prompts={prompt_file}",
        "num_prompts=4",
        "max_new_tokens=16",
        "temperatures=[0.0]",
        "repeats=2",
        "dtype=float32",
        "threads=1",
        "tree_nodes=[3]",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert set(result) >= {"environment", "settings", "rows", "headline"}
    rows = {(row["method"], row["temperature"]): row for row in result["rows"]}
    methods = {"plain", "hf_generate", "prompt_lookup", "tree", "tree_3"}
    assert rows.keys() == {(method, t) for method in methods for t in (0.0, 0.7, 1.0)}
    for (method, temperature), row in rows.items():
        assert row.keys() >= KEYS
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert row["per_kind"].keys() == {"body", "edit"}, "kinds are taken in turn"
        drawn_alike = method != "hf_generate" or temperature == 0
        assert row["compared"] == (4 if drawn_alike else 0)
        if drawn_alike:
            assert row["identical"] == 4, f"{method} at T={temperature} differs from plain"
    assert rows["plain", 0.0]["accept_length"] == 1 < rows["tree", 0.0]["accept_length"]
    assert rows["tree", 1.0]["tree_nodes"] == 6 and rows["tree_3", 1.0]["tree_nodes"] == 3
    assert rows["tree", 0.0]["extra_parameters"] > 0 == rows["plain", 0.0]["extra_parameters"]
    assert len(result["settings"]["prompts_sha256"]) == 64
    assert "prompt_lookup" in done.stdout and "Headline" in done.stdout


def test_tree_search_stores_what_it_measured(
    tiny_export: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree that is printed but not written leaves the next bench with the old one."""
    before = load_export(tiny_export)
    tree_search(
        TreeSearchConfig(
            checkpoint=str(tiny_export),
            prompts=str(prompt_file),
            max_new_tokens=24,
            max_nodes=8,
            dtype="float32",
            threads=1,
        )
    )
    after = load_export(tiny_export)  # checks the manifest
    section = after.config["tree"]
    assert section["measured_on"]["dtype"] == "float32"
    assert len(section["measured_on"]["prompts_sha256"]) == 64
    sizes = {size["num_nodes"]: size for size in section["measured_on"]["sizes"]}
    assert after.tree.num_nodes in sizes and after.tree != before.tree
    assert section["expected_accept_length"] == pytest.approx(
        sizes[after.tree.num_nodes]["accept_length"], abs=1e-3
    )
    assert f"{after.tree.num_nodes} nodes" in capsys.readouterr().out


def test_prompts_are_fixed_by_their_hash(tiny_model_dir: Path, prompt_file: Path) -> None:
    """Two tables over different prompts must not look alike."""
    tokenizer = load_tokenizer(str(tiny_model_dir))
    device = torch.device("cpu")
    chosen, digest = read_prompts(prompt_file, tokenizer, 4, max_length=64, device=device)
    assert [prompt.kind for prompt in chosen] == ["body", "edit", "body", "edit"]
    _, same = read_prompts(prompt_file, tokenizer, 4, max_length=64, device=device)
    prompt_file.write_text(prompt_file.read_text().replace("f1(x)", "f1(y)"))
    _, changed = read_prompts(prompt_file, tokenizer, 4, max_length=64, device=device)
    assert digest == same != changed
    with pytest.raises(ConfigError, match="no prompt of at most 3 tokens"):
        read_prompts(prompt_file, tokenizer, 4, max_length=3, device=device)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"out": "nowhere/bench.json"}, "no folder nowhere"),
        ({"prompts": "missing.jsonl"}, "missing.jsonl"),
        ({"max_new_tokens": 512}, "512.*context is 512"),
        ({"checkpoint": "missing"}, "missing"),
    ],
)
def test_bad_input_is_named(tiny_export: Path, settings: dict[str, object], message: str) -> None:
    """A mistake found after the measuring costs the measuring."""
    values = {"checkpoint": str(tiny_export), "threads": 1, **settings}
    with pytest.raises(ConfigError, match=message):
        bench(BenchConfig(**values))  # type: ignore[arg-type]
