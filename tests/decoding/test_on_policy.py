"""Batches that the draft model wrote itself: its own words, in their places, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.data.chat import Encoded
from specheads.data.pack import PackedBatches
from specheads.decoding.loop import plain_decode
from specheads.decoding.stream import continue_prompts
from specheads.losses.cross_entropy import IGNORE, count_valid
from specheads.models.output import packed_hidden
from specheads.training.teachers import OnPolicyBatches
from specheads.verification.sampling import Sampler
from tests.zoo import build

SEQ_LEN, PAD = 24, 63


def document(name: str, ids: Sequence[int], learned: Sequence[bool]) -> Encoded:
    """Return a document whose tokens are learned where ``learned`` says so."""
    array = np.array(ids, dtype=np.int32)
    return Encoded(name, array, np.where(np.array(learned), array, IGNORE).astype(np.int32))


def some_documents(number: int = 12) -> list[Encoded]:
    """Return texts, answers to prompts and dialogues with two answers."""
    generator = np.random.default_rng(0)
    found = []
    for i in range(number):
        ids = generator.integers(0, 60, size=int(generator.integers(4, 13))).tolist()
        learned = [True] * len(ids)
        if i % 3 == 1:
            learned = [j >= 2 for j in range(len(ids))]
        if i % 3 == 2:
            learned = [j in (1, len(ids) - 1) for j in range(len(ids))]
        found.append(document(f"d{i}", ids, learned))
    return found


def packed(documents: list[Encoded], rows: int = 2) -> PackedBatches:
    """Return batches of two rows."""
    return PackedBatches(documents, seq_len=SEQ_LEN, rows=rows, seed=5, pad_token_id=PAD)


class Writer:
    """Answers with 60, 61, ..., half the time ending early; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], list[int], list[int]]] = []

    def __call__(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], seeds: Sequence[int]
    ) -> list[list[int]]:
        """Answer."""
        self.asked.append(([list(p) for p in prompts], list(limits), list(seeds)))
        return [
            [60 + i % 3 for i in range(max(1, limit - seed % 2))]
            for limit, seed in zip(limits, seeds, strict=True)
        ]


def on_policy(documents: list[Encoded], writer: Any = None, **changes: Any) -> OnPolicyBatches:
    """Return batches all of which are the draft model's own, unless ``changes`` say otherwise."""
    options: dict[str, Any] = {"share": 1.0, "max_new_tokens": 6, "seed": 7, "vocab_size": 64}
    options["pad_token_id"] = PAD
    return OnPolicyBatches(packed(documents), writer or Writer(), **options | changes)


def parts(batch: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """Return (row, segment, start, stop) of every document."""
    found = []
    for row, segments in enumerate(batch["segment_ids"].tolist()):
        for segment in sorted(set(segments) - {0}):
            places = [i for i, s in enumerate(segments) if s == segment]
            assert places == list(range(places[0], places[-1] + 1))
            found.append((row, segment, places[0], places[-1] + 1))
    return found


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(2, SEQ_LEN), min_size=1, max_size=8),
    kinds=st.integers(0, 3**8),
    limit=st.integers(1, 9),
)
def test_prompts_stay_and_answers_are_what_was_written(
    lengths: list[int], kinds: int, limit: int
) -> None:
    """A prompt that is learned, or an answer one place off, is a teacher of other tokens."""
    documents = []
    for number, length in enumerate(lengths):
        learned = [True] * length
        if kind := kinds // 3**number % 3:
            learned = [j >= kind for j in range(length)]
        documents.append(document(f"d{number}", range(length), learned))
    writer = Writer()
    batches = on_policy(documents, writer, max_new_tokens=limit)
    before, after = next(packed(documents)), next(batches)
    prompts, limits, seeds = writer.asked[0]
    answers = Writer()(prompts, limits, seeds)
    assert len(set(seeds)) == len(seeds)
    places = parts(after)
    assert len(places) == len(prompts)
    texts = [
        (row, before["input_ids"][row, start:stop].tolist())
        for row, _, start, stop in parts(before)
        if (before["labels"][row, start + 1 : stop] != IGNORE).any()  # else there is no answer
    ]
    for (row, _, start, stop), (old_row, text), prompt, answer, allowed in zip(
        places, texts, prompts, answers, limits, strict=True
    ):
        assert row == old_row
        assert prompt == text[: len(prompt)] and 1 <= len(prompt) < len(text)
        assert allowed == min(limit, len(text) - len(prompt))
        assert after["input_ids"][row, start:stop].tolist() == prompt + answer
        assert after["labels"][row, start:stop].tolist() == [IGNORE] * len(prompt) + answer
        assert after["position_ids"][row, start:stop].tolist() == list(range(stop - start))
    padding = after["segment_ids"] == 0
    assert (after["labels"][padding] == IGNORE).all()
    assert (after["input_ids"][padding] == PAD).all()
    assert int(count_valid(after["labels"], after["segment_ids"], 0)[0]) == sum(map(len, answers))
    for row, positions in enumerate(after["position_ids"].tolist()):
        segments = after["segment_ids"][row].tolist()
        for (a, b), (s, t) in zip(pairwise(positions), pairwise(segments), strict=True):
            assert b == (a + 1 if s == t else 0)


