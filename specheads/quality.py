"""Say what tuning or a lossy rule costs: ``python -m specheads.quality checkpoint=<export>``.

A tuned base (medusa2) is read beside its original on held-out answers: perplexity, KL, the share of
tokens at which both find the same one the likeliest, and how far greedy texts of both agree. With
``decode.acceptance=lossy_...`` texts are written by that rule and exactly, with the same seeds, and
the base judges both. Writes quality.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, QualityConfig
from specheads.config.main import answer as answer_json
from specheads.config.main import answers_json, hydra_main, take_literal
from specheads.measure.clock import max_prompt_length, prompt_file
from specheads.system.terminal import progress_bar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specheads.data.chat import Encoded
    from specheads.decoding.exported import Subject
    from specheads.measure.clock import Prompt


@answers_json
def run(config: QualityConfig) -> None:
    """Load, read, decode, print, write.

    Raises:
        ConfigError: for wrong settings or files.
    """
    import json

    from specheads.decoding.exported import (
        acceptance_rule,
        check_drafter,
        is_plain_model,
        load_subject,
    )
    from specheads.measure.clock import read_prompts
    from specheads.measure.quality import (
        format_quality,
        greedy_agreement,
        read_answers,
        summarise,
    )
    from specheads.models.base import end_tokens
    from specheads.system import hardware

    out = Path(config.out)
    if not out.parent.is_dir():
        raise ConfigError(f"out is {out}, but there is no folder {out.parent}")
    name, why_none = original_of(config)
    rule = acceptance_rule(config.decode)
    if not rule.lossless:
        check_drafter(config.decode, has_heads=not is_plain_model(config.checkpoint))
    data = prompt_file(config.data, config.checkpoint, "prompts.jsonl")
    if not data.is_file():
        raise ConfigError(f"data is {data}, which is no file")
    threads = hardware.pin_threads(config.threads)
    device = hardware.pick_device(config.device)
    dtype = hardware.pick_dtype(config.dtype, device)
    hardware.quiet_loading()
    subject = load_subject(config.checkpoint, base=config.base or None, dtype=dtype, device=device)
    original = load_original(config, name, subject, dtype, device) if name else None
    documents, left_out = read_documents(data, subject, original, config.num_records)
    eos = end_tokens(subject.base, subject.tokenizer)
    prompts: list[Prompt] = []
    digest = ""
    if config.num_prompts and (original is not None or not rule.lossless):
        prompts, digest = read_prompts(
            data,
            subject.tokenizer,
            config.num_prompts,
            max_length=max_prompt_length(subject.base, config.max_new_tokens),
            device=device,
        )
    rounds = (original is not None) + (not rule.lossless)
    with progress_bar("text", total=len(documents) + rounds * len(prompts), leave=False) as bar:
        readings = read_answers(subject.base, original, documents, bar.update)
        texts = None
        if original is not None and prompts:
            texts = greedy_agreement(
                subject.base,
                original,
                prompts,
                max_new_tokens=config.max_new_tokens,
                eos=eos,
                tick=bar.update,
            )
        lossy = None
        if not rule.lossless and prompts:
            lossy = _lossy(config, subject, prompts, eos, bar.update)
    result: dict[str, Any] = {
        "environment": hardware.environment(device),
        "settings": {
            **asdict(config),
            # the embedded file and an export's own lie elsewhere on every machine
            "data": config.data or f"{data.parent.name}/{data.name}",
            "dtype": str(dtype).removeprefix("torch."),
            "threads": threads,
            "prompts_sha256": digest,
        },
        "original": name or None,
        "why_no_original": why_none,
        "rule": rule.rule,
        "left_out": left_out,
        "heldout": summarise(readings),
        "texts": texts,
        "lossy": lossy,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(format_quality(result))
    if left_out:
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        print(f"left out of the records: {why}")
    print(f"wrote {out}")
    answer_json(result)


def original_of(config: QualityConfig) -> tuple[str, str]:
    """Return the name of the model to compare with, or an empty one and why there is none.

    Raises:
        ConfigError: if the export cannot be read.
    """
    from specheads.decoding.exported import is_plain_model
    from specheads.models.checkpoint import read_config

    if config.original:
        return config.original, ""
    if is_plain_model(config.checkpoint):
        return "", "no original to compare with: original=<model> names one"
    base = read_config(config.checkpoint)["base"]
    if not base["tuned"]:
        return "", "the base was not tuned: exact decoding gives the original's own output"
    if not base["name"]:
        return "", "the base was trained from scratch: there is no original"
    return str(base["name"]), ""


def load_original(
    config: QualityConfig,
    name: str,
    subject: Subject,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Load the model to compare with.

    Raises:
        ConfigError: if it cannot be loaded, has another tokenizer, or its recorded weights have
            changed.
    """
    from specheads.models.base import load_base_model, load_tokenizer
    from specheads.models.draft import check_same_tokenizer
    from specheads.models.names import base_digest, check_recorded

    recorded: dict[str, Any] = subject.export.config["base"] if subject.export else {}
    revision = None
    where = f"original={name}"
    try:
        if not config.original:  # written by whoever made the export
            check_recorded(name, recorded["revision"])
            revision = recorded["revision"]
        check_same_tokenizer(subject.tokenizer, load_tokenizer(name, revision=revision), where)
        original = load_base_model(name, revision=revision, dtype=dtype, device=device, attn="auto")
    except ConfigError as error:
        if config.original:
            raise
        raise ConfigError(
            f"{config.checkpoint} was tuned from {name}: {error}; original=<model> says where it is"
        ) from None
    if not config.original:
        found = base_digest(name, revision=revision)
        if found != recorded["digest"]:
            raise ConfigError(
                f"{config.checkpoint} was tuned from {name} with digest {recorded['digest'][:12]},"
                f" now it has {found[:12]}; original={name} compares all the same"
            )
    return original


