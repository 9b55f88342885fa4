"""Losses fused with the output matrix: gradients formed chunk by chunk, in forward.

``cross_entropy.py`` and ``distill.py`` hold the losses themselves. Shapes: N rows (tokens), G
groups (heads) of N / G rows each, n rows of one chunk, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specheads.system.errors import refuse

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


# (numbers of the rows [n], their logits [n, V], labels [n, 1], factors [n, 1], slope) -> losses
# [n, 1] and hits [n, 2], or other columns that are summed like them. With slope, the logits are
# replaced by factor * d loss / d logits.
RowLoss = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def check_rows(hidden: Tensor, output: Output, labels: Tensor, row_weight: Tensor) -> None:
    """Check the arguments that all losses share; ``linear_cross_entropy`` describes them.

    Raises:
        ValueError: for shapes that do not fit.
    """
    ours, theirs, shape = (tuple(x.shape) for x in (hidden, output.weight, labels))
    bias = theirs[:1] if output.bias is None else tuple(output.bias.shape)
    odd = len(ours) != 2 or len(theirs) != 2 or ours[1] != theirs[1]
    many = labels.dim() not in (1, 2) or labels.numel() != ours[0]
    weights = tuple(row_weight.shape)
    refuse(
        {
            f"hidden {ours} and weight {theirs} must be [N, d], [V, d]": odd,
            f"labels has shape {shape}, hidden has {ours[0]} rows": many,
            f"row_weight has shape {weights}, labels {shape}": weights != shape,
            f"bias has shape {bias}, weight has {theirs[0]} rows": bias != theirs[:1],
        }
    )


def rows_at_once(weight: Tensor) -> int:
    """Return how many rows of logits of ``weight`` [V, d] to hold where nobody says."""
    # the C library hands blocks above 32 MiB back to the system, which fills new ones with zeros
    on_cpu = weight.device.type == "cpu"
    return max(256 if on_cpu else 1024, 2 ** (22 if on_cpu else 23) // weight.shape[0])


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which products with ``weight`` are to be made here and now."""
    device = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


class Logits:
    """The logits of one chunk of rows after the other, all in one block of memory."""

    def __init__(self, output: Output, num_rows: int, *, capped: bool = False) -> None:
        """Take the block, of ``num_rows`` rows; ``capped`` where a softcap's slope is wanted."""
        self.output, weight = output, output.weight
        self.compute = compute_dtype(weight)
        self.exact = torch.float64 if self.compute == torch.float64 else torch.float32
        self.matrix = weight.to(self.compute)
        self.block = weight.new_empty((num_rows, weight.shape[0]), dtype=self.exact)
        alike = torch.empty_like
        split = self.compute != self.exact
        self.narrow = alike(self.block, dtype=self.compute) if split else None
        self.squares = alike(self.block) if capped and output.softcap is not None else None

    def of(self, x: Tensor) -> Tensor:
        """Return the logits [n, V] of the rows ``x`` [n, d]; the next call overwrites them.

        ``squares`` then has the tanh^2 of a softcap, where it is wanted.
        """
        n, output = len(x), self.output
        z = self.block[:n]
        if self.narrow is None:
            torch.mm(x, self.matrix.t(), out=z)
        else:
            z.copy_(torch.mm(x, self.matrix.t(), out=self.narrow[:n]))
        if output.bias is not None:
            z.add_(output.bias)
        if output.scale != 1.0:
            z.mul_(output.scale)
        if output.softcap is not None:
            z.div_(output.softcap).tanh_()
            if self.squares is not None:
                torch.mul(z, z, out=self.squares[:n])
            z.mul_(output.softcap)
        return z


@torch.no_grad()
def chunks_of_logits(hidden: Tensor, output: Output) -> Iterator[Tensor]:
    """Yield logits [n, V] of hidden states [N, d], some rows at a time; the next overwrite them."""
    size = rows_at_once(output.weight)
    logits = Logits(output, min(size, len(hidden)))
    yield from (logits.of(rows.to(logits.compute)) for rows in hidden.split(size))


@torch.no_grad()
def likelihoods(hidden: Tensor, output: Output, labels: Tensor) -> Tensor:
    """Return the probabilities [N] of labels [N], 0 where one is ``IGNORE``."""
    found, parts = list[Tensor](), labels[:, None].split(rows_at_once(output.weight))
    for z, label in zip(chunks_of_logits(hidden, output), parts, strict=True):
        log_prob = z.gather(1, label.clamp_min(0)) - z.logsumexp(1, keepdim=True)
        found.append(log_prob.exp().masked_fill_(label == IGNORE, 0.0)[:, 0])
    return torch.cat(found)


