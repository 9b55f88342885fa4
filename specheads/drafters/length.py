"""How much to draft: how many tokens of a chain, and which part of a tree.

What ends a chain may depend on the tokens drafted so far, which are all proposed, and on what was
accepted in earlier steps. It may not take back a token that was drawn: that would be a choice among
samples, and the output would no longer be the base model's
(:func:`specheads.verification.rejection.block`).

:class:`AdaptiveLength` drafts as many tokens as pay. A draft of n tokens gains
``1 + sum_d prod_{j <= d} rate_j`` tokens, where rate_j is how often the j-th is accepted once those
before it were, and costs n passes of the draft model and a verify step of n + 1 nodes. Their ratio
is the speed, with the measured cost of the step in place of the usual assumption that it costs what
a plain step costs (Leviathan et al., arXiv:2211.17192, theorem 3.8). The rates are learned from
each text while it is written.

:class:`CutDrafter` verifies the part of another drafter's tree that pays. A node's value is the
product along its path of how often guesses at that depth and of that rank among their siblings were
right; taken in the order of their values, nodes form a tree at every size, and the size with the
most expected tokens per measured cost is verified. A verified tree tells the truth about every node
whose parent was reached (arXiv:2402.12374, section 3, grows static trees from such rates).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from specheads.attention.tree import batched
from specheads.drafters.contract import Candidates, Drafter, Prefill, StepResult
from specheads.drafters.growing import pack


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
        max_tokens: per step, at least 1.

    Raises:
        ValueError: if it is less.
    """

    max_tokens: int

    asks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")

    def start(self) -> None:
        """Nothing is remembered."""

    def limit(self, state: None) -> int:
        """Return the longest draft."""
        return self.max_tokens

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Never stop early."""
        return True

    def observe(self, state: None, num_proposed: int, num_accepted: int) -> None:
        """Learn nothing."""


@dataclass(frozen=True)
class ConfidentLength(FixedLength):
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

    threshold: float = 0.3

    asks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Look at the product."""
        return math.prod(probs) >= self.threshold


