"""A base model whose decoder layers lie in parts on the ranks of ZeRO-3: no rank holds it whole.

Layers are read one after the other: rank 0 reads a layer's tensors from the files, DeepSpeed hands
them out and keeps a part on every rank (Rajbhandari et al., arXiv:1910.02054, stage 3). What is
outside of the layers, the embedding, the output matrix and the last norm, stays whole on every
rank, as heads and losses read it themselves; an engine of ZeRO-3 divides that too while it trains.

What runs, merges or writes such a model is collective: all ranks do it together.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specheads.models import base as bases
from specheads.models import manifest
from specheads.models.adapters import plain_copy
from specheads.models.digest import weight_files
from specheads.models.names import model_folder, resolve_name
from specheads.models.output import layers_of
from specheads.system import dist


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of ``model`` lie in parts on the ranks."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def load_sharded(
    name: str,
    settings: dict[str, Any],
    *,
    dtype: torch.dtype,
    attn: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel | None, str]:
    """Load a base model layer by layer into parts; the ranks' group has been started.

    Args:
        name: a folder, or a name on the hub.
        settings: DeepSpeed's, with ZeRO-3.
        dtype: of the weights.
        attn: transformers' attention implementation, or ``auto``.
        revision: of a hub model.
        trust_remote_code: run modelling code that comes with the model.

    Returns:
        The model, in eval mode and frozen, and an empty text; or None, and why it cannot be read
        so: transformers joins or renames tensors of its files, or it has no list of layers.

    Raises:
        ConfigError: if the model cannot be found, or a file is damaged.
    """
    import deepspeed
    from accelerate import init_empty_weights

    place = resolve_name(name)
    manifest.check_model_files(name, place, trust_remote_code=trust_remote_code)
    config = bases.load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    with manifest.one_line(f"cannot load model.name={name}"):
        # tables, as of rotary embeddings, lie in no file
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=None if attn == "auto" else attn,
                trust_remote_code=trust_remote_code,
            )  # fmt: skip
        files = manifest.open_safetensors(weight_files(model_folder(name, revision=revision)))
        if why := _unlike(model, files):
            return None, why
        bases.take_generation_config(model, name, revision)
        device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
        prefixes = [prefix for prefix, _ in _layers(model)]
        keys = [key for key in model.state_dict() if key in files.header]
        for prefix, layer in _layers(model):
            _fill(model, (key for key in keys if key.startswith(prefix)), files, device)
            deepspeed.zero.Init(module=layer, config_dict_or_path=settings)
        outside = (key for key in keys if not key.startswith(tuple(prefixes)))
        _fill(model, outside, files, device, everywhere=True)
        model.tie_weights()
    model.name_or_path = name
    return model.eval().requires_grad_(False), ""


def _unlike(model: PreTrainedModel, files: manifest.TensorFiles) -> str:
    """Return in what the names and shapes of files and model differ; empty if in nothing."""
    try:
        layers_of(model)
    except ValueError as error:
        return str(error)
    there = {name: shape for name, (shape, _) in files.header.items()}
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    odd = {name for name in there.keys() | here.keys() if there.get(name) != here.get(name)}
    odd -= model.all_tied_weights_keys.keys() - there.keys()  # the other name is stored
    if model._keep_in_fp32_modules_strict and model.dtype != torch.float32:
        return f"{type(model).__name__} keeps some of its weights in float32"
    if not odd:
        return ""
    return f"{min(odd)} is {there.get(min(odd))} in its files, {here.get(min(odd))} in the model"


def _fill(
    model: PreTrainedModel,
    keys: Iterable[str],
    files: manifest.TensorFiles,
    device: torch.device,
    *,
    everywhere: bool = False,
) -> None:
    """Give some tensors of a model the numbers of the files; on rank 0 alone, or on every rank."""
    for key in keys:
        place, _, name = key.rpartition(".")
        module = model.get_submodule(place)
        tensor, is_parameter = getattr(module, name), name in module._parameters
        if everywhere or dist.is_main() or not is_parameter:
            filled = files.read([key])[key].to(device, tensor.dtype)
        else:  # DeepSpeed sends what rank 0 has
            filled = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        setattr(module, name, nn.Parameter(filled, requires_grad=False) if is_parameter else filled)


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Return the decoder's layers, each with how the names of its tensors begin."""
    layers = layers_of(model)
    start = next(name for name, module in model.named_modules() if module is layers)
    return ((f"{start}.{number}.", layer) for number, layer in enumerate(layers))


def whole_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Return the layers with how their names begin, each whole on all ranks while it has its turn.

    A model that does not lie in parts has them all along.
    """
    for prefix, layer in _layers(model):
        with whole(layer):
            yield prefix, layer


def take_part(model: PreTrainedModel) -> None:
    """Do what other ranks have to do while rank 0 saves the model."""
    for _ in whole_layers(model):
        pass


@contextlib.contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Put the parts of a module's parameters together on all ranks while the context is open."""
    with contextlib.ExitStack() as gathered:
        for parameter in module.parameters() if is_sharded(module) else ():
            import deepspeed

            # one by one, as DeepSpeed holds what it gathers at one time twice for a moment
            gathered.enter_context(deepspeed.zero.GatheredParameters(parameter))
        yield


@contextlib.contextmanager
def runnable(model: PreTrainedModel) -> Iterator[None]:
    """Let a model in parts be run by all ranks together, each layer whole while it computes.

    Not while an engine trains it, which does the same. Any other model runs as it is.
    """
    with contextlib.ExitStack() as handles:
        for _, layer in _layers(model) if is_sharded(model) else ():
            gathered = contextlib.ExitStack()

            def enter(layer: nn.Module, _: Any, gathered: contextlib.ExitStack = gathered) -> None:
                gathered.enter_context(whole(layer))

            def leave(*_: Any, gathered: contextlib.ExitStack = gathered) -> None:
                gathered.close()

            handles.callback(layer.register_forward_pre_hook(enter).remove)
            handles.callback(layer.register_forward_hook(leave, always_call=True).remove)
        yield


def save_sharded(folder: Path, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Write a model in parts as a Hugging Face folder, a file for each layer, its adapter merged.

    Rank 0 calls it, which holds one layer whole at a time; the others call :func:`take_part`.

    Args:
        folder: to write into.
        model: in parts.
        dtype: of what is written; None keeps each tensor's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers, place, total = len(layers_of(model)), dict[str, str](), 0
    # the names of the original: an adapter is merged, and wraps nothing any more
    tied = model.all_tied_weights_keys

    def write(number: int, tensors: dict[str, Tensor]) -> None:
        nonlocal total
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        tensors = {name: each.to(dtype or each.dtype) for name, each in tensors.items()}
        manifest.save_tensors(folder / file, tensors, {"format": "pt"})
        place.update(dict.fromkeys(tensors, file))
        total += sum(each.numel() * each.element_size() for each in tensors.values())

    prefixes = []
    for number, (prefix, layer) in enumerate(whole_layers(model), start=2):
        prefixes.append(prefix)
        plain = plain_copy(layer, model.dtype).state_dict()
        write(number, {prefix + name: tensor for name, tensor in plain.items()})
        del plain
        gc.collect()  # copies of modules that DeepSpeed has wrapped hold themselves
    outside = model.state_dict().items()
    write(1, {n: t for n, t in outside if n not in tied and not n.startswith(tuple(prefixes))})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    manifest.write_json(folder / "model.safetensors.index.json", index, strict=False)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
