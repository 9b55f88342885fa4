"""Lossy acceptance rules: faster, and NOT the base model's distribution.

They change what is written, each within the bound its docstring states. Nothing that uses one may
be called lossless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree, batched
from specheads.verification.acceptance import path_to
from specheads.verification.rejection import Randomness, descend


def typical(
    tokens: Tensor,
    tree: Tree | RowTrees,
    base_probs: Tensor,
    *,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept what the base model finds typical: lossy.

    Medusa, arXiv:2401.10774, section 2.3.1. A token x is accepted if
    p(x) > min(epsilon, delta exp(-H(p))) given its own prefix; H is the entropy. The longest path
    of such tokens wins, among equals the most likely one. The token after it is always the base
    model's own best, so every step gains at least one token of greedy decoding.

    Larger values are stricter, of epsilon as well as of delta, and accept less: several guides
    have it backwards. Medusa sets delta = sqrt(epsilon); here both are given. With
    epsilon >= delta epsilon has no effect; with epsilon >= 1 and delta >= V nothing is accepted,
    which is greedy decoding; with either at 0 every token of positive probability is.

    Guarantee: none on the distribution. Every accepted token has more than
    min(epsilon, delta exp(-H)) probability.

    Args:
        tokens: [B, N]. Negative tokens are padding and never accepted.
        tree: the shape; equal siblings do no harm.
        base_probs: [B, N, V], after all warpers.
        epsilon: the threshold where the base model is sure.
        delta: the threshold, relative to exp(-H), where it is not.

    Returns:
        path: [B, D+1], the accepted nodes, padded with -1.
        num_accepted: [B], 0..D.
        next_token: [B].
    """
    entropy = -torch.special.xlogy(base_probs, base_probs).sum(-1)  # [B, N]
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    parents = batched(tree, tree.parents).clamp(min=0).expand_as(tokens)
    probs = probs_of(tokens, tree, base_probs)
    return longest(tokens, tree, base_probs, probs, probs > threshold.gather(1, parents))


def lenient(
    tokens: Tensor,
    tree: Tree | RowTrees,
    base_probs: Tensor,
    draft_probs: Tensor | None,
    chance: Randomness,
    *,
    lenience: float,
    sampling: str = "without_replacement",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafted tokens more readily than exactness allows: lossy.

    Leviathan et al., arXiv:2211.17192, appendix A.5: as
    :func:`specheads.verification.rejection.reject` with l q in place of q: a token is accepted with
    probability min(1, r(x) / (l q(x))), and a refused one leaves (r - l q)_+ normalised.
    Deterministic candidates are point masses: accepted with probability min(1, p(x) / l). (Some
    code keeps the residual (r - q)_+: another distribution.)

    Guarantee: given its prefix no token is more than 1 / l times as likely as under the base
    model, pi(x) <= p(x) / l, with siblings too. l = 1 is exact.

    Args:
        tokens: [B, N]. Negative tokens are padding.
        tree: the shape.
        base_probs: [B, N, V], after all warpers.
        draft_probs: [B, N, V], or None for deterministic candidates; equal siblings must then be
            merged.
        chance: the random choices.
        lenience: l, in (0, 1].
        sampling: as in ``reject``; not used for deterministic candidates.

    Returns:
        path: [B, D+1], the accepted nodes, padded with -1.
        num_accepted: [B], 0..D.
        next_token: [B].

    Raises:
        ValueError: if ``lenience`` lies outside (0, 1] or ``sampling`` is unknown.
    """
    check_lenience(lenience)
    if draft_probs is None:
        sampling = "none"
    return descend(tokens, tree, base_probs, draft_probs, chance, sampling, lenience)


def lenient_greedy(
    tokens: Tensor, tree: Tree | RowTrees, base_probs: Tensor, *, lenience: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept what is almost as likely as the base model's best token: lossy.

    The greedy form of :func:`lenient` (the same appendix): x is accepted if p(x) >= l max p. The
    longest path wins, among equals the most likely; the token after it is the base model's best.

    Guarantee: given its prefix every token has at least l times the probability of the best one.
    l = 1 is greedy decoding.

    Args:
        tokens: [B, N]. Negative tokens are padding.
        tree: the shape; equal siblings do no harm.
        base_probs: [B, N, V], of the temperature at which likelihoods are to be compared (1: the
            model's own), not of temperature 0.
        lenience: l, in (0, 1].

    Returns:
        path: [B, D+1], the accepted nodes, padded with -1.
        num_accepted: [B], 0..D.
        next_token: [B].

    Raises:
        ValueError: if ``lenience`` lies outside (0, 1].
    """
    check_lenience(lenience)
    parents = batched(tree, tree.parents).clamp(min=0).expand_as(tokens)
    probs = probs_of(tokens, tree, base_probs)
    return longest(
        tokens, tree, base_probs, probs, probs >= lenience * base_probs.amax(-1).gather(1, parents)
    )


def check_lenience(lenience: float) -> None:
    """Refuse a lenience that is none.

    Raises:
        ValueError: if it lies outside (0, 1].
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience must be in (0, 1], got {lenience}")


def probs_of(tokens: Tensor, tree: Tree | RowTrees, base_probs: Tensor) -> Tensor:
    """Return the probability [B, N] of each node's token after its parent."""
    parents = batched(tree, tree.parents).clamp(min=0).expand_as(tokens)
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    return base_probs[rows, parents, tokens.clamp(min=0)]


def longest(
    tokens: Tensor, tree: Tree | RowTrees, base_probs: Tensor, probs: Tensor, accepted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the longest path of accepted nodes, among equals the most likely, and its sequel."""
    accepted = accepted & (tokens >= 0)
    accepted[:, 0] = True
    mask = batched(tree, tree.tree_mask)
    reached = (accepted[:, None, :] | ~mask).all(-1)  # [B, N]
    scores = probs.log()
    scores[:, 0] = 0.0
    likelihood = torch.where(mask, scores[:, None, :], 0.0).sum(-1)
    depths = batched(tree, tree.depths)
    deepest = torch.where(reached, depths, 0).amax(-1, keepdim=True)
    last = torch.where(reached & (depths == deepest), likelihood, float("-inf")).argmax(-1)
    path, num_accepted = path_to(tree, last)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    return path, num_accepted, base_probs[rows, last].argmax(-1)
