"""Losses fused with the output matrix: gradients formed chunk by chunk, in forward.

``cross_entropy.py`` and ``distill.py`` hold the losses themselves. Shapes: N rows (tokens), G
groups (heads) of N / G rows each, n rows of one chunk, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specheads.system.errors import check

IGNORE = -100  # label of a token that is not to be learned

_COMPARED = 1 << 22  # logits compared at once while counting hits
_FP16_HEADROOM = 64.0  # keeps a sum over one chunk's rows below 65504 in float16


@dataclass(frozen=True)
class Output:
    """An output matrix, and what turns its products into logits.

    The logits are ``softcap * tanh(a / softcap)`` of ``a = scale * (hidden @ weight.T + bias)``.
    """

    weight: Tensor  # [V, d]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None  # bound of the logits; costs a second buffer of a chunk's size

    def detached(self) -> Output:
        """Return the same output, to which no gradient flows."""
        bias = None if self.bias is None else self.bias.detach()
        return Output(self.weight.detach(), bias, self.scale, self.softcap)


# (numbers of the rows [n], their logits [n, V], labels [n, 1], factors [n, 1], slope) -> losses
# [n, 1] and hits [n, 2], or other columns that are summed like them. With slope, the logits are
# replaced by factor * d loss / d logits.
RowLoss = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def check_rows(
    hidden: Tensor, output: Output, labels: Tensor, row_weight: Tensor, chunk_size: int
) -> None:
    """Check the arguments that all losses share; ``linear_cross_entropy`` describes them.

    Raises:
        ValueError: for shapes that do not fit.
    """
    count, weight, bias = hidden.shape[0], output.weight, output.bias
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, d], [V, d]"
        )
    if labels.dim() not in (1, 2) or labels.numel() != count:
        raise ValueError(f"labels has shape {tuple(labels.shape)}, hidden has {count} rows")
    if row_weight.shape != labels.shape:
        raise ValueError(
            f"row_weight has shape {tuple(row_weight.shape)}, labels {tuple(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, weight has {weight.shape[0]} rows")
    check(chunk_size >= 0, "chunk_size", chunk_size, "at least 0")


def rows_at_once(weight: Tensor) -> int:
    """Return how many rows of logits of ``weight`` [V, d] to hold where nobody says."""
    return max(256 if weight.device.type == "cpu" else 1024, 2**23 // weight.shape[0])


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which products with ``weight`` are to be made here and now."""
    device = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def cross_entropy_rows(
    rows: Tensor, z: Tensor, label: Tensor, factor: Tensor, slope: bool
) -> tuple[Tensor, Tensor]:
    """Return cross entropies [n, 1], and whether the label is among the first and first five."""
    del rows
    target = z.gather(1, label)
    top, best = z.max(1, keepdim=True)
    hits = torch.cat([best == label, rank_of(z, target) < 5], 1).float()
    mass = z.sub_(top).exp_().sum(1, keepdim=True)  # z is exp(logit - max) now
    ce = mass.log() + (top - target)
    if slope:
        z.mul_(factor / mass)
        z.scatter_(1, label, z.gather(1, label) - factor)
    return ce, hits


def fused_loss(
    hidden: Tensor,
    output: Output,
    labels: Tensor,
    row_weight: Tensor,
    row_loss: RowLoss,
    *,
    chunk_size: int,
    num_columns: int = 2,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of ``row_loss`` over the valid rows, and the statistics.

    These are [G, 1 + num_columns]: the sums of the losses and of what comes with them.
    """
    # The gradients are formed here and now, for whatever requires one: under no_grad nothing may.
    if not torch.is_grad_enabled():
        hidden, output = hidden.detach(), output.detached()
    loss, stats, unit, grads = _loss_and_grads(
        hidden, output, labels, row_weight, row_loss, chunk_size, num_columns
    )
    loss = _HandOut.apply(hidden, output.weight, output.bias, loss, unit * output.scale, grads)
    return loss, stats


class _HandOut(torch.autograd.Function):
    """The loss with its gradients, which are there already: backward hands them out, scaled."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        unit: Tensor,
        grads: list[Tensor | None],
    ) -> Tensor:
        # Not saved tensors: backward scales them in place and lets .grad take them over.
        ctx.grads, ctx.unit = grads, unit
        ctx.dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: second derivatives would be silent zeros
            raise RuntimeError(
                "the fused loss has no second derivative (create_graph=True); that of "
                "linear_cross_entropy has one with implementation='naive'"
            )
        if ctx.grads is None:
            raise RuntimeError(
                "the fused loss hands out its gradients once: add the losses up and call "
                "backward once"
            )
        grads, ctx.grads = ctx.grads, None
        factor = grad_loss.to(ctx.unit.dtype) * ctx.unit
        return (*map(_scale, grads, [factor] * 3, ctx.dtypes), None, None, None)


