"""Losses fused with the output matrix: gradients formed chunk by chunk, in forward.

Shapes: N rows, n rows of one chunk, d hidden size, V vocabulary. ``losses.py`` and
``soft_loss.py`` are the ways in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

IGNORE = -100  # label of a token that is not to be learned

_COMPARED = 1 << 22  # logits compared at once while counting hits
_FP16_HEADROOM = 64.0  # keeps a sum over one chunk's rows below 65504 in float16


class LossInputs(NamedTuple):
    """Checked arguments of ``losses.linear_cross_entropy``, which describes them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    row_weight: Tensor
    groups: Tensor | None
    num_groups: int
    scale: float
    softcap: float | None
    chunk_size: int
    count_hits: bool


class Finishing(Protocol):
    """What turns products with an output matrix into logits."""

    @property
    def bias(self) -> Tensor | None:
        """[V] or None."""

    @property
    def scale(self) -> float:
        """Factor of the logits."""

    @property
    def softcap(self) -> float | None:
        """Bound of the logits."""


# (numbers of the rows [n], their logits [n, V], labels [n, 1], factors [n, 1], slope) -> losses
# [n, 1] and hits [n, 2], or other columns that are summed like them. With slope, the logits are
# replaced by factor * d loss / d logits.
RowLoss = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def checked_inputs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    row_weight: Tensor,
    groups: Tensor | None,
    num_groups: int,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    chunk_size: int,
    count_hits: bool,
) -> LossInputs:
    """Check what ``losses.linear_cross_entropy`` describes, and choose the size of a chunk.

    Raises:
        ValueError: for shapes that do not fit.
    """
    count, vocab = hidden.shape[0], weight.shape[0]
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, d], [V, d]"
        )
    for name, tensor in (("labels", labels), ("row_weight", row_weight), ("groups", groups)):
        if tensor is not None and tensor.shape != (count,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, hidden has {count} rows")
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, weight has {vocab} rows")
    if groups is None and num_groups != 1:
        raise ValueError(f"num_groups is {num_groups}, but groups is None")
    if chunk_size < 0:
        raise ValueError(f"chunk_size must be at least 0, got {chunk_size}")
    chunk_size = chunk_size or rows_at_once(weight)
    return LossInputs(
        hidden, weight, bias, labels, row_weight.detach(), groups, num_groups, scale, softcap,
        chunk_size, count_hits,
    )  # fmt: skip


def rows_at_once(weight: Tensor) -> int:
    """Return how many rows of logits of ``weight`` [V, d] to hold where nobody says."""
    return max(256 if weight.device.type == "cpu" else 1024, 2**23 // weight.shape[0])


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which products with ``weight`` are to be made here and now."""
    device = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def fused_cross_entropy(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return loss and statistics; see ``losses.linear_cross_entropy``."""

    def row_loss(
        rows: Tensor, z: Tensor, label: Tensor, factor: Tensor, slope: bool
    ) -> tuple[Tensor, Tensor]:
        ce, mass, hits = _softmax_numerator(z, label, inputs.count_hits)
        if slope:
            z.mul_(factor / mass)
            z.scatter_(1, label, z.gather(1, label) - factor)
        return ce, hits

    return fused_loss(inputs, row_loss)


def fused_loss(
    inputs: LossInputs, row_loss: RowLoss, *, num_columns: int = 2
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of ``row_loss`` over the valid rows, and the statistics.

    These are [num_groups, 1 + num_columns]: the sums of the losses and of what comes with them.
    """
    # Inside Function.forward gradients are always off, so the caller's mode is read here.
    on = torch.is_grad_enabled()
    needs = [on and x is not None and x.requires_grad for x in inputs[:3]]
    loss, stats = _FusedLoss.apply(*inputs[:3], inputs[3:], needs, row_loss, num_columns)
    return loss, stats


class _FusedLoss(torch.autograd.Function):
    """Loss and gradients in forward; backward hands the gradients out, scaled."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        others: tuple[Any, ...],
        needs: list[bool],
        row_loss: RowLoss,
        num_columns: int,
    ) -> tuple[Tensor, Tensor]:
        inputs = LossInputs(hidden, weight, bias, *others)
        loss, stats, unit, grads = _loss_and_grads(inputs, needs, row_loss, num_columns)
        grad_hidden, grad_weight, grad_bias = grads
        if grad_weight is not None and weight.dtype == torch.bfloat16:
            grad_weight = grad_weight.to(weight.dtype)  # float32's range: no loss scale to await
        # Not saved tensors: backward scales them in place and lets .grad take them over.
        ctx.grads = [grad_hidden, grad_weight, grad_bias]
        ctx.dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        ctx.unit = unit * inputs.scale
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: second derivatives would be silent zeros
            raise RuntimeError(
                "the fused loss has no second derivative (create_graph=True); that of "
                "linear_cross_entropy has one with implementation='naive'"
            )
        if grad_loss is None:
            return (None,) * 7
        if ctx.grads is None:
            raise RuntimeError(
                "the fused loss hands out its gradients once: add the losses up and call "
                "backward once"
            )
        grads, ctx.grads = ctx.grads, None
        factor = grad_loss.to(ctx.unit.dtype) * ctx.unit
        return (*map(_scale, grads, [factor] * 3, ctx.dtypes), None, None, None, None)


def _loss_and_grads(
    inputs: LossInputs, needs: list[bool], row_loss: RowLoss, num_columns: int
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Go over the valid rows once.

    Returns:
        Loss, statistics, the unit the gradients are still to be multiplied by (with ``scale``),
        and the gradients of hidden, weight and bias, None where ``needs`` is False.
    """
    hidden, weight, labels = inputs.hidden, inputs.weight, inputs.labels
    compute = compute_dtype(weight)
    exact = torch.float64 if compute == torch.float64 else torch.float32
    rows = (labels != IGNORE).nonzero().squeeze(1)
    count = rows.numel()
    every_row = count == hidden.shape[0]
    matrix = weight.to(compute)
    factors = inputs.row_weight.to(exact)
    # float16 cannot hold a probability times 1 / num_valid: the largest factor stays out of the
    # products and comes in where the loss scale already is, in backward.
    unit = factors.new_ones(())
    if compute == torch.float16 and count:
        unit = factors.abs().amax().clamp_min(torch.finfo(exact).tiny)
        factors = factors / unit

    # One block holds logits, then probabilities, then the gradient of the logits.
    size = (min(inputs.chunk_size, count), weight.shape[0])
    block = hidden.new_empty(size, dtype=exact)
    narrow = hidden.new_empty(size, dtype=compute) if compute != exact else None
    capped = inputs.softcap is not None and any(needs)
    squares = hidden.new_empty(size, dtype=exact) if capped else None
    # Gradients in float16 wait for the loss scale in float32.
    kept = exact if hidden.dtype == torch.float16 else hidden.dtype
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=kept) if needs[0] else None
    grad_weight = weight.new_empty(weight.shape, dtype=exact) if needs[1] else None
    grad_bias = weight.new_zeros(weight.shape[:1], dtype=exact) if needs[2] else None
    loss = factors.new_zeros(())
    # wide, so that the sums do not depend on which rows share a chunk
    stats = factors.new_zeros(inputs.num_groups, 1 + num_columns, dtype=torch.float64)

    for start in range(0, count, inputs.chunk_size):
        picked = rows[start : start + inputs.chunk_size]
        n = picked.numel()
        x = hidden[start : start + n] if every_row else hidden.index_select(0, picked)
        x = x.to(compute)
        label = labels.index_select(0, picked)[:, None]
        factor = factors.index_select(0, picked)[:, None]
        z, low = block[:n], None if narrow is None else narrow[:n]
        square = None if squares is None else squares[:n]

        write_logits(inputs, x, matrix, z, low, square)
        losses, hits = row_loss(picked, z, label, factor, any(needs))
        loss += (losses * factor).sum()
        counted = torch.cat([losses.float(), hits], 1).double()
        if inputs.groups is None:
            stats[0] += counted.sum(0)
        else:
            stats.index_add_(0, inputs.groups.index_select(0, picked), counted)
        if not any(needs):
            continue

        if square is not None:  # d tanh = 1 - tanh^2
            z.addcmul_(z, square, value=-1.0)
        if grad_bias is not None:
            grad_bias += z.sum(0)
        slope = z if low is None else low.copy_(z)
        if grad_hidden is not None and every_row and kept == compute:
            torch.mm(slope, matrix, out=grad_hidden[start : start + n])
        elif grad_hidden is not None:
            grad_hidden.index_copy_(0, picked, torch.mm(slope, matrix).to(kept))
        if grad_weight is not None:
            _add_product(grad_weight, slope, x, first=start == 0)

    if grad_weight is not None and count == 0:
        grad_weight.zero_()
    return loss * unit, stats.float(), unit, [grad_hidden, grad_weight, grad_bias]


def write_logits(
    output: Finishing,
    x: Tensor,
    matrix: Tensor,
    z: Tensor,
    low: Tensor | None,
    square: Tensor | None = None,
) -> None:
    """Write the logits of the rows ``x`` [n, d] into ``z`` [n, V], and tanh^2 into ``square``.

    ``low`` [n, V] has the dtype of ``x`` and ``matrix`` [V, d]; None where ``z`` has it too.
    """
    if low is None:
        torch.mm(x, matrix.t(), out=z)
    else:
        z.copy_(torch.mm(x, matrix.t(), out=low))
    if output.bias is not None:
        z.add_(output.bias)
    if output.scale != 1.0:
        z.mul_(output.scale)
    if output.softcap is not None:
        z.div_(output.softcap).tanh_()
        if square is not None:
            torch.mul(z, z, out=square)
        z.mul_(output.softcap)


def _softmax_numerator(z: Tensor, label: Tensor, count_hits: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits [n, V] into exp(z - max) in place.

    Returns:
        Cross entropy [n, 1], the sums of ``z`` [n, 1], and whether the label is among the first
        and the first five [n, 2] (float32, NaN if not counted).
    """
    target = z.gather(1, label)
    if count_hits:
        top, best = z.max(1, keepdim=True)
        hits = torch.cat([best == label, rank_of(z, target) < 5], 1).float()
    else:
        top = z.amax(1, keepdim=True)
        hits = z.new_full((z.shape[0], 2), torch.nan, dtype=torch.float32)
    mass = z.sub_(top).exp_().sum(1, keepdim=True)
    return mass.log() + (top - target), mass, hits


def rank_of(logits: Tensor, target: Tensor) -> Tensor:
    """Count the logits [n, V] above the target's [n, 1], in parts that stay in the cache."""
    step = max(1, _COMPARED // logits.shape[1])
    parts = zip(logits.split(step), target.split(step), strict=True)
    # Zeros and ones of the logits' own dtype, in which float32 counts to 2^24: on a CPU that takes
    # half the time of a sum of bool into int32, and that a tenth of one into int64.
    return torch.cat(
        [torch.gt(z, t, out=torch.empty_like(z)).sum(1, keepdim=True) for z, t in parts]
    )


def _add_product(total: Tensor, slope: Tensor, x: Tensor, *, first: bool) -> None:
    """Add ``slope.T @ x`` to ``total`` [V, d]; the first product fills it."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.t(), x, beta=0.0 if first else 1.0)
        return
    headroom = _FP16_HEADROOM if slope.dtype == torch.float16 else 1.0
    product = torch.mm(slope.t(), x / headroom)
    (total.zero_() if first else total).add_(product, alpha=headroom)


def _scale(grad: Tensor | None, factor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """Multiply ``grad`` in place by a scalar, at the scalar's precision; return it as ``dtype``."""
    if grad is None:
        return None
    if factor.device.type == "cpu" and factor.item() == 1.0:  # elsewhere asking would wait
        return grad.to(dtype)
    if grad.dtype == factor.dtype:
        return grad.mul_(factor).to(dtype)
    for part in grad.split(1024):  # a factor rounded to bfloat16 would bias every gradient
        part.copy_(part.to(factor.dtype).mul_(factor))
    return grad.to(dtype)
