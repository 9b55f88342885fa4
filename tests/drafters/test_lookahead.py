"""Lookahead decoding: the window, its n-grams, and the laws of drafters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specheads.attention.cache import TreeCache
from specheads.attention.tree import RowTrees
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.growing import TextRows
from specheads.drafters.lookahead import LookaheadDrafter, NgramPool
from specheads.models import forward
from specheads.models.forward import ModelPass
from specheads.verification.sampling import Sampler
from tests.published_lookahead import PublishedLookahead
from tests.ragged import Alternate, new_tokens, padded
from tests.zoo import VOCAB, build

LOOPING = 4  # a seed whose model repeats itself
SETTINGS = [(5, 4, 3), (3, 5, 2), (2, 2, 1), (4, 3, 5)]
SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(temperature=0.2, seed=3)}


def prompt(length: int = 12) -> Tensor:
    """Return [1, length] tokens, the second half a copy of the first."""
    half = torch.randint(VOCAB, (1, length // 2), generator=torch.Generator().manual_seed(length))
    return torch.cat([half, half], dim=1)


class Recording(LookaheadDrafter):
    """Keeps what the first row proposed, and what came of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.windows: list[list[list[int]]] = []
        self.guessed: list[set[tuple[int, ...]]] = []
        self.proposed: list[Candidates] = []
        self.gained: list[list[int]] = []
        self.final: Any = None

    def propose(self, state: TextRows) -> Candidates:
        """Keep the window and the guesses as they stand in the tree."""
        self.windows.append([list(level) for level in state.rows[0].window])
        candidates = super().propose(state)
        self.proposed.append(candidates)
        assert isinstance(candidates.tree, RowTrees)
        tokens, found = candidates.tokens[0].tolist(), set()
        for line in candidates.tree.ancestors[0].tolist():
            path = tuple(tokens[node] for node in line[1:] if node >= 0)
            if len(path) == self.ngram - 1 and min(path) >= 0:
                found.add(path)
        self.guessed.append(found)
        return candidates

    def observe(self, state: TextRows, result: StepResult) -> TextRows:
        """Keep the new tokens."""
        self.gained.append(list(result.new_tokens[0]))
        self.final = super().observe(state, result).rows[0]
        return state


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_steps_are_those_of_the_published_algorithm(
    settings: tuple[int, int, int], sampler: Sampler
) -> None:
    """Prevents a window off by one column or row: it accepts less, and no other test would see."""
    model = build("llama", seed=LOOPING).double()
    drafter, ids, num_new = Recording(*settings), prompt(), 64
    result = decode(model, drafter, ids, max_new_tokens=num_new, sampler=sampler)
    text = [*ids[0].tolist(), result.new_tokens[0]]
    slow = PublishedLookahead(model, text, drafter.windows[0][0], *settings, sampler)
    for window, guesses, gained in zip(
        drafter.windows, drafter.guessed, drafter.gained, strict=True
    ):
        step = slow.step(len(ids[0]) + num_new - len(slow.text))
        assert (window, guesses, gained) == (step.window, set(step.guesses), step.tokens)
    assert slow.text == result.sequences[0].tolist()
    assert slow.window == drafter.final.window
    for first, known in slow.pool.items():
        assert drafter.final.pool.latest(first) == known[::-1]
    assert max(result.accept_lengths) == settings[1]  # an n-gram was accepted whole


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
@torch.no_grad()
def test_combined_mask_is_that_of_branches_apart(name: str) -> None:
    """Prevents a window that sees guesses, other columns or wrong positions."""
    model, ids = build(name), prompt()
    drafter = Recording(4, 4, 3)
    text = decode(model, drafter, ids, max_new_tokens=16).sequences[0].tolist()
    start, sizes = ids.shape[1], set()
    for candidates, gained in zip(drafter.proposed, drafter.gained, strict=True):
        base = ModelPass(model, TreeCache())
        base.read(torch.tensor([text[:start]]), [start])
        logits = base.verify(candidates.inputs, candidates.tree)[0]
        inputs = candidates.inputs[0].tolist()
        assert isinstance(candidates.tree, RowTrees)
        lines = candidates.tree.ancestors[0].tolist()
        branches = [[inputs[node] for node in line if node >= 0] for line in lines]
        width = max(map(len, branches))
        alone = torch.tensor([text[:start] + each + [0] * (width - len(each)) for each in branches])
        linear = model(alone, use_cache=False).logits
        ends = torch.tensor([start + len(each) - 1 for each in branches])
        expected = linear[torch.arange(len(ends)), ends]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        sizes.add(len(branches))
        start += len(gained)
    assert len(sizes) > 2  # filling, full, and with guesses


def test_the_context_may_be_filled_to_the_brim() -> None:
    """Prevents windows beyond a model's last position from failing there."""
    model, ids = build("gpt2"), prompt(220)
    drafter = LookaheadDrafter(15, 5, 15)
    plain = plain_decode(model, ids, max_new_tokens=36)
    assert decode(model, drafter, ids, max_new_tokens=36).sequences.equal(plain.sequences)


def test_processors_change_what_the_window_says_too() -> None:
    """Prevents n-grams that the processors make impossible, and processors that see probes."""
    model, ids = build("llama", seed=LOOPING), prompt()
    for make in (lambda: RepetitionPenaltyLogitsProcessor(1.3), Alternate):
        for sampler in SAMPLERS.values():
            settings: dict[str, Any] = {"max_new_tokens": 40, "sampler": sampler}
            plain = plain_decode(
                model, ids, logits_processor=LogitsProcessorList([make()]), **settings
            )
            result = decode(
                model,
                LookaheadDrafter(4, 3, 3),
                ids,
                logits_processor=LogitsProcessorList([make()]),
                **settings,
            )
            assert result.sequences.equal(plain.sequences)


