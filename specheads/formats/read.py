"""Bring checkpoints of others into a native export: Medusa heads, alone or beside their base.

``medusa_lm_head.safetensors`` of the original repository (both versions), ``model.safetensors`` of
vLLM's layout, a whole model with ``medusa_head.*`` among its tensors, and the published Hydra heads
(:mod:`specheads.formats.hydra`). Sizes are held to the base's before anything is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError
from specheads.formats import hydra as hydra_published
from specheads.formats import medusa
from specheads.formats.medusa import check_sizes, layout_of, read_heads
from specheads.formats.write import recorded_dtype
from specheads.models.base import (
    check_tokenizer,
    load_base_model,
    load_config,
    load_tokenizer,
    torch_dtype,
)
from specheads.models.checkpoint import save_export
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import (
    MANIFEST,
    PROVENANCE,
    TensorFiles,
    open_pickle,
    open_safetensors,
    read_json,
)
from specheads.models.names import base_digest, model_folder, weight_files
from specheads.models.output import output_layer

_FILES = ("medusa_lm_head", "hydra_lm_head")
_NUM_NODES = 16  # of the tree until one was searched
_COUNTS = (
    "medusa_num_heads", "num_medusa_heads", "medusa_num_layers", "num_medusa_layers", "medusa",
)  # fmt: skip


def is_foreign(checkpoint: str | Path) -> bool:
    """Return whether a folder holds heads that ``bring_in`` may know, from names alone."""
    folder = Path(checkpoint)
    return folder.is_dir() and (
        _heads_file(folder) is not None
        or bool(_config_of_others(folder).keys() & {*_COUNTS, "hydra_num_heads", "medusa_fc_bias"})
    )


def bring_in(
    checkpoint: str, base: str, output: Path, *, dtype: str | None, allow_pickle: bool
) -> list[str]:
    """Write a native export of a foreign checkpoint, whole or not at all.

    Args:
        checkpoint: its folder.
        base: the base model that the heads are for; of a whole model, the one it was made from.
        output: a new folder.
        dtype: of the written tensors; None keeps each as it is.
        allow_pickle: read a ``.pt``, tensors alone.

    Returns:
        What the user has to know, in lines.

    Raises:
        ConfigError: one line, if the folder is of no known layout, holds a tensor that has no place
            in it, or heads that a native export cannot hold exactly, or ones of another base.
        RunError: if the disk is full.
    """
    folder = Path(checkpoint)
    config = _config_of(folder)
    if single := _heads_file(folder):
        hydra = single.stem == "hydra_lm_head"
        files = _opened(single, allow_pickle)
    elif weights := weight_files(folder):
        files = open_safetensors(weights)
        if any(name.startswith(medusa.PREFIX) for name in files.header):
            return _bring_whole(folder, base, output, files, config, dtype)
        hydra = "hydra_num_heads" in config
    else:
        raise ConfigError(
            f"{folder} holds no heads of a known layout: neither {_FILES[0]}.safetensors nor .pt,"
            f" {_FILES[1]}, nor model.safetensors"
        )
    layout = None if hydra else layout_of(files, config)
    hydra_heads = hydra_published.layout_of(files, config) if hydra else None
    hidden_size, vocab_size = _sizes(base)
    if layout is not None:
        check_sizes(files, layout, config, hidden_size, vocab_size)
    if hydra_heads is not None:
        hydra_published.check_sizes(files, hydra_heads, hidden_size, vocab_size)
    model = load_base_model(base, dtype=recorded_dtype(base), device="cpu")
    digest = base_digest(base)
    form = output_layer(model)
    if hydra_heads is not None:
        heads = hydra_published.build(files, hydra_heads, model, form)
        notes = hydra_heads.notes
    else:
        assert layout is not None
        heads = read_heads(files, layout, config, form)
        notes = layout.notes
    _save(output, heads, model, base, digest, folder, dtype, tuned=None)
    return [f"{heads.num_heads} {heads.kind} heads of {files.where.name}", *notes, *_last(output)]


def _bring_whole(
    folder: Path, base: str, output: Path, files: TensorFiles, config: dict[str, Any],
    dtype: str | None,
) -> list[str]:  # fmt: skip
    """Bring in a whole model with heads; it becomes the export's own base."""
    own = {name for name in files.header if name.startswith(medusa.PREFIX)}
    inside = TensorFiles(
        files.where, {name: files.header[name] for name in own}, files.notes, files._files
    )
    layout = layout_of(inside, config)
    digest = base_digest(base)
    name = str(folder)
    if not (tuned := _tuned(files, own, base)):
        name = base
    check_sizes(inside, layout, config, *_sizes(name))
    with _quiet():  # the heads are known here, and reported by transformers as of no use
        model = load_base_model(
            name, dtype=recorded_dtype(name), device="cpu", beside=medusa.PREFIX
        )
    heads = read_heads(inside, layout, config, output_layer(model))
    for key in _COUNTS:
        vars(model.config).pop(key, None)
    _save(output, heads, model, base, digest, folder, dtype, tuned=model if tuned else None)
    if tuned:
        first = (
            f"{heads.num_heads} {heads.kind} heads, and the model they were in as a tuned {base}"
        )
    else:
        first = f"{heads.num_heads} {heads.kind} heads; the model they were in is {base} unchanged"
    return [
        first,
        *layout.notes,
        *_last(output),
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _sizes(name: str) -> tuple[int, int]:
    """Return hidden size and vocabulary of a model, from its config alone."""
    config = load_config(name).get_text_config()
    hidden_size, vocab_size = (getattr(config, key, 0) for key in ("hidden_size", "vocab_size"))
    if type(hidden_size) is not int or type(vocab_size) is not int or not hidden_size * vocab_size:
        raise ConfigError(f"base={name}: its config names no hidden_size and vocab_size")
    return hidden_size, vocab_size


def _tuned(files: TensorFiles, heads: set[str], base: str) -> bool:
    """Return whether the model around the heads has other weights than ``base``."""
    original = open_safetensors(weight_files(model_folder(base)))
    names = files.header.keys() - heads
    if names != original.header.keys():
        return True
    for name in sorted(names):
        if files.header[name] != original.header[name]:
            return True
        if not torch.equal(files.read([name])[name], original.read([name])[name]):
            return True
    return False


def _save(
    output: Path, heads: MedusaHeads, model: PreTrainedModel, base: str, digest: str, folder: Path,
    dtype: str | None, tuned: PreTrainedModel | None,
) -> None:  # fmt: skip
    tokenizer = load_tokenizer(str(folder) if tuned is not None else base)
    check_tokenizer(tokenizer, model)
    ranks = min(heads.num_outputs, 10)
    few = Tree.from_choices([[0] * depth for depth in range(1, heads.num_heads + 1)])
    save_export(
        output,
        heads,
        base_name=base,
        base_digest=digest,
        tokenizer=tokenizer,
        tree=default_tree(heads.num_heads, _NUM_NODES) if ranks == 10 else few,
        training={"recipe": "imported", "steps": None, "data": None, "from": folder.name},
        tuned_base=tuned,
        base_dtype=model.dtype,
        dtype=None if dtype is None else torch_dtype(dtype),
    )


def _config_of(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConfigError(
            f"checkpoint={folder}: there is no such folder; one of the hub is first downloaded: hf"
            f" download {folder} --local-dir <folder>"
        )
    if (folder / MANIFEST).is_file() or (folder / PROVENANCE).is_file():
        raise ConfigError(f"{folder} is an export of specheads already: leave base= out")
    return _config_of_others(folder)


def _config_of_others(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return read_json(file, "", strict=False) if file.is_file() else {}


def _heads_file(folder: Path) -> Path | None:
    for stem in _FILES:
        for end in (".safetensors", ".pt"):
            if (file := folder / f"{stem}{end}").is_file():
                return file
    return None


def _opened(file: Path, allow_pickle: bool) -> TensorFiles:
    if file.suffix == ".pt":
        return open_pickle(file, allow_pickle=allow_pickle)
    return open_safetensors([file])


def _last(output: Path) -> list[str]:
    return [
        "its tree is one for heads that nobody has measured; find its own:"
        f" python -m specheads.tree_search checkpoint={output}"
    ]
