"""Trees that a draft model grows: the laws, every prefix there is, vocabularies, ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Tree, batched
from specheads.config import ConfigError
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.draft_tree import DraftTreeDrafter
from specheads.verification.sampling import Sampler
from tests.drafters.test_draft_model import near
from tests.ragged import ROWS, new_tokens, padded
from tests.zoo import VOCAB, build

Path = tuple[int, ...]


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """Return a base model."""
    return build("llama")


@pytest.fixture(scope="module")
def draft(base: PreTrainedModel) -> PreTrainedModel:
    """Return a model that often says what the base says."""
    return near(base, 0.04)


def prefill_of(texts: list[list[int]], sampler: Sampler, vocab_size: int = VOCAB) -> Prefill:
    """Return what a drafter is told of texts that end with their roots."""
    ids = [text[:-1] for text in texts]
    root = torch.tensor([text[-1] for text in texts])
    counts = [len(each) for each in ids]
    tokens = torch.tensor([each + [0] * (max(counts) - len(each)) for each in ids])
    return Prefill(ids, tokens, counts, {}, root, sampler, vocab_size)


def paths_of(candidates: Candidates, row: int) -> list[Path]:
    """Return each node's path of tokens in one row, padding and the root left out."""
    tokens, tree = candidates.tokens[row], candidates.tree
    lines = batched(tree, tree.ancestors)
    lines = lines[row if len(lines) > 1 else 0]
    paths = [tuple(tokens[line[line > 0]].tolist()) for line in lines[1:]]
    return [path for path in paths if -1 not in path]


@torch.no_grad()
def says(draft: PreTrainedModel, text: list[int]) -> Tensor:
    """Return the logits [V] after a text, without a cache."""
    logits: Tensor = draft(input_ids=torch.tensor([text])).logits
    return logits[0, -1]


def every_prefix(
    draft: PreTrainedModel, text: list[int], num_ranks: int, depth: int, temperature: float
) -> dict[Path, float]:
    """Return the probability of every path of the best guesses, each from a pass of its own."""
    found: dict[Path, float] = {(): 1.0}
    for level in range(depth):
        for path in [path for path in found if len(path) == level]:
            probs = (says(draft, [*text, *path]) / temperature).softmax(-1).topk(num_ranks)
            for prob, token in zip(probs.values.tolist(), probs.indices.tolist(), strict=True):
                found[*path, token] = found[path] * prob
    return found


class Fresh:
    """A drafter, and beside it one that starts anew at every step: they must say the same."""

    def __init__(self, drafter: Any, make: Any) -> None:
        self.drafter, self.make = drafter, make
        self.taps, self.deterministic = drafter.taps, drafter.deterministic
        self.num_steps = 0

    def start(self, prefill: Prefill) -> Any:
        """Start both."""
        self.sampler, self.vocab_size = prefill.sampler, prefill.vocab_size
        texts = [[*ids, int(root)] for ids, root in zip(prefill.ids, prefill.root, strict=True)]
        return self.drafter.start(prefill), texts

    def propose(self, state: Any) -> Candidates:
        """Compare the first row's tree; seeds belong to it."""
        inner, texts = state
        candidates: Candidates = self.drafter.propose(inner)
        fresh = self.make()
        alone = fresh.propose(
            fresh.start(prefill_of(texts[:1], self.sampler, self.vocab_size)),
        )
        assert sorted(paths_of(alone, 0)) == sorted(paths_of(candidates, 0))
        if candidates.draft_probs is not None:
            torch.testing.assert_close(
                alone.draft_probs, candidates.draft_probs[:1], rtol=1e-3, atol=1e-6
            )
        self.num_steps += 1
        return candidates

    def observe(self, state: Any, result: StepResult) -> Any:
        """Follow."""
        texts = [text + new for text, new in zip(state[1], result.new_tokens, strict=True)]
        return self.drafter.observe(state[0], result), texts

    def select(self, state: Any, rows: Tensor) -> Any:
        """Keep some rows, the first of which must stay the first of the batch for its seed."""
        return self.drafter.select(state[0], rows), [state[1][row] for row in rows.tolist()]


def check_fresh(base: PreTrainedModel, make: Any, sampler: Sampler) -> None:
    """Demand that what is proposed depends on the text and on nothing that was before."""
    fresh = Fresh(make(), make)
    decode(base, fresh, ROWS[0], max_new_tokens=24, sampler=sampler)
    batch = Fresh(make(), make)
    decode(base, batch, **padded([ROWS[0], ROWS[1]]), max_new_tokens=16, sampler=sampler)
    assert min(fresh.num_steps, batch.num_steps) > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_leave_nothing_behind(
    temperature: float, base: PreTrainedModel, draft: PreTrainedModel
) -> None:
    """Guesses that stay in the draft's cache never show in the output, only in acceptance."""
    make = partial(DraftTreeDrafter, draft, 10, max_depth=3, width=2)
    check_fresh(base, make, Sampler(temperature, seed=3))


