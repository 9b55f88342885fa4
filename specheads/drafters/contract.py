"""What the decoding loop asks of a drafter, and what it tells it after every verify step."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specheads.attention.tree import RowTrees, Tree
from specheads.models.output import FINAL, TRUNK, side_by_side
from specheads.verification.sampling import Sampler

__all__ = ["FINAL", "TRUNK", "Candidates", "Drafter", "Prefill", "StepResult", "picked"]

T = TypeVar("T")


@dataclass(frozen=True)
class Candidates:
    """The guesses of one step.

    Attributes:
        tokens: [B, N], node 0 the root; equal siblings merged. Negative tokens are padding: never
            accepted, whatever the base model says.
        tree: their shape, shared or per row, with N nodes; it may differ from step to step.
        draft_probs: what sampled candidates were drawn from, [B, N, V]: row i is the distribution
            of the first child of node i. None for deterministic candidates.
        sampling: how siblings were drawn from it, see :mod:`specheads.verification.acceptance`.
        probes: [B, N] what the base model reads, where it reads more than ``tokens``: a node whose
            token is negative and whose probe is not is read, never accepted, and
            ``StepResult.base_tokens`` says what follows it. None: the tokens.
        own: [B, n], see ``StepResult``; set by the loop where it verifies a part of the proposal.
        follows_noise: what was guessed may depend on the noise with which the base model will draw.
    """

    tokens: Tensor
    tree: Tree | RowTrees
    draft_probs: Tensor | None = None
    sampling: str = "none"
    probes: Tensor | None = None
    own: Tensor | None = None
    follows_noise: bool = False

    @property
    def inputs(self) -> Tensor:
        """[B, N], what the base model reads; negative where it is padding."""
        return self.tokens if self.probes is None else self.probes


@dataclass(frozen=True)
class Prefill:
    """What the base model read before the first step.

    Attributes:
        ids: per row the whole text so far, without padding and without the root.
        tokens: [B, T], what was read now, right-padded: less than ``ids`` where a conversation goes
            on behind a cache.
        num_tokens: per row how many of the T are real, at least 1.
        hidden: tap -> [B, T, d].
        root: [B], the first new token.
        sampler: how the base model's tokens are drawn, which a drafter that samples imitates.
        vocab_size: V, how many tokens the base model has logits for; 0: unknown.
        follows_draws: a guess may follow the noise of the base's draws, which decide.
        numbers: [B], as which rows they draw; from 0 on if None.
    """

    ids: Sequence[Sequence[int]]
    tokens: Tensor
    num_tokens: Sequence[int]
    hidden: Mapping[str, Tensor]
    root: Tensor
    sampler: Sampler = Sampler()
    vocab_size: int = 0
    follows_draws: bool = True
    numbers: Sequence[int] | None = None

    @property
    def rows(self) -> list[int]:
        """[B], as which rows they draw."""
        return list(range(len(self.ids)) if self.numbers is None else self.numbers)

    def last_hidden(self, *taps: str) -> Tensor:
        """Return the hidden states [B, d] at each row's last real token, of taps side by side."""
        hidden = side_by_side(self.hidden, taps)
        last = torch.tensor(self.num_tokens, device=hidden.device) - 1
        return hidden[torch.arange(len(last), device=hidden.device), last]


@dataclass(frozen=True)
class StepResult:
    """What the base model said about one tree.

    Attributes:
        tree: the verified tree; shallower than the proposed one where the token limit was near.
        tokens: [B, N], the verified tokens.
        base_tokens: [B, N], the base model's next token after *every* node, accepted or not.
        hidden: tap -> [B, N, d].
        path: [B, D+1], accepted nodes, padded with -1.
        num_accepted: [B], 0..D.
        next_root: [B], the base model's token after the last accepted node.
        new_tokens: per row the tokens gained: those accepted, then ``next_root``.
        own: [B, n], where in the verified tree the n nodes stand that this drafter proposed; -1 for
            one that was not verified. None: the tree is its own, or the front of it.
        divergence: [B, D+1, 2], under a lossy rule, for each token gained: KL divergence in nats
            and total variation, of what it was drawn from to the base model's distribution.
    """

    tree: Tree | RowTrees
    tokens: Tensor
    base_tokens: Tensor
    hidden: Mapping[str, Tensor]
    path: Tensor
    num_accepted: Tensor
    next_root: Tensor
    new_tokens: list[list[int]]
    own: Tensor | None = None
    divergence: Tensor | None = None

    @property
    def places(self) -> list[Sequence[int]]:
        """[B][n], ``own`` as numbers; of a tree that is its own every node in its place."""
        if self.own is None:
            return [range(self.tree.num_nodes)] * len(self.new_tokens)
        return self.own.tolist()


class Drafter(Protocol):
    """Proposes trees; keeps whatever it needs in a state of its own, all of it [B, ...].

    A row of a batch must be proposed what it would be proposed alone.

    Attributes:
        taps: which hidden states of the base model it needs: ``FINAL``, ``TRUNK``.
        deterministic: its candidates are a function of the prefix and the seed: by the default
            rule, tokens are then those of plain decoding with the seed, and not of its distribution
            only.
    """

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the hidden states to capture."""

    @property
    def deterministic(self) -> bool:
        """Whether the candidates are a function of the prefix and the seed."""

    def start(self, prefill: Prefill) -> Any:
        """Return the state after the prefill."""

    def propose(self, state: Any) -> Candidates:
        """Return the guesses for the tokens after the root."""

    def observe(self, state: Any, result: StepResult) -> Any:
        """Return the state after a verify step."""

    def select(self, state: Any, rows: Tensor) -> Any:
        """Return the state of the rows ``rows`` [R] (long); the others have ended.

        In a beam search one may come several times: each goes its own way from there.
        """

    def join(self, state: Any, other: Any) -> Any:
        """Return the state of the rows of both, which this drafter started one after the other."""


def picked(rows: Sequence[T], kept: Sequence[int]) -> list[T]:
    """Return the ``rows`` at the places ``kept``; those that come again are copies."""
    first = {i: place for place, i in reversed(list(enumerate(kept)))}
    return [
        rows[i] if first[i] == place else copy.deepcopy(rows[i]) for place, i in enumerate(kept)
    ]
