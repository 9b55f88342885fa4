"""Trees that sequential heads grow at every step, against every prefix there is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

from specheads.attention.tree import RowTrees, default_tree
from specheads.drafters import growing
from specheads.drafters import heads as drafter_module
from specheads.drafters.contract import FINAL, Candidates
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsDrafter, HeadsState, heads_drafter
from specheads.models.heads import MedusaHeads
from specheads.models.output import OutputLayer
from specheads.verification.sampling import Sampler
from tests.drafters.test_sequential import build, one_by_one, prefill

Path = tuple[int, ...]
TEMPERATURES = [0.5, 2.0, 1.0]


def drafter_of(
    base: LlamaForCausalLM, heads: MedusaHeads, num_nodes: int, **settings: Any
) -> HeadsDrafter:
    """Return a drafter; the output layer squashes logits, as some models' do."""
    output = OutputLayer(base.lm_head, scale=2.0, softcap=8.0)
    return heads_drafter(base, heads, output, Grown(num_nodes, **settings))


def every_prefix(
    drafter: HeadsDrafter,
    base: LlamaForCausalLM,
    hidden: Tensor,
    root: int,
    temperatures: list[float],
) -> dict[Path, float]:
    """Return the probability of every path of the best ranks, node by node."""
    logits = one_by_one(drafter.heads, base, drafter.output, hidden, root)
    found: dict[Path, float] = {(): 1.0}
    for depth in range(drafter.max_depth):
        for path in [path for path in found if len(path) == depth]:
            probs = (logits(path) / temperatures[depth]).softmax(-1).topk(drafter.num_ranks)
            for prob, token in zip(probs.values.tolist(), probs.indices.tolist(), strict=True):
                found[*path, token] = found[path] * prob
    return found


def paths_of(candidates: Candidates, row: int) -> list[Path]:
    """Return each node's path of tokens in one row."""
    assert isinstance(candidates.tree, RowTrees)
    tokens = candidates.tokens[row]
    lines = candidates.tree.ancestors[row]
    return [tuple(tokens[line[line > 0]].tolist()) for line in lines]


@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("kind", ["markov_pruned", "hydra", "everything"])
@torch.no_grad()
def test_the_tree_is_the_best_of_all_prefixes(
    tiny_llama: LlamaForCausalLM, kind: str, host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level cut too short, a head asked too early, or probabilities of another path."""
    monkeypatch.setattr(growing, "HOSTS", ("cpu",) if host else ())
    monkeypatch.setattr(drafter_module, "CANDIDATES", 272)  # all there are
    heads = build(tiny_llama, kind)
    sure = [0.02, 0.02, 5.0]  # all but two nodes on the last level
    for num_nodes, num_ranks, temperatures in (
        (2, 4, TEMPERATURES),
        (7, 4, TEMPERATURES),
        (15, 4, TEMPERATURES),
        (9, 8, sure),
    ):
        drafter = drafter_of(
            tiny_llama,
            heads,
            num_nodes,
            num_ranks=num_ranks,
            temperatures=temperatures,
            width=num_nodes,
        )
        read = prefill(tiny_llama, 3)
        candidates = drafter.propose(drafter.start(read))
        assert candidates.tokens.shape == (3, num_nodes)
        assert candidates.tokens[:, 0].equal(read.root)
        for row, hidden in enumerate(read.last_hidden(FINAL)):
            values = every_prefix(drafter, tiny_llama, hidden, int(read.root[row]), temperatures)
            best = sorted(values, key=values.__getitem__, reverse=True)[:num_nodes]
            assert sorted(paths_of(candidates, row)) == sorted(best)


@pytest.mark.parametrize("kind", ["markov", "hydra"])
@torch.no_grad()
def test_a_device_grows_what_the_host_grows(
    tiny_llama: LlamaForCausalLM, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents other trees on a GPU, whose branch no test on a CPU would go through."""
    heads = build(tiny_llama, kind)
    depths = set()
    for num_nodes, width in ((2, 3), (12, 1), (12, 3), (30, 4), (60, 8)):
        drafter = drafter_of(tiny_llama, heads, num_nodes, width=width)
        read = prefill(tiny_llama, 3)
        state = drafter.start(read)
        on_host = drafter.propose(state)
        monkeypatch.setattr(growing, "HOSTS", ())
        on_device = drafter.propose(state)
        monkeypatch.undo()
        assert on_host.tokens.equal(on_device.tokens)
        for name in ("parents", "depths", "tree_mask", "ancestors"):
            assert getattr(on_host.tree, name).equal(getattr(on_device.tree, name))
        assert isinstance(on_host.tree, RowTrees)
        depths |= set(on_host.tree.depths.max(1).values.tolist())
        for row in range(3):
            paths = paths_of(on_host, row)
            assert len(set(paths)) == num_nodes, "equal siblings"
            asked = [{path[:-1] for path in paths if len(path) == depth} for depth in (2, 3)]
            assert kind == "markov" or max(map(len, asked)) <= width
    assert len(depths) > 1, "some trees end before the last head"


@pytest.mark.parametrize("kind", ["markov", "markov_pruned"])
@torch.no_grad()
def test_guesses_in_two_waves_are_those_of_level_after_level(
    tiny_llama: LlamaForCausalLM, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another position's noise or another depth's temperature only shows as low acceptance."""
    monkeypatch.setattr(drafter_module, "CANDIDATES", 272)  # all there are
    heads = build(tiny_llama, kind)
    drawn = Sampler(temperature=0.7, top_k=50, seed=3)
    read = replace(prefill(tiny_llama, 3), sampler=drawn, vocab_size=272)
    grown = drafter_of(tiny_llama, heads, 12, width=12, temperatures=TEMPERATURES)
    for drafter in (grown, heads_drafter(tiny_llama, heads, grown.output, default_tree(3, 12))):
        at_once = drafter.propose(drafter.start(read))
        assert drafter.linked
        drafter.linked = False
        in_turn = drafter.propose(drafter.start(read))
        assert at_once.tokens.equal(in_turn.tokens)
        assert at_once.tree.parents.equal(in_turn.tree.parents)
    monkeypatch.setattr(drafter_module, "MOST_OUTPUTS", heads.num_outputs - 1)
    assert not drafter_of(tiny_llama, heads, 12).linked


@pytest.mark.parametrize("kind", ["markov", "hydra"])
@torch.no_grad()
def test_nothing_waits_for_the_device(tiny_llama: LlamaForCausalLM, kind: str) -> None:
    """A synchronisation per level costs a GPU more than the tree gains."""
    heads = build(tiny_llama, kind)
    drafter = drafter_of(tiny_llama, heads, 12)
    state = HeadsState(torch.tensor([3, 4]), torch.randn(2, 32), drafter.steps())
    growing._starts_above.cache_clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):  # has no values: reading one raises
            parents, _, values = drafter.grow(state)
    finally:
        growing._starts_above.cache_clear()
    assert tuple(parents.shape) == tuple(values.shape) == (2, 12)


def test_settings_are_checked(tiny_llama: LlamaForCausalLM) -> None:
    """A beam of nothing, and temperatures of other heads."""
    heads = build(tiny_llama, "hydra")
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        drafter_of(tiny_llama, heads, 8, width=0)
    with pytest.raises(ValueError, match="temperatures must be positive, one per head"):
        drafter_of(tiny_llama, heads, 8, temperatures=[1.0, 1.0])
