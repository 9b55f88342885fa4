"""Merged trees: the same tokens, no fewer accepted than the best member's, everyone informed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Tree, batched, default_tree
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import FINAL, TRUNK, Candidates, Drafter, Prefill, StepResult
from specheads.drafters.growing import Grown, pack
from specheads.drafters.heads import heads_drafter
from specheads.drafters.length import StepCosts
from specheads.drafters.lookahead import LookaheadDrafter
from specheads.drafters.lookup import NgramDrafter, SuffixDrafter
from specheads.drafters.merge import (
    FIRST,
    LATER,
    MEMORY,
    PRIOR,
    DrafterValues,
    HybridDrafter,
    Rates,
    Trie,
)
from specheads.measure.clock import pad_left
from specheads.models.output import output_layer
from specheads.verification.sampling import Sampler
from tests.models.test_mtp_drafters import counting
from tests.ragged import ROWS, new_tokens, padded
from tests.zoo import VOCAB, build

NUM_NEW = 32
Path = tuple[int, ...]


def paths_of(candidates: Candidates, row: int) -> list[Path | None]:
    """Return every node's text below the root; a probe's is in negative numbers, padding's None."""
    parents = batched(candidates.tree, candidates.tree.parents)
    above = parents.expand_as(candidates.tokens)[row].tolist()
    tokens, inputs = candidates.tokens[row].tolist(), candidates.inputs[row].tolist()
    paths: list[Path | None] = [()]
    for node in range(1, len(tokens)):
        path = paths[above[node]]
        token = tokens[node] if tokens[node] >= 0 else -1 - inputs[node]
        paths.append(None if path is None or inputs[node] < 0 else (*path, token))
    return paths


def accepted(paths: Sequence[Path | None], text: Sequence[int]) -> int:
    """Return how many tokens of ``text`` a tree with these paths gives."""
    return max(len(path) for path in paths if path is not None and path == tuple(text[: len(path)]))


@dataclass
class Watched:
    """A drafter's state, and what it last proposed for which texts."""

    inner: Any
    texts: list[list[int]]
    candidates: Candidates | None = None


class Watch:
    """Another drafter, held to what a step must tell it.

    Args:
        inner: the drafter.
        base: to ask what follows each of its nodes; None does not ask.
    """

    deterministic = True

    def __init__(self, inner: Drafter, base: PreTrainedModel | None = None) -> None:
        self.inner, self.base, self.taps = inner, base, inner.taps
        self.asked = self.missed = 0

    def start(self, prefill: Prefill) -> Watched:
        """Note the texts."""
        roots = prefill.root.tolist()
        texts = [[*ids, root] for ids, root in zip(prefill.ids, roots, strict=True)]
        return Watched(self.inner.start(prefill), texts)

    def propose(self, state: Watched) -> Candidates:
        """Note what is proposed."""
        state.candidates = self.inner.propose(state.inner)
        return state.candidates

    def observe(self, state: Watched, result: StepResult) -> Watched:
        """Compare what the base is said to have said with what it says."""
        assert state.candidates is not None and result.own is not None
        assert result.own.shape == state.candidates.tokens.shape
        if self.base is not None:
            for row, text in enumerate(state.texts):
                self._compare(paths_of(state.candidates, row), row, text, result)
        state.inner = self.inner.observe(state.inner, result)
        state.texts = [text + new for text, new in zip(state.texts, result.new_tokens, strict=True)]
        return state

    def _compare(
        self, paths: list[Path | None], row: int, text: list[int], result: StepResult
    ) -> None:
        assert self.base is not None and result.own is not None
        for path, node in zip(paths, result.own[row].tolist(), strict=True):
            if path is None or node < 0:
                self.missed += path is not None
                continue
            if path and path[-1] >= 0 > int(result.tokens[row, node]):
                continue  # beyond the limit
            read = [token if token >= 0 else -1 - token for token in path]
            logits = self.base(torch.tensor([text + read])).logits[0, -1]
            assert int(result.base_tokens[row, node]) == int(logits.argmax())
            for tap in self.taps:
                assert result.hidden[tap].shape[1] == result.tree.num_nodes
            self.asked += 1

    def select(self, state: Watched, rows: Tensor) -> Watched:
        """Keep some rows."""
        kept = rows.tolist()
        return Watched(self.inner.select(state.inner, rows), [state.texts[row] for row in kept])


