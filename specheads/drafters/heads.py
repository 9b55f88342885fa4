"""Medusa heads as a drafter: every head guesses its own token ahead from one hidden state.

Cai et al., arXiv:2401.10774, section 2.1. Head i predicts depth i + 1; its guesses depend on the
last committed hidden state and not on the guesses above them, so one top-k per head fills the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specheads.drafters.contract import FINAL, Candidates, Prefill, StepResult
from specheads.tree import Tree

if TYPE_CHECKING:
    from specheads.models.base import OutputLayer
    from specheads.models.heads import MedusaHeads


@dataclass(frozen=True)
class HeadsState:
    """Where the next guesses start.

    Attributes:
        root: [B], the last certain token.
        hidden: [B, d], the hidden state that predicted it.
        predict: hidden [B, d] to the heads' logits [K, B, V].
    """

    root: Tensor
    hidden: Tensor
    predict: Callable[[Tensor], Tensor]


class HeadsDrafter:
    """Fills a static tree with the heads' best guesses.

    The heads may lie on another device than the token ids: that of the output layer, where a base
    model is spread over several.

    Args:
        heads: the heads.
        output: the base model's output layer, which shared heads go through.
        tree: at most as deep as there are heads.

    Raises:
        ValueError: if the tree is deeper than the heads or wider than the vocabulary.
    """

    taps = (FINAL,)
    deterministic = True

    def __init__(self, heads: MedusaHeads, output: OutputLayer, tree: Tree) -> None:
        num_heads = heads.num_heads
        if tree.max_depth > num_heads:
            raise ValueError(f"tree has depth {tree.max_depth}, but there are {num_heads} heads")
        vocab_size = output.weight.shape[0]
        if tree.max_rank >= vocab_size:
            raise ValueError(f"tree has rank {tree.max_rank}, the vocabulary {vocab_size} tokens")
        self.heads = heads
        self.output = output
        self.tree = tree
        self._device = next((p.device for p in heads.parameters()), output.weight.device)
        self._num_ranks = tree.max_rank + 1
        # node -> its place in the heads' top-k lists laid end to end, [N - 1]
        slots = (tree.depths - 1) * self._num_ranks + tree.ranks
        self._slots = slots[1:].to(self._device)

    def start(self, prefill: Prefill) -> HeadsState:
        """Start from the prompt's last hidden state; the heads need no others."""
        # a snapshot for every text anew: the heads may have been trained on in between
        predict = self.heads.snapshot(self.output)
        self.tree = self.tree.to(prefill.root.device)
        return HeadsState(prefill.root, prefill.last_hidden(FINAL).to(self._device), predict)

    def propose(self, state: HeadsState) -> Candidates:
        """One pass of all heads, one top-k, one gather."""
        root = state.root[:, None]
        if self.tree.num_nodes == 1:
            return Candidates(root, self.tree)
        logits = state.predict(state.hidden)[: self.tree.max_depth]  # [D, B, V]
        best = logits.topk(self._num_ranks, dim=-1).indices
        best = best.transpose(0, 1).flatten(1)  # [B, D * ranks]
        guesses = best.index_select(1, self._slots).to(root.device)
        return Candidates(torch.cat([root, guesses], dim=1), self.tree)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        hidden = result.hidden[FINAL]
        if len(hidden) == 1 and result.path.device.type == "cpu":  # nothing to wait for
            accepted = hidden[:, result.path[0].tolist()[int(result.num_accepted)]]
        else:
            rows = torch.arange(len(hidden), device=hidden.device)
            accepted = hidden[rows, result.last_node.to(hidden.device)]
        return HeadsState(result.next_root, accepted.to(self._device), state.predict)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        hidden = state.hidden[rows.to(self._device)]
        return HeadsState(state.root[rows], hidden, state.predict)
