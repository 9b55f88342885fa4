"""Decode the same prompts with several methods in turn, and clock each of them.

All methods of one comparison share process, weights, dtype, prompts, limit and rule of counting: a
new token is one that stands after the prompt in the result, an end of text included. The baselines
are plain decoding and transformers' own loops: generate, compiled generate, an assistant model,
prompt lookup. :class:`Phases` clocks the parts of one step of the decoding loop from outside, so
that the loop itself holds no clocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.cache import TreeCache
from specheads.config import ConfigError
from specheads.data.chat import Encoder
from specheads.data.suites import prompt_records
from specheads.decoding import loop
from specheads.decoding.loop import decode, plain_decode
from specheads.decoding.result import DecodeResult, Output
from specheads.drafters.contract import Drafter
from specheads.drafters.heads import HeadsDrafter
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
    started: hardware.Sample | None = None  # the processors' counters when the warm-up was over

    @property
    def batches(self) -> list[range]:
        """Which prompts were decoded together."""
        size, total = self.batch_size, len(self.decoded)
        return [range(i, min(i + size, total)) for i in range(0, total, size)]

    def only(self, chosen: Sequence[int]) -> Runs:
        """Return what was done with some prompts; no seconds where batches held others too."""
        alone = self.batch_size == 1
        seconds, prefill = (
            [[repeat[i] for i in chosen] for repeat in repeats] if alone else []
            for repeats in (self.seconds, self.prefill)
        )
        return replace(
            self, seconds=seconds, prefill=prefill, decoded=[self.decoded[i] for i in chosen]
        )


def pad_left(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return prompts [1, P] of several lengths as one batch [B, T], and its attention mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    rows = [F.pad(prompt, (longest - prompt.shape[1], 0)) for prompt in prompts]
    real = [F.pad(torch.ones_like(prompt), (longest - prompt.shape[1], 0)) for prompt in prompts]
    return torch.cat(rows), torch.cat(real)


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


Run = Callable[[Batch, float, int, int], list[Decoded]]  # (batch, temperature, seed, limit)


def _method(name: str, run: Run, max_new_tokens: int, **about: Any) -> Method:
    """Return a method whose prefill is the same call with a limit of one token."""

    def limited(limit: int) -> Decode:
        return lambda batch, temperature, seed: run(batch, temperature, seed, limit)

    return Method(name, limited(max_new_tokens), prefill=limited(1), **about)


def _our_method(
    name: str,
    loop: Callable[..., DecodeResult],
    eos: tuple[int, ...],
    max_new_tokens: int,
    **about: Any,
) -> Method:
    """Return one of our own loops, given all but the prompts, the limit and the sampler."""

    def run(batch: Batch, temperature: float, seed: int, limit: int) -> list[Decoded]:
        result = loop(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=limit,
            sampler=Sampler(temperature=temperature, seed=seed),
            eos_token_ids=eos,
        )
        return [
            Decoded(r.new_tokens, r.accept_lengths, r.finished, r.num_replays, r.num_replay_passes)
            for r in result.rows
        ]

    return _method(name, run, max_new_tokens, **about)


def plain_method(
    base: PreTrainedModel, eos: tuple[int, ...], max_new_tokens: int, *, compile: bool = False
) -> Method:
    """Return our own loop of one token at a time, the baseline of every figure."""
    plain = partial(plain_decode, base, compile=compile)
    return _our_method("plain", plain, eos, max_new_tokens, compiled=compile)


def drafted_method(
    name: str,
    base: PreTrainedModel,
    drafter: Drafter,
    eos: tuple[int, ...],
    max_new_tokens: int,
    *,
    tree_nodes: int = 1,
    **options: Any,
) -> Method:
    """Return the decoding loop with ``drafter``.

    Tokens are compared with plain decoding's where the rule is lossless and, when sampling, the
    candidates are not themselves sampled.

    Args:
        name: of the method; its drafter is called by its class.
        base: base model.
        drafter: proposes.
        eos: tokens that end a text.
        max_new_tokens: limit per prompt.
        tree_nodes: most tokens that a step verifies, the root included.
        **options: more arguments of ``decode``: ``acceptance``, ``compile``.
    """
    rule = options.get("acceptance")
    lossless = rule is None or rule.lossless
    return _our_method(
        name,
        partial(decode, base, drafter, **options),
        eos,
        max_new_tokens,
        drafter=type(drafter).__name__.removesuffix("Drafter").lower(),
        tree_nodes=tree_nodes,
        seeded=lossless and drafter.deterministic,
        lossless=lossless,
        compiled=options.get("compile", False),
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

    Returns:
        Runs by the method's name; without methods that are others' where prompts are alone.
    """
    methods = [each for each in methods if batch_size > 1 or not each.in_batches]
    device = prompts[0].input_ids.device
    batches = make_batches(prompts, batch_size)

    def clocked(decode: Decode, batch: Batch) -> tuple[float, list[Decoded]]:
        start = time.perf_counter()
        decoded = decode(batch, temperature, seed + batch.first)
        return time.perf_counter() - start, decoded

    runs = {method.name: Runs(batch_size=batch_size) for method in methods}
    for method in methods:  # warm up, and look at the memory of one batch of this method alone
        # where passes are compiled, a shape met for the first time takes seconds: meet all now
        for batch in batches if any(each.compiled for each in methods) else batches[-1:]:
            clocked(method.decode, batch)
        peak_memory(device, reset=True)
        clocked(method.decode, batches[0])
        runs[method.name].peak_memory = peak_memory(device)
    started = hardware.sample()
    for repeat in range(repeats):
        for method in methods:
            of = runs[method.name]
            of.started = started
            of.seconds.append([])
            of.prefill += [[]] if prefill and method.prefill else []
        for index, batch in enumerate(batches):
            first = (index + repeat) % len(methods)
            for method in (*methods[first:], *methods[:first]):
                of = runs[method.name]
                if prefill and method.prefill:
                    of.prefill[-1].append(clocked(method.prefill, batch)[0])
                seconds, decoded = clocked(method.decode, batch)
                of.seconds[-1].append(seconds)
                of.decoded += decoded if repeat == 0 else []
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


