"""Rules for sampled candidates: exact, found by going through every outcome of draft and rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree
from specheads.verification import acceptance
from specheads.verification.acceptance import block, reject, sample_siblings
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

EXACT, BROKEN = 1e-9, 1e-3

WIDE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
# numbers of siblings that differ, and a leaf beside a parent
MIXED = Tree.from_choices([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (0, 0, 0)])


def by(sampling: str) -> Rule:
    """Return rejection for one way of sampling."""

    def rule(
        tokens: Tensor, tree: Tree, base_probs: Tensor, draft_probs: Tensor, chance: Outcomes
    ) -> tuple[Tensor, Tensor, Tensor]:
        return reject(tokens, tree, base_probs, draft_probs, chance, sampling)

    return rule


def by_block(
    tokens: Tensor, tree: Tree, base_probs: Tensor, draft_probs: Tensor, chance: Outcomes
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply block verification."""
    return block(tokens, base_probs, draft_probs, chance)


def error(
    rule: Rule, tree: Tree, sampling: str, *, shared: bool = False, vocab_size: int = 3
) -> float:
    """Return the total variation distance of three decoded tokens to the model's."""
    model, other = ToyModel(vocab_size, seed=1), ToyModel(vocab_size, seed=2)
    return distance(model, verified(model, tree, ToyDrafter(other, tree, sampling, shared), rule))


CASES = {
    "chain": (by("chain"), Tree.chain(3), "without_replacement", False, 4),
    "block": (by_block, Tree.chain(3), "without_replacement", False, 4),
    "siblings": (by("without_replacement"), WIDE, "without_replacement", False, 3),
    "shared siblings": (by("without_replacement"), WIDE, "without_replacement", True, 5),
    "mixed": (by("without_replacement"), MIXED, "without_replacement", False, 3),
    "shared mixed": (by("without_replacement"), MIXED, "without_replacement", True, 4),
    "point masses": (by("none"), MIXED, "none", False, 4),
}


@pytest.mark.parametrize("name", CASES)
def test_the_distribution_is_kept(name: str) -> None:
    """Prevents every bias, however small, in the text of several steps."""
    rule, tree, sampling, shared, vocab_size = CASES[name]
    assert error(rule, tree, sampling, shared=shared, vocab_size=vocab_size) < EXACT


def swapped(rule: Rule) -> Rule:
    """Return a rule that is told siblings in another order than they were drawn in."""

    def other_order(
        tokens: Tensor, tree: Tree, base_probs: Tensor, draft_probs: Tensor, chance: Outcomes
    ) -> tuple[Tensor, Tensor, Tensor]:
        nodes = torch.arange(tree.num_nodes)
        for node in range(tree.num_nodes):
            children = (tree.parents == node).nonzero().flatten()
            nodes[children] = nodes[children.flip(0)]
        # a relabelling of nodes: only siblings without children change places here
        path, num_accepted, token = rule(
            tokens[:, nodes], tree, base_probs[:, nodes], draft_probs[:, nodes], chance
        )
        return torch.where(path >= 0, nodes[path], path), num_accepted, token

    return other_order


FLAT = Tree.from_choices([(0,), (1,)])
BREAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the residual is the base distribution": lambda patch: patch.setattr(
        acceptance, "subtract", lambda residual, drawn_from: residual
    ),
    "siblings count as drawn anew": lambda patch: patch.setattr(
        acceptance, "without", lambda draft, index: draft
    ),
    "siblings are not normalised": lambda patch: patch.setattr(
        acceptance, "without", lambda draft, index: draft.scatter(1, index, 0.0)
    ),
}


