"""transformers' logits processors for rows of different lengths and for the nodes of a tree.

A processor maps the tokens so far and the logits after them to scores. In a batch, transformers
calls it with left-padded rows; here it is called with each row's own text, so that a row of a batch
is treated as it would be alone. What a processor was told about lengths when ``generate`` built it
(:data:`LENGTHS`) counts the padding, and is corrected for each row.

Processors of transformers without a state may be asked about all nodes of a tree, level by level,
before it is known which of them will be accepted. Any other one, written by the user or with a
state, is asked about a node only once its path is accepted: it sees the text before each new token
once and in order, as in plain decoding. (Once more where two tokens tie to within rounding, see
:mod:`specheads.decoding.choose`, and on beyond a token that ends the text within a step.)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process as theirs
from transformers.generation import stopping_criteria

from specheads.attention.tree import Tree
from specheads.drafters.contract import Candidates
from specheads.models.forward import pad_rows
from specheads.verification.sampling import Sampler, Survivors

# they look at the logits alone: one call serves all nodes of all rows
PREFIX_FREE = {
    theirs.EpsilonLogitsWarper,
    theirs.EtaLogitsWarper,
    theirs.InfNanRemoveLogitsProcessor,
    theirs.LogitNormalization,
    theirs.MinPLogitsWarper,
    theirs.SuppressTokensLogitsProcessor,
    theirs.TemperatureLogitsWarper,
    theirs.TopHLogitsWarper,
    theirs.TopKLogitsWarper,
    theirs.TopPLogitsWarper,
    theirs.TypicalLogitsWarper,
}
# of these it is known how far rounding moves the edge
CUTS = (theirs.MinPLogitsWarper, theirs.TopKLogitsWarper, theirs.TopPLogitsWarper)
# the attribute in which a processor keeps a length of the padded text
LENGTHS: dict[type, str] = {
    theirs.ExponentialDecayLengthPenalty: "regulation_start",
    theirs.ForcedEOSTokenLogitsProcessor: "max_length",
    theirs.MinLengthLogitsProcessor: "min_length",
    theirs.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    theirs.SuppressTokensAtBeginLogitsProcessor: "begin_index",
}
# exact types: a subclass may do anything
STATELESS = {
    *PREFIX_FREE,
    *LENGTHS,
    theirs.ForcedBOSTokenLogitsProcessor,
    theirs.NoBadWordsLogitsProcessor,
    theirs.NoRepeatNGramLogitsProcessor,
    theirs.RepetitionPenaltyLogitsProcessor,
    theirs.SequenceBiasLogitsProcessor,
    stopping_criteria.EosTokenCriteria,
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
}


class Rows(NamedTuple):
    """The rows of a batch that take part in a step.

    Attributes:
        numbers: [B], which rows of the batch they are, for their seeds and processors.
        texts: [B], prompt and new tokens so far; not to be changed.
        going: [B], whether the row may still get tokens.
    """

    numbers: Sequence[int]
    texts: Sequence[Sequence[int]]
    going: Sequence[bool]

    @property
    def roots(self) -> list[int]:
        """[B], the position of each text's last token."""
        return [len(text) - 1 for text in self.texts]


