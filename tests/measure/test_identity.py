"""Counting identical decodings and judging the others."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specheads.attention.tree import default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.measure.clock import Prompt
from specheads.measure.identity import (
    Divergence,
    Rounding,
    choice_scores,
    compare,
    given_logits,
    unit_in_last_place,
)
from specheads.verification.sampling import Sampler
from tests.scripted import ScriptedDrafter

NUM_NEW = 12


def random_prompts(count: int) -> list[Tensor]:
    """Return ``count`` prompts of six tokens."""
    return [torch.randint(0, 256, (1, 6)) for _ in range(count)]


def decode_all(
    model: LlamaForCausalLM, prompts: Sequence[Tensor], samplers: Sequence[Sampler]
) -> list[list[int]]:
    """Return plain decoding's tokens."""
    return [
        plain_decode(model, prompt, max_new_tokens=NUM_NEW, sampler=sampler).new_tokens
        for prompt, sampler in zip(prompts, samplers, strict=True)
    ]


def asked(prompts: Sequence[Tensor]) -> list[Prompt]:
    """Return prompts with names."""
    return [Prompt(f"p{i}", "", prompt) for i, prompt in enumerate(prompts)]


def judge(
    model: LlamaForCausalLM,
    prompts: Sequence[Tensor],
    plain: Sequence[list[int]],
    other: Sequence[list[int]],
    samplers: Sequence[Sampler],
) -> list[Divergence]:
    """Compare, with the noise measured on the plain texts."""
    rounding = Rounding(model, list(zip(prompts, plain, strict=True)), [1, 4, 8])
    return compare(asked(prompts), plain, other, samplers, rounding=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_difference_is_no_near_tie(
    tiny_llama: LlamaForCausalLM, temperature: float, dtype: torch.dtype
) -> None:
    """If every difference counted as rounding, a broken cache would pass as bfloat16."""
    model = tiny_llama.type(dtype)
    prompts = random_prompts(4)
    samplers = [Sampler(temperature=temperature, seed=seed) for seed in range(4)]
    plain = decode_all(model, prompts, samplers)
    other = [list(tokens) for tokens in plain]
    other[1][7] = (other[1][7] + 11) % 256  # another token
    other[2] = other[2][:5]  # stopped early
    found = judge(model, prompts, plain, other, samplers)
    assert not any(each.near_tie for each in found)
    first, second = found
    assert (first.prompt, first.index) == ("p1", 7)
    assert (first.plain_token, first.other_token) == (plain[1][7], other[1][7])
    assert first.margin_dtype and first.margin_dtype > 0.001
    assert (second.prompt, second.index, second.other_token) == ("p2", 5, None)
    assert second.margin_fp32 is None and second.margin_dtype is None


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_margins_are_those_of_the_weights_at_hand(
    tiny_llama: LlamaForCausalLM, temperature: float
) -> None:
    """Margins of another position, without the noise, or of unrounded weights explain nothing."""
    model = tiny_llama.bfloat16()
    prompt, sampler = torch.randint(0, 256, (1, 6)), Sampler(temperature=temperature, seed=3)
    (plain,) = decode_all(model, [prompt], [sampler])
    index = 7
    other = [*plain[:index], (plain[index] + 11) % 256, *plain[index + 1 :]]
    found = judge(model, [prompt], [plain], [other], [sampler])
    (divergence,) = found

    text = torch.cat([prompt, torch.tensor([plain[:index]])], dim=1)
    logits = deepcopy(model).double()(input_ids=text).logits[0, -1]
    scores = choice_scores(logits, text.shape[1], sampler)
    expected = abs(float((scores[plain[index]] - scores[other[index]]).detach()))
    assert divergence.margin_fp32 == pytest.approx(expected, abs=1e-5)
    assert divergence.margin_dtype == pytest.approx(expected, abs=0.1)
    assert divergence.margin_dtype != pytest.approx(expected, abs=1e-5), "bfloat16 is coarser"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_scores_are_those_of_the_choice(
    tiny_llama: LlamaForCausalLM, temperature: float, dtype: torch.dtype
) -> None:
    """A position too far, or missing noise, gives the margin of another choice."""
    model = tiny_llama.type(dtype)
    prompt, sampler = torch.randint(0, 256, (1, 6)), Sampler(temperature=temperature, seed=3)
    (tokens,) = decode_all(model, [prompt], [sampler])
    ids = torch.cat([prompt, torch.tensor([tokens])], dim=1)[:, :-1]
    for index, logits in enumerate(given_logits(model, ids, 6, 1)):
        assert int(choice_scores(logits, 6 + index, sampler).argmax()) == tokens[index]


def test_passes_of_any_width_are_one_text(tiny_llama: LlamaForCausalLM) -> None:
    """Rows shifted by one would be noise as large as the logits, and excuse everything."""
    ids = torch.randint(0, 256, (1, 17))
    whole = given_logits(tiny_llama, ids, 6, 0)
    assert whole.shape[0] == 12
    for width in (1, 4, 11, 30):
        torch.testing.assert_close(
            given_logits(tiny_llama, ids, 6, width), whole, atol=1e-5, rtol=0
        )


def test_noise_is_rounding_and_no_more(tiny_llama: LlamaForCausalLM) -> None:
    """Noise measured in float32 where bfloat16 decodes fails every run; the reverse passes all."""
    prompts = random_prompts(4)
    texts = list(zip(prompts, decode_all(tiny_llama, prompts, [Sampler()] * 4), strict=True))
    fine = Rounding(tiny_llama, texts, [1, 4, 50]).noise
    rounded = Rounding(tiny_llama.bfloat16(), texts, [1, 4, 50])
    coarse = rounded.noise
    assert 0 < fine.shape < 1e-5 and 0 < fine.dtype < 1e-5
    # on processors without bfloat16 more than half of the positions have no noise at all
    assert 0 <= coarse.typical_shape <= coarse.shape
    assert 1e-3 < coarse.shape < 0.1
    assert 1e-3 < coarse.dtype < 0.1
    assert coarse.num_positions == 48 and coarse.widths == (4, 12)
    assert rounded.reference.dtype == torch.float32 and rounded.base.dtype == torch.bfloat16
    compiled = Rounding(tiny_llama, texts, [1, 4, 50], compiled=True).noise
    assert compiled.shape == 2 * coarse.dtype and compiled.dtype == coarse.dtype
    few = Rounding(tiny_llama, [(texts[0][0], texts[0][1][:2])], [2]).noise
    assert few.shape >= 2 * 2**-9, "logits of 1 and more are 2**-7 and more apart"


def test_unit_in_last_place() -> None:
    """A power of two too much or too little doubles or halves the least limit."""
    for number in (0.3, 1.0, 1.9, 13.2, 16.0):
        for dtype in (torch.bfloat16, torch.float32):
            exact = torch.tensor(number, dtype=dtype)
            above = torch.nextafter(exact, torch.tensor(1e9, dtype=dtype))
            assert unit_in_last_place(float(exact), dtype) == float(above) - float(exact)


def test_nothing_is_measured_without_need(tiny_llama: LlamaForCausalLM) -> None:
    """A copy of the weights in float32 that nobody asked for does not fit beside a large model."""
    prompts = random_prompts(2)
    plain = decode_all(tiny_llama, prompts, [Sampler()] * 2)
    rounding = Rounding(tiny_llama, list(zip(prompts, plain, strict=True)), [4])
    found = compare(asked(prompts), plain, plain, [Sampler()] * 2, rounding=rounding)
    assert found == []
    assert not {"noise", "reference"} & vars(rounding).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tie_is_a_near_tie(tiny_llama: LlamaForCausalLM, dtype: torch.dtype) -> None:
    """Two tokens with one and the same row of weights are told apart by nothing but order."""
    model = tiny_llama.type(dtype)
    prompt = torch.randint(0, 256, (1, 6))
    (plain,) = decode_all(model, [prompt], [Sampler()])
    twin = next(t for t in range(256) if t not in plain)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[plain[-1]]
        model.lm_head.weight[twin] -= 1e-9
    found = judge(model, [prompt], [plain], [[*plain[:-1], twin]], [Sampler()])
    assert [each.near_tie for each in found] == [True]


@pytest.mark.parametrize("temperature", [0.0, 0.01])  # more noise would part the rivals
def test_what_rounding_does_passes(tiny_llama: LlamaForCausalLM, temperature: float) -> None:
    """A limit below what rounding does would fail decoders that do nothing wrong."""
    model = tiny_llama.bfloat16()
    with torch.no_grad():  # every token has a rival, so that rounding has something to decide
        close = model.lm_head.weight[0::2] + 0.002 * torch.randn(136, 32).bfloat16()
        model.lm_head.weight[1::2] = close
    prompts = random_prompts(16)
    samplers = [Sampler(temperature=temperature, seed=seed) for seed in range(16)]
    plain = decode_all(model, prompts, samplers)
    other = []
    for prompt, text, sampler in zip(prompts, plain, samplers, strict=True):
        truth = prompt[0].tolist() + text
        drafter = ScriptedDrafter(default_tree(3, 8), truth, 0.7, vocab=256)
        result = decode(model, drafter, prompt, max_new_tokens=NUM_NEW, sampler=sampler)
        other.append(result.new_tokens)
    found = judge(model, prompts, plain, other, samplers)
    assert found and all(each.near_tie for each in found)
