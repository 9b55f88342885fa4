"""One row of a step's candidates as lists, for drafters that look at what others propose."""

from __future__ import annotations

from dataclasses import dataclass

from specheads.drafters.contract import Candidates
from specheads.tree import batched

# guesses as nested dictionaries: token -> what was guessed behind it
Guesses = dict[int, "Guesses"]


@dataclass(frozen=True)
class Laid:
    """One row's candidates as lists over its nodes.

    Attributes:
        tokens: the root first; negative where nothing may be accepted.
        inputs: what the base model reads; negative where nothing.
        parents: -1 for the root.
        depth: of the deepest guess.
        num_read: nodes that are no padding.
    """

    tokens: list[int]
    inputs: list[int]
    parents: list[int]
    depth: int
    num_read: int

    def guesses(self) -> Guesses:
        """Return the guesses below the root."""
        below: list[Guesses | None] = [{}]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            above = below[parent]
            if token < 0 or above is None:  # nothing below padding can be accepted
                below.append(None)
            else:
                below.append(above.setdefault(token, {}))
        root = below[0]
        assert root is not None
        return root


def lay_out(candidates: Candidates) -> list[Laid]:
    """Return candidates row by row."""
    parents = batched(candidates.tree, candidates.tree.parents).tolist()
    depths = batched(candidates.tree, candidates.tree.depths).tolist()
    tokens, inputs = candidates.tokens.tolist(), candidates.inputs.tolist()
    found = []
    for row, (own, read) in enumerate(zip(tokens, inputs, strict=True)):
        shape = row if len(parents) > 1 else 0
        nodes = [node for node, token in enumerate(own) if token >= 0]
        found.append(
            Laid(
                own,
                read,
                parents[shape],
                max(depths[shape][node] for node in nodes),
                sum(each >= 0 for each in read),
            )
        )
    return found
