"""Prompt lookup as a drafter: copy what followed the last few tokens when they last occurred.

Saxena, "Prompt Lookup Decoding" (2023). Needs no training, which makes it the baseline that trained
heads have to beat wherever there is nothing to copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.tree import Tree


@dataclass
class NgramRow:
    """One row's tokens and where its n-grams ended last.

    Attributes:
        tokens: prompt and output, the root included.
        ends: n-gram -> index of the token after its latest occurrence that has one.
    """

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)


@dataclass(frozen=True)
class NgramState:
    """The rows, and the device where candidates go."""

    rows: list[NgramRow]
    device: torch.device


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

    def start(self, prefill: Prefill) -> NgramState:
        """Index the prompts."""
        rows = [NgramRow() for _ in prefill.ids]
        for row, ids, root in zip(rows, prefill.ids, prefill.root.tolist(), strict=True):
            self.extend(row, [*ids, root])
        return NgramState(rows, prefill.root.device)

    def propose(self, state: NgramState) -> Candidates:
        """Look up the longest suffix that occurred before; shorter chains are padded."""
        guesses = [self.look_up(row) for row in state.rows]
        depth = max(map(len, guesses))
        chains = [
            [row.tokens[-1], *found, *[-1] * (depth - len(found))]
            for row, found in zip(state.rows, guesses, strict=True)
        ]
        return Candidates(torch.tensor(chains, device=state.device), Tree.chain(depth))

    def look_up(self, row: NgramRow) -> list[int]:
        """Return what followed the longest suffix of a row that occurred before; [] if none."""
        tokens, ends = row.tokens, row.ends
        guesses: list[int] = []
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            end = ends.get(tuple(tokens[-n:]))
            if end is not None:
                for source in range(end, end + self.num_tokens):  # a repeat may copy its own copy
                    known = source - len(tokens)
                    guesses.append(tokens[source] if known < 0 else guesses[known])
                break
        return guesses

    def observe(self, state: NgramState, result: StepResult) -> NgramState:
        """Index the new tokens."""
        for row, new_tokens in zip(state.rows, result.new_tokens, strict=True):
            self.extend(row, new_tokens)
        return state

    def select(self, state: NgramState, rows: Tensor) -> NgramState:
        """Keep some rows."""
        return NgramState([state.rows[row] for row in rows.tolist()], state.device)

    def extend(self, row: NgramRow, new_tokens: list[int]) -> None:
        """Append tokens; an n-gram is entered once the token after it is known."""
        for token in new_tokens:
            index = len(row.tokens)
            for n in range(self.min_ngram, min(self.max_ngram, index) + 1):
                row.ends[tuple(row.tokens[index - n :])] = index
            row.tokens.append(token)


# Prompt lookup at its best on the embedded model's calibration answers: longer matches first, any
# match rather than none, ten tokens at once.
LOOKUP_NGRAM, LOOKUP_TOKENS = 8, 10
