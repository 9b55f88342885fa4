"""Show which tokens of a document are learned: colour on a terminal, brackets in plain text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from specheads.data.chat import Encoded
from specheads.data.rows import Record
from specheads.losses import IGNORE
from specheads.terminal import harmless

PLAIN = ("⟦", "⟧")
_LEARNED = "\x1b[38;5;16;48;5;157m"  # black on pale green
_SPECIAL = {True: "\x1b[1;38;5;125;48;5;157m", False: "\x1b[38;5;125m"}  # red, bold where learned
_RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that are alike; the texts of all segments join to that of the document."""

    text: str
    learned: bool
    special: bool


def segments(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> Iterator[Segment]:
    """Cut a document where learned tokens begin or end, and around special tokens."""
    ids = encoded.input_ids.tolist()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    alike = [
        (label != IGNORE, i in special)
        for i, label in zip(ids, encoded.labels.tolist(), strict=True)
    ]
    shown, start = "", 0
    for (learned, is_special), run in groupby(alike):
        stop = start + len(list(run))
        # some tokenizers drop the space before a text, so a run is read behind what precedes it
        whole = _decode(tokenizer, ids[:stop])
        goes_on = whole.startswith(shown)
        text = whole[len(shown) :] if goes_on else _decode(tokenizer, ids[start:stop])
        yield Segment(text, learned, is_special)
        shown, start = whole, stop


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def render(
    encoded: Encoded,
    tokenizer: PreTrainedTokenizerBase,
    *,
    color: bool,
    brackets: tuple[str, str] = PLAIN,
) -> str:
    """Return a document's text, special tokens included, with its learned parts marked.

    Characters that a terminal would obey are shown as escapes.

    Args:
        encoded: the document.
        tokenizer: that encoded it.
        color: by colours of the terminal, not by ``brackets``.
        brackets: what stands before and after a learned part.
    """
    pieces: list[str] = []
    shown = (replace(each, text=harmless(each.text)) for each in segments(encoded, tokenizer))
    for learned, group in groupby(shown, key=lambda s: s.learned):
        if color:
            pieces += [_paint(segment) for segment in group]
        else:
            text = "".join(segment.text for segment in group)
            pieces.append(brackets[0] + text + brackets[1] if learned else text)
    return "".join(pieces)


def _paint(segment: Segment) -> str:
    if not segment.learned and not segment.special:
        return segment.text
    style = _SPECIAL[segment.learned] if segment.special else _LEARNED
    lines = segment.text.split("\n")  # terminals paint the rest of a line that ends in colour
    return "\n".join(style + line + _RESET if line else line for line in lines)


def share(learned: int, tokens: int) -> str:
    """Return the mask ratio as people read it."""
    return f"{tokens:,} tokens, {learned:,} learned ({100 * learned / max(1, tokens):.1f}%)"


def pick(records: Sequence[Record], number: int, seed: int) -> list[Record]:
    """Return ``number`` records drawn by ``seed``, more where there are more kinds, in order.

    Every kind is there at least once, unless ``number`` is 0.
    """
    if not number:
        return []
    order = list(range(len(records)))
    random.Random(seed).shuffle(order)
    firsts: dict[str, int] = {}
    for i in order:
        firsts.setdefault(records[i]["kind"], i)
    chosen = set(firsts.values())
    others = [i for i in order if i not in chosen]
    return [records[i] for i in sorted([*chosen, *others[: max(0, number - len(chosen))]])]
