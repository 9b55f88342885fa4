"""Trees cut to what pays: the best part of each, learned from what was really decided."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specheads.attention.tree import RowTrees, Tree
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.heads import HeadsDrafter
from specheads.drafters.length import (
    WEIGHT,
    CutDrafter,
    FixedLength,
    StepCosts,
    TextRates,
    rank_prior,
    ranks_of,
)
from specheads.models.heads import MedusaHeads
from specheads.models.output import output_layer
from tests.zoo import VOCAB, build

TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
COSTS = StepCosts(0.05, [0, 1, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0])


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """Return a base model."""
    return build("llama")


def heads_drafter(base: PreTrainedModel) -> HeadsDrafter:
    """Return a static tree of heads that differ from one another and hit now and then."""
    output = output_layer(base)
    heads = MedusaHeads(3, 1, base.config.hidden_size, VOCAB)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        heads.init_from_output(output.weight)
        for parameter in heads.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return HeadsDrafter(heads.eval(), output, TREE)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=6, max_size=6),
    st.lists(st.floats(0.01, 0.8), min_size=7, max_size=7),
)
@settings(max_examples=60)
def test_no_part_of_the_tree_is_better(seen: list[tuple[int, int]], more: list[float]) -> None:
    """A greedy cut that stops at the first node that does not pay misses those behind it."""
    kinds = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (9, 9)]
    row = TextRates(
        {rank: float(min(pair)) for rank, pair in zip(kinds, seen, strict=True)},
        {rank: float(max(pair)) for rank, pair in zip(kinds, seen, strict=True)},
    )
    costs = StepCosts(0.05, [0.0, *itertools.accumulate(more)])
    tokens, parents = [9, 1, 2, 3, 4, 5, 6], TREE.parents.tolist()
    kept = CutDrafter(DraftLike(), costs).keep(row, tokens, tokens, parents)
    rates = row.estimate(ranks_of(tokens, parents), rank_prior, WEIGHT)

    def speed(nodes: tuple[int, ...]) -> float:
        values = {0: 1.0}
        for node in nodes[1:]:
            values[node] = values[parents[node]] * rates[node]
        return sum(values.values()) / costs.of_step(TREE.max_depth, len(nodes))

    parts = [
        (0, *nodes)
        for size in range(7)
        for nodes in itertools.combinations(range(1, 7), size)
        if all(parents[node] in (0, *nodes) for node in nodes)
    ]
    assert tuple(kept) in parts
    assert speed(tuple(kept)) == pytest.approx(max(map(speed, parts)))


class DraftLike:
    """A member of fixed candidates for one row."""

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(self, candidates: Candidates | None = None) -> None:
        self.candidates = candidates
        self.own: list[list[int]] = []

    def start(self, prefill: Prefill) -> None:
        """Nothing is remembered."""

    def propose(self, state: None) -> Candidates:
        """Return the candidates."""
        assert self.candidates is not None
        return self.candidates

    def observe(self, state: None, result: StepResult) -> None:
        """Note the own nodes."""
        assert result.own is not None
        self.own = result.own.tolist()

    def select(self, state: None, rows: torch.Tensor) -> None:
        """Nothing is kept."""


def test_only_what_was_decided_is_counted() -> None:
    """Guesses behind a wrong one, left out, or beyond the limit must not count as wrong."""
    member = DraftLike(Candidates(torch.tensor([[9, 1, 2, 3, 4, 5, 6]]), TREE))
    drafter = CutDrafter(member, StepCosts(0.0, [0, 1, 1, 1, 1, 1, 9, 9]))
    prefill = Prefill([[1]], torch.tensor([[1]]), [1], {}, torch.tensor([9]))
    state = drafter.start(prefill)
    candidates = drafter.propose(state)
    # left out: the second guesses below the first level
    assert candidates.tokens.tolist() == [[9, 1, 2, 3, 6]]
    tokens = candidates.tokens.clone()
    tokens[0, 3:] = -1  # beyond the limit
    result = StepResult(
        candidates.tree,
        tokens,
        torch.zeros_like(tokens),
        {},
        torch.tensor([[0, 1, -1]]),
        torch.tensor([1]),
        torch.tensor([7]),
        [[1, 7]],
    )
    state = drafter.observe(state, result)
    assert state.rows[0].trials == {(1, 0): 1.0, (1, 1): 1.0}
    assert state.rows[0].hits == {(1, 0): 1.0, (1, 1): 0.0}
    assert member.own == [[0, 1, 2, 3, -1, -1, 4]]


def test_probes_are_always_kept() -> None:
    """Lookahead's window read in part gives n-grams of the wrong columns."""
    tokens = torch.tensor([[9, 1, 2, -1, -1]])
    probes = torch.tensor([[9, 1, 2, 5, 6]])
    tree = RowTrees.from_lists([[-1, 0, 0, 0, 3]], 2)
    member = DraftLike(Candidates(tokens, tree, probes=probes))
    drafter = CutDrafter(member, StepCosts(0.0, [0, 1, 5, 9, 9, 9]))
    state = drafter.start(Prefill([[1]], torch.tensor([[1]]), [1], {}, torch.tensor([9])))
    candidates = drafter.propose(state)
    assert candidates.inputs.tolist()[0][:1] == [9] and {5, 6} <= set(candidates.inputs[0].tolist())


def test_sampled_members_are_refused(base: PreTrainedModel) -> None:
    """Leaving out samples by their value changes the distribution of the output."""
    sampled = DraftModelDrafter(base, FixedLength(2), sampling="sampled")
    with pytest.raises(ValueError, match="samples its guesses"):
        CutDrafter(sampled, COSTS)
    with pytest.raises(ValueError, match="memory must be positive"):
        CutDrafter(heads_drafter(base), COSTS, memory=0)