@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.parametrize("name", ["siblings", "shared mixed"])
def test_a_broken_rule_shows(name: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a vacuous enumeration."""
    BREAKS[broken](monkeypatch)
    rule, tree, sampling, shared, _ = CASES[name]
    assert error(rule, tree, sampling, shared=shared) > BROKEN


def test_the_order_of_siblings_shows() -> None:
    """Prevents drafters and rules that disagree about which sibling was drawn first."""
    sampling = "without_replacement"
    assert error(by(sampling), FLAT, sampling, vocab_size=4) < EXACT
    assert error(swapped(by(sampling)), FLAT, sampling, vocab_size=4) > BROKEN


def test_taking_one_way_of_sampling_for_another_shows() -> None:
    """Prevents top-k guesses treated as samples, the commonest error of public code."""
    assert error(by("without_replacement"), FLAT, "none", vocab_size=4) > BROKEN
    # what is drawn independently of the base model may always count as a point mass
    assert error(by("none"), FLAT, "without_replacement") < EXACT


@pytest.mark.parametrize("broken", ["residual", "goodness"])
def test_a_broken_block_shows(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents block verification with the residual, or the weights, of another rule."""
    rule, tree, sampling, _, vocab_size = CASES["block"]
    if broken == "residual":
        monkeypatch.setattr(acceptance, "normalise", lambda weights, otherwise: otherwise)
    else:
        accept = Outcomes.accept
        monkeypatch.setattr(Outcomes, "accept", lambda self, p, site: accept(self, p**2, site))
    assert error(rule, tree, sampling, vocab_size=vocab_size) > BROKEN


# --- what rules accept ----------------------------------------------------------------------


class Constant(ToyModel):
    """The same distribution everywhere."""

    def __init__(self, probs: list[float]) -> None:
        super().__init__(len(probs), seed=0)
        self._table = torch.tensor(probs, dtype=torch.float64).expand_as(self._table)


def mean_accepted(
    base: list[float], draft: list[float], tree: Tree, sampling: str, rule: Rule
) -> float:
    """Return the mean number of accepted tokens where nothing depends on the context."""
    drafter = ToyDrafter(Constant(draft), tree, sampling)
    return expected_accepted(verified(Constant(base), tree, drafter, rule), 0)


def test_block_accepts_more_than_token_by_token() -> None:
    """Prevents a block rule that is exact but no better: the example of its paper."""
    case = ([1 / 3, 2 / 3], [2 / 3, 1 / 3], Tree.chain(2), "without_replacement")
    assert mean_accepted(*case, by("chain")) == pytest.approx(10 / 9, abs=1e-12)
    assert mean_accepted(*case, by_block) == pytest.approx(11 / 9, abs=1e-12)


BASE = [0.05, 0.3, 0.1, 0.15, 0.02, 0.18, 0.2]
DRAFT = [0.3, 0.25, 0.17, 0.1, 0.08, 0.06, 0.04]


def test_siblings_accept_more_than_one() -> None:
    """Prevents later siblings that are never accepted."""
    means = [
        mean_accepted(BASE, DRAFT, tree, "without_replacement", by("without_replacement"))
        for tree in (Tree.chain(1), FLAT, Tree.from_choices([(0,), (1,), (2,)]))
    ]
    assert means[0] == pytest.approx(sum(map(min, BASE, DRAFT)), abs=1e-12)
    assert means[0] < means[1] - 0.05 < means[2] - 0.05


# --- bottom-up rules and shared candidates --------------------------------------------------


def traversal(
    tokens: Tensor, tree: Tree, base_probs: Tensor, draft_probs: Tensor, chance: Outcomes
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify a tree from its leaves upwards (Weng et al., arXiv:2505.12398), row by row."""
    lasts, next_tokens = [], []
    for row in range(tokens.shape[0]):
        one = chance.row(row)
        base, draft = list(base_probs[row]), list(draft_probs[row])
        children = {
            node: (tree.parents == node).nonzero().flatten().tolist()
            for node in range(tree.num_nodes)
        }
        level = {0: 1.0}
        node, site = 0, 0
        while True:
            while children[node]:
                child = children[node][0]
                token = int(tokens[row, child])
                level[child] = min(1.0, level[node] * float(base[node][token] / draft[node][token]))
                node = child
            if one.accept(level[node], site):
                break
            site += 1
            child, node = node, int(tree.parents[node])
            left = (level[node] * base[node] - draft[node]).clamp(min=0)
            mass = float(left.sum())
            base[node] = left / mass if mass > 0 else base[node]
            removed = draft[node].clone()
            removed[int(tokens[row, child])] = 0
            draft[node] = removed / removed.sum()
            level[node] = mass / (mass + 1 - level[node]) if node else 1.0
            children[node].remove(child)
        lasts.append(node)
        next_tokens.append(one.draw(base[node], 0))
    last = torch.tensor(lasts)
    return tree.ancestors[last], tree.depths[last], torch.tensor(next_tokens)


@pytest.mark.parametrize("shared", [False, True])
def test_bottom_up_is_wrong_for_shared_candidates(shared: bool) -> None:
    """Prevents a bottom-up rule for parallel heads: it is exact for independent draws only."""
    bottom_up = error(traversal, WIDE, "without_replacement", shared=shared)
    assert bottom_up > BROKEN if shared else bottom_up < EXACT
    assert error(by("without_replacement"), WIDE, "without_replacement", shared=shared) < EXACT


# --- batches, trees of their own, padding ---------------------------------------------------


class Fixed:
    """Outcomes from numbers that belong to a row and a site."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def _uniform(self, site: int, num: int = 1) -> Tensor:
        drawn = [
            torch.rand(num, generator=torch.Generator().manual_seed(97 * row + site))
            for row in self.rows
        ]
        return torch.stack(drawn).double()

    def accept(self, probability: Tensor, site: int) -> Tensor:
        """Compare."""
        return self._uniform(site)[:, 0] < probability

    def draw(self, probs: Tensor, site: int) -> Tensor:
        """Race."""
        return (probs / -self._uniform(site + 1000, probs.shape[-1]).log()).argmax(-1)


def random_case(num_rows: int, tree: Tree, vocab_size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, base_probs and draft_probs."""
    generator = torch.Generator().manual_seed(5)
    shape = (num_rows, tree.num_nodes, vocab_size)
    base, draft = (
        torch.randn(shape, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2)
    )
    noise = -torch.rand(shape, generator=generator, dtype=torch.float64).log()
    tokens = torch.zeros(shape[:2], dtype=torch.long)
    for node in range(tree.num_nodes):
        children = (tree.parents == node).nonzero().flatten()
        if not len(children):
            continue
        gumbel = -noise[:, node].log()
        tokens[:, children] = sample_siblings(draft[:, node], len(children), gumbel)
    return tokens, base, draft


RULES = {
    "without_replacement": (partial(reject, sampling="without_replacement"), MIXED),
    "chain": (partial(reject, sampling="chain"), Tree.chain(3)),
    "block": (lambda tokens, tree, *rest: block(tokens, *rest), Tree.chain(3)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_row_of_a_batch_is_the_row_alone(name: str) -> None:
    """Prevents rows that read each other's residuals, or walk in step with each other."""
    rule, tree = RULES[name]
    case = random_case(40, tree)
    tokens, base, draft = case
    path, num_accepted, token = rule(tokens, tree, base, draft, Fixed(list(range(40))))
    assert set(num_accepted.tolist()) == set(range(tree.max_depth + 1))
    for row in range(40):
        alone = [part[row : row + 1] for part in case]
        got = rule(alone[0], tree, *alone[1:], Fixed([row]))
        assert got[0].equal(path[row : row + 1])
        assert [int(got[1]), int(got[2])] == [int(num_accepted[row]), int(token[row])]


def test_trees_of_rows_are_read_as_one_tree_is() -> None:
    """Prevents a rule that looks at the first row's tree for all rows."""
    sampling = "without_replacement"
    others = [MIXED, Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0)])]
    rows = RowTrees.from_parents(torch.stack([tree.parents for tree in others]), 3)
    cases = [[part[:1] for part in random_case(1, tree)] for tree in others]
    tokens, base, draft = (torch.cat(parts) for parts in zip(*cases, strict=True))
    for start in range(0, 100, 2):
        chance = Fixed([start, start + 1])
        path, num_accepted, token = reject(tokens, rows, base, draft, chance, sampling)
        for row, (tree, case) in enumerate(zip(others, cases, strict=True)):
            alone = reject(case[0], tree, *case[1:], Fixed([start + row]), sampling)
            assert path[row].equal(alone[0][0])
            assert [int(num_accepted[row]), int(token[row])] == [int(alone[1]), int(alone[2])]


