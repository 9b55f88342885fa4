"""Our chains and copies beside transformers' assisted generation and prompt lookup: same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import FixedLength
from specheads.drafters.lookup import NgramDrafter
from specheads.measure.bench import Contest, fixed_assistant
from specheads.measure.clock import Batch
from tests.ragged import ROWS, padded
from tests.zoo import build, disturbed

NUM_NEW = 16


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a base model and a draft model that often agrees with it."""
    base = build(request.param)
    return base, disturbed(base)


def generated(base: PreTrainedModel, prompt: torch.Tensor, **settings: Any) -> list[int]:
    """Return the new tokens of transformers' greedy generate."""
    found = base.generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        **settings,
    )
    tokens: list[int] = found[0, prompt.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_draft_chain_gives_what_assisted_generation_gives(
    pair: tuple[PreTrainedModel, PreTrainedModel], num_tokens: int
) -> None:
    """Two programs that verify the same chains in their own ways check each other."""
    base, draft = pair
    drafter = DraftModelDrafter(draft, FixedLength(num_tokens))
    for prompt in ROWS:
        ours = decode(base, drafter, prompt, max_new_tokens=NUM_NEW)
        with fixed_assistant(draft, num_tokens):
            assert ours.new_tokens == generated(base, prompt, assistant_model=draft)


def test_assisted_generation_takes_as_many_passes_of_the_base(
    pair: tuple[PreTrainedModel, PreTrainedModel], request: pytest.FixtureRequest
) -> None:
    """A comparison of speed is only fair where both draft and accept alike."""
    base, draft = pair
    passes: list[int] = []
    request.addfinalizer(base.register_forward_hook(lambda *_: passes.append(1)).remove)
    for prompt in ROWS:
        ours = decode(
            base, DraftModelDrafter(draft, FixedLength(3)), prompt, max_new_tokens=NUM_NEW
        )
        before = len(passes)
        with fixed_assistant(draft, 3):
            generated(base, prompt, assistant_model=draft)
        # theirs verifies a draft with the prefill already, and may spend a pass on the last token
        assert abs(len(passes) - before - (ours.num_steps + 1)) <= 2


@pytest.mark.parametrize(("ngram", "num_tokens"), [(2, 10), (3, 4)])
def test_copies_give_what_prompt_lookup_gives(
    pair: tuple[PreTrainedModel, PreTrainedModel], ngram: int, num_tokens: int
) -> None:
    """The same for guesses that are copied from the text."""
    base, _ = pair
    drafter = NgramDrafter(max_ngram=ngram, num_tokens=num_tokens)
    for row in ROWS:
        prompt = torch.cat([row, row], dim=1)  # something to copy
        ours = decode(base, drafter, prompt, max_new_tokens=NUM_NEW)
        settings = {"prompt_lookup_num_tokens": num_tokens, "max_matching_ngram_size": ngram}
        assert ours.new_tokens == generated(base, prompt, **settings)


@pytest.mark.parametrize("kind", ["assistant", "lookup"])
def test_steps_of_transformers_are_counted(
    pair: tuple[PreTrainedModel, PreTrainedModel], kind: str, request: pytest.FixtureRequest
) -> None:
    """Shown with an accept length of 1, transformers' own speculation looks like none."""
    base, draft = pair
    if kind == "assistant":
        method = Contest(base, (), None, NUM_NEW).assisted(draft, 3)
    else:
        method = Contest(base, (), None, NUM_NEW).lookup(4, 2)
    passes: list[int] = []
    request.addfinalizer(base.register_forward_hook(lambda *_: passes.append(1)).remove)
    prompt = torch.cat([ROWS[0], ROWS[0]], dim=1)
    for temperature in (0.0, 1.0):
        passes.clear()
        (found,) = method.decode(Batch(prompt, torch.ones_like(prompt)), temperature, 0)
        assert len(found.accept_lengths) == len(passes)
        assert sum(found.accept_lengths) == len(found.new_tokens) == NUM_NEW
        assert 1 <= min(found.accept_lengths) <= max(found.accept_lengths) <= 5
    if kind == "assistant":  # the greedy draft often agrees
        (greedy,) = method.decode(Batch(prompt, torch.ones_like(prompt)), 0.0, 0)
        assert max(greedy.accept_lengths) > 1


@pytest.mark.parametrize("kind", ["assistant", "lookup"])
def test_clocked_methods_decode_every_row(
    pair: tuple[PreTrainedModel, PreTrainedModel], kind: str
) -> None:
    """A method that reads the padding, or forgets rows, is fast and wrong."""
    base, draft = pair
    end = plain_decode(base, ROWS[1], max_new_tokens=NUM_NEW).new_tokens[5]
    if kind == "assistant":
        method = Contest(base, (end,), None, NUM_NEW).assisted(draft, 3)
    else:
        method = Contest(base, (end,), None, NUM_NEW).lookup(4, 2)
    batch = padded(ROWS)
    found = method.decode(Batch(batch["input_ids"], batch["attention_mask"]), 0.0, 0)
    for prompt, each in zip(ROWS, found, strict=True):
        expected = plain_decode(base, prompt, max_new_tokens=NUM_NEW, eos_token_ids=(end,))
        assert (each.new_tokens, each.finished) == (expected.new_tokens, expected.finished)
    drawn = [method.decode(Batch(ROWS[0], torch.ones_like(ROWS[0])), 1.0, s)[0] for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert not method.seeded


def test_the_assistants_settings_come_back(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    """A draft model that was measured must not be saved with the settings of the measurement."""
    _, draft = pair
    before = draft.generation_config.to_dict()
    with pytest.raises(RuntimeError, match="stop"), fixed_assistant(draft, 7):
        assert draft.generation_config.num_assistant_tokens == 7
        raise RuntimeError("stop")
    assert draft.generation_config.to_dict() == before
