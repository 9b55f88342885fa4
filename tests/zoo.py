"""Tiny random models of many architectures, whose logits depend on every token, mask and position.

A model at its default initialisation is degenerate: attention is nearly uniform and logits nearly
equal, so that a wrong mask would change nothing a test can see.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 64
WINDOW = 6  # of the models with a sliding window: smaller than any prompt, so that it bites

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # tied ones repeat themselves
}

_GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,  # unlike the keys'
}


class Kind(NamedTuple):
    """A model type of transformers, what differs from SMALL, and the attention it runs with."""

    model_type: str
    changes: dict[str, Any] = {}
    attention: str = "sdpa"


TREE_MODELS = {
    "llama": Kind("llama"),
    "llama-eager": Kind("llama", {}, "eager"),
    "qwen2": Kind("qwen2"),
    "qwen2-window": Kind(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": Kind("qwen3"),
    "mistral": Kind("mistral", {"sliding_window": None}),
    "mistral-window": Kind("mistral", {"sliding_window": WINDOW}),
    "gemma2": Kind("gemma2", _GEMMA, "eager"),  # its softcap rules out sdpa
    "gemma3": Kind(
        "gemma3_text", _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}
    ),
    "phi3": Kind("phi3"),
    "gpt2": Kind("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}),
    "gpt_neox": Kind("gpt_neox"),
    "opt": Kind("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "mixtral": Kind("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": Kind("qwen3_moe", _EXPERTS),
    "deepseek_v3": Kind("deepseek_v3", _DEEPSEEK),
    "falcon": Kind("falcon", {"alibi": False}),  # multi-query: one key head
    "llama4": Kind(  # chunked attention
        "llama4_text",
        {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 64},
    ),
}

THRESHOLD = 64
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [4.0, 3.0, 2.0, 5.0],
    "original_max_position_embeddings": THRESHOLD,
    "factor": 4.0,
}
_PHI = {"original_max_position_embeddings": THRESHOLD}

# what they compute changes for a whole pass at THRESHOLD
THRESHOLD_MODELS = {
    "llama-longrope": Kind("llama", {"rope_parameters": _LONGROPE}),  # keeps keys at the crossing
    "phi3-longrope": Kind("phi3", _PHI | {"rope_parameters": _LONGROPE}),  # reads the text anew
    "phimoe-longrope": Kind(
        "phimoe",
        _PHI
        | {
            "num_local_experts": 4,
            "rope_parameters": _LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.5},
        },
    ),
    "llama4-temperature": Kind(
        "llama4_text",
        {
            "attention_chunk_size": 200,
            "attn_temperature_tuning": True,
            "attn_scale": 2.0,
            "floor_scale": THRESHOLD,
            "no_rope_layers": [1, 0],
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
        },
    ),
}

# ALiBi counts slots, gpt_neo's local layers mask by slot: a tree would be wrong, a chain is exact
CHAIN_MODELS = {
    "bloom": Kind("bloom", {"n_head": 4, "n_layer": 2}, "eager"),
    "mpt": Kind("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, "eager"),
    "falcon-alibi": Kind("falcon", {"alibi": True}, "eager"),
    "gpt_neo": Kind(
        "gpt_neo",
        {
            "attention_types": [[["global", "local"], 1]],
            "num_layers": 2,
            "num_heads": 4,
            "window_size": WINDOW,
        },
        "eager",
    ),
}

REFUSED_MODELS = {
    "mamba": Kind("mamba", {}, "eager"),
    "qwen3_next": Kind(
        "qwen3_next",
        _EXPERTS
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    # its window is in transformers' own cache only
    "moshi": Kind("moshi", {"sliding_window": WINDOW, "ffn_dim": 64}),
    "lfm2": Kind("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "deepseek_v32": Kind(
        "deepseek_v32", _DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
    ),
}

MODELS = TREE_MODELS | THRESHOLD_MODELS | CHAIN_MODELS | REFUSED_MODELS


def build(name: str, *, seed: int = 1, std: float = 0.3, **changes: Any) -> PreTrainedModel:
    """Build one of MODELS in float32 and eval mode; ``changes`` are settings of its config."""
    model_type, own, attention = MODELS[name]
    known = CONFIG_MAPPING[model_type]()
    settings = {key: value for key, value in SMALL.items() if hasattr(known, key)}
    if model_type == "falcon":
        del settings["head_dim"]  # a property there
    config = CONFIG_MAPPING[model_type](**settings | own | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    redraw(model, seed=seed, std=std)
    return model.eval()


def redraw(model: PreTrainedModel, *, seed: int = 1, std: float = 0.3) -> None:
    """Draw all weights anew; those of norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            parameter.copy_(noise * 0.3 + 1 if is_norm else noise)


def disturbed(model: PreTrainedModel, noise: float = 0.2, *, seed: int = 1) -> PreTrainedModel:
    """Return a copy of ``model`` that often agrees with it: a draft model for it.

    Args:
        model: left as it is.
        noise: added to each weight tensor, in units of its standard deviation.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * noise * weight.std())
    return other.eval()
