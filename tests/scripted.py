"""Drafters, and a sample of models, for the decoding tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specheads.attention.tree import RowTrees, Tree
from specheads.drafters.contract import FINAL, Candidates, Prefill, StepResult
from specheads.models import support as tree_support
from tests.zoo import SMALL, VOCAB, build

if TYPE_CHECKING:
    import pytest  # which a lent machine lacks, see scripts/gpu_check.py

__all__ = ["MODELS", "SMALL", "VOCAB", "ScriptedDrafter", "build"]

# a sample for tests of other things; the whole of tests/zoo.py is tried in test_architectures.py
MODELS = ("llama", "llama-eager", "mistral-window", "gemma2", "gpt2")


class ScriptedDrafter:
    """Knows the true continuations and puts them into a share of its guesses.

    Args:
        tree: static.
        truth: prompt and continuation, one row or several.
        hit_rate: how often a node of rank 0 is right; nodes of other ranks are right the rest of
            the time, and may then be equal siblings.
        row_trees: give every row its own copy of the tree, as drafters of dynamic trees do.
    """

    taps = (FINAL,)
    deterministic = True

    def __init__(
        self,
        tree: Tree,
        truth: list[int] | list[list[int]],
        hit_rate: float,
        vocab: int = VOCAB,
        *,
        row_trees: bool = False,
    ) -> None:
        self.tree, self.hit_rate, self.vocab, self.row_trees = tree, hit_rate, vocab, row_trees
        self.truth = truth if truth and isinstance(truth[0], list) else [truth]
        self.generator = torch.Generator().manual_seed(0)

    def start(self, prefill: Prefill) -> ScriptedState:
        """Check the hidden states' shape; remember the roots and their positions."""
        assert prefill.hidden[self.taps[0]].shape[:2] == prefill.tokens.shape
        assert len(prefill.last_hidden(*self.taps)) == len(prefill.ids)
        positions = [len(ids) for ids in prefill.ids]
        return ScriptedState(list(range(len(positions))), positions, prefill.root)

    def propose(self, state: ScriptedState) -> Candidates:
        """Guess."""
        rows = [self._guess(*each) for each in zip(state.rows, state.positions, strict=True)]
        guesses = torch.tensor(rows, device=state.root.device)[:, 1:]
        tokens = torch.cat([state.root[:, None], guesses], dim=1)
        tree = self.tree.to(tokens.device)
        if not self.row_trees:
            return Candidates(tokens, tree)
        parents = tree.parents.expand(len(rows), -1)
        return Candidates(tokens, RowTrees.from_parents(parents, self.tree.max_depth))

    def _guess(self, row: int, position: int) -> list[int]:
        tokens = [0]
        truth = self.truth[row]
        assert isinstance(truth, list)
        depths, ranks = self.tree.depths[1:].tolist(), self.tree.ranks[1:].tolist()
        hits = (torch.rand(len(depths), generator=self.generator) < self.hit_rate).tolist()
        for depth, rank, hit in zip(depths, ranks, hits, strict=True):
            i = position + depth
            right = truth[i] if i < len(truth) else 0
            good = hit if rank == 0 else (not hit and 0 < self.hit_rate < 1)
            tokens.append(right if good else (right + 1 + rank) % self.vocab)
        return tokens

    def observe(self, state: ScriptedState, result: StepResult) -> ScriptedState:
        """Move on."""
        assert result.hidden[self.taps[0]].shape[:2] == result.tokens.shape
        gained = map(len, result.new_tokens)
        positions = [n + new for n, new in zip(state.positions, gained, strict=True)]
        return ScriptedState(state.rows, positions, result.next_root)

    def select(self, state: ScriptedState, rows: Tensor) -> ScriptedState:
        """Keep some rows."""
        kept = rows.tolist()
        return ScriptedState(
            [state.rows[i] for i in kept], [state.positions[i] for i in kept], state.root[rows]
        )


def pretend_rounding(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, rounding: float
) -> None:
    """Let the self-test of ``model`` have measured ``rounding`` of its logits."""
    support = replace(tree_support.tree_support(model), rounding=rounding)
    attention = tree_support._known[model][0]
    monkeypatch.setitem(tree_support._known, model, (attention, support))


@dataclass(frozen=True)
class ScriptedState:
    """Which rows these are, where their roots stand, and the roots [B]."""

    rows: list[int]
    positions: list[int]
    root: Tensor


class Recorder(BaseStreamer):
    """A streamer that keeps what it is fed."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        """Keep."""
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        """Count."""
        self.ended += 1
