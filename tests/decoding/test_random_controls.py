"""Random settings together: a tree changes no token, neither does a batch, a door or a drafter."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.decoding.generate import SpecDecoder
from tests.ragged import PAD, Alternate, new_tokens, padded
from tests.scripted import ScriptedDrafter, build

TOKENS = st.integers(0, PAD - 1)
GREEDY: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.6, 1.1, 1.5]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=6),
    "sequence_bias": st.dictionaries(
        st.tuples(TOKENS) | st.tuples(TOKENS, TOKENS), st.floats(-5, 5), min_size=1, max_size=4
    ),
    "eos_token_id": st.lists(TOKENS, min_size=1, max_size=12, unique=True),
    "min_new_tokens": st.integers(1, 9),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 6), st.floats(1.01, 1.5)),
    "suppress_tokens": st.lists(TOKENS, min_size=1, max_size=5),
    "begin_suppress_tokens": st.lists(TOKENS, min_size=1, max_size=5),
    "remove_invalid_values": st.just(True),
    "renormalize_logits": st.just(True),
    "logits_processor": st.just(Alternate),  # the class: every call gets its own
}
SAMPLED: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.1, 0.7, 1.0, 1.6]),
    "top_k": st.sampled_from([0, 1, 5, 50]),
    "top_p": st.sampled_from([0.3, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.05, 0.4]),
    "typical_p": st.sampled_from([0.5, 0.95]),
}


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Return a tree that is grown node by node."""
    nodes: list[tuple[int, ...]] = [()]
    for parent in draw(st.lists(st.integers(0, 20), max_size=14)):
        above = nodes[parent % len(nodes)]
        nodes.append((*above, sum(node[:-1] == above for node in nodes if node)))
    return Tree.from_choices(nodes[1:])


def some(strategies: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[Any]:
    """Return dicts of up to ``most`` of these settings."""
    return st.lists(st.sampled_from(sorted(strategies)), max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: strategies[name] for name in names})
    )


@cache
def model() -> PreTrainedModel:
    """Return one small model for all examples."""
    return build("llama")


def fresh(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return settings for one call."""
    if "logits_processor" not in chosen:
        return dict(chosen)
    return {**chosen, "logits_processor": [chosen["logits_processor"]()]}


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    tree=trees(),
    row_trees=st.booleans(),
    hit_rate=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_new=st.integers(1, 14),
    controls=some(GREEDY, 4),
    warpers=st.none() | some(SAMPLED, 3),
    seed=st.integers(0, 2**40),
)
def test_nothing_changes_a_token(
    lengths: list[int],
    tree: Tree,
    row_trees: bool,
    hit_rate: float,
    num_new: int,
    controls: dict[str, Any],
    warpers: dict[str, Any] | None,
    seed: int,
) -> None:
    """Prevents what no list of cases foresaw: settings that are right alone and wrong together."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(PAD, (1, n), generator=generator) for n in lengths]
    if "exponential_decay_length_penalty" in controls:
        controls.setdefault("eos_token_id", [7, 19, 33])
    chosen: dict[str, Any] = {
        "max_new_tokens": num_new,
        "do_sample": warpers is not None,
        "pad_token_id": PAD,
        **controls,
        **(warpers or {}),
    }
    plain = SpecDecoder(model(), None)
    truth = []
    for i, row in enumerate(rows):
        alone = plain.generate(row, seed=seed + i, **fresh(chosen))
        truth.append(alone.new_tokens)
        if warpers is None:
            ones = torch.ones_like(row)
            theirs = model().generate(row, attention_mask=ones, **fresh(chosen))
            assert theirs.equal(alone.sequences)
    texts = [row[0].tolist() + new for row, new in zip(rows, truth, strict=True)]
    drafter = ScriptedDrafter(tree, texts, hit_rate, row_trees=row_trees)
    decoder = SpecDecoder(model(), drafter)
    batch = {**padded(rows), "seed": seed}
    ours = decoder.generate(**batch, **fresh(chosen))
    assert new_tokens(ours) == truth
    assert new_tokens(plain.generate(**batch, **fresh(chosen))) == truth
    custom = model().generate(custom_generate=decoder, **batch, **fresh(chosen))
    assert custom.equal(ours.sequences)
