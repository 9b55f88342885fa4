"""Trees grown at every step: the best ones, well formed, and exact to decode with."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

from specheads.attention.tree import RowTrees, grow_tree
from specheads.drafters import growing
from specheads.drafters.contract import FINAL, Prefill
from specheads.drafters.growing import Grown, OneTree, best_tree_on_host, best_trees
from specheads.drafters.heads import HeadsDrafter, HeadsState
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer, output_layer

Paths = dict[tuple[int, ...], float]


def all_paths(log_probs: list[list[float]]) -> Paths:
    """Return every path of ranks with its probability."""
    found: Paths = {}
    for depth in range(1, len(log_probs) + 1):
        for path in itertools.product(*(range(len(each)) for each in log_probs[:depth])):
            found[path] = math.exp(sum(log_probs[d][rank] for d, rank in enumerate(path)))
    return found


def brute_force(paths: Paths, num_nodes: int) -> float:
    """Return the most that any tree of num_nodes gains: every set of paths that is a tree."""
    return max(
        sum(paths[path] for path in chosen)
        for chosen in itertools.combinations(paths, num_nodes - 1)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )


def paths_of(parents: Tensor, slots: Tensor, num_ranks: int) -> list[tuple[int, ...]]:
    """Return each node's path of ranks, for one row; checks that the nodes are a sorted tree."""
    assert parents[0] == -1 and len(parents) == len(slots) + 1
    found: list[tuple[int, ...]] = [()]
    for node, (parent, slot) in enumerate(zip(parents[1:].tolist(), slots.tolist(), strict=True)):
        assert 0 <= parent <= node
        depth, rank = divmod(slot, num_ranks)
        assert depth == len(found[parent]), "a node of another head than its depth's"
        found.append((*found[parent], rank))
    assert [len(path) for path in found] == sorted(len(path) for path in found)
    assert len(set(found)) == len(found)
    return found


def alike(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [D, B, R] of heads that guess the same below all, and places."""
    below = log_probs[:, :, None].expand(-1, -1, log_probs.shape[-1], -1)
    return below, torch.arange(log_probs.shape[-1]).expand_as(below)


def heap_of(log_probs: Tensor, num_nodes: int) -> OneTree:
    """Return one row's tree, of log-probabilities [D, R]."""
    below, places = (each[:, 0].tolist() for each in alike(log_probs[:, None]))
    return best_tree_on_host(num_nodes, below, places)


# few distinct numbers, so that values tie, and certain and impossible guesses among them
LOGS = st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.0, -math.inf]) | st.floats(-5, 0)
SHAPES = st.sampled_from([(1, 6), (2, 2), (2, 3), (3, 2)])


@st.composite
def guesses(draw: st.DrawFn) -> list[list[float]]:
    """Draw log-probabilities of heads, in any order."""
    depth, ranks = draw(SHAPES)
    return [draw(st.lists(LOGS, min_size=ranks, max_size=ranks)) for _ in range(depth)]


@given(guesses(), st.integers(2, 8))
@settings(max_examples=80)
def test_the_tree_is_the_best_of_all(log_probs: list[list[float]], num_nodes: int) -> None:
    """A level cut too short, or a child kept without its parent where values tie."""
    paths = all_paths(log_probs)
    num_nodes = min(num_nodes, len(paths) + 1)
    parents, slots, _ = best_trees(num_nodes, *alike(torch.tensor(log_probs)[:, None]))
    nodes = paths_of(parents[0], slots[0], len(log_probs[0]))
    assert len(nodes) == num_nodes
    gain = sum(paths[node] for node in nodes[1:])
    assert gain == pytest.approx(brute_force(paths, num_nodes), rel=1e-5)
    rates = [[math.exp(each) for each in of_head] for of_head in log_probs]
    assert 1 + gain == pytest.approx(grow_tree(rates, num_nodes)[1], rel=1e-5)
    ordered = [sorted(of_head, reverse=True) for of_head in log_probs]
    on_host, host_slots = heap_of(torch.tensor(ordered), num_nodes)
    nodes = paths_of(torch.tensor(on_host), torch.tensor(host_slots), len(log_probs[0]))
    assert sum(all_paths(ordered)[node] for node in nodes[1:]) == pytest.approx(gain, rel=1e-5)


def test_rows_grow_their_own_trees() -> None:
    """Rows mixed up, or one row's tree for all; sizes as decoding uses them, against the heap."""
    log_probs = torch.randn(4, 5, 12).mul(2).log_softmax(-1).topk(8).values
    for num_nodes in (2, 16, 33):
        parents, slots, _ = best_trees(num_nodes, *alike(log_probs))
        assert parents.shape == (5, num_nodes)
        trees = []
        for row in range(5):
            nodes = paths_of(parents[row], slots[row], 8)
            heap, _ = grow_tree(log_probs[:, row].exp().tolist(), num_nodes)
            assert sorted(nodes[1:]) == sorted(heap.choices)
            trees.append(tuple(sorted(nodes)))
        assert len(set(trees)) > 1 or num_nodes == 2
        grown = [heap_of(log_probs[:, row], num_nodes) for row in range(5)]
        assert [each[0] for each in grown] == parents.tolist()
        assert [each[1] for each in grown] == slots.tolist()
        tree = RowTrees.from_parents(parents, 4)
        listed = RowTrees.from_lists(parents.tolist(), 4)
        for name in ("parents", "depths", "tree_mask", "ancestors"):
            assert getattr(listed, name).equal(getattr(tree, name))
        depths = tree.depths
        assert depths.tolist() == [sorted(row) for row in depths.tolist()]


