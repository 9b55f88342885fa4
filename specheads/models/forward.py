"""A model's forward passes: read tokens, or verify a tree, behind what the cache holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.grouped_attention import grouped_attention
from specheads.kv_cache import TreeCache
from specheads.models.base import context_length, input_device
from specheads.models.compiled import check_compilable, run_compiled
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
        if self.compiled:
            return self._run_compiled(tokens, tree)
        # a root alone behind rows of one length is a plain step
        plain = self.chain_only or (tree.num_nodes == 1 and self.cache.rows.uniform)
        with contextlib.nullcontext() if plain else masked(tree, self.cache):
            logits: Tensor = self.model(
                input_ids=tokens.clamp(min=0).to(self.device),
                position_ids=self._positions(batched(tree, tree.depths).to(self.device)),
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        return logits

    def _run_compiled(self, tokens: Tensor, tree: Tree | RowTrees) -> Tensor:
        depths = batched(tree, tree.depths).to(self.device)
        tokens = tokens.clamp(min=0).to(self.device)
        return run_compiled(self.model, self.cache, tokens, self._positions(depths), tree)

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
        logits = base.read(ids[:, i : i + 1], [1])
    return logits
