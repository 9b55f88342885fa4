"""Trees that a draft model fills: grown at every step, or of a fixed shape.

A grown tree (:class:`DraftTreeDrafter`) takes its shape from the draft model's own probabilities,
level by level as EAGLE-2 does (arXiv:2406.16858): of every level the most valuable nodes are read,
and of all that was found the most valuable nodes are proposed.

A fixed tree (:class:`SampledTreeDrafter`) takes the best guesses, or siblings drawn one after
another from the draft model's distribution at their parent, about which recursive rejection
decides: Sequoia (arXiv:2402.12374), recursive speculative decoding (arXiv:2402.14160). Or all but
one sibling are the best guesses and one is drawn from the rest, which accepts more at most
temperatures. :func:`sequoia_tree` finds the best shape: where the k-th child of any node is
accepted at a rate that depends on k alone, dynamic programming finds the tree of a given size and
depth that accepts most (Sequoia, section 3). A child can only stand beside all those drawn before
it, and their rates need not fall, so that taking the most valuable node next may miss it.

The draft model's cache holds certain text only. A level is read by verifying the nodes read so far
once more with the new ones: they are few (those with children), and one pass is one pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Choice, RowTrees, Tree
from specheads.config import ConfigError
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.draft_model import DraftCache, DraftRows
from specheads.drafters.growing import NUM_RANKS, WIDTH, Nodes, best_guesses, grow_on_host, pack
from specheads.models.base import input_embedding, output_device
from specheads.models.draft import vocab_size
from specheads.models.support import tree_support
from specheads.verification.rejection import sample_siblings, sample_top_and_one

MAX_DEPTH = 6


def check_reads_trees(draft: PreTrainedModel) -> None:
    """Refuse a draft model that cannot read a tree.

    Raises:
        ConfigError: with the reason.
    """
    support = tree_support(draft)
    if support.kind != "tree":
        raise ConfigError(f"a draft tree needs a draft model that reads trees: {support.reason}")


class DraftTreeDrafter:
    """Grows the tree that a draft model finds most probable, per row and step.

    Where the base model samples at a temperature, so do the draft model's probabilities have it.

    Args:
        draft: the draft model, in eval mode; of the base model's token ids.
        num_nodes: N of every tree, root included.
        max_depth: deepest node; each level takes a pass of the draft model.
        num_ranks: guesses per node to choose from.
        width: of every level only the so many most valuable nodes may have children.
        min_gain: a row's tree ends where its next level could not gain so many tokens, the sum of
            the probabilities of the paths that it would continue: what a pass of the draft model
            costs, in plain steps, is worth giving. 0 always goes as deep as it may.

    Raises:
        ValueError: if a number is out of range.
        ConfigError: for a draft model that cannot read a tree.
    """

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(
        self,
        draft: PreTrainedModel,
        num_nodes: int,
        *,
        max_depth: int = MAX_DEPTH,
        num_ranks: int = NUM_RANKS,
        width: int = WIDTH,
        min_gain: float = 0.0,
    ) -> None:
        if num_nodes < 2:
            raise ValueError(f"num_nodes must be at least 2, got {num_nodes}")
        for name, number in (("max_depth", max_depth), ("num_ranks", num_ranks), ("width", width)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if min_gain < 0:
            raise ValueError(f"min_gain must be at least 0, got {min_gain}")
        check_reads_trees(draft)
        self.draft, self.num_nodes = draft, num_nodes
        self.max_depth, self.width = min(max_depth, num_nodes - 1), width
        self.num_ranks = min(num_ranks, num_nodes - 1)
        self.min_gain = min_gain
        self._latest: DraftCache | None = None  # a conversation may go on

    def start(self, prefill: Prefill) -> DraftRows:
        """Start behind the prompt; the draft model reads it with the first guesses."""
        state = DraftRows.start(self.draft, prefill, self._latest)
        self._latest = state.cache
        return state

    @torch.inference_mode()
    def propose(self, state: DraftRows) -> Candidates:
        """One pass of the draft model per level, as far down as it may pay."""
        sampler = state.sampler
        scale = 1 / sampler.temperature if sampler.temperature else 1.0
        limits = state.limits([self.max_depth] * len(state.rows))
        if not any(limits):
            return Candidates(state.root[:, None], Tree.chain(0).to(state.root.device))
        reading = Reading(state.cache)

        def ask(nodes: Nodes | None) -> tuple[Tensor, Tensor]:
            logits = state.cache.sync()[:, None] if nodes is None else reading.ask(nodes)
            logits = state.shared(logits).float() * scale
            return best_guesses(logits, min(self.num_ranks, logits.shape[-1]))

        roots = [text[-1] for text in state.cache.texts]
        rows = grow_on_host(ask, roots, limits, self.num_nodes, self.width, self.min_gain)
        return pack(rows, state.root.device)

    def observe(self, state: DraftRows, result: StepResult) -> DraftRows:
        """Append the tokens gained."""
        return state.observe(result)

    def select(self, state: DraftRows, rows: Tensor) -> DraftRows:
        """Keep some rows."""
        return state.select(rows)


class Reading:
    """The nodes of this step's trees that the draft model has read, a tree per row.

    Args:
        cache: behind which they stand.
    """

    def __init__(self, cache: DraftCache) -> None:
        self._cache = cache
        self._tokens = [[text[-1]] for text in cache.texts]
        self._parents = [[-1] for _ in cache.texts]
        self._first, self._depth = 0, 0  # of the nodes that were asked last

    def ask(self, nodes: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
        """Go one level down; return the logits [B, n, V'] after its nodes.

        Args:
            nodes: per row n times the place of the parent among the nodes asked before, the root
                at first, and the token.
        """
        first, self._first = self._first, len(self._tokens[0])
        self._depth += 1
        for tokens, parents, new in zip(self._tokens, self._parents, nodes, strict=True):
            tokens += [token for _, token in new]
            parents += [first + place for place, _ in new]
        tree = RowTrees.from_lists(self._parents, self._depth)
        logits = verify_again(self._cache, torch.tensor(self._tokens), tree)
        return logits[:, self._first :]


def verify_again(cache: DraftCache, tokens: Tensor, tree: Tree | RowTrees) -> Tensor:
    """Return the logits [B, N, V'] at a tree whose root the cache holds as the last token.

    The cache is left as it was.

    Args:
        cache: the draft model's.
        tokens: [B, N], node 0 the last certain token.
        tree: their shape.
    """
    held = cache.forward.cache
    held.shorten([length - 1 for length in held.lengths])
    # the root may be a token that only the base model has
    known = input_embedding(cache.forward.model).shape[0]
    logits = cache.forward.verify(tokens.clamp(max=known - 1), tree)
    held.extend([1] * len(held.lengths))
    return logits


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
    nodes: list[Choice] = [(), *tree.choices]
    below: dict[Choice, list[int]] = defaultdict(list)  # by inner node, sorted as nodes are
    for node, choice in enumerate(tree.choices, start=1):
        below[choice[:-1]].append(node)
    inner, levels = list(below), []

    def index(numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers), device=device)

    for depth in range(tree.max_depth):
        read = [choice for choice in inner if len(choice) <= depth]
        first = sum(len(choice) < depth for choice in inner)
        kinds: dict[int, list[int]] = defaultdict(list)
        for site in range(first, len(read)):
            kinds[1 + nodes[below[inner[site]][-1]][-1]].append(site)
        families = []
        for num_ranks, sites in kinds.items():
            children = [(i, node) for i, site in enumerate(sites) for node in below[inner[site]]]
            families.append(
                Family(
                    num_ranks,
                    places=index(site - first for site in sites),
                    sites=index(sites),
                    nodes=index(nodes.index(inner[site]) for site in sites),
                    children=index(node for _, node in children),
                    slots=index(i * num_ranks + nodes[node][-1] for i, node in children),
                )
            )
        levels.append(
            FixedLevel(
                Tree.from_choices(read[1:]),
                index(map(nodes.index, read)),
                len(read) - first,
                families,
            )
        )
    return levels


class SampledTreeDrafter:
    """Fills a fixed tree from a draft model.

    Siblings are drawn from the draft model's distribution as the base model's sampler makes it
    (temperature, top-k, top-p). At temperature 0 they are its best guesses, whatever the sampling.

    Args:
        draft: the draft model, in eval mode; of the base model's token ids.
        tree: its ranks are the order in which siblings are drawn and tested.
            :func:`specheads.drafters.draft_tree.sequoia_tree` finds good ones.
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
        limits = state.limits([self.tree.max_depth] * len(state.rows))
        place, sampler = state.root.device, state.sampler
        if not any(limits):
            return Candidates(state.root[:, None], Tree.chain(0).to(place))
        logits = state.shared(state.cache.sync()[:, None])
        device, noise, draft_probs = logits.device, None, None
        tokens = torch.zeros(len(limits), self.tree.num_nodes, dtype=torch.long, device=device)
        tokens[:, 0] = state.root.to(device)
        if self.sampling != "none" and sampler.temperature > 0:
            num = self.tree.max_depth if self.deterministic else self._num_inner
            noise = state.noise(num, logits, coupled=self.deterministic)
            if not self.deterministic:
                draft_probs = torch.zeros_like(noise[:, :1]).repeat(1, tokens.shape[1], 1)
        for depth, level in enumerate(self._levels):
            if depth > 0:
                logits = verify_again(state.cache, tokens[:, level.nodes], level.read)
                logits = state.shared(logits[:, -level.num_asked :])
            if noise is None:
                scores = logits
            elif self.deterministic:
                scores = sampler.warp(logits) + noise[:, depth, None]
            else:
                scores = sampler.probs(logits)
            for family in level.families:
                here = scores[:, family.places]
                if noise is None or draft_probs is None:
                    guesses = here.topk(family.num_ranks, dim=-1).indices
                else:
                    draw = sample_top_and_one if self.sampling == "top_and_one" else _siblings
                    guesses, drawn_from = draw(here, family.num_ranks, noise[:, family.sites])
                    draft_probs[:, family.nodes] = drawn_from.to(draft_probs)
                tokens[:, family.children] = guesses.flatten(1)[:, family.slots]
        if min(limits) < self.tree.max_depth:
            deepest = torch.tensor(limits, device=device)[:, None]
            tokens = tokens.masked_fill(self.tree.depths.to(device) > deepest, -1)
        tree, tokens = self.tree.to(place), tokens.to(place)
        if draft_probs is None:
            return Candidates(tokens, tree)
        return Candidates(tokens, tree, draft_probs.to(place), self.sampling)

    def observe(self, state: DraftRows, result: StepResult) -> DraftRows:
        """Append the tokens gained."""
        return state.observe(result)

    def select(self, state: DraftRows, rows: Tensor) -> DraftRows:
        """Keep some rows."""
        return state.select(rows)


def _siblings(probs: Tensor, num_siblings: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return siblings drawn without replacement, and what they were drawn from."""
    return sample_siblings(probs, num_siblings, noise), probs


def sequoia_tree(rates: Sequence[float], num_nodes: int, max_depth: int) -> tuple[Tree, float]:
    """Return the tree that is expected to accept most.

    Args:
        rates: ``rates[k]``, the probability that child k is accepted where its parent was: all
            children before it were refused and it was not (measured on nodes that were visited).
        num_nodes: at most, root included.
        max_depth: at most.

    Returns:
        The tree and its expected accept length, 1 + the sum over its nodes of the product of the
        rates along the path.

    Raises:
        ValueError: if ``num_nodes`` < 1, ``max_depth`` < 0, or a rate lies outside [0, 1].
    """
    tables = _Tables(rates, num_nodes, max_depth)
    return tables.tree(num_nodes, max_depth), float(tables.values[-1][num_nodes])


class _Tables:
    """What trees of every depth and size are worth, and how their nodes are shared out.

    Attributes:
        values: per depth, [N + 1] the most tokens that a tree of at most so many nodes gains.
    """

    def __init__(self, rates: Sequence[float], num_nodes: int, max_depth: int) -> None:
        if num_nodes < 1 or max_depth < 0:
            raise ValueError(
                f"num_nodes must be at least 1 and max_depth at least 0, got {num_nodes} and"
                f" {max_depth}"
            )
        if any(not 0 <= rate <= 1 for rate in rates):
            raise ValueError(f"rates must lie in [0, 1], got {list(rates)}")
        self.rates = list(rates)[: num_nodes - 1]
        root = torch.ones(num_nodes + 1, dtype=torch.float64)
        root[0] = 0
        self.values = [root]
        # per depth and child [N]: of so many nodes for it and its later siblings, how many it gets
        self._shares: list[list[list[int]]] = [[]]
        for _ in range(max_depth):
            below, shares = self._siblings(self.values[-1])
            self.values.append(torch.cat([root[:1], 1 + below]))
            self._shares.append(shares)

    def _siblings(self, values: Tensor) -> tuple[Tensor, list[list[int]]]:
        """Share nodes out among the children of one node, the last child first.

        Args:
            values: [N + 1], of the trees that may hang there.

        Returns:
            [N], what 0 to N - 1 nodes below gain at most; and the shares.
        """
        num = len(values) - 1
        rest = torch.arange(num)[:, None] - torch.arange(num)  # [nodes, those that a child gets]
        after, shares = torch.zeros(num, dtype=torch.float64), []
        for rate in reversed(self.rates):
            gains = rate * values[:num] + after[rest.clamp(min=0)]
            gains = gains.masked_fill(rest < 0, -1.0)
            gains[:, 0] = 0.0  # without this child there are no later ones
            after, share = gains.max(dim=1)
            shares.append(share.tolist())
        return after, shares[::-1]

    def tree(self, num_nodes: int, max_depth: int) -> Tree:
        """Return the best tree of at most so many nodes."""
        return Tree.from_choices(self._nodes((), num_nodes, max_depth))

    def _nodes(self, path: Choice, num_nodes: int, depth: int) -> Iterator[Choice]:
        left = num_nodes - 1
        for child, shares in enumerate(self._shares[depth]):
            if not (share := shares[left]):
                return
            yield (*path, child)
            yield from self._nodes((*path, child), share, depth - 1)
            left -= share
