"""Losses of heads against the base model's own distribution, without ever holding all logits.

Shapes: N rows (tokens of all heads, one after the other), n rows of one chunk, d hidden size,
V vocabulary, V' the tokens that the student can give (V unless there is a token map).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.fused_loss import (
    checked_inputs,
    compute_dtype,
    fused_loss,
    rank_of,
    rows_at_once,
    write_logits,
)

KINDS = ("soft", "tv", "lk_alpha", "lk_lambda")


@dataclass(frozen=True)
class Teacher:
    """Where the distribution to learn comes from; no gradient flows to any of it.

    Its logits are ``softcap * tanh(a / softcap)`` of ``a = scale * (hidden @ weight.T + bias)``.
    """

    hidden: Tensor  # [N, dt], row by row beside the student's
    weight: Tensor  # [V, dt]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None


def linear_soft_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    labels: Tensor,
    row_weight: Tensor,
    *,
    kind: str,
    top_k: int = 0,
    temperature: float = 1.0,
    eta: float = 3.0,
    token_map: Tensor | None = None,
    groups: Tensor | None = None,
    num_groups: int = 1,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = 0,
    count_hits: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the distances between a teacher's distribution and a student's.

    With the teacher's probabilities t, the student's s, and the acceptance A = sum min(t, s), which
    is the probability that speculative sampling accepts a token drawn from s (arXiv:2211.17192),
    the distance of a row is

    - ``soft``: KL(t || s), the cross entropy against t less t's entropy;
    - ``tv``: 1 - A, the total variation distance;
    - ``lk_alpha``: -log A, whose gradient is that of ``tv`` divided by A: it does not vanish where
      t and s hardly overlap (arXiv:2602.23881). Equal to cross entropy where t is one token;
    - ``lk_lambda``: L * KL(t || s) + (1 - L) * (1 - A) with L = exp(-eta * A) of the row, through
      which no gradient flows (arXiv:2602.23881; its authors train Medusa heads with eta = 10).

    All are 0 where s = t. Gradients are formed in the forward pass, ``chunk_size`` rows at a time,
    as in :func:`specheads.losses.linear_cross_entropy`: at no time do more than one chunk of the
    student's and the teacher's logits exist (of both, their probabilities and what is made of
    them: up to seven buffers of that size), and no gradient is formed under ``no_grad`` or for an
    input that needs none. Under autocast the products run in autocast's dtype; everything after
    them is float32 or wider.

    Args:
        hidden: [N, d] rows of the student.
        weight: [V', d] its output matrix.
        teacher: its rows and its output matrix.
        labels: [N] token ids of the full vocabulary. They only choose the rows (``IGNORE`` skips
            one) and count hits; a label that the token map drops is a row like any other.
        row_weight: [N] factor of each row's distance; no gradient flows to it.
        kind: one of ``KINDS``.
        top_k: keep the teacher's k most likely tokens and renormalise, which is what the base
            samples from with that top_k; 1 takes its best token for the label. 0 keeps all.
        temperature: divides the teacher's logits only. The student learns the distribution at
            that temperature as its own at temperature 1.
        eta: of ``lk_lambda``.
        token_map: [V'] token id of each of the student's outputs, without repetition; None: V' = V.
            Whatever the student cannot give is always rejected, so A sums over the kept tokens
            with t not renormalised, and 1 - A stays above 0. KL would then be infinite: it takes
            t renormalised over the kept tokens. A row whose t holds none of them (top_k) counts 0
            in KL and ``lk_alpha``, and has no gradient.
        groups: [N] int64 number of the group (head) a row is counted under.
        num_groups: number of groups.
        bias: [V'] of the student, or None.
        scale: factor of the student's logits.
        softcap: bound of the student's logits.
        chunk_size: rows whose logits exist at one time; 0: as for the cross entropy.
        count_hits: whether to count the student's top-1 and top-5 hits of the labels.

    Returns:
        The loss, a differentiable scalar, and float32 statistics [num_groups, 3]: sum of distances,
        top-1 hits and top-5 hits over the valid rows (hits are NaN if not counted).

    Raises:
        ValueError: for an unknown kind, numbers out of range, or shapes that do not fit.
    """
    _check(hidden, weight, teacher, kind, top_k, temperature, eta, token_map)
    inputs = checked_inputs(
        hidden, weight, labels, row_weight, groups, num_groups, bias, scale, softcap,
        chunk_size or rows_at_once(teacher.weight), count_hits,
    )  # fmt: skip
    output_of = None
    if token_map is not None:
        output_of = labels.new_full(teacher.weight.shape[:1], -1)
        output_of[token_map] = torch.arange(token_map.numel(), device=labels.device)
    log_teacher = _LogTeacher(teacher, min(inputs.chunk_size, hidden.shape[0]), top_k, temperature)

    def row_loss(
        rows: Tensor, z: Tensor, label: Tensor, factor: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor]:
        if output_of is not None:
            label = output_of.index_select(0, label.squeeze(1))[:, None]
        if count_hits:
            target = z.gather(1, label if output_of is None else label.clamp_min(0))
            near = (rank_of(z, target) < 5) & (label >= 0)
            hits = torch.cat([z.argmax(1, keepdim=True) == label, near], 1).float()
        else:
            hits = z.new_full((len(z), 2), torch.nan, dtype=torch.float32)
        log_t = log_teacher(rows)
        if token_map is not None:
            log_t = log_t.index_select(1, token_map)
        losses = _distance(z, log_t.to(z.dtype), factor, slope, kind, eta, token_map is not None)
        return losses, hits

    return fused_loss(inputs, row_loss)


