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
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specheads.config import ConfigError, ExportConfig
from specheads.config.main import answer, answers_json, hydra_main
from specheads.system.errors import one_of
from specheads.system.files import made_for_now

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from specheads.data.schema import Record
    from specheads.models.heads import MedusaHeads
    from specheads.models.kinds import Heads

_PROMPTS = ("prompts.jsonl", "calibration.jsonl")  # what bench and tree_search read of an export
_PROVENANCE = "specheads.json"  # beside a draft model


@answers_json
def run(config: ExportConfig) -> None:
    """Load, change, print, write."""
    records = _check(config)
    from specheads.formats import Job, push, write
    from specheads.formats.read import bring_in, is_foreign
    from specheads.models.checkpoint import read_config
    from specheads.models.manifest import read_provenance
    from specheads.system import hardware

    hardware.quiet_loading()
    checkpoint, output, form = config.checkpoint, Path(config.output), config.format
    notes: list[str] = []
    if config.base:
        pickled = config.allow_pickle
        notes = bring_in(checkpoint, config.base, output, dtype=config.dtype, allow_pickle=pickled)
        info = read_config(output)
    elif (Path(checkpoint) / _PROVENANCE).is_file():
        form, info = _draft_format(config), read_provenance(checkpoint) or {}
        notes = write.write(Job(form, checkpoint, info, output, config.dtype))
    elif is_foreign(checkpoint):
        raise ConfigError(
            f"{checkpoint} is a checkpoint of others: base=<its base model> brings it in"
        )
    elif form != "native":
        info = read_config(checkpoint)
        notes = write.write(Job(form, checkpoint, info, output, config.dtype))
    else:
        _write_native(config, records)
        info = read_config(output)
    if notes:
        print(f"wrote {output}: " + "\n".join(notes))
    push.finish(output, form, info, push=config.push, private=config.private)
    answer({"output": str(output.resolve()), "format": form, "notes": notes, "push": config.push})


def _check(config: ExportConfig) -> list[Record]:
    """Check the settings before anything is loaded; return the records to count, if any."""
    from specheads.data.load import read_jsonl
    from specheads.formats import push
    from specheads.formats.serving import taken_for
    from specheads.formats.write import FORMATS
    from specheads.system.hardware import pick_device

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
    # native heads may lie anywhere: vLLM loads none
    if config.format != "native" or (Path(config.checkpoint) / _PROVENANCE).is_file():
        for key, place in (("output", output.resolve()), ("push", config.push)):
            if word := taken_for(place):
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
        push.check(config.push)
    if config.lm_head == "low_rank":
        pick_device(config.device)
    if config.lm_head != "pruned":
        return []
    if not config.counted:
        raise ConfigError(
            "lm_head=pruned needs counted=<file>.jsonl: records whose answers say which tokens"
            " to keep"
        )
    return read_jsonl(config.counted)


def _draft_format(config: ExportConfig) -> str:
    """Return the format in which a draft model is written.

    Raises:
        ConfigError: if the settings ask for what only heads have.
    """
    if config.lm_head != "keep" or config.merge:
        raise ConfigError(
            f"{config.checkpoint} is a draft model: lm_head= and merge= are for heads and adapters"
        )
    return "draft" if config.format == "plain" else config.format