def read_documents(
    data: Path, subject: Subject, original: PreTrainedModel | None, num_records: int
) -> tuple[list[Encoded], dict[str, int]]:
    """Return the records as both models can read them, and how many cannot be, by reason.

    Raises:
        ConfigError: if the file is wrong, or no record is left.
    """
    from specheads.data.chat import Encoder
    from specheads.data.load import read_jsonl
    from specheads.measure.quality import answer_places
    from specheads.models.base import context_length

    models = [subject.base, *([original] if original is not None else [])]
    context = min(context_length(model) or 1 << 30 for model in models)
    encoder = Encoder(subject.tokenizer)
    documents, left_out = [], {"too long for the context": 0, "without an answer": 0}
    for record in _in_turn(read_jsonl(data)):
        document = encoder(record)
        if len(document.input_ids) > context:
            left_out["too long for the context"] += 1
        elif not answer_places(document):
            left_out["without an answer"] += 1
        else:
            documents.append(document)
        if num_records and len(documents) == num_records:
            break
    left_out = {reason: number for reason, number in left_out.items() if number}
    if not documents:
        why = ", ".join(f"{number} {reason}" for reason, number in left_out.items())
        raise ConfigError(f"{data} holds no record to read: {why}")
    return documents, left_out


def _in_turn(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records kind after kind in turn, so that the first few are of all kinds."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    longest = max(map(len, by_kind.values()))
    return [of[i] for i in range(longest) for of in by_kind.values() if i < len(of)]


def _lossy(
    config: QualityConfig,
    subject: Subject,
    prompts: Sequence[Prompt],
    eos: tuple[int, ...],
    tick: Callable[[], object],
) -> dict[str, Any]:
    from specheads.decoding.exported import acceptance_rule, choose_drafter
    from specheads.measure.quality import lossy_cost

    return lossy_cost(
        subject.base,
        choose_drafter(subject, config.decode).drafter,
        acceptance_rule(config.decode),
        prompts,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
        eos_token_ids=eos,
        compile=config.decode.compile,
        tick=tick,
    )


def main() -> None:
    """Entry point."""
    sys.argv[1:], data = take_literal(sys.argv[1:], "data")  # to Hydra a group of conf/

    def task(config: QualityConfig) -> None:
        run(config if data is None else replace(config, data=data))

    hydra_main("quality", QualityConfig, task)


if __name__ == "__main__":
    main()
