"""How many tokens a draft model proposes: fixed, or until it is no longer sure.

What ends a chain may depend on the tokens drafted so far, which are all proposed, and on what was
accepted in earlier steps. It may not take back a token that was drawn: that would be a choice among
samples, and the output would no longer be the base model's
(:func:`specheads.verification.rejection.block`).

How many tokens to draft next: as many as pay, from what was accepted lately and what steps cost.

A draft of n tokens gains ``1 + sum_d prod_{j <= d} rate_j`` tokens, where rate_j is how often the
j-th is accepted once those before it were, and costs n passes of the draft model and a verify step
of n + 1 nodes. Their ratio is the speed, with the measured cost of the step in place of the usual
assumption that it costs what a plain step costs (Leviathan et al., arXiv:2211.17192, theorem 3.8).
The rates are learned from each text while it is written.

Verify only that part of a drafter's tree which pays, by what was accepted lately and its costs.

The right size and depth of a tree depend on the text: where guesses are mostly right a deep tree
pays, where they are mostly wrong a few nodes do. A node's value is the product along its path of
how often guesses at that depth and of that rank among their siblings were right; taken in the order
of their values, nodes form a tree at every size, and the size with the most expected tokens per
measured cost is verified. A verified tree tells the truth about every node whose parent was reached
(arXiv:2402.12374, section 3, grows static trees from such rates).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from specheads.attention.tree import batched
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.drafters.growing import pack

__all__ = ["ConfidentLength", "EntropyLength", "FixedLength", "Length"]


class Length(Protocol):
    """Says for every row of its own how long its next draft is.

    States belong to a row: a row of a batch gets the lengths that it would get alone.

    Attributes:
        max_tokens: no draft is longer.
        asks: whether :meth:`goes_on` is to be called. It needs the draft's probabilities on the
            host after every token, which is a synchronisation on a GPU.
    """

    @property
    def max_tokens(self) -> int:
        """The longest draft."""

    @property
    def asks(self) -> bool:
        """Whether ``goes_on`` is to be called."""

    def start(self) -> Any:
        """Return the state of one row before its first step."""

    def limit(self, state: Any) -> int:
        """Return how many tokens the row may be proposed next, 0 to ``max_tokens``."""

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Say, after a token was drafted for a row, whether another one is to follow it.

        Args:
            probs: of each token drafted in this step, the draft's probability for it; the newest
                one is the last. At temperature 0 those of temperature 1.
            entropies: of the distributions they were chosen from, in nats.
        """

    def observe(self, state: Any, num_proposed: int, num_accepted: int) -> Any:
        """Return the state of a row after a step for which it was asked.

        Args:
            state: before the step.
            num_proposed: guesses on which the step has decided: where ``num_accepted`` is smaller,
                the guess after the accepted ones was refused, and about later ones nothing is
                known. Guesses that nobody verified, as near the token limit, do not count. It is 0
                after a limit of 0.
            num_accepted: 0..num_proposed.
        """