def _write_native(config: ExportConfig, records: list[Record]) -> None:
    """Write an export of ours, with smaller heads where they are asked for."""
    from specheads.attention.tree import Tree
    from specheads.models.adapters import merge_adapter
    from specheads.models.base import load_tokenizer
    from specheads.models.checkpoint import load_export, load_heads, read_config, save_export

    checkpoint = config.checkpoint
    info = read_config(checkpoint)
    asked = f"lm_head={config.lm_head} "
    asked += (
        f"rank={config.rank}" if config.lm_head == "low_rank" else f"num_kept={config.num_kept}"
    )
    _check_heads(config, info, asked)
    tree = Tree.from_choices(info["tree"]["choices"])
    tokenizer = load_tokenizer(checkpoint)
    heads = load_heads(checkpoint)
    smaller, note = _smaller(config, heads, tokenizer, records)
    if config.lm_head != "keep" and num_bytes(smaller) >= num_bytes(heads):
        raise ConfigError(
            f"{asked} makes no smaller heads of {checkpoint}: {size(heads)} before,"
            f" {size(smaller)} after"
        )
    tuned = load_export(checkpoint, device="cpu").base if info["base"]["tuned"] else None
    if config.merge and tuned is not None:
        merge_adapter(tuned)
    training = {**info.get("training", {}), **({"compressed": note} if note else {})}
    info = {**info, "training": training}
    save_export(config.output, smaller, tokenizer, tree, info, tuned_base=tuned, dtype=config.dtype)
    for name in _PROMPTS:
        if (Path(checkpoint) / name).is_file():
            shutil.copyfile(Path(checkpoint) / name, Path(config.output) / name)
    print(f"heads: {size(heads)} before, {size(smaller, config.dtype)} now")
    print(
        f"wrote {config.output}, with the tree of {checkpoint} and none of its measurements; find"
        f" its own: python -m specheads.tree_search checkpoint={config.output}"
    )


def _check_heads(config: ExportConfig, info: dict[str, Any], asked: str) -> None:
    """Refuse what cannot be done to the heads, from config.json alone."""
    from specheads.models.checkpoint import KINDS

    if config.merge and not info["base"].get("adapter"):
        raise ConfigError(f"merge=true, but {config.checkpoint} has no separate adapter")
    if config.lm_head != "keep" and not KINDS[kind := info["kind"]].compressible:
        raise ConfigError(f"{asked} is not for {kind.upper()} heads, which {config.checkpoint} has")
    if config.lm_head != "pruned":
        return
    if config.num_kept > info["vocab_size"]:
        raise ConfigError(
            f"num_kept is {config.num_kept}, the vocabulary of {config.checkpoint} has"
            f" {info['vocab_size']} tokens"
        )
    deepest = max((rank for path in info["tree"]["choices"] for rank in path), default=-1)
    if config.num_kept <= deepest:
        raise ConfigError(
            f"num_kept is {config.num_kept}, but the tree of {config.checkpoint} takes the"
            f" {deepest + 1} best guesses of a head"
        )


def _smaller(
    config: ExportConfig, heads: Heads, tokenizer: PreTrainedTokenizerBase, records: list[Record]
) -> tuple[Heads, dict[str, Any]]:
    """Return the heads that are asked for, and what the new export says about how they came."""
    from specheads.models.heads import low_rank_heads, pruned_heads, relative_errors
    from specheads.system.hardware import pick_device

    if config.lm_head == "keep":
        return heads, {}
    own = cast("MedusaHeads", heads)  # the compressible ones
    try:
        if config.lm_head == "pruned":
            kept, coverage = _most_frequent(config, own, tokenizer, records)
            return pruned_heads(own, kept), {"num_kept": config.num_kept, **coverage}
        smaller = low_rank_heads(own.to(pick_device(config.device)), config.rank)
        errors = relative_errors(own, smaller)
    except ValueError as error:
        raise ConfigError(f"{config.checkpoint}: {error}") from None
    for i, relative in enumerate(errors):
        print(f"head {i}: relative error of its output matrix {relative:.4f}")
    return smaller, {"rank": config.rank, "relative_errors": errors}


def _most_frequent(
    config: ExportConfig,
    heads: MedusaHeads,
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


def num_bytes(heads: Heads, dtype: str | None = None) -> int:
    """Return the size of all tensors of ``heads``, as they are or in ``dtype``."""
    from specheads.models.base import torch_dtype

    tensors = heads.state_dict().values()
    dtypes = (torch_dtype(dtype) if dtype and t.is_floating_point() else t.dtype for t in tensors)
    return sum(t.numel() * each.itemsize for t, each in zip(tensors, dtypes, strict=True))


def size(heads: Heads, dtype: str | None = None) -> str:
    """Return how many parameters ``heads`` have and what they take, in words."""
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    return f"{parameters:,} parameters in {num_bytes(heads, dtype) / 1e6:,.2f} MB"


def main() -> None:
    """Entry point."""
    hydra_main("export", ExportConfig, run)


if __name__ == "__main__":
    main()
