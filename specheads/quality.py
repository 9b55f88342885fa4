"""Say what tuning or a lossy rule costs: ``python -m specheads.quality checkpoint=<export>``.

A tuned base (medusa2) is read beside its original on held-out answers: perplexity, KL, the share of
tokens at which both find the same one the likeliest, and how far greedy texts of both agree. With
``decode.acceptance=lossy_...`` texts are written by that rule and exactly, with the same seeds, and
the base judges both. Writes quality.json.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, QualityConfig
from specheads.config.main import answer, answers_json, hydra_main
from specheads.system.files import check_folder
from specheads.system.terminal import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specheads.decoding.exported import Subject
    from specheads.measure.clock import Prompt


@answers_json
def run(config: QualityConfig) -> None:
    """Load, read, decode, print, write.

    Raises:
        ConfigError: for wrong settings or files.
    """
    import json

    from specheads.decoding.exported import check_drafter, is_plain_model, load_subject
    from specheads.measure.clock import prompt_file
    from specheads.measure.quality import format_quality
    from specheads.system import hardware

    out = check_folder("out", config.out)
    name, why_none = original_of(config)
    if config.decode.acceptance != "exact":
        check_drafter(config.decode, has_heads=not is_plain_model(config.checkpoint))
    data = prompt_file(config.data, config.checkpoint, "prompts.jsonl")
    if not data.is_file():
        raise ConfigError(f"data is {data}, which is no file")
    device, dtype, threads = hardware.prepare(config.device, config.dtype, config.threads)
    subject = load_subject(config.checkpoint, base=config.base, dtype=dtype, device=device)
    original = load_original(config, name, subject) if name else None
    digest, found = _measure(config, subject, original, data)
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
        "rule": config.decode.acceptance,
        **found,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(format_quality(result))
    if found["left_out"]:
        why = ", ".join(f"{number} {reason}" for reason, number in found["left_out"].items())
        print(f"left out of the records: {why}")
    print(f"wrote {out}")
    answer(result)


def _measure(
    config: QualityConfig, subject: Subject, original: PreTrainedModel | None, data: Path
) -> tuple[str, dict[str, Any]]:
    """Read records and continue prompts of ``data``; return the prompts' sha256 and the figures."""
    from specheads.decoding.exported import acceptance_rule, choose_drafter
    from specheads.measure.clock import prompts_of
    from specheads.measure.quality import (
        greedy_agreement,
        lossy_cost,
        read_answers,
        read_documents,
        summarise,
    )
    from specheads.models.base import end_tokens

    base, tokenizer, rule = subject.base, subject.tokenizer, acceptance_rule(config.decode)
    models = [base] if original is None else [base, original]
    documents, left_out = read_documents(data, tokenizer, models, config.num_records)
    eos, limit = end_tokens(base, tokenizer), config.max_new_tokens
    prompts: list[Prompt] = []
    digest, rounds = "", (original is not None) + (not rule.lossless)
    if config.num_prompts and rounds:
        prompts, digest = prompts_of(base, tokenizer, data, config.num_prompts, limit)
    texts = lossy = None
    with progress_bar("text", total=len(documents) + rounds * len(prompts), leave=False) as bar:
        readings = read_answers(base, original, documents, bar.update)
        if original is not None and prompts:
            texts = greedy_agreement(
                base, original, prompts, max_new_tokens=limit, eos=eos, tick=bar.update
            )
        if not rule.lossless and prompts:
            lossy = lossy_cost(
                base,
                choose_drafter(subject, config.decode).drafter,
                rule,
                prompts,
                max_new_tokens=limit,
                temperature=config.temperature,
                seed=config.seed,
                eos_token_ids=eos,
                compile=config.decode.compile,
                tick=bar.update,
            )
    heldout = summarise(readings)
    return digest, {"left_out": left_out, "heldout": heldout, "texts": texts, "lossy": lossy}


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


def load_original(config: QualityConfig, name: str, subject: Subject) -> PreTrainedModel:
    """Load the model to compare with, as the base is loaded.

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
        dtype, device = subject.base.dtype, subject.base.device
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


def main() -> None:
    """Entry point."""
    hydra_main("quality", QualityConfig, run, literal=("data",))  # to Hydra a group of conf/


if __name__ == "__main__":
    main()
