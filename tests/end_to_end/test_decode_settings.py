"""``decode.*``: which trees, which rule, compiled or not, in generate and bench."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.bench import run as bench
from specheads.config import BenchConfig, ConfigError, DecodeConfig, GenerateConfig
from specheads.decoding import exported
from specheads.decoding.exported import exported_drafter, tree_kind
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsDrafter
from specheads.generate import run as generate
from specheads.models import forward
from specheads.models.checkpoint import load_export, set_tree

DYNAMIC = {"num_nodes": 5, "temperatures": [1.0, 2.0, 0.5]}


def text_of(capsys: pytest.CaptureFixture[str], export: Path, **decode: Any) -> str:
    """Return what generate prints with these settings."""
    capsys.readouterr()
    settings = DecodeConfig(**decode)
    generate(
        GenerateConfig(
            checkpoint=str(export), prompt="def f(x):", max_new_tokens=24, decode=settings
        )
    )
    return capsys.readouterr().out


def test_settings_change_the_speed_and_not_the_text(
    tiny_export: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a setting that is read and dropped, and one that changes what is written."""
    made: list[object] = []
    run: list[str] = []

    make = exported.heads_drafter

    def watch(*args: Any) -> HeadsDrafter:
        made.append(args[-1])
        return make(*args)

    real = torch.compile
    monkeypatch.setattr(exported, "heads_drafter", watch)
    monkeypatch.setattr(
        torch, "compile", lambda f, mode=None: (run.append("compiled"), real(f, backend="eager"))[1]
    )
    forward._compiled_forward.cache_clear()
    expected = text_of(capsys, tiny_export)
    assert text_of(capsys, tiny_export, tree="dynamic", num_nodes=4) == expected
    assert text_of(capsys, tiny_export, compile=True) == expected
    assert [each for each in made if isinstance(each, Grown)] == [Grown(4)]
    assert run == ["compiled"]
    forward._compiled_forward.cache_clear()
    loose = text_of(capsys, tiny_export, acceptance="lossy_typical", epsilon=0.0, delta=0.0)
    assert loose != expected, "everything is accepted: the heads' own text"


def test_a_dynamic_tree_is_the_one_that_was_searched_for(tiny_export: Path) -> None:
    """Prevents a size or temperatures out of the air where the export has measured ones."""
    export = load_export(tiny_export, dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match="needs decode.num_nodes"):
        exported_drafter(export, DecodeConfig(tree="dynamic"))
    set_tree(tiny_export, export.tree, 1.0, {"dynamic": DYNAMIC})
    export = load_export(tiny_export, dtype=torch.float32, device="cpu")
    drafter = exported_drafter(export, DecodeConfig(tree="dynamic"))
    assert isinstance(drafter.shape, Grown) and drafter.num_nodes == 5
    drafter = exported_drafter(export, DecodeConfig(tree="dynamic", num_nodes=7))
    assert isinstance(drafter.shape, Grown) and drafter.num_nodes == 7


def test_auto_takes_what_was_found_faster(tiny_export: Path) -> None:
    """Prevents a default that is slower than what the search of this machine says."""
    export = load_export(tiny_export, dtype=torch.float32, device="cpu")
    assert tree_kind(export, DecodeConfig()) == "static", "nothing was searched"
    for speedup, kind in ((1.9, "static"), (2.1, "dynamic")):
        measured_on = {"speedup": 2.0, "dynamic": {**DYNAMIC, "speedup": speedup}}
        set_tree(tiny_export, export.tree, 1.0, measured_on)
        export = load_export(tiny_export, dtype=torch.float32, device="cpu")
        assert tree_kind(export, DecodeConfig()) == kind
        assert isinstance(exported_drafter(export).shape, Grown) == (kind == "dynamic")
        assert tree_kind(export, DecodeConfig(tree="static")) == "static"
    assert tree_kind(export, DecodeConfig(num_nodes=4)) == "dynamic"


def test_bench_shows_dynamic_trees_and_names_lossy_rules(
    tiny_export: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prevents a lossy row that passes for an exact one, or is held to plain decoding's tokens."""
    export = load_export(tiny_export, dtype=torch.float32, device="cpu")
    set_tree(tiny_export, export.tree, 1.0, {"dynamic": DYNAMIC})
    out = prompt_file.with_name("bench.json")
    bench(
        BenchConfig(
            checkpoint=str(tiny_export),
            out=str(out),
            prompts=str(prompt_file),
            num_prompts=2,
            max_new_tokens=12,
            repeats=1,
            dtype="float32",
            threads=1,
            decode=DecodeConfig(acceptance="lossy_typical"),
        )
    )
    rows = {(row["method"], row["temperature"]): row for row in json.loads(out.read_text())["rows"]}
    assert rows["tree_dynamic", 0.0]["identical"] == 2 and rows["tree_dynamic", 0.0]["drafter"]
    for temperature in (0.0, 1.0):
        assert rows["tree_lossy_typical", temperature]["compared"] == 0
    assert "tree_lossy_typical" in capsys.readouterr().out
