"""A model's forward pass, compiled: the same pass at fewer microseconds per layer.

What changes from step to step (tokens, positions, slots, mask) enters as tensors. The mask is made
outside, by the functions that the model itself would call, since they ask Python what tree is
active. On a GPU the compiled pass is captured in CUDA graphs (``mode="reduce-overhead"``), which
want every shape to repeat: keys are then shown up to a multiple of the cache's block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from specheads.grouped_attention import grouped_attention_traced
from specheads.kv_cache import BLOCK, TreeCache
from specheads.models.hidden import FINAL, TRUNK, Captured, capture_hidden, last_layer
from specheads.tree import RowTrees, Tree
from specheads.tree_mask import tree_attention

_captured: WeakKeyDictionary[PreTrainedModel, tuple[Captured, set[str], object]] = (
    WeakKeyDictionary()
)


def check_compilable(model: PreTrainedModel, *, chain_only: bool) -> None:
    """Refuse what cannot be compiled.

    Raises:
        ValueError: for an attention whose masks are no tensors, and a model that masks by itself.
    """
    attention = model.config.get_text_config()._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(f"compile=True needs sdpa or eager attention, the model uses {attention}")
    if chain_only:
        raise ValueError(
            f"compile=True needs a model that verifies trees, {type(model).__name__}"
            " masks by itself"
        )


def _forward(model: PreTrainedModel, **inputs: Any) -> Tensor:
    logits: Tensor = model(**inputs, use_cache=True).logits
    return logits


@lru_cache(maxsize=2)
def _compiled_forward(mode: str | None) -> Callable[..., Tensor]:
    """Return the pass compiled; it is compiled anew for every model and shape it meets."""
    return torch.compile(_forward, mode=mode)


@contextlib.contextmanager
def capture_traced(model: PreTrainedModel, taps: Collection[str] = (FINAL,)) -> Iterator[Captured]:
    """As ``capture_hidden``, but for good: a hook is part of what is compiled.

    torch.compile does not look whether hooks have come or gone since, so that one that goes with
    its context would leave passes that record into nowhere. And a pass that was compiled before the
    hook came would go on without it: so it comes with the first compiled pass, needed or not.
    """
    captured = _capture_for_good(model)
    if missing := set(taps) - captured[1]:
        raise ValueError(
            f"a compiled {type(model).__name__} records no hidden states at {sorted(missing)}"
        )
    yield captured[0]


def _capture_for_good(model: PreTrainedModel) -> tuple[Captured, set[str]]:
    if model not in _captured:
        taps = {FINAL}
        with contextlib.suppress(ValueError):  # a model without a list of layers has no trunk
            last_layer(model)
            taps.add(TRUNK)
        forever = capture_hidden(model, taps, every_thread=True)
        _captured[model] = (forever.__enter__(), taps, forever)
    return _captured[model][:2]


def run_compiled(
    model: PreTrainedModel,
    cache: TreeCache,
    tokens: Tensor,
    positions: Tensor,
    tree: Tree | RowTrees,
) -> Tensor:
    """Return the logits [B, N, V] of a tree behind what the cache holds.

    Args:
        model: the base model.
        cache: with room for the tree.
        tokens: [B, N].
        positions: [1 or B, N].
        tree: a root alone is a plain step.
    """
    _capture_for_good(model)
    num_rows, num_tokens = tokens.shape
    width = cache.rows.longest + num_tokens
    on_gpu = tokens.device.type == "cuda"
    if on_gpu:
        width = min(-(-width // BLOCK) * BLOCK, cache.capacity)
    with cache.fix(num_tokens, width):
        with tree_attention(tree, cache):
            like = torch.empty(num_rows, num_tokens, 0, dtype=model.dtype, device=tokens.device)
            mask = create_masks_for_generate(model.config, like, None, cache, positions)
        with grouped_attention_traced():
            if on_gpu:
                torch.compiler.cudagraph_mark_step_begin()  # what the last one returned is used up
            return _compiled_forward("reduce-overhead" if on_gpu else None)(
                model,
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
            )
