"""Sequential MTP heads while decoding: what they remember of texts, and their way down a tree.

At token position p module k reads the token's embedding and G^{k-1}_{p-1}, what the module before
made of the position before; G^{-1} is the base's final hidden state (arXiv:2412.19437, equations 21
to 24). Unrolled, G^k_p needs the base's hidden state at p - 1 - k and the tokens from there on. So
everything up to the root (the last certain token, whose hidden state is not known yet) follows from
certain tokens and true hidden states, and :class:`TextCache` computes it from nothing else: what
was drafted and refused leaves no trace. Position p lies in slot p - 1 of every module; module k has
nothing at positions up to k, and its first k slots are masked.

A node of depth m reads, in module k >= m, its token's embedding and what module k - 1 made of its
parent; module m guesses its children. Modules below m would need hidden states that the base has
not computed yet, and nothing asks for them. So when :class:`MtpWalk` comes to depth m, module m
runs over all nodes found so far: each attends to the certain tokens and to its own path.

The layers are transformers' own, whatever they are made of, and take a :class:`TreeLayer` for their
cache, which puts the nodes of a tree behind each row's end.
Shapes: B rows, T new positions, n nodes of a level, N nodes so far without the root, K modules, L
slots, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.models.head_cache import RootCache, rows_at

Run = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TextCache(RootCache):
    """What modules that read tokens remember of every row, as it is after :meth:`append`.

    A row's length is the position of its root, whose token the modules have read: ``root`` is G^k
    there, [K, B, d]; where the text is too short for it, anything finite.

    Attributes:
        run: runs module k: its number, what the module before made [B, T, d], the tokens'
            embeddings [B, T, d], an additive mask [B, 1, T, L], positions [B, T], their position
            embeddings, and a :class:`TreeLayer`; returns G^k [B, T, d] last, as
            ``MtpHeads.attend`` does.
        window: how many tokens a layer looks back upon, itself included; None for all.
    """

    run: Run
    window: int | None

    def append(self, hidden: Tensor, counts: Sequence[int], tokens: Tensor) -> tuple[Self, Tensor]:
        """Read on.

        Args:
            hidden: [B, T, d], the base's final hidden states of the positions that follow,
                right-padded.
            counts: per row how many of the T are real; where it is 0, nothing changes.
            tokens: [B, T], the token that came after each of them, the root at the last one.

        Returns:
            The cache with them, and G^k at each row's root, [K, B, d].
        """
        cache, _ = self.read(hidden, counts, tokens)
        return cache, cache.root

    @torch.no_grad()
    def read(self, hidden: Tensor, counts: Sequence[int], tokens: Tensor) -> tuple[Self, Tensor]:
        """Do what :meth:`append` does; return G^k at every new token, [K, B, T, d]."""
        device = self.ends.device
        num_rows, num_new = tokens.shape
        seen = self.slots.reserve(self.lengths, num_new)
        places = self.ends[:, None] + torch.arange(num_new, device=device)  # [B, T]
        distances = places[..., None] - torch.arange(seen, device=device)  # [B, T, L]
        allowed = distances >= 0
        if self.window is not None:
            allowed &= distances < self.window
        mask = additive(allowed, self.root.dtype)
        waves = _at(self.slots.waves, places)
        embedded = self.embed(tokens).to(self.root.dtype)
        before = hidden.to(self.root.dtype)
        found: list[Tensor] = []
        for i in range(len(self.root)):
            if i:
                # what was before the first token of this module is no part of it
                hide(mask[:, 0, :, i - 1], places >= i)
                # one position back: at the first of these tokens that is the root until now
                before = torch.cat([self.root[i - 1, :, None], found[-1][:, :-1]], dim=1)
            layer = self.slots.layers[i]
            found.append(self.run(i, before, embedded, mask, places, waves, layer)[1])
        every = torch.stack(found)
        if num_rows == 1:
            ends = self.ends + counts[0]
            root = every[:, :, counts[0] - 1] if counts[0] else self.root
        else:
            new = torch.tensor(counts, device=device)
            ends = self.ends + new
            rows = torch.arange(num_rows, device=device)
            root = every[:, rows, (new - 1).clamp(min=0)]
            if min(counts) == 0:
                root = torch.where(new[:, None] > 0, root, self.root)
        return replace(self, lengths=self.grown(counts), ends=ends, root=root), every


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask [B, 1, T, L] that layers add to their scores, of bools [B, T, L]."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return hide(zeros, ~allowed)[:, None]


def hide(mask: Tensor, which: Tensor) -> Tensor:
    """Mask more of an additive mask, in place."""
    return mask.masked_fill_(which, torch.finfo(mask.dtype).min)


class MtpWalk:
    """One step's way down the tree; to be called under ``torch.no_grad()``.

    Args:
        logits: maps a module's number and what the module makes [B, n, d] to logits [B, n, V].
        hidden: [K, B, d], what the modules make of the roots.
        root: [B], the last certain tokens.
        memory: of the texts up to there.

    Attributes:
        depth: of the nodes at hand.
        tokens: [B, n], the nodes' own.
    """

    def __init__(
        self, logits: Callable[..., Tensor], hidden: Tensor, root: Tensor, memory: TextCache
    ) -> None:
        self._logits, self._hidden, self._memory = logits, hidden, memory
        self.depth, self.tokens = 0, root[:, None]
        self._made = hidden[0][:, None]  # [B, 1 + N, d], of this level's module, root first
        self._embedded = hidden.new_zeros(len(root), 0, hidden.shape[-1])
        self._above = root.new_zeros(len(root), 0)  # [B, N], places of parents, 0 the root
        self._depths: list[int] = []
        # whether a node has another, root first, for ancestor or is the same
        self._lines = torch.ones(len(root), 1, 1, dtype=torch.bool, device=root.device)

    def logits(self) -> Tensor:
        """Return what the module of this level says at its nodes, [B, n, V]."""
        return self._logits(self.depth, self._made[:, -self.tokens.shape[1] :])

    def descend(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Go to nodes one deeper.

        Args:
            tokens: [B, n'], the tokens of these nodes.
            parents: the places of their parents among the n nodes at hand, [n'] where all rows
                share them, else [B, n']; None where node for node follows.
        """
        depth, num_rows, num_new = self.depth + 1, *tokens.shape
        first = self._lines.shape[1] - self.tokens.shape[1]
        if parents is None:
            parents = torch.arange(num_new, device=tokens.device)
        above = (first + parents).expand(num_rows, -1)
        lines = rows_at(self._lines, above)
        own = torch.eye(num_new, dtype=torch.bool, device=tokens.device).expand(num_rows, -1, -1)
        lines = torch.cat([F.pad(self._lines, (0, num_new)), torch.cat([lines, own], 2)], dim=1)
        self._lines, self._above = lines, torch.cat([self._above, above], dim=1)
        embedded = self._memory.embed(tokens).to(self._made.dtype)
        self._embedded = torch.cat([self._embedded, embedded], dim=1)
        self._depths += [depth] * num_new
        self.depth, self.tokens = depth, tokens
        self._made = torch.cat([self._hidden[depth][:, None], self._run(depth)], dim=1)

    def _run(self, module: int) -> Tensor:
        """Return what a module makes of all nodes but the root, [B, N, d]."""
        memory = self._memory
        ends, num_nodes = memory.ends[:, None], len(self._depths)
        seen = memory.slots.reserve(memory.lengths, num_nodes)
        depths = torch.tensor(self._depths, device=ends.device)
        places = ends - 1 + depths  # [B, N], slots that they would have if certain
        slots = torch.arange(seen, device=ends.device)
        # module k has nothing in its first k slots, but in short texts it begins in the tree
        certain = ((slots >= module) & (slots < ends))[:, None].expand(-1, num_nodes, -1)
        itself = torch.eye(num_nodes, dtype=torch.bool, device=ends.device)
        lines = self._lines[:, 1:, 1:] & ((places >= module)[:, None] | itself)
        if memory.window is not None:
            certain = certain & (places[..., None] - slots < memory.window)
            lines = lines & (depths[:, None] - depths < memory.window)
        behind = (ends + torch.arange(num_nodes, device=ends.device))[:, None].expand_as(lines)
        mask = additive(certain.scatter(2, behind, lines), memory.root.dtype)
        waves, layer = _at(memory.slots.waves, places), memory.slots.layers[module]
        before = rows_at(self._made, self._above)
        return memory.run(module, before, self._embedded, mask, places, waves, layer)[1]


def _at(waves: Any, places: Tensor) -> Any:
    """Return the position embeddings [B, T, ...] of the slots ``places`` [B, T]."""
    return tuple(w[0, places] for w in waves) if isinstance(waves, tuple) else waves[0, places]
