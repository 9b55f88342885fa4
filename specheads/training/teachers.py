"""What stands in for running the base, or for its texts, while something learns from it.

Hidden states that are stored or served: heads train on the frozen base's, without the base. A
stored teacher: a draft model learns from the base's most likely tokens at every position. Either is
added to the batches of ``data/pack.py`` beside the tokens.

On-policy batches: a draft model that is only shown what the base writes never sees the places where
its own guesses lead. Here it writes the answers, and learns the base's distribution along them
(generalised knowledge distillation, arXiv:2306.13649, algorithm 1; arXiv:2310.08461). Every
document keeps its prompt, and its answer is written anew, at most as long as it was,
so that as many tokens are read as without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError, TrainConfig
from specheads.data import teacher_cache
from specheads.data.chat import Encoded
from specheads.data.pack import Batch, Mapped, PackedBatches, collate, number_of
from specheads.data.served import AHEAD, ServedBatches, StatesServer
from specheads.losses.cross_entropy import IGNORE
from specheads.models.base import input_device
from specheads.models.output import OutputLayer, packed_hidden, with_final
from specheads.system import dist
from specheads.training.loop import Batches
from specheads.training.setup import Data


class Log(Protocol):
    """Where it is said what goes on: a run's log, or what stands in for it."""

    def say(self, text: str) -> None:
        """Say a line."""

    def doing(self, what: str, share: float = 0.0) -> None:
        """Take note of what goes on, and of how much of it is done."""


def cached_features(
    cfg: TrainConfig, base: PreTrainedModel, data: Data, log: Log | None, taps: Sequence[str]
) -> tuple[Batches, list[Batch], list[str]]:
    """Return batches and held-out rows, with the base's hidden states where settings ask for them.

    With ``features.dir`` what is missing in the cache is written: by the base, or, with
    ``features.endpoint``, by a server. With a server alone nothing is stored. A dry run, or one
    without log, writes and asks nothing: its batches have zeros. With the states at ``taps`` lie
    the final ones, which are what the base's own tokens come from.

    Returns:
        Batches, held-out rows, and lines for a dry run.

    Raises:
        ConfigError: if the cache was made of something else, data.growth is set, the disk has too
            little room, or a file of the cache is damaged.
        RunError: if the disk fills up; what is finished stays, and the next run goes on there. If
            a server does not give what is needed.
    """
    batches, heldout, url = data.train, data.heldout, cfg.features.endpoint
    stored = with_final(taps)
    if not cfg.features.dir:
        return _served(cfg, base, data, log, stored) if url else (batches, heldout, [])
    if not isinstance(batches, PackedBatches):
        raise ConfigError("features.dir needs rows of one length; leave data.growth out")
    autocast, folder = cfg.autocast == "bfloat16", Path(cfg.features.dir).expanduser()
    sample = _sample(base, autocast=autocast)
    made_of = teacher_cache.computed_by(cfg.model, cfg.autocast)
    if url:
        made_of["computation"] = f"served, {cfg.model.dtype}"
    numbers: dict[str, Any] = {"hidden_size": sample.shape[-1], "given_as": sample.dtype}
    of_rows = [document for batch in heldout for row in batch["documents"] for document in row]
    places = [(folder, batches.documents), *([(folder / "heldout", of_rows)] if of_rows else [])]
    numbers |= {"dtype": cfg.features.dtype, "taps": stored}
    plans = [teacher_cache.plan_features(*place, made_of, **numbers) for place in places]
    more = f", held-out rows {teacher_cache.readable(plans[1].num_bytes)}" if of_rows else ""
    said = f"{plans[0].describe()}{more}; {teacher_cache.still_missing(*plans)}"
    if cfg.dry_run or log is None:
        zeros = torch.zeros(len(stored) * sample.shape[-1], dtype=base.dtype)
        return with_numbers(batches, hidden=zeros), heldout, [said]
    log.say(said)
    caches = []
    shape = batches.rows, batches.seq_len
    for plan, (_, documents) in zip(plans, places, strict=True):
        served = _server(cfg, base, plan.taps, log).of if url and plan.missing() else None
        tell = partial(log.doing, "storing hidden states")
        teacher_cache.write_cache(
            plan, documents, base, shape, served=served, autocast=autocast, tell=tell
        )
        caches.append(teacher_cache.TeacherCache(plan))
    count, filled = itertools.count(), []
    for batch in heldout if of_rows else []:
        known = [[next(count) for _ in row] for row in batch["documents"]]
        filled.append({**batch, **caches[1].rows(known, batch["input_ids"].shape[1])})
    return teacher_cache.cached_batches(batches, caches[0]), filled, []


def _server(cfg: TrainConfig, base: PreTrainedModel, taps: Sequence[str], log: Log) -> StatesServer:
    digest = teacher_cache.computed_by(cfg.model, cfg.autocast)["base model"]
    given = cfg.features.endpoint, base, digest, taps
    return StatesServer(*given, patience=cfg.dist_timeout, say=log.say)


def _served(
    cfg: TrainConfig, base: PreTrainedModel, data: Data, log: Log | None, taps: Sequence[str]
) -> tuple[Batches, list[Batch], list[str]]:
    """Return what :func:`cached_features` does, of a server and without a folder."""
    said = f"hidden states: from {cfg.features.endpoint}, {AHEAD} micro-batches ahead"
    if cfg.dry_run or log is None:
        width = len(taps) * base.config.get_text_config().hidden_size
        zeros = torch.zeros(width, dtype=base.dtype)
        return with_numbers(data.train, hidden=zeros), data.heldout, [said]
    log.say(said)
    server = _server(cfg, base, taps, log)
    heldout = [
        server.filled(each) for each in data.heldout if dist.is_main()
    ]  # others measure none
    return ServedBatches(data.train, server), heldout, []