class _LogTeacher:
    """The teacher's log-probabilities of some rows; one block for all chunks."""

    def __init__(self, teacher: Teacher, chunk_size: int, top_k: int, temperature: float) -> None:
        weight = teacher.weight.detach()
        compute = compute_dtype(weight)
        exact = torch.float64 if compute == torch.float64 else torch.float32
        size = (chunk_size, weight.shape[0])
        self.teacher, self.matrix = teacher, weight.to(compute)
        self.hidden = teacher.hidden.detach()
        self.block = weight.new_empty(size, dtype=exact)
        self.narrow = weight.new_empty(size, dtype=compute) if compute != exact else None
        self.top_k, self.temperature = top_k, temperature

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [n, V] for the rows [n], -inf for tokens outside the top k; overwritten next."""
        count = rows.numel()
        x = self.hidden.index_select(0, rows).to(self.matrix.dtype)
        z, low = self.block[:count], None if self.narrow is None else self.narrow[:count]
        write_logits(self.teacher, x, self.matrix, z, low)
        if 0 < self.top_k < z.shape[1]:
            best, where = z.topk(self.top_k, dim=1)
            z.fill_(-torch.inf).scatter_(1, where, best)
        if self.temperature != 1.0:
            z.div_(self.temperature)
        return _log_softmax(z)


def _distance(
    z: Tensor, log_t: Tensor, factor: Tensor, slope: bool, kind: str, eta: float, restricted: bool
) -> Tensor:
    """Return the distance of each row [n, 1]; see ``linear_soft_loss``.

    Args:
        z: [n, V'] logits of the student, overwritten; with ``slope`` by the gradient times
            ``factor`` [n, 1].
        log_t: [n, V'] logarithms of the teacher's probabilities, overwritten.
        factor: of the rows.
        slope: whether gradients are wanted.
        kind: of the distance.
        eta: of ``lk_lambda``.
        restricted: whether the teacher's probabilities may sum to less than 1.
    """
    log_s = _log_softmax(z)
    losses, share = torch.zeros_like(factor), torch.ones_like(factor)  # share: of the KL
    # The gradient of every kind is the sum of c * (s * x.sum() - x) over these c [n, 1], x [n, V'].
    terms: list[tuple[Tensor, Tensor]] = []
    if kind != "soft":
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
    if kind in ("soft", "lk_lambda"):
        if restricted:
            mass = log_t.logsumexp(1, keepdim=True)
            log_t.sub_(torch.where(mass.isneginf(), 0.0, mass))
        t = log_t.exp_()  # sums to 1, or to 0 where nothing of it is kept
        losses = losses + share * F.kl_div(log_s, t, reduction="none").sum(1, keepdim=True)
        terms.append((share, t))
    if slope:
        log_s.exp_().mul_(torch.stack([c * x.sum(1, keepdim=True) for c, x in terms]).sum(0))
        for c, x in terms:
            log_s.addcmul_(c, x, value=-1.0)
        log_s.mul_(factor)
    return losses


def _log_softmax(z: Tensor) -> Tensor:
    """Turn logits [n, V] into logarithms of probabilities, in place."""
    z.sub_(z.amax(1, keepdim=True))  # first, or large logits lose the digits that matter
    return z.sub_(z.exp().sum(1, keepdim=True).log_())


def _check(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    kind: str,
    top_k: int,
    temperature: float,
    eta: float,
    token_map: Tensor | None,
) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {top_k}")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if eta <= 0:
        raise ValueError(f"eta must be positive, got {eta}")
    ours, theirs = tuple(teacher.hidden.shape), tuple(teacher.weight.shape)
    if len(ours) != 2 or len(theirs) != 2 or ours[1] != theirs[1]:
        raise ValueError(f"the teacher's hidden {ours} and weight {theirs} must be [N, d], [V, d]")
    if ours[0] != hidden.shape[0]:
        raise ValueError(f"the teacher has {ours[0]} rows, hidden has {hidden.shape[0]}")
    if teacher.bias is not None and teacher.bias.shape != theirs[:1]:
        raise ValueError(
            f"the teacher's bias has shape {tuple(teacher.bias.shape)}, its weight {theirs[0]} rows"
        )
    if token_map is None and weight.shape[0] != theirs[0]:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, the teacher's {theirs[0]}: token_map is missing"
        )
    if token_map is not None and token_map.shape != weight.shape[:1]:
        raise ValueError(
            f"token_map has shape {tuple(token_map.shape)}, weight has {weight.shape[0]} rows"
        )
