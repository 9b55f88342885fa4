"""Answer records with the base model itself, in batches, so that no answer knows its neighbours.

Each row draws with a seed made from the run's seed and its record's id. In float32 an answer is
therefore the same whatever batch it falls in, in which order, and after how many restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.data.dialogue import (
    Dialogue,
    TurnEncoder,
    UnusableRecordError,
    check_answer,
    dialogue,
)
from specheads.data.outcome import Outcome, Quarantined, Sampling, record_seed
from specheads.data.records import Record
from specheads.decoding.loop import decode
from specheads.decoding.plain import plain_decode
from specheads.decoding.result import DecodedRow
from specheads.decoding.sampling import Sampler
from specheads.drafters.contract import Drafter
from specheads.models.base import context_length
from specheads.tree import RowTrees, Tree
from specheads.tree_support import tree_support

POOL = 32  # batches whose records are sorted by length together


@dataclass(frozen=True)
class SeededRows(Sampler):
    """A sampler whose row b draws with ``seeds[b]``, whatever its place in the batch."""

    seeds: tuple[int, ...] = ()

    def scores(
        self, logits: Tensor, positions: Tensor, rows: Sequence[int] | None = None
    ) -> Tensor:
        """See :meth:`Sampler.scores`."""
        return super().scores(logits, positions, self._rows(len(logits), rows))

    def tree_scores(
        self,
        logits: Tensor,
        tree: Tree | RowTrees,
        root_positions: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """See :meth:`Sampler.tree_scores`."""
        return super().tree_scores(
            logits, tree, root_positions, self._rows(len(root_positions), rows)
        )

    def _rows(self, num_rows: int, rows: Sequence[int] | None) -> list[int]:
        # row r draws with seed + r, and seed is 0
        return [self.seeds[row] for row in (range(num_rows) if rows is None else rows)]


class Engine:
    """The base model as it answers: plainly, or with a drafter, whose answers are the same.

    Args:
        base: the base model.
        turns: gives the prompts' ids.
        sampling: how answers are drawn.
        drafter: proposes; None decodes one token at a time. Its candidates are to be deterministic.
        batch_size: dialogues that are decoded together; 1 where the model takes no more.

    Raises:
        ValueError: for a drafter that samples: its random choices belong to rows, not to records.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        turns: TurnEncoder,
        sampling: Sampling,
        *,
        drafter: Drafter | None = None,
        batch_size: int = 8,
    ) -> None:
        if drafter is not None and not drafter.deterministic:
            raise ValueError("drafter must be deterministic: a sampling one draws by row")
        self.base = base
        self.turns = turns
        self.sampling = sampling
        self.drafter = drafter
        self.batch_size = batch_size if tree_support(base).kind == "tree" else 1
        self.context = context_length(base) or 1 << 40

    def answer(
        self,
        records: Sequence[Record],
        generation: dict[str, Any],
        tokenizer_digest: str,
    ) -> Iterator[Outcome]:
        """Answer records; yield what became of each batch.

        Args:
            records: in an order of which every beginning is a fair sample; neighbours are sorted by
                length within :data:`POOL` batches.
            generation: JSON about the engine, for every answered record.
            tokenizer_digest: of the tokenizer, for the stored ids.
        """
        size = self.batch_size * POOL
        for start in range(0, len(records), size):
            early = Outcome()
            talks: list[Dialogue] = []
            for record in records[start : start + size]:
                try:
                    talks.append(dialogue(record))
                except UnusableRecordError as error:
                    early.quarantined.append(Quarantined(record, error.reason, str(error)))
            talks = self._each(talks, self.turns.ask, early)
            if early.quarantined:
                yield early
            talks.sort(key=lambda talk: (len(talk.turns), len(talk.ids)))
            for i in range(0, len(talks), self.batch_size):
                batch = talks[i : i + self.batch_size]
                yield self._answer_batch(batch, generation, tokenizer_digest)

    def _answer_batch(
        self,
        talks: list[Dialogue],
        generation: dict[str, Any],
        tokenizer_digest: str,
    ) -> Outcome:
        outcome = Outcome()
        while talks := self._each(talks, self._check_room, outcome):
            rows = self.decode([t.ids for t in talks], [self._seed(t) for t in talks])
            outcome.num_tokens += sum(len(row.new_tokens) for row in rows)
            row_of = {talk.id: row for talk, row in zip(talks, rows, strict=True)}
            talks = self._each(talks, partial(self._take, row_of), outcome)
            for talk in [talk for talk in talks if talk.finished]:
                tokens = {"ids": talk.ids, "answers": talk.spans, "tokenizer": tokenizer_digest}
                outcome.answered.append(talk.answered(generation, tokens))
            going_on = [talk for talk in talks if not talk.finished]
            talks = self._each(going_on, self.turns.ask, outcome)
        return outcome

    def _each(
        self, talks: list[Dialogue], action: Callable[[Dialogue], object], outcome: Outcome
    ) -> list[Dialogue]:
        """Do ``action`` with each; return those that it is possible with."""
        kept = []
        for talk in talks:
            try:
                action(talk)
            except UnusableRecordError as error:
                outcome.quarantined.append(Quarantined(talk.record, error.reason, str(error)))
            else:
                kept.append(talk)
        return kept

    def _seed(self, talk: Dialogue) -> int:
        return record_seed(self.sampling.seed, talk.id)

    def _check_room(self, talk: Dialogue) -> None:
        if len(talk.ids) >= self.context:
            raise UnusableRecordError(
                "too_long", f"a prompt of {len(talk.ids)} tokens in a context of {self.context}"
            )

    def _take(self, row_of: dict[str, DecodedRow], talk: Dialogue) -> None:
        row = row_of[talk.id]
        self.turns.add(talk, row.new_tokens, ended=row.finished)
        check_answer(talk, self.sampling.keep_truncated)

    def decode(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[DecodedRow]:
        """Continue prompts, each up to the limit or the end of the context."""
        limit = self.sampling.max_new_tokens
        rooms = [min(limit, self.context - len(prompt)) for prompt in prompts]
        found: dict[int, DecodedRow] = {}
        # one limit for all rows of a pass; few have another than the usual one
        order = sorted(range(len(prompts)), key=rooms.__getitem__)
        for room, group in groupby(order, rooms.__getitem__):
            members = list(group)
            rows = self._decode([prompts[i] for i in members], [seeds[i] for i in members], room)
            found |= zip(members, rows, strict=True)
        return [found[i] for i in range(len(prompts))]

    def _decode(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], limit: int
    ) -> tuple[DecodedRow, ...]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        device, sampling = self.base.device, self.sampling
        options: dict[str, Any] = {
            "max_new_tokens": limit,
            "attention_mask": torch.tensor(
                [[0] * n + [1] * (longest - n) for n in padding], device=device
            ),
            "sampler": SeededRows(
                sampling.temperature, sampling.top_k, sampling.top_p, seeds=tuple(seeds)
            ),
            "eos_token_ids": self.turns.end_tokens,
        }
        rows = [[0] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]
        ids = torch.tensor(rows, device=device)
        if self.drafter is None:
            return plain_decode(self.base, ids, **options).rows
        return decode(self.base, self.drafter, ids, **options).rows
