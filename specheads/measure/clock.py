"""Decode the same prompts with several methods in turn, and clock each of them.

All methods of one comparison share process, weights, dtype, prompts, limit and rule of counting: a
new token is one that stands after the prompt in the result, an end of text included.

Baselines beside plain decoding: generate, without batches, with compiled passes.

transformers' own speculative decoding, to compare with: an assistant model, prompt lookup.

Clock the phases of the decoding loop from outside, so that the loop itself holds no clocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.cache import TreeCache
from specheads.config import ConfigError
from specheads.data.chat import Encoder
from specheads.data.suites import prompt_records
from specheads.decoding import loop
from specheads.decoding.accept import Acceptance
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodeResult, Output
from specheads.drafters.contract import Drafter
from specheads.drafters.growing import DynamicDrafter, StaticDrafter
from specheads.models import forward
from specheads.models.base import context_length
from specheads.models.forward import ModelPass
from specheads.models.head_cache import LayerCache
from specheads.models.heads import Steps, Walk
from specheads.models.mtp_hf import check_prompt
from specheads.models.output import OutputLayer
from specheads.system import hardware
from specheads.system.files import tinycode_dir
from specheads.system.hardware import peak_memory
from specheads.verification.sampling import Sampler


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


def prompts_of(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    num_prompts: int,
    max_new_tokens: int,
) -> tuple[list[Prompt], str]:
    """Return :func:`read_prompts` of those that leave ``base`` room for the new tokens."""
    longest = max_prompt_length(base, max_new_tokens)
    return read_prompts(path, tokenizer, num_prompts, max_length=longest, device=base.device)


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
    started: list[hardware.Sample] | None = None,
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
        started.append(hardware.sample())
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


def hf_generate_method(
    base: PreTrainedModel,
    eos: tuple[int, ...],
    pad: int | None,
    max_new_tokens: int,
    *,
    name: str = "hf_generate",
    options: Mapping[str, Any] | None = None,
    compiled: bool = False,
) -> Method:
    """Return transformers' own ``generate``; it draws differently, so only T=0 compares tokens.

    Prompts of a batch are padded to the longest, and rows that ended wait for the others.

    Args:
        base: base model.
        eos: tokens that end a text.
        pad: padding.
        max_new_tokens: limit per prompt.
        name: of the method.
        options: more arguments of ``generate``.
        compiled: whether they make it compile its passes.
    """
    if base.device.type == "cpu":  # generate() loads deepspeed, which else announces its guess
        os.environ.setdefault("DS_ACCELERATOR", "cpu")

    def run(
        batch: Batch, temperature: float, seed: int, limit: int = max_new_tokens
    ) -> list[Decoded]:
        torch.manual_seed(seed)
        chosen: dict[str, Any] = dict(options or {})
        if chosen.get("use_mtp"):
            check_prompt(base, batch.input_ids.shape[1])
        if temperature:
            chosen |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        sequences = base.generate(  # type: ignore[operator]
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=limit,
            do_sample=temperature > 0,
            eos_token_id=list(eos) or None,
            pad_token_id=pad if pad is not None else (eos[0] if eos else 0),
            **chosen,
        )
        texts = sequences[:, batch.input_ids.shape[1] :].tolist()
        return [_until_end(tokens, eos) for tokens in texts]

    prefill = partial(run, limit=1)
    return Method(name, run, seeded=False, compiled=compiled, prefill=prefill)


def _until_end(tokens: list[int], eos: tuple[int, ...]) -> Decoded:
    """Count what a row got before generate() padded it to the length of the longest."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return Decoded(tokens[:end], [1] * (end - 1), tokens[end - 1] in eos)


def one_by_one_method(plain: Method) -> Method:
    """Return ``plain`` over the prompts of a batch one after the other, as without batching.

    What a batch gains by itself, before anything is drafted: a decoder that is slower than this has
    no use for its batch. Of one prompt it would be ``plain`` again, so it is left out there.

    Args:
        plain: decodes any batch.
    """
    assert plain.prefill is not None

    def alone(decode: Decode) -> Decode:
        def run(batch: Batch, temperature: float, seed: int) -> list[Decoded]:
            found = []
            for row, (ids, mask) in enumerate(
                zip(batch.input_ids, batch.attention_mask, strict=True)
            ):
                prompt = ids[mask.bool()][None]
                one = Batch(prompt, mask[mask.bool()][None], batch.first + row)
                found += decode(one, temperature, seed + row)
            return found

        return run

    return replace(
        plain,
        name="one_by_one",
        decode=alone(plain.decode),
        prefill=alone(plain.prefill),
        in_batches=True,
    )


