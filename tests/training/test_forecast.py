"""What a dry run says of a base whose weights are not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.config import HeadsConfig, LossConfig
from specheads.models.base import input_embedding
from specheads.models.output import output_layer, packed_taps, with_final
from specheads.training.forecast import operations
from specheads.training.objectives import HeadsObjective
from specheads.training.setup import heads_of
from tests.end_to_end.commands import start

SIZES = {
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "llama-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
}
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "shared": {"lm_head": "shared"},
    "hydra": {"condition": True, "prefix_layer": True},
    "joined": {"kind": "block", "lm_head": "shared", "options": {"form": "joined", "anchors": 16}},
    "dspark": {
        "kind": "block", "lm_head": "own", "correction": "markov", "markov_rank": 16,
        "options": {"form": "published", "anchors": 16},
    },
    "eagle3": {"kind": "eagle3", "lm_head": "own", "options": {"num_taps": 2, "anchors": 16}},
}  # fmt: skip


def described(folder: Path, **sizes: int) -> Path:
    """Write the config of a Llama, and nothing else."""
    heads = sizes["hidden_size"] // 128
    LlamaConfig(
        vocab_size=128_256, num_attention_heads=heads, num_key_value_heads=8, **sizes
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("recipe", ["dspark", "block", "medusa1", "eagle3"])
@pytest.mark.parametrize("size", SIZES)
def test_what_a_large_base_needs_is_said_from_its_config_alone(
    size: str,
    recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever plans terabytes of hidden states has to have the base's weights, or a wrong sum."""
    base = described(tmp_path / size, **SIZES[size])
    settings = f"model={base}", f"hydra.run.dir={tmp_path / 'run'}", "steps=1000", "dry_run=true"
    assert start(monkeypatch, f"+recipe={recipe}", "model.dtype=bfloat16", *settings) == 0
    said = capsys.readouterr().out
    width, layers = SIZES[size]["hidden_size"], SIZES[size]["num_hidden_layers"]
    mlp = 3 * width * SIZES[size]["intermediate_size"]
    attention = 2 * width * width + 2 * width * 1024
    numbers = layers * (mlp + attention + 2 * width) + 2 * 128_256 * width + width
    assert f"base: {numbers / 1e6:,.0f} M parameters" in said
    taps, each = re.search(r"hidden states: (\d+) taps x ([\d,]+)", said).groups()  # type: ignore[union-attr]
    wanted = {"dspark": 6, "block": 4, "medusa1": 1, "eagle3": 4}[recipe]
    assert (int(taps), int(each.replace(",", ""))) == (wanted, width)
    assert f"{wanted * width * 2:,} bytes per token" in said
    assert "8 GPUs of 80 GB" in said and "assumed" in said and "online" in said
    zero2 = re.search(r"zero2 [^;]*", said)
    assert zero2 is not None
    assert zero2[0].endswith("(too much)") == (size == "llama-70b")
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_trains_the_base_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A plan that leaves out the base's own gradients says that it fits."""
    base = described(tmp_path / "base", **SIZES["llama-8b"])
    settings = f"model={base}", f"hydra.run.dir={tmp_path / 'run'}", "dry_run=true"
    assert start(monkeypatch, "+recipe=medusa2", *settings) == 2
    said = capfd.readouterr().err
    assert "recipe=medusa2 needs model.safetensors there" in said and said.count("\n") == 1


@pytest.mark.parametrize("kind", HEADS)
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    """A part of the heads that is counted for no row, or for every row, plans other hours."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2,
        )
    ).requires_grad_(False)  # fmt: skip
    output = output_layer(base)
    heads = heads_of(HeadsConfig(num_heads=3, **HEADS[kind]), base, output)
    heads.init_from_output(output.weight)
    rows, length = 2, 128
    ids = torch.randint(256, (rows, length))
    positions = torch.arange(length).expand(rows, -1)
    final, tapped = packed_taps(base, ids, positions, heads.taps)
    hidden = tapped if with_final(heads.taps) == heads.taps else torch.cat([tapped, final], -1)
    batch = {
        "input_ids": ids, "labels": ids, "position_ids": positions, "hidden": hidden,
        "segment_ids": torch.ones_like(ids),
    }  # fmt: skip
    objective = HeadsObjective(
        None, heads, LossConfig(), train_base=False, output=output,
        embed=lambda tokens: input_embedding(base)[tokens],
    )  # fmt: skip

    def added(into: Any, one: Any, other: Any, **_: Any) -> int:
        return int(2 * one[0] * one[1] * other[1])  # as torch counts the others: shapes come in

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added}) as counter:
        objective(batch)[0].backward()
    counted = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counted.items() if "attention" in str(op) or "bmm" in str(op))
    products = sum(counted.values()) - attention
    assert operations(heads, rows, length) == pytest.approx(products, rel=0.3)
