"""Cross entropy over an output matrix without ever holding all logits, and the labels it needs.

Shapes: N rows (tokens of all heads, one after the other), d hidden size, V vocabulary, B T batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.losses.fused import IGNORE, Output, fused_loss, rank_of, rows_at_once
from specheads.system.errors import check


def shift_labels(labels: Tensor, segment_ids: Tensor, offset: int) -> Tensor:
    """Move labels so that position t holds the token ``offset`` ahead in the same document.

    Args:
        labels: [B, T] unshifted labels; ``IGNORE`` where nothing is to be learned.
        segment_ids: [B, T] number of the document within its row, 0 for padding.
        offset: 1 for the language model, i + 2 for head i.

    Returns:
        [B, T] labels; ``IGNORE`` where the target lies outside the document of position t.

    Raises:
        ValueError: if ``offset`` is below 1 or the shapes differ.
    """
    check(offset >= 1, "offset", offset, "at least 1")
    if labels.shape != segment_ids.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} and segment_ids {tuple(segment_ids.shape)} differ"
        )
    shifted = torch.full_like(labels, IGNORE)
    if offset < labels.shape[1]:
        here, there = segment_ids[:, :-offset], segment_ids[:, offset:]
        same = (here == there) & (here != 0)
        shifted[:, :-offset] = torch.where(same, labels[:, offset:], IGNORE)
    return shifted


def count_valid(labels: Tensor, segment_ids: Tensor, num_heads: int) -> Tensor:
    """Count the labels of the language model (entry 0) and of head i (entry i + 1).

    Returns:
        [num_heads + 1] int64 counts of this batch, on its device.
    """
    offsets = range(1, num_heads + 2)
    return torch.stack([(shift_labels(labels, segment_ids, o) != IGNORE).sum() for o in offsets])


def linear_cross_entropy(
    hidden: Tensor,
    output: Output,
    labels: Tensor,
    row_weight: Tensor,
    *,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of cross entropies of ``labels`` under an output matrix.

    It works on ``chunk_size`` rows at a time and forms the gradients in the forward pass
    from the same logits (the idea of Liger-Kernel, arXiv:2410.10989), so that at no time more
    than one chunk of logits exists; the backward pass only scales them. It forms gradients of
    exactly those inputs that need one, none under ``no_grad``. Under autocast the products run
    in autocast's dtype; softmax and the sum over chunks are always float32 or wider.

    Args:
        hidden: [N, d] rows; for several heads of one matrix their rows one after the other.
        output: the output matrix [V, d], its bias, scale and softcap.
        labels: [N] token ids, ``IGNORE`` for rows to skip; [G, N / G] for the rows of G heads,
            whose statistics are then counted apart.
        row_weight: factor of each row's cross entropy, shaped as ``labels``; no gradient flows
            to it.
        chunk_size: rows whose logits exist at one time; 0 takes as many as run fastest, about
            32 MB of logits on a CPU and at least 1024 rows elsewhere.

    Returns:
        The loss, a differentiable scalar, and float32 statistics [G, 3]: sum of cross entropies,
        top-1 hits and top-5 hits over the valid rows. A tie for the first place goes to the
        lowest id, a tie for the fifth is a hit.

    Raises:
        ValueError: for shapes that do not fit.
    """
    size = chunk_size or rows_at_once(output.weight)
    return fused_loss(hidden, output, labels, row_weight, cross_entropy_rows, chunk_size=size)


def cross_entropy_rows(
    rows: Tensor, z: Tensor, label: Tensor, factor: Tensor, slope: bool
) -> tuple[Tensor, Tensor]:
    """Return cross entropies [n, 1], and whether the label is among the first and first five."""
    target = z.gather(1, label)
    top, best = z.max(1, keepdim=True)
    hits = torch.cat([best == label, rank_of(z, target) < 5], 1).float()
    mass = z.sub_(top).exp_().sum(1, keepdim=True)  # z is exp(logit - max) now
    ce = mass.log() + (top - target)
    if slope:
        z.mul_(factor / mass)
        z.scatter_(1, label, z.gather(1, label) - factor)
    return ce, hits
