"""Losses against the base model's own distribution, without ever holding all logits.

Shapes: N rows (tokens of all heads, one after the other), n rows of one chunk, d hidden size,
V vocabulary, V' the tokens that the student can give (V unless there is a token map).

Distances between a teacher's and a student's distribution, and their gradients by hand.

Everything is in logarithms, and in place where it can be: the tensors are as wide as a vocabulary.
Shapes: n rows, V' tokens that the student can give.

Teachers of the soft losses: one whose logits are made as they are needed, and a stored one.

Shapes: N rows, n rows of one chunk, V vocabulary, V' the tokens that the student can give (V unless
there is a token map), k tokens that a stored teacher knows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.losses.fused import (
    checked_inputs,
    compute_dtype,
    fused_loss,
    rank_of,
    rows_at_once,
    write_logits,
)

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
    """Return the distance of each row [n, 1]; see :func:`linear_soft_loss`.

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


_LEAST_TAIL = 1e-7  # what k float32 probabilities miss to 1 by rounding alone


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


@dataclass(frozen=True)
class StoredTeacher:
    """A teacher of whom each row's k most likely tokens are known, k below V.

    The distance is then that of two distributions over k + 1 things: these tokens, and all others
    together. It is 0 where the student gives these tokens the teacher's probabilities, and, but for
    ``lk_lambda``, never more than the distance over all tokens.
    """

    ids: Tensor  # [N, k] integers, best first, without repetition
    log_probs: Tensor  # [N, k] at temperature 1; what their probabilities miss to 1 is the others'


