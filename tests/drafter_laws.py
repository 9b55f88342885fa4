"""What every drafter must keep, whatever it proposes: laws to call with one's own drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodeResult
from specheads.drafters.contract import Drafter
from specheads.models.forward import ModelPass
from specheads.verification.sampling import Sampler
from tests.ragged import NUM_NEW, ROWS, new_tokens, padded

Make = Callable[[], Drafter]


def check_greedy_identity(model: PreTrainedModel, make: Make, *, num_new: int = NUM_NEW) -> float:
    """Demand plain greedy decoding's tokens, alone and in a ragged batch; return accept length."""
    settings: dict[str, Any] = {"max_new_tokens": num_new}
    plain = [plain_decode(model, row, **settings) for row in ROWS]
    alone = [decode(model, make(), row, **settings) for row in ROWS]
    assert [each.new_tokens for each in alone] == [each.new_tokens for each in plain]
    together = decode(model, make(), **padded(ROWS), **settings)
    assert new_tokens(together) == [each.new_tokens for each in plain]
    check_rows_alike(alone, together)
    return sum(sum(each.rows[0].accept_lengths) for each in alone) / sum(
        len(each.rows[0].accept_lengths) for each in alone
    )


def check_seeded_identity(
    model: PreTrainedModel, make: Make, *, temperature: float = 1.0, num_new: int = NUM_NEW
) -> None:
    """Demand the tokens that plain decoding draws with each seed, alone and in a ragged batch."""
    for seed in (0, 7):
        expected, alone = [], []
        for i, row in enumerate(ROWS):
            sampler = Sampler(temperature=temperature, seed=seed + i)
            settings: dict[str, Any] = {"max_new_tokens": num_new, "sampler": sampler}
            expected.append(plain_decode(model, row, **settings).new_tokens)
            alone.append(decode(model, make(), row, **settings))
        assert [each.new_tokens for each in alone] == expected
        together = decode(
            model,
            make(),
            **padded(ROWS),
            max_new_tokens=num_new,
            sampler=Sampler(temperature=temperature, seed=seed),
        )
        assert new_tokens(together) == expected
        check_rows_alike(alone, together)


def check_rows_alike(alone: list[DecodeResult], together: DecodeResult) -> None:
    """Demand that a row of a batch was proposed what it is proposed alone."""
    for one, row in zip(alone, together.rows, strict=True):
        assert one.rows[0].accept_lengths == row.accept_lengths


def check_cache(model: PreTrainedModel, make: Make, *, sampler: Sampler | None = None) -> None:
    """Demand that the base's cache ends as a prefill of the same text leaves it."""
    for row in ROWS:
        cache = TreeCache()
        decode(model, make(), row, max_new_tokens=NUM_NEW, sampler=sampler, cache=cache)
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
    plain = plain_decode(model, ROWS[0], max_new_tokens=NUM_NEW).new_tokens
    end = plain[NUM_NEW // 2]
    result = decode(model, make(), ROWS[0], max_new_tokens=NUM_NEW, eos_token_ids=(end,))
    assert result.new_tokens == plain[: plain.index(end) + 1]


def check_conversation(model: PreTrainedModel, make: Make) -> None:
    """Demand the same tokens where a text goes on behind a cache."""
    cache = TreeCache()
    first = decode(model, make(), ROWS[0], max_new_tokens=6, cache=cache)
    text = torch.cat([ROWS[0], torch.tensor([[*first.new_tokens, 5, 6, 7]])], dim=1)
    second = decode(model, make(), text, max_new_tokens=NUM_NEW, cache=cache)
    assert second.new_tokens == plain_decode(model, text, max_new_tokens=NUM_NEW).new_tokens


def check_deterministic(model: PreTrainedModel, make: Make) -> float:
    """Demand all laws of a drafter without sampled candidates; return its greedy accept length."""
    check_seeded_identity(model, make)
    check_cache(model, make)
    check_cache(model, make, sampler=Sampler(temperature=1.0, seed=3))
    check_ends(model, make)
    check_conversation(model, make)
    return check_greedy_identity(model, make)


def check_sampled(model: PreTrainedModel, make: Make) -> float:
    """Demand all laws of a drafter with sampled candidates; return its greedy accept length."""
    check_cache(model, make, sampler=Sampler(temperature=0.8, top_k=20, seed=3))
    check_ends(model, make)
    check_conversation(model, make)
    settings: dict[str, Any] = {"max_new_tokens": NUM_NEW, "eos_token_ids": (7, 8, 9)}
    samplers = [Sampler(0.8, top_p=0.9, seed=4 + row) for row in range(len(ROWS))]
    together = decode(model, make(), **padded(ROWS), sampler=samplers[0], **settings)
    alone = [
        decode(model, make(), row, sampler=sampler, **settings)
        for row, sampler in zip(ROWS, samplers, strict=True)
    ]
    assert new_tokens(together) == [each.new_tokens for each in alone]
    check_rows_alike(alone, together)
    return check_greedy_identity(model, make)


def _states(cache: TreeCache, length: int) -> list[Tensor]:
    found = []
    for layer in cache.layers:
        assert layer.keys is not None and layer.values is not None
        found += [layer.keys[:, :, :length], layer.values[:, :, :length]]
    return found
