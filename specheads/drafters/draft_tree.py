"""Trees that a draft model fills: grown at every step, or of a fixed shape.

A grown tree (:class:`DraftTreeDrafter`) takes its shape from the draft model's own probabilities,
level by level as EAGLE-2 does (arXiv:2406.16858): of every level the most valuable nodes are read,
and of all that was found the most valuable nodes are proposed.

A fixed tree (:class:`SampledTreeDrafter`) takes siblings drawn one after another from the draft
model's distribution at their parent, about which recursive rejection decides: Sequoia
(arXiv:2402.12374), recursive speculative decoding (arXiv:2402.14160).
:func:`sequoia_tree` finds the best shape: where the k-th child of any node is
accepted at a rate that depends on k alone, dynamic programming finds the tree of a given size and
depth that accepts most (Sequoia, section 3). A child can only stand beside all those drawn before
it, and their rates need not fall, so that taking the most valuable node next may miss it.

The draft model's cache holds certain text only. A level is read by verifying the nodes read so far
once more with the new ones: they are few (those with children), and one pass is one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import Choice, RowTrees, Tree
from specheads.config import ConfigError
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.draft_model import DraftCache
from specheads.drafters.growing import NUM_RANKS, WIDTH, Nodes, best_guesses, grow_on_host, pack
from specheads.drafters.heads import levels_of
from specheads.models.base import output_device
from specheads.models.draft import vocab_size
from specheads.models.support import tree_support
from specheads.system.errors import at_least, check
from specheads.verification.acceptance import sample_siblings

MAX_DEPTH = 6


def check_reads_trees(draft: PreTrainedModel) -> None:
    """Refuse a draft model that cannot read a tree.

    Raises:
        ConfigError: with the reason.
    """
    support = tree_support(draft)
    if support.kind != "tree":
        raise ConfigError(f"a draft tree needs a draft model that reads trees: {support.reason}")


class CachedTreeDrafter:
    """What both kinds have in common: their state is the draft model's cache.

    Args:
        draft: the draft model, in eval mode; of the base model's token ids.

    Raises:
        ConfigError: for a draft model that cannot read a tree.
    """

    taps: tuple[str, ...] = ()

    def __init__(self, draft: PreTrainedModel) -> None:
        check_reads_trees(draft)
        self.draft = draft
        self._latest: DraftCache | None = None  # a conversation may go on

    def start(self, prefill: Prefill) -> DraftCache:
        """Start behind the prompt; the draft model reads it with the first guesses."""
        self._latest = DraftCache(self.draft, prefill, self._latest)
        return self._latest

    def observe(self, state: DraftCache, result: StepResult) -> DraftCache:
        """Append the tokens gained."""
        return state.observe(result)

    def select(self, state: DraftCache, rows: Tensor) -> DraftCache:
        """Keep some rows."""
        return state.select(rows)

    def join(self, state: DraftCache, other: DraftCache) -> DraftCache:
        """Take the rows of both."""
        return state.join(other)


class DraftTreeDrafter(CachedTreeDrafter):
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
        self.num_nodes, self.width, self.min_gain = num_nodes, width, min_gain
        self.max_depth = min(max_depth, num_nodes - 1)
        self.num_ranks = min(num_ranks, num_nodes - 1)
        at_least(self, num_nodes=2, max_depth=1, num_ranks=1, width=1, min_gain=0)
        super().__init__(draft)

    @torch.inference_mode()
    def propose(self, state: DraftCache) -> Candidates:
        """One pass of the draft model per level, as far down as it may pay."""
        scale = 1 / state.sampler.temperature if state.sampler.temperature else 1.0
        limits = state.limits([self.max_depth] * len(state.rows))
        if not any(limits):
            return Candidates(state.root[:, None], Tree.chain(0).to(state.root.device))
        roots = [text[-1] for text in state.texts]
        # the nodes that the draft model has read, a tree per row
        read, above = [[root] for root in roots], [[-1] for _ in roots]
        first = depth = 0  # of those that were asked last

        def ask(nodes: Nodes | None) -> tuple[Tensor, Tensor]:
            nonlocal first, depth
            if nodes is None:
                logits = state.sync()[:, None]
            else:
                before, first, depth = first, len(read[0]), depth + 1
                for tokens, parents, new in zip(read, above, nodes, strict=True):
                    tokens += [token for _, token in new]
                    parents += [before + place for place, _ in new]
                tree = RowTrees.from_lists(above, depth)
                logits = state.verify_again(torch.tensor(read), tree)[:, first:]
            logits = state.shared(logits).float() * scale
            return best_guesses(logits, min(self.num_ranks, logits.shape[-1]))

        rows = grow_on_host(ask, roots, limits, self.num_nodes, self.width, self.min_gain)
        return pack(rows, state.root.device)


class SampledTreeDrafter(CachedTreeDrafter):
    """Fills a fixed tree from a draft model.

    Siblings are drawn from the draft model's distribution as the base model's sampler makes it
    (temperature, top-k, top-p). At temperature 0 they are its best guesses.

    Args:
        draft: the draft model, in eval mode; of the base model's token ids.
        tree: its ranks are the order in which siblings are drawn and tested; without gaps.
            :func:`sequoia_tree` finds good ones.
        coupled: take those guesses that the draft model would draw first with the very noise that
            the base model will draw with at their position; a function of text and seed, so that
            output is plain decoding's for the seed. Else they are drawn one after another without
            replacement, with noise that nothing else uses: the output has the base model's
            distribution, but is not plain decoding's for the seed.

    Raises:
        ConfigError: for a tree without guesses, with gaps in its ranks, or wider than the draft
            model has tokens, and for a draft model that cannot read a tree.
    """

    def __init__(self, draft: PreTrainedModel, tree: Tree, *, coupled: bool = False) -> None:
        known, size, nodes = {*tree.choices}, vocab_size(draft), [(), *tree.choices]
        gap = [c for c in tree.choices if c[-1] and (*c[:-1], c[-1] - 1) not in known]
        check(tree.num_nodes > 1, "num_nodes of tree", tree.num_nodes, "at least 2: a guess")
        check(not gap, "tree", gap[:1], "without nodes that lack the sibling drawn before them")
        check(tree.max_rank < size, "ranks", tree.max_rank, f"below the draft's {size} tokens")
        super().__init__(draft)
        self.tree, self.deterministic = tree, coupled
        device, above = output_device(draft), {choice[:-1] for choice in known}
        inner = [place for place, node in enumerate(nodes) if node in above]  # have children
        self._levels = levels_of(tree, True, device)
        self._inner = torch.tensor(inner, device=device)
        # what the draft model reads before each level: all inner nodes above it
        self._read = [
            Tree.from_choices(nodes[place] for place in inner[1:] if len(nodes[place]) <= depth)
            for depth in range(tree.max_depth)
        ]

    @torch.inference_mode()
    def propose(self, state: DraftCache) -> Candidates:
        """One pass of the draft model per level."""
        limits = state.limits([self.tree.max_depth] * len(state.rows))
        place, sampler, coupled = state.root.device, state.sampler, self.deterministic
        if not any(limits):
            return Candidates(state.root[:, None], Tree.chain(0).to(place))
        logits, noise, num_read = state.sync()[:, None], None, 0
        read = state.root[:, None].to(logits.device)
        tokens_of, probs_of = [read], []
        if sampler.temperature > 0:
            num = self.tree.max_depth if coupled else len(self._inner)
            noise = state.noise(num, state.shared(logits), coupled=coupled)
        for depth, (level, inner) in enumerate(zip(self._levels, self._read, strict=True)):
            if depth > 0:
                logits = state.verify_again(read, inner)[:, num_read:]
            scores = state.shared(logits)
            if noise is None:
                guesses = scores.topk(level.num_ranks, dim=-1).indices
            elif coupled:
                scores = sampler.warp(scores) + noise[:, depth, None]
                guesses = scores.topk(level.num_ranks, dim=-1).indices
            else:
                probs_of.append(sampler.probs(scores))
                draws = noise[:, num_read : inner.num_nodes]  # each inner node has its own
                guesses = sample_siblings(probs_of[-1], level.num_ranks, draws)
            num_read = inner.num_nodes
            # a node with fewer children takes the front: more guesses begin as fewer ones do
            tokens_of.append(guesses.flatten(1).index_select(1, level.slots))
            read = torch.cat([read, tokens_of[-1].index_select(1, level.inner)], dim=1)
        tokens = torch.cat(tokens_of, dim=1)
        if min(limits) < self.tree.max_depth:
            deepest = torch.tensor(limits, device=tokens.device)[:, None]
            tokens = tokens.masked_fill(self.tree.depths.to(tokens.device) > deepest, -1)
        tree, tokens = self.tree.to(place), tokens.to(place)
        if noise is None or coupled:
            return Candidates(tokens, tree, follows_noise=noise is not None)
        draft_probs = torch.zeros_like(noise[:, :1]).repeat(1, tokens.shape[1], 1)
        draft_probs[:, self._inner] = torch.cat(probs_of, dim=1).to(draft_probs)
        return Candidates(tokens, tree, draft_probs.to(place), "without_replacement")


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
        ConfigError: if ``num_nodes`` < 1, ``max_depth`` < 0, or a rate lies outside [0, 1].
    """
    check(num_nodes >= 1, "num_nodes", num_nodes, "at least 1")
    check(max_depth >= 0, "max_depth", max_depth, "at least 0")
    check(all(0 <= rate <= 1 for rate in rates), "rates", list(rates), "in [0, 1]")
    # per depth, [N + 1] the most tokens that a tree of at most so many nodes gains
    values = [(torch.arange(num_nodes + 1) > 0).double()]
    # per depth and child [N]: of so many nodes for it and its later siblings, how many it gets
    shares: list[list[list[int]]] = [[]]
    rest = torch.arange(num_nodes)[:, None] - torch.arange(num_nodes)  # what a child leaves
    for _ in range(max_depth):
        after, of_children = torch.zeros(num_nodes, dtype=torch.float64), []
        # the last child first: it can only stand beside all those before it
        for rate in reversed(rates[: num_nodes - 1]):
            gains = rate * values[-1][:num_nodes] + after[rest.clamp(min=0)]
            gains = gains.masked_fill(rest < 0, -1.0)
            gains[:, 0] = 0.0  # without this child there are no later ones
            after, share = gains.max(dim=1)
            of_children.append(share.tolist())
        values.append(torch.cat([values[0][:1], 1 + after]))
        shares.append(of_children[::-1])

    def below(path: Choice, left: int, depth: int) -> Iterator[Choice]:
        for child, of_child in enumerate(shares[depth]):
            if not (share := of_child[left]):
                return
            yield (*path, child)
            yield from below((*path, child), share - 1, depth - 1)
            left -= share

    tree = Tree.from_choices(below((), num_nodes - 1, max_depth))
    return tree, float(values[-1][num_nodes])
