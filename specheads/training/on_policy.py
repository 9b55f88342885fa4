"""Batches in which the draft model wrote the answers itself, for the base to judge.

A draft model that is only shown what the base writes never sees the places where its own guesses
lead. Here it writes the answers, and learns the base's distribution along them (generalised
knowledge distillation, arXiv:2306.13649, algorithm 1; arXiv:2310.08461).

A batch is that of ``data/pack.py``: every document keeps its place and its prompt, and its answer
is written anew, at most as long as it was, so that as many tokens are read as without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from specheads import dist
from specheads.data.pack import Batch
from specheads.losses import IGNORE
from specheads.training.loop import Batches

# prompts, most new tokens of each, seed of each -> new tokens of each
Generate = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[int]], list[list[int]]]


@dataclass(frozen=True)
class _Place:
    """A document of a batch: tokens ``start`` to ``stop`` of a row, the answer from ``cut`` on."""

    row: int
    start: int
    cut: int
    stop: int


class OnPolicyBatches:
    """A share of the batches with answers of the draft model's own.

    Which batches these are, what is cut off them and what the draws are made from is a function of
    the seed and the number of the batch: the saved place is that number and the data's own place.
    """

    def __init__(
        self,
        batches: Batches,
        generate: Generate,
        *,
        share: float,
        max_new_tokens: int,
        seed: int,
        vocab_size: int,
        pad_token_id: int = 0,
    ) -> None:
        """Take the batches.

        Args:
            batches: of this rank.
            generate: lets the draft model, as it is now, continue prompts.
            share: of the batches, in [0, 1]; they are evenly spread.
            max_new_tokens: of an answer.
            seed: of the run.
            vocab_size: tokens that base and draft model both have; an answer ends before the first
                one that is not among them.
            pad_token_id: fills what a shorter answer leaves free.
        """
        self.batches, self.generate = batches, generate
        self.share, self.max_new_tokens = share, max_new_tokens
        self.seed, self.vocab_size, self.pad_token_id = seed, vocab_size, pad_token_id
        self.taken = 0

    def __next__(self) -> Batch:
        """Return the next batch, with answers of the draft model's own or the data's."""
        number, batch = self.taken, next(self.batches)
        self.taken += 1
        # to a millionth: 0.7 * 10 is not 7
        before, after = (int(n * self.share + 1e-6) for n in (number, number + 1))
        return self.rewrite(batch, number) if after > before else batch

    def rewrite(self, batch: Batch, number: int) -> Batch:
        """Return the batch ``number`` with answers of the draft model in place of its own.

        Where a document has several answers one of them is written anew, by lot, and what follows
        it is left out. A text that is all answer is continued from somewhere inside it. Learned are
        the new tokens alone.
        """
        places = self._places(batch, number)
        ids = batch["input_ids"]
        prompts = [ids[p.row, p.start : p.cut].tolist() for p in places]
        limits = [min(self.max_new_tokens, p.stop - p.cut) for p in places]
        seeds = [_hash(self.seed, dist.rank(), number, i) for i in range(len(places))]
        answers = [
            list(takewhile(lambda token: token < self.vocab_size, answer))
            for answer in self.generate(prompts, limits, seeds)
        ]
        return _laid_out(batch, places, answers, self.pad_token_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the place, the same for any number of ranks; plain JSON."""
        taken = self.taken * dist.world_size()  # by all ranks together
        return {"taken": taken, "batches": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place."""
        self.batches.load_state_dict(state["batches"])
        self.taken = int(state["taken"]) // dist.world_size()

    def _places(self, batch: Batch, number: int) -> list[_Place]:
        generator = torch.Generator().manual_seed(_hash(self.seed, dist.rank(), number, -1))
        found = []
        for row, segments in enumerate(batch["segment_ids"]):
            for segment in range(1, int(segments.max()) + 1):
                inside = (segments == segment).nonzero().flatten()
                start, stop = int(inside[0]), int(inside[-1]) + 1
                learned = (batch["labels"][row, start:stop] != IGNORE).tolist()
                cuts = _cuts(learned)
                lot = int(torch.randint(1 << 30, (1,), generator=generator))
                if cuts:
                    found.append(_Place(row, start, start + cuts[lot % len(cuts)], stop))
        return found


def _cuts(learned: Sequence[bool]) -> list[int]:
    """Return where an answer may be written anew: at its beginning, or anywhere in a text.

    Never at 0: there has to be a prompt, and a begin of text is none.
    """
    starts = [i for i in range(1, len(learned)) if learned[i] and not learned[i - 1]]
    if any(learned[:2]) and all(learned[1:]):
        return list(range(1, len(learned)))
    return starts


def _laid_out(
    batch: Batch, places: Sequence[_Place], answers: Sequence[Sequence[int]], pad_token_id: int
) -> Batch:
    """Return the batch with ``answers`` from each place's cut on; other documents are left out."""
    old = {key: batch[key] for key in ("input_ids", "labels", "position_ids", "segment_ids")}
    new: dict[str, Tensor] = {
        "input_ids": torch.full_like(old["input_ids"], pad_token_id),
        "labels": torch.full_like(old["labels"], IGNORE),
        "position_ids": torch.zeros_like(old["position_ids"]),
        "segment_ids": torch.zeros_like(old["segment_ids"]),
    }
    for place, answer in zip(places, answers, strict=True):
        row, end = place.row, place.cut + len(answer)
        written = torch.tensor(list(answer), dtype=torch.long)
        prompt, whole = slice(place.start, place.cut), slice(place.start, end)
        new["input_ids"][row, prompt] = old["input_ids"][row, prompt]
        new["input_ids"][row, place.cut : end] = written
        new["labels"][row, place.cut : end] = written
        new["segment_ids"][row, whole] = old["segment_ids"][row, whole]
        new["position_ids"][row, whole] = torch.arange(end - place.start)
    for row, segments in enumerate(new["segment_ids"]):  # padding is a document like any other
        since = 0
        for i, segment in enumerate(segments.tolist()):
            since = since + 1 if segment == 0 else 0
            if segment == 0:
                new["position_ids"][row, i] = since - 1
    return {**batch, **new}


def _hash(*numbers: int) -> int:
    """Return a number below 2^62 that depends on all of ``numbers``."""
    text = ":".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 2
