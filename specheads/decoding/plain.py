"""Plain decoding, one token per forward pass: the definition of correct, and the baseline.

Everything the tree loop does must give these tokens. It uses the same cache and asks for the last
row of logits only, so that a speed-up over it is a speed-up over a loop without wasted work.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.decoding.result import (
    DecodeResult,
    OnTokens,
    Output,
    Stopping,
    check_request,
)
from specheads.decoding.sampling import Sampler
from specheads.kv_cache import TreeCache


def process(logits_processor: LogitsProcessorList, ids: Tensor, logits: Tensor) -> Tensor:
    """Apply processors to logits [R, V] after the tokens [R, T]."""
    return logits_processor(cast(LongTensor, ids), cast(FloatTensor, logits.float()))


def draw_next(
    logits: Tensor,
    sampler: Sampler,
    ids: Tensor,
    logits_processor: LogitsProcessorList | None,
) -> Tensor:
    """Draw the token after ``ids`` [B, T] from its logits [B, V]; returns [B]."""
    if logits_processor:
        logits = process(logits_processor, ids, logits)
    position = torch.full((ids.shape[0],), ids.shape[1], device=ids.device)
    return sampler(logits, position)


def plain_decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    eos_token_ids: Collection[int] = (),
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Stopping | None = None,
    on_tokens: OnTokens | None = None,
) -> DecodeResult:
    """Decode one token at a time.

    Args:
        model: any causal language model of transformers.
        input_ids: [1, P].
        max_new_tokens: limit; the end-of-sequence token counts.
        sampler: greedy if None.
        eos_token_ids: tokens that end the sequence.
        logits_processor: changes the logits, given the sequence so far.
        stopping_criteria: asked after every token.
        on_tokens: called with the new tokens of every step.

    Raises:
        ValueError: for a batch, an empty prompt, or more tokens than the model has positions.
    """
    check_request(model, input_ids, max_new_tokens)
    sampler = sampler or Sampler()
    output = Output(input_ids, max_new_tokens, eos_token_ids, stopping_criteria, on_tokens)
    with torch.inference_mode():
        _decode(model, output, sampler, logits_processor)
    return output.result()


def _decode(
    model: PreTrainedModel,
    output: Output,
    sampler: Sampler,
    logits_processor: LogitsProcessorList | None,
) -> None:
    cache = TreeCache()
    tokens, start = output.input_ids, 0
    while not output.done:
        logits = step(model, tokens, cache, start)
        start += tokens.shape[1]
        token = draw_next(logits, sampler, output.ids, logits_processor)
        output.emit(token.tolist())  # the step's only synchronisation
        tokens = token[:, None]


def step(model: PreTrainedModel, tokens: Tensor, cache: TreeCache, start: int) -> Tensor:
    """Read tokens [B, T] that stand from ``start`` on; returns the logits [B, V] after the last."""
    cache.reserve(start + tokens.shape[1])
    output = model(
        input_ids=tokens,
        position_ids=torch.arange(start, start + tokens.shape[1], device=tokens.device)[None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def replay(model: PreTrainedModel, ids: Tensor, num_prompt_tokens: int) -> Tensor:
    """Return the logits [B, V] after ``ids`` [B, T] to the last bit as plain decoding sees them."""
    cache = TreeCache()
    logits = step(model, ids[:, :num_prompt_tokens], cache, 0)
    for i in range(num_prompt_tokens, ids.shape[1]):
        logits = step(model, ids[:, i : i + 1], cache, i)
    return logits
