"""A drafter whose candidates are sampled from fixed random distributions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.attention.tree import Tree
from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.verification.acceptance import sample_siblings
from specheads.verification.sampling import Sampler, draft_noise, gumbel_noise


def drawn(sampler: Sampler, logits: Tensor, positions: Tensor) -> Tensor:
    """Return what the base model draws from logits [B, ..., V] at positions [B, ...]."""
    if sampler.temperature == 0:
        return logits.argmax(-1)
    noise = gumbel_noise(sampler.seeds_of(range(len(positions))), positions, logits.shape[-1])
    return (sampler.warp(logits) + noise).argmax(-1)


@dataclass(frozen=True)
class SampledState:
    """Where the rows stand.

    Attributes:
        root: [B].
        positions: [B], of the roots.
        rows: which rows of the batch these are.
    """

    root: Tensor
    positions: Tensor
    rows: list[int]


class SampledDrafter:
    """Draws children from distributions that depend on a token and the depth.

    Args:
        tree: ranks are draw order.
        vocab_size: V.
        sampling: "without_replacement", "chain", or "none" for the best.
        seed: of the draws; row b uses ``seed + b``.
        shared: the token is the root, and all parents of a level have the same draws, as with
            parallel heads. Else it is the parent, and each parent draws anew.
    """

    taps = ()
    deterministic = False

    def __init__(
        self, tree: Tree, vocab_size: int, sampling: str, seed: int, *, shared: bool = False
    ) -> None:
        self.tree, self.vocab_size, self.sampling = tree, vocab_size, sampling
        self.seed, self.shared = seed, shared
        generator = torch.Generator().manual_seed(11)
        shape = (max(tree.max_depth, 1), vocab_size, vocab_size)
        self.probs = (1.5 * torch.randn(shape, generator=generator)).softmax(-1)
        self.children = {
            node: (tree.parents == node).nonzero().flatten().tolist()
            for node in range(tree.num_nodes)
        }

    def start(self, prefill: Prefill) -> SampledState:
        """Remember the roots and where they are."""
        positions = torch.tensor([len(ids) for ids in prefill.ids])
        return SampledState(prefill.root, positions, list(range(len(positions))))

    def propose(self, state: SampledState) -> Candidates:
        """Draw parent by parent."""
        tree, num_rows = self.tree, len(state.rows)
        seeds = [self.seed + row for row in state.rows]
        noise = draft_noise(seeds, state.positions, tree.num_nodes, self.vocab_size)
        tokens = state.root[:, None].repeat(1, tree.num_nodes)
        draft_probs = torch.zeros(num_rows, tree.num_nodes, self.vocab_size)
        for node, children in self.children.items():
            if not children:
                continue
            depth = int(tree.depths[node])
            seen = state.root if self.shared else tokens[:, node]
            # parents of one level with one noise draw the same tokens
            draws = noise[:, depth if self.shared else node]
            probs = self.probs[depth][seen]
            by_rank = self.sampling == "none"
            drawn = sample_siblings(probs, len(children), 0 * draws if by_rank else draws)
            tokens[:, children], draft_probs[:, node] = drawn, probs
        if self.sampling == "none":
            return Candidates(tokens, tree)
        return Candidates(tokens, tree, draft_probs, self.sampling)

    def observe(self, state: SampledState, result: StepResult) -> SampledState:
        """Move on."""
        gained = torch.tensor([len(new) for new in result.new_tokens])
        return replace(state, root=result.next_root, positions=state.positions + gained)

    def select(self, state: SampledState, rows: Tensor) -> SampledState:
        """Keep some rows."""
        kept = [state.rows[i] for i in rows.tolist()]
        return SampledState(state.root[rows], state.positions[rows], kept)
