"""Measuring what the heads guessed, and counting what trees gain from it, against decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specheads.attention.tree import Tree
from specheads.config import ConfigError
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import Drafter
from specheads.drafters.growing import (
    DynamicSequentialDrafter,
    best_trees,
    dynamic_drafter,
    static_drafter,
)
from specheads.measure.hits import (
    MISS,
    TEMPERATURES,
    Hits,
    collect_hits,
    decoded_gains,
    dynamic_sizes,
    fit_temperatures,
    gained,
    grown_sizes,
    measure_hits,
    replay,
    static_sizes,
)
from specheads.models.blocks import prefix_sizes
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer, output_layer
from specheads.verification.sampling import Sampler

Medusa = tuple[LlamaForCausalLM, MedusaHeads, OutputLayer]
TREES = [
    Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2)]),
    Tree.from_choices([(rank,) for rank in range(8)]),
    Tree.chain(3),
]


@pytest.fixture
def medusa(tiny_llama: LlamaForCausalLM) -> Medusa:
    """Return a base with three heads that differ from one another and hit now and then."""
    output = output_layer(tiny_llama)
    heads = MedusaHeads(3, 1, 32, 272)
    with torch.no_grad():
        heads.init_from_output(output.weight)
        for i, parameter in enumerate(heads.parameters()):
            parameter.add_(0.02 * (1 + i % 3) * torch.randn_like(parameter))
    return tiny_llama, heads.eval(), output


def prompts() -> list[Tensor]:
    """Return prompts of several lengths."""
    return [torch.randint(0, 256, (1, size)) for size in (5, 17, 3)]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("ends", [False, True])
def test_replay_is_what_decoding_does(medusa: Medusa, temperature: float, ends: bool) -> None:
    """Ranks read one position off, or tokens counted past the end, choose a wrong tree."""
    compare_with_decoding(medusa, temperature, ends, prompts())


KINDS: dict[str, dict[str, Any]] = {
    "pruned": {"lm_head": "pruned", "num_kept": 120},
    "markov": {"markov_rank": 4, "lm_head": "shared"},
    "hydra_prefix": {"condition": True},
    "everything": {"condition": True, "markov_rank": 4, "lm_head": "pruned", "num_kept": 200},
}


@pytest.fixture(params=KINDS)
def any_kind(tiny_llama: LlamaForCausalLM, request: pytest.FixtureRequest) -> Medusa:
    """Return a base with three heads of another kind."""
    sizes = prefix_sizes(tiny_llama.config) if "prefix" in request.param else None
    output = output_layer(tiny_llama)
    heads = MedusaHeads(3, 1, 32, 272, prefix=sizes, **KINDS[request.param])
    text = plain_decode(tiny_llama, prompts()[0], max_new_tokens=40).new_tokens
    many = sorted({*text[:-3]}) + [token for token in range(272) if token not in text]
    with torch.no_grad():
        kept = torch.tensor(many[: heads.num_outputs])  # of one text all but a few that come
        heads.init_from_output(output.weight, kept if heads.token_map is not None else None)
        for name, parameter in heads.named_parameters():
            if "norm" not in name:
                scale = 0.05 if "markov" in name or "condition" in name else 0.015
                parameter.add_(scale * torch.randn_like(parameter))
    return tiny_llama, heads.eval(), output


@pytest.mark.parametrize(("temperature", "ends"), [(0.0, False), (0.3, True)])
def test_every_kind_of_heads_is_counted_as_it_decodes(
    any_kind: Medusa, temperature: float, ends: bool
) -> None:
    """Heads asked about other tokens than the accepted ones, or behind half of the prefix layer."""
    compare_with_decoding(any_kind, temperature, ends, prompts()[:2])


def compare_with_decoding(
    medusa: Medusa, temperature: float, ends: bool, rows: list[Tensor]
) -> None:
    """Hold counted accept lengths, of static and grown trees, to those of decoding."""
    base, heads, output = medusa
    scales = [0.7, 1.0, 1.5]
    hits = 0
    for index, prompt in enumerate(rows):
        sampler = Sampler(temperature=temperature, seed=index)
        eos: tuple[int, ...] = ()
        if ends:  # a token of the text itself, so that it ends inside a tree
            text = plain_decode(base, prompt, max_new_tokens=30, sampler=sampler)
            eos = (text.new_tokens[20],)
        plain = plain_decode(base, prompt, max_new_tokens=40, sampler=sampler, eos_token_ids=eos)
        assert plain.finished is ends
        found = measure_hits(
            base, heads, output, plain.sequences, prompt.shape[1], ended=plain.finished
        )
        if ends:  # the last step's root comes before the end, and nothing comes after that
            assert found.came[-1, 1:].isnan().all() and (found.ranks[-1, 1:] == MISS).all()
        largest = dynamic_drafter(base, heads, output, 20, temperatures=scales)
        if isinstance(largest, DynamicSequentialDrafter):
            dynamic = grown_sizes(found, largest)
        else:
            dynamic = dynamic_sizes(found, 20, scales)
        ways: list[tuple[Drafter, list[int]]] = [
            (
                static_drafter(base, heads, output, tree),
                list(replay(tree, found.ranks, ended=ends)),
            )
            for tree in TREES
        ]
        for nodes in (2, 7, 20):  # the replay of a tree whose choice (d,) holds what is needed
            accepted = (dynamic <= nodes).sum(1)
            lengths, root = [], 0
            while root < len(accepted):
                length = int(accepted[root]) + 1
                lengths.append(min(length, len(accepted) - root) if ends else length)
                root += length
            grown = dynamic_drafter(base, heads, output, nodes, temperatures=scales)
            ways.append((grown, lengths))
        for drafter, replayed in ways:
            decoded = decode(
                base, drafter, prompt, max_new_tokens=40, sampler=sampler, eos_token_ids=eos
            )
            assert decoded.new_tokens == plain.new_tokens
            hits += sum(decoded.accept_lengths) - len(decoded.accept_lengths)
            if ends:
                assert replayed == decoded.accept_lengths
            else:  # near the limit the ranks are unknown
                assert replayed == decoded.accept_lengths[: len(replayed)]
                assert sum(replayed) >= 40 - 1 - 4
    assert hits > 5, "the heads never hit, so nothing was compared"


@pytest.mark.parametrize("ended", [False, True])
def test_all_sizes_at_once_are_each_size_alone(ended: bool) -> None:
    """The table of sizes would rank trees that nobody decodes with."""
    generator = torch.Generator().manual_seed(1)
    order = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (2,), (1, 0), (0, 0, 1)]
    sizes = torch.arange(1, 12)
    for length in (0, 1, 2, 30):
        ranks = torch.randint(0, 3, (length, 3), generator=generator)
        ranks[ranks == 2] = MISS
        tokens, steps = gained(static_sizes(order, ranks), sizes, ended=ended)
        for size, token, step in zip(sizes.tolist(), tokens.tolist(), steps.tolist(), strict=True):
            tree = Tree.from_choices(order[: size - 1])
            alone = list(replay(tree, ranks, ended=ended))
            assert (token, step) == (sum(alone), len(alone))


@pytest.mark.parametrize("num_nodes", [8, 2])
def test_what_is_expected_is_what_comes(medusa: Medusa, num_nodes: int) -> None:
    """On the very same prompts nothing may differ: neither batches, seeds, nor the cut-off end."""
    base, heads, output = medusa
    settings = {
        "eos_token_ids": (17, 40, 99),
        "max_new_tokens": 30,
        "temperatures": (0.0, 0.5),
        "seed": 5,
    }
    many = [torch.randint(0, 256, (1, 3 + 2 * i)) for i in range(10)]  # more than one batch
    hits = collect_hits(base, heads, output, many, **settings)  # type: ignore[arg-type]
    assert len(hits) == 10 and {len(texts) for texts in hits} == {2}
    assert {text.ended for texts in hits for text in texts} == {True, False}
    tree = Tree.from_choices(
        [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2)][: num_nodes - 1]
    )
    gains = decoded_gains(
        base,
        static_drafter(base, heads, output, tree),
        many,
        num_heads=3,
        **settings,  # type: ignore[arg-type]
    )
    for prompt, texts in enumerate(hits):
        steps = [step for text in texts for step in replay(tree, text.ranks, ended=text.ended)]
        assert gains.tokens[prompt].item() == sum(steps)
        assert gains.steps[prompt].item() == len(steps)


def test_one_growth_tells_every_size() -> None:
    """Sizes read off the largest tree must be those of the trees that are decoded with."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 4, 6, generator=generator).mul(2).sort(-1, descending=True).values
    ranks = torch.randint(0, 4, (200, 4), generator=generator).clamp(max=2)
    ranks[::7, 2] = MISS
    norms = torch.stack([(logits / each).logsumexp(-1) for each in TEMPERATURES], dim=-1)
    temperatures = [0.5, 1.0, 2.0, 4.0]
    hits = Hits(ranks, logits, logits[..., 0], norms, True)
    needed = dynamic_sizes(hits, 40, temperatures)
    log_probs = (logits / torch.tensor(temperatures)[:, None]).log_softmax(-1).transpose(0, 1)
    accepted = []
    for size in (2, 3, 5, 9, 17, 40):
        parents, slots = best_trees(log_probs, size)
        for position in range(200):
            paths: list[tuple[int, ...]] = [()]
            for parent, slot in zip(parents[position, 1:], slots[position], strict=True):
                paths.append((*paths[parent], int(slot) % 6))
            for depth in range(4):
                held = tuple(ranks[position, : depth + 1].tolist()) in paths
                assert held == bool(needed[position, depth] <= size)
                accepted.append((depth, held))
    assert {(depth, held) for depth in range(4) for held in (True, False)} == set(accepted)