def _generate(
    base: PreTrainedModel, batch: Batch, temperature: float, eos: tuple[int, ...], **options: Any
) -> list[list[int]]:
    """Return what transformers' ``generate`` puts behind each row, drawn from all tokens."""
    if temperature:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    sequences = base.generate(  # type: ignore[operator]
        batch.input_ids,
        attention_mask=batch.attention_mask,
        do_sample=temperature > 0,
        eos_token_id=list(eos) or None,
        **options,
    )
    tokens: list[list[int]] = sequences[:, batch.input_ids.shape[1] :].tolist()
    return tokens


def hf_generate_method(
    base: PreTrainedModel,
    eos: tuple[int, ...],
    pad: int | None,
    max_new_tokens: int,
    *,
    name: str = "hf_generate",
    options: dict[str, Any] | None = None,
) -> Method:
    """Return transformers' own ``generate``; it draws differently, so only T=0 compares tokens.

    Prompts of a batch are padded to the longest, and rows that ended wait for the others.

    Args:
        base: base model.
        eos: tokens that end a text.
        pad: token of the padding.
        max_new_tokens: limit per prompt.
        name: of the method.
        options: more arguments of ``generate``.
    """
    if base.device.type == "cpu":  # generate() loads deepspeed, which else announces its guess
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    more = options or {}
    padding = pad if pad is not None else (eos[0] if eos else 0)

    def run(batch: Batch, temperature: float, seed: int, limit: int) -> list[Decoded]:
        torch.manual_seed(seed)
        if more.get("use_mtp"):
            check_prompt(base, batch.input_ids.shape[1])
        texts = _generate(
            base, batch, temperature, eos, max_new_tokens=limit, pad_token_id=padding, **more
        )
        return [_until_end(tokens, eos) for tokens in texts]

    compiled = "compile_config" in more
    return _method(name, run, max_new_tokens, seeded=False, compiled=compiled)


