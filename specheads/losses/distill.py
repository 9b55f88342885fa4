"""Losses against the base model's own distribution, without ever holding all logits.

Distances between a teacher's and a student's distribution, with gradients by hand. Everything is in
logarithms, and in place where it can be: the tensors are as wide as a vocabulary.

Shapes: N rows (tokens of all heads, one after the other), n rows of one chunk, d hidden size,
V vocabulary, V' the tokens that the student can give (V unless there is a token map), k tokens that
a stored teacher knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.losses.fused import Logits, Output, fused_loss, rank_of, rows_at_once
from specheads.system.errors import check, one_of, refuse

KINDS = ("soft", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda")

_LEAST_TAIL = 1e-7  # what k float32 probabilities miss to 1 by rounding alone


@dataclass(frozen=True)
class SoftLoss:
    """Which distance between the teacher's distribution and the student's is the loss.

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

    All are 0 where s = t.

    Attributes:
        kind: one of ``KINDS``.
        top_k: keep the teacher's k most likely tokens and renormalise, which is what the base
            samples from with that top_k; 1 takes its best token for the label. 0 keeps all.
            ``reverse_kl`` would be infinite.
        temperature: divides the teacher's logits only. The student learns the distribution at
            that temperature as its own at temperature 1.
        eta: how fast ``lk_lambda`` turns from KL to acceptance.
        jsd_beta: the teacher's weight in the mixture of ``jsd``, between 0 and 1.
        compare: report cross entropy and acceptance, too; not with a token map.

    Raises:
        ConfigError: for an unknown kind, or one that is infinite with its ``top_k``.
    """

    kind: str
    top_k: int = 0
    temperature: float = 1.0
    eta: float = 3.0
    jsd_beta: float = 0.5
    compare: bool = False

    def __post_init__(self) -> None:
        one_of("kind", self.kind, *KINDS)
        finite = not self.top_k or self.kind != "reverse_kl"
        check(finite, "top_k", self.top_k, "0 for reverse_kl, infinite without all tokens")

    @property
    def needs_log_sum(self) -> bool:
        """Whether, with a token map, the distance depends on what the other tokens weigh.

        Not where the teacher is renormalised over the kept ones. With ``top_k`` all logits are made
        in any case, to find the best.
        """
        return self.kind in ("tv", "lk_alpha", "lk_lambda") and not self.top_k


@dataclass(frozen=True)
class Teacher:
    """Hidden states and the output that makes their logits; no gradient flows to any of it.

    With a token map a student can give fewer tokens. Whatever it cannot give is always rejected, so
    A sums over the kept tokens with t not renormalised, and 1 - A stays above 0. KL would then be
    infinite: it takes t renormalised over the kept tokens, as do ``reverse_kl`` and ``jsd``. A row
    whose t holds none of them (top_k) counts 0 in all but ``tv``, and has no gradient.
    """

    hidden: Tensor  # [N, dt], row by row beside the student's
    output: Output  # weight [V, dt]
    token_map: Tensor | None = None  # [V'] token id of each of the student's outputs, all different
    # [N] of ``fused.log_sums`` at the loss's temperature, made once for students that share rows.
    # With a token map the logits of other tokens are then not asked for again.
    log_sum: Tensor | None = None


@dataclass(frozen=True)
class StoredTeacher:
    """A teacher of whom each row's k most likely tokens are known, k below V.

    The distance is then that of two distributions over k + 1 things: these tokens, and all others
    together. It is 0 where the student gives these tokens the teacher's probabilities, and, but for
    ``lk_lambda``, never more than the distance over all tokens.
    """

    ids: Tensor  # [N, k] integers, best first, without repetition
    log_probs: Tensor  # [N, k] at temperature 1; what their probabilities miss to 1 is the others'


# Compares some of a student's rows with its teacher's: (numbers of the rows [n], logarithms of the
# student's probabilities [n, V'], factors [n, 1], slope) -> distance and, where it is compared, the
# acceptance at temperature 1 over all known tokens, both [n, 1]. The logarithms are overwritten,
# with slope by factor * d distance / d logits.
Measure = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def linear_soft_loss(
    hidden: Tensor,
    output: Output,
    teacher: Teacher | StoredTeacher,
    labels: Tensor,
    row_weight: Tensor,
    loss: SoftLoss,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the distances between a teacher's distribution and a student's.

    Gradients are formed in the forward pass, ``chunk_size`` rows at a time, as in
    :func:`specheads.losses.cross_entropy.linear_cross_entropy`: at no time do more than one
    chunk of the student's and the teacher's logits exist (of both, their probabilities and what is
    made of them: up to eight buffers of that size), and no gradient is formed under ``no_grad`` or
    for an input that needs none. Under autocast the products run in autocast's dtype;
    everything after them is float32 or wider.

    Args:
        hidden: [N, d] rows of the student.
        output: its output matrix [V', d], with bias, scale and softcap.
        teacher: its rows and its output matrix, or what is stored of its probabilities.
        labels: [N] token ids of the full vocabulary, or [G, N / G] as for the cross entropy. They
            only choose the rows (``IGNORE`` skips one) and count hits; a label that the token map
            drops is a row like any other.
        row_weight: factor of each row's distance, shaped as ``labels``; no gradient flows to it.
        loss: which distance.
        chunk_size: rows whose logits exist at one time; 0: as for the cross entropy.

    Returns:
        The loss, a differentiable scalar, and float32 statistics [G, 3]: sum of distances, the
        student's top-1 hits and top-5 hits of the labels over the valid rows. With
        ``loss.compare`` [G, 5]: behind them the sum of the labels' cross entropies, and that of A
        at temperature 1 over all tokens, whatever the loss was told; of a stored teacher over its
        k tokens, which is at most A.

    Raises:
        ValueError: for shapes that do not fit, or a stored teacher that cannot give the
            distribution asked for.
    """
    check_teacher(teacher, hidden, output.weight, loss)
    kept = output_of = None
    if isinstance(teacher, StoredTeacher):
        chunk_size = chunk_size or rows_at_once(output.weight)
        measure: Measure = partial(_against_stored, teacher, loss)
    else:
        kept, widest = teacher.token_map, teacher.output.weight
        if kept is not None:
            output_of = labels.new_full(widest.shape[:1], -1)
            output_of[kept] = torch.arange(kept.numel(), device=labels.device)
        narrow = _kept_alone(teacher, loss)
        chunk_size = chunk_size or rows_at_once(output.weight if narrow else widest)
        measure = _against_made(teacher, loss, min(chunk_size, hidden.shape[0]))

    def row_loss(
        rows: Tensor, z: Tensor, label: Tensor, factor: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor]:
        if output_of is not None:
            label = output_of.index_select(0, label.squeeze(1))[:, None]
        target = z.gather(1, label if output_of is None else label.clamp_min(0))
        near = (rank_of(z, target) < 5) & (label >= 0)
        columns = [z.argmax(1, keepdim=True) == label, near]
        log_s = log_softmax_(z)
        if loss.compare:
            columns.append(-log_s.gather(1, label))
        losses, accepted = measure(rows, log_s, factor, slope)
        if accepted is not None:
            columns.append(accepted)
        return losses, torch.cat([column.float() for column in columns], 1)

    given, columns = (labels, row_weight, row_loss), 4 if loss.compare else 2
    return fused_loss(hidden, output, *given, chunk_size=chunk_size, num_columns=columns)


