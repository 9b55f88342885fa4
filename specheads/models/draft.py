"""Draft models: a smaller model for a base, the base with fewer layers, or one that exists.

All of them read and write the base's token ids. What a draft model says about ids that the base
does not have is never proposed, so the two may pad their vocabularies to different sizes.

A draft model's export is a plain Hugging Face folder that says where it comes from:
``config.json``, safetensors, tokenizer, chat template and generation config, as everything that
loads models reads them; beside them ``specheads.json`` and ``manifest.json``, which nothing but
specheads looks at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specheads.config import ConfigError
from specheads.models.base import (
    Loading,
    load_base_model,
    load_tokenizer,
    num_ids,
    said,
    torch_dtype,
)
from specheads.models.checkpoint import findable, save_hf
from specheads.models.manifest import PROVENANCE, one_line, write_json, write_manifest
from specheads.models.quantize import quantization_of
from specheads.system.files import whole_folder
from specheads.system.redact import redact

_ROUND = 16  # sizes of matrices come in multiples of it
# what two tokenizers of one vocabulary may still cut differently
_PROBES = (
    "def add(a, b):\n    return a + b\n\n\n",
    "The year 1234567, 3.14159 and -42.",
    "  two spaces\tand a tab, naïve café — ½ ≠ 0.5",
    "北京 привет こんにちは 🙂",
    "It's John's; DON'T! x=y==z",
)


def draft_config(config: PreTrainedConfig, layers: int, hidden: int = 0) -> PreTrainedConfig:
    """Return the settings of a smaller model of the same architecture and vocabulary.

    The number of heads and the inner size of the MLP shrink in proportion to the hidden size, so
    that heads stay as wide as they are. Where layers differ in kind (sliding and full attention),
    the kinds are those of evenly spread layers.

    Args:
        config: of the base model.
        layers: of the draft model.
        hidden: its hidden size; 0 is the base's.

    Raises:
        ConfigError: if the base has fewer layers, or the hidden size holds no whole heads.
    """
    text = config.get_text_config()
    total = int(text.num_hidden_layers)
    if layers > total:
        raise ConfigError(f"draft.layers is {layers}, the base model has {total} layers")
    changes: dict[str, Any] = {}
    size = int(text.hidden_size)
    if hidden and hidden != size:
        heads = int(text.num_attention_heads)
        step = size // math.gcd(heads, size)
        if hidden % step:
            raise ConfigError(
                f"draft.hidden is {hidden}, which holds no whole heads of the base model, {heads}"
                f" in {size}: expected a multiple of {step}"
            )
        fewer = heads * hidden // size
        changes = {"hidden_size": hidden, "num_attention_heads": fewer}
        grouped = getattr(text, "num_key_value_heads", None)
        if grouped:
            groups = heads // int(grouped)
            kept = fewer // groups if fewer % groups == 0 else math.gcd(fewer, int(grouped))
            changes["num_key_value_heads"] = kept
        for key in ("intermediate_size", "ffn_dim", "n_inner", "word_embed_proj_dim"):
            if inner := getattr(text, key, None):
                scaled = inner * hidden / size
                whole = key == "word_embed_proj_dim"
                changes[key] = round(scaled) if whole else max(1, round(scaled / _ROUND)) * _ROUND
    return _with_layers(text, spread(total, layers), changes)


def new_draft(config: PreTrainedConfig, *, attn: str = "sdpa") -> PreTrainedModel:
    """Return a random model of ``config`` (:func:`draft_config`), in float32 and eval mode.

    Raises:
        ConfigError: if transformers cannot build it.
    """
    with one_line(f"draft.start: a smaller {config.model_type} model cannot be built"):
        made = AutoModelForCausalLM.from_config(
            config, attn_implementation=None if attn == "auto" else attn, dtype=torch.float32
        )
    return made.eval()


def spread(total: int, number: int) -> list[int]:
    """Return ``number`` of the layers 0 to ``total`` - 1, evenly spread; the first is among them.

    Of two or more the last one is, too.
    """
    return [round(i * (total - 1) / max(1, number - 1)) for i in range(number)]


def pruned(base: PreTrainedModel, keep: Sequence[int]) -> PreTrainedModel:
    """Return a copy of ``base`` with the layers ``keep`` alone, in float32 and eval mode.

    Nothing is shared with the base: training the copy leaves the base as it is.

    Args:
        base: not quantised.
        keep: rising numbers of layers, counted from 0.

    Raises:
        ConfigError: if these are no such numbers, the base is quantised, or its layers are not of
            a kind that can be taken out.
    """
    total = int(base.config.get_text_config().num_hidden_layers)
    listed = list(keep)
    if not listed or listed != sorted(set(listed)) or not 0 <= listed[0] <= listed[-1] < total:
        raise ConfigError(
            f"draft.keep is {listed}, expected rising layers of the base model, 0 to {total - 1}"
        )
    if found := quantization_of(base):
        raise ConfigError(
            f"draft.start=base copies layers, which {found['method']} has quantised here; load the"
            " base without model.quantization, or choose draft.start=random"
        )
    config = _with_layers(base.config.get_text_config(), listed, {})
    made = new_draft(config, attn=base.config._attn_implementation)
    made.to(base.device)  # type: ignore[arg-type]
    prefix = _layers_name(base, total) + "."
    place, state = {str(layer): i for i, layer in enumerate(listed)}, {}
    for name, tensor in base.state_dict().items():
        layer, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):  # what is of no layer keeps its name
            state[name] = tensor
        elif layer in place:
            state[f"{prefix}{place[layer]}.{rest}"] = tensor
    name = type(base).__name__
    with one_line(f"draft.start=base: {name} with the layers {listed} is another model"):
        made.load_state_dict(state)
    return made


def load_draft(
    name: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    where: str = "draft",
    revision: str | None = None,
    **loading: Unpack[Loading],
) -> PreTrainedModel:
    """Load a draft model, in eval mode.

    Args:
        name: a folder, a name on the hub, or ``tinycode``.
        tokenizer: the base model's; its identity is checked before the model is loaded. None
            checks nothing.
        where: the setting that names the draft model, for messages.
        revision: of the hub's.
        **loading: see :class:`specheads.models.base.Loading`.

    Raises:
        ConfigError: if it cannot be found or loaded, its tokenizer is another one, or it has fewer
            outputs than the tokenizer has ids.
    """
    loading.setdefault("attn", "auto")
    try:
        if tokenizer is not None:
            trusted = loading.get("trust_remote_code", False)
            own = load_tokenizer(name, revision=revision, trust_remote_code=trusted)
            check_same_tokenizer(tokenizer, own, f"{where}={name}")
        draft = load_base_model(name, revision=revision, **loading)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.name=", f"{where}=")) from None
    if tokenizer is not None:
        size, ids = vocab_size(draft), num_ids(tokenizer)
        if size < ids:
            raise ConfigError(
                f"{where}={name} has {size} outputs, the tokenizer has {ids} token ids"
            )
    return draft


def check_same_tokenizer(
    base_tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase, where: str
) -> None:
    """Check that token ids mean the same to a base model and to its draft model.

    Compared are all tokens with their ids, and the ids of some texts. Chat template and end of text
    may differ, as they do between a base and its chat version: they are the base's.

    Args:
        base_tokenizer: the base model's.
        draft_tokenizer: the draft model's.
        where: the setting that names the draft model, the beginning of the message.

    Raises:
        ConfigError: naming what differs first.
    """
    base, draft = base_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if base != draft:
        odd = [token for token in base.keys() | draft.keys() if base.get(token) != draft.get(token)]
        first = min(odd, key=lambda token: (base.get(token, draft.get(token, 0)), token))
        ids = [str(each.get(first, "missing")) for each in (base, draft)]
        raise ConfigError(
            f"{where}: its tokenizer is not the base model's: {len(odd)} of {len(base)} tokens"
            f" differ, first {first!r}, {ids[0]} in the base's, {ids[1]} in the draft model's"
        )
    both = base_tokenizer, draft_tokenizer
    for text in _PROBES:
        found = [each(text, add_special_tokens=False)["input_ids"] for each in both]
        if found[0] != found[1]:
            at = next((i for i, (a, b) in enumerate(zip(*found, strict=False)) if a != b), 0)
            raise ConfigError(
                f"{where}: its tokenizer has the base model's tokens, but cuts texts otherwise:"
                f" {text!r} is {found[0][at : at + 4]} ... in the base's,"
                f" {found[1][at : at + 4]} ... in the draft model's, from token {at} on"
            )


def vocab_size(model: PreTrainedModel) -> int:
    """Return the number of a model's outputs, padding included."""
    return int(model.get_output_embeddings().weight.shape[0])