@dataclass(frozen=True)
class RowProcessors:
    """The processors of every row of a batch; make it with :func:`bind`.

    Attributes:
        rows: per row those that look at the text, and all before them; rows that are treated alike
            share one list.
        rest: those after them, which look at the logits alone.
    """

    rows: Sequence[LogitsProcessorList]
    rest: LogitsProcessorList

    @property
    def temperature(self) -> float:
        """What the scores are divided by, 1 without a temperature among the processors."""
        every, kind = (*self.rows[0], *self.rest), theirs.TemperatureLogitsWarper
        return math.prod(each.temperature for each in every if type(each) is kind)

    def imitated(self, sampler: Sampler) -> Sampler:
        """Return a sampler that draws as ``sampler`` does behind these processors, or nearly so.

        It has their temperature, top-k and top-p; what looks at the text, and rarer cuts, it lacks.
        """
        top_k, top_p = sampler.top_k, sampler.top_p
        for each in (*self.rows[0], *self.rest):
            if type(each) is theirs.TopKLogitsWarper:
                top_k = min(top_k or each.top_k, each.top_k)
            elif type(each) is theirs.TopPLogitsWarper:
                top_p = min(top_p, each.top_p)
        temperature = sampler.temperature * self.temperature
        return replace(sampler, temperature=temperature, top_k=top_k, top_p=top_p)

    @property
    def cut(self) -> bool:
        """Whether there are cuts whose edges :meth:`leave` finds."""
        return any(type(each) in CUTS for each in self.rest)

    def leave(self, tokens: Survivors) -> None:
        """Tell which tokens are left by the processors that look at the logits alone.

        The edges of top-k, top-p and min-p are found. Those of rarer cuts, which go by entropies or
        by likelihood alone, are taken to be where they are without rounding.

        Args:
            tokens: with the scores that ``rest`` is applied to, and the slack of the logits.
        """
        for each in self.rows[0]:
            if type(each) is theirs.TemperatureLogitsWarper:  # the scores are divided already
                tokens.slack = tokens.slack / each.temperature
        for each in self.rest:
            if type(each) is theirs.TemperatureLogitsWarper:
                tokens.temper(each.temperature)
            elif type(each) is theirs.TopKLogitsWarper:
                tokens.top_k(each.top_k)
            elif type(each) is theirs.TopPLogitsWarper:
                tokens.top_p(each.top_p, each.min_tokens_to_keep)
            elif type(each) is theirs.MinPLogitsWarper:
                tokens.min_p(each.min_p, each.min_tokens_to_keep)
            elif type(each) is not theirs.LogitNormalization:  # which moves all of them alike
                tokens.other(partial(self._alone, each))

    @property
    def stateless(self) -> bool:
        """Whether they may be asked about texts that will never be."""
        return all(type(processor) in STATELESS for processor in self.rows[0])

    def at_nodes(self, candidates: Candidates, logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return scores at all nodes: those that ``rest`` is applied to, and the outcome.

        Those that look at the text are called for each level of the trees.

        Args:
            candidates: the trees.
            logits: [B, N, V].
            rows: whose texts the trees continue.

        Returns:
            Both [B, N, V].

        Raises:
            ValueError: if a processor has to be asked about accepted nodes only.
        """
        tree = candidates.tree
        if not self.stateless and tree.num_nodes > 1:
            raise ValueError("at_nodes needs stateless processors: ask along the accepted path")
        if not self.rows[0]:
            return logits, self._finish(logits)
        device, num_rows = logits.device, len(rows.numbers)
        tokens, texts = candidates.inputs.clamp(min=0).to(device), pad_rows(rows.texts, device)
        lines = tree.ancestors.to(device).expand(num_rows, -1, -1)
        scores = logits.float().clone()
        if isinstance(tree, Tree):  # known without asking the device
            depths = [[0, *map(len, tree.choices)]] * num_rows
        else:
            depths = tree.depths.tolist()
        # nodes that can be processed in one call: those of one depth behind texts of one length
        groups: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for i, (row, text) in enumerate(zip(rows.numbers, rows.texts, strict=True)):
            alike = id(self.rows[row]) if self.stateless else i
            for node, depth in enumerate(depths[i]):
                groups.setdefault((alike, len(text), depth), []).append((i, node))
        for (_, length, depth), members in groups.items():
            each, nodes = torch.tensor(members, device=device).T
            guessed = tokens[each].gather(1, lines[each, nodes, 1 : depth + 1])  # [n, depth]
            looking: Any = self.rows[rows.numbers[members[0][0]]]  # at the text
            prefix = torch.cat([texts[each, :length], guessed], dim=1)
            scores[each, nodes] = looking(prefix, scores[each, nodes]).to(scores)
        return scores, self._finish(scores)

    def _finish(self, scores: Tensor) -> Tensor:
        """Apply ``rest`` to [..., V]."""
        return self._alone(self.rest, scores) if self.rest else scores

    @staticmethod
    def _alone(processor: Any, scores: Tensor) -> Tensor:
        flat = scores.flatten(0, -2)
        unused = torch.zeros(flat.shape[0], 1, dtype=torch.long, device=flat.device)
        return cast(Tensor, processor(unused, flat.float())).view_as(scores)


NO_PROCESSORS = RowProcessors((LogitsProcessorList(),), LogitsProcessorList())


def bind(
    processors: LogitsProcessorList | None, prompts: Sequence[Sequence[int]], num_prompt_tokens: int
) -> RowProcessors:
    """Prepare processors for the rows of a batch.

    Args:
        processors: as ``generate`` builds them for the padded batch, or of your own. Those of
            unknown type are copied for every row but the first, as they may keep a state.
        prompts: per row, without padding.
        num_prompt_tokens: P, to which they were padded.

    Raises:
        ValueError: for a processor that would have to be copied and cannot be.
    """
    if not processors:
        return NO_PROCESSORS
    split = max((i + 1 for i, p in enumerate(processors) if type(p) not in PREFIX_FREE), default=0)
    rest = LogitsProcessorList(processors[split:])
    shared: dict[Hashable, LogitsProcessorList] = {}
    rows = []
    for row in range(len(prompts)):
        own = [_for_row(p, row, prompts, num_prompt_tokens) for p in processors[:split]]
        alike = (len(prompts[row]), *(getattr(p, "prompt_ignore_length", None) for p in own))
        alone = any(type(p) not in STATELESS for p in own)
        rows.append(shared.setdefault((row,) if alone else alike, LogitsProcessorList(own)))
    return RowProcessors(tuple(rows), rest)


def _for_row(
    processor: Any, row: int, prompts: Sequence[Sequence[int]], num_prompt_tokens: int
) -> Any:
    """Return the processor for one row's own text."""
    kind, padding = type(processor), num_prompt_tokens - len(prompts[row])
    if kind in LENGTHS:
        name = LENGTHS[kind]
        return _changed(processor, **{name: getattr(processor, name) - padding})
    if kind is theirs.RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length
        if ignored is None:
            return processor
        if isinstance(ignored, Tensor):
            ignored = int(ignored[row])
        return _changed(processor, prompt_ignore_length=max(0, ignored - padding))
    if kind is theirs.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return _changed(processor, _prefix_allowed_tokens_fn=lambda _row, ids: allowed(row, ids))
    return copy_for_row(processor, row, "logits processor")


def copy_for_row(called: Any, row: int, what: str) -> Any:
    """Return a copy, for any row but the first, of what may keep a state; models are shared.

    Args:
        called: a logits processor, a stopping criterion.
        row: of the batch.
        what: how to call it in an error.

    Raises:
        ValueError: if it cannot be copied.
    """
    if row == 0 or type(called) in STATELESS:
        return called
    heavy = (nn.Module, PreTrainedTokenizerBase)
    memo = {id(v): v for v in getattr(called, "__dict__", {}).values() if isinstance(v, heavy)}
    try:
        return copy.deepcopy(called, memo)
    except Exception as error:
        raise ValueError(
            f"{what} {type(called).__name__} cannot be copied for row {row} ({error});"
            " decode one prompt at a time"
        ) from error


def _changed(processor: Any, **attributes: object) -> Any:
    changed = copy.copy(processor)
    vars(changed).update(attributes)
    return changed
