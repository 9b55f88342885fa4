"""The simulator says of every rule what real decoding says, and shows it nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.judging import judge, learn_chances, learn_rates
from specheads.decoding.loop import decode
from specheads.decoding.recording import Recording, record
from specheads.drafters.adaptive import AdaptiveLength, StepCosts
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import ConfidentLength, EntropyLength, FixedLength, Length
from specheads.drafters.ngram import NgramDrafter
from specheads.sampling import Sampler
from specheads.tree_support import tree_support
from tests.ragged import NUM_NEW, ROWS, new_tokens, padded
from tests.zoo import build

LONGEST = 5
# no two sums of these are alike, so that a pass or a node more or less shows
COSTS = StepCosts(0.17, [0.0, 1.0, 1.07, 1.19, 1.31, 1.53, 1.71])
RULES: dict[str, Length] = {
    "adaptive": AdaptiveLength(COSTS, LONGEST, memory=6),
    "adaptive_confident": AdaptiveLength(COSTS, LONGEST, chances=[0.1, 0.5, 0.6, 0.9, 1.0]),
    "confident": ConfidentLength(LONGEST, 0.4),
    "entropy": EntropyLength(LONGEST, 0.3),
}
FIXED: dict[str, Length] = {f"fixed_{n}": FixedLength(n) for n in (1, 3, LONGEST)}


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """Return a base model that was found to read trees, which takes passes of its own."""
    model = build("llama")
    tree_support(model)
    return model


@pytest.fixture(scope="module")
def draft(base: PreTrainedModel) -> PreTrainedModel:
    """Return a model that often says what the base says."""
    other = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    return other


@dataclass
class Spied:
    """A rule, and everything that it was asked and told."""

    rule: Any
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.max_tokens, self.asks = self.rule.max_tokens, self.rule.asks

    def start(self) -> Any:
        """Pass on."""
        return self.rule.start()

    def limit(self, state: Any) -> int:
        """Note the answer."""
        self.calls.append(("limit", self.rule.limit(state)))
        return int(self.calls[-1][1])

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Note what was shown, rounded: batches of other shapes round otherwise."""
        shown = [round(each, 3) for each in (*probs, *entropies)]
        self.calls.append(("goes_on", *shown))
        return bool(self.rule.goes_on(probs, entropies))

    def observe(self, state: Any, num_proposed: int, num_accepted: int) -> Any:
        """Note what was told."""
        self.calls.append(("observe", num_proposed, num_accepted))
        return self.rule.observe(state, num_proposed, num_accepted)


@contextmanager
def passes(model: PreTrainedModel) -> Iterator[list[int]]:
    """Give the number of tokens per row of every forward pass."""
    widths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield widths
    hook.remove()


SETTINGS: dict[str, tuple[str, Sampler, tuple[int, ...]]] = {
    "greedy": ("greedy", Sampler(), ()),
    "sampled": ("coupled", Sampler(temperature=0.9, seed=3), ()),
    "ended": ("greedy", Sampler(temperature=1.0, seed=4), tuple(range(0, 64, 9))),
}


@pytest.fixture(scope="module")
def recorded(base: PreTrainedModel, draft: PreTrainedModel) -> dict[str, list[Recording]]:
    """Return recordings of all prompts with each of SETTINGS."""
    found = {}
    for setting, (sampling, sampler, eos) in SETTINGS.items():
        make = partial(DraftModelDrafter, draft, sampling=sampling)
        found[setting] = [
            record(
                base,
                make,
                prompt,
                max_tokens=LONGEST,
                max_new_tokens=NUM_NEW,
                sampler=sampler,
                eos_token_ids=eos,
            )
            for prompt in ROWS
        ]
    return found


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", FIXED | RULES)
def test_the_replay_is_what_decoding_does(
    name: str,
    setting: str,
    base: PreTrainedModel,
    draft: PreTrainedModel,
    recorded: dict[str, list[Recording]],
) -> None:
    """A simulator that gains, spends or tells a rule what no run does judges another method."""
    rule = (FIXED | RULES)[name]
    sampling, sampler, eos = SETTINGS[setting]
    for prompt, recording in zip(ROWS, recorded[setting], strict=True):
        real, replayed = Spied(rule), Spied(rule)
        drafter = DraftModelDrafter(draft, real, sampling=sampling)
        with passes(base) as verified, passes(draft) as drafted:
            result = decode(
                base,
                drafter,
                prompt,
                max_new_tokens=NUM_NEW,
                sampler=sampler,
                eos_token_ids=eos,
            )
        judged = judge(replayed, [recording], COSTS)
        assert judged.accept_lengths[0] == tuple(result.accept_lengths)
        steps = verified[1:]
        assert len(steps) == result.num_steps and result.num_replays == 0
        assert sum(judged.lengths[0]) == len(drafted)
        assert judged.cost == pytest.approx(
            len(drafted) * COSTS.draft + sum(COSTS.verify[width] for width in steps)
        )
        assert judged.plain_cost == len(result.new_tokens) - 1
        # the last step ends the text: what a rule is told of it changes nothing
        assert replayed.calls[:-1] == real.calls[:-1]


