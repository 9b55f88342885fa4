"""The decoding loops: propose, verify step, accept, commit; and plain decoding, their definition.

Plain decoding, one token per forward pass, is the definition of correct, and the baseline.
Everything the tree loop does must give its tokens, and a row of a batch must get those it would get
alone. Both use the same cache and ask for the rows of logits that are needed only, so that a
speed-up is one over a loop without wasted work.

Both loops take, at each position, the base model's own choice given the same prefix and, when
sampling, the same noise. A verify step multiplies matrices of other shapes than a plain step, so
its logits differ by rounding, and where the two best tokens are closer than that, or one is as
close to the edge of a cut, a near-tie, the choice could differ. In float32 such a choice (a few in
10,000) is made again from a plain replay of the text so far, so that the tokens are those of plain
decoding and not almost always so. This rests on rounding being below ``sampling.ROUNDING``. Where
the self-test measures more, near-ties are wider by as much; but a model which multiplies rounding
like that (dozens of layers with random weights did) is not promised to give the very tokens of
plain decoding. In bfloat16 and float16 rounding is so coarse that near-ties are common, and no
replay is made: outputs are plausible, not identical, but with ``invariant``, where passes round
alike, see :func:`~specheads.models.forward.rounds_by_shape`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree
from specheads.decoding.accept import Acceptance, accept
from specheads.decoding.choose import Chooser, make_chooser
from specheads.decoding.processors import bind
from specheads.decoding.result import DecodeResult, Limits, Output, read_prompts
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.models.forward import ModelPass, capture_for_good, pad_rows
from specheads.models.output import capture_hidden
from specheads.models.support import tree_support
from specheads.verification.sampling import Sampler


@dataclass(frozen=True)
class Settings(Limits):
    """How to decode; the keyword arguments of :func:`decode` and :func:`plain_decode`.

    Attributes:
        attention_mask: [B, P], 0 on padding.
        sampler: greedy if None; row b is sampled with its seed + b.
        logits_processor: changes the logits, given the row's text so far without padding, see
            :mod:`specheads.decoding.processors`.
        acceptance: the rule by which candidates are accepted; exact if None.
        cache: keeps keys and values for a later turn. If it holds the beginnings of the prompts,
            only the rest is read.
        pad_token_id: stands in ``sequences`` behind rows that ended early.
        compile: run all passes but the prefill compiled; the first of each shape takes a while.
        invariant: in 16 bits on a CPU, let a row's bits be the same whatever else is in a pass, so
            that all texts that are begun anew are those of plain decoding.
    """

    attention_mask: Tensor | None = None
    sampler: Sampler | None = None
    logits_processor: LogitsProcessorList | None = None
    acceptance: Acceptance | None = None
    cache: TreeCache | None = None
    pad_token_id: int = 0
    compile: bool = False
    invariant: bool = False


def plain_decode(model: PreTrainedModel, input_ids: Tensor, **settings: Any) -> DecodeResult:
    """Decode one token at a time; see :func:`decode` for the arguments."""
    return decode(model, None, input_ids, **settings)


def decode(
    model: PreTrainedModel, drafter: Drafter | None, input_ids: Tensor, **settings: Any
) -> DecodeResult:
    """Decode by verifying a tree of guesses in each forward pass.

    The tokens are those of plain decoding. Where candidates are sampled at a temperature above 0,
    and rejection decides about them, they are other tokens of the same distribution; where
    ``acceptance`` is lossy, other tokens.

    Args:
        model: any causal language model that can be decoded step by step.
        drafter: proposes the guesses; None decodes plainly, one token at a time.
        input_ids: [B, P], left-padded where prompts differ in length.
        **settings: the attributes of :class:`Settings` and :class:`Limits`; ``max_new_tokens`` must
            be among them.

    Raises:
        ValueError: for an empty prompt, a mask that is not left padding, a cache of another number
            of rows, more tokens than the model has positions, a model that cannot be decoded step
            by step, a batch or compiled passes where its masks or positions are out of reach, a
            logits processor or stopping criterion that cannot be copied for a row, or one that
            answers about several rows; for a model that cannot verify the candidates, and for a
            rule other than sample-and-walk with a logits processor that keeps a state.
    """
    asked = Settings(**settings)
    prompts = read_prompts(model, input_ids, asked.attention_mask, asked.max_new_tokens)
    support = tree_support(model)
    support.check_batch(len(prompts))
    output = Output(prompts, input_ids.device, asked)
    cache = TreeCache() if asked.cache is None else asked.cache
    # a batch and compiled passes need what trees need: masks that are not the model's
    base = ModelPass(
        model,
        cache,
        chain_only=support.kind == "chain",
        compiled=asked.compile,
        invariant=asked.invariant,
    )
    processors = bind(asked.logits_processor, prompts, input_ids.shape[1])
    with torch.inference_mode():
        known = base.align(prompts)
        # plain decoding of one whole prompt is what all else is compared with, and replays nothing
        exact = drafter is not None or len(prompts) > 1 or any(known) or asked.compile
        chooser = make_chooser(model, output, asked.sampler, processors, exact=exact)
        acceptance = asked.acceptance or Acceptance()
        batch = Batch(base, output, chooser, drafter, acceptance, list(range(len(prompts))))
        unread = [prompt[n:] for prompt, n in zip(prompts, known, strict=True)]
        try:
            batch.read_whole(unread)
            with batch.passes():
                while any(batch.going):
                    if asked.cache is None and not asked.compile:  # another size compiles anew
                        batch.leave()
                    batch.step()
        finally:
            if asked.cache is not None:
                cache.tokens = [output.texts[row][:n] for row, n in enumerate(cache.lengths)]
    return output.result(input_ids, asked.pad_token_id, asked.cache)


@dataclass(eq=False, repr=False)
class Batch:
    """Rows of a cache that are decoded together, step by step; rows may come and go in between.

    Attributes:
        base: the base model's passes, and the cache.
        output: the texts.
        chooser: how tokens are chosen.
        drafter: proposes; None decodes one token at a time.
        acceptance: the rule.
        numbers: by row of the cache, which row of the output it is.
        state: the drafter's.
    """

    base: ModelPass
    output: Output
    chooser: Chooser
    drafter: Drafter | None
    acceptance: Acceptance
    numbers: list[int]
    state: Any = None
    _hidden: Callable[[], dict[str, Tensor]] = dict

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Let passes be made while this is open, and the drafter see their hidden states."""
        taps = self.drafter.taps if self.drafter else ()
        # saves a tenth of the calls' overhead beside no_grad
        with torch.inference_mode(), tapped(self.base, taps) as self._hidden:
            yield

    @property
    def going(self) -> list[bool]:
        """Per row whether it goes on."""
        return [self.output.budget(row) > 0 for row in self.numbers]

    def read_whole(self, unread: Sequence[Sequence[int]]) -> None:
        """Read the prompts of all rows at once; one by one where together they round otherwise.

        Args:
            unread: see :meth:`read`.
        """
        cache, numbers = self.base.cache, self.numbers
        size = 1 if self.base.invariant and not any(cache.lengths) else len(numbers)
        if size < len(numbers):
            cache.select(torch.tensor([0]))
            self.numbers = numbers[:size]
        with self.passes():
            for _ in self.read(unread[:size]):
                pass
        for number, prompt in zip(numbers[size:], unread[size:], strict=True):
            base = copy.copy(self.base)
            base.cache = TreeCache()
            other = replace(self, base=base, numbers=[number])
            other.read_whole([prompt])
            self.join(other)
            self.output.num_calls -= 1  # all of them are one pass, no steps

    def read(self, unread: Sequence[Sequence[int]], piece: int = 0) -> Iterator[None]:
        """Read the prompts of all rows; at the end each is given its first token.

        Args:
            unread: per row the tokens that are not in the cache, at least 1.
            piece: pause behind every so many tokens of the only row; 0 reads all at once.

        Yields:
            Nothing, between two pieces.
        """
        output, numbers = self.output, self.numbers
        tokens, counts = pad_rows(unread, output.device), [len(row) for row in unread]
        num_tokens, parts = tokens.shape[1], list[dict[str, Tensor]]()
        for start in range(0, num_tokens, piece or num_tokens):
            part = tokens[:, start : start + (piece or num_tokens)]
            logits = self.base.read(part, [min(count - start, part.shape[1]) for count in counts])
            parts.append(self._hidden())
            if start + part.shape[1] < num_tokens:
                yield
        chosen = self.chooser.next_tokens(output, logits, numbers)
        if self.drafter is not None:
            root = torch.tensor(chosen, device=logits.device)
            at_nodes = parts[0]
            if len(parts) > 1:
                at_nodes = {
                    tap: torch.cat([each[tap] for each in parts], dim=1) for tap in at_nodes
                }
            prompts = [list(output.texts[row]) for row in numbers]
            drawn = self.chooser.processors.imitated(self.chooser.sampler), logits.shape[-1]
            rest = *drawn, self.acceptance.follows_draws, numbers
            self.state = self.drafter.start(Prefill(prompts, tokens, counts, at_nodes, root, *rest))
        output.emit(numbers, [[token] for token in chosen])

    def step(self) -> StepResult | None:
        """Give every row that goes on its next tokens; there has to be one.

        Returns:
            What was verified; None without a drafter.
        """
        base, output, chooser, numbers = self.base, self.output, self.chooser, self.numbers
        if self.drafter is None:
            last = pad_rows([output.texts[row][-1:] for row in numbers], base.device)
            text = partial(output.texts.__getitem__, numbers[0])
            logits = base.read_next(last, list(map(int, self.going)), text)
            chosen = chooser.next_tokens(output, logits, numbers)
            output.emit(numbers, [[token] for token in chosen])
            return None
        anew = base.starts_over()
        budgets = [output.budget(row) for row in numbers]
        candidates = propose(self.drafter, self.state, base, budgets, alone=anew)
        rows = output.at(numbers)
        if anew:  # the root alone, the text's last token
            logits = base.read_anew(rows.texts[0])[:, None]
            base.cache.crop(-1)  # the commit adds it
            at_nodes = {tap: states[:, -1:] for tap, states in self._hidden().items()}
        else:
            logits = base.verify(candidates.inputs, candidates.tree)
            at_nodes = self._hidden()
        result, processed = accept(candidates, logits, at_nodes, chooser, rows, self.acceptance)
        output.keep(rows, result.path, logits, processed, chooser.sampler)
        counts = output.emit(numbers, result.new_tokens)
        if result.divergence is not None:
            for row, gained, num in zip(numbers, result.divergence.tolist(), counts, strict=True):
                output.rows[row].divergences += gained[:num]
        base.cache.commit(result.path, counts)
        kept = [new[:n] for new, n in zip(result.new_tokens, counts, strict=True)]
        self.state = self.drafter.observe(self.state, replace(result, new_tokens=kept))
        return result

    def leave(self) -> None:
        """Let go of rows that have ended; the last ones move into their places, all others stay."""
        going = self.going
        kept, num_kept = list(range(len(going))), sum(going)
        last = [i for i in kept[num_kept:] if going[i]]
        kept = [i if going[i] else last.pop() for i in kept[:num_kept]]
        self.numbers = [self.numbers[i] for i in kept]
        if 0 < num_kept < len(going):
            rows = torch.tensor(kept)
            self.base.cache.select(rows)
            if self.drafter is not None:
                self.state = self.drafter.select(self.state, rows)

    def join(self, other: Batch) -> None:
        """Take over the rows of ``other``, behind those here; there have to be some."""
        self.base.cache.join(other.base.cache)
        if self.drafter is not None:
            self.state = self.drafter.join(self.state, other.state)
        self.numbers = [*self.numbers, *other.numbers]


