"""Tree decoding: propose, verify step, accept, commit; the plain loop's tokens in fewer steps.

What "the same tokens" means: both loops take, at each position, the base model's own choice given
the same prefix (and, when sampling, the same noise). A verify step multiplies matrices of other
shapes than a plain step, so its float32 logits differ from the plain ones by rounding (about 1e-6
relative). A choice changes only where the two best tokens are closer than that: a near-tie, which
in float32 is rare enough not to occur in thousands of tokens, but is no impossibility, and which in
bfloat16 (1e-2) is common.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.acceptance import walk
from specheads.decoding.plain import draw_next
from specheads.decoding.result import (
    DecodeResult,
    OnTokens,
    Output,
    Stopping,
    check_request,
    positions,
)
from specheads.decoding.sampling import Sampler
from specheads.drafters.contract import FINAL, Candidates, Drafter, StepResult
from specheads.kv_cache import TreeCache
from specheads.tree_mask import tree_attention


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    drafter: Drafter,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    eos_token_ids: Collection[int] = (),
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Stopping | None = None,
    on_tokens: OnTokens | None = None,
) -> DecodeResult:
    """Decode by verifying a tree of guesses in each forward pass.

    Takes what :func:`specheads.decoding.plain.plain_decode` takes and returns its tokens.

    Raises:
        ValueError: for a batch, an empty prompt, or more tokens than the model has positions.
    """
    raise NotImplementedError
