"""Say what is missing here, or what a base model can be decoded with.

``python -m specheads.doctor`` looks at the installation: every part that is missing, what it is
for, and the command that adds it. Exit code 1: something is missing that nothing works without.

``python -m specheads.doctor model=<folder or name>`` looks at a model, one line per finding, each
checked on the model itself. Exit code 0: trees, or at least chains, give what plain decoding gives.
1: the model is refused, or something was found that must be mended.

``torchrun --nproc-per-node 2 -m specheads.doctor``, or any other launcher, looks at all ranks: a
row for each, and in what they differ. Exit code 1: a rank is missing, or not like the others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path

from specheads.config import ConfigError, DoctorConfig, RunError
from specheads.config.main import answer, answering, hydra_main
from specheads.system import dist
from specheads.system.launch import read_launcher
from specheads.system.terminal import stop


def run(config: DoctorConfig) -> None:
    """Examine, print."""
    read_launcher()
    if dist.world_size() > 1:
        examine_ranks(config)
        return
    if config.model:
        examine_model(config)
        return
    examine_installation()
    if config.device != "auto":
        from specheads.system.hardware import pick_device

        pick_device(config.device)


def examine_installation() -> None:
    """Print what is there and what is not.

    Raises:
        RunError: if something is missing that nothing works without.
    """
    from specheads.measure import installation

    parts = installation.examine_installation()
    for part in parts:
        print(f"{part.name:<15} {part.line()}")
        if part.wanting:
            print(f"{'':<15} {part.command}")
    wanting = [part.name for part in parts if part.wanting and not part.required]
    wrong = [part.name for part in parts if part.required and not part.ok]
    found = [{**asdict(part), "ok": part.ok} for part in parts]
    answer({"parts": found, "missing": wanting, "wrong": wrong, "ok": not wrong})
    if wrong:
        raise RunError(f"nothing works without {', '.join(wrong)}: see the commands above")
    rest = f"; without {', '.join(wanting)}" if wanting else ", and nothing is missing"
    print(f"{'verdict':<15} works{rest}")


def examine_ranks(config: DoctorConfig) -> None:
    """Print, on rank 0, what every rank of the launcher finds where it runs.

    Raises:
        RunError: if one does not answer, is not like the others, or finds no model.
    """
    from specheads.measure import ranks

    own = ranks.look(config.model, config.revision, config.device)
    found, wrong = ranks.gather(own, config.dist_timeout)
    if not dist.is_main():
        return
    print(ranks.table(found))
    answer({"ranks": found, "wrong": wrong, "ok": not wrong})
    if wrong:
        raise RunError("; ".join(wrong))
    print(f"{'verdict':<15} {len(found)} ranks answered, and are alike")


def examine_model(config: DoctorConfig) -> None:
    """Load a model, examine it, print.

    Raises:
        ConfigError: if it is none, or cannot be loaded.
        RunError: if it cannot be decoded, or something about it must be mended.
    """
    from specheads.measure.diagnose import examine
    from specheads.models.base import load_base_model, load_tokenizer
    from specheads.system import hardware

    if (Path(config.model) / "manifest.json").is_file():
        tuned = Path(config.model) / "base"
        raise ConfigError(
            f"{config.model} is an export; its base model is "
            + (f"model={tuned}" if tuned.is_dir() else "named in its config.json")
        )
    device, dtype, _ = hardware.prepare(config.device, config.dtype)
    spread = config.device_map or None
    origin = {key: getattr(config, key) for key in ("revision", "trust_remote_code")}
    model = load_base_model(
        config.model, dtype=dtype, device=device, device_map=spread, attn=config.attn, **origin
    )
    tokenizer = None
    with contextlib.suppress(ConfigError):
        tokenizer = load_tokenizer(config.model, **origin)
    # transformers makes up an empty one where files are missing
    if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_ids):
        tokenizer = None
    found = []
    for finding in examine(model, tokenizer):
        mark = "" if finding.ok or finding.name == "verdict" else "WRONG: "
        print(f"{finding.name:<10} {mark}{finding.text}", flush=True)
        found.append(asdict(finding))
    wrong = [each["name"] for each in found if not each["ok"]]
    answer({"model": config.model, "findings": found, "wrong": wrong, "ok": not wrong})
    if wrong:
        raise RunError(f"{config.model}: see {', '.join(wrong)} above")


def main() -> None:
    """Entry point; looks at the installation even where the command line cannot be read."""
    if any(importlib.util.find_spec(name) is None for name in ("hydra", "torch")):
        asked = DoctorConfig(json="json=true" in sys.argv[1:])
        try:
            with answering(asked):
                run(asked)
        except RunError as error:
            stop(str(error), error.exit_code)
        return
    hydra_main("doctor", DoctorConfig, run, literal=("model",))


if __name__ == "__main__":
    main()
