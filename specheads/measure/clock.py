"""Decode the same prompts with several methods in turn, and clock each of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import CompareConfig, ConfigError, TreeSearchConfig
from specheads.data.chat import Encoder
from specheads.data.suites import prompt_records
from specheads.decoding.result import DecodedRow, pad_left
from specheads.models.base import context_length
from specheads.system import hardware
from specheads.system.files import tinycode_dir
from specheads.system.terminal import note

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One prompt; ``input_ids`` is [1, P]."""

    id: str
    kind: str
    input_ids: Tensor


@dataclass(frozen=True)
class Batch:
    """Prompts decoded together.

    Attributes:
        input_ids: [B, P], left-padded.
        attention_mask: [B, P], 0 on padding.
        first: number of the first prompt; the others follow it.
    """

    input_ids: Tensor
    attention_mask: Tensor
    first: int = 0


class Budget:
    """Time that a measurement may take; asked between its parts, whose least is always done.

    Args:
        seconds: from now on.
        now: tells the time, in seconds.
    """

    def __init__(
        self, seconds: float = math.inf, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now, self._end = now, now() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; none where it is below 0."""
        return self._end - self._now()

    def spent(self) -> bool:
        """Return whether nothing is left."""
        return self.left <= 0

    def part(self, share: float) -> Budget:
        """Return a share of what is left, which begins now."""
        return Budget(share * max(self.left, 0.0), self._now)

    def within(self, items: Iterable[T], least: int = 1) -> Iterator[T]:
        """Yield items, ``least`` of them and then as long as time is left."""
        for number, item in enumerate(items):
            if number >= least and self.spent():
                return
            yield item


Decoded = list[DecodedRow]  # one per row of a batch
Decode = Callable[..., Decoded]  # (batch, temperature, seed, max_new_tokens=...)


@dataclass(frozen=True)
class Method:
    """One way to continue prompts: ``decode(batch, temperature, seed)``, one result per row.

    Row b draws with ``seed + b``, so that a prompt is continued alike in batches of any size.
    The same call with a fourth argument, 1, stops after one new token: that is the prefill, which
    reads the prompts and chooses what comes first.
    """

    name: str
    decode: Decode
    drafter: str | None = None
    tree_nodes: int = 1
    extra_parameters: int = 0
    seeded: bool = True  # draws what plain decoding draws with the same seed
    lossless: bool = True  # greedy, its tokens are plain decoding's
    compiled: bool = False
    in_batches: bool = False  # the same as another method where prompts are decoded alone


@dataclass
class Runs:
    """What one method did with all prompts at one temperature and batch size."""

    seconds: list[list[float]] = field(default_factory=list)  # [repeats][batches]
    decoded: Decoded = field(default_factory=list)  # [prompts], of the first repeat
    peak_memory: int = 0
    batch_size: int = 1
    prefill: list[list[float]] = field(default_factory=list)  # as seconds; empty: not clocked
    started: hardware.Sample | None = None  # the processors' counters when the warm-up was over

    @property
    def batches(self) -> list[range]:
        """Which prompts were decoded together."""
        size, total = self.batch_size, len(self.decoded)
        return [range(i, min(i + size, total)) for i in range(0, total, size)]

    def only(self, chosen: Sequence[int]) -> Runs:
        """Return what was done with some prompts; no seconds where batches held others too."""
        clocked = self.seconds if self.batch_size == 1 else []
        seconds = [[repeat[i] for i in chosen] for repeat in clocked]
        return Runs(seconds, [self.decoded[i] for i in chosen], batch_size=self.batch_size)


def make_batches(prompts: Sequence[Prompt], size: int) -> list[Batch]:
    """Group prompts in their order, ``size`` by ``size``; the last batch may be smaller."""
    ids = [prompt.input_ids for prompt in prompts]
    return [Batch(*pad_left(ids[i : i + size]), i) for i in range(0, len(ids), size)]


def read_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    *,
    max_length: int,
    device: torch.device,
) -> tuple[list[Prompt], str]:
    """Return ``num_prompts`` prompts of a file, evenly over its kinds, and their sha256.

    Args:
        path: records, what follows the prompt in them is not looked at; or questions of a suite,
            see :func:`specheads.data.suites.prompt_records`.
        tokenizer: the base model's.
        num_prompts: as many of the file's first prompts as there are, kind after kind in turn.
        max_length: longest prompt in tokens; longer ones are left out.
        device: of the token ids.

    Raises:
        ConfigError: if the file is wrong, or every prompt is too long.
    """
    encoder = Encoder(tokenizer)
    found = []
    for record in prompt_records(path, chat=tokenizer.chat_template is not None):
        ids = encoder.prompt(record)
        if 0 < len(ids) <= max_length:
            found.append(Prompt(record["id"], record["kind"], torch.tensor([ids], device=device)))
    if not found:
        raise ConfigError(f"{path} has no prompt of at most {max_length} tokens")
    chosen = list(islice(kinds_in_turn(found, attrgetter("kind")), num_prompts))
    return chosen, digest_of(chosen)


def kinds_in_turn(items: Iterable[T], kind_of: Callable[[T], str]) -> Iterator[T]:
    """Yield the first of every kind, then the second of every kind, and so on."""
    by_kind: dict[str, list[T]] = {}
    for item in items:
        by_kind.setdefault(kind_of(item), []).append(item)
    return (each for row in zip_longest(*by_kind.values()) for each in row if each is not None)


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Return the sha256 of prompts: their names, kinds and tokens."""
    content = [[prompt.id, prompt.kind, prompt.input_ids[0].tolist()] for prompt in prompts]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@torch.inference_mode()
def clock(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    temperature: float,
    *,
    repeats: int,
    batch_size: int = 1,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
    budget: Budget | None = None,
    least: int = 1,
    prefill: bool = False,
) -> dict[str, Runs]:
    """Decode every prompt with every method, ``repeats`` times, the methods in turn per batch.

    Interleaving makes a slow minute of the machine hit all methods alike. Each starts a batch in
    another place of the turn, so that none always runs on a warmer cache than the others.

    Args:
        methods: of distinct names.
        prompts: what to continue.
        temperature: of the sampling; 0 is greedy.
        repeats: clocked rounds over all prompts.
        batch_size: prompts decoded together, neighbours in ``prompts``.
        seed: prompt n is sampled with ``seed + n``.
        tick: called after every decoded prompt.
        budget: time for the one round there is then; it ends between batches.
        least: batches that are decoded however little time there is.
        prefill: clock, in each turn just before it, the method's prefill alone as well.

    Returns:
        Runs by the method's name; without methods that are others' where prompts are alone.
    """
    methods = [each for each in methods if batch_size > 1 or not each.in_batches]
    device = prompts[0].input_ids.device
    batches = make_batches(prompts, batch_size)

    runs = {method.name: Runs(batch_size=batch_size) for method in methods}
    for method in methods:  # warm up, and look at the memory of one batch of this method alone
        # where passes are compiled, a shape met for the first time takes seconds: meet all now
        for batch in batches if any(each.compiled for each in methods) else batches[-1:]:
            method.decode(batch, temperature, seed + batch.first)
        hardware.peak_memory(device, reset=True)
        method.decode(batches[0], temperature, seed)
        runs[method.name].peak_memory = hardware.peak_memory(device)
    started = hardware.sample()
    for repeat in range(repeats):
        for of in runs.values():
            of.started = started
            of.seconds.append([])
            of.prefill += [[]] if prefill else []
        for index, batch in enumerate((budget or Budget()).within(batches, least)):
            turn = take_turn(
                methods, batch, temperature, seed=seed, first=index + repeat, prefill=prefill
            )
            for name, (before, seconds, decoded) in turn:
                of = runs[name]
                if prefill:
                    of.prefill[-1].append(before)
                of.seconds[-1].append(seconds)
                of.decoded += decoded if repeat == 0 else []
                for _ in decoded:
                    tick()
    return runs


@torch.inference_mode()
def take_turn(
    methods: Sequence[Method],
    batch: Batch,
    temperature: float,
    *,
    seed: int = 0,
    first: int = 0,
    prefill: bool = False,
) -> Iterator[tuple[str, tuple[float, float, Decoded]]]:
    """Decode one batch with every method, one after the other.

    Args:
        methods: of distinct names.
        batch: what to continue.
        temperature: of the sampling.
        seed: prompt n is sampled with ``seed + n``.
        first: number of the turn, which decides who begins.
        prefill: clock each method's prefill alone as well, just before it.

    Yields:
        The method's name; the seconds of its prefill alone, 0 where it is not clocked; those of
        the whole call; and one result per row.
    """
    first %= len(methods)
    for method in (*methods[first:], *methods[:first]):
        begin = time.perf_counter()
        if prefill:
            method.decode(batch, temperature, seed + batch.first, 1)
        middle = time.perf_counter()
        decoded = method.decode(batch, temperature, seed + batch.first)
        end = time.perf_counter()
        yield method.name, (middle - begin if prefill else 0.0, end - middle, decoded)


def prompt_file(given: str, checkpoint: str, name: str) -> Path:
    """Return the user's file of prompts, else the export's own, else the embedded one.

    The embedded ones are instructions about Python; for a base that is not the embedded one a line
    says so, as figures on prompts of another kind say little.
    """
    if given:
        return Path(given)
    own = Path(checkpoint) / name
    if own.is_file():
        return own
    base = checkpoint
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # what loading will refuse
        base = json.loads((Path(checkpoint) / "config.json").read_text())["base"]["name"]
    if base != "tinycode":
        of_run = Path(checkpoint).parent / "prompts.jsonl"  # held out, and calibrated on
        kept = f"; the run kept {of_run} to calibrate on" if of_run.is_file() else ""
        note(f"specheads: no prompts given: taking the embedded ones, which are about Python{kept}")
    return tinycode_dir() / name


def prompts_of(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    num_prompts: int,
    max_new_tokens: int,
) -> tuple[list[Prompt], str]:
    """Return :func:`read_prompts` of those that leave the model room for the new tokens.

    Raises:
        ConfigError: as that does, or if no prompt could leave room.
    """
    context = context_length(base) or 1 << 30
    if max_new_tokens >= context:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, but the base model's context is {context}"
        )
    longest = context - max_new_tokens
    return read_prompts(path, tokenizer, num_prompts, max_length=longest, device=base.device)


