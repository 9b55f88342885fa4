"""Make the drafter that heads of any kind need.

Medusa heads that grow a tree of their own at every step, out of their own probabilities.

A static tree spends its nodes on the ranks that hit on average; here they go where the heads are
unsure now. The heads guess in parallel, so a node's value is the product of the heads'
probabilities along its path, and the tree that gains most in expectation holds the most valuable
prefixes: what :func:`specheads.attention.tree.grow_tree` does with rates that were measured
beforehand (DDTree does it with a heap on the host).

Sequential heads that grow a tree of their own at every step, out of their own probabilities.

A node's value is the product of the probabilities along its path, each conditional on the tokens
above it, and the tree that gains most in expectation holds the most valuable prefixes: as for
parallel heads (:mod:`specheads.drafters.growing`), but what stands below a node is known only once
a head has been asked there. So it is grown level by level, as EAGLE-2 does (arXiv:2406.16858), and
heads are asked only where a child may still come among the best.

Lay trees that were grown in Python, one per row, out as the candidates of one step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specheads.attention.tree import RowTrees
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.heads import Follower, HeadsState

if TYPE_CHECKING:
    from specheads.models.kinds import Heads, Steps, Walk
    from specheads.models.output import OutputLayer
import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specheads.models.kinds import Heads
    from specheads.models.output import OutputLayer
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.drafters.heads import HeadsDrafter, SequentialDrafter
from specheads.models.base import Embed, input_device
from specheads.models.kinds import Heads
from specheads.models.output import OutputLayer

NUM_RANKS = 10  # guesses per head that a tree may use, as measured for static trees
HOSTS = ("cpu",)  # devices where Python need not wait for anything, and small ops cost more


def best_trees(log_probs: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Grow for every row the tree of ``num_nodes`` nodes with the most probable prefixes.

    Level by level: no level can hold more than the nodes that are left once there is one on each
    level above it, and its best come from extending the best of the level above. Of all levels
    together the best are kept, the shallower first where values tie, so that no node stands there
    without its parent. Shapes depend on the arguments' shapes only; nothing waits for the device.

    Args:
        log_probs: [D, B, R], no positive numbers: the R best guesses for each depth, in any order.
        num_nodes: root included; smaller if there are not so many prefixes.

    Returns:
        parents [B, N], -1 for the root, nodes sorted by depth; and slots [B, N - 1]: where each
        node below the root stands in a row's guesses laid end to end, ``d * R + r`` for guess r at
        depth d + 1.

    Raises:
        ValueError: if ``num_nodes`` < 1.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1, got {num_nodes}")
    depth, num_rows, num_ranks = log_probs.shape
    values = log_probs.new_zeros(num_rows, 1)  # of the root
    of_levels, below = [values], [torch.zeros_like(values, dtype=torch.long)]
    for d in range(min(depth, num_nodes - 1)):
        extended = (values[:, :, None] + log_probs[d][:, None]).flatten(1)
        values, flat = extended.topk(min(num_nodes - 1 - d, extended.shape[1]), dim=1)
        of_levels.append(values)
        below.append(flat)  # (place of the parent in its level) * R + rank
    kept, parents, flat = keep_best(of_levels, below, num_ranks, num_nodes)
    _, first = _offsets(tuple(level.shape[1] for level in below), num_ranks, log_probs.device)
    return parents, (first[kept] + flat % num_ranks)[:, 1:]


def keep_best(
    of_levels: Sequence[Tensor], below: Sequence[Tensor], num_ranks: int, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the most valuable nodes of a tree grown level by level.

    Args:
        of_levels: per level, the root's first, the nodes' values [B, n].
        below: likewise ``(place of the parent in its level) * R + rank``.
        num_ranks: R.
        num_nodes: N, root included.

    Returns:
        kept [B, N]: places in the levels laid end to end; parents [B, N], -1 for the root; and what
        ``below`` says of the kept nodes.
    """
    sizes = tuple(level.shape[1] for level in below)
    above, _ = _offsets(sizes, num_ranks, below[0].device)
    # a stable sort, and levels in order: a node never precedes its equally probable parent
    best = torch.cat(list(of_levels), 1).sort(dim=1, descending=True, stable=True).indices
    kept = best[:, :num_nodes].sort(dim=1).values
    flat = torch.cat(list(below), 1).gather(1, kept)
    parents = torch.searchsorted(kept, above[kept] + flat // num_ranks)
    parents[:, 0] = -1
    return kept, parents, flat


@lru_cache(maxsize=64)
def _offsets(sizes: tuple[int, ...], num_ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per place in the levels laid end to end: where the level above and its own guesses start."""
    starts = [sum(sizes[:level]) for level in range(len(sizes))]
    above = [0] + [starts[d] for d, size in enumerate(sizes[1:]) for _ in range(size)]
    first = [0] + [d * num_ranks for d, size in enumerate(sizes[1:]) for _ in range(size)]
    return torch.tensor(above, device=device), torch.tensor(first, device=device)


def best_tree_on_host(
    log_probs: Sequence[Sequence[float]], num_nodes: int
) -> tuple[list[int], list[int]]:
    """Do for one row what :func:`best_trees` does, with a heap: on a CPU at a third of the time.

    Args:
        log_probs: [D][R], each depth's best first.
        num_nodes: root included.

    Returns:
        parents [N] and slots [N - 1], as :func:`best_trees` gives them.
    """
    num_ranks = len(log_probs[0])
    # (minus the value, order of arrival, depth, rank, what the parent is worth, its number)
    frontier: list[tuple[float, int, int, int, float, int]] = []
    if num_nodes > 1:
        frontier.append((-log_probs[0][0], 0, 0, 0, 0.0, 0))
    found: list[tuple[int, int, int, int]] = []  # depth, number, rank, the parent's number
    arrived = 1
    while frontier and len(found) + 1 < num_nodes:
        negative, _, depth, rank, above, parent = heapq.heappop(frontier)
        found.append((depth, len(found) + 1, rank, parent))
        if rank + 1 < num_ranks:
            value = above + log_probs[depth][rank + 1]
            heapq.heappush(frontier, (-value, arrived, depth, rank + 1, above, parent))
        if depth + 1 < len(log_probs):
            value = log_probs[depth + 1][0] - negative
            heapq.heappush(frontier, (-value, arrived + 1, depth + 1, 0, -negative, len(found)))
        arrived += 2
    found.sort()
    place = {number: i for i, (_, number, _, _) in enumerate(found, start=1)}
    place[0] = 0
    parents = [-1, *(place[parent] for _, _, _, parent in found)]
    return parents, [depth * num_ranks + rank for depth, _, rank, _ in found]


def best_guesses(logits: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and indices [..., R] of the best of logits [..., V']."""
    best = logits.topk(num_ranks, dim=-1)
    # a softmax at the best guesses only; torch's own logsumexp takes thrice the small ops
    shifted = best.values - best.values[..., :1]
    log_probs = shifted - (logits - best.values[..., :1]).exp_().sum(-1, keepdim=True).log_()
    return log_probs, best.indices


@dataclass(frozen=True)
class GrownShape:
    """What bounds a tree grown at every step.

    Attributes:
        max_depth: deepest node.
        num_ranks: guesses per node to choose from.
        scales: per depth what logits are multiplied with; None where that changes nothing.
    """

    max_depth: int
    num_ranks: int
    scales: list[float] | None

    @staticmethod
    def of(
        heads: Heads,
        num_nodes: int,
        max_depth: int | None,
        num_ranks: int,
        temperatures: Sequence[float] | None,
    ) -> GrownShape:
        """Check the settings of a drafter, see :class:`DynamicHeadsDrafter`."""
        max_depth = heads.num_heads if max_depth is None else max_depth
        if not 1 <= max_depth <= heads.num_heads:
            raise ValueError(
                f"max_depth must be in 1..{heads.num_heads}, the number of heads, got {max_depth}"
            )
        if num_nodes < 2 or num_ranks < 1:
            raise ValueError(
                f"num_nodes must be at least 2 and num_ranks at least 1, got {num_nodes} and "
                f"{num_ranks}"
            )
        if temperatures is not None:
            if len(temperatures) != heads.num_heads:
                raise ValueError(
                    f"{len(temperatures)} temperatures for {heads.num_heads} heads: one per head"
                )
            if min(temperatures) <= 0:
                raise ValueError(f"temperatures must be positive, got {list(temperatures)}")
        max_depth = min(max_depth, num_nodes - 1)
        scales = None
        if temperatures is not None and any(each != 1 for each in temperatures):
            scales = [1 / each for each in temperatures[:max_depth]]
        # more ranks than nodes can never be used
        return GrownShape(max_depth, min(num_ranks, num_nodes - 1, heads.num_outputs), scales)


class DynamicHeadsDrafter:
    """Fills the tree that the heads themselves find most probable, per row and step.

    The guesses are a function of the prefix, so sample-and-walk stays exact.

    Args:
        heads: parallel ones.
        output: the base model's output layer, which shared heads go through.
        num_nodes: N of every tree, root included.
        max_depth: deepest node; None is the number of heads.
        num_ranks: guesses per head to choose from.
        temperatures: one per head: its logits are divided by it, where it was measured to be too
            sure of itself (above 1) or not sure enough; None leaves them.

    Raises:
        ValueError: if a number is out of range, or the number of temperatures is not that of heads.
    """

    deterministic = True

    def __init__(
        self,
        heads: Heads,
        output: OutputLayer,
        num_nodes: int,
        *,
        max_depth: int | None = None,
        num_ranks: int = NUM_RANKS,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        shape = GrownShape.of(heads, num_nodes, max_depth, num_ranks, temperatures)
        self.heads, self.output = heads, output
        self.num_nodes, self.max_depth = num_nodes, shape.max_depth
        self.num_ranks = shape.num_ranks
        self.taps = heads.taps
        self._follower = Follower(heads, output)
        self._scales: Tensor | None = None
        if shape.scales is not None:
            scales = torch.tensor(shape.scales, device=self._follower.device)
            self._scales = scales[:, None, None]

    def start(self, prefill: Prefill) -> HeadsState:
        """Start from the prompt's last hidden state."""
        return self._follower.start(prefill, self.heads.snapshot(self.output))

    def propose(self, state: HeadsState) -> Candidates:
        """One pass of all heads, one top-k, and a tree from what it found."""
        logits = state.predict(state.hidden)[: self.max_depth].float()  # [D, B, V']
        if self._scales is not None:
            logits = logits * self._scales
        log_probs, indices = best_guesses(logits, self.num_ranks)
        guesses = indices.transpose(0, 1).flatten(1)
        if logits.device.type in HOSTS:
            rows = log_probs.transpose(0, 1).tolist()
            grown = [best_tree_on_host(row, self.num_nodes) for row in rows]
            tree = RowTrees.from_lists([parents for parents, _ in grown], self.max_depth)
            guesses = guesses.gather(1, torch.tensor([slots for _, slots in grown]))
        else:
            parents, slots = best_trees(log_probs, self.num_nodes)
            tree = RowTrees.from_parents(parents, self.max_depth)
            guesses = guesses.gather(1, slots)
        guesses = self.heads.token_ids(guesses).to(state.root.device)
        return Candidates(torch.cat([state.root[:, None], guesses], dim=1), tree)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        return self._follower.observe(state, result)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        return self._follower.select(state, rows)


# Nodes of a level below which a head is asked. Trees of up to 32 nodes of Hydra heads on the
# embedded model gain nothing from more, and a thousandth less from 3.
WIDTH = 4


@dataclass(frozen=True)
class Grown:
    """Trees that were grown, nodes sorted by depth.

    Attributes:
        parents: [B, N], -1 for the root.
        tokens: [B, N], the root first.
        values: [B, N], the logarithm of the probability of each node's path.
    """

    parents: Tensor
    tokens: Tensor
    values: Tensor


class DynamicSequentialDrafter:
    """Fills the tree that sequential heads themselves find most probable, per row and step.

    The guesses are a function of the prefix, so sample-and-walk stays exact.

    Args:
        heads: sequential ones.
        output: the base model's output layer, which shared heads go through.
        embed: the base model's input embedding, for heads that read tokens through it; takes and
            returns tensors on the heads' device.
        num_nodes: N of every tree, root included.
        max_depth: deepest node; None is the number of heads.
        num_ranks: guesses per node to choose from.
        temperatures: one per head: its logits are divided by it; None leaves them.
        width: of every level only the so many most valuable nodes may have children.

    Raises:
        ValueError: if a number is out of range, or the number of temperatures is not that of heads.
    """

    deterministic = True

    def __init__(
        self,
        heads: Heads,
        output: OutputLayer,
        embed: Embed | None,
        num_nodes: int,
        *,
        max_depth: int | None = None,
        num_ranks: int = NUM_RANKS,
        temperatures: Sequence[float] | None = None,
        width: int = WIDTH,
    ) -> None:
        shape = GrownShape.of(heads, num_nodes, max_depth, num_ranks, temperatures)
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self.heads, self.output = heads, output
        self.num_nodes, self.max_depth = num_nodes, shape.max_depth
        self.num_ranks, self.width = shape.num_ranks, width
        self._scales = shape.scales
        self.taps = heads.taps
        self._follower = Follower(heads, output, embed)
        self._steps = heads.steps(output, embed, shape.max_depth)

    def steps(self) -> Steps:
        """Return the heads as they are now."""
        return self._steps()

    def start(self, prefill: Prefill) -> HeadsState:
        """Start from the prompt's last hidden state."""
        return self._follower.start(prefill, self.steps())

    @torch.no_grad()
    def propose(self, state: HeadsState) -> Candidates:
        """One pass of a head per level, as far down as it may pay."""
        root = state.root
        walk = state.predict.begin(state.hidden, root.to(self._follower.device), state.memory)
        if state.hidden.device.type in HOSTS:
            parents, tokens = self._grow_on_host(walk, root.tolist())
            tree = RowTrees.from_lists(parents, self.max_depth)
            return Candidates(torch.tensor(tokens), tree)
        grown = self.grow(walk)
        tree = RowTrees.from_parents(grown.parents.to(root.device), self.max_depth)
        return Candidates(grown.tokens.to(root.device), tree)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        return self._follower.observe(state, result)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        return self._follower.select(state, rows)

    def _guesses(self, walk: Walk) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and token ids of the best guesses at the nodes, [B, n, R]."""
        logits = walk.logits().float()
        if self._scales is not None and self._scales[walk.depth] != 1:
            logits = logits * self._scales[walk.depth]
        log_probs, places = best_guesses(logits, self.num_ranks)
        return log_probs, self.heads.token_ids(places)

    @torch.no_grad()
    def grow(self, walk: Walk) -> Grown:
        """Grow trees; shapes depend on the arguments' shapes only, nothing waits for the device.

        Args:
            walk: at the roots.
        """
        tokens = [walk.tokens]
        values = torch.zeros_like(tokens[0], dtype=torch.float)  # of the nodes that are asked
        of_levels, below = [values], [torch.zeros_like(tokens[0])]
        for depth in range(self.max_depth):
            log_probs, guesses = self._guesses(walk)
            extended = (values[..., None] + log_probs).flatten(1)
            size = min(self.num_nodes - 1 - depth, extended.shape[1])
            best, flat = extended.topk(size, dim=1)
            of_levels.append(best)
            below.append(flat)  # (place of the parent in its level) * R + rank
            tokens.append(guesses.flatten(1).gather(1, flat))
            if depth + 1 < self.max_depth:
                values = best[:, : self.width]
                parents = flat[:, : self.width] // self.num_ranks
                walk.descend(tokens[-1][:, : self.width], parents)
        kept, parents, _ = keep_best(of_levels, below, self.num_ranks, self.num_nodes)
        return Grown(
            parents,
            torch.cat(tokens, dim=1).gather(1, kept),
            torch.cat(of_levels, dim=1).gather(1, kept),
        )

    def _grow_on_host(
        self, walk: Walk, roots: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Grow the same trees in Python, and stop where no node can come among the best any more.

        Returns:
            parents and tokens, per row.
        """
        rows = [GrowingRow(root, self.num_nodes) for root in roots]
        for depth in range(self.max_depth):
            log_probs, guesses = (each.tolist() for each in self._guesses(walk))
            for row, of_row, tokens in zip(rows, log_probs, guesses, strict=True):
                row.extend(depth, of_row, tokens, self.width)
            widest = max(len(row.asked) for row in rows)
            if widest == 0 or depth + 1 == self.max_depth:
                break
            # rows that ask at fewer nodes ask at one of them, or anywhere, once more
            asked = [[(each.above, each.token) for each in row.asked] or [(0, 0)] for row in rows]
            table = torch.tensor([each + each[:1] * (widest - len(each)) for each in asked])
            walk.descend(table[..., 1], table[..., 0])
        trees = [row.tree() for row in rows]
        return [parents for parents, _ in trees], [tokens for _, tokens in trees]


class _Asked(NamedTuple):
    """A node below which a head is asked.

    Attributes:
        value: logarithm of its path's probability.
        number: its place in the row's list of nodes, from 1 on; 0 is the root.
        above: the place of its parent among those that were asked before.
        token: its own.
    """

    value: float
    number: int
    above: int
    token: int


class GrowingRow:
    """One row's tree while it grows on the host, a level at a time.

    Attributes:
        asked: the nodes below which is asked next, the most valuable of the last level.
    """

    def __init__(self, root: int, num_nodes: int) -> None:
        self.root, self.most = root, num_nodes - 1
        self.asked = [_Asked(0.0, 0, 0, root)]
        # (minus the value, depth, place in the level, the parent's number, token), level by level
        self.found: list[tuple[float, int, int, int, int]] = []
        self.best: list[float] = []  # the values of the best nodes so far, negative, ascending

    def extend(
        self,
        depth: int,
        log_probs: Sequence[Sequence[float]],
        tokens: Sequence[Sequence[int]],
        width: int,
    ) -> None:
        """Add the best of the next level, and choose below which of them to ask."""
        full = len(self.best) == self.most
        level: list[tuple[float, int, int]] = []  # minus the value, place of the parent, rank
        for place, asked in enumerate(self.asked):
            for rank, log_prob in enumerate(log_probs[place]):
                negative = -asked.value - log_prob
                if full and negative >= self.best[-1]:
                    break
                level.append((negative, place, rank))
        level.sort()
        del level[self.most - depth :]
        first = len(self.found) + 1
        self.found += [
            (negative, depth, place, self.asked[above].number, tokens[above][rank])
            for place, (negative, above, rank) in enumerate(level)
        ]
        self.best = sorted(self.best + [each[0] for each in level])[: self.most]
        # where the tree is full, children must be worth more than its last node, and so must they
        bar = self.best[-1] if len(self.best) == self.most else math.inf
        self.asked = [
            _Asked(-negative, first + place, above, tokens[above][rank])
            for place, (negative, above, rank) in enumerate(level[:width])
            if negative < bar
        ]

    def tree(self) -> tuple[list[int], list[int]]:
        """Return parents and tokens of the best nodes, sorted by depth."""
        order = sorted(range(len(self.found)), key=self.found.__getitem__)
        kept = sorted(order[: self.most])
        place = {0: 0} | {index + 1: node for node, index in enumerate(kept, start=1)}
        parents = [-1, *(place[self.found[index][3]] for index in kept)]
        return parents, [self.root, *(self.found[index][4] for index in kept)]


StaticDrafter = HeadsDrafter | SequentialDrafter
DynamicDrafter = DynamicHeadsDrafter | DynamicSequentialDrafter


def static_drafter(
    base: PreTrainedModel, heads: Heads, output: OutputLayer, tree: Tree
) -> StaticDrafter:
    """Return a drafter that fills ``tree`` at every step.

    Args:
        base: the base model, whose input embedding some sequential heads read tokens through.
        heads: of any kind.
        output: the base's output layer.
        tree: at most as deep as there are heads.

    Raises:
        ValueError: if the tree is deeper than the heads or wider than the tokens they can guess.
    """
    if heads.sequential:
        return SequentialDrafter(heads, output, embedding(base, heads), tree)
    return HeadsDrafter(heads, output, tree)


def dynamic_drafter(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    num_nodes: int,
    *,
    max_depth: int | None = None,
    num_ranks: int = NUM_RANKS,
    temperatures: Sequence[float] | None = None,
) -> DynamicDrafter:
    """Return a drafter that grows a tree of ``num_nodes`` nodes anew at every step.

    Args:
        base: the base model.
        heads: of any kind.
        output: the base's output layer.
        num_nodes: N of every tree, root included.
        max_depth: deepest node; None is the number of heads.
        num_ranks: guesses per node to choose from.
        temperatures: one per head; its logits are divided by it.

    Raises:
        ValueError: if a number is out of range, or the number of temperatures is not that of heads.
    """
    if heads.sequential:
        return DynamicSequentialDrafter(
            heads,
            output,
            embedding(base, heads),
            num_nodes,
            max_depth=max_depth,
            num_ranks=num_ranks,
            temperatures=temperatures,
        )
    return DynamicHeadsDrafter(
        heads,
        output,
        num_nodes,
        max_depth=max_depth,
        num_ranks=num_ranks,
        temperatures=temperatures,
    )


def embedding(base: PreTrainedModel, heads: Heads) -> Embed | None:
    """Return the base's input embedding as a function that may be called where the heads lie.

    None where the heads do not read tokens through it.
    """
    if not heads.needs_embedding:
        return None
    module, place = base.get_input_embeddings(), input_device(base)
    if module is None:
        raise ValueError(f"{type(base).__name__} has no input embedding that the heads could use")

    def embed(tokens: Tensor) -> Tensor:
        found: Tensor = module(tokens.to(place))
        return found.to(tokens.device)

    return embed


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
