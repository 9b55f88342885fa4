"""Try every causal model type of the installed transformers, tiny and random.

    python scripts/sweep_architectures.py --out sweep.json
    python scripts/sweep_architectures.py --types llama gemma2

For each type: can it be built at this size; what the self-test makes of it; and, where it promises
trees, whether three ragged rows decoded by tree give what each gives alone by the plain loop. A
promise that is not kept is printed as WRONG, and the exit code is 1. Types that cannot be built
from these settings are listed and prove nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from specheads.decoding.loop import decode
from specheads.decoding.plain import plain_decode
from specheads.tree import default_tree
from specheads.tree_support import tree_support
from tests.ragged import ROWS, padded
from tests.scripted import ScriptedDrafter
from tests.zoo import SMALL, WINDOW, redraw

MAX_PARAMETERS = 4_000_000
SECONDS = 20  # for one type
NUM_NEW = 12

# the names under which configs keep their sizes, for whatever has them
SIZES: dict[str, Any] = {
    **SMALL,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_chunk_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 256,
    "d_model": 32,
    "num_layers": 2,
    "n_layers": 2,
    "num_heads": 4,
    "n_heads": 4,
    "d_ff": 64,
    "ffn_dim": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    "query_pre_attn_scalar": 8,
    "mamba_d_state": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


class TooBigError(ValueError):
    """The settings above do not make this type small."""


def build(model_type: str) -> PreTrainedModel:
    """Build a type as small as its config lets us."""
    known = CONFIG_MAPPING[model_type]()
    settings = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    if kinds := getattr(known, "layer_types", None):
        settings["layer_types"] = (list(dict.fromkeys(kinds))[:2] * 2)[:2]  # one layer of each
    if model_type == "falcon":
        del settings["head_dim"]  # a property there
    if hasattr(known, "kv_lora_rank"):
        settings["num_key_value_heads"] = 4
    if hasattr(known, "rotary_dim"):
        settings["rotary_dim"] = 4
    config = CONFIG_MAPPING[model_type](**settings)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    if (count := sum(parameter.numel() for parameter in shape.parameters())) > MAX_PARAMETERS:
        raise TooBigError(f"{count:,} parameters")
    model = AutoModelForCausalLM.from_config(config).eval()
    redraw(model)
    model(torch.zeros(1, 4, dtype=torch.long))
    return model


def keeps_its_promise(model: PreTrainedModel) -> bool:
    """Decode ragged rows by tree and compare with each row's plain text."""
    alone = [plain_decode(model, row, max_new_tokens=NUM_NEW).new_tokens for row in ROWS]
    truth = [row[0].tolist() + text for row, text in zip(ROWS, alone, strict=True)]
    drafter = ScriptedDrafter(default_tree(3, 9), truth, 0.7)
    together = decode(model, drafter, **padded(ROWS), max_new_tokens=NUM_NEW)
    return [row.new_tokens for row in together.rows] == alone


def judge(model_type: str) -> tuple[str, str]:
    """Return the verdict on a type, and the reason."""
    try:
        model = build(model_type)
    except Exception as error:  # 190 modelling files, each with its own
        return "not built", f"{type(error).__name__}: {error}"
    try:
        support = tree_support(model)
    except ValueError as error:
        return "refused", str(error)
    if support.kind == "chain":
        return "chain", support.reason
    return ("tree", "") if keeps_its_promise(model) else ("WRONG", "tree, but other tokens")


def expired(*_: object) -> NoReturn:
    """End a type that takes too long."""
    raise TimeoutError(f"took more than {SECONDS} s")


def main() -> int:
    """Judge all types; print and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, expired)
    verdicts: dict[str, dict[str, str]] = defaultdict(dict)
    for model_type in options.types:
        signal.alarm(SECONDS)
        try:
            verdict, reason = judge(model_type)
        except Exception as error:
            verdict, reason = "WRONG", f"{type(error).__name__}: {error}"
        finally:
            signal.alarm(0)
        verdicts[verdict][model_type] = " ".join(reason.split())[:200]
    for verdict, types in sorted(verdicts.items()):
        print(f"\n{verdict}: {len(types)}")
        for model_type, reason in types.items():
            print(f"  {model_type:<28}{reason[:100]}".rstrip())
    if options.out:
        document = {"transformers": transformers.__version__, **verdicts}
        options.out.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return int("WRONG" in verdicts)


if __name__ == "__main__":
    raise SystemExit(main())
