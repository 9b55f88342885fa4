"""One attention layer between base model and heads (Hydra++, arXiv:2402.05109, section 4.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedConfig

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)

FINAL_NORM = "final_norm"  # among the sizes: true where a norm follows, as in published Hydra heads


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
        config = LlamaConfig(
            **{key: value for key, value in sizes.items() if key != FINAL_NORM},
            vocab_size=1,
            num_hidden_layers=1,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        config._attn_implementation = "sdpa"
        # transformers' own model builds masks, packed documents and caches; only its one layer and
        # the rotary table are used
        model = LlamaModel(config)
        model.embed_tokens = cast(Any, None)
        if not sizes.get(FINAL_NORM):
            model.norm = cast(Any, nn.Identity())
        self.model = model
        if dtype is not None:
            self.to(dtype)
        layer = cast(Any, model.layers[0])
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PrefixLayer:
        """Move or cast everything but the rotary table, which would be rounded: it only moves."""
        rotary: Any = self.model.rotary_emb
        table = rotary.inv_freq
        super()._apply(fn, recurse)
        rotary.inv_freq = table.to(rotary.inv_freq.device)
        return self

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Map hidden states [B, T, d] of whole documents to [B, T, d].

        Args:
            hidden: several documents in a row if packed.
            position_ids: [B, T], restarting at 0 with every document.
        """
        weight = cast(Tensor, cast(Any, self.model.layers[0]).self_attn.o_proj.weight)
        output = self.model(
            inputs_embeds=hidden.to(weight.dtype), position_ids=position_ids, use_cache=False
        )
        found: Tensor = output.last_hidden_state
        return found