@dataclass(frozen=True)
class FixedLength:
    """Always as many tokens.

    Args:
        num_tokens: per step, at least 1.

    Raises:
        ValueError: if it is less.
    """

    num_tokens: int

    asks = False

    def __post_init__(self) -> None:
        _check_tokens("num_tokens", self.num_tokens)

    @property
    def max_tokens(self) -> int:
        """The longest draft."""
        return self.num_tokens

    def start(self) -> None:
        """Nothing is remembered."""

    def limit(self, state: None) -> int:
        """Return the number."""
        return self.num_tokens

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Never stop early."""
        return True

    def observe(self, state: None, num_proposed: int, num_accepted: int) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class ConfidentLength:
    """Until the draft gives its tokens together too small a probability.

    The product of the tokens' probabilities under the draft estimates the probability that all of
    them are accepted. The token at which it falls below the threshold is still proposed: the pass
    that gave it has been made.

    Args:
        max_tokens: longest draft, at least 1.
        threshold: of the product, in [0, 1]; 0 never stops early.

    Raises:
        ValueError: if one lies outside.
    """

    max_tokens: int
    threshold: float = 0.3

    asks = True

    def __post_init__(self) -> None:
        _check_tokens("max_tokens", self.max_tokens)
        _check_share("threshold", self.threshold)

    def start(self) -> None:
        """Nothing is remembered."""

    def limit(self, state: None) -> int:
        """Return the longest draft."""
        return self.max_tokens

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Look at the product."""
        return math.prod(probs) >= self.threshold

    def observe(self, state: None, num_proposed: int, num_accepted: int) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class EntropyLength:
    """Until the draft's own entropy H says that the base will hardly accept: AdaEDL.

    arXiv:2410.18351: 1 - sqrt(scale * H) bounds the probability of acceptance from below; the draft
    ends where the bound falls below a threshold. The paper moves the threshold with the acceptance
    it observes; here it is given, and what learns from acceptance is a ``limit``. The token at
    which the draft ends is still proposed: the pass that gave it has been made.

    Args:
        max_tokens: longest draft, at least 1.
        threshold: of the bound, in [0, 1].
        scale: of the entropy in nats, positive.

    Raises:
        ValueError: if one lies outside.
    """

    max_tokens: int
    threshold: float = 0.3
    scale: float = 0.2

    asks = True

    def __post_init__(self) -> None:
        _check_tokens("max_tokens", self.max_tokens)
        _check_share("threshold", self.threshold)
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale}")

    def start(self) -> None:
        """Nothing is remembered."""

    def limit(self, state: None) -> int:
        """Return the longest draft."""
        return self.max_tokens

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Look at the newest entropy."""
        return 1 - math.sqrt(self.scale * max(entropies[-1], 0.0)) >= self.threshold

    def observe(self, state: None, num_proposed: int, num_accepted: int) -> None:
        """Learn nothing."""


def _check_tokens(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


PRIOR = 0.7  # acceptance to start from where nothing was measured
WEIGHT = 4.0  # observations that a prior counts as
MEMORY = 40.0  # steps after which an observation has faded to 1/e
# chances for a draft model that is taken at its word: a token is right as often as it says
CALIBRATED = tuple((i + 0.5) / 20 for i in range(20))


@dataclass(frozen=True)
class StepCosts:
    """What drafting and verifying cost on this machine, in units of a plain step.

    Attributes:
        draft: of one more drafted token: of one pass of the draft model; 0 for copied ones.
        verify: ``verify[n]`` is a verify step of n nodes, the root included; ``verify[0]`` is not
            looked at. Larger steps than were measured are taken to cost what the largest does.

    Raises:
        ValueError: for a negative cost, or no cost of a step of 1 node.
    """

    draft: float
    verify: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "verify", tuple(self.verify))
        if len(self.verify) < 2:
            raise ValueError(f"verify must hold the cost of 1 node at index 1, got {self.verify}")
        if not all(0 <= cost < math.inf for cost in (self.draft, *self.verify[1:])):
            raise ValueError(
                f"costs must be finite and at least 0, got draft {self.draft} and verify "
                f"{self.verify[1:]}"
            )

    def of_step(self, num_drafted: int, num_nodes: int) -> float:
        """Return the cost of drafting tokens one after the other and verifying so many nodes."""
        return self.draft * num_drafted + self.verify[min(num_nodes, len(self.verify) - 1)]

    def of_chain(self, num_tokens: int) -> float:
        """Return the cost of drafting and verifying a chain."""
        return self.of_step(num_tokens, num_tokens + 1)


def best_length(rates: Sequence[float], costs: StepCosts) -> tuple[int, float]:
    """Return the draft length with the most tokens per cost, and how many that are.

    Args:
        rates: per depth, how often a token is accepted once those before it were.
        costs: of a step; at most ``len(rates)`` tokens are drafted, and the fewest where lengths
            tie.
    """
    best, speed = 0, 1 / costs.of_chain(0)
    reached = expected = 1.0
    for length, rate in enumerate(rates, start=1):
        reached *= rate
        expected += reached
        if (found := expected / costs.of_chain(length)) > speed:
            best, speed = length, found
    return best, speed


@dataclass(frozen=True)
class RunningRates:
    """One text's acceptance per depth; a value, never changed in place.

    A draft of which k tokens were accepted says that depths 1 to k were right and, if more had been
    proposed, that depth k + 1 was wrong. Of what lies deeper it says nothing: those tokens followed
    a wrong one, or none were proposed.

    Attributes:
        hits: per depth, how often it was right; old steps fade.
        trials: likewise, how often it was tried.
    """

    hits: tuple[float, ...]
    trials: tuple[float, ...]

    @staticmethod
    def unseen(max_depth: int) -> RunningRates:
        """Return the rates of a text that has not begun."""
        return RunningRates((0.0,) * max_depth, (0.0,) * max_depth)

    def after(self, num_proposed: int, num_accepted: int, memory: float) -> RunningRates:
        """Return the rates after one more step, every step before it faded a little.

        They fade at steps that propose nothing too: what was learned long ago is forgotten in
        favour of the prior, so that a text on which drafting did not pay is tried again.

        Args:
            num_proposed: tokens that the base model verified.
            num_accepted: how many of them were right.
            memory: steps after which an observation counts 1/e of a new one.

        Raises:
            ValueError: if more were accepted than proposed.
        """
        if not 0 <= num_accepted <= num_proposed:
            raise ValueError(f"{num_accepted} tokens accepted of {num_proposed} proposed")
        kept = math.exp(-1 / memory)
        tried = min(num_accepted + 1, num_proposed)
        return RunningRates(
            tuple(hits * kept + (d < num_accepted) for d, hits in enumerate(self.hits)),
            tuple(trials * kept + (d < tried) for d, trials in enumerate(self.trials)),
        )

    def estimate(self, prior: Sequence[float], weight: float) -> list[float]:
        """Return the rate of every depth.

        The prior is first scaled by how this text did on the whole, all depths together, and then
        corrected depth by depth, where something was seen.

        Args:
            prior: rate per depth before anything is seen.
            weight: observations that it counts as.
        """
        foreseen = sum(n * rate for n, rate in zip(self.trials, prior, strict=True))
        factor = (sum(self.hits) + weight) / (foreseen + weight)
        return [
            (hits + weight * min(1.0, rate * factor)) / (trials + weight)
            for hits, trials, rate in zip(self.hits, self.trials, prior, strict=True)
        ]


class AdaptiveLength:
    """Drafts as many tokens as have paid lately; a ``Length`` of :mod:`specheads.drafters.length`.

    Every row of a batch learns alone. With ``chances`` the draft model's confidence ends drafts: a
    token is drafted only where its chance to be reached, times its prior rate, is worth more than
    it costs at the speed that the prior promises. What was accepted lately then decides whether to
    draft at all, and no longer how much: it was accepted of tokens that had been sure enough, so
    that it says little of what a draft without regard to confidence would gain.
    Without ``chances`` a text of some hundred tokens is short to learn from: lengths then wander by
    a token or two around the best one.

    Args:
        costs: of drafting and verifying.
        max_tokens: longest draft.
        prior: acceptance per depth (given that those before were accepted) to start a text from:
            one for all, or one per depth, as measured on other texts.
        weight: observations that the prior counts as.
        memory: steps after which an observation has faded to 1/e.
        chances: how often tokens were accepted, measured on other texts, by the probability that
            the draft model gave them: of equal bins of [0, 1]. ``CALIBRATED`` where nothing was
            measured. Empty: confidence is not looked at.

    Raises:
        ValueError: if a number is out of range, or a cost that is needed was not measured.
    """

    def __init__(
        self,
        costs: StepCosts,
        max_tokens: int,
        *,
        prior: float | Sequence[float] = PRIOR,
        weight: float = WEIGHT,
        memory: float = MEMORY,
        chances: Sequence[float] = (),
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if len(costs.verify) < max_tokens + 2:
            raise ValueError(
                f"costs.verify must reach {max_tokens + 1} nodes for max_tokens {max_tokens}, got "
                f"{len(costs.verify) - 1}"
            )
        rates = [prior] * max_tokens if isinstance(prior, int | float) else list(prior)
        if len(rates) != max_tokens:
            raise ValueError(f"prior has {len(rates)} rates for max_tokens {max_tokens}")
        if not all(0 <= rate <= 1 for rate in (*rates, *chances)):
            raise ValueError(f"prior and chances must lie in [0, 1], got {rates} and {chances}")
        if weight <= 0 or memory <= 0:
            raise ValueError(f"weight and memory must be positive, got {weight} and {memory}")
        self.costs, self.max_tokens = costs, max_tokens
        self.prior, self.weight, self.memory = tuple(rates), weight, memory
        self.chances = tuple(chances)
        self.asks = bool(chances)
        self._bars = self._worth()

    def _worth(self) -> list[float]:
        """Per number of tokens drafted, how likely all must be right for one more to pay."""
        _, speed = best_length(self.prior, self.costs)
        chains = [self.costs.of_chain(n) for n in range(self.max_tokens + 1)]
        more = [speed * (after - before) for before, after in pairwise(chains)]
        return [
            cost / rate if rate else math.inf for cost, rate in zip(more, self.prior, strict=True)
        ]

    def start(self) -> RunningRates:
        """Return the state of a text that begins."""
        return RunningRates.unseen(self.max_tokens)

    def limit(self, state: RunningRates) -> int:
        """Return the draft length with the most expected tokens per cost, 0..max_tokens.

        Where confidence ends drafts, 0 or ``max_tokens``.
        """
        length, _ = best_length(state.estimate(self.prior, self.weight), self.costs)
        return self.max_tokens if length and self.asks else length

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Say whether one more token is worth its cost after those with these probabilities."""
        if not self.chances or len(probs) >= self.max_tokens:
            return len(probs) < self.max_tokens
        bins = len(self.chances)
        right = math.prod(self.chances[min(int(prob * bins), bins - 1)] for prob in probs)
        return right > self._bars[len(probs)]

    def observe(self, state: RunningRates, num_proposed: int, num_accepted: int) -> RunningRates:
        """Return the state after a step.

        Raises:
            ValueError: if more were accepted than proposed.
        """
        return state.after(num_proposed, num_accepted, self.memory)


