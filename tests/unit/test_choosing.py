"""A drafter that learns whom to ask: lawful, and right about members whose worth was planted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.loop import decode
from specheads.decoding.plain import plain_decode
from specheads.drafters.adaptive import AdaptiveLength, StepCosts
from specheads.drafters.choosing import ChoosingDrafter, ChoosingState
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.drafters.laid import lay_out
from specheads.drafters.length import FixedLength
from specheads.drafters.ngram import NgramDrafter
from specheads.tree import RowTrees, Tree
from tests.drafter_laws import check_deterministic
from tests.zoo import VOCAB, build

FREE = StepCosts(0.0, [0, 1, 1.05, 1.1, 1.15, 1.2, 1.25])
PRICED = StepCosts(0.2, FREE.verify)
LONG = 60  # new tokens, where something is to be learned


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    """Return a base model."""
    return build("llama")


@pytest.fixture(scope="module")
def draft(base: PreTrainedModel) -> PreTrainedModel:
    """Return a model that often says what the base says."""
    other = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.04 * torch.randn(parameter.shape, generator=generator))
    return other


@dataclass
class PlantedState:
    """Per row the whole text that is to come, and where its root stands."""

    texts: list[list[int]]
    places: list[int]
    root: Tensor


@cache
def future(model: PreTrainedModel, ids: tuple[int, ...]) -> list[int]:
    """Return a prompt and its greedy continuation."""
    text = torch.tensor([ids])
    return [*ids, *plain_decode(model, text, max_new_tokens=LONG + 8).new_tokens]


class Planted:
    """Guesses a chain that is right as far as planted, by the root's position.

    Args:
        model: whose greedy continuation is guessed.
        num_right: from the root's position to how many guesses are right.
        num_tokens: guesses per step.
        branches: give the root a second, wrong child, so that the tree is no chain.
    """

    taps: tuple[str, ...] = ()
    deterministic = True

    def __init__(
        self,
        model: PreTrainedModel,
        num_right: Callable[[int], int],
        *,
        num_tokens: int = 3,
        branches: bool = False,
    ) -> None:
        self.model, self.num_right, self.num_tokens = model, num_right, num_tokens
        self.branches = branches
        self.asked = 0
        self.owned: list[Tensor | None] = []

    def start(self, prefill: Prefill) -> PlantedState:
        """Look the future up."""
        texts = [future(self.model, tuple(ids)) for ids in prefill.ids]
        return PlantedState(texts, [len(ids) for ids in prefill.ids], prefill.root)

    def propose(self, state: PlantedState) -> Candidates:
        """Guess."""
        self.asked += 1
        rows = []
        for text, place in zip(state.texts, state.places, strict=True):
            truth, right = text[place + 1 : place + 1 + self.num_tokens], self.num_right(place)
            chain = [t if d < right else (t + 1) % VOCAB for d, t in enumerate(truth)]
            chain += [0] * (self.num_tokens - len(chain))
            wrong = [(chain[0] + 2) % VOCAB] if self.branches else []
            rows.append(chain[:1] + wrong + chain[1:])
        tokens = torch.cat([state.root[:, None], torch.tensor(rows)], dim=1)
        if not self.branches:
            return Candidates(tokens, Tree.chain(self.num_tokens))
        shape = [-1, 0, 0, 1, *range(3, self.num_tokens + 1)]
        return Candidates(tokens, RowTrees.from_lists([shape] * len(rows), self.num_tokens))

    def observe(self, state: PlantedState, result: StepResult) -> PlantedState:
        """Move on."""
        self.owned.append(result.own)
        gained = map(len, result.new_tokens)
        places = [place + num for place, num in zip(state.places, gained, strict=True)]
        return PlantedState(state.texts, places, result.next_root)

    def select(self, state: PlantedState, rows: Tensor) -> PlantedState:
        """Keep some rows."""
        kept = rows.tolist()
        return PlantedState(
            [state.texts[i] for i in kept], [state.places[i] for i in kept], state.root[rows]
        )


def always(num: int) -> Callable[[int], int]:
    """Return a planted worth that does not change."""
    return lambda place: num


MEMBERS: dict[
    str, Callable[[PreTrainedModel, PreTrainedModel], tuple[list[Drafter], list[StepCosts]]]
]
MEMBERS = {
    "copies_and_draft": lambda base, draft: (
        [NgramDrafter(), DraftModelDrafter(draft, FixedLength(3))],
        [FREE, PRICED],
    ),
    "adaptive_draft": lambda base, draft: (
        [
            NgramDrafter(num_tokens=4),
            DraftModelDrafter(draft, AdaptiveLength(PRICED, 4), sampling="coupled"),
        ],
        [FREE, PRICED],
    ),
    "two_priced_trees": lambda base, draft: (
        [
            Planted(base, lambda place: place % 3, branches=True),
            DraftModelDrafter(draft, FixedLength(2)),
            Planted(base, lambda place: place % 2, num_tokens=4),
        ],
        [PRICED, PRICED, FREE],
    ),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_the_laws_hold(name: str, base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Rows that ask different members get each other's guesses, or learn from each other."""

    def make() -> ChoosingDrafter:
        return ChoosingDrafter(*MEMBERS[name](base, draft))

    assert check_deterministic(base, make) > 1.1


