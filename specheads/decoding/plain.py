"""Plain decoding, one token per forward pass: the definition of correct, and the baseline.

Everything the tree loop does must give these tokens, and a row of a batch must get those it would
get alone. It uses the same cache and asks for the last row of logits only, so that a speed-up over
it is a speed-up over a loop without wasted work.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.decoding.choosing import Chooser, make_chooser
from specheads.decoding.result import DecodeResult, OnTokens, Output, Stopping, read_prompts
from specheads.kv_cache import TreeCache
from specheads.models.forward import ModelPass, pad_rows
from specheads.sampling import Sampler
from specheads.tree_support import check_tree_support


def plain_decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    sampler: Sampler | None = None,
    eos_token_ids: Collection[int] = (),
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Stopping | None = None,
    on_tokens: OnTokens | None = None,
    cache: TreeCache | None = None,
    pad_token_id: int = 0,
    keep_scores: bool = False,
    compile: bool = False,
) -> DecodeResult:
    """Decode one token at a time.

    Args:
        model: any causal language model that can be decoded step by step.
        input_ids: [B, P], left-padded where prompts differ in length.
        max_new_tokens: limit per row; the end-of-sequence token counts.
        attention_mask: [B, P], 0 on padding.
        sampler: greedy if None; row b is sampled with its seed + b.
        eos_token_ids: tokens that end a row.
        logits_processor: changes the logits, given the row's text so far without padding, see
            :mod:`specheads.decoding.processors`.
        stopping_criteria: one, or a list of them, asked after every token about one row [1, T] at
            a time, without padding. Rows after the first ask copies of those that may keep a state.
        on_tokens: called with a row's number and its new tokens, for every row and step.
        cache: keeps keys and values for a later turn. If it holds the beginnings of the prompts,
            only the rest is read.
        pad_token_id: stands in ``sequences`` behind rows that ended early.
        keep_scores: keep what every token was chosen from; it costs 2 V numbers per token.
        compile: run all passes but the prefill compiled; the first of each shape takes a while.

    Raises:
        ValueError: for an empty prompt, a mask that is not left padding, a cache of another number
            of rows, more tokens than the model has positions, a model that cannot be decoded step
            by step, a batch or compiled passes where its masks or positions are out of reach, a
            logits processor or stopping criterion that cannot be copied for a row, or one that
            answers about several rows.
    """
    prompts = read_prompts(model, input_ids, attention_mask, max_new_tokens)
    support = check_tree_support(model)
    support.check_batch(len(prompts))
    # a batch and compiled passes need what trees need: masks that are not the model's
    chain_only = support.kind == "chain"
    output = Output(
        prompts, input_ids.device, max_new_tokens, eos_token_ids, stopping_criteria, on_tokens
    )
    output.keep_scores(keep_scores)
    base = ModelPass(
        model, TreeCache() if cache is None else cache, chain_only=chain_only, compiled=compile
    )
    with torch.inference_mode():
        known = base.align(prompts)
        # what others are compared with
        alone = len(prompts) == 1 and not any(known) and not compile
        chooser = make_chooser(
            model,
            output,
            sampler,
            logits_processor,
            num_prompt_tokens=input_ids.shape[1],
            exact=not alone,
            rounding=support.rounding,
        )
        try:
            _decode(base, output, chooser, known, drop=cache is None and not compile)
        finally:
            if cache is not None:
                cache.tokens = [output.text(row)[:n] for row, n in enumerate(cache.lengths)]
    return output.result(input_ids, pad_token_id, cache)


def _decode(
    base: ModelPass, output: Output, chooser: Chooser, known: list[int], *, drop: bool
) -> None:
    tokens, counts = prompt_tokens(output, known)
    rows = list(range(len(counts)))
    while True:
        logits = base.read_next(tokens, counts, partial(output.text, rows[0]))
        chosen = chooser.next_tokens(logits, rows)
        counts = output.emit(rows, [[token] for token in chosen])
        going = [bool(output.budget(row)) for row in rows]
        if not any(going):
            return
        if drop and not all(going):
            kept = [i for i, goes in enumerate(going) if goes]
            base.cache.select(torch.tensor(kept))
            rows, chosen = ([each[i] for i in kept] for each in (rows, chosen))
            going = [True] * len(kept)
        tokens, counts = pad_rows([[token] for token in chosen], base.device), list(map(int, going))


def prompt_tokens(output: Output, known: list[int]) -> tuple[Tensor, list[int]]:
    """Return what is to be read of the prompts, [B, T] right-padded, and how much per row."""
    unread = [prompt[n:] for prompt, n in zip(output.prompts, known, strict=True)]
    return pad_rows(unread, output.device), [len(row) for row in unread]
