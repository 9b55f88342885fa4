"""Measure a verify step with and without expanding the cache to all query heads.

    python scripts/bench_gqa.py --out benchmarks/gqa.json

A random Llama of the given shape verifies a tree behind a cache of random keys and values; both
ways take turns, and the figures are medians. ``attention`` is the attention call of one layer
alone, in the three forms there are. On a machine that is not idle, times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone need not be installed

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.attention.cache import TreeCache
from specheads.attention.mask import (
    attend_folded,
    causal_tree_mask,
    grouped_attention,
    tree_attention,
)
from specheads.attention.tree import Tree, default_tree
from specheads.system.hardware import environment, pin_threads


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    """Return a model at its default random weights: only shapes matter here."""
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=options.query_heads * options.head_dim,
        intermediate_size=3 * options.query_heads * options.head_dim,
        num_hidden_layers=options.layers,
        num_attention_heads=options.query_heads,
        num_key_value_heads=options.key_heads,
        head_dim=options.head_dim,
        max_position_embeddings=max(options.context) + options.nodes,
        attn_implementation="sdpa",
    )
    dtype = getattr(torch, options.dtype)
    return LlamaForCausalLM(config).to(options.device, dtype).eval()


def filled_cache(options: argparse.Namespace, num_tokens: int) -> TreeCache:
    """Return a cache as after a prompt of ``num_tokens``, with random content."""
    cache = TreeCache()
    cache.reserve(1, num_tokens)
    shape = (1, options.key_heads, num_tokens, options.head_dim)
    for layer in range(options.layers):
        keys, values = (
            torch.randn(shape, device=options.device, dtype=getattr(torch, options.dtype))
            for _ in range(2)
        )
        cache.update(keys, values, layer)
    cache.extend([num_tokens])
    cache.reserve(1, options.nodes)
    return cache


def step(model: LlamaForCausalLM, cache: TreeCache, tree: Tree, grouped: bool) -> Tensor:
    """Verify; nothing is committed."""
    device = model.device
    context = grouped_attention() if grouped else contextlib.nullcontext()
    with tree_attention(tree, cache), context:
        logits: Tensor = model(
            input_ids=torch.zeros(1, tree.num_nodes, dtype=torch.long, device=device),
            position_ids=(tree.depths + cache.lengths[0])[None].to(device),
            past_key_values=cache,
            use_cache=True,
        ).logits
    return logits


def take_turns(
    ways: dict[str, Callable[[], Tensor]], repeats: int, device: torch.device
) -> dict[str, float]:
    """Return the median milliseconds of each way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 2):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 2:  # the first warm up
                seconds[name].append(time.perf_counter() - start)
    return {name: round(1e3 * statistics.median(each), 4) for name, each in seconds.items()}


def attention_ways(options: argparse.Namespace, num_tokens: int, tree: Tree) -> dict[str, Any]:
    """Return the three forms of one layer's attention."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    num_slots, groups = num_tokens + tree.num_nodes, options.query_heads // options.key_heads

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, options.head_dim, device=device, dtype=dtype)

    query = draw(options.query_heads, tree.num_nodes)
    key, value = draw(options.key_heads, num_slots), draw(options.key_heads, num_slots)
    mask = causal_tree_mask(tree, num_tokens, dtype, device)
    folded: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def expanded() -> Tensor:
        keys, values = (t.repeat_interleave(groups, 1) for t in (key, value))
        return scaled_dot_product_attention(query, keys, values, mask)

    ways: dict[str, Callable[[], Tensor]] = {
        "expanded": expanded,
        "folded": lambda: attend_folded(query, key, value, mask, None, folded),
        "enable_gqa": lambda: scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=True
        ),
    }
    return take_turns(ways, options.repeats, device)


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--query-heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pin_threads(options.threads)
    torch.manual_seed(0)
    model, tree = build(options), default_tree(4, options.nodes)
    rows = []
    for num_tokens in options.context:
        cache = filled_cache(options, num_tokens)
        ours, theirs = (step(model, cache, tree, grouped) for grouped in (True, False))
        ways = {
            "expanded": lambda cache=cache: step(model, cache, tree, False),
            "grouped": lambda cache=cache: step(model, cache, tree, True),
        }
        rows.append(
            {
                "context": num_tokens,
                "step_ms": take_turns(ways, options.repeats, model.device),
                "attention_ms": attention_ways(options, num_tokens, tree),
                "largest_difference": float((ours - theirs).abs().max()),
            }
        )
        print(json.dumps(rows[-1]))
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        document = {"environment": environment(), "settings": settings, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