def _kept_alone(teacher: Teacher, loss: SoftLoss) -> bool:
    """Return whether the teacher's logits of the kept tokens are enough."""
    known = teacher.log_sum is not None or not loss.needs_log_sum
    return teacher.token_map is not None and known and not loss.top_k


@torch.no_grad()
def _against_made(teacher: Teacher, loss: SoftLoss, chunk_size: int) -> Measure:
    """Compare with logits that are made chunk by chunk, all in one block of ``chunk_size`` rows."""
    kept, output, alone = teacher.token_map, teacher.output, _kept_alone(teacher, loss)
    log_sum = teacher.log_sum if loss.needs_log_sum else None
    some = 0 < loss.top_k < len(output.weight)
    if kept is not None and alone:
        bias = None if output.bias is None else output.bias[kept]
        output = replace(output, weight=output.weight[kept], bias=bias)
    logits = Logits(output, chunk_size)

    def measure(
        rows: Tensor, log_s: Tensor, factor: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        z = logits.of(teacher.hidden.index_select(0, rows).to(logits.compute))
        accepted = None
        if loss.compare:
            accepted = overlap(log_s, log_softmax_(z).to(log_s.dtype))
        if some:
            best, where = z.topk(loss.top_k, dim=1)
            z.fill_(-torch.inf).scatter_(1, where, best)
        if loss.temperature != 1.0:
            z.div_(loss.temperature)
        if alone and log_sum is not None:
            z.sub_(log_sum.index_select(0, rows)[:, None])
        elif not loss.compare or some or loss.temperature != 1.0:
            log_softmax_(z)  # of logarithms of probabilities as of logits
        log_t = (z if kept is None or alone else z.index_select(1, kept)).to(log_s.dtype)
        losses = distance(loss, log_s, log_t, factor, slope, restricted=kept is not None)
        return losses, accepted

    return measure


def _against_stored(
    teacher: StoredTeacher, loss: SoftLoss, rows: Tensor, log_s: Tensor, factor: Tensor, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Compare with k tokens and the mass of all others, see ``Measure``.

    The acceptance is that of the k tokens, a lower bound.
    """
    ids = teacher.ids.index_select(0, rows).long()
    log_t = teacher.log_probs.index_select(0, rows).to(log_s.dtype)
    accepted = overlap(log_s.gather(1, ids), log_t) if loss.compare else None
    if loss.top_k:
        ids, log_t = ids[:, : loss.top_k], log_t[:, : loss.top_k] / loss.temperature
        tail = torch.full_like(log_t[:, :1], -torch.inf)
    else:
        tail = (1.0 - log_t.exp().sum(1, keepdim=True)).clamp_min_(_LEAST_TAIL).log_()
    log_t = log_softmax_(torch.cat([log_t, tail], 1))
    known = log_s.gather(1, ids)
    others = log_s.scatter_(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    # These are logits of the buckets as good as any: the slope by them is that by z.
    buckets = torch.cat([known, others], 1)
    losses = distance(loss, buckets, log_t, factor, slope)
    if slope:  # the others' slope is shared among them as their mass is
        log_s.sub_(others).exp_().mul_(buckets[:, -1:]).scatter_(1, ids, buckets[:, :-1])
    return losses, accepted


def distance(
    loss: SoftLoss,
    log_s: Tensor,
    log_t: Tensor,
    factor: Tensor,
    slope: bool,
    *,
    restricted: bool = False,
) -> Tensor:
    """Return the distance of each row [n, 1].

    Args:
        loss: which distance.
        log_s: [n, V'] logarithms of the student's probabilities, overwritten; with ``slope`` by
            the gradient with respect to the student's logits, times ``factor`` [n, 1].
        log_t: [n, V'] logarithms of the teacher's probabilities, overwritten.
        factor: [n, 1] factors of the rows.
        slope: whether gradients are wanted.
        restricted: whether the teacher's probabilities may sum to less than 1.
    """
    losses, share = torch.zeros_like(factor), torch.ones_like(factor)  # share: of the KL
    # The gradient of every kind is the sum of c * (s * x.sum() - x) over these c [n, 1], x [n, V'].
    terms: list[tuple[Tensor, Tensor]] = []
    if loss.kind in ("tv", "lk_alpha", "lk_lambda"):
        lower = torch.minimum(log_s, log_t)
        # In logarithms, because A underflows long before log A does.
        log_a = lower.logsumexp(1, keepdim=True).clamp_max_(0.0)
        accepted, none = log_a.exp(), log_a.isneginf()
        if loss.kind == "lk_alpha":
            losses = torch.where(none, 0.0, -log_a)
        else:
            share = (-loss.eta * accepted).exp() if loss.kind == "lk_lambda" else losses
            losses = (1.0 - share) * (1.0 - accepted)
        if slope:  # x is s / A where s < t
            c = torch.ones_like(factor) if loss.kind == "lk_alpha" else (1.0 - share) * accepted
            lower.sub_(torch.where(none, 0.0, log_a)).exp_().mul_(log_s < log_t)
            terms.append((c, lower))
    elif loss.kind != "soft":
        none = _renormalise(log_t) if restricted else torch.zeros_like(factor, dtype=torch.bool)
        own = 0.0 if loss.kind == "reverse_kl" else 1.0 - loss.jsd_beta
        losses, term = _mixed(log_s, log_t, own)
        losses = torch.where(none, 0.0, losses)
        term[1].masked_fill_(none, 0.0)
        terms.append(term)
    if loss.kind in ("soft", "lk_lambda"):
        if restricted:
            _renormalise(log_t)
        if loss.top_k:  # what is left out has a probability of 0, and a finite logarithm
            log_t.clamp_min_(-1e4)
        gap = log_t - log_s
        t = log_t.exp_()  # sums to 1, or to 0 where nothing of it is kept
        # half the time of kl_div, which takes logarithms of t again
        losses = losses + share * torch.linalg.vecdot(t, gap)[:, None]
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


def check_teacher(
    teacher: Teacher | StoredTeacher, hidden: Tensor, weight: Tensor, loss: SoftLoss
) -> None:
    """Check a teacher against the student's ``hidden`` [N, d] and ``weight`` [V', d].

    Raises:
        ValueError: for shapes that do not fit, or a distribution that a stored teacher's tokens do
            not determine: of another temperature without top_k, say, because what it makes of the
            other tokens' mass depends on each of them.
    """
    size = weight.shape[0]
    if isinstance(teacher, StoredTeacher):
        ours, theirs = tuple(teacher.ids.shape), tuple(teacher.log_probs.shape)
        k, top_k, odd = ours[-1], loss.top_k, len(ours) != 2 or ours != theirs
        refuse(
            {
                f"the teacher's ids {ours} and log_probs {theirs} must be [N, k]": odd,
                f"the teacher has {k} tokens, weight has {size} rows": not 0 < k < size,
                f"top_k is {top_k}, the stored teacher has {k} tokens": top_k > k,
                f"temperature is {loss.temperature}; a stored teacher of {k} tokens needs a top_k"
                f" of 1 to {k} for that": loss.temperature != 1.0 and not top_k,
            }
        )
    else:
        ours, theirs = tuple(teacher.hidden.shape), tuple(teacher.output.weight.shape)
        odd = len(ours) != 2 or len(theirs) != 2 or ours[1] != theirs[1]
        bias, kept = teacher.output.bias, teacher.token_map
        told = theirs[:1] if bias is None else tuple(bias.shape)
        mapped = (size,) if kept is None else tuple(kept.shape)
        rows, missing = theirs[0], kept is None and size != theirs[0]
        refuse(
            {
                f"the teacher's hidden {ours} and weight {theirs} must be [N, d], [V, d]": odd,
                f"the teacher's bias has shape {told}, its weight {rows} rows": told != (rows,),
                f"weight has {size} rows, the teacher's {rows}: token_map is missing": missing,
                f"token_map has shape {mapped}, weight has {size} rows": mapped != (size,),
            }
        )
    refuse({f"the teacher has {ours[0]} rows, hidden has {len(hidden)}": ours[0] != len(hidden)})
