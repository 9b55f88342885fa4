"""Heads of every kind as files: what config.json says of them, and their tensors.

Tensors of MTP heads are called ``mtp.layers.{k}.*``, the others' ``heads.{i}.*`` and ``prefix.*``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.models.base import output_device
from specheads.models.foreign import one_line
from specheads.models.heads import MedusaHeads
from specheads.models.hf import cast_tensors
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads
from specheads.models.mtp_layer import config_from_json
from specheads.models.tensor_headers import check_header, read_tensors

HEADS_FILE = "model.safetensors"
_SMALL_HEADS = 1 << 23  # parameters: 32 MB in float32
_MTP_PREFIX = "mtp."
_MEDUSA_KEYS = ("num_heads", "num_layers", "lm_head", "hidden_size", "vocab_size")
# keys that an export of each kind must have
KIND_KEYS: dict[str, tuple[str, ...]] = {
    "medusa": _MEDUSA_KEYS,
    "hydra": _MEDUSA_KEYS,
    "mtp": ("num_heads", "variant", "lm_head", "block", "hidden_size", "vocab_size"),
}


def heads_section(heads: Heads) -> dict[str, Any]:
    """Return, as JSON, what :func:`build_heads` builds the same heads from."""
    if isinstance(heads, MtpHeads):
        return {
            "kind": heads.kind,
            "num_heads": heads.num_heads,
            "variant": heads.variant,
            "lm_head": heads.lm_head,
            "hidden_first": heads.hidden_first,
            "block": heads.block,
            "hidden_size": heads.hidden_size,
            "vocab_size": heads.vocab_size,
        }
    return {
        "kind": heads.kind,
        "num_heads": heads.num_heads,
        "num_layers": heads.num_layers,
        "lm_head": heads.lm_head,
        "rank": heads.rank,
        "num_kept": 0 if heads.token_map is None else heads.num_outputs,
        "correction": "markov" if heads.markov_rank else "none",
        "markov_rank": heads.markov_rank,
        "prefix_layer": heads.prefix is not None,
        "prefix": None if heads.prefix is None else heads.prefix.sizes,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        **({"joined": True} if heads.joined else {}),
    }


def build_heads(config: dict[str, Any]) -> Heads:
    """Return heads of ``config`` without memory, whose tensors are still to be read.

    Raises:
        ValueError: one line, if there are no such heads.
    """
    with torch.device("meta"):  # nor is time lost for drawing weights that are replaced at once
        if config["kind"] == "mtp":
            return _build_mtp(config)
        # exports of 0.1 have none of them
        optional = ("rank", "num_kept", "markov_rank", "prefix", "joined")
        try:
            return MedusaHeads(
                **{key: config[key] for key in _MEDUSA_KEYS},
                **{key: config[key] for key in optional if key in config},
                condition=config["kind"] == "hydra",
            )
        except (TypeError, ArithmeticError, RuntimeError) as error:
            raise ValueError(str(error)) from None


def _build_mtp(config: dict[str, Any]) -> MtpHeads:
    with one_line("block"):
        heads = MtpHeads(
            config["num_heads"],
            config_from_json(config["block"]),
            config["vocab_size"],
            variant=config["variant"],
            lm_head=config["lm_head"],
            hidden_first=bool(config.get("hidden_first")),
        )
    if heads.hidden_size != config["hidden_size"]:
        raise ValueError(
            f"block.hidden_size is {heads.hidden_size}, hidden_size {config['hidden_size']}"
        )
    return heads


def _compute_tables(heads: Heads, config_file: Path) -> None:
    """Make the rotary tables of ``heads``, which no file holds; the sizes are checked by now."""
    holder: Any = heads if isinstance(heads, MtpHeads) else heads.prefix and heads.prefix.model
    if holder is None:
        return
    with one_line(f"{config_file}: no rotary table"):
        holder.rotary_emb = type(holder.rotary_emb)(config=holder.config)


def save_heads(folder: Path, heads: Heads, dtype: torch.dtype | None) -> None:
    """Write the tensors of ``heads`` into ``folder``, in ``dtype`` (None keeps each as it is)."""
    tensors = {k: v.detach().cpu().contiguous() for k, v in named_tensors(heads).items()}
    save_file(cast_tensors(tensors, dtype), folder / HEADS_FILE, metadata={"format": "pt"})


def named_tensors(heads: Heads) -> dict[str, Tensor]:
    """Return the tensors of ``heads`` by the names that an export gives them."""
    prefix = _prefix(heads)
    return {prefix + name: tensor for name, tensor in heads.state_dict().items()}


def _prefix(heads: Heads) -> str:
    return _MTP_PREFIX if isinstance(heads, MtpHeads) else ""


def load_heads_file(path: Path, config: dict[str, Any], config_file: Path) -> Heads:
    """Build the heads of ``config`` and read all of their tensors, and no others.

    Args:
        path: the export's folder.
        config: what its config.json holds.
        config_file: where that lies, for the messages.

    Raises:
        ConfigError: one line, if config and tensors do not fit together.
    """
    try:
        heads = build_heads(config)
    except ValueError as error:
        raise ConfigError(f"{config_file}: {error}") from None
    file, wanted = path / HEADS_FILE, named_tensors(heads)
    check_header(file, wanted)
    _compute_tables(heads, config_file)
    tensors = read_tensors(file, wanted)
    _check_map(file, tensors.get("token_map"), config["vocab_size"])
    prefix = _prefix(heads)
    state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    heads.load_state_dict(state, assign=True)
    return heads


def _check_map(file: Path, token_map: Tensor | None, vocab_size: int) -> None:
    if token_map is None:
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(token_map))
    if lowest < 0 or highest >= vocab_size or len(token_map.unique()) < len(token_map):
        raise ConfigError(
            f"{file}: token_map holds {lowest} to {highest}, expected {len(token_map)} different"
            f" tokens of 0 to {vocab_size - 1}"
        )


def as_loaded(heads: Heads, base: PreTrainedModel, dtype: torch.dtype | None = None) -> Heads:
    """Put heads where and how an export's are that is loaded, and return them: to decode with.

    They take the base's dtype, but small ones are float32 on a CPU, which takes several times as
    long for a product of one row with a small bfloat16 matrix, and they make dozens of them in a
    step. Which tokens come depends on the base model alone.

    Args:
        heads: changed in place.
        base: their base model.
        dtype: None takes the base's.
    """
    place, dtype = output_device(base), dtype or base.dtype
    small = sum(parameter.numel() for parameter in heads.parameters()) <= _SMALL_HEADS
    if small and place.type == "cpu" and dtype.itemsize < 4:
        dtype = torch.float32
    return heads.to(device=place, dtype=dtype).eval()
