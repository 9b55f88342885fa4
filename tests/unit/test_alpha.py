"""Agreement of draft and base, and what chains gain along a text, against slow references."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import FixedLength
from specheads.measure.drafts import Gained, fit_vocabulary, measure_alpha, replay_chain
from specheads.verification.sampling import Sampler
from tests.ragged import ROWS
from tests.zoo import VOCAB, build, disturbed

NUM_NEW = 18


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a base model and a draft model that agrees with it now and then."""
    base = build("llama")
    return base, disturbed(base, seed=0)


@given(
    rates=st.lists(st.floats(0, 1), max_size=6),
    num_tokens=st.integers(1, 4),
    room=st.integers(0, 3),
)
@settings(max_examples=60)
def test_a_chain_along_a_text_is_every_outcome_weighed(
    rates: list[float], num_tokens: int, room: int
) -> None:
    """A count that loses the steps after a refusal promises the speed of the lucky ones."""
    limit = len(rates) + room

    @cache
    def follow(start: int) -> tuple[float, float, float]:
        """Return expected steps, proposals and acceptances from ``start`` on."""
        if start >= len(rates):
            return 0.0, 0.0, 0.0
        depth = min(num_tokens, limit - start - 1)
        steps, proposed, accepted = 1.0, float(depth), 0.0
        for right in range(depth + 1):  # guesses accepted in this step
            chance = 1.0
            for i in range(start, start + right):
                chance *= rates[i] if i < len(rates) else 1.0
            ends = start + right >= len(rates)  # the text ended within the guesses
            if right < depth and not ends:
                chance *= 1 - rates[start + right]
            after = (0.0, 0.0, 0.0) if ends else follow(start + right + 1)
            kept = min(right, len(rates) - start)
            steps += chance * after[0]
            proposed += chance * after[1]
            accepted += chance * (after[2] + kept)
            if ends:
                break
        return steps, proposed, accepted

    found = replay_chain(rates, num_tokens, limit)
    expected = follow(0)
    assert (found.steps, found.proposed, found.accepted) == pytest.approx(expected, abs=1e-9)
    assert found.tokens == len(rates)


