"""Drafters of drafters within each other: a member finds its nodes, however deep it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import batched
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.drafters.growing import TextRows
from specheads.drafters.length import StepCosts
from specheads.drafters.lookahead import LookaheadDrafter
from specheads.drafters.lookup import NgramDrafter, SuffixDrafter
from specheads.drafters.merge import HybridDrafter
from tests.ragged import ROWS, new_tokens, padded
from tests.zoo import build


class Checked(LookaheadDrafter):
    """Asks the base model what follows each node that it is told of."""

    def __init__(self, base: PreTrainedModel) -> None:
        super().__init__(3, 3, 3)
        self.base, self.num_told = base, 0
        self.proposed: Candidates | None = None

    def start(self, prefill: Prefill) -> TextRows:
        """Note the texts."""
        roots = prefill.root.tolist()
        self.texts = [[*ids, root] for ids, root in zip(prefill.ids, roots, strict=True)]
        return super().start(prefill)

    def propose(self, state: TextRows) -> Candidates:
        """Note the nodes."""
        self.proposed = super().propose(state)
        return self.proposed

    def observe(self, state: TextRows, result: StepResult) -> TextRows:
        """Compare."""
        if self.proposed is not None:
            for row in range(len(self.texts)):
                self._compare(self.proposed, row, result)
        self.proposed = None
        for text, new in zip(self.texts, result.new_tokens, strict=True):
            text += new
        return super().observe(state, result)

    def _compare(self, proposed: Candidates, row: int, result: StepResult) -> None:
        own = range(result.tokens.shape[1]) if result.own is None else result.own[row].tolist()
        lines = batched(proposed.tree, proposed.tree.ancestors)[row].tolist()
        read = proposed.inputs[row].tolist()
        for node, place in zip(range(len(read)), own, strict=False):
            forbidden = 0 <= int(proposed.tokens[row, node]) != int(result.tokens[row, place])
            if place < 0 or read[node] < 0 or forbidden:
                continue
            path = [read[each] for each in lines[node][1:] if each >= 0]
            logits = self.base(torch.tensor([self.texts[row] + path])).logits[0, -1]
            assert int(result.base_tokens[row, place]) == int(logits.argmax())
            self.num_told += 1


FREE = StepCosts(0.0, [0.0, 1.0, 1.02, 1.04, 1.06, 1.1])
DEAR = StepCosts(0.2, FREE.verify)
NESTS: dict[str, Callable[[Drafter], Drafter]] = {
    "hybrid of cut": lambda it: HybridDrafter([NgramDrafter(), HybridDrafter([it], costs=[FREE])]),
    "cut of hybrid": lambda it: HybridDrafter([HybridDrafter([NgramDrafter(), it])], costs=[FREE]),
    "lazy hybrid of cut": lambda it: HybridDrafter(
        [SuffixDrafter(6), HybridDrafter([it], costs=[FREE])], costs=[FREE, DEAR]
    ),
}


@pytest.mark.parametrize("name", ["llama", "bloom"])
@pytest.mark.parametrize("nest", NESTS)
@torch.no_grad()
def test_members_of_members_are_told_of_their_own_nodes(nest: str, name: str) -> None:
    """Prevents n-grams learned at another drafter's nodes, which only shows as fewer accepted."""
    base = build(name, std=0.5)
    rows = [torch.cat([row, row], dim=1) for row in ROWS[: 3 if name == "llama" else 1]]
    settings: dict[str, Any] = {"max_new_tokens": 14, **padded(rows)}
    checked = Checked(base)
    # a cache: rows that have ended stay
    result = decode(base, NESTS[nest](checked), cache=TreeCache(), **settings)
    assert new_tokens(result) == new_tokens(plain_decode(base, **settings))
    assert checked.num_told > (10 if name == "llama" else 0)
    # and where rows that have ended go
    assert new_tokens(decode(base, NESTS[nest](LookaheadDrafter()), **settings)) == new_tokens(
        result
    )
