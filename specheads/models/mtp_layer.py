"""What one multi-token-prediction head is made of, for any decoder layer of transformers'.

``mtp.py`` puts K of them together. Shapes: d hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig


def block_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of one layer like the last one of a base model with ``config``."""
    config = copy.deepcopy(config.get_text_config())
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if types := vars(config).get(key):
            setattr(config, key, types[-1:])
    if step := getattr(config, "decoder_sparse_step", None):  # which layers have experts
        last = config.num_hidden_layers - 1
        dense = last in config.mlp_only_layers or (last + 1) % step
        config.decoder_sparse_step, config.mlp_only_layers = 1, [0] if dense else []
    config.num_hidden_layers = 1
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the base; these layers are numbers
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # the last layer is never among the dense ones
    return config


def config_from_json(values: dict[str, Any]) -> PreTrainedConfig:
    """Return the config that :meth:`MtpHeads.block` wrote.

    Raises:
        ValueError: if transformers does not know its type.
    """
    values = dict(values)
    kind = values.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"block.model_type is {kind!r}, which transformers does not know")
    found = CONFIG_MAPPING[kind](**values)
    assert isinstance(found, PreTrainedConfig)
    return found


class MtpLayer(nn.Module):
    """One head: what joins its inputs, a decoder layer, a norm, its own output matrix if any.

    Args:
        parts: classes of layer, norm and rotary table.
        config: of the layer.
        sequential: read a token's embedding beside the hidden state.
        own_outputs: rows of its own output matrix; 0 shares the base's.
    """

    def __init__(
        self, parts: Parts, config: PreTrainedConfig, *, sequential: bool, own_outputs: int
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.block = parts.layer(config, 0)
        self.norm = parts.make_norm(width)
        self.enorm = parts.make_norm(width) if sequential else None
        self.hnorm = parts.make_norm(width) if sequential else None
        self.eh_proj = nn.Linear(2 * width, width, bias=False) if sequential else None
        self.lm_head = nn.Linear(width, own_outputs, bias=False) if own_outputs else None

    def join(self, hidden: Tensor, embedded: Tensor, *, hidden_first: bool) -> Tensor:
        """Return what the layer of a sequential head reads, [..., d].

        Args:
            hidden: [..., d], what the head before made, or the base's final hidden state.
            embedded: [..., d], embeddings of the token that the head before predicts.
            hidden_first: the order in which they lie side by side.
        """
        assert self.enorm is not None and self.hnorm is not None and self.eh_proj is not None
        weight = self.eh_proj.weight
        parts = [self.enorm(embedded.to(weight.dtype)), self.hnorm(hidden.to(weight.dtype))]
        joined: Tensor = self.eh_proj(torch.cat(parts[::-1] if hidden_first else parts, dim=-1))
        return joined


class Parts:
    """The classes that transformers' model of a config is made of, and how it draws weights.

    Sets how the layers attend: by sdpa, whatever the base uses; eager where a model cannot.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        try:
            model = self._model(config, "sdpa")
        except ValueError:  # Gemma 2 bounds its scores, gpt-oss has sinks
            model = self._model(config, "eager")
        for part in ("layers", "norm", "rotary_emb"):
            if not hasattr(model, part):
                raise ValueError(
                    f"{type(model).__name__} has no {part}: MTP heads need a model built like Llama"
                )
        (kind,) = vars(config).get("layer_types") or ("full_attention",)
        if not kind.endswith("_attention") or kind == "linear_attention":
            raise ValueError(
                f"the last layer of {type(model).__name__} is of type {kind}, which would carry "
                "one document's state into the next: MTP heads need attention"
            )
        self.initialise: Callable[[nn.Module], None] = model._init_weights
        self.layer: Any = type(model.layers[-1])
        self.rotary: Any = type(model.rotary_emb)
        self._norm: Any = type(model.norm)
        self._epsilon = getattr(config, "rms_norm_eps", None)

    @staticmethod
    def _model(config: PreTrainedConfig, attention: str) -> Any:
        config._attn_implementation = attention
        with torch.device("meta"):
            return AutoModel.from_config(config)

    def make_norm(self, width: int) -> nn.Module:
        """Return a norm like the base's final one."""
        norm = self._norm(width, eps=self._epsilon) if self._epsilon else self._norm(width)
        assert isinstance(norm, nn.Module)
        return norm