def hf_compiled_method(
    base: PreTrainedModel, eos: tuple[int, ...], pad: int | None, max_new_tokens: int
) -> Method:
    """Return ``generate`` with transformers' static cache, for which it compiles its passes.

    It does so by itself on a GPU; on other devices it has to be told.
    """
    on_gpu = base.device.type == "cuda"
    how: Any = CompileConfig(mode="reduce-overhead" if on_gpu else "default")
    how._compile_all_devices = True
    return hf_generate_method(
        base,
        eos,
        pad,
        max_new_tokens,
        name="hf_compiled",
        options={"cache_implementation": "static", "compile_config": how},
        compiled=True,
    )


def hf_assisted_method(
    base: PreTrainedModel,
    draft: PreTrainedModel,
    num_tokens: int,
    eos: tuple[int, ...],
    max_new_tokens: int,
) -> Method:
    """Return ``generate(assistant_model=draft)`` with as many guesses at every step.

    Its confidence threshold is 0 and its schedule constant, so that it drafts what a chain of fixed
    length drafts here. It takes one prompt at a time: rows of a batch follow each other.

    Args:
        base: base model.
        draft: the assistant; its generation settings are changed while it runs.
        num_tokens: guesses per step.
        eos: tokens that end a text.
        max_new_tokens: limit per prompt.
    """

    def run(
        batch: Batch, temperature: float, seed: int, limit: int = max_new_tokens
    ) -> list[Decoded]:
        with fixed_assistant(draft, num_tokens):
            options = {"assistant_model": draft, "max_new_tokens": limit}
            return _rows(base, batch, temperature, seed, eos, options)

    extra = sum(parameter.numel() for parameter in draft.parameters())
    prefill = partial(run, limit=1)
    return Method(
        "hf_assisted", run, "hf assistant", num_tokens + 1, extra, seeded=False, prefill=prefill
    )


def hf_lookup_method(
    base: PreTrainedModel,
    num_tokens: int,
    ngram: int,
    eos: tuple[int, ...],
    max_new_tokens: int,
) -> Method:
    """Return ``generate(prompt_lookup_num_tokens=...)``, one prompt at a time.

    Args:
        base: base model.
        num_tokens: tokens copied per step.
        ngram: longest match.
        eos: tokens that end a text.
        max_new_tokens: limit per prompt.
    """

    def run(
        batch: Batch, temperature: float, seed: int, limit: int = max_new_tokens
    ) -> list[Decoded]:
        options = {
            "prompt_lookup_num_tokens": num_tokens,
            "max_matching_ngram_size": ngram,
            "max_new_tokens": limit,
        }
        return _rows(base, batch, temperature, seed, eos, options)

    prefill = partial(run, limit=1)
    return Method(
        "hf_lookup", run, "hf prompt lookup", num_tokens + 1, seeded=False, prefill=prefill
    )