@pytest.mark.parametrize("temperature", [0.0, 2.5])
def test_the_tree_is_the_best_of_all_prefixes(temperature: float, draft: PreTrainedModel) -> None:
    """A level cut too short, or probabilities of another path, only cost acceptance."""
    texts = [[3, 5, 8, 2, 9, 11], [7, 1, 4], [6, 2, 2, 40]]
    for num_nodes, max_depth in ((2, 3), (8, 3), (14, 2), (9, 1)):
        drafter = DraftTreeDrafter(
            draft, num_nodes, max_depth=max_depth, num_ranks=4, width=num_nodes
        )
        state = drafter.start(prefill_of(texts, Sampler(temperature)))
        candidates = drafter.propose(state)
        assert candidates.tokens[:, 0].tolist() == [text[-1] for text in texts]
        for row, text in enumerate(texts):
            num_ranks = min(4, num_nodes - 1)
            values = every_prefix(draft, text, num_ranks, max_depth, temperature or 1.0)
            best = sorted(values, key=values.__getitem__, reverse=True)[1:num_nodes]
            assert sorted(paths_of(candidates, row)) == sorted(best)
        assert state.lengths == [len(text) for text in texts]


def test_a_level_that_gains_too_little_is_not_read(
    draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model that is asked on where it knows nothing costs more than it gives."""
    passes = []
    forward = type(draft).forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return forward(self, *args, **kwargs)

    DraftTreeDrafter(draft, 12)  # the self-test is run once
    monkeypatch.setattr(type(draft), "forward", counted)
    texts = [[3, 5, 8, 2, 9, 11]]
    depths = []
    for min_gain in (0.0, 0.3, 1.01):
        passes.clear()
        drafter = DraftTreeDrafter(draft, 12, max_depth=4, width=2, min_gain=min_gain)
        candidates = drafter.propose(drafter.start(prefill_of(texts, Sampler(1.5))))
        depths.append(candidates.tree.max_depth)
        for path in paths_of(candidates, 0):
            assert len(path) <= len(passes)
    assert depths[0] > 1 and depths[2] == 1 and len(passes) == 1
    assert depths[0] >= depths[1] >= depths[2]


@pytest.mark.parametrize("size", [48, 80])
def test_vocabularies_may_differ(size: int, base: PreTrainedModel) -> None:
    """Prevents guesses that the base has no logits for, and roots that the draft cannot read."""
    other = build("llama", vocab_size=size, seed=1)
    make = partial(DraftTreeDrafter, other, 10, max_depth=3, num_ranks=6)
    drafter = make()
    state = drafter.start(prefill_of([[1, 2, 3], [5, 60]], Sampler()))
    assert int(drafter.propose(state).tokens.max()) < min(size, VOCAB) or size < VOCAB
    for temperature in (0.0, 1.0):
        settings: dict[str, Any] = {"max_new_tokens": 12, "sampler": Sampler(temperature, seed=2)}
        plain = plain_decode(base, **padded(ROWS), **settings)
        found = decode(base, make(), **padded(ROWS), **settings)
        assert new_tokens(found) == new_tokens(plain)


def test_guesses_end_where_the_draft_models_positions_end(base: PreTrainedModel) -> None:
    """Positions that were never trained, or none at all, where the base goes on."""
    short = build("llama", max_position_embeddings=16)
    make = partial(DraftTreeDrafter, short, 10, max_depth=3, num_ranks=1)
    drafter = make()
    for length, depth in ((13, 3), (15, 2), (16, 1), (17, 0), (20, 0)):
        state = drafter.start(prefill_of([[1] * length], Sampler()))
        assert drafter.propose(state).tree.max_depth == depth
    plain = plain_decode(base, **padded(ROWS), max_new_tokens=18)
    assert new_tokens(decode(base, make(), **padded(ROWS), max_new_tokens=18)) == new_tokens(plain)


def test_settings_are_checked(base: PreTrainedModel) -> None:
    """A tree of nothing, or of a model that would read it wrongly."""
    with pytest.raises(ValueError, match="num_nodes must be at least 2, got 1"):
        DraftTreeDrafter(base, 1)
    with pytest.raises(ValueError, match="width must be at least 1, got 0"):
        DraftTreeDrafter(base, 8, width=0)
    with pytest.raises(ValueError, match="min_gain must be at least 0"):
        DraftTreeDrafter(base, 8, min_gain=-1.0)
    with pytest.raises(ConfigError, match=r"a draft tree needs .* reads trees: .*ALiBi"):
        DraftTreeDrafter(build("bloom"), 8)


def test_a_chain_is_a_tree_of_one_rank(base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Prevents levels that are read in another order than they hang together."""
    drafter = DraftTreeDrafter(draft, 5, max_depth=4, num_ranks=1)
    text = ROWS[0][0].tolist()
    candidates = drafter.propose(drafter.start(prefill_of([text], Sampler())))
    written = plain_decode(draft, ROWS[0], max_new_tokens=4).new_tokens
    assert candidates.tokens[0, 1:].tolist() == written
    assert candidates.tree == Tree.chain(4)
    assert plain_decode(base, ROWS[0], max_new_tokens=4).new_tokens
