"""Find texts that are nearly the same, slowly and obviously."""

from __future__ import annotations

import re
from collections.abc import Sequence

WORDS = 3  # of an n-gram
SHARE = 0.5  # of the shorter text's n-grams that the other has too


def ngrams(text: str) -> set[tuple[str, ...]]:
    """Return the runs of words, in lower case and without punctuation; short texts are one run."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}


def near_duplicates(ones: Sequence[str], others: Sequence[str]) -> list[tuple[int, int]]:
    """Return which of ``ones`` is nearly which of ``others``, by their places.

    The share is of the shorter one's n-grams, so that a text inside a longer one is found too,
    which Jaccard's index would let pass. Where both lists are one, a text is not its own duplicate.
    """
    grams = [ngrams(each) for each in others]
    found = []
    for i, own in enumerate(map(ngrams, ones)):
        for j, other in enumerate(grams):
            if (ones is others and i >= j) or not own & other:
                continue
            if len(own & other) >= SHARE * min(len(own), len(other)):
                found.append((i, j))
    return found
