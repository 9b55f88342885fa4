"""Make another export of one: ``python -m specheads.export checkpoint=<export> output=<folder>``.

``lm_head=low_rank rank=64`` replaces every head's output matrix by the nearest one of that rank.
``lm_head=pruned num_kept=8000 counted=<file>.jsonl`` keeps the rows of the tokens that the file's
answers hold most often. ``merge=true`` adds a separate adapter to the base model, ``dtype=`` writes
the tensors in another one. What is decoded stays the base's own output; how much of it is guessed
right changes, and with it the best tree.

``format=`` writes a Hugging Face folder, with any adapter merged: ``plain`` the base alone; ``hf``
base and MTP heads as one model, which the Auto classes load once specheads is imported;
``mtp_standard`` sequential MTP heads as ``generate(use_mtp=True)`` and serving engines read them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, ExportConfig
from specheads.entry import hydra_main

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specheads.data.records import Record
    from specheads.models.kinds import Heads

_PROMPTS = ("prompts.jsonl", "calibration.jsonl")  # what bench and tree_search read of an export


def run(config: ExportConfig) -> None:
    """Load, change, print, write."""
    from specheads import hardware
    from specheads.models.base import load_tokenizer
    from specheads.models.checkpoint import load_heads, read_config, save_export
    from specheads.tree import Tree

    records = _check(config)
    hardware.quiet_loading()
    info = read_config(config.checkpoint)
    if config.format != "native":
        _write_foreign(config, info)
        return
    _check_heads(config, info)
    tree = Tree.from_json(info["tree"]["choices"])
    tokenizer = load_tokenizer(config.checkpoint)
    heads = load_heads(config.checkpoint)
    smaller, note = _changed(config, heads, tokenizer, records)
    if config.lm_head != "keep" and num_bytes(smaller) >= num_bytes(heads):
        raise ConfigError(
            f"{_choice(config)} makes no smaller heads of {config.checkpoint}: "
            f"{_size(heads)} before, {_size(smaller)} after"
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
    print(f"heads: {_size(heads)} before, {_size(smaller, config.dtype)} now")
    print(
        f"wrote {config.output}, with the tree of {config.checkpoint} and none of its measurements;"
        f" find its own: python -m specheads.tree_search checkpoint={config.output}"
    )


def _check(config: ExportConfig) -> list[Record]:
    """Check the settings before anything is loaded; return the records to count, if any."""
    from specheads.data.records import read_jsonl

    if (
        config.format == "native"
        and config.lm_head == "keep"
        and not config.merge
        and config.dtype is None
    ):
        raise ConfigError(
            "nothing to change: give lm_head=, merge=true or dtype=, or another format="
        )
    output = Path(config.output)
    if output.exists():
        raise ConfigError(f"output is {output}, which exists: give a new folder")
    if not output.parent.is_dir():
        raise ConfigError(f"output is {output}, but there is no folder {output.parent}")
    if config.lm_head != "pruned":
        return []
    if not config.counted:
        raise ConfigError(
            "lm_head=pruned needs counted=<file>.jsonl: records whose answers say which tokens"
            " to keep"
        )
    return read_jsonl(config.counted)


def _check_heads(config: ExportConfig, info: dict[str, Any]) -> None:
    """Refuse what cannot be done to the heads, from config.json alone."""
    if config.lm_head != "keep" and info["kind"] == "mtp":
        raise ConfigError(f"{_choice(config)} is not for MTP heads, which {config.checkpoint} has")
    if config.lm_head == "pruned" and config.num_kept > info["vocab_size"]:
        raise ConfigError(
            f"num_kept is {config.num_kept}, the vocabulary of {config.checkpoint} has"
            f" {info['vocab_size']} tokens"
        )
    deepest = max((rank for choice in info["tree"]["choices"] for rank in choice), default=-1)
    if config.lm_head == "pruned" and config.num_kept <= deepest:
        raise ConfigError(
            f"num_kept is {config.num_kept}, but the tree of {config.checkpoint} takes the"
            f" {deepest + 1} best guesses of a head"
        )
    if config.merge and not info["base"].get("adapter"):
        raise ConfigError(f"merge=true, but {config.checkpoint} has no separate adapter")


def _write_foreign(config: ExportConfig, info: dict[str, Any]) -> None:
    """Write the folder of another format, and say how to use it."""
    from specheads.formats import mtp_standard
    from specheads.models import mtp_hf
    from specheads.models.checkpoint import load_export, save_plain_model
    from specheads.models.mtp import MtpHeads

    output, form = config.output, config.format
    if form != "plain" and info["kind"] != "mtp":
        raise ConfigError(f"format={form} is for MTP heads, {config.checkpoint} is {info['kind']}")
    export = load_export(config.checkpoint, dtype=config.dtype)
    base, heads, tokenizer = export.base, export.heads, export.tokenizer
    if form == "plain":
        save_plain_model(output, base, tokenizer, dtype=config.dtype)
        print(f"wrote {output}: AutoModelForCausalLM.from_pretrained loads it")
        return
    assert isinstance(heads, MtpHeads)
    if form == "hf":
        mtp_hf.write(output, base, heads, tokenizer)
        print(
            f"wrote {output}: after `import specheads` AutoModelForCausalLM.from_pretrained loads"
            " it, its heads as model.mtp; without them: mtp_heads=None"
        )
        return
    mtp_standard.write(output, base, heads, tokenizer)
    after = "" if base.config.model_type in mtp_standard.NATIVE else " after `import specheads`"
    print(f"wrote {output}: for generate(use_mtp=True) of transformers >= 5.20{after}")
    if layers := mtp_standard.unlisted_layers(base, heads.num_heads):
        pattern = rf"model\.layers\.({'|'.join(map(str, layers))})\."
        print(
            f"{type(base).__name__} of transformers does not look for layers {layers} by itself;"
            f" first do: model._keys_to_ignore_on_load_unexpected.add(r'{pattern}')"
        )


def _changed(
    config: ExportConfig,
    heads: Heads,
    tokenizer: PreTrainedTokenizerBase,
    records: list[Record],
) -> tuple[Heads, dict[str, Any]]:
    """Return the heads that are asked for, and what the new export says about how they came."""
    from specheads import dist
    from specheads.models.compress import low_rank_heads, pruned_heads, relative_errors
    from specheads.models.mtp import MtpHeads

    if config.lm_head == "keep" or isinstance(heads, MtpHeads):
        return heads, {}
    try:
        if config.lm_head == "low_rank":
            smaller = low_rank_heads(heads.to(dist.device()), config.rank)
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
    from specheads.losses import IGNORE
    from specheads.training.parts import most_frequent

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


def _tuned_base(config: ExportConfig, info: dict[str, Any]) -> PreTrainedModel | None:
    from specheads.models.checkpoint import load_export

    return load_export(config.checkpoint).base if info["base"]["tuned"] else None


def _choice(config: ExportConfig) -> str:
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


def _size(heads: Heads, dtype: str | None = None) -> str:
    parameters = sum(parameter.numel() for parameter in heads.parameters())
    return f"{parameters:,} parameters in {num_bytes(heads, dtype) / 1e6:,.2f} MB"


def main() -> None:
    """Entry point."""
    hydra_main("export", ExportConfig, run)


if __name__ == "__main__":
    main()
