"""Heads as a drafter: Medusa, Hydra, Markov and MTP heads fill a static tree, or grow one.

Parallel heads (Cai et al., arXiv:2401.10774, section 2.1) guess from the last committed hidden
state alone: head i predicts depth i + 1 whatever stands above, so one top-k of all heads fills the
whole tree. Sequential heads (Hydra, Ankner et al., arXiv:2402.05109; Markov; MTP) read the tokens
drafted before their own, so that the same rank under two parents is two different tokens: each head
runs once per level, for all nodes of that level that have children, in all rows together. Heads
that read of these tokens the last one alone (Markov), of a small vocabulary, guess in two waves:
the few best of each depth first, then what each of these adds to each of the next.

The best guesses at a node are its children, so no two siblings are equal. Where the base model
draws, the best are those by the heads' logits with the noise of its own draws at that position
(:class:`Draws`). Guesses are a function of prefix and seed, and sample-and-walk stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.attention.tree import RowTrees, Tree
from specheads.drafters import growing
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.growing import Grown, Nodes, OneTree, best_guesses, on_host
from specheads.models.forward import pad_rows
from specheads.models.head_cache import rows_at
from specheads.models.kinds import HeadCache, Heads, Walk
from specheads.models.output import OutputLayer, side_by_side
from specheads.system.errors import at_least, check
from specheads.verification.sampling import Sampler

# Where heads guess in two waves, the candidates of each depth; and the most tokens to choose from
# with which they do. On tinycode's 272 eight candidates lose nothing, and a step takes a tenth less
# time; on 8,192 of SmolLM2 even 128 lose guesses, and nothing is saved.
CANDIDATES, MOST_OUTPUTS = 8, 1024


@dataclass(frozen=True)
class Draws:
    """The base model's draws ahead of some texts, which guesses follow.

    A draw is the best of logits with Gumbel noise that belongs to a position. With the same noise
    on the heads' logits both take the same token with a probability of at least
    (1 - TV) / (1 + TV), TV being the distance of the two distributions (Daliri et al.,
    arXiv:2408.07978), where without it the best guess is drawn as often as it is likely.

    Attributes:
        sampler: how the base model's tokens are drawn; at temperature 0 there is nothing to follow.
        vocab_size: V of the base model.
        rows: [B], which rows of the batch these are, for their seeds.
        lengths: [B], tokens of each text, the root included: where the first guess stands.
    """

    sampler: Sampler
    vocab_size: int
    rows: list[int]
    lengths: list[int]

    def noise(self, depth: int, num: int, heads: Heads, device: torch.device) -> Tensor:
        """Return the noise at ``num`` depths of the trees from ``depth`` on, [num, B, V']."""
        starts = [length + depth for length in self.lengths]
        noise = self.sampler.noise_from(starts, num, self.vocab_size, device, self.rows)
        kept = heads.token_map
        noise = noise[..., : heads.num_outputs] if kept is None else noise[..., kept]
        return noise.transpose(0, 1)

    def follow(self, logits: Tensor, depth: int, heads: Heads) -> Tensor:
        """Return what draws would be the best of; the logits where the base model does not draw.

        Args:
            logits: [D, B, n, V'], of the heads, at the nodes of as many depths of the trees.
            depth: of the first nodes whose children are guessed.
            heads: which.

        Returns:
            As the logits; float32 where there are draws.
        """
        if not self.sampler.temperature:
            return logits
        noise = self.noise(depth, len(logits), heads, logits.device)
        return self.sampler.warp(logits) + noise[:, :, None]

    def select(self, kept: Sequence[int]) -> Draws:
        """Keep some texts."""
        rows, lengths = ([each[i] for i in kept] for each in (self.rows, self.lengths))
        return replace(self, rows=rows, lengths=lengths)


NO_DRAWS = Draws(Sampler(), 0, [], [])


class Unread(NamedTuple):
    """What layers of heads that attend have not read of some texts; see :class:`HeadCache`.

    Attributes:
        hidden: [B, T, n * d], the base's hidden states at the heads' taps, right-padded.
        counts: per row how many of the T are real.
        tokens: [B, T], the token that came after each.
    """

    hidden: Tensor
    counts: Sequence[int]
    tokens: Tensor

    def select(self, rows: Tensor) -> Unread:
        """Keep some rows."""
        counts = [self.counts[row] for row in rows.tolist()]
        here = rows.to(self.tokens.device)
        return Unread(self.hidden[here], counts, self.tokens[here])

    @staticmethod
    def joined(parts: Sequence[Unread]) -> Unread:
        """Return what is unread after one another as one."""
        if len(parts) == 1:
            return parts[0]
        hidden = torch.cat([part.hidden for part in parts], dim=1)
        tokens = torch.cat([part.tokens for part in parts], dim=1)
        counts = [sum(each) for each in zip(*(part.counts for part in parts), strict=True)]
        if len(counts) > 1:  # padding lies in between: what is real comes to the front
            sizes = [(part.tokens.shape[1], torch.tensor(part.counts)) for part in parts]
            real = torch.cat([torch.arange(n) < count[:, None] for n, count in sizes], dim=1)
            places = (~real).int().argsort(dim=1, stable=True)[:, : max(counts)].to(tokens.device)
            hidden, tokens = rows_at(hidden, places), tokens.gather(1, places)
        return Unread(hidden, counts, tokens)


@dataclass
class HeadsState:
    """Where the next guesses start.

    Attributes:
        root: [B], the last certain token.
        hidden: [B, d], the hidden state that predicted it, behind the prefix layer if there is one;
            of MTP heads [K, B, d], what each of their layers makes of it. None before layers that
            attend have read anything.
        predict: the heads as they were when the text began.
        memory: what layers of the heads remember of the text, if they have any that attend.
        draws: those that guesses follow.
        unread: what these layers read first when they are asked, and not where nobody asks.
    """

    root: Tensor
    hidden: Tensor | None
    predict: Any
    memory: HeadCache | None = None
    draws: Draws = NO_DRAWS
    unread: Sequence[Unread] = ()


# candidates [B, D * C], and log-probabilities and places, see growing.best_trees
Guesses = tuple[Tensor, Tensor, Tensor]


class HeadsDrafter:
    """Proposes the heads' best guesses, in a tree of a fixed shape or one grown at every step.

    Where a conversation goes on behind a cache, hidden states of what was read before are not at
    hand: layers of the heads that attend then see only what is new. That costs accepted tokens and
    changes none.

    The heads may lie on another device than the token ids: that of the output layer, where a base
    model is spread over several.

    Args:
        heads: of any kind; those that read tokens have been told through what, see
            :meth:`specheads.models.kinds.Heads.read_through`.
        output: the base model's output layer, which shared heads go through.
        shape: the tree to fill at every step, or of what size trees are grown.

    Attributes:
        num_nodes: of every tree, root included.
        max_depth: the deepest node that a tree may have.
        num_ranks: guesses per node that a tree may use.
        width: of grown trees, see :class:`specheads.drafters.growing.Grown`.

    Raises:
        ValueError: if the tree is deeper than the heads or wider than the tokens they can guess, or
            if a number is out of range.
    """

    deterministic = True

    def __init__(self, heads: Heads, output: OutputLayer, shape: Tree | Grown) -> None:
        self.heads, self.output, self.shape = heads, output, shape
        self.taps = heads.taps
        self.num_nodes = shape.num_nodes
        self.device = next((p.device for p in heads.parameters()), output.weight.device)
        self._scales: Tensor | None = None
        if isinstance(shape, Tree):
            check_tree(shape, heads)
            self.max_depth, self.num_ranks = shape.max_depth, shape.max_rank + 1
            self._levels = levels_of(shape, heads.sequential, self.device)
            nodes = (shape.depths - 1, shape.parents, shape.ranks)
            self._nodes = [*zip(*(each.tolist() for each in nodes), strict=True)][1:]
        else:
            at_least(shape, num_nodes=2, num_ranks=1, width=1)
            self.max_depth, self.width = min(heads.num_heads, shape.num_nodes - 1), shape.width
            # more ranks than nodes can never be used
            self.num_ranks = min(shape.num_ranks, shape.num_nodes - 1, heads.num_outputs)
            given = shape.temperatures or [1.0] * heads.num_heads
            fitting = len(given) == heads.num_heads and min(given) > 0
            check(fitting, "temperatures", given, "positive, one per head")
            if any(each != 1 for each in given):
                self._scales = torch.tensor([1 / each for each in given], device=self.device)
        few = heads.num_outputs <= MOST_OUTPUTS
        self.linked = heads.markov_rank > 0 and not heads.condition and few
        if heads.sequential:
            self._steps = heads.steps(output, self.max_depth)

    def steps(self) -> Any:
        """Return the heads as they are now: they may have been trained on in between."""
        return self._steps() if self.heads.sequential else self.heads.snapshot(self.output)

    def start(self, prefill: Prefill) -> HeadsState:
        """Start behind the prompt: from its last hidden state, or all where heads attend."""
        predict, root = self.steps(), prefill.root
        sampler = prefill.sampler if prefill.follows_draws else Sampler()
        size = max(prefill.vocab_size, self.heads.vocab_size)
        draws = Draws(sampler, size, prefill.rows, [len(ids) + 1 for ids in prefill.ids])
        if isinstance(self.shape, Tree):
            self.shape = self.shape.to(root.device)
        memory = self.heads.memory(len(prefill.num_tokens))
        if memory is None:
            last_hidden = prefill.last_hidden(*self.taps).to(self.device)
            return HeadsState(root, last_hidden, predict, None, draws)
        ahead = prefill.tokens.roll(-1, dims=1).to(self.device)
        last = torch.tensor(prefill.num_tokens, device=self.device)[:, None] - 1
        ahead = ahead.scatter(1, last, root.to(self.device)[:, None])
        hidden = side_by_side(prefill.hidden, self.taps).to(self.device)
        unread = Unread(hidden, prefill.num_tokens, ahead)
        return HeadsState(root, None, predict, memory, draws, [unread])

    @torch.no_grad()
    def propose(self, state: HeadsState) -> Candidates:
        """One pass of all parallel heads, or of one sequential head per level."""
        root = state.root
        if self.num_nodes == 1:
            return Candidates(root[:, None], Tree.chain(0).to(root.device))
        follows = state.draws.sampler.temperature > 0
        if isinstance(self.shape, Tree):
            guesses = torch.cat([root[:, None], self._fill(state).to(root.device)], dim=1)
            return Candidates(guesses, self.shape, follows_noise=follows)
        if on_host(self.device):
            rows = self._grow_on_host(state)
            tree = RowTrees.from_lists([parents for _, parents in rows], self.max_depth)
            guesses = torch.tensor([tokens for tokens, _ in rows]).to(root.device)
            return Candidates(guesses, tree, follows_noise=follows)
        parents, tokens, _ = self.grow(state)
        tree = RowTrees.from_parents(parents.to(root.device), self.max_depth)
        return Candidates(tokens.to(root.device), tree, follows_noise=follows)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        hidden, memory = side_by_side(result.hidden, self.taps), state.memory
        counts = [len(new) for new in result.new_tokens]
        if memory is None:  # the last accepted node
            nodes = result.path.gather(1, result.num_accepted[:, None])
        else:  # per row the accepted nodes, as many as tokens were gained
            nodes = result.path[:, : max(counts)].clamp(min=0)
        hidden = rows_at(hidden, nodes.to(hidden.device)).to(self.device)
        last, unread = state.hidden, state.unread
        if memory is None:
            last = hidden[:, 0]
        else:
            unread = [*unread, Unread(hidden, counts, pad_rows(result.new_tokens, self.device))]
        lengths = [n + count for n, count in zip(state.draws.lengths, counts, strict=True)]
        draws = replace(state.draws, lengths=lengths)
        return replace(state, root=result.next_root, hidden=last, draws=draws, unread=unread)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        here, hidden = rows.to(self.device), state.hidden
        return replace(
            state,
            draws=state.draws.select(rows.tolist()),
            root=state.root[rows],
            hidden=None if hidden is None else hidden.index_select(-2, here),
            memory=state.memory and state.memory.select(rows),
            unread=[part.select(rows) for part in state.unread],
        )

    def join(self, state: HeadsState, other: HeadsState) -> HeadsState:
        """Take the rows of both; layers that attend read what they have not."""
        hidden = torch.cat([self.read(state), self.read(other)], dim=-2)
        draws, more, memory = state.draws, other.draws, state.memory
        rows, lengths = draws.rows + more.rows, draws.lengths + more.lengths
        draws = replace(draws, rows=rows, lengths=lengths)
        if memory is not None and other.memory is not None:
            memory = memory.join(other.memory)
        root = torch.cat([state.root, other.root])
        return replace(state, root=root, hidden=hidden, memory=memory, draws=draws)

    def read(self, state: HeadsState) -> Tensor:
        """Let layers that attend read on; return the hidden states that heads guess from."""
        if state.unread:
            assert state.memory is not None
            state.memory, state.hidden = state.memory.append(*Unread.joined(state.unread))
            state.unread = ()
        assert state.hidden is not None
        return state.hidden

    def _walk(self, state: HeadsState) -> Any:
        """Return sequential heads at the roots."""
        return state.predict(self.read(state), state.root.to(self.device), state.memory)

    def _fill(self, state: HeadsState) -> Tensor:
        """Return the guesses [B, N - 1] at the nodes of the static tree."""
        walk = self._walk(state) if self.heads.sequential else None
        if walk and self.linked:
            return self._fill_linked(*self._linked(walk, state.draws))
        found = []
        for number, level in enumerate(self._levels, start=1):
            # parallel heads have one level, in which all of them guess
            logits = walk.logits()[None] if walk else self._parallel(state)
            logits = state.draws.follow(logits, walk.depth if walk else 0, self.heads)
            best = logits.topk(level.num_ranks, dim=-1).indices.transpose(0, 1).flatten(1)
            tokens = self.heads.token_ids(best.index_select(1, level.slots))
            found.append(tokens)
            if walk and number < len(self._levels):
                walk.descend(tokens.index_select(1, level.inner), level.parents)
        return torch.cat(found, dim=1) if len(found) > 1 else found[0]

    def _grow_on_host(self, state: HeadsState) -> list[OneTree]:
        """Grow every row's tree in Python."""
        (walk, known), roots = self._begin(state), state.root.tolist()
        if known is not None:
            tokens, *levels = known
            rows = (each.transpose(0, 1).tolist() for each in levels)
            trees: list[OneTree] = []
            for root, own, *of_row in zip(roots, tokens.tolist(), *rows, strict=True):
                parents, slots = growing.best_tree_on_host(self.num_nodes, *of_row)
                trees.append(([root, *(own[slot] for slot in slots)], parents))
            return trees

        def ask(nodes: Nodes | None) -> tuple[Tensor, Tensor]:
            if nodes is not None:
                table = torch.tensor(nodes)
                walk.descend(table[..., 1], table[..., 0])
            return self._guesses(walk, state.draws)

        limits = [self.max_depth] * len(roots)
        return growing.grow_on_host(ask, roots, limits, self.num_nodes, self.width)

    def _alike(self, state: HeadsState) -> Guesses:
        """Return the guesses of parallel heads."""
        logits = state.draws.follow(self._parallel(state).float(), 0, self.heads)
        if self._scales is not None:
            logits = logits * self._scales[: self.max_depth, None, None, None]
        log_probs, places = best_guesses(logits, self.num_ranks)  # [D, B, 1, R]
        tokens = self.heads.token_ids(places.transpose(0, 1).flatten(1))
        below = log_probs.expand(-1, -1, self.num_ranks, -1)  # the same below every candidate
        return tokens, below, torch.arange(self.num_ranks, device=below.device).expand_as(below)

    def _parallel(self, state: HeadsState) -> Tensor:
        """Return the logits [D, B, 1, V'] of parallel heads."""
        logits: Tensor = state.predict(self.read(state))[: self.max_depth, :, None]
        return logits

    @torch.no_grad()
    def grow(self, state: HeadsState) -> tuple[Tensor, Tensor, Tensor]:
        """Grow every row's tree; nothing waits for the device.

        Returns:
            Parents, tokens and values, see :func:`specheads.drafters.growing.grow`.
        """
        (walk, known), roots = self._begin(state), state.root.to(self.device)
        if known is not None:
            tokens, *levels = known
            parents, slots, values = growing.best_trees(self.num_nodes, *levels)
            return parents, torch.cat([roots[:, None], tokens.gather(1, slots)], dim=1), values

        def ask(nodes: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
            if nodes is not None:
                walk.descend(*nodes)
            return self._guesses(walk, state.draws)

        return growing.grow(ask, roots, self.num_nodes, self.max_depth, self.width)

    def _begin(self, state: HeadsState) -> tuple[Any, Guesses | None]:
        """Return sequential heads at the roots; and all guesses, where these are known by then."""
        if not self.heads.sequential:
            return None, self._alike(state)
        walk = self._walk(state)
        return walk, self._linked(walk, state.draws) if self.linked else None

    def _fill_linked(self, tokens: Tensor, _: Tensor, places: Tensor) -> Tensor:
        """Return which of the candidates [B, D * C] stand at the nodes of the static tree."""
        rows = []
        for row in places.transpose(0, 1).tolist():
            found, slots = [0], []
            for depth, parent, rank in self._nodes:
                found.append(row[depth][found[parent]][rank])
                slots.append(depth * len(row[0]) + found[-1])
            rows.append(slots)
        return tokens.gather(1, torch.tensor(rows, device=tokens.device))

    def _linked(self, walk: Any, draws: Draws) -> Guesses:
        """Let heads that read of the path its last token alone guess at once, in two waves.

        First the candidates of each depth, without what a drafted token adds; then what every
        candidate adds to every one of the next depth. Probabilities are those among candidates:
        what the others of depth 1 are left is the same for all paths.
        """
        heads, output = self.heads, self.output
        alone = walk.alone(self.max_depth)
        chosen, drawn = output.finish(alone), draws.sampler.temperature > 0
        if drawn:
            noise = draws.noise(0, self.max_depth, heads, alone.device)
            chosen = draws.sampler.warp(chosen) + noise
        num_candidates = min(max(CANDIDATES, self.num_ranks), heads.num_outputs)
        places = chosen.topk(num_candidates, dim=-1).indices
        tokens = heads.token_ids(places)  # [D, B, C]
        logits = alone.gather(-1, places)[:, :, None].repeat(1, 1, num_candidates, 1)
        logits[1:] += walk.added(tokens[:-1], places[1:])
        logits = output.finish(logits)
        if drawn:
            logits = draws.sampler.warp(logits) + noise.gather(-1, places)[:, :, None]
        if self._scales is not None:
            logits = logits * self._scales[: self.max_depth, None, None, None]
        levels = best_guesses(logits, min(self.num_ranks, num_candidates))  # [D, B, C, R]
        return tokens.transpose(0, 1).flatten(1), *levels

    def _guesses(self, walk: Walk, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and token ids of the best guesses at the nodes, [B, n, R]."""
        logits = draws.follow(walk.logits().float()[None], walk.depth, self.heads)[0]
        if self._scales is not None:
            logits = logits * self._scales[walk.depth]
        log_probs, places = best_guesses(logits, self.num_ranks)
        return log_probs, self.heads.token_ids(places)


def heads_drafter(
    base: PreTrainedModel, heads: Heads, output: OutputLayer, shape: Tree | Grown
) -> HeadsDrafter:
    """Return the drafter of heads on a base, whose tokens they then read."""
    heads.read_through(base)
    return HeadsDrafter(heads, output, shape)


def check_tree(tree: Tree, heads: Heads) -> None:
    """Refuse a tree that the heads cannot fill.

    Raises:
        ConfigError: if it is deeper than the heads or wider than the tokens they can guess.
    """
    depth, rank, num_heads = tree.max_depth, tree.max_rank, heads.num_heads
    check(depth <= num_heads, "depth of tree", depth, f"at most {num_heads}, one per head")
    among = "of the vocabulary" if heads.token_map is None else "that the heads guess among"
    expected = f"below the {heads.num_outputs} tokens {among}"
    check(rank < heads.num_outputs, "rank in tree", rank, expected)


@dataclass(frozen=True)
class Level:
    """How one level of a tree is filled from the inner nodes (those with children) above it.

    Attributes:
        num_ranks: R, guesses that each inner node above is asked for.
        slots: [M], where the level's nodes stand among these guesses laid end to end.
        inner: [I], places of the level's own inner nodes.
        parents: [I], the places of their parents among the inner nodes above.
    """

    num_ranks: int
    slots: Tensor
    inner: Tensor
    parents: Tensor


def levels_of(tree: Tree, sequential: bool, device: torch.device) -> list[Level]:
    """Return the levels of a tree, from depth 1 on; of parallel heads all of them as one."""
    tree = tree.to("cpu")
    if not sequential:
        num_ranks = tree.max_rank + 1
        every = ((tree.depths - 1) * num_ranks + tree.ranks)[1:]
        return [Level(num_ranks, every.to(device), every[:0], every[:0])]
    levels, above = [], torch.tensor([0])  # the inner nodes of the level above
    for depth in range(1, tree.max_depth + 1):
        nodes = (tree.depths == depth).nonzero()[:, 0]
        places, ranks = torch.searchsorted(above, tree.parents[nodes]), tree.ranks[nodes]
        num_ranks = int(ranks.max()) + 1
        inner = torch.isin(nodes, tree.parents).nonzero()[:, 0]
        tensors = places * num_ranks + ranks, inner, places[inner]
        levels.append(Level(num_ranks, *(each.to(device) for each in tensors)))
        above = nodes[inner]
    return levels
