"""Are two decodings the same tokens, and where they are not, could rounding have decided it?

In float32 tree decoding gives the very tokens of plain decoding. In bfloat16 and float16 one token
and a tree of tokens go through differently shaped matrix products whose results differ in the last
bits, so a choice between two nearly equal tokens can fall either way, and everything after it with
it. Only the first divergence of a text can be judged. It is a near-tie if both margins between the
two tokens are within what was measured of rounding on the same model and texts:

- the margin of plain decoding's own pass, within the shape noise: what passes of other shapes
  change about the difference of two logits. This is what a decoder may do, and all it may do;
- the margin re-scored in float32 with the same weights, within the noise of the dtype: by how much
  it misses the difference of two logits, in passes of any of these shapes. Its errors are for the
  greater part common to all shapes, so it is larger than the shape noise.

The noise is measured without the code that is on trial: through the model's own cache and masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specheads.decoding.choose import EXACT_DTYPES
from specheads.measure.clock import Prompt
from specheads.models.adapters import in_float32
from specheads.models.base import input_device
from specheads.models.forward import replay
from specheads.verification.sampling import Sampler, gumbel_noise

CONTENDERS = 32  # the likeliest tokens; others are hardly ever chosen between


@dataclass(frozen=True)
class Noise:
    """The largest changes of the difference of two logits that were seen.

    Attributes:
        shape: between passes of one token and passes of several; at least two units in the last
            place of the largest logit, as the least change can round each logit to its neighbour.
            Compiled passes round in other places than those that are measured here; their bound is
            twice ``dtype``, for the distance of each of the two from float32.
        dtype: between passes in the model's dtype and float32; at least ``shape``.
        typical_shape: the median over positions of what was measured for ``shape``.
        num_positions: where it was measured.
        widths: tokens per pass; the whole text in one pass beside them.
    """

    shape: float
    dtype: float
    typical_shape: float
    num_positions: int
    widths: tuple[int, ...]


@dataclass
class Rounding:
    """What rounding does to the logits of a model along some texts, measured when first asked.

    Attributes:
        base: the model.
        texts: pairs of a prompt [1, P] and the tokens that plain decoding put behind it: those that
            are compared, so that the rarest case among them counts.
        widths: tokens per forward pass of the decodings in question.
        compiled: those decodings ran compiled passes.
    """

    base: PreTrainedModel
    texts: Sequence[tuple[Tensor, Sequence[int]]]
    widths: Sequence[int]
    compiled: bool = False

    def __post_init__(self) -> None:
        """Leave out widths that no text has tokens for."""
        self._seen: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        longest = max((len(tokens) for _, tokens in self.texts), default=0)
        self.widths = tuple(sorted({min(width, longest) for width in self.widths} - {0, 1}))

    @cached_property
    def reference(self) -> PreTrainedModel:
        """The same weights in float32: 4 bytes per parameter more, from the first use on."""
        if self.base.dtype in EXACT_DTYPES:
            return self.base
        return in_float32(self.base)

    def logits(self, ids: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """Return what plain decoding sees after ``ids`` [1, T], and the float32 logits, [V] each.

        They are remembered, as several decodings of a text often leave it at the same token.

        Args:
            ids: the text.
            prompt: [1, P], which it begins with.
        """
        key = prompt.shape[1], *ids[0].tolist()
        if key not in self._seen:
            in_dtype = replay(self.base, ids, prompt.shape[1])[0]
            in_fp32 = given_logits(self.reference, ids, ids.shape[1], 0)[0]
            self._seen[key] = in_dtype, in_fp32
        return self._seen[key]

    @cached_property
    @torch.inference_mode()
    def noise(self) -> Noise:
        """Decode the texts again, their tokens given, in passes of several widths."""
        changes: list[Tensor] = []
        misses: list[Tensor] = []
        largest, num_positions = 0.0, 0
        for prompt, tokens in self.texts:
            new = torch.tensor([list(tokens)], dtype=prompt.dtype, device=prompt.device)
            ids, start = torch.cat([prompt, new], dim=1)[:, :-1], prompt.shape[1]
            one = given_logits(self.base, ids, start, 1)
            exact = given_logits(self.reference, ids, start, 0)
            contenders = one.topk(min(CONTENDERS, one.shape[-1])).indices
            largest = max(largest, float(one.abs().max()))
            num_positions += len(one)
            misses.append(_spread(one - exact, contenders))
            for width in (*self.widths, 0):
                other = given_logits(self.base, ids, start, width)
                changes.append(_spread(other - one, contenders))
                misses.append(_spread(other - exact, contenders))
        all_changes = torch.cat(changes)
        shape = max(float(all_changes.max()), 2 * unit_in_last_place(largest, self.base.dtype))
        dtype = max(float(torch.cat(misses).max()), shape)
        return Noise(
            shape=2 * dtype if self.compiled else shape,
            dtype=dtype,
            typical_shape=float(all_changes.median()),
            num_positions=num_positions,
            widths=tuple(self.widths),
        )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index where the two differ (one of them may have ended), else None."""
    pairs = enumerate(zip_longest(left, right))
    return next((index for index, (a, b) in pairs if a != b), None)


