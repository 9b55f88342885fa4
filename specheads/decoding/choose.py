"""How the base model's tokens are chosen at the nodes of a tree, near-ties included.

A choice is an argmax of scores: logits, processed with the node's own prefix, plus the noise of the
node's position. Where the two best scores are closer than rounding, plain decoding's logits decide,
and where rounding might move the best one, or a better one, across the edge of a cut (top-k, top-p,
min-p).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Tree
from specheads.decoding.processors import NO_PROCESSORS, RowProcessors, Rows
from specheads.decoding.result import Output
from specheads.drafters.contract import Candidates
from specheads.models.forward import replay
from specheads.models.support import tree_support
from specheads.verification.sampling import ROUNDING, Sampler, Survivors

EXACT_DTYPES = (torch.float32, torch.float64)


class Scored(NamedTuple):
    """The logits of some nodes on their way to scores, each [..., V].

    Attributes:
        before: after the processors that look at the text.
        processed: after all processors.
        scores: with temperature, cuts and noise.
    """

    before: Tensor
    processed: Tensor
    scores: Tensor

    def best(self) -> Tensor:
        """Return the tokens of the highest scores, [...], the first of equal ones."""
        # of 49,152 scores in 16 bits on a CPU, argmax takes five times as long
        return self.scores.max(-1).indices


@dataclass(frozen=True)
class Chooser:
    """Turns logits into scores whose argmax is the base model's token.

    Attributes:
        sampler: greedy, or with noise.
        processors: evaluated at each node with that node's own prefix.
        replay: a row's number and a text of it to the logits [1, V] of plain decoding after it, to
            settle near-ties with; None leaves those to rounding.
        rounding: of a difference of two logits, relative to the largest.
    """

    sampler: Sampler
    processors: RowProcessors = NO_PROCESSORS
    replay: Callable[[int, Sequence[int]], Tensor] | None = None
    rounding: float = ROUNDING

    def next_tokens(self, output: Output, logits: Tensor, numbers: Sequence[int]) -> list[int]:
        """Choose one token per row from logits [B, V] after their texts; it is not emitted yet.

        Args:
            output: the texts.
            logits: [B, V].
            numbers: [B], which rows.
        """
        rows = output.at(numbers)
        scored = self._after(logits, rows)
        if output.kept is not None:
            root = torch.zeros(len(numbers), 1, dtype=torch.long)
            output.keep(rows, root, logits[:, None], scored.processed[:, None], self.sampler)
        tokens = scored.best()
        if self.replay is None:
            return tokens.tolist()
        ties = self._near_ties(logits, scored.before, scored.scores, rows)
        chosen, tied = torch.stack([tokens, ties]).tolist()
        for i, (row, text, going) in enumerate(zip(*rows, strict=True)):
            if tied[i] and going:
                chosen[i] = int(self.settle(row, text).argmax())
        return chosen

    def at_nodes(self, candidates: Candidates, logits: Tensor, rows: Rows) -> Scored:
        """Score the trees; off the accepted path the scores may be those of bare logits.

        Args:
            candidates: the trees.
            logits: [B, N, V].
            rows: whose texts the trees continue.

        Returns:
            Of all nodes, [B, N, V].
        """
        if not self.processors.stateless and candidates.tree.num_nodes > 1:
            return self._on_paths(candidates, logits, rows)
        before, processed = self.processors.at_nodes(candidates, logits, rows)
        scores = self.sampler.tree_scores(processed, candidates.tree, rows.roots, rows.numbers)
        return Scored(before, processed, scores)

    def _on_paths(self, candidates: Candidates, logits: Tensor, rows: Rows) -> Scored:
        """Go down node by node, as only then it is known which prefixes will be."""
        every = Scored(*(logits.float().clone() for _ in Scored._fields))
        parents = candidates.tree.parents.expand_as(candidates.tokens).tolist()
        tokens_of = candidates.tokens.tolist()
        for i, (row, text, going) in enumerate(zip(*rows, strict=True)):
            prefix = list(text)
            here = [0]  # the nodes with this prefix: several if equal siblings were not merged
            alone = Rows([row], [prefix], [going])
            while here and going:
                at_node = logits[i : i + 1, here[0]]
                found = self._after(at_node, alone)
                tied = self.replay and self._near_ties(at_node, found.before, found.scores, alone)
                if tied:
                    found = found._replace(scores=self.settle(row, prefix))
                for whole, part in zip(every, found, strict=True):
                    whole[i, here] = part.float()
                drawn = int(found.best())
                prefix.append(drawn)
                here = [
                    node
                    for node, token in enumerate(tokens_of[i])
                    if parents[i][node] in here and token == drawn
                ]
        return every

    def _after(self, logits: Tensor, rows: Rows) -> Scored:
        """Return scores [B, V] after the texts of ``rows``."""
        tokens = torch.zeros(len(logits), 1, dtype=torch.long)  # the texts' last ones: not read
        roots = Candidates(tokens, Tree.chain(0).to(logits.device))
        scored = self.at_nodes(roots, logits[:, None], rows)
        return Scored(*(each[:, 0] for each in scored))

    def near_ties(self, logits: Tensor, scored: Scored, rows: Rows, path: Tensor) -> Tensor:
        """Tell which nodes of ``path`` [B, D+1] are to be settled; [B, D+1] bool."""
        if self.replay is None:
            return torch.zeros_like(path, dtype=torch.bool)
        each, nodes = torch.arange(path.shape[0], device=path.device)[:, None], path.clamp(min=0)
        before = scored.before[each, nodes] if self._cuts else None
        ties = self._near_ties(logits[each, nodes], before, scored.scores[each, nodes], rows)
        return ties & (path >= 0)

    @property
    def _cuts(self) -> bool:
        """Whether tokens are cut off; greedily the best is taken, which no cut removes."""
        sampler = self.sampler
        cut = sampler.top_k > 0 or sampler.top_p < 1 or self.processors.cut
        return cut and sampler.temperature > 0

    def _near_ties(
        self, logits: Tensor, before: Tensor | None, scores: Tensor, rows: Rows
    ) -> Tensor:
        """Tell it along paths [B, D+1, V], or of single nodes [B, V], that follow the texts.

        One whose best score is infinite has been settled.
        """
        sampler, processors = self.sampler, self.processors
        if before is None or not self._cuts:
            # a temperature among the processors enlarges rounding as the sampler's own does
            factor = processors.temperature
            logits = logits if factor == 1 else logits / factor
            return sampler.near_ties(logits, scores, rounding=self.rounding)
        left = Survivors(before, self.rounding * logits.abs().amax(-1, keepdim=True))
        processors.leave(left)
        left.temper(sampler.temperature)
        if sampler.top_k:
            left.top_k(sampler.top_k)
        if sampler.top_p < 1:
            left.top_p(sampler.top_p)
        bare = replace(sampler, temperature=1.0, top_k=0, top_p=1.0)
        along = left.scores if logits.dim() == 3 else left.scores[:, None]
        path = Tree.chain(along.shape[1] - 1).to(logits.device)
        noised = bare.tree_scores(along, path, rows.roots, rows.numbers).view_as(left.scores)
        return left.undecided(noised) & ~scores.amax(-1).isposinf()

    def settle(self, row: int, text: Sequence[int]) -> Tensor:
        """Return scores [1, V] after a text from plain decoding's logits, beyond any doubt."""
        assert self.replay is not None
        scores = self._after(self.replay(row, text), Rows([row], [text], [True])).scores
        return scores.scatter(-1, scores.argmax(-1, keepdim=True), float("inf"))


def make_chooser(
    model: PreTrainedModel,
    output: Output,
    sampler: Sampler | None,
    processors: RowProcessors = NO_PROCESSORS,
    *,
    exact: bool = True,
) -> Chooser:
    """Return a chooser whose replays are counted.

    Args:
        model: the base model.
        output: counts the replays.
        sampler: greedy if None.
        processors: of the batch's rows.
        exact: settle near-ties where the dtype is precise enough for it.
    """

    def replayed(row: int, text: Sequence[int]) -> Tensor:
        num_prompt = output.num_prompt(row)
        output.rows[row].num_replays += 1
        output.rows[row].num_replay_passes += 1 + len(text) - num_prompt
        return replay(model, torch.tensor([list(text)], device=output.device), num_prompt)

    settled = replayed if exact and model.dtype in EXACT_DTYPES else None
    return Chooser(sampler or Sampler(), processors, settled, tree_support(model).rounding)
