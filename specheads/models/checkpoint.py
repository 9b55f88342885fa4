"""Exports: what users load. Heads, tokenizer, tree and (medusa2) the tuned base, in one folder.

A base tuned through an adapter is merged into ``base/``, or its adapter lies in ``adapter/`` and
the original, quantised as it was, is loaded under it. What config.json says of the heads, and what
their tensors are called, is the heads' own, see :class:`specheads.models.kinds.Heads`.

Everything is safetensors and JSON, written aside and renamed, and listed in ``manifest.json`` with
its size and sha256. Loading takes all of it or refuses with one line. Models alone are written as
Hugging Face folders.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from specheads.attention.tree import Tree
from specheads.config import ConfigError
from specheads.models import manifest
from specheads.models.adapters import has_adapter, load_adapter, plain_copy, save_adapter
from specheads.models.base import (
    Loading,
    check_tokenizer,
    load_base_model,
    load_tokenizer,
    output_device,
    torch_dtype,
    without_weights,
)
from specheads.models.block import BlockHeads
from specheads.models.digest import file_sha256
from specheads.models.eagle import EagleHeads
from specheads.models.export_config import check_config, check_tree
from specheads.models.heads import MedusaHeads
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads
from specheads.models.names import OURS, base_digest, resolve_name
from specheads.models.packed import pack_linears
from specheads.models.quantize import METHODS, quantization_of
from specheads.models.sharded import is_sharded, save_sharded
from specheads.system.files import shipped_export, whole_file, whole_folder
from specheads.system.hub import fetched_export
from specheads.system.redact import redact


def save_hf(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None,
) -> None:
    """Write model and tokenizer so that transformers, and what builds on it, can load them.

    An adapter is merged in what is written, and a quantised base under it dequantised. The caller's
    model stays as it is; ``dtype`` is that of the written tensors, None keeps theirs.
    """
    if is_sharded(model):
        save_sharded(folder, model, dtype)
        _finish_model(folder, tokenizer, dtype)
        return
    if has_adapter(model):
        model = plain_copy(model, model.dtype)
    _write_model(folder, model, cast_tensors(model.state_dict(), dtype), tokenizer, dtype)


def save_as(
    folder: Path,
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    base: PreTrainedModel,
    extra: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``base`` and more tensors as a model of class ``kind``, with its names for them.

    An adapter is merged and a quantised base dequantised in what is written. All tensors get one
    dtype, the base's if it is None, but those that the class keeps in float32.

    Raises:
        ConfigError: if the base is quantised in a way that cannot be undone.
    """
    if has_adapter(base) or quantization_of(base):
        base = plain_copy(base, base.dtype)
    state, dtype = base.state_dict() | extra, dtype or base.dtype
    vars(config).pop("quantization_config", None)  # what is written is numbers
    with torch.device("meta"):
        model: Any = kind(config)  # only its class and config are used
    if base.can_generate():
        model.generation_config = base.generation_config
    wide = model._keep_in_fp32_modules_strict
    exact = {k: tensor for k, tensor in state.items() if any(part in k for part in wide)}
    _write_model(folder, model, cast_tensors(state, dtype) | exact, tokenizer, dtype)


def _write_model(
    folder: Path,
    model: PreTrainedModel,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype | None,
) -> None:
    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)  # to unwrap the model accelerate imports deepspeed: it warns
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        logging.disable(silenced)
    _finish_model(folder, tokenizer, dtype)


def _finish_model(
    folder: Path, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype | None
) -> None:
    """Write the tokenizer beside a model, and into its config the dtype of what was written."""
    if dtype is not None:
        config = manifest.read_json(folder / "config.json", "", strict=False)
        config["dtype"] = str(dtype).removeprefix("torch.")
        manifest.write_json(folder / "config.json", config, strict=False)
    tokenizer.save_pretrained(folder)


