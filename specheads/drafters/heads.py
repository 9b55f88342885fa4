"""Medusa heads as a drafter: every head guesses its own token ahead from one hidden state.

Cai et al., arXiv:2401.10774, section 2.1. Head i predicts depth i + 1; its guesses depend on the
last committed hidden state and not on the guesses above them, so one top-k per head fills the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.drafters.contract import FINAL, Candidates, StepResult
from specheads.tree import Tree

if TYPE_CHECKING:
    from specheads.models.base import OutputLayer
    from specheads.models.heads import MedusaHeads


STACKED_BYTES = 16 * 2**20  # of weights; above it the products outweigh the calls that start them


@dataclass(frozen=True)
class StackedHeads:
    """A copy of small heads with their weights side by side: all of them in one product a layer.

    Four heads of a 6 M parameter model take 16 calls of a few microseconds of work each; stacked it
    is a third of the time. The numbers are those of ``MedusaHeads.logits`` up to rounding and
    before scale and softcap, which do not change which guesses are best.

    Attributes:
        blocks: per residual block the weights [K, d, d] (transposed) and biases [K, 1, d].
        output: [K, d, V], or [d, V] where the heads share the base's matrix.
        bias: [V], of the base's output layer.
    """

    blocks: list[tuple[Tensor, Tensor]]
    output: Tensor
    bias: Tensor | None

    @staticmethod
    def copy(heads: MedusaHeads, output: OutputLayer, num_heads: int) -> StackedHeads | None:
        """Stack the first ``num_heads`` heads; None if they are large."""
        used = heads.heads[:num_heads]
        num_bytes = sum(p.numel() * p.element_size() for p in used.parameters())
        if num_bytes > STACKED_BYTES or num_heads == 0:
            return None
        blocks = []
        for layers in zip(*(head.blocks for head in used), strict=True):
            weight = torch.stack([block.weight for block in layers]).transpose(1, 2)
            blocks.append((weight, torch.stack([block.bias for block in layers])[:, None]))
        matrices = [heads.output_weight(i, output.weight) for i in range(num_heads)]
        if heads.lm_head == "shared":
            return StackedHeads(blocks, matrices[0].t(), output.bias)
        return StackedHeads(blocks, torch.stack(matrices).transpose(1, 2), output.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [K, B, V] for ``hidden`` [B, d]."""
        num_heads = self.blocks[0][0].shape[0] if self.blocks else self.output.shape[0]
        x = hidden.expand(num_heads, *hidden.shape)
        for weight, bias in self.blocks:
            x = x.to(weight.dtype)
            x = x + F.silu(torch.baddbmm(bias, x, weight))
        logits = x.to(self.output.dtype) @ self.output
        return logits if self.bias is None else logits + self.bias


@dataclass(frozen=True)
class HeadsState:
    """Where the next guesses start.

    Attributes:
        root: [B], the last certain token.
        hidden: [B, d], the hidden state that predicted it.
        stacked: the heads as they were when decoding started; None if they are large.
    """

    root: Tensor
    hidden: Tensor
    stacked: StackedHeads | None


class HeadsDrafter:
    """Fills a static tree with the heads' best guesses.

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
        self.tree = tree.to(output.weight.device)
        self._num_ranks = tree.max_rank + 1
        # node -> its place in the heads' top-k lists laid end to end, [N - 1]
        self._slots = ((self.tree.depths - 1) * self._num_ranks + self.tree.ranks)[1:]

    def start(self, prompt_ids: Tensor, hidden: Mapping[str, Tensor], root: Tensor) -> HeadsState:
        """Start from the prompt's last hidden state; the heads need no others."""
        # anew for every text: the heads may have been trained on in between
        stacked = StackedHeads.copy(self.heads, self.output, self.tree.max_depth)
        return HeadsState(root, hidden[FINAL][:, -1], stacked)

    def propose(self, state: HeadsState) -> Candidates:
        """One pass of all heads, one top-k, one gather."""
        root = state.root[:, None]
        if self.tree.num_nodes == 1:
            return Candidates(root, self.tree)
        if state.stacked is not None:
            logits = state.stacked.logits(state.hidden)  # [D, B, V]
        else:
            logits = self.heads.logits(state.hidden, self.output)[: self.tree.max_depth]
        best = logits.topk(self._num_ranks, dim=-1).indices
        best = best.transpose(0, 1).flatten(1)  # [B, D * ranks]
        return Candidates(torch.cat([root, best[:, self._slots]], dim=1), self.tree)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        hidden = result.hidden[FINAL]
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return HeadsState(result.next_root, hidden[rows, result.last_node], state.stacked)
