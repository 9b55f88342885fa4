"""Measure an export: plain, transformers' generate, prompt lookup and trees, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads import contention
from specheads.decoding import report
from specheads.decoding.baselines import (
    hf_compiled_method,
    hf_generate_method,
    one_by_one_method,
)
from specheads.decoding.deciding import Acceptance
from specheads.decoding.identity import Rounding, compare
from specheads.decoding.measure import (
    Method,
    Prompt,
    Runs,
    clock,
    drafted_method,
    plain_method,
)
from specheads.decoding.paired import pairs
from specheads.decoding.tables import disturbance_lines
from specheads.drafters.made import DynamicDrafter, StaticDrafter, static_drafter
from specheads.drafters.ngram import LOOKUP_NGRAM, LOOKUP_TOKENS, NgramDrafter
from specheads.hardware import environment
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer
from specheads.sampling import Sampler
from specheads.tree import Tree

Clocked = Mapping[tuple[float, int], dict[str, Runs]]  # (temperature, batch size) -> method -> runs


def make_methods(
    base: PreTrainedModel,
    heads: Heads | None,
    output: OutputLayer | None,
    trees: Sequence[Tree],
    *,
    eos: tuple[int, ...],
    pad: int | None,
    max_new_tokens: int,
    dynamic: DynamicDrafter | None = None,
    lossy: Acceptance | None = None,
    compile: bool = False,
    batched: bool = False,
) -> list[Method]:
    """Return the compared methods; the first of ``trees`` is called ``tree``.

    Args:
        base: base model.
        heads: heads on it; None for the baselines alone, with no trees.
        output: its output layer, for the heads.
        trees: static ones.
        eos: tokens that end a text.
        pad: padding of transformers' generate.
        max_new_tokens: limit per prompt.
        dynamic: a drafter of trees grown at each step, to be compared too.
        lossy: a rule that the first tree is decoded by once more, named in the row.
        compile: compile the base's passes in our own loops, the plain one included, which is then
            measured as it was before too, and generate with compiled passes.
        batched: there will be batches, to be measured beside decoding without them.
    """
    plain = plain_method(base, eos, max_new_tokens, compile=compile)
    methods = [plain, hf_generate_method(base, eos, pad, max_new_tokens)]
    if compile:
        eager = plain_method(base, eos, max_new_tokens)
        methods.insert(1, replace(eager, name="plain_eager"))
        methods.append(hf_compiled_method(base, eos, pad, max_new_tokens))
    if batched:
        methods.append(one_by_one_method(plain))
    methods.append(
        drafted_method(
            "prompt_lookup",
            base,
            NgramDrafter(max_ngram=LOOKUP_NGRAM, num_tokens=LOOKUP_TOKENS),
            eos,
            max_new_tokens,
            tree_nodes=LOOKUP_TOKENS + 1,
            compile=compile,
        ),
    )
    if heads is None or output is None:
        return methods
    extra = sum(parameter.numel() for parameter in heads.parameters())
    drafted: list[tuple[str, StaticDrafter | DynamicDrafter, int, Acceptance | None]] = [
        (
            f"tree_{tree.num_nodes}" if index else "tree",
            static_drafter(base, heads, output, tree),
            tree.num_nodes,
            None,
        )
        for index, tree in enumerate(trees)
    ]
    if dynamic is not None:
        drafted.append(("tree_dynamic", dynamic, dynamic.num_nodes, None))
    if lossy is not None:
        _, first, num_nodes, _ = drafted[0]
        drafted.append((f"tree_{lossy.rule}", first, num_nodes, lossy))
    for name, drafter, num_nodes, acceptance in drafted:
        methods.append(
            drafted_method(
                name,
                base,
                drafter,
                eos,
                max_new_tokens,
                tree_nodes=num_nodes,
                extra_parameters=extra,
                acceptance=acceptance,
                compile=compile,
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
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Clock ``methods`` at one temperature, batch 1; return a row of bench.json for each of them.

    Args:
        base: base model.
        methods: from :func:`make_methods`.
        prompts: disjoint from those the tree was chosen on.
        temperature: of the sampling.
        repeats: clocked rounds over all prompts.
        seed: prompt n is sampled with ``seed + n``.
        tick: called after every decoded prompt.
    """
    runs = clock(methods, prompts, temperature, repeats=repeats, seed=seed, tick=tick)
    clocked = {(temperature, 1): runs}
    rounding = rounding_of(base, methods, prompts, clocked)
    return make_rows(base, methods, prompts, clocked, rounding, seed=seed)


