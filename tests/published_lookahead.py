"""Lookahead decoding restated from its publication, slowly: no cache, no tree, an explicit mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specheads.verification.sampling import Sampler
from tests.sampled import drawn


@dataclass(frozen=True)
class PublishedStep:
    """What one step read and gave.

    Attributes:
        window: rows of the window before the step; row 0 is without the last token of the text.
        guesses: n-grams without their first token, the oldest first.
        tokens: accepted ones, and the base model's next.
    """

    window: list[list[int]]
    guesses: list[tuple[int, ...]]
    tokens: list[int]


class PublishedLookahead:
    """Fu et al., arXiv:2402.02057, for one text and tiny models.

    Args:
        model: takes a 4-D mask as it is.
        text: prompt and first token.
        first_row: W + N - 3 tokens, any.
        window: W.
        ngram: N.
        guesses: G.
        sampler: how the model's tokens are drawn; the publication has greedy ones in the window.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        text: list[int],
        first_row: list[int],
        window: int,
        ngram: int,
        guesses: int,
        sampler: Sampler,
    ) -> None:
        assert len(first_row) == window + ngram - 3
        self.model, self.sampler = model, sampler
        self.columns, self.ngram, self.guesses = window, ngram, guesses
        self.text = list(text)
        self.window = [list(first_row)]
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        for end in range(ngram, len(text) + 1):
            self._enter(text[end - ngram : end])

    def _enter(self, ngram: list[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        known = self.pool.setdefault(first, [])
        if rest in known:
            known.remove(rest)
            known.append(rest)
        elif len(known) < self.guesses:
            known.append(rest)
        else:
            self.pool[first] = [*known[1:], rest]

    def step(self, limit: int) -> PublishedStep:
        """Give at most ``limit`` tokens."""
        full = len(self.window) == self.ngram - 1
        guesses = list(self.pool.get(self.text[-1], [])) if full else []
        here, last_row, after_guesses = self._read(guesses)
        best: list[int] = []
        then = here
        for guess, said in zip(guesses, after_guesses, strict=True):
            truth = [here, *said]
            hits = 0
            while hits < len(guess) and guess[hits] == truth[hits]:
                hits += 1
            if hits > len(best):
                best, then = list(guess[:hits]), truth[hits]
        step = PublishedStep([list(row) for row in self.window], guesses, [*best, then][:limit])
        if full:
            assert len(last_row) == self.columns
            for column in range(self.columns):
                first = self.text[-1] if column == 0 else self.window[0][column - 1]
                rest = [row[column] for row in self.window[1:]]
                self._enter([first, *rest, last_row[column]])
            rows = [*self.window, last_row]
            self.window = [rows[1][1:], *rows[2:]]
        else:
            self.window = [row[1:] for row in self.window] + [last_row[1:]]
        for token in step.tokens:
            self.text.append(token)
            if len(self.text) >= self.ngram:
                self._enter(self.text[-self.ngram :])
        return step

    @torch.no_grad()
    def _read(self, guesses: list[tuple[int, ...]]) -> tuple[int, list[int], list[list[int]]]:
        """Return what the model says after the text, the window's last row, and each guess."""
        length = len(self.text)
        tokens, positions = list(self.text), list(range(length))
        place = {(0, 0): length - 1}  # (row, column): the text's last token is column 0 of row 0
        for row, level in enumerate(self.window):
            for i, token in enumerate(level):
                column = i + 1 if row == 0 else i
                place[row, column] = len(tokens)
                tokens.append(token)
                positions.append(length - 1 + row + column)
        starts = []
        for guess in guesses:
            starts.append(len(tokens))
            tokens += guess
            positions += range(length, length + len(guess))
        sees = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        for i in range(length):
            sees[i, : i + 1] = True
        sees[length:, :length] = True
        for (row, column), i in place.items():
            for (other_row, other_column), j in place.items():
                if other_row == 0:
                    sees[i, j] |= other_column <= column
                else:
                    sees[i, j] |= other_row <= row and other_column == column
        for start, guess in zip(starts, guesses, strict=True):
            for i in range(len(guess)):
                sees[start + i, start : start + i + 1] = True
        dtype = self.model.dtype
        mask = torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
        at = torch.tensor([positions])
        logits = self.model(
            input_ids=torch.tensor([tokens]),
            attention_mask=mask[None, None],
            position_ids=at,
            use_cache=False,
        ).logits
        said = drawn(self.sampler, logits, at + 1)[0].tolist()
        last = len(self.window) - 1
        row = [said[i] for (r, _), i in sorted(place.items()) if r == last]
        return (
            said[length - 1],
            row,
            [said[s : s + len(g)] for s, g in zip(starts, guesses, strict=True)],
        )
