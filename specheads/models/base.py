"""The base model: find and load it, build one anew, know its tokenizer, sizes and devices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available

from specheads.config import DTYPES, ConfigError
from specheads.models import manifest
from specheads.models.layer_step import pack_model
from specheads.models.names import resolve_name
from specheads.models.quantize import bnb_config, check_own_quantization, prepare_quantized
from specheads.system import hardware

Embed = Callable[[Tensor], Tensor]  # an input embedding: token ids of any shape to [..., d]


class Loading(TypedDict, total=False):
    """How and where a model is loaded.

    Attributes:
        dtype: of the weights; float32 unless given.
        device: where they go: one of torch's, or what :func:`hardware.pick_device` knows, as
            ``auto``, which it is unless given.
        device_map: in place of ``device``: ``auto``, ``balanced``, ``sequential``, or a device for
            each part, ``disk`` among them.
        attn: transformers' attention implementation; ``auto`` is sdpa where the model has it.
        trust_remote_code: run modelling code that comes with the model.
    """

    dtype: str | torch.dtype | None
    device: str | torch.device
    device_map: str | dict[str, Any] | None
    attn: str
    trust_remote_code: bool


def load_base_model(
    name: str,
    *,
    revision: str | None = None,
    quantization: str = "none",
    beside: str | None = None,
    **loading: Unpack[Loading],
) -> PreTrainedModel:
    """Load a causal language model to decode with: in eval mode, and its weights do not learn.

    :func:`~specheads.models.adapters.require_grad` lets them.
    With ``device_map`` accelerate spreads it, and decoding follows by itself: token ids go to the
    embedding, every layer of the cache lies where its layer computes, heads belong to
    :func:`output_device`. Tested with layers on CPU and on disk; several GPUs could not be tried.

    Args:
        name: ``tinycode``, a folder, or a name on the hub.
        revision: of a hub model: a branch, tag or commit.
        quantization: ``nf4`` or ``int8`` quantise the linear layers while loading, all but the
            output matrix; ``dtype`` is then that of the products and of the rest. Such a model is
            on its device for good. Models that are quantised already say so themselves.
        beside: how the names begin of tensors that may lie among the model's; any other one that is
            left over is refused. None leaves that to transformers.
        **loading: see :class:`Loading`; ``attn`` is sdpa unless given.

    Raises:
        ConfigError: if the model cannot be found or loaded, lacks weights, does not support
            ``attn``, is quantised and the library for it is missing, or has no safetensors; for
            what specheads itself has written also if anything but its weights was changed.
    """
    dtype, attn = torch_dtype(loading.get("dtype") or "float32"), loading.get("attn", "sdpa")
    device, device_map = loading.get("device", "auto"), loading.get("device_map")
    trust_remote_code = loading.get("trust_remote_code", False)
    if attn == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError(
            "model.attn=flash_attention_2 needs the flash-attn package and a CUDA device;"
            " model.attn=sdpa works everywhere"
        )
    if isinstance(device, str):
        device = torch.device("cpu") if device_map else hardware.pick_device(device)
    bnb = bnb_config(quantization, dtype)
    place, revision = resolve_name(name), revision or "main"
    ours = manifest.check_model_files(name, place, trust_remote_code=trust_remote_code)
    # or transformers would ask the hub to convert a stranger's pickle
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "true")
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    with manifest.one_line(f"cannot load model.name={name}"):
        own = getattr(config, "quantization_config", None)
        own = own or getattr(config.get_text_config(), "quantization_config", None)
        check_own_quantization(name, own, quantization)
        quantized = bnb is not None or own is not None
        if quantized and device_map is None:  # it cannot be moved once it is made
            device_map = {"": str(device)}
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place,
                revision=revision,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=None if attn == "auto" else attn,
                trust_remote_code=trust_remote_code,
                device_map=device_map,
                **({"quantization_config": bnb} if bnb else {}),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are reported; they are refused below
            )
        except OSError as error:
            if "safetensors" not in str(error):
                raise
            raise ConfigError(
                f"model.name={name} has no model.safetensors: {manifest.NEEDS_SAFETENSORS}"
            ) from None
    model, report = loaded
    mismatched = [key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]]
    unused = [key for key in report["unexpected_keys"] if ours or not key.startswith(beside or "")]
    missing = report["missing_keys"]
    problems = {"missing": missing, "of another shape": mismatched, "of no use": unused}
    for problem, keys in problems.items():
        if names := sorted(map(str, keys)):  # filled with random numbers, and a log line
            raise ConfigError(
                f"model.name={name}: {len(names)} weights are {problem} in its files,"
                f" first {names[0]}"
            )
    if quantized:
        prepare_quantized(model)
    model.eval().requires_grad_(False)
    if not device_map:
        model.to(device)
        pack_model(model)
    return model


def load_config(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Return a model's config, after a look at the numbers in it.

    Raises:
        ConfigError: if there is none, or it asks for too many layers, or for code on the hub.
    """
    place, options = resolve_name(name), {"revision": revision or "main"}
    with manifest.one_line(f"cannot load model.name={name}"):
        values = PreTrainedConfig.get_config_dict(place, **options)[0]
        manifest.check_counts(f"model.name={name}", values)
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
        manifest.refuse_kernels(name, config, trust_remote_code=trust_remote_code)
        return config