def two_sets(
    config: CompareConfig | TreeSearchConfig,
    checkpoint: str,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Prompt], list[Prompt]]:
    """Return ``num_prompts`` prompts to learn from, and up to ``num_measured`` others to check on.

    Both come from the user's one file where there is one. A prompt whose tokens are those of one
    that is learnt from is never checked on, whatever it is called.

    Raises:
        ConfigError: as :func:`prompts_of`, or if a file made to check on holds no others.
    """

    def read(path: Path, number: int) -> list[Prompt]:
        return prompts_of(base, tokenizer, path, number, config.max_new_tokens)[0]

    path = prompt_file(config.prompts, checkpoint, "calibration.jsonl")
    every = read(path, config.num_prompts + (config.num_measured if config.prompts else 0))
    learnt, others = every[: config.num_prompts], every[config.num_prompts :]
    if config.num_measured and not config.prompts:
        path = prompt_file("", checkpoint, "prompts.jsonl")
        others = read(path, config.num_measured)
    known = {tuple(prompt.input_ids[0].tolist()) for prompt in learnt}
    unseen = [prompt for prompt in others if tuple(prompt.input_ids[0].tolist()) not in known]
    if len(unseen) < len(others):
        print(f"{len(others) - len(unseen)} prompts of {path} are calibrated on: not measured")
    if others and not unseen and not config.prompts:
        raise ConfigError(f"{path} holds no prompt but those that are calibrated on")
    return learnt, unseen


def now(device: torch.device) -> float:
    """Return the time, after whatever the device still does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
