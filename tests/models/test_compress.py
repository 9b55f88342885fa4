"""Smaller heads made of trained ones: what they keep must be what was trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from specheads.models.heads import (
    MedusaHeads,
    low_rank_heads,
    output_matrix,
    pruned_heads,
)
from specheads.models.output import OutputLayer

VOCAB, SIZE, NUM_HEADS = 20, 8, 3
PREFIX = {"hidden_size": SIZE, "intermediate_size": 12, "num_attention_heads": 2}
FORMS: dict[str, dict[str, Any]] = {
    "parallel": {},
    "hydra": {"condition": True},
    "markov": {"markov_rank": 3},
    "everything": {"condition": True, "markov_rank": 3, "prefix": PREFIX},
}


def build(lm_head: str = "own", dtype: torch.dtype | None = None, **form: Any) -> MedusaHeads:
    """Return random heads, not those at the start, where all matrices are one."""
    heads = MedusaHeads(NUM_HEADS, 1, SIZE, VOCAB, lm_head, **form).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return heads


def logits_of(heads: MedusaHeads) -> Tensor:
    """Return logits [K, B, T, V'] of random hidden states behind the prefix layer, if any."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 5, SIZE, generator=generator)
    tokens = torch.randint(0, VOCAB, (2, 5, NUM_HEADS), generator=generator)
    embedding = torch.randn(VOCAB, SIZE, generator=generator)
    torch.manual_seed(3)
    output = OutputLayer(nn.Linear(SIZE, VOCAB), scale=0.5, softcap=2.0)
    hidden = heads.contextual(hidden, torch.arange(5).expand(2, 5))
    heads.embed = lambda ids: embedding[ids]
    with torch.no_grad():
        return heads.logits(hidden, output, tokens)


@pytest.mark.parametrize("form", FORMS)
def test_full_rank_changes_no_logit(form: str) -> None:
    """A factor lost, or the prefix layer's table of positions, would only show in acceptance."""
    heads = build(**FORMS[form])
    smaller = low_rank_heads(heads, SIZE)
    assert smaller.lm_head == "low_rank" and smaller.rank == SIZE
    torch.testing.assert_close(logits_of(smaller), logits_of(heads), rtol=1e-4, atol=1e-5)


def test_low_rank_is_the_best_of_its_rank() -> None:
    """Any other choice of directions loses more than it has to, unseen."""
    heads = build()
    for rank in range(1, SIZE + 1):
        smaller = low_rank_heads(heads, rank)
        for i in range(NUM_HEADS):
            matrix = output_matrix(heads, i).double().numpy()
            left, values, right = np.linalg.svd(matrix, full_matrices=False)
            best = (left[:, :rank] * values[:rank]) @ right[:rank]
            found = output_matrix(smaller, i).numpy()
            np.testing.assert_allclose(found, best, rtol=1e-4, atol=1e-5)


def test_low_rank_again_is_the_low_rank_of_the_whole() -> None:
    """Heads of low rank can be made smaller still, from their product and not from one factor."""
    heads = build()
    twice, once = low_rank_heads(low_rank_heads(heads, 5), 3), low_rank_heads(heads, 3)
    torch.testing.assert_close(logits_of(twice), logits_of(once), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_pruned_logits_are_those_of_the_kept_tokens(form: str) -> None:
    """Rows in another order than the token map guess other tokens: 0% accepted, no error."""
    heads = build(**FORMS[form])
    kept = torch.tensor([17, 3, 4, 11, 0])
    smaller = pruned_heads(heads, kept)
    assert smaller.token_map is not None and smaller.token_map.tolist() == [0, 3, 4, 11, 17]
    expected = logits_of(heads)[..., smaller.token_map]
    torch.testing.assert_close(logits_of(smaller), expected, rtol=1e-6, atol=1e-6)
    best = logits_of(smaller).argmax(-1)
    hidden = [token for token in range(VOCAB) if token not in kept.tolist()]
    full = logits_of(heads).clone()
    full[..., hidden] = -torch.inf
    assert torch.equal(smaller.token_ids(best), full.argmax(-1))


def test_pruned_again_keeps_the_rows_of_the_tokens() -> None:
    """Ids taken for places in a matrix that is pruned already would keep other tokens."""
    heads = build(markov_rank=3)
    some = torch.tensor([2, 5, 9, 13, 19])
    twice = pruned_heads(pruned_heads(heads, some), torch.tensor([19, 5]))
    once = pruned_heads(heads, torch.tensor([5, 19]))
    assert torch.equal(logits_of(twice), logits_of(once))
    assert torch.equal(twice.token_ids(torch.tensor([0, 1])), torch.tensor([5, 19]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["low_rank", "pruned"])
def test_everything_else_is_a_copy(form: str, kind: str) -> None:
    """Blocks forgotten are the identity again; shared, training one moves the other."""
    heads = build(dtype=torch.bfloat16, **FORMS[form]).eval()
    if kind == "low_rank":
        smaller = low_rank_heads(heads, 2)
    else:
        smaller = pruned_heads(heads, torch.arange(6))
    assert smaller.kind == heads.kind and smaller.sequential == heads.sequential
    assert (smaller.prefix is None) == (heads.prefix is None) and not smaller.training
    ours, theirs = smaller.state_dict(), heads.state_dict()
    assert {t.dtype for n, t in ours.items() if n != "token_map"} == {torch.bfloat16}
    for name, tensor in theirs.items():
        if ".lm_head." in name:
            continue
        same = tensor[:6] if kind == "pruned" and ".markov.up." in name else tensor
        assert torch.equal(ours[name], same), name
        assert ours[name].data_ptr() != tensor.data_ptr(), name
    assert all(parameter.requires_grad for parameter in smaller.parameters())
    assert not any(tensor.is_meta for tensor in (*smaller.parameters(), *smaller.buffers()))


def test_the_originals_stay_as_they_are() -> None:
    """Made from heads that are still being trained, the copies must not change them."""
    heads = build(markov_rank=3)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    for smaller in (low_rank_heads(heads, 2), pruned_heads(heads, torch.arange(5))):
        with torch.no_grad():
            for parameter in smaller.parameters():
                parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in heads.state_dict().items())


def test_what_makes_no_sense_is_refused_in_one_line() -> None:
    """Heads that share the base's matrix have nothing to make smaller."""
    own, shared = build(), build("shared")
    low, pruned = low_rank_heads(own, 2), pruned_heads(own, torch.arange(5))
    for made, message in (
        (
            lambda: low_rank_heads(shared, 2),
            "a matrix for all tokens, to be made low_rank, got 'shared'",
        ),
        (lambda: low_rank_heads(pruned, 2), "got 'pruned'"),
        (lambda: low_rank_heads(own, 9), r"rank must be in 1\.\.8, .*, got 9"),
        (lambda: low_rank_heads(own, 0), r"rank must be in 1\.\.8, .*, got 0"),
        (lambda: pruned_heads(shared, torch.arange(5)), "a whole matrix, .* got 'shared'"),
        (lambda: pruned_heads(low, torch.arange(5)), "got 'low_rank'"),
        (lambda: pruned_heads(own, torch.tensor([], dtype=torch.long)), r"num_kept must be in 1"),
        (lambda: pruned_heads(pruned, torch.tensor([4, 5, 6])), "2 of the tokens to keep were"),
        (lambda: output_matrix(shared, 0), "share the base's output matrix"),
    ):
        with pytest.raises(ValueError, match=message):
            made()