def test_small_and_certain_trees() -> None:
    """More nodes asked for than there are prefixes; heads that are certain, so that all tie."""
    parents, slots, _ = best_trees(50, *alike(torch.zeros(2, 1, 2)))
    assert len(paths_of(parents[0], slots[0], 2)) == 7
    parents, slots, _ = best_trees(9, *alike(torch.zeros(3, 1, 4)))
    paths_of(parents[0], slots[0], 4)
    parents, slots, _ = best_trees(1, *alike(torch.zeros(3, 2, 4)))
    assert parents.tolist() == [[-1], [-1]] and slots.shape == (2, 0)


def test_nothing_waits_for_the_device() -> None:
    """A synchronisation in every step costs a GPU more than the tree gains."""
    growing._starts_above.cache_clear()
    try:
        with FakeTensorMode():  # has no values: reading one raises
            parents, slots, _ = best_trees(16, *alike(torch.zeros(4, 3, 8)))
            tree = RowTrees.from_parents(parents, 4)
        assert tuple(parents.shape) == (3, 16) and tuple(slots.shape) == (3, 15)
        assert tuple(tree.tree_mask.shape) == (3, 16, 16)
    finally:
        growing._starts_above.cache_clear()


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


@torch.no_grad()
def test_nodes_hold_the_most_probable_continuations(
    medusa: tuple[LlamaForCausalLM, MedusaHeads, OutputLayer],
) -> None:
    """A node filled by the wrong head or rank, or temperatures of the wrong head."""
    _, heads, output = medusa
    temperatures = [0.5, 2.0, 1.0]
    drafter = HeadsDrafter(heads, output, Grown(12, num_ranks=11, temperatures=temperatures))
    hidden, root = 4 * torch.randn(2, 5, 32), torch.tensor([7, 8])
    prefill = Prefill(
        [[0] * 5] * 2, torch.zeros(2, 5, dtype=torch.long), [5, 3], {FINAL: hidden}, root
    )
    candidates = drafter.propose(drafter.start(prefill))
    assert isinstance(candidates.tree, RowTrees) and candidates.tree.num_nodes == 12
    last = torch.stack([hidden[0, 4], hidden[1, 2]])
    scaled = heads.logits(last, output) / torch.tensor(temperatures)[:, None, None]
    probs = scaled.softmax(-1)  # [K, B, V]
    for row in range(2):
        best = probs[:, row].topk(11)
        rates = best.values.tolist()
        tree, _ = grow_tree(rates, 12)
        wanted = {
            tuple(int(best.indices[d, rank]) for d, rank in enumerate(choice))
            for choice in tree.choices
        }
        tokens = candidates.tokens[row]
        assert tokens[0] == root[row]
        lines = candidates.tree.ancestors[row]
        assert {tuple(tokens[line[line > 0]].tolist()) for line in lines[1:]} == wanted


def test_settings_are_checked(
    medusa: tuple[LlamaForCausalLM, MedusaHeads, OutputLayer],
) -> None:
    """A tree deeper than the heads, or a list of temperatures read for the wrong heads."""
    _, heads, output = medusa
    with pytest.raises(ValueError, match="num_nodes must be at least 2"):
        HeadsDrafter(heads, output, Grown(1))
    with pytest.raises(ValueError, match="temperatures must be positive, one per head"):
        HeadsDrafter(heads, output, Grown(8, temperatures=[1.0, 1.0]))
    with pytest.raises(ValueError, match="temperatures must be"):
        HeadsDrafter(heads, output, Grown(8, temperatures=[1.0, 0.0, 1.0]))


def test_a_device_grows_what_the_host_grows(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: LlamaForCausalLM
) -> None:
    """Prevents other trees on a GPU, whose branch no test on a CPU would go through."""
    heads = MedusaHeads(4, 1, 32, 272)
    drafter = HeadsDrafter(heads, output_layer(tiny_llama), Grown(12))
    predict = heads.snapshot(output_layer(tiny_llama))
    state = HeadsState(torch.arange(3), torch.randn(3, 32), predict)
    on_host = drafter.propose(state)
    monkeypatch.setattr(growing, "HOSTS", ())
    on_device = drafter.propose(state)
    assert on_host.tokens.equal(on_device.tokens)
    for name in ("parents", "depths", "tree_mask", "ancestors"):
        assert getattr(on_host.tree, name).equal(getattr(on_device.tree, name))
