"""Prompt lookup as a drafter: copy what followed the last few tokens when they last occurred.

Saxena, "Prompt Lookup Decoding" (2023). Needs no training, which makes it the baseline that trained
heads have to beat wherever there is nothing to copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads.drafters.contract import Candidates, StepResult
from specheads.tree import Tree


@dataclass
class NgramState:
    """One row's tokens and where its n-grams ended last.

    Attributes:
        tokens: prompt and output, the root included.
        ends: n-gram -> index of the token after its latest occurrence that has one.
        device: where candidates go.
    """

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    device: torch.device | None = None


class NgramDrafter:
    """Proposes a chain: the continuation of the latest earlier match of the longest suffix.

    Args:
        max_ngram: longest suffix to look up; shorter ones are tried after it.
        num_tokens: continuation to propose; nothing (a plain step) where nothing matches.
        min_ngram: shortest suffix to look up.

    Raises:
        ValueError: if one is below 1, or ``min_ngram`` above ``max_ngram``.
    """

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(self, max_ngram: int = 3, num_tokens: int = 10, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram must be in 1..{max_ngram} (max_ngram), got {min_ngram}")
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.num_tokens = num_tokens

    def start(self, prompt_ids: Tensor, hidden: Mapping[str, Tensor], root: Tensor) -> NgramState:
        """Index the prompt.

        Raises:
            ValueError: for more than one row.
        """
        if prompt_ids.shape[0] != 1:
            raise ValueError(f"prompt_ids must have 1 row, got {prompt_ids.shape[0]}")
        state = NgramState(device=prompt_ids.device)
        self._extend(state, prompt_ids[0].tolist() + root.tolist())
        return state

    def propose(self, state: NgramState) -> Candidates:
        """Look up the longest suffix that occurred before."""
        tokens = state.tokens
        guesses: list[int] = []
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            end = state.ends.get(tuple(tokens[-n:]))
            if end is not None:
                for source in range(end, end + self.num_tokens):  # a repeat may copy its own copy
                    known = source - len(tokens)
                    guesses.append(tokens[source] if known < 0 else guesses[known])
                break
        chain = torch.tensor([[tokens[-1], *guesses]], device=state.device)
        return Candidates(chain, Tree.chain(len(guesses)))

    def observe(self, state: NgramState, result: StepResult) -> NgramState:
        """Index the new tokens."""
        self._extend(state, result.new_tokens[0])
        return state

    def _extend(self, state: NgramState, new_tokens: list[int]) -> None:
        """Append tokens; an n-gram is entered once the token after it is known."""
        for token in new_tokens:
            index = len(state.tokens)
            for n in range(self.min_ngram, min(self.max_ngram, index) + 1):
                state.ends[tuple(state.tokens[index - n :])] = index
            state.tokens.append(token)
