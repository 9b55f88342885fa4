"""A draft model's chain: the laws, a slow drafter that says the same, vocabularies, bookkeeping."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.config import ConfigError
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.length import (
    AdaptiveLength,
    FixedLength,
    Length,
    StepCosts,
)
from specheads.verification.sampling import Sampler, draft_noise, gumbel_noise
from tests.drafter_laws import (
    check_greedy_identity,
)
from tests.ragged import NUM_NEW, ROWS, new_tokens, padded
from tests.zoo import VOCAB, build

LENGTHS: dict[str, Length] = {
    "fixed": FixedLength(3),
    "confident": AdaptiveLength(StepCosts(0.03, [0] + [1] * 6), 4),
}


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """Return a base model."""
    return build("llama")


@pytest.fixture(scope="module")
def draft(base: PreTrainedModel) -> PreTrainedModel:
    """Return a model that often says what the base says."""
    return near(base, 0.015)


def near(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """Return a copy whose weights are a little off."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return other


@dataclass
class Compared:
    """The drafter, beside a slow one without cache, batch and bookkeeping.

    Attributes:
        fast: under test.
        max_length: the longest chain seen.
        shortest: the shortest.
    """

    fast: DraftModelDrafter
    max_length: int = 0
    shortest: int = 99
    taps: tuple[str, ...] = field(default=())

    @property
    def deterministic(self) -> bool:
        """As it says."""
        return self.fast.deterministic

    def start(self, prefill: Prefill) -> Any:
        """Remember the texts, too."""
        texts = [[*ids, int(root)] for ids, root in zip(prefill.ids, prefill.root, strict=True)]
        return self.fast.start(prefill), texts, list(range(len(texts))), prefill

    def propose(self, state: Any) -> Candidates:
        """Compare."""
        fast, texts, rows, prefill = state
        found = self.fast.propose(fast)
        for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
            expected, probs = self._slowly(text, row, prefill)
            guesses = [token for token in found.tokens[i, 1:].tolist() if token >= 0]
            assert guesses == expected
            assert found.tokens[i, 1 + len(guesses) :].eq(-1).all()
            self.max_length = max(self.max_length, len(guesses))
            self.shortest = min(self.shortest, len(guesses))
            if found.draft_probs is not None:
                assert found.draft_probs.shape == (*found.tokens.shape, prefill.vocab_size)
                torch.testing.assert_close(
                    found.draft_probs[i, : len(probs)], torch.stack(probs), rtol=1e-3, atol=1e-5
                )
        return found

    def _slowly(self, text: list[int], row: int, prefill: Prefill) -> tuple[list[int], Any]:
        model, length, sampler = self.fast.draft, self.fast.length, prefill.sampler
        known = model.get_input_embeddings().weight.shape[0]
        tokens, chosen, all_probs = list[int](), list[float](), []
        root = torch.tensor([len(text) - 1])
        while len(tokens) < length.max_tokens:
            ids = torch.tensor([[min(token, known - 1) for token in [*text, *tokens]]])
            logits = model(ids).logits[0, -1].float()
            missing = max(0, prefill.vocab_size - len(logits))
            logits = torch.nn.functional.pad(logits, (0, missing), value=-float("inf"))
            logits = logits[: prefill.vocab_size]
            probs, noise = sampler.probs(logits), torch.zeros(())
            if sampler.temperature and self.fast.sampling == "coupled":
                position = root + 1 + len(tokens)
                noise = gumbel_noise([sampler.seed + row], position, len(logits))[0]
            if sampler.temperature and self.fast.sampling == "sampled":
                levels = draft_noise([sampler.seed + row], root, len(tokens) + 1, len(logits))
                noise = levels[0, -1]
            tokens.append(int((probs.log() + noise).argmax()))
            chosen.append(float(probs[tokens[-1]]))
            all_probs.append(probs)
            if not length.goes_on(chosen):
                break
        return tokens, all_probs

    def observe(self, state: Any, result: StepResult) -> Any:
        """Append to the texts."""
        fast, texts, rows, prefill = state
        for text, new in zip(texts, result.new_tokens, strict=True):
            text.extend(new)
        return self.fast.observe(fast, result), texts, rows, prefill

    def select(self, state: Any, rows: Tensor) -> Any:
        """Keep some rows."""
        fast, texts, numbers, prefill = state
        kept = rows.tolist()
        return (
            self.fast.select(fast, rows),
            [texts[i] for i in kept],
            [numbers[i] for i in kept],
            prefill,
        )


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_guesses_are_those_of_a_slow_drafter(
    temperature: float, sampling: str, name: str, base: PreTrainedModel, draft: PreTrainedModel
) -> None:
    """Prevents guesses from a wrong text: the base repairs them, so that only speed would show."""
    drafter = Compared(DraftModelDrafter(draft, LENGTHS[name], sampling=sampling))
    result = decode(
        base,
        drafter,
        **padded(ROWS),
        max_new_tokens=NUM_NEW,
        sampler=Sampler(temperature, seed=2),
        eos_token_ids=(1, 2, 3, 4),
    )
    assert result.accept_length > 1.05
    if name == "fixed":
        assert drafter.max_length == drafter.shortest == 3
    else:
        assert 1 <= drafter.shortest < drafter.max_length


