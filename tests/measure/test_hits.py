"""What the heads guessed, what trees gain from it, and how static trees are grown."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from specheads.attention.tree import Tree
from specheads.config import ConfigError
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import Drafter
from specheads.drafters.growing import Grown, best_trees
from specheads.drafters.heads import heads_drafter
from specheads.measure import hits as module
from specheads.measure.hits import (
    MISS,
    TEMPERATURES,
    Hits,
    Texts,
    acceptance,
    collect_hits,
    decoded_gains,
    fit_temperatures,
    gained,
    grow_nodes,
    grow_order,
    grown_sizes,
    measure_hits,
    static_sizes,
    step_ranks,
)
from specheads.models.blocks import prefix_sizes
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from specheads.verification.sampling import Sampler
from tests.conftest import Medusa
from tests.conftest import three_prompts as prompts
from tests.enumeration import replay

TREES = [
    Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2)]),
    Tree.from_choices([(rank,) for rank in range(8)]),
    Tree.chain(3),
]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("ends", [False, True])
def test_replay_is_what_decoding_does(medusa: Medusa, temperature: float, ends: bool) -> None:
    """Ranks read one position off, or tokens counted past the end, choose a wrong tree."""
    compare_with_decoding(medusa, temperature, ends, prompts())


KINDS: dict[str, dict[str, Any]] = {
    "pruned": {"lm_head": "pruned", "num_kept": 120},
    "shared_pruned": {"lm_head": "shared_pruned", "num_kept": 120},
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
            text = plain_decode(base, prompt, max_new_tokens=17, sampler=sampler)
            eos = (text.new_tokens[-1],)
        plain = plain_decode(base, prompt, max_new_tokens=24, sampler=sampler, eos_token_ids=eos)
        assert plain.finished is ends
        found = measure_hits(base, heads, output, prompt, plain.rows[0], sampler)
        if ends:  # the last step's root comes before the end, and nothing comes after that
            assert found.came[-1, 1:].isnan().all() and (found.ranks[-1, 1:] == MISS).all()
        largest = heads_drafter(base, heads, output, Grown(20, temperatures=scales))
        dynamic = grown_sizes(found, largest)
        ways: list[tuple[Drafter, list[int]]] = [
            (
                heads_drafter(base, heads, output, tree),
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
            grown = heads_drafter(base, heads, output, Grown(nodes, temperatures=scales))
            ways.append((grown, lengths))
        for drafter, replayed in ways:
            decoded = decode(
                base, drafter, prompt, max_new_tokens=24, sampler=sampler, eos_token_ids=eos
            )
            assert decoded.new_tokens == plain.new_tokens
            hits += sum(decoded.accept_lengths) - len(decoded.accept_lengths)
            if ends:
                assert replayed == decoded.accept_lengths
            else:  # near the limit the ranks are unknown
                assert replayed == decoded.accept_lengths[: len(replayed)]
                assert sum(replayed) >= 24 - 1 - 4
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
    many = [torch.randint(0, 256, (1, 3 + 2 * i)) for i in range(10)]  # more than one batch
    texts = Texts(many, (17, 40, 99), 30, (0.0, 0.5), seed=5)
    hits = collect_hits(base, heads, output, texts)
    assert len(hits) == 10 and {len(texts) for texts in hits} == {2}
    assert {text.ended for texts in hits for text in texts} == {True, False}
    tree = Tree.from_choices(
        [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2)][: num_nodes - 1]
    )
    gains = decoded_gains(base, heads_drafter(base, heads, output, tree), texts, 3)
    for prompt, of_prompt in enumerate(hits):
        steps = [step for text in of_prompt for step in replay(tree, text.ranks, ended=text.ended)]
        assert gains.tokens[prompt].item() == sum(steps)
        assert gains.steps[prompt].item() == len(steps)


def test_one_growth_tells_every_size() -> None:
    """Sizes read off the largest tree must be those of the trees that are decoded with."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 4, 6, generator=generator).mul(2).sort(-1, descending=True).values
    ranks = torch.randint(0, 4, (200, 4), generator=generator).clamp(max=2)
    ranks[::7, 2] = MISS
    temperatures = [0.5, 1.0, 2.0, 4.0]
    log_probs = (logits / torch.tensor(temperatures)[:, None]).log_softmax(-1).transpose(0, 1)
    accepted = []
    below = log_probs[:, :, None].expand(-1, -1, 6, -1)
    parents, slots, values = best_trees(40, below, torch.arange(6).expand_as(below))
    guesses = torch.nn.functional.pad(slots % 6, (1, 0), value=-1)
    needed = module._sizes_needed(parents, values, guesses, ranks)
    for size in (2, 3, 5, 9, 17, 40):
        parents, slots, _ = best_trees(size, below, torch.arange(6).expand_as(below))
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
    hits = Hits(ranks, came, norms, True)
    assert fit_temperatures([[hits]]) == [2.0, 0.5]
    alive = ranks[:, 0] != MISS  # where the first head missed, the second is another
    norms[~alive, 1] = torch.stack(
        [(logits[~alive, 1] * 9 / t).logsumexp(-1) for t in TEMPERATURES], -1
    )
    came[~alive, 1] *= 9
    assert fit_temperatures([[Hits(ranks, came, norms, True)]]) == [2.0, 0.5]
    nothing = Hits(ranks[:0], came[:0], norms[:0], True)
    assert fit_temperatures([[nothing]]) == [1.0, 1.0]


