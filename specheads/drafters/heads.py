"""Medusa heads as a drafter: every head guesses its own token ahead from one hidden state.

Cai et al., arXiv:2401.10774, section 2.1. Head i predicts depth i + 1; its guesses depend on the
last committed hidden state and not on the guesses above them, so one top-k per head fills the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.following import Follower, HeadsState
from specheads.tree import Tree

if TYPE_CHECKING:
    from specheads.models.kinds import Heads
    from specheads.models.output import OutputLayer


class HeadsDrafter:
    """Fills a static tree with the heads' best guesses.

    Args:
        heads: parallel ones.
        output: the base model's output layer, which shared heads go through.
        tree: at most as deep as there are heads.

    Raises:
        ValueError: if the tree is deeper than the heads or wider than the tokens they can guess.
    """

    deterministic = True

    def __init__(self, heads: Heads, output: OutputLayer, tree: Tree) -> None:
        check_tree(tree, heads)
        self.heads = heads
        self.output = output
        self.tree = tree
        self.taps = (heads.tap,)
        self._follower = Follower(heads, output)
        self._num_ranks = tree.max_rank + 1
        # node -> its place in the heads' top-k lists laid end to end, [N - 1]
        slots = (tree.depths - 1) * self._num_ranks + tree.ranks
        self._slots = slots[1:].to(self._follower.device)

    def start(self, prefill: Prefill) -> HeadsState:
        """Start from the prompt's last hidden state; the heads need no others."""
        # a snapshot for every text anew: the heads may have been trained on in between
        predict = self.heads.snapshot(self.output)
        self.tree = self.tree.to(prefill.root.device)
        return self._follower.start(prefill, predict)

    def propose(self, state: HeadsState) -> Candidates:
        """One pass of all heads, one top-k, one gather."""
        root = state.root[:, None]
        if self.tree.num_nodes == 1:
            return Candidates(root, self.tree)
        logits = state.predict(state.hidden)[: self.tree.max_depth]  # [D, B, V']
        best = logits.topk(self._num_ranks, dim=-1).indices
        best = best.transpose(0, 1).flatten(1)  # [B, D * ranks]
        guesses = self.heads.token_ids(best.index_select(1, self._slots))
        return Candidates(torch.cat([root, guesses.to(root.device)], dim=1), self.tree)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        return self._follower.observe(state, result)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        return self._follower.select(state, rows)


def check_tree(tree: Tree, heads: Heads) -> None:
    """Refuse a tree that the heads cannot fill.

    Raises:
        ValueError: if it is deeper than the heads or wider than the tokens they can guess.
    """
    if tree.max_depth > heads.num_heads:
        raise ValueError(f"tree has depth {tree.max_depth}, but there are {heads.num_heads} heads")
    if tree.max_rank < heads.num_outputs:
        return
    guessed = "the vocabulary" if heads.token_map is None else "the heads guess among"
    raise ValueError(f"tree has rank {tree.max_rank}, {guessed} {heads.num_outputs} tokens")
