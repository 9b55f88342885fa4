"""Rows that come and go: each with the tokens it would get alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from specheads.decoding.loop import Settings, plain_decode
from specheads.decoding.stream import Job, Prefixes, Stream
from specheads.models.forward import ModelPass
from specheads.verification.sampling import Sampler
from tests import zoo

END = tuple(range(8))  # tokens that end a row: an eighth of all
OPENING = [9, 30, 11, 50, 12, 9]


def alone(model: object, job: Job, sampler: Sampler) -> list[int]:
    """Return what a prompt is continued with in a batch of its own."""
    return plain_decode(
        model,  # type: ignore[arg-type]
        torch.tensor([job.ids]),
        max_new_tokens=job.limit,
        sampler=Sampler(sampler.temperature, sampler.top_k, sampler.top_p, job.seed),
        eos_token_ids=END,
    ).new_tokens


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3", "falcon", "deepseek_v3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_know_nothing_of_each_other(name: str, temperature: float) -> None:
    """A newcomer in the place of a row that has ended must see neither its text nor its seed.

    Prompts of 1 to 40 tokens come in threes, twos and ones, half of them with one beginning; the
    reference decodes each alone.
    """
    model = zoo.build(name)
    chance = random.Random(3)
    jobs = [
        Job(
            OPENING * (i % 4 < 2)
            + [chance.randrange(8, zoo.VOCAB) for _ in range(chance.choice([1, 3, 8, 40]))],
            chance.choice([1, 2, 30]),
            seed=chance.randrange(1 << 31),
            owner=i,
        )
        for i in range(14)
    ]
    sampler = Sampler(temperature, top_k=20)
    stream = Stream(model, None, Settings(sampler=sampler, eos_token_ids=END), batch_size=3)
    found: dict[int, list[int]] = {}
    waiting = list(jobs)
    while waiting or stream.free < 3:
        if stream.free >= chance.choice([1, 1, 2, 3]):
            new, waiting = waiting[: stream.free], waiting[stream.free :]
            stream.add(new)
        if stream.free < 3:
            stream.step()
        for job, row in stream.take_ended():
            assert job.owner not in found
            found[job.owner] = row.new_tokens
            assert row.finished == (row.new_tokens[-1] in END)
    assert len(found) == len(jobs)
    for job in jobs:
        assert found[job.owner] == alone(model, job, sampler), job.owner


def test_what_prompts_begin_with_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template's system turn, read again for each of thousands of prompts, costs a third more."""
    read: list[int] = []
    plain = ModelPass.read

    def counted(self: ModelPass, tokens: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        read.append(tokens.numel())
        return plain(self, tokens, counts)

    monkeypatch.setattr(ModelPass, "read", counted)
    jobs = [Job(OPENING + [13 + i, 20], 1, seed=i) for i in range(5)]
    stream = Stream(zoo.build("llama"), None, Settings(), batch_size=3)
    stream.add(jobs[:1])
    stream.add(jobs[1:3])  # the first two that come together show what they share
    stream.add(jobs[3:])
    assert read == [8, 6, 2 * 2, 2 * 2]
    stream.add([Job([40, 41, 42], 1), Job([9, 30, 44], 1)])  # others share less of it, or nothing
    assert read[4:] == [2 * 3]


def test_rows_grow_past_a_block() -> None:
    """Caches of different sizes are joined: the smaller one's free slots must hold no garbage."""
    model = zoo.build("llama", max_position_embeddings=700)
    long = Job([8 + i % 50 for i in range(500)], 100, seed=1)
    short = Job([9, 10], 60, seed=2)
    sampler = Sampler(1.0)
    for jobs in ((long, short), (short, long)):
        stream = Stream(model, None, Settings(sampler=sampler), batch_size=2)
        stream.add(jobs[:1])
        for _ in range(5):
            stream.step()
        stream.add(jobs[1:])
        while stream.free < 2:
            stream.step()
        for job, row in stream.take_ended():
            expected = plain_decode(
                model,
                torch.tensor([job.ids]),
                max_new_tokens=job.limit,
                sampler=Sampler(1.0, seed=job.seed),
            )
            assert row.new_tokens == expected.new_tokens


def test_what_does_not_fit_is_refused() -> None:
    """A job without tokens, or more jobs than rows, would be read as padding."""
    stream = Stream(zoo.build("llama"), None, Settings(), batch_size=1)
    for jobs in ([Job([9], 1), Job([9], 1)], [Job([], 3)], [Job([9], 0)]):
        with pytest.raises(ValueError, match="jobs for 1 rows, or an empty one"):
            stream.add(jobs)
    with pytest.raises(ValueError):
        Stream(zoo.build("bloom"), None, Settings(), batch_size=2)


def test_who_is_cancelled_before_being_read_disturbs_nobody() -> None:
    """A client that hangs up while its prompt waits would end all who share passes with it."""
    model = zoo.build("llama")
    jobs = [Job([9 + (i + n) % 50 for i in range(20)], 5, seed=n, owner=n) for n in range(3)]
    how = Settings(sampler=Sampler(1.0))
    stream = Stream(model, None, how, batch_size=3, piece=8, prefixes=Prefixes(100))
    for job in jobs:
        stream.add([job])  # the first is read, piece by piece; the others wait
    stream.cancel(stream.jobs[1][0])
    ended: dict[int, list[int]] = {}
    while stream.free < 3:
        stream.step()
        ended |= {job.owner: row.new_tokens for job, row in stream.take_ended()}
    sampler = Sampler(1.0)
    assert ended == {0: alone(model, jobs[0], sampler), 1: [], 2: alone(model, jobs[2], sampler)}
