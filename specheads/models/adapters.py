"""LoRA on the base model, in place: arXiv:2106.09685; on a quantised base QLoRA, arXiv:2305.14314.

The base stays the PreTrainedModel that it was: its linear layers are wrapped, nothing else changes,
so that hooks, caches, tree decoding and ``generate`` go on working. Adapter weights are float32.
The ``adapter/`` of an export is written and read as peft does, so that others read it too.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specheads.config import AdapterConfig, ConfigError
from specheads.models import manifest, quantize
from specheads.models.packed import drop_packed
from specheads.system.errors import need

Part = TypeVar("Part", bound=nn.Module)
NAME = "default"  # peft's name of the only adapter


def check_tunable(quantization: str, adapter: AdapterConfig) -> None:
    """Check that a base quantised like this can be tuned; before it is loaded.

    Raises:
        ConfigError: if quantised weights themselves were to be trained.
    """
    if quantization != "none" and adapter.kind == "none":
        raise ConfigError(
            f"model.quantization={quantization}: quantised weights cannot be trained themselves;"
            " choose adapter=lora (QLoRA)"
        )


def add_adapter(base: PreTrainedModel, adapter: AdapterConfig, *, seed: int = 0) -> None:
    """Wrap the decoder's linear layers with LoRA, in place; only its weights require gradients.

    The logits are bit for bit those of before until the first step: B starts at zero. The output
    matrix is never wrapped, because heads and losses read the matrix itself. Experts that
    are kept as one stacked tensor are no linear layers and stay as they are.

    Args:
        base: the base model, quantised or not.
        adapter: rank, alpha, dropout and targets; names of modules or their last parts.
        seed: of the initial A; torch's own generator is left alone, so that a resumed run draws
            what an uninterrupted one does.

    Raises:
        ConfigError: if a target is the output matrix, or there is no such linear layer.
        ValueError: if ``base`` has an adapter already.
    """
    if has_adapter(base):
        raise ValueError("the base model has an adapter already")
    sizes = {"r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": adapter.dropout}
    inject(base, _targets(base, adapter.targets), **sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in _layers(base).values():
            first = layer.lora_A[NAME].weight
            drawn = torch.empty(first.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            first.copy_(drawn)
            layer.lora_B[NAME].weight.zero_()


def has_adapter(base: nn.Module) -> bool:
    """Return whether ``base`` carries an adapter."""
    return getattr(base, "peft_config", None) is not None


def adapter_parameters(base: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by their names in ``base``; empty where there is none."""
    if not has_adapter(base):
        return {}
    return {name: p for name, p in base.named_parameters() if ".lora_" in name}


def require_grad(base: PreTrainedModel, value: bool) -> None:
    """Let the base be trained, or freeze it: all of it, or its adapter alone where it has one.

    Raises:
        ConfigError: if a quantised base without adapter was to be trained.
    """
    adapter = adapter_parameters(base)
    quantization = quantize.quantization_of(base)
    if value and quantization and not adapter:
        check_tunable(quantization["method"], AdapterConfig())
    drop_packed(base)
    for name, parameter in base.named_parameters():
        if parameter.is_floating_point():  # quantised weights cannot be asked for a gradient
            parameter.requires_grad_(value and (not adapter or name in adapter))


