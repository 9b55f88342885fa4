"""What may stand in an export's config.json: types and ranges, before anything is made of it.

The bounds are far above what anyone trains; they keep a damaged or hostile number from filling the
memory or building modules for hours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads.config import ConfigError
from specheads.models.blocks import FINAL_NORM, SIZES
from specheads.models.digest import check_recorded
from specheads.models.manifest import expect, nested, said_of

MAX_NODES = 4096  # of a tree: the verify step of that many tokens takes seconds
_NUMBERS = {  # lowest and highest
    "num_heads": (1, 256),
    "num_layers": (0, 64),
    "hidden_size": (1, 1 << 20),
    "vocab_size": (1, 1 << 28),
    "rank": (0, 1 << 20),
    "num_kept": (0, 1 << 28),
    "markov_rank": (0, 1 << 20),
}
_NULLABLE = "dict or NoneType"
_TYPES = {  # of what is there
    "lm_head": "str", "correction": "str", "variant": "str", "prefix_layer": "bool",
    "hidden_first": "bool", "joined": "bool", "prefix": _NULLABLE, "training": _NULLABLE,
    "tokenizer": _NULLABLE, "block": "dict", "form": "dict", "base.tuned": "bool",
    "base.adapter": "bool", "base.digest": "str", "base.quantization": _NULLABLE,
    "tree.choices": "list", "tree.measured_on": _NULLABLE,
}  # fmt: skip
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_LARGEST = 1 << 40  # of any number of a layer's config
_MOST_EXPERTS = 4096
# of a layer's config: what would load code or files, and what transformers sets itself
_FORBIDDEN = ("attn_implementation", "auto_map", "quantization_config", "name_or_path")


def check_config(file: Path, config: dict[str, Any]) -> None:
    """Check the types and ranges of an export's config whose keys are all there.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    with said_of(file):
        _check_values(config)
        _check_prefix(config)
        _check_block(config.get("block"))
        check_tree(config["tree"], config)
        base, known = config["base"], ", ".join(_DTYPES)
        check_recorded(base["name"], base["revision"])
        expect(base["dtype"] in _DTYPES, "base.dtype", base["dtype"], f"one of {known}")


def _check_values(config: dict[str, Any]) -> None:
    for key, (lowest, highest) in _NUMBERS.items():
        value = config.get(key, lowest)
        fits = type(value) is int and lowest <= value <= highest
        expect(fits, key, value, f"{lowest} to {highest}")
    for key, kinds in _TYPES.items():
        section, _, name = key.rpartition(".")
        values = config[section] if section else config
        if name in values:
            kind = type(values[name]).__name__
            expect(kind in kinds.split(" or "), key, values[name], kinds)
    if "correction" in config and "markov_rank" in config:
        meant = "markov" if config["markov_rank"] else "none"
        expected = f"{meant} with markov_rank {config['markov_rank']}"
        expect(config["correction"] == meant, "correction", config["correction"], expected)


def _check_prefix(config: dict[str, Any]) -> None:
    sizes = config.get("prefix") or {}
    if "prefix" in config:
        given = config.get("prefix_layer")
        expect(given is bool(sizes), "prefix_layer", given, f"{bool(sizes)}, as prefix says")
    for key, value in sizes.items():
        name = f"prefix.{key}"
        if key == FINAL_NORM:
            expect(type(value) is bool, name, value, "bool")
        elif key == "rms_norm_eps":
            expect(type(value) in (int, float) and 0 <= value < 1, name, value, "0 to 1")
        elif key in SIZES:
            fits = type(value) is int and 1 <= value <= 1 << 30
            expect(fits, name, value, f"1 to {1 << 30}")
        else:
            raise ConfigError(f"prefix.{key:.40} is not a size of a prefix layer")
    if sizes:
        width, expected = sizes.get("hidden_size"), config["hidden_size"]
        expect(width == expected, "prefix.hidden_size", width, f"hidden_size {expected}")


def _check_block(block: dict[str, Any] | None) -> None:
    if block is None:
        return
    kind = block.get("model_type")
    expect(type(kind) is str, "block.model_type", kind, "the name of one")
    for path, value in nested(block):
        key, name = ".".join(("block", *path)), path[-1].removeprefix("_")
        number = type(value) in (int, float)
        if name in _FORBIDDEN:
            raise ConfigError(f"{key} must not be there")
        expect(not number or abs(value) <= _LARGEST, key, value, f"at most {_LARGEST}")
        if "expert" in name and type(value) is int:
            expect(value <= _MOST_EXPERTS, key, value, f"at most {_MOST_EXPERTS}")
        if name == "num_hidden_layers":
            expect(value == 1, key, value, "1: a head is one layer")
        if name == "partial_rotary_factor":
            expect(number and 0 < value <= 1, key, value, "0 to 1")


def check_tree(section: dict[str, Any], heads: dict[str, Any]) -> None:
    """Hold the section ``tree`` of an export's config to what that says of the ``heads``.

    Raises:
        ConfigError: if a choice is no path, deeper than there are heads, or wider than what they
            know; if there are too many, or the expected accept length cannot be.
    """
    choices, length = section["choices"], section.get("expected_accept_length")
    number, num_heads, known = len(choices), heads["num_heads"], heads.get("num_kept")
    whose, known = (
        ("the heads know", known) if known else ("the vocabulary has", heads["vocab_size"])
    )
    expect(number < MAX_NODES, "the number of tree.choices", number, f"below {MAX_NODES}")
    for choice in choices:
        path = type(choice) is list and all(type(rank) is int and rank >= 0 for rank in choice)
        expect(path, "tree: a choice", choice, "a path of ranks from 0 up")
        if len(choice) > num_heads:
            raise ConfigError(f"the tree is {len(choice)} deep, but there are {num_heads} heads")
        if max(choice, default=0) >= known:
            raise ConfigError(f"the tree uses rank {max(choice)}, {whose} {known} tokens")
    most = num_heads + 1.001  # a mean, rounded
    fits = length is None or (type(length) in (int, float) and 0 <= length <= most)
    expect(fits, "tree.expected_accept_length", length, f"0 to {most}")