def unit_in_last_place(number: float, dtype: torch.dtype) -> float:
    """Return the distance of neighbouring numbers of ``dtype`` around a positive ``number``."""
    return math.ldexp(torch.finfo(dtype).eps, math.frexp(number)[1] - 1) if number else 0.0


@torch.inference_mode()
def logits_at(model: PreTrainedModel, ids: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return the logits [N, V] of the token behind each of ``places``, in the model's dtype.

    Args:
        model: any causal language model.
        ids: the text, at most as long as the model's context.
        places: N of its positions, rising.
    """
    device = input_device(model)
    text = torch.tensor([list(ids)], device=device)
    kept = torch.tensor(list(places), device=device)
    positions = torch.arange(text.shape[1], device=device)[None]
    logits: Tensor = model(
        input_ids=text, position_ids=positions, use_cache=False, logits_to_keep=kept
    ).logits[0]
    if logits.shape[0] != len(places):  # the model has returned them all
        logits = logits[kept.to(logits.device)]
    return logits


def given_logits(model: PreTrainedModel, ids: Tensor, start: int, width: int) -> Tensor:
    """Return the logits of a text from its last prompt token on, through transformers' own cache.

    Args:
        model: the model.
        ids: the text, [1, T].
        start: prompt tokens in it; they are read in one pass.
        width: tokens per pass after that; 0 reads everything in one pass.

    Returns:
        [T - start + 1, V] float32.
    """
    if not width:
        return logits_at(model, ids[0].tolist(), range(start - 1, ids.shape[1])).float()
    cache = DynamicCache(config=model.config)
    first = model(input_ids=ids[:, :start], past_key_values=cache, logits_to_keep=1).logits
    rows = [first[0, -1:]]
    for i in range(start, ids.shape[1], width):
        rows.append(model(input_ids=ids[:, i : i + width], past_key_values=cache).logits[0])
    return torch.cat(rows).float()


def _spread(error: Tensor, tokens: Tensor) -> Tensor:
    """Return by how much errors [L, V] differ at most between two of ``tokens`` [L, C], [L]."""
    among = error.gather(1, tokens)
    return among.amax(1) - among.amin(1)


@dataclass(frozen=True)
class Divergence:
    """Where a decoding first differs from plain decoding.

    Attributes:
        prompt: its name.
        index: which new token, counted from 0.
        plain_token: plain decoding's; None where its text had ended.
        other_token: the other decoding's; None where its text had ended.
        margin_fp32: between the two scores in float32, in units of logits, the position's noise
            included where it was sampled; None where a text had ended, which no rounding explains.
        margin_dtype: between the two scores in plain decoding's own pass, in the same units.
        near_tie: rounding explains it.
    """

    prompt: str
    index: int
    plain_token: int | None
    other_token: int | None
    margin_fp32: float | None
    margin_dtype: float | None
    near_tie: bool


def choice_scores(logits: Tensor, position: int, sampler: Sampler) -> Tensor:
    """Return the scores, in units of logits, whose largest is the token at ``position``, [V].

    Args:
        logits: [V].
        position: absolute, from the prompt's first token on; the noise belongs to it.
        sampler: with which the text was decoded.
    """
    if not sampler.temperature:
        return logits.float()
    places = torch.tensor([position], device=logits.device)
    noise = gumbel_noise([sampler.seed], places, len(logits))
    return (sampler.warp(logits) + noise[0]) * sampler.temperature


@torch.inference_mode()
def compare(
    prompts: Sequence[Prompt],
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    samplers: Sequence[Sampler],
    *,
    rounding: Rounding,
) -> list[Divergence]:
    """Return the first divergence of each decoding that is not plain decoding's, judged.

    Args:
        prompts: what was continued.
        plain: new tokens of plain decoding.
        other: those of the decoding in question.
        samplers: with which both were made, the seed of each its own.
        rounding: of the model that decoded; nothing is measured where nothing diverges.
    """
    found = []
    for asked, left, right, sampler in zip(prompts, plain, other, samplers, strict=True):
        name, prompt = asked.id, asked.input_ids
        index = first_difference(left, right)
        if index is None:
            continue
        a, b = (text[index] if index < len(text) else None for text in (left, right))
        if a is None or b is None:
            found.append(Divergence(name, index, a, b, None, None, near_tie=False))
            continue
        # up to here both are the same text, so one replay of it gives the logits both chose from
        before = torch.tensor([left[:index]], dtype=prompt.dtype, device=prompt.device)
        ids = torch.cat([prompt, before], dim=1)
        scores = [choice_scores(x, ids.shape[1], sampler) for x in rounding.logits(ids, prompt)]
        margin_dtype, margin_fp32 = (abs(float(x[a]) - float(x[b])) for x in scores)
        noise = rounding.noise
        near_tie = margin_dtype <= noise.shape and margin_fp32 <= noise.dtype
        found.append(Divergence(name, index, a, b, margin_fp32, margin_dtype, near_tie))
    return found
