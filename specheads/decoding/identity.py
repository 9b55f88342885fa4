"""Are two decodings the same tokens, and where they are not, could rounding have decided it?

In float32 tree decoding gives the very tokens of plain decoding. In bfloat16 one token and a tree
of tokens go through differently shaped matrix products whose results differ in the last bits, so a
choice between two nearly equal tokens can fall either way. Such near ties are counted, each against
a bound that is measured on the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from specheads.decoding.plain import plain_decode
from specheads.decoding.sampling import Sampler, gumbel_noise
from specheads.decoding.stats import first_difference


@dataclass(frozen=True)
class Identity:
    """How many of the compared decodings are the same tokens, and what the others are.

    Attributes:
        identical: same tokens from first to last.
        compared: all.
        near_ties: differ first at a choice closer than rounding can decide.
        gaps: per decoding that is not identical, the distance of the two tokens in logits.
    """

    identical: int
    compared: int
    near_ties: int
    gaps: list[float]


class _Recorder(LogitsProcessor):
    """Keeps the logits that each token was chosen from, and changes nothing."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        self.logits.append(scores[0])
        return scores


def plain_logits(
    base: PreTrainedModel, input_ids: Tensor, num_tokens: int, sampler: Sampler
) -> Tensor:
    """Decode ``num_tokens`` tokens plainly; return the logits of each choice, [num_tokens, V]."""
    recorder = _Recorder()
    plain_decode(
        base,
        input_ids,
        max_new_tokens=num_tokens,
        sampler=sampler,
        logits_processor=LogitsProcessorList([recorder]),
    )
    return torch.stack(recorder.logits)


@torch.inference_mode()
def measure_rounding(
    base: PreTrainedModel, prompts: Sequence[Tensor], *, num_tokens: int = 16
) -> float:
    """Return the largest difference of a logit between one token per pass and all in one pass.

    Args:
        base: base model.
        prompts: token ids, [1, P] each.
        num_tokens: decoded per prompt.
    """
    largest = 0.0
    for prompt in prompts:
        recorder = _Recorder()
        result = plain_decode(
            base,
            prompt,
            max_new_tokens=num_tokens,
            logits_processor=LogitsProcessorList([recorder]),
        )
        whole = base(
            input_ids=result.sequences[:, :-1], use_cache=False, logits_to_keep=num_tokens
        ).logits[0]
        one_by_one = torch.stack(recorder.logits)
        largest = max(largest, float((whole.float() - one_by_one).abs().max()))
    return largest


@torch.inference_mode()
def choice_scores(base: PreTrainedModel, input_ids: Tensor, index: int, sampler: Sampler) -> Tensor:
    """Return the scores, in units of logits, whose largest plain decoding took as a token, [V].

    Args:
        base: base model.
        input_ids: prompt, [1, P].
        index: which new token, counted from 0.
        sampler: with which the prompt was decoded; its noise is part of the scores.
    """
    logits = plain_logits(base, input_ids, index + 1, sampler)[index]
    if not sampler.temperature:
        return logits.float()
    position = torch.tensor([input_ids.shape[1] + index], device=logits.device)
    noise = gumbel_noise(sampler.seed, position, len(logits))[0]
    return (sampler.warp(logits) + noise) * sampler.temperature


def compare(
    base: PreTrainedModel,
    prompts: Sequence[Tensor],
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    samplers: Sequence[Sampler],
    *,
    rounding: float,
) -> Identity:
    """Compare decodings with plain ones, prompt by prompt.

    Two choices that rounding moves by at most ``rounding`` each can change places only if they are
    at most twice that apart.

    Args:
        base: base model.
        prompts: token ids, [1, P] each.
        plain: new tokens of plain decoding.
        other: those of the decoding in question.
        samplers: with which both were made.
        rounding: from :func:`measure_rounding`.
    """
    gaps: list[float] = []
    for prompt, left, right, sampler in zip(prompts, plain, other, samplers, strict=True):
        index = first_difference(left, right)
        if index is None:
            continue
        if index >= min(len(left), len(right)):  # one stopped early: no rounding explains that
            gaps.append(float("inf"))
            continue
        scores = choice_scores(base, prompt, index, sampler)
        gaps.append(abs(float(scores[left[index]]) - float(scores[right[index]])))
    near_ties = sum(gap <= 2 * rounding for gap in gaps)
    return Identity(len(prompts) - len(gaps), len(prompts), near_ties, gaps)
