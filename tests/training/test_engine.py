"""The engine door and what it optimizes: groups, schedules, state of every optimizer."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear8bitLt
from safetensors.torch import load_file
from transformers import PreTrainedModel

from specheads.config import AdapterConfig, ConfigError, LossConfig, OptimConfig
from specheads.models.adapters import adapter_parameters, add_adapter
from specheads.training.engine import (
    Muon,
    TorchEngine,
    lambda_scale,
    lr_factor,
    make_optimizers,
    param_groups,
)
from specheads.training.loop import open_engine
from tests.toys import ToyBatches, ToyObjective, toy_config


def one_step(engine: TorchEngine, number: int, factor: float = 1.0) -> float:
    """Take an optimizer step on batch ``number``."""
    batch = ToyBatches().make(number)
    batch["num_valid"] = torch.full((3,), 10.0)
    loss, _ = engine.forward(batch)
    engine.backward(loss, last=True)
    return engine.step(factor)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_saved_and_loaded_continues_exactly(tmp_path: Path, name: str) -> None:
    """Optimizer state that is lost or permuted only shows as a slightly worse run."""
    cfg = toy_config(tmp_path, optim__name=name)
    engines = []
    for _ in range(2):
        objective = ToyObjective()
        groups = param_groups(cfg.optim, heads=(objective, cfg.optim.lr))
        engines.append(TorchEngine(objective, groups, cfg))
    first, second = engines
    one_step(first, 0)
    one_step(first, 1)
    first.save(tmp_path)
    second.load(tmp_path)
    for number in (2, 3):
        assert one_step(first, number) == one_step(second, number)
    for (key, x), y in zip(
        first.objective.state_dict().items(), second.objective.state_dict().values(), strict=True
    ):
        assert torch.equal(x, y), key


class Wide(ToyObjective):
    """With two matrices large enough for 8-bit moments."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = torch.nn.Sequential(torch.nn.Linear(6, 800), torch.nn.Linear(800, 6))


def test_8_bit_moments_continue_exactly(tmp_path: Path) -> None:
    """Moments that come back as floats, or with another code book, only make a worse run."""
    cfg = toy_config(tmp_path, optim__name="adamw8bit")
    engines = []
    for _ in range(2):
        objective = Wide()
        groups = param_groups(cfg.optim, heads=(objective, cfg.optim.lr))
        engines.append(TorchEngine(objective, groups, cfg))
    first, second = engines
    one_step(first, 0)
    one_step(first, 1)
    first.save(tmp_path)
    stored = load_file(tmp_path / "optimizer.safetensors")
    eight = {name for name, tensor in stored.items() if tensor.dtype == torch.uint8}
    assert eight == {f"blocks.0.{i}.weight/state{n}" for i in (0, 1) for n in (1, 2)}
    second.load(tmp_path)
    for number in (2, 3):
        assert one_step(first, number) == one_step(second, number)
    for (key, x), y in zip(
        first.objective.state_dict().items(), second.objective.state_dict().values(), strict=True
    ):
        assert torch.equal(x, y), key


def test_8_bit_steps_are_near_those_of_adamw(tmp_path: Path) -> None:
    """An optimizer built with other betas, decay or rates than the settings say trains, too."""
    found = []
    for name in ("adamw", "adamw8bit"):
        cfg = toy_config(tmp_path, optim__name=name, optim__weight_decay=0.1)
        objective = Wide()
        before = torch.nn.utils.parameters_to_vector(objective.parameters()).detach()
        engine = TorchEngine(
            objective, param_groups(cfg.optim, heads=(objective, cfg.optim.lr)), cfg
        )
        for number in range(4):
            one_step(engine, number, factor=0.5)
        after = torch.nn.utils.parameters_to_vector(objective.parameters()).detach()
        found.append(after - before)
    plain, eight = found
    assert torch.dot(plain, eight) / plain.norm() / eight.norm() > 0.99
    assert float(eight.norm() / plain.norm()) == pytest.approx(1.0, abs=0.02)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Loading what fits and skipping the rest leaves heads at their initial values."""
    cfg = toy_config(tmp_path)
    objective = ToyObjective()
    TorchEngine(objective, param_groups(cfg.optim, heads=(objective, 0.1)), cfg).save(tmp_path)
    objective.embed.requires_grad_(False)
    engine = TorchEngine(objective, param_groups(cfg.optim, heads=(objective, 0.1)), cfg)
    with pytest.raises(ConfigError, match="unexpected: embed.weight"):
        engine.load(tmp_path)


def test_learning_rates_cover_biases(tmp_path: Path) -> None:
    """Head biases left at the base model's rate were a known defect elsewhere."""
    optim = OptimConfig(lr=1e-3, base_lr=1e-4)
    heads, base = ToyObjective(), ToyObjective()
    groups = param_groups(optim, heads=(heads, optim.lr), base=(base, optim.base_lr))
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert all(rates[id(p)] == 1e-3 for p in heads.parameters())
    assert all(rates[id(p)] == 1e-4 for p in base.parameters())
    assert len(rates) == len(list(heads.parameters())) + len(list(base.parameters()))


