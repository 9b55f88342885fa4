"""EAGLE-3's own: its layer beside a slow reference, and the layers that it taps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specheads.config import ConfigError, HeadsConfig
from specheads.models.eagle import EagleForm, EagleHeads, eagle_taps
from specheads.models.output import output_layer, packed_taps
from tests.models.test_heads_contract import FORMS, drawn

EAGLES = [name for name in FORMS if name.startswith("eagle3")]


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x over its root mean square, times a weight."""
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate pairs (j, j + h / 2) of x [heads, h] by their angles, one after the other."""
    half, found = x.shape[-1] // 2, x.clone()
    for j in range(half):
        angle = torch.tensor(position / theta ** (j / half))
        a, b = x[:, j], x[:, j + half]
        found[:, j] = a * angle.cos() - b * angle.sin()
        found[:, j + half] = b * angle.cos() + a * angle.sin()
    return found


@torch.no_grad()
def chain(heads: EagleHeads, base: LlamaForCausalLM, ids: list[int], at: int) -> list[Tensor]:
    """Take K steps behind position ``at`` as the paper says it, one token and head at a time."""
    form, w = heads.form, heads.state_dict()
    hidden = packed_taps(base, torch.tensor([ids]), torch.arange(len(ids))[None], heads.taps)[1][0]
    epsilon, width = form.rms_norm_eps, form.head_dim
    group = form.num_attention_heads // form.num_key_value_heads
    seen: list[tuple[Tensor, Tensor]] = []
    found: list[Tensor] = []
    state = torch.zeros(0)
    for position in range(at + heads.num_heads):
        if position <= at:
            taps = hidden[position]
            if form.norm_before_fc:
                taps = normed(taps, w["input_norm.weight"], epsilon)
            if form.fc_norm:
                parts = taps.chunk(len(form.taps))
                taps = torch.cat(
                    [normed(x, w[f"fc_norm.{i}.weight"], epsilon) for i, x in enumerate(parts)]
                )
            state = w["fc.weight"] @ taps
        token = base.get_input_embeddings().weight[ids[position + 1]]
        g = normed(state, w["hidden_norm.weight"], epsilon)
        read = torch.cat([normed(token, w["layer.input_layernorm.weight"], epsilon), g])
        attention = {
            name: (w[f"layer.self_attn.{name}_proj.weight"] @ read).view(-1, width)
            for name in "qkv"
        }
        seen.append((turned(attention["k"], position, form.rope_theta), attention["v"]))
        if position < at:
            continue
        queries, out = turned(attention["q"], position, form.rope_theta), []
        for head, query in enumerate(queries):
            keys, values = (torch.stack([each[i][head // group] for each in seen]) for i in (0, 1))
            out.append((keys @ query / width**0.5).softmax(0) @ values)
        x = g if form.norm_before_residual else state
        x = x + w["layer.self_attn.o_proj.weight"] @ torch.cat(out)
        y = normed(x, w["layer.post_attention_layernorm.weight"], epsilon)
        gate, up = (w[f"layer.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        x = x + w["layer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        found.append(normed(x, w["norm.weight"], epsilon))
        state = found[-1] if form.norm_output else x
    return found


@pytest.mark.parametrize("name", EAGLES)
def test_the_layer_is_the_published_one(name: str, tiny_llama: LlamaForCausalLM) -> None:
    """Another order of norms, halves or positions drafts well here, and badly in every engine."""
    heads: Any = drawn(FORMS[name](tiny_llama))
    ids = torch.randint(0, 256, (1, 14))
    positions = torch.arange(14)[None]
    hidden = packed_taps(tiny_llama, ids, positions, heads.taps)[1]
    made = heads.contextual(hidden, positions, ids, tiny_llama.get_input_embeddings())
    for at in (0, 6):
        slow = torch.stack(chain(heads, tiny_llama, ids[0].tolist(), at))
        torch.testing.assert_close(made[:, 0, at].detach(), slow, rtol=1e-4, atol=1e-5)


def test_taps_by_rule() -> None:
    """Other layers than engines tap by default cost accept length, and no error says so.

    Engines' default states are those behind 2, n / 2 and n - 3 layers.
    """
    assert eagle_taps(32, 3) == (1, 15, 28) and eagle_taps(30, 3) == (1, 14, 26)
    assert eagle_taps(2, 3) == (0,) and eagle_taps(5, 3) == (1,) and eagle_taps(8, 3) == (1, 3, 4)
    assert eagle_taps(32, 2) == (1, 28) and eagle_taps(1, 3) == (0,)


def test_what_it_cannot_be_is_one_line(tiny_llama: LlamaForCausalLM) -> None:
    """A second layer that is left out, or a misspelt option, trains other heads than were asked."""
    output = output_layer(tiny_llama)
    for settings, message in (
        (HeadsConfig("eagle3", num_layers=2), "num_layers must be 1, EAGLE-3's one layer, got 2"),
        (HeadsConfig("eagle3", {"windows": 3}), "options must be one of taps, num_taps"),
    ):
        with pytest.raises(ConfigError, match=message):
            EagleHeads.from_settings(settings, tiny_llama, output)
    with pytest.raises(ConfigError, match="form.head_dim"):
        EagleForm.stored({"head_dim": 1 << 20})