def test_guesses_were_refused_and_accepted(recorded: dict[str, list[Recording]]) -> None:
    """The test above would pass on texts where nothing, or everything, is accepted."""
    for setting in ("greedy", "sampled"):
        assert {0, 1, 2, LONGEST} <= {n for each in recorded[setting] for n in each.num_right}
    assert 2 < max(each.num_tokens for each in recorded["ended"]) < NUM_NEW


@pytest.mark.parametrize("name", ["adaptive", "adaptive_confident"])
def test_a_row_of_a_batch_is_judged_as_alone(
    name: str,
    base: PreTrainedModel,
    draft: PreTrainedModel,
    recorded: dict[str, list[Recording]],
) -> None:
    """Lengths learned from other rows: a table of single prompts would not hold for a batch."""
    judged = judge(RULES[name], recorded["greedy"], COSTS)
    drafter = DraftModelDrafter(draft, RULES[name])
    settings: dict[str, Any] = {**padded(ROWS), "max_new_tokens": NUM_NEW}
    result = decode(base, drafter, **settings)
    assert judged.accept_lengths == tuple(tuple(row.accept_lengths) for row in result.rows)
    assert [len(tokens) for tokens in new_tokens(result)] == [NUM_NEW] * len(ROWS)


def test_copies_can_be_recorded(base: PreTrainedModel) -> None:
    """A drafter that ignores the rule and has fewer guesses to offer at some positions."""
    text = torch.tensor([[5, 6, 7, 8] * 5])
    recording = record(
        base,
        lambda length: NgramDrafter(num_tokens=length.max_tokens),
        text,
        max_tokens=4,
        max_new_tokens=NUM_NEW,
    )
    assert recording.num_tokens == NUM_NEW and set(recording.num_drafted) <= {0, 4}
    judged = judge(FixedLength(4), [recording], replace(COSTS, draft=0.0))
    result = decode(base, NgramDrafter(num_tokens=4), text, max_new_tokens=NUM_NEW)
    assert judged.accept_lengths[0] == tuple(result.accept_lengths)


def recording_of(right: list[int], probs: list[tuple[float, ...]]) -> Recording:
    """Return a text with so many right guesses of three at each position."""
    num = len(right)
    return Recording("made", 3, num + 1, (3,) * num, tuple(right), tuple(probs), tuple(probs))


def test_rates_and_chances_are_counted() -> None:
    """A prior or a calibration that counts guesses behind a wrong one is too low everywhere."""
    probs = [(0.1, 0.9), (0.9, 0.1), (0.9, 0.9), (), (), ()]
    made = recording_of([0, 1, 3, 0, 0, 0], probs)
    assert learn_rates([made], 3) == pytest.approx([2 / 6, 1 / 2, 1.0])
    # decided: .1 wrong | .9 right, .1 wrong | .9 right, .9 right (the third has no confidence)
    assert learn_chances([made], bins=2) == pytest.approx([(0 + 0.25) / 3, (3 + 0.75) / 4])
    rising = learn_chances([recording_of([1, 0], [(0.1, 0.2), (0.9, 0.9)])], bins=4)
    assert rising == sorted(rising)
    # the text ended: nobody knows whether the second guess was right
    ended = recording_of([1], [(0.2, 0.2)])
    assert learn_rates([ended], 2) == [1.0, 0.0]
    assert learn_chances([ended], bins=1) == [(1 + 0.5) / 2]


def test_what_was_not_recorded_is_refused() -> None:
    """A longer rule would be judged as if its last tokens had all been wrong."""
    made = recording_of([1], [(0.5, 0.5)])
    with pytest.raises(ValueError, match="up to 4 tokens, but drafts of 3 were recorded"):
        judge(FixedLength(4), [made], COSTS)
    with pytest.raises(ValueError, match="confidences, but none were recorded"):
        judge(ConfidentLength(3), [replace(made, probs=())], COSTS)


def test_sampled_drafts_are_refused(base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Their texts depend on the length: one recording says nothing about other lengths."""
    prompt: Tensor = ROWS[0]
    with pytest.raises(ValueError, match="only drafters with deterministic guesses"):
        record(
            base,
            lambda length: DraftModelDrafter(draft, length, sampling="sampled"),
            prompt,
            max_tokens=2,
            max_new_tokens=4,
        )
