"""Read, run, merge and write bases in parts on several ranks; started by test_distributed.py.

``parts.py FOLDER``: prints ``ok`` for every architecture of which all is as of a base held whole.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig

from specheads.config import AdapterConfig
from specheads.models import sharded
from specheads.models.adapters import adapter_parameters, add_adapter, merge_adapter
from specheads.models.base import load_base_model
from specheads.models.checkpoint import save_hf
from specheads.models.output import layers_of
from specheads.system import dist
from specheads.training.ranks import join
from tests.conftest import build_byte_tokenizer, build_tiny_llama
from tests.toys import toy_config

IDS = torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(0))
BASES: dict[str, tuple[Any, str]] = {
    "llama": (lambda: build_tiny_llama(), ""),
    "tied": (lambda: build_tiny_llama(tie_word_embeddings=True), ""),
    "bfloat16": (lambda: build_tiny_llama().bfloat16(), ""),
    "gpt2": (
        lambda: AutoModelForCausalLM.from_config(
            GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=272)
        ),
        "list of layers",
    ),
    "mixtral": (
        lambda: AutoModelForCausalLM.from_config(
            MixtralConfig(
                hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, vocab_size=272, num_local_experts=2,
            )
        ),
        "experts",
    ),
}  # fmt: skip


def load(folder: Path, dtype: torch.dtype) -> tuple[Any, str]:
    """Load what lies in a folder in parts."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = join(toy_config(folder, deepspeed={"zero_optimization": zero}, device="cpu"))
    return sharded.load_sharded(str(folder), settings, dtype=dtype, attn="sdpa")


def logits(model: Any) -> torch.Tensor:
    """Run a model as it is; of one in parts a single layer is whole at a time."""
    layers, held = layers_of(model), list[int]()

    def count(*_: Any) -> None:
        parts = ([p for p in layer.parameters() if hasattr(p, "ds_id")] for layer in layers)
        held.append(sum(any(p.numel() for p in each) for each in parts))

    with torch.no_grad(), sharded.runnable(model), contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(count).remove)
        found = model(input_ids=IDS, use_cache=False).logits
    assert len(layers) > 1 and held == [int(sharded.is_sharded(model))] * len(layers), held
    return found


def check(folder: Path, dtype: str) -> None:
    """Hold a base in parts to the same base read whole."""
    expected = load_base_model(str(folder), dtype=dtype, device="cpu")
    base, why = load(folder, expected.dtype)
    assert base is not None, why
    layers = [p for p in base.parameters() if hasattr(p, "ds_id")]
    assert layers and all(p.numel() == 0 for p in layers), "a layer is whole"
    assert torch.equal(logits(base), logits(expected))
    for model in (base, expected):
        add_adapter(model, AdapterConfig(kind="lora", rank=2, dropout=0.0))
        for number, parameter in enumerate(adapter_parameters(model).values()):
            generator = torch.Generator().manual_seed(number)
            parameter.data.normal_(0, 0.1, generator=generator)
    assert torch.equal(logits(base), logits(expected)), "with an adapter"
    assert all(p.numel() == 0 for p in layers), "a layer stayed whole"
    merge_adapter(expected)
    out = folder.with_name(folder.name + "-written")
    if dist.is_main():
        save_hf(out, base, build_byte_tokenizer(), None)
        found = load_base_model(str(out), dtype=dtype, device="cpu").state_dict()
        assert found.keys() == expected.state_dict().keys()
        for name, tensor in expected.state_dict().items():
            assert torch.equal(found[name], tensor), name
    else:
        sharded.take_part(base)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, (build, refused) in BASES.items():
        folder = place / name
        if dist.is_main():
            torch.manual_seed(0)
            build().save_pretrained(folder)
            build_byte_tokenizer().save_pretrained(folder)
        join(toy_config(place, deepspeed={"zero_optimization": {"stage": 3}}, device="cpu"))
        dist.barrier()
        if refused:
            base, why = load(folder, torch.float32)
            assert base is None and refused in why, why
        else:
            check(folder, "bfloat16" if name == "bfloat16" else "float32")
        print(f"{name} ok", flush=True)
    dist.shutdown()
