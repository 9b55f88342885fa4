"""Trees that a draft model grows at every step, out of its own probabilities.

A node's value is the product of the probabilities along its path. What stands below a node is known
only once the draft model has read it, so trees are grown level by level, as EAGLE-2 does
(arXiv:2406.16858): of every level the most valuable nodes are read, and of all that was found the
most valuable nodes are proposed. The guesses are a function of the prefix.

The draft model's cache holds certain text only. A level is read by verifying the nodes read so far
once more with the new ones: they are few (those with children), and one pass is one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.draft_cache import DraftCache
from specheads.drafters.dynamic import NUM_RANKS, best_guesses
from specheads.drafters.grown import GrowingRow
from specheads.models.base import input_embedding
from specheads.sampling import Sampler
from specheads.tree import RowTrees, Tree
from specheads.tree_support import tree_support

WIDTH = 4  # nodes of a level that the draft model reads
MAX_DEPTH = 6


@dataclass(frozen=True)
class DraftRows:
    """Where the rows of a batch stand, for drafters that let a draft model read trees.

    Attributes:
        cache: the draft model's view of the texts, root included.
        root: [B], the last certain token.
        rows: which rows of the batch these are.
        sampler: how the base model's tokens are drawn.
        vocab_size: V of the base model; 0: that of the draft model.
    """

    cache: DraftCache
    root: Tensor
    rows: list[int]
    sampler: Sampler
    vocab_size: int

    @staticmethod
    def start(
        draft: PreTrainedModel, prefill: Prefill, previous: DraftCache | None = None
    ) -> DraftRows:
        """Start behind the prompt; nothing is read yet.

        Args:
            draft: the draft model.
            prefill: as the drafter got it.
            previous: of the text before, see :meth:`DraftCache.start`.
        """
        cache = DraftCache.start(draft, prefill, previous)
        rows = list(range(len(prefill.ids)))
        return DraftRows(cache, prefill.root, rows, prefill.sampler, prefill.vocab_size)

    def observe(self, result: StepResult) -> DraftRows:
        """Append the tokens gained."""
        self.cache.follow(result.new_tokens)
        return replace(self, root=result.next_root)

    def select(self, rows: Tensor) -> DraftRows:
        """Keep some rows."""
        self.cache.select(rows)
        kept = [self.rows[row] for row in rows.tolist()]
        return replace(self, root=self.root[rows.to(self.root.device)], rows=kept)

    def limits(self, max_depth: int) -> list[int]:
        """Return per row how deep its guesses may be: the draft model has positions for no more."""
        if (room := self.cache.room) is None:
            return [max_depth] * len(self.rows)
        # the deepest guess is not read
        return [max(0, min(max_depth, room - len(text) + 1)) for text in self.cache.texts]

    def shared(self, logits: Tensor) -> Tensor:
        """Bring the draft model's logits [..., V'] to the base model's tokens, [..., V]."""
        if not self.vocab_size or self.vocab_size == logits.shape[-1]:
            return logits
        missing = self.vocab_size - logits.shape[-1]  # negative: what is too much is cut
        return F.pad(logits, (0, missing), value=float("-inf"))


def check_reads_trees(draft: PreTrainedModel) -> None:
    """Refuse a draft model that cannot read a tree.

    Raises:
        ConfigError: with the reason.
    """
    support = tree_support(draft)
    if support.kind != "tree":
        raise ConfigError(f"a draft tree needs a draft model that reads trees: {support.reason}")