Rank = tuple[int, int]  # depth from 1 on, place among its siblings from 0 on


@dataclass
class CutRow:
    """One text's acceptance; all of it fades.

    Attributes:
        hits: how often the guess of a rank was right.
        trials: how often one was verified behind a right parent.
    """

    hits: dict[Rank, float] = field(default_factory=dict)
    trials: dict[Rank, float] = field(default_factory=dict)

    def rate(self, rank: Rank, factor: float) -> float:
        """Return how often guesses of a rank are right; the prior scaled by ``factor`` counts."""
        hits, trials = self.hits.get(rank, 0.0), self.trials.get(rank, 0.0)
        return (hits + WEIGHT * min(1.0, prior(rank) * factor)) / (trials + WEIGHT)

    def factor(self) -> float:
        """Return how this text does on the whole, beside the prior."""
        foreseen = sum(trials * prior(rank) for rank, trials in self.trials.items())
        return (sum(self.hits.values()) + WEIGHT) / (foreseen + WEIGHT)

    def fade(self, kept: float) -> None:
        """Age by a step."""
        for numbers in (self.hits, self.trials):
            for rank in numbers:
                numbers[rank] *= kept

    def note(self, rank: Rank, *, hit: bool) -> None:
        """Count a guess about which the base has decided."""
        self.trials[rank] = self.trials.get(rank, 0.0) + 1
        self.hits[rank] = self.hits.get(rank, 0.0) + hit


