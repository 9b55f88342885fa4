"""Medusa heads as a drafter: every head guesses its own token ahead from one hidden state.

Cai et al., arXiv:2401.10774, section 2.1. Head i predicts depth i + 1; its guesses depend on the
last committed hidden state and not on the guesses above them, so one top-k per head fills the tree.

Where drafters of heads stand: the last certain token, and the hidden state that predicted it.

Sequential heads (Hydra, Markov, MTP) as a drafter: a static tree filled from the root down.

Ankner et al., arXiv:2402.05109: head i reads the tokens drafted before its own, so that the same
rank under two parents is two different tokens. Each head is asked once per level, for all nodes of
that level that have children, in all rows together; the best guesses at a node are its children, so
no two siblings are equal. Guesses are a function of the prefix, and sample-and-walk stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads.drafters.contract import Prefill, StepResult

if TYPE_CHECKING:
    from specheads.models.base import Embed
    from specheads.models.kinds import HeadCache, Heads
    from specheads.models.output import OutputLayer
from typing import TYPE_CHECKING

from specheads.attention.tree import Tree
from specheads.drafters.contract import Candidates
from specheads.models.output import side_by_side

if TYPE_CHECKING:
    from specheads.models.kinds import Heads
    from specheads.models.output import OutputLayer


@dataclass(frozen=True)
class HeadsState:
    """Where the next guesses start.

    Attributes:
        root: [B], the last certain token.
        hidden: [B, d], the hidden state that predicted it, behind the prefix layer if there is one;
            of MTP heads [K, B, d], what each of their layers makes of it.
        predict: the heads as they were when the text began.
        memory: what layers of the heads remember of the text, if they have any that attend.
    """

    root: Tensor
    hidden: Tensor
    predict: Any
    memory: HeadCache | None = None


class Follower:
    """Goes from one certain token to the next, and takes along what attends.

    Where a conversation goes on behind a cache, hidden states of what was read before are not at
    hand: layers of the heads that attend then see what is new only. That costs accepted tokens and
    changes none.

    The heads may lie on another device than the token ids: that of the output layer, where a base
    model is spread over several.

    Args:
        heads: the heads.
        output: the base model's output layer.
        embed: the base's input embedding, where layers of the heads read tokens through it.

    Attributes:
        device: of the heads.
    """

    def __init__(self, heads: Heads, output: OutputLayer, embed: Embed | None = None) -> None:
        self.device = next((p.device for p in heads.parameters()), output.weight.device)
        self._heads, self._embed = heads, embed

    def start(self, prefill: Prefill, predict: Any) -> HeadsState:
        """Start behind the prompt."""
        memory = self._heads.memory(len(prefill.num_tokens), self._embed)
        if memory is None:
            return HeadsState(
                prefill.root, prefill.last_hidden(*self._heads.taps).to(self.device), predict
            )
        ahead = prefill.tokens.roll(-1, dims=1).to(self.device)
        rows = torch.arange(len(ahead), device=self.device)
        last = torch.tensor(prefill.num_tokens, device=self.device) - 1
        ahead[rows, last] = prefill.root.to(self.device)
        hidden = side_by_side(prefill.hidden, self._heads.taps).to(self.device)
        memory, last_hidden = memory.append(hidden, prefill.num_tokens, ahead)
        return HeadsState(prefill.root, last_hidden, predict, memory)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        hidden, path = side_by_side(result.hidden, self._heads.taps), result.path
        if state.memory is not None:
            # per row the accepted nodes, as many as tokens were gained
            counts = [len(new) for new in result.new_tokens]
            width = max(1, *counts)
            nodes = path[:, :width].clamp(min=0).to(hidden.device)
            if len(hidden) == 1:
                hidden = hidden.index_select(1, nodes[0])
            else:
                hidden = hidden[torch.arange(len(hidden), device=hidden.device)[:, None], nodes]
            padded = [[*new, *[0] * (width - len(new))] for new in result.new_tokens]
            tokens = torch.tensor(padded, device=self.device)
            memory, last = state.memory.append(hidden.to(self.device), counts, tokens)
            return replace(state, root=result.next_root, hidden=last, memory=memory)
        if len(hidden) == 1 and path.device.type == "cpu":  # nothing to wait for
            accepted = hidden[:, path[0].tolist()[int(result.num_accepted)]]
        else:
            rows = torch.arange(len(hidden), device=hidden.device)
            accepted = hidden[rows, result.last_node.to(hidden.device)]
        return replace(state, root=result.next_root, hidden=accepted.to(self.device))

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        return replace(
            state,
            root=state.root[rows],
            hidden=state.hidden.index_select(-2, rows.to(self.device)),
            memory=None if state.memory is None else state.memory.select(rows),
        )


class HeadsDrafter:
    """Fills a static tree with the heads' best guesses.

    Args:
        heads: parallel ones.
        output: the base model's output layer, which shared heads go through.
        tree: at most as deep as there are heads.

    Raises:
        ValueError: if the tree is deeper than the heads or wider than the tokens they can guess.
    """

    deterministic = True

    def __init__(self, heads: Heads, output: OutputLayer, tree: Tree) -> None:
        check_tree(tree, heads)
        self.heads = heads
        self.output = output
        self.tree = tree
        self.taps = heads.taps
        self._follower = Follower(heads, output)
        self._num_ranks = tree.max_rank + 1
        # node -> its place in the heads' top-k lists laid end to end, [N - 1]
        slots = (tree.depths - 1) * self._num_ranks + tree.ranks
        self._slots = slots[1:].to(self._follower.device)

    def start(self, prefill: Prefill) -> HeadsState:
        """Start from the prompt's last hidden state; the heads need no others."""
        # a snapshot for every text anew: the heads may have been trained on in between
        predict = self.heads.snapshot(self.output)
        self.tree = self.tree.to(prefill.root.device)
        return self._follower.start(prefill, predict)

    def propose(self, state: HeadsState) -> Candidates:
        """One pass of all heads, one top-k, one gather."""
        root = state.root[:, None]
        if self.tree.num_nodes == 1:
            return Candidates(root, self.tree)
        logits = state.predict(state.hidden)[: self.tree.max_depth]  # [D, B, V']
        best = logits.topk(self._num_ranks, dim=-1).indices
        best = best.transpose(0, 1).flatten(1)  # [B, D * ranks]
        guesses = self.heads.token_ids(best.index_select(1, self._slots))
        return Candidates(torch.cat([root, guesses.to(root.device)], dim=1), self.tree)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        return self._follower.observe(state, result)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        return self._follower.select(state, rows)


