"""Sequential heads (Hydra, Markov, MTP) as a drafter: a static tree filled from the root down.

Ankner et al., arXiv:2402.05109: head i reads the tokens drafted before its own, so that the same
rank under two parents is two different tokens. Each head is asked once per level, for all nodes of
that level that have children, in all rows together; the best guesses at a node are its children, so
no two siblings are equal. Guesses are a function of the prefix, and sample-and-walk stays exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.following import Follower, HeadsState
from specheads.drafters.heads import check_tree
from specheads.models.mtp import MtpHeads
from specheads.models.mtp_steps import MtpSteps
from specheads.models.stepwise import Steps, Tables
from specheads.tree import Tree

if TYPE_CHECKING:
    from specheads.models.kinds import Heads
    from specheads.models.output import OutputLayer
    from specheads.models.stepwise import Embed


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


def steps_of(
    heads: Heads, output: OutputLayer, embed: Embed | None, depth: int
) -> Callable[[], Steps | MtpSteps]:
    """Return a function that returns the heads as they are when it is called.

    Args:
        heads: sequential ones.
        output: the base's output layer.
        embed: the base's input embedding, for heads that read tokens through it.
        depth: how many of the heads will be asked.

    Raises:
        ValueError: for parallel heads, or if the embedding is missing.
    """
    if isinstance(heads, MtpHeads):
        mtp = MtpSteps(heads, output, embed)
        return lambda: mtp
    tables = Tables(heads, embed, depth)
    return lambda: Steps(heads, output, tables)


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
        self.taps = (heads.tap,)
        self._follower = Follower(heads, output, embed)
        self._steps = steps_of(heads, output, embed, tree.max_depth)
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
