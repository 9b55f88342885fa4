"""Streaming text, one colour per verify step."""

import re

import pytest
from transformers import PreTrainedTokenizerFast

from specheads.decoding.conversation import StepPrinter
from specheads.system.terminal import harmless


def show(
    tokenizer: PreTrainedTokenizerFast, steps: list[list[int]], *, color: bool, safe: bool = False
) -> tuple[list[str], StepPrinter]:
    """Print steps of tokens; return the written pieces and the printer."""
    pieces: list[str] = []
    printer = StepPrinter(tokenizer, pieces.append, color=color, safe=safe)
    for step in steps:
        printer(0, step)
    printer.finish()
    return pieces, printer


def test_characters_across_steps_are_written_whole(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Bytes decoded step by step turn every accented letter into replacement marks."""
    text = "é→x\ny"
    ids = byte_tokenizer(text, add_special_tokens=False).input_ids
    pieces, printer = show(byte_tokenizer, [[i] for i in ids], color=False)
    assert "".join(pieces) == text == printer.text.shown
    assert all("\ufffd" not in piece for piece in pieces)


def test_colours_change_with_the_step_and_do_not_bleed(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """A background left on at a line break paints the rest of the terminal's line."""
    ids = byte_tokenizer("ab\ncd", add_special_tokens=False).input_ids
    pieces, _ = show(byte_tokenizer, [ids[:1], ids[1:4], ids[4:]], color=True)
    joined = "".join(pieces)
    codes = re.findall(r"\x1b\[30;48;5;(\d+)m", joined)
    assert len(set(codes)) == 3 and codes[1] == codes[2]
    assert re.sub(r"\x1b\[[0-9;]*m", "", joined) == "ab\ncd"
    assert "\x1b[0m\n" in joined
    assert joined.count("\x1b[0m") == len(codes)


def test_end_of_text_is_not_shown(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """The end-of-text token is a token, but no text."""
    ids = byte_tokenizer("ab", add_special_tokens=False).input_ids
    pieces, _ = show(byte_tokenizer, [ids, [258]], color=False)
    assert "".join(pieces) == "ab"


def test_unfinished_bytes_are_shown_at_the_end(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Bytes held back for a character that never completes would vanish."""
    pieces, _ = show(byte_tokenizer, [[97], [0xC3]], color=False)
    assert "".join(pieces) == "a\ufffd"


@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_sequences_across_steps_are_escaped(
    byte_tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    """A sequence in pieces, or a control character whose bytes are in two, is obeyed as a whole."""
    text = "a\x1b]0;x\x07\x9b2J\u202eé\r\nb"
    ids = byte_tokenizer(text, add_special_tokens=False).input_ids
    steps = [ids[i : i + size] for i in range(0, len(ids), size)]
    pieces, printer = show(byte_tokenizer, steps, color=False, safe=True)
    assert "".join(pieces) == harmless(text) != text
    assert printer.text.shown == text