def prior(rank: Rank) -> float:
    """Return the acceptance rate to start from, that of middling Medusa heads."""
    depth, place = rank
    return 0.6 * 0.97 ** (depth - 1) * 0.3**place


@dataclass
class CutState:
    """The member's state, what the rows learned, and what was verified of the trees.

    Attributes:
        member: its state.
        rows: per row of the batch.
        ranks: per row, of each node that was kept.
        kept: per row the member's nodes that were kept, the root first.
        parents: per row, of the kept nodes.
        probed: per row, which of the kept nodes are probes.
        num_nodes: of the member's candidates.
    """

    member: Any
    rows: list[CutRow]
    ranks: list[list[Rank]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)
    probed: list[list[bool]] = field(default_factory=list)
    num_nodes: int = 0


class CutDrafter:
    """Proposes of a member's tree the part with the most expected tokens per cost.

    Every row learns alone. Probes are always kept.

    Args:
        member: deterministic: of sampled guesses none may be left out by their value.
        costs: ``verify`` by number of nodes; ``draft`` per level of the member's trees, which is
            spent whatever is left out.
        memory: steps after which an observation has faded to 1/e.

    Raises:
        ValueError: for a sampled member, or a memory that is not positive.
    """

    deterministic = True

    def __init__(self, member: Drafter, costs: StepCosts, *, memory: float = MEMORY) -> None:
        if not member.deterministic:
            raise ValueError(
                f"{type(member).__name__} samples its guesses: which of them are verified may not "
                "depend on their values"
            )
        if memory <= 0:
            raise ValueError(f"memory must be positive, got {memory}")
        self.member, self.costs, self.memory = member, costs, memory
        self.taps = member.taps

    def start(self, prefill: Prefill) -> CutState:
        """Start the member."""
        return CutState(self.member.start(prefill), [CutRow() for _ in prefill.ids])

    def propose(self, state: CutState) -> Candidates:
        """Ask the member; keep what pays."""
        candidates = self.member.propose(state.member)
        laid = lay_out(candidates)
        state.num_nodes = candidates.tokens.shape[1]
        state.kept, state.ranks, state.parents, state.probed = [], [], [], []
        for row, tree in zip(state.rows, laid, strict=True):
            ranks = ranks_of(tree)
            kept = self._keep(row, tree, ranks)
            place = {node: i for i, node in enumerate(kept)}
            state.kept.append(kept)
            state.ranks.append([ranks[node] for node in kept])
            state.parents.append([place.get(tree.parents[node], -1) for node in kept])
            state.probed.append([tree.tokens[node] < tree.inputs[node] for node in kept])
        pairs = list(zip(laid, state.kept, strict=True))
        return pack(
            [[tree.tokens[node] for node in kept] for tree, kept in pairs],
            state.parents,
            candidates.tokens.device,
            inputs=None
            if candidates.probes is None
            else [[tree.inputs[node] for node in kept] for tree, kept in pairs],
        )

    def _keep(self, row: CutRow, tree: Laid, ranks: Sequence[Rank]) -> list[int]:
        """Return the nodes that pay, in the member's order."""
        factor = row.factor()
        values = [1.0]
        for node, parent in enumerate(tree.parents[1:], start=1):
            guess = tree.tokens[node] >= 0
            values.append(values[parent] * row.rate(ranks[node], factor) if guess else 0.0)
        always = {0}
        for node, token in enumerate(tree.tokens):
            if token < 0 <= tree.inputs[node]:
                while node not in always:
                    always.add(node)
                    node = tree.parents[node]
        # a stable sort: no node precedes its equally valuable parent
        order = sorted(range(len(values)), key=lambda node: (node not in always, -values[node]))
        order = [node for node in order if node in always or values[node] > 0]
        expected, best, size = 0.0, 0.0, 1
        for num, node in enumerate(order, start=1):
            expected += values[node]
            speed = expected / self.costs.of_step(tree.depth, num)
            if num >= len(always) and speed > best:
                best, size = speed, num
        return sorted(order[:size])

    def observe(self, state: CutState, result: StepResult) -> CutState:
        """Learn from what was decided, and let the member follow."""
        if not state.kept:  # nobody has asked for a proposal
            nowhere = result.tokens.new_empty(len(state.rows), 0)
            state.member = self.member.observe(state.member, replace(result, own=nowhere))
            return state
        fade, num_verified = math.exp(-1 / self.memory), result.tokens.shape[1]
        paths, tokens = result.path.tolist(), result.tokens.tolist()
        theirs = None if result.own is None else result.own.tolist()
        own = []
        for index, row in enumerate(state.rows):
            if theirs is None:
                places = verified_places(state.parents[index], state.probed[index], num_verified)
            else:
                places = theirs[index][: len(state.kept[index])]
            where = [-1] * state.num_nodes
            for node, place in zip(state.kept[index], places, strict=True):
                where[node] = place
            own.append(where)
            if not result.new_tokens[index]:
                continue
            row.fade(fade)
            path = set(paths[index])
            for i, parent in enumerate(state.parents[index][1:], start=1):
                place = places[i]
                if place >= 0 and tokens[index][place] >= 0 and places[parent] in path:
                    row.note(state.ranks[index][i], hit=place in path)
        seen = replace(result, own=torch.tensor(own, device=result.tokens.device))
        state.member = self.member.observe(state.member, seen)
        state.kept = []
        return state

    def select(self, state: CutState, rows: Tensor) -> CutState:
        """Keep some rows."""
        return CutState(
            self.member.select(state.member, rows), [state.rows[row] for row in rows.tolist()]
        )


