"""Bring checkpoints of others into a native export: heads alone, or beside their base.

``medusa_lm_head.safetensors`` of the original repository (both versions), ``model.safetensors`` of
vLLM's layout, a whole model with ``medusa_head.*`` among its tensors, the published Hydra heads
(:mod:`specheads.formats.head_files`), DFlash, DSpark and EAGLE-3
(:mod:`specheads.formats.drafters`). Sizes are held to the base's before anything is read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError
from specheads.formats import drafters, head_files, medusa
from specheads.formats.write import recorded_dtype
from specheads.models import manifest
from specheads.models.base import check_tokenizer, load_base_model, load_config, load_tokenizer
from specheads.models.checkpoint import origin, save_export
from specheads.models.digest import weight_files
from specheads.models.names import model_folder

_FILES = [f"{stem}_lm_head{end}" for stem in ("medusa", "hydra") for end in (".safetensors", ".pt")]
_NUM_NODES = 16  # of the tree until one was searched
# keys that the config of a whole model has of its heads
_COUNTS = ["medusa", *(s.format(w) for s in medusa.SPELLINGS for w in ("heads", "layers"))]


def is_foreign(checkpoint: str | Path) -> bool:
    """Return whether a folder holds heads that ``bring_in`` may know, from names alone."""
    folder = Path(checkpoint)
    if any((folder / name).is_file() for name in _FILES):
        return True
    config = _config_of(folder)
    known = {*_COUNTS, "hydra_num_heads", "medusa_fc_bias"}
    return bool(drafters.kind_of(config)) or not config.keys().isdisjoint(known)


def bring_in(
    checkpoint: str, base: str, output: Path, *, dtype: torch.dtype | None, allow_pickle: bool
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
    layout, around = _open(folder, allow_pickle)
    # a whole model of other weights than the base's becomes the export's own base
    tuned = around is not None and _is_tuned(around, base)
    name = str(folder) if tuned else base
    layout.check_sizes(*_sizes(name))
    before = logging.get_verbosity()
    if tuned:  # the heads are known here, and reported by transformers as of no use
        logging.set_verbosity_error()
    try:
        beside = None if around is None else medusa.PREFIX
        model = load_base_model(name, dtype=recorded_dtype(name), device="cpu", beside=beside)
    finally:
        logging.set_verbosity(before)
    heads, tokenizer = layout.read(model), load_tokenizer(name)
    check_tokenizer(tokenizer, model)
    for key in _COUNTS:
        vars(model.config).pop(key, None)
    # a default tree takes up to the tenth guess of a head
    chain = Tree.from_choices([[0] * depth for depth in range(1, heads.num_heads + 1)])
    tree = chain if heads.num_outputs < 10 else default_tree(heads.num_heads, _NUM_NODES)
    training = {"recipe": "imported", "steps": None, "data": None, "from": folder.name}
    info, tuned_base = origin(base, training, dtype=model.dtype), model if tuned else None
    save_export(output, heads, tokenizer, tree, info, tuned_base=tuned_base, dtype=dtype)
    found = f" of {layout.files.where.name}"
    if around is not None:
        found = f"; the model they were in is {base} unchanged"
        if tuned:
            found = f", and the model they were in as a tuned {base}"
    return [
        f"{heads.num_heads} {heads.kind} heads{found}",
        *layout.notes,
        "its tree is one for heads that nobody has measured; find its own:"
        f" python -m specheads.tree_search checkpoint={output}",
    ]


def _open(
    folder: Path, allow_pickle: bool
) -> tuple[head_files.Layout | drafters.Layout, manifest.TensorFiles | None]:
    """Return the layout of the heads in a folder, and the model around them if there is one."""
    if not folder.is_dir():
        raise ConfigError(
            f"checkpoint={folder}: there is no such folder; one of the hub is first downloaded: hf"
            f" download {folder} --local-dir <folder>"
        )
    if (folder / manifest.MANIFEST).is_file() or (folder / manifest.PROVENANCE).is_file():
        raise ConfigError(f"{folder} is an export of specheads already: leave base= out")
    config = _config_of(folder)
    if single := next((folder / name for name in _FILES if (folder / name).is_file()), None):
        if single.suffix == ".pt":
            files = manifest.open_pickle(single, allow_pickle=allow_pickle)
        else:
            files = manifest.open_safetensors([single])
        return head_files.Layout(files, config), None
    if not (weights := weight_files(folder)):
        raise ConfigError(
            f"{folder} holds no heads of a known layout: neither medusa_lm_head.safetensors nor"
            " .pt, hydra_lm_head, nor model.safetensors"
        )
    files = manifest.open_safetensors(weights)
    if drafters.kind_of(config):
        return drafters.Layout(files, config), None
    inside = {name: each for name, each in files.header.items() if name.startswith(medusa.PREFIX)}
    if inside:
        rest = {name: each for name, each in files.header.items() if name not in inside}
        layout = head_files.Layout(replace(files, header=inside), config)
        return layout, replace(files, header=rest)
    return head_files.Layout(files, config), None


def _config_of(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return manifest.read_json(file, "", strict=False) if file.is_file() else {}


def _sizes(name: str) -> tuple[int, int]:
    """Return hidden size and vocabulary of a model, from its config alone."""
    config = load_config(name).get_text_config()
    hidden_size, vocab_size = (getattr(config, key, 0) for key in ("hidden_size", "vocab_size"))
    if type(hidden_size) is not int or type(vocab_size) is not int or not hidden_size * vocab_size:
        raise ConfigError(f"base={name}: its config names no hidden_size and vocab_size")
    return hidden_size, vocab_size


def _is_tuned(files: manifest.TensorFiles, base: str) -> bool:
    """Return whether the model around the heads has other weights than ``base``."""
    original = manifest.open_safetensors(weight_files(model_folder(base)))
    return files.header != original.header or not all(
        torch.equal(files.read([name])[name], original.read([name])[name])
        for name in sorted(files.header)
    )
