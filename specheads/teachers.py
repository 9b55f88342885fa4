"""Teachers of the soft losses: one whose logits are made as they are needed, and a stored one.

Shapes: N rows, n rows of one chunk, V vocabulary, V' the tokens that the student can give (V unless
there is a token map), k tokens that a stored teacher knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specheads.distances import distance, log_softmax_, overlap
from specheads.fused_loss import compute_dtype, write_logits

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
