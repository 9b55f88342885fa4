"""Decoding with parallel and causal MTP heads: exact, and with the guesses of their layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Tree, batched, default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsState, heads_drafter
from specheads.measure.calibrate import Search, calibrate
from specheads.measure.clock import pad_left
from specheads.measure.hits import Texts, fit_temperatures, grown_sizes, measure_hits
from specheads.models.base import input_embedding
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import TRUNK, capture_hidden, output_layer
from specheads.verification.sampling import Sampler, gumbel_noise
from tests.enumeration import replay
from tests.zoo import VOCAB, build

VARIANTS = ("parallel", "causal")
NUM_NEW = 18
TREE = default_tree(3, 12)


def trunk_of(base: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return what the base's last layer reads, [B, T, d]."""
    with capture_hidden(base, (TRUNK,)) as captured:
        base(input_ids=ids, use_cache=False)
    return captured[TRUNK]


@cache
def counting(name: str, variant: str) -> tuple[PreTrainedModel, MtpHeads]:
    """Return a base that counts, mostly, and heads that do; not to be changed.

    A token's embedding points to the next token, and past what the layers add to it; the heads'
    matrices are the base's, so many tokens further. So guesses hit often and not always.
    """
    base = build(name).requires_grad_(False)
    embeddings = input_embedding(base)
    base.get_output_embeddings().weight.copy_(6 * F.normalize(embeddings, dim=1).roll(1, 0))
    for key, parameter in base.named_parameters():
        if "o_proj" in key or "down" in key:
            parameter.mul_(0.1)
    heads = MtpHeads(3, block_config(base.config), VOCAB, variant=variant, lm_head="own")
    heads.init_from_base(base)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in heads.named_parameters():
            if "norm" not in key:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * parameter.std() * noise)
        for i in range(3):
            matrix = heads.get_parameter(f"layers.{i}.lm_head.weight")
            matrix.copy_(matrix.roll(i + 1, 0))
    return base, heads.eval()


class Slow:
    """The same drafter without a memory: all from the whole text, at every step.

    It also counts the steps whose candidates were the fast drafter's.
    """

    deterministic = True

    def __init__(self, fast: Any, base: PreTrainedModel) -> None:
        self.fast, self.base, self.heads = fast, base, fast.heads
        self.taps = fast.taps
        self.texts: list[list[int]] = []
        self.compared = 0

    def start(self, prefill: Prefill) -> HeadsState:
        """Note the texts, roots included."""
        self.texts = [
            [*ids, root] for ids, root in zip(prefill.ids, prefill.root.tolist(), strict=True)
        ]
        return self.fast.start(prefill)

    def propose(self, state: HeadsState) -> Candidates:
        """Guess from the texts alone, and compare with the fast drafter's guesses."""
        features = []
        for text in self.texts:
            hidden = trunk_of(self.base, torch.tensor([text[:-1]]))
            positions = torch.arange(hidden.shape[1])[None]
            features.append(self.heads.contextual(hidden, positions)[:, 0, -1])
        hidden = torch.stack(features, dim=1)  # [K, B, d]
        torch.testing.assert_close(self.fast.read(state), hidden, rtol=1e-4, atol=1e-4)
        roots = torch.tensor([text[-1] for text in self.texts])
        slow = self.fast.propose(replace(state, hidden=hidden, root=roots))
        if isinstance(slow.tree, Tree):
            logits = self.heads.logits(hidden, self.fast.output)  # [K, B, V]
            if state.draws.sampler.temperature > 0:
                sampler, starts = state.draws.sampler, torch.tensor([*map(len, self.texts)])
                after = starts[:, None] + torch.arange(len(logits))
                noise = gumbel_noise(sampler.seeds_of(state.draws.rows), after, logits.shape[-1])
                logits = logits / sampler.temperature + noise.transpose(0, 1)
            order = logits.argsort(-1, descending=True)
            for node in range(1, slow.tree.num_nodes):
                head, rank = int(slow.tree.depths[node]) - 1, int(slow.tree.ranks[node])
                assert slow.tokens[:, node].equal(order[head, :, rank])
        fast = self.fast.propose(state)
        assert fast.tokens.equal(slow.tokens)
        assert batched(fast.tree, fast.tree.parents).equal(batched(slow.tree, slow.tree.parents))
        self.compared += 1
        return slow

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Note what was gained."""
        for text, new in zip(self.texts, result.new_tokens, strict=True):
            text += new
        return self.fast.observe(state, result)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Note who is left."""
        self.texts = [self.texts[row] for row in rows.tolist()]
        return self.fast.select(state, rows)