def with_numbers(batches: Batches, **numbers: Tensor) -> Mapped:
    """Return batches with the same numbers at every position: what a cache costs that is missing.

    Args:
        batches: the run's.
        **numbers: by the name that a cache gives them, [n].
    """

    def add(batch: Batch) -> Batch:
        shape = batch["input_ids"].shape
        return {**batch, **{name: x.repeat(*shape, 1) for name, x in numbers.items()}}

    return Mapped(batches, add)


def stored_teacher(
    cfg: TrainConfig,
    base: PreTrainedModel,
    output: OutputLayer,
    batches: object,
    vocab_size: int,
    log: Log,
) -> tuple[Batches, list[str]]:
    """Return batches with the base's most likely tokens at every position, from ``draft.stored``.

    What is missing there is written: what the training records bring along of the learned tokens
    (``regenerate logprobs=``), else what the base says. A dry run writes nothing: its batches have
    a teacher that says nothing.

    Args:
        cfg: the run's settings.
        base: the base model, as the settings load it.
        output: its output layer.
        batches: the run's training data, with rows of one length.
        vocab_size: tokens over which base and draft are compared.
        log: the open run directory.

    Returns:
        Batches, and lines for a dry run.

    Raises:
        ConfigError: if the folder was made of something else, the disk has too little room, or a
            file of the folder is damaged.
        RunError: if the disk fills up; what is finished stays, and the next run goes on there.
    """
    assert isinstance(batches, PackedBatches)  # check_draft has seen to it
    top_k, folder = cfg.draft.stored_top_k, Path(cfg.draft.stored).expanduser()
    told = ""
    if not cfg.draft.learn_prompts:  # of which no record says anything
        told = teacher_cache.check_told(batches.documents, top_k, vocab_size)
    if not told and base.device.type == "meta":
        raise ConfigError(
            f"model.name={cfg.model.name} holds no weights, and the training records bring no"
            " likeliest tokens along; regenerate endpoint= logprobs= writes such"
        )
    made_of = {"log-probabilities of the records": told}
    if not told:
        made_of = teacher_cache.computed_by(cfg.model, cfg.autocast)
    place = folder, batches.documents, made_of
    plan = teacher_cache.plan_top_logits(*place, vocab_size=vocab_size, top_k=top_k)
    said = f"{plan.describe()}; {teacher_cache.still_missing(plan)}"
    if cfg.dry_run:
        evenly = torch.full((top_k,), 1 / (top_k + 1)).log()
        nothing = {"teacher_ids": torch.arange(top_k), "teacher_log_probs": evenly}
        return with_numbers(batches, **nothing), [said]
    log.say(said)
    tell = partial(log.doing, "storing what the base says")
    given = plan, batches.documents, None if told else base
    autocast = cfg.autocast == "bfloat16"
    shape = batches.rows, batches.seq_len
    teacher_cache.write_cache(*given, shape, output=output, autocast=autocast, tell=tell)
    return teacher_cache.cached_batches(batches, teacher_cache.TeacherCache(plan)), []


@torch.no_grad()
def _sample(base: PreTrainedModel, *, autocast: bool) -> Tensor:
    """Return hidden states of two tokens: their size and their dtype are those of all."""
    device = input_device(base)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        return packed_hidden(base, tokens, torch.arange(2, device=device)[None])


# prompts, most new tokens of each, seed of each -> new tokens of each
Generate = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[int]], list[list[int]]]


@dataclass(frozen=True)
class _Place:
    """A document of a batch: tokens ``start`` to ``stop`` of a row, the answer from ``cut`` on."""

    row: int
    start: int
    cut: int
    stop: int


@dataclass
class OnPolicyBatches:
    """A share of the batches with answers of the draft model's own.

    Which batches these are, what is cut off them and what the draws are made from is a function of
    the seed and the number of the batch: the saved place is that number and the data's own place.

    Attributes:
        batches: this rank's batches.
        generate: lets the draft model, as it is now, continue prompts.
        share: the share of the batches, in [0, 1]; they are evenly spread.
        max_new_tokens: the most tokens of an answer.
        seed: the run's seed.
        vocab_size: tokens that base and draft model both have; an answer ends before the first one
            that is not among them.
        pad_token_id: fills what a shorter answer leaves free.
        taken: batches of this rank so far.
    """

    batches: Batches
    generate: Generate
    _: KW_ONLY
    share: float
    max_new_tokens: int
    seed: int
    vocab_size: int
    pad_token_id: int = 0
    taken: int = 0

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
        seeds = [self._seed(number, i) for i in range(len(places))]
        answers = [
            list(itertools.takewhile(lambda token: token < self.vocab_size, answer))
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

    def _seed(self, number: int, i: int) -> int:
        return number_of(self.seed, dist.rank(), number, i) >> 1

    def _places(self, batch: Batch, number: int) -> list[_Place]:
        generator = torch.Generator().manual_seed(self._seed(number, -1))
        found = []
        for row, segments in enumerate(batch["segment_ids"]):
            for segment in range(1, int(segments.max()) + 1):
                inside = (segments == segment).nonzero().flatten().tolist()
                start, stop = inside[0], inside[-1] + 1
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
    rows: list[list[Encoded]] = [[] for _ in batch["input_ids"]]
    for place, answer in zip(places, answers, strict=True):
        prompt = batch["input_ids"][place.row, place.start : place.cut].tolist()
        ids = np.array([*prompt, *answer], dtype=np.int32)
        labels = np.array([IGNORE] * len(prompt) + [*answer], dtype=np.int32)
        rows[place.row].append(Encoded("", ids, labels))
    new = collate(rows, batch["input_ids"].shape[1], pad_token_id)
    return {**batch, **new, "ids": batch["ids"]}
