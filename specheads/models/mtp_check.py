"""Whether the layers of MTP heads are of the kind that :mod:`specheads.models.mtp_keys` computes.

transformers has hundreds of kinds of layers. What is not built from the known parts is refused by
its parts, and what uses them otherwise (norms around 1, multipliers, layers without rotation) by
its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
from transformers import PreTrainedConfig

from specheads.config import ConfigError

if TYPE_CHECKING:
    from specheads.models.mtp import MtpHeads
    from specheads.models.mtp_keys import MtpKeys

_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_PRODUCTS = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo") + tuple(
    f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")
)
_OPTIONAL = (
    *(name.replace("weight", "bias") for name in _PRODUCTS),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)
_PLACES = 7  # compared: a prompt of three, then two steps

_checked: WeakSet[MtpHeads] = WeakSet()


def window_of(config: PreTrainedConfig) -> int | None:
    """Return how many positions one sees, itself included; None for all before it."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None)
    return int(window) if window and kinds[-1] == "sliding_attention" else None


def check_layers(heads: MtpHeads, empty: Callable[[MtpHeads, int], MtpKeys]) -> None:
    """Compare the memory with transformers' layers, once for these heads.

    Args:
        heads: parallel or causal ones.
        empty: makes their memory.

    Raises:
        ConfigError: if they differ; names the type of model.
    """
    if heads in _checked:
        return
    if problem := _odd_part(heads) or _odd_numbers(heads, empty):
        raise ConfigError(
            f"MTP heads of variant {heads.variant} cannot decode with layers of model_type"
            f" {heads.config.model_type}: {problem}; layers like those of llama, qwen3 and mistral"
            " are known"
        )
    _checked.add(heads)


def _odd_part(heads: MtpHeads) -> str | None:
    config, layer = heads.config, heads.layer(0)
    names = {name for name, _ in layer.block.named_parameters()}
    if missing := sorted({*_NORMS, *_PRODUCTS} - names):
        return f"they have no {missing[0]}"
    if extra := sorted(names - {*_NORMS, *_PRODUCTS, *_OPTIONAL}):
        return f"they have {extra[0]}"
    if any(kind not in ("full_attention", "sliding_attention") for kind in _kinds(config)):
        return f"they attend by {_kinds(config)[-1]}"
    if getattr(config, "attention_chunk_size", None):
        return "they attend in chunks"
    block = cast(Any, layer.block)
    attention = block.self_attn
    within = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = [block.input_layernorm, block.post_attention_layernorm, layer.norm]
    norms += [norm for norm in within if norm is not None]
    epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
    if None in epsilons or len(epsilons) > 1:
        return "their norms are of several kinds, or of an unknown one"
    if getattr(attention, "scaling", None) is None or not hasattr(block.mlp, "act_fn"):
        return "their attention or MLP is of an unknown kind"
    width = getattr(attention, "head_dim", None)
    if any(norm is not None and norm.weight.shape != (width,) for norm in within):
        return "norms of queries and keys span all heads"
    weight = attention.k_proj.weight
    cos, _ = heads.rotary_emb(weight, torch.zeros(1, 1, dtype=torch.long, device=weight.device))
    if cos.shape[-1] != width:
        return f"{cos.shape[-1]} of {width} numbers per head are rotated"
    return None


def _kinds(config: PreTrainedConfig) -> list[str]:
    return getattr(config, "layer_types", None) or []


@torch.no_grad()
def _odd_numbers(heads: MtpHeads, empty: Callable[[MtpHeads, int], MtpKeys]) -> str | None:
    weight = next(heads.parameters())
    generator = torch.Generator().manual_seed(0)  # the decoding's own draws must not move
    hidden = torch.randn(1, _PLACES, heads.hidden_size, generator=generator)
    hidden = hidden.to(device=weight.device, dtype=weight.dtype)
    training = heads.training
    heads.eval()  # no dropout
    try:
        positions = torch.arange(_PLACES, device=weight.device)[None]
        whole = heads.contextual(hidden, positions)[:, 0].float()  # [K, T, d]
    finally:
        heads.train(training)
    memory, found = empty(heads, 1), []
    for first, end in ((0, 3), (3, 4), (4, _PLACES)):
        memory, features = memory.append(hidden[:, first:end], [end - first])
        found.append(features[:, 0].float())
    wanted = whole[:, [2, 3, _PLACES - 1]]
    error = float((torch.stack(found, dim=1) - wanted).norm() / wanted.norm().clamp_min(1e-30))
    allowed = max(1e-4, 10 * torch.finfo(weight.dtype).eps)  # the sums are in another order
    if error <= allowed:
        return None
    return f"what is computed here differs from transformers by {error:.2g} of it"
