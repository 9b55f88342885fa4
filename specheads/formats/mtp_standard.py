"""Sequential heads in the MTP standard of transformers: one folder for it and what builds on it.

``generate(use_mtp=True)`` of transformers >= 5.20 and vLLM's transformers backend read it through
``transformers.modeling_layers.MtpModel``; the layout is DeepSeek-V3's (arXiv:2412.19437). Head k is
layer N + k of the checkpoint, N being the base's layers: ``model.layers.{N+k}.`` in front of
``enorm``, ``hnorm``, ``eh_proj``, the decoder layer's own names and ``shared_head.norm``. Embedding
and output matrix are the base's. The config's ``num_mtp_layers`` says how many heads there are.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError
from specheads.formats import serving
from specheads.formats.serving import NATIVE_MTP, Job, Serving
from specheads.models.checkpoint import load_export, save_as
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.mtp_hf import CLASSES, our_config
from specheads.system.errors import refuse
from specheads.system.files import whole_folder

_KNOWN = (*CLASSES, *NATIVE_MTP)  # types of base models
# keys of a layer's config that change nothing of what it computes
_IRRELEVANT = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "num_nextn_predict_layers", "pad_token_id", "quantization_config",
    "tie_word_embeddings", "transformers_version", "use_cache",
}  # fmt: skip


def write_export(job: Job) -> list[str]:
    """Write an export in the standard."""
    export = load_export(job.checkpoint, dtype=job.dtype, device="cpu")
    base = export.base
    write(job.output, base, export.heads, export.tokenizer)
    if not (layers := unlisted_layers(base, export.heads.num_heads)):
        return []
    pattern = rf"model\.layers\.({'|'.join(map(str, layers))})\."
    return [
        f"{type(base).__name__} of transformers does not look for layers {layers} by itself; first"
        f" do: model._keys_to_ignore_on_load_unexpected.add(r'{pattern}')"
    ]


def serve(place: str, base: str, info: dict[str, Any]) -> list[Serving]:
    """Return how engines serve the folder ``place``."""
    kind, number = info.get("block", {}).get("model_type", ""), info["num_heads"]
    imported, version, needs, alone = "", "0.33, its files", "", serving.ALONE
    if kind not in NATIVE_MTP:
        imported, version = "import specheads; ", "0.33, tried on a CPU"
        needs = (
            f"needs vLLM 0.33 and transformers 5.20 or newer, and specheads beside them, of which a"
            f" {kind} with MTP layers is a class. 0.33 exists for GPUs only: on a CPU its Python"
            " files were tried, over the kernels of 0.32"
        )
    if number > 1:
        alone += f"; prompts of at least {number} tokens: it fails with fewer than there are heads"
    found = [
        serving.transformers(place, "use_mtp=True", alone, imported),
        serving.vllm(place, {"method": "mtp", "num_speculative_tokens": number}, needs, version),
        serving.sglang(place, "EAGLE", number),
        serving.tensorrt(place, decoding_type="MTP", max_draft_len=number),
        serving.llama_cpp(f"model.gguf --spec-type draft-mtp --spec-draft-n-max {number}", place),
    ]
    not_known = serving.unknown_mtp(info)
    return [
        Serving(each.engine, "", not_known[each.engine]) if each.engine in not_known else each
        for each in found
    ]


def write(
    folder: str | Path,
    base: PreTrainedModel,
    heads: Heads,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write base and heads, whole or not at all.

    ``eh_proj`` is written for ``[embedding; hidden]``, whichever order the heads were trained in:
    that is what every engine takes, and only some know a key for the other one.

    Args:
        folder: a new one, or one to replace.
        base: the plain model; an adapter is merged in what is written.
        heads: sequential ones that share the base's output matrix.
        tokenizer: written beside them.
        dtype: of all tensors; None takes the base's.

    Raises:
        ConfigError: if the standard cannot hold these heads, or does not know such a base.
        RunError: if the disk is full.
    """
    ours = check(base, heads)
    number = ours.num_heads
    kind: type[PreTrainedModel] = type(base)
    if base.config.model_type in NATIVE_MTP:
        config = copy.deepcopy(base.config)
        config.num_mtp_layers = number
    else:
        kind = CLASSES[base.config.model_type].model
        types = getattr(ours.config, "layer_types", None)
        more = {"mtp_layer_types": list(types) * number} if types else {}
        config = our_config(base.config, num_mtp_layers=number, **more)
    first = base.config.num_hidden_layers
    extra = {}
    for name, tensor in ours.state_dict().items():
        if ours.hidden_first and name.endswith(".eh_proj.weight"):
            tensor = tensor.roll(ours.hidden_size, dims=1)  # the embedding's half goes first
        extra[_standard_name(name, first)] = tensor
    with whole_folder(Path(folder)) as fresh:
        save_as(fresh, kind, config, base, extra, tokenizer, dtype)


def check(base: PreTrainedModel, heads: Heads) -> MtpHeads:
    """Return ``heads`` if the standard can hold them.

    Raises:
        ConfigError: with what is in the way.
    """
    ours, kind, known = cast(MtpHeads, heads), base.config.model_type, ", ".join(_KNOWN)
    variant = getattr(heads, "variant", heads.kind)
    refuse({
        f"format=mtp_standard holds sequential MTP heads, these are {variant} ones": (
            variant != "sequential"
        ),
        "format=mtp_standard holds heads that share the base's output matrix, these have their own":
            ours.lm_head != "shared",
        f"format=mtp_standard: the base model is of type {kind!r}, the standard is known for"
        f" {known}": kind not in _KNOWN,
    })  # fmt: skip
    expected, found = block_config(base.config).to_dict(), ours.config.to_dict()
    keys = sorted(key for key in found.keys() - _IRRELEVANT if not key.startswith("_"))
    if key := next((key for key in keys if found[key] != expected.get(key)), ""):
        raise ConfigError(
            "format=mtp_standard: the heads' layers must be like the base's last one, but their"
            f" {key} is {found[key]!r}, the base's {expected.get(key)!r}"
        )
    return ours


def unlisted_layers(base: PreTrainedModel, num_heads: int) -> list[int]:
    """Return the layers of written heads that transformers' class of a native base passes over.

    It looks for those of the published models, such as layer 61 of DeepSeek-V3, and for no others.
    ``generate(use_mtp=True)`` needs a pattern in ``model._keys_to_ignore_on_load_unexpected`` for
    each. Engines with a class of their own do not look at that.
    """
    if base.config.model_type not in NATIVE_MTP:
        return []
    first = base.config.num_hidden_layers
    patterns = list(type(base)._keys_to_ignore_on_load_unexpected or [])
    return [
        layer
        for layer in range(first, first + num_heads)
        if not any(re.search(pattern, f"model.layers.{layer}.eh_proj") for pattern in patterns)
    ]


def _standard_name(name: str, first: int) -> str:
    """Return the name in the checkpoint of ``layers.{k}.<rest>`` of :class:`MtpHeads`."""
    _, layer, rest = name.split(".", 2)
    if rest.startswith("norm."):
        rest = f"shared_head.{rest}"
    return f"model.layers.{first + int(layer)}.{rest.removeprefix('block.')}"
