"""One thread that decodes what many clients ask for: rows come and go between steps.

Requests that draw alike share a :class:`~specheads.decoding.stream.Stream`, a lane; lanes take
turns. Each row gets the tokens that ``generate`` gives for its prompt, settings and seed alone.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch import Tensor
from transformers import LogitsProcessorList

from specheads.config import ConfigError
from specheads.config.commands import TextSettings
from specheads.decoding.generate import SpecDecoder, room, settings_of
from specheads.decoding.processors import PREFIX_FREE
from specheads.decoding.result import met
from specheads.decoding.stream import Job, Prefixes, Stream
from specheads.models.support import tree_support
from specheads.system.terminal import harmless, note

# the lane's key; the job, whose owner is its ticket; what makes a lane
_Waiting = tuple[Hashable, Job, Callable[[], Stream]]
Logprobs = tuple[float, list[tuple[int, float]]]  # of the token, and of the likeliest ones


@dataclass(frozen=True)
class Step:
    """What one step gave a prompt.

    Attributes:
        tokens: new ones.
        logprobs: of each, where they were asked for.
        tree: the nodes that were verified, where they were asked for: parent, token, accepted.
        finish: ``stop`` or ``length`` behind the last token, else empty.
        error: why it ended otherwise; empty.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[Logprobs] = ()
    tree: Sequence[tuple[int, int, bool]] = ()
    finish: str = ""
    error: str = ""


@dataclass(eq=False)
class Ticket:
    """A prompt on its way through the engine.

    Attributes:
        ids: its tokens.
        settings: how its tokens are chosen.
        drafter: name of the decoder.
        tell: called by the engine's thread with every step.
        limit: of new tokens; fewer where the context ends.
        stop: strings that end it.
        processors: logits processors beside those of the settings; one that fails ends this prompt.
        top_logprobs: how many of the likeliest tokens to tell of; None: no log-probabilities.
        wants_tree: tell of the nodes.
        deadline: of :func:`time.monotonic`.
        cancelled: set it, and the prompt ends with the next step.
        error: why it ends early.
    """

    ids: list[int]
    settings: TextSettings
    drafter: str
    tell: Callable[[Step], object]
    limit: int
    stop: Sequence[str] = ()
    processors: Sequence[Any] = ()
    top_logprobs: int | None = None
    wants_tree: bool = False
    deadline: float = float("inf")
    cancelled: bool = False
    error: str = ""
    num_told: int = 0


@dataclass
class Guarded:
    """A logits processor or stopping criterion whose fault ends its own prompt."""

    called: Any
    ticket: Ticket

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        """Answer as it does; after a fault leave scores as they are, or say that it is over."""
        judges = scores is None
        try:
            if self.ticket.error:
                return True if judges else scores
            if judges:
                return met(self.called, input_ids)
            found = self.called(input_ids, scores)
            if not isinstance(found, Tensor) or found.shape != scores.shape:
                raise ValueError(f"it has to answer scores of shape {list(scores.shape)}")
        except Exception as error:  # of whoever wrote it
            name = type(self.called).__name__
            self.ticket.error = harmless(f"{name} failed: {type(error).__name__}: {error}")
            return True if judges else scores
        return found


class BusyError(RuntimeError):
    """The queue is full."""


