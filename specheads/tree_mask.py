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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)

from specheads.kv_cache import TreeCache
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


# their attention builds on its own idea of where a key stands, where no mask function reaches, and
# a short self-test would not show it (gpt_neo's local window is 256 tokens wide)
_UNSUPPORTED_TYPES = ("gpt_neo",)


def check_tree_support(model: PreTrainedModel) -> None:
    """Refuse models that cannot verify a tree; remembers those that passed.

    Beside known reasons, a self-test: the logits along both branches of a small tree must be those
    of ordinary forward passes over each branch. It catches ALiBi, recurrent layers, custom code.

    Raises:
        ValueError: with the reason.
    """
    attention = model.config.get_text_config()._attn_implementation
    if _passed.get(model) == attention:
        return
    name = type(model).__name__
    if model.training:
        raise ValueError(f"{name} is in training mode; call model.eval() before decoding")
    if attention not in SUPPORTED_ATTENTION:
        options = ", ".join(SUPPORTED_ATTENTION)
        raise ValueError(f"{name} uses {attention} attention; tree attention needs {options}")
    if getattr(model, "_is_stateful", False) or _has_linear_attention(model):
        raise ValueError(f"{name} keeps a recurrent state, which cannot branch into a tree")
    if model.config.get_text_config().model_type in _UNSUPPORTED_TYPES:
        raise ValueError(f"{name} masks keys by slot in its own code; a tree would be wrong there")
    error, spread = _self_test(model)
    # rounding differs with the shapes; a wrong mask or position moves logits by their own spread
    limit = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.2
    if not error <= limit * spread:
        raise ValueError(
            f"{name} fails the tree self-test: logits in a tree differ from linear ones by "
            f"{error:.2g} (limit {limit * spread:.2g}); it ignores masks or positions"
        )
    _passed[model] = attention


_passed: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()


def _has_linear_attention(model: PreTrainedModel) -> bool:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return any("attention" not in kind or kind == "linear_attention" for kind in kinds)


@torch.no_grad()
def _self_test(model: PreTrainedModel) -> tuple[float, float]:
    """Return the largest difference between tree and linear logits, and the logits' spread."""
    tree = Tree.from_choices([(0,), (1,), (0, 0), (1, 0), (1, 0, 0)]).to(model.device)
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (1, 5 + tree.num_nodes), generator=generator).to(model.device)
    prompt, nodes = ids[:, :5], ids[:, 5:]
    cache = TreeCache()
    positions = torch.arange(5, device=model.device)[None]
    model(input_ids=prompt, position_ids=positions, past_key_values=cache, use_cache=True)
    with tree_attention(tree):
        in_tree = model(
            input_ids=nodes,
            position_ids=5 + tree.depths[None],
            past_key_values=cache,
            use_cache=True,
        ).logits.float()
    error = spread = 0.0
    for path in tree.paths:
        path = path[path >= 0]
        linear = model(input_ids=torch.cat([prompt, nodes[:, path]], 1), use_cache=False)
        logits = linear.logits[:, 5:].float()
        error = max(error, float((in_tree[:, path] - logits).abs().max()))
        spread = max(spread, float(logits.std(-1).max()))
    return error, spread