class DraftTreeDrafter:
    """Grows the tree that a draft model finds most probable, per row and step.

    Where the base model samples at a temperature, so do the draft model's probabilities have it.

    Args:
        draft: the draft model, in eval mode; of the base model's token ids.
        num_nodes: N of every tree, root included.
        max_depth: deepest node; each level takes a pass of the draft model.
        num_ranks: guesses per node to choose from.
        width: of every level only the so many most valuable nodes may have children.
        min_gain: a row's tree ends where its next level could not gain so many tokens, the sum of
            the probabilities of the paths that it would continue: what a pass of the draft model
            costs, in plain steps, is worth giving. 0 always goes as deep as it may.

    Raises:
        ValueError: if a number is out of range.
        ConfigError: for a draft model that cannot read a tree.
    """

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(
        self,
        draft: PreTrainedModel,
        num_nodes: int,
        *,
        max_depth: int = MAX_DEPTH,
        num_ranks: int = NUM_RANKS,
        width: int = WIDTH,
        min_gain: float = 0.0,
    ) -> None:
        if num_nodes < 2:
            raise ValueError(f"num_nodes must be at least 2, got {num_nodes}")
        for name, number in (("max_depth", max_depth), ("num_ranks", num_ranks), ("width", width)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if min_gain < 0:
            raise ValueError(f"min_gain must be at least 0, got {min_gain}")
        check_reads_trees(draft)
        self.draft, self.num_nodes = draft, num_nodes
        self.max_depth, self.width = min(max_depth, num_nodes - 1), width
        self.num_ranks = min(num_ranks, num_nodes - 1)
        self.min_gain = min_gain
        self._latest: DraftCache | None = None  # a conversation may go on

    def start(self, prefill: Prefill) -> DraftRows:
        """Start behind the prompt; the draft model reads it with the first guesses."""
        state = DraftRows.start(self.draft, prefill, self._latest)
        self._latest = state.cache
        return state

    @torch.inference_mode()
    def propose(self, state: DraftRows) -> Candidates:
        """One pass of the draft model per level, as far down as it may pay."""
        sampler = state.sampler
        scale = 1 / sampler.temperature if sampler.temperature else 1.0
        limits = state.limits(self.max_depth)
        if not any(limits):
            return Candidates(state.root[:, None], Tree.chain(0).to(state.root.device))
        reading = Reading(state.cache)
        grown = [GrowingRow(text[-1], self.num_nodes) for text in state.cache.texts]
        logits = state.cache.sync()[:, None]
        for depth in range(max(limits)):
            logits = state.shared(logits).float() * scale
            best = best_guesses(logits, min(self.num_ranks, logits.shape[-1]))
            log_probs, guesses = (each.tolist() for each in best)
            for row, limit, of_row, tokens in zip(grown, limits, log_probs, guesses, strict=True):
                if depth < limit:
                    row.extend(depth, of_row, tokens, self.width)
                gain = sum(math.exp(each.value) for each in row.asked)
                if depth + 1 >= limit or gain < self.min_gain:
                    row.asked = []
            widest = max(len(row.asked) for row in grown)
            if widest == 0:
                break
            # rows that ask at fewer nodes ask at one of them, or anywhere, once more
            asked = [[(each.above, each.token) for each in row.asked] or [(0, 0)] for row in grown]
            logits = reading.ask([each + each[:1] * (widest - len(each)) for each in asked])
        return merged([row.tree() for row in grown], state.root)

    def observe(self, state: DraftRows, result: StepResult) -> DraftRows:
        """Append the tokens gained."""
        return state.observe(result)

    def select(self, state: DraftRows, rows: Tensor) -> DraftRows:
        """Keep some rows."""
        return state.select(rows)


def merged(trees: Sequence[tuple[list[int], list[int]]], root: Tensor) -> Candidates:
    """Return the rows' trees, parents and tokens each, as one; smaller ones are padded."""
    size = max(len(tokens) for _, tokens in trees)
    parents, tokens, max_depth = [], [], 0
    for above, guesses in trees:
        node, depth = len(above) - 1, 0
        while node:
            node, depth = above[node], depth + 1
        max_depth = max(max_depth, depth)
        missing = size - len(guesses)
        # beside its deepest node, so that nodes stay sorted by depth
        parents.append(above + [max(above[-1], 0)] * missing)
        tokens.append(guesses + [-1] * missing)
    if root.device.type == "cpu":
        tree = RowTrees.from_lists(parents, max_depth)
    else:
        tree = RowTrees.from_parents(torch.tensor(parents, device=root.device), max_depth)
    found = torch.tensor(tokens, device=root.device)
    found[:, 0] = root
    return Candidates(found, tree)


class Reading:
    """The nodes of this step's trees that the draft model has read, a tree per row.

    Args:
        cache: behind which they stand.
    """

    def __init__(self, cache: DraftCache) -> None:
        self._cache = cache
        self._tokens = [[text[-1]] for text in cache.texts]
        self._parents = [[-1] for _ in cache.texts]
        self._first, self._depth = 0, 0  # of the nodes that were asked last

    def ask(self, nodes: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
        """Go one level down; return the logits [B, n, V'] after its nodes.

        Args:
            nodes: per row n times the place of the parent among the nodes asked before, the root
                at first, and the token.
        """
        first, self._first = self._first, len(self._tokens[0])
        self._depth += 1
        for tokens, parents, new in zip(self._tokens, self._parents, nodes, strict=True):
            tokens += [token for _, token in new]
            parents += [first + place for place, _ in new]
        tree = RowTrees.from_lists(self._parents, self._depth)
        logits = verify_again(self._cache, torch.tensor(self._tokens), tree)
        return logits[:, self._first :]


def verify_again(cache: DraftCache, tokens: Tensor, tree: Tree | RowTrees) -> Tensor:
    """Return the logits [B, N, V'] at a tree whose root the cache holds as the last token.

    The cache is left as it was.

    Args:
        cache: the draft model's.
        tokens: [B, N], node 0 the last certain token.
        tree: their shape.
    """
    held = cache.forward.cache
    held.shorten([length - 1 for length in held.lengths])
    # the root may be a token that only the base model has
    known = input_embedding(cache.forward.model).shape[0]
    logits = cache.forward.verify(tokens.clamp(max=known - 1), tree)
    held.extend([1] * len(held.lengths))
    return logits
