"""How the base model's tokens are chosen at the nodes of a tree, near-ties included.

A choice is an argmax of scores: logits, processed with the node's own prefix, plus the noise of the
node's position. Where the two best scores are closer than rounding, plain decoding's logits decide,
and where rounding might move the best one, or a better one, across the edge of a cut (top-k, top-p,
min-p).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.attention.tree import Tree
from specheads.decoding.processors import RowProcessors, bind
from specheads.decoding.result import Output
from specheads.drafters.contract import Candidates
from specheads.models.forward import replay
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


@dataclass(frozen=True)
class Chooser:
    """Turns logits into scores whose argmax is the base model's token.

    Attributes:
        sampler: greedy, or with noise.
        output: the texts so far.
        processors: evaluated at each node with that node's own prefix.
        replay: text [1, T] and its number of prompt tokens to the logits [1, V] of plain decoding,
            to settle near-ties with; None leaves those to rounding.
        rounding: of a difference of two logits, relative to the largest.
    """

    sampler: Sampler
    output: Output
    processors: RowProcessors | None = None
    replay: Callable[[Tensor, int], Tensor] | None = None
    rounding: float = ROUNDING

    @property
    def imitable(self) -> Sampler:
        """How tokens are drawn, the processors' part of it included: what drafters imitate."""
        if self.processors is None:
            return self.sampler
        return self.processors.imitated(self.sampler)

    def next_tokens(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        """Choose the token after the texts of ``rows`` [B] from logits [B, V]."""
        scored = self._scores_after(logits, rows)
        tokens = scored.scores.argmax(-1)
        chosen: list[int]
        if self.replay is None:
            chosen = tokens.tolist()
        else:
            ties = self._near_ties(logits, scored.before, scored.scores, rows)
            chosen, tied = torch.stack([tokens, ties]).tolist()
            for i, row in enumerate(rows):
                if tied[i] and self.output.budget(row):
                    chosen[i] = int(self.settle(row).argmax())
        for i, row in enumerate(rows):
            self._keep(row, logits[i : i + 1], scored.processed[i : i + 1])
        return chosen

    def scores_at_nodes(
        self, candidates: Candidates, logits: Tensor, rows: Sequence[int]
    ) -> Scored:
        """Score the trees; off the accepted path the scores may be those of bare logits.

        Args:
            candidates: the trees.
            logits: [B, N, V].
            rows: [B], whose texts the trees continue.

        Returns:
            Of all nodes, [B, N, V].
        """
        if self.processors is not None and not self.processors.stateless:
            return self._scores_on_paths(candidates, logits, rows)
        before, processed = self._processed(candidates, logits, rows)
        roots = [self.output.length(row) - 1 for row in rows]
        scores = self.sampler.tree_scores(processed, candidates.tree, roots, rows)
        return Scored(before, processed, scores)

    def processed_at_nodes(
        self, candidates: Candidates, logits: Tensor, rows: Sequence[int]
    ) -> Tensor:
        """Return the logits [B, N, V] after processors, each given its node's own prefix.

        Raises:
            ValueError: if a processor keeps a state: it must not see texts that will never be.
        """
        return self._processed(candidates, logits, rows)[1]

    def _processed(
        self, candidates: Candidates, logits: Tensor, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        if self.processors is None:
            return logits, logits
        texts = [self.output.text(row) for row in rows]
        return self.processors.at_nodes(candidates, logits, rows, texts)

    def _scores_on_paths(
        self, candidates: Candidates, logits: Tensor, rows: Sequence[int]
    ) -> Scored:
        """Go down node by node, as only then it is known which prefixes will be."""
        every = Scored(*(logits.float().clone() for _ in Scored._fields))
        parents = candidates.tree.parents.expand_as(candidates.tokens).tolist()
        for i, (row, tokens) in enumerate(zip(rows, candidates.tokens.tolist(), strict=True)):
            more: list[int] = []
            here = [0]  # the nodes with this prefix: several if equal siblings were not merged
            while here and self.output.budget(row):
                at_node = logits[i : i + 1, here[0]]
                found = self._scores_after(at_node, [row], more)
                ties = self.replay is not None and self._near_ties(
                    at_node, found.before, found.scores, [row], more
                )
                if ties:
                    found = found._replace(scores=self.settle(row, more))
                for whole, part in zip(every, found, strict=True):
                    whole[i, here] = part.float()
                drawn = int(found.scores.argmax(-1))
                more.append(drawn)
                here = [
                    node
                    for node, token in enumerate(tokens)
                    if parents[i][node] in here and token == drawn
                ]
        return every

    def _scores_after(
        self, logits: Tensor, rows: Sequence[int], more: Sequence[int] = ()
    ) -> Scored:
        """Return scores [B, V] after the texts of ``rows`` and ``more``."""
        before = processed = logits
        if self.processors is not None:
            texts = [[*self.output.text(row), *more] for row in rows]
            before, processed = self.processors.after(logits, rows, texts)
        scores = self._noised(self.sampler, processed[:, None], rows, more)[:, 0]
        return Scored(before, processed, scores)

    def _noised(
        self, sampler: Sampler, logits: Tensor, rows: Sequence[int], more: Sequence[int] = ()
    ) -> Tensor:
        """Return scores [B, D+1, V] along a path each that begins after the texts and ``more``."""
        roots = [self.output.length(row) + len(more) - 1 for row in rows]
        path = Tree.chain(logits.shape[1] - 1).to(logits.device)
        return sampler.tree_scores(logits, path, roots, rows)

    def near_ties(
        self, logits: Tensor, scored: Scored, rows: Sequence[int], path: Tensor
    ) -> Tensor:
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
        sampler, processors = self.sampler, self.processors
        cut = sampler.top_k > 0 or sampler.top_p < 1 or (processors is not None and processors.cut)
        return cut and sampler.temperature > 0

    def _near_ties(
        self,
        logits: Tensor,
        before: Tensor | None,
        scores: Tensor,
        rows: Sequence[int],
        more: Sequence[int] = (),
    ) -> Tensor:
        """Tell it along paths [B, D+1, V], or of single nodes [B, V] after the texts and ``more``.

        One whose best score is infinite has been settled.
        """
        sampler, processors = self.sampler, self.processors
        if before is None or not self._cuts:
            # a temperature among the processors enlarges rounding as the sampler's own does
            factor = 1.0 if processors is None else processors.temperature
            logits = logits if factor == 1.0 else logits / factor
            return sampler.near_ties(logits, scores, rounding=self.rounding)
        left = Survivors(before, self.rounding * logits.abs().amax(-1, keepdim=True))
        if processors is not None:
            processors.leave(left)
        left.temper(sampler.temperature)
        if sampler.top_k:
            left.top_k(sampler.top_k)
        if sampler.top_p < 1:
            left.top_p(sampler.top_p)
        bare = replace(sampler, temperature=1.0, top_k=0, top_p=1.0)
        along = left.scores if logits.dim() == 3 else left.scores[:, None]
        noised = self._noised(bare, along, rows, more).view_as(left.scores)
        return left.undecided(noised) & ~scores.amax(-1).isposinf()

    def settle(self, row: int, more: Sequence[int] = ()) -> Tensor:
        """Return scores [1, V] after a text from plain decoding's logits, beyond any doubt."""
        assert self.replay is not None
        decoded = self.output.rows[row]
        decoded.num_replays += 1
        decoded.num_replay_passes += 1 + len(decoded.new_tokens) + len(more)
        logits = self.replay(self.output.ids(row, more), len(self.output.prompts[row]))
        scores = self._scores_after(logits, [row], more).scores
        return scores.scatter(-1, scores.argmax(-1, keepdim=True), float("inf"))

    def keep(self, rows: Sequence[int], path: Tensor, logits: Tensor, processed: Tensor) -> None:
        """Keep what the tokens of accepted paths were chosen from, if that was asked for.

        Args:
            rows: [B].
            path: [B, D+1], padded with -1.
            logits: [B, N, V].
            processed: [B, N, V].
        """
        if self.output.kept is None:
            return
        for i, row in enumerate(rows):
            nodes = path[i, path[i] >= 0]
            self._keep(row, logits[i, nodes], processed[i, nodes])

    def _keep(self, row: int, logits: Tensor, processed: Tensor) -> None:
        if self.output.kept is None or not self.output.budget(row):
            return
        scores = processed.float()
        if self.sampler.temperature > 0:
            scores = self.sampler.warp(scores)
        # copies: a view would keep the logits of the whole tree in memory
        self.output.kept[row] += zip(logits.float().clone(), scores.clone(), strict=True)


def make_chooser(
    model: PreTrainedModel,
    output: Output,
    sampler: Sampler | None,
    logits_processor: LogitsProcessorList | None,
    *,
    num_prompt_tokens: int,
    exact: bool,
    rounding: float = ROUNDING,
) -> Chooser:
    """Return a chooser.

    Args:
        model: the base model.
        output: the texts.
        sampler: greedy if None.
        logits_processor: for prompts that were padded to ``num_prompt_tokens``.
        num_prompt_tokens: P.
        exact: settle near-ties where the dtype is precise enough for it.
        rounding: of a difference of two logits of ``model``, relative to the largest.
    """
    settle = partial(replay, model) if exact and model.dtype in EXACT_DTYPES else None
    processors = bind(logits_processor, output.prompts, num_prompt_tokens)
    return Chooser(sampler or Sampler(), output, processors, settle, rounding)
