"""Answer a suite's questions one at a time, turn by turn, and clock every turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.data.suites import Question
from specheads.data.templates import QuestionPrompts
from specheads.decoding.answer_files import AnswerFile, Turn
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.result import DecodeResult
from specheads.models.base import context_length, end_tokens, input_device


class TooLongError(ValueError):
    """A turn that leaves no room for an answer in the base model's context."""


@dataclass(frozen=True)
class Asked:
    """How questions are asked.

    Attributes:
        prompts: makes them of questions.
        max_new_tokens: per turn; less where the context ends before.
        temperature: of the sampling; 0 is greedy.
        seed: question n of the suite is answered with ``seed + n``, all its turns alike.
    """

    prompts: QuestionPrompts
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


def answer(decoder: SpecDecoder, question: Question, number: int, asked: Asked) -> list[Turn]:
    """Return the answers to all turns of a question, each given those before it.

    Args:
        decoder: answers, with a tokenizer bound; without a drafter, plainly.
        question: asked.
        number: its place in the suite.
        asked: how.

    Raises:
        TooLongError: if a turn does not fit the base model's context.
        ConfigError: if the chat template refuses the conversation.
    """
    turns: list[Turn] = []
    for i in range(len(question.turns)):
        ids = asked.prompts.ids(question, [turn.text for turn in turns])
        turns.append(_answer_turn(decoder, ids, f"{question.id}, turn {i}", number, asked))
    return turns


def answer_all(
    decoders: Mapping[str, SpecDecoder],
    questions: Sequence[Question],
    todo: Mapping[int, Sequence[str]],
    files: Mapping[str, AnswerFile],
    asked: Asked,
    *,
    warmup: int,
    skip_long: bool,
    tick: Callable[[], object] = lambda: None,
) -> list[int | str]:
    """Answer what is missing, the decoders in turn, each first in every other question.

    Args:
        decoders: by name.
        questions: of the suite.
        todo: place of a question -> names of the decoders that have not answered it.
        files: by the same names; every answer is written before the next question is asked.
        asked: how.
        warmup: times that each decoder answers a question before the first is clocked.
        skip_long: leave out questions that do not fit the base model's context.
        tick: called after every question.

    Returns:
        The ids of the questions left out.

    Raises:
        ConfigError: if a question does not fit, and ``skip_long`` is false.
    """
    left_out: list[int | str] = []

    def too_long(question: Question, error: TooLongError) -> None:
        if not skip_long:
            raise ConfigError(f"{error}; skip_long=true leaves such questions out") from None
        left_out.append(question.id)
        tick()

    fitting = []
    for number in todo:  # all of them first: the last question must not end a run of hours
        try:
            check_length(next(iter(decoders.values())), questions[number], asked)
            fitting.append(number)
        except TooLongError as error:
            too_long(questions[number], error)
    for name in files if fitting else ():
        for _ in range(warmup):
            with contextlib.suppress(TooLongError):  # of a later turn; the clocked one says it
                answer(decoders[name], questions[fitting[0]], fitting[0], asked)
    for number in fitting:
        question, missing = questions[number], list(todo[number])
        try:
            order = missing if number % 2 else missing[::-1]
            turns = {name: answer(decoders[name], question, number, asked) for name in order}
        except TooLongError as error:
            too_long(question, error)
            continue
        for name in missing:
            files[name].append(question, turns[name])
        tick()
    return left_out


def check_length(decoder: SpecDecoder, question: Question, asked: Asked) -> None:
    """Raise TooLongError if the first turn leaves no room for an answer."""
    _room(decoder, asked.prompts.ids(question), f"{question.id}, turn 0")


def count_tokens(decoder: SpecDecoder, result: DecodeResult) -> tuple[int, int, list[int]]:
    """Return new tokens, forward passes and accept lengths, as an answer file counts them.

    The token that ends an answer is no token of it: Spec-Bench counts a baseline's tokens in its
    text, which has none, and a method that counted it would be faster by nothing but that. Of
    plain decoding every pass gains a token; with a drafter the prefill's belongs to no step.
    """
    ends = result.finished and result.new_tokens[-1] in _end_tokens(decoder)
    num_passes = result.num_steps + 1
    lengths = [1] * num_passes if decoder.drafter is None else list(result.accept_lengths)
    return len(result.new_tokens) - int(ends), num_passes, lengths


