"""Which tensors of a foreign file belong to which head: told by their names, not by its config.

Configs of published checkpoints are known to lie (two heads where the file holds five, layers
that are one layer under several names), so that everything is counted. A name that no layout knows
is refused: skipped, it would be heads that guess nothing right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specheads.config import ConfigError
from specheads.formats.tensor_files import TensorFiles

MOST_HEADS, MOST_LAYERS = 256, 64  # of native exports, see models/export_config.py
_PREFIXES = ("module.", "medusa_heads.", "medusa_head.", "model.medusa_head.")
_ORIGINAL = re.compile(r"(\d{1,3})\.(\d{1,3})\.(linear\.weight|linear\.bias|weight)")
_VLLM = re.compile(r"blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
_VLLM_MATRIX = re.compile(r"lm_heads\.(\d{1,3})\.weight")


@dataclass
class Layout:
    """Names of tensors in their files.

    Attributes:
        blocks: per head, per block, the names of weight and bias; no bias is zero.
        matrices: per head the name of its output matrix; empty where they use the base's.
        token_map: name of the ids that the rows of the matrices stand for, if they are fewer.
        notes: what the user has to know, in lines.
    """

    blocks: list[list[tuple[str, str | None]]]
    matrices: list[str]
    token_map: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def num_layers(self) -> int:
        """Blocks per head."""
        return len(self.blocks[0])

    def names(self) -> set[str]:
        """Return all names."""
        pairs = [name for head in self.blocks for pair in head for name in pair]
        return {name for name in (*pairs, *self.matrices, self.token_map) if name is not None}


def layout_of(files: TensorFiles, config: dict[str, Any]) -> Layout:
    """Find the heads among the tensors of ``files``.

    Args:
        files: of Medusa heads alone.
        config: the config.json beside them; empty where there is none.

    Raises:
        ConfigError: with the first name that is unknown, or missing.
    """
    blocks: dict[tuple[int, int], dict[str, str]] = {}
    matrices: dict[int, tuple[int, str]] = {}
    token_map = common = None
    for name in sorted(files.header):
        plain = _without_prefix(name)
        if found := _ORIGINAL.fullmatch(plain):
            head, place, part = int(found[1]), int(found[2]), found[3]
            if part == "weight":
                _once(files, matrices, head, (place, name))
            else:
                _once(files, blocks.setdefault((head, place), {}), part.split(".")[1], name)
        elif found := _VLLM.fullmatch(plain):
            _once(files, blocks.setdefault((int(found[1]), int(found[2])), {}), found[3], name)
        elif found := _VLLM_MATRIX.fullmatch(plain):
            _once(files, matrices, int(found[1]), (-1, name))
        elif plain == "lm_head.weight":
            common = name
        elif plain == "token_map":
            token_map = name
        else:
            raise ConfigError(f"{files.where}: {name:.120} is no tensor of Medusa heads")
    number = 1 + max((*matrices, *(head for head, _ in blocks)), default=-1)
    if not 1 <= number <= MOST_HEADS:
        raise ConfigError(f"{files.where} holds {number} heads, expected 1 to {MOST_HEADS}")
    notes = list(files.notes)
    layers = [
        _blocks_of(files.where, head, blocks, matrices.get(head, (None, ""))[0], notes)
        for head in range(number)
    ]
    if len(counts := {len(each) for each in layers}) > 1:
        raise ConfigError(
            f"{files.where}: its heads have {min(counts)} to {max(counts)} layers, expected the"
            " same number in all"
        )
    names = _matrices(files.where, number, matrices, common, config)
    _say_lies(config, number, len(layers[0]), notes)
    return Layout(layers, names, token_map, notes)


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _once(files: TensorFiles, found: dict[Any, Any], key: Any, value: Any) -> None:
    if key in found:
        raise ConfigError(f"{files.where} holds the same tensor under two names: {value}")
    found[key] = value


def _blocks_of(
    where: Path,
    head: int,
    blocks: dict[tuple[int, int], dict[str, str]],
    end: int | None,
    notes: list[str],
) -> list[tuple[str, str | None]]:
    """Return the names of one head's blocks.

    Args:
        where: the file, for messages.
        head: which.
        blocks: names by head and layer.
        end: the place of its output matrix behind its blocks; None or -1 where that says nothing.
        notes: a line is added where one block stands for several.
    """
    own = {layer: names for (owner, layer), names in blocks.items() if owner == head}
    number = end if end is not None and end >= 0 else 1 + max(own, default=-1)
    if number > MOST_LAYERS:
        raise ConfigError(f"{where}: head {head} has {number} layers, at most {MOST_LAYERS} can be")
    if len(own) == 1 and number > 1:
        # `[block] * n` is one module under n names; savers that drop shared tensors leave one
        [only] = own.values()
        own = dict.fromkeys(range(number), only)
        line = f"one block stands for the {number} layers of a head, as it was trained"
        if line not in notes:
            notes.append(line)
    for layer in range(number):
        if layer not in own or "weight" not in own[layer]:
            raise ConfigError(f"{where} lacks the weight of layer {layer} of head {head}")
    if extra := sorted(set(own) - set(range(number))):
        raise ConfigError(f"{where}: layer {extra[0]} of head {head} stands behind its matrix")
    return [(own[layer]["weight"], own[layer].get("bias")) for layer in range(number)]


def _matrices(
    where: Path,
    number: int,
    matrices: dict[int, tuple[int, str]],
    common: str | None,
    config: dict[str, Any],
) -> list[str]:
    if common is not None and matrices:
        raise ConfigError(f"{where} holds lm_head.weight and {matrices[min(matrices)][1]}")
    if common is not None:
        return [common] * number
    if not matrices:
        return []
    if config.get("original_lm_head") and set(matrices) == {0}:
        return [matrices[0][1]] * number
    if missing := sorted(set(range(number)) - matrices.keys()):
        raise ConfigError(f"{where} lacks the output matrix of head {missing[0]}")
    return [matrices[head][1] for head in range(number)]


def _say_lies(config: dict[str, Any], heads: int, layers: int, notes: list[str]) -> None:
    claims = {
        "heads": ("medusa_num_heads", "num_medusa_heads", "num_heads", heads),
        "layers": ("medusa_num_layers", "num_medusa_layers", "num_hidden_layers", layers),
    }
    medusa = config.get("model_type") == "medusa"  # elsewhere num_hidden_layers is the base's
    for what, (*keys, counted) in claims.items():
        for key in keys if medusa else keys[:2]:
            if key in config and config[key] != counted:
                notes.append(
                    f"config.json says {key}={config[key]!r:.40}, the tensors are of {counted}"
                    f" {what}: those are taken"
                )
                break
