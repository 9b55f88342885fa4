"""Acceptance rules for candidates that were sampled, and how to sample such candidates.

They accept a sampled token with the probability that its draft distribution calls for and draw
from what is left otherwise, so that the output is distributed as the base model's. Only the
distribution is kept: with the same seed the tokens differ from plain decoding's.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree, batched
from specheads.verification.acceptance import path_to

# how the children of a node came about; in every case siblings stand in the order of the tests
SAMPLINGS = ("none", "without_replacement", "top_and_one", "chain")


class Randomness(Protocol):
    """The random choices of one verify step; equal (row, site) pairs give equal outcomes.

    An object rather than a generator, so that tests can go through every outcome.
    """

    def accept(self, probability: Tensor, site: int) -> Tensor:
        """Return [B] bool, true with ``probability`` [B]; independent between sites."""

    def draw(self, probs: Tensor, site: int) -> Tensor:
        """Draw one token per row from ``probs`` [B, V]; returns [B]."""


def reject(
    tokens: Tensor,
    tree: Tree | RowTrees,
    base_probs: Tensor,
    draft_probs: Tensor | None,
    chance: Randomness,
    sampling: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Test the children of each node one after another: recursive rejection.

    With residual r (at first the base distribution) and draft distribution q, a child x drawn from
    q is accepted with probability min(1, r(x) / q(x)); if it is refused, r becomes (r - q)_+
    normalised. What the next sibling counts as depends on ``sampling``:

    * ``without_replacement``: drawn from q without the refused x, normalised (Sequoia,
      arXiv:2402.12374; recursive rejection sampling, arXiv:2402.14160).
    * ``top_and_one``: the first child was drawn from q, which is zero at its siblings; the others
      are the drafter's best tokens and count as point masses: accepted with probability r(x), else
      r(x) becomes 0. The sampled child must be tested first: the other order is exact too, but
      accepts much less. A node all of whose children are deterministic has a one-hot q at the
      first. Numbers of children may differ between nodes.
    * ``chain``: one child each; plain speculative sampling (arXiv:2211.17192).
    * ``none``: all are point masses, ``draft_probs`` is not needed. As :func:`walk` in
      distribution, which does the same with less work.

    Guarantee: exact: the output is distributed as the base model's, provided that tokens were
    drawn as stated, siblings are distinct, and the tree's shape does not depend on what was drawn.
    Levels must be drawn independently of each other given the tokens above; parents of one level
    may share the same draws (as parallel heads do), since at most one of them is ever visited. A
    rule that goes bottom-up is not exact then. Candidates that were chosen among the drawn ones by
    their probability are no longer samples; as point masses they stay exact.

    Args:
        tokens: [B, N]. Negative tokens are padding: never tested, and nothing is learnt from them.
        tree: the shape; siblings stand in draw order.
        base_probs: [B, N, V], after all warpers, given each node's own prefix.
        draft_probs: [B, N, V]; ``draft_probs[b, i]`` is what the first child of node i was drawn
            from. Rows of nodes without children are not read.
        chance: the random choices.
        sampling: one of ``SAMPLINGS``.

    Returns:
        path: [B, D+1], the accepted nodes, padded with -1.
        num_accepted: [B], 0..D.
        next_token: [B], the token after the last accepted node.

    Raises:
        ValueError: if ``sampling`` is unknown, or not "none" and ``draft_probs`` is missing.
    """
    return descend(tokens, tree, base_probs, draft_probs, chance, sampling, 1.0)


