"""What vLLM 0.32 or 0.33 needs to draft with :mod:`specheads.vllm_proposer`: settings, and a base.

These proposers guess from the text, without heads, for a base that was tuned together with its
heads or for any other. The folder holds ``speculative_config.json``, the value of
``--speculative-config``, and beside it the base as a plain Hugging Face folder where the recipe
changed it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.models.checkpoint import save_hf
from specheads.models.manifest import write_json
from specheads.system.files import whole_folder

SETTINGS = "speculative_config.json"
MODULE = "specheads.vllm_proposer"
CLASSES = ("SuffixProposer", "NgramProposer", "LookaheadPoolProposer")
NUM_TOKENS = 8  # guessed per step at most; where nothing was written before, nothing is guessed


def settings(proposer: str = CLASSES[0], num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """Return the value of vLLM's ``--speculative-config``.

    Raises:
        ValueError: for an unknown proposer, or no tokens.
    """
    if proposer not in CLASSES:
        raise ValueError(f"proposer must be one of {', '.join(CLASSES)}, got {proposer!r}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    return {
        "method": "custom_class",
        "model": f"{MODULE}.{proposer}",
        "num_speculative_tokens": num_tokens,
    }


def write(
    folder: str | Path,
    base: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    proposer: str = CLASSES[0],
    num_tokens: int = NUM_TOKENS,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the folder, whole or not at all.

    Args:
        folder: a new one, or one to replace.
        base: the tuned base; an adapter is merged in what is written. None where the original is
            unchanged: vLLM loads that one by its own name.
        tokenizer: written beside the base.
        proposer: one of ``CLASSES``.
        num_tokens: guessed per step at most.
        dtype: of all tensors; None takes the base's.

    Raises:
        ValueError: for unknown settings, or a base without its tokenizer.
        RunError: if the disk is full.
    """
    found = settings(proposer, num_tokens)
    if (base is None) != (tokenizer is None):
        raise ValueError("base and tokenizer are given together, or neither")
    with whole_folder(Path(folder)) as fresh:
        if base is not None and tokenizer is not None:
            save_hf(fresh, base, tokenizer, dtype)
        write_json(fresh / SETTINGS, found)