@dataclass(frozen=True)
class EntropyLength(ConfidentLength):
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

    scale: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale}")

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Look at the newest entropy."""
        return 1 - math.sqrt(self.scale * max(entropies[-1], 0.0)) >= self.threshold


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


Kind = Hashable  # of a guess: its depth, or its depth and rank


@dataclass(frozen=True)
class TextRates:
    """How often one text's guesses of each kind were right; a value, never changed in place.

    Attributes:
        hits: by kind, how often a guess was right; old steps fade.
        trials: by kind, how often one was tried behind right ones.
    """

    hits: Mapping[Kind, float] = field(default_factory=dict)
    trials: Mapping[Kind, float] = field(default_factory=dict)

    def after(self, outcomes: Mapping[Kind, bool], memory: float) -> TextRates:
        """Return the rates after one more step, every step before it faded a little.

        They fade at steps that try nothing too: what was learned long ago is forgotten in favour of
        the prior, so that a text on which drafting did not pay is tried again.

        Args:
            outcomes: by kind whether a guess was right, of those behind right ones only: a guess
                that followed a wrong one says nothing.
            memory: steps after which an observation counts 1/e of a new one.
        """
        kept = math.exp(-1 / memory)
        kinds = {**self.trials, **outcomes}
        return TextRates(
            {kind: self.hits.get(kind, 0.0) * kept + outcomes.get(kind, False) for kind in kinds},
            {kind: self.trials.get(kind, 0.0) * kept + (kind in outcomes) for kind in kinds},
        )

    def estimate(
        self, kinds: Iterable[Kind], prior: Callable[[Any], float], weight: float
    ) -> list[float]:
        """Return the rate of every kind.

        The prior is first scaled by how this text did on the whole, all kinds together, and then
        corrected kind by kind, where something was seen.

        Args:
            kinds: those that are asked for.
            prior: the rate of a kind before anything is seen.
            weight: observations that it counts as.
        """
        foreseen = sum(trials * prior(kind) for kind, trials in self.trials.items())
        factor = (sum(self.hits.values()) + weight) / (foreseen + weight)
        return [
            (self.hits.get(kind, 0.0) + weight * min(1.0, prior(kind) * factor))
            / (self.trials.get(kind, 0.0) + weight)
            for kind in kinds
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
        # per number of tokens drafted, how likely all must be right for one more to pay
        _, speed = best_length(self.prior, costs)
        chains = [costs.of_chain(n) for n in range(max_tokens + 1)]
        self._bars = [
            speed * (after - before) / rate if rate else math.inf
            for (before, after), rate in zip(pairwise(chains), rates, strict=True)
        ]

    def start(self) -> TextRates:
        """Return the state of a text that begins."""
        return TextRates()

    def limit(self, state: TextRates) -> int:
        """Return the draft length with the most expected tokens per cost, 0..max_tokens.

        Where confidence ends drafts, 0 or ``max_tokens``.
        """
        rates = state.estimate(range(self.max_tokens), self.prior.__getitem__, self.weight)
        length, _ = best_length(rates, self.costs)
        return self.max_tokens if length and self.asks else length

    def goes_on(self, probs: Sequence[float], entropies: Sequence[float]) -> bool:
        """Say whether one more token is worth its cost after those with these probabilities."""
        if not self.chances or len(probs) >= self.max_tokens:
            return len(probs) < self.max_tokens
        bins = len(self.chances)
        right = math.prod(self.chances[min(int(prob * bins), bins - 1)] for prob in probs)
        return right > self._bars[len(probs)]

    def observe(self, state: TextRates, num_proposed: int, num_accepted: int) -> TextRates:
        """Return the state after a step.

        Raises:
            ValueError: if more were accepted than proposed.
        """
        if not 0 <= num_accepted <= num_proposed:
            raise ValueError(f"{num_accepted} tokens accepted of {num_proposed} proposed")
        tried = range(min(num_accepted + 1, num_proposed))
        return state.after({depth: depth < num_accepted for depth in tried}, self.memory)


Rank = tuple[int, int]  # depth from 1 on, place among its siblings from 0 on


def rank_prior(rank: Rank) -> float:
    """Return the acceptance rate of a rank to start from, that of middling Medusa heads."""
    depth, place = rank
    return 0.6 * 0.97 ** (depth - 1) * 0.3**place


@dataclass
class CutState:
    """The member's state, what the rows learned, and what was proposed last.

    Attributes:
        member: its state.
        rows: per row of the batch, its rates by rank.
        proposed: per row the parents and ranks of the member's nodes, and which of them were kept,
            the root first; empty where nobody asked for a proposal.
    """

    member: Any
    rows: list[TextRates]
    proposed: list[tuple[list[int], list[Rank], list[int]]] = field(default_factory=list)


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
        return CutState(self.member.start(prefill), [TextRates() for _ in prefill.ids])

    def propose(self, state: CutState) -> Candidates:
        """Ask the member; keep what pays."""
        candidates = self.member.propose(state.member)
        tree = candidates.tree
        parents = batched(tree, tree.parents).expand_as(candidates.tokens).tolist()
        state.proposed, cut, read = [], [], []
        for rates, tokens, inputs, above in zip(
            state.rows, candidates.tokens.tolist(), candidates.inputs.tolist(), parents, strict=True
        ):
            ranks = ranks_of(tokens, above)
            kept = self.keep(rates, tokens, inputs, above)
            place = {node: i for i, node in enumerate(kept)}
            cut.append(
                ([tokens[node] for node in kept], [place.get(above[node], -1) for node in kept])
            )
            read.append([inputs[node] for node in kept])
            state.proposed.append((above, ranks, kept))
        probes = None if candidates.probes is None else read
        return pack(cut, candidates.tokens.device, inputs=probes)

    def keep(
        self,
        rates: TextRates,
        tokens: Sequence[int],
        inputs: Sequence[int],
        parents: Sequence[int],
    ) -> list[int]:
        """Return the nodes of one row that pay, in the member's order.

        Args:
            rates: of the row's text, by rank.
            tokens: [N], the root first.
            inputs: [N], what the base model reads.
            parents: [N], -1 for the root.
        """
        ranks = ranks_of(tokens, parents)
        found = rates.estimate(ranks, rank_prior, WEIGHT)
        values, always = [1.0], {0}
        for node in range(1, len(tokens)):
            values.append(values[parents[node]] * found[node] if tokens[node] >= 0 else 0.0)
            above = node if tokens[node] < 0 <= inputs[node] else 0  # a probe
            while above not in always:
                always.add(above)
                above = parents[above]
        # a stable sort: no node precedes its equally valuable parent
        order = sorted(range(len(values)), key=lambda node: (node not in always, -values[node]))
        order = [node for node in order if node in always or values[node] > 0]
        depth = max(rank[0] for rank, token in zip(ranks, tokens, strict=True) if token >= 0)
        expected, best, size = 0.0, 0.0, 1
        for num, node in enumerate(order, start=1):
            expected += values[node]
            speed = expected / self.costs.of_step(depth, num)
            if num >= len(always) and speed > best:
                best, size = speed, num
        return sorted(order[:size])

    def observe(self, state: CutState, result: StepResult) -> CutState:
        """Learn from what was decided, and tell the member where its nodes were verified."""
        num_verified, paths = result.tokens.shape[1], result.path.tolist()
        theirs = [range(num_verified)] * len(paths) if result.own is None else result.own.tolist()
        own: list[list[int]] = [[]] * len(paths)
        for i, (parents, ranks, kept) in enumerate(state.proposed):
            where = own[i] = [-1] * len(parents)
            for node, place in zip(kept, theirs[i], strict=False):
                where[node] = place
            if not result.new_tokens[i]:
                continue
            tokens, path = result.tokens[i].tolist(), set(paths[i])
            outcomes: dict[Kind, bool] = {
                ranks[node]: where[node] in path
                for node in kept[1:]
                if tokens[where[node]] >= 0 <= where[node] and where[parents[node]] in path - {-1}
            }
            state.rows[i] = state.rows[i].after(outcomes, self.memory)
        places = torch.tensor(own, dtype=torch.long, device=result.tokens.device)
        member = self.member.observe(state.member, replace(result, own=places))
        return CutState(member, state.rows)

    def select(self, state: CutState, rows: Tensor) -> CutState:
        """Keep some rows."""
        return CutState(
            self.member.select(state.member, rows), [state.rows[row] for row in rows.tolist()]
        )


def ranks_of(tokens: Sequence[int], parents: Sequence[int]) -> list[Rank]:
    """Return for every node its depth and its place among its siblings, as they are listed."""
    found: list[Rank] = [(0, 0)]
    children: Counter[int] = Counter()
    for node, parent in enumerate(parents[1:], start=1):
        found.append((found[parent][0] + 1, children[parent]))
        children[parent] += tokens[node] >= 0
    return found
