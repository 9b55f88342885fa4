"""Acceptance rules: pure functions from what was guessed and what the base model says to a path.

Sample-and-walk follows the base model's own draws. For candidates that were sampled there is
rejection: a token is accepted with the probability that its draft distribution calls for, and what
is left is drawn from otherwise, so that the output is distributed as the base model's. Only the
distribution is kept: with the same seed the tokens differ from plain decoding's. Lossy rules
(:func:`typical`, :func:`lenient_greedy`, a ``lenience`` below 1) are faster, and NOT the base
model's distribution: each states its bound, and nothing that uses one may be called lossless.
So are the bounded ones, which are no rules of their own: :func:`tilted` moves the base model's
distribution as far towards what was guessed as a bound allows, and an exact rule does the rest with
what comes out in place of the base model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree, batched
from specheads.system.errors import check, one_of
from specheads.verification.sampling import Chance

# how the children of a node came about; in every case siblings stand in the order of the tests
SAMPLINGS = ("none", "without_replacement", "chain")


def walk(tokens: Tensor, tree: Tree | RowTrees, base_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the base model's own tokens down the tree: sample-and-walk.

    The base model draws one token at each node (greedily, or by sampling with the node's own
    prefix). Where a child of the node carries that token we move there, otherwise we stop; the
    token drawn at the last node is the next root.

    Guarantee: exact, for candidates that are deterministic given the prefix (top-k of heads,
    n-grams) and for those drawn with noise of their own: every emitted token was drawn by the base
    model given exactly the tokens before it. For deterministic candidates no exact rule accepts
    more on average, for the accepted length is that of the longest prefix of the output that lies
    in the tree, and the output's distribution is given. There is one draw per node: drawing again
    for another path through a node (as Medusa's sampling modes do) changes the distribution.

    Args:
        tokens: [B, N], the token at each node. Negative tokens are padding and never accepted.
        tree: the shape, one for all rows or one per row.
        base_tokens: [B, N], the token the base model draws after each node. Equal siblings may
            stay if draws after equal prefixes are equal, as greedy ones and those with noise of a
            position are; otherwise merge them first.

    Returns:
        path: [B, D+1], the accepted nodes from the root (``path[:, 0] == 0``), padded with -1.
        num_accepted: [B], 0..D.
    """
    parents = batched(tree, tree.parents).clamp(min=0).expand_as(tokens)
    match = (tokens == base_tokens.gather(1, parents)) & (tokens >= 0)  # [B, N]
    match[:, 0] = True
    reached = (match[:, None, :] | ~tree.tree_mask).all(-1)  # [B, N]: all of the node's path
    # nodes are sorted by depth: the last one reached is among the deepest
    last = (reached * torch.arange(1, tree.num_nodes + 1, device=tokens.device)).argmax(-1)
    return path_to(tree, last)


