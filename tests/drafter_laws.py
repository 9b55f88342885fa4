"""What every drafter must keep, whatever it proposes: laws to call with one's own drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodeResult
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.drafters.heads import HeadsDrafter
from specheads.models.forward import ModelPass
from specheads.verification.sampling import Sampler
from tests.ragged import NUM_NEW, ROWS, new_tokens, padded

Make = Callable[[], Drafter]
Third = tuple[Any, int, Tensor]  # the drafter's state, the number of the step, the roots


@lru_cache(maxsize=64)  # one base serves many drafters
def plain_tokens(
    model: PreTrainedModel, prompt: tuple[int, ...], num_new: int, sampler: Sampler | None = None
) -> list[int]:
    """Return what plain decoding gives."""
    settings: dict[str, Any] = {"max_new_tokens": num_new, "sampler": sampler or Sampler()}
    return plain_decode(model, torch.tensor([prompt]), **settings).new_tokens


def check_greedy_identity(model: PreTrainedModel, make: Make, *, num_new: int = NUM_NEW) -> float:
    """Demand plain greedy decoding's tokens, alone and in a ragged batch; return accept length."""
    alone = check_identity(model, make, Sampler(), num_new)
    return sum(sum(each.rows[0].accept_lengths) for each in alone) / sum(
        len(each.rows[0].accept_lengths) for each in alone
    )


def check_identity(
    model: PreTrainedModel, make: Make, sampler: Sampler, num_new: int = NUM_NEW
) -> list[DecodeResult]:
    """Demand what plain decoding gives or draws, alone and in a ragged batch, and its cache."""
    alone, together = check_rows_alike(model, make, sampler, max_new_tokens=num_new)
    rows = [(row, replace(sampler, seed=sampler.seed + i)) for i, row in enumerate(ROWS)]
    expected = [plain_tokens(model, tuple(row[0].tolist()), num_new, own) for row, own in rows]
    assert [each.new_tokens for each in alone] == expected
    assert new_tokens(together) == expected
    return alone


def check_rows_alike(
    model: PreTrainedModel, make: Make, sampler: Sampler, **settings: Any
) -> tuple[list[DecodeResult], DecodeResult]:
    """Demand that a row of a batch gets and is proposed what it is alone; return both."""
    alone = []
    for i, row in enumerate(ROWS):
        cache, own = TreeCache(), replace(sampler, seed=sampler.seed + i)
        alone.append(decode(model, make(), row, sampler=own, cache=cache, **settings))
        check_cache(model, cache)
    together = decode(model, make(), **padded(ROWS), sampler=sampler, **settings)
    assert [each.new_tokens for each in alone] == new_tokens(together)
    for one, of_batch in zip(alone, together.rows, strict=True):
        assert one.rows[0].accept_lengths == of_batch.accept_lengths
    return alone, together


def check_cache(model: PreTrainedModel, cache: TreeCache) -> None:
    """Demand that the base's cache ends as a prefill of the same text leaves it."""
    fresh = TreeCache()
    text = torch.tensor(cache.tokens)
    with torch.inference_mode():
        ModelPass(model, fresh).read(text, [text.shape[1]])
    length = cache.lengths[0]
    assert length == text.shape[1]
    for kept, new in zip(_states(cache, length), _states(fresh, length), strict=True):
        torch.testing.assert_close(kept, new, rtol=1e-4, atol=1e-5)


def check_ends(model: PreTrainedModel, make: Make) -> None:
    """Demand that rows end at an end of text or the limit, wherever guesses go on."""
    for limit in (1, 2, 5):
        result = decode(model, make(), **padded(ROWS), max_new_tokens=limit)
        assert [len(tokens) for tokens in new_tokens(result)] == [limit] * len(ROWS)
    plain = plain_tokens(model, tuple(ROWS[0][0].tolist()), NUM_NEW)
    end = plain[NUM_NEW // 2]
    result = decode(model, make(), ROWS[0], max_new_tokens=NUM_NEW, eos_token_ids=(end,))
    assert result.new_tokens == plain[: plain.index(end) + 1]


def check_conversation(model: PreTrainedModel, make: Make) -> None:
    """Demand the same tokens where a text goes on behind a cache."""
    cache = TreeCache()
    first = decode(model, make(), ROWS[0], max_new_tokens=6, cache=cache)
    text = (*ROWS[0][0].tolist(), *first.new_tokens, 5, 6, 7)
    second = decode(model, make(), torch.tensor([text]), max_new_tokens=NUM_NEW, cache=cache)
    assert second.new_tokens == plain_tokens(model, text, NUM_NEW)


class EveryThird:
    """Lets another drafter propose at every third step only.

    Args:
        inner: the drafter.
        asks: ask it at the others too, and drop what it says.
    """

    deterministic = True

    def __init__(self, inner: Drafter, *, asks: bool) -> None:
        self.inner, self.asks, self.taps = inner, asks, inner.taps
        self.proposed: list[list[list[int]]] = []

    def start(self, prefill: Prefill) -> Third:
        """Begin with a step at which it proposes nothing."""
        return self.inner.start(prefill), 1, prefill.root

    def propose(self, state: Third) -> Candidates:
        """Return its candidates, or the roots alone."""
        inner, step, root = state
        if step % 3 == 0:
            candidates = self.inner.propose(inner)
            self.proposed.append(candidates.tokens.tolist())
            return candidates
        if self.asks:
            self.inner.propose(inner)
        return Candidates(root[:, None], Tree.chain(0))

    def observe(self, state: Third, result: StepResult) -> Third:
        """Tell it where its nodes were: nowhere, where it has not proposed."""
        inner, step, root = state
        if step % 3:
            result = replace(result, own=torch.zeros(len(root), 0, dtype=torch.long))
        return self.inner.observe(inner, result), step + 1, result.next_root

    def select(self, state: Third, rows: Tensor) -> Third:
        """Keep some rows."""
        inner, step, root = state
        return self.inner.select(inner, rows), step, root[rows]


def check_asked_seldom(model: PreTrainedModel, make: Make) -> None:
    """Demand that a drafter which is not asked at every step misses nothing of the text."""
    asked, left = (EveryThird(make(), asks=asks) for asks in (True, False))
    request = {**padded(ROWS), "max_new_tokens": NUM_NEW}
    texts = [new_tokens(decode(model, each, **request)) for each in (asked, left)]
    assert texts[0] == texts[1]
    if isinstance(asked.inner, HeadsDrafter):  # others learn from guesses that nobody verified
        assert asked.proposed == left.proposed


def check_deterministic(model: PreTrainedModel, make: Make) -> float:
    """Demand all laws of a drafter without sampled candidates; return its greedy accept length."""
    check_identity(model, make, Sampler(temperature=1.0, seed=7), num_new=12)
    check_ends(model, make)
    check_conversation(model, make)
    check_asked_seldom(model, make)
    return check_greedy_identity(model, make)


def check_sampled(model: PreTrainedModel, make: Make) -> float:
    """Demand all laws of a drafter with sampled candidates; return its greedy accept length."""
    check_ends(model, make)
    check_conversation(model, make)
    sampler = Sampler(0.8, top_k=20, top_p=0.9, seed=4)
    check_rows_alike(model, make, sampler, max_new_tokens=NUM_NEW, eos_token_ids=(7, 8, 9))
    return check_greedy_identity(model, make)


def _states(cache: TreeCache, length: int) -> list[Tensor]:
    found = []
    for layer in cache.layers:
        assert layer.keys is not None and layer.values is not None
        found += [layer.keys[:, :, :length], layer.values[:, :, :length]]
    return found
