"""What may stand in an export's config.json: types and ranges, before anything is made of it.

The bounds are far above what anyone trains; they keep a damaged or hostile number from filling the
memory or building modules for hours.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from specheads.config import ConfigError
from specheads.models.blocks import FINAL_NORM, SIZES
from specheads.models.names import check_recorded

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
    for key, (lowest, highest) in _NUMBERS.items():
        if key not in config:
            continue
        if type(value := config[key]) is not int:
            raise ConfigError(f"{file}: {key} is {value!r:.40}, not a number")
        if not lowest <= value <= highest:
            raise ConfigError(f"{file}: {key} is {value}, expected {lowest} to {highest}")
    for key in ("lm_head", "correction", "variant"):
        _is(file, config, key, str)
    for key in ("prefix_layer", "hidden_first", "joined"):
        _is(file, config, key, bool)
    for key in ("prefix", "training", "tokenizer"):
        _is(file, config, key, dict, none=True)
    if "correction" in config and "markov_rank" in config:
        meant = "markov" if config["markov_rank"] else "none"
        if config["correction"] != meant:
            raise ConfigError(
                f"{file}: correction is {config['correction']!r:.40}, but markov_rank is"
                f" {config['markov_rank']}"
            )
    if "prefix" in config and config.get("prefix_layer") is not bool(config["prefix"]):
        raise ConfigError(
            f"{file}: prefix_layer is {config.get('prefix_layer')}, but prefix says otherwise"
        )
    _check_prefix(file, config)
    if "block" in config:
        _check_block(file, config["block"])
    _check_base(file, config["base"])
    _check_tree(file, config["tree"], config["num_heads"])


def _is(file: Path, values: dict[str, Any], key: str, kind: type, *, none: bool = False) -> None:
    value = values.get(key)
    if key in values and not (type(value) is kind or (none and value is None)):
        raise ConfigError(f"{file}: {key} is {value!r:.40}, expected {kind.__name__}")


def _check_prefix(file: Path, config: dict[str, Any]) -> None:
    sizes = config.get("prefix") or {}
    for key, value in sizes.items():
        if key == FINAL_NORM:
            _is(file, {f"prefix.{key}": value}, f"prefix.{key}", bool)
            continue
        if key not in SIZES:
            raise ConfigError(f"{file}: prefix.{key:.40} is not a size of a prefix layer")
        whole = key != "rms_norm_eps"
        if type(value) is not int if whole else not 0 <= _real(value) < 1:
            raise ConfigError(f"{file}: prefix.{key} is {value!r:.40}, not a number that it can be")
        if whole and not 1 <= value <= 1 << 30:
            raise ConfigError(f"{file}: prefix.{key} is {value}, expected 1 to {1 << 30}")
    if sizes and sizes.get("hidden_size") != config["hidden_size"]:
        raise ConfigError(
            f"{file}: prefix.hidden_size is {sizes.get('hidden_size')}, hidden_size"
            f" {config['hidden_size']}"
        )


def _check_block(file: Path, block: Any) -> None:
    if type(block) is not dict:
        raise ConfigError(f"{file}: block is {block!r:.40}, expected dict")
    if type(block.get("model_type")) is not str:
        raise ConfigError(f"{file}: block.model_type is {block.get('model_type')!r:.40}")
    for key, value in _leaves(block):
        name = key.rpartition(".")[2].removeprefix("_")
        if name in _FORBIDDEN:
            raise ConfigError(f"{file}: block.{key} must not be there")
        if isinstance(value, int | float) and not abs(value) <= _LARGEST:
            raise ConfigError(f"{file}: block.{key} is {value!r:.40}, at most {_LARGEST} is")
        if "expert" in name and type(value) is int and value > _MOST_EXPERTS:
            raise ConfigError(f"{file}: block.{key} is {value}, at most {_MOST_EXPERTS} are known")
        if name == "num_hidden_layers" and value != 1:
            raise ConfigError(f"{file}: block.{key} is {value!r:.40}, a head is one layer")
        if name == "partial_rotary_factor" and not 0 < _real(value) <= 1:
            raise ConfigError(f"{file}: block.{key} is {value!r:.40}, expected 0 to 1")


def _leaves(values: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return what is no dict or list, with the path of keys that leads to it."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    found = []
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict | list):
            found += _leaves(value, name if isinstance(values, dict) else prefix)
        else:
            found.append((name if isinstance(values, dict) else prefix, value))
    return found


def _check_base(file: Path, info: dict[str, Any]) -> None:
    try:
        check_recorded(info["name"], info["revision"])
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    named = {f"base.{key}": value for key, value in info.items()}
    for key in ("base.tuned", "base.adapter"):
        _is(file, named, key, bool)
    _is(file, named, "base.digest", str)
    _is(file, named, "base.quantization", dict, none=True)
    if info["dtype"] not in _DTYPES:
        raise ConfigError(
            f"{file}: base.dtype is {info['dtype']!r:.40}, expected one of {', '.join(_DTYPES)}"
        )


def _check_tree(file: Path, section: dict[str, Any], num_heads: int) -> None:
    choices = section["choices"]
    if type(choices) is not list:
        raise ConfigError(f"{file}: tree: choices is {choices!r:.40}, expected list")
    if len(choices) >= MAX_NODES:
        raise ConfigError(
            f"{file}: tree: {len(choices)} choices and the root, at most {MAX_NODES} nodes"
        )
    for choice in choices:
        if type(choice) is not list or any(type(rank) is not int or rank < 0 for rank in choice):
            raise ConfigError(f"{file}: tree: {choice!r:.60} is no path of ranks from 0 up")
        if len(choice) > num_heads:
            raise ConfigError(
                f"{file}: the tree is {len(choice)} deep, but there are {num_heads} heads"
            )
    length = section.get("expected_accept_length")
    most = num_heads + 1.001  # a mean, rounded
    if length is not None and not 0 <= _real(length) <= most:
        raise ConfigError(
            f"{file}: tree.expected_accept_length is {length!r:.40}, expected 0 to {most}"
        )
    _is(file, {"tree.measured_on": section.get("measured_on")}, "tree.measured_on", dict, none=True)


def _real(value: Any) -> float:
    """Return ``value`` as a number, NaN where it is none: no bound holds then."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.inf