@pytest.mark.parametrize("vocab_size", [48, 80])
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "coupled"])
def test_vocabularies_may_differ_in_size(
    sampling: str, vocab_size: int, base: PreTrainedModel
) -> None:
    """Prevents guesses that the base has no embedding for, and probabilities of other tokens."""
    other = build("llama", vocab_size=vocab_size, seed=4)
    with torch.no_grad():
        other.get_output_embeddings().weight[VOCAB:].mul_(4)  # it would like to say these
    drafter = Compared(DraftModelDrafter(other, FixedLength(2), sampling=sampling))
    for temperature in (0.0, 1.0):
        sampler = Sampler(temperature, seed=1)
        settings: dict[str, Any] = {"max_new_tokens": 12, "sampler": sampler}
        result = decode(base, drafter, **padded(ROWS), **settings)
        if temperature == 0 or sampling != "sampled":
            plain = plain_decode(base, **padded(ROWS), **settings)
            assert new_tokens(result) == new_tokens(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_draft_model_has_a_dtype_of_its_own(
    dtype: torch.dtype, base: PreTrainedModel, draft: PreTrainedModel
) -> None:
    """Prevents probabilities of unequal dtypes in one comparison, and a crash over them."""
    other = copy.deepcopy(draft).to(dtype)
    for sampling in ("greedy", "sampled", "coupled"):
        drafter = DraftModelDrafter(other, LENGTHS["confident"], sampling=sampling)
        for sampler in (Sampler(), Sampler(1.0, seed=3)):
            result = decode(base, drafter, ROWS[0], max_new_tokens=12, sampler=sampler)
            if sampler.temperature == 0 or sampling != "sampled":
                plain = plain_decode(base, ROWS[0], max_new_tokens=12, sampler=sampler)
                assert result.new_tokens == plain.new_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_base_is_its_own_best_draft(temperature: float, base: PreTrainedModel) -> None:
    """Prevents noise of other positions in coupled drafts, and a cache that lags behind."""
    drafter = DraftModelDrafter(base, FixedLength(3), sampling="coupled")
    sampler = Sampler(temperature, seed=5)
    result = decode(base, drafter, **padded(ROWS), max_new_tokens=17, sampler=sampler)
    assert all(row.accept_lengths == [4] * 4 for row in result.rows)
    sampled = DraftModelDrafter(base, FixedLength(3), sampling="sampled")
    result = decode(base, sampled, **padded(ROWS), max_new_tokens=17, sampler=sampler)
    assert all(row.accept_lengths == [4] * 4 for row in result.rows)


class Reads:
    """Positions that a model reads, pass by pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.passes: list[list[int]] = []
        DraftModelDrafter(model, FixedLength(1))  # its self-test is over before we look
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.passes.append(kwargs["position_ids"][0].tolist())


def test_every_token_is_read_once(base: PreTrainedModel) -> None:
    """Prevents a draft that reads its own guesses again, or makes a pass whose result is unused."""
    draft = copy.deepcopy(base)
    reads = Reads(draft)
    result = decode(base, DraftModelDrafter(draft, FixedLength(3)), ROWS[0], max_new_tokens=21)
    assert result.accept_lengths == [4] * 5
    positions = [position for each in reads.passes for position in each]
    assert positions == list(range(len(positions)))
    assert len(reads.passes) == 3 * result.num_steps
    assert [len(each) for each in reads.passes[1:]] == [1, 1] + [2, 1, 1] * 4


def test_a_conversation_reads_what_is_new(base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Prevents that every turn of a conversation costs the draft model the whole of it."""
    other = copy.deepcopy(draft)
    reads, drafter, cache = Reads(other), DraftModelDrafter(other, FixedLength(3)), TreeCache()
    first = decode(base, drafter, ROWS[0], max_new_tokens=6, cache=cache)
    text = torch.cat([ROWS[0], torch.tensor([[*first.new_tokens, 5, 6, 7]])], dim=1)
    reads.passes.clear()
    second = decode(base, drafter, text, max_new_tokens=8, cache=cache)
    assert second.new_tokens == plain_decode(base, text, max_new_tokens=8).new_tokens
    num_read = len(reads.passes[0])
    assert 4 <= num_read <= 6  # the three, the root, and what the first turn had not read
    reads.passes.clear()
    decode(base, drafter, text, max_new_tokens=8)
    assert len(reads.passes[0]) == text.shape[1] + 1  # another text, as far as anyone can know


class Told:
    """A fixed length that keeps what it is told, and may ask for nothing in some steps.

    Args:
        num_tokens: per step.
        every: it asks for tokens in every so many steps only.
    """

    asks = False

    def __init__(self, num_tokens: int, every: int = 1) -> None:
        self.max_tokens, self.every = num_tokens, every
        self.told: list[tuple[int, int]] = []

    def start(self) -> int:
        """Count steps."""
        return 0

    def limit(self, state: int) -> int:
        """Return 0 but for every so many steps."""
        return 0 if state % self.every else self.max_tokens

    def goes_on(self, probs: Sequence[float]) -> bool:
        """Not be asked."""
        raise AssertionError

    def observe(self, state: int, num_proposed: int, num_accepted: int) -> int:
        """Keep it."""
        self.told.append((num_proposed, num_accepted))
        return state + 1


def test_a_rule_hears_what_was_decided(base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Prevents refusals that never were: of guesses behind the limit or the end of the text."""
    for model in (base, draft):
        told = Told(3)
        result = decode(base, DraftModelDrafter(model, told), ROWS[0], max_new_tokens=19)
        *whole, last = [length - 1 for length in result.accept_lengths]
        assert told.told[:-1] == [(3, num) for num in whole]
        assert told.told[-1][1] >= last
        if model is base:
            assert all(proposed == accepted for proposed, accepted in told.told)
    plain = plain_decode(base, ROWS[0], max_new_tokens=19).new_tokens
    told = Told(3)
    decode(
        base, DraftModelDrafter(base, told), ROWS[0], max_new_tokens=19, eos_token_ids=plain[6:7]
    )
    assert all(proposed == accepted for proposed, accepted in told.told)


def test_no_guesses_cost_no_pass(base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Prevents paying for a draft model in steps that do not use it, or losing the text there."""
    other, told = copy.deepcopy(draft), Told(3, every=2)
    reads, drafter = Reads(other), DraftModelDrafter(other, told)
    result = decode(base, drafter, ROWS[0], max_new_tokens=NUM_NEW)
    assert result.new_tokens == plain_decode(base, ROWS[0], max_new_tokens=NUM_NEW).new_tokens
    assert len(reads.passes) == 3 * -(-result.num_steps // 2)
    assert (0, 0) in told.told and len(told.told) == result.num_steps
    check_greedy_identity(base, lambda: DraftModelDrafter(draft, Told(3, every=2)))


def test_a_draft_model_may_have_fewer_positions(base: PreTrainedModel) -> None:
    """Prevents a crash, or endless wrong guesses, where a text outgrows the draft model."""
    short = build("gpt2", n_positions=16, max_position_embeddings=16)
    reads = Reads(short)
    drafter = DraftModelDrafter(short, FixedLength(3))
    for limit in (12, 40):
        plain = plain_decode(base, ROWS[0], max_new_tokens=limit)
        result = decode(base, drafter, ROWS[0], max_new_tokens=limit)
        assert result.new_tokens == plain.new_tokens
    assert max(position for each in reads.passes for position in each) == 15
    reads.passes.clear()
    decode(base, drafter, torch.cat([ROWS[0], ROWS[0]], dim=1), max_new_tokens=4)
    assert not reads.passes


def test_a_draft_model_of_another_kind(base: PreTrainedModel) -> None:
    """Prevents that only models like the base can draft: windows, ALiBi, no rotary positions."""
    for name in ("mistral-window", "gpt2", "bloom"):
        other = build(name, seed=3)
        result = decode(base, DraftModelDrafter(other, FixedLength(2)), ROWS[0], max_new_tokens=10)
        assert result.new_tokens == plain_decode(base, ROWS[0], max_new_tokens=10).new_tokens
    with pytest.raises(ConfigError, match="1 row at a time, got 3 rows"):
        decode(base, DraftModelDrafter(other, FixedLength(2)), **padded(ROWS), max_new_tokens=4)


def test_what_cannot_draft_is_refused(base: PreTrainedModel) -> None:
    """Prevents a misspelt way of sampling, and a state that cannot forget a refused guess."""
    with pytest.raises(ValueError, match=r"sampling must be one of .*'sample'"):
        DraftModelDrafter(base, FixedLength(2), sampling="sample")
    with pytest.raises(ConfigError, match="recurrent state"):
        DraftModelDrafter(build("mamba"), FixedLength(2))


def test_coupled_guesses_are_accepted_as_promised(
    base: PreTrainedModel, draft: PreTrainedModel
) -> None:
    """Prevents noise that is the base's, but of another position, token or row."""
    num_rows = 600
    prompt = ROWS[1].expand(num_rows, -1)
    drafter = DraftModelDrafter(draft, FixedLength(1), sampling="coupled")
    result = decode(base, drafter, prompt, max_new_tokens=3, sampler=Sampler(1.0, seed=1))
    accepted = torch.tensor([row.accept_lengths[0] - 1.0 for row in result.rows])
    read = result.sequences[:, : prompt.shape[1] + 1]
    with torch.no_grad():
        shared = [model(read).logits[:, -1].softmax(-1) for model in (base, draft)]
    distance = (shared[0] - shared[1]).abs().sum(-1) / 2
    margin = 4 * 0.5 / num_rows**0.5
    assert 0.1 < float(distance.mean()) < 0.9
    least = float(((1 - distance) / (1 + distance)).mean())
    assert least - margin < float(accepted.mean()) < float((1 - distance).mean()) + margin
    assert least > margin + 0.1  # independent draws would be equal much more rarely
