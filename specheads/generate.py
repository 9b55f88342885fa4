r"""Continue prompts: ``python -m specheads.generate checkpoint=<export> prompt="def add(a, b):"``.

The checkpoint may be a base model without heads too; what drafts for it is ``decode.drafter``.

The prompt is taken as it stands, whatever characters it holds, and so is every ``stop="..."``;
without a prompt, standard input is read. The text goes to standard output, tokens and time to
standard error. ``prompts=<file>.jsonl`` decodes many in batches and writes a JSON line for each.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, GenerateConfig
from specheads.config.main import answer, answers_json, hydra_main, take_literal, take_literals
from specheads.system.terminal import harmless, wants_color, write

if TYPE_CHECKING:
    from specheads.data.schema import Record
    from specheads.decoding.generate import SpecDecoder
    from specheads.decoding.result import DecodeResult


@answers_json
def run(config: GenerateConfig) -> None:
    """Load, decode, print."""
    from specheads.data.chat import Encoder
    from specheads.decoding.exported import (
        acceptance_rule,
        check_drafter,
        choose_drafter,
        is_plain_model,
        load_subject,
    )
    from specheads.decoding.generate import SpecDecoder
    from specheads.models.base import context_length
    from specheads.models.support import tree_support
    from specheads.system import hardware

    if not config.plain:
        check_drafter(config.decode, has_heads=not is_plain_model(config.checkpoint))
    device = hardware.pick_device(config.device)
    dtype = hardware.pick_dtype(config.dtype, device)
    hardware.quiet_loading()
    hardware.pin_threads(None)
    subject = load_subject(
        config.checkpoint,
        base=config.base,
        dtype=dtype,
        device=device,
        device_map=config.device_map or None,
    )
    base, tokenizer = subject.base, subject.tokenizer
    if tree_support(base).kind == "chain":
        config = replace(config, batch_size=1)  # its rows can only be decoded alone
    records = _records(config, has_template=tokenizer.chat_template is not None)
    encode = Encoder(tokenizer).prompt
    prompts = [encode(record) for record in records]
    context = context_length(base) or 1 << 30
    for record, prompt in zip(records, prompts, strict=True):
        if len(prompt) >= context:
            name = f" {record['id']}" if config.prompts else ""
            raise ConfigError(
                f"the prompt{name} is {len(prompt)} tokens, but the base model's context is"
                f" {context}"
            )
    decoder = SpecDecoder(
        base,
        None if config.plain else choose_drafter(subject, config.decode).drafter,
        tokenizer=tokenizer,
        acceptance=acceptance_rule(config.decode),
        compile=config.decode.compile,
    )
    if config.prompts:
        _run_batches(config, decoder, records, prompts, context)
    else:
        _run_one(config, decoder, prompts[0], context)


def _run_one(
    config: GenerateConfig, decoder: SpecDecoder, prompt: Sequence[int], context: int
) -> None:
    from specheads.decoding.conversation import StepPrinter

    assert decoder.tokenizer is not None
    color = wants_color(config.color, sys.stdout)
    # with json=true the text that is to be exact stands in the object
    safe = config.json or sys.stdout.isatty()
    printer = StepPrinter(decoder.tokenizer, write, color=color, safe=safe)
    limit = min(config.max_new_tokens, context - len(prompt))
    start = time.perf_counter()
    result = _decode(config, decoder, [prompt], limit, config.seed, on_tokens=printer)
    printer.finish()
    seconds = time.perf_counter() - start
    write("\n")
    num_new = len(result.new_tokens)
    print(
        f"{num_new} tokens in {result.num_steps} steps after the prompt: "
        f"{result.accept_length:.2f} tokens per step, {num_new / seconds:.0f} tokens/s"
        + (f", {result.num_replay_passes} passes for near-ties" if result.num_replays else "")
        + ("" if result.finished or limit == config.max_new_tokens else "; the context is full"),
        file=sys.stderr,
    )
    answer(
        {
            "text": printer.text,
            "new_tokens": result.new_tokens,
            "num_prompt_tokens": len(prompt),
            "num_steps": result.num_steps,
            "accept_length": result.accept_length,
            "accept_lengths": result.accept_lengths,
            "finished": result.finished,
            "seconds": seconds,
            "tokens_per_second": num_new / seconds,
        }
    )


def _run_batches(
    config: GenerateConfig,
    decoder: SpecDecoder,
    records: Sequence[Record],
    prompts: Sequence[Sequence[int]],
    context: int,
) -> None:
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    start = time.perf_counter()
    lengths: list[int] = []
    num_new = 0
    lines: list[dict[str, Any]] = []
    for batch, limit in _batches(config, prompts, context):
        rows = [prompts[i] for i in batch]
        result = _decode(config, decoder, rows, limit, config.seed + batch[0])
        for i, row in zip(batch, result.rows, strict=True):
            lengths += row.accept_lengths
            num_new += len(row.new_tokens)
            line = {
                "id": records[i]["id"],
                "text": tokenizer.decode(row.new_tokens, skip_special_tokens=True),
                "num_tokens": len(row.new_tokens),
                "num_steps": len(row.accept_lengths),
                "finished": row.finished,
            }
            text = json.dumps(line, ensure_ascii=False) + "\n"
            write(harmless(text) if config.json or sys.stdout.isatty() else text)
            lines.append({**line, "new_tokens": row.new_tokens})
    seconds = time.perf_counter() - start
    print(
        f"{num_new} tokens for {len(prompts)} prompts in batches of {config.batch_size}: "
        f"{sum(lengths) / max(1, len(lengths)):.2f} tokens per step and prompt, "
        f"{num_new / seconds:.0f} tokens/s",
        file=sys.stderr,
    )
    answer(
        {
            "rows": lines,
            "accept_length": sum(lengths) / max(1, len(lengths)),
            "seconds": seconds,
            "tokens_per_second": num_new / seconds,
        }
    )


def _batches(
    config: GenerateConfig, prompts: Sequence[Sequence[int]], context: int
) -> Iterator[tuple[list[int], int]]:
    """Neighbours, as their seeds follow each other, that may get the same number of tokens."""
    limits = [min(config.max_new_tokens, context - len(prompt)) for prompt in prompts]
    for limit, group in itertools.groupby(range(len(prompts)), limits.__getitem__):
        members = list(group)
        for i in range(0, len(members), config.batch_size):
            yield members[i : i + config.batch_size], limit


def _decode(
    config: GenerateConfig,
    decoder: SpecDecoder,
    prompts: Sequence[Sequence[int]],
    limit: int,
    seed: int,
    **more: Any,
) -> DecodeResult:
    from specheads.decoding.generate import decode_arguments

    assert decoder.tokenizer is not None
    return decoder.generate(
        max_new_tokens=limit,
        stop_strings=config.stop or None,
        seed=seed,
        **decode_arguments(config, decoder.base, decoder.tokenizer, prompts),
        **more,
    )


def _records(config: GenerateConfig, *, has_template: bool) -> list[Record]:
    from specheads.data.load import read_jsonl

    if config.prompts:
        return read_jsonl(config.prompts)
    prompt = config.prompt or _read_prompt()
    record: Record = {"id": "prompt", "kind": "prompt"}
    if config.raw or not has_template:
        record["text"] = prompt
    else:
        record["messages"] = [{"role": "user", "content": prompt}]
    return [record]


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("prompt, then Ctrl-D:", file=sys.stderr)
    prompt = sys.stdin.read()
    if not prompt.strip():
        raise ConfigError('no prompt given: prompt="..." or text on standard input')
    return prompt


def main() -> None:
    """Entry point."""
    sys.argv[1:], prompt = take_literal(sys.argv[1:], "prompt")
    sys.argv[1:], stops = take_literals(sys.argv[1:], "stop")

    def task(config: GenerateConfig) -> None:
        if prompt is not None:
            config = replace(config, prompt=prompt)
        run(replace(config, stop=stops) if stops else config)

    hydra_main("generate", GenerateConfig, task)


if __name__ == "__main__":
    main()
