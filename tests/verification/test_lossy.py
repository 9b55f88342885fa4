"""Lossy rules: what they promise instead of the base model's distribution."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree
from specheads.decoding.accept import Acceptance
from specheads.verification.acceptance import lenient_greedy, reject, typical
from tests.enumeration import (
    Outcomes,
    Rule,
    ToyDrafter,
    ToyModel,
    decoded_joint,
    distance,
    expected_accepted,
    verified,
)

MODEL = ToyModel(4, seed=1)
TREE = Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])


def by_lenience(lenience: float, sampling: str) -> Rule:
    """Return lenient rejection for one way of sampling."""

    def rule(
        tokens: Tensor, tree: Tree, base_probs: Tensor, draft_probs: Tensor, chance: Outcomes
    ) -> tuple[Tensor, Tensor, Tensor]:
        drawn_from = None if sampling == "none" else draft_probs
        return reject(tokens, tree, base_probs, drawn_from, chance, sampling, lenience)

    return rule


def joint(rule: Rule, sampling: str, num_tokens: int) -> Tensor:
    """Return the distribution of the first decoded tokens."""
    draft = ToyDrafter(ToyModel(4, seed=2), TREE, sampling)
    return decoded_joint(MODEL, verified(MODEL, TREE, draft, rule), num_tokens)


@pytest.mark.parametrize("sampling", ["without_replacement", "none"])
def test_lenience_keeps_its_bound(sampling: str) -> None:
    """Prevents a lenient rule that makes a token more than 1 / l times as likely."""
    for lenience in (0.8, 0.4):
        got = joint(by_lenience(lenience, sampling), sampling, 3)
        assert float(got.sum()) == pytest.approx(1, abs=1e-9)
        # the first token is drawn plainly
        assert (got <= MODEL.joint(3) / lenience**2 * (1 + 1e-9)).all()
        pairs = got.view(-1, 4).sum(-1) / MODEL.joint(2)
        assert pairs.max() <= 1 / lenience * (1 + 1e-9)
        assert pairs.max() > 1.1, "nothing was changed: the bound is not tested"


@pytest.mark.parametrize("sampling", ["without_replacement", "none"])
def test_lenience_one_is_exact_and_less_accepts_more(sampling: str) -> None:
    """Prevents a lenience that works the other way round."""
    draft = ToyDrafter(ToyModel(4, seed=2), TREE, sampling)
    steps = [
        verified(MODEL, TREE, draft, by_lenience(lenience, sampling))
        for lenience in (1.0, 0.7, 0.4, 0.01)
    ]
    assert distance(MODEL, steps[0], 2) < 1e-9
    means = [expected_accepted(step, MODEL.nothing) for step in steps]
    assert means == sorted(means)
    assert means[0] < means[-1] - 0.1


def test_a_broken_lenience_shows() -> None:
    """Prevents a vacuous bound: a lower lenience must break it."""
    got = joint(by_lenience(0.8 / 4, "chain"), "without_replacement", 2)
    assert (got / MODEL.joint(2)).max() > 1 / 0.8 + 0.05


def random_case(num_rows: int, tree: Tree, vocab_size: int = 8) -> tuple[Tensor, Tensor]:
    """Return tokens and base_probs."""
    generator = torch.Generator().manual_seed(3)
    shape = (num_rows, tree.num_nodes, vocab_size)
    base = (torch.randn(shape, generator=generator) * 2).softmax(-1)
    # a fair guess at the parent's likely tokens, siblings distinct
    guess = base.log() + 2.5 * torch.randn(shape, generator=generator)
    order = guess[:, tree.parents.clamp(min=0)].argsort(-1, descending=True)
    index = tree.ranks.clamp(min=0)[None, :, None].expand(num_rows, -1, 1)
    return order.gather(2, index)[..., 0], base


DEEP = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0)])


def slow_typical(
    tokens: list[int], tree: Tree, base: Tensor, epsilon: float, delta: float
) -> list[int]:
    """Try every node's whole path as one would on paper."""
    best, best_key = [0], (0, 0.0)
    for line in tree.ancestors.tolist():
        path = [node for node in line if node >= 0]
        likelihood = 0.0
        for parent, node in zip(path, path[1:], strict=False):
            probs = base[parent].double()
            entropy = -float((probs * probs.log()).sum())
            p = float(probs[tokens[node]])
            if not p > min(epsilon, delta * torch.tensor(-entropy).exp()):
                break
            likelihood += float(torch.tensor(p).log())
        else:
            if (len(path) - 1, likelihood) > best_key or len(path) == 1:
                best, best_key = path, (len(path) - 1, likelihood)
    return best