def walk_on_host(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    base_tokens: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Do what :func:`walk` does, in Python: on a CPU one loop costs less than sixteen small ops.

    Args:
        tokens: [B, N].
        parents: [B, N], nodes sorted by depth.
        base_tokens: [B, N].

    Returns:
        Per row the accepted nodes from the root.
    """
    paths = []
    for row, above, drawn in zip(tokens, parents, base_tokens, strict=True):
        reached, last = {0}, 0
        for node in range(1, len(row)):
            parent = above[node]
            if row[node] == drawn[parent] and parent in reached and row[node] >= 0:
                reached.add(node)
                last = node
        path = [last]
        while path[-1]:
            path.append(above[path[-1]])
        paths.append(path[::-1])
    return paths


def path_to(tree: Tree | RowTrees, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the way from the root to one node per row.

    Args:
        tree: one for all rows or one per row.
        nodes: [B].

    Returns:
        path: [B, D+1], padded with -1.
        depths: [B].
    """
    if isinstance(tree, Tree):
        return tree.ancestors[nodes], tree.depths[nodes]
    rows = torch.arange(nodes.shape[0], device=nodes.device)
    return tree.ancestors[rows, nodes], tree.depths[rows, nodes]


def merge_siblings(tokens: Tensor, tree: Tree | RowTrees) -> tuple[Tensor, RowTrees]:
    """Merge equal siblings: later ones become padding, what hangs under them moves to the first.

    For candidates that are deterministic given the prefix. Merged and unmerged trees hold the same
    texts, but rules that test siblings one after another never reach what hangs under a later
    twin, and draws of their own at twins would be several chances for one prefix. Siblings sampled
    without replacement are never equal; merging those sampled with replacement would hide how
    often each was drawn, so do not.

    Args:
        tokens: [B, N], negative where padded.
        tree: the shape.

    Returns:
        tokens: [B, N], -1 in place of the later twins.
        tree: a tree per row, of the same N nodes in the same order.
    """
    parents = batched(tree, tree.parents).expand_as(tokens)
    same_token = (tokens[:, :, None] == tokens[:, None, :]) & (tokens >= 0)[:, None, :]
    same_token |= torch.eye(tree.num_nodes, dtype=torch.bool, device=tokens.device)
    first = torch.arange(tree.num_nodes, device=tokens.device).expand_as(tokens)
    # children that met under one parent may be twins in turn: a level settles in each round
    for _ in range(tree.max_depth):
        twins = same_token & (parents[:, :, None] == parents[:, None, :])
        first = twins.int().argmax(-1)
        parents = torch.where(parents < 0, parents, first.gather(1, parents.clamp(min=0)))
    nodes = torch.arange(tree.num_nodes, device=tokens.device)
    merged = tokens.masked_fill(first != nodes, -1)
    return merged, RowTrees.from_parents(parents.contiguous(), tree.max_depth)


def reject(
    tokens: Tensor,
    tree: Tree | RowTrees,
    base_probs: Tensor,
    draft_probs: Tensor | None,
    chance: Chance,
    sampling: str,
    lenience: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Test the children of each node one after another: recursive rejection.

    With residual r (at first the base distribution) and draft distribution q, a child x drawn from
    q is accepted with probability min(1, r(x) / q(x)); if it is refused, r becomes (r - q)_+
    normalised. What the next sibling counts as depends on ``sampling``:

    * ``without_replacement``: drawn from q without the refused x, normalised (Sequoia,
      arXiv:2402.12374; recursive rejection sampling, arXiv:2402.14160).
    * ``chain``: one child each; plain speculative sampling (arXiv:2211.17192).
    * ``none``: all are point masses, ``draft_probs`` is not needed. As :func:`walk` in
      distribution, which does the same with less work.

    With a ``lenience`` l below 1 it is lossy (Leviathan et al., arXiv:2211.17192, appendix A.5):
    l q stands in place of q, and point masses are accepted with probability min(1, r(x) / l). (Some
    code keeps the residual (r - q)_+: another distribution.)

    Guarantee: exact at l = 1: the output is distributed as the base model's, provided that tokens
    were drawn as stated, siblings are distinct, and the tree's shape does not depend on what was
    drawn. Levels must be drawn independently of each other given the tokens above; parents of one
    level may share the same draws (as parallel heads do), since at most one of them is ever
    visited. A rule that goes bottom-up is not exact then. Candidates that were chosen among the
    drawn ones by their probability are no longer samples; as point masses they stay exact. With l
    below 1 no token is, given its prefix, more than 1 / l times as likely as under the base model,
    pi(x) <= p(x) / l, with siblings too.

    Args:
        tokens: [B, N]. Negative tokens are padding: never tested, and nothing is learnt from them.
        tree: the shape; siblings stand in draw order.
        base_probs: [B, N, V], after all warpers, given each node's own prefix.
        draft_probs: [B, N, V]; ``draft_probs[b, i]`` is what the first child of node i was drawn
            from. Rows of nodes without children are not read.
        chance: the random choices.
        sampling: one of ``SAMPLINGS``; of deterministic candidates equal siblings must be merged.
        lenience: l, in (0, 1].

    Returns:
        path: [B, D+1], the accepted nodes, padded with -1.
        num_accepted: [B], 0..D.
        next_token: [B], the token after the last accepted node.

    Raises:
        ConfigError: if ``sampling`` is unknown, or not "none" and ``draft_probs`` is missing.
    """
    one_of("sampling", sampling, *SAMPLINGS)
    given = draft_probs is not None or sampling == "none"
    check(given, "draft_probs", draft_probs, f"given for sampling {sampling!r}")
    parents = batched(tree, tree.parents)
    at = torch.zeros_like(tokens[:, 0])  # [B], where each row stands
    residual = base_probs[:, 0]
    draft = None if draft_probs is None or sampling == "none" else draft_probs[:, 0]
    # nodes are sorted by depth, so one pass meets the children of every node on the way in order
    for node in range(1, tree.num_nodes):
        token = tokens[:, node]
        tested = (parents[:, node] == at) & (token >= 0)
        if tokens.device.type == "cpu" and not tested.any():  # elsewhere asking costs more
            continue
        index = token.clamp(min=0)[:, None]
        drawn_from = draft
        if drawn_from is None:  # a point mass
            drawn_from = torch.zeros_like(residual).scatter(1, index, 1.0)
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
        at = torch.where(accepted, node, at)
    path, num_accepted = path_to(tree, at)
    return path, num_accepted, chance.draw(residual, 0)


def block(
    tokens: Tensor, base_probs: Tensor, draft_probs: Tensor, chance: Chance
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


def guessed(tokens: Tensor, tree: Tree | RowTrees, vocab_size: int) -> Tensor:
    """Return which tokens the children of each node are, [B, N, V] bool."""
    rows, nodes = ((tokens >= 0) & (batched(tree, tree.depths) > 0)).nonzero(as_tuple=True)
    parents = batched(tree, tree.parents).expand_as(tokens)[rows, nodes]
    among = torch.zeros(*tokens.shape, vocab_size, dtype=torch.bool, device=tokens.device)
    among[rows, parents, tokens[rows, nodes]] = True
    return among


def tilted(base_probs: Tensor, guesses: Tensor, bound: float, measure: str) -> Tensor:
    """Return the distribution within a bound of the base model's that accepts the most: lossy.

    A token of distribution h that was guessed deterministically is accepted with the probability
    h(C) of the guesses C; one that was drawn from q with that of sum_x min(q(x), h(x)). Here is the
    h that maximises this among all whose distance from the base model's p is at most the bound, and
    that give nothing to a token that p cannot give.

    * ``tv``: total variation. Mass t, the bound or all that can be gained, goes from the tokens
      that have too much to those that have too little, in proportion (with sampled guesses the
      front of Yin et al., arXiv:2411.00841, theorem 5: one is refused with TV(p, q) - t).
    * ``kl``: KL(h || p) in nats. h is p times a factor on the guesses and another elsewhere, whose
      KL is that of two coins, h(C) and p(C). The equation is solved, not expanded as in
      arXiv:2604.04987, whose h may lie beyond the bound. With sampled guesses
      h = min(c p, max(c' p, q)): the ratio q / p, held between two factors.

    Guarantee: given its prefix every token's distribution is within the bound, provided that an
    exact rule decides with h in place of p, that guesses are a function of the prefix or drawn from
    q, and that p is the base model's after all warpers. Of a whole text of T tokens the KL
    divergence is T times the bound at most (the chain rule), the total variation T times likewise.
    It does not follow that the text is as good as the base model's.

    Args:
        base_probs: p, [..., V].
        guesses: [..., V]; bool: which tokens were guessed; else q.
        bound: of the distance; 0 leaves p as it is.
        measure: ``tv`` or ``kl``.

    Returns:
        h, [..., V].
    """
    one_of("measure", measure, "tv", "kl")
    if bound == 0:
        return base_probs
    if guesses.dtype == torch.bool:
        inside = torch.where(guesses, base_probs, 0).sum(-1, keepdim=True).clamp(max=1)
        more = (inside + bound).clamp(max=1) if measure == "tv" else _coin(inside, bound)
        more = torch.where(inside > 0, more, 0)
        factor = torch.where(guesses, more / inside, (1 - more) / (1 - inside))
        return base_probs * factor.nan_to_num(0)
    if measure == "kl":
        return _clamped(base_probs, guesses, bound)
    gain = torch.where(base_probs > 0, guesses - base_probs, 0).clamp(min=0)
    loss = (base_probs - guesses).clamp(min=0)
    gained, lost = (each.sum(-1, keepdim=True) for each in (gain, loss))
    moved = gained.clamp(max=bound)
    return base_probs + (moved / gained).nan_to_num(0) * gain - (moved / lost).nan_to_num(0) * loss


def converted(
    tokens: Tensor,
    tree: Tree | RowTrees,
    drawn: Tensor,
    base_probs: Tensor,
    chance: Chance,
    bound: float,
    measure: str,
) -> Tensor:
    """Turn some of the base model's draws that no guess hits into the likeliest guess: lossy.

    For guesses that follow the noise of the draws, of which :func:`tilted` knows nothing: what was
    guessed and what is drawn go together. A draw that misses becomes the guess x with probability
    a(x), chosen independently of the noise. Then, however the guesses came about:

    * ``tv``: with a = the bound, output and draw differ with at most this probability, hence the
      total variation of their distributions.
    * ``kl``: with a(x) = l p(x) no token is more than 1 + l or less than 1 - l times as likely as
      under the base model. Of all such h the largest KL(h || p) is
      ((1 + l) log(1 + l) + (1 - l) log(1 - l)) / 2, as a convex function of a mean of 0 is largest
      at the ends; l is where this is the bound, at most 1.

    Guarantee: as :func:`tilted`. It accepts no less than the exact rule, but the most possible only
    of what is known here.

    Args:
        tokens: [B, N], negative where padded; equal siblings may stay.
        tree: the shape.
        drawn: [B, N], the base model's draw after each node.
        base_probs: [B, N, V].
        chance: the random choices.
        bound: of the distance.
        measure: ``tv`` or ``kl``.

    Returns:
        [B, N], what is written after each node.
    """
    one_of("measure", measure, "tv", "kl")
    parents = batched(tree, tree.parents).expand_as(tokens)
    above = parents.clamp(min=0)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    likely = base_probs[rows, above, tokens.clamp(min=0)]  # [B, N], of each node after its parent
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    child = (parents[:, None, :] == nodes[:, None]) & (tokens >= 0)[:, None, :]  # [B, node, child]
    best, which = torch.where(child, likely[:, None, :], -1.0).max(-1)
    guess = tokens.gather(1, which)
    hit = (child & (tokens[:, None, :] == drawn[..., None])).any(-1)
    possible = best > 0
    rate = best * _swing(bound) if measure == "kl" else torch.full_like(best, bound)
    rate = torch.where(possible, rate, 0)
    takes = torch.stack([chance.accept(rate[:, node], node) for node in nodes.tolist()], dim=1)
    return torch.where(takes & ~hit & possible, guess, drawn)


@lru_cache(maxsize=8)
def _swing(bound: float) -> float:
    """Return l, see :func:`converted`."""

    def allowed(swing: Tensor) -> Tensor:
        ends = torch.stack([1 + swing, 1 - swing])
        return torch.special.xlogy(ends, ends).mean(0) <= bound

    low, high = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    return float(_largest(low, high, allowed))


def _largest(low: Tensor, high: Tensor, allowed: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest numbers between ``low`` and ``high``, the former of which are allowed."""
    for _ in range(40):
        middle = (low + high) / 2
        within = allowed(middle)
        low, high = torch.where(within, middle, low), torch.where(within, high, middle)
    return low


def _coin(probability: Tensor, bound: float) -> Tensor:
    """Return the largest a with KL(a || p) of two coins at most ``bound``, [...]."""
    p = probability.double()

    def within(a: Tensor) -> Tensor:
        distance = torch.special.xlogy(a, a / p)
        distance = distance + torch.special.xlogy(1 - a, (1 - a) / (1 - p))
        return distance.nan_to_num(0) <= bound

    # all of it, where that is within the bound
    found = torch.where(-p.log() <= bound, 1.0, _largest(p, torch.ones_like(p), within))
    return found.to(probability)


def _clamped(base_probs: Tensor, draft_probs: Tensor, bound: float) -> Tensor:
    """Return min(c p, max(c' p, q)), [..., V], of sum 1 and KL(h || p) at most ``bound``.

    Tokens are sorted by r = q / p. For every c there is one c' at which the sum is 1; both KL and
    acceptance grow with c, which is found by halving.
    """
    p, q = base_probs.double(), torch.where(base_probs > 0, draft_probs, 0).double()
    # sums that are 1 to the last bit of float32 only would count a billion times where r is large
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True).clamp(min=1)
    ratio = (q / p).nan_to_num(0)
    r, order = ratio.sort(-1)
    sorted_p, sorted_q = p.gather(-1, order), q.gather(-1, order)
    # sums over the tokens before the k-th, [..., V + 1]
    below, drafted, weighed = (
        torch.nn.functional.pad(each.cumsum(-1), (1, 0))
        for each in (sorted_p, sorted_q, torch.special.xlogy(sorted_q, r))
    )
    from_there = torch.nn.functional.pad(sorted_p.flip(-1).cumsum(-1).flip(-1), (0, 1))
    least = r * below[..., :-1] - drafted[..., :-1]  # what raising all before the k-th to it takes

    def at(highest: Tensor) -> tuple[Tensor, Tensor]:
        """Return c' and KL(h || p) for c, each [..., 1]."""
        j = torch.searchsorted(r, highest)
        above = from_there.gather(-1, j)
        spare = 1 - highest * above - drafted.gather(-1, j)
        k = torch.searchsorted(least, spare).clamp(min=1)
        held = below.gather(-1, k)
        lowest = ((spare + drafted.gather(-1, k)) / held).nan_to_num(0).clamp(0, 1)
        distance = torch.special.xlogy(lowest, lowest) * held
        distance += weighed.gather(-1, j) - weighed.gather(-1, torch.minimum(k, j))
        return lowest, distance + torch.special.xlogy(highest, highest) * above

    low, high = torch.zeros_like(r[..., :1]), r[..., -1:].clamp(min=1).log()
    low = torch.where(at(high.exp())[1] <= bound, high, low)
    highest = _largest(low, high, lambda log: at(log.exp())[1] <= bound).exp()
    clamped = p * torch.minimum(torch.maximum(ratio, at(highest)[0]), highest)
    return (clamped / clamped.sum(-1, keepdim=True)).to(base_probs)


def leniently(
    tokens: Tensor,
    tree: Tree | RowTrees,
    base_probs: Tensor,
    draft_probs: Tensor | None,
    lenience: float,
) -> Tensor:
    """Return what :func:`reject` with a lenience draws from after each node, [B, N, V].

    Args:
        tokens: [B, N], without equal siblings; negative where padded.
        tree: the shape.
        base_probs: [B, N, V].
        draft_probs: [B, N, V] of a sampled chain; None: the tokens are deterministic.
        lenience: l, in (0, 1].
    """
    parents = batched(tree, tree.parents).expand_as(tokens)
    if draft_probs is not None:
        children = (parents >= 0) & (tokens >= 0)
        drafted = torch.nn.functional.pad(children[:, 1:], (0, 1))[..., None] * draft_probs
        taken = torch.minimum(drafted, base_probs / lenience)
        rest = subtract(base_probs, lenience * drafted)
    else:
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        at = rows, parents.clamp(min=0), tokens.clamp(min=0)
        base_at = torch.where((parents >= 0) & (tokens >= 0), base_probs[at], 0)
        # a sibling is tested once those before it were refused, and has what they leave over
        before = (parents[:, :, None] == parents[:, None]).tril(-1)
        left = 1 - (before * base_at[:, None]).sum(-1)
        accepted = (base_at / left / lenience).nan_to_num(0).clamp(0, 1)
        reached = torch.where(before, 1 - accepted[:, None], 1).prod(-1)
        taken = torch.zeros_like(base_probs).index_put(at, reached * accepted, accumulate=True)
        among = guessed(tokens, tree, base_probs.shape[-1])
        rest = normalise(base_probs.masked_fill(among, 0), base_probs)
    return taken + (1 - taken.sum(-1, keepdim=True)).clamp(min=0) * rest


def divergences(probs: Tensor, base_probs: Tensor) -> Tensor:
    """Return KL(h || p) in nats and TV(h, p) of distributions [..., V], as [..., 2]."""
    ratio = torch.where(probs > 0, probs / base_probs, 1)
    distance = torch.special.xlogy(probs, ratio).sum(-1).clamp(min=0)
    return torch.stack([distance, (probs - base_probs).abs().sum(-1) / 2], dim=-1)


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
    return _longest(tokens, tree, base_probs, threshold, torch.gt)


def lenient_greedy(
    tokens: Tensor, tree: Tree | RowTrees, base_probs: Tensor, *, lenience: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept what is almost as likely as the base model's best token: lossy.

    The greedy form of :func:`reject` with a lenience (the same appendix): x is accepted if
    p(x) >= l max p. The longest path wins, among equals the most likely; the token after it is the
    base model's best.

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
    """
    return _longest(tokens, tree, base_probs, lenience * base_probs.amax(-1), torch.ge)


def _longest(
    tokens: Tensor,
    tree: Tree | RowTrees,
    base_probs: Tensor,
    threshold: Tensor,
    passes: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the longest path of accepted nodes, among equals the most likely, and its sequel.

    Args:
        tokens: [B, N].
        tree: the shape.
        base_probs: [B, N, V].
        threshold: [B, N], for the tokens after each node.
        passes: compares probabilities with thresholds.
    """
    parents = batched(tree, tree.parents).clamp(min=0).expand_as(tokens)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    probs = base_probs[rows[:, None], parents, tokens.clamp(min=0)]
    accepted = passes(probs, threshold.gather(1, parents)) & (tokens >= 0)
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
    return path, num_accepted, base_probs[rows, last].argmax(-1)