def decode_prompt(
    decoder: SpecDecoder,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[DecodeResult, float, float]:
    """Decode one prompt [1, P]; return the result, the seconds, and those until the first token."""
    assert decoder.tokenizer is not None
    first: list[float] = []

    def on_tokens(row: int, tokens: list[int]) -> None:
        del row, tokens
        if not first:
            first.append(time.perf_counter())

    pad = decoder.tokenizer.pad_token_id
    drawn: dict[str, Any] = {"top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    _wait(decoder)
    start = time.perf_counter()
    result = decoder.generate(
        input_ids,
        max_new_tokens,
        attention_mask=torch.ones_like(input_ids),
        temperature=temperature,
        seed=seed,
        on_tokens=on_tokens,
        eos_token_id=list(_end_tokens(decoder)) or None,
        pad_token_id=pad if isinstance(pad, int) else 0,
        **drawn,
    )
    _wait(decoder)
    return result, time.perf_counter() - start, first[0] - start


def _answer_turn(
    decoder: SpecDecoder, ids: list[int], where: str, number: int, asked: Asked
) -> Turn:
    assert decoder.tokenizer is not None
    limit = min(asked.max_new_tokens, _room(decoder, ids, where))
    result, seconds, prefill = decode_prompt(
        decoder,
        torch.tensor([ids], device=input_device(decoder.base)),
        limit,
        temperature=asked.temperature,
        seed=asked.seed + number,
    )
    new_tokens, num_passes, lengths = count_tokens(decoder, result)
    text = decoder.tokenizer.decode(
        result.new_tokens[:new_tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return Turn(
        text=str(text).strip(),
        new_tokens=new_tokens,
        num_passes=num_passes,
        accept_lengths=lengths,
        wall_time=seconds,
        prefill_time=prefill,
        num_emitted=len(result.new_tokens),
        num_prompt_tokens=len(ids),
        limit=limit,
    )


def _room(decoder: SpecDecoder, ids: list[int], where: str) -> int:
    context = context_length(decoder.base)
    if context is None:
        return 1 << 30
    if len(ids) >= context:
        raise TooLongError(
            f"question {where}: the prompt is {len(ids)} tokens, but the base model's context is"
            f" {context}"
        )
    return context - len(ids)


def _end_tokens(decoder: SpecDecoder) -> tuple[int, ...]:
    assert decoder.tokenizer is not None
    return end_tokens(decoder.base, decoder.tokenizer)


def _wait(decoder: SpecDecoder) -> None:
    if decoder.base.device.type == "cuda":  # kernels run on after the call that starts them
        torch.cuda.synchronize()


def forward(
    inputs: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    *,
    decoder: SpecDecoder | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    **ignored: Any,
) -> tuple[Tensor, int, int, list[int]]:
    """Serve as ``forward_func`` of Spec-Bench's ``run_eval``.

    Args:
        inputs: what the tokenizer gave, with ``input_ids`` [1, P].
        model: the base model.
        tokenizer: its tokenizer.
        max_new_tokens: limit.
        decoder: what ``load`` returned; None decodes plainly, the baseline.
        temperature: of the sampling.
        seed: of the sampling.
        **ignored: what the harness hands to every method.

    Returns:
        ``output_ids`` [1, P + L]; new tokens, the one that ends the answer not counted; forward
        passes, the prefill included; tokens gained per verify step (of the baseline: per pass).

    Raises:
        ValueError: for another model than the decoder's base, or more than one prompt.
    """
    del ignored
    if decoder is None:
        decoder = SpecDecoder(model, None, tokenizer=tokenizer)
    elif decoder.base is not model:
        raise ValueError("model is not the base model of decoder: model=decoder.base")
    if inputs.input_ids.shape[0] != 1:
        raise ValueError(f"inputs must hold 1 prompt, got {inputs.input_ids.shape[0]}")
    result, _, _ = decode_prompt(
        decoder, inputs.input_ids, max_new_tokens, temperature=temperature, seed=seed
    )
    return (result.sequences, *count_tokens(decoder, result))
