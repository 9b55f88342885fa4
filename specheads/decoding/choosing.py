"""How the base model's tokens are chosen at the nodes of a tree, near-ties included.

A choice is an argmax of scores: logits, processed with the node's own prefix, plus the noise of the
node's position. Where the two best scores are closer than rounding, plain decoding's logits decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specheads.decoding.forward import replay
from specheads.decoding.result import Output
from specheads.decoding.sampling import Sampler
from specheads.drafters.contract import Candidates

EXACT_DTYPES = (torch.float32, torch.float64)
# processors that look at the logits alone: one call serves all nodes of a tree
PREFIX_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


def process(logits_processor: LogitsProcessorList, ids: Tensor, logits: Tensor) -> Tensor:
    """Apply processors to logits [R, V] after the tokens [R, T]."""
    return logits_processor(cast(LongTensor, ids), cast(FloatTensor, logits.float()))


@dataclass(frozen=True)
class Chooser:
    """Turns logits into scores whose argmax is the base model's token.

    Attributes:
        sampler: greedy, or with noise.
        output: the texts so far.
        logits_processor: evaluated at each node with that node's own prefix.
        replay: text [1, T] and its number of prompt tokens to the logits [1, V] of plain decoding,
            to settle near-ties with; None leaves those to rounding.
    """

    sampler: Sampler
    output: Output
    logits_processor: LogitsProcessorList | None = None
    replay: Callable[[Tensor, int], Tensor] | None = None

    @property
    def _prefix_free(self) -> bool:
        return all(isinstance(p, PREFIX_FREE) for p in self.logits_processor or ())

    def next_tokens(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        """Choose the token after the texts of ``rows`` [B] from logits [B, V]."""
        scores = self._scores_after(logits, rows)
        tokens = scores.argmax(-1)
        if self.replay is None:
            chosen: list[int] = tokens.tolist()
            return chosen
        chosen, tied = torch.stack([tokens, self.sampler.near_ties(logits, scores)]).tolist()
        for i, row in enumerate(rows):
            if tied[i] and self.output.budget(row):
                chosen[i] = int(self.settle(row).argmax())
        return chosen

    def scores_at_nodes(
        self, candidates: Candidates, logits: Tensor, rows: Sequence[int]
    ) -> Tensor:
        """Return scores [B, N, V]; off the accepted path they may be the bare logits.

        Args:
            candidates: the trees.
            logits: [B, N, V].
            rows: [B], whose texts the trees continue.
        """
        if not self._prefix_free:
            each = [self._scores_on_path(candidates, logits, i, row) for i, row in enumerate(rows)]
            return torch.cat(each)
        if self.logits_processor:
            unused = candidates.tokens.reshape(-1, 1)
            processed = process(self.logits_processor, unused, logits.flatten(0, 1))
            logits = processed.view_as(logits)
        roots = [self.output.length(row) - 1 for row in rows]
        positions = torch.tensor(roots, device=logits.device)
        return self.sampler.tree_scores(logits, candidates.tree, positions, rows)

    def _scores_on_path(
        self, candidates: Candidates, logits: Tensor, index: int, row: int
    ) -> Tensor:
        """Go down node by node, as only then the prefix is known; [1, N, V]."""
        parents = candidates.tree.parents
        above = (parents if parents.dim() == 1 else parents[index]).tolist()
        tokens = candidates.tokens[index].tolist()
        scores = logits[index : index + 1].float()
        more: list[int] = []
        here = [0]  # the nodes with this prefix: several if equal siblings were not merged
        while here and self.output.budget(row):
            at_node = logits[index : index + 1, here[0]]
            found = self._scores_after(at_node, [row], more)
            if self.replay is not None and bool(self.sampler.near_ties(at_node, found).any()):
                found = self.settle(row, more)
            scores[:, here] = found[:, None].float()
            drawn = int(found.argmax(-1))
            more.append(drawn)
            here = [i for i, token in enumerate(tokens) if above[i] in here and token == drawn]
        return scores

    def _scores_after(
        self, logits: Tensor, rows: Sequence[int], more: Sequence[int] = ()
    ) -> Tensor:
        """Return scores [B, V] after the texts of ``rows`` and ``more`` from logits [B, V]."""
        if self.logits_processor and self._prefix_free:
            unused = torch.zeros(len(rows), 1, dtype=torch.long, device=logits.device)
            logits = process(self.logits_processor, unused, logits)
        elif self.logits_processor:
            processed = [
                process(self.logits_processor, self.output.ids(row, more), logits[i : i + 1])
                for i, row in enumerate(rows)
            ]
            logits = torch.cat(processed)
        lengths = [self.output.length(row) + len(more) for row in rows]
        return self.sampler.scores(logits, torch.tensor(lengths, device=logits.device), rows)

    def near_ties(self, logits: Tensor, scores: Tensor, path: Tensor) -> Tensor:
        """Tell which nodes of ``path`` [B, D+1] are to be settled; [B, D+1] bool."""
        if self.replay is None:
            return torch.zeros_like(path, dtype=torch.bool)
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        nodes = path.clamp(min=0)
        tied = self.sampler.near_ties(logits[rows, nodes], scores[rows, nodes])
        return tied & (path >= 0)

    def settle(self, row: int, more: Sequence[int] = ()) -> Tensor:
        """Return scores [1, V] after a text from plain decoding's logits, beyond any doubt."""
        assert self.replay is not None
        self.output.rows[row].num_replays += 1
        logits = self.replay(self.output.ids(row, more), len(self.output.prompts[row]))
        scores = self._scores_after(logits, [row], more)
        return scores.scatter(-1, scores.argmax(-1, keepdim=True), float("inf"))


def make_chooser(
    model: PreTrainedModel,
    output: Output,
    sampler: Sampler | None,
    logits_processor: LogitsProcessorList | None,
    *,
    exact: bool,
) -> Chooser:
    """Return a chooser; ``exact`` settles near-ties where the dtype is precise enough for it."""
    settle = partial(replay, model) if exact and model.dtype in EXACT_DTYPES else None
    return Chooser(sampler or Sampler(), output, logits_processor, settle)
