"""Sample-and-walk against a slow reference and against the base model's exact distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree, default_tree
from specheads.verification.acceptance import merge_siblings, reject, walk, walk_on_host
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


def slow_walk(tokens: list[int], tree: Tree, base_tokens: list[int]) -> list[int]:
    """Walk node by node as one would on paper."""
    path, node = [0], 0
    while True:
        children = [i for i in range(tree.num_nodes) if int(tree.parents[i]) == node]
        hit = [i for i in children if tokens[i] >= 0 and tokens[i] == base_tokens[node]]
        if not hit:
            return path
        node = hit[0]
        path.append(node)


@pytest.mark.parametrize("seed", range(30))
def test_walk_on_the_host_is_the_walk_in_tensors(seed: int) -> None:
    """Prevents a CPU that accepts other paths than a GPU; trees, twins and padding at random."""
    generator = torch.Generator().manual_seed(seed)

    def random(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    num_nodes = 1 + int(random(12, 1))
    parents = torch.full((3, num_nodes), -1)
    for row in range(3):
        places: list[int] = []  # of parents: nodes stay sorted by depth if these never fall
        for node in range(1, num_nodes):
            lowest = places[-1] if places else 0
            places.append(lowest + int(random(node - lowest, 1)))
        parents[row, 1:] = torch.tensor(places, dtype=torch.long)
    tree = RowTrees.from_parents(parents, num_nodes - 1)
    tokens, base = random(3, 3, num_nodes) - 1, random(3, 3, num_nodes)
    path, num_accepted = walk(tokens, tree, base)
    found = walk_on_host(tokens.tolist(), parents.tolist(), base.tolist())
    assert [len(nodes) - 1 for nodes in found] == num_accepted.tolist()
    for row, nodes in enumerate(found):
        assert path[row, : len(nodes)].tolist() == nodes


@pytest.mark.parametrize("tree", [Tree.chain(0), Tree.chain(3), default_tree(4, 20)], ids=str)
def test_walk_equals_the_slow_one(tree: Tree) -> None:
    """Prevents accepting a node whose ancestor was refused, or stopping too early."""
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for _ in range(100):
        # distinct siblings from a small vocabulary, so that walks go deep
        tokens = (tree.ranks + torch.randint(3, (), generator=generator)) % 10
        base = torch.randint(4, (2, tree.num_nodes), generator=generator)
        rows = torch.stack([tokens, tokens])
        path, num_accepted = walk(rows, tree, base)
        for row in range(2):
            expected = slow_walk(tokens.tolist(), tree, base[row].tolist())
            assert path[row].tolist() == expected + [-1] * (tree.max_depth + 1 - len(expected))
            assert num_accepted[row] == len(expected) - 1
            seen.add(len(expected))
    assert len(seen) == tree.max_depth + 1


def test_padding_is_never_accepted() -> None:
    """Prevents Medusa's padding bug: a short path padded with token 0, and a base that says 0."""
    tree = Tree.chain(2)
    path, num_accepted = walk(torch.tensor([[5, 0, -1]]), tree, torch.tensor([[0, -1, 3]]))
    assert num_accepted.tolist() == [1]
    assert path.tolist() == [[0, 1, -1]]


def test_equal_siblings_do_no_harm() -> None:
    """Prevents a path that jumps between two siblings with the same token."""
    tree = Tree.from_choices([(0,), (1,), (1, 0)])
    path, num_accepted = walk(torch.tensor([[5, 7, 7, 8]]), tree, torch.tensor([[7, 8, 8, 1]]))
    assert num_accepted.tolist() == [2]
    assert path.tolist() == [[0, 2, 3]]


# --- exactness by enumeration ---------------------------------------------------------------

MODEL = ToyModel(3, seed=1)
TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0)])