def without_weights(name: str) -> bool:
    """Say whether a name is a folder that describes a model and holds no weights of it."""
    folder = Path(name).expanduser()
    weights = any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    return (folder / "config.json").is_file() and not weights


def described(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return a model without memory, as config.json and generation_config.json describe it.

    Raises:
        ConfigError: as :func:`load_config` does.
    """
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    take_generation_config(model, name, revision)
    return model


def take_generation_config(model: PreTrainedModel, name: str, revision: str | None) -> None:
    """Give a model that was built from its config the generation settings beside it, if any."""
    with contextlib.suppress(OSError):  # not every model has them
        found = GenerationConfig.from_pretrained(resolve_name(name), revision=revision or "main")
        model.generation_config = found


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let the decoder's layers be computed again in backward instead of keeping what they made.

    Only in training mode and only where gradients are formed; they are the same. Non-reentrant,
    so that it works where the layers' inputs need no gradient (frozen embeddings under an adapter).

    Raises:
        ConfigError: if transformers has no support for it in this model.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"model.gradient_checkpointing=true: {type(model).__name__} does not support it"
        )
    # transformers renamed it between the versions that are supported
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    enable = getattr(model, f"{name}_checkpointing_enable")
    enable(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
    model.disable_input_require_grads()  # only reentrant checkpoints need gradients of embeddings


def build_from_init(init: dict[str, Any], *, attn: str = "sdpa") -> PreTrainedModel:
    """Build a randomly initialised model from ``model_type`` and config values; for pretraining.

    Raises:
        ConfigError: if the type or one of the values is unknown to transformers.
    """
    values = dict(init)
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"model.init.model_type={model_type} is not a type transformers knows")
    known = CONFIG_MAPPING[model_type]()  # AutoConfig would keep a mistyped key without a word
    if unknown := sorted(key for key in values if not hasattr(known, key)):
        raise ConfigError(
            f"model.init: {', '.join(unknown)} is not a setting of a {model_type} model"
        )
    with manifest.one_line("model.init"):
        config = AutoConfig.for_model(model_type, **values)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attn)


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to a model.

    Raises:
        ConfigError: if there is none.
    """
    place = resolve_name(name)
    with manifest.one_line(f"cannot load a tokenizer of {name}"):
        return AutoTokenizer.from_pretrained(
            place, revision=revision or "main", trust_remote_code=trust_remote_code
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Check that every token has an embedding; embeddings padded to a round size are normal.

    Raises:
        ConfigError: if the tokenizer has more ids than the model; gives both numbers.
    """
    ids, num_rows = num_ids(tokenizer), input_embedding(model).shape[0]
    if ids > num_rows:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path} has {ids} token ids, the base model"
            f" {model.name_or_path} has {num_rows} embeddings: they do not belong together"
        )


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of token ids, the largest id + 1."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def context_length(model: PreTrainedModel) -> int | None:
    """Return the longest sequence the model was made for, or None where its config does not say."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None


def input_embedding(model: PreTrainedModel) -> Tensor:
    """Return the input embedding matrix [V, d]."""
    return cast(Tensor, model.get_input_embeddings().weight)


def input_device(model: PreTrainedModel) -> torch.device:
    """Return where token ids go: the input embedding's device, also where accelerate moves it."""
    return _device_of(model.get_input_embeddings())


def output_device(model: PreTrainedModel) -> torch.device:
    """Return where the last hidden states become logits, and heads belong: the output layer's."""
    return _device_of(model.get_output_embeddings())


def _device_of(module: nn.Module) -> torch.device:
    # weights that accelerate keeps elsewhere until they are needed lie on "meta"
    runs_on = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    weight = cast(Tensor, module.weight)
    return weight.device if runs_on is None else torch.device(runs_on)


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype called ``dtype``, e.g. ``bfloat16`` or ``bf16``."""
    found = getattr(torch, DTYPES.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype must name a torch dtype, got {dtype!r}")
    return found


def end_tokens(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a text, of the model's generation settings or the tokenizer's."""
    found = said((base.generation_config, base.config, tokenizer), "eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, Iterable) else (int(found),)


def said(places: Iterable[object], key: str) -> Any:
    """Return the value of an attribute where the first of several places has one; else None."""
    values = (getattr(place, key, None) for place in places)
    return next((value for value in values if value is not None), None)
