"""Clocking methods against each other, the baselines, and the phases of the loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.attention.tree import default_tree
from specheads.decoding import loop
from specheads.decoding.result import DecodedRow
from specheads.drafters.heads import heads_drafter
from specheads.measure.bench import Contest
from specheads.measure.clock import Batch, Budget, Method, Prompt, clock, prompt_file
from specheads.models.forward import ModelPass
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer
from specheads.system.files import tinycode_dir
from tests.ragged import ROWS
from tests.script_modules import load_script

bench_step: Any = load_script("bench_step")


@pytest.mark.parametrize("compiled", [False, True])
def test_compilation_is_not_clocked(compiled: bool) -> None:
    """Prevents a speed-up that is the time a compiler took for a length that came for the first."""
    calls: list[int] = []

    def decode(batch: Batch, temperature: float, seed: int) -> list[DecodedRow]:
        calls.append(batch.first)
        return [DecodedRow([1, 2], [1])]

    methods = [Method("plain", decode, compiled=compiled), Method("tree", decode)]
    prompts = [Prompt(str(i), "kind", torch.tensor([[i]])) for i in range(4)]
    runs = clock(methods, prompts, 0.0, repeats=1)
    clocked = len(methods) * len(prompts)
    before = calls[: len(calls) - clocked]
    assert set(before) == (set(range(4)) if compiled else {0, 3})
    assert [len(runs[name].seconds[0]) for name in ("plain", "tree")] == [4, 4]


class Watch:
    """A clock that moves when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.mark.parametrize(("seconds", "expected"), [(100, 6), (10.5, 4), (1, 2), (0, 2)])
