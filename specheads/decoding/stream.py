"""Decoding of one prompt after the other: a row that ends makes room for the next.

In a batch all would wait for the longest answer, which among thousands is often several times the
mean. Here a pass is over as many rows as there is room for, until the last prompts. Each row gets
the tokens that it would get alone, as in any batch. :func:`continue_prompts` does this with a model
that is being trained.

In 16 bits that holds where ``rounds_by_shape`` of specheads/models/forward.py says so: on CPUs a
row's bits depend on how many queries and keys attention is over, and on being alone, and both are
evened out. Elsewhere a near-tie may fall otherwise beside other rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice
from os.path import commonprefix
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.mask import KEY_BLOCK
from specheads.decoding.accept import Acceptance
from specheads.decoding.choose import make_chooser
from specheads.decoding.loop import Batch, Settings
from specheads.decoding.processors import RowProcessors, bind
from specheads.decoding.result import DecodedRow, Limits, Output, Stopping
from specheads.drafters.contract import Drafter, StepResult
from specheads.models.forward import ModelPass, rounds_by_shape, thresholds, undisturbed
from specheads.models.support import tree_support
from specheads.verification.sampling import Sampler


@dataclass(frozen=True)
class Job:
    """A prompt to be continued.

    Attributes:
        ids: its tokens.
        limit: of new tokens; with the prompt they have to fit the model's context.
        seed: of its draws.
        owner: whatever the caller knows it by.
        ends: tokens that end it beside those that end all rows.
        processors: logits processors that are its own, for its text alone.
        criteria: stopping criteria, likewise.
    """

    ids: list[int]
    limit: int
    seed: int = 0
    owner: Any = None
    ends: Collection[int] = ()
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    criteria: Sequence[Stopping] = ()

    @classmethod
    def of(cls, ids: list[int], how: Settings, owner: Any = None) -> Job:
        """Return a prompt that is continued as ``how`` says; its criteria may keep a state."""
        own = bind(how.logits_processor, [ids], len(ids)).rows[0]
        seed = how.sampler.seed if how.sampler else 0
        criteria: Any = how.stopping_criteria or ()
        return cls(ids, how.max_new_tokens, seed, owner, how.eos_token_ids, own, criteria)


@dataclass(eq=False, repr=False)
class Stream:
    """Rows of a model's cache, and the prompts in them.

    Args:
        model: any causal language model that can decode batches; others one row at a time.
        drafter: proposes; None decodes one token at a time.
        how: how tokens are chosen, but for what is each job's own: seeds, limits, stopping
            criteria, and logits processors that look at the text. With ``invariant`` prompts are
            read whole, one by one and from their beginnings.
        batch_size: rows.
        piece: read prompts so many tokens at a time, a piece with every step of the rows that are
            there; 0 reads them when they are added. Where positions have a threshold a prompt stays
            whole.
        prefixes: what earlier texts may share with prompts; None shares what those that come
            together begin with.
        evened: without a drafter, let a row round alike alone and beside others, where that can be
            had; a row that is alone then takes as long as two.

    Raises:
        ValueError: for several rows of a model whose masks or positions are out of reach.
    """

    model: PreTrainedModel
    drafter: Drafter | None
    how: Settings
    _: KW_ONLY
    batch_size: int = 8
    piece: int = 0
    prefixes: Prefixes | None = None
    evened: bool = True

    def __post_init__(self) -> None:
        support = tree_support(self.model)
        support.check_batch(self.batch_size)
        how, chain_only = self.how, support.kind == "chain"
        passes = {"chain_only": chain_only, "compiled": how.compile, "invariant": how.invariant}
        self._passes: dict[str, Any] = passes
        self._thresholds = thresholds(self.model)
        evened = self.evened and self.batch_size > 1 and self.drafter is None
        self._alike = evened and rounds_by_shape(self.model)
        self._jobs: dict[int, Job] = {}  # by row of the output
        self._seeds: list[int] = []
        self._own: list[LogitsProcessorList] = []
        asked = Limits(eos_token_ids=how.eos_token_ids, keep_scores=how.keep_scores)
        self.output = Output([], self.model.device, asked)
        seeded = replace(how.sampler or Sampler(), seeds=self._seeds)
        processors = RowProcessors(self._own, bind(how.logits_processor, [[0]], 1).rest)
        # plain decoding of one whole prompt is what all else is compared with, and replays nothing
        shares = self.batch_size > 1 or self.piece > 0 or self.prefixes is not None
        exact = shares or self.drafter is not None or how.compile
        self._chooser = make_chooser(self.model, self.output, seeded, processors, exact=exact)
        self._shared: TreeCache | None = None  # of one row: what prompts begin with
        self._batch: Batch | None = None
        self._readings: list[tuple[Batch, Iterator[None]]] = []
        self._verified: tuple[Sequence[int], StepResult] | None = None
        self._ended: list[int] = []

    def run(self, take: Callable[[int], Sequence[Job]]) -> Iterator[list[tuple[Job, DecodedRow]]]:
        """Decode until there are no more jobs; yield after each step those that have ended.

        Args:
            take: returns at most so many jobs, as many as there are now. It is asked whenever a
                sixteenth of the rows is free (a prompt alone is read as fast as a few together),
                and for the last time when all rows are free and it returns none.
        """
        waiting: list[Job] = []
        while True:
            if self.free >= max(1, self.batch_size // 16):
                waiting += take(self.free - len(waiting))
                num = self.num_fitting(waiting)
                self.add(waiting[:num])
                waiting = waiting[num:]
            if self.free < self.batch_size:
                self.step()
            ended = self.take_ended()
            if not ended and not waiting and self.free == self.batch_size:
                return
            yield ended

    @property
    def _rows(self) -> list[int]:
        batches = [self._batch, *(batch for batch, _ in self._readings)]
        return [row for batch in batches if batch for row in batch.numbers]

    @property
    def free(self) -> int:
        """How many rows are free."""
        return self.batch_size - len(self._rows)

    def num_fitting(self, jobs: Sequence[Job]) -> int:
        """Return how many of ``jobs``, the first ones, can be added beside the rows there are.

        Beside the free rows, a position threshold of the model's limits them: what crosses it is
        decoded alone. 0 while there are other rows only.
        """
        jobs = jobs[: self.free]
        there = [self._jobs[row] for row in self._rows]
        for num in range(len(jobs), 0, -1):
            beside = [*there, *jobs[:num]]
            spans = [(len(job.ids), len(job.ids) + job.limit) for job in beside]
            if len(beside) == 1 or self._thresholds.shared_side(spans) is not None:
                return num
        return 0

    def add(self, jobs: Sequence[Job]) -> None:
        """Read the prompts of jobs, as many as fit, or begin to.

        They are read together, but for those that take several pieces, so that nobody waits for
        them, and with ``invariant``, as they would round otherwise.

        Raises:
            ValueError: for an empty prompt, a limit below 1, or more jobs than fit.
        """
        if len(jobs) > self.free or any(not job.ids or job.limit < 1 for job in jobs):
            raise ValueError(f"got {len(jobs)} jobs for {self.free} rows, or an empty one")
        if self.num_fitting(jobs) < len(jobs):
            raise ValueError(f"{len(jobs)} jobs lie on other sides of {self._thresholds} than rows")
        most = 0 if self.how.invariant else self.piece or sys.maxsize
        together = [job for job in jobs if len(job.ids) <= most]
        for some in [together, *([job] for job in jobs if len(job.ids) > most)]:
            if some:
                self._add(some)

    def _add(self, jobs: Sequence[Job]) -> None:
        rows = []
        for job in jobs:
            number = self.output.add(job.ids, job.limit, job.ends, job.criteria)
            rows.append(number)
            self._jobs[number] = job
            self._seeds[number : number + 1] = [job.seed]
            self._own[number : number + 1] = [job.processors]
        with torch.inference_mode():
            base, known = self._begin([job.ids for job in jobs])
        unread = [job.ids[n:] for n, job in zip(known, jobs, strict=True)]
        acceptance = self.how.acceptance or Acceptance()
        batch = Batch(base, self.output, self._chooser, self.drafter, acceptance, rows)
        piece = 0 if self._thresholds.name or self.how.invariant else self.piece
        self._readings.append((batch, batch.read(unread, piece)))
        if max(map(len, unread)) <= (piece or sys.maxsize):
            self._read_on(-1)

    def _read_on(self, which: int) -> None:
        """Read the next piece of prompts that are being read."""
        batch, pieces = self._readings.pop(which)
        with batch.passes():
            if any(batch.going) and next(pieces, self) is not self:
                self._readings.insert(0, (batch, pieces))
                return
            self._leave(batch)
            if batch.numbers and self._batch is not None:
                self._batch.join(batch)
            elif batch.numbers:
                self._batch = batch

    def _begin(self, prompts: list[list[int]]) -> tuple[ModelPass, list[int]]:
        """Return a pass for prompts, and how many tokens of each its cache holds already.

        What several prompts begin with, such as a template's system turn, is read once for all
        that follow, and its keys are copied.
        """
        room, multiple = 0 if self._batch else self.batch_size, KEY_BLOCK if self._alike else 1
        shared = self._shared
        if self.prefixes is not None and not self.how.invariant:
            shared = self.prefixes.longest(list(commonprefix(prompts))) or shared
        elif shared is None and len(prompts) > 1:
            common = list(commonprefix([ids[:-1] for ids in prompts]))
            if common:
                first = ModelPass(self.model, TreeCache(multiple=multiple))
                first.read(torch.tensor([common], device=first.device), [len(common)])
                shared = self._shared = first.cache
                shared.tokens = [common]
        cache = TreeCache(room, multiple) if shared is None else shared.copy_of(0)
        if shared is not None:
            cache.room, cache.tokens, cache.rows.multiple = room, shared.tokens, multiple
            cache.select(torch.zeros(len(prompts), dtype=torch.long))
        base = ModelPass(self.model, cache, **self._passes)
        known = [0] * len(prompts) if shared is None else base.align(prompts)
        cache.tokens = []
        return base, known

    def step(self) -> None:
        """Give every row its next tokens, and read a piece of a prompt; one of both has to be."""
        if self._readings:
            self._read_on(0)
        if self._batch is not None:
            self._leave(self._batch)  # those that were cancelled
        if (batch := self._batch) is None:
            return
        with batch.passes():
            verified = batch.step()
            self._verified = None if verified is None else (batch.numbers, verified)
            self._leave(batch)

    def _leave(self, batch: Batch) -> None:
        ended = [each for each in enumerate(batch.numbers) if not self.output.budget(each[1])]
        cache = batch.base.cache
        for i, row in ended:
            if self.prefixes is not None and cache.lengths:  # else it was cancelled unread
                self.prefixes.keep(cache, i, self.output.texts[row])
        self._ended += [row for _, row in ended]
        batch.leave()
        if batch is self._batch and not batch.numbers:
            self._batch = None

    def cancel(self, number: int) -> None:
        """End a row with its next step; its tokens so far are what it was continued with."""
        self.output.limits[number] = len(self.output.rows[number].new_tokens)

    @property
    def jobs(self) -> list[tuple[int, Job]]:
        """Rows of the output, and the jobs in them, that have not been taken yet."""
        return list(self._jobs.items())

    def trees(self) -> dict[int, list[tuple[int, int, bool]]]:
        """Return what the last step verified: per row its nodes' parents, tokens, and if accepted.

        Padding is left out.
        """
        if self._verified is None:
            return {}
        numbers, result = self._verified
        parents = result.tree.parents.expand_as(result.tokens).tolist()
        rows = zip(numbers, parents, result.tokens.tolist(), result.path.tolist(), strict=True)
        found = {}
        for number, above, tokens, path in rows:
            place = {-1: -1}
            nodes: list[tuple[int, int, bool]] = []
            for node, (parent, token) in enumerate(zip(above, tokens, strict=True)):
                if token >= 0 and parent in place:
                    place[node] = len(nodes)
                    nodes.append((place[parent], token, node in path))
            found[number] = nodes
        return found

    def take_ended(self) -> list[tuple[Job, DecodedRow]]:
        """Return the jobs that have ended since the last call, and what they were continued with.

        Nothing is kept of them here.
        """
        ended = [(self._jobs.pop(row), self.output.rows[row]) for row in self._ended]
        for row in self._ended:
            self.output.remove(row)
        self._ended = []
        return ended


class Prefixes:
    """The latest texts' keys and values, one row each, for prompts that begin alike.

    Args:
        most: tokens of all together; the oldest give way.
        least: shorter beginnings are read again, which takes no longer than a copy.
    """

    def __init__(self, most: int, least: int = 16) -> None:
        self.most, self.least = most, least
        self._held: list[TreeCache] = []  # the latest last

    def longest(self, prompt: Sequence[int]) -> TreeCache | None:
        """Return the text that shares most with the beginning of a prompt; not to be changed."""
        lengths = [len(commonprefix([each.tokens[0], list(prompt)])) for each in self._held]
        best = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if best is None or lengths[best] < self.least:
            return None
        self._held.append(self._held.pop(best))
        return self._held[-1]

    def keep(self, cache: TreeCache, row: int, text: Sequence[int]) -> None:
        """Keep a copy of a row, whose tokens ``text`` begins with."""
        tokens = list(text[: cache.lengths[row]])
        if not self.least <= len(tokens) <= self.most:
            return
        own = cache.copy_of(row)
        own.tokens = [tokens]
        # a conversation goes on: what the text begins with is not needed beside it
        self._held = [e for e in self._held if e.tokens[0] != tokens[: e.lengths[0]]] + [own]
        while sum(each.lengths[0] for each in self._held) > self.most:
            del self._held[0]


def continue_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    seeds: Sequence[int],
    *,
    temperature: float,
    eos_token_ids: Collection[int] = (),
    batch_size: int = 32,
) -> list[list[int]]:
    """Return what ``model`` writes after each prompt, an end of text included.

    An answer depends on its prompt, limit and seed alone, not on its neighbours (see above). Modes
    and random generators are left as they were found.

    Args:
        model: any causal language model that can be decoded; it may be in training mode.
        prompts: token ids, none empty.
        limits: per prompt the most new tokens, at least 1; with the prompt they have to fit the
            model's context.
        seeds: per prompt, of its draws.
        temperature: 0 is greedy.
        eos_token_ids: tokens that end a text.
        batch_size: prompts that are continued together; 1 where the model takes no more.
    """
    given = enumerate(zip(prompts, limits, seeds, strict=True))
    jobs = [Job(list(ids), limit, seed, owner) for owner, (ids, limit, seed) in given]
    answers: list[list[int]] = [[] for _ in jobs]
    # those of like length are read together with the least padding
    waiting = iter(sorted(jobs, key=lambda job: len(job.ids)))
    with undisturbed(model):
        rows = batch_size if tree_support(model).kind == "tree" else 1
        how = Settings(sampler=Sampler(temperature), eos_token_ids=eos_token_ids)
        stream = Stream(model, None, how, batch_size=rows)
        for ended in stream.run(lambda num: list(islice(waiting, num))):
            for job, row in ended:
                answers[job.owner] = row.new_tokens
    return answers