def descend(
    tokens: Tensor,
    tree: Tree | RowTrees,
    base_probs: Tensor,
    draft_probs: Tensor | None,
    chance: Randomness,
    sampling: str,
    lenience: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what :func:`reject` says; lossy with a ``lenience`` below 1, see ``lossy.lenient``."""
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling must be one of {SAMPLINGS}, got {sampling!r}")
    if draft_probs is None and sampling != "none":
        raise ValueError(f"draft_probs must be given for sampling {sampling!r}")
    parents = batched(tree, tree.parents)
    at = torch.zeros_like(tokens[:, 0])  # [B], where each row stands
    untested = torch.ones_like(at, dtype=torch.bool)  # none of its children has been tested
    residual = base_probs[:, 0]
    draft = None if draft_probs is None else draft_probs[:, 0]
    # nodes are sorted by depth, so one pass meets the children of every node on the way in order
    for node in range(1, tree.num_nodes):
        token = tokens[:, node]
        is_child = parents[:, node] == at
        tested = is_child & (token >= 0)
        if tokens.device.type == "cpu" and not tested.any():  # elsewhere asking costs more
            untested = untested & ~is_child
            continue
        index = token.clamp(min=0)[:, None]
        drawn_from = torch.zeros_like(residual).scatter(1, index, 1.0)
        if draft is not None and sampling == "without_replacement":
            drawn_from = draft
        elif draft is not None and sampling != "none":
            drawn_from = torch.where(untested[:, None], draft, drawn_from)
        drawn_from = drawn_from * lenience
        ratio = (residual.gather(1, index) / drawn_from.gather(1, index))[:, 0]
        ratio = ratio.clamp(max=1.0).nan_to_num(0.0)  # 0 / 0 is a token that cannot be
        accepted = chance.accept(torch.where(tested, ratio, 0.0), node) & tested
        refused = (tested & ~accepted)[:, None]
        residual = torch.where(refused, subtract(residual, drawn_from), residual)
        residual = torch.where(accepted[:, None], base_probs[:, node], residual)
        if draft is not None and draft_probs is not None:
            draft = torch.where(refused, without(draft, index), draft)
            draft = torch.where(accepted[:, None], draft_probs[:, node], draft)
        untested = (untested & ~is_child) | accepted
        at = torch.where(accepted, node, at)
    path, num_accepted = path_to(tree, at)
    return path, num_accepted, chance.draw(residual, 0)


def block(
    tokens: Tensor, base_probs: Tensor, draft_probs: Tensor, chance: Randomness
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide on a sampled chain as a whole: block verification.

    Sun et al., arXiv:2403.10444. With P_0 = 1, P_i = min(1, P_{i-1} p(x_i) / q(x_i)) and
    S_i = sum_x (P_i p(x) - q(x))_+ after i tokens, the first i tokens are found good with
    probability S_i / (S_i + 1 - P_i), independently for every i, and all of them with probability
    P_D. The longest good prefix is kept; the next token is drawn from (P_i p - q)_+ there, or from
    p after the whole chain.

    Guarantee: exact, and no exact rule accepts more of a single sampled chain on average; testing
    token by token accepts less or equal. Tokens must have been drawn one after another from
    ``draft_probs``. Whether a chain ends at a token may depend on the tokens up to it, as where a
    draft model stops once it is unsure: the proof goes prefix by prefix. But no token that was
    drawn may be left out.

    Args:
        tokens: [B, N], node i + 1 the only child of node i. From the first negative token on a
            row is padding: its chain is shorter.
        base_probs: [B, N, V], after all warpers.
        draft_probs: [B, N, V]; ``draft_probs[b, i]`` is what node i + 1 was drawn from; the last
            one is not read.
        chance: the random choices.

    Returns:
        path: [B, N], the accepted nodes, padded with -1.
        num_accepted: [B], 0..N-1.
        next_token: [B], the token after the last accepted node.
    """
    num_nodes = tokens.shape[1]
    real = (tokens >= 0).cumprod(1)
    length = real.sum(1) - 1  # [B], the last real node
    index = tokens[:, 1:].clamp(min=0)[..., None]
    base_at = base_probs[:, :-1].gather(2, index)[..., 0]
    draft_at = draft_probs[:, :-1].gather(2, index)[..., 0]
    ratio = (base_at / draft_at).nan_to_num(0.0)
    weight = torch.ones_like(base_probs[:, 0, 0])
    residual, num_accepted = base_probs[:, 0], torch.zeros_like(length)
    for node in range(num_nodes):
        if node > 0:
            weight = (weight * ratio[:, node - 1]).clamp(max=1.0)
        left = base_probs[:, node] * weight[:, None]
        is_last = length == node
        if node < num_nodes - 1:
            left = torch.where(is_last[:, None], left, (left - draft_probs[:, node]).clamp(min=0))
        mass = left.sum(-1)
        good = torch.where(is_last, weight, (mass / (mass + 1 - weight)).nan_to_num(1.0))
        good = torch.where(length >= node, good, 0.0)
        # the prefix without tokens is always good
        kept = torch.ones_like(is_last) if node == 0 else chance.accept(good, node)
        num_accepted = torch.where(kept, node, num_accepted)
        residual = torch.where(kept[:, None], normalise(left, base_probs[:, node]), residual)
    nodes = torch.arange(num_nodes, device=tokens.device)
    path = torch.where(nodes <= num_accepted[:, None], nodes, -1)
    return path, num_accepted, chance.draw(residual, 0)


def normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Scale ``weights`` [..., V] to sum 1; where all are 0, rounding's doing, ``otherwise``."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def subtract(residual: Tensor, drawn_from: Tensor) -> Tensor:
    """Return (r - q)_+ normalised, what is left of r [B, V] after a token from q was refused."""
    return normalise((residual - drawn_from).clamp(min=0), residual)


def without(draft: Tensor, index: Tensor) -> Tensor:
    """Return the draft distribution [B, V] without the token ``index`` [B, 1], normalised."""
    draft = draft.scatter(1, index, 0.0)
    return normalise(draft, draft)


def sample_siblings(draft_probs: Tensor, num_siblings: int, noise: Tensor) -> Tensor:
    """Draw distinct tokens one after another, each from the distribution without those before.

    The ``num_siblings`` largest of log q + Gumbel noise, in order, are such a draw (Kool et al.,
    arXiv:1903.06059).

    Args:
        draft_probs: [..., V].
        num_siblings: how many.
        noise: [..., V] Gumbel noise; of a stream that no acceptance rule uses.

    Returns:
        [..., num_siblings], in draw order; -1 where fewer tokens have positive probability.
    """
    scores = draft_probs.log() + noise
    best = scores.topk(num_siblings, dim=-1)
    return best.indices.masked_fill(best.values == float("-inf"), -1)


def sample_top_and_one(
    draft_probs: Tensor, num_siblings: int, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Take the n - 1 most likely tokens and draw one of the others.

    Args:
        draft_probs: [..., V].
        num_siblings: n, at least 1.
        noise: [..., V] Gumbel noise; of a stream that no acceptance rule uses.

    Returns:
        tokens: [..., n], first the one that was drawn (-1 where no other has positive
            probability), then the most likely in order.
        rest_probs: [..., V], what it was drawn from: the ``draft_probs`` of the rule.
    """
    best = draft_probs.topk(num_siblings - 1, dim=-1).indices
    rest = draft_probs.scatter(-1, best, 0.0)
    rest = normalise(rest, rest)
    return torch.cat([sample_siblings(rest, 1, noise), best], dim=-1), rest
