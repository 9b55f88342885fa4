"""Measure a base's passes on a CPU as specheads runs them beside those of torch and transformers.

    python scripts/bench_packed.py --base smollm2 --out packed.json
    python scripts/bench_packed.py --base smollm2 --dtype float32 --out packed_float32.json

Passes over one token, over trees and over a batch's rows, with a cache, in turn; the ratio is the
median over pairs of neighbouring calls. Whether their logits have the same bits is said beside, and
what the base's products alone take, each linear layer's as torch multiplies. On a machine that is
not idle the times mean nothing.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import harness
import torch
from harness import spread, take_turns
from torch import nn
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import default_tree
from specheads.models.base import load_base_model
from specheads.models.forward import ModelPass
from specheads.models.packed import PackedLinear
from specheads.system import hardware


@dataclass
class Settings:
    """What is measured.

    Attributes:
        base: folder or hub name of a model
        dtype: of its weights
        threads: 0: all
        nodes: of one row's trees
        rows: of batches of one token each
        context: cached tokens
        calls: pairs per shape
        out: write the JSON there
    """

    base: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    threads: int = 0
    nodes: tuple[int, ...] = (1, 2, 8, 12, 16, 32)
    rows: tuple[int, ...] = (8, 64)
    context: int = 100
    calls: int = 60
    out: Path | None = None


def unpacked(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that multiplies as torch does."""
    other = copy.deepcopy(model)
    for layer in [each for each in other.modules() if isinstance(each, PackedLinear)]:
        cast(Any, layer).__class__ = nn.Linear  # and so layers run as transformers has them
    return other


def products_of(model: PreTrainedModel, num_rows: int) -> Callable[[], Any]:
    """Return what multiplies so many rows with the weight of every linear layer."""
    weights = [each.weight for each in model.modules() if isinstance(each, nn.Linear)]
    inputs = {w.shape[1]: torch.randn(num_rows, w.shape[1], dtype=w.dtype) for w in weights}
    return lambda: [nn.functional.linear(inputs[w.shape[1]], w) for w in weights]


@torch.inference_mode()
def compare(
    models: dict[str, PreTrainedModel], num_rows: int, num_nodes: int, given: Settings
) -> dict[str, Any]:
    """Clock a pass of one shape in turn."""
    tree = default_tree(4, num_nodes)
    tokens = torch.arange(num_rows * num_nodes).reshape(num_rows, num_nodes)
    ids = torch.arange(given.context).expand(num_rows, -1)
    passes = {name: ModelPass(model, TreeCache()) for name, model in models.items()}
    for each in passes.values():
        each.read(ids, [given.context] * num_rows)

    def one(each: ModelPass) -> Callable[[], Any]:
        return lambda: each.verify(tokens, tree)

    plain, packed = (each.verify(tokens, tree) for each in passes.values())
    turns = {name: one(each) for name, each in passes.items()}
    turns["products"] = products_of(models["torch"], num_rows * num_nodes)
    clocked = take_turns(turns, given.calls, warmup=3)
    before, after, alone = (clocked[name]["seconds"] for name in turns)
    return {
        "rows": num_rows,
        "nodes": num_nodes,
        "torch_ms": {key: 1e3 * value for key, value in spread(before).items()},
        "packed_ms": {key: 1e3 * value for key, value in spread(after).items()},
        "products_ms": {key: 1e3 * value for key, value in spread(alone).items()},
        "ratio": spread([b / a for a, b in zip(before, after, strict=True)]),
        "of_products": spread([b / a for a, b in zip(alone, after, strict=True)]),
        "same_bits": torch.equal(plain, packed),
    }


def main() -> None:
    """Measure and print."""
    given = harness.parse(Settings)
    hardware.pin_threads(given.threads)
    model = load_base_model(given.base, dtype=given.dtype, device="cpu")
    if not any(isinstance(layer, PackedLinear) for layer in model.modules()):
        raise SystemExit(f"nothing is packed here: this processor or oneDNN has no {given.dtype}")
    models = {"torch": unpacked(model), "packed": model}
    shapes = [(1, n) for n in given.nodes] + [(n, 1) for n in given.rows]
    found = []
    for num_rows, num_nodes in shapes:
        found.append(compare(models, num_rows, num_nodes, given))
        line = found[-1]
        print(
            f"rows {num_rows:3d}, nodes {num_nodes:3d}: {line['torch_ms']['median']:7.1f} ms,"
            f" packed {line['packed_ms']['median']:7.1f} ms, ratio {line['ratio']['median']:.2f},"
            f" {line['of_products']['median']:.2f} of the products alone,"
            f" {'same' if line['same_bits'] else 'OTHER'} bits",
            flush=True,
        )
    harness.write(given.out, harness.report(given, passes=found))


if __name__ == "__main__":
    main()