def cast_tensors(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return ``tensors`` in ``dtype``; what shares memory (tied matrices) stays one tensor."""
    done: dict[tuple[object, ...], Tensor] = {}
    cast = {}
    for name, tensor in tensors.items():
        # tensors without memory of their own (empty ones) are never taken for one another
        key = (tensor.data_ptr() or name, tensor.shape, tensor.stride())
        if key not in done:
            keep = dtype is None or not tensor.is_floating_point()
            done[key] = tensor if keep else tensor.to(dtype)
        cast[name] = done[key]
    return cast


# by the ``kind`` of config.json
KINDS: dict[str, type[Heads]] = {
    "medusa": MedusaHeads,
    "hydra": MedusaHeads,
    "mtp": MtpHeads,
    "block": BlockHeads,
    "eagle3": EagleHeads,
}


def named_tensors(heads: Heads) -> dict[str, Tensor]:
    """Return the tensors of ``heads`` by the names that an export gives them."""
    return {heads.tensor_prefix + name: tensor for name, tensor in heads.state_dict().items()}


HEADS_FILE = "model.safetensors"
_SMALL_HEADS = 1 << 22  # parameters: 16 MB in float32


def load_heads_file(path: Path, config: dict[str, Any]) -> Heads:
    """Build the heads of an export's ``config`` and read all of their tensors, and no others.

    Raises:
        ConfigError: one line, if config and tensors do not fit together.
    """
    # without memory; nor is time lost for drawing weights that are replaced at once
    odd = manifest.said_of(path / _CONFIG, TypeError, ArithmeticError, RuntimeError)
    with odd, torch.device("meta"):
        heads = KINDS[config["kind"]].from_config(config)
    file, wanted = path / HEADS_FILE, named_tensors(heads)
    tensors = manifest.read_tensors(file, wanted)
    with manifest.one_line(f"{path / _CONFIG}: no rotary table"):
        heads.make_tables()  # not before: the tensors have told how large they may be
    if (ids := tensors.get("token_map")) is not None:
        manifest.check_ids(f"{file}: token_map", ids, config["vocab_size"], len(ids))
    state = {name.removeprefix(heads.tensor_prefix): each for name, each in tensors.items()}
    heads.load_state_dict(state, assign=True)
    return heads


def as_loaded(heads: Heads, base: PreTrainedModel, dtype: torch.dtype | None = None) -> Heads:
    """Put heads where an export's are that is loaded with ``base``; see :func:`placed`.

    Args:
        heads: changed in place.
        base: their base model.
        dtype: None takes the base's.
    """
    heads.read_through(base)
    return placed(heads, output_device(base), dtype or base.dtype)


def placed(heads: Heads, device: torch.device, dtype: torch.dtype) -> Heads:
    """Put heads where and how they decode with a base of a dtype, and return them.

    They take the base's dtype, but small ones are float32 on a CPU, which takes several times as
    long for a product of one row with a small bfloat16 matrix, and they make dozens of them in a
    step. Block heads make few, of several rows, and bfloat16 is packed for those. Which tokens come
    depends on the base model alone.
    """
    small = sum(parameter.numel() for parameter in heads.parameters()) <= _SMALL_HEADS
    packed = heads.kind == "block" and dtype == torch.bfloat16
    if small and not packed and device.type == "cpu" and dtype.itemsize < 4:
        dtype = torch.float32
    pack_linears(heads.to(device=device, dtype=dtype).eval())
    return heads


FORMAT_VERSION = 1
_CONFIG, _BASE, _ADAPTER = "config.json", "base", "adapter"
_SECTIONS: dict[str, tuple[str, ...]] = {
    "base": ("name", "tuned", "revision", "digest", "dtype"),
    "tokenizer": ("digest",),
    "tree": ("choices", "expected_accept_length", "measured_on"),
}


_NOUNS = {"vocab_size": "outputs", "hidden_size": "hidden numbers"}


class OtherBaseError(ConfigError):
    """The base model at hand is not the one that the heads were trained on."""


@dataclass(frozen=True)
class Export:
    """A loaded export, in eval mode; ``config`` is what its config.json holds."""

    base: PreTrainedModel
    heads: Heads
    tokenizer: PreTrainedTokenizerBase
    tree: Tree
    config: dict[str, Any]


def origin(
    name: str,
    training: dict[str, Any],
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    quantization: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what an export says of the original base model, and of the training, for saving it.

    Args:
        name: as the user gave it; empty where there is none, because the base was trained from
            scratch. The tuned base is then all there is.
        training: JSON: recipe, steps, data, held-out losses.
        revision: of a hub model.
        dtype: in which an unchanged base was used.
        quantization: ``quantization_of`` an unchanged base; a tuned one says it itself.
    """
    described = not name or without_weights(name)  # a base of which there is no digest
    base = {
        "name": name,
        "revision": revision if name else None,
        "digest": "" if described else base_digest(name, revision=revision),
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": quantization,
    }
    return {"base": base, "training": training}


def save_export(
    path: str | Path,
    heads: Heads,
    tokenizer: PreTrainedTokenizerBase,
    tree: Tree,
    info: dict[str, Any],
    *,
    tuned_base: PreTrainedModel | None = None,
    merge: bool = False,
    dtype: str | torch.dtype | None = None,
) -> None:
    """Write an export, whole or not at all; an earlier one at ``path`` is replaced at the end.

    Args:
        path: the folder.
        heads: to save.
        tokenizer: saved with its chat template.
        tree: to decode with; :func:`set_tree` adds what was measured of it.
        info: from :func:`origin`, or the config.json of an export, of which the sections ``base``
            and ``training`` are taken.
        tuned_base: the adapted base where the recipe changed it. Of one in parts
            (``models/sharded.py``) other ranks call ``take_part``.
        merge: write a base with an adapter merged, to ``base/``; the adapter alone otherwise.
        dtype: of the saved tensors; None keeps each as it is.

    Raises:
        ValueError: if the tree is deeper than there are heads, or there is neither an original
            nor a tuned base.
        RunError: if the disk is full.
    """
    path, base, about = Path(path), info["base"], heads.to_config()
    unmeasured = {"choices": tree.to_json(), "expected_accept_length": None, "measured_on": None}
    check_tree(unmeasured, about)
    if not base["name"] and tuned_base is None:
        raise ValueError("base.name is empty, and there is no tuned_base to be found instead")
    target = None if dtype is None else torch_dtype(dtype)
    adapter = tuned_base is not None and has_adapter(tuned_base) and not merge
    used, quantization = base.get("dtype", "float32"), base.get("quantization")
    if tuned_base is not None:
        used = tuned_base.dtype if adapter else target or tuned_base.dtype
        quantization = quantization_of(tuned_base) if adapter else None
    name, revision = findable(base["name"]), base.get("revision")
    with whole_folder(path) as folder:
        tensors = cast_tensors(named_tensors(heads), target)
        manifest.save_tensors(folder / HEADS_FILE, tensors, {"format": "pt"})
        tokenizer.save_pretrained(folder)
        if tuned_base is not None and adapter:
            save_adapter(folder / _ADAPTER, tuned_base, name, revision)
        elif tuned_base is not None:
            save_hf(folder / _BASE, tuned_base, tokenizer, target)
        files = {file.name: file_sha256(file) for file in folder.iterdir() if file.is_file()}
        config = {
            "format_version": FORMAT_VERSION,
            **about,
            "base": {
                "name": name,
                "tuned": tuned_base is not None,
                "adapter": adapter,
                "revision": revision,
                "digest": base["digest"],
                "dtype": str(torch_dtype(used)).removeprefix("torch."),
                "quantization": quantization,
            },
            "tokenizer": {"digest": _tokenizer_digest(files)},
            "tree": unmeasured,
            "training": redact(info["training"]),
        }
        manifest.write_json(folder / _CONFIG, config)
        manifest.write_manifest(folder)


def load_export(
    path: str | Path,
    *,
    base: str | None = None,
    other_base: bool = False,
    beside: Export | None = None,
    **loading: Unpack[Loading],
) -> Export:
    """Load base model, heads, tokenizer and tree, and check that they belong together.

    The heads are to be decoded with: they do not learn until ``heads.requires_grad_()``.

    Args:
        path: an export folder, its name on the hub (``owner/name``, ``owner/name@revision``), or
            ``smollm2`` for the shipped one.
        base: where the original base model is now, if not under its recorded name.
        other_base: a base of other weights is taken, with a line that says so.
        beside: an export that is loaded already, whose base model, of the same weights, is shared.
        **loading: how and where the base goes, see :class:`specheads.models.base.Loading`; its
            dtype, which is also that of the heads (see :func:`as_loaded`), is the recorded one
            unless given. Heads go where the base's output layer is.

    Raises:
        ConfigError: one line with both numbers, if a file is missing, truncated or changed, the
            base or its vocabulary is another, tensors are missing or unexpected, or the tree is
            deeper than there are heads.
    """
    path = Path(fetched_export(shipped_export(str(path))))
    config = read_config(path)
    _check_tokenizer_files(path, config, manifest.check_manifest(path))
    with manifest.said_of(f"{path / _CONFIG}: tree", TypeError):
        tree = Tree.from_choices(config["tree"]["choices"])
    heads = load_heads_file(path, config)
    if beside is not None:
        _check_shared(path, config, beside.config)
        heads = as_loaded(heads, beside.base).requires_grad_(False)
        return Export(beside.base, heads, beside.tokenizer, tree, config)
    model = _load_base(path, config, base, loading, other_base=other_base)
    trusted = loading.get("trust_remote_code", False)
    tokenizer = load_tokenizer(str(path), trust_remote_code=trusted)
    check_tokenizer(tokenizer, model)
    if heads.lm_head.startswith("shared") and model.get_output_embeddings().weight.is_meta:
        raise ConfigError(f"{path}: its heads share the output layer; device_map offloads that one")
    dtype = torch_dtype(loading.get("dtype") or config["base"]["dtype"])
    heads = as_loaded(heads, model, dtype).requires_grad_(False)
    return Export(model, heads, tokenizer, tree, config)


def _load_base(
    path: Path, config: dict[str, Any], base: str | None, loading: Loading, *, other_base: bool
) -> PreTrainedModel:
    """Load the base model of an export: its own, ``base``, or the recorded one."""
    info = config["base"]
    inside = info["tuned"] and not info.get("adapter")  # no original is needed
    if inside and base is not None:
        raise ConfigError(f"{path} brings its own tuned base model; base={base} cannot replace it")
    name = str(path / _BASE) if inside else base or info["name"]
    if not name:
        raise ConfigError(
            f"{path / _CONFIG}: base.name is empty, and the export has no base of its own"
        )
    revision = None if inside or base else info["revision"]
    options: dict[str, Any] = {"attn": "auto", "dtype": info["dtype"]}
    options |= {key: value for key, value in loading.items() if value is not None}
    quantization = _quantization(path, info)
    try:
        if local := not inside and (folder := Path(resolve_name(name))).is_dir():
            # before it is loaded: a stranger's config may name any path
            about = manifest.read_json(
                folder / "config.json", f"{folder} is no model", strict=False
            )
            _check_sizes(path, config, name, about)
            check_digest(path, config, name, other_base=other_base)
        model = load_base_model(name, revision=revision, quantization=quantization, **options)
    except OtherBaseError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{path} needs its base model: {error}") from None
    # a config may lie about its sizes, and the files of a hub model are there only now
    shape = model.get_output_embeddings().weight.shape
    _check_sizes(path, config, name, dict(zip(_NOUNS, shape, strict=True)))
    if not inside and not local:
        check_digest(path, config, name, revision=revision, other_base=other_base)
    if info.get("adapter"):
        load_adapter(model, path / _ADAPTER)
    return model


def load_heads(path: str | Path) -> Heads:
    """Load the heads of an export without its base model, to go on training them.

    Raises:
        ConfigError: if ``path`` is no whole export.
    """
    path = Path(path)
    config = read_config(path)
    manifest.check_manifest(path)
    return load_heads_file(path, config)


def set_tree(
    path: str | Path,
    tree: Tree,
    expected_accept_length: float | None = None,
    measured_on: dict[str, Any] | None = None,
    *,
    heldout: dict[str, float] | None = None,
) -> None:
    """Replace the tree of an export, and its manifest with it.

    Args:
        path: the export.
        tree: to decode with.
        expected_accept_length: of ``tree`` where it was measured.
        measured_on: JSON about that measurement.
        heldout: figures for the ``training`` section; None leaves it as it is.

    Raises:
        ConfigError: if ``path`` is no export, or the tree is deeper than there are heads, or wider
            than the tokens that they know.
    """
    path = Path(path)
    config = read_config(path)
    listed = manifest.check_manifest(path)
    config["tree"] = {
        "choices": tree.to_json(),
        "expected_accept_length": expected_accept_length,
        "measured_on": measured_on,
    }
    check_tree(config["tree"], config)
    if heldout is not None:
        config["training"] = {**config["training"], "heldout": heldout}
    with whole_file(path / manifest.MANIFEST) as listing, whole_file(path / _CONFIG) as about:
        manifest.write_json(about, config)
        listed["files"][_CONFIG] = manifest.manifest_entry(about)
        manifest.write_json(listing, listed)


def save_plain_model(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str | torch.dtype | None = None,
) -> None:
    """Write a model as a plain Hugging Face folder, whole or not at all; for pretraining.

    Raises:
        RunError: if the disk is full.
    """
    with whole_folder(Path(path)) as folder:
        save_hf(folder, model, tokenizer, None if dtype is None else torch_dtype(dtype))


def read_config(path: str | Path) -> dict[str, Any]:
    """Read an export's config.json without loading anything else.

    Raises:
        ConfigError: if there is none, or this version of specheads cannot read it.
    """
    path = Path(path)
    config = manifest.read_json(path / _CONFIG, f"{path} is not an export of specheads")
    version, kind = config.get("format_version"), config.get("kind")
    if version is None:
        raise ConfigError(f"{path} is not an export of specheads: {_CONFIG} has no format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {version!r:.20}, this specheads reads {FORMAT_VERSION}"
        )
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise ConfigError(f"{path} holds kind {kind!r:.40}, this specheads reads {known}")
    for section, keys in {"": KINDS[kind].config_keys, **_SECTIONS}.items():
        values = config.get(section) if section else config
        for key in keys:
            if not isinstance(values, dict) or key not in values:
                raise ConfigError(f"{path / _CONFIG} lacks {f'{section}.{key}'.lstrip('.')}")
    check_config(path / _CONFIG, config)
    return config


def _check_sizes(path: Path, config: dict[str, Any], name: str, sizes: dict[str, Any]) -> None:
    for key, noun in _NOUNS.items():
        if type(size := sizes.get(key)) is int and size != config[key]:
            raise OtherBaseError(
                f"{path} was trained for a base model with {config[key]} {noun}, {name} has {size}"
            )


def check_digest(
    path: Path,
    config: dict[str, Any],
    name: str,
    *,
    revision: str | None = None,
    other_base: bool = False,
) -> None:
    """Hold the weights of a base to those that an export was trained on.

    Args:
        path: the export.
        config: its config.json.
        name: of the base, whose files have been downloaded.
        revision: of a hub model.
        other_base: only print that they are others.

    Raises:
        OtherBaseError: one line with both digests.
    """
    if (found := base_digest(name, revision=revision)) == config["base"]["digest"]:
        return
    told = (
        f"{path} was trained on other weights than those of {name}: digest"
        f" {config['base']['digest'][:12]} recorded, {found[:12]} found"
    )
    if not other_base:
        raise OtherBaseError(
            f"{told}; other_base=true, or model.other_base=true in"
            " training, takes them all the same"
        )
    print(f"specheads: {told}; tokens stay exact, acceptance may differ", file=sys.stderr)


def _check_shared(path: Path, config: dict[str, Any], beside: dict[str, Any]) -> None:
    if config["base"]["tuned"] or beside["base"]["tuned"]:
        whose = path if config["base"]["tuned"] else "the export beside it"
        raise ConfigError(
            f"{path} cannot share a base model: {whose} brings a tuned one of its own"
        )
    mine, theirs = config["base"]["digest"], beside["base"]["digest"]
    if mine != theirs:
        raise ConfigError(
            f"{path} was trained on other weights: base digest {mine[:12]} recorded, the export"
            f" beside it has {theirs[:12]}"
        )


def _quantization(path: Path, info: dict[str, Any]) -> str:
    """Return how the base is to be quantised while it is loaded."""
    recorded = info.get("quantization") or {"own": True}
    if recorded.get("own"):
        return "none"  # or as its own files say
    method = recorded.get("method")
    known = ", ".join(METHODS)
    manifest.expect(method in METHODS, f"{path / _CONFIG}: base.quantization.method", method, known)
    return str(method)


def findable(name: str) -> str:
    """Return a base model's name as others can use it: the full path of a folder or GGUF file.

    A relative path would mean another one for whoever loads the export. An empty name, where there
    is no original, stays empty, and is not the current folder.
    """
    path = Path(name).expanduser()
    known = not name or name in OURS or not path.exists()
    return name if known else str(path.resolve())


def _tokenizer_digest(files: dict[str, str]) -> str:
    """Return one sha256 over those of the files of an export that are its tokenizer's."""
    names = sorted(files.keys() - {HEADS_FILE, _CONFIG})
    return hashlib.sha256("".join(f"{n}\0{files[n]}\n" for n in names).encode()).hexdigest()


def _check_tokenizer_files(path: Path, config: dict[str, Any], entries: dict[str, Any]) -> None:
    recorded = config["tokenizer"]["digest"]
    listed = {n: entry["sha256"] for n, entry in entries["files"].items() if "/" not in n}
    if (found := _tokenizer_digest(listed)) != recorded:
        raise ConfigError(
            f"{path} has another tokenizer than it was saved with: digest"
            f" {recorded!r:.14} recorded, {found[:12]} found"
        )
