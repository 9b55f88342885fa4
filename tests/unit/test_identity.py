"""Counting identical decodings and explaining the others."""

import pytest
import torch
from transformers import LlamaForCausalLM

from specheads.decoding.identity import choice_scores, compare, measure_rounding
from specheads.decoding.plain import plain_decode
from specheads.decoding.sampling import Sampler


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_difference_is_no_near_tie(tiny_llama: LlamaForCausalLM, temperature: float) -> None:
    """If every difference counted as rounding, a broken cache would pass as bfloat16."""
    prompts = [torch.randint(0, 256, (1, 6)) for _ in range(4)]
    samplers = [Sampler(temperature=temperature, seed=seed) for seed in range(4)]
    plain = [
        plain_decode(tiny_llama, prompt, max_new_tokens=12, sampler=sampler).new_tokens
        for prompt, sampler in zip(prompts, samplers, strict=True)
    ]
    rounding = measure_rounding(tiny_llama, prompts)
    assert 0 < rounding < 1e-4
    other = [list(tokens) for tokens in plain]
    other[1][7] = (other[1][7] + 11) % 256  # another token
    other[2] = other[2][:5]  # stopped early
    found = compare(tiny_llama, prompts, plain, other, samplers, rounding=rounding)
    assert (found.identical, found.compared, found.near_ties) == (2, 4, 0)
    assert found.gaps[0] > 0.001 and found.gaps[1] == float("inf")


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_scores_are_those_of_the_choice(tiny_llama: LlamaForCausalLM, temperature: float) -> None:
    """A position too far, or missing noise, gives the gap of another choice."""
    prompt = torch.randint(0, 256, (1, 6))
    sampler = Sampler(temperature=temperature, seed=3)
    tokens = plain_decode(tiny_llama, prompt, max_new_tokens=8, sampler=sampler).new_tokens
    for index, token in enumerate(tokens):
        assert int(choice_scores(tiny_llama, prompt, index, sampler).argmax()) == token


def test_a_tie_is_a_near_tie(tiny_llama: LlamaForCausalLM) -> None:
    """Two tokens with one and the same row of weights are told apart by nothing but order."""
    prompt = torch.randint(0, 256, (1, 6))
    plain = plain_decode(tiny_llama, prompt, max_new_tokens=6).new_tokens
    twin = next(t for t in range(256) if t not in plain)
    with torch.no_grad():
        tiny_llama.lm_head.weight[twin] = tiny_llama.lm_head.weight[plain[-1]]
        tiny_llama.lm_head.weight[twin] -= 1e-9
    found = compare(
        tiny_llama, [prompt], [plain], [[*plain[:-1], twin]], [Sampler()], rounding=1e-6
    )
    assert (found.identical, found.near_ties) == (0, 1)
