"""The plan of a run: what it counts, what it times, and that it changes nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from specheads.config import EvaluateConfig, TreeConfig
from specheads.data.teacher_cache import readable
from specheads.measure import evaluate as module
from specheads.measure.clock import Prompt
from specheads.measure.evaluate import Heldout, describe_expected
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.training import plan as plan_module
from specheads.training.engine import Spread, make_optimizers, param_groups
from specheads.training.loop import Stage
from specheads.training.plan import (
    StagePlan,
    clock,
    count_parameters,
    describe_costs,
    export_bytes,
    optimizer_bytes,
    plan_stage,
)
from specheads.training.teachers import with_numbers
from tests.toys import ToyBatches, ToyObjective, toy_config

OFFLOADS = {"zero2_offload", "zero3_offload"}


def plan_of(tmp_path: Path, objective: ToyObjective, **changes: Any) -> StagePlan:
    """Plan a stage that trains all of ``objective`` but its embedding."""
    cfg = toy_config(tmp_path, **changes)
    objective.embed.requires_grad_(False)
    groups = param_groups(cfg.optim, heads=(objective, cfg.optim.lr))
    parts = {"base": objective.embed, "heads": objective.blocks, "output": objective.lm_head}
    return plan_stage(Stage(objective, ToyBatches(), groups), cfg, parts, objective.lm_head.weight)


def test_a_plan_changes_nothing(tmp_path: Path) -> None:
    """A dry run that trains a little, or reads batches ahead, plans another run than it starts."""
    objective, batches = ToyObjective(dropout=0.3), ToyBatches()
    objective.blocks[0].eval()
    cfg = toy_config(tmp_path / "run")
    groups = param_groups(cfg.optim, heads=(objective, cfg.optim.lr))
    weights = {name: tensor.clone() for name, tensor in objective.state_dict().items()}
    modes = [part.training for part in objective.modules()]
    next(batches)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    stage = Stage(objective, batches, groups)
    plan = plan_stage(stage, cfg, {"heads": objective}, objective.lm_head.weight)
    assert torch.equal(torch.rand(2), expected)
    assert batches.state_dict() == {"position": 1}
    assert all(torch.equal(objective.state_dict()[k], v) for k, v in weights.items())
    assert [part.training for part in objective.modules()] == modes
    assert all(parameter.grad is None for parameter in objective.parameters())
    assert all("initial_lr" not in group for group in groups)
    assert len(objective.seen_num_valid) == 4 and len(plan.seconds) == 3
    assert not any(tmp_path.iterdir())


def test_parts_are_counted(tmp_path: Path) -> None:
    """A plan that forgets the optimizer fits a machine that the run does not fit."""
    objective = ToyObjective()
    plan = plan_of(tmp_path, objective)
    # embedding 11 x 6; three blocks 6 x 6 + 6; output matrix 11 x 6 + 11
    assert {part: tuple(counts.values()) for part, counts in plan.parameters.items()} == {
        "base": (0, 66), "heads": (126, 0), "output": (77, 0)
    }  # fmt: skip
    found = plan.needs["as set"]
    assert found.weights == 4 * 269
    assert found.gradients == plan.trained_bytes == 4 * 203
    assert found.optimizer == plan.optimizer_bytes == 8 * 203
    assert found.logits == 4 * 11 * 24  # no more than there are positions
    chunked = plan_of(tmp_path, objective, loss__chunk_size=5)
    assert chunked.needs["as set"].logits == 4 * 11 * 5
    zero: dict[str, Any] = {"deepspeed": {"zero_optimization": {"stage": 2}}}
    assert plan_of(tmp_path, objective, **zero).needs["as set"].gradients == 4 * 203


def test_what_zero_splits_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting the whole optimizer on each rank refuses machines that would do."""
    monkeypatch.setattr(plan_module.dist, "world_size", lambda: 2)
    parts = ("weights", "gradients", "optimizer")
    whole = {"weights": 4 * 269, "gradients": 4 * 203, "optimizer": 8 * 203}
    for stage, split in enumerate([(), parts[2:], parts[1:], parts]):
        zero = {"zero_optimization": {"stage": stage}}
        plan = plan_of(tmp_path, ToyObjective(), deepspeed=zero)
        # stages 1 to 3 step a copy of the float32 weights beside the two moments
        whole[parts[2]] = (12 if stage else 8) * 203
        for part in parts:
            assert getattr(plan.needs["as set"], part) == whole[part] / (
                2 if part in split else 1
            ), (stage, part)