@pytest.mark.parametrize("settings", [(0.09, 0.3), (0.25, 0.5), (0.02, 2.0)])
def test_typical_equals_the_slow_one(settings: tuple[float, float]) -> None:
    """Prevents Medusa's swapped defaults, the entropy of another node, and a shorter path."""
    epsilon, delta = settings
    tokens, base = random_case(200, DEEP)
    path, num_accepted, token = typical(tokens, DEEP, base, epsilon=epsilon, delta=delta)
    for row in range(200):
        expected = slow_typical(tokens[row].tolist(), DEEP, base[row], epsilon, delta)
        assert path[row].tolist() == expected + [-1] * (4 - len(expected))
        assert num_accepted[row] == len(expected) - 1
        assert token[row] == base[row, expected[-1]].argmax()
    assert len(set(num_accepted.tolist())) > 2, set(num_accepted.tolist())


def test_the_defaults_are_medusas() -> None:
    """Prevents the two thresholds changing places, as in Medusa's own helpers."""
    tokens, base = random_case(100, DEEP)
    for default, given in zip(
        typical(tokens, DEEP, base),
        typical(tokens, DEEP, base, epsilon=0.09, delta=0.3),
        strict=True,
    ):
        assert default.equal(given)
    swapped = typical(tokens, DEEP, base, epsilon=0.3, delta=0.09)
    assert not swapped[1].equal(typical(tokens, DEEP, base)[1])


def test_larger_values_are_stricter() -> None:
    """Prevents the belief that a larger epsilon accepts more."""
    tokens, base = random_case(300, DEEP)
    for name in ("epsilon", "delta"):
        before = None
        for value in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
            settings = {"epsilon": 0.1, "delta": 0.3, name: value}
            num_accepted = typical(tokens, DEEP, base, **settings)[1]
            assert before is None or (num_accepted <= before).all()
            if before is None:
                assert (num_accepted == DEEP.max_depth).all(), "0 accepts all"
            before = num_accepted
        assert before is not None
        if name == "epsilon":
            # min(epsilon, delta exp(-H)) <= delta
            assert before.equal(typical(tokens, DEEP, base, epsilon=0.3, delta=0.3)[1])


def test_the_strictest_is_greedy_decoding() -> None:
    """Prevents a next token that is not the base model's own best."""
    tokens, base = random_case(50, DEEP)
    path, num_accepted, token = typical(tokens, DEEP, base, epsilon=1.0, delta=8.0)
    assert (num_accepted == 0).all()
    assert (path[:, 1:] == -1).all()
    assert token.equal(base[:, 0].argmax(-1))


@pytest.mark.parametrize("lenience", [1.0, 0.6, 0.2])
def test_lenient_greedy_keeps_its_bound(lenience: float) -> None:
    """Prevents tokens far from the best, and, at 1, any but the greedy ones."""
    tokens, base = random_case(200, DEEP)
    path, num_accepted, token = lenient_greedy(tokens, DEEP, base, lenience=lenience)
    for row in range(200):
        line = path[row, : int(num_accepted[row]) + 1].tolist()
        for parent, node in zip(line, line[1:], strict=False):
            probs = base[row, parent]
            assert probs[tokens[row, node]] >= lenience * probs.max()
        assert token[row] == base[row, line[-1]].argmax()
        # and no longer path would do
        fits = {0}
        for node in range(1, DEEP.num_nodes):
            parent = int(DEEP.parents[node])
            probs = base[row, parent]
            if parent in fits and probs[tokens[row, node]] >= lenience * probs.max():
                fits.add(node)
        assert num_accepted[row] == max(int(DEEP.depths[node]) for node in fits)


@pytest.mark.parametrize("rule", [typical, partial(lenient_greedy, lenience=0.3)])
def test_padding_and_trees_of_rows(rule: Rule) -> None:
    """Prevents padding accepted as token 0, and the first row's tree used for all."""
    tokens, base = random_case(60, DEEP)
    tokens[:, 1] = -1
    path, num_accepted, token = rule(tokens, DEEP, base)
    assert not (path == 1).any()
    assert num_accepted.max() > 1
    rows = RowTrees.from_parents(DEEP.parents.expand(60, -1), 3)
    for one, other in zip(rule(tokens, rows, base), (path, num_accepted, token), strict=True):
        assert one.equal(other)
    # some rows without their first children, in a tree of their own
    parents = DEEP.parents.expand(60, -1).clone()
    parents[30:, 3] = 2
    other_tree = RowTrees.from_parents(parents, 3)
    mixed = rule(tokens, other_tree, base)
    lone = RowTrees.from_parents(parents[30:], 3)
    for whole, half in zip(mixed, rule(tokens[30:], lone, base[30:]), strict=True):
        assert whole[30:].equal(half)


def test_misuse_is_refused() -> None:
    """Prevents a lenience of 0, which would accept anything."""
    for lenience in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"lenience must be in \(0, 1\], got"):
            Acceptance("lossy_lenient", lenience=lenience)
