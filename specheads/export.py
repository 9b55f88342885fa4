"""Make another export of one: ``python -m specheads.export checkpoint=<export> output=<folder>``.

``lm_head=low_rank rank=64`` replaces every head's output matrix by the nearest one of that rank.
``lm_head=pruned num_kept=8000 counted=<file>.jsonl`` keeps the rows of the tokens that the file's
answers hold most often. ``merge=true`` adds a separate adapter to the base model, ``dtype=`` writes
the tensors in another one. What is decoded stays the base's own output; how much of it is guessed
right changes, and with it the best tree.

``format=`` writes what other programs read, with any adapter merged; docs/formats.md lists them.
``base=`` brings a checkpoint of others in: Medusa heads of the original repository or of vLLM,
Hydra heads of theirs, DFlash, DSpark and EAGLE-3. A draft model's folder can be written in another
``dtype=``, or without what only specheads reads (``format=draft``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specheads.config import ConfigError, ExportConfig
from specheads.config.main import answer, entry_point
from specheads.system.errors import one_of, refuse
from specheads.system.files import made_for_now

if TYPE_CHECKING:
    from specheads.data.schema import Record

_PROVENANCE = "specheads.json"  # beside a draft model


def run(config: ExportConfig) -> None:
    """Load, change, print, write."""
    records = _check(config)
    from specheads.formats import card, write
    from specheads.formats.read import bring_in, is_foreign
    from specheads.formats.serving import Job
    from specheads.models.base import torch_dtype
    from specheads.models.checkpoint import read_config
    from specheads.models.manifest import read_provenance
    from specheads.system import hardware

    hardware.quiet_loading()
    checkpoint, output, form = config.checkpoint, Path(config.output), config.format
    notes: list[str] = []
    dtype = None if config.dtype is None else torch_dtype(config.dtype)
    is_draft = (Path(checkpoint) / _PROVENANCE).is_file()
    if is_draft and (config.lm_head != "keep" or config.merge):
        raise ConfigError(
            f"{checkpoint} is a draft model: lm_head= and merge= are for heads and adapters"
        )
    if not (config.base or is_draft) and is_foreign(checkpoint):
        raise ConfigError(
            f"{checkpoint} is a checkpoint of others: base=<its base model> brings it in"
        )
    if config.base:
        pickled = config.allow_pickle
        notes = bring_in(checkpoint, config.base, output, dtype=dtype, allow_pickle=pickled)
        info = read_config(output)
    elif is_draft or form != "native":
        form = "draft" if is_draft and form == "plain" else form
        info = (read_provenance(checkpoint) or {}) if is_draft else read_config(checkpoint)
        notes = write.write(Job(form, checkpoint, info, output, dtype, config.layout))
    else:
        write.write_native(config, records)
        info = read_config(output)
    if notes:
        print(f"wrote {output}: " + "\n".join(notes))
    card.finish(output, form, info, push=config.push, private=config.private)
    answer({"output": str(output.resolve()), "format": form, "notes": notes, "push": config.push})


def _check(config: ExportConfig) -> list[Record]:
    """Check the settings before anything is loaded; return the records to count, if any."""
    from specheads.data.load import read_jsonl
    from specheads.formats.drafters import FORMATS as LAID_OUT
    from specheads.formats.serving import taken_for
    from specheads.formats.write import FORMATS, check_push
    from specheads.system.hardware import pick_device

    one_of("format", config.format, *FORMATS)
    native, output = config.format == "native", Path(config.output)
    shape = config.lm_head != "keep" or config.merge  # of heads or base
    changes = shape or config.dtype is not None or config.push or config.base
    unchanged, pruned = native and not changes, config.lm_head == "pruned"
    pickled = config.allow_pickle and not config.base
    problems = {
        "nothing to change: give lm_head=, merge=true or dtype=, or another format=": unchanged,
        "base= brings a foreign checkpoint into native as it is: change it, or write it in"
        " another format, in a second call": config.base and (shape or not native),
        "allow_pickle=true is for foreign checkpoints, with base=": pickled,
        f"layout={config.layout} is for format=dflash, dspark or eagle3": (
            config.layout != "speculators" and config.format not in LAID_OUT
        ),
        "private=true is for push=organisation/name": config.private and not config.push,
        f"output is {output}, which exists: give a new folder": output.exists(),
        "lm_head=pruned needs counted=<file>.jsonl: records whose answers say which tokens"
        " to keep": pruned and not config.counted,
    }
    refuse(problems)
    # native heads may lie anywhere: vLLM loads none
    if not native or (Path(config.checkpoint) / _PROVENANCE).is_file():
        for key, place in (("output", output.resolve()), ("push", config.push)):
            if word := taken_for(place, config.format):
                raise ConfigError(
                    f"{key} is {place}: vLLM takes what lies under a path with {word!r} for a"
                    " drafter of that kind, whatever method says: give one without it"
                )
    try:
        with made_for_now(output):
            pass
    except OSError as error:
        raise ConfigError(
            f"output={output} cannot be made: {error.strerror}; give a folder that can be written"
        ) from None
    if config.push:
        check_push(config.push)
    if config.lm_head == "low_rank":
        pick_device(config.device)
    return read_jsonl(config.counted) if pruned else []


main = entry_point("export", ExportConfig, run)


if __name__ == "__main__":
    main()
