"""Text as it appears, one colour per verify step: the tokens of a step came from one pass."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from specheads.terminal import harmless

_BACKGROUNDS = (223, 153, 157, 225, 229, 189)  # pale, of the 256-colour palette
_RESET = "\x1b[0m"


class StepPrinter:
    """Prints the new tokens of every step as text; give it to a decoding loop as ``on_tokens``.

    Bytes of an unfinished character wait for the step that completes it.

    Args:
        tokenizer: the base model's.
        write: gets pieces of text; they join to the whole text.
        color: give each step a background of its own.
        safe: write control characters as escapes, for a terminal that would obey them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str], object],
        *,
        color: bool,
        safe: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.write = write
        self.color = color
        self.safe = safe
        self._tokens: list[int] = []
        self._shown = ""
        self._num_steps = 0

    def __call__(self, row: int, tokens: list[int]) -> None:
        """Show one step's tokens; there is only one row."""
        assert row == 0
        self._tokens += tokens
        self._show(self._decode().rstrip("\ufffd"))
        self._num_steps += 1

    def finish(self) -> None:
        """Show what was held back; it will not be completed."""
        self._show(self._decode())

    @property
    def text(self) -> str:
        """All text shown so far, without colours."""
        return self._shown

    def _decode(self) -> str:
        text = self.tokenizer.decode(
            self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _show(self, text: str) -> None:
        piece = text[len(self._shown) :]
        if not piece:
            return
        self._shown = text
        if self.safe:
            piece = harmless(piece)
        self.write(self._paint(piece) if self.color else piece)

    def _paint(self, piece: str) -> str:
        start = f"\x1b[30;48;5;{_BACKGROUNDS[self._num_steps % len(_BACKGROUNDS)]}m"
        # A background that is on at a line break would fill the rest of the line.
        return "\n".join(f"{start}{line}{_RESET}" if line else "" for line in piece.split("\n"))
