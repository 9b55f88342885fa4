"""Choosing a tree from ranks and clocked steps."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specheads.decoding import calibrate as module
from specheads.decoding.calibrate import (
    MISS,
    calibrate,
    grow_from_ranks,
    measure_hit_ranks,
    measure_step_seconds,
    pick_size,
    replay,
)
from specheads.decoding.loop import decode
from specheads.decoding.plain import plain_decode
from specheads.decoding.sampling import Sampler
from specheads.drafters.heads import HeadsDrafter
from specheads.models.base import OutputLayer, output_layer
from specheads.models.heads import MedusaHeads
from specheads.tree import Tree

TREES = [
    Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2)]),
    Tree.from_choices([(rank,) for rank in range(8)]),
    Tree.chain(3),
]


@pytest.fixture
def medusa(tiny_llama: LlamaForCausalLM) -> tuple[LlamaForCausalLM, MedusaHeads, OutputLayer]:
    """Return a base with three heads that differ from one another and hit now and then."""
    output = output_layer(tiny_llama)
    heads = MedusaHeads(3, 1, 32, 272)
    with torch.no_grad():
        heads.init_from_output(output.weight)
        for i, parameter in enumerate(heads.parameters()):
            parameter += 0.02 * (1 + i % 3) * torch.randn_like(parameter)
    return tiny_llama, heads.eval(), output


def prompts() -> list[Tensor]:
    """Return prompts of several lengths."""
    return [torch.randint(0, 256, (1, size)) for size in (5, 17, 3)]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("ends", [False, True])
def test_replay_is_what_decoding_does(
    medusa: tuple[LlamaForCausalLM, MedusaHeads, OutputLayer], temperature: float, ends: bool
) -> None:
    """Ranks read one position off, or tokens counted past the end, choose a wrong tree."""
    base, heads, output = medusa
    hits = 0
    for index, prompt in enumerate(prompts()):
        sampler = Sampler(temperature=temperature, seed=index)
        eos: tuple[int, ...] = ()
        if ends:  # a token of the text itself, so that it ends inside a tree
            text = plain_decode(base, prompt, max_new_tokens=30, sampler=sampler)
            eos = (text.new_tokens[20],)
        plain = plain_decode(base, prompt, max_new_tokens=40, sampler=sampler, eos_token_ids=eos)
        assert plain.finished is ends
        ranks = measure_hit_ranks(
            base, heads, output, plain.sequences, prompt.shape[1], ended=plain.finished
        )
        for tree in TREES:
            replayed = list(replay(tree, ranks, ended=plain.finished))
            decoded = decode(
                base,
                HeadsDrafter(heads, output, tree),
                prompt,
                max_new_tokens=40,
                sampler=sampler,
                eos_token_ids=eos,
            )
            assert decoded.new_tokens == plain.new_tokens
            hits += sum(decoded.accept_lengths) - len(decoded.accept_lengths)
            if ends:
                assert replayed == decoded.accept_lengths
            else:  # near the limit the ranks are unknown
                assert replayed == decoded.accept_lengths[: len(replayed)]
                assert sum(replayed) >= 40 - 1 - 3
    assert hits > 10, "the heads never hit, so nothing was compared"


def test_growth_uses_the_path_above() -> None:
    """Products of marginal rates would buy (0, 0) and (1, 5), which never happen."""
    ranks = torch.tensor([[0, 5], [1, 0]] * 500)
    assert set(grow_from_ranks(ranks, 5).choices) == {(0,), (1,), (0, 5), (1, 0)}


def test_growth_borrows_where_a_path_is_rare() -> None:
    """One lucky position must not buy a deep node that is seldom right."""
    ranks = torch.tensor([[0, 0]] * 60 + [[0, 1]] * 30 + [[1, 9]])
    assert set(grow_from_ranks(ranks, 4).choices) == {(0,), (0, 0), (0, 1)}


def test_growth_leaves_out_what_never_hits() -> None:
    """Nodes without hits cost time in every step and gain nothing."""
    ranks = torch.tensor([[0, MISS], [0, MISS]])
    assert grow_from_ranks(ranks, 48).choices == ((0,),)


@pytest.mark.parametrize("cost,expected", [(0.0, 16), (1.0, 2)])
def test_calibrate_weighs_gain_against_time(
    medusa: tuple[LlamaForCausalLM, MedusaHeads, OutputLayer],
    monkeypatch: pytest.MonkeyPatch,
    cost: float,
    expected: int,
) -> None:
    """The longest accept length alone always buys the largest tree, however slow."""
    base, heads, output = medusa
    sizes = [1, *(size for size in module.SIZES if size <= 16)]

    def fake(run: list[Any], **_: Any) -> list[float]:
        assert len(run) == len(sizes)
        return [1 + cost * size for size in sizes]

    monkeypatch.setattr(module, "measure_step_seconds", fake)
    found = calibrate(
        base, heads, output, prompts(), eos_token_ids=(), max_new_tokens=40, max_nodes=16
    )
    assert found.tree.num_nodes == expected
    assert [size["num_nodes"] for size in found.measured_on["sizes"]] == sizes[1:]
    lengths = [size["accept_length"] for size in found.measured_on["sizes"]]
    assert lengths[-1] > lengths[0] >= 1


def test_calibrate_gives_the_size_asked_for(
    medusa: tuple[LlamaForCausalLM, MedusaHeads, OutputLayer],
) -> None:
    """A pinned tree size must not be replaced by the fastest one."""
    base, heads, output = medusa
    found = calibrate(
        base, heads, output, prompts(), eos_token_ids=(), max_new_tokens=24, num_nodes=7, repeats=1
    )
    assert found.tree.num_nodes == 7
    assert found.expected_accept_length == pytest.approx(
        found.measured_on["sizes"][0]["accept_length"], abs=1e-4
    )


def test_calibrate_refuses_nothing_to_measure(
    medusa: tuple[LlamaForCausalLM, MedusaHeads, OutputLayer],
) -> None:
    """Without positions every rate is zero, and the tree would silently be the root alone."""
    base, heads, output = medusa
    with pytest.raises(ValueError, match="at least 1 prompt"):
        calibrate(base, heads, output, [], eos_token_ids=())
    with pytest.raises(ValueError, match="max_new_tokens 3 leaves no position"):
        calibrate(base, heads, output, prompts(), eos_token_ids=(), max_new_tokens=3)


def test_step_seconds_leave_the_prefill_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt's prefill, spread over few steps, would favour trees with many steps."""
    slow = iter([9.0, 1.0, 1.0])  # one disturbed repeat

    def run(limit: int) -> tuple[float, int]:
        if limit < 12:
            return 5.0, limit - 1
        return 5.0 + 10 * 0.25 * next(slow, 1.0), 10

    assert measure_step_seconds([run], max_new_tokens=12, repeats=3) == [0.25]


def test_a_tie_of_the_clock_goes_to_the_larger_tree() -> None:
    """Noise of the clock would choose a short tree on one day and a long one on the next."""
    assert pick_size([1.5, 2.2, 2.6], [1.0, 1.29, 1.6]) == 2  # 1.71 against 1.63 per second
    assert pick_size([1.5, 2.2, 2.6], [1.0, 1.29, 2.0]) == 1
    assert pick_size([1.0], [1.0]) == 0