class Judge:
    """A hybrid whose every step is compared with what each member alone would have gained."""

    deterministic = True

    def __init__(self, hybrid: HybridDrafter, truth: list[list[int]]) -> None:
        self.hybrid, self.taps = hybrid, hybrid.taps
        self.left = [list(row[1:]) for row in truth]
        self.steps = 0
        self.gains: list[int] = [0] * len(hybrid.members)
        self.beaten = 0  # steps that gained more than the first member alone

    def start(self, prefill: Prefill) -> Any:
        """Start."""
        return self.hybrid.start(prefill)

    def propose(self, state: Any) -> Candidates:
        """Ask the members apart, and together."""
        alone = [
            member.propose(own)
            for member, own in zip(self.hybrid.members, state.members, strict=True)
        ]
        merged = self.hybrid.propose(state)
        self.lengths = []
        for row, text in enumerate(self.left):
            each = [accepted(paths_of(candidates, row), text[:-1]) for candidates in alone]
            assert accepted(paths_of(merged, row), text[:-1]) == max(each)
            self.lengths.append(each)
        return merged

    def observe(self, state: Any, result: StepResult) -> Any:
        """Compare."""
        for row, new in enumerate(result.new_tokens):
            each = self.lengths[row]
            assert new == self.left[row][: len(new)]
            assert len(new) == max(each) + 1
            self.left[row] = self.left[row][len(new) :]
            self.steps += 1
            self.gains = [sum(both) for both in zip(self.gains, each, strict=True)]
            self.beaten += max(each) > each[0]
        return self.hybrid.observe(state, result)

    def select(self, state: Any, rows: Tensor) -> Any:
        """Keep some rows."""
        self.left = [self.left[row] for row in rows.tolist()]
        return self.hybrid.select(state, rows)


def counting_prompts() -> list[Tensor]:
    """Return texts that count, each twice over the same numbers and each with a slip of its own."""
    rows = []
    for start, slip, length in ((3, 40, 9), (20, 7, 12), (50, 12, 5)):
        run = [(start + i) % VOCAB for i in range(length)]
        rows.append(torch.tensor([[*run, slip, *run, slip, start]]))
    return rows


CASES = [("parallel", False, 0.0), ("parallel", True, 1.0), ("causal", False, 0.7)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("variant", "dynamic", "temperature"), CASES)
def test_a_hybrid_accepts_what_its_best_member_would(
    variant: str, dynamic: bool, temperature: float, rows: int
) -> None:
    """Heads told of the wrong node, or guesses lost in the merge, only show as fewer accepted."""
    base, heads = counting("llama", variant)
    output = output_layer(base)
    ids, mask = pad_left(counting_prompts()[:rows])
    settings: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": NUM_NEW,
        "sampler": Sampler(temperature=temperature, seed=3),
    }

    def member() -> Drafter:
        if dynamic:
            return heads_drafter(base, heads, output, Grown(12))
        return heads_drafter(base, heads, output, default_tree(3, 12))

    plain = plain_decode(base, ids, **settings)
    truth = [row.new_tokens for row in plain.rows]
    hybrid = HybridDrafter([member(), NgramDrafter(), SuffixDrafter()])
    judge = Judge(hybrid, truth)
    result = decode(base, judge, ids, **settings)
    assert new_tokens(result) == truth
    alone = decode(base, member(), ids, **settings)
    if rows > 1:
        assert judge.beaten, "n-grams gave nothing beside the heads: nothing was merged"
    assert judge.steps <= sum(len(row.accept_lengths) for row in alone.rows)


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), ("llama", 3), ("bloom", 1)])
@pytest.mark.parametrize("num_nodes", [0, 6])
@torch.no_grad()
def test_members_are_told_of_their_own_nodes(name: str, rows: int, num_nodes: int) -> None:
    """A member that reads another's node learns n-grams that the base never said."""
    base = build(name, std=0.5)
    prompts = [torch.cat([row, row], dim=1) for row in ROWS[:rows]]  # so that there are guesses
    watched = [Watch(LookaheadDrafter(3, 3, 3), base), Watch(SuffixDrafter(6), base)]
    hybrid = HybridDrafter([HybridDrafter(watched, num_nodes), Watch(NgramDrafter(), base)])
    settings: dict[str, Any] = {"max_new_tokens": 14, **padded(prompts)}
    result = decode(base, hybrid, **settings)
    assert new_tokens(result) == new_tokens(plain_decode(base, **settings))
    assert min(each.asked for each in watched) > (2 if name == "bloom" else 20)
    if not num_nodes:
        assert bool(watched[0].missed) == (name == "bloom")  # which reads no window


