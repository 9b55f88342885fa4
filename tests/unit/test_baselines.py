"""The baselines that compiled decoding is measured beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.measure.bench import Contest
from specheads.measure.clock import Batch
from tests.ragged import ROWS


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
    assert len(expected.tokens) == 6 and not traced
    for name in ("plain", "hf_compiled"):
        before = len(traced)
        (found,) = methods[name].decode(batch, 0.0, 0)
        assert found.tokens == expected.tokens
        assert len(traced) > before, f"{name} compiled nothing"
    without = Contest(tiny_llama, (), 0, 6).baselines()
    assert [each.name for each in without] == ["plain", "hf_generate", "prompt_lookup"]
    assert not any(each.compiled for each in without)
