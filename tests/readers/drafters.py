"""Read DFlash, DSpark and EAGLE-3 as engines do: from the published rules, without specheads.

Slow and obvious: one position, head and slot at a time. The base's states are transformers' own
``hidden_states``, of which number k stands behind k layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

SPECULATORS = "speculators_model_type"


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x over its root mean square, times a weight."""
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate the pairs (j, j + h / 2) of x [heads, h]."""
    half, found = x.shape[-1] // 2, x.clone()
    for j in range(half):
        angle = torch.tensor(position / theta ** (j / half))
        a, b = x[:, j], x[:, j + half]
        found[:, j] = a * angle.cos() - b * angle.sin()
        found[:, j + half] = b * angle.cos() + a * angle.sin()
    return found


class Drafter:
    """A folder as an engine reads it.

    Args:
        folder: config.json and model.safetensors.
        embed: the base's embedding [V, d].
        lm_head: the base's output matrix [V, d].
    """

    def __init__(self, folder: Path, embed: Tensor, lm_head: Tensor) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.w = load_file(folder / "model.safetensors")
        self.embed, self.lm_head = embed, self.w.get("lm_head.weight", lm_head)
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.theta, self.epsilon = self.layer["rope_theta"], self.layer["rms_norm_eps"]
        self.width = self.layer["head_dim"]
        self.group = self.layer["num_attention_heads"] // self.layer["num_key_value_heads"]

    def token(self, place: int) -> int:
        """Return the base's id of a place among the drafter's outputs."""
        return place + int(self.w["d2t"][place]) if "d2t" in self.w else place

    def taps(self, states: list[Tensor], ids: list[int]) -> Tensor:
        """Return the states behind so many layers, side by side, [T, n * d]."""
        return torch.cat([states[k][0] for k in ids], dim=-1)

    def attended(
        self, query: Tensor, keys: list[Tensor], values: list[Tensor], layer: str
    ) -> Tensor:
        """Return what o_proj makes of the attention of queries [heads, h]."""
        out = []
        for head, each in enumerate(query):
            k = torch.stack([key[head // self.group] for key in keys])
            v = torch.stack([value[head // self.group] for value in values])
            out.append((k @ each / self.width**0.5).softmax(0) @ v)
        return self.w[f"{layer}self_attn.o_proj.weight"] @ torch.cat(out)

    def heads_of(self, name: str, x: Tensor) -> Tensor:
        """Return a projection of x, by attention heads."""
        return (self.w[name] @ x).view(-1, self.width)

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        """Return x with what the MLP adds."""
        y = normed(x, self.w[f"{layer}post_attention_layernorm.weight"], self.epsilon)
        gate, up = (self.w[f"{layer}mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return x + self.w[f"{layer}mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)


class Eagle3(Drafter):
    """EAGLE-3, either layout."""

    def logits(self, ids: list[int], states: list[Tensor], at: int, steps: int) -> list[Tensor]:
        """Return the logits of each step behind position ``at``, told the text's own tokens."""
        config, w = self.config, self.w
        # some engines read the keys of eagle_config inside it, some outside
        assert config.get("eagle_config", {}).items() <= config.items()
        taps = self.taps(states, config["eagle_aux_hidden_state_layer_ids"])
        layer = "layers.0." if SPECULATORS in config else "midlayer."
        # vLLM sizes fc by this number, which in speculators' layout it believes to be 3 without
        assert taps.shape[-1] == self.layer.get("num_aux_hidden_states", 3) * len(self.embed[0])
        keys, values, found = [], [], []
        state = torch.zeros(0)
        for position in range(at + steps):
            if position <= at:
                fused = taps[position]
                if config["norm_before_fc"]:
                    fused = normed(fused, w["input_norm.weight"], self.epsilon)
                if config["fc_norm"]:
                    parts = fused.chunk(len(config["eagle_aux_hidden_state_layer_ids"]))
                    fused = torch.cat(
                        [
                            normed(part, w[f"fc_norm.{i}.weight"], self.epsilon)
                            for i, part in enumerate(parts)
                        ]
                    )
                state = w["fc.weight"] @ fused
            token = self.embed[ids[position + 1]]
            g = normed(state, w[f"{layer}hidden_norm.weight"], self.epsilon)
            e = normed(token, w[f"{layer}input_layernorm.weight"], self.epsilon)
            read = torch.cat([e, g])
            q, k, v = (self.heads_of(f"{layer}self_attn.{n}_proj.weight", read) for n in "qkv")
            keys.append(turned(k, position, self.theta))
            values.append(v)
            if position < at:
                continue
            x = g if config["norm_before_residual"] else state
            x = x + self.attended(turned(q, position, self.theta), keys, values, layer)
            x = self.mlp(x, layer)
            final = normed(x, w["norm.weight"], self.epsilon)
            found.append(self.lm_head @ final)
            state = final if config["norm_output"] else x
        return found


class DFlash(Drafter):
    """DFlash and DSpark, either layout."""

    def logits(self, ids: list[int], states: list[Tensor], at: int, steps: int) -> list[Tensor]:
        """Return the logits of each guess of the block behind position ``at``."""
        config, w = {**self.config, **self.config.get("dflash_config", {})}, self.w
        native = SPECULATORS not in config
        layers = (
            [i + 1 for i in config["target_layer_ids"]]
            if native
            else config["aux_hidden_state_layer_ids"]
        )
        markov = "markov_rank" in config
        anchored = markov if native else config["sample_from_anchor"]
        taps = self.taps(states, layers) @ w["fc.weight"].T
        context = normed(taps, w["hidden_norm.weight"], self.epsilon)
        block = [ids[at + 1]] + [config["mask_token_id"]] * (config["block_size"] - 1)
        xs = [self.embed[token] for token in block]
        for number in range(self.layer["num_hidden_layers"]):
            layer = f"layers.{number}."
            first = [normed(x, w[f"{layer}input_layernorm.weight"], self.epsilon) for x in xs]
            places = [*range(at + 1), *(at + 1 + i for i in range(len(xs)))]
            queries, keys, values = [], [], []
            for place, source in zip(places, [*context[: at + 1], *first], strict=True):
                q, k, v = (
                    self.heads_of(f"{layer}self_attn.{n}_proj.weight", source) for n in "qkv"
                )
                q, k = (
                    normed(each, w[f"{layer}self_attn.{n}_norm.weight"], self.epsilon)
                    for n, each in (("q", q), ("k", k))
                )
                queries.append(turned(q, place, self.theta))
                keys.append(turned(k, place, self.theta))
                values.append(v)
            own = queries[at + 1 :]
            xs = [
                self.mlp(x + self.attended(query, keys, values, layer), layer)
                for x, query in zip(xs, own, strict=True)
            ]
        found = []
        for i, x in enumerate(xs if anchored else xs[1:]):
            logits = self.lm_head @ normed(x, w["norm.weight"], self.epsilon)
            if markov:
                before = ids[at + 1 + i]
                bias = w["markov_head.markov_w1.weight"][before]
                logits = logits + w["markov_head.markov_w2.weight"] @ bias
            found.append(logits)
        assert len(found) == steps
        return found
