"""Small GGUF files, written with gguf's writer and tables of names that are spelled out here.

Nothing of transformers' tables is used, so that a mistake in them shows. What is done to tensors is
that of llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.conftest import redraw

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
}
# of each architecture: transformers' name, what its config says beside SIZES, its tokenizer
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "gpt2"),
    "qwen2": ("qwen2", {}, "gpt2"),
    "phi3": ("phi3", {"sliding_window": 12, "partial_rotary_factor": 0.75}, "llama"),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7},
        "llama",
    ),
}
_PLAIN = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
NAMES: dict[str, dict[str, str]] = {
    "llama": _PLAIN,
    "qwen2": _PLAIN | {
        "self_attn.q_proj.bias": "attn_q.bias",
        "self_attn.k_proj.bias": "attn_k.bias",
        "self_attn.v_proj.bias": "attn_v.bias",
    },
    "phi3": _PLAIN | {
        "self_attn.qkv_proj.weight": "attn_qkv.weight",
        "mlp.gate_up_proj.weight": "ffn_up.weight",
    },
    "gemma3": _PLAIN | {
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    },
}  # fmt: skip
# what ends a text: transformers' own class for Qwen2 has a token of this name in any case
END = {"llama": "<|end|>", "qwen2": "<|endoftext|>", "phi3": "<eos>", "gemma3": "<eos>"}
WORDS = ["the", "cat", "sat", "on", "mat", "hello", "world", "don't", "in", "1999", "12"]
TEXTS = ["the cat sat on the mat", "hello  world, in 1999", " a\n  12 don't é 日本", "x"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return the 256 characters that stand for bytes in byte-level BPE (GPT-2)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def byte_level_vocabulary(end: str = "<|end|>") -> tuple[list[str], list[str]]:
    """Return tokens (specials last, ``end`` ends a text) and merges, best first."""
    alphabet, merges = byte_alphabet(), []
    tokens = list(alphabet)
    for word in WORDS:
        pieces = [alphabet[byte] for byte in f" {word}".encode()]
        while len(pieces) > 1:
            merged = pieces[0] + pieces[1]
            if merged not in tokens:
                tokens.append(merged)
                merges.append(f"{pieces[0]} {pieces[1]}")
            pieces[:2] = [merged]
    return [*tokens, end, "<|user|>", "<|assistant|>", "<pad>"], merges


def sentencepiece_vocabulary() -> list[str]:
    """Return tokens as sentencepiece has them: specials, bytes, characters, then pieces."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|user|>", "<|assistant|>"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += sorted(set("▁" + "".join(WORDS)))
    for word in WORDS:
        tokens += [f"▁{word[:end]}" for end in range(1, len(word) + 1)]
    return list(dict.fromkeys(tokens))


def build(architecture: str, seed: int = 0) -> PreTrainedModel:
    """Build a random model whose vocabulary is that of its tokenizer."""
    model_type, more, kind = MODELS[architecture]
    size = len(byte_level_vocabulary()[0] if kind == "gpt2" else sentencepiece_vocabulary())
    values = {**SIZES, "vocab_size": size, "pad_token_id": 0, **more}
    config = AutoConfig.for_model(model_type, **values, attn_implementation="eager")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    redraw(model, seed=seed)
    return model


def stored(architecture: str, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors as llama.cpp's converter writes them."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        tensors[gguf_name(architecture, name)] = changed(architecture, name, tensor)
    return tensors


def gguf_name(architecture: str, name: str) -> str:
    """Return llama.cpp's name of a weight."""
    outside = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside:
        return outside[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[architecture][rest]}"


def changed(architecture: str, name: str, tensor: Tensor) -> Tensor:
    """Return a weight's numbers as llama.cpp has them."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj.weight": 4, "k_proj.weight": 2}.get(".".join(name.split(".")[-2:]))
    if architecture == "llama" and heads:  # pairs of rows, not halves, are turned together
        rows, columns = tensor.shape
        pairs = tensor.reshape(heads, 2, rows // heads // 2, columns)
        return pairs.transpose(1, 2).reshape(rows, columns)
    return tensor


def q4_1(tensor: Tensor) -> tuple[np.ndarray, Tensor]:
    """Return blocks of Q4_1, and by hand what they stand for: 32 times ``d * q + m``."""
    packed = gguf.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q4_1)
    blocks = torch.from_numpy(packed).reshape(-1, 20)
    d, m = (blocks[:, i : i + 2].contiguous().view(torch.float16).float() for i in (0, 2))
    values = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], dim=1)
    return packed, (values * d + m).reshape(tensor.shape)


def write(
    file: Path,
    architecture: str,
    model: PreTrainedModel,
    *,
    quantized: bool = False,
    extra: Callable[[Any], None] = lambda writer: None,
    change: Callable[[dict[str, Any]], None] = lambda tensors: None,
) -> dict[str, Tensor]:
    """Write a model and its tokenizer as GGUF.

    Args:
        file: to write.
        architecture: llama.cpp's name.
        model: from :func:`build`.
        quantized: matrices as Q4_1.
        extra: writes more metadata with the writer.
        change: takes away or changes tensors that are about to be written.

    Returns:
        What stands in the file, dequantised, by its names there.
    """
    writer = gguf.GGUFWriter(file, architecture)
    _, more, kind = MODELS[architecture]
    sizes = {**SIZES, **more}
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    writer.add_rope_freq_base(sizes["rope_theta"])
    width = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    writer.add_rope_dimension_count(int(width * sizes.get("partial_rotary_factor", 1)))
    if "head_dim" in sizes:
        writer.add_key_length(width)
        writer.add_value_length(width)
    if "sliding_window" in sizes:
        writer.add_sliding_window(sizes["sliding_window"])
    _add_tokenizer(writer, kind, END[architecture])
    extra(writer)
    tensors = stored(architecture, model)
    change(tensors)
    read = {}
    for name, tensor in tensors.items():
        if quantized and tensor.ndim == 2:
            packed, read[name] = q4_1(tensor)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            read[name] = tensor
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def _add_tokenizer(writer: Any, kind: str, end: str) -> None:
    normal, unknown, control, byte = 1, 2, 3, 6
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        tokens, merges = byte_level_vocabulary(end)
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(merges)
        types = [
            control if token.startswith("<|") or token == "<pad>" else normal for token in tokens
        ]
        writer.add_eos_token_id(tokens.index(end))
        writer.add_add_bos_token(False)
    else:
        tokens = sentencepiece_vocabulary()
        types = [byte if token.startswith("<0x") else normal for token in tokens]
        types[:7] = [control, control, control, unknown, control, control, control]
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_bos_token_id(tokens.index("<bos>"))
        writer.add_eos_token_id(tokens.index(end))
        writer.add_eot_token_id(tokens.index("<|user|>"))
        writer.add_unk_token_id(tokens.index("<unk>"))
        writer.add_add_bos_token(True)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_pad_token_id(tokens.index("<pad>"))
    writer.add_chat_template(TEMPLATE)
