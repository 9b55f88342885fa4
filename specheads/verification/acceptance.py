"""Acceptance rules: pure functions from what was guessed and what the base model says to a path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree, batched


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
