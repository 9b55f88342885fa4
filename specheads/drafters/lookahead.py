"""Lookahead decoding: the base model drafts for itself, by Jacobi iteration beside verification.

Fu et al., arXiv:2402.02057. A window of W columns and N - 1 rows holds tokens at the positions
ahead of the root. Row 0 begins with the root itself; every other row is what the base model said,
one step earlier, after the tokens above it. A step reads the whole window, and what is said after
its last row completes N tokens in line in every column. Such an n-gram goes into a pool under its
first token, and those under the root are the guesses of a step. Nothing is trained.

The published mask is that of a tree: row 0 is a chain below the root, and column j of row l is the
child of column j of row l - 1, at depth j + l. So the window's nodes are probes, read and never
accepted, in the tree whose other nodes are the guesses. When sampling, what the base model says in
the window is drawn with the noise of the position, as all its tokens are: the guesses are a
function of prefix and seed, and sample-and-walk returns plain decoding's tokens.

It differs from the authors' program in this: guesses that begin alike share nodes; an n-gram that
is accepted whole is followed by the base model's next token in the same step; filling begins after
the prefill and not with it. Models that take chains only never read a window: they are guessed the
latest n-gram of the text itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from specheads.drafters.contract import Candidates, StepResult
from specheads.drafters.growing import TextDrafter, TextRows, pack
from specheads.system.errors import at_least


class NgramPool:
    """The n-grams met latest, for every first token at most ``capacity`` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._known: dict[int, dict[tuple[int, ...], None]] = {}  # the latest last

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """Enter an n-gram, or make it the latest again; the oldest gives way."""
        known = self._known.setdefault(first, {})
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.capacity:
            del known[next(iter(known))]

    def latest(self, first: int) -> list[tuple[int, ...]]:
        """Return what followed ``first``, the latest first."""
        return list(reversed(self._known.get(first, {})))


class LookaheadRow:
    """One row's window and pool.

    Args:
        width: columns of row 0 while the window fills, without the root's.
        ngram: N.
        guesses: G.

    Attributes:
        text: its last N tokens, the root included.
        window: the rows of the window so far, at most N - 1. Row 0 is without the root.
        pool: n-grams.
        last: where the last row's columns stand in the tree that was proposed; empty after a step.
        reads: the window was read in the last step.
    """

    def __init__(self, width: int, ngram: int, guesses: int) -> None:
        self.text: deque[int] = deque(maxlen=ngram)
        self.window: list[list[int]] = []
        self.width, self.pool = width, NgramPool(guesses)
        self.last: list[int] = []
        self.reads = True

    def extend(self, new_tokens: Sequence[int]) -> None:
        """Append tokens, and enter their n-grams; row 0 is filled with tokens of the prompt."""
        if not self.window:  # any tokens do; drawn alike for a row alone and in a batch
            self.window = [random.Random(0).choices(new_tokens, k=self.width)]
        for token in new_tokens:
            self.text.append(token)
            if len(self.text) == self.text.maxlen:
                first, *rest = self.text
                self.pool.add(first, tuple(rest))


class Node(NamedTuple):
    """A node of a row's tree; ``token`` is -1 in the window."""

    depth: int
    parent: int
    token: int
    probe: int


class LookaheadDrafter(TextDrafter):
    """Proposes the pool's n-grams under the root, and has the window read beside them.

    The first N - 2 steps fill the window, and guess nothing while they do. It moves by one column
    at each step, however many tokens were accepted.

    Published settings of W, N and G for GPUs with arithmetic to spare are 15, 5, 15 for a base of 7
    billion parameters, 10, 5, 10 for 13 and 7, 5, 7 for 33: steps of 120, 80 and 56 tokens. On a
    CPU, or in a batch, a step of so many tokens costs several plain ones.

    Args:
        window: W, columns.
        ngram: N, tokens of an n-gram; a step accepts at most N - 1.
        guesses: G, n-grams kept under each token, of the window and of the text, and guessed at
            once.
        fixed_size: pad all trees to the largest number of nodes, for compiled passes.

    Raises:
        ConfigError: for W or N below 2, or G below 1.
    """

    def __init__(
        self, window: int = 7, ngram: int = 4, guesses: int = 7, *, fixed_size: bool = False
    ) -> None:
        self.window, self.ngram, self.guesses = window, ngram, guesses
        at_least(self, window=2, ngram=2, guesses=1)
        self.max_depth = window + ngram - 3
        # while it fills, the window has fewer rows of more columns
        sizes = [(rows + 1) * (self.max_depth + 1 - rows) for rows in range(ngram - 1)]
        self.num_nodes = max(sizes) + guesses * (ngram - 1) if fixed_size else 1
        self.begin = partial(LookaheadRow, self.max_depth, ngram, guesses)

    def propose(self, state: TextRows) -> Candidates:
        """Plant the windows, and the guesses beside them."""
        planted = [zip(*self._plant(row), strict=True) for row in state.rows]
        _, parents, tokens, inputs = zip(*planted, strict=True)
        rows = list(zip(tokens, parents, strict=True))
        return pack(rows, state.device, inputs=inputs, num_nodes=self.num_nodes)

    def observe(self, state: TextRows, result: StepResult) -> TextRows:
        """Harvest the window's n-grams and those of the new tokens; move the window on."""
        drawn = result.base_tokens.tolist()
        rows = zip(state.rows, drawn, result.places, result.new_tokens, strict=True)
        for row, said, own, new_tokens in rows:
            places = [own[node] if node < len(own) else -1 for node in row.last]
            row.last, row.reads = [], bool(places) and -1 not in places
            if row.reads:
                self._advance(row, [said[place] for place in places])
            row.extend(new_tokens)
        return state

    def _plant(self, row: LookaheadRow) -> list[Node]:
        """Return the nodes of the row's tree, sorted by depth."""
        root = row.text[-1]
        nodes = [Node(0, -1, root, root)]
        for depth, token in enumerate(row.window[0], start=1):
            nodes.append(Node(depth, depth - 1, -1, token))
        above = range(len(nodes))
        for level, tokens in enumerate(row.window[1:], start=1):
            nodes += [Node(level + i, above[i], -1, token) for i, token in enumerate(tokens)]
            above = range(len(nodes) - len(tokens), len(nodes))
        # where no window is read there is nothing to wait for
        if len(row.window) == self.ngram - 1 or not row.reads:
            known: dict[tuple[int, int], int] = {}
            for guess in row.pool.latest(root):
                parent = 0
                for depth, token in enumerate(guess, start=1):
                    if (parent, token) not in known:
                        known[parent, token] = len(nodes)
                        nodes.append(Node(depth, parent, token, token))
                    parent = known[parent, token]
        order = sorted(range(len(nodes)), key=lambda number: nodes[number].depth)
        place = {number: i for i, number in enumerate(order)} | {-1: -1}
        row.last = [place[number] for number in above]
        return [nodes[number]._replace(parent=place[nodes[number].parent]) for number in order]

    def _advance(self, row: LookaheadRow, said: list[int]) -> None:
        """Take the base model's tokens after the last row's columns, the root's first in row 0."""
        window = row.window
        if len(window) < self.ngram - 1:  # filling: every row gives up its first column
            row.window = [level[1:] for level in [*window, said]]
            return
        levels = [*window[1:], said]
        for first, *rest in zip([row.text[-1], *window[0]], *levels, strict=True):
            row.pool.add(first, tuple(rest))
        # row 1 becomes row 0, and its first column the next root's
        row.window = [levels[0][1:], *levels[1:]]
