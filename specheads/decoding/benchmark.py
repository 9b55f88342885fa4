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
    Runs,
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


def measure_rows(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    temperature: float,
    *,
    repeats: int,
    rounding: float,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> tuple[list[dict[str, Any]], dict[str, Runs]]:
    """Clock ``methods`` at one temperature and compare their tokens with plain decoding.

    Args:
        base: base model.
        methods: from :func:`make_methods`.
        prompts: disjoint from those the tree was chosen on.
        temperature: of the sampling.
        repeats: clocked rounds over all prompts.
        rounding: of this base, see :func:`specheads.decoding.identity.measure_rounding`.
        seed: prompt n is sampled with ``seed + n``.
        tick: called after every decoded prompt.

    Returns:
        One row of bench.json per method, and the runs behind them.
    """
    ids = [prompt.input_ids for prompt in prompts]
    runs = clock(methods, prompts, temperature, repeats=repeats, seed=seed, tick=tick)
    plain = [decoded.tokens for decoded in runs["plain"].decoded]
    samplers = [Sampler(temperature=temperature, seed=seed + n) for n in range(len(ids))]
    rows = []
    for method in methods:
        same = None
        if method.seeded or temperature == 0:
            other = [decoded.tokens for decoded in runs[method.name].decoded]
            same = compare(base, ids, plain, other, samplers, rounding=rounding)
        rows.append(
            report.make_row(
                method,
                runs,
                prompts,
                temperature,
                same,
                dtype=str(base.dtype).removeprefix("torch."),
                device=base.device.type,
            )
        )
    return rows, runs


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

    The arguments are those of :func:`measure_rows`, and:

    Args:
        base: base model.
        methods: compared.
        prompts: decoded.
        temperatures: 0 and 0.7 must be among them, see :func:`specheads.decoding.report.headline`.
        repeats: clocked rounds.
        seed: of the sampling.
        settings: more to record beside the figures.
        tick: called after every decoded prompt.
    """
    before = environment()
    rounding = measure_rounding(base, [prompt.input_ids for prompt in prompts[:4]])
    rows: list[dict[str, Any]] = []
    all_runs = []
    for temperature in temperatures:
        found, runs = measure_rows(
            base,
            methods,
            prompts,
            temperature,
            repeats=repeats,
            rounding=rounding,
            seed=seed,
            tick=tick,
        )
        rows += found
        all_runs.append(runs)
    drift = report.baseline_drift(all_runs)
    return {
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
        "headline": report.headline(rows),
        "rows": rows,
    }
