"""Baselines beside plain decoding: generate, without batches, with compiled passes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel

from specheads.decoding.measure import Batch, Decode, Decoded, Method
from specheads.models.mtp_hf import check_prompt


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
