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
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice

from specheads.drafters.contract import Candidates
from specheads.drafters.growing import OneTree, TextDrafter, TextRows, by_depth, pack
from specheads.system.errors import at_least, check, within

# Prompt lookup at its best on the embedded model's calibration answers: longer matches first, any
# match rather than none, ten tokens at once.
LOOKUP_NGRAM, LOOKUP_TOKENS = 8, 10


class NgramRow:
    """One row's text, and where its n-grams ended last; arguments as :class:`NgramDrafter` has.

    Attributes:
        tokens: prompt and output, the root included.
        ends: n-gram -> index of the token after its latest occurrence that has one.
    """

    def __init__(self, max_ngram: int, num_tokens: int, min_ngram: int) -> None:
        expected = f"in 1..{max_ngram} (max_ngram)"
        check(1 <= min_ngram <= max_ngram, "min_ngram", min_ngram, expected)
        check(num_tokens >= 1, "num_tokens", num_tokens, "at least 1")
        self.max_ngram, self.num_tokens, self.min_ngram = max_ngram, num_tokens, min_ngram
        self.tokens: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}

    def extend(self, new_tokens: Sequence[int]) -> None:
        """Append tokens; an n-gram is entered once the token after it is known."""
        for token in new_tokens:
            index = len(self.tokens)
            for n in range(self.min_ngram, min(self.max_ngram, index) + 1):
                self.ends[tuple(self.tokens[index - n :])] = index
            self.tokens.append(token)

    def look_up(self) -> list[int]:
        """Return what followed the longest suffix that occurred before; [] if none did."""
        for n in range(min(self.max_ngram, len(self.tokens)), self.min_ngram - 1, -1):
            end = self.ends.get(tuple(self.tokens[-n:]))
            if end is not None:  # a repeat may copy its own copy
                copied = self.tokens[end : end + self.num_tokens]
                return list(islice(cycle(copied), self.num_tokens))
        return []


class CopyDrafter(TextDrafter, ABC):
    """What drafters that copy have in common: each row's tree is made in Python."""

    def propose(self, state: TextRows) -> Candidates:
        """Return the rows' trees; smaller ones are padded."""
        return pack(self.trees(state), state.device)

    @abstractmethod
    def trees(self, state: TextRows) -> list[OneTree]:
        """Return tokens and parents of each row's tree, the root first."""


class NgramDrafter(CopyDrafter):
    """Proposes a chain: the continuation of the latest earlier match of the longest suffix.

    Args:
        max_ngram: longest suffix to look up; shorter ones are tried after it.
        num_tokens: continuation to propose; nothing (a plain step) where nothing matches.
        min_ngram: shortest suffix to look up.

    Raises:
        ConfigError: if one is below 1, or ``min_ngram`` above ``max_ngram``.
    """

    def __init__(self, max_ngram: int = 3, num_tokens: int = 10, min_ngram: int = 1) -> None:
        self.begin = partial(NgramRow, max_ngram, num_tokens, min_ngram)
        self.begin()  # for its errors

    def trees(self, state: TextRows) -> list[OneTree]:
        """Look up the longest suffix that occurred before."""
        chains = [[row.tokens[-1], *row.look_up()] for row in state.rows]
        return [(chain, range(-1, len(chain) - 1)) for chain in chains]


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
        token: the text's last one.
    """

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.latest = [-1], [0], [0], [0]
        self.last, self.token = 0, -1

    def extend(self, new_tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in new_tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        self.token = token
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


class SuffixDrafter(CopyDrafter):
    """Proposes the likeliest continuations of the longest suffix that occurred before, as a tree.

    How likely a continuation is: the share of the suffix's earlier occurrences that went on so.

    Args:
        num_nodes: N of the largest tree, root included; a chain where only one thing followed.
        per_match: a suffix of n tokens is followed for at most per_match * n tokens, since short
            ones match by chance.
        min_share: leave out what followed less often than this, as a share of the occurrences.

    Raises:
        ConfigError: if a number is out of range.
    """

    begin = SuffixAutomaton

    def __init__(
        self, num_nodes: int = 16, *, per_match: float = 3.0, min_share: float = 0.3
    ) -> None:
        self.num_nodes, self.per_match, self.min_share = num_nodes, per_match, min_share
        at_least(self, num_nodes=2, per_match=1)
        within(self, min_share="[0, 1]")

    def trees(self, state: TextRows) -> list[OneTree]:
        """Follow each row's match."""
        return [self._tree(row) for row in state.rows]

    def _tree(self, automaton: SuffixAutomaton) -> OneTree:
        """Return tokens and parents of the most frequent continuations, best first."""
        start = automaton.match
        depth = min(self.num_nodes - 1, int(self.per_match * automaton.length[start]))
        found: list[tuple[int, int, int, int]] = []  # depth, number, the parent's number, token
        # minus the share, depth, order of arrival, token, state, the parent's number
        frontier: list[tuple[float, int, int, int, int, int]] = []
        frontier.append((-1.0, 0, 0, automaton.token, start, 0))
        arrived = 0
        while frontier and len(found) < self.num_nodes:
            negative, level, _, token, here, above = heapq.heappop(frontier)
            number = len(found)
            found.append((level, number, above, token))
            for part, token, state in automaton.continuations(here) if level < depth else ():
                if -negative * part < self.min_share:
                    break
                arrived += 1
                child = (negative * part, level + 1, arrived, token, state, number)
                heapq.heappush(frontier, child)
        return by_depth(found)
