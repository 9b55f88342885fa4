"""A checkpoint whose tokens and accept lengths are pinned; see scripts/make_golden.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specheads.attention.tree import Tree
from specheads.decoding.loop import plain_decode
from specheads.drafters.growing import Grown
from specheads.drafters.heads import HeadsDrafter
from specheads.models.checkpoint import Export, load_export
from specheads.models.output import output_layer
from tests.script_modules import load_script

make_golden = load_script("make_golden")
CASES = make_golden.cases()


def load() -> Export:
    """Load the checkpoint with all the checks that users get."""
    return load_export(make_golden.GOLDEN / "export", dtype="float32")


@pytest.fixture(scope="module")
def export() -> Export:
    """Return the checkpoint; not to be changed."""
    return load()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_tokens_and_accept_lengths_are_the_pinned_ones(
    export: Export, case: dict[str, Any]
) -> None:
    """A silent loss of acceptance: all tokens stay right, only the speed is gone."""
    result = make_golden.decode_case(export, case)
    assert [row.new_tokens for row in result.rows] == case["new_tokens"]
    assert [row.accept_lengths for row in result.rows] == case["accept_lengths"]
    assert result.accept_length >= make_golden.ACCEPTED
    assert result.num_replays == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_plain_decoding_gives_the_pinned_tokens(export: Export, case: dict[str, Any]) -> None:
    """If both loops drift together, no test that compares them notices."""
    plain = plain_decode(export.base, **make_golden.request(export, case))
    assert [row.new_tokens for row in plain.rows] == case["new_tokens"]


def test_dynamic_trees_accept_as_much(export: Export) -> None:
    """A dynamic tree whose values are off still gives the right tokens, slowly."""
    drafter = HeadsDrafter(export.heads, output_layer(export.base), Grown(export.tree.num_nodes))
    steps = static_steps = 0
    for case in CASES:
        result = make_golden.decode_case(export, case, drafter)
        assert [row.new_tokens for row in result.rows] == case["new_tokens"]
        steps += sum(len(row.accept_lengths) for row in result.rows)
        static_steps += sum(map(len, case["accept_lengths"]))
    # not pinned: nodes are often nearly equally probable, and rounding decides
    assert steps <= 1.1 * static_steps


def test_pinned_choices_are_clear() -> None:
    """A near tie in here fails on somebody else's processor and is then taken for a bug."""
    for case in CASES:
        assert min(case["choice_gaps"]) >= make_golden.CLEAR_CHOICE
        assert min(case["guess_gaps"]) >= make_golden.CLEAR_GUESS


def shift_heads(export: Export) -> HeadsDrafter:
    """Let every head guess for the depth after its own."""
    modules = list(export.heads.heads)
    export.heads.heads = torch.nn.ModuleList([*modules[1:], modules[0]])
    return make_golden.make_drafter(export, "heads")


def drop_last_head(export: Export) -> HeadsDrafter:
    """Decode without the deepest guesses."""
    return HeadsDrafter(
        export.heads, output_layer(export.base), export.tree.trim(export.tree.max_depth - 1)
    )


def swap_ranks(export: Export) -> HeadsDrafter:
    """Grow the branches under the second best guess."""
    swapped = {0: 1, 1: 0}
    choices = [(swapped.get(choice[0], choice[0]), *choice[1:]) for choice in export.tree.choices]
    return HeadsDrafter(export.heads, output_layer(export.base), Tree.from_choices(choices))


def forget_a_bias(export: Export) -> HeadsDrafter:
    """Lose one small tensor of one head, as a lenient loader would."""
    export.heads.get_parameter("heads.1.blocks.0.bias").data.zero_()
    return make_golden.make_drafter(export, "heads")


@pytest.mark.parametrize("damage", [shift_heads, drop_last_head, swap_ranks, forget_a_bias])
def test_damage_shows(damage: Callable[[Export], HeadsDrafter]) -> None:
    """A pin that holds whatever the heads guess would guard nothing."""
    export = load()
    drafter = damage(export)
    for case in CASES[:2]:
        result = make_golden.decode_case(export, case, drafter)
        assert [row.new_tokens for row in result.rows] == case["new_tokens"]
        if [row.accept_lengths for row in result.rows] != case["accept_lengths"]:
            return
    pytest.fail("the accept lengths are still the pinned ones")