def test_answers_of_a_batch_do_not_see_their_neighbours() -> None:
    """An answer that sees its neighbour is learned from words that decoding does not have."""
    model = build("llama")
    batch = next(on_policy(some_documents(18)[1::3], max_new_tokens=2))
    with torch.no_grad():
        hidden = packed_hidden(model, batch["input_ids"], batch["position_ids"])
        for row, _, start, stop in parts(batch):
            alone = batch["input_ids"][row : row + 1, start:stop]
            expected = packed_hidden(model, alone, torch.arange(stop - start)[None])
            torch.testing.assert_close(hidden[row : row + 1, start:stop], expected)


def test_one_answer_of_a_dialogue_is_written_anew_and_what_follows_is_left_out() -> None:
    """The user's next question belongs to another answer than the one that was just written."""
    ids = list(range(12))
    learned = [i in (2, 3, 8, 9, 10, 11) for i in ids]
    cuts, draws = set(), []
    writer = Writer()
    batches = on_policy([document("a", ids, learned)], writer)
    for _ in range(12):
        next(batches)
    for prompts, limits, seeds in writer.asked:
        draws += seeds
        cuts |= {len(prompt) for prompt in prompts}
        assert all(limit == min(6, 12 - len(p)) for p, limit in zip(prompts, limits, strict=True))
    assert cuts == {2, 8}
    assert len(set(draws)) == len(draws)  # or every visit would draw the same answer


def test_texts_are_continued_from_anywhere_behind_their_begin() -> None:
    """A begin of text alone is no prompt: all answers would begin alike."""
    for learned in ([True] * 9, [False] + [True] * 8):
        writer = Writer()
        batches = on_policy([document("a", range(9), learned)], writer)
        for _ in range(30):
            next(batches)
        assert {len(p) for prompts, _, _ in writer.asked for p in prompts} == set(range(1, 9))


def test_an_answer_ends_before_what_the_base_does_not_have() -> None:
    """The base has no embedding for what the draft model alone pads its vocabulary with."""
    batch = next(
        on_policy(some_documents(), lambda _, limits, __: [[5, 64, 5][:n] for n in limits])
    )
    assert set(batch["labels"].flatten().tolist()) == {IGNORE, 5}
    batch = next(on_policy(some_documents(), lambda prompts, _, __: [[64] for _ in prompts]))
    assert set(batch["labels"].flatten().tolist()) == {IGNORE}
    assert batch["input_ids"].max() < 64


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.3, 3), (0.5, 5), (0.7, 7), (1.0, 10)])
def test_the_share_is_that_of_the_batches_and_evenly_spread(share: float, expected: int) -> None:
    """A share drawn by lot is another one in a short run, and bunched in a long one."""
    writer = Writer()
    batches, plain = on_policy(some_documents(), writer, share=share), packed(some_documents())
    own = []
    for _ in range(10):
        asked = len(writer.asked)
        batch, original = next(batches), next(plain)
        own.append(len(writer.asked) > asked)
        if not own[-1]:
            assert all(torch.equal(batch[k], original[k]) for k in ("input_ids", "labels"))
    assert sum(own) == expected
    assert abs(sum(own[:5]) - 5 * share) <= 1


def test_a_saved_place_goes_on_with_the_same_answers() -> None:
    """A resumed run that draws other answers ends elsewhere than one that was not stopped."""
    first, found = on_policy(some_documents(), share=0.5), []
    for _ in range(3):
        next(first)
    place = first.state_dict()
    found.append([next(first) for _ in range(4)])
    again = on_policy(some_documents(), share=0.5)
    again.load_state_dict(place)
    found.append([next(again) for _ in range(4)])
    for a, b in zip(*found, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a if key != "ids")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_is_continued_as_it_would_be_alone(temperature: float) -> None:
    """An answer that depends on its neighbours changes with the number of processes."""
    model = build("llama").train()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(60, (n,), generator=generator).tolist() for n in (5, 1, 9, 3, 3)]
    limits, seeds = [7, 1, 12, 4, 9], [11, 2**61 + 5, 3, 3, 0]
    state = torch.get_rng_state()
    found = continue_prompts(
        model, prompts, limits, seeds, temperature=temperature, eos_token_ids=(9,), batch_size=2
    )
    assert model.training and torch.equal(torch.get_rng_state(), state)
    model.eval()
    for prompt, limit, seed, answer in zip(prompts, limits, seeds, found, strict=True):
        alone = plain_decode(
            model,
            torch.tensor([prompt]),
            max_new_tokens=limit,
            sampler=Sampler(temperature=temperature, seed=seed),
            eos_token_ids=(9,),
        )
        assert answer == alone.new_tokens
    assert continue_prompts(model, [], [], [], temperature=1.0) == []