def test_nothing_to_measure_is_refused(medusa: Medusa) -> None:
    """Without positions every rate is zero, and the tree would silently be the root alone."""
    base, heads, output = medusa
    with pytest.raises(ValueError, match="at least 1 prompt"):
        collect_hits(base, heads, output, Texts([]))
    with pytest.raises(ConfigError, match="max_new_tokens 3 leaves no position"):
        collect_hits(base, heads, output, Texts(prompts(), max_new_tokens=3))


def choices(ranks: Tensor, num_nodes: int) -> set[tuple[int, ...]]:
    """Return the nodes of the grown tree."""
    return {node for node, _ in grow_order(ranks, num_nodes)}


def hits_of(ranks: Tensor, ended: bool = True) -> Hits:
    """Return hits that hold nothing but ranks."""
    nothing = torch.zeros(0)
    return Hits(ranks, nothing, nothing, ended)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=20),
    st.integers(2, 8),
)
@settings(max_examples=25)
def test_the_order_is_the_best_of_every_size(rows: list[list[int]], num_nodes: int) -> None:
    """Conditional rates jump from path to path; a greedy growth could miss what lies below."""
    ranks = torch.tensor(rows)
    ranks[ranks == 3] = MISS
    worth = dict(grow_order(ranks, 1 + 3 + 9))  # all nodes that ever hit
    assert all(worth[node] <= worth.get(node[:-1], 1.0) + 1e-12 for node in worth)
    num_nodes = min(num_nodes, len(worth) + 1)
    best = max(
        sum(worth[node] for node in chosen)
        for chosen in itertools.combinations(worth, num_nodes - 1)
        if all(len(node) == 1 or node[:-1] in chosen for node in chosen)
    )
    grown = grow_order(ranks, num_nodes)
    assert sum(value for _, value in grown) == pytest.approx(best)


def test_growth_uses_the_path_above() -> None:
    """Products of marginal rates would buy (0, 0) and (1, 5), which never happen."""
    ranks = torch.tensor([[0, 5], [1, 0]] * 500)
    assert choices(ranks, 5) == {(0,), (1,), (0, 5), (1, 0)}


def test_growth_borrows_where_a_path_is_rare() -> None:
    """One lucky position must not buy a deep node that is seldom right."""
    ranks = torch.tensor([[0, 0]] * 60 + [[0, 1]] * 30 + [[1, 9]])
    assert choices(ranks, 4) == {(0,), (0, 0), (0, 1)}


def test_growth_leaves_out_what_never_hits() -> None:
    """Nodes without hits cost time in every step and gain nothing."""
    ranks = torch.tensor([[0, MISS], [0, MISS]])
    assert choices(ranks, 48) == {(0,)}
    assert grow_nodes([[hits_of(torch.zeros(0, 2, dtype=torch.long))]], 8) == []


def test_growth_counts_where_steps_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Easy runs are passed in one step, however many positions they have; hard ones one by one."""
    monkeypatch.setattr(module, "_TYPICAL_NODES", 3)
    easy, hard = [0, 0], [1, MISS]
    text = hits_of(torch.tensor([easy, easy, easy, hard, hard] * 50))
    everywhere = [node for node, _ in grow_order(text.ranks, 3)]
    assert everywhere == [(0,), (0, 0)]
    assert step_ranks(everywhere, [[text]], 3).tolist()[:4] == [easy, hard, hard, easy]
    nodes = grow_nodes([[text]], 3)
    assert set(nodes) == {(0,), (1,)}
    assert len(step_ranks(nodes, [[text]], 3)) < len(step_ranks(everywhere, [[text]], 3))


def test_acceptance_adds_up_to_the_accept_length() -> None:
    """The widths in the picture, and the length printed beside it, must tell the same story."""
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(0, 3, (size, 3), generator=generator) for size in (40, 7, 90)]
    hits = [[hits_of(ranks, ended=False)] for ranks in texts]
    tree = Tree.from_choices([(0,), (1,), (0, 0), (1, 2), (0, 0, 1)])
    steps = [step for ranks in texts for step in replay(tree, ranks, ended=False)]
    shares = acceptance(tree, hits)
    assert 1 + sum(shares) == pytest.approx(sum(steps) / len(steps))
    assert shares[tree.choices.index((0,))] > shares[tree.choices.index((0, 0))] > 0
