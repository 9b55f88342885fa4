"""Say what tuning or a lossy rule costs: ``python -m specheads.quality checkpoint=<export>``.

A tuned base (medusa2) is read beside its original on held-out answers: perplexity, KL, the share of
tokens at which both find the same one the likeliest, and how far greedy texts of both agree. With
``decode.acceptance=lossy_...`` texts are written by that rule and exactly, with the same seeds, and
the base judges both. Writes quality.json.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, QualityConfig
from specheads.config.main import entry_point, report
from specheads.system.files import check_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specheads.decoding.exported import Subject


def run(config: QualityConfig) -> None:
    """Load, read, decode, print, write.

    Raises:
        ConfigError: for wrong settings or files.
    """
    from specheads.decoding.exported import acceptance_rule, choose_drafter, subject_of
    from specheads.measure import quality
    from specheads.measure.clock import prompt_file, prompts_of
    from specheads.models.base import end_tokens
    from specheads.system.hardware import environment

    out = check_folder("out", config.out)
    name, why_none = original_of(config)
    rule = acceptance_rule(config.decode)
    data = prompt_file(config.data, config.checkpoint, "prompts.jsonl")
    if not data.is_file():
        raise ConfigError(f"data is {data}, which is no file")
    subject = subject_of(config, None if rule.lossless else config.decode)
    base, tokenizer, limit = subject.base, subject.tokenizer, config.max_new_tokens
    original = load_original(config, name, subject) if name else None
    models = [base] if original is None else [base, original]
    documents, left_out = quality.read_documents(data, tokenizer, models, config.num_records)
    number = 0 if original is None and rule.lossless else config.num_prompts
    prompts, digest = prompts_of(base, tokenizer, data, number, limit) if number else ([], "")
    texts = lossy = None
    readings = quality.read_answers(base, original, documents)
    how: dict[str, Any] = {"max_new_tokens": limit, "eos_token_ids": end_tokens(base, tokenizer)}
    if original is not None and prompts:
        texts = quality.greedy_agreement(base, original, prompts, **how)
    if not rule.lossless and prompts:
        drafter = choose_drafter(subject, config.decode).drafter
        how |= {"temperature": config.temperature, "seed": config.seed}
        how["compile"] = config.decode.compile
        lossy = quality.lossy_cost(base, drafter, rule, prompts, **how)
    machine = environment(base.device)
    result: dict[str, Any] = {
        "environment": machine,
        "settings": {
            **asdict(config),
            # the embedded file and an export's own lie elsewhere on every machine
            "data": config.data or f"{data.parent.name}/{data.name}",
            "dtype": str(base.dtype).removeprefix("torch."),
            "threads": machine["threads"],
            "prompts_sha256": digest,
        },
        "original": name or None,
        "why_no_original": why_none,
        "rule": config.decode.acceptance,
        "left_out": left_out,
        "heldout": quality.summarise(readings),
        "texts": texts,
        "lossy": lossy,
    }
    report(out, result, quality.format_quality(result))


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
    from specheads.models.draft import load_draft
    from specheads.models.names import base_digest

    how: dict[str, Any] = {"dtype": subject.base.dtype, "device": subject.base.device}
    recorded = {} if config.original or not subject.export else subject.export.config["base"]
    how |= {"where": "original", "revision": recorded.get("revision")}
    try:
        original = load_draft(name, tokenizer=subject.tokenizer, **how)
    except ConfigError as error:
        if not recorded:
            raise
        raise ConfigError(
            f"{config.checkpoint} was tuned from {name}: {error}; original=<model> says where it is"
        ) from None
    if recorded and (found := base_digest(name, revision=how["revision"])) != recorded["digest"]:
        raise ConfigError(
            f"{config.checkpoint} was tuned from {name} with digest {recorded['digest'][:12]},"
            f" now it has {found[:12]}; original={name} compares all the same"
        )
    return original


main = entry_point("quality", QualityConfig, run, literal=("data",))  # to Hydra a group of conf/


if __name__ == "__main__":
    main()