@torch.no_grad()
def log_sums(hidden: Tensor, output: Output, temperature: float) -> Tensor:
    """Return log sum exp(logit / temperature) over all tokens, [N], of hidden states [N, d]."""
    chunks = chunks_of_logits(hidden, output)
    return torch.cat([z.div_(temperature).logsumexp(1) for z in chunks])


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

    Raises:
        ValueError: for shapes that do not fit.
    """
    check_rows(hidden, output, labels, row_weight)
    weight, num_groups = output.weight, 1 if labels.dim() == 1 else labels.shape[0]
    # The gradients are formed here and now, for whatever requires one: under no_grad nothing may.
    needs = [
        x is not None and x.requires_grad and torch.is_grad_enabled()
        for x in (hidden, weight, output.bias)
    ]
    with torch.no_grad():
        labels, row_weight = labels.flatten(), row_weight.flatten()
        rows = (labels != IGNORE).nonzero().squeeze(1)
        count = rows.numel()
        logits = Logits(output, min(chunk_size, count), capped=any(needs))
        compute, exact = logits.compute, logits.exact
        factors = row_weight.to(exact)
        # float16 cannot hold a probability times 1 / num_valid: the largest factor stays out of the
        # products and comes in where the loss scale already is, in backward.
        unit = factors.new_ones(())
        if compute == torch.float16 and count:
            unit = factors.abs().amax().clamp_min(torch.finfo(exact).tiny)
            factors = factors / unit

        # Gradients in float16 wait for the loss scale in float32. That of the matrix is filled by
        # its first chunk, not zeroed before: at V x d it is the largest tensor of the step.
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
            x = hidden.index_select(0, picked).to(compute)
            z = logits.of(x)  # then probabilities, then the gradient of the logits
            label = labels.index_select(0, picked)[:, None]
            factor = factors.index_select(0, picked)[:, None]
            losses, hits = row_loss(picked, z, label, factor, any(needs))
            loss += (losses * factor).sum()
            counted = torch.cat([losses.float(), hits], 1).double()
            if num_groups == 1:
                stats[0] += counted.sum(0)
            else:
                stats.index_add_(0, picked // (labels.numel() // num_groups), counted)
            if not any(needs):
                continue

            if logits.squares is not None:  # d tanh = 1 - tanh^2
                z.addcmul_(z, logits.squares[:n], value=-1.0)
            if grad_bias is not None:
                grad_bias += z.sum(0)
            slope = z if logits.narrow is None else logits.narrow[:n].copy_(z)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, picked, torch.mm(slope, logits.matrix).to(kept))
            if grad_weight is not None:
                _add_product(grad_weight, slope, x, first=start == 0)

        if grad_weight is not None and count == 0:
            grad_weight.zero_()
        if grad_weight is not None and weight.dtype == torch.bfloat16:
            grad_weight = grad_weight.to(weight.dtype)  # float32's range: no loss scale to await
    grads = [grad_hidden, grad_weight, grad_bias]
    loss = _HandOut.apply(hidden, weight, output.bias, loss * unit, unit * output.scale, grads)
    return loss, stats.float()


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
            raise RuntimeError("the fused loss has no second derivative (create_graph=True)")
        if ctx.grads is None:
            raise RuntimeError(
                "the fused loss hands out its gradients once: add the losses up and call "
                "backward once"
            )
        grads, ctx.grads = ctx.grads, None
        factor = grad_loss.to(ctx.unit.dtype) * ctx.unit
        return (*map(_scale, grads, [factor] * 3, ctx.dtypes), None, None, None)


def rank_of(logits: Tensor, target: Tensor) -> Tensor:
    """Count the logits [n, V] above the target's [n, 1], in parts that stay in the cache."""
    step = max(1, _COMPARED // logits.shape[1])
    parts = zip(logits.split(step), target.split(step), strict=True)
    # Zeros and ones of the logits' own dtype, in which float32 counts to 2^24: on a CPU that takes
    # half the time of a sum of bool into int32, and that a tenth of one into int64.
    above = [torch.gt(z, t, out=torch.empty_like(z)).sum(1, keepdim=True) for z, t in parts]
    return torch.cat(above)


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
