"""Cross entropy over an output matrix without ever holding all logits, and the labels it needs.

Shapes: N rows (tokens of all heads, one after the other), d hidden size, V vocabulary, B T batch.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.losses.fused import (
    IGNORE,
    LossInputs,
    checked_inputs,
    compute_dtype,
    fused_cross_entropy,
)

IMPLEMENTATIONS = ("fused", "naive", "torch", "liger")


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
    if offset < 1:
        raise ValueError(f"offset must be at least 1, got {offset}")
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
    weight: Tensor,
    labels: Tensor,
    row_weight: Tensor,
    *,
    groups: Tensor | None = None,
    num_groups: int = 1,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int = 0,
    count_hits: bool = True,
    implementation: str = "fused",
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of cross entropies of ``labels`` under an output matrix.

    The logits are ``softcap * tanh(a / softcap)`` of ``a = scale * (hidden @ weight.T + bias)``.
    ``fused`` works on ``chunk_size`` rows at a time and forms the gradients in the forward pass
    from the same logits (the idea of Liger-Kernel, arXiv:2410.10989), so that at no time more
    than one chunk of logits exists; the backward pass only scales them. It forms gradients of
    exactly those inputs that need one, none under ``no_grad``. Under autocast the products run
    in autocast's dtype; softmax and the sum over chunks are always float32 or wider.

    Args:
        hidden: [N, d] rows; for several heads of one matrix their rows one after the other.
        weight: [V, d] output matrix.
        labels: [N] token ids, ``IGNORE`` for rows to skip.
        row_weight: [N] factor of each row's cross entropy; no gradient flows to it.
        groups: [N] int64 number of the group (head) a row is counted under.
        num_groups: number of groups.
        bias: [V] or None.
        scale: factor of the logits.
        softcap: bound of the logits; costs a second buffer of the size of a chunk.
        chunk_size: rows whose logits exist at one time; 0 takes as many as run fastest, about
            32 MB of logits on a CPU and at least 1024 rows elsewhere.
        count_hits: whether to count top-1 and top-5 hits (a few percent of the time).
        implementation: ``fused``; ``naive``, the reference that holds all logits; ``torch``,
            PyTorch's function of the same name (2.13); ``liger``, from liger-kernel (GPU).

    Returns:
        The loss, a differentiable scalar, and float32 statistics [num_groups, 3]: sum of cross
        entropies, top-1 hits and top-5 hits over the valid rows (hits are NaN if not counted).
        A tie for the first place goes to the lowest id, a tie for the fifth is a hit.

    Raises:
        ValueError: for shapes that do not fit, or an implementation that cannot serve.
    """
    inputs = checked_inputs(
        hidden, weight, labels, row_weight, groups, num_groups, bias, scale, softcap, chunk_size,
        count_hits,
    )  # fmt: skip
    check_implementation(implementation, softcap)
    if implementation == "naive":
        return _naive(inputs)
    if implementation == "fused":
        return fused_cross_entropy(inputs)
    with torch.no_grad():  # neither counts hits: one more pass over the logits does
        _, stats = fused_cross_entropy(inputs)
    return (_torch if implementation == "torch" else _liger)(inputs), stats


def check_implementation(implementation: str, softcap: float | None = None) -> None:
    """Refuse an implementation that is unknown, not installed, or cannot do ``softcap``.

    Raises:
        ValueError: with the reason, in one line.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    if implementation == "torch" and not hasattr(F, "linear_cross_entropy"):
        raise ValueError(
            f"implementation 'torch' needs torch 2.13 or newer, this is {torch.__version__}"
        )
    if implementation == "torch" and softcap is not None:
        raise ValueError(f"implementation 'torch' knows no softcap, the model has {softcap}")
    if implementation == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("implementation 'liger' needs the package liger-kernel (and a GPU)")


def _logits(inputs: LossInputs) -> Tensor:
    weight, bias = inputs.weight, inputs.bias
    logits = F.linear(inputs.hidden.to(weight.dtype), weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if bias is not None:
        logits = logits + bias
    logits = logits * inputs.scale
    if inputs.softcap is not None:
        logits = torch.tanh(logits / inputs.softcap) * inputs.softcap
    return logits


def _naive(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    labels = inputs.labels
    logits = _logits(inputs)
    ce = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    loss = (ce * inputs.row_weight).sum()
    with torch.no_grad():
        valid = labels != IGNORE
        columns = [ce.detach().float()]
        if inputs.count_hits:
            target = logits.gather(1, labels.clamp_min(0)[:, None])
            columns.append((logits.argmax(1) == labels).float())
            columns.append((logits > target).sum(1, dtype=torch.int32) < 5)
        else:
            columns += [torch.full_like(columns[0], torch.nan)] * 2
        groups = torch.zeros_like(labels) if inputs.groups is None else inputs.groups
        counted = torch.stack([column.float() for column in columns], 1)[valid]
        stats = counted.new_zeros(inputs.num_groups, 3)
        stats.index_add_(0, groups[valid], counted)
    return loss, stats


def _torch(inputs: LossInputs) -> Tensor:
    """PyTorch's chunked loss; its backward forms the logits a second time (4 products, not 3)."""
    compute = compute_dtype(inputs.weight)
    bias = None if inputs.bias is None else (inputs.bias * inputs.scale).to(compute)
    ce = F.linear_cross_entropy(
        (inputs.hidden * inputs.scale).to(compute),
        inputs.weight.to(compute),
        inputs.labels,
        linear_bias=bias,
        ignore_index=IGNORE,
        reduction="none",
        options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=inputs.chunk_size),
    )
    return (ce * inputs.row_weight).sum()


def _liger(inputs: LossInputs) -> Tensor:
    """Liger's fused loss, called once per distinct row weight: it sums with equal weights."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    compute = compute_dtype(inputs.weight)
    bias = None if inputs.bias is None else (inputs.bias * inputs.scale).to(compute)
    sum_ce = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE, reduction="sum", softcap=inputs.softcap
    )
    hidden, weight = (inputs.hidden * inputs.scale).to(compute), inputs.weight.to(compute)
    loss = inputs.row_weight.new_zeros(())
    for value in inputs.row_weight[inputs.labels != IGNORE].unique():
        labels = torch.where(inputs.row_weight == value, inputs.labels, IGNORE)
        loss = loss + value * sum_ce(weight, hidden, labels, bias)
    return loss


@torch.no_grad()
def kl_divergence(base_logits: Tensor, logits: Tensor, chunk_size: int = 1024) -> Tensor:
    """Return KL(base || other) in nats for each row, in float32, ``chunk_size`` rows at a time.

    Args:
        base_logits: [..., V] logits of the original model.
        logits: [..., V] logits of the model compared with it.
        chunk_size: rows whose probabilities exist at one time.

    Returns:
        [...] divergences.

    Raises:
        ValueError: if the shapes differ.
    """
    if base_logits.shape != logits.shape:
        raise ValueError(
            f"base_logits {tuple(base_logits.shape)} and logits {tuple(logits.shape)} differ"
        )
    vocab = logits.shape[-1]
    pairs = zip(
        base_logits.reshape(-1, vocab).split(chunk_size),
        logits.reshape(-1, vocab).split(chunk_size),
        strict=True,
    )
    parts = []
    for ours, theirs in pairs:
        base, other = ours.float().log_softmax(-1), theirs.float().log_softmax(-1)
        parts.append((base.exp() * (base - other)).sum(-1))
    return torch.cat(parts).reshape(logits.shape[:-1])
