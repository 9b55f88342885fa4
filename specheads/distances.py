"""Distances between a teacher's and a student's distribution, and their gradients by hand.

Everything is in logarithms, and in place where it can be: the tensors are as wide as a vocabulary.
Shapes: n rows, V' tokens that the student can give.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("soft", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda")


def distance(
    log_s: Tensor,
    log_t: Tensor,
    factor: Tensor,
    slope: bool,
    *,
    kind: str,
    eta: float,
    jsd_beta: float,
    restricted: bool,
) -> Tensor:
    """Return the distance of each row [n, 1]; see :func:`specheads.soft_loss.linear_soft_loss`.

    Args:
        log_s: [n, V'] logarithms of the student's probabilities, overwritten; with ``slope`` by
            the gradient with respect to the student's logits, times ``factor`` [n, 1].
        log_t: [n, V'] logarithms of the teacher's probabilities, overwritten.
        factor: of the rows.
        slope: whether gradients are wanted.
        kind: one of ``KINDS``.
        eta: of ``lk_lambda``.
        jsd_beta: of ``jsd``.
        restricted: whether the teacher's probabilities may sum to less than 1.
    """
    losses, share = torch.zeros_like(factor), torch.ones_like(factor)  # share: of the KL
    # The gradient of every kind is the sum of c * (s * x.sum() - x) over these c [n, 1], x [n, V'].
    terms: list[tuple[Tensor, Tensor]] = []
    if kind in ("tv", "lk_alpha", "lk_lambda"):
        lower = torch.minimum(log_s, log_t)
        # In logarithms, because A underflows long before log A does.
        log_a = lower.logsumexp(1, keepdim=True).clamp_max_(0.0)
        accepted, none = log_a.exp(), log_a.isneginf()
        if kind == "lk_alpha":
            losses = torch.where(none, 0.0, -log_a)
        else:
            share = (-eta * accepted).exp() if kind == "lk_lambda" else losses
            losses = (1.0 - share) * (1.0 - accepted)
        if slope:  # x is s / A where s < t
            c = torch.ones_like(factor) if kind == "lk_alpha" else (1.0 - share) * accepted
            lower.sub_(torch.where(none, 0.0, log_a)).exp_().mul_(log_s < log_t)
            terms.append((c, lower))
    elif kind != "soft":
        none = _renormalise(log_t) if restricted else torch.zeros_like(factor, dtype=torch.bool)
        losses, term = _mixed(log_s, log_t, 0.0 if kind == "reverse_kl" else 1.0 - jsd_beta)
        losses = torch.where(none, 0.0, losses)
        term[1].masked_fill_(none, 0.0)
        terms.append(term)
    if kind in ("soft", "lk_lambda"):
        if restricted:
            _renormalise(log_t)
        t = log_t.exp_()  # sums to 1, or to 0 where nothing of it is kept
        losses = losses + share * F.kl_div(log_s, t, reduction="none").sum(1, keepdim=True)
        terms.append((share, t))
    if slope:
        log_s.exp_().mul_(torch.stack([c * x.sum(1, keepdim=True) for c, x in terms]).sum(0))
        for c, x in terms:
            log_s.addcmul_(c, x, value=-1.0)
        log_s.mul_(factor)
    return losses


def log_softmax_(z: Tensor) -> Tensor:
    """Turn logits [n, V] into logarithms of probabilities, in place."""
    z.sub_(z.amax(1, keepdim=True))  # first, or large logits lose the digits that matter
    return z.sub_(z.exp().sum(1, keepdim=True).log_())


def overlap(log_s: Tensor, log_t: Tensor) -> Tensor:
    """Return the sum of min(s, t) over each row, [n, 1], from logarithms [n, V']."""
    return torch.minimum(log_s, log_t).exp_().sum(1, keepdim=True)


def _mixed(log_s: Tensor, log_t: Tensor, own: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the KL(s || m) or the divergence of both from m, and its term of the gradient.

    Args:
        log_s: [n, V'] of the student.
        log_t: [n, V'] of the teacher, overwritten.
        own: weight of the student in m = (1 - own) * t + own * s; at 0 the teacher is held to
            nothing, and the distance is KL(s || t).
    """
    losses: Tensor | float = 0.0
    if own:
        t = log_t.exp()
        log_t.add_(math.log1p(-own))
        log_m = torch.logaddexp(log_t, log_s + math.log(own), out=log_t)
        losses = (1.0 - own) * F.kl_div(log_m, t, reduction="none").sum(1, keepdim=True)
    else:
        log_m = log_t
    # of KL(s || m) and of KL(t || m) together the slope by s is own * log(s / m), up to constants
    x = log_m.sub_(log_s).mul_(log_s.exp())
    weight = own or 1.0
    losses = losses - weight * x.sum(1, keepdim=True)
    return losses, (torch.full_like(losses, weight), x)


def _renormalise(log_t: Tensor) -> Tensor:
    """Let the probabilities of each row sum to 1, in place; return the rows [n, 1] without any."""
    mass = log_t.logsumexp(1, keepdim=True)
    none = mass.isneginf()
    log_t.sub_(torch.where(none, 0.0, mass))
    return none
