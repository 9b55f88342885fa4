"""Write an export in a foreign format: what it needs is loaded, checked, and written whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError
from specheads.files import whole_folder
from specheads.formats.fasterdecoding import check_v1, check_v2
from specheads.formats.parallel import check_parallel, place_of_base

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from specheads.models.heads import MedusaHeads
    from specheads.models.output import OutputLayer

MEDUSA = ("vllm_medusa", "fasterdecoding_v1", "fasterdecoding_v2", "merged")
MTP = ("hf", "mtp_standard")


def check_form(form: str, checkpoint: str | Path, info: dict[str, Any]) -> None:
    """Refuse what ``form`` cannot hold, from config.json alone.

    Args:
        form: a format of heads, or ``plain``.
        checkpoint: the export.
        info: what its config.json holds.

    Raises:
        ConfigError: one line with what is in the way.
    """
    if form in MTP and info["kind"] != "mtp":
        raise ConfigError(f"format={form} is for MTP heads, {checkpoint} is {info['kind']}")
    if form == "draft":
        raise ConfigError(
            f"format=draft is for draft models, {checkpoint} is {info['kind']}; plain writes its"
            " base model"
        )
    if form not in MEDUSA:
        return
    check_parallel(form, checkpoint, info)
    if form == "fasterdecoding_v2":
        check_v2(checkpoint, info)
    elif form != "vllm_medusa":
        check_v1(form, checkpoint, info)


def write(
    form: str, checkpoint: str, output: Path, info: dict[str, Any], dtype: str | None
) -> list[str]:
    """Write an export in ``form``, whole or not at all.

    Args:
        form: that ``check_form`` has nothing against.
        checkpoint: the export.
        output: a new folder.
        info: what the export's config.json holds.
        dtype: of the written tensors; None keeps theirs.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: if the base cannot be loaded, or the format cannot hold these heads.
        RunError: if the disk is full.
    """
    if form in MEDUSA:
        return _medusa(form, checkpoint, output, info, dtype)
    if form == "vllm_custom_class":
        return _custom_class(checkpoint, output, info, dtype)
    from specheads.formats import mtp_standard
    from specheads.models import mtp_hf
    from specheads.models.checkpoint import load_export, save_plain_model
    from specheads.models.mtp import MtpHeads

    export = load_export(checkpoint, dtype=dtype, device="cpu")
    base, heads, tokenizer = export.base, export.heads, export.tokenizer
    if form == "plain":
        save_plain_model(output, base, tokenizer, dtype=dtype)
        return ["AutoModelForCausalLM.from_pretrained loads it"]
    assert isinstance(heads, MtpHeads)
    if form == "hf":
        mtp_hf.write(output, base, heads, tokenizer)
        return [
            "after `import specheads` AutoModelForCausalLM.from_pretrained loads it, its heads as"
            " model.mtp; without them: mtp_heads=None"
        ]
    mtp_standard.write(output, base, heads, tokenizer)
    after = "" if base.config.model_type in mtp_standard.NATIVE else " after `import specheads`"
    notes = [f"for generate(use_mtp=True) of transformers >= 5.20{after}"]
    if layers := mtp_standard.unlisted_layers(base, heads.num_heads):
        pattern = rf"model\.layers\.({'|'.join(map(str, layers))})\."
        notes.append(
            f"{type(base).__name__} of transformers does not look for layers {layers} by itself;"
            f" first do: model._keys_to_ignore_on_load_unexpected.add(r'{pattern}')"
        )
    return notes


def _custom_class(
    checkpoint: str, output: Path, info: dict[str, Any], dtype: str | None
) -> list[str]:
    """Write settings for vLLM, and the base beside them where the recipe changed it."""
    from specheads.formats import vllm_custom_class
    from specheads.models.base import torch_dtype
    from specheads.models.checkpoint import load_export

    notes = ["vLLM guesses from the text with it: the heads are not in it"]
    if not info["base"]["tuned"]:
        vllm_custom_class.write(output)
        return notes
    export = load_export(checkpoint, device="cpu")
    wanted = None if dtype is None else torch_dtype(dtype)
    vllm_custom_class.write(output, export.base, export.tokenizer, dtype=wanted)
    return [*notes, "the tuned base model lies beside the settings"]


def _medusa(
    form: str, checkpoint: str, output: Path, info: dict[str, Any], dtype: str | None
) -> list[str]:
    from specheads.formats import fasterdecoding, merged, vllm_medusa
    from specheads.models.base import load_tokenizer, torch_dtype
    from specheads.models.checkpoint import load_export, load_heads
    from specheads.models.heads import MedusaHeads
    from specheads.models.hf import save_hf
    from specheads.models.output import output_layer

    heads = load_heads(checkpoint)  # in the precision they are stored in
    assert isinstance(heads, MedusaHeads)
    wanted = None if dtype is None else torch_dtype(dtype)
    place, tuned = place_of_base(info, output), bool(info["base"]["tuned"])
    if form == "fasterdecoding_v2" and not tuned:  # nothing of the base is in it
        with whole_folder(output) as folder:
            notes = fasterdecoding.write_v2(folder, heads, wanted, base=place)
            load_tokenizer(checkpoint).save_pretrained(folder)
        return notes
    export = load_export(checkpoint, device="cpu")
    base, tokenizer, layer = export.base, export.tokenizer, output_layer(export.base)
    with whole_folder(output) as folder:
        if form == "merged":
            return merged.write(folder, base, heads, layer, tokenizer, wanted)
        if form == "vllm_medusa":
            notes = vllm_medusa.write(folder, heads, layer, wanted)
        else:
            notes = _original(form, folder, heads, layer, tokenizer, wanted, place)
        if tuned:
            save_hf(folder / "base", base, tokenizer, wanted)
            notes.append(f"these heads belong to the tuned base model, which is in {place}")
    return notes


def _original(
    form: str,
    folder: Path,
    heads: MedusaHeads,
    output: OutputLayer,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None,
    base: str,
) -> list[str]:
    """Write a folder that the original repository reads, with the tokenizer as its trainer does."""
    from specheads.formats import fasterdecoding

    tokenizer.save_pretrained(folder)
    if form == "fasterdecoding_v1":
        return fasterdecoding.write_v1(folder, heads, output, dtype, base=base)
    return fasterdecoding.write_v2(folder, heads, dtype, base=base)
