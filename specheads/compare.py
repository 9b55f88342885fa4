"""Find out which draft model pays: ``python -m specheads.compare model=<base> candidates=[...]``.

Per candidate it measures alpha and costs, predicts the best draft length and the speed-up, measures
the speed-up on other prompts, and recommends one of them, or none. Writes compare.json.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from specheads.config import CompareConfig, ConfigError
from specheads.config.main import entry_point, report
from specheads.system.files import check_folder


def run(config: CompareConfig) -> None:
    """Load, predict, measure, print, write.

    Raises:
        ConfigError: for wrong settings or files, or a candidate with another tokenizer.
    """
    from specheads.decoding.exported import load_subject
    from specheads.measure.clock import digest_of, two_sets
    from specheads.measure.drafts import DraftComparison, format_compared, sampling_of
    from specheads.measure.render import disturbance_lines
    from specheads.models.base import load_tokenizer
    from specheads.models.draft import load_draft
    from specheads.system import hardware

    out = check_folder("out", config.out)
    _check(config)
    device, dtype, threads = hardware.prepare(config.device, config.dtype, config.threads)
    trust = config.trust_remote_code
    options: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust}
    tokenizer = load_tokenizer(config.model, trust_remote_code=trust)
    # before the base, which is the largest: each is held to its tokenizer
    same: dict[str, Any] = {"tokenizer": tokenizer, "where": "candidates"}
    drafts = {name: load_draft(name, **same, **options) for name in config.candidates}
    subject = load_subject(config.model, **options)
    prompts, measured = two_sets(config, config.model, subject.base, subject.tokenizer)
    if not measured:
        raise ConfigError(
            f"{config.prompts} leaves no prompts to measure on beside the {len(prompts)} that alpha"
            f" is measured on: num_prompts is {config.num_prompts}, num_measured"
            f" {config.num_measured}"
        )
    before = hardware.environment(device)
    found = DraftComparison(subject, drafts, prompts, measured, config).run()
    digests = {"prompts_sha256": digest_of(prompts), "measured_sha256": digest_of(measured)}
    shown = {**asdict(config), **digests, "threads": threads}
    shown |= {"dtype": str(dtype).removeprefix("torch."), "sampling": sampling_of(config)}
    place = before | found.pop("disturbance")
    result = {"environment": place, "settings": shown, **found}
    result["warnings"] = disturbance_lines(result)
    report(out, result, format_compared(result))


def _check(config: CompareConfig) -> None:
    if not config.model:
        raise ConfigError("no value given for model: a folder, a name on the hub, or tinycode")
    if not config.candidates:
        raise ConfigError("candidates must name at least 1 draft model, got []")
    twice = sorted({name for name in config.candidates if config.candidates.count(name) > 1})
    if twice:
        raise ConfigError(f"candidates names {twice[0]} twice")


main = entry_point("compare", CompareConfig, run, literal=("model",))


if __name__ == "__main__":
    main()
