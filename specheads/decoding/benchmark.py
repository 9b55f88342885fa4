"""Measure an export: plain, transformers' generate, prompt lookup and trees, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.decoding import report
from specheads.decoding.identity import compare, measure_rounding
from specheads.decoding.measure import (
    Method,
    Prompt,
    clock,
    drafted_method,
    hf_generate_method,
    plain_method,
)
from specheads.decoding.sampling import Sampler
from specheads.drafters.heads import HeadsDrafter
from specheads.drafters.ngram import NgramDrafter
from specheads.hardware import environment
from specheads.models.base import OutputLayer
from specheads.models.heads import MedusaHeads
from specheads.tree import Tree

# Prompt lookup at its best on the embedded model's calibration answers: longer matches first, any
# match rather than none, ten tokens at once.
LOOKUP_NGRAM, LOOKUP_TOKENS = 8, 10


def make_methods(
    base: PreTrainedModel,
    heads: MedusaHeads,
    output: OutputLayer,
    trees: Sequence[Tree],
    *,
    eos: tuple[int, ...],
    pad: int | None,
    max_new_tokens: int,
) -> list[Method]:
    """Return the compared methods; the first of ``trees`` is called ``tree``."""
    extra = sum(parameter.numel() for parameter in heads.parameters())
    methods = [
        plain_method(base, eos, max_new_tokens),
        hf_generate_method(base, eos, pad, max_new_tokens),
        drafted_method(
            "prompt_lookup",
            base,
            NgramDrafter(max_ngram=LOOKUP_NGRAM, num_tokens=LOOKUP_TOKENS),
            eos,
            max_new_tokens,
            tree_nodes=LOOKUP_TOKENS + 1,
        ),
    ]
    for index, tree in enumerate(trees):
        methods.append(
            drafted_method(
                f"tree_{tree.num_nodes}" if index else "tree",
                base,
                HeadsDrafter(heads, output, tree),
                eos,
                max_new_tokens,
                tree_nodes=tree.num_nodes,
                extra_parameters=extra,
            )
        )
    return methods


def benchmark(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    repeats: int,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Clock ``methods`` at every temperature and return the content of bench.json.

    Args:
        base: base model.
        methods: from :func:`make_methods`.
        prompts: disjoint from those the tree was chosen on.
        temperatures: of the sampling.
        repeats: clocked rounds over all prompts.
        seed: of the sampling.
        settings: more to record beside the figures.
        tick: called after every decoded prompt.
    """
    device = prompts[0].input_ids.device
    dtype = str(base.dtype).removeprefix("torch.")
    ids = [prompt.input_ids for prompt in prompts]
    before = environment()
    rounding = measure_rounding(base, ids[:4])
    rows: list[dict[str, Any]] = []
    all_runs = []
    for temperature in temperatures:
        runs = clock(methods, prompts, temperature, repeats=repeats, seed=seed, tick=tick)
        all_runs.append(runs)
        plain = [decoded.tokens for decoded in runs["plain"].decoded]
        samplers = [Sampler(temperature=temperature, seed=seed + n) for n in range(len(ids))]
        for method in methods:
            same = None
            if method.seeded or temperature == 0:
                other = [decoded.tokens for decoded in runs[method.name].decoded]
                same = compare(base, ids, plain, other, samplers, rounding=rounding)
            row = report.make_row(
                method, runs, prompts, temperature, same, dtype=dtype, device=device.type
            )
            rows.append(row)
    drift = report.baseline_drift(all_runs)
    result = {
        "environment": {
            **before,
            "baseline_drift": round(drift, 4),
            "contended": drift > report.DRIFT_LIMIT,
        },
        "settings": {
            **(settings or {}),
            "temperatures": list(temperatures),
            "repeats": repeats,
            "seed": seed,
            "threads": torch.get_num_threads(),
            "rounding": rounding,
            "near_tie_limit": 2 * rounding,
        },
        "rows": rows,
    }
    result["headline"] = report.headline(rows)
    return result