def test_padding_is_never_tested() -> None:
    """Prevents padding read as a refused token, which would change what is left."""
    tokens, base, draft = random_case(50, FLAT)
    only_first = tokens.clone()
    only_first[:, 2] = -1
    chance = Fixed(list(range(50)))
    got = reject(only_first, FLAT, base, draft, chance, "without_replacement")
    chain = reject(tokens[:, :2], Tree.chain(1), base, draft, chance, "without_replacement")
    for one, other in zip(got, chain, strict=True):
        assert one.equal(other)


def test_a_chain_may_end_earlier_in_some_rows() -> None:
    """Prevents block verification of tokens that stand behind the end of a row's chain."""
    tokens, base, draft = random_case(60, Tree.chain(3))
    cut = tokens.clone()
    cut[:, 2:] = -1
    cut[:, 3] = tokens[:, 3]  # not after padding
    chance = Fixed(list(range(60)))
    path, num_accepted, token = block(cut, base, draft, chance)
    short = block(tokens[:, :2], base[:, :2], draft[:, :2], chance)
    assert path[:, :2].equal(short[0])
    assert (path[:, 2:] == -1).all()
    assert num_accepted.equal(short[1])
    assert token.equal(short[2])
    assert num_accepted.max() == 1


def test_equal_distributions_accept_everything() -> None:
    """Prevents 0 / 0 where the drafter is the base model."""
    for name, (rule, tree) in RULES.items():
        tokens, _, draft = random_case(50, tree)
        got = rule(tokens, tree, draft.float(), draft.float(), Fixed(list(range(50))))
        assert not got[2].isnan().any(), name
        assert (got[1] >= 1).all(), name


