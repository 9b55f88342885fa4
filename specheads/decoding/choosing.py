"""How the base model's tokens are chosen at the nodes of a tree, near-ties included.

A choice is an argmax of scores: logits, processed with the node's own prefix, plus the noise of the
node's position. Where the two best scores are closer than rounding, plain decoding's logits decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specheads.decoding.plain import process
from specheads.decoding.sampling import Sampler
from specheads.drafters.contract import Candidates

# processors that look at the logits alone: one call serves all nodes of a tree
PREFIX_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass(frozen=True)
class Chooser:
    """Turns logits into scores whose argmax is the base model's token.

    Attributes:
        sampler: greedy, or with noise.
        logits_processor: evaluated at each node with that node's own prefix.
        replay: sequence [1, T] to the logits [1, V] of plain decoding, to settle near-ties with;
            None leaves those to rounding.
    """

    sampler: Sampler
    logits_processor: LogitsProcessorList | None = None
    replay: Callable[[Tensor], Tensor] | None = None

    def scores_at_nodes(self, candidates: Candidates, logits: Tensor, ids: Tensor) -> Tensor:
        """Return scores [B, N, V]; off the accepted path they may be the bare logits.

        Args:
            candidates: the tree.
            logits: [B, N, V].
            ids: [B, T], the sequence so far, the root included.
        """
        tokens, processors = candidates.tokens, self.logits_processor
        if processors and not all(isinstance(p, PREFIX_FREE) for p in processors):
            return self._scores_on_path(candidates, logits, ids)
        if processors:
            rows = process(processors, tokens.reshape(-1, 1), logits.flatten(0, 1))
            logits = rows.view_as(logits)
        root_position = torch.full((ids.shape[0],), ids.shape[1] - 1, device=ids.device)
        return self.sampler.tree_scores(logits, candidates.tree, root_position)

    def _scores_on_path(self, candidates: Candidates, logits: Tensor, ids: Tensor) -> Tensor:
        """Go down node by node, as only then the prefix is known."""
        tree = candidates.tree
        tokens, parents = candidates.tokens[0].tolist(), tree.parents.tolist()
        scores = logits.float()
        here = [0]  # the nodes whose prefix is `ids`: several if equal siblings were not merged
        while here:
            at_node = logits[:, here[0]]
            row = self._scores_after(ids, at_node)
            if self.replay is not None and bool(self.sampler.near_ties(at_node, row).any()):
                row = self.settle(ids)
            scores[:, here] = row[:, None].float()
            token = row.argmax(-1)
            ids = torch.cat([ids, token[:, None]], dim=1)
            drawn = int(token)
            here = [i for i in range(tree.num_nodes) if parents[i] in here and tokens[i] == drawn]
        return scores

    def _scores_after(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return scores [B, V] after ``ids`` [B, T] from logits [B, V]."""
        if self.logits_processor:
            logits = process(self.logits_processor, ids, logits)
        position = torch.full((ids.shape[0],), ids.shape[1], device=ids.device)
        return self.sampler.scores(logits, position)

    def near_ties(self, logits: Tensor, scores: Tensor, path: Tensor) -> Tensor:
        """Tell which nodes of ``path`` [B, D+1] are to be settled; [B, D+1] bool."""
        if self.replay is None:
            return torch.zeros_like(path, dtype=torch.bool)
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        nodes = path.clamp(min=0)
        tied = self.sampler.near_ties(logits[rows, nodes], scores[rows, nodes])
        return tied & (path >= 0)

    def settle(self, ids: Tensor) -> Tensor:
        """Return scores [B, V] after ``ids`` from plain decoding's logits, beyond any doubt."""
        assert self.replay is not None
        scores = self._scores_after(ids, self.replay(ids))
        return scores.scatter(-1, scores.argmax(-1, keepdim=True), float("inf"))