def test_muon_takes_hidden_matrices_only(tmp_path: Path) -> None:
    """Muon on embeddings, output matrices or biases trains, and trains badly."""
    optim = OptimConfig(name="muon", lr=1e-3, muon_ratio=4.0)
    objective = ToyObjective()
    groups = {g["name"]: g for g in param_groups(optim, base=(objective, optim.lr))}
    hidden = {id(block.weight) for block in objective.blocks}
    assert {id(p) for p in groups["base_muon"]["params"]} == hidden
    assert groups["base_muon"]["lr"] == pytest.approx(4e-3)
    assert len(groups["base"]["params"]) == len(list(objective.parameters())) - len(hidden)
    engine = TorchEngine(objective, list(groups.values()), toy_config(tmp_path, optim__name="muon"))
    before = [block.weight.detach().clone() for block in objective.blocks]
    one_step(engine, 0)
    assert all(
        not torch.equal(x, block.weight) for x, block in zip(before, objective.blocks, strict=True)
    )


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
def test_muon_in_float32_steps_as_torchs(shape: tuple[int, int]) -> None:
    """A rate, a transposition or a momentum that is another trains, at another speed than tuned."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, torchs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [c([p], lr=0.02) for c, p in ((Muon, ours), (torch.optim.Muon, torchs))]
    for _ in range(4):
        grad = torch.randn(shape, generator=generator)
        ours.grad, torchs.grad = grad.clone(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - torchs).norm() < 0.02 * (torchs - start).norm()  # bfloat16's rounding
    first, second = (o.state_dict() for o in optimizers)
    assert first["state"][0].keys() == second["state"][0].keys()
    torch.testing.assert_close(first["state"][0], second["state"][0])


@pytest.mark.parametrize("native", [False, True])
def test_muon_rounds_only_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """Emulated, the products of bfloat16 take longer than the pass and its gradients."""
    monkeypatch.setattr("specheads.system.hardware.has_native_bfloat16", lambda: native)
    optim = OptimConfig(name="muon")
    groups = param_groups(optim, base=(ToyObjective(), optim.lr))
    made = {type(optimizer) for optimizer in make_optimizers(groups, optim)}
    assert made == {torch.optim.AdamW, torch.optim.Muon if native else Muon}


def test_muon_leaves_adapters_to_adamw(tiny_llama: PreTrainedModel) -> None:
    """Muon makes the steps of A and B orthogonal, which says nothing about the step of B A."""
    add_adapter(tiny_llama, AdapterConfig(kind="lora", rank=2))
    (group,) = param_groups(OptimConfig(name="muon"), base=(tiny_llama, 1e-3))
    assert group["name"] == "base"
    assert len(group["params"]) == len(adapter_parameters(tiny_llama))


def test_an_infinite_gradient_stops_before_the_step(tmp_path: Path) -> None:
    """A finite loss can have infinite gradients; clipping turns them into NaN weights."""
    cfg = toy_config(tmp_path)
    objective = ToyObjective()
    engine = TorchEngine(objective, param_groups(cfg.optim, heads=(objective, 0.1)), cfg)
    objective.lm_head.weight.register_hook(lambda grad: grad * float("inf"))
    before = {name: p.detach().clone() for name, p in objective.named_parameters()}
    assert not math.isfinite(one_step(engine, 0))
    assert all(torch.equal(before[name], p) for name, p in objective.named_parameters())
    assert all(p.grad is None for p in objective.parameters())
    assert not any(optimizer.state for optimizer in engine.optimizers)
    assert not engine.overflowed


def test_many_processes_need_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plain processes would train two models into one directory."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg = toy_config(tmp_path)
    with pytest.raises(ConfigError, match="2 processes were started, but deepspeed=none"):
        open_engine(ToyObjective(), [], cfg)


@pytest.mark.parametrize("name", ["muon", "adamw8bit"])
def test_some_optimizers_exclude_deepspeed(tmp_path: Path, name: str) -> None:
    """ZeRO flattens matrices; Muon on a flat vector is not Muon, nor are blocks of 8 bits these."""
    cfg = toy_config(tmp_path, optim__name=name, deepspeed={"zero_optimization": {"stage": 2}})
    with pytest.raises(ConfigError, match=f"optim.name={name} needs deepspeed=none"):
        open_engine(ToyObjective(), [], cfg)


def test_zero_3_and_quantised_weights_exclude_each_other(tmp_path: Path) -> None:
    """It would cut the packed numbers into parts, and fail deep inside the first product."""
    cfg = toy_config(tmp_path, deepspeed={"zero_optimization": {"stage": 3}})
    objective = ToyObjective()
    objective.blocks[0] = Linear8bitLt(6, 6, has_fp16_weights=False)
    with pytest.raises(ConfigError, match="ZeRO-3 cannot spread quantised weights; choose") as e:
        open_engine(objective, [], cfg)
    assert "\n" not in str(e.value)


def test_a_missing_bitsandbytes_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ImportError would come after the model was loaded, without the setting's name."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cfg = toy_config(tmp_path, optim__name="adamw8bit")
    objective = ToyObjective()
    with pytest.raises(ConfigError, match="optim.name=adamw8bit needs bitsandbytes: pip install"):
        open_engine(objective, param_groups(cfg.optim, heads=(objective, 0.1)), cfg)


def test_schedules() -> None:
    """A warm-up that restarts nowhere, or a decay that restarts with a stage, is easy to miss."""
    cosine = OptimConfig(warmup_steps=4, schedule="cosine")
    factors = [lr_factor(step, 0, 100, cosine, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.2, rel=1e-2)
    assert factors[4] == pytest.approx(1.0, rel=1e-2)
    assert 0 < factors[99] < 1e-3
    second = [lr_factor(step, 50, 100, cosine, 100) for step in (49, 50, 54)]
    assert second[1] == pytest.approx(0.2 * 0.5, rel=1e-2)
    assert second[2] == pytest.approx(factors[54])
    wsd = OptimConfig(warmup_steps=0, schedule="wsd", decay_fraction=0.25)
    assert lr_factor(74, 0, 100, wsd, 100) == 1.0
    assert lr_factor(90, 0, 100, wsd, 100) == pytest.approx(0.4)
    assert lr_factor(0, 0, 1, OptimConfig(warmup_steps=20), 1) == 1.0  # a run shorter than that


def test_lambda_rises_within_its_stage() -> None:
    """A ramp that counts the steps of the whole run starts the second stage in its middle."""
    assert lambda_scale(3, 0, 10, LossConfig()) == 1.0
    sine = LossConfig(lambda_schedule="sine")
    assert lambda_scale(9, 0, 10, sine) == pytest.approx(1.0)
    assert lambda_scale(14, 10, 20, sine) == pytest.approx(2**-0.5)
    linear = LossConfig(lambda_schedule="linear", lambda_ramp=0.4)
    found = [lambda_scale(step, 10, 20, linear) for step in range(10, 20)]
    assert found == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 7])
    assert lambda_scale(
        11, 10, 20, LossConfig(lambda_schedule="sine", lambda_ramp=0.4)
    ) == pytest.approx(2**-0.5)