class Fixed:
    """Proposes given paths, per row."""

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(self, rows: Sequence[Sequence[Path]], taps: tuple[str, ...] = ()) -> None:
        self.rows, self.taps, self.sampling = rows, taps, "none"
        self.told: list[StepResult] = []
        self.asked = 0

    def start(self, prefill: Prefill) -> None:
        """Nothing to remember."""

    def propose(self, state: None) -> Candidates:
        """Lay the paths out, and every token above 90 as a probe."""
        self.asked += 1
        parents, tokens, inputs = [], [], []
        for row in self.rows:
            nodes: dict[Path, int] = {(): 0}
            ends = sorted({path[:n] for path in row for n in range(1, len(path) + 1)}, key=len)
            for path in ends:
                nodes[path] = len(nodes)
            parents.append([-1, *(nodes[path[:-1]] for path in ends)])
            inputs.append([1, *(path[-1] for path in ends)])
            tokens.append([each if each <= 90 else -1 for each in inputs[-1]])
        found = pack(list(zip(tokens, parents, strict=True)), torch.device("cpu"), inputs=inputs)
        return replace(found, sampling=self.sampling)

    def observe(self, state: None, result: StepResult) -> None:
        """Note what was said."""
        self.told.append(result)

    def select(self, state: None, rows: Tensor) -> None:
        """Nothing to select."""


def prefill(rows: int) -> Prefill:
    """Return a prompt of two tokens per row."""
    ids = torch.zeros(rows, 2, dtype=torch.long)
    return Prefill(ids.tolist(), ids, [2] * rows, {}, torch.ones(rows, dtype=torch.long))


def result_of(candidates: Candidates, new: list[list[int]]) -> StepResult:
    """Return what a step gained."""
    rows = torch.zeros(len(new), dtype=torch.long)
    tokens = candidates.tokens
    path = rows[:, None]
    return StepResult(candidates.tree, tokens, tokens, {}, path, rows, rows, new)


TREES = st.lists(
    st.lists(st.lists(st.sampled_from([0, 1, 2, 91, 92]), min_size=1, max_size=4), max_size=5),
    min_size=2,
    max_size=2,
)


@given(st.lists(TREES, min_size=1, max_size=3), st.sampled_from([0, 2, 4]))
@settings(max_examples=100)
def test_merging_shares_equal_prefixes(members: list[list[list[list[int]]]], num: int) -> None:
    """A prefix verified twice costs a node; one lost costs what hangs under it."""
    fixed = [Fixed([[tuple(path) for path in row] for row in rows]) for rows in members]
    hybrid = HybridDrafter(fixed, num)
    state = hybrid.start(prefill(2))
    merged = hybrid.propose(state)
    depths = batched(merged.tree, merged.tree.depths).expand_as(merged.tokens)
    assert (depths.diff(dim=1) >= 0).all(), "nodes are to be sorted by depth"
    hybrid.observe(state, result_of(merged, [[0], [1]]))
    for row in range(2):
        found = [path for path in paths_of(merged, row) if path is not None]
        alone = [paths_of(each.propose(None), row) for each in fixed]
        wanted = {path for paths in alone for path in paths if path is not None}
        assert len(found) == len(set(found)) and set(found) <= wanted
        probed = {path for path in wanted if path and path[-1] < 0}
        free = {path[:n] for path in probed for n in range(len(path) + 1)} | {()}
        assert free <= set(found)
        assert len(found) == (min(len(wanted), len(free) + num - 1) if num else len(wanted))
        everything = paths_of(merged, row)
        for each, paths in zip(fixed, alone, strict=True):
            own = each.told[-1].own
            assert own is not None
            for path, node in zip(paths, own[row].tolist(), strict=True):
                if path is None or path not in found:
                    assert node == -1
                else:
                    assert everything[node] == path


