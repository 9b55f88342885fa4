"""What heads share that read several hidden states of the base: block heads and EAGLE-3.

The states at the taps of a position lie side by side, and one linear map (``fc``) joins them.
Layers have attention heads of their own, with rotary positions. One output matrix serves all heads:
the base's, or one of their own, of all tokens or of some.

Shapes: d hidden size, n taps, B rows, T positions, H key heads of width h in each, V vocabulary, V'
the tokens that the heads can guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.config.declared import Settings, at_least
from specheads.models.blocks import ZeroLinear
from specheads.models.kinds import Heads
from specheads.models.layer_step import Attend, rotated
from specheads.models.output import FINAL, LAYER, OutputLayer, final_norm
from specheads.models.packed import Kept, product
from specheads.system.errors import check, one_of


@dataclass
class TappedForm(Settings):
    """What a recipe says under ``heads.options``, and config.json under ``form``.

    Attributes:
        taps: numbers of the base's layers whose output is read, from 0; -1 for its final state.
            Empty takes ``num_taps`` of them by rule.
        num_taps: how many, where ``taps`` does not say which.
        num_attention_heads: of a layer; 0 takes the base's, as for the three that follow.
        num_key_value_heads: of a layer.
        head_dim: h.
        intermediate_size: of a layer's MLP.
        rope_theta: of the rotary positions.
        rms_norm_eps: of all norms.
        anchors: positions per row and step of the training from which the heads guess.
    """

    taps: tuple[int, ...] = ()
    num_taps: int = at_least(1, 3)
    num_attention_heads: int = at_least(0, 0)
    num_key_value_heads: int = at_least(0, 0)
    head_dim: int = at_least(0, 0)
    intermediate_size: int = at_least(0, 0)
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    anchors: int = field(default=128, compare=False)  # no part of what the heads are

    def _check_together(self) -> None:
        check(self.rope_theta > 0, "rope_theta", self.rope_theta, "above 0")
        check(self.anchors >= 1, "anchors", self.anchors, "at least 1")

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """Return the form that a dictionary describes.

        Raises:
            ValueError: for a key that is none of its own, or a value of another type.
        """
        known = {each.name: each for each in fields(cls)}
        for key, value in options.items():
            one_of("options", key, *known)
            wanted = type(known[key].default)
            taken = {tuple: (list, tuple), float: (float, int)}.get(wanted, (wanted,))
            check(type(value) in taken, f"options.{key}", value, f"a {wanted.__name__}")
        found = dict(options)
        if "taps" in found:
            whole = all(type(tap) is int and tap >= -1 for tap in found["taps"])
            check(whole, "options.taps", list(found["taps"]), "numbers of layers, or -1")
            found["taps"] = tuple(found["taps"])
        return cls(**found)

    @classmethod
    def stored(cls, options: dict[str, Any]) -> Self:
        """Return the form that a stranger's config.json describes.

        Raises:
            ValueError: as :meth:`of`, and for numbers beyond what anyone trains.
        """
        form = cls.of(options)
        most = {"head_dim": 1 << 12, "num_attention_heads": 1 << 12, "intermediate_size": 1 << 24}
        for key, bound in most.items():
            check(getattr(form, key) <= bound, f"form.{key}", getattr(form, key), f"to {bound}")
        check(len(form.taps) <= 64, "form.taps", len(form.taps), "at most 64")
        return form

    def sized(
        self, base: PreTrainedModel, hidden_size: int, by_rule: Callable[[int], tuple[int, ...]]
    ) -> Self:
        """Return the form with all sizes and taps given, those left open by the base.

        Args:
            base: whose sizes are taken.
            hidden_size: d.
            by_rule: from how many taps to which.
        """
        config = base.config.get_text_config()
        heads = config.num_attention_heads
        sizes = {
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or hidden_size // heads,
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * hidden_size,
        }
        taps = self.taps or by_rule(self.num_taps)
        given = {key: getattr(self, key) or size for key, size in sizes.items()}
        return replace(self, taps=taps, num_taps=len(taps), **given)

    def waves(self, positions: Tensor) -> Tensor:
        """Return cosines, and sines with their sign, of positions [...], as [2, ..., h] float32."""
        half = self.head_dim // 2
        places = torch.arange(half, device=positions.device, dtype=torch.float32)
        angles = positions[..., None] * self.rope_theta ** (-places / half)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`stored` reads."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.compare}
        return {**found, "taps": list(self.taps)}


class Norm(nn.RMSNorm):
    """A norm in the dtype of its weight, also under autocast, which narrows what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d] to [..., d]."""
        return super().forward(x.to(self.weight.dtype))


class TappedLayer(nn.Module):
    """A decoder layer whose attention reads what it is given beside the residual stream.

    At the start the identity.

    Args:
        size: d.
        form: sizes of the attention and the MLP.
        read: width of what queries, keys and values are made of.
        normed: with norms of queries and keys, as Qwen3's.
    """

    def __init__(self, size: int, form: TappedForm, read: int, *, normed: bool) -> None:
        super().__init__()
        width = form.head_dim
        queries, keys = form.num_attention_heads * width, form.num_key_value_heads * width
        epsilon = form.rms_norm_eps
        self.width = width
        self.input_layernorm = Norm(size, eps=epsilon)
        self.post_attention_layernorm = Norm(size, eps=epsilon)
        self.self_attn, self.mlp = nn.ModuleDict(), nn.ModuleDict()
        for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            self.self_attn[name] = nn.Linear(read, outputs, bias=False)
        self.self_attn["o_proj"] = ZeroLinear(queries, size, bias=False)
        for name in ("q_norm", "k_norm") if normed else ():
            self.self_attn[name] = Norm(width, eps=epsilon)
        for name in ("gate_proj", "up_proj"):
            self.mlp[name] = nn.Linear(size, form.intermediate_size, bias=False)
        self.mlp["down_proj"] = ZeroLinear(form.intermediate_size, size, bias=False)

    def keys(self, states: Tensor, waves: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, normed and rotated, and values of states [B, T, read], [B, H, T, h] each.

        Args:
            states: what keys and values are made of.
            waves: [2, B, T, h], of their positions.
        """
        return self._turned("k", states, waves), self._split(self.self_attn["v_proj"](states))

    def run(self, x: Tensor, states: Tensor, waves: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream [B, Q, d] behind the layer.

        Args:
            x: [B, Q, d], before it.
            states: [B, Q, read], what queries, keys and values are made of.
            waves: [2, B, Q, h], of the positions.
            attend: looks at more than the new keys and values, or at less.
        """
        read = attend(self._turned("q", states, waves), *self.keys(states, waves))
        x = x + self.self_attn["o_proj"](read.transpose(1, 2).flatten(2))
        normed, mlp = self.post_attention_layernorm(x), self.mlp
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))

    def _turned(self, name: str, states: Tensor, waves: Tensor) -> Tensor:
        made = self._split(self.self_attn[f"{name}_proj"](states))
        if f"{name}_norm" in self.self_attn:
            made = self.self_attn[f"{name}_norm"](made)
        return rotated(made, waves[:, :, None])

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.width)).transpose(1, 2)


class TappedHeads(nn.Module, Heads):
    """K heads that read several taps and share one output matrix; the base of their kinds.

    Args:
        num_heads: K.
        hidden_size: d of the base.
        vocab_size: V of the base.
        lm_head: ``shared``, the base's output matrix; ``shared_pruned``, its rows of some tokens;
            ``own`` or ``pruned``, one of their own.
        form: all sizes and taps given.
        num_kept: where pruned, the tokens that the heads can guess.

    Raises:
        ValueError: for numbers out of range.
    """

    unseen_settings: ClassVar[tuple[str, ...]] = ("form",)
    form_class: ClassVar[type[TappedForm]]
    needs_embedding, one_matrix = True, True
    num_layers = 0  # all run before a head is asked
    token_map: Tensor | None  # a buffer

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        vocab_size: int,
        lm_head: str,
        form: TappedForm,
        num_kept: int = 0,
    ) -> None:
        super().__init__()
        one_of("lm_head", lm_head, "shared", "shared_pruned", "own", "pruned")
        self.take_sizes(num_heads, hidden_size, vocab_size, lm_head, num_kept)
        heads, groups = form.num_attention_heads, form.num_key_value_heads
        check(groups >= 1 and heads % groups == 0, "num_key_value_heads", groups, f"of {heads}")
        check(form.head_dim >= 2 and form.head_dim % 2 == 0, "head_dim", form.head_dim, "even")
        check(form.intermediate_size >= 1, "intermediate_size", form.intermediate_size, "above 0")
        check(len(form.taps) >= 1, "taps", list(form.taps), "at least one")
        self.form, self.anchors = form, form.anchors
        self.taps = tuple(FINAL if tap < 0 else f"{LAYER}{tap}" for tap in form.taps)
        self.fc = nn.Linear(len(form.taps) * hidden_size, hidden_size, bias=False)
        self.norm = Norm(hidden_size, eps=form.rms_norm_eps)
        self.output = nn.ModuleDict()
        if "shared" not in lm_head:
            self.output["lm_head"] = nn.Linear(hidden_size, self.num_outputs, bias=False)
        self._kept = Kept()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Build the heads that an export's config.json describes.

        Raises:
            ValueError: if there are no such heads.
        """
        sizes = {key: config[key] for key in cls.config_keys if key != "form"}
        return cls(**sizes, form=cls.form_class.stored(config["form"]))

    def to_config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` builds the same heads from, as JSON."""
        return super().to_config() | {"form": self.form.to_json()}

    @torch.no_grad()
    def start_from(self, base: PreTrainedModel) -> None:
        """Give the last norm the scale of the base's, whose output matrix reads what it makes."""
        norm = final_norm(base)
        weight = next(norm.parameters(), None)
        if weight is None or weight.is_meta:  # a norm without a scale, or a look at sizes alone
            return
        ones = torch.ones(1, weight.shape[-1], dtype=weight.dtype, device=weight.device)
        ones[:, ::2] = -1  # a norm that takes the mean off sees something too
        self.norm.weight.fill_(float(norm(ones).float().pow(2).mean().sqrt()))

    @torch.no_grad()
    def init_from_output(self, weight: Tensor, kept: Tensor | None = None) -> None:
        """Take the tokens to guess, and copy the base's matrix where it is not shared."""
        super().init_from_output(weight, kept)
        for matrix in self.output.values():
            cast(nn.Linear, matrix).weight.copy_(self.guessed_rows(weight))

    def output_weight(self, i: int, base_weight: Tensor) -> Tensor:
        """Return the matrix [V', d_i], the same of all heads."""
        return self.shared_rows(base_weight)

    def shared_rows(self, base_weight: Tensor) -> Tensor:
        """Return the matrix [V', d], the heads' own or the base's rows."""
        for matrix in self.output.values():
            return cast(Tensor, matrix.weight)
        return self.guessed_rows(base_weight)

    @torch.no_grad()
    def own_products(self, output: OutputLayer) -> Callable[[Tensor], Tensor]:
        """Return a function from what ``contextual`` makes [..., d] to products [..., V']."""
        sources = [cast(Tensor, each.weight) for each in self.output.values()] or [output.weight]
        sources += [] if self.token_map is None else [self.token_map]
        made = self._kept.of(sources, lambda: product(self.shared_rows(output.weight)))
        return torch.no_grad()(made)

    def _table(self, capacity: int) -> Tensor:
        return self.form.waves(torch.arange(capacity, device=self.fc.weight.device))


def attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Return what queries [B, G * H, Q, h] read of keys and values [B, H, L, h] under a mask."""
    grouped = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