def ranks_of(tree: Laid) -> list[Rank]:
    """Return for every node its depth and its place among its siblings, as they are listed."""
    found: list[Rank] = [(0, 0)]
    children: dict[int, int] = {}
    for node, parent in enumerate(tree.parents[1:], start=1):
        place = children.get(parent, 0)
        found.append((found[parent][0] + 1, place))
        if tree.tokens[node] >= 0:
            children[parent] = place + 1
    return found


def verified_places(parents: Sequence[int], probed: Sequence[bool], num_verified: int) -> list[int]:
    """Return where each of a row's proposed nodes stands in the verified tree, -1 for nowhere.

    Trees are verified as they are, and chains without their end where the limit is near; a model
    that can only read chains verifies the first children of a tree.

    Args:
        parents: of the proposed nodes; -1 for the root.
        probed: which of them are probes.
        num_verified: nodes of the verified tree.
    """
    if num_verified >= len(parents):
        return list(range(len(parents)))
    if all(parent == node - 1 for node, parent in enumerate(parents)):
        return [node if node < num_verified else -1 for node in range(len(parents))]
    places = [-1] * len(parents)
    last, places[0], num = 0, 0, 1
    for node, parent in enumerate(parents):
        if node and parent == last and not probed[node] and num < num_verified:
            last, places[node], num = node, num, num + 1
    return places


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
