"""Trees of a fixed shape that a draft model fills, by sampling or with its best guesses.

Sampled siblings are drawn one after another from the draft model's distribution at their parent,
each parent with noise of its own, and recursive rejection decides about them: Sequoia
(arXiv:2402.12374), recursive speculative decoding (arXiv:2402.14160). Or all but one are its best
guesses and one is drawn from the rest, which accepts more at most temperatures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.draft_cache import DraftCache
from specheads.drafters.draft_tree import DraftRows, check_reads_trees, verify_again
from specheads.models.base import output_device
from specheads.models.draft import vocab_size
from specheads.noise import draft_noise, noise_ahead
from specheads.rejection import sample_siblings, sample_top_and_one
from specheads.tree import Choice, Tree

SAMPLINGS = ("none", "coupled", "without_replacement", "top_and_one")


@dataclass(frozen=True)
class Family:
    """The nodes of one level that have equally many guesses to choose their children from.

    Attributes:
        num_ranks: R, guesses at each of them.
        places: [n], where they stand among the inner nodes (those with children) of the level.
        sites: [n], where they stand among the inner nodes of the tree.
        nodes: [n], where they stand in the tree.
        children: [c], where their children stand in the tree.
        slots: [c], where these stand among the guesses laid end to end, n times R.
    """

    num_ranks: int
    places: Tensor
    sites: Tensor
    nodes: Tensor
    children: Tensor
    slots: Tensor


@dataclass(frozen=True)
class FixedLevel:
    """What is read and filled for the children of the inner nodes of one depth.

    Attributes:
        read: the inner nodes down to this depth, a tree.
        nodes: [M + 1], where they stand in the whole tree, the root first.
        num_asked: how many of them, the last ones, are of this depth.
        families: of the inner nodes of this depth.
    """

    read: Tree
    nodes: Tensor
    num_asked: int
    families: list[Family]


def fixed_levels(tree: Tree, device: torch.device) -> list[FixedLevel]:
    """Return the levels of a tree with inner nodes, the root's first; indices on ``device``."""
    all_nodes: list[Choice] = [(), *tree.choices]
    number = {choice: node for node, choice in enumerate(all_nodes)}
    below: dict[Choice, list[Choice]] = defaultdict(list)
    for choice in tree.choices:
        below[choice[:-1]].append(choice)
    inner = [choice for choice in all_nodes if choice in below]
    levels = []

    def index(numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), device=device)

    for depth in range(tree.max_depth):
        read = [choice for choice in inner if len(choice) <= depth]
        asked = [choice for choice in inner if len(choice) == depth]
        kinds: dict[int, list[Choice]] = defaultdict(list)
        for choice in asked:
            kinds[1 + below[choice][-1][-1]].append(choice)
        families = [
            Family(
                num_ranks,
                index(asked.index(choice) for choice in members),
                index(inner.index(choice) for choice in members),
                index(number[choice] for choice in members),
                index(number[child] for choice in members for child in below[choice]),
                index(
                    place * num_ranks + child[-1]
                    for place, choice in enumerate(members)
                    for child in below[choice]
                ),
            )
            for num_ranks, members in kinds.items()
        ]
        nodes = index(number[choice] for choice in read)
        levels.append(FixedLevel(Tree.from_choices(read[1:]), nodes, len(asked), families))
    return levels


