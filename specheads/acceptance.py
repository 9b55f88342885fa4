"""Acceptance rules: pure functions from what was guessed and what the base model says to a path."""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.tree import Tree


def walk(tokens: Tensor, tree: Tree, base_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the base model's own tokens down the tree: sample-and-walk.

    The base model draws one token at each node (greedily, or by sampling with the node's own
    prefix). Where a child of the node carries that token we move there, otherwise we stop; the
    token drawn at the last node is the next root.

    Guarantee: exact, for candidates that are deterministic given the prefix (top-k of heads,
    n-grams): every emitted token was drawn by the base model given exactly the tokens before it.
    No exact rule accepts more on average, for the accepted length is that of the longest prefix
    of the output that lies in the tree, and the output's distribution is given. There is one draw
    per node: drawing again for another path through a node (as Medusa's sampling modes do)
    changes the distribution.

    Args:
        tokens: [B, N], the token at each node. Negative tokens are padding and never accepted.
        tree: the shape; equal siblings need not be merged for exactness, only for speed.
        base_tokens: [B, N], the token the base model draws after each node.

    Returns:
        path: [B, D+1], the accepted nodes from the root (``path[:, 0] == 0``), padded with -1.
        num_accepted: [B], 0..D.
    """
    parents = tree.parents.clamp(min=0)
    match = (tokens == base_tokens[:, parents]) & (tokens >= 0)  # [B, N]
    match[:, 0] = True
    reached = (match[:, None, :] | ~tree.tree_mask).all(-1)  # [B, N]: all of the node's path
    # nodes are sorted by depth: the last one reached is among the deepest
    last = (reached * torch.arange(1, tree.num_nodes + 1, device=tokens.device)).argmax(-1)
    return tree.ancestors[last], tree.depths[last]
