"""What a dry run says of a base whose weights are not there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.config import ConfigError, HeadsConfig, LossConfig, PlanConfig
from specheads.config.compose import composed as composed_config
from specheads.models.adapters import require_grad
from specheads.models.mtp import MtpHeads
from specheads.models.output import OutputLayer, output_layer, packed_taps, with_final
from specheads.system.files import conf_dir
from specheads.training.engine import param_groups
from specheads.training.forecast import forecast, heads_activations, operations, sketch
from specheads.training.objectives import HeadsObjective
from specheads.training.plan import RESERVED, SPREADS, Work, load_of, parameters_of
from specheads.training.setup import build_draft, heads_of, load_base
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
    assert f"base {numbers / 1e6:,.2f} M frozen" in said
    wanted = {"dspark": 6, "block": 4, "medusa1": 1, "eagle3": 4}[recipe]
    assert f"{wanted * width * 2:,} bytes per token" in said
    assert "8 GPUs of 80 GB" in said and "not predicted" in said and "online" in said
    zero2 = re.search(r"^ *zero2 .*$", said, re.MULTILINE)
    assert zero2 is not None
    assert zero2[0].endswith("too much in 80 GB") == (size == "llama-70b")
    assert not (tmp_path / "run").exists()


RECIPES = sorted(path.stem for path in (conf_dir() / "recipe").glob("*.yaml"))
OWN = {
    "medusa2": ["adapter=lora", "adapter.rank=2"],
    "distill": ["draft.hidden=16"],
    "pretrain": ["model.init.hidden_size=40"],
}


def planned(base: Path, recipe: str, *words: str) -> PlanConfig:
    """Return the settings of a plan."""
    given = [f"+recipe={recipe}", f"model.name={base}", *OWN.get(recipe, []), *words]
    return composed_config("plan", PlanConfig, given)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_planned(recipe: str, tiny_model_dir: Path) -> None:
    """A recipe that nobody can plan is tried on eight GPUs to find out that it needs sixteen."""
    found = forecast(planned(tiny_model_dir, recipe), gpus=4)
    figures = json.loads(json.dumps(found.figures))
    assert figures["cheapest"] == "zero0" and figures["activations_counted"]
    assert figures["operations_per_step"] > 0 and figures["seconds_per_step"] is None
    assert set(figures["stages"]) == {name for name in SPREADS if name != "none"}
    trained = sum(part["trained"] for part in figures["parameters"].values())
    zero1 = figures["stages"]["zero1"]
    assert zero1["gradients"] == 4 * trained and zero1["optimizer"] == 12 * trained / 4
    assert "not predicted" in str(found) and "0:00:" not in str(found)


@pytest.mark.parametrize("recipe", ["medusa1", "medusa2", "mtp_finetune", "distill"])
def test_a_plan_counts_what_real_weights_take(recipe: str, tiny_model_dir: Path) -> None:
    """Tensors without memory of another shape or dtype plan another run than is started."""
    cfg = planned(tiny_model_dir, recipe, "loss.chunk_size=7", "heads.lm_head=own")
    drawn = sketch(cfg)
    base, output, tokenizer = load_base(cfg, train_base=recipe == "medusa2")
    tuned = recipe == "medusa2"
    require_grad(base, tuned)
    parts: dict[str, Any] = {"base": base}
    if recipe == "distill":
        parts["draft"] = build_draft(cfg, base, tokenizer)
        output = output_layer(parts["draft"])
    else:
        make = MtpHeads.from_settings if recipe == "mtp_finetune" else heads_of
        section: Any = cfg.mtp if recipe == "mtp_finetune" else cfg.heads
        parts["heads"] = make(section, base, output)
    groups = param_groups(cfg.optim, **{name: (part, 1.0) for name, part in parts.items()})
    real = Work(parts, groups, output.weight)
    for spread in SPREADS.values():
        assert load_of(drawn, cfg, spread) == load_of(real, cfg, spread)
    assert parameters_of(drawn) == parameters_of(real)


def test_the_cheapest_that_fits_is_named(tmp_path: Path) -> None:
    """A plan that names what does not fit, or more communication than is needed, costs a night."""
    base = described(tmp_path / "base", **SIZES["llama-8b"])
    words = "model.dtype=bfloat16", "data.rows=1", "model.gradient_checkpointing=true"
    cfg = planned(base, "medusa2", *words, "adapter=none")
    needs = forecast(cfg).needs
    for name in ("zero0", "zero1", "zero2", "zero3", "zero3_offload"):
        assert forecast(cfg, memory=needs[name].peak + RESERVED).figures["cheapest"] == name
    assert forecast(cfg, gpus=1, memory=3e11).figures["cheapest"] == "none"
    assert "least communication): none fits" in str(forecast(cfg, memory=1e10))


def test_time_is_predicted_for_a_rate_alone(tiny_model_dir: Path) -> None:
    """Hours that rest on a rate which nobody gave are taken for a promise."""
    found = forecast(planned(tiny_model_dir, "medusa1", "steps=10"), gpus=2, flops=1e9)
    figures = found.figures
    assert figures["seconds_per_step"] == figures["operations_per_step"] / 1e9
    assert figures["regenerate_seconds"] == figures["regenerate_operations"] / 2e9
    assert "at flops=1e+09 of each GPU, as given" in str(found)


def test_packed_weights_are_counted_as_packed(tiny_model_dir: Path) -> None:
    """A base of four bits planned as one of sixteen is refused a GPU that would do."""
    words = "adapter=lora", "model.dtype=bfloat16"
    plain = forecast(planned(tiny_model_dir, "medusa2", *words), gpus=1)
    packed = forecast(planned(tiny_model_dir, "medusa2", *words, "model.quantization=nf4"), gpus=1)
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)  # two layers of the tiny Llama
    saved = plain.needs["none"].weights - packed.needs["none"].weights
    assert saved == pytest.approx(linear * (2 - 0.5 - 1 / 64), rel=0.01)
    assert "zero3" not in packed.needs
    assert packed.figures["parameters"] == plain.figures["parameters"]


def test_a_recipe_of_the_users_own_is_not_guessed_at(tiny_model_dir: Path) -> None:
    """A file that trains something else would be planned as heads on a frozen base."""
    cfg = replace(planned(tiny_model_dir, "medusa1"), recipe="mine.py")
    with pytest.raises(ConfigError, match="recipe=mine.py trains what its own code says"):
        forecast(cfg)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["recipe=medusa1", "gpus=0"], "gpus must be at least 1, got 0"),
        (["recipe=medusa1", "model=/no/such"], "model.name=/no/such: there is no such folder"),
        (["recipe=nope"], "Could not find 'recipe/nope'"),
        ([], "choose a recipe: recipe=block|"),
        (["recipe=medusa1", "gpu=1"], "unknown key gpu; did you mean gpus?"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    words: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistake in a plan ends in a traceback of transformers."""
    assert start(monkeypatch, *words, command="plan") == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1


