"""Drafters that copy from the text itself what followed its last tokens when they occurred before.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023) sees the latest match of a few tokens and
copies one continuation. It needs no training, which makes it the baseline that trained heads have
to beat wherever there is nothing to copy.

A suffix automaton (Blumer et al., 1985) finds the longest match of any length while the text grows,
and knows how often each continuation followed: those that compete become branches of a small tree,
as in SuffixDecoding (Oliaro et al., arXiv:2411.04975); the automaton itself drafts chains in SAM
decoding (Hu et al., arXiv:2411.10666).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads.drafters.contract import Candidates, Prefill, StepResult
from specheads.drafters.growing import pack


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
        chains = [[row.tokens[-1], *self.look_up(row)] for row in state.rows]
        return pack([(chain, range(-1, len(chain) - 1)) for chain in chains], state.device)

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


# How many suffixes a new token is counted for, the longest first. Other texts never have so many
# that occurred before in different places; a loop has as many as it has tokens, and there the
# longest, which are looked up, have been counted.
COUNTED = 64


class SuffixAutomaton:
    """All substrings of a growing text, in at most 2n states and O(1) amortised time per token.

    A state stands for the substrings that end at the same places; state 0 for the empty one. All
    lists go by state.

    Attributes:
        follow: token -> state, the substrings one token longer.
        link: the state of the longest suffix that ends at more places; -1 for state 0.
        length: of the longest substring.
        count: how often the substrings occurred, overlapping ones included (not kept for state 0).
        latest: index after their latest occurrence.
        last: the state of the whole text.
    """

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.latest = [-1], [0], [0], [0]
        self.last = 0

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        follow, link, length = self.follow, self.link, self.length
        end = length[self.last] + 1
        new = self._add(end, {}, 0, 0)
        state = self.last
        while state >= 0 and token not in follow[state]:
            follow[state][token] = new
            state = link[state]
        if state >= 0:
            met = follow[state][token]
            if length[met] == length[state] + 1:
                link[new] = met
            else:  # shorter ones of its substrings now end here too
                copy = self._add(length[state] + 1, dict(follow[met]), link[met], self.count[met])
                while state >= 0 and follow[state].get(token) == met:
                    follow[state][token] = copy
                    state = link[state]
                link[met] = link[new] = copy
        self.last = state = new
        for _ in range(COUNTED):
            if not state:
                break
            self.count[state] += 1
            self.latest[state] = end
            state = link[state]

    def _add(self, length: int, follow: dict[int, int], link: int, count: int) -> int:
        self.follow.append(follow)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(0)
        return len(self.follow) - 1

    @property
    def match(self) -> int:
        """The state of the longest suffix that occurred before; 0 if there is none."""
        return max(self.link[self.last], 0)

    def continuations(self, state: int) -> list[tuple[float, int, int]]:
        """Return what followed a state, the most frequent first, of equals the latest.

        Where the text ends behind all its occurrences, that of the longest suffix which went on:
        a repeat copies its own copy.

        Returns:
            Per token its share of the occurrences, the token, and the state with it.
        """
        while not self.follow[state]:
            state = self.link[state]
        follow = self.follow[state]
        if len(follow) == 1:
            return [(1.0, *each) for each in follow.items()]
        count, latest = self.count, self.latest
        total = sum(count[each] for each in follow.values())
        ordered = sorted(follow.items(), key=lambda each: (-count[each[1]], -latest[each[1]]))
        return [(count[each] / total, token, each) for token, each in ordered]


@dataclass(frozen=True)
class SuffixState:
    """Per row the automaton of its text and the text's last token; where candidates go."""

    rows: list[tuple[SuffixAutomaton, int]]
    device: torch.device


class SuffixDrafter:
    """Proposes the likeliest continuations of the longest suffix that occurred before, as a tree.

    How likely a continuation is: the share of the suffix's earlier occurrences that went on so.

    Args:
        num_nodes: N of the largest tree, root included.
        max_depth: deepest node; None is num_nodes - 1, a chain where only one thing followed.
        min_match: shortest suffix to follow; a plain step where none is as long.
        per_match: a suffix of n tokens is followed for at most per_match * n tokens, since short
            ones match by chance; None follows all as far as the tree goes.
        min_share: leave out what followed less often than this, as a share of the occurrences.

    Raises:
        ValueError: if a number is out of range.
    """

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(
        self,
        num_nodes: int = 16,
        *,
        max_depth: int | None = None,
        min_match: int = 1,
        per_match: float | None = 3.0,
        min_share: float = 0.3,
    ) -> None:
        if num_nodes < 2:
            raise ValueError(f"num_nodes must be at least 2, got {num_nodes}")
        max_depth = num_nodes - 1 if max_depth is None else max_depth
        if max_depth < 1 or min_match < 1:
            raise ValueError(
                f"max_depth and min_match must be at least 1, got {max_depth} and {min_match}"
            )
        if per_match is not None and per_match * min_match < 1:
            raise ValueError(
                f"per_match must be at least 1 / min_match, or nothing follows a match of"
                f" {min_match}, got {per_match}"
            )
        if not 0 <= min_share <= 1:
            raise ValueError(f"min_share must be in 0..1, got {min_share}")
        self.num_nodes, self.max_depth = num_nodes, max_depth
        self.min_match, self.per_match, self.min_share = min_match, per_match, min_share

    def start(self, prefill: Prefill) -> SuffixState:
        """Read the prompts."""
        rows = []
        for ids, root in zip(prefill.ids, prefill.root.tolist(), strict=True):
            automaton = SuffixAutomaton()
            for token in (*ids, root):
                automaton.extend(token)
            rows.append((automaton, root))
        return SuffixState(rows, prefill.root.device)

    def propose(self, state: SuffixState) -> Candidates:
        """Follow each row's match."""
        return pack([self._tree(*row) for row in state.rows], state.device)

    def _tree(self, automaton: SuffixAutomaton, root: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the most frequent continuations, best first."""
        start = automaton.match
        matched, depth = automaton.length[start], self.max_depth
        if matched < self.min_match:
            return [root], [-1]
        if self.per_match is not None:
            depth = min(depth, int(self.per_match * matched))
        found: list[tuple[int, int, int, int]] = []  # depth, number, token, the parent's number
        # minus the share, depth, order of arrival, token, state, the parent's number
        frontier: list[tuple[float, int, int, int, int, int]] = []
        arrived, share, here, number, below = 0, 1.0, start, 0, 1
        while True:
            if below <= depth:
                for part, token, state in automaton.continuations(here):
                    if share * part < self.min_share:
                        break
                    arrived += 1
                    heapq.heappush(frontier, (-share * part, below, arrived, token, state, number))
            if not frontier or len(found) + 1 == self.num_nodes:
                break
            negative, level, _, token, here, above = heapq.heappop(frontier)
            share, number, below = -negative, len(found) + 1, level + 1
            found.append((level, number, token, above))
        found.sort()
        place = {0: 0} | {each[1]: i for i, each in enumerate(found, start=1)}
        tokens = [root, *(token for _, _, token, _ in found)]
        return tokens, [-1, *(place[above] for _, _, _, above in found)]

    def observe(self, state: SuffixState, result: StepResult) -> SuffixState:
        """Read the new tokens."""
        for i, ((automaton, _), new) in enumerate(zip(state.rows, result.new_tokens, strict=True)):
            for token in new:
                automaton.extend(token)
            if new:
                state.rows[i] = automaton, new[-1]
        return state

    def select(self, state: SuffixState, rows: Tensor) -> SuffixState:
        """Keep some rows."""
        return SuffixState([state.rows[row] for row in rows.tolist()], state.device)
