"""Sequential heads at work: down a tree, level by level, each head once for all nodes of its level.

Head i is asked at nodes of depth i, whose path from the root down gives the i + 1 tokens that it
reads. What it makes of the path above is carried down and not computed again. Where the vocabulary
is small, what a token adds is looked up in a table instead of computed. Shapes: B rows, n nodes of
a level, K heads, D of them in use, d hidden size, V vocabulary, V' tokens that the heads can guess.

Sequential MTP heads at work: down a tree, level by level, each module once for all nodes above.

A node of depth m reads, in module k >= m, its token's embedding and what module k - 1 made of its
parent; module m guesses its children. Modules below m would need hidden states that the base has
not computed yet, and nothing asks for them. So when the walk comes to depth m, module m runs over
all nodes found so far: each attends to the certain tokens and to its own path. Shapes: B rows,
n nodes of a level, N nodes so far without the root, K modules, d hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.models.heads import MedusaHeads, normalised

if TYPE_CHECKING:
    from specheads.models.output import OutputLayer
from specheads.models.head_cache import MtpTexts, Pass, additive, hide, text_window

if TYPE_CHECKING:
    from specheads.models.mtp import Embed, MtpHeads
    from specheads.models.output import OutputLayer

Embed = Callable[[Tensor], Tensor]

MAX_TABLE = 1 << 23  # numbers in the tables of one kind; beyond, products are computed


@dataclass(frozen=True)
class Level:
    """Some nodes of one depth, and what the heads below have made of their paths so far.

    Attributes:
        depth: of the nodes, and thereby the head that guesses their children.
        tokens: [B, n], the nodes' own.
        carried: [B, n, ...]: with tables of a condition, the inputs of heads ``depth`` and below,
            side by side; without, the embeddings of the path; nothing without a condition.
    """

    depth: int
    tokens: Tensor
    carried: Tensor | None


class Tables:
    """What each token adds, computed once for all tokens of the vocabulary.

    Attributes:
        conditions: per place j of a path [V, (D - j) * d]: what a token there adds to heads j, ...
        biases: per head [V, V'], the Markov correction; None where it is too large, or absent.

    Args:
        heads: sequential ones.
        embed: the base's input embedding, for heads with a condition.
        depth: D.

    Raises:
        ValueError: for parallel heads, or if the embedding is missing.
    """

    def __init__(self, heads: MedusaHeads, embed: Embed | None, depth: int) -> None:
        if not heads.sequential:
            raise ValueError("these heads are parallel: they need not be asked level by level")
        if heads.condition and embed is None:
            raise ValueError("these heads read tokens through embed, which is None")
        self.heads, self.embed, self.depth = heads, embed, depth
        self._known: list[Tensor] = []
        self.conditions: list[Tensor] = []
        self.biases: list[Tensor] | None = None
        vocab_size, width = heads.vocab_size, heads.hidden_size
        size = vocab_size * width * depth * (depth + 1) // 2
        # joined heads have none: what a token adds depends on the hidden state beside it
        self._condition = heads.condition and 0 < size <= MAX_TABLE
        size = vocab_size * heads.num_outputs * depth
        self._markov = heads.markov_rank > 0 and 0 < size <= MAX_TABLE

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the tables, unless they are those of the weights as they are now.

        Training writes weights in ways that no version counter sees, so that they are compared.
        """
        parts = [self.heads.head(i) for i in range(self.depth)]
        conditions = [part.condition.weight for part in parts if part.condition is not None]
        markov = [(part.markov.down.weight, part.markov.up.weight) for part in parts if part.markov]
        conditions, markov = conditions * self._condition, markov * self._markov
        sources = [*conditions, *itertools.chain(*markov)]
        if conditions:
            assert self.embed is not None
            ids = torch.arange(self.heads.vocab_size, device=conditions[0].device)
            sources.append(normalised(self.embed(ids)))
        if len(sources) == len(self._known) and all(map(torch.equal, sources, self._known)):
            return
        if conditions:
            self.conditions = tabulated(sources[-1], conditions)
        if markov:
            self.biases = [_wide(down) @ _wide(up).T for down, up in markov]
        self._known = [source.clone() for source in sources]


def tabulated(embeddings: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return per place j of a path what every token there adds to the heads that read it.

    Args:
        embeddings: [V, d].
        weights: of the conditions of heads 0, 1, ..., [d, (i + 1) * d].

    Returns:
        Per place [V, (D - j) * d].
    """
    width, wide = embeddings.shape[1], list(map(_wide, weights))
    embeddings = embeddings.to(wide[0].dtype)
    return [
        torch.cat(
            [embeddings @ weight[:, j * width : (j + 1) * width].T for weight in wide[j:]],
            dim=1,
        )
        for j in range(len(weights))
    ]


def _wide(weight: Tensor) -> Tensor:
    """Return the weight in a dtype in which sums of a few products do not round."""
    return weight if weight.dtype == torch.float64 else weight.float()


class Steps:
    """The heads as they are now, for one text.

    Args:
        heads: sequential ones.
        output: the base's output layer.
        tables: of these heads; they are brought up to date.
    """

    @torch.no_grad()
    def __init__(self, heads: MedusaHeads, output: OutputLayer, tables: Tables) -> None:
        tables.refresh()
        self.heads, self.output = heads, output
        self.embed, self.num_levels = tables.embed, tables.depth
        self._conditions, self._biases = tables.conditions, tables.biases
        self._offset: Tensor | None = None
        self._products: Callable[[Tensor], Tensor] | None = None
        if self._conditions:
            parts = [heads.head(i).condition for i in range(self.num_levels)]
            self._offset = torch.cat([part.bias for part in parts if part is not None])
            self._offset = self._offset.to(self._conditions[0].dtype)
        elif not heads.condition:
            self._products = heads.own_products(output)

    def begin(self, hidden: Tensor, root: Tensor, memory: object = None) -> Walk:
        """Start at the roots.

        Args:
            hidden: [B, d], behind the prefix layer if there is one.
            root: [B], the tokens that the base chose from there.
            memory: not used: what the prefix layer remembers is in ``hidden``.
        """
        del memory
        own = None if self._products is None else self._products(hidden)
        return Walk(self, hidden, root[:, None], own)


class Walk:
    """One step's way down; to be gone without gradients, which nothing here forbids.

    Attributes:
        level: the nodes at hand.
    """

    def __init__(self, steps: Steps, hidden: Tensor, root: Tensor, own: Tensor | None) -> None:
        self._steps, self._hidden, self._own = steps, hidden[:, None], own
        carried = None
        if steps._conditions:
            assert steps._offset is not None
            start = hidden.to(steps._offset.dtype).repeat(1, steps.num_levels) + steps._offset
            carried = start[:, None] + F.embedding(root, steps._conditions[0])
        elif steps.heads.condition:
            carried = self._embedded(root)
        self.level = Level(0, root, carried)

    def logits(self) -> Tensor:
        """Return what the head of this level says at its nodes, [B, n, V']."""
        steps, level = self._steps, self.level
        head = steps.heads.head(level.depth)
        if self._own is not None:
            products = self._own[level.depth][:, None]  # the same at all nodes
        else:
            assert level.carried is not None
            if steps._conditions:
                x = level.carried[..., : steps.heads.hidden_size]
            else:
                x = head.conditioned(self._hidden, level.carried)
            products = head.own_product(x, steps.output.weight)
        if head.markov is not None:
            if steps._biases is not None:
                added = F.embedding(level.tokens, steps._biases[level.depth])
            else:
                added = head.markov.up(head.markov.down(level.tokens))
            products = products + added.to(products.dtype)
        return steps.heads.finish(products, steps.output)

    def descend(self, tokens: Tensor, parents: Tensor | None) -> None:
        """Go to nodes one deeper.

        Args:
            tokens: [B, n'], theirs.
            parents: the places of their parents among the n nodes at hand, [n'] where all rows
                share them, else [B, n']; None where node for node follows.
        """
        steps, depth = self._steps, self.level.depth + 1
        carried = self.level.carried
        if carried is not None:
            if parents is not None and parents.dim() == 1:
                carried = carried.index_select(1, parents)
            elif parents is not None:
                carried = carried.gather(1, parents[..., None].expand(-1, -1, carried.shape[2]))
            if steps._conditions:
                below = carried[..., steps.heads.hidden_size :]
                carried = below + F.embedding(tokens, steps._conditions[depth])
            else:
                carried = torch.cat([carried, self._embedded(tokens)], dim=-1)
        self.level = Level(depth, tokens, carried)

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self._steps.embed is not None
        return self._steps.heads.embedded(tokens, self._steps.embed)


class MtpSteps:
    """What :class:`specheads.models.head_walk.Steps` is, of MTP heads.

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
        text_window(heads.config)
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
        if (window := text_window(heads.config)) is not None:
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
