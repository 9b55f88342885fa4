"""Plain decoding of one prompt after the other: a row that ends makes room for the next.

In a batch all would wait for the longest answer, which among thousands is often several times the
mean. Here a pass is over as many rows as there is room for, until the last prompts. Each row gets
the tokens that it would get alone, as in any batch. :func:`continue_prompts` does this with a model
that is being trained.

In 16 bits that holds where ``rounds_by_shape`` of specheads/models/forward.py says so: on CPUs a
row's bits depend on how many queries and keys attention is over, and on being alone, and both are
evened out. Elsewhere a near-tie may fall otherwise beside other rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.mask import KEY_BLOCK
from specheads.decoding.choose import make_chooser
from specheads.decoding.result import DecodedRow, Limits, Output
from specheads.models.forward import ModelPass, pad_rows, rounds_by_shape, thresholds, undisturbed
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
    """

    ids: list[int]
    limit: int
    seed: int = 0
    owner: Any = None
    ends: Collection[int] = ()


@dataclass(eq=False, repr=False)
class PlainStream:
    """Rows of a model's cache, and the prompts in them.

    Args:
        model: any causal language model that can decode batches; others one row at a time.
        sampler: how tokens are drawn; its seeds are not used, each job has its own.
        eos_token_ids: tokens that end a row.
        batch_size: rows.

    Attributes:
        num_tokens: that all rows together were given, counted on; whoever reads may set it back.

    Raises:
        ValueError: for several rows of a model whose masks or positions are out of reach.
    """

    model: PreTrainedModel
    sampler: Sampler
    _: KW_ONLY
    eos_token_ids: Collection[int] = ()
    batch_size: int = 8

    def __post_init__(self) -> None:
        support = tree_support(self.model)
        support.check_batch(self.batch_size)
        self._chain_only = support.kind == "chain"
        self._thresholds = thresholds(self.model)
        self._alike = self.batch_size > 1 and rounds_by_shape(self.model)
        self.num_tokens = 0
        self._jobs: dict[int, Job] = {}  # by row of the output
        self._seeds: list[int] = []
        self._output = Output([], self.model.device, Limits(0, self.eos_token_ids))
        seeded = replace(self.sampler, seeds=self._seeds)
        self._chooser = make_chooser(self.model, self._output, seeded)
        self._base: ModelPass | None = None
        self._shared: TreeCache | None = None  # of one row: what prompts begin with
        self._rows: list[int] = []  # of the cache: which jobs they belong to
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

    @torch.inference_mode()
    def add(self, jobs: Sequence[Job]) -> None:
        """Read the prompts of jobs, as many as fit.

        Raises:
            ValueError: for an empty prompt, a limit below 1, or more jobs than fit.
        """
        if len(jobs) > self.free or any(not job.ids or job.limit < 1 for job in jobs):
            raise ValueError(f"got {len(jobs)} jobs for {self.free} rows, or an empty one")
        if not jobs:
            return
        if self.num_fitting(jobs) < len(jobs):
            raise ValueError(f"{len(jobs)} jobs lie on other sides of {self._thresholds} than rows")
        rows = list(range(len(self._seeds), len(self._seeds) + len(jobs)))
        for row, job in zip(rows, jobs, strict=True):
            self._jobs[row] = job
            self._seeds.append(job.seed)
            self._output.add(job.ids, job.limit, job.ends)
        base, known = self._begin([job.ids for job in jobs])
        unread = [job.ids[n:] for n, job in zip(known, jobs, strict=True)]
        tokens = pad_rows(unread, base.device)
        rows = self._emit(base, tokens, [len(ids) for ids in unread], rows)
        if not rows:
            return
        if self._base is None:
            self._base = base
        else:
            self._base.cache.join(base.cache)
        self._rows += rows

    def _begin(self, prompts: list[list[int]]) -> tuple[ModelPass, list[int]]:
        """Return a pass for prompts, and how many tokens of each its cache holds already.

        What several prompts begin with, such as a template's system turn, is read once for all
        that follow, and its keys are copied.
        """
        room, multiple = 0 if self._base else self.batch_size, KEY_BLOCK if self._alike else 1
        known = [0] * len(prompts)
        if self._shared is None and len(prompts) > 1:
            common = list(commonprefix([ids[:-1] for ids in prompts]))
            if common:
                first = ModelPass(self.model, TreeCache(multiple=multiple))
                first.read(torch.tensor([common], device=first.device), [len(common)])
                self._shared, first.cache.tokens = first.cache, [common]
        if self._shared is None:
            cache = TreeCache(room, multiple)
            return ModelPass(self.model, cache, chain_only=self._chain_only), known
        cache = copy.deepcopy(self._shared)
        cache.room = room
        cache.select(torch.zeros(len(prompts), dtype=torch.long))
        base = ModelPass(self.model, cache)
        known, cache.tokens = base.align(prompts), []
        return base, known

    @torch.inference_mode()
    def step(self) -> None:
        """Give every row its next token; there has to be one."""
        assert self._base is not None
        last = [self._output.texts[row][-1:] for row in self._rows]
        tokens = pad_rows(last, self._base.device)
        self._rows = self._emit(self._base, tokens, [1] * len(last), self._rows)
        if not self._rows:
            self._base = None

    def _emit(
        self, base: ModelPass, tokens: Tensor, counts: list[int], rows: list[int]
    ) -> list[int]:
        """Read tokens, choose the next ones; return the rows that go on."""
        text = partial(self._output.texts.__getitem__, rows[0])
        if self._alike and tokens.numel() == 1:  # products round one row otherwise than several
            base.cache.select(torch.zeros(2, dtype=torch.long))
            logits = base.read_next(tokens.repeat(2, 1), [1, 1], text)[:1]
            base.cache.select(torch.zeros(1, dtype=torch.long))
        else:
            logits = base.read_next(tokens, counts, text)
        chosen = self._chooser.next_tokens(self._output, logits, rows)
        self._output.emit(rows, [[token] for token in chosen])
        self.num_tokens += len(rows)
        going = [self._output.budget(row) > 0 for row in rows]
        self._ended += [row for row, goes in zip(rows, going, strict=True) if not goes]
        kept, num_kept = list(range(len(rows))), sum(going)
        # the last rows move into the places of those that have ended, all others stay
        last = [i for i in kept[num_kept:] if going[i]]
        kept = [i if going[i] else last.pop() for i in kept[:num_kept]]
        if 0 < num_kept < len(rows):
            base.cache.select(torch.tensor(kept))
        return [rows[i] for i in kept]

    def take_ended(self) -> list[tuple[Job, DecodedRow]]:
        """Return the jobs that have ended since the last call, and what they were continued with.

        Nothing is kept of them here.
        """
        ended = [(self._jobs.pop(row), self._output.rows[row]) for row in self._ended]
        for row in self._ended:
            self._output.texts[row], self._output.rows[row] = [], DecodedRow()
        self._ended = []
        return ended


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
    waiting = sorted(jobs, key=lambda job: len(job.ids))
    with undisturbed(model):
        rows = batch_size if tree_support(model).kind == "tree" else 1
        sampler = Sampler(temperature=temperature)
        stream = PlainStream(model, sampler, eos_token_ids=eos_token_ids, batch_size=rows)

        def take(num: int) -> list[Job]:
            taken, waiting[:num] = waiting[:num], []
            return taken

        for ended in stream.run(take):
            for job, row in ended:
                answers[job.owner] = row.new_tokens
    return answers
