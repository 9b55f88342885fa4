"""Decode with an export as the settings say: which trees, which rule."""

from __future__ import annotations

from typing import Any

from specheads.config import ConfigError, DecodeConfig
from specheads.decoding.deciding import Acceptance
from specheads.drafters.made import (
    DynamicDrafter,
    StaticDrafter,
    dynamic_drafter,
    static_drafter,
)
from specheads.models.checkpoint import Export
from specheads.models.output import output_layer


def exported_drafter(
    export: Export, decode: DecodeConfig | None = None
) -> StaticDrafter | DynamicDrafter:
    """Return the drafter of an export's heads that ``decode`` asks for; by default the fastest.

    Raises:
        ConfigError: if a dynamic tree is asked for, and neither the settings nor the export say how
            large it is to be.
    """
    decode = decode or DecodeConfig()
    output = output_layer(export.base)
    if tree_kind(export, decode) == "static":
        return static_drafter(export.base, export.heads, output, export.tree)
    measured = dynamic_settings(export)
    num_nodes = decode.num_nodes or measured.get("num_nodes", 0)
    if not num_nodes:
        raise ConfigError(
            "decode.tree=dynamic needs decode.num_nodes: the export was not searched for it"
            " (python -m specheads.tree_search)"
        )
    temperatures = measured.get("temperatures")
    return dynamic_drafter(export.base, export.heads, output, num_nodes, temperatures=temperatures)


def tree_kind(export: Export, decode: DecodeConfig) -> str:
    """Return ``static`` or ``dynamic``; ``auto`` is what was faster when tree_search was run."""
    if decode.tree != "auto":
        return decode.tree
    if decode.num_nodes:
        return "dynamic"
    static = export.config.get("tree", {}).get("measured_on") or {}
    dynamic = dynamic_settings(export)
    return "dynamic" if dynamic.get("speedup", 0) > static.get("speedup", 0) else "static"


def dynamic_settings(export: Export) -> dict[str, Any]:
    """Return what tree_search found about dynamic trees; empty where it was not run."""
    measured_on = export.config.get("tree", {}).get("measured_on") or {}
    found = measured_on.get("dynamic") or {}
    assert isinstance(found, dict)
    return found


def acceptance_rule(decode: DecodeConfig) -> Acceptance:
    """Return the rule that ``decode`` asks for."""
    return Acceptance(
        decode.acceptance, epsilon=decode.epsilon, delta=decode.delta, lenience=decode.lenience
    )
