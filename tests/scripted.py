"""Drafters, and a sample of models, for the decoding tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specheads.drafters.contract import FINAL, Candidates, StepResult
from specheads.tree import Tree
from tests.zoo import SMALL, VOCAB, build

__all__ = ["MODELS", "SMALL", "VOCAB", "ScriptedDrafter", "build"]

# a sample for tests of other things; the whole of tests/zoo.py is tried in test_architectures.py
MODELS = ("llama", "llama-eager", "mistral-window", "gemma2", "gpt2")


class ScriptedDrafter:
    """Knows the true continuation and puts it into a share of its guesses.

    Args:
        tree: static.
        truth: prompt and continuation.
        hit_rate: how often a node of rank 0 is right; nodes of other ranks are right the rest of
            the time, and may then be equal siblings.
    """

    taps = (FINAL,)
    deterministic = True

    def __init__(self, tree: Tree, truth: list[int], hit_rate: float, vocab: int = VOCAB) -> None:
        self.tree, self.truth, self.hit_rate, self.vocab = tree, truth, hit_rate, vocab
        self.generator = torch.Generator().manual_seed(0)

    def start(
        self, prompt_ids: Tensor, hidden: Mapping[str, Tensor], root: Tensor
    ) -> tuple[int, int]:
        """Check the hidden states' shape; remember the root and its position."""
        assert hidden[FINAL].shape[:2] == prompt_ids.shape
        return prompt_ids.shape[1], int(root)

    def propose(self, state: tuple[int, int]) -> Candidates:
        """Guess."""
        position, root = state
        tokens = [root]
        for depth, rank in zip(self.tree.depths[1:], self.tree.ranks[1:], strict=True):
            i = position + int(depth)
            right = self.truth[i] if i < len(self.truth) else 0
            hit = bool(torch.rand((), generator=self.generator) < self.hit_rate)
            good = hit if int(rank) == 0 else (not hit and 0 < self.hit_rate < 1)
            tokens.append(right if good else (right + 1 + int(rank)) % self.vocab)
        return Candidates(torch.tensor([tokens]), self.tree)

    def observe(self, state: tuple[int, int], result: StepResult) -> tuple[int, int]:
        """Move on."""
        assert result.hidden[FINAL].shape[:2] == result.tokens.shape
        return state[0] + len(result.new_tokens[0]), int(result.next_root)
