"""Measure ways to decode beside their baselines: ``python -m specheads.bench checkpoint=<export>``.

Writes bench.json and prints its rows. The baselines are our own loop of one token at a time,
transformers' generate, and prompt lookup. ``drafters=[suffix,heads+suffix]`` measures more beside
the heads, ``exports=[runs/medusa1/export]`` other heads on the same base; a base model without
heads is a checkpoint too. Fails (exit code 1, after writing) where outputs differ from plain
decoding's by more than rounding explains.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from specheads.config import BenchConfig, ConfigError, RunError
from specheads.config.main import entry_point, report
from specheads.system.errors import need
from specheads.system.files import check_folder
from specheads.system.terminal import note

ALWAYS = (0.0, 0.7, 1.0)  # greedy, the headline where greedy text loops, and unmodified sampling


def run(config: BenchConfig) -> None:
    """Load, measure, print, write.

    Raises:
        ConfigError: for wrong settings or files.
        RunError: at the end, if a decoding's tokens differ from plain decoding's and rounding is no
            explanation.
    """
    from specheads.decoding.exported import acceptance_rule, is_plain_model, subject_of
    from specheads.measure import bench, hits
    from specheads.measure.clock import prompt_file, prompts_of
    from specheads.measure.render import bench_text, html_page
    from specheads.measure.rows import failures, write_steps
    from specheads.models.output import output_layer

    _check_outputs(config)
    temperatures, sizes = {*config.temperatures, *ALWAYS}, {1, *config.batch_sizes}
    plan = bench.Plan(sorted(temperatures), config.repeats, sorted(sizes), config.seed)
    lists = {"temperatures": plan.temperatures, "batch_sizes": plan.batch_sizes}
    at = ", ".join(f"{key}=[{','.join(f'{x:g}' for x in of)}]" for key, of in lists.items())
    note(f"specheads: measuring {config.checkpoint} at {at}")
    decode, has_heads = config.decode, not is_plain_model(config.checkpoint)
    asked = bench.asked_for(decode, config.drafters, has_heads=has_heads)
    subject = subject_of(config, None)
    base, export = subject.base, subject.export
    limits = config.num_prompts, config.max_new_tokens
    path = prompt_file(config.prompts, config.checkpoint, "prompts.jsonl")
    prompts, digest = prompts_of(base, subject.tokenizer, path, *limits)
    rule = acceptance_rule(decode)
    lossy = None if rule.lossless else rule
    contest = bench.Contest.of(
        subject, config.max_new_tokens, compile=decode.compile, invariant=decode.invariant
    )
    methods = contest.baselines(batched=max(sizes) > 1)
    if export:
        trees = [export.tree]
        if config.tree_nodes:
            path = prompt_file("", config.checkpoint, "calibration.jsonl")
            read, _ = prompts_of(base, subject.tokenizer, path, *limits)
            texts = hits.Texts([prompt.input_ids for prompt in read], contest.eos)
            seen = hits.collect_hits(base, export.heads, output_layer(base), texts)
            trees += [hits.grow_static(seen, size) for size in config.tree_nodes]
        methods += contest.of_trees(export.heads, trees)
        methods += contest.of_export(export, decode, lossy)
    methods += contest.of_drafters(subject, asked, lossy)
    methods += contest.of_others(bench.load_others(subject, config.exports))
    settings = {
        "checkpoint": config.checkpoint,
        "tree": export.tree.to_json() if export else None,
        "drafters": [each.drafter for each in asked],
        "exports": config.exports,
        "num_prompts": len(prompts),
        "prompts_sha256": digest,
        "max_new_tokens": config.max_new_tokens,
        "base_parameters": sum(each.numel() for each in base.parameters()),
        "decode": asdict(decode),
    }
    quoted = bench.quoted_method(export, decode, asked)
    result, clocked = bench.benchmark(
        base, methods, prompts, plan, settings=settings, headline=quoted
    )
    report(Path(config.out), result, bench_text(result))  # whatever comes of what follows
    if config.steps:
        write_steps(Path(config.steps), clocked, prompts)
    if config.report:
        Path(config.report).write_text(html_page(result), encoding="utf-8")
    if beside := [path for path in (config.steps, config.report) if path]:
        print(f"wrote {', '.join(beside)}")
    if failed := failures(result):
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise RunError(f"rounding does not explain that {failed[0]}{more}")
    if config.card:
        from specheads.formats import card

        card.measured(config.checkpoint, result)
        print(f"wrote the figures into {Path(config.checkpoint) / card.CARD}")


def _check_outputs(config: BenchConfig) -> None:
    """Refuse files that could not be written, before anything is measured."""
    for name in ("out", "steps", "report"):
        path = check_folder(name, getattr(config, name))
        if getattr(config, name) and path.is_dir():
            raise ConfigError(f"{name} is {path}, which is a folder")
    if config.report:
        need("matplotlib", "plots", f"report={config.report}")
    if config.card:
        from specheads.decoding.exported import is_plain_model
        from specheads.formats import card

        if is_plain_model(config.checkpoint):
            raise ConfigError(f"card=true needs an export, {config.checkpoint} is a base model")
        card.check(config.checkpoint)


main = entry_point("bench", BenchConfig, run)


if __name__ == "__main__":
    main()
