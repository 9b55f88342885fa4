"""MTP heads while decoding, against their layers over the whole text."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specheads.attention import cache as slots
from specheads.config import ConfigError
from specheads.models import head_cache, mtp
from specheads.models.mtp import MtpHeads, block_config
from tests.zoo import MODELS, SMALL, WINDOW, redraw

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 10_000.0}}),
    "qwen2": ("qwen2", {}),  # biases of queries, keys and values only
    "qwen3": ("qwen3", {}),  # norms of queries and keys
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "many queries per key": ("llama", {"num_key_value_heads": 1}),
}
VARIANTS = ("parallel", "causal")


def make(
    model_type: str, changes: dict[str, Any], variant: str, num_heads: int = 3, std: float = 0.3
) -> MtpHeads:
    """Return random heads that differ from each other."""
    known = CONFIG_MAPPING[model_type]()
    values = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    config = block_config(CONFIG_MAPPING[model_type](**values | changes))
    heads = MtpHeads(num_heads, config, 64, variant=variant)
    redraw(heads, std=std)  # type: ignore[arg-type]
    return heads.eval()


@cache
def heads_of(name: str, variant: str) -> MtpHeads:
    """Return heads of one of KINDS; not to be changed."""
    return make(*KINDS[name], variant)


@torch.no_grad()
def whole(heads: MtpHeads, text: Tensor) -> Tensor:
    """Return the features [K, T, d] of a text [T, d] on its own."""
    return heads.contextual(text[None], torch.arange(len(text))[None])[:, 0]


def compare(heads: MtpHeads, steps: list[list[int]], kept: list[list[int]], near: float) -> None:
    """Feed rows step by step, drop some on the way, and compare every output.

    Args:
        heads: parallel or causal ones.
        steps: per step and row the number of new positions.
        kept: per step the rows that go on after it, by their number at the start.
        near: the relative tolerance.
    """
    dtype, total = next(heads.parameters()).dtype, [sum(row) for row in zip(*steps, strict=True)]
    generator = torch.Generator().manual_seed(sum(total))
    draw = {"generator": generator, "dtype": dtype}
    texts = [torch.randn(max(n, 1), heads.hidden_size, **draw) for n in total]  # type: ignore[call-overload]
    expected = [whole(heads, text) for text in texts]
    rows, read = list(range(len(total))), [0] * len(total)
    memory = heads.memory(len(rows))
    for counts, going in zip(steps, kept, strict=True):
        width = max(1, *(counts[row] for row in rows))
        hidden = torch.randn(len(rows), width, heads.hidden_size, **draw)  # type: ignore[call-overload]
        for place, row in enumerate(rows):
            part = texts[row][read[row] : read[row] + counts[row]]
            hidden[place, : counts[row]] = part
            read[row] += counts[row]
        memory, found = memory.append(hidden, [counts[row] for row in rows])
        assert memory.lengths == tuple(read[row] for row in rows)
        for place, row in enumerate(rows):
            if counts[row]:
                last = expected[row][:, read[row] - 1]
                torch.testing.assert_close(found[:, place], last, rtol=near, atol=near)
        places = [place for place, row in enumerate(rows) if row in going]
        memory, rows = memory.select(torch.tensor(places)), [rows[place] for place in places]


# norms and rotary tables are float32 in transformers, whatever the dtype
NEAR = {torch.float32: 2e-5, torch.float64: 5e-6}


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", KINDS)
def test_features_are_those_of_the_whole_text(
    name: str, variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's keys, a wrong position or norm only show as low acceptance.

    Rows are left alone and dropped on the way; windows are passed, memories grow.
    """
    monkeypatch.setattr(slots, "BLOCK", 8)
    heads = make(*KINDS[name], variant) if dtype == torch.float64 else heads_of(name, variant)
    steps = [[7, 18, 2], [1, 0, 4], [3, 1, 1], [1, 1, 1], [2, 5, 0], [1, 3, 9]]
    every = [0, 1, 2]
    compare(heads.to(dtype), steps, [every, every, [1, 2], [1, 2], [1], [1]], NEAR[dtype])
    compare(heads, [[19], [1], [4], [1]], [[0]] * 4, NEAR[dtype])


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Draw how several texts are split into steps, and who goes on."""
    num_rows, num_steps = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    first = draw(st.lists(st.integers(1, 21), min_size=num_rows, max_size=num_rows))
    counts = st.lists(st.integers(0, 6), min_size=num_rows, max_size=num_rows)
    steps, kept = [first], []
    going = list(range(num_rows))
    for _ in range(num_steps):
        going = [row for row in going if row == going[-1] or draw(st.integers(0, 4))]
        kept.append(going)
        steps.append(draw(counts))
    return steps, [*kept, going]


@given(splits(), st.sampled_from(["llama", "qwen3", "mistral-window"]), st.sampled_from(VARIANTS))
@settings(max_examples=40)
def test_splits_do_not_matter(
    drawn: tuple[list[list[int]], list[list[int]]], name: str, variant: str
) -> None:
    """Blocks and spans, with borders anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "BLOCK", 8)
        patch.setattr(head_cache, "_SPAN", 5)
        compare(heads_of(name, variant), *drawn, 2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_window_is_one(variant: str) -> None:
    """A window that is ignored, as the tests above would not see if it never mattered."""
    narrow, wide = (heads_of(name, variant) for name in ("mistral-window", "mistral"))
    wide = make(*KINDS["mistral"], variant)
    wide.load_state_dict(narrow.state_dict())
    hidden = torch.randn(1, 30, 32)
    _, seen = narrow.memory(1).append(hidden, [30])
    _, all_seen = wide.memory(1).append(hidden, [30])
    assert (seen - all_seen).abs().max() > 0.05
    reach = 1 if variant == "parallel" else 3  # layer behind layer sees as much further
    far = hidden.clone()
    far[:, : 30 - reach * (WINDOW - 1) - 1] = 0
    _, same = narrow.memory(1).append(far, [30])
    torch.testing.assert_close(same, seen, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_heads_pass_their_own_check(name: str, variant: str) -> None:
    """Rounding taken for another kind of layer would refuse models that work."""
    heads = make(*KINDS[name], variant, num_heads=7).bfloat16()
    text = torch.randn(20, 32).bfloat16()
    _, found = heads.memory(1).append(text[None], [20])
    wanted = whole(heads, text)[:, -1].float()
    assert (found[:, 0].float() - wanted).norm() < 0.05 * wanted.norm()


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms around 1": ("gemma", {}, "an unknown kind .*variance_epsilon"),
    "multipliers": ("granite", {"residual_multiplier": 0.5}, "differs from transformers"),
    "no rotation": ("smollm3", {"no_rope_layers": [1, 0]}, "differs from transformers"),
    "more norms": ("gemma3_text", {"sliding_window": 6}, "they have "),
    "one matrix": ("phi3", {}, "no mlp.gate_proj.weight"),
    "experts": ("mixtral", {"num_local_experts": 4}, "no mlp.down_proj.weight"),
    "latent": ("deepseek_v3", MODELS["deepseek_v3"].changes, "they have no mlp.down"),
    "norms behind": ("olmo2", {}, "no input_layernorm.weight"),
    "partial": ("glm", {"partial_rotary_factor": 0.5, "head_dim": 8}, "they have"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", OTHERS)
def test_other_layers_are_refused(case: str, variant: str) -> None:
    """Layers computed by the wrong formula would draft nonsense without a word."""
    model_type, changes, reason = OTHERS[case]
    heads = make(model_type, changes, variant, num_heads=2)
    with pytest.raises(ConfigError, match=f"model_type {model_type}: .*{reason}") as error:
        heads.memory(1)
    assert "\n" not in str(error.value)


def test_the_check_is_made_once_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paid at every text it would cost more than it saves; a moved seed changes what is sampled."""
    heads = make("llama", {"attention_dropout": 0.5}, "parallel").train()
    before, calls = torch.get_rng_state(), 0
    real = mtp.odd_numbers

    def counted(*args: Any) -> str | None:
        nonlocal calls
        calls += 1
        return real(*args)

    monkeypatch.setattr(mtp, "odd_numbers", counted)
    for _ in range(3):
        heads.memory(2)
    assert calls == 1 and heads.training
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_heads_trained_in_between_are_noticed(variant: str) -> None:
    """Drafting with stale weights in evaluations during training."""
    heads, hidden = make("llama", {}, variant), torch.randn(1, 9, 32)
    heads.memory(1)
    for parameter in heads.parameters():
        parameter.data = parameter + 0.1 * torch.randn_like(parameter)  # unseen by autograd
    _, found = heads.memory(1).append(hidden, [9])
    torch.testing.assert_close(found[:, 0], whole(heads, hidden[0])[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["in place", "replaced", "moved"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_frozen_heads_are_copied_once_and_changes_are_noticed(variant: str, change: str) -> None:
    """Prevents stale weights where others were loaded into frozen heads, or a copy per text."""
    heads, hidden = make("llama", {}, variant).requires_grad_(False), torch.randn(1, 9, 32)
    first = heads.memory(1)
    assert heads.memory(1).stacks is first.stacks
    state = {k: v + 0.1 * torch.randn_like(v) for k, v in heads.state_dict().items()}
    if change == "in place":
        heads.load_state_dict(state)
    elif change == "replaced":
        heads.load_state_dict(state, assign=True)
    else:
        heads.double().float()
        heads.get_parameter("layers.0.norm.weight").mul_(2)
    assert heads.memory(1).stacks is not first.stacks
    _, found = heads.memory(1).append(hidden, [9])
    torch.testing.assert_close(found[:, 0], whole(heads, hidden[0])[:, -1], rtol=1e-4, atol=1e-5)