def steps_and_asked(
    base: PreTrainedModel, members: list[Planted], costs: list[StepCosts], **settings: float
) -> tuple[int, list[int]]:
    """Decode one text; return its steps, and how often each member was asked."""
    drafter = ChoosingDrafter(members, costs, **settings)
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    result = decode(base, drafter, prompt, max_new_tokens=LONG)
    assert result.new_tokens == plain_decode(base, prompt, max_new_tokens=LONG).new_tokens
    return len(result.accept_lengths), [member.asked for member in members]


def test_the_better_of_two_is_asked(base: PreTrainedModel) -> None:
    """A bandit that asks in turn, or clings to whom it asked first."""
    bad, good = Planted(base, always(0)), Planted(base, always(3))
    for members in ([bad, good], [good, bad]):
        bad.asked = good.asked = 0
        steps, _ = steps_and_asked(base, members, [PRICED, PRICED])
        assert bad.asked <= 0.3 * steps
    # nobody is forgotten for good
    changed = Planted(base, lambda place: 3 if place > 30 else 0)
    stale = Planted(base, lambda place: 0 if place > 30 else 3)
    steps, (asked, _) = steps_and_asked(base, [changed, stale], [PRICED, PRICED], memory=10)
    assert asked >= 0.3 * steps


def test_dear_guesses_must_be_worth_it(base: PreTrainedModel) -> None:
    """Choosing by accepted tokens alone pays any price for them."""
    dear = StepCosts(3.0, FREE.verify)
    good, cheap = Planted(base, always(3)), Planted(base, always(2))
    steps, (asked, _) = steps_and_asked(base, [good, cheap], [dear, PRICED], explore=0.1)
    assert asked <= 0.2 * steps


def test_free_members_are_scored_without_being_verified(base: PreTrainedModel) -> None:
    """Learning only from verified guesses finds a good free member late, or never."""
    free, priced = Planted(base, lambda place: 3 if place > 20 else 0), Planted(base, always(2))
    drafter = ChoosingDrafter([free, priced], [FREE, PRICED])
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    states: list[ChoosingState] = []
    start = drafter.start
    drafter.start = lambda prefill: states.append(start(prefill)) or states[-1]  # type: ignore
    result = decode(base, drafter, prompt, max_new_tokens=LONG)
    assert free.asked == len(result.accept_lengths)
    rates = states[0].rows[0].rates[0]
    # every step's guesses were settled by the text, but for the last few
    assert rates.trials[0] > 0.5 * sum(0.975**i for i in range(len(result.accept_lengths)))
    verified = [own is None for own in free.owned]
    assert sum(verified[-5:]) >= 4 and not any(verified[3:6])


def test_what_members_are_told_of_their_nodes(base: PreTrainedModel) -> None:
    """A member that takes another's nodes for its own follows a path it did not guess."""
    tree = Planted(base, always(1), branches=True)
    chain = Planted(base, always(2))
    drafter = ChoosingDrafter([tree, chain], [FREE, FREE])
    state = drafter.start(
        Prefill([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]]), [2, 2], {}, torch.tensor([5, 6]))
    )
    state.rows[0].rates[1] = state.rows[0].rates[1].after(3, 0, 1e9)  # row 0: the tree
    state.rows[1].rates[0] = state.rows[1].rates[0].after(3, 0, 1e9)  # row 1: the chain
    for _ in range(4):
        state.rows[0].rates[0] = state.rows[0].rates[0].after(3, 3, 1e9)
        state.rows[1].rates[1] = state.rows[1].rates[1].after(3, 3, 1e9)
    candidates = drafter.propose(state)
    assert [row.chosen for row in state.rows] == [0, 1] and not state.whole
    laid = lay_out(candidates)
    assert laid[0].parents == [-1, 0, 0, 1, 3] and laid[1].parents[:4] == [-1, 0, 1, 2]
    assert laid[1].tokens[4] == -1
    result = StepResult(
        candidates.tree,
        candidates.tokens,
        torch.zeros_like(candidates.tokens),
        {},
        torch.tensor([[0, -1], [0, -1]]),
        torch.tensor([0, 0]),
        torch.tensor([0, 0]),
        [[0], [0]],
    )
    drafter.observe(state, result)
    told = [member.owned[-1] for member in (tree, chain)]
    assert told[0] is not None and told[0].tolist() == [[0, 1, 2, 3, 4], [-1] * 5]
    assert told[1] is not None and told[1].tolist() == [[-1] * 4, [0, 1, 2, 3]]


def test_wrong_members_are_refused(base: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Sampled guesses that are mixed with others are verified by a rule that is not exact."""
    sampled = DraftModelDrafter(draft, FixedLength(2), sampling="sampled")
    with pytest.raises(ValueError, match="DraftModelDrafter samples its guesses"):
        ChoosingDrafter([sampled], [PRICED])
    with pytest.raises(ValueError, match="at least 1 drafter"):
        ChoosingDrafter([], [])
    with pytest.raises(ValueError, match="2 costs for 1 members"):
        ChoosingDrafter([NgramDrafter()], [FREE, FREE])
    with pytest.raises(ValueError, match="memory positive"):
        ChoosingDrafter([NgramDrafter()], [FREE], memory=0)