@torch.no_grad()
def _loss_and_grads(
    hidden: Tensor,
    output: Output,
    labels: Tensor,
    row_weight: Tensor,
    row_loss: RowLoss,
    chunk_size: int,
    num_columns: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Go over the valid rows once.

    Returns:
        Loss, statistics, the unit the gradients are still to be multiplied by (with ``scale``),
        and the gradients of hidden, weight and bias, None for those that need none.
    """
    weight, num_groups = output.weight, 1 if labels.dim() == 1 else labels.shape[0]
    needs = [x is not None and x.requires_grad for x in (hidden, weight, output.bias)]
    labels, row_weight = labels.flatten(), row_weight.flatten()
    compute = compute_dtype(weight)
    exact = torch.float64 if compute == torch.float64 else torch.float32
    rows = (labels != IGNORE).nonzero().squeeze(1)
    count = rows.numel()
    every_row = count == hidden.shape[0]
    matrix = weight.to(compute)
    factors = row_weight.to(exact)
    # float16 cannot hold a probability times 1 / num_valid: the largest factor stays out of the
    # products and comes in where the loss scale already is, in backward.
    unit = factors.new_ones(())
    if compute == torch.float16 and count:
        unit = factors.abs().amax().clamp_min(torch.finfo(exact).tiny)
        factors = factors / unit

    # One block holds logits, then probabilities, then the gradient of the logits.
    size = (min(chunk_size, count), weight.shape[0])
    block = hidden.new_empty(size, dtype=exact)
    narrow = hidden.new_empty(size, dtype=compute) if compute != exact else None
    capped = output.softcap is not None and any(needs)
    squares = hidden.new_empty(size, dtype=exact) if capped else None
    # Gradients in float16 wait for the loss scale in float32.
    kept = exact if hidden.dtype == torch.float16 else hidden.dtype
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=kept) if needs[0] else None
    grad_weight = weight.new_empty(weight.shape, dtype=exact) if needs[1] else None
    grad_bias = weight.new_zeros(weight.shape[:1], dtype=exact) if needs[2] else None
    loss = factors.new_zeros(())
    # wide, so that the sums do not depend on which rows share a chunk
    stats = factors.new_zeros(num_groups, 1 + num_columns, dtype=torch.float64)

    for start in range(0, count, chunk_size):
        picked = rows[start : start + chunk_size]
        n = picked.numel()
        x = hidden[start : start + n] if every_row else hidden.index_select(0, picked)
        x = x.to(compute)
        label = labels.index_select(0, picked)[:, None]
        factor = factors.index_select(0, picked)[:, None]
        z, low = block[:n], None if narrow is None else narrow[:n]
        square = None if squares is None else squares[:n]

        write_logits(output, x, matrix, z, low, square)
        losses, hits = row_loss(picked, z, label, factor, any(needs))
        loss += (losses * factor).sum()
        counted = torch.cat([losses.float(), hits], 1).double()
        if num_groups == 1:
            stats[0] += counted.sum(0)
        else:
            stats.index_add_(0, picked // (labels.numel() // num_groups), counted)
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
    if grad_weight is not None and weight.dtype == torch.bfloat16:
        grad_weight = grad_weight.to(weight.dtype)  # float32's range: no loss scale to await
    return loss * unit, stats.float(), unit, [grad_hidden, grad_weight, grad_bias]


def write_logits(
    output: Output,
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