def check_tree(tree: Tree, heads: Heads) -> None:
    """Refuse a tree that the heads cannot fill.

    Raises:
        ValueError: if it is deeper than the heads or wider than the tokens they can guess.
    """
    if tree.max_depth > heads.num_heads:
        raise ValueError(f"tree has depth {tree.max_depth}, but there are {heads.num_heads} heads")
    if tree.max_rank < heads.num_outputs:
        return
    guessed = "the vocabulary" if heads.token_map is None else "the heads guess among"
    raise ValueError(f"tree has rank {tree.max_rank}, {guessed} {heads.num_outputs} tokens")


@dataclass(frozen=True)
class Level:
    """How one level of a tree is filled from the inner nodes (those with children) above it.

    Attributes:
        num_ranks: R, guesses that each inner node above is asked for.
        slots: [M], where the level's nodes stand among these guesses laid end to end.
        inner: [I], places of the level's own inner nodes; None where all are.
        parents: [I], the places of their parents among the inner nodes above; None where node for
            node follows.
    """

    num_ranks: int
    slots: Tensor
    inner: Tensor | None
    parents: Tensor | None


def levels_of(tree: Tree, device: torch.device) -> list[Level]:
    """Return the levels of a tree, from depth 1 on."""
    above: list[tuple[int, ...]] = [()]
    levels = []
    for depth in range(1, tree.max_depth + 1):
        nodes = [choice for choice in tree.choices if len(choice) == depth]
        num_ranks = 1 + max(node[-1] for node in nodes)
        places = [above.index(node[:-1]) for node in nodes]
        slots = [place * num_ranks + node[-1] for place, node in zip(places, nodes, strict=True)]
        with_children = {choice[:-1] for choice in tree.choices if len(choice) == depth + 1}
        inner = [i for i, node in enumerate(nodes) if node in with_children]
        parents = [places[i] for i in inner]
        levels.append(
            Level(
                num_ranks,
                torch.tensor(slots, device=device),
                None if len(inner) == len(nodes) else torch.tensor(inner, device=device),
                None
                if parents == list(range(len(above)))
                else torch.tensor(parents, device=device),
            )
        )
        above = [nodes[i] for i in inner]
    return levels


class SequentialDrafter:
    """Fills a static tree with the best guesses of heads that read the tokens drafted before.

    Args:
        heads: sequential ones.
        output: the base model's output layer, which shared heads go through.
        embed: the base model's input embedding, for heads that read tokens through it; takes and
            returns tensors on the heads' device.
        tree: at most as deep as there are heads.

    Raises:
        ValueError: if the tree is deeper than the heads or wider than the tokens they can guess.
    """

    deterministic = True

    def __init__(self, heads: Heads, output: OutputLayer, embed: Embed | None, tree: Tree) -> None:
        check_tree(tree, heads)
        self.heads, self.output, self.tree = heads, output, tree
        self.taps = heads.taps
        self._follower = Follower(heads, output, embed)
        self._steps = heads.steps(output, embed, tree.max_depth)
        self._levels = levels_of(tree, self._follower.device)

    def start(self, prefill: Prefill) -> HeadsState:
        """Start from the prompt's last hidden state."""
        # for every text anew: the heads may have been trained on in between
        steps = self._steps()
        self.tree = self.tree.to(prefill.root.device)
        return self._follower.start(prefill, steps)

    @torch.no_grad()
    def propose(self, state: HeadsState) -> Candidates:
        """One head, one top-k and one gather per level."""
        root = state.root[:, None]
        if not self._levels:
            return Candidates(root, self.tree)
        there = state.root.to(self._follower.device)
        walk = state.predict.begin(state.hidden, there, state.memory)
        found = []
        for number, level in enumerate(self._levels, start=1):
            best = walk.logits().topk(level.num_ranks, dim=-1).indices.flatten(1)
            tokens = self.heads.token_ids(best.index_select(1, level.slots))
            found.append(tokens)
            if number < len(self._levels):
                inner = tokens if level.inner is None else tokens.index_select(1, level.inner)
                walk.descend(inner, level.parents)
        guesses = torch.cat(found, dim=1).to(root.device)
        return Candidates(torch.cat([root, guesses], dim=1), self.tree)

    def observe(self, state: HeadsState, result: StepResult) -> HeadsState:
        """Move to the last accepted node."""
        return self._follower.observe(state, result)

    def select(self, state: HeadsState, rows: Tensor) -> HeadsState:
        """Keep some rows."""
        return self._follower.select(state, rows)