def test_the_verdict_is_about_a_step_not_about_a_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not there at one time must not refuse a run, and what DeepSpeed adds must count."""
    plan = plan_of(tmp_path, ToyObjective())
    assert set(plan.needs) == {"as set", "zero0", "zero1", "zero2", "zero3", *OFFLOADS}
    assert plan.choice_ranks == 8
    found = plan.needs["as set"]
    states = found.weights + found.gradients + found.optimizer
    assert 4 * 269 + 12 * 203 <= found.peak <= states + found.logits + found.formed
    text = describe_costs(toy_config(tmp_path), [plan], {})
    assert f"{readable(found.training)}  " in text and "fits in " in text
    assert "on 8 ranks" in text
    # buckets of 500 million numbers of 4 bytes, which no dry run on one rank would show
    assert plan.needs["zero2"].buckets == 2e9
    # the gradient of the output matrix, whole on every rank while the loss is formed
    assert plan.needs["zero2"].formed == 4 * 66
    frozen = ToyObjective()
    frozen.lm_head.requires_grad_(False)
    assert plan_of(tmp_path, frozen).needs["zero2"].formed == 0
    monkeypatch.setattr("specheads.training.plan.gpu_memory", lambda: 7e9)
    text = describe_costs(toy_config(tmp_path), [plan], {})
    assert "  fits in 7 GB" in text
    (line,) = (line for line in text.splitlines() if line.split()[0] == "zero2")
    assert line.endswith("too much in 7 GB")
    muon = plan_of(tmp_path, ToyObjective(), optim__name="muon")
    assert set(muon.needs) == {"as set"}  # DeepSpeed refuses it


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_holds_what_was_announced(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """The largest part of full training is its optimizer: twice too little is out of memory."""
    cfg = toy_config(tmp_path, optim__name=name)
    objective = ToyObjective().to(dtype)
    groups = param_groups(cfg.optim, heads=(objective, 0.1))
    announced = sum(optimizer_bytes(group, cfg, Spread()) for group in groups)
    for parameter in objective.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = 0
    for optimizer in make_optimizers(groups, cfg.optim):
        optimizer.step()
        for state in optimizer.state.values():
            held += sum(v.numel() * v.element_size() for v in state.values() if v.numel() > 1)
    assert announced == held
    small = toy_config(tmp_path, optim__name="adamw8bit")
    assert optimizer_bytes({"name": "heads", "params": [torch.zeros(50)]}, small, Spread()) == 100
    sharded = Spread(deepspeed=True, stage=1)
    narrow = [torch.zeros(50, dtype=torch.bfloat16)]
    assert optimizer_bytes({"name": "heads", "params": narrow}, cfg, sharded) == 600


def test_quantised_parameters_count_as_many(tmp_path: Path) -> None:
    """A 4-bit base of 8 billion parameters would be announced as one of 4 billion."""

    class State:
        shape = (10, 6)

    module = nn.Linear(6, 10, bias=False)
    module.weight = nn.Parameter(torch.zeros(30, 1, dtype=torch.uint8), requires_grad=False)
    module.weight.quant_state = State()  # type: ignore[attr-defined]
    assert count_parameters(module) == 60


def test_time_is_that_of_all_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten factor of accumulation promises an hour for a night."""
    now = itertools.accumulate([0, 9, 1, 1, 2, 1, 3])  # a begin, then begin and end in turn
    monkeypatch.setattr(plan_module.time, "perf_counter", lambda: next(now))
    plan = plan_of(tmp_path, ToyObjective(), optim__accumulation=4)
    assert plan.seconds == [4.0, 8.0, 12.0]
    assert plan.total_seconds == 8 * 8.0
    text = describe_costs(toy_config(tmp_path), [plan], {})
    assert "8 s a step, 0:01:04 for all (4 to 12 s in 3 timed micro-batches" in text
    assert "heads 0.00 M trained" in text and " 1.6 kB" in text
    assert clock(3 * 3600 + 62) == "3:01:02"


