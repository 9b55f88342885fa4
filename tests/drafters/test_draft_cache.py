"""A draft model's cache follows the text, whatever was guessed, gained, or left out in between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.drafters.contract import Prefill
from specheads.drafters.draft_model import DraftCache
from tests.zoo import VOCAB, build


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    """Return a model with a window smaller than the texts."""
    return build("mistral-window")


def prefill_of(texts: Sequence[list[int]], known: Sequence[int] | None = None) -> Prefill:
    """Return what a drafter gets where the texts end in their roots."""
    read = [text[n:-1] for text, n in zip(texts, known or [0] * len(texts), strict=True)]
    width = max(map(len, read))
    return Prefill(
        ids=[text[:-1] for text in texts],
        tokens=torch.tensor([[*row, *[0] * (width - len(row))] for row in read]),
        num_tokens=[len(row) for row in read],
        hidden={},
        root=torch.tensor([text[-1] for text in texts]),
    )


def after(model: PreTrainedModel, text: list[int]) -> Tensor:
    """Return the logits [V] after a text, read at once."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([text])).logits[0, -1]
    return logits


def check(model: PreTrainedModel, logits: Tensor, texts: Sequence[list[int]]) -> None:
    """Demand that logits [B, V] are those after the texts."""
    for row, text in zip(logits, texts, strict=True):
        torch.testing.assert_close(row, after(model, text), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_logits_are_those_after_the_text(seed: int, num_rows: int, draft: PreTrainedModel) -> None:
    """Prevents guesses left in the cache, rows that read others' tokens, tokens read nowhere."""
    chance = random.Random(seed)

    def tokens(at_least: int, at_most: int) -> list[int]:
        return [chance.randrange(VOCAB) for _ in range(chance.randint(at_least, at_most))]

    texts = [tokens(2, 9) for _ in range(num_rows)]
    cache = DraftCache(draft, prefill_of(texts))
    for _ in range(12):
        num_rows = len(texts)
        drafted: list[list[int]] = [[] for _ in texts]
        if chance.random() < 0.8:  # else it is not asked in this step
            check(draft, cache.sync(), texts)
            going = [True] * num_rows
            for _ in range(chance.randint(0, 3)):
                going = [goes and chance.random() < 0.8 for goes in going]
                guesses = tokens(num_rows, num_rows)
                logits = cache.read(torch.tensor(guesses), going)
                for row, goes in enumerate(going):
                    if goes:
                        drafted[row].append(guesses[row])
                        expected = after(draft, texts[row] + drafted[row])
                        torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-4)
            for guesses in drafted:  # the last guess is not read
                guesses.append(chance.randrange(VOCAB))
        right = [chance.randint(0, len(guesses)) for guesses in drafted]
        gained = [
            guesses[:num] + tokens(1, 1 if guesses else 3)
            for guesses, num in zip(drafted, right, strict=True)
        ]
        if chance.random() < 0.2:  # a text that has ended
            gained[0], right[0] = [], 0
        matched = cache.follow(gained, drafted)
        assert all(num >= least for num, least in zip(matched, right, strict=True))
        texts = [text + new for text, new in zip(texts, gained, strict=True)]
        assert cache.texts == texts
        if len(texts) > 1 and chance.random() < 0.2:
            kept = chance.sample(range(len(texts)), 2)
            cache.select(torch.tensor(kept))
            texts = [texts[row] for row in kept]
    cache.follow([[3], [4], [5]][: len(texts)])
    check(
        draft,
        cache.sync(),
        [[*text, token] for text, token in zip(texts, (3, 4, 5), strict=False)],
    )
    assert cache.lengths == [len(text) + 1 for text in texts]


def test_trees_behind_the_text_leave_no_trace(draft: PreTrainedModel) -> None:
    """Prevents that what was verified behind the text stays there as if it had been written."""
    from specheads.attention.tree import Tree

    texts = [[1, 2, 3, 4], [5, 6]]
    cache = DraftCache(draft, prefill_of(texts))
    with torch.inference_mode():
        cache.sync()
        logits = cache.forward.verify(torch.tensor([[7, 8, 9]] * 2), Tree.chain(2))
    check(draft, logits[:, -1], [[*text, 7, 8, 9] for text in texts])
    cache.follow([[7], [9, 7]])
    check(draft, cache.sync(), [[*texts[0], 7], [*texts[1], 9, 7]])


def test_a_conversation_takes_the_cache_over(draft: PreTrainedModel) -> None:
    """Prevents two texts in one cache: the earlier state must still be right, if anyone asks."""
    texts = [[1, 2, 3, 4], [5, 6, 7]]
    first = DraftCache(draft, prefill_of(texts))
    logits = first.sync()
    longer = [[1, 2, 3, 4, 9, 8], [5, 6, 1, 1, 2]]
    second = DraftCache(draft, prefill_of(longer, [3, 2]), first)
    assert second.lengths == [4, 2] and first.lengths == [0, 0]
    check(draft, second.sync(), longer)
    torch.testing.assert_close(first.sync(), logits, rtol=1e-3, atol=1e-4)
    second.follow([[1], [2]])
    check(draft, second.sync(), [[*longer[0], 1], [*longer[1], 2]])
    other = DraftCache(draft, prefill_of(longer), second)  # nothing was known beforehand
    assert other.lengths == [0, 0]
    fewer = DraftCache(draft, prefill_of(longer[:1], [3]), second)
    assert fewer.lengths == [0]
    check(draft, fewer.sync(), longer[:1])