def benchmark(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    repeats: int,
    batch_sizes: Sequence[int] = (1,),
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    headline: str = "tree",
    progress: Callable[[str], object] = lambda text: None,
    tick: Callable[[], object] = lambda: None,
    clocked: dict[tuple[float, int], dict[str, Runs]] | None = None,
) -> dict[str, Any]:
    """Clock ``methods`` at every temperature and return the content of bench.json.

    The arguments are those of :func:`measure_rows`, and:

    Args:
        base: base model.
        methods: compared.
        prompts: decoded.
        temperatures: 0 and 0.7 must be among them, see :func:`specheads.decoding.report.headline`.
        repeats: clocked rounds.
        batch_sizes: prompts decoded together; 1 must be among them.
        seed: of the sampling.
        settings: more to record beside the figures.
        headline: the method whose figures are to be quoted.
        progress: told which temperature and batch size comes next.
        tick: called after every decoded prompt.
        clocked: gets the runs themselves, by temperature and batch size.
    """
    before = environment(base.device)
    clocked = {} if clocked is None else clocked
    watched: list[dict[str, Any]] = []
    for temperature in temperatures:
        for size in batch_sizes:
            progress(f"T={temperature:g}, batch {size}")
            started: list[contention.Sample] = []  # when the warm-up is over
            clocked[temperature, size] = clock(
                methods,
                prompts,
                temperature,
                repeats=repeats,
                batch_size=size,
                seed=seed,
                tick=tick,
                prefill=True,
                started=started,
            )
            watched.append(
                {
                    "temperature": temperature,
                    "batch": size,
                    "drift": round(report.baseline_drift([clocked[temperature, size]]), 4),
                    **contention.between(started[0], contention.sample()),
                }
            )
    # only now: the float32 copy that a divergence asks for would count as memory of the methods
    rounding = rounding_of(base, methods, prompts, clocked)
    rows = make_rows(base, methods, prompts, clocked, rounding, seed=seed)
    result: dict[str, Any] = {
        "environment": {**before, **report.disturbance(watched)},
        "settings": {
            **(settings or {}),
            "temperatures": list(temperatures),
            "batch_sizes": list(batch_sizes),
            "repeats": repeats,
            "seed": seed,
            "threads": torch.get_num_threads(),
            "noise": asdict(rounding.noise) if any(row["divergences"] for row in rows) else None,
        },
        "headline": report.headline(rows, headline),
        "crossover": report.crossovers(rows),
        "pairs": pairs(clocked),
        "rows": rows,
    }
    return result | {"warnings": disturbance_lines(result)}


def rounding_of(
    base: PreTrainedModel, methods: Sequence[Method], prompts: Sequence[Prompt], clocked: Clocked
) -> Rounding:
    """Return what will measure, if asked, how rounding moves logits along the plain texts."""
    texts = [
        (prompt.input_ids, decoded.tokens)
        for (_, size), runs in clocked.items()
        if size == 1
        for prompt, decoded in zip(prompts, runs["plain"].decoded, strict=True)
    ]
    widths = {method.tree_nodes * size for method in methods for _, size in clocked}
    compiled = any(method.compiled for method in methods)
    return Rounding(base, texts, sorted(widths), compiled=compiled)


def make_rows(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    clocked: Clocked,
    rounding: Rounding,
    *,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Compare all tokens with those of plain decoding alone, and return the rows of bench.json.

    A batch, too, is held to plain decoding of each prompt by itself; its speed to plain decoding in
    batches of the same size.
    """
    rows = []
    for (temperature, _), runs in clocked.items():
        plain = [decoded.tokens for decoded in clocked[temperature, 1]["plain"].decoded]
        samplers = [Sampler(temperature=temperature, seed=seed + n) for n in range(len(prompts))]
        for method in (each for each in methods if each.name in runs):
            same = None
            if method.seeded or (temperature == 0 and method.lossless):
                same = compare(
                    [prompt.id for prompt in prompts],
                    [prompt.input_ids for prompt in prompts],
                    plain,
                    [decoded.tokens for decoded in runs[method.name].decoded],
                    samplers,
                    rounding=rounding,
                )
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
    return rows