CASES = [
    ("llama", (7,), 0.0, False),
    ("llama", (7,), 1.0, True),
    ("llama", (7, 18, 2), 0.0, True),
    ("llama", (7, 18, 2), 1.0, False),
    ("qwen3", (7, 18, 2), 1.0, False),
    ("mistral-window", (7, 18, 2), 1.0, False),
]


@pytest.mark.parametrize(("name", "lengths", "temperature", "dynamic"), CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_is_exact_and_remembers_what_was_committed(
    name: str, variant: str, lengths: tuple[int, ...], temperature: float, dynamic: bool
) -> None:
    """Rejected nodes remembered, accepted ones forgotten: exact all the same, and slow."""
    base, heads = counting(name, variant)
    prompts = [torch.randint(VOCAB, (1, length)) for length in lengths]
    ids, mask = pad_left(prompts)
    settings: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": NUM_NEW,
        "sampler": Sampler(temperature=temperature, seed=3),
    }
    first = plain_decode(base, ids, **settings)
    eos = (first.rows[0].new_tokens[12],) if len(lengths) > 1 else ()  # a row ends before others
    settings["eos_token_ids"] = eos
    plain = plain_decode(base, ids, **settings)
    output = output_layer(base)
    fast = (
        heads_drafter(base, heads, output, Grown(12))
        if dynamic
        else heads_drafter(base, heads, output, TREE)
    )
    drafter = Slow(fast, base)
    result = decode(base, drafter, ids, **settings)
    assert [row.new_tokens for row in result.rows] == [row.new_tokens for row in plain.rows]
    steps = [length for row in result.rows for length in row.accept_lengths]
    assert drafter.compared >= 5 and min(steps) == 1 and sum(steps) > 1.3 * len(steps)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_hits_are_what_decoding_gains(variant: str, temperature: float, ends: bool) -> None:
    """Ranks of another position, or of the layers without their context, choose a wrong tree."""
    base, heads = counting("llama", variant)
    output, prompt = output_layer(base), torch.randint(VOCAB, (1, 9))
    sampler = Sampler(temperature=temperature, seed=5)
    plain = plain_decode(base, prompt, max_new_tokens=30, sampler=sampler)
    eos = (plain.new_tokens[20],) if ends else ()
    plain = plain_decode(base, prompt, max_new_tokens=30, sampler=sampler, eos_token_ids=eos)
    found = measure_hits(base, heads, output, prompt, plain.rows[0], sampler)
    assert (found.ranks[:, 0] < 3).any()
    drafter = heads_drafter(base, heads, output, TREE)
    settings: dict[str, Any] = {"sampler": sampler, "max_new_tokens": 30, "eos_token_ids": eos}
    steps = decode(base, drafter, prompt, **settings).accept_lengths
    counted = list(replay(TREE, found.ranks, ended=ends))
    assert counted == steps[: len(counted)] and max(counted) > 1
    scales = fit_temperatures([[found]])
    grown = heads_drafter(base, heads, output, Grown(8, temperatures=scales))
    steps = decode(base, grown, prompt, **settings).accept_lengths
    accepted, counted = (grown_sizes(found, grown) <= 8).sum(1).tolist(), []
    while sum(counted) < len(accepted):
        counted.append(min(accepted[sum(counted)] + 1, len(accepted) - sum(counted) if ends else 9))
    assert counted == steps[: len(counted)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tree_can_be_chosen(variant: str) -> None:
    """Calibration with both kinds of trees runs for these heads, and finds that they hit."""
    base, heads = counting("llama", variant)
    found = calibrate(
        base,
        heads,
        output_layer(base),
        Texts([torch.randint(VOCAB, (1, 5)) for _ in range(2)], max_new_tokens=16),
        Search(max_nodes=4, repeats=1),
    )
    assert found.expected_accept_length > 1.2 and found.tree.num_nodes > 1
    assert found.measured_on["dynamic"]["accept_length"] > 1.2
