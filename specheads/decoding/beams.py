"""Beam search with the beams' drafted trees verified in one pass; transformers' own beams result.

The search itself is transformers': :class:`Beams` stands in its place of the model, and is asked
for the logits after every running text, a token at a time. Where all of these texts are nodes of
the trees that were verified last, it answers at once. Where one is not, all running texts become
the roots of new trees, a row of the cache each: the rows are those of their parents, with the nodes
on the way to them, and one pass over all trees scores as many texts ahead as the drafter guessed.
So length penalties, early stopping, logits processors and stopping criteria are transformers', and
beams and scores are those that it gives without a drafter, to within rounding: where two beams at
the cut are closer than that, the other one may be kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree
from specheads.decoding.loop import propose, tapped
from specheads.decoding.result import DecodedRow, DecodeResult, read_prompts
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.models.forward import ModelPass, pad_rows
from specheads.models.support import tree_support
from specheads.verification.acceptance import path_to

_Text = tuple[int, tuple[int, ...]]  # which prompt it continues, and its new tokens


class Beams(GenerationMixin):
    """What transformers' beam search takes for the model.

    Args:
        model: the base model.
        drafter: proposes what follows each beam; None scores one token at a time.
        input_ids: [B * W, P], the prompts, each once for every beam.
        config: as ``generate`` resolved it.
        attention_mask: [B * W, P], 0 on the padding on the left; None is all ones.
        compiled: see :class:`~specheads.decoding.loop.Settings`.

    Raises:
        ValueError: what :func:`~specheads.decoding.loop.decode` raises of prompts and models.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter | None,
        input_ids: Tensor,
        config: GenerationConfig,
        attention_mask: Tensor | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self.config, self.device = model.config, input_ids.device
        self.num_steps = 0
        self.beam_scores = torch.empty(0)
        self._drafter, self._options, self._ids = drafter, config, input_ids
        width = config.num_beams
        mask = None if attention_mask is None else attention_mask[::width]
        self._limit = config.max_length - input_ids.shape[1]
        self._prompts = read_prompts(model, input_ids[::width], mask, self._limit)
        support = tree_support(model)
        support.check_batch(len(input_ids))
        chain_only = support.kind == "chain"
        self._base = ModelPass(model, TreeCache(), chain_only=chain_only, compiled=compiled)
        self._state: Any = None  # the drafter's
        # of the last pass: its trees, None where prompts were read; hidden states; logits
        # [rows, nodes, V], and where in them those after each text are
        self._candidates: Candidates | None = None
        self._hidden: Callable[[], dict[str, Tensor]] = dict
        self._logits = torch.empty(0)
        self._scored: dict[_Text, tuple[int, int]] = {}

    def search(self, logits_processor: Any, stopping_criteria: Any) -> DecodeResult:
        """Search; return the best beams of each prompt, the best first.

        Args:
            logits_processor: as ``generate`` made it; it sees log-probabilities.
            stopping_criteria: likewise.
        """
        config, num_prompt = copy.copy(self._options), self._ids.shape[1]
        config.return_dict_in_generate = True
        asked = self._ids, logits_processor, stopping_criteria, config
        search = cast(Any, super())._beam_search  # typed for models, in whose place this stands
        with tapped(self._base, self._drafter.taps if self._drafter else ()) as self._hidden:
            found = search(*asked, use_cache=False)
        rows = []
        for tokens, beams in zip(found.sequences.tolist(), found.beam_indices, strict=True):
            new = tokens[num_prompt : num_prompt + int((beams >= 0).sum())]
            rows.append(DecodedRow(new, finished=len(new) < self._limit))
        return DecodeResult(
            found.sequences,
            self.num_steps,
            tuple(rows),
            scores=found.scores,
            logits=found.logits,
            sequences_scores=self.beam_scores[:, : config.num_return_sequences].flatten(),
        )

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        """Take the texts whole, [B * W, T]."""
        return {"input_ids": input_ids}

    def _update_finished_beams(self, **kwargs: Any) -> Any:  # type: ignore[override]
        found = super()._update_finished_beams(**kwargs)
        self.beam_scores = found[1]  # which it returns only with all scores of all steps
        return found

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        """Return the logits after every text, [B * W, 1, V]."""
        num_prompt, width = self._ids.shape[1], self._options.num_beams
        new = input_ids[:, num_prompt:].tolist()
        texts = [(row // width, tuple(tokens)) for row, tokens in enumerate(new)]
        if not self._scored:
            self._read()
        elif any(text not in self._scored for text in texts):
            self._verify(texts)
        rows, nodes = zip(*map(self._scored.__getitem__, texts), strict=True)
        return CausalLMOutput(logits=self._logits[list(rows), list(nodes)][:, None])

    def _read(self) -> None:
        """Read the prompts."""
        tokens, counts = pad_rows(self._prompts, self.device), list(map(len, self._prompts))
        self._logits = self._base.read(tokens, counts)[:, None]
        self._scored = {(number, ()): (number, 0) for number in range(len(counts))}

    def _verify(self, texts: Sequence[_Text]) -> None:
        """Score texts that are one token longer than some that were, and guesses behind them."""
        roots = torch.tensor([new[-1] for _, new in texts], device=self.device)
        self._follow(texts, roots)
        candidates = Candidates(roots[:, None], Tree.chain(0).to(self.device))
        if self._drafter is not None:
            budgets = [self._limit - len(new) for _, new in texts]
            candidates = propose(self._drafter, self._state, self._base, budgets)
        if not candidates.tokens[:, 0].equal(roots):
            raise ValueError(
                "the drafter's rows share what should be each one's own, see its select"
            )
        self._logits = self._base.verify(candidates.inputs, candidates.tree)
        self.num_steps += 1
        self._candidates, self._scored = candidates, {}
        parents = candidates.tree.parents.expand_as(candidates.tokens)
        rows = zip(texts, candidates.tokens.tolist(), parents.tolist(), strict=True)
        for row, ((prompt, new), tokens, above) in enumerate(rows):
            known = {0: new}
            for node in range(1, len(tokens)):
                if tokens[node] >= 0 and above[node] in known:
                    known[node] = (*known[above[node]], tokens[node])
            for node, text in known.items():
                self._scored.setdefault((prompt, text), (row, node))

    def _follow(self, texts: Sequence[_Text], roots: Tensor) -> None:
        """Let cache and drafter hold the parents of ``texts``, a row for each."""
        places = [self._scored[prompt, new[:-1]] for prompt, new in texts]
        rows, nodes = torch.tensor(places).T
        hidden = {tap: states[rows] for tap, states in self._hidden().items()}
        cache, drafter, before = self._base.cache, self._drafter, self._candidates
        if before is None:
            cache.select(rows)
            if drafter is not None:
                prompts = [self._prompts[row] for row in rows.tolist()]
                tokens, counts = pad_rows(prompts, self.device), list(map(len, prompts))
                vocab = self._logits.shape[-1]
                given = Prefill(prompts, tokens, counts, hidden, roots, vocab_size=vocab)
                self._state = drafter.start(given)
            return
        tree = before.tree if isinstance(before.tree, Tree) else before.tree.select(rows)
        path, depths = path_to(tree, nodes.to(self.device))
        counts = (depths + 1).tolist()
        cache.select(rows, ahead=tree.num_nodes)
        cache.commit(path, counts)
        if drafter is not None:
            result = StepResult(
                tree,
                before.tokens[rows],
                self._logits.max(-1).indices[rows],
                hidden,
                path,
                depths,
                roots,
                [list(new[-count:]) for (_, new), count in zip(texts, counts, strict=True)],
                None if before.own is None else before.own[rows],
            )
            self._state = drafter.observe(drafter.select(self._state, rows), result)