def test_a_chain_gets_the_texts_own_ngrams() -> None:
    """Prevents a window that is never read from being taken for read, and guessing nothing then."""
    model, ids = build("bloom"), prompt(40)
    drafter = Recording(4, 3, 3)
    plain = plain_decode(model, ids, max_new_tokens=40)
    streamed: list[int] = []
    result = decode(
        model, drafter, ids, max_new_tokens=40, on_tokens=lambda _, new: streamed.extend(new)
    )
    assert result.sequences.equal(plain.sequences) and streamed == result.new_tokens
    assert all(window == drafter.windows[0] for window in drafter.windows)
    assert any(drafter.guessed[1:])


@dataclass
class Beside:
    """Proposes another's tree with a probe of its own in it, as a merged tree may have.

    Attributes:
        drafter: the other.
        dropped: nodes from this depth on are left out at every third step.
    """

    drafter: LookaheadDrafter
    dropped: int = 99
    taps: tuple[str, ...] = ()
    deterministic: bool = True
    num_steps: int = 0

    def start(self, prefill: Prefill) -> Any:
        """Start the other."""
        return self.drafter.start(prefill)

    def propose(self, state: Any) -> Candidates:
        """Merge."""
        theirs = self.drafter.propose(state)
        tree = theirs.tree
        assert isinstance(tree, RowTrees) and theirs.probes is not None
        self.num_steps += 1
        depth = self.dropped if self.num_steps % 3 == 0 else 99
        rows, self.own = [], []
        for i, depths in enumerate(tree.depths.tolist()):
            root = int(theirs.tokens[i, 0])
            nodes, own = [(-1, root, root), (0, -1, 7)], [0]
            for node in range(1, len(depths)):
                above = int(tree.parents[i, node])
                kept = depths[node] < depth
                pair = theirs.tokens[i, node], theirs.inputs[i, node]
                own.append(node + 1 if kept else -1)
                nodes.append((above + (above > 0), *(int(each) if kept else -1 for each in pair)))
            rows.append(nodes)
            self.own.append(own)
        parents, tokens, probes = torch.tensor(rows).unbind(-1)
        merged = RowTrees.from_parents(parents.contiguous(), tree.max_depth)
        return Candidates(tokens, merged, probes=probes)

    def observe(self, state: Any, result: StepResult) -> Any:
        """Say where the other's nodes stand."""
        return self.drafter.observe(state, replace(result, own=torch.tensor(self.own)))

    def select(self, state: Any, rows: Tensor) -> Any:
        """Keep some rows."""
        return self.drafter.select(state, rows)


def test_it_finds_its_nodes_in_a_merged_tree() -> None:
    """Prevents n-grams read at another drafter's nodes."""
    model = build("llama", seed=LOOPING)
    batch = padded([prompt(8), prompt(14)])
    alone = decode(model, LookaheadDrafter(4, 4, 3), **batch, max_new_tokens=40)
    merged = decode(model, Beside(LookaheadDrafter(4, 4, 3)), **batch, max_new_tokens=40)
    assert new_tokens(merged) == new_tokens(alone)
    assert [row.accept_lengths for row in merged.rows] == [row.accept_lengths for row in alone.rows]
    part = decode(model, Beside(LookaheadDrafter(4, 4, 3), 2), **batch, max_new_tokens=40)
    assert new_tokens(part) == new_tokens(alone)


def test_one_size_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents trees of ever new sizes, each of which a compiled pass is compiled for anew."""
    model, ids = build("llama", seed=LOOPING, num_hidden_layers=1), prompt()
    drafter, free = Recording(4, 4, 3, fixed_size=True), Recording(4, 4, 3)
    first = decode(model, drafter, ids, max_new_tokens=24)
    second = decode(model, free, ids, max_new_tokens=24)
    assert first.accept_lengths == second.accept_lengths
    assert {each.tree.num_nodes for each in drafter.proposed} == {drafter.num_nodes}
    assert max(each.tree.num_nodes for each in free.proposed) <= drafter.num_nodes
    forward._compiled_forward.cache_clear()
    real = torch.compile  # tracing is what tells; the code generator's work takes minutes
    monkeypatch.setattr(torch, "compile", lambda f, mode=None: real(f, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    result = decode(model, drafter, ids, max_new_tokens=24, compile=True)
    assert result.accept_lengths == first.accept_lengths
    assert counters["stats"]["unique_graphs"] <= 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=60), st.integers(1, 3))
def test_pool_keeps_the_latest(entries: list[tuple[int, int]], capacity: int) -> None:
    """Prevents a pool that forgets what it has just met, or grows without end."""
    pool = NgramPool(capacity)
    for i, (first, rest) in enumerate(entries):
        pool.add(first, (rest,))
        met = [(r,) for f, r in reversed(entries[: i + 1]) if f == first]
        assert pool.latest(first) == list(dict.fromkeys(met))[:capacity]
    assert pool.latest(9) == []


@pytest.mark.parametrize("wrong", [(1, 4, 1), (4, 1, 1), (4, 4, 0)])
def test_settings_are_checked(wrong: tuple[int, int, int]) -> None:
    """Prevents an n-gram without a guess, and a window that is the root alone."""
    with pytest.raises(ValueError, match="(window|ngram|guesses) must be at least"):
        LookaheadDrafter(*wrong)
