"""The distribution of text whose guesses a draft model sampled, and stopped when it was unsure."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specheads.decoding.loop import decode
from specheads.drafters import draft_model
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import AdaptiveLength, StepCosts
from specheads.verification.sampling import Sampler
from tests.end_to_end.test_distribution import (
    BATCH,
    COUNTED,
    NUM_NEW,
    PROMPT,
    SKIPPED,
    VOCAB,
    excess,
    expected,
    model,
)

__all__ = ["expected", "model"]  # fixtures


def counts_of(base: LlamaForCausalLM, num_rows: int) -> Tensor:
    """Decode with a draft model like the base and count the texts, V^3 values."""
    draft = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.12 * torch.randn(parameter.shape, generator=generator))
    prompt = torch.tensor([PROMPT]).repeat(BATCH, 1)
    counts = torch.zeros(VOCAB**COUNTED, dtype=torch.long)
    place = VOCAB ** torch.arange(COUNTED - 1, -1, -1)
    # ends where the draft gave its tokens together less than a probability of about 0.2
    length = AdaptiveLength(StepCosts(0.066, [0] + [1] * 5), 3)
    drafter = DraftModelDrafter(draft, length, sampling="sampled")
    for seed in range(0, num_rows, BATCH):
        result = decode(
            base,
            drafter,
            prompt,
            max_new_tokens=NUM_NEW,
            sampler=Sampler(temperature=1.0, seed=seed),
        )
        assert 1.2 < result.accept_length < 3.5, "guesses must be right at times, and wrong"
        new = result.sequences[:, len(PROMPT) + SKIPPED :][:, :COUNTED]
        counts += (new * place).sum(1).bincount(minlength=len(counts))
    return counts


def test_the_distribution_is_the_base_models(
    model: LlamaForCausalLM,  # noqa: F811
    expected: Tensor,  # noqa: F811
) -> None:
    """Prevents a bias: of noise used twice, of lengths that depend on draws, of a draft cache."""
    assert excess(counts_of(model, 15_000), expected) < 1


def forget_temperature(patch: pytest.MonkeyPatch) -> None:
    """Break the probabilities: they are not those that tokens were drawn from."""
    probs_of = draft_model._draft_probs
    patch.setattr(
        draft_model,
        "_draft_probs",
        lambda probs, size: probs_of(
            [each.sqrt() / each.sqrt().sum(-1, True) for each in probs], size
        ),
    )


def take_back(patch: pytest.MonkeyPatch) -> None:
    """Break the length: the token at which the draft got unsure is not proposed."""
    propose = DraftModelDrafter.propose

    def shorter(self: DraftModelDrafter, state: draft_model.DraftState) -> draft_model.Candidates:
        found = propose(self, state)
        counts = (found.tokens[:, 1:] >= 0).sum(1)
        unsure = (counts < self.length.max_tokens).long()
        level = torch.arange(found.tokens.shape[1])
        kept = level <= (counts - unsure)[:, None]
        return draft_model.Candidates(
            found.tokens.masked_fill(~kept, -1), found.tree, found.draft_probs, found.sampling
        )

    patch.setattr(DraftModelDrafter, "propose", shorter)


@pytest.mark.parametrize("break_it", [forget_temperature, take_back])
def test_what_is_broken_shows(
    break_it: Callable[[pytest.MonkeyPatch], None],
    model: LlamaForCausalLM,  # noqa: F811
    expected: Tensor,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents a test without power: a third of the rows is enough to see each of these."""
    break_it(monkeypatch)
    assert excess(counts_of(model, 5_000), expected) > 1.5
