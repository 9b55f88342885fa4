"""A model's forward passes: read tokens, or verify a tree, behind what the cache holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.grouped_attention import grouped_attention
from specheads.kv_cache import TreeCache
from specheads.models.base import context_length, input_device
from specheads.models.compiled import check_compilable, run_compiled
from specheads.models.thresholds import reads_anew, thresholds
from specheads.tree import RowTrees, Tree, batched
from specheads.tree_mask import tree_attention


class ModelPass:
    """Runs the base model, or a draft model, over new tokens of every row of a cache.

    Args:
        model: the model.
        cache: empty, or holding the rows' texts so far.
        chain_only: the model masks by itself, so that no mask of ours may be asked for: one row,
            and a chain in place of a tree.
        compiled: run all passes but the prefill compiled; the first of each shape takes a while.

    Raises:
        ValueError: for a model that cannot be compiled with masks of ours.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        *,
        chain_only: bool = False,
        compiled: bool = False,
    ) -> None:
        if compiled:
            check_compilable(model, chain_only=chain_only)
        self.model = model
        self.cache = cache
        self.chain_only = chain_only
        self.compiled = compiled
        self.device = input_device(model)
        self._context = context_length(model)
        self._thresholds = thresholds(model)

    def align(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Keep of the cache what plain decoding of ``texts`` [B] would have in it; see its align.

        Keys that were made on another side of a threshold than the prompts are read again.
        """
        known, found = self.cache.align(texts), self._thresholds
        if found is None or not any(known):
            return known
        lengths = [len(text) for text in texts]
        # where rows end apart, the padding behind the longest one reaches this far
        last = max(known) + max(n - k for n, k in zip(lengths, known, strict=True)) - 1
        if found.period:  # which queries are scaled by; keys are the same on all sides
            stale = len(set(known)) > 1 and found.side(min(known)) != found.side(last)
        else:
            side = found.side(max(lengths) - 1)
            stale = self.cache.sides != {side} or found.side(last) != side
        if stale:
            known = [0] * len(texts)
            self.cache.shorten(known)
        return known

    def within(self, budgets: Sequence[int]) -> list[int]:
        """Return how many of ``budgets`` tokens per row a step may give this side of a threshold.

        A step's guesses stand behind each row's end, beginning with its root.
        """
        if self._thresholds is None:
            return list(budgets)
        limits = []
        for budget, length in zip(budgets, self.cache.lengths, strict=True):
            end = self._thresholds.after(length)
            limits.append(budget if end is None else min(budget, end - length))
        return limits

    @property
    def num_slots(self) -> int | None:
        """How many nodes a step may have where slots are taken for positions; None elsewhere."""
        found, longest = self._thresholds, self.cache.rows.longest
        if found is None or not found.period or self.chain_only:
            return None
        end = found.after(longest)
        return None if end is None else end - longest

    def reaches_threshold(self, num_tokens: int) -> bool:
        """Tell whether the next tokens of the longest row lie on several sides of a threshold."""
        if self._thresholds is None:
            return False
        longest = self.cache.rows.longest
        end = self._thresholds.after(longest)
        return end is not None and longest + num_tokens > end

    def starts_over(self) -> bool:
        """Tell whether ``generate`` would read the only row's text anew before its next token."""
        found, lengths = self._thresholds, self.cache.lengths
        return (
            found is not None
            and len(lengths) == 1
            and lengths[0] in found.starts
            and reads_anew(self.model, lengths[0])
        )

    def read_anew(self, text: Sequence[int]) -> Tensor:
        """Read the only row from its start; return the logits [1, V] after its last token."""
        self.cache.shorten([0])
        return self.read(torch.tensor([text], device=self.device), [len(text)])

    def read_next(
        self, tokens: Tensor, counts: Sequence[int], text: Callable[[], Sequence[int]]
    ) -> Tensor:
        """Do what :meth:`read` does, as ``generate`` does it, which may start over.

        Args:
            tokens: [B, T].
            counts: per row.
            text: returns the whole text of the first row, these tokens included.
        """
        return self.read_anew(text()) if self.starts_over() else self.read(tokens, counts)

    def _note_side(self, num_tokens: int) -> None:
        """Remember on which side the keys are made, to which :meth:`align` holds later texts."""
        cache, found = self.cache, self._thresholds
        if found is None:
            return
        if not cache.rows.longest:
            cache.sides.clear()
        cache.sides.add(found.side(cache.rows.longest + num_tokens - 1))

    def read(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Read the first ``counts[b]`` tokens of each row; return the logits after them.

        Args:
            tokens: [B, T], right-padded.
            counts: per row, at most T; 0 leaves the row as it is, and its logits mean nothing.

        Returns:
            [B, V].
        """
        num_rows, num_tokens = tokens.shape
        cache = self.cache
        cache.reserve(num_rows, num_tokens)
        self._note_side(num_tokens)
        if self.compiled and num_tokens == 1 and cache.layers:
            logits = self._run_compiled(tokens, Tree.chain(0))[:, -1]
            cache.extend(counts)
            return logits
        last = [max(count, 1) - 1 for count in counts]
        kept = sorted(set(last))
        whole = kept == [num_tokens - 1]
        ahead = torch.arange(num_tokens, device=self.device)[None]
        # rows that end together see each other's padding in no way: it comes after all they have
        ragged = not cache.rows.uniform
        with masked(None, cache) if ragged else contextlib.nullcontext():
            logits = self.model(
                input_ids=tokens.to(self.device),
                position_ids=self._positions(ahead),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if whole else torch.tensor(kept, device=self.device),
            ).logits
        cache.extend(counts)
        if whole:
            return logits[:, -1]
        if logits.shape[1] == len(kept):  # else the model has returned them all
            last = [kept.index(each) for each in last]
        rows = torch.arange(num_rows, device=logits.device)
        return logits[rows, torch.tensor(last, device=logits.device)]

    def verify(self, tokens: Tensor, tree: Tree | RowTrees) -> Tensor:
        """Run the model over all nodes at once; the cache is to be committed after.

        Args:
            tokens: [B, N]; negative ones are padding.
            tree: their shape.

        Returns:
            Logits [B, N, V].
        """
        self.cache.reserve(*tokens.shape)
        self._note_side(1)
        if self.compiled:
            return self._run_compiled(tokens, tree)
        # a root alone behind rows of one length is a plain step
        plain = self.chain_only or (tree.num_nodes == 1 and self.cache.rows.uniform)
        with contextlib.nullcontext() if plain else masked(tree, self.cache):
            logits: Tensor = self.model(
                input_ids=tokens.clamp(min=0).to(self.device),
                position_ids=self._node_positions(tree),
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        return logits

    def _run_compiled(self, tokens: Tensor, tree: Tree | RowTrees) -> Tensor:
        tokens = tokens.clamp(min=0).to(self.device)
        return run_compiled(self.model, self.cache, tokens, self._node_positions(tree), tree)

    def _node_positions(self, tree: Tree | RowTrees) -> Tensor:
        """Return the position ids [1 or B, N] of a tree; those of forbidden guesses may be less."""
        positions = self._positions(batched(tree, tree.depths).to(self.device))
        if self._thresholds is None or not self.reaches_threshold(tree.max_depth + 1):
            return positions
        # a guess beyond a threshold is forbidden, but would decide for the others of its pass
        end = self._thresholds.after(self.cache.rows.longest)
        assert end is not None
        return positions.clamp(max=end - 1)

    def _positions(self, ahead: Tensor) -> Tensor:
        """Return the position ids of tokens that stand ``ahead`` [1 or B, T] of their row's end."""
        rows = self.cache.rows
        positions = ahead + (rows.longest if rows.uniform else rows.on(self.device)[:, None])
        if self._context is None or rows.longest + ahead.shape[1] <= self._context:
            return positions
        # padding, and guesses that the limit forbids: whatever is said of them is ignored, but a
        # learned embedding has no row for positions outside the context
        return positions.clamp(max=self._context - 1)


@contextlib.contextmanager
def masked(tree: Tree | RowTrees | None, cache: TreeCache) -> Iterator[None]:
    """While open, a pass attends along ``tree``, and its mask does not make attention expensive."""
    with tree_attention(tree, cache), grouped_attention():
        yield


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of tokens as [B, T], padded with 0 on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)


def replay(model: PreTrainedModel, ids: Tensor, num_prompt_tokens: int) -> Tensor:
    """Return the logits [1, V] after ``ids`` [1, T] to the last bit as plain decoding sees them."""
    base = ModelPass(model, TreeCache())
    logits = base.read(ids[:, :num_prompt_tokens], [num_prompt_tokens])
    for i in range(num_prompt_tokens, ids.shape[1]):
        so_far = ids[:, : i + 1]
        logits = base.read_next(so_far[:, i:], [1], so_far[0].tolist)
    return logits


@contextlib.contextmanager
def undisturbed(*modules: nn.Module) -> Iterator[None]:
    """Put modules into eval mode; give every submodule its mode back, and torch its randomness."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    places = {tensor.device for module in modules for tensor in module.parameters()}
    with torch.random.fork_rng([place for place in places if place.type == "cuda"]):
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for part, mode in modes:
                part.training = mode