def test_a_cache_that_is_not_there_is_stood_in_for() -> None:
    """A dry run must neither write the cache nor time the base that it is to save."""
    batches = ToyBatches()
    stand_in = with_numbers(batches, hidden=torch.zeros(6, dtype=torch.bfloat16))
    batch = next(stand_in)
    assert batch["hidden"].shape == (2, 12, 6) and batch["hidden"].dtype == torch.bfloat16
    assert torch.equal(batch["labels"], batches.make(0)["labels"])
    assert stand_in.state_dict() == {"position": 1}
    stand_in.load_state_dict({"position": 5})


def test_totals_of_a_run(tmp_path: Path) -> None:
    """Disk that fills up at the third checkpoint, or an export without the tuned base in it."""
    objective = ToyObjective()
    parts: dict[str, nn.Module] = {"base": objective.embed, "heads": objective.blocks}

    def planned(base: int, adapter: int = 0) -> StagePlan:
        counts = {"base": (base, 66 - base), "heads": (126, 0), "adapter": (adapter, 0)}
        named = {part: {"trained": a, "frozen": b} for part, (a, b) in counts.items()}
        return StagePlan("joint", 4, named, {}, True, [2.0], 812, 1624)

    cfg = toy_config(tmp_path, checkpoint__every=2, checkpoint__keep=2, evaluate__every=2)
    text = describe_costs(cfg, [planned(0), planned(66)], parts, "feature cache 1.0 GB")
    assert "192 positions in 8 steps" in text and "time: 0:00:16 at the least" in text
    assert "checkpoints 3 x 2.4 kB, best weights 812 bytes" in text
    assert text.endswith("feature cache 1.0 GB")
    assert export_bytes([planned(0)], parts) == 4 * 126
    assert export_bytes([planned(0), planned(66)], parts) == 4 * (126 + 66)
    assert export_bytes([planned(0, 9)], parts) == 4 * (126 + 66)  # merged or not


def test_what_a_verify_step_costs_is_clocked(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever trains for a night wants to know before what the heads must reach to pay."""
    output = output_layer(tiny_llama)
    heads = MedusaHeads(3, 1, 32, 272)
    heads.init_from_output(output.weight)
    prompts = [Prompt("", "", ids) for ids in (torch.full((1, 3), 7), torch.full((1, 9), 8))]
    heldout = Heldout(tiny_llama, prompts, EvaluateConfig(max_new_tokens=12, num_nodes=4), ())

    def told(tree: TreeConfig) -> str:
        return describe_expected(heldout, heads, output, tree)

    assert "a verify step of 4 nodes costs" in told(TreeConfig())  # really clocked
    seen: list[int] = []

    def clock(base: Any, drafters: Any, ids: torch.Tensor, **_: Any) -> Any:
        seen.extend([ids.shape[1]] * len(drafters))
        return [[1.0] * 3, [4.0, 2.5, 3.0]], []

    monkeypatch.setattr(module, "clock_steps", clock)
    text = told(TreeConfig(num_nodes=7))
    assert seen == [9, 9] and text.endswith("it pays above an accept length of 3.00")
    assert "7 nodes costs 3.00 plain steps here (2.50 to 4.00)" in text
    assert "3 nodes" in told(TreeConfig(choices=[[0], [0, 0]]))
