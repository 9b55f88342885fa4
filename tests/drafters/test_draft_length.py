"""How long drafts get, and that ending them early keeps the base model's distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specheads.attention.tree import Tree
from specheads.drafters.length import (
    AdaptiveLength,
    FixedLength,
    Length,
    StepCosts,
)
from specheads.verification.acceptance import block, reject
from tests.enumeration import DRAFT_SITES, Outcomes, ToyModel, distance, expected_accepted, verified

EXACT, BROKEN = 1e-9, 1e-3
TREE = Tree.chain(3)
RULES: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "block": lambda tokens, tree, base, draft, chance: block(tokens, base, draft, chance),
    "token by token": lambda *args: reject(*args, "chain"),
}


class StoppingChain:
    """Draws a chain from a toy model until a rule ends it.

    Args:
        model: what tokens are drawn from.
        length: the rule.
        takes_back: break it: the token at which the rule stopped is not proposed.
    """

    def __init__(self, model: ToyModel, length: Length, *, takes_back: bool = False) -> None:
        self.model, self.length, self.takes_back = model, length, takes_back

    def __call__(self, contexts: Tensor, chance: Outcomes) -> tuple[Tensor, Tensor]:
        """Draw token by token, as one row does."""
        num_rows, depth = len(contexts), self.length.limit(self.length.start())
        tokens = torch.full((num_rows, TREE.num_nodes), -1)
        tokens[:, 0] = 0
        probs = torch.zeros(num_rows, TREE.num_nodes, self.model.vocab_size, dtype=torch.float64)
        said: list[list[float]] = [[] for _ in contexts]
        going = [True] * num_rows
        for level in range(depth):
            here = self.model.probs(contexts)
            # a row that has ended draws nothing: its outcomes would be counted
            certain = torch.zeros_like(here)
            certain[:, 0] = 1.0
            live = torch.tensor(going)
            drawn_from = torch.where(live[:, None], here, certain)
            drawn = chance.draw(drawn_from, DRAFT_SITES * (level + 1))
            probs[:, level] = here  # of rows that have ended: whatever, it must not be looked at
            for row, goes in enumerate(going):
                if not goes:
                    continue
                said[row].append(float(here[row, drawn[row]]))
                going[row] = self.length.goes_on(said[row])
                if going[row] or not self.takes_back:
                    tokens[row, level + 1] = drawn[row]
            contexts = self.model.after(contexts, drawn)
        return tokens, probs


LENGTHS: dict[str, Length] = {
    "fixed": FixedLength(3),
    "confident": AdaptiveLength(StepCosts(0.3, [0, 1, 1, 1, 1]), 3),
}


def lengths_drawn(length: Length) -> set[int]:
    """Return how long the chains of one context get, over all draws."""
    model, found = ToyModel(4, seed=2), set()

    def step(contexts: Tensor, chance: Outcomes) -> list[list[int]]:
        tokens, _ = StoppingChain(model, length)(contexts, chance)
        found.update(((tokens >= 0).sum(1) - 1).tolist())
        return [[0]] * len(contexts)

    expected_accepted(step, model.context((1, 2)))
    return found


def error(rule: str, length: Length, *, takes_back: bool = False) -> float:
    """Return the total variation distance of three decoded tokens to the model's."""
    model, other = ToyModel(4, seed=1), ToyModel(4, seed=2)
    draft = StoppingChain(other, length, takes_back=takes_back)
    return distance(model, verified(model, TREE, draft, RULES[rule]))


@pytest.mark.parametrize("rule", RULES)
def test_ending_a_chain_early_keeps_the_distribution(rule: str) -> None:
    """Prevents the bias of a length that depends on the draws, in particular of whole blocks."""
    assert error(rule, LENGTHS["confident"]) < EXACT


def test_the_lengths_do_depend_on_the_draws() -> None:
    """Prevents rules that happen never to stop, which would prove nothing."""
    assert lengths_drawn(LENGTHS["fixed"]) == {3}
    assert len(lengths_drawn(LENGTHS["confident"])) > 1


@pytest.mark.parametrize("rule", RULES)
def test_taking_a_drawn_token_back_is_not_exact(rule: str) -> None:
    """Prevents that anyone drops the token at which a rule stopped: the enumeration sees it."""
    assert error(rule, LENGTHS["confident"], takes_back=True) > BROKEN


def test_numbers_out_of_range_are_refused() -> None:
    """Prevents a draft of no tokens that nobody asked for."""
    with pytest.raises(ValueError, match=r"tokens must be at least 1, got 0"):
        FixedLength(0)
