"""Tree attention in unmodified transformers models, through the public mask interface.

Every model of transformers 5 builds its masks by calling a registered function with an index-based
rule (causal, sliding window, chunked). We register wrappers: while a tree is active, the indices of
tree slots are translated to logical positions (prefix + depth) before the rule sees them, and the
result is ANDed with the ancestor matrix. So windows and chunks are measured in positions and not in
slots, with no code per model. A ready-made 4-D mask would be silently wrong on sliding-window
models and under eager attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)

from specheads.tree import Tree

SUPPORTED_ATTENTION = ("sdpa", "eager", "flex_attention")

_active: ContextVar[Tree | None] = ContextVar("specheads_tree", default=None)


@contextlib.contextmanager
def tree_attention(tree: Tree) -> Iterator[None]:
    """While open, a forward pass over ``tree.num_nodes`` tokens attends along the tree.

    The pass must be given ``position_ids = prefix + tree.depths``: transformers does not notice
    when they are missing.
    """
    _install()
    token = _active.set(tree)
    try:
        yield
    finally:
        _active.reset(token)


@lru_cache(maxsize=1)
def _install() -> None:
    """Register the wrappers once; without an active tree they only pass through."""
    for name in SUPPORTED_ATTENTION:
        AttentionMaskInterface.register(name, _tree_aware(ALL_MASK_ATTENTION_FUNCTIONS[name], name))


def _tree_aware(make_mask: Callable[..., Any], name: str) -> Callable[..., Any]:
    def make_tree_mask(*args: Any, **kwargs: Any) -> Any:
        tree = _active.get()
        if tree is None:
            return make_mask(*args, **kwargs)
        q_length, num_cached = kwargs["q_length"], kwargs["q_offset"]
        if q_length != tree.num_nodes:
            raise ValueError(
                f"the active tree has {tree.num_nodes} nodes, the forward pass {q_length} tokens"
            )
        rule = kwargs["mask_function"]
        if (
            name != "flex_attention"
            and rule is causal_mask_function
            and kwargs.get("attention_mask") is None
            and kwargs["kv_length"] == num_cached + q_length
            and kwargs["batch_size"] == 1
        ):
            return causal_tree_mask(tree, num_cached, kwargs["dtype"], kwargs["device"])
        kwargs["mask_function"] = _along_tree(rule, tree.to(kwargs["device"]), num_cached)
        kwargs["allow_is_causal_skip"] = False
        return make_mask(*args, **kwargs)

    return make_tree_mask


def _along_tree(rule: Callable[..., Tensor], tree: Tree, num_cached: int) -> Callable[..., Tensor]:
    last = tree.num_nodes - 1
    depths, tree_mask = tree.depths, tree.tree_mask

    def rule_along_tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_node = (q - num_cached).clamp(0, last)  # every query is a node
        k_node = (k - num_cached).clamp(0, last)
        in_tree = k >= num_cached
        q_position = num_cached + depths[q_node]
        k_position = torch.where(in_tree, num_cached + depths[k_node], k)
        live = k <= num_cached + last  # static caches have empty slots behind
        seen = rule(b, h, q_position, k_position)
        return seen & live & (~in_tree | tree_mask[q_node, k_node])

    return rule_along_tree


def causal_tree_mask(
    tree: Tree, num_cached: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the additive mask [1, 1, N, num_cached + N] of a tree under plain causal attention.

    It is the end of one prepared buffer ``[0 ... 0 | tree]``, so that a step builds nothing; and it
    is additive because attention would otherwise convert a bool mask anew in every layer.
    """
    width = -(-num_cached // 1024) * 1024
    mask = _mask_buffer(tree, width, dtype, device)[..., width - num_cached :]
    # GPU kernels want aligned rows
    return mask if device.type == "cpu" else mask.contiguous()


@lru_cache(maxsize=64)
def _mask_buffer(tree: Tree, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    num_nodes = tree.num_nodes
    mask = torch.zeros(1, 1, num_nodes, width + num_nodes, dtype=dtype)
    mask[..., width:].masked_fill_(~tree.tree_mask.cpu(), torch.finfo(dtype).min)
    return mask.to(device)