def test_temperatures_are_found_again() -> None:
    """A head that is twice too sure must be halved, each by its own; unseen positions not count."""
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(4000, 2, 40, generator=generator) * 2
    tokens = torch.distributions.Categorical(logits=true).sample()
    logits = true * torch.tensor([2.0, 0.5])[:, None]  # what the heads say
    order = logits.argsort(-1, descending=True)
    ranks = (order == tokens[..., None]).int().argmax(-1)
    ranks[ranks >= 10] = MISS
    came = logits.gather(-1, tokens[..., None])[..., 0]
    came[-500:, 1] = torch.nan  # beyond the end of a text
    ranks[-500:, 1] = MISS
    norms = torch.stack([(logits / each).logsumexp(-1) for each in TEMPERATURES], dim=-1)
    hits = Hits(ranks, logits.topk(10).values, came, norms, True)
    assert fit_temperatures([[hits]]) == [2.0, 0.5]
    alive = ranks[:, 0] != MISS  # where the first head missed, the second is another
    norms[~alive, 1] = torch.stack(
        [(logits[~alive, 1] * 9 / t).logsumexp(-1) for t in TEMPERATURES], -1
    )
    came[~alive, 1] *= 9
    assert fit_temperatures([[Hits(ranks, hits.logits, came, norms, True)]]) == [2.0, 0.5]
    nothing = Hits(ranks[:0], logits[:0, :, :10], came[:0], norms[:0], True)
    assert fit_temperatures([[nothing]]) == [1.0, 1.0]


def test_nothing_to_measure_is_refused(medusa: Medusa) -> None:
    """Without positions every rate is zero, and the tree would silently be the root alone."""
    base, heads, output = medusa
    with pytest.raises(ValueError, match="at least 1 prompt"):
        collect_hits(base, heads, output, [], eos_token_ids=())
    with pytest.raises(ConfigError, match="max_new_tokens 3 leaves no position"):
        collect_hits(base, heads, output, prompts(), eos_token_ids=(), max_new_tokens=3)
