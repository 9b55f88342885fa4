"""What ``make test-engines`` says of an engine's texts and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specheads.attention.tree import Tree
from specheads.config import HeadsConfig
from specheads.decoding.result import DecodedRow
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import KINDS as HEADS
from specheads.models.checkpoint import load_export, origin, save_export
from specheads.models.output import output_layer
from tests.script_modules import load_script

engines: Any = load_script("engines")

TEXTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]]
STEPS = [2, 1, 2, 2]


def run(texts: list[list[int]] = TEXTS, steps: list[int] = STEPS) -> dict[str, Any]:
    """Return what an engine gave one by one and together."""
    one = {"texts": texts, "steps": steps, "accepted": [3, 1], "seconds": [0.5] * len(texts)}
    return {"version": "0", "runs": {"1": one, "16": {**one, "texts": list(texts)}}}


def said(theirs: dict[str, Any], own: dict[str, Any] | None = None, **more: Any) -> Any:
    """Return what is said, beside our chain."""
    given = {"expected": TEXTS, "most": 1, "plain": run()} | more
    own = own or {"texts": TEXTS, "steps": STEPS, "accepted": [3, 1]}
    return engines.judged(theirs, own, **given)


def test_what_is_as_it_should_be_does_not_fail() -> None:
    """A judge that fails at everything is switched off."""
    found = said(run())
    assert found["failed"] == [] and found["steps"] == found["our_steps"] == 7
    assert found["steps_of_agreeing"] == [7, 7]


def test_one_step_more_fails() -> None:
    """Heads that are shifted by one, or read the wrong layer, change no text: steps alone tell."""
    assert said(run(steps=[2, 2, 2, 2]))["failed"] == [
        "its verify steps are not those of our chain"
    ]
    # more on one text and fewer on another is no agreement
    assert said(run(steps=[1, 2, 2, 2]))["failed"]


def test_texts_that_differ_are_no_matter_of_steps() -> None:
    """A near-tie makes another text, whose steps are its own."""
    other = [*TEXTS[:3], [1, 1, 2]]
    found = said(run(other, [*STEPS[:3], 9]), plain=run(other))
    assert found["failed"] == [] and found["as_transformers"] == 3
    assert found["steps_of_agreeing"] == [5, 5]
    worse = [*TEXTS[:2], [7, 8, 8], [1, 1, 2]]
    assert said(run(worse), plain=run(worse))["failed"] == [
        "too many texts differ from transformers'"
    ]


@pytest.mark.parametrize("where", ["alone", "together"])
def test_an_engine_that_writes_otherwise_with_speculation_fails(where: str) -> None:
    """An engine whose verification is wrong serves texts that its model would not write."""
    theirs = run()
    theirs["runs"]["1" if where == "alone" else "16"]["texts"] = [*TEXTS[:3], [1, 1, 2]]
    assert "texts differ from its own without speculation" in said(theirs)["failed"]


def test_accepted_guesses_are_counted_by_their_place() -> None:
    """Positions that are counted from one shift every figure of the table."""
    rows = [DecodedRow(accept_lengths=[3, 1]), DecodedRow(accept_lengths=[2])]
    assert engines.accepted_per_position(rows, 3) == [2, 1, 0]


def test_levelled_heads_have_one_norm_and_load(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A copy that kept its norms, or the old manifest, would fail in vLLM or here."""
    base = load_base_model(str(tiny_model_dir), dtype="float32")
    wanted = HeadsConfig("block", {"form": "published"}, 3, 2, "shared")
    heads = HEADS["block"].from_settings(wanted, base, output_layer(base))
    heads.layers[1].self_attn["k_norm"].weight.data.fill_(2.0)
    tree, info = Tree.chain(3), origin(str(tiny_model_dir), {"recipe": "dflash"})
    save_export(tmp_path / "export", heads, load_tokenizer(str(tiny_model_dir)), tree, info)
    level: Any = load_export(engines.level(tmp_path / "export")).heads
    norms = [layer.self_attn["k_norm"].weight for layer in level.layers]
    assert norms[1].equal(norms[0]) and not norms[1].eq(2.0).any()