@contextlib.contextmanager
def original(base: PreTrainedModel) -> Iterator[None]:
    """Turn the adapter off while the context is open: the same weights are the original model.

    Raises:
        ValueError: if there is no adapter; the base would then be the tuned one itself.
    """
    layers = list(_layers(base).values())
    if not layers:
        raise ValueError("the original is the base with its adapter off, and it has none")
    # peft freezes what it turns off, and unfreezes what it turns on
    wanted = [(parameter, parameter.requires_grad) for parameter in base.parameters()]
    before = [layer.disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer.enable_adapters(not disabled)
        for parameter, value in wanted:
            parameter.requires_grad_(value)


def merges(base: PreTrainedModel, merge: str) -> bool:
    """Return whether ``adapter.merge`` (true, false or auto) merges the adapter of this base."""
    return merge == "true" or (merge == "auto" and quantize.quantization_of(base) is None)


def merge_adapter(base: PreTrainedModel) -> None:
    """Add the adapter to the weights, in place, and remove it.

    A quantised base is dequantised to its dtype as a whole; its outputs then differ from
    those that were trained by the rounding of the sums to that dtype.

    Raises:
        ValueError: if there is no adapter.
        ConfigError: if the base is quantised in a way that cannot be undone.
    """
    if not has_adapter(base):
        raise ValueError("there is no adapter to merge")
    _make_plain(base, base.dtype)


def in_float32(base: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in float32, dequantised, its adapter merged: what rounding is measured against.

    Weights that cannot be dequantised here (GPTQ, AWQ) have no better numbers: ``base`` itself.
    """
    quantization = quantize.quantization_of(base)
    if quantization and not any(quantize.is_quantized_linear(module) for module in base.modules()):
        return base
    other = copy.deepcopy(base)
    if not quantization:
        other.float()  # before the sums are formed
    _make_plain(other, torch.float32)
    # buffers that were float32 all along (rotary frequencies) stay what they were
    return other.float()


def plain_copy(part: Part, dtype: torch.dtype) -> Part:
    """Return a copy of a base or of a part of it, its adapter merged, dequantised to ``dtype``.

    Raises:
        ConfigError: if the base is quantised in a way that cannot be undone.
    """
    other = copy.deepcopy(part)
    _make_plain(other, dtype)
    return other


@torch.no_grad()
def _make_plain(base: nn.Module, dtype: torch.dtype) -> None:
    """Merge and dequantise in place; sums are formed in float32 at least, and rounded once."""
    # a list, as modules are replaced on the way; wrapped ones come before what they wrap, which is
    # then done, and passed over by its name
    for name, module in list(base.named_modules()):
        layer: Any = getattr(module, "base_layer", module)
        quantized = quantize.is_quantized_linear(layer) and not name.endswith(".base_layer")
        if layer is module and not quantized:
            continue
        weight = quantize.plain_weight(layer)
        keep = dtype if quantized else weight.dtype
        if layer is not module:
            wide = torch.promote_types(weight.dtype, torch.float32)
            delta = cast(Any, module).get_delta_weight(NAME)
            weight = weight.to(wide) + delta.to(wide)
        if quantized:
            with torch.device("meta"):
                plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            plain.bias = layer.bias
            layer = plain.train(module.training)
        layer.weight = nn.Parameter(weight.to(keep))
        base.set_submodule(name, layer)
    if has_adapter(base):
        del base.peft_config
    quantizer: Any = getattr(base, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(base)


def inject(base: PreTrainedModel, names: Sequence[str], **settings: Any) -> None:
    """Wrap the layers ``names`` and no others; A and B are still to be filled.

    Args:
        base: without adapter.
        names: full names of linear layers.
        **settings: of peft's LoraConfig.
    """
    need("peft", "train", "an adapter")
    quantize.quiet_bitsandbytes()  # peft imports it where it is installed
    from peft import LoraConfig, inject_adapter_in_model

    device = base.device
    rng = torch.random.fork_rng([device] if device.type == "cuda" else [])
    # in mixtures of experts peft would take names among the targets for those of stacked tensors;
    # keys of a state dict it takes as they are
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["-"], **settings)
    keys: Any = {f"{name}.lora_A.weight": None for name in names}
    with rng, warnings.catch_warnings(action="ignore"):
        inject_adapter_in_model(config, base, state_dict=keys)
    config.target_modules = list(names)
    for parameter in adapter_parameters(base).values():
        parameter.data = parameter.data.float()
    require_grad(base, True)
    base.train(base.training)  # the new modules too


def _layers(base: nn.Module) -> dict[str, Any]:
    """Return the wrapped layers by name."""
    return {name: module for name, module in base.named_modules() if hasattr(module, "lora_A")}


def _is_linear(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear):
        return isinstance(module, Conv1D) or hasattr(module, "in_features")  # GPTQ, AWQ
    if type(module).forward is nn.Linear.forward or quantize.is_quantized_linear(module):
        return True
    # Falcon's are linear layers all the same, Llama 4's router returns something else
    with torch.no_grad():
        return isinstance(module(module.weight.new_zeros(1, module.in_features)), Tensor)


def _targets(base: PreTrainedModel, wanted: list[str]) -> list[str]:
    """Return the full names of the layers to wrap."""
    output = base.get_output_embeddings()
    linear = {name: module for name, module in base.named_modules() if _is_linear(module)}
    allowed = [name for name, module in linear.items() if module is not output]

    def matches(name: str, target: str) -> bool:
        return name == target or name.endswith(f".{target}")

    for target in wanted:
        if any(module is output and matches(name, target) for name, module in linear.items()):
            raise ConfigError(
                f"adapter.targets: {target} is the output matrix, which heads and losses read"
                " themselves; it cannot have an adapter"
            )
        if not any(matches(name, target) for name in allowed):
            there = sorted({name.rsplit(".", 1)[-1] for name in allowed})
            raise ConfigError(
                f"adapter.targets: the base has no linear layer {target}; it has {', '.join(there)}"
            )
    chosen = [n for n in allowed if not wanted or any(matches(n, target) for target in wanted)]
    if not chosen:
        raise ConfigError(f"adapter.kind=lora: {type(base).__name__} has no linear layer to adapt")
    return chosen


_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# of peft's config: what is used here, and what does not change what the adapter computes
_USED = ("r", "lora_alpha", "lora_dropout", "target_modules")
_FREE = ("base_model_name_or_path", "revision", "inference_mode", "peft_version")
_PREFIX = "base_model.model."  # peft's, of every tensor


def save_adapter(folder: Path, base: PreTrainedModel, name: str, revision: str | None) -> None:
    """Write the adapter as peft does: adapter_config.json and safetensors.

    Args:
        folder: made here.
        base: carries the adapter.
        name: of the original base.
        revision: of a hub model.
    """
    folder.mkdir()
    config: Any = copy.deepcopy(base.peft_config[NAME])
    config.base_model_name_or_path, config.revision = name, revision
    config.inference_mode = True
    config.save_pretrained(str(folder))
    manifest.save_tensors(folder / _TENSORS, _by_stored_name(base), {"format": "pt"})


def _by_stored_name(base: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by peft's names for them."""
    found = adapter_parameters(base).items()
    return {f"{_PREFIX}{name.replace(f'.{NAME}.', '.')}": parameter for name, parameter in found}


def load_adapter(base: PreTrainedModel, folder: Path) -> None:
    """Put the adapter that ``save_adapter`` wrote onto ``base``, frozen.

    Raises:
        ConfigError: if files are damaged, or tensors are missing, unexpected or of another shape.
    """
    about, file = folder / _CONFIG, folder / _TENSORS
    stored = manifest.read_json(about, f"{folder} is no adapter")
    names = _stored_targets(about, stored, base)
    # the rank decides how much memory is taken: it must be that of the tensors
    header = manifest.read_header(file)
    ranks = {shape[:1] for key, (shape, _) in header.items() if ".lora_A." in key}
    if type(rank := stored.get("r")) is not int or ranks != {(rank,)}:
        found = sorted(number for shape in ranks for number in shape)
        raise ConfigError(f"{about}: r is {rank!r:.40}, the tensors have {found or 'none'}")
    with manifest.one_line(f"{about} cannot be used"):
        inject(base, names, **{key: stored.get(key) for key in _USED[:3]})
    _check_others(about, stored, base)
    wanted = _by_stored_name(base)
    manifest.copy_tensors(manifest.read_tensors(file, wanted), wanted)
    require_grad(base, False)
    base.eval()


def _stored_targets(about: Path, stored: dict[str, Any], base: PreTrainedModel) -> list[str]:
    """Return the names of the wrapped layers, after a look at the other numbers that are used."""
    alpha, dropout = stored.get("lora_alpha"), stored.get("lora_dropout")
    names: Any = stored.get("target_modules")
    real = isinstance(alpha, int | float) and 0 < alpha <= 1 << 20
    manifest.expect(real, f"{about}: lora_alpha", alpha, "a number above 0")
    real = isinstance(dropout, int | float) and 0 <= dropout < 1
    manifest.expect(real, f"{about}: lora_dropout", dropout, "0 to 1")
    named = type(names) is list and all(type(name) is str for name in names) and names
    manifest.expect(bool(named), f"{about}: target_modules", names, "names")
    if odd := sorted(set(names) - {name for name, _ in base.named_modules()}):
        raise ConfigError(f"{about} is of another model: the base has no {odd[0]:.80}")
    return names


def _check_others(about: Path, stored: dict[str, Any], base: PreTrainedModel) -> None:
    """Check that all the rest of the config is what :func:`inject` has made."""
    made: Any = base.peft_config
    plain = json.loads(json.dumps(made[NAME].to_dict(), default=_plain))
    for key, value in stored.items():
        if key in (*_USED, *_FREE):
            continue
        # newer versions have more keys
        same = value == plain.get(key) or not (key in plain or value)
        expected = f"{plain.get(key)!r:.40}, as specheads' have it"
        manifest.expect(same, f"{about}: {key}", value, expected)


def _plain(value: object) -> object:
    """Return what JSON can hold, as peft writes it."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
