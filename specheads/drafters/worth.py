"""Learn while decoding where it pays to ask a drafter that costs something, after the free ones.

What it can add depends on what is at hand already: its guesses count where those at hand are all
wrong from the first on. So it is kept how many tokens asking promised for a place that was open,
and a step asks if these, as far as the place is open, are worth the price at the speed without
them. What asking promised shows as soon as the guesses are there; where nobody asks, what is known
drifts back to what is usual, so that a text that changes is tried again.
"""

from __future__ import annotations

USUAL = 1.3  # tokens that heads or a draft model add where nothing is at hand
NEW = 0.3  # weight of what was seen last
FORGET = 0.03  # how far what is known drifts with each step that does not ask
OPEN = 0.1  # places less open than this teach little


class Worth:
    """Of one text: per drafter what it adds to an open place, and what it costs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}

    def pays(self, member: int, tokens: float, cost: float, chance: float) -> bool:
        """Tell whether to ask; the first time always.

        Args:
            member: number of the drafter.
            tokens: expected of the step without it.
            cost: of that step.
            chance: that one of the first guesses at hand is right.
        """
        if member not in self._known:
            return True
        gain, price = self._known[member]
        pays = gain * (1 - chance) * cost > tokens * price
        if not pays and gain < USUAL:
            self._known[member] = gain + FORGET * (USUAL - gain), price
        return pays

    def learn(self, member: int, gained: float, price: float, chance: float) -> None:
        """Take note of what asking did.

        Args:
            member: number of the drafter.
            gained: expected tokens that its guesses add.
            price: what they cost.
            chance: that one of the first guesses at hand before was right.
        """
        gain, _ = self._known.get(member, (USUAL, price))
        if chance <= 1 - OPEN:
            gain += NEW * (gained / (1 - chance) - gain)
        self._known[member] = gain, price
