"""From the settings of ``generate`` and ``chat`` to the arguments of ``SpecDecoder.generate``.

Both commands come through here, so that a turn of a chat is what ``generate`` gives for the same
conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.models.base import end_tokens


class Asked(Protocol):
    """What both settings have."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    no_repeat_ngram_size: int


def decode_arguments(
    asked: Asked,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Return ``input_ids`` and ``attention_mask`` [B, P], padded on the left, and the settings.

    Args:
        asked: how tokens are chosen.
        base: the base model, for its end tokens and its device.
        tokenizer: its tokenizer.
        prompts: per row its token ids.
    """
    eos = end_tokens(base, tokenizer)
    pad = tokenizer.pad_token_id
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * n + [*prompt] for n, prompt in zip(padding, prompts, strict=True)]
    mask = [[0] * n + [1] * (longest - n) for n in padding]
    found = {
        "input_ids": torch.tensor(rows, device=base.device),
        "attention_mask": torch.tensor(mask, device=base.device),
        "temperature": asked.temperature,
        "repetition_penalty": asked.repetition_penalty,
        "no_repeat_ngram_size": asked.no_repeat_ngram_size,
        "eos_token_id": list(eos) or None,
        "pad_token_id": pad if isinstance(pad, int) else 0,
    }
    if asked.temperature > 0:
        found |= {"top_k": asked.top_k, "top_p": asked.top_p, "min_p": asked.min_p or None}
    return found