def test_greedy_chains_take_the_steps_that_were_foretold(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    """Prevents predictions for another loop: other limits, other first tokens, a shifted text."""
    base, draft = pair
    alpha = measure_alpha(base, draft, ROWS, max_new_tokens=NUM_NEW, temperature=0.0)
    assert 0.2 < alpha.alpha < 1
    for num_tokens in (1, 2, 3, 5):
        drafter = DraftModelDrafter(draft, FixedLength(num_tokens))
        lengths = [
            length
            for row in ROWS
            for length in decode(base, drafter, row, max_new_tokens=NUM_NEW).accept_lengths
        ]
        foretold = alpha.chain(num_tokens)
        assert foretold.steps == len(lengths)
        assert foretold.tokens == sum(lengths)
        assert foretold.accepted == sum(lengths) - len(lengths)
        assert foretold.accept_length == pytest.approx(sum(lengths) / len(lengths))


def test_sampled_chains_are_foretold_on_average(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    """Prevents an acceptance rate that is that of greedy guesses, or of other positions."""
    base, draft = pair
    drafter = DraftModelDrafter(draft, FixedLength(1), sampling="sampled")  # blocks are tokens here
    prompt, num_steps, num_tokens = ROWS[0], 0, 0
    for seed in range(60):
        sampler = Sampler(temperature=1.0, seed=1000 + seed)
        result = decode(base, drafter, prompt, max_new_tokens=NUM_NEW, sampler=sampler)
        num_steps += len(result.accept_lengths)
        num_tokens += sum(result.accept_lengths)
    alpha = measure_alpha(base, draft, [prompt] * 60, max_new_tokens=NUM_NEW, temperature=1.0)
    found = alpha.chain(1).accept_length
    # accept lengths are 1 or 2: a standard error of at most 0.5 / sqrt(steps), on either side
    assert found == pytest.approx(num_tokens / num_steps, abs=4 * 0.5 * (2 / num_steps) ** 0.5)
    best = alpha.chain(1, sampled=False).accept_length
    assert abs(best - found) > 4 * 0.5 * (2 / num_steps) ** 0.5, (
        "the test could not tell them apart"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_alpha_is_what_distributions_share(
    pair: tuple[PreTrainedModel, PreTrainedModel], temperature: float
) -> None:
    """Alpha over the prompt too, or one token late, is a plausible number of something else."""
    base, draft = pair
    found = measure_alpha(
        base, draft, ROWS, max_new_tokens=NUM_NEW, temperature=temperature, seed=5
    )
    shared, kept = [], []
    for n, row in enumerate(ROWS):
        sampler = Sampler(temperature=temperature, seed=5 + n)
        new = plain_decode(base, row, max_new_tokens=NUM_NEW, sampler=sampler).new_tokens
        for i in range(1, len(new)):  # one pass per token, no cache
            text = torch.cat([row, torch.tensor([new[:i]])], dim=1)
            with torch.no_grad():
                ours, theirs = (m(text, use_cache=False).logits[0, -1] for m in (base, draft))
            if temperature == 0:
                share = float(ours.argmax() == theirs.argmax())
                shared.append(share)
                kept.append(share)
                continue
            p, q = ((logits / temperature).softmax(-1) for logits in (ours, theirs))
            shared.append(float(torch.minimum(p, q).sum()))
            kept.append(min(1.0, float(q[new[i]] / p[new[i]])))
    assert found.num_tokens == len(shared) == len(ROWS) * (NUM_NEW - 1)
    assert found.alpha == pytest.approx(sum(shared) / len(shared), abs=1e-5)
    assert [x for text in found.texts for x in text.kept] == pytest.approx(kept, abs=1e-4)
    per_prompt = [sum(shared[i : i + NUM_NEW - 1]) / (NUM_NEW - 1) for i in (0, 17, 34)]
    assert found.per_prompt == pytest.approx(per_prompt, abs=1e-5)


def test_a_model_agrees_with_itself() -> None:
    """The scale's end: every guess accepted, however long the chain."""
    base = build("llama")
    for temperature in (0.0, 1.0):
        alpha = measure_alpha(base, base, ROWS, max_new_tokens=9, temperature=temperature)
        assert alpha.alpha == pytest.approx(1, abs=1e-6)
        assert alpha.acceptance_rate == pytest.approx(1, abs=1e-5)
        assert alpha.chain(3).accept_length == pytest.approx(4, abs=1e-4)  # 8 tokens, 2 steps


def test_texts_of_one_token_have_nothing_to_verify() -> None:
    """Prevents NaN in a table, or a prompt that counts as a perfect one."""
    base = build("llama")
    alpha = measure_alpha(base, base, ROWS, max_new_tokens=1, temperature=1.0)
    assert (alpha.alpha, alpha.num_tokens, alpha.per_prompt) == (0.0, 0, [0.0] * len(ROWS))
    assert alpha.chain(2) == Gained()
    assert alpha.chain(2).accept_length == alpha.chain(2).acceptance_rate == 0.0


@pytest.mark.parametrize("size", [VOCAB - 8, VOCAB + 8])
def test_vocabularies_of_other_sizes_are_compared_over_the_bases(size: int) -> None:
    """Outputs that the base has no token for are never guessed: their mass is the others'."""
    base, draft = build("llama"), build("llama", seed=2, vocab_size=size)
    prompt = ROWS[0] % (VOCAB - 8)
    alpha = measure_alpha(base, draft, [prompt], max_new_tokens=2, temperature=1.0)
    first = plain_decode(
        base, prompt, max_new_tokens=1, sampler=Sampler(temperature=1.0)
    ).new_tokens
    assert first[0] < size, "else the draft model reads another token"
    text = torch.cat([prompt, torch.tensor([first])], dim=1)
    with torch.no_grad():
        p = base(text).logits[0, -1].softmax(-1)
        q = draft(text).logits[0, -1]
    both = min(size, VOCAB)
    expected = torch.minimum(p[:both], q[:both].softmax(-1)).sum()
    assert alpha.alpha == pytest.approx(float(expected), abs=1e-5)


def test_missing_outputs_cannot_be_drawn() -> None:
    """A zero in place of minus infinity gives mass to tokens that the draft does not know."""
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_vocabulary(logits, 2).tolist() == [[1.0, 2.0]]
    assert fit_vocabulary(logits, 4).softmax(-1)[0, 3] == 0
    with pytest.raises(ValueError, match="num_tokens must be at least 1, got 0"):
        replay_chain([0.5], 0, 1)
