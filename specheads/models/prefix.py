"""One attention layer between base model and heads (Hydra++, arXiv:2402.05109, section 4.3)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaModel, PreTrainedConfig

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)


def prefix_sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the sizes of a layer like those of the base model with ``config``; plain JSON."""
    config = config.get_text_config()
    found = {key: getattr(config, key, None) for key in SIZES}
    found["intermediate_size"] = found["intermediate_size"] or 4 * config.hidden_size
    return {key: value for key, value in found.items() if value is not None}


class PrefixLayer(nn.Module):
    """A Llama layer over the base's last hidden states, the identity at the start.

    A head sees one hidden state; this layer lets it look back over all of them. Whatever the base
    model is, the layer is Llama's, of the same sizes; rotary positions are those of the text.

    Args:
        sizes: from :func:`prefix_sizes`.
        dtype: of the parameters; None means torch's default.
    """

    def __init__(self, sizes: dict[str, Any], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        config = LlamaConfig(**sizes, vocab_size=1, num_hidden_layers=1, pad_token_id=None)
        config._attn_implementation = "sdpa"
        # transformers' own model builds masks, packed documents and caches; only its one layer and
        # the rotary table are used
        model = LlamaModel(config)
        model.embed_tokens = cast(Any, None)
        model.norm = cast(Any, nn.Identity())
        if dtype is not None:
            model.layers.to(dtype)  # not the rotary table, which would be rounded
        self.model = model
        layer = cast(Any, model.layers[0])
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, past_key_values: Cache | None = None
    ) -> Tensor:
        """Map hidden states [B, T, d] to [B, T, d].

        Args:
            hidden: of whole documents, or of what follows behind ``past_key_values``.
            position_ids: [B, T]; without a cache they restart at 0 with every packed document.
            past_key_values: a cache of this one layer, which is extended.
        """
        weight = cast(Tensor, cast(Any, self.model.layers[0]).self_attn.o_proj.weight)
        output = self.model(
            inputs_embeds=hidden.to(weight.dtype),
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
        )
        found: Tensor = output.last_hidden_state
        return found