@contextlib.contextmanager
def tapped(base: ModelPass, taps: Collection[str]) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Give a function that returns the latest forward pass's hidden states, tap -> [B, T, d].

    Raises:
        ValueError: for an unknown tap.
    """
    if not taps:
        yield dict
        return
    capture: contextlib.AbstractContextManager[dict[str, Tensor]] = (
        contextlib.nullcontext(capture_for_good(base.model, taps))
        if base.compiled
        else capture_hidden(base.model, taps)
    )
    with capture as captured:
        yield lambda: {tap: captured[tap][:, : base.num_tokens] for tap in taps}


def propose(
    drafter: Drafter, state: Any, base: ModelPass, budgets: Sequence[int], *, alone: bool = False
) -> Candidates:
    """Ask for guesses; forbid those that would run past a row's limit, or what a pass may hold.

    Compiled passes keep the tree's shape; others leave out levels that no row may reach.

    Args:
        drafter: proposes.
        state: its state.
        base: the base model's passes.
        budgets: per row the tokens it may still get, of which a step gives one beside the guesses.
        alone: leave out all guesses.

    Raises:
        ValueError: for sampled candidates of a drafter that says it is deterministic.
    """
    candidates = drafter.propose(state)
    if drafter.deterministic and candidates.sampling != "none":
        raise ValueError(
            f"the drafter is deterministic, but its candidates are sampled: {candidates.sampling}"
        )
    if base.chain_only or alone:
        candidates = first_chain(candidates)
    tree, tokens, probes = candidates.tree, candidates.tokens, candidates.probes
    budgets, num_slots = [1] if alone else base.within(budgets), base.num_slots
    if num_slots is not None and num_slots < tree.num_nodes:
        deepest = int(tree.depths[..., num_slots].min()) - 1
        budgets = [min(budget, max(deepest, 0) + 1) for budget in budgets]
    if isinstance(tree, Tree) and (alone or not base.compiled):
        tree = tree.trim(max(max(budgets) - 1, 0))
        tokens = tokens[:, : tree.num_nodes]
        probes = None if probes is None else probes[:, : tree.num_nodes]
    if min(budgets) - 1 < tree.max_depth:
        limits = torch.tensor(budgets, device=tokens.device)[:, None] - 1
        tokens = tokens.masked_fill(tree.depths > limits.clamp(min=0), -1)
    if tokens is candidates.tokens:
        return candidates
    probs, own = candidates.draft_probs, candidates.own
    return replace(
        candidates,
        tokens=tokens,
        tree=tree,
        draft_probs=None if probs is None else probs[:, : tree.num_nodes],
        probes=probes,
        own=None if own is None else own.masked_fill(own >= tree.num_nodes, -1),
    )


def first_chain(candidates: Candidates) -> Candidates:
    """Return the one row's chain of first children, which are drawn as a chain's nodes are."""
    tree, path = candidates.tree, [0]
    probed = (candidates.tokens < candidates.inputs)[0].tolist()
    for node, parent in enumerate(tree.parents.expand_as(candidates.tokens)[0].tolist()):
        if parent == path[-1] and not probed[node]:
            path.append(node)
    probs = candidates.draft_probs
    own = torch.full_like(candidates.tokens, -1)
    own[:, path] = torch.arange(len(path), device=own.device)
    return Candidates(
        candidates.tokens[:, path],
        Tree.chain(len(path) - 1).to(own.device),
        None if probs is None else probs[:, path],
        "none" if probs is None else "chain",
        own=own,
        follows_noise=candidates.follows_noise,
    )
