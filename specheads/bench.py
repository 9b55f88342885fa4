"""Measure ways to decode beside their baselines: ``python -m specheads.bench checkpoint=<export>``.

Writes bench.json and prints its rows. The baselines are our own loop of one token at a time,
transformers' generate, and prompt lookup. ``drafters=[suffix,heads+suffix]`` measures more beside
the heads, ``exports=[runs/medusa1/export]`` other heads on the same base; a base model without
heads is a checkpoint too. Fails (exit code 1, after writing) where outputs differ from plain
decoding's by more than rounding explains.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import BenchConfig, ConfigError, RunError
from specheads.config.main import answer, answers_json, hydra_main
from specheads.measure.clock import max_prompt_length, prompt_file
from specheads.system.terminal import progress_bar

if TYPE_CHECKING:
    from specheads.attention.tree import Tree
    from specheads.config import DecodeConfig
    from specheads.drafters.growing import DynamicDrafter
    from specheads.measure.clock import Runs
    from specheads.models.checkpoint import Export

ALWAYS = (0.0, 0.7, 1.0)  # greedy, the headline where greedy text loops, and unmodified sampling


@answers_json
def run(config: BenchConfig) -> None:
    """Load, measure, print, write.

    Raises:
        ConfigError: for wrong settings or files.
        RunError: at the end, if a decoding's tokens differ from plain decoding's and rounding is no
            explanation.
    """
    import json

    from specheads.decoding.exported import acceptance_rule, is_plain_model, load_subject
    from specheads.measure.bench import (
        asked_for,
        benchmark,
        load_others,
        make_methods,
        methods_of_others,
        other_methods,
    )
    from specheads.measure.clock import read_prompts
    from specheads.measure.hits import accuracy_of
    from specheads.measure.rows import failures, write_steps
    from specheads.models.base import end_tokens
    from specheads.models.output import output_layer
    from specheads.system import hardware

    out = Path(config.out)
    _check_outputs(config)
    temperatures = sorted({*config.temperatures, *ALWAYS})
    batch_sizes = sorted({1, *config.batch_sizes})
    print(_announcement(config, temperatures, batch_sizes), file=sys.stderr, flush=True)
    device, dtype, _ = hardware.prepare(config.device, config.dtype, config.threads)
    has_heads = not is_plain_model(config.checkpoint)
    asked = asked_for(config.decode, config.drafters, has_heads=has_heads)
    subject = load_subject(config.checkpoint, base=config.base, dtype=dtype, device=device)
    base, export = subject.base, subject.export
    prompts, digest = read_prompts(
        prompt_file(config.prompts, config.checkpoint, "prompts.jsonl"),
        subject.tokenizer,
        config.num_prompts,
        max_length=max_prompt_length(subject.base, config.max_new_tokens),
        device=device,
    )
    eos = end_tokens(base, subject.tokenizer)
    rule = acceptance_rule(config.decode)
    lossy = None if rule.lossless else rule
    methods = make_methods(
        base,
        export.heads if export else None,
        output_layer(base) if export else None,
        [export.tree, *_other_trees(export, config, eos)] if export else [],
        eos=eos,
        pad=subject.tokenizer.pad_token_id,
        max_new_tokens=config.max_new_tokens,
        dynamic=_dynamic(export, config) if export else None,
        lossy=lossy,
        compile=config.decode.compile,
        batched=max(config.batch_sizes, default=1) > 1,
    )
    methods += other_methods(
        subject, asked, eos=eos, max_new_tokens=config.max_new_tokens, lossy=lossy
    )
    others = load_others(subject, config.exports)
    methods += methods_of_others(
        others,
        eos=eos,
        max_new_tokens=config.max_new_tokens,
        compile=config.decode.compile,
    )
    headline = _headline(config, asked, export)
    per_text = sum(size > 1 or not method.in_batches for size in batch_sizes for method in methods)
    total = per_text * len(prompts) * len(temperatures) * config.repeats
    clocked: dict[tuple[float, int], dict[str, Runs]] = {}
    with progress_bar("text", total=total) as bar:
        result = benchmark(
            base,
            methods,
            prompts,
            temperatures=temperatures,
            repeats=config.repeats,
            batch_sizes=batch_sizes,
            seed=config.seed,
            settings={
                "checkpoint": config.checkpoint,
                "tree": export.tree.to_json() if export else None,
                "drafters": [each.drafter for each in asked],
                "exports": config.exports,
                "num_prompts": len(prompts),
                "prompts_sha256": digest,
                "max_new_tokens": config.max_new_tokens,
                "base_parameters": sum(each.numel() for each in base.parameters()),
                "decode": asdict(config.decode),
            },
            headline=headline,
            progress=bar.set_description,
            tick=bar.update,
            clocked=clocked,
        )
    out.write_text(json.dumps(result, indent=1) + "\n")  # whatever comes of what follows
    _print(result)
    if config.steps:
        write_steps(Path(config.steps), clocked, prompts)
    if export:
        result["heads"] = accuracy_of({"tree": export, **others}, prompts, clocked)
        out.write_text(json.dumps(result, indent=1) + "\n")
    _write_pages(config, result)
    answer(result)
    if failed := failures(result):
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise RunError(f"rounding does not explain that {failed[0]}{more}")
    if config.card:
        from specheads.formats import card

        card.measured(config.checkpoint, result)
        print(f"wrote the figures into {Path(config.checkpoint) / card.CARD}")


def _announcement(
    config: BenchConfig, temperatures: Sequence[float], batch_sizes: Sequence[int]
) -> str:
    """Return the line at the start; it tells what is measured without having been asked for."""

    def listed(name: str, values: Sequence[float]) -> str:
        return f"{name}=[{','.join(f'{value:g}' for value in values)}]"

    both = listed("temperatures", temperatures), listed("batch_sizes", batch_sizes)
    always = []
    if more := [each for each in temperatures if each not in config.temperatures]:
        always.append(listed("temperatures", more))
    if 1 not in config.batch_sizes:
        always.append(listed("batch_sizes", [1]))
    unasked = f"; every bench measures {' and '.join(always)}" if always else ""
    return f"specheads: measuring {config.checkpoint} at {', '.join(both)}{unasked}"


def _check_outputs(config: BenchConfig) -> None:
    """Refuse files that could not be written, before anything is measured."""
    from specheads.measure.plots import check_plots

    for name in ("out", "steps", "markdown", "report"):
        path = Path(getattr(config, name))
        if not path.parent.is_dir():
            raise ConfigError(f"{name} is {path}, but there is no folder {path.parent}")
        if getattr(config, name) and path.is_dir():
            raise ConfigError(f"{name} is {path}, which is a folder")
    if config.report:
        check_plots("report", config.report)
    if config.card:
        from specheads.decoding.exported import is_plain_model
        from specheads.formats import card

        if is_plain_model(config.checkpoint):
            raise ConfigError(f"card=true needs an export, {config.checkpoint} is a base model")
        card.check(config.checkpoint)


def _print(result: dict[str, Any]) -> None:
    """Print the figures as tables and sentences."""
    from specheads.measure.render import (
        disturbance_lines,
        format_batches,
        format_divergences,
        format_kinds,
        format_table,
        headline_line,
    )
    from specheads.measure.rows import format_pairs

    print(format_table(result["rows"]))
    print("\nAccept length (speed-up) per kind of prompt")
    print(format_kinds(result["rows"]))
    if len(result["settings"]["batch_sizes"]) > 1:
        print("\nTokens/s (speed-up over plain decoding in batches of that size)")
        print(format_batches(result["rows"]))
    if result["pairs"]:
        print(f"\nSide by side (95%)\n{format_pairs(result['pairs'])}")
    if divergences := format_divergences(result):
        print(f"\n{divergences}")
    print(f"\n{headline_line(result)}")
    for line in disturbance_lines(result):
        print(line)


def _write_pages(config: BenchConfig, result: dict[str, Any]) -> None:
    """Write the pages that were asked for, and say what was written."""
    from specheads.measure.render import html_page, markdown_page

    if config.markdown:
        Path(config.markdown).write_text(markdown_page(result), encoding="utf-8")
    if config.report:
        Path(config.report).write_text(html_page(result), encoding="utf-8")
    written = [config.out, config.steps, config.markdown, config.report]
    print(f"wrote {', '.join(path for path in written if path)}")


def _headline(config: BenchConfig, asked: Sequence[DecodeConfig], export: Export | None) -> str:
    """Return the method to quote: what generate would decode with, given the same settings."""
    from specheads.decoding.exported import tree_kind

    if export is None or config.decode.draft or config.decode.drafter not in ("auto", "heads"):
        return asked[0].drafter
    return "tree_dynamic" if tree_kind(export, config.decode) == "dynamic" else "tree"


def _dynamic(export: Export, config: BenchConfig) -> DynamicDrafter | None:
    """Return the drafter of trees grown at each step, where its size is given or was measured."""
    from specheads.decoding.exported import dynamic_settings, exported_drafter
    from specheads.drafters.growing import DynamicDrafter

    asked = config.decode.tree == "dynamic" or config.decode.num_nodes
    if not asked and not dynamic_settings(export):
        return None
    drafter = exported_drafter(export, replace(config.decode, tree="dynamic"))
    assert isinstance(drafter, DynamicDrafter)
    return drafter


def _other_trees(export: Export, config: BenchConfig, eos: tuple[int, ...]) -> list[Tree]:
    """Grow the sizes asked for beside the export's tree, on the calibration prompts."""
    if not config.tree_nodes:
        return []
    from specheads.measure.clock import read_prompts
    from specheads.measure.hits import collect_hits, grow_static
    from specheads.models.output import output_layer

    prompts, _ = read_prompts(
        prompt_file("", config.checkpoint, "calibration.jsonl"),
        export.tokenizer,
        config.num_prompts,
        max_length=max_prompt_length(export.base, config.max_new_tokens),
        device=export.base.device,
    )
    hits = collect_hits(
        export.base,
        export.heads,
        output_layer(export.base),
        [prompt.input_ids for prompt in prompts],
        eos_token_ids=eos,
    )
    return [grow_static(hits, size) for size in config.tree_nodes]


def main() -> None:
    """Entry point."""
    hydra_main("bench", BenchConfig, run)


if __name__ == "__main__":
    main()
