"""A decoder layer as decoding runs it: few rows, for which to start an operation takes its time.

One product makes queries, keys and values, one the two parts of the MLP, and little stands between
them. Of a base's layers those run so that are built as Llama's, Mistral's and Qwen's, with the same
bits as transformers gives in bfloat16; other kinds stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads.models.packed import MOST_ROWS, Kept, PackedLinear, is_ours, pack_linears, product

# from queries [B, G * H, Q, h] and the new keys and values [B, H, Q, h] to what the queries read
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Pick = Callable[[Tensor], Tensor]  # from states [B, ..., T, w] to those at some of T positions
_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_NUM_PRODUCTS = 7  # of a layer


class LayerStep:
    """A layer with its weights as they are now, or n of them side by side that read the same.

    Of several layers states have one dimension more, in front.

    Args:
        layers: with parts called as Llama's are, and norms of queries and keys, or none.
        width: h, of a head.
        epsilon: of all norms.
        activate: the MLP's activation.
        cached: see :func:`specheads.models.packed.product`.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        width: int,
        epsilon: float,
        activate: Callable[[Tensor], Tensor] = F.silu,
        *,
        cached: bool = False,
    ) -> None:
        parts = [cast(Any, layer) for layer in layers]
        attentions, mlps = [part.self_attn for part in parts], [part.mlp for part in parts]
        outputs = [getattr(attentions[0], f"{name}_proj").out_features for name in "qkv"]
        self.num_heads = [size // width for size in outputs]  # G * H, H, H
        self.width, self.epsilon, self.activate = width, epsilon, activate
        self.before = _stacked([part.input_layernorm.weight[None] for part in parts])
        self.within = _stacked([part.post_attention_layernorm.weight[None] for part in parts])
        self.norms: Tensor | None = None  # [G * H + H, 1, h]
        if hasattr(attentions[0], "q_norm"):
            norms = ((each.q_norm.weight, each.k_norm.weight) for each in attentions)
            queries, keys, _ = self.num_heads
            self.norms = _stacked(
                [torch.cat([q.expand(queries, -1), k.expand(keys, -1)])[:, None] for q, k in norms]
            )

        def joined(owners: list[Any], *names: str) -> Callable[[Tensor], Tensor]:
            linears = [[getattr(owner, f"{name}_proj") for name in names] for owner in owners]
            if len(linears) > 1:
                return _side_by_side(linears)
            weights, biases = zip(*((part.weight, part.bias) for part in linears[0]), strict=True)
            return product(*weights, biases=biases, cached=cached)

        self.read, self.out = joined(attentions, *"qkv"), joined(attentions, "o")
        self.inner, self.down = joined(mlps, "gate", "up"), joined(mlps, "down")

    def __call__(
        self, x: Tensor, waves: Tensor, attend: Attend, asked: Pick | None = None
    ) -> Tensor:
        """Return the residual stream [B, Q, d] behind the layer.

        Args:
            x: [B, Q, d], before it.
            waves: [2, B or 1, Q, h], cosines, and sines with their sign, of the positions.
            attend: looks at more than the new keys and values, or at less.
            asked: picks the positions whose queries ``attend`` answers; None for all.
        """
        made = self.read(self._normed(x) * self.before).unflatten(-1, (-1, self.width))
        queries, keys, size = self.num_heads
        turned, values = made.transpose(-3, -2).split([queries + keys, size], dim=-3)
        if self.norms is not None:
            turned = self._normed(turned) * self.norms
        turned = rotated(turned, waves[:, :, None])
        found = attend(turned[..., :queries, :, :], turned[..., queries:, :, :], values)
        if asked is not None:
            x = asked(x)
        x = x + self.out(found.transpose(-3, -2).flatten(-2))
        gate, up = self.inner(self._normed(x) * self.within).chunk(2, dim=-1)
        return x + self.down(self.activate(gate) * up)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.epsilon)


def _stacked(parts: list[Tensor]) -> Tensor:
    """Return a weight [..., w] of each layer as [n, 1, ..., w]; of one layer as it is."""
    return parts[0] if len(parts) == 1 else torch.stack(parts)[:, None]


