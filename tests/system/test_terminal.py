"""What is written to a terminal, and read from one; the real one is in test_chat_command."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
import traceback
import unicodedata
import warnings

import pytest
from tqdm import tqdm

from specheads.system import terminal
from specheads.system.terminal import (
    Lines,
    StatusLine,
    advance,
    escape_output,
    harmless,
    keys_of,
    progress_bar,
    unescaped,
    waiting_for,
    wants_color,
)


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return a number that nothing real has."""
        return 99

    def take(self) -> str:
        """Return what was written since the last call."""
        text = self.getvalue()
        self.truncate(0)
        self.seek(0)
        return text


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return columns and rows of the terminal, to be changed."""
    found = [40, 10]
    monkeypatch.setattr(
        terminal.os, "get_terminal_size", lambda number: os.terminal_size(tuple(found))
    )
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return found


def test_colours_are_wanted_where_somebody_sees_them(
    size: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape sequences in a file, or on a terminal that prints them, make a text unreadable."""
    assert wants_color("auto", Screen()) and not wants_color("auto", io.StringIO())
    assert not wants_color("never", Screen()) and wants_color("always", io.StringIO())
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_color("auto", Screen()), "the convention: an empty value counts as unset"
    monkeypatch.setenv("NO_COLOR", "0")
    assert not wants_color("auto", Screen())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color("auto", Screen())


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    """Sequences change the title, or the clipboard; overrides make a line read as another one."""
    kept = "a\n\tb é ü 日本 👩\u200d💻 \u00a0 שלום\u200f."
    assert harmless(kept) == kept
    assert harmless("\x1b]0;title\x07\r\x9b31m\x7f") == "\\u001b]0;title\\u0007\\r\\u009b31m\\u007f"
    for number in range(0x110000):
        c = chr(number)
        obeyed = unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"
        obeyed |= 0x202A <= number <= 0x202E or 0x2066 <= number <= 0x206F
        assert (harmless(c) != c) == obeyed, hex(number)
        assert harmless(c).isascii() or not obeyed
    line = json.dumps({"text": "\x1b\x7f\x9b\u202e\u2028é"}, ensure_ascii=False)
    assert json.loads(harmless(line)) == json.loads(line), "a line of JSON stays one"


def test_whatever_a_command_prints_is_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One print, log line, warning or bar that quotes a file's name raw would be enough."""
    foreign = "\x1b]52;c;ZXZpbA==\x07\x9b2J\u202e"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    escape_output()
    escape_output()
    assert unescaped(unescaped(sys.stdout)) is unescaped(sys.stdout) is not sys.stdout
    print(foreign)
    sys.stdout.writelines([foreign, "\r\n"])
    logger = logging.getLogger("specheads.test")
    logger.addHandler(handler := logging.StreamHandler())
    logger.warning(foreign)
    logger.removeHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning(foreign, UserWarning, "file", 1)
    with (
        tqdm(total=2, file=sys.stderr, desc=foreign, mininterval=0, ascii=True) as outer,
        tqdm(total=1, file=sys.stderr, mininterval=0, ascii=True) as inner,
    ):
        inner.update()
        outer.update()
        tqdm.write(foreign, file=sys.stdout)
    try:
        raise ValueError(foreign)
    except ValueError:
        traceback.print_exc()
    out, err = capsys.readouterr()
    assert out.count(harmless(foreign)) == 3 and err.count(harmless(foreign)) >= 4
    assert "\x1b[A" in err and "\r" in err, "bars above each other are moved to"
    for text in (out, err.replace("\x1b[A", "").replace("\r", "")):
        assert harmless(text) == text
    print("\x1b[2mours\x1b[0m", file=unescaped(sys.stdout))
    assert capsys.readouterr().out == "\x1b[2mours\x1b[0m\n"


def test_the_status_line_is_given_back(size: list[int]) -> None:
    """A scroll region that stays leaves the user a terminal that is broken below."""
    screen = Screen()
    with StatusLine(screen) as status:
        assert screen.take() == "\n\x1b7\x1b[1;9r\x1b8\x1b[1A"
        status.show("x" * 60)
        assert screen.take() == "\x1b7\x1b[10;1H\x1b[2K" + "x" * 39 + "\x1b8"
        size[:] = 30, 20
        status.show("y")
        assert screen.take() == "\x1b7\x1b[1;19r\x1b8\x1b7\x1b[20;1H\x1b[2Ky\x1b8"
    assert screen.take() == "\x1b7\x1b[20;1H\x1b[2K\x1b[r\x1b8"
    with pytest.raises(KeyError), StatusLine(screen):
        raise KeyError
    assert screen.take().endswith("\x1b[r\x1b8")


def test_no_status_line_without_a_place_for_it(
    size: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cursor movements in a log are noise, and on two rows there would be nothing else."""
    file = io.StringIO()
    with StatusLine(file) as status:
        status.show("x")
    assert file.getvalue() == ""
    for columns, rows in ((80, 0), (80, 3)):
        size[:] = columns, rows
        screen = Screen()
        with StatusLine(screen) as status:
            status.show("x")
        assert screen.take() == ""
    size[:] = 80, 24
    monkeypatch.setenv("TERM", "dumb")
    with StatusLine(screen) as status:
        status.show("x")
    assert screen.take() == ""


def test_lines_over_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last line without its end is a message too."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\nthree"))
    lines = Lines(["/help"], {r"\C-p": "/plain"})
    with keys_of(io.StringIO("x")) as typed:
        assert typed() == ""
    assert [lines.read(""), lines.read(""), lines.read("")] == ["one", "", "three"]
    with pytest.raises(EOFError):
        lines.read("")


def test_what_was_typed_ahead_comes_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a user types while an answer comes is the next question, and not lost."""
    screen = Screen("later\n")
    monkeypatch.setattr("sys.stdin", screen)
    monkeypatch.setattr("builtins.input", lambda prompt="": screen.readline().rstrip("\n"))
    lines = Lines()
    lines.type_ahead("one\rtwo\nth")
    lines.type_ahead("ree, ")
    assert [lines.read("> "), lines.read("> "), lines.read("> ")] == ["one", "two", "three, later"]
    assert capsys.readouterr().err == "> one\n> two\n> three, "
    lines.type_ahead("a\n\x7fxy\b\x1b[A\x1bOD\x04é\t\x7f\x7fz\n")
    assert [lines.read(""), lines.read("")] == ["a", "z"]


def test_a_bar_without_a_terminal_is_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of silence in a log look like a program that hangs; a line per text fills it."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress_bar("text", total=35) as bar:
        bar.set_description("T=0")
        for _ in range(35):
            now[0] += 1
            bar.update()
    out, err = capsys.readouterr()
    assert not out and "\r" not in err
    assert [line.partition(",")[0] for line in err.splitlines()] == [
        "specheads: text 0 of 35",
        "specheads: T=0: text 0 of 35",
        *(f"specheads: T=0: text {n} of 35" for n in (10, 20, 30, 35)),
    ]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert [*progress_bar("text", iterable=[1, 2])] == [1, 2]
    assert "\r" in capsys.readouterr().err


def test_a_long_wait_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Minutes without a line are taken for a program that hangs."""
    with waiting_for("loading it", first=0.01, seconds=0.01):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2 and lines[0] == "loading it (0 s)"
    with waiting_for("loading it"):
        pass
    assert not capsys.readouterr().err
    with progress_bar("text", seconds=0.01, total=3) as bar:
        for _ in range(3):
            time.sleep(0.02)
            advance(bar, 0, "5 tokens/s")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 4 and "text 0 of 3" in lines[2] and "5 tokens/s" in lines[2]
