"""Learn while decoding where it pays to ask a drafter that costs something, after the free ones.

Whether it pays depends on what is at hand already: where a long copy is promised, heads add little
and cost the same. What asking did to the expected speed is therefore kept by that promise. Every
asking tells, right or wrong, as the expectation is known as soon as the guesses are; and where
nobody asks, what is known fades, so that a text that changes is tried again.
"""

from __future__ import annotations

OPTIMISM = 1.1  # what asking is believed to do to the speed where it was never tried
NEW = 0.4  # weight of what was seen last
FORGET = 0.03  # how much of what is known fades with each step that does not ask
WIDTH = 0.5  # tokens of promise that are told apart


class Worth:
    """Of one text, per drafter and promise: by what factor asking changed the expected speed."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], float] = {}

    def pays(self, member: int, promise: float) -> bool:
        """Tell whether to ask.

        Args:
            member: number of the drafter.
            promise: expected accept length without it.
        """
        key = member, int(promise / WIDTH)
        known = self._known.get(key, OPTIMISM)
        if known <= 1:
            self._known[key] = known + FORGET * (OPTIMISM - known)
        return known > 1

    def learn(self, member: int, promise: float, factor: float) -> None:
        """Take note of what asking did.

        Args:
            member: number of the drafter.
            promise: expected accept length without it.
            factor: tokens per cost with it, its own cost included, over those without.
        """
        key = member, int(promise / WIDTH)
        known = self._known.get(key, OPTIMISM)
        self._known[key] = known + NEW * (factor - known)
