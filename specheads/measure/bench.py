"""Measure an export: plain, transformers' generate, prompt lookup and trees, in one process.

What a bench measures beside trees of heads: other heads, drafters, and transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.config import ConfigError, DecodeConfig
from specheads.decoding.accept import Acceptance
from specheads.decoding.exported import (
    Subject,
    check_drafter,
    choose_drafter,
    draft_model,
    drafter_names,
    dynamic_settings,
    exported_drafter,
    model_of,
    num_parameters,
)
from specheads.drafters.growing import DynamicDrafter, StaticDrafter, static_drafter
from specheads.drafters.lookup import LOOKUP_NGRAM, LOOKUP_TOKENS, NgramDrafter
from specheads.measure import rows as report
from specheads.measure.clock import (
    Method,
    Prompt,
    Runs,
    clock,
    drafted_method,
    hf_assisted_method,
    hf_compiled_method,
    hf_generate_method,
    hf_lookup_method,
    one_by_one_method,
    plain_method,
)
from specheads.measure.identity import Rounding, compare
from specheads.measure.render import disturbance_lines
from specheads.measure.rows import pairs
from specheads.models.checkpoint import Export, load_export
from specheads.models.draft import vocab_size
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer
from specheads.system import hardware
from specheads.system.hardware import environment
from specheads.verification.sampling import Sampler

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
        temperatures: 0 and 0.7 must be among them, see :func:`specheads.measure.rows.headline`.
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
            started: list[hardware.Sample] = []  # when the warm-up is over
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
                    **hardware.between(started[0], hardware.sample()),
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


HF_TOKENS = 4  # of transformers' assistant where our own draft's length adapts itself


def asked_for(
    decode: DecodeConfig, drafters: Sequence[str], *, has_heads: bool
) -> list[DecodeConfig]:
    """Return the settings of each drafter asked for, without the heads alone.

    Args:
        decode: the settings, its own drafter first.
        drafters: more, as in ``decode.drafter``.
        has_heads: the checkpoint is an export.

    Raises:
        ConfigError: for a drafter that is unknown, lacks its model, or cannot be made.
    """
    names = ["+".join(drafter_names(decode, has_heads=has_heads)), *drafters]
    found = [replace(decode, drafter=name) for name in dict.fromkeys(names) if name != "heads"]
    for each in found:
        check_drafter(each, has_heads=has_heads)
    return found


def other_methods(
    subject: Subject,
    asked: Sequence[DecodeConfig],
    *,
    eos: tuple[int, ...],
    max_new_tokens: int,
    lossy: Acceptance | None = None,
) -> list[Method]:
    """Return a method for each of ``asked``, and what transformers has of the kind.

    Args:
        subject: base model, tokenizer, and heads, if any.
        asked: from :func:`asked_for`.
        eos: tokens that end a text.
        max_new_tokens: limit per prompt.
        lossy: a rule that the first one is decoded by once more, where there are no heads.

    Raises:
        ConfigError: if a drafter cannot be made for this base model.
    """
    if not asked:
        return []
    base = subject.base
    decode, draft = asked[0], None
    names = {name for each in asked for name in each.drafter.split("+")}
    methods = []
    if decode.draft:
        draft = draft_model(subject, decode)
        num_tokens, alone = decode.draft_tokens or HF_TOKENS, model_of(draft)
        if vocab_size(alone) == vocab_size(base):  # transformers takes no others
            methods.append(hf_assisted_method(base, alone, num_tokens, eos, max_new_tokens))
    if names & {"lookup", "suffix"}:
        methods.append(hf_lookup_method(base, LOOKUP_TOKENS, LOOKUP_NGRAM, eos, max_new_tokens))
    chosen = [choose_drafter(subject, each, draft=draft) for each in asked]
    rules: list[tuple[str, Acceptance | None]] = [(each.name, None) for each in chosen]
    if lossy is not None and subject.export is None:
        chosen.append(chosen[0])
        rules.append((f"{chosen[0].name}_{lossy.rule}", lossy))
    for each, (name, rule) in zip(chosen, rules, strict=True):
        methods.append(
            drafted_method(
                name,
                base,
                each.drafter,
                eos,
                max_new_tokens,
                tree_nodes=each.num_nodes,
                extra_parameters=each.extra_parameters,
                acceptance=rule,
                compile=decode.compile,
                drafter_name=each.name,
            )
        )
    return methods


def load_others(subject: Subject, paths: Sequence[str]) -> dict[str, Export]:
    """Load exports of other heads on the subject's own base model, by short names.

    Args:
        subject: has heads of its own.
        paths: folders; ``runs/medusa1/export`` is called ``medusa1``.

    Raises:
        ConfigError: if one has another base model, or two would have one name.
    """
    found: dict[str, Export] = {}
    for path in paths:
        folder = Path(path)
        name = folder.resolve().parent.name if folder.name == "export" else folder.name
        if name in found:
            raise ConfigError(f"exports: {path} would be called {name}, as another one is")
        if subject.export is None:
            raise ConfigError(
                f"exports={path} are other heads beside those of checkpoint, which has none"
            )
        found[name] = load_export(folder, beside=subject.export)
    return found


def methods_of_others(
    others: Mapping[str, Export],
    *,
    eos: tuple[int, ...],
    max_new_tokens: int,
    compile: bool = False,
) -> list[Method]:
    """Return for each export its tree, called ``<name>/tree``, and that of each step, if measured.

    Args:
        others: from :func:`load_others`.
        eos: tokens that end a text.
        max_new_tokens: limit per prompt.
        compile: compile the base's passes.
    """
    methods = []
    for name, export in others.items():
        kinds = {"tree": "static"} | (
            {"tree_dynamic": "dynamic"} if dynamic_settings(export) else {}
        )
        for method, kind in kinds.items():
            drafter = exported_drafter(export, DecodeConfig(tree=kind))
            num_nodes = getattr(drafter, "num_nodes", export.tree.num_nodes)
            methods.append(
                drafted_method(
                    f"{name}/{method}",
                    export.base,
                    drafter,
                    eos,
                    max_new_tokens,
                    tree_nodes=num_nodes,
                    extra_parameters=num_parameters(export.heads),
                    compile=compile,
                )
            )
    return methods
