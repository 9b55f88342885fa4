"""Texts that say nearly the same thing: the one measure by which sets of questions are compared.

Two texts are near-duplicates where the Jaccard index of their sets of three words in a row reaches
:data:`NEAR` (shingles: Broder, On the resemblance and containment of documents, 1997). Case and
signs do not count. Of ten words one may differ, of a question of six words none: "What is the
capital of France?" and "... of Spain?" are near-duplicates, with another verb they are not.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

NEAR = 0.6
# Chinese and Japanese are written without blanks: each of their characters is a word
_WORD = re.compile(r"[\u3040-\u9fff]|[^\W\u3040-\u9fff]+")

Shingle = tuple[str, ...]


def words(text: str) -> list[str]:
    """Return the words of ``text`` in lower case."""
    return _WORD.findall(text.lower())


def shingles(text: str) -> set[Shingle]:
    """Return every three words in a row of ``text``; a shorter text is one shingle."""
    found = words(text)
    return {tuple(found[i : i + 3]) for i in range(max(1, len(found) - 2))}


class SimilarTexts:
    """A set of texts that is asked for the near-duplicates of others.

    Every pair with a shingle in common is counted exactly; those without cannot be alike.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._places: dict[Shingle, list[int]] = defaultdict(list)

    def add(self, text: str) -> None:
        """Add ``text``, as number 0, 1 and so on."""
        found = shingles(text)
        for shingle in found:
            self._places[shingle].append(len(self._sizes))
        self._sizes.append(len(found))

    def near(self, text: str) -> int | None:
        """Return the number of the first text of which ``text`` is a near-duplicate, else None."""
        found = shingles(text)
        shared = Counter(n for shingle in found for n in self._places.get(shingle, ()))
        sizes, size = self._sizes, len(found)
        alike = (i for i, num in shared.items() if num >= NEAR * (size + sizes[i] - num))
        return min(alike, default=None)