def test_nodes_go_to_whoever_is_right_of_late() -> None:
    """Values that never change leave a member that is always wrong its share of the tree."""
    right, wrong = Fixed([[(5, 6, 7)]]), Fixed([[(8, 8, 8)]])
    hybrid = HybridDrafter([wrong, right], num_nodes=4)
    state = hybrid.start(prefill(1))
    for _ in range(8):
        merged = hybrid.propose(state)
        state = hybrid.observe(state, result_of(merged, [[5, 6, 7, 1]]))
    assert merged.tokens.tolist() == [[1, 5, 6, 7]]
    assert isinstance(merged.tree, Tree) and merged.tree.max_depth == 3
    both = HybridDrafter([wrong, right])
    first = both.propose(replace(both.start(prefill(1)), rates=state.rates)).tokens[0, 1:3]
    assert first.tolist() == [5, 8], "models that take chains only follow the first child"
    for _ in range(3 * MEMORY):  # what was left out is judged too, or nobody ever came back
        merged = hybrid.propose(state)
        state = hybrid.observe(state, result_of(merged, [[8, 8, 8, 1]]))
    assert merged.tokens.tolist() == [[1, 8, 8, 8]]
    rows = HybridDrafter([Fixed([[(5, 6)], [(5, 6)]]), Fixed([[(8, 8)], [(8, 8)]])], num_nodes=3)
    apart = rows.start(prefill(2))
    for _ in range(6):
        merged = rows.propose(apart)
        apart = rows.observe(apart, result_of(merged, [[5, 6, 1], [8, 8, 1]]))
    assert merged.tokens.tolist() == [[1, 5, 6], [1, 8, 8]], "a row learns from its own text"
    apart = rows.select(apart, torch.tensor([1]))
    assert apart.rates[0].of((2, 1, 0, 0)) > 0.8 > apart.rates[0].of((1, 1, 0, 0))


def test_trees_are_as_large_as_pays() -> None:
    """A tree of fixed size makes every step of a text with nothing to copy dearer."""
    chain, other = Fixed([[(5, 6, 7)]]), Fixed([[(8, 8, 8)]])
    costs = StepCosts(0, [0, 1.5, 1.5, 2, 2.5, 4.5, 5.5, 6.5])
    hybrid = HybridDrafter([chain, other], costs=[costs, costs])
    state = hybrid.start(prefill(1))
    sizes = []
    for text in [[5, 6, 7, 1]] * 20 + [[3]] * 40:
        merged = hybrid.propose(state)
        trie = state.tries[0]
        values = trie.values(state.rates[0])
        found = sorted(values[1:], reverse=True)
        speeds = [(1 + sum(found[:n])) / costs.verify[n + 1] for n in range(len(found))]
        sizes.append(merged.tokens.shape[1])
        assert sizes[-1] == 1 + speeds.index(max(speeds))
        tokens, cost = trie.best(values, costs.verify)
        assert tokens / cost == pytest.approx(max(speeds)) and cost in costs.verify
        state = hybrid.observe(state, result_of(merged, [text]))
    assert sizes[19] == 4 and sizes[-1] <= 2
    small = HybridDrafter([chain, other], num_nodes=2, costs=[costs, costs])
    assert small.propose(replace(state, members=[None, None])).tokens.shape[1] == 2


def test_members_are_asked_where_it_pays() -> None:
    """A draft model that writes what a copy already holds makes every step dearer."""
    rows = [[(5, 6, 7)], [(5, 6, 7)]]
    cheap, dear = Fixed(rows), Fixed([[(9,)], [(9,)]])
    verify = [0, 1, 1.1, 1.2, 1.3, 1.4]
    costs = [StepCosts(0.4, verify), StepCosts(0, verify)]
    hybrid = HybridDrafter([dear, cheap], costs=costs)  # the free one is asked first all the same
    state = hybrid.start(prefill(2))
    copied, written = [5, 6, 7, 1], [9, 1]
    for text in (copied, written), (copied, copied), (copied, copied):
        found = []
        for _ in range(30):
            merged = hybrid.propose(state)
            found.append([9 in row for row in merged.tokens.tolist()])
            state = hybrid.observe(state, result_of(merged, list(text)))
        if text[1] is written:
            assert all(row[1] for row in found[-15:]), "it is worth its cost there"
    assert sum(map(sum, found)) <= 6, "asked for copies, beyond a try now and then"
    assert dear.asked < cheap.asked == 90
    assert dear.told[-1].own.numel() == 0, "it was told of nodes that it never proposed"
    for _ in range(100):
        merged = hybrid.propose(state)
        state = hybrid.observe(state, result_of(merged, [written, written]))
    assert all(9 in row for row in merged.tokens.tolist()), "nobody comes back"


