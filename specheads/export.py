"""Make another export of one: ``python -m specheads.export checkpoint=<export> output=<folder>``.

``lm_head=low_rank rank=64`` replaces every head's output matrix by the nearest one of that rank.
``lm_head=pruned num_kept=8000 counted=<file>.jsonl`` keeps the rows of the tokens that the file's
answers hold most often. ``merge=true`` adds a separate adapter to the base model, ``dtype=`` writes
the tensors in another one. What is decoded stays the base's own output; how much of it is guessed
right changes, and with it the best tree.

``format=`` writes what other programs read, with any adapter merged; docs/formats.md lists them.
``base=`` brings a checkpoint of others in: Medusa heads of the original repository or of vLLM,
Hydra heads of theirs. A draft model's folder can be written in another ``dtype=``, or without what
only specheads reads (``format=draft``).

Smaller heads of trained ones, as ``python -m specheads.export`` is asked for them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, ExportConfig
from specheads.config.main import answer, answers_json, hydra_main
from specheads.system.errors import one_of
from specheads.system.files import made_for_now

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specheads.data.schema import Record
if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from specheads.data.schema import Record
    from specheads.models.mtp import Heads

_PROMPTS = ("prompts.jsonl", "calibration.jsonl")  # what bench and tree_search read of an export
_PROVENANCE = "specheads.json"  # beside a draft model


@answers_json
def run(config: ExportConfig) -> None:
    """Load, change, print, write."""
    records = _check(config)
    from specheads.formats.push import finish
    from specheads.formats.read import is_foreign
    from specheads.models.checkpoint import read_config
    from specheads.system import hardware

    hardware.quiet_loading()
    output = Path(config.output)
    if config.base:
        form, notes, info = _import(config)
    elif (Path(config.checkpoint) / _PROVENANCE).is_file():
        form, notes, info = _draft(config)
    elif is_foreign(config.checkpoint):
        raise ConfigError(
            f"{config.checkpoint} is a checkpoint of others: base=<its base model> brings it in"
        )
    elif config.format != "native":
        form, info = config.format, read_config(config.checkpoint)
        notes = _foreign(config, info)
    else:
        info = _native(config, records)
        form, notes = "native", []
    if notes:
        print(f"wrote {output}: " + "\n".join(notes))
    finish(output, form, info, push=config.push, private=config.private)
    answer({"output": str(output.resolve()), "format": form, "notes": notes, "push": config.push})


def _check(config: ExportConfig) -> list[Record]:
    """Check the settings before anything is loaded; return the records to count, if any."""
    from specheads.data.load import read_jsonl
    from specheads.formats import push
    from specheads.formats.write import FORMATS
    from specheads.system import hardware

    one_of("format", config.format, *FORMATS)
    changes = config.lm_head != "keep" or config.merge or config.dtype is not None or config.push
    if config.format == "native" and not changes and not config.base:
        raise ConfigError(
            "nothing to change: give lm_head=, merge=true or dtype=, or another format="
        )
    if config.base and (config.format != "native" or config.lm_head != "keep" or config.merge):
        raise ConfigError(
            "base= brings a foreign checkpoint into native as it is: change it, or write it in"
            " another format, in a second call"
        )
    if config.allow_pickle and not config.base:
        raise ConfigError("allow_pickle=true is for foreign checkpoints, with base=")
    if config.private and not config.push:
        raise ConfigError("private=true is for push=organisation/name")
    output = Path(config.output)
    if output.exists():
        raise ConfigError(f"output is {output}, which exists: give a new folder")
    _check_path(config)
    try:
        with made_for_now(output):
            pass
    except OSError as error:
        raise ConfigError(
            f"output={output} cannot be made: {error.strerror}; give a folder that can be written"
        ) from None
    if config.push:
        push.check(config.push)
    if config.lm_head == "low_rank":
        hardware.pick_device(config.device)
    if config.lm_head != "pruned":
        return []
    if not config.counted:
        raise ConfigError(
            "lm_head=pruned needs counted=<file>.jsonl: records whose answers say which tokens"
            " to keep"
        )
    return read_jsonl(config.counted)


def _check_path(config: ExportConfig) -> None:
    """Refuse a place from which vLLM would load the folder as another kind of drafter."""
    from specheads.formats.serving import taken_for

    if config.format == "native" and not (Path(config.checkpoint) / _PROVENANCE).is_file():
        return  # heads, which vLLM does not load
    for key, place in (("output", Path(config.output).resolve()), ("push", config.push)):
        if word := taken_for(place):
            raise ConfigError(
                f"{key} is {place}: vLLM takes what lies under a path with {word!r} for a drafter"
                " of that kind, whatever method says: give one without it"
            )


def _native(config: ExportConfig, records: list[Record]) -> dict[str, Any]:
    """Write a native export; return what its config.json holds."""
    from specheads.models.base import load_tokenizer
    from specheads.models.checkpoint import load_heads, read_config, save_export

    pass  # MOVED
    from specheads.attention.tree import Tree

    info = read_config(config.checkpoint)
    _check_heads(config, info)
    tree = Tree.from_json(info["tree"]["choices"])
    tokenizer = load_tokenizer(config.checkpoint)
    heads = load_heads(config.checkpoint)
    smaller, note = changed(config, heads, tokenizer, records)
    if config.lm_head != "keep" and num_bytes(smaller) >= num_bytes(heads):
        raise ConfigError(
            f"{choice(config)} makes no smaller heads of {config.checkpoint}: "
            f"{size(heads)} before, {size(smaller)} after"
        )
    save_export(
        config.output,
        smaller,
        base_name=info["base"]["name"],
        base_digest=info["base"]["digest"],
        base_revision=info["base"]["revision"],
        base_dtype=info["base"]["dtype"],
        base_quantization=info["base"].get("quantization"),
        tokenizer=tokenizer,
        tree=tree,
        training={**info.get("training", {}), **({"compressed": note} if note else {})},
        tuned_base=_tuned_base(config, info),
        merge=str(config.merge).lower(),
        dtype=config.dtype,
    )
    for name in _PROMPTS:
        if (Path(config.checkpoint) / name).is_file():
            shutil.copyfile(Path(config.checkpoint) / name, Path(config.output) / name)
    print(f"heads: {size(heads)} before, {size(smaller, config.dtype)} now")
    print(
        f"wrote {config.output}, with the tree of {config.checkpoint} and none of its measurements;"
        f" find its own: python -m specheads.tree_search checkpoint={config.output}"
    )
    return read_config(config.output)


def _check_heads(config: ExportConfig, info: dict[str, Any]) -> None:
    """Refuse what cannot be done to the heads, from config.json alone."""
    pass  # MOVED

    if config.lm_head != "keep" and info["kind"] == "mtp":
        raise ConfigError(f"{choice(config)} is not for MTP heads, which {config.checkpoint} has")
    if config.lm_head == "pruned" and config.num_kept > info["vocab_size"]:
        raise ConfigError(
            f"num_kept is {config.num_kept}, the vocabulary of {config.checkpoint} has"
            f" {info['vocab_size']} tokens"
        )
    deepest = max((rank for path in info["tree"]["choices"] for rank in path), default=-1)
    if config.lm_head == "pruned" and config.num_kept <= deepest:
        raise ConfigError(
            f"num_kept is {config.num_kept}, but the tree of {config.checkpoint} takes the"
            f" {deepest + 1} best guesses of a head"
        )
    if config.merge and not info["base"].get("adapter"):
        raise ConfigError(f"merge=true, but {config.checkpoint} has no separate adapter")


def _tuned_base(config: ExportConfig, info: dict[str, Any]) -> PreTrainedModel | None:
    from specheads.models.checkpoint import load_export

    tuned = info["base"]["tuned"]
    return load_export(config.checkpoint, device="cpu").base if tuned else None


def _foreign(config: ExportConfig, info: dict[str, Any]) -> list[str]:
    """Write an export of heads in another format; return what there is to say."""
    from specheads.formats import Job, write

    job = Job(config.format, config.checkpoint, info, Path(config.output), config.dtype)
    return write.write(job)


def _draft(config: ExportConfig) -> tuple[str, list[str], dict[str, Any]]:
    """Write a draft model again, in another dtype or as a plain folder."""
    from specheads.formats import Job, write
    from specheads.models.manifest import read_provenance

    if config.lm_head != "keep" or config.merge:
        raise ConfigError(
            f"{config.checkpoint} is a draft model: lm_head= and merge= are for heads and adapters"
        )
    info = read_provenance(Path(config.checkpoint))
    form = "draft" if config.format == "plain" else config.format
    job = Job(form, config.checkpoint, info, Path(config.output), config.dtype)
    return form, write.write(job), info


def _import(config: ExportConfig) -> tuple[str, list[str], dict[str, Any]]:
    """Bring a checkpoint of others into native."""
    from specheads.formats.read import bring_in
    from specheads.models.checkpoint import read_config

    notes = bring_in(
        config.checkpoint,
        config.base,
        Path(config.output),
        dtype=config.dtype,
        allow_pickle=config.allow_pickle,
    )
    return "native", notes, read_config(config.output)


def main() -> None:
    """Entry point."""
    hydra_main("export", ExportConfig, run)


if __name__ == "__main__":
    main()


def changed(
    config: ExportConfig,
    heads: Heads,
    tokenizer: PreTrainedTokenizerBase,
    records: list[Record],
) -> tuple[Heads, dict[str, Any]]:
    """Return the heads that are asked for, and what the new export says about how they came."""
    from specheads.models.compress import low_rank_heads, pruned_heads, relative_errors
    from specheads.models.mtp import MtpHeads
    from specheads.system import hardware

    if config.lm_head == "keep" or isinstance(heads, MtpHeads):
        return heads, {}
    try:
        if config.lm_head == "low_rank":
            smaller = low_rank_heads(heads.to(hardware.pick_device(config.device)), config.rank)
            errors = relative_errors(heads, smaller)
            for i, error in enumerate(errors):
                print(f"head {i}: relative error of its output matrix {error:.4f}")
            return smaller, {"rank": config.rank, "relative_errors": errors}
        kept, coverage = _most_frequent(config, heads, tokenizer, records)
        return pruned_heads(heads, kept), {"num_kept": config.num_kept, **coverage}
    except ValueError as error:
        raise ConfigError(f"{config.checkpoint}: {error}") from None


def _most_frequent(
    config: ExportConfig,
    heads: Heads,
    tokenizer: PreTrainedTokenizerBase,
    records: list[Record],
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the tokens to keep, and how much of the counted answers they are; prints that."""
    import numpy as np
    from tqdm import tqdm

    from specheads.data.chat import Encoder
    from specheads.losses.cross_entropy import IGNORE
    from specheads.training.setup import most_frequent

    encode = Encoder(tokenizer)
    documents = [encode(record) for record in tqdm(records, unit="record", disable=None)]
    learned = np.concatenate([document.labels for document in documents])
    learned = learned[learned != IGNORE]
    if not len(learned):
        raise ConfigError(f"counted={config.counted}: its records hold no answers")
    kept = most_frequent(documents, heads.vocab_size, config.num_kept)
    share, seen = float(np.isin(learned, kept.numpy()).mean()), len(np.unique(learned))
    print(
        f"the {len(kept):,} kept tokens are {share:.2%} of the {len(learned):,} answer tokens of"
        f" {config.counted}"
    )
    if seen < len(kept):
        print(f"only {seen:,} different tokens occur there; the others are kept by their number")
    return kept, {"counted_tokens": len(learned), "counted_share": share}


def choice(config: ExportConfig) -> str:
    """Return the settings that ask for smaller heads, as the user wrote them."""
    if config.lm_head == "low_rank":
        return f"lm_head=low_rank rank={config.rank}"
    return f"lm_head=pruned num_kept={config.num_kept}"


def num_bytes(heads: Heads, dtype: str | None = None) -> int:
    """Return the size of all tensors of ``heads``, as they are or in ``dtype``."""
    from specheads.models.base import torch_dtype

    return sum(
        tensor.numel()
        * (torch_dtype(dtype) if dtype and tensor.is_floating_point() else tensor.dtype).itemsize
        for tensor in heads.state_dict().values()
    )


def size(heads: Heads, dtype: str | None = None) -> str:
    """Return how many parameters ``heads`` have and what they take, in words."""
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    return f"{parameters:,} parameters in {num_bytes(heads, dtype) / 1e6:,.2f} MB"
