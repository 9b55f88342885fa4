"""Losses against the base model's own distribution, without ever holding all logits.

Shapes: N rows (tokens of all heads, one after the other), n rows of one chunk, d hidden size,
V vocabulary, V' the tokens that the student can give (V unless there is a token map).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.distances import KINDS, log_softmax_
from specheads.fused_loss import checked_inputs, fused_loss, rank_of, rows_at_once
from specheads.teachers import (
    Buckets,
    MadeTeacher,
    Measure,
    StoredTeacher,
    Teacher,
    check_stored,
    check_teacher,
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
    as in :func:`specheads.losses.linear_cross_entropy`: at no time do more than one chunk of the
    student's and the teacher's logits exist (of both, their probabilities and what is made of
    them: up to eight buffers of that size), and no gradient is formed under ``no_grad`` or for an
    input that needs none. Under autocast the products run in autocast's dtype; everything after
    them is float32 or wider.

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