@contextlib.contextmanager
def fixed_assistant(draft: PreTrainedModel, num_tokens: int) -> Iterator[None]:
    """While open, transformers drafts ``num_tokens`` with ``draft``, never fewer for lack of trust.

    It reads that from the assistant's own generation settings.
    """
    settings: Any = draft.generation_config
    wanted = {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    before = {name: getattr(settings, name, None) for name in wanted}
    for name, value in wanted.items():
        setattr(settings, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def _rows(
    base: PreTrainedModel,
    batch: Batch,
    temperature: float,
    seed: int,
    eos: tuple[int, ...],
    options: dict[str, Any],
) -> list[Decoded]:
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    texts = []
    for row, (ids, mask) in enumerate(zip(batch.input_ids, batch.attention_mask, strict=True)):
        torch.manual_seed(seed + row)
        prompt = ids[mask.bool()][None]
        with _known_before_passes(base) as known:
            found = base.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=temperature > 0,
                eos_token_id=list(eos) or None,
                # there is no padding; any other token would be hidden from the assistant
                pad_token_id=eos[0] if eos else None,
                **sampling,
                **options,
            )
        tokens = found[0, prompt.shape[1] :].tolist()
        lengths = gained_by_passes(known, prompt.shape[1], len(tokens))
        texts.append(Decoded(tokens, lengths, bool(eos) and tokens[-1] in eos))
    return texts


@contextlib.contextmanager
def _known_before_passes(base: PreTrainedModel) -> Iterator[list[int]]:
    """Note while open how many tokens the cache holds when a pass of ``base`` begins."""
    known: list[int] = []

    def note(module: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        known.append(int(options["past_key_values"].get_seq_length()))

    hook = base.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield known
    finally:
        hook.remove()


def gained_by_passes(known: Sequence[int], num_prompt: int, num_new: int) -> list[int]:
    """Return the tokens gained by each pass of transformers' assisted generation.

    It does not say them itself. Behind a pass its cache holds all tokens but the last. The first
    pass verifies guesses with the prompt, so that it counts as a step, which it does not here.

    Args:
        known: tokens in the cache before each pass, 0 before the first.
        num_prompt: tokens of the prompt.
        num_new: tokens that were returned behind it.
    """
    ends = [*(count + 1 for count in known[1:]), num_prompt + num_new]
    return [end - start for start, end in zip([num_prompt, *ends], ends, strict=False)]


FORWARD, HEADS = "base forward", "heads"
PHASES = (FORWARD, HEADS, "propose", "verify", "accept", "emit", "commit", "observe", "replay")


def now(device: torch.device) -> float:
    """Return the time, after whatever the device still does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Phases:
    """Clocks nested calls, each without what it calls that is clocked too, step by step.

    Attributes:
        steps: per step the seconds of every phase, and of the whole as ``step``.

    Args:
        device: waited for before every look at the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self._step: dict[str, float] | None = None  # the one that is going on
        self._begin = 0.0
        self._open: list[list[Any]] = []  # [name, seconds of clocked calls inside]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, clocked as ``name``; a call of propose begins a step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = now(self.device)
            if name == "propose":
                if self._step is not None:
                    self.steps.append({**self._step, "step": start - self._begin})
                self._step, self._begin = dict.fromkeys(PHASES, 0.0), start
            outer = [each[0] for each in self._open]
            self._open.append([name, 0.0])
            try:
                return function(*args, **kwargs)
            finally:
                total = now(self.device) - start
                _, inside = self._open.pop()
                if self._open:
                    self._open[-1][1] += total
                if self._step is not None:  # before the first step there is the prefill
                    label = "replay" if name == FORWARD and "accept" in outer else name
                    self._step[label] += total - inside

        return run

    @contextlib.contextmanager
    def watching(
        self,
        base: PreTrainedModel,
        drafter: StaticDrafter | DynamicDrafter,
        *,
        compile: bool = False,
    ) -> Iterator[None]:
        """Clock the phases of one text decoded while open; its last step is left out.

        Args:
            base: base model.
            drafter: that decodes.
            compile: the passes are compiled ones.
        """
        snapshot, compiled_forward = drafter.heads.snapshot, forward._compiled_forward

        def clocked_forward(mode: str | None) -> Callable[..., Tensor]:
            return self.timed(FORWARD, compiled_forward(mode))

        def clocked_snapshot(output: OutputLayer) -> Callable[[Tensor], Tensor]:
            return self.timed(HEADS, snapshot(output))

        places: list[tuple[Any, str, str]] = [
            (loop, "propose", "propose"),
            (loop, "accept", "accept"),
            (ModelPass, "verify", "verify"),
            (Output, "emit", "emit"),
            (TreeCache, "commit", "commit"),
            (drafter, "observe", "observe"),
            (Steps, "begin", HEADS),
            (Walk, "logits", HEADS),
            (Walk, "descend", HEADS),
            (LayerCache, "append", HEADS),
        ]
        if not compile:  # a forward in place of the model's own would be compiled with it
            places.append((base, "forward", FORWARD))
        with contextlib.ExitStack() as stack:
            for owner, attribute, name in places:
                clocked = self.timed(name, getattr(owner, attribute))
                stack.enter_context(patch.object(owner, attribute, clocked))
            stack.enter_context(patch.object(drafter.heads, "snapshot", clocked_snapshot))
            stack.enter_context(patch.object(forward, "_compiled_forward", clocked_forward))
            yield
        self._step = None  # nothing tells where it ended