def sampled_walk(
    tokens: Tensor, tree: Tree | RowTrees, base_probs: Tensor, draft_probs: Tensor, chance: Outcomes
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per node and walk."""
    base_tokens = torch.stack(
        [chance.draw(base_probs[:, node], node) for node in range(tree.num_nodes)], dim=1
    )
    path, num_accepted = walk(tokens, tree, base_tokens)
    rows = torch.arange(len(tokens))
    return path, num_accepted, base_tokens[rows, path[rows, num_accepted]]


def medusa_sampling(
    tokens: Tensor, tree: Tree, base_probs: Tensor, draft_probs: Tensor, chance: Outcomes
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw anew for every path, also at the nodes paths share; keep the longest, as Medusa does."""
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for number, line in enumerate(tree.paths.tolist()):
        nodes = [node for node in line if node >= 0]
        drawn = torch.stack(
            [chance.draw(base_probs[:, node], 100 * number + node) for node in nodes], dim=1
        )
        path, num_accepted = walk(tokens[:, nodes], Tree.chain(len(nodes) - 1), drawn)
        path = torch.where(path >= 0, torch.tensor(nodes)[path.clamp(min=0)], -1)
        path = torch.nn.functional.pad(path, (0, len(line) - len(nodes)), value=-1)
        token = drawn.gather(1, num_accepted[:, None])[:, 0]
        if best is None:
            best = path, num_accepted, token
        longer = num_accepted > best[1]
        best = (
            torch.where(longer[:, None], path, best[0]),
            torch.where(longer, num_accepted, best[1]),
            torch.where(longer, token, best[2]),
        )
    assert best is not None
    return best


def error(rule: Rule, tree: Tree, sampling: str, shared: bool = False) -> float:
    """Return the total variation distance of three decoded tokens to the model's."""
    draft = ToyDrafter(ToyModel(3, seed=2), tree, sampling, shared)
    return distance(MODEL, verified(MODEL, tree, draft, rule))


def test_sample_and_walk_keeps_the_distribution() -> None:
    """Prevents a rule that prefers drafted tokens; enumerated, so that no bias is too small."""
    assert error(sampled_walk, TREE, "none") < 1e-9
    chain = Tree.from_choices([(0,), (1,), (0, 0)])  # sampled candidates too
    assert error(sampled_walk, chain, "without_replacement", shared=True) < 1e-9


def test_the_enumeration_can_tell() -> None:
    """Prevents a vacuous test above: several draws for one prefix must show as an error."""
    assert error(medusa_sampling, Tree.from_choices([(0,), (1,), (0, 0)]), "none") > 1e-2


def test_greedy_walk_writes_the_greedy_text() -> None:
    """Prevents a walk that leaves the base model's own best tokens."""

    class Greedy(ToyModel):
        def probs(self, contexts: Tensor) -> Tensor:
            best = super().probs(contexts).argmax(-1)
            return torch.nn.functional.one_hot(best, self.vocab_size).double()

    model = Greedy(3, seed=1)
    draft = ToyDrafter(ToyModel(3, seed=2), TREE, "without_replacement")
    got = decoded_joint(model, verified(model, TREE, draft, sampled_walk))
    assert got.max() > 1 - 1e-9
    assert (got - model.joint(3)).abs().sum() < 1e-9


# --- trees of rows, equal siblings ----------------------------------------------------------


def random_rows(num_rows: int, num_nodes: int, max_depth: int) -> RowTrees:
    """Return random trees whose nodes are sorted by depth."""
    generator = torch.Generator().manual_seed(4)
    parents = []
    for _ in range(num_rows):
        depths, row = [0], [-1]
        for _ in range(1, num_nodes):
            lowest = depths[-1] - 1  # parents of this depth or one deeper keep the order
            allowed = [i for i, d in enumerate(depths) if lowest <= d < max_depth]
            pick = int(torch.randint(len(allowed), (), generator=generator))
            row.append(allowed[pick])
            depths.append(depths[row[-1]] + 1)
        parents.append(row)
    return RowTrees.from_parents(torch.tensor(parents), max_depth)


def one_tree(tree: RowTrees, row: int) -> RowTrees:
    """Return one row's tree."""
    return RowTrees.from_parents(tree.parents[row : row + 1], tree.max_depth)


def test_walk_goes_down_every_rows_own_tree() -> None:
    """Prevents a walk that follows the first row's tree in all rows."""
    tree = random_rows(50, 9, 3)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(-1, 2, (50, 9), generator=generator)
    base = torch.randint(2, (50, 9), generator=generator)
    path, num_accepted = walk(tokens, tree, base)
    for row in range(50):
        reached = {0}
        for node in range(1, 9):
            parent = int(tree.parents[row, node])
            if parent in reached and tokens[row, node] == base[row, parent]:
                reached.add(node)
        assert num_accepted[row] == max(int(tree.depths[row, node]) for node in reached)
        line = path[row, : int(num_accepted[row]) + 1].tolist()
        assert set(line) <= reached
        assert [int(tree.parents[row, node]) for node in line[1:]] == line[:-1]
        assert (path[row, len(line) :] == -1).all()
        alone = walk(tokens[row : row + 1], one_tree(tree, row), base[row : row + 1])
        assert alone[0].equal(path[row : row + 1])
    assert set(num_accepted.tolist()) == {0, 1, 2, 3}


def texts(tokens: Tensor, tree: RowTrees, row: int) -> set[tuple[int, ...]]:
    """Return the texts of a row's nodes that no padding stands in."""
    found = set()
    for line in tree.ancestors[row].tolist():
        text = tuple(int(tokens[row, node]) for node in line[1:] if node >= 0)
        if min(text, default=0) >= 0:
            found.add(text)
    return found


def test_equal_siblings_are_merged() -> None:
    """Prevents subtrees lost with the twin they hang under, and twins left among the moved."""
    tree = random_rows(50, 12, 3)
    tokens = torch.randint(-1, 3, (50, 12), generator=torch.Generator().manual_seed(2))
    tokens[:, 0] = 0
    merged, shape = merge_siblings(tokens, tree)
    assert (merged == tokens)[merged >= 0].all()
    assert shape.depths.equal(tree.depths)
    num_merged = 0
    for row in range(50):
        assert texts(merged, shape, row) == texts(tokens, tree, row)
        real = [i for i in range(1, 12) if merged[row, i] >= 0]
        siblings = [(int(shape.parents[row, i]), int(merged[row, i])) for i in real]
        assert len(set(siblings)) == len(siblings)
        num_merged += int((tokens[row] >= 0).sum()) - len(real) - 1
    assert num_merged > 50


def test_siblings_that_differ_stay_as_they_are() -> None:
    """Prevents padding merged with padding, and cousins taken for siblings."""
    tree = Tree.from_choices([(0,), (1,), (0, 0), (1, 0), (1, 1)])
    tokens = torch.tensor([[3, 5, 3, 1, 1, 2], [3, -1, -1, 1, 1, 2]])
    merged, shape = merge_siblings(tokens, tree)
    assert merged.equal(tokens)
    assert shape.parents.equal(tree.parents.expand(2, -1))


@pytest.mark.parametrize("rule", ["walk", "point masses"])
def test_equal_siblings_with_draws_of_their_own_must_be_merged(rule: str) -> None:
    """Prevents several chances for one prefix, or a refused token tried again, through twins."""
    tree = Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])

    def draft(contexts: Tensor, chance: Outcomes) -> tuple[Tensor, Tensor]:
        tokens, probs = ToyDrafter(MODEL, tree, "none")(contexts, chance)
        tokens[:, 2] = tokens[:, 1]
        tokens[:, 4] = 2 - tokens[:, 3].clamp(max=1)
        return tokens, probs

    def unmerged(
        tokens: Tensor, tree: Tree | RowTrees, base: Tensor, draft: Tensor, chance: Outcomes
    ) -> tuple[Tensor, Tensor, Tensor]:
        if rule == "walk":
            return sampled_walk(tokens, tree, base, draft, chance)
        return reject(tokens, tree, base, None, chance, "none")

    def merged(
        tokens: Tensor, tree: Tree, base: Tensor, draft: Tensor, chance: Outcomes
    ) -> tuple[Tensor, Tensor, Tensor]:
        return unmerged(*merge_siblings(tokens, tree), base, draft, chance)

    assert distance(MODEL, verified(MODEL, tree, draft, merged)) < 1e-9
    means = [
        expected_accepted(verified(MODEL, tree, draft, one), MODEL.nothing)
        for one in (unmerged, merged)
    ]
    assert means[0] < means[1] - 0.05
    if rule == "walk":
        assert distance(MODEL, verified(MODEL, tree, draft, unmerged)) > 1e-3
