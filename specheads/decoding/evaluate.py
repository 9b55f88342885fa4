"""Decode held-out prompts during and after training: the recipes hand these to the two loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import EvaluateConfig, TreeConfig
from specheads.decoding.calibrate import Calibration, calibrate
from specheads.decoding.measure import Prompt, clock, drafted_method, plain_method
from specheads.drafters.heads import HeadsDrafter
from specheads.models.base import OutputLayer
from specheads.models.heads import MedusaHeads
from specheads.tree import Tree, default_tree

WHILE_TRAINING_NODES = 16  # a fixed tree, so that the curve compares one step with another


def decode_heldout(
    base: PreTrainedModel,
    heads: MedusaHeads,
    output: OutputLayer,
    prompts: Sequence[Tensor],
    evaluate: EvaluateConfig,
    eos_token_ids: tuple[int, ...],
) -> dict[str, float]:
    """Return accept length, speed-up and share of identical outputs, greedy, with a fixed tree."""
    training = base.training, heads.training
    base.eval()
    heads.eval()
    tree = default_tree(heads.num_heads, WHILE_TRAINING_NODES)
    drafter = HeadsDrafter(heads, output, tree)
    methods = [
        plain_method(base, eos_token_ids, evaluate.max_new_tokens),
        drafted_method(
            "tree",
            base,
            drafter,
            eos_token_ids,
            evaluate.max_new_tokens,
            tree_nodes=tree.num_nodes,
        ),
    ]
    named = [Prompt(str(i), "heldout", ids) for i, ids in enumerate(prompts)]
    runs = clock(methods, named, 0.0, repeats=1)
    base.train(training[0])
    heads.train(training[1])
    plain, tree_runs = runs["plain"], runs["tree"]
    pairs = list(zip(plain.decoded, tree_runs.decoded, strict=True))
    steps = [length for decoded in tree_runs.decoded for length in decoded.accept_lengths]
    return {
        "eval/accept_length": sum(steps) / max(1, len(steps)),
        "eval/speedup": sum(plain.seconds[0]) / sum(tree_runs.seconds[0]),
        "eval/identical": sum(a.tokens == b.tokens for a, b in pairs) / len(pairs),
    }


def choose_tree(
    base: PreTrainedModel,
    heads: MedusaHeads,
    output: OutputLayer,
    prompts: Sequence[Tensor],
    tree: TreeConfig,
    evaluate: EvaluateConfig,
    eos_token_ids: tuple[int, ...],
    *,
    seed: int = 0,
) -> Calibration:
    """Return the tree that the settings give, or the fastest one measured on ``prompts``."""
    if tree.choices:
        return Calibration(Tree.from_choices(tree.choices), 0.0, {})
    base.eval()
    heads.eval()
    with torch.inference_mode():
        return calibrate(
            base,
            heads,
            output,
            prompts,
            eos_token_ids=eos_token_ids,
            max_new_tokens=evaluate.max_new_tokens,
            num_nodes=tree.num_nodes,
            seed=seed,
            dynamic=True,
        )
