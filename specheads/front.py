"""The library in a few lines: a model with what drafts for it, loaded by one name.

Example::

    import specheads

    model = specheads.load("smollm2")
    print(model.generate("Name three rivers.", max_new_tokens=64).text)
    for piece in model.stream([{"role": "user", "content": "And lakes?"}]):
        print(piece.text, end="")
    print(model.compare(["Name three rivers.", "Name three lakes."]))

What is generated is the base model's own output, as the command ``generate`` writes it: text is a
user's turn where the model has a chat template.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, overload

import torch
from torch import Tensor

from specheads.config import ConfigError, DecodeConfig, TrainConfig
from specheads.config.commands import TextSettings
from specheads.data.chat import Encoder
from specheads.decoding.conversation import GrowingText, text_of
from specheads.decoding.exported import Chosen, Subject, choose_drafter, load_subject
from specheads.decoding.generate import SpecDecoder, decode_many, room, settings_of
from specheads.decoding.stream import Job, Stream
from specheads.models.base import context_length
from specheads.system import hardware
from specheads.system.files import shipped_export

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int] | Tensor


@dataclass(frozen=True)
class Generated:
    """What a prompt was continued with.

    Attributes:
        text: without special tokens.
        tokens: their ids, the one that ends the text included.
        prompt_tokens: ids of the prompt as the model read it.
        accept_lengths: tokens that each verify step gave; the prefill gives one more.
        finished: the text ended by itself, and not at the limit.
        seconds: of the call, for all its prompts.
    """

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    accept_lengths: list[int]
    finished: bool
    seconds: float

    @property
    def accept_length(self) -> float:
        """Mean tokens per verify step; 1 where there was none."""
        return sum(self.accept_lengths) / max(len(self.accept_lengths), 1) or 1.0

    def __str__(self) -> str:
        """Return one line: how much, how fast, and how the text begins."""
        steps = len(self.accept_lengths)
        said = f"{len(self.tokens)} tokens in {steps} steps, {self.accept_length:.2f} per step"
        return f"{said}, {self.seconds:.2f} s: {self.text[:40]!r}"


@dataclass(frozen=True)
class Piece:
    """What one step of a stream gave.

    Attributes:
        text: the text that is new; characters that are not whole yet wait for a later piece.
        tokens: the step's.
    """

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Comparison:
    """A drafter beside plain decoding on the same prompts, in turns.

    Attributes:
        speedup: tokens per second over plain decoding's, all prompts together.
        speedup_ci95: its interval over prompts.
        accept_length: mean tokens per verify step.
        accept_length_ci95: its interval over prompts.
        identical: texts that are plain decoding's, of ``compared``.
        compared: None where a drafter samples: its texts are others of the same distribution.
        tokens_per_second: with the drafter.
        plain_tokens_per_second: without.
        temperature: of the texts.
        num_prompts: how many.
    """

    speedup: float
    speedup_ci95: tuple[float, float]
    accept_length: float
    accept_length_ci95: tuple[float, float]
    identical: int | None
    compared: int | None
    tokens_per_second: float
    plain_tokens_per_second: float
    temperature: float
    num_prompts: int

    def __str__(self) -> str:
        """Return one line."""
        low, high = self.speedup_ci95
        same = f", {self.identical} of {self.compared} texts equal" if self.compared else ""
        return (
            f"{self.speedup:.2f}x plain decoding ({low:.2f} to {high:.2f}) at"
            f" T={self.temperature:g}: {self.accept_length:.2f} tokens per step,"
            f" {self.tokens_per_second:.0f} tokens/s over {self.plain_tokens_per_second:.0f},"
            f" {self.num_prompts} prompts{same}"
        )


class Model:
    """A base model, its tokenizer, and what drafts for it; made by :func:`load`.

    Attributes:
        subject: base model, tokenizer, and the export they came with, if any.
        drafter: its name, as ``decode.drafter`` of the commands.
        decoder: for what this class leaves out, see :class:`SpecDecoder`.
    """

    def __init__(self, subject: Subject, decode: DecodeConfig) -> None:
        self.subject, self._decode = subject, decode
        self._chosen: Chosen = choose_drafter(subject, decode)
        self.drafter = self._chosen.name
        self.decoder: SpecDecoder = SpecDecoder.of(subject, decode, self._chosen.drafter)
        self._encode = Encoder(subject.tokenizer)

    def __repr__(self) -> str:
        """Return one line."""
        base = self.subject.base
        name = self.subject.tokenizer.name_or_path or type(base).__name__
        dtype = str(base.dtype).removeprefix("torch.")
        return f"<specheads.Model {name}: {self.drafter}, {dtype} on {base.device.type}>"

    def prompt(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the ids of a prompt as the model reads it.

        Args:
            prompt: text; messages, the last one a user's; or ids, [P] or [1, P].
            raw: take text as it stands, also where there is a chat template.

        Raises:
            ConfigError: for a prompt of no tokens, one that fills the context, or messages that the
                template refuses.
        """
        template = None if raw else self.subject.tokenizer.chat_template
        if isinstance(prompt, Tensor):
            prompt = prompt.flatten().tolist()
        elif isinstance(prompt, str) and template is not None:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            ids = self._encode.prompt({"id": "of this call", "kind": "prompt", "text": prompt})
        elif prompt and isinstance(prompt[0], Mapping):
            messages = [dict(cast(Message, each)) for each in prompt]
            ids = self._encode.prompt({"id": "of this call", "kind": "chat", "messages": messages})
        else:
            ids = [int(cast(int, token)) for token in prompt]
        context = context_length(self.subject.base) or math.inf
        if not 0 < len(ids) < context:
            raise ConfigError(f"the prompt has {len(ids)} tokens, expected 1 to {context - 1:g}")
        return ids

    @overload
    def generate(self, prompts: str | Tensor, **settings: Any) -> Generated: ...

    @overload
    def generate(self, prompts: Sequence[Any], **settings: Any) -> Generated | list[Generated]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        batch_size: int = 8,
        raw: bool = False,
        **settings: Any,
    ) -> Generated | list[Generated]:
        """Continue a prompt, or several.

        Args:
            prompts: text, messages, ids (see :meth:`prompt`), or a list of them.
            max_new_tokens: limit per prompt.
            temperature: 0 is greedy, more is sampling.
            top_k: keep the k most likely tokens; 0 keeps all.
            top_p: keep the fewest tokens that together reach this probability.
            seed: same seed, same tokens, as plain decoding with it; prompt n draws with ``seed +
                n``.
            batch_size: prompts that are decoded together.
            raw: take text as it stands.
            **settings: further ones of :meth:`SpecDecoder.generate`, as ``stop_strings``.

        Returns:
            One result, or for a list of prompts a list of them.

        Raises:
            ConfigError: as :meth:`prompt`.
            ValueError: for settings that do not go with a tree of guesses.
        """
        several = _several(prompts)
        asked = cast("Sequence[Prompt]", prompts) if several else [cast(Prompt, prompts)]
        ids = [self.prompt(each, raw=raw) for each in asked]
        drawn = TextSettings(
            checkpoint="", temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        start = time.perf_counter()
        rows = list(decode_many(self.decoder, drawn, ids, max_new_tokens, batch_size, **settings))
        seconds = time.perf_counter() - start
        found = []
        for read, row in zip(ids, rows, strict=True):
            new, lengths = row.new_tokens, row.accept_lengths
            text = text_of(self.subject.tokenizer, new)
            found.append(Generated(text, new, read, lengths, row.finished, seconds))
        return found if several else found[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        raw: bool = False,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Continue one prompt; yield what each step gives, as soon as it is there.

        The pieces' texts join to :meth:`generate`'s. Each step is decoded when its piece is asked
        for.

        Args:
            prompt: text, messages or ids, see :meth:`prompt`.
            max_new_tokens: limit.
            temperature: 0 is greedy, more is sampling.
            seed: same seed, same tokens.
            raw: take text as it stands.
            **settings: further ones of :meth:`SpecDecoder.generate`.

        Raises:
            ConfigError: as :meth:`prompt`, before anything is decoded.
        """
        ids = self.prompt(prompt, raw=raw)
        limit = min(max_new_tokens, room(self.subject.base, ids))
        drawn = TextSettings(checkpoint="", temperature=temperature, seed=seed)
        return self._pieces(ids, drawn, limit, settings)

    def _pieces(
        self, ids: list[int], drawn: TextSettings, limit: int, settings: dict[str, Any]
    ) -> Iterator[Piece]:
        how = settings_of(self.decoder, drawn, ids, limit, **settings)
        decoder = self.decoder
        stream = Stream(decoder.base, decoder.drafter, how, batch_size=1, evened=False)
        stream.add([Job.of(ids, how)])
        text, row = GrowingText(self.subject.tokenizer), stream.output.rows[0]
        while step := row.new_tokens[len(text.tokens) :]:
            yield Piece(text.add(step), step)
            if stream.free:
                break
            stream.step()
        if rest := text.add([], ended=True):
            yield Piece(rest, [])

    def compare(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        repeats: int = 2,
        seed: int = 0,
        raw: bool = False,
    ) -> Comparison:
        """Decode prompts with the drafter and plainly, in turns, and clock both.

        Args:
            prompts: texts, messages or ids; the more, the narrower the intervals.
            max_new_tokens: limit per prompt.
            temperature: of the texts.
            repeats: clocked rounds over all prompts.
            seed: prompt n draws with ``seed + n``.
            raw: take text as it stands.

        Raises:
            ConfigError: as :meth:`prompt`, and without any prompts.
        """
        from specheads.measure.bench import Contest, make_rows
        from specheads.measure.clock import Prompt as Clocked
        from specheads.measure.clock import clock

        if not prompts:
            raise ConfigError("compare() needs prompts, got none")
        device = self.subject.base.device
        ids = [self.prompt(each, raw=raw) for each in prompts]
        texts = [
            Clocked(str(n), "", torch.tensor([each], device=device)) for n, each in enumerate(ids)
        ]
        contest = Contest.of(self.subject, max_new_tokens, compile=self._decode.compile)
        drafted = contest.ours("drafted", self._chosen.drafter, self._chosen.num_nodes)
        methods = [contest.ours(), drafted]
        runs = clock(methods, texts, temperature, repeats=repeats, seed=seed)
        rows, _ = make_rows(self.subject.base, methods, texts, {(temperature, 1): runs}, seed=seed)
        plain, own = rows
        alike = ("accept_length", "identical", "tokens_per_second", "temperature", "num_prompts")
        return Comparison(
            speedup=own["speedup_vs_plain"],
            speedup_ci95=tuple(own["speedup_vs_plain_ci95"]),
            accept_length_ci95=tuple(own["accept_length_ci95"]),
            compared=own["compared"] or None,  # 0 where draws differ by design
            plain_tokens_per_second=plain["tokens_per_second"],
            **{name: own[name] for name in alike},
        )


def run_recipe(recipe: str, **settings: Any) -> Path:
    """Train as ``python -m specheads.train +recipe=<recipe> key=value ...`` does; return the run.

    Args:
        recipe: its name, as ``medusa1``.
        **settings: of the command; a key with dots is one level deeper with two underscores, as
            ``optim__lr=1e-3``.

    Returns:
        The run directory, with ``export/`` in it.

    Raises:
        ConfigError: one line, if a setting is unknown or asks for something that cannot be.
        RunError: if the training failed.
    """
    from specheads.config.compose import composed
    from specheads.config.main import tidy_arguments
    from specheads.config.own import hydra_word
    from specheads.train import train

    place = f"run_dir=runs/{settings.get('name', recipe)}"
    words = [f"{key.replace('__', '.')}={hydra_word(value)}" for key, value in settings.items()]
    given = [f"+recipe={recipe}", *([] if "run_dir" in settings else [place]), *words]
    config = composed("train", TrainConfig, tidy_arguments(given))
    train(config)
    return Path(config.run_dir)


def _several(prompts: object) -> bool:
    """Return whether these are several prompts, and not messages or ids of one."""
    if isinstance(prompts, str | Tensor):
        return isinstance(prompts, Tensor) and prompts.dim() == 2 and len(prompts) > 1
    first = next(iter(cast(Sequence[Any], prompts)), None)
    return first is None or not isinstance(first, Mapping | int)


def load(
    checkpoint: str | Path,
    *,
    drafter: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    base: str | None = None,
    **decode: Any,
) -> Model:
    """Load a model with what drafts for it.

    Args:
        checkpoint: an export's folder or its name on the hub (``org/heads``,
            ``org/heads@revision``), ``smollm2`` with the heads that ship, or a base model: a
            folder, a .gguf, a name.
        drafter: as ``decode.drafter`` of the commands: heads, suffix, lookup, lookahead, draft, or
            several as ``heads+suffix``; ``auto`` takes an export's heads, a base's own suffixes.
        device: ``auto`` takes a GPU where there is one; cpu, cuda, cuda:1, mps.
        dtype: ``auto`` takes bfloat16 where the processor has it; float32, bfloat16, float16.
        base: where an export's base model is now, if it was moved.
        **decode: further settings of ``decode``, as ``draft="org/small"``, ``num_nodes=24``.

    Raises:
        ConfigError: one line, if something cannot be found, loaded, or drafted with.
    """
    asked = DecodeConfig(drafter=drafter, **decode)
    on = hardware.pick_device(device)
    hardware.quiet_loading()
    place = shipped_export(str(checkpoint))
    subject = load_subject(place, base=base, dtype=hardware.pick_dtype(dtype, on), device=on)
    return Model(subject, asked)
