r"""Continue prompts: ``python -m specheads.generate checkpoint=<export> prompt="def add(a, b):"``.

The checkpoint may be a base model without heads too; what drafts for it is ``decode.drafter``.

The prompt is taken as it stands, whatever characters it holds, and so is every ``stop="..."``;
without a prompt, standard input is read. The text goes to standard output, tokens and time to
standard error. ``prompts=<file>.jsonl`` decodes many in batches and writes a JSON line for each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, GenerateConfig
from specheads.config.main import answer, entry_point
from specheads.system.terminal import harmless, note, wants_color, write

if TYPE_CHECKING:
    from specheads.data.schema import Record
    from specheads.decoding.generate import SpecDecoder
    from specheads.decoding.result import DecodedRow

Tokens = Sequence[int]


def run(config: GenerateConfig) -> None:
    """Load, decode, print."""
    from specheads.data.chat import Encoder
    from specheads.decoding.exported import choose_drafter, subject_of
    from specheads.decoding.generate import SpecDecoder, room

    subject = subject_of(config, None if config.plain else config.decode)
    records = _records(config, has_template=subject.tokenizer.chat_template is not None)
    prompts = list(map(Encoder(subject.tokenizer).prompt, records))
    names = [record["id"] for record in records]
    for name, prompt in zip(names, prompts, strict=True):
        room(subject.base, prompt, f"the prompt {name}" if config.prompts else "the prompt")
    drafter = None if config.plain else choose_drafter(subject, config.decode).drafter
    decoder = SpecDecoder.of(subject, config.decode, drafter)
    if config.prompts:
        answer(_decode_all(config, decoder, names, prompts))
    else:
        answer(_decode_one(config, decoder, prompts[0]))


def _decode_one(config: GenerateConfig, decoder: SpecDecoder, prompt: Tokens) -> dict[str, Any]:
    """Show the text of one prompt as it appears; return what ``json=true`` answers."""
    from specheads.decoding.conversation import StepPrinter
    from specheads.decoding.generate import decode_prompts, room

    assert decoder.tokenizer is not None
    color = wants_color(config.color, sys.stdout)
    # with json=true the text that is to be exact stands in the object
    safe = config.json or sys.stdout.isatty()
    printer = StepPrinter(decoder.tokenizer, write, color=color, safe=safe)
    limit = min(config.max_new_tokens, room(decoder.base, prompt))
    start, stop = time.perf_counter(), config.stop or None
    result = decode_prompts(decoder, config, [prompt], limit, stop_strings=stop, on_tokens=printer)
    printer.finish()
    seconds = time.perf_counter() - start
    rate = len(result.new_tokens) / seconds
    write("\n")
    note(
        f"{len(result.new_tokens)} tokens in {result.num_steps} steps after the prompt: "
        f"{result.accept_length:.2f} tokens per step, {rate:.0f} tokens/s"
        + (f", {result.num_replay_passes} passes for near-ties" if result.num_replays else "")
        + said_of(decoder, result.rows)
        + ("" if result.finished or limit == config.max_new_tokens else "; the context is full")
    )
    names = ("new_tokens", "num_steps", "accept_length", "accept_lengths", "finished")
    found = {name: getattr(result, name) for name in names}
    found |= {"seconds": seconds, "tokens_per_second": rate}
    return {"text": printer.text.shown, "num_prompt_tokens": len(prompt), **found}


def _decode_all(
    config: GenerateConfig, decoder: SpecDecoder, names: Sequence[str], prompts: Sequence[Tokens]
) -> dict[str, Any]:
    """Write a line of JSON per prompt; return what ``json=true`` answers."""
    from specheads.decoding.generate import decode_many
    from specheads.measure.rows import mean_accept_length

    assert decoder.tokenizer is not None
    start, size, limit = time.perf_counter(), config.batch_size, config.max_new_tokens
    rows: list[dict[str, Any]] = []
    stop = config.stop or None
    decoded: list[DecodedRow] = []
    done = decode_many(decoder, config, prompts, limit, size, stop_strings=stop)
    for name, row in zip(names, done, strict=True):
        decoded.append(row)
        line = {
            "id": name,
            "text": decoder.tokenizer.decode(row.new_tokens, skip_special_tokens=True),
            "num_tokens": len(row.new_tokens),
            "num_steps": len(row.accept_lengths),
            "finished": row.finished,
        }
        text = json.dumps(line, ensure_ascii=False) + "\n"
        write(harmless(text) if config.json or sys.stdout.isatty() else text)
        rows.append({**line, "new_tokens": row.new_tokens})
    seconds = time.perf_counter() - start
    num_new = sum(row["num_tokens"] for row in rows)
    length, rate = mean_accept_length([row.accept_lengths for row in decoded]), num_new / seconds
    note(
        f"{num_new} tokens for {len(prompts)} prompts in batches of up to {size}: "
        f"{length:.2f} tokens per step and prompt, {rate:.0f} tokens/s{said_of(decoder, decoded)}"
    )
    return {"rows": rows, "accept_length": length, "seconds": seconds, "tokens_per_second": rate}


def said_of(decoder: SpecDecoder, rows: Sequence[DecodedRow]) -> str:
    """Return what is to be said of texts that a lossy rule wrote; empty of others."""
    from specheads.decoding.result import divergence_said, mean_divergence

    label = decoder.acceptance.label if decoder.acceptance and decoder.drafter else ""
    return label and f"; {label}: {divergence_said(mean_divergence(rows))}"


def _records(config: GenerateConfig, *, has_template: bool) -> list[Record]:
    """Return the prompts of the file, or the one that was given or is typed."""
    from specheads.data.load import read_jsonl

    if config.prompts:
        return read_jsonl(config.prompts)
    if not (prompt := config.prompt):
        if sys.stdin.isatty():
            note("prompt, then Ctrl-D:")
        prompt = sys.stdin.read()
        if not prompt.strip():
            raise ConfigError('no prompt given: prompt="..." or text on standard input')
    if config.raw or not has_template:
        return [{"id": "prompt", "kind": "prompt", "text": prompt}]
    return [{"id": "prompt", "kind": "prompt", "messages": [{"role": "user", "content": prompt}]}]


main = entry_point("generate", GenerateConfig, run, literal=("prompt", "stop"))


if __name__ == "__main__":
    main()
