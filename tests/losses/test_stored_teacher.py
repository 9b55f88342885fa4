"""Losses against k stored tokens and the mass of all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.losses.distill import (
    KINDS,
    SoftLoss,
    StoredTeacher,
    Teacher,
    linear_soft_loss,
)
from specheads.losses.fused import IGNORE, Output

VOCAB, SIZE = 19, 6


def problem(num_rows: int = 24, spread: float = 1.0) -> dict[str, Any]:
    """Return arguments of the loss in float64 with a teacher that knows all tokens."""
    generator = torch.Generator().manual_seed(num_rows)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    labels = torch.randint(0, VOCAB, (num_rows,), generator=generator)
    labels[torch.rand(num_rows, generator=generator) < 0.3] = IGNORE
    return {
        "hidden": randn(num_rows, SIZE).requires_grad_(),
        "weight": randn(VOCAB, SIZE).requires_grad_(),
        "bias": randn(VOCAB).requires_grad_(),
        "teacher": Teacher(randn(num_rows, SIZE) * spread, Output(randn(VOCAB, SIZE))),
        "labels": labels,
        "row_weight": torch.rand(num_rows, generator=generator, dtype=torch.float64),
    }


def stored(teacher: Teacher, k: int) -> StoredTeacher:
    """Return what would be stored of a teacher."""
    best, ids = (teacher.hidden @ teacher.output.weight.T).log_softmax(1).topk(k, dim=1)
    return StoredTeacher(ids.int(), best)


def losses(
    p: dict[str, Any], teacher: Any = None, chunk_size: int = 0, **options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return loss, statistics and gradients."""
    loss, stats = linear_soft_loss(
        p["hidden"],
        Output(p["weight"], p["bias"]),
        teacher or p["teacher"],
        p["labels"],
        p["row_weight"],
        SoftLoss(**options, compare=True),
        chunk_size,
    )
    return loss, stats, list(torch.autograd.grad(loss, [p["hidden"], p["weight"], p["bias"]]))


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9) -> bool:
    """Return whether two tensors differ little, relative to the expected one's norm."""
    return float((found - expected).norm()) <= rtol * float(expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [0, 5])
def test_all_tokens_but_one_are_all_tokens(kind: str, chunk_size: int) -> None:
    """A bucket that lost its mass, or its gradient, teaches a draft to be too sure."""
    p = problem()
    few = stored(p["teacher"], VOCAB - 1)
    loss, stats, grads = losses(p, kind=kind, chunk_size=chunk_size)
    found, found_stats, found_grads = losses(p, kind=kind, chunk_size=chunk_size, teacher=few)
    assert close(found.detach(), loss.detach())
    assert torch.allclose(found_stats[:, :4], stats[:, :4])
    assert all(close(a, b, 1e-8) for a, b in zip(found_grads, grads, strict=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reverse_kl"])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_top_k_of_the_stored_is_top_k_of_all(kind: str, temperature: float) -> None:
    """What a base with top_k samples from is known exactly; offline must not learn another."""
    p, options = problem(), {"kind": kind, "top_k": 4, "temperature": temperature}
    loss, _, grads = losses(p, **options)
    for k in (4, 7):
        found, _, found_grads = losses(p, **options, teacher=stored(p["teacher"], k))
        assert close(found.detach(), loss.detach())
        assert all(close(a, b) for a, b in zip(found_grads, grads, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_are_one_thing(kind: str) -> None:
    """By the definition: sum the tail of both sides, measure the k + 1 numbers, let autograd go."""
    p, k = problem(), 5
    found, stats, grads = losses(p, kind=kind, teacher=stored(p["teacher"], k), eta=2.0)
    student = (p["hidden"] @ p["weight"].T + p["bias"]).softmax(1)
    theirs = (p["teacher"].hidden @ p["teacher"].output.weight.T).softmax(1)
    t, ids = theirs.topk(k, dim=1)
    s = student.gather(1, ids)
    lower = torch.where(s < t, s, t).sum(1).detach()
    t = torch.cat([t, 1 - t.sum(1, keepdim=True)], 1)
    s = torch.cat([s, 1 - s.sum(1, keepdim=True)], 1)
    m, accepted = (s + t) / 2, torch.where(s < t, s, t).sum(1)
    forward, reverse = (t * (t / s).log()).sum(1), (s * (s / t).log()).sum(1)
    share = (-2.0 * accepted.detach()).exp()
    rows = {
        "soft": forward,
        "reverse_kl": reverse,
        "jsd": ((t * (t / m).log()).sum(1) + (s * (s / m).log()).sum(1)) / 2,
        "tv": 1 - accepted,
        "lk_alpha": -accepted.log(),
        "lk_lambda": share * forward + (1 - share) * (1 - accepted),
    }[kind]
    valid = p["labels"] != IGNORE
    loss = (rows * p["row_weight"])[valid].sum()
    assert close(found.detach(), loss.detach())
    assert stats[0, 4].item() == pytest.approx(lower[valid].sum().item(), rel=1e-6)
    expected = torch.autograd.grad(loss, [p["hidden"], p["weight"], p["bias"]])
    assert all(close(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_fewer_tokens_never_look_worse(spread: float) -> None:
    """A bucket may hide a difference, and invent none; what is called a lower bound must be one."""
    p = problem(60, spread)
    for kind in ("soft", "reverse_kl", "jsd", "tv", "lk_alpha"):
        loss, stats, _ = losses(p, kind=kind)
        before, accepted = float(loss.detach()), float(stats[0, 4])
        for k in (12, 5, 1):
            few, few_stats, _ = losses(p, kind=kind, teacher=stored(p["teacher"], k))
            assert float(few.detach()) <= before + 1e-9, (kind, k)
            assert float(few_stats[0, 4]) <= accepted + 1e-6, (kind, k)
            before, accepted = float(few.detach()), float(few_stats[0, 4])


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_is_certain_stays_finite(kind: str) -> None:
    """In float32 k probabilities sum to more than 1 by rounding; a tail of NaN ends the run."""
    p = problem()
    float32 = {k: v.detach().float().requires_grad_() for k, v in p.items() if k in GRADED}
    ids = stored(p["teacher"], 3).ids
    log_probs = torch.tensor([1e-6, -20.0, -30.0]).expand(len(ids), 3)
    float32["row_weight"] = p["row_weight"].float()
    loss, stats, grads = losses({**p, **float32}, kind=kind, teacher=StoredTeacher(ids, log_probs))
    assert all(bool(x.isfinite().all()) for x in (loss, stats, *grads))


GRADED = ("hidden", "weight", "bias")


def test_misuse_names_both_numbers() -> None:
    """Another temperature of a tail whose tokens nobody knows would be a guess, silently."""
    p = problem(10)
    few = stored(p["teacher"], 4)
    for change, message in (
        ({"temperature": 0.5}, "temperature is 0.5; a stored teacher of 4 tokens needs a top_k"),
        ({"top_k": 5}, "top_k is 5, the stored teacher has 4 tokens"),
        ({"teacher": StoredTeacher(few.ids[1:], few.log_probs[1:])}, "9 rows, hidden has 10"),
        ({"teacher": StoredTeacher(few.ids[:, 1:], few.log_probs)}, r"\(10, 3\) and log_probs"),
        ({"teacher": stored(p["teacher"], VOCAB)}, f"{VOCAB} tokens, weight has {VOCAB} rows"),
    ):
        with pytest.raises(ValueError, match=message):
            losses(p, **{"teacher": few, "kind": "soft", **change})
    losses(p, teacher=few, kind="soft", top_k=4, temperature=0.5)