def small_base(hidden: int, intermediate: int) -> tuple[LlamaForCausalLM, OutputLayer]:
    """Return a frozen Llama of six layers, and its output layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    base = LlamaForCausalLM(config).requires_grad_(False)
    return base, output_layer(base)


def on_stored(
    base: LlamaForCausalLM, output: OutputLayer, heads: Any, rows: int, length: int
) -> tuple[HeadsObjective, dict[str, torch.Tensor]]:
    """Return the objective of heads on stored hidden states, and a batch of them."""
    ids = torch.randint(256, (rows, length))
    positions = torch.arange(length).expand(rows, -1)
    final, tapped = packed_taps(base, ids, positions, heads.taps)
    hidden = tapped if with_final(heads.taps) == heads.taps else torch.cat([tapped, final], -1)
    batch = {
        "input_ids": ids, "labels": ids, "position_ids": positions, "hidden": hidden,
        "segment_ids": torch.ones_like(ids),
    }  # fmt: skip
    heads.read_through(base)
    objective = HeadsObjective(None, heads, LossConfig(), train_base=False, output=output)
    return objective, batch


@pytest.mark.parametrize("kind", HEADS)
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    """A part of the heads that is counted for no row, or for every row, plans other hours."""
    base, output = small_base(64, 160)
    heads = heads_of(HeadsConfig(num_heads=3, **HEADS[kind]), base, output)
    heads.init_from_output(output.weight)
    rows, length = 2, 128
    objective, batch = on_stored(base, output, heads, rows, length)

    def added(into: Any, one: Any, other: Any, **_: Any) -> int:
        return int(2 * one[0] * one[1] * other[1])  # as torch counts the others: shapes come in

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added}) as counter:
        objective(batch)[0].backward()
    counted = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counted.items() if "attention" in str(op) or "bmm" in str(op))
    products = sum(counted.values()) - attention
    assert operations(heads, rows, length) == pytest.approx(products, rel=0.3)


@pytest.mark.parametrize("kind", HEADS)
def test_activations_of_heads_are_about_what_is_kept(kind: str) -> None:
    """Heads that attend keep more than their base's last layer: left out, a plan does not fit."""
    base, output = small_base(512, 1376)
    heads = heads_of(HeadsConfig(num_heads=3, **HEADS[kind]), base, output)
    heads.init_from_output(output.weight)
    rows, length = 2, 256
    objective, batch = on_stored(base, output, heads, rows, length)
    weights = {p.untyped_storage().data_ptr() for p in (*heads.parameters(), *base.parameters())}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        objective(batch)
    places = rows * min(heads.anchors or length, length)
    # the fused loss has formed these
    gradients = 4 * 3 * places * heads.hidden_size
    # a head's layers are made again in backward
    again = [p.shape for p in heads.parameters() if p.dim() == 2 and heads.num_layers]
    largest = (
        4 * rows * length * max((sum(shape) for shape in again if 256 not in shape), default=0)
    )
    told = heads_activations(heads, rows, length, 4)
    found = sum(storage.nbytes() for storage in kept.values()) + gradients + largest
    assert told == pytest.approx(found, rel=0.35)