class SampledTreeDrafter:
    """Fills a fixed tree from a draft model.

    Siblings are drawn from the draft model's distribution as the base model's sampler makes it
    (temperature, top-k, top-p). At temperature 0 they are its best guesses, whatever the sampling.

    Args:
        draft: the draft model, in eval mode; of the base model's token ids.
        tree: its ranks are the order in which siblings are drawn and tested.
            :func:`specheads.drafters.sequoia.sequoia_tree` finds good ones.
        sampling: how the children of a node are chosen.
            none: the draft model's best guesses.
            coupled: those that it would draw first with the very noise that the base model will
            draw with at their position; a function of text and seed, so that output is plain
            decoding's for the seed, as with ``none``.
            without_replacement: drawn one after another, with noise that nothing else uses.
            top_and_one: rank 0 is drawn from all but the best guesses, which are the other ranks.
            With these two the output has the base model's distribution, but is not plain
            decoding's for the seed; ranks must have no gaps.

    Raises:
        ValueError: for another ``sampling``, a tree without guesses, with gaps in its ranks, or
            wider than the draft model has tokens.
        ConfigError: for a draft model that cannot read a tree.
    """

    taps: tuple[str, ...] = ()

    def __init__(
        self, draft: PreTrainedModel, tree: Tree, *, sampling: str = "without_replacement"
    ) -> None:
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling must be one of {SAMPLINGS}, got {sampling!r}")
        if tree.num_nodes < 2:
            raise ValueError("the tree has no guesses")
        self.deterministic = sampling in ("none", "coupled")
        known = set(tree.choices)
        gap = [
            each for each in tree.choices if each[-1] and (*each[:-1], each[-1] - 1) not in known
        ]
        if gap and not self.deterministic:
            raise ValueError(
                f"the tree has node {gap[0]} without the sibling before it, in whose place nothing"
                " would be drawn"
            )
        if tree.max_rank >= vocab_size(draft):
            raise ValueError(
                f"the tree has rank {tree.max_rank}, the draft model {vocab_size(draft)} tokens"
            )
        check_reads_trees(draft)
        self.draft, self.tree, self.sampling = draft, tree, sampling
        self._levels = fixed_levels(tree, output_device(draft))
        self._num_inner = len(self._levels[-1].nodes)
        self._latest: DraftCache | None = None  # a conversation may go on

    def start(self, prefill: Prefill) -> DraftRows:
        """Start behind the prompt; the draft model reads it with the first guesses."""
        state = DraftRows.start(self.draft, prefill, self._latest)
        self._latest = state.cache
        return state

    @torch.inference_mode()
    def propose(self, state: DraftRows) -> Candidates:
        """One pass of the draft model per level."""
        limits, place = state.limits(self.tree.max_depth), state.root.device
        if not any(limits):
            return Candidates(state.root[:, None], Tree.chain(0).to(place))
        logits = state.cache.sync()[:, None]
        device = logits.device
        tokens = torch.zeros(len(limits), self.tree.num_nodes, dtype=torch.long, device=device)
        tokens[:, 0] = state.root.to(device)
        noise, draft_probs = self._noise(state, state.shared(logits)), None
        for depth, level in enumerate(self._levels):
            if depth > 0:
                logits = verify_again(state.cache, tokens[:, level.nodes], level.read)
                logits = logits[:, -level.num_asked :]
            scores = state.shared(logits)
            if noise is not None and self.deterministic:
                scores = state.sampler.warp(scores) + noise[:, depth, None]
            if noise is None or self.deterministic:
                fill_best(tokens, scores, level)
                continue
            if draft_probs is None:
                draft_probs = torch.zeros_like(noise[:, :1]).repeat(1, tokens.shape[1], 1)
            self._draw(tokens, draft_probs, state.sampler.probs(scores), noise, level)
        if min(limits) < self.tree.max_depth:
            deepest = torch.tensor(limits, device=device)[:, None]
            tokens = tokens.masked_fill(self.tree.depths.to(device) > deepest, -1)
        tree, tokens = self.tree.to(place), tokens.to(place)
        if draft_probs is None:
            return Candidates(tokens, tree)
        return Candidates(tokens, tree, draft_probs.to(place), self.sampling)

    def _noise(self, state: DraftRows, logits: Tensor) -> Tensor | None:
        """Return [B, n, V] for n levels if coupled, else for n inner nodes; None: no draws."""
        sampler, device, num_tokens = state.sampler, logits.device, logits.shape[-1]
        if self.sampling == "none" or sampler.temperature == 0:
            return None
        after = [len(text) for text in state.cache.texts]  # where the first guess stands
        if self.sampling == "coupled":
            depth = self.tree.max_depth
            return noise_ahead(sampler.seed, after, depth, num_tokens, device, state.rows)
        roots = torch.tensor(after, device=device) - 1
        return draft_noise(sampler.seed, roots, self._num_inner, num_tokens, state.rows)

    def _draw(
        self, tokens: Tensor, draft_probs: Tensor, probs: Tensor, noise: Tensor, level: FixedLevel
    ) -> None:
        """Fill in the children of a level's inner nodes, and what they were drawn from.

        Args:
            tokens: [B, N], of the whole tree.
            draft_probs: [B, N, V].
            probs: [B, n, V], at the n inner nodes.
            noise: [B, I, V], of all inner nodes.
            level: which they are.
        """
        for family in level.families:
            here, own = probs[:, family.places], noise[:, family.sites]
            if self.sampling == "top_and_one":
                drawn, drawn_from = sample_top_and_one(here, family.num_ranks, own)
            else:
                drawn, drawn_from = sample_siblings(here, family.num_ranks, own), here
            tokens[:, family.children] = drawn.flatten(1)
            draft_probs[:, family.nodes] = drawn_from.to(draft_probs)

    def observe(self, state: DraftRows, result: StepResult) -> DraftRows:
        """Append the tokens gained."""
        return state.observe(result)

    def select(self, state: DraftRows, rows: Tensor) -> DraftRows:
        """Keep some rows."""
        return state.select(rows)


def fill_best(tokens: Tensor, scores: Tensor, level: FixedLevel) -> None:
    """Fill in the best children of a level's inner nodes.

    Args:
        tokens: [B, N], of the whole tree.
        scores: [B, n, V], at the n inner nodes.
        level: which they are.
    """
    for family in level.families:
        best = scores[:, family.places].topk(family.num_ranks, dim=-1).indices
        tokens[:, family.children] = best.flatten(1)[:, family.slots]
