"""Prompts of different lengths, and what their continuations are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

from specheads.decoding import stream
from specheads.decoding.choose import Chooser
from specheads.decoding.loop import Settings
from specheads.decoding.result import DecodeResult, Output
from specheads.decoding.stream import Job
from specheads.verification.sampling import Sampler

NUM_NEW = 18
PAD = 63
ROWS = [torch.randint(PAD, (1, n), generator=torch.Generator().manual_seed(n)) for n in (9, 3, 6)]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Return left-padded rows as generate() takes them."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - row.shape[1] :] = row[0]
        mask[i, longest - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def texts_of(result: DecodeResult, rows: list[Tensor]) -> list[list[int]]:
    """Return prompts and new tokens without padding."""
    return [row[0].tolist() + new.new_tokens for row, new in zip(rows, result.rows, strict=True)]


def new_tokens(result: DecodeResult) -> list[list[int]]:
    """Return what each row gained."""
    return [row.new_tokens for row in result.rows]


class Alternate(LogitsProcessor):
    """Forbids even tokens at even calls, odd ones at odd calls; checks that it is called in order.

    It has a state: neither order nor number of its calls may depend on how guesses are verified.
    """

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Shut out half of the tokens."""
        (text,) = input_ids.tolist()
        if self.texts:
            assert text[:-1] == self.texts[-1]
        self.texts.append(text)
        scores = scores.clone()
        scores[:, len(self.texts) % 2 :: 2] = -float("inf")
        return scores


class After(StoppingCriteria):
    """Stops behind a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Look at the last token."""
        return input_ids[:, -1] == self.token


def steps_and_differing(
    model: PreTrainedModel, turns: Sequence[tuple[int, Sequence[Job]]]
) -> tuple[int, int]:
    """Continue jobs, drawn at T=1, in streams of so many rows, one after the other.

    Returns:
        After how many different texts logits were seen, and how often others than before.
    """
    seen: dict[tuple[int, ...], Tensor] = {}
    choose, differing = Chooser.next_tokens, 0

    def kept(chooser: Chooser, output: Output, logits: Tensor, rows: list[int]) -> list[int]:
        nonlocal differing
        for row, found in zip(rows, logits, strict=True):
            differing += not seen.setdefault(tuple(output.texts[row]), found).equal(found)
        return choose(chooser, output, logits, rows)

    with patch.object(Chooser, "next_tokens", kept):
        for size, jobs in turns:
            waiting = list(jobs)

            def take(num: int, waiting: list[Job] = waiting) -> list[Job]:
                taken, waiting[:num] = waiting[:num], []
                return taken

            rows = stream.Stream(model, None, Settings(sampler=Sampler(1.0)), batch_size=size)
            assert sum(len(ended) for ended in rows.run(take)) == len(jobs)
    return len(seen), differing