class Measure(Protocol):
    """What compares some of a student's rows with its teacher's."""

    def __call__(
        self, rows: Tensor, log_s: Tensor, factor: Tensor, slope: bool, compare: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return distance and, with ``compare``, acceptance of each row, both [n, 1].

        Args:
            rows: [n] their numbers.
            log_s: [n, V'] logarithms of the student's probabilities, overwritten; with ``slope``
                by the gradient with respect to its logits, times ``factor`` [n, 1].
            factor: of the rows.
            slope: whether gradients are wanted.
            compare: whether the acceptance at temperature 1 over all known tokens is wanted.
        """


class MadeTeacher:
    """Measures against a :class:`Teacher`, with one block of logits for all chunks."""

    def __init__(
        self,
        teacher: Teacher,
        chunk_size: int,
        *,
        top_k: int,
        temperature: float,
        token_map: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """Make room for ``chunk_size`` rows; ``options`` are those of ``distances.distance``."""
        weight = teacher.weight.detach()
        compute = compute_dtype(weight)
        exact = torch.float64 if compute == torch.float64 else torch.float32
        size = (chunk_size, weight.shape[0])
        self.teacher, self.matrix = teacher, weight.to(compute)
        self.hidden = teacher.hidden.detach()
        self.block = weight.new_empty(size, dtype=exact)
        self.narrow = weight.new_empty(size, dtype=compute) if compute != exact else None
        self.top_k, self.temperature = top_k, temperature
        self.token_map, self.options = token_map, options

    def __call__(
        self, rows: Tensor, log_s: Tensor, factor: Tensor, slope: bool, compare: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`Measure`."""
        z = self._logits(rows)
        accepted = overlap(log_s, log_softmax_(z).to(log_s.dtype)) if compare else None
        plain = self.temperature == 1.0 and not 0 < self.top_k < z.shape[1]
        if not (compare and plain):
            log_softmax_(self._shaped(z))  # of logarithms of probabilities as of logits
        if self.token_map is not None:
            z = z.index_select(1, self.token_map)
        return distance(log_s, z.to(log_s.dtype), factor, slope, **self.options), accepted

    def _logits(self, rows: Tensor) -> Tensor:
        """Return [n, V] for the rows [n]; overwritten next."""
        count = rows.numel()
        x = self.hidden.index_select(0, rows).to(self.matrix.dtype)
        z, low = self.block[:count], None if self.narrow is None else self.narrow[:count]
        write_logits(self.teacher, x, self.matrix, z, low)
        return z

    def _shaped(self, z: Tensor) -> Tensor:
        """Apply top_k, -inf for other tokens, and temperature, in place."""
        if 0 < self.top_k < z.shape[1]:
            best, where = z.topk(self.top_k, dim=1)
            z.fill_(-torch.inf).scatter_(1, where, best)
        return z if self.temperature == 1.0 else z.div_(self.temperature)


class Buckets:
    """Measures against a :class:`StoredTeacher`: k tokens, and the mass of all others."""

    def __init__(
        self, teacher: StoredTeacher, *, top_k: int, temperature: float, options: dict[str, Any]
    ) -> None:
        """Take what is stored; ``options`` are those of ``distances.distance``."""
        self.ids, self.log_probs = teacher.ids.detach(), teacher.log_probs.detach()
        self.top_k, self.temperature, self.options = top_k, temperature, options

    def __call__(
        self, rows: Tensor, log_s: Tensor, factor: Tensor, slope: bool, compare: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`Measure`; the acceptance is that of the k tokens, a lower bound."""
        ids = self.ids.index_select(0, rows).long()
        log_t = self.log_probs.index_select(0, rows).to(log_s.dtype)
        accepted = overlap(log_s.gather(1, ids), log_t) if compare else None
        if self.top_k:
            ids, log_t = ids[:, : self.top_k], log_t[:, : self.top_k] / self.temperature
            tail = torch.full_like(log_t[:, :1], -torch.inf)
        else:
            tail = (1.0 - log_t.exp().sum(1, keepdim=True)).clamp_min_(_LEAST_TAIL).log_()
        log_t = log_softmax_(torch.cat([log_t, tail], 1))
        known = log_s.gather(1, ids)
        others = log_s.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        # These are logits of the buckets as good as any: the slope by them is that by z.
        buckets = torch.cat([known, others], 1)
        losses = distance(buckets, log_t, factor, slope, **self.options)
        if slope:  # the others' slope is shared among them as their mass is
            log_s.sub_(others).exp_().mul_(buckets[:, -1:]).scatter_(1, ids, buckets[:, :-1])
        return losses, accepted


def check_stored(num_stored: int, top_k: int, temperature: float) -> None:
    """Refuse a distribution that ``num_stored`` best tokens, at temperature 1, do not determine.

    Raises:
        ValueError: if top_k is larger; or for another temperature without top_k, because what a
            temperature makes of the other tokens' mass depends on each of them.
    """
    if top_k > num_stored:
        raise ValueError(f"top_k is {top_k}, the stored teacher has {num_stored} tokens")
    if temperature != 1.0 and not top_k:
        raise ValueError(
            f"temperature is {temperature}; a stored teacher of {num_stored} tokens needs a top_k"
            f" of 1 to {num_stored} for that"
        )


def check_teacher(
    teacher: Teacher | StoredTeacher, hidden: Tensor, weight: Tensor, token_map: Tensor | None
) -> None:
    """Check a teacher against the student's ``hidden`` [N, d] and ``weight`` [V', d].

    Raises:
        ValueError: for shapes that do not fit, or a stored teacher with a token map.
    """
    stored = isinstance(teacher, StoredTeacher)
    if isinstance(teacher, StoredTeacher):
        ours, theirs = tuple(teacher.ids.shape), tuple(teacher.log_probs.shape)
        if len(ours) != 2 or ours != theirs:
            raise ValueError(f"the teacher's ids {ours} and log_probs {theirs} must be [N, k]")
    else:
        ours, theirs = tuple(teacher.hidden.shape), tuple(teacher.weight.shape)
        if len(ours) != 2 or len(theirs) != 2 or ours[1] != theirs[1]:
            raise ValueError(
                f"the teacher's hidden {ours} and weight {theirs} must be [N, d], [V, d]"
            )
        if teacher.bias is not None and teacher.bias.shape != theirs[:1]:
            raise ValueError(
                f"the teacher's bias has shape {tuple(teacher.bias.shape)}, its weight"
                f" {theirs[0]} rows"
            )
    if ours[0] != hidden.shape[0]:
        raise ValueError(f"the teacher has {ours[0]} rows, hidden has {hidden.shape[0]}")
    if stored and not 0 < ours[1] < weight.shape[0]:
        raise ValueError(f"the teacher has {ours[1]} tokens, weight has {weight.shape[0]} rows")
    if stored and token_map is not None:
        raise ValueError("a stored teacher is not possible with a token_map")
    if not stored and token_map is None and weight.shape[0] != theirs[0]:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, the teacher's {theirs[0]}: token_map is missing"
        )
    if token_map is not None and token_map.shape != weight.shape[:1]:
        raise ValueError(
            f"token_map has shape {tuple(token_map.shape)}, weight has {weight.shape[0]} rows"
        )


__all__ = ["KINDS", "StoredTeacher", "Teacher", "check_options", "linear_soft_loss"]


def linear_soft_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher | StoredTeacher,
    labels: Tensor,
    row_weight: Tensor,
    *,
    kind: str,
    top_k: int = 0,
    temperature: float = 1.0,
    eta: float = 3.0,
    jsd_beta: float = 0.5,
    token_map: Tensor | None = None,
    groups: Tensor | None = None,
    num_groups: int = 1,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = 0,
    count_hits: bool = True,
    compare: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the distances between a teacher's distribution and a student's.

    With the teacher's probabilities t, the student's s, and the acceptance A = sum min(t, s), which
    is the probability that speculative sampling accepts a token drawn from s (arXiv:2211.17192),
    the distance of a row is

    - ``soft``: KL(t || s), the cross entropy against t less t's entropy;
    - ``reverse_kl``: KL(s || t);
    - ``jsd``: b * KL(t || m) + (1 - b) * KL(s || m) with m = b * t + (1 - b) * s and b the
      ``jsd_beta``, the generalised Jensen-Shannon divergence of arXiv:2306.13649; divided by b it
      tends to KL(t || s) for b to 0, divided by 1 - b to KL(s || t) for b to 1;
    - ``tv``: 1 - A, the total variation distance;
    - ``lk_alpha``: -log A, whose gradient is that of ``tv`` divided by A: it does not vanish where
      t and s hardly overlap (arXiv:2602.23881). Equal to cross entropy where t is one token;
    - ``lk_lambda``: L * KL(t || s) + (1 - L) * (1 - A) with L = exp(-eta * A) of the row, through
      which no gradient flows (arXiv:2602.23881; its authors train Medusa heads with eta = 10).

    All are 0 where s = t. Gradients are formed in the forward pass, ``chunk_size`` rows at a time,
    as in :func:`specheads.losses.cross_entropy.linear_cross_entropy`: at no time do more than one
    chunk of the student's and the teacher's logits exist (of both, their probabilities and what is
    made of them: up to eight buffers of that size), and no gradient is formed under ``no_grad`` or
    for an input that needs none. Under autocast the products run in autocast's dtype;
    everything after them is float32 or wider.

    Args:
        hidden: [N, d] rows of the student.
        weight: [V', d] its output matrix.
        teacher: its rows and its output matrix, or what is stored of its probabilities.
        labels: [N] token ids of the full vocabulary. They only choose the rows (``IGNORE`` skips
            one) and count hits; a label that the token map drops is a row like any other.
        row_weight: [N] factor of each row's distance; no gradient flows to it.
        kind: one of ``KINDS``.
        top_k: keep the teacher's k most likely tokens and renormalise, which is what the base
            samples from with that top_k; 1 takes its best token for the label. 0 keeps all.
            ``reverse_kl`` would be infinite.
        temperature: divides the teacher's logits only. The student learns the distribution at
            that temperature as its own at temperature 1.
        eta: of ``lk_lambda``.
        jsd_beta: of ``jsd``, between 0 and 1.
        token_map: [V'] token id of each of the student's outputs, without repetition; None: V' = V.
            Whatever the student cannot give is always rejected, so A sums over the kept tokens
            with t not renormalised, and 1 - A stays above 0. KL would then be infinite: it takes
            t renormalised over the kept tokens, as do ``reverse_kl`` and ``jsd``. A row whose t
            holds none of them (top_k) counts 0 in all but ``tv``, and has no gradient.
        groups: [N] int64 number of the group (head) a row is counted under.
        num_groups: number of groups.
        bias: [V'] of the student, or None.
        scale: factor of the student's logits.
        softcap: bound of the student's logits.
        chunk_size: rows whose logits exist at one time; 0: as for the cross entropy.
        count_hits: whether to count the student's top-1 and top-5 hits of the labels.
        compare: whether to report cross entropy and acceptance, too; not with a token map.

    Returns:
        The loss, a differentiable scalar, and float32 statistics [num_groups, 3]: sum of distances,
        top-1 hits and top-5 hits over the valid rows (hits are NaN if not counted). With
        ``compare`` [num_groups, 5]: behind them the sum of the labels' cross entropies, and that
        of A at temperature 1 over all tokens, whatever the loss was told; of a stored teacher over
        its k tokens, which is at most A.

    Raises:
        ValueError: for an unknown kind, numbers out of range, shapes that do not fit, or a stored
            teacher that cannot give the distribution asked for.
    """
    check_options(kind, top_k, temperature, eta, jsd_beta)
    check_teacher(teacher, hidden, weight, token_map)
    if compare and token_map is not None:
        raise ValueError("compare is not possible with a token_map")
    widest = weight if isinstance(teacher, StoredTeacher) else teacher.weight
    inputs = checked_inputs(
        hidden, weight, labels, row_weight, groups, num_groups, bias, scale, softcap,
        chunk_size or rows_at_once(widest), count_hits,
    )  # fmt: skip
    output_of = None
    if token_map is not None:
        output_of = labels.new_full(widest.shape[:1], -1)
        output_of[token_map] = torch.arange(token_map.numel(), device=labels.device)
    options = {"kind": kind, "eta": eta, "jsd_beta": jsd_beta, "restricted": token_map is not None}
    measure: Measure
    if isinstance(teacher, StoredTeacher):
        check_stored(teacher.ids.shape[1], top_k, temperature)
        measure = Buckets(teacher, top_k=top_k, temperature=temperature, options=options)
    else:
        measure = MadeTeacher(
            teacher,
            min(inputs.chunk_size, hidden.shape[0]),
            top_k=top_k,
            temperature=temperature,
            token_map=token_map,
            options=options,
        )

    def row_loss(
        rows: Tensor, z: Tensor, label: Tensor, factor: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor]:
        if output_of is not None:
            label = output_of.index_select(0, label.squeeze(1))[:, None]
        if count_hits:
            target = z.gather(1, label if output_of is None else label.clamp_min(0))
            near = (rank_of(z, target) < 5) & (label >= 0)
            columns = [z.argmax(1, keepdim=True) == label, near]
        else:
            columns = [z.new_full((len(z), 2), torch.nan)]
        log_s = log_softmax_(z)
        if compare:
            columns.append(-log_s.gather(1, label))
        losses, accepted = measure(rows, log_s, factor, slope, compare)
        if accepted is not None:
            columns.append(accepted)
        return losses, torch.cat([column.float() for column in columns], 1)

    return fused_loss(inputs, row_loss, num_columns=4 if compare else 2)


def check_options(
    kind: str, top_k: int = 0, temperature: float = 1.0, eta: float = 3.0, jsd_beta: float = 0.5
) -> None:
    """Refuse what :func:`linear_soft_loss` cannot do.

    Raises:
        ValueError: with the reason, in one line.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {top_k}")
    if top_k and kind == "reverse_kl":
        raise ValueError(f"top_k must be 0 for reverse_kl, infinite without all tokens: {top_k}")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if eta <= 0:
        raise ValueError(f"eta must be positive, got {eta}")
    if not 0 < jsd_beta < 1:
        raise ValueError(f"jsd_beta must be between 0 and 1, got {jsd_beta}")
