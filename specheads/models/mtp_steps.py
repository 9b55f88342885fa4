"""Sequential MTP heads at work: down a tree, level by level, each module once for all nodes above.

A node of depth m reads, in module k >= m, its token's embedding and what module k - 1 made of its
parent; module m guesses its children. Modules below m would need hidden states that the base has
not computed yet, and nothing asks for them. So when the walk comes to depth m, module m runs over
all nodes found so far: each attends to the certain tokens and to its own path. Shapes: B rows,
n nodes of a level, N nodes so far without the root, K modules, d hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.models.mtp_texts import MtpTexts, Pass, additive, hide, window_of
from specheads.models.stepwise import Level

if TYPE_CHECKING:
    from specheads.models.mtp import Embed, MtpHeads
    from specheads.models.output import OutputLayer


class MtpSteps:
    """What :class:`specheads.models.stepwise.Steps` is, of MTP heads.

    Args:
        heads: sequential ones.
        output: the base's output layer.
        embed: the base's input embedding.

    Raises:
        ValueError: for heads that are not sequential, without an embedding, or if the layers'
            attention is neither full nor that of a sliding window.
    """

    def __init__(self, heads: MtpHeads, output: OutputLayer, embed: Embed | None) -> None:
        if not heads.sequential:
            raise ValueError("these heads are parallel: they need not be asked level by level")
        if embed is None:
            raise ValueError("these heads read tokens through embed, which is None")
        window_of(heads.config)
        self.heads, self.output, self.embed = heads, output, embed

    def begin(self, hidden: Tensor, root: Tensor, memory: MtpTexts) -> MtpWalk:
        """Start at the roots.

        Args:
            hidden: [K, B, d], what the modules make of the roots.
            root: [B], the last certain tokens.
            memory: of the texts up to there.
        """
        return MtpWalk(self, hidden, root, memory)


class MtpWalk:
    """One step's way down; to be gone without gradients, which nothing here forbids.

    Attributes:
        level: the nodes at hand.
    """

    def __init__(self, steps: MtpSteps, hidden: Tensor, root: Tensor, memory: MtpTexts) -> None:
        self._steps, self._hidden, self._memory = steps, hidden, memory
        self.level = Level(0, root[:, None], None)
        self._made = hidden[0][:, None]  # [B, 1 + N, d], of this level's module, root first
        self._embedded = hidden.new_zeros(len(root), 0, hidden.shape[-1])
        self._above = root.new_zeros(len(root), 0)  # [B, N], places of parents, 0 the root
        self._depths: list[int] = []
        # whether a node has another, root first, for ancestor or is the same
        self._lines = torch.ones(len(root), 1, 1, dtype=torch.bool, device=root.device)

    def logits(self) -> Tensor:
        """Return what the module of this level says at its nodes, [B, n, V]."""
        steps, level = self._steps, self.level
        weight = steps.heads.output_weight(level.depth, steps.output.weight)
        made = self._made[:, -level.tokens.shape[1] :]
        return steps.heads.finish(F.linear(made.to(weight.dtype), weight), steps.output)

    def descend(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Go to nodes one deeper.

        Args:
            tokens: [B, n'], theirs.
            parents: the places of their parents among the n nodes at hand, [n'] where all rows
                share them, else [B, n']; None where node for node follows.
        """
        depth, num_rows, num_new = self.level.depth + 1, *tokens.shape
        first = self._lines.shape[1] - self.level.tokens.shape[1]
        if parents is None:
            parents = torch.arange(num_new, device=tokens.device)
        above = (first + parents).expand(num_rows, -1)
        lines = _rows(self._lines, above)
        own = torch.eye(num_new, dtype=torch.bool, device=tokens.device).expand(num_rows, -1, -1)
        lines = torch.cat([F.pad(self._lines, (0, num_new)), torch.cat([lines, own], 2)], dim=1)
        self._lines, self._above = lines, torch.cat([self._above, above], dim=1)
        embedded = self._memory.embed(tokens).to(self._made.dtype)
        self._embedded = torch.cat([self._embedded, embedded], dim=1)
        self._depths += [depth] * num_new
        self.level = Level(depth, tokens, None)
        self._made = torch.cat([self._hidden[depth][:, None], self._run(depth)], dim=1)

    def _run(self, module: int) -> Tensor:
        """Return what a module makes of all nodes but the root, [B, N, d]."""
        memory, heads = self._memory, self._steps.heads
        start, num_nodes = max(memory.lengths), len(self._depths)
        depths = torch.tensor(self._depths, device=memory.ends.device)
        places = memory.ends[:, None] - 1 + depths  # [B, N], slots that they would have if certain
        slots = torch.arange(start, device=places.device)
        certain = slots < memory.ends[:, None]  # [B, L]
        certain = certain[:, None].expand(-1, num_nodes, -1)
        lines = self._lines[:, 1:, 1:]
        if (window := window_of(heads.config)) is not None:
            certain = certain & (places[..., None] - slots < window)
            lines = lines & (depths[:, None] - depths < window)
        mask = additive(torch.cat([certain, lines], dim=2), memory.root.dtype)
        if min(memory.lengths) < module:  # in short texts the module begins in the tree
            below = (places < module)[:, None].expand(-1, num_nodes, -1)
            itself = torch.eye(num_nodes, dtype=torch.bool, device=places.device)
            hide(mask[:, 0, :, start:], below & ~itself)
        mask[..., : min(module, start)] = torch.finfo(mask.dtype).min
        memory.slots.reserve(start + num_nodes)
        seen = start + num_nodes
        cache = Pass(memory.slots, module, slice(start, seen), seen)
        waves = memory.slots.waves(places)
        before = _rows(self._made, self._above)
        joined = heads.layer(module).join(before, self._embedded, hidden_first=heads.hidden_first)
        return heads.attend(module, joined, mask, places, waves, cache)[1]


def _rows(table: Tensor, places: Tensor) -> Tensor:
    """Return rows [B, n, ...] of tables [B, m, ...], by their places [B, n]."""
    return table.gather(1, places[..., None].expand(-1, -1, table.shape[2]))