class Engine(threading.Thread):
    """Decodes tickets until it is stopped.

    Args:
        decoders: by name; all of one base model.
        batch_size: rows of all lanes together; 1 where the model takes no more.
        queue: prompts that may wait.
        piece: tokens of a prompt that are read between two steps.
        prefix_tokens: of earlier texts whose keys and values are kept.
    """

    def __init__(
        self,
        decoders: Mapping[str, SpecDecoder],
        *,
        batch_size: int,
        queue: int,
        piece: int,
        prefix_tokens: int,
    ) -> None:
        super().__init__(name="specheads engine", daemon=True)
        self.decoders, self.queue = decoders, queue
        base = next(iter(decoders.values())).base
        self.batch_size = batch_size if tree_support(base).kind == "tree" else 1
        self.prefixes = Prefixes(prefix_tokens) if prefix_tokens else None
        self._options: dict[str, Any] = {"batch_size": self.batch_size, "piece": piece}  # of lanes
        self._options |= {"prefixes": self.prefixes, "evened": False}
        self.registry = CollectorRegistry()
        by_drafter: dict[str, Any] = {"labelnames": ["drafter"], "registry": self.registry}
        self._tokens = Counter("specheads_tokens", "tokens that steps gave", **by_drafter)
        about = "verify steps of prompts: tokens by steps is the accept length"
        self._steps = Counter("specheads_steps", about, **by_drafter)
        about = "seconds in which every prompt that was decoded made a step"
        self._seconds = Histogram("specheads_step_seconds", about, registry=self.registry)
        for name in ("waiting", "running"):
            gauge = Gauge(f"specheads_{name}", f"prompts {name}", registry=self.registry)
            gauge.set_function(partial(getattr, self, f"num_{name}"))
        self._lanes: dict[Hashable, Stream] = {}
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._stopped = False

    @property
    def num_waiting(self) -> int:
        """Prompts that have no row yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts that have a row."""
        return sum(self.batch_size - lane.free for lane in list(self._lanes.values()))

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue prompts.

        Raises:
            BusyError: if that many may not wait; none is queued then.
            TooLongError: for a prompt that leaves no room for an answer.
            ConfigError: one line, for settings that decoding refuses.
        """
        waiting = self.num_waiting
        if waiting + len(tickets) > self.queue + self.batch_size - self.num_running:
            raise BusyError(f"{waiting} prompts are waiting, and {self.queue} may")
        prepared = [self._prepare(ticket) for ticket in tickets]
        with self._changed:
            self._waiting += prepared
            self._changed.notify()

    def _prepare(self, ticket: Ticket) -> _Waiting:
        """Let ``generate`` read the settings."""
        decoder = self.decoders[ticket.drafter]
        limit = min(ticket.limit, room(decoder.base, ticket.ids))
        guarded = LogitsProcessorList([Guarded(each, ticket) for each in ticket.processors])
        more: dict[str, Any] = {"logits_processor": guarded} if guarded else {}
        if ticket.stop:
            more["stop_strings"] = list(ticket.stop)
        if ticket.top_logprobs is not None:
            more["output_logits"] = True
        try:
            how = settings_of(decoder, ticket.settings, ticket.ids, limit, **more)
        except ValueError as error:
            raise ConfigError(harmless(str(error))) from None
        given: Any = how.stopping_criteria or ()
        rules: Any = [Guarded(rule, ticket) for rule in given]
        how = replace(how, stopping_criteria=rules)
        make = partial(Stream, decoder.base, decoder.drafter, how, **self._options)
        job = Job.of(ticket.ids, how, ticket)
        processors = how.logits_processor or LogitsProcessorList()
        temperature = how.sampler.temperature if how.sampler else 0.0
        return (ticket.drafter, temperature, how.keep_scores, _alike(processors)), job, make

    def stop(self, patience: float = 0.0) -> None:
        """Answer what was asked for so many seconds more, end the rest, and stop."""
        end = time.monotonic() + patience
        while (self._waiting or self._lanes) and time.monotonic() < end:
            time.sleep(0.02)
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self.join()

    def run(self) -> None:
        """Take turns until stopped."""
        while True:
            with self._changed:
                while not (self._stopped or self._waiting or self._lanes):
                    self._changed.wait()
                if self._stopped:
                    break
            with self._seconds.time():
                self._turn()
        for ticket in self._tickets():
            ticket.tell(Step(error="the server is stopping"))

    def _tickets(self) -> list[Ticket]:
        running = [job for lane in self._lanes.values() for _, job in lane.jobs]
        return [job.owner for job in [*(job for _, job, _ in self._waiting), *running]]

    def _turn(self) -> None:
        """Admit what fits, and let each lane make one step."""
        now = time.monotonic()
        for ticket in self._tickets():
            if now > ticket.deadline and not ticket.error:
                ticket.error = "the time for this request is over"
        joining = self._admitted()
        for key, lane in list(self._lanes.items()):
            for number, job in lane.jobs:
                if job.owner.cancelled or job.owner.error:
                    lane.cancel(number)
            try:
                lane.add(joining.get(key, []))
                lane.step()
            except Exception as error:  # such as memory that is full: other lanes go on
                note(harmless(traceback.format_exc()))
                problem = Step(error=harmless(f"{type(error).__name__}: {error}"))
                there = [job for _, job in lane.jobs]
                for ticket in {job.owner: None for job in [*joining.get(key, []), *there]}:
                    ticket.tell(problem)
                del self._lanes[key]
                continue
            self._tell(lane)
            if lane.free == self.batch_size:
                del self._lanes[key]

    def _admitted(self) -> dict[Hashable, list[Job]]:
        """Return who gets rows now, by lane."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        left, joining = [], dict[Hashable, list[Job]]()
        free = self.batch_size - self.num_running
        for entry in waiting:
            key, job, make = entry
            ticket = job.owner
            if ticket.cancelled or ticket.error:
                ticket.tell(Step(error=ticket.error or "cancelled"))
                continue
            jobs = joining.get(key, [])
            lane = self._lanes.get(key)
            if free and lane is None:
                lane = self._lanes[key] = make()
            if not free or lane is None or lane.num_fitting([*jobs, job]) <= len(jobs):
                left.append(entry)
                continue
            free -= 1
            joining[key] = [*jobs, job]
        with self._changed:
            self._waiting = left + self._waiting
        return joining

    def _tell(self, lane: Stream) -> None:
        """Tell everybody of a lane what is new."""
        found = [(number, job.owner) for number, job in lane.jobs]
        rows = {number: lane.output.rows[number] for number, _ in found}
        scores = {number: lane.output.kept[number] for number in rows} if lane.output.kept else {}
        trees = lane.trees() if any(ticket.wants_tree for _, ticket in found) else {}
        ended = {id(job.owner) for job, _ in lane.take_ended()}
        for number, ticket in found:
            row, finish = rows[number], ""
            if id(ticket) in ended:
                finish = "stop" if row.finished else "length"
            new = row.new_tokens[ticket.num_told :]
            if not new and not finish:
                continue
            told: list[Logprobs] = []
            if ticket.top_logprobs is not None:
                kept = scores[number]
                told = [
                    _logprobs(token, logits, ticket.top_logprobs)
                    for token, (logits, _) in zip(new, kept, strict=False)
                ]
                kept.clear()  # two numbers for every token of the vocabulary
            if not ticket.num_told and len(new) > 1:  # the prompt's own token is of no step
                ticket.tell(Step(new[:1], told[:1]))
                ticket.num_told, new, told = 1, new[1:], told[1:]
            if ticket.num_told and new:
                self._steps.labels(ticket.drafter).inc()
                self._tokens.labels(ticket.drafter).inc(len(new))
            tree = trees.get(number, ()) if ticket.num_told and ticket.wants_tree else ()
            ticket.num_told = len(row.new_tokens)
            ticket.tell(Step(new, told, tree, finish, ticket.error if finish else ""))


def _logprobs(token: int, logits: Tensor, num: int) -> Logprobs:
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(num, len(logprobs)))
    return float(logprobs[token]), list(
        zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )


def _alike(processors: LogitsProcessorList) -> Hashable:
    """Return a key that is the same for processors that one call may stand for."""
    free = [repr(sorted(vars(each).items())) * (type(each) in PREFIX_FREE) for each in processors]
    return tuple(map(type, processors)), tuple(free)


def frequency_penalty(
    num_prompt: int, presence: float, frequency: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what lowers scores of tokens that the answer has: once, and per occurrence."""

    def lowered(input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, num_prompt:]
        counts = torch.zeros_like(scores).scatter_add(
            1, answer, torch.ones_like(answer, dtype=scores.dtype)
        )
        return scores - frequency * counts - presence * (counts > 0)

    return lowered