# --- drawing candidates ---------------------------------------------------------------------


def test_siblings_are_drawn_in_order() -> None:
    """Prevents siblings sorted by token or by probability, which the rules would read wrongly."""
    generator = torch.Generator().manual_seed(1)
    num, probs = 60_000, torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    uniform = torch.rand(num, 4, generator=generator, dtype=torch.float64)
    drawn = sample_siblings(probs.expand(num, -1), 2, -(-uniform.log()).log())
    counts = (drawn[:, 0] * 4 + drawn[:, 1]).bincount(minlength=16).double()
    expected = probs[:, None] * probs / (1 - probs)[:, None] * num
    expected = expected.fill_diagonal_(0).flatten()
    assert counts[expected == 0].sum() == 0
    statistic = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert statistic < 39.6  # 11 degrees of freedom, alpha 4e-5


def test_no_token_without_probability_is_drawn() -> None:
    """Prevents a token from outside the draft's support being guessed, and its 0 / 0."""
    probs, noise = torch.tensor([[0.0, 1.0, 0.0]]), torch.zeros(1, 3)
    assert sample_siblings(probs, 3, noise).tolist() == [[1, -1, -1]]


def test_misuse_is_refused() -> None:
    """Prevents a misspelt way of sampling taken for another one."""
    tokens, base, draft = random_case(1, FLAT)
    with pytest.raises(ValueError, match="without_replacment"):
        reject(tokens, FLAT, base, draft, Fixed([0]), "without_replacment")
    with pytest.raises(ValueError, match="draft_probs"):
        reject(tokens, FLAT, base, None, Fixed([0]), "chain")


def test_enumeration_is_complete() -> None:
    """Prevents an enumeration that loses outcomes and compares what is left."""
    model, other = ToyModel(3, seed=1), ToyModel(3, seed=2)
    sampling = "without_replacement"
    step = verified(model, FLAT, ToyDrafter(other, FLAT, sampling), by(sampling))
    assert float(decoded_joint(model, step).sum()) == pytest.approx(1, abs=1e-12)