def _side_by_side(linears: list[list[nn.Linear]]) -> Callable[[Tensor], Tensor]:
    """Return the map from [n, B, Q, in] to what each layer's products make of its part.

    Args:
        linears: of each of n layers those that read the same.
    """
    parts = [torch.cat([each.weight for each in own]) for own in linears]
    weight, bias = torch.stack(parts).transpose(1, 2), None
    if linears[0][0].bias is not None:
        bias = torch.stack([torch.cat([each.bias for each in own]) for own in linears])[:, None]

    def multiplied(x: Tensor) -> Tensor:
        flat = x.flatten(1, 2)
        found = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias, flat, weight)
        return found.unflatten(1, x.shape[1:3])

    return multiplied


def rotated(x: Tensor, waves: Tensor) -> Tensor:
    """Rotate x [..., h] by the waves [2, ..., h] of its positions, cosines and signed sines."""
    cos, sin = waves.to(x.dtype)
    # two products and a sum, each rounded, as transformers does it in 16 bits
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class SteppedLayer:
    """What stands before the class of a base's layer and computes the same, where nothing learns.

    Before every pass it looks at the layer's parts: they may have been replaced, as by an adapter,
    or written to.
    """

    _kept: Kept  # its step

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        """Do what the layer does; transformers gives all but the hidden states by name."""
        layer = cast(Any, self)
        memory, waves = given.get("past_key_values"), given.get("position_embeddings")
        if (
            args
            or waves is None
            or torch.compiler.is_compiling()
            or torch.is_grad_enabled()
            or layer.self_attn.config._attn_implementation != "sdpa"
            or hidden_states.numel() > MOST_ROWS * hidden_states.shape[-1]
            or (step := self._as_it_is()) is None
        ):
            return cast(Tensor, super().forward(hidden_states, *args, **given))  # type: ignore[misc]
        attention, mask = layer.self_attn, given.get("attention_mask")

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if memory is not None:
                keys, values = memory.update(keys, values, attention.layer_idx)
            found = ALL_ATTENTION_FUNCTIONS["sdpa"](
                attention, queries, keys, values, mask, dropout=0.0, scaling=attention.scaling
            )
            return cast(Tensor, found[0]).transpose(1, 2)

        return step(hidden_states, signed(*waves), attend)

    def _as_it_is(self) -> LayerStep | None:
        """Return the step of the weights as they are; None where they learn or are not packed."""
        layer = cast(Any, self)
        attention, mlp = layer.self_attn, layer.mlp
        parts = [part for each in (layer, attention, mlp) for part in each._modules.values()]
        held = [p for part in parts for p in part._parameters.values() if p is not None]
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        if hooked or any(each.requires_grad for each in held):
            return None

        def made() -> LayerStep | None:
            packed = [part for part in parts if type(part) is PackedLinear and is_ours(part.weight)]
            if len(packed) < _NUM_PRODUCTS:
                return None
            width, epsilon = attention.head_dim, layer.input_layernorm.variance_epsilon
            return LayerStep([layer], width, epsilon, mlp.act_fn, cached=packed[0]._cached)

        return cast(LayerStep | None, self._kept.of(held, made))


@lru_cache(maxsize=1)
def signed(cos: Tensor, sin: Tensor) -> Tensor:
    """Return the waves of a pass, whose layers are all given the same tensors.

    Args:
        cos: [..., h], as transformers makes them.
        sin: likewise.
    """
    half = sin.shape[-1] // 2
    return torch.stack([cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)])


@cache
def _stepped(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (SteppedLayer, kind), {})


def pack_model(model: nn.Module) -> None:
    """Let a base on a CPU multiply with packed weights and run its layers as :class:`LayerStep`.

    Args:
        model: where and as it will be used; changed in place.
    """
    pack_linears(model)
    for part in model.modules():
        kind: type[nn.Module] = type(part)
        places = [f"transformers.models.{each}.modeling_{each}" for each in _KINDS]
        if kind.__module__ in places and kind.__name__.endswith("DecoderLayer"):
            cast(Any, part).__class__ = _stepped(cast(Any, kind))
            cast(Any, part)._kept = Kept()
