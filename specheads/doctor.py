"""Say what a base model can be decoded with: ``python -m specheads.doctor model=<folder or name>``.

Checked on the model itself, one line per finding. Exit code 0: trees, or at least chains, give
what plain decoding gives. 1: the model is refused, or something was found that must be mended.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specheads.config import ConfigError, DoctorConfig, RunError
from specheads.entry import hydra_main
from specheads.generate import take_literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def run(config: DoctorConfig) -> None:
    """Load, examine, print."""
    import torch

    from specheads import dist, hardware
    from specheads.decoding.diagnose import examine
    from specheads.models.base import load_base_model

    if not config.model:
        raise ConfigError("no value given for model: a folder, a name on the hub, or tinycode")
    if (Path(config.model) / "manifest.json").is_file():
        tuned = Path(config.model) / "base"
        raise ConfigError(
            f"{config.model} is an export; its base model is "
            + (f"model={tuned}" if tuned.is_dir() else "named in its config.json")
        )
    device = torch.device(config.device) if config.device else dist.device()
    hardware.quiet_loading()
    model = load_base_model(
        config.model,
        revision=config.revision,
        dtype=hardware.pick_dtype(config.dtype, device),
        device=device,
        device_map=config.device_map or None,
        attn=config.attn,
        trust_remote_code=config.trust_remote_code,
    )
    wrong = []
    for finding in examine(model, _tokenizer(config)):
        mark = "" if finding.ok or finding.name == "verdict" else "WRONG: "
        print(f"{finding.name:<10} {mark}{finding.text}", flush=True)
        wrong += [] if finding.ok else [finding.name]
    if wrong:
        raise RunError(f"{config.model}: see {', '.join(wrong)} above")


def _tokenizer(config: DoctorConfig) -> PreTrainedTokenizerBase | None:
    from specheads.models.base import load_tokenizer

    try:
        tokenizer = load_tokenizer(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except ConfigError:
        return None
    # transformers makes up an empty one where files are missing
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def main() -> None:
    """Entry point."""
    sys.argv[1:], model = take_literal(sys.argv[1:], "model")

    def task(config: DoctorConfig) -> None:
        run(config if model is None else replace(config, model=model))

    hydra_main("doctor", DoctorConfig, task)


if __name__ == "__main__":
    main()