def test_a_price_counts_as_deep_as_the_guesses_go() -> None:
    """Prevents members that look free, or that pay for every node of a level."""
    wide, free = Fixed([[(9, 9), (8, 8), (7, 7)]]), Fixed([[(5,)]])
    verify = [0, 1, 1, 1, 1, 1, 1, 1, 1]
    hybrid = HybridDrafter([free, wide], costs=[StepCosts(0, verify), StepCosts(0.25, verify)])
    state = hybrid.start(prefill(1))
    learned: list[tuple[int, float, float, float]] = []
    state.values[0].learn = lambda *what: learned.append(what)  # type: ignore[method-assign]
    hybrid.propose(state)
    values = state.tries[0].values(state.rates[0])
    assert learned == [(1, pytest.approx(sum(values) - 1 - FIRST[0]), 0.5, FIRST[0])]


def test_asking_pays_where_a_place_is_open() -> None:
    """Asking where a copy is sure costs as much as where it helps, and seems to help as much."""
    worth = DrafterValues()
    assert worth.pays(0, 9.0, 1.0, 1.0), "nothing is known of it"
    for _ in range(30):
        worth.learn(0, 1.0, 0.5, 0.5)  # two tokens for a place that is open
    assert worth.pays(0, 2.0, 1.0, 0.4) and not worth.pays(0, 2.0, 1.0, 0.6)
    assert worth.pays(0, 2.0, 2.0, 0.6), "a step that costs more anyway"
    assert worth.pays(1, 9.0, 1.0, 1.0), "nor of another one"
    for _ in range(30):
        worth.learn(0, 0.0, 0.5, 1.0)  # says nothing
    assert worth.pays(0, 2.0, 1.0, 0.4)
    for _ in range(30):
        worth.learn(0, 0.0, 0.5, 0.0)
    assert not worth.pays(0, 1.0, 1.0, 0.0)
    asked = [worth.pays(0, 1.0, 1.0, 0.0) for _ in range(60)]
    assert any(asked), "nobody comes back"


def test_tokens_that_a_copy_gives_next_are_worth_little() -> None:
    """At a gap of one token asking seems to pay, and the copy behind it would have been free."""
    worth = DrafterValues()
    for _ in range(30):
        worth.learn(0, 1.5, 1.0, 0.0)
    worth.stepped(1, 1.0)
    assert worth.pays(0, 1.0, 1.0, 0.0)
    for _ in range(10):
        assert not worth.pays(0, 9.0, 1.0, 0.9)  # a copy at hand
        worth.stepped(9, 1.0)
    assert worth.pays(0, 1.0, 1.0, 0.0), "what followed no gap says nothing"
    for _ in range(10):
        worth.pays(0, 1.0, 1.0, 0.0)
        worth.stepped(1, 1.0)
        worth.pays(0, 9.0, 1.0, 0.9)
        worth.stepped(9, 1.0)
    assert not worth.pays(0, 1.0, 1.0, 0.0)


