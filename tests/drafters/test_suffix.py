"""The suffix automaton and its drafter, against searches through the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.attention.tree import Tree, batched
from specheads.drafters.contract import Prefill, StepResult
from specheads.drafters.lookup import COUNTED, SuffixAutomaton, SuffixDrafter

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def occurrences(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Return the indices after the occurrences of ``part``."""
    n = len(part)
    return [end for end in range(n, len(text) + 1) if list(text[end - n : end]) == list(part)]


def slow_match(text: Sequence[int]) -> list[int]:
    """Return the longest suffix that occurred before."""
    for n in range(len(text) - 1, 0, -1):
        if len(occurrences(text, text[-n:])) > 1:
            return list(text[-n:])
    return []


def slow_continuations(text: Sequence[int], context: Sequence[int]) -> list[tuple[float, int]]:
    """Return shares and tokens behind the longest suffix of ``context`` that went on."""
    for n in range(len(context), 0, -1):
        ends = [end for end in occurrences(text, context[-n:]) if end < len(text)]
        if ends:
            nexts = [text[end] for end in ends]
            latest = {token: end for end, token in zip(ends, nexts, strict=True)}
            ordered = sorted(latest, key=lambda token: (-nexts.count(token), -latest[token]))
            return [(nexts.count(token) / len(nexts), token) for token in ordered]
    return []


def slow_paths(text: Sequence[int], drafter: SuffixDrafter) -> list[tuple[int, ...]]:
    """Return the paths of the drafter's nodes, in the order in which they are found."""
    match = slow_match(text)
    depth = min(drafter.num_nodes - 1, int(drafter.per_match * len(match)))
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, int, tuple[int, ...]]] = []

    def add(share: float, path: tuple[int, ...]) -> None:
        if len(path) < depth:
            for part, token in slow_continuations(text, [*match, *path]):
                if share * part >= drafter.min_share:
                    waiting.append((-share * part, len(path) + 1, arrived[0], (*path, token)))
                    arrived[0] += 1

    arrived = [0]
    add(1.0, ())
    while waiting and len(found) + 1 < drafter.num_nodes:
        best = min(waiting)
        waiting.remove(best)
        found.append(best[3])
        add(-best[0], best[3])
    return found


def prefill(rows: Sequence[Sequence[int]]) -> Prefill:
    """Return what was read of texts whose last tokens are the roots."""
    ids = [list(row[:-1]) for row in rows]
    width = max(map(len, ids))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in ids])
    return Prefill(ids, tokens, [*map(len, ids)], {}, torch.tensor([row[-1] for row in rows]))


def gained(rows: list[list[int]]) -> StepResult:
    """Return a step's result of which only the new tokens count."""
    empty = torch.zeros(len(rows), 1, dtype=torch.long)
    return StepResult(Tree.chain(0), empty, empty, {}, empty, empty[:, 0], empty[:, 0], rows)


def paths_of(candidates: Any, row: int) -> list[tuple[int, ...]]:
    """Return the paths of a row's nodes below the root, padding left out."""
    tree = candidates.tree
    parents = batched(tree, tree.parents).expand_as(candidates.tokens)[row].tolist()
    tokens = candidates.tokens[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return [path for path in paths[1:] if min(path) >= 0]


@given(TEXTS)
@settings(max_examples=150)
def test_automaton_counts_every_substring(text: list[int]) -> None:
    """A split state with a wrong count or link turns rare continuations into frequent ones."""
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.extend([token])
        part = text[:end]
        assert automaton.length[automaton.match] == len(slow_match(part))
    assert len(automaton.follow) <= 2 * len(text)
    for start in range(len(text)):
        state = 0
        for end in range(start + 1, len(text) + 1):
            state = automaton.follow[state][text[end - 1]]
            found = occurrences(text, text[start:end])
            assert automaton.count[state] == len(found)
            assert automaton.latest[state] == found[-1]


@given(
    st.lists(TEXTS.filter(lambda text: len(text) > 1), min_size=1, max_size=3),
    st.lists(TEXTS, min_size=1, max_size=4),
    st.integers(2, 9),
    st.sampled_from([99.0, 1.0, 2.5]),
    st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=100)
def test_trees_hold_the_most_frequent_continuations(
    texts: list[list[int]],
    steps: list[list[int]],
    num_nodes: int,
    per_match: float,
    min_share: float,
) -> None:
    """Guesses from another row, from before a step, or of the wrong match only cost acceptance."""
    drafter = SuffixDrafter(num_nodes, per_match=per_match, min_share=min_share)
    state = drafter.start(prefill(texts))
    texts = [list(text) for text in texts]
    for new in steps:
        candidates = drafter.propose(state)
        assert candidates.tokens[:, 0].tolist() == [text[-1] for text in texts]
        for row, text in enumerate(texts):
            paths = slow_paths(text, drafter)
            assert sorted(paths_of(candidates, row)) == sorted(paths)
            # of siblings the more frequent first, for models that take chains only
            slow = [path for path in paths if len(path) == 1]
            assert [path for path in paths_of(candidates, row) if len(path) == 1] == slow
        state = drafter.observe(state, gained([new[: row + 1] for row in range(len(texts))]))
        texts = [text + new[: row + 1] for row, text in enumerate(texts)]
    state = drafter.select(state, torch.tensor([len(texts) - 1]))
    assert sorted(paths_of(drafter.propose(state), 0)) == sorted(slow_paths(texts[-1], drafter))


def test_loops_cost_no_more_than_other_texts() -> None:
    """A loop has a repeated suffix per token: counting all of them would be quadratic."""
    automaton = SuffixAutomaton()
    automaton.extend([7] * (20 * COUNTED))
    assert sum(automaton.count) <= 20 * COUNTED**2
    drafter = SuffixDrafter(9)
    state = drafter.start(prefill([[7] * (3 * COUNTED)]))
    assert drafter.propose(state).tokens.tolist() == [[7] * 9]


def test_branches_are_weighted_by_frequency() -> None:
    """The latest match alone hides that another continuation is the usual one."""
    drafter = SuffixDrafter(4, per_match=1.0)
    candidates = drafter.propose(drafter.start(prefill([[1, 5, 1, 5, 1, 6, 9, 1]])))
    assert candidates.tokens.tolist() == [[1, 5, 6]]
    tree = candidates.tree
    assert batched(tree, tree.parents).tolist() == [[-1, 0, 0]]


def test_suffix_settings_are_checked() -> None:
    """A match of length 0 would follow anything."""
    for changes, words in (
        ({"num_nodes": 1}, "num_nodes must be at least 2, got 1"),
        ({"per_match": 0.5}, "per_match must be at least 1"),
        ({"min_share": 2.0}, r"min_share must be in \[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=words):
            SuffixDrafter(**changes)  # type: ignore[arg-type]
