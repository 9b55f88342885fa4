"""Measure an export: plain, transformers' generate, prompt lookup and trees, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.config import ConfigError, DecodeConfig
from specheads.decoding.exported import (
    Subject,
    check_drafter,
    drafter_names,
    tree_kind,
)
from specheads.measure import rows as report
from specheads.measure.clock import (
    Method,
    Prompt,
    clock,
)
from specheads.measure.hits import Texts, collect_hits, grow_static
from specheads.measure.identity import Rounding, compare
from specheads.measure.render import disturbance_lines
from specheads.measure.rows import Clocked
from specheads.models.checkpoint import Export, load_export
from specheads.models.output import output_layer
from specheads.system import hardware
from specheads.verification.sampling import Sampler


@dataclass(frozen=True)
class Plan:
    """What is clocked.

    Attributes:
        temperatures: 0 and 0.7 must be among them, see :func:`specheads.measure.rows.headline`.
        repeats: clocked rounds.
        batch_sizes: prompts decoded together; 1 must be among them.
        seed: of the sampling.
    """

    temperatures: Sequence[float]
    repeats: int
    batch_sizes: Sequence[int] = (1,)
    seed: int = 0


def benchmark(
    base: PreTrainedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    settings: Mapping[str, Any] | None = None,
    headline: str = "tree",
    bar: Any = None,
) -> tuple[dict[str, Any], Clocked]:
    """Clock ``methods`` at every temperature and batch size.

    Args:
        base: base model.
        methods: compared.
        prompts: decoded.
        plan: temperatures, batch sizes and repeats.
        settings: more to record beside the figures.
        headline: the method whose figures are to be quoted.
        bar: told which temperature and batch size comes next (``set_description``), and of every
            decoded prompt (``update``).

    Returns:
        The content of bench.json; and the runs themselves.
    """
    before = hardware.environment(base.device)
    clocked = {}
    watched: list[dict[str, Any]] = []
    for temperature in plan.temperatures:
        for size in plan.batch_sizes:
            if bar is not None:
                bar.set_description(f"T={temperature:g}, batch {size}")
            runs = clock(
                methods,
                prompts,
                temperature,
                repeats=plan.repeats,
                batch_size=size,
                seed=plan.seed,
                tick=bar.update if bar is not None else lambda: None,
                prefill=True,
            )
            clocked[temperature, size] = runs
            watched.append(report.seen_beside(runs, temperature))
    # only now: the float32 copy that a divergence asks for would count as memory of the methods
    rounding = rounding_of(base, methods, prompts, clocked)
    rows = make_rows(base, methods, prompts, clocked, rounding, seed=plan.seed)
    result: dict[str, Any] = {
        "environment": {**before, **report.disturbance(watched)},
        "settings": {
            **(settings or {}),
            "temperatures": list(plan.temperatures),
            "batch_sizes": list(plan.batch_sizes),
            "repeats": plan.repeats,
            "seed": plan.seed,
            "threads": torch.get_num_threads(),
            "noise": asdict(rounding.noise) if any(row["divergences"] for row in rows) else None,
        },
        "headline": report.headline(rows, headline),
        "crossover": report.crossovers(rows),
        "pairs": report.pairs(clocked),
        "rows": rows,
    }
    return result | {"warnings": disturbance_lines(result)}, clocked


def rounding_of(
    base: PreTrainedModel, methods: Sequence[Method], prompts: Sequence[Prompt], clocked: Clocked
) -> Rounding:
    """Return what will measure, if asked, how rounding moves logits along the plain texts."""
    texts = [
        (prompt.input_ids, decoded.new_tokens)
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
    names, ids = ([getattr(prompt, key) for prompt in prompts] for key in ("id", "input_ids"))
    dtype, device = str(base.dtype).removeprefix("torch."), base.device.type
    rows = []
    for (temperature, _), runs in clocked.items():
        plain = [decoded.new_tokens for decoded in clocked[temperature, 1]["plain"].decoded]
        samplers = [Sampler(temperature=temperature, seed=seed + n) for n in range(len(prompts))]
        for method in (each for each in methods if each.name in runs):
            same = None
            if method.seeded or (temperature == 0 and method.lossless):
                texts = [decoded.new_tokens for decoded in runs[method.name].decoded]
                same = compare(names, ids, plain, texts, samplers, rounding=rounding)
            rows.append(
                report.make_row(
                    method, runs, prompts, temperature, same, dtype=dtype, device=device
                )
            )
    return rows


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


def quoted_method(
    export: Export | None, decode: DecodeConfig, asked: Sequence[DecodeConfig]
) -> str:
    """Return the method to quote: what generate would decode with, given the same settings."""
    if export is None or decode.draft or decode.drafter not in ("auto", "heads"):
        return asked[0].drafter
    return "tree_dynamic" if tree_kind(export, decode) == "dynamic" else "tree"


def grown_trees(
    export: Export, prompts: Sequence[Prompt], eos: tuple[int, ...], sizes: Sequence[int]
) -> list[Tree]:
    """Grow static trees of some sizes for an export's heads, on calibration prompts."""
    texts = Texts([prompt.input_ids for prompt in prompts], eos)
    hits = collect_hits(export.base, export.heads, output_layer(export.base), texts)
    return [grow_static(hits, size) for size in sizes]


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