def test_rates_are_running_means() -> None:
    """Judging guesses below a wrong one would call all deep guesses hopeless."""
    trie, rates = Trie(1), Rates()
    trie.add(0, [1, 5, 6, 9], [-1, 0, 1, 0], [1, 5, 6, 9])
    trie.add(1, [1, 5, 7], [-1, 0, 1], [1, 5, 7])
    kinds = {
        "both": (3, 1, 0, 0),
        "second": (1, 1, 1, 0),
        "own": (1, 2, 0, 0),
        "other": (2, 2, 0, 0),
    }
    assert set(trie.kinds) - {None} == set(kinds.values())
    first, both = FIRST[0], 1 - (1 - FIRST[0]) ** 2
    assert rates.of(kinds["own"]) == first and rates.of(kinds["second"]) == LATER
    assert rates.of(kinds["both"]) == pytest.approx(both)
    trie.learn(rates, [4, 6])  # wrong at depth 1: depth 2 is not judged
    assert rates.of(kinds["own"]) == first
    assert rates.of(kinds["both"]) == pytest.approx(both * PRIOR / (PRIOR + 1))
    for _ in range(10 * MEMORY):
        trie.learn(rates, [5, 7])
    once = first * PRIOR / (PRIOR + 1)
    assert rates.of(kinds["other"]) > 0.99 and rates.of(kinds["own"]) == pytest.approx(once), (
        "where the better sibling is right, it says nothing of the others"
    )
    assert rates.of(kinds["second"]) == pytest.approx(LATER * PRIOR / (PRIOR + 1))
    trie.learn(rates, [5, 6])  # the other one was believed, and judged, first
    assert rates.of(kinds["other"]) == pytest.approx(1 - 1 / MEMORY, abs=0.01)
    assert rates.of(kinds["own"]) == pytest.approx(once + (1 - once) / (PRIOR + 2))


def test_siblings_share_what_is_likely() -> None:
    """Two sure guesses for one place promise two tokens: then asking anybody seems to pay."""
    trie, rates = Trie(1), Rates()
    trie.add(0, [1, 5, 6], [-1, 0, 1], [1, 5, 6])
    first = FIRST[0]
    sure = [1, first, first**2]
    assert trie.values(rates) == pytest.approx(sure)
    before = trie.values(rates)
    trie.add(1, [1, 7, 91], [-1, 0, 0], [1, 7, 91])
    rest = 1 - first
    found = [*sure, rest * first, rest**2 * LATER]
    assert trie.values(rates) == pytest.approx(found)
    assert trie.chance(before) == first and trie.chance(found) == 1 - rest**2 * (1 - LATER)
    for _ in range(20):
        rates.learn((2, 1, 0, 0), True)
    high, values = rates.of((2, 1, 0, 0)), trie.values(rates)
    assert values[3] == pytest.approx(high) and values[1] == pytest.approx((1 - high) * first)
    assert sum(values[node] for node in (1, 3, 4)) < 1


def test_what_goes_far_is_believed() -> None:
    """A copy of a long match is right far more often than one of a token that occurred before."""
    beliefs = []
    for depth in (3, 4, 8):
        trie, rates = Trie(1), Rates()
        trie.add(0, [1, *[5] * depth], range(-1, depth), [1, *[5] * depth])
        beliefs.append(trie.values(rates)[1])
        trie.add(1, [1, 5], [-1, 0], [1, 5])
        assert trie.kinds[1] == (3, 1, 0, len(beliefs) - 1), "the farthest of those that agree"
    assert beliefs == list(FIRST)


def test_what_cannot_be_merged_is_refused() -> None:
    """Sampled candidates among others are no samples any more: the output would be another's."""
    sampled = Fixed([[(5,)]])
    sampled.deterministic = False
    with pytest.raises(ValueError, match="candidates of Fixed must be deterministic"):
        HybridDrafter([NgramDrafter(), sampled])
    with pytest.raises(ValueError, match="at least one member"):
        HybridDrafter([])
    with pytest.raises(ValueError, match="num_nodes must be 0"):
        HybridDrafter([NgramDrafter()], 1)
    lying = Fixed([[(5,)]])
    lying.sampling = "chain"
    hybrid = HybridDrafter([lying])
    with pytest.raises(ValueError, match="candidates of Fixed must be deterministic"):
        hybrid.propose(hybrid.start(prefill(1)))
    with pytest.raises(ValueError, match="one for each of 1 members, got 2"):
        HybridDrafter([NgramDrafter()], costs=[StepCosts(0, [0, 1])] * 2)
    taps = [Fixed([[]], taps) for taps in ((TRUNK,), (), (FINAL, TRUNK))]
    assert HybridDrafter(taps).taps == (TRUNK, FINAL)
