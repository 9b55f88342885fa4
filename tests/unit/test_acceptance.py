"""Sample-and-walk against a slow reference and against the base model's exact distribution."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from specheads.acceptance import walk
from specheads.tree import Tree, default_tree

Prefix = tuple[int, ...]


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

V, LENGTH = 3, 3
TREE = Tree.from_choices([(0,), (1,), (0, 0), (1, 0)])


def base_probs(prefix: Prefix) -> Tensor:
    """Return a toy model's distribution after ``prefix``."""
    seed = 7 + sum((token + 1) * 31**i for i, token in enumerate(prefix))
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits.softmax(-1)


def guesses(prefix: Prefix) -> list[int]:
    """Return deterministic tokens for TREE: the toy's own favourites, second ones at depth 2."""
    order = base_probs(prefix).argsort(descending=True).tolist()
    return [prefix[-1], order[0], order[1], order[1], order[2]]


def node_prefix(prefix: Prefix, tokens: list[int], node: int) -> Prefix:
    """Return the tokens a node's own prediction is given."""
    line = [int(i) for i in TREE.ancestors[node] if i >= 0]
    return prefix[:-1] + tuple(tokens[i] for i in line)


def decode_exactly(draws_per_node: str) -> dict[Prefix, float]:
    """Enumerate every outcome of tree decoding; returns the distribution of LENGTH tokens."""
    done: dict[Prefix, float] = defaultdict(float)
    open_: dict[Prefix, float] = defaultdict(float)
    for token in range(V):
        open_[(token,)] += float(base_probs(())[token])
    while open_:
        prefix, weight = open_.popitem()
        if len(prefix) >= LENGTH:
            done[prefix[:LENGTH]] += weight
            continue
        tokens = guesses(prefix)
        probs = [base_probs(node_prefix(prefix, tokens, node)) for node in range(TREE.num_nodes)]
        for base in itertools.product(range(V), repeat=TREE.num_nodes):
            chance = weight
            for node, token in enumerate(base):
                chance *= float(probs[node][token])
            if draws_per_node == "one":
                drawn = torch.tensor([base])
                path, num_accepted = walk(torch.tensor([tokens]), TREE, drawn)
                nodes = path[0, : int(num_accepted) + 1].tolist()
                open_[prefix + tuple(base[i] for i in nodes)] += chance
                continue
            # Medusa's rule: every row of candidates draws anew at the nodes rows share
            for again in range(V):
                other = (again, *base[1:])
                rows = [
                    slow_walk(tokens, TREE, list(base)),
                    slow_walk(tokens, TREE, list(other)),
                ]
                best = max(rows, key=len)
                source = base if best is rows[0] else other
                new = prefix + tuple(source[i] for i in best)
                open_[new] += chance * float(probs[0][again])
    return done


def error(draws_per_node: str) -> float:
    """Return the total variation distance to the toy model's own joint distribution."""
    got = decode_exactly(draws_per_node)
    total = 0.0
    for text in itertools.product(range(V), repeat=LENGTH):
        truth = 1.0
        for i, token in enumerate(text):
            truth *= float(base_probs(text[:i])[token])
        total += abs(got[text] - truth)
    return total / 2


def test_sample_and_walk_keeps_the_distribution() -> None:
    """Prevents a rule that prefers drafted tokens; enumerated, so that no bias is too small."""
    assert error("one") < 1e-12


def test_the_enumeration_can_tell() -> None:
    """Prevents a vacuous test above: several draws for one prefix must show as an error."""
    assert error("several") > 1e-2
