"""Grouped-query attention under a mask without a copy of the cache for every query head.

transformers' sdpa attention expands keys and values to all query heads (``repeat_kv``) whenever a
mask is given, in every layer and step: with 16 query and 2 key heads, eight times the memory
traffic of what it reads. Kernels can do without. On CPU torch's own grouped mode
(``enable_gqa``) does; elsewhere the kernels with masks have no such mode, so that the query heads
of a group are laid one behind the other along the query length and share the mask's rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_ALIGNMENT = 8  # elements: GPU kernels copy a mask whose rows start elsewhere

# of the forward pass at hand: a mask and the same laid out for groups, by the mask's id and groups
_Folded = dict[tuple[int, int], tuple[Tensor, Tensor]]
_active: ContextVar[_Folded | None] = ContextVar("specheads_grouped", default=None)
_traced = False  # a plain global: what torch.compile traces cannot ask a ContextVar


@contextlib.contextmanager
def grouped_attention() -> Iterator[None]:
    """While open, models with sdpa attention do not expand their cache; open it around one pass."""
    _install()
    token = _active.set({})
    try:
        yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def grouped_attention_traced() -> Iterator[None]:
    """While open, passes traced by torch.compile do not expand their cache either."""
    global _traced
    _install()
    before, _traced = _traced, True
    try:
        yield
    finally:
        _traced = before


def _folded_now() -> _Folded | None:
    if torch.compiler.is_compiling():
        return {} if _traced else None
    return _active.get()


@lru_cache(maxsize=1)
def _install() -> None:
    """Register the wrapper once; without an open context it only passes through."""
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        folded = _folded_now()
        if (
            folded is None
            or attention_mask is None
            or query.shape[1] == key.shape[1]
            or not _is_plain(args, kwargs)
        ):
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        scale = kwargs.get("scaling")
        if query.device.type == "cpu":
            output = scaled_dot_product_attention(
                query, key, value, attention_mask, scale=scale, enable_gqa=True
            )
        else:
            output = attend_folded(query, key, value, attention_mask, scale, folded)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sdpa", attend)


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call asks for nothing but attention; the rest is left to transformers."""
    extras = ("dropout", "position_bias", "cache", "softcap", "output_attentions", "s_aux")
    return not args and not any(kwargs.get(name) for name in extras)


def attend_folded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    folded: _Folded,
) -> Tensor:
    """Attend with the G query heads of a group one behind the other.

    Args:
        query: [B, H * G, N, d].
        key: [B, H, L, d].
        value: [B, H, L, e].
        mask: [B or 1, H * G or 1, N, L], bool or additive.
        scale: None is 1 / sqrt(d).
        folded: masks of this pass that were laid out before; most layers share one.

    Returns:
        [B, H * G, N, e].
    """
    num_rows, num_heads, num_tokens, _ = query.shape
    groups = num_heads // key.shape[1]
    by_group = query.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, H, G * N, d]
    # a traced pass lays the mask out in every layer: the compiler sees that it is one
    known = (0 if torch.compiler.is_compiling() else id(mask), groups)
    if known not in folded:
        folded[known] = mask, _fold_mask(mask, groups)
    output = scaled_dot_product_attention(by_group, key, value, folded[known][1], scale=scale)
    return output.unflatten(2, (groups, num_tokens)).flatten(1, 2)


def _fold_mask(mask: Tensor, groups: int) -> Tensor:
    """Return [B, H or 1, G * N, L] with rows that start where kernels want them."""
    num_rows, num_heads, num_tokens, num_slots = mask.shape
    if num_heads == 1:
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1)
    else:
        mask = mask.unflatten(1, (-1, groups))
    width = -(-num_slots // _ALIGNMENT) * _ALIGNMENT
    shape = (num_rows, mask.shape[1], groups, num_tokens, width)
    laid_out = torch.empty(shape, dtype=mask.dtype, device=mask.device)[..., :num_slots]
    laid_out.copy_(mask)
    return laid_out.flatten(2, 3)
