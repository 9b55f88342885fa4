"""Lay trees that were grown in Python, one per row, out as the candidates of one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specheads.drafters.contract import Candidates
from specheads.drafters.dynamic import HOSTS
from specheads.tree import RowTrees, Tree


def pack(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    device: torch.device,
    *,
    inputs: Sequence[Sequence[int]] | None = None,
    num_nodes: int = 1,
) -> Candidates:
    """Return candidates with all rows padded to the largest.

    Args:
        tokens: [B][n], per row its own n, the root first.
        parents: likewise, of nodes sorted by depth; -1 for the root.
        device: where the candidates go.
        inputs: likewise, what the base model reads, where that is more than the tokens.
        num_nodes: pad to at least so many, where steps of one size are wanted.
    """
    sizes = [len(row) for row in parents]
    width = max(num_nodes, *sizes)
    if all(_is_chain(row) for row in parents):  # its mask is prepared once for all steps
        tree: Tree | RowTrees = Tree.chain(width - 1).to(device)
    else:
        # beside the last node, so that nodes stay sorted by depth
        padded = [
            [*row, *[max(row[-1], 0)] * (width - size)] if size < width else row
            for row, size in zip(parents, sizes, strict=True)
        ]
        depth = max(_depth_of_last(row) for row in padded)
        if device.type in HOSTS:
            tree = RowTrees.from_lists(padded, depth)
        else:
            tree = RowTrees.from_parents(torch.tensor(padded, device=device), depth)
    probes = None if inputs is None else torch.tensor(_padded(inputs, width), device=device)
    return Candidates(torch.tensor(_padded(tokens, width), device=device), tree, probes=probes)


def _padded(rows: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    return [[*row, *[-1] * (width - len(row))] for row in rows]


def _is_chain(parents: Sequence[int]) -> bool:
    return all(parent == node - 1 for node, parent in enumerate(parents))


def _depth_of_last(parents: Sequence[int]) -> int:
    depth, node = 0, parents[-1]
    while node >= 0:
        depth, node = depth + 1, parents[node]
    return depth
