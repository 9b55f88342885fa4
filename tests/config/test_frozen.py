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


@pytest.mark.parametrize("recipe", ["medusa1", "hydra"])
def test_another_model_has_none_of_them(recipe: str) -> None:
    """One model's learning rate on another learns nothing, and costs the same hours."""
    for model in ("model=/some/folder", "model=qwen3_8b", "model.name=/some/folder"):
        cfg = composed("train", [f"+recipe={recipe}", model, "data=jsonl", "data.path=mine"])
        assert (cfg.steps, cfg.optim.lr, cfg.heads.num_kept) == (0, 0, 0)
        assert (cfg.features.dir, cfg.heads.lm_head) == ("auto", "auto")
        assert (cfg.data.max_records, cfg.data.packages, cfg.model.tuned) == (0, [], {})
        given = ["steps=7", "optim.lr=0.5", "heads=shared", "features.dir=", "data.max_records=3"]
        cfg = composed("train", [f"+recipe={recipe}", model, *given])
        assert (cfg.steps, cfg.optim.lr, cfg.features.dir) == (7, 0.5, "")
        assert (cfg.heads.lm_head, cfg.data.max_records) == ("shared", 3)


@pytest.mark.parametrize("key", ["steps", "optim.lr"])
def test_recipes_without_a_rule_say_so(key: str) -> None:
    """A run of no steps would export heads that nobody trained."""
    with pytest.raises(ConfigError, match=f"{key} must be given: distill has no rule for it"):
        composed("train", ["+recipe=distill", f"{key}=0"])