def _with_layers(
    config: PreTrainedConfig, kept: Sequence[int], changes: dict[str, Any]
) -> PreTrainedConfig:
    """Return a copy of ``config`` of the layers ``kept``, and with ``changes``."""
    names: dict[str, str] = getattr(config, "attribute_map", {})
    values, total = config.to_dict(), int(config.num_hidden_layers)
    for key, value in values.items():  # what there is one of for each layer
        if "layer" in key and isinstance(value, list) and len(value) == total:
            values[key] = [value[layer] for layer in kept]
    for key in ("quantization_config", "_name_or_path"):
        values.pop(key, None)
    for key, value in {"num_hidden_layers": len(kept), **changes}.items():
        values[names.get(key, key)] = value
    about = f"draft.layers: a {config.model_type} model of {len(kept)} layers"
    with one_line(f"{about} cannot be described"):
        return type(config).from_dict(values)


def _layers_name(model: nn.Module, total: int) -> str:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            return name
    raise ConfigError(f"draft.start=base: {type(model).__name__} keeps no list of {total} layers")


FORMAT_VERSION = 2


def save_draft(
    path: str | Path,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    info: dict[str, Any],
    *,
    dtype: str | torch.dtype | None = None,
) -> None:
    """Write a draft model, whole or not at all; an earlier one at ``path`` is replaced at the end.

    Args:
        path: the folder.
        draft: to save.
        tokenizer: the base model's, saved with its chat template.
        info: from :func:`specheads.models.checkpoint.origin`, of the base model that it was trained
            for; and ``measured``, alpha and accept length by temperature, as the recipe found them.
            Or what :func:`specheads.models.manifest.read_provenance` has read.
        dtype: of the saved tensors; None keeps each as it is.

    Raises:
        RunError: if the disk is full.
    """
    base = info["base"]
    provenance = {
        "format_version": FORMAT_VERSION,
        "kind": "draft",
        "base": {
            "name": findable(base["name"]),
            "revision": base.get("revision"),
            "digest": base["digest"],
            "dtype": base["dtype"],
        },
        "training": redact(info["training"]),
        "measured": info["measured"],
    }
    with whole_folder(Path(path)) as folder:
        save_hf(folder, draft, tokenizer, None if dtype is None else torch_dtype(dtype))
        write_json(folder / PROVENANCE, provenance)
        write_manifest(folder)


def take_end_tokens(draft: PreTrainedModel, base: PreTrainedModel) -> None:
    """Let ``draft`` begin, pad and end its texts as ``base`` does, in its generation settings.

    The base's other settings are not taken over: how tokens are drawn is the user's to say, and
    what is wrong among them would keep the draft model from being saved.
    """
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    places: list[Any] = [base.generation_config, base.config.get_text_config()]
    own: Any = draft
    own.generation_config = GenerationConfig(**{key: said(places, key) for key in keys})
