"""``python -m specheads.bench`` and ``tree_search`` on a tiny model."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.bench import run as bench
from specheads.config import BenchConfig, ConfigError, RunError, TreeSearchConfig
from specheads.decoding.result import DecodedRow
from specheads.measure.bench import Contest
from specheads.measure.clock import Batch, Method, read_prompts
from specheads.models.base import load_tokenizer
from specheads.models.checkpoint import load_export, read_config
from specheads.models.manifest import write_manifest
from specheads.tree_search import run as tree_search

Program = Callable[..., subprocess.CompletedProcess[str]]
KEYS = {
    "method", "drafter", "tree_nodes", "dtype", "device", "batch", "temperature", "num_prompts",
    "new_tokens", "seconds", "tokens_per_second", "speedup_vs_plain", "speedup_vs_plain_ci95",
    "speedup_vs_hf_generate", "accept_length", "accept_length_ci95", "rep8", "peak_memory",
    "extra_parameters", "identical", "compared", "near_ties", "divergences",
    "num_replays", "num_replay_passes",
}  # fmt: skip


def test_bench_writes_every_row(tiny_export: Path, prompt_file: Path, program: Program) -> None:
    """A table without its baselines, or with outputs that differ, proves nothing.

    Nor does it say why it took so long if it measures in silence what was not asked for.
    """
    out = prompt_file.with_name("bench.json")
    done = program(
        "bench",
        f"out={out}",
        f"checkpoint={tiny_export}",
        f"prompts={prompt_file}",
        "num_prompts=3",
        "max_new_tokens=8",
        "temperatures=[0.0]",
        "repeats=2",
        "dtype=float32",
        "threads=1",
        "tree_nodes=[3]",
        "batch_sizes=[2]",
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("specheads: ")]
    planned = "temperatures=[0,0.7,1], batch_sizes=[1,2]"
    assert lines[0] == f"specheads: measuring {tiny_export} at {planned}"
    parts = [f"specheads: T={t:g}, batch {b}: text " for t in (0, 0.7, 1) for b in (1, 2)]
    found = [part for line in lines for part in parts if line.startswith(part)]
    assert [*dict.fromkeys(found)] == parts
    assert " of 198, " in lines[-1] and lines[-1].startswith(f"{parts[-1]}198 of")
    result = json.loads(out.read_text())
    assert set(result) >= {"environment", "settings", "rows", "headline"}
    batched = [row for row in result["rows"] if row["batch"] == 2]
    without = [row for row in batched if row["method"] != "one_by_one"]
    assert len(without) * 2 == len(result["rows"]) - 3, "batch 1 is always there"
    assert all(row["identical"] in (3, None) for row in batched)
    assert {row["method"] for row in result["crossover"]} == {"prompt_lookup", "tree", "tree_3"}
    assert result["settings"]["noise"] is None, "nothing differs, nothing is measured"
    assert "plain decoding" in done.stdout and "batch 2" in done.stdout
    alone = [row for row in result["rows"] if row["batch"] == 1]
    rows = {(row["method"], row["temperature"]): row for row in alone}
    methods = {"plain", "hf_generate", "prompt_lookup", "tree", "tree_3"}
    assert rows.keys() == {(method, t) for method in methods for t in (0.0, 0.7, 1.0)}
    for (method, temperature), row in rows.items():
        assert row.keys() >= KEYS
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert row["per_kind"].keys() == {"body", "edit"}, "kinds are taken in turn"
        drawn_alike = method != "hf_generate" or temperature == 0
        assert row["compared"] == (3 if drawn_alike else 0)
        if drawn_alike:
            assert row["identical"] == 3, f"{method} at T={temperature} differs from plain"
    assert rows["plain", 0.0]["accept_length"] == 1 < rows["tree", 0.0]["accept_length"]
    assert rows["tree", 1.0]["tree_nodes"] == 6 and rows["tree_3", 1.0]["tree_nodes"] == 3
    assert rows["tree", 0.0]["extra_parameters"] > 0 == rows["plain", 0.0]["extra_parameters"]
    assert len(result["settings"]["prompts_sha256"]) == 64
    assert "prompt_lookup" in done.stdout and "Headline" in done.stdout


def test_a_wrong_decoder_fails_the_bench(
    tiny_export: Path,
    prompt_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A table of speed-ups of other outputs than plain decoding's must not leave with 0."""
    make = Contest.of_trees

    def make_wrong(*args: Any, **kwargs: Any) -> list[Method]:
        def decode(batch: Batch, temperature: float, seed: int, *prefill: int) -> list[DecodedRow]:
            decoded = tree.decode(batch, temperature, seed, *prefill)
            if not prefill:
                decoded[-1].new_tokens[5] = (decoded[-1].new_tokens[5] + 11) % 256
            return decoded

        *others, tree = make(*args, **kwargs)
        return [*others, replace(tree, decode=decode)]

    monkeypatch.setattr(Contest, "of_trees", make_wrong)
    out = prompt_file.with_name("bench.json")
    with pytest.raises(RunError, match="tree at T=0, batch 1: prompt body-0 .* token 5 .*limit"):
        bench(
            BenchConfig(
                checkpoint=str(tiny_export),
                out=str(out),
                prompts=str(prompt_file),
                num_prompts=2,
                max_new_tokens=8,
                repeats=1,
                dtype="bfloat16",
                threads=1,
            )
        )
    row = next(row for row in json.loads(out.read_text())["rows"] if row["method"] == "tree")
    assert row["identical"] == row["near_ties"] == 0
    assert row["divergences"][0]["index"] == 5 and row["divergences"][0]["margin_fp32"] > 0
    assert "NOT ROUNDING" in capsys.readouterr().out


def test_a_moved_base_is_found(tiny_export: Path, prompt_file: Path, tiny_model_dir: Path) -> None:
    """An export whose base was moved could be trained on and decoded with, but not measured."""
    moved = tiny_export.with_name("moved")
    shutil.copytree(tiny_model_dir, moved)
    path = tiny_export / "config.json"
    config = read_config(tiny_export)
    config["base"]["name"] = "/nowhere"
    path.write_text(json.dumps(config))
    write_manifest(tiny_export)
    settings = {"checkpoint": str(tiny_export), "prompts": str(prompt_file), "threads": 1}
    short = {"num_prompts": 1, "max_new_tokens": 4, "repeats": 1, "dtype": "float32"}
    out = tiny_export.with_name("bench.json")
    with pytest.raises(ConfigError, match="nowhere"):
        bench(BenchConfig(**settings, **short, out=str(out)))  # type: ignore[arg-type]
    bench(BenchConfig(**settings, **short, out=str(out), base=str(moved)))  # type: ignore[arg-type]
    assert out.is_file()


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
            repeats=1,
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
