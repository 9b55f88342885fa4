"""The best fixed shape of a tree whose siblings are drawn one after another: Sequoia's.

Chen et al., arXiv:2402.12374, section 3: where the k-th child of any node is accepted at a rate
that depends on k alone, dynamic programming finds the shape of a given size and depth that accepts
most. A child can only stand beside all those drawn before it, and their rates need not fall (one
sampled token is tested before the best ones, see ``top_and_one`` in :mod:`specheads.rejection`), so
that taking the most valuable node next may miss it. And depth has a price here: each level costs a
pass of the draft model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specheads.rejection import Randomness, reject, sample_siblings, sample_top_and_one
from specheads.tree import Choice, Tree


def sequoia_tree(rates: Sequence[float], num_nodes: int, max_depth: int) -> tuple[Tree, float]:
    """Return the tree that is expected to accept most.

    Args:
        rates: ``rates[k]``, the probability that child k is accepted where its parent was: all
            children before it were refused and it was not (:func:`child_rates`).
        num_nodes: at most, root included.
        max_depth: at most.

    Returns:
        The tree and its expected accept length, 1 + the sum over its nodes of the product of the
        rates along the path.

    Raises:
        ValueError: if ``num_nodes`` < 1, ``max_depth`` < 0, or a rate lies outside [0, 1].
    """
    tables = _Tables(rates, num_nodes, max_depth)
    return tables.tree(num_nodes, max_depth), float(tables.values[-1][num_nodes])


def fastest_tree(
    rates: Sequence[float], draft_cost: float, verify_costs: Sequence[float], max_depth: int
) -> tuple[Tree, float]:
    """Return the tree that is expected to give most tokens in the time that its step takes.

    Args:
        rates: as in :func:`sequoia_tree`.
        draft_cost: of one pass of the draft model; a tree of depth D takes D of them.
        verify_costs: ``verify_costs[n]``, of a base pass over n nodes, root included; in the same
            unit. Entry 0 is not read; the last one is of the largest tree.
        max_depth: at most.

    Returns:
        The tree and its tokens per unit of cost. The root alone where no drafting pays.

    Raises:
        ValueError: as :func:`sequoia_tree`, or if there is no cost of a pass over one node, or one
            that is not positive.
    """
    if len(verify_costs) < 2 or min(verify_costs[1:]) <= 0 or draft_cost < 0:
        raise ValueError(
            "verify_costs must give positive costs for 1 node and more and draft_cost must not be"
            f" negative, got {list(verify_costs)} and {draft_cost}"
        )
    num_nodes = len(verify_costs) - 1
    tables = _Tables(rates, num_nodes, max_depth)
    speed, depth, size = max(
        (float(values[n]) / (depth * draft_cost + verify_costs[n]), -depth, -n)
        for depth, values in enumerate(tables.values)
        for n in range(1, num_nodes + 1)
    )
    return tables.tree(-size, -depth), speed


class _Tables:
    """What trees of every depth and size are worth, and how their nodes are shared out.

    Attributes:
        values: per depth, [N + 1] the most tokens that a tree of at most so many nodes gains.
    """

    def __init__(self, rates: Sequence[float], num_nodes: int, max_depth: int) -> None:
        if num_nodes < 1 or max_depth < 0:
            raise ValueError(
                f"num_nodes must be at least 1 and max_depth at least 0, got {num_nodes} and"
                f" {max_depth}"
            )
        if any(not 0 <= rate <= 1 for rate in rates):
            raise ValueError(f"rates must lie in [0, 1], got {list(rates)}")
        self.rates = list(rates)[: num_nodes - 1]
        root = torch.ones(num_nodes + 1, dtype=torch.float64)
        root[0] = 0
        self.values = [root]
        # per depth and child [N]: of so many nodes for it and its later siblings, how many it gets
        self._shares: list[list[list[int]]] = [[]]
        for _ in range(max_depth):
            below, shares = self._siblings(self.values[-1])
            self.values.append(torch.cat([root[:1], 1 + below]))
            self._shares.append(shares)

    def _siblings(self, values: Tensor) -> tuple[Tensor, list[list[int]]]:
        """Share nodes out among the children of one node, the last child first.

        Args:
            values: [N + 1], of the trees that may hang there.

        Returns:
            [N], what 0 to N - 1 nodes below gain at most; and the shares.
        """
        num = len(values) - 1
        rest = torch.arange(num)[:, None] - torch.arange(num)  # [nodes, those that a child gets]
        after, shares = torch.zeros(num, dtype=torch.float64), []
        for rate in reversed(self.rates):
            gains = rate * values[:num] + after[rest.clamp(min=0)]
            gains = gains.masked_fill(rest < 0, -1.0)
            gains[:, 0] = 0.0  # without this child there are no later ones
            after, share = gains.max(dim=1)
            shares.append(share.tolist())
        return after, shares[::-1]

    def tree(self, num_nodes: int, max_depth: int) -> Tree:
        """Return the best tree of at most so many nodes."""
        return Tree.from_choices(self._nodes((), num_nodes, max_depth))

    def _nodes(self, path: Choice, num_nodes: int, depth: int) -> Iterator[Choice]:
        left = num_nodes - 1
        for child, shares in enumerate(self._shares[depth]):
            if not (share := shares[left]):
                return
            yield (*path, child)
            yield from self._nodes((*path, child), share, depth - 1)
            left -= share


def child_rates(
    base_probs: Tensor,
    draft_probs: Tensor,
    num_children: int,
    sampling: str,
    noise: Tensor,
    chance: Randomness,
) -> list[float]:
    """Measure how often each child of a node is accepted, over nodes that were visited.

    Args:
        base_probs: [S, V], what the base model said at S nodes, after all warpers.
        draft_probs: [S, V], what the draft model said there.
        num_children: that are drawn at each node.
        sampling: ``without_replacement`` or ``top_and_one``.
        noise: [S, V] Gumbel noise for the draws.
        chance: the random choices of the rule.

    Returns:
        Per child the share of nodes at which it was accepted.

    Raises:
        ValueError: for another ``sampling``.
    """
    if sampling == "without_replacement":
        children, drawn_from = sample_siblings(draft_probs, num_children, noise), draft_probs
    elif sampling == "top_and_one":
        children, drawn_from = sample_top_and_one(draft_probs, num_children, noise)
    else:
        raise ValueError(f"sampling must be without_replacement or top_and_one, got {sampling!r}")
    tree = Tree.from_choices([(child,) for child in range(num_children)]).to(children.device)
    tokens = torch.cat([torch.zeros_like(children[:, :1]), children], dim=1)
    shape = (-1, tree.num_nodes, -1)
    path, num_accepted, _ = reject(
        tokens,
        tree,
        base_probs[:, None].expand(shape),
        drawn_from[:, None].expand(shape),
        chance,
        sampling,
    )
    accepted = path[:, 1][num_accepted > 0]
    return (accepted.bincount(minlength=tree.num_nodes)[1:] / max(len(tokens), 1)).tolist()
