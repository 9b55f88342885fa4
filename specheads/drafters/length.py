"""How many tokens a draft model proposes: fixed, or until it is no longer sure.

What ends a chain may depend on the tokens drafted so far, which are all proposed, and on what was
accepted in earlier steps. It may not take back a token that was drawn: that would be a choice among
samples, and the output would no longer be the base model's (:func:`specheads.rejection.block`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
