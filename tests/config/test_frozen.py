"""What recipes compose to for the embedded model, and for others."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specheads.config import ConfigError
from tests.composed import composed

FROZEN = json.loads((Path(__file__).parent / "frozen.json").read_text())


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as ``{"optim.lr": 0.001, ...}``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


@pytest.mark.parametrize("words", FROZEN)
def test_the_embedded_model_keeps_its_numbers(words: str) -> None:
    """A number that moved from a recipe to its model and lost its way changes every pinned loss."""
    expected = FROZEN["+recipe=medusa1"] | FROZEN[words]
    for key in expected.pop("__gone__", []):
        del expected[key]
    found = json.loads(json.dumps(flat(asdict(composed("train", words.split())))))
    assert {key: found.get(key, "none") for key in expected} == expected
