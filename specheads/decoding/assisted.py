"""transformers' own speculative decoding, to compare with: an assistant model, prompt lookup."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.decoding.measure import Batch, Decoded, Method


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