def _until_end(tokens: list[int], eos: tuple[int, ...]) -> Decoded:
    """Count what a row got before generate() padded it to the length of the longest."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return Decoded(tokens[:end], [1] * (end - 1), tokens[end - 1] in eos)


def _rows(batch: Batch) -> Iterator[Batch]:
    """Yield each row as a batch of its own, without padding."""
    for row, (ids, mask) in enumerate(zip(batch.input_ids, batch.attention_mask, strict=True)):
        real = mask.bool()
        yield Batch(ids[real][None], mask[real][None], batch.first + row)


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
            rows = enumerate(_rows(batch))
            return [text for i, row in rows for text in decode(row, temperature, seed + i)]

        return run

    decode, prefill = alone(plain.decode), alone(plain.prefill)
    return replace(plain, name="one_by_one", in_batches=True, decode=decode, prefill=prefill)


def hf_compiled_method(
    base: PreTrainedModel, eos: tuple[int, ...], pad: int | None, max_new_tokens: int
) -> Method:
    """Return ``generate`` with transformers' static cache, for which it compiles its passes.

    It does so by itself on a GPU; on other devices it has to be told.
    """
    on_gpu = base.device.type == "cuda"
    how: Any = CompileConfig(mode="reduce-overhead" if on_gpu else "default")
    how._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": how}
    return hf_generate_method(base, eos, pad, max_new_tokens, name="hf_compiled", options=options)


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

    def run(batch: Batch, temperature: float, seed: int, limit: int) -> list[Decoded]:
        options = {"assistant_model": draft, "max_new_tokens": limit}
        with fixed_assistant(draft, num_tokens):
            return _speculated(base, batch, temperature, seed, eos, options)

    extra = sum(parameter.numel() for parameter in draft.parameters())
    about = {"tree_nodes": num_tokens + 1, "extra_parameters": extra, "seeded": False}
    return _method("hf_assisted", run, max_new_tokens, drafter="hf assistant", **about)


def hf_lookup_method(
    base: PreTrainedModel, num_tokens: int, ngram: int, eos: tuple[int, ...], max_new_tokens: int
) -> Method:
    """Return ``generate(prompt_lookup_num_tokens=...)``, one prompt at a time.

    Args:
        base: base model.
        num_tokens: tokens copied per step.
        ngram: longest match.
        eos: tokens that end a text.
        max_new_tokens: limit per prompt.
    """
    copied = {"prompt_lookup_num_tokens": num_tokens, "max_matching_ngram_size": ngram}

    def run(batch: Batch, temperature: float, seed: int, limit: int) -> list[Decoded]:
        options = {**copied, "max_new_tokens": limit}
        return _speculated(base, batch, temperature, seed, eos, options)

    about = {"tree_nodes": num_tokens + 1, "seeded": False}
    return _method("hf_lookup", run, max_new_tokens, drafter="hf prompt lookup", **about)


@contextlib.contextmanager
def fixed_assistant(draft: PreTrainedModel, num_tokens: int) -> Iterator[None]:
    """While open, transformers drafts ``num_tokens`` with ``draft``, never fewer for lack of trust.

    It reads that from the assistant's own generation settings.
    """
    settings = vars(draft.generation_config)
    wanted = {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    with patch.dict(settings, wanted):
        yield


def _speculated(
    base: PreTrainedModel,
    batch: Batch,
    temperature: float,
    seed: int,
    eos: tuple[int, ...],
    options: dict[str, Any],
) -> list[Decoded]:
    """Return the texts of transformers' own speculation, which takes one row at a time."""
    texts = []
    for i, row in enumerate(_rows(batch)):
        torch.manual_seed(seed + i)
        with _known_before_passes(base) as known:
            # there is no padding; any other token than the end would be hidden from the assistant
            padding = eos[0] if eos else None
            (tokens,) = _generate(base, row, temperature, eos, pad_token_id=padding, **options)
        lengths = gained_by_passes(known, row.input_ids.shape[1], len(tokens))
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
        drafter: HeadsDrafter,
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
