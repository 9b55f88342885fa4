"""Decode the same prompts with several methods in turn, and clock each of them.

All methods of one comparison share process, weights, dtype, prompts, limit and rule of counting: a
new token is one that stands after the prompt in the result, an end of text included.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads import contention
from specheads.assets import tinycode_dir
from specheads.config import ConfigError
from specheads.data.chat import Encoder
from specheads.data.suites import prompt_records
from specheads.decoding.deciding import Acceptance
from specheads.decoding.loop import decode
from specheads.decoding.plain import plain_decode
from specheads.decoding.result import DecodeResult
from specheads.drafters.contract import Drafter
from specheads.hardware import peak_memory
from specheads.models.base import context_length
from specheads.sampling import Sampler


@dataclass(frozen=True)
class Prompt:
    """One prompt; ``input_ids`` is [1, P]."""

    id: str
    kind: str
    input_ids: Tensor


@dataclass(frozen=True)
class Decoded:
    """New tokens of one prompt.

    Attributes:
        tokens: all after the prompt, the end of text included.
        accept_lengths: tokens gained by each verify step; plain decoding gains one.
        ended: stopped by an end of text, not by the limit.
        num_replays: near-ties that were settled by a plain replay.
        num_replay_passes: forward passes that replays took.
    """

    tokens: list[int]
    accept_lengths: list[int]
    ended: bool
    num_replays: int = field(default=0, compare=False)
    num_replay_passes: int = field(default=0, compare=False)


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


Decode = Callable[[Batch, float, int], list[Decoded]]  # (batch, temperature, seed)


@dataclass(frozen=True)
class Method:
    """One way to continue prompts: ``decode(batch, temperature, seed)``, one result per row.

    Row b draws with ``seed + b``, so that a prompt is continued alike in batches of any size.
    ``prefill`` is the same call with a limit of one new token: it reads the prompts and chooses
    what comes first, as far as this method does that before its first step.
    """

    name: str
    decode: Decode
    drafter: str | None = None
    tree_nodes: int = 1
    extra_parameters: int = 0
    seeded: bool = True  # draws what plain decoding draws with the same seed
    lossless: bool = True  # greedy, its tokens are plain decoding's
    compiled: bool = False
    prefill: Decode | None = None
    in_batches: bool = False  # the same as another method where prompts are decoded alone


@dataclass
class Runs:
    """What one method did with all prompts at one temperature and batch size."""

    seconds: list[list[float]] = field(default_factory=list)  # [repeats][batches]
    decoded: list[Decoded] = field(default_factory=list)  # [prompts], of the first repeat
    peak_memory: int = 0
    batch_size: int = 1
    prefill: list[list[float]] = field(default_factory=list)  # as seconds; empty: not clocked

    @property
    def batches(self) -> list[range]:
        """Which prompts were decoded together."""
        size, total = self.batch_size, len(self.decoded)
        return [range(i, min(i + size, total)) for i in range(0, total, size)]


def make_batches(prompts: Sequence[Prompt], size: int) -> list[Batch]:
    """Group prompts in their order, ``size`` by ``size``; the last batch may be smaller."""
    batches = []
    for first in range(0, len(prompts), size):
        rows = [prompt.input_ids[0] for prompt in prompts[first : first + size]]
        longest = max(map(len, rows))
        ids = rows[0].new_zeros(len(rows), longest)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :] = row
            mask[i, longest - len(row) :] = 1
        batches.append(Batch(ids, mask, first))
    return batches


def as_decoded(result: DecodeResult) -> list[Decoded]:
    """Return what a comparison needs of every row."""
    return [
        Decoded(
            row.new_tokens,
            row.accept_lengths,
            row.finished,
            row.num_replays,
            row.num_replay_passes,
        )
        for row in result.rows
    ]


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
    by_kind: dict[str, list[Prompt]] = {}
    for record in prompt_records(path, chat=tokenizer.chat_template is not None):
        ids = encoder.prompt(record)
        if 0 < len(ids) <= max_length:
            prompt = Prompt(record["id"], record["kind"], torch.tensor([ids], device=device))
            by_kind.setdefault(prompt.kind, []).append(prompt)
    rounds = range(max(map(len, by_kind.values()), default=0))
    ordered = [by_kind[kind][i] for i in rounds for kind in by_kind if i < len(by_kind[kind])]
    if not ordered:
        raise ConfigError(f"{path} has no prompt of at most {max_length} tokens")
    chosen = ordered[:num_prompts]
    content = [[prompt.id, prompt.kind, prompt.input_ids[0].tolist()] for prompt in chosen]
    return chosen, hashlib.sha256(json.dumps(content).encode()).hexdigest()


def plain_method(
    base: PreTrainedModel, eos: tuple[int, ...], max_new_tokens: int, *, compile: bool = False
) -> Method:
    """Return our own loop of one token at a time, the baseline of every figure."""

    def run(
        batch: Batch, temperature: float, seed: int, limit: int = max_new_tokens
    ) -> list[Decoded]:
        result = plain_decode(
            base,
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=limit,
            sampler=Sampler(temperature=temperature, seed=seed),
            eos_token_ids=eos,
            compile=compile,
        )
        return as_decoded(result)

    return Method("plain", run, compiled=compile, prefill=partial(run, limit=1))


def drafted_method(
    name: str,
    base: PreTrainedModel,
    drafter: Drafter,
    eos: tuple[int, ...],
    max_new_tokens: int,
    *,
    tree_nodes: int,
    extra_parameters: int = 0,
    acceptance: Acceptance | None = None,
    compile: bool = False,
    drafter_name: str | None = None,
) -> Method:
    """Return the decoding loop with ``drafter``, called ``drafter_name``, else by its class.

    Tokens are compared where the rule is lossless and, when sampling, the candidates are not
    themselves sampled.
    """

    def run(
        batch: Batch, temperature: float, seed: int, limit: int = max_new_tokens
    ) -> list[Decoded]:
        result = decode(
            base,
            drafter,
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=limit,
            sampler=Sampler(temperature=temperature, seed=seed),
            eos_token_ids=eos,
            acceptance=acceptance,
            compile=compile,
        )
        return as_decoded(result)

    kind = drafter_name or type(drafter).__name__.removesuffix("Drafter").lower()
    lossless = acceptance is None or acceptance.lossless
    seeded = lossless and drafter.deterministic
    return Method(
        name,
        run,
        kind,
        tree_nodes,
        extra_parameters,
        seeded,
        lossless,
        compile,
        prefill=partial(run, limit=1),
    )


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
    prefill: bool = False,
    started: list[contention.Sample] | None = None,
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
        prefill: clock, in each turn just before it, the method's prefill alone as well.
        started: gets the processors' counters at the moment when the warm-up is over.

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
        peak_memory(device, reset=True)
        method.decode(batches[0], temperature, seed)
        runs[method.name].peak_memory = peak_memory(device)
    if started is not None:
        started.append(contention.sample())
    for repeat in range(repeats):
        for method in methods:
            runs[method.name].seconds.append([0.0] * len(batches))
            if prefill and method.prefill:
                runs[method.name].prefill.append([0.0] * len(batches))
        for index, batch in enumerate(batches):
            first = (index + repeat) % len(methods)
            for method in (*methods[first:], *methods[:first]):
                if prefill and method.prefill:
                    start = time.perf_counter()
                    method.prefill(batch, temperature, seed + batch.first)
                    runs[method.name].prefill[repeat][index] = time.perf_counter() - start
                start = time.perf_counter()
                decoded = method.decode(batch, temperature, seed + batch.first)
                runs[method.name].seconds[repeat][index] = time.perf_counter() - start
                if repeat == 0:
                    runs[method.name].decoded += decoded
                for _ in decoded:
                    tick()
    return runs


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
    if not _is_embedded(checkpoint):
        of_run = Path(checkpoint).parent / "prompts.jsonl"  # held out, and calibrated on
        kept = f"; the run kept {of_run} to calibrate on" if of_run.is_file() else ""
        print(
            f"specheads: no prompts given: taking the embedded ones, which are about Python{kept}",
            file=sys.stderr,
        )
    return tinycode_dir() / name


def _is_embedded(checkpoint: str) -> bool:
    """Return whether the base is the embedded model, as far as can be told before it is loaded."""
    if checkpoint == "tinycode":
        return True
    try:
        base = json.loads((Path(checkpoint) / "config.json").read_text())["base"]
        return bool(base["name"] == "tinycode")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def max_prompt_length(base: PreTrainedModel, max_new_tokens: int) -> int:
    """Return the longest prompt that leaves room for the new tokens.

    Raises:
        ConfigError: if there is none.
    """
    context = context_length(base)
    if context is None:
        return 1 << 30
    if max_new_tokens >= context:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, but the base model's context is {context}"
        )
    return context - max_new_tokens