def test_a_budget_ends_between_prompts(seconds: float, expected: int) -> None:
    """Prompts of one method only, or figures of fewer prompts than they say, compare nothing."""
    watch = Watch()

    def decode(batch: Batch, temperature: float, seed: int) -> list[DecodedRow]:
        watch.now += 1
        return [DecodedRow([seed, int(batch.input_ids)], [1])]

    methods = [Method("plain", decode), Method("tree", decode)]
    prompts = [Prompt(str(i), "kind", torch.tensor([[i]])) for i in range(6)]
    whole = clock(methods, prompts, 0.0, repeats=1)
    runs = clock(methods, prompts, 0.0, repeats=1, budget=Budget(seconds, watch), least=2)
    for name, of in runs.items():
        assert of.decoded == whole[name].decoded[:expected]
        assert len(of.seconds[0]) == expected
    budget, taken = Budget(10, watch), []
    for item in budget.within(range(9), least=2):
        taken.append(item)
        watch.now += 4
    assert taken == [0, 1, 2] and budget.spent()
    assert list(budget.within(range(9))) == [0] and budget.part(0.5).left == 0
    assert Budget(8, watch).part(0.25).left == 2 and not Budget().spent()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trace instead of generating code, which takes minutes; note what was to be compiled."""
    from specheads.models import forward

    forward._compiled_forward.cache_clear()
    real, asked = torch.compile, []

    def compile(function: Any, **settings: Any) -> Any:
        asked.append(getattr(function, "__qualname__", type(function).__name__))
        return real(function, backend="eager")

    monkeypatch.setattr(torch, "compile", compile)
    torch._dynamo.reset()
    return asked


def test_compiled_methods_stand_beside_others(
    tiny_llama: LlamaForCausalLM, traced: list[str]
) -> None:
    """Compiled trees over a plain loop that is not compiled, or a generate that only says so."""
    contest = Contest(tiny_llama, (), 0, 6, compile=True)
    methods = {each.name: each for each in contest.baselines(batched=True)}
    forward = {name for name, each in methods.items() if each.compiled}
    assert forward == {"plain", "hf_compiled", "prompt_lookup", "one_by_one"}
    assert {"plain_eager", "hf_generate"} == set(methods) - forward
    batch = Batch(ROWS[0], torch.ones_like(ROWS[0]))
    (expected,) = methods["plain_eager"].decode(batch, 0.0, 0)
    assert len(expected.new_tokens) == 6 and not traced
    for name in ("plain", "hf_compiled"):
        before = len(traced)
        (found,) = methods[name].decode(batch, 0.0, 0)
        assert found.new_tokens == expected.new_tokens
        assert len(traced) > before, f"{name} compiled nothing"
    without = Contest(tiny_llama, (), 0, 6).baselines()
    assert [each.name for each in without] == ["plain", "hf_generate", "prompt_lookup"]
    assert not any(each.compiled for each in without)


@pytest.mark.parametrize("sequential", [False, True])
def test_phases_add_up_to_their_step(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, sequential: bool
) -> None:
    """A phase counted twice, or in another step, is an overhead that nobody can find."""
    output = OutputLayer(tiny_llama.lm_head)
    heads = MedusaHeads(3, 1, 32, 272, condition=sequential)
    heads.init_from_output(output.weight)
    drafter = heads_drafter(tiny_llama, heads.eval(), output, default_tree(3, 6))
    forward = tiny_llama.forward
    clock = 0.0

    def look(device: torch.device) -> float:
        nonlocal clock
        clock += 1
        return clock

    def slow_forward(*args: object, **kwargs: object) -> object:
        nonlocal clock
        clock += 100
        return forward(*args, **kwargs)

    monkeypatch.setattr(bench_step, "now", look)  # each look takes a second, a pass 100
    monkeypatch.setattr(tiny_llama, "forward", slow_forward)
    verify, propose = ModelPass.verify, loop.propose
    ids = torch.randint(0, 256, (1, 6))
    wanted = loop.decode(tiny_llama, drafter, ids, max_new_tokens=24)
    phases = bench_step.Phases(torch.device("cpu"))
    for _ in range(2):
        with phases.watching(tiny_llama, drafter):
            found = loop.decode(tiny_llama, drafter, ids, max_new_tokens=24)
        assert found.new_tokens == wanted.new_tokens
    assert (ModelPass.verify, loop.propose) == (verify, propose), "the clocks are gone again"
    assert len(phases.steps) == 2 * (wanted.num_steps - 1), "the last of each text has no end"
    for step in phases.steps:
        assert step.keys() == {*bench_step.PHASES, bench_step.ROWS, "step"}
        assert step[bench_step.FORWARD] == 101
        assert 0 < step[bench_step.HEADS] < 100 and 0 < step["verify"] < 100
        phased = sum(step[name] for name in bench_step.PHASES)
        assert 0.9 * step["step"] < phased <= step["step"]


def test_a_draft_models_passes_are_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model that grows a tree verifies with its own passes: the base's would look slow."""
    clock = iter(range(100))
    monkeypatch.setattr(bench_step, "now", lambda device: next(clock))
    phases = bench_step.Phases(torch.device("cpu"))
    verify = phases.timed("verify", lambda: next(clock))
    propose = phases.timed("propose", verify)
    for _ in range(2):
        propose()
        verify()
    (step,) = phases.steps
    # a pass takes two looks and its own second, a proposal a look on either side of one
    assert (step["propose"], step["verify"]) == (4, 2)


def export(folder: Path, base: str) -> Path:
    """Write the part of an export that is looked at."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"base": {"name": base}}))
    return folder


def test_own_prompts_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of the wrong file give a good-looking table about something else."""
    folder = export(tmp_path / "export", "/a/model")
    assert prompt_file("mine.jsonl", str(folder), "prompts.jsonl") == Path("mine.jsonl")
    (folder / "prompts.jsonl").write_text("")
    assert prompt_file("", str(folder), "prompts.jsonl") == folder / "prompts.jsonl"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("base", ["/a/model", "", "org/name"])
def test_another_base_is_told_of_the_embedded_prompts(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree fitted to Python questions, for a model of anything else, is no better than none."""
    folder = export(tmp_path / "run" / "export", base)
    assert prompt_file("", str(folder), "calibration.jsonl").parent == tinycode_dir()
    said = capsys.readouterr().err
    assert "about Python" in said and said.count("\n") == 1 and "run/prompts.jsonl" not in said
    (tmp_path / "run" / "prompts.jsonl").write_text("")
    prompt_file("", str(folder), "calibration.jsonl")
    assert "run/prompts.jsonl" in capsys.readouterr().err


def test_the_embedded_base_is_told_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hint that always comes is read by nobody."""
    prompt_file("", "tinycode", "prompts.jsonl")
    prompt_file("", str(export(tmp_path / "export", "tinycode")), "prompts.jsonl")
    assert capsys.readouterr() == ("", "")
