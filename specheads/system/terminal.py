"""The terminal: colours, progress, a status line, keys and lines, and what is escaped for it.

Only the standard library is used, and tqdm for bars: readline for editing where Python has it,
termios for keys while text is written, and escape sequences that every terminal since the VT100
knows. Where there is no terminal, each part does nothing or falls back to plain lines.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO

from specheads.system.redact import redact

if TYPE_CHECKING:
    from tqdm import tqdm

DIM, RESET = "\x1b[2m", "\x1b[0m"
_BAR = "specheads: {desc}{unit} {n_fmt} of {total_fmt}, {elapsed}, left {remaining}{postfix}"
_FEW_ROWS = 4
# C0, DEL, C1; line and paragraph separators; bidirectional formatting; surrogates
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")
_MOVES = re.compile(r"(?:\x1b\[A)*\Z|\r?")  # all that tqdm writes but text
_KEYS = re.compile(r"\x1b(?:[\[O][0-9;]*[A-Za-z~]|.)")  # what arrows and their like send


def wants_color(setting: str, stream: TextIO) -> bool:
    """Return whether to write colours: as ``setting`` says, with ``auto`` on a terminal only.

    ``auto`` heeds NO_COLOR (https://no-color.org) and TERM=dumb.
    """
    if setting != "auto":
        return setting == "always"
    return not os.environ.get("NO_COLOR") and moves_cursor(stream)


def moves_cursor(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal that knows escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def harmless(text: str) -> str:
    """Return ``text`` with escapes for the characters that a terminal would obey.

    What a model, a file or a server wrote may hold any of them: they move the cursor, type, fill
    the clipboard, or make a line read as another one. Escaped as JSON does it, so that a line of
    JSON stays one, are C0 and C1 but for line breaks and tabs, DEL, line and paragraph separators,
    bidirectional embeddings, overrides and isolates, and lone surrogates, which no stream takes.
    """
    return _OBEYED.sub(lambda found: json.dumps(found[0])[1:-1], text)


class _Escaped:
    """A stream of text that gets what :func:`harmless` gives; standard error also tqdm's moves."""

    def __init__(self, stream: TextIO, *, bars: bool) -> None:
        self.stream, self.bars = stream, bars

    def write(self, text: str) -> int:
        """Write ``text``."""
        moves = _MOVES.match(text) if self.bars else None
        start = moves.end() if moves else 0
        self.stream.write(text[:start] + harmless(text[start:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def escape_output() -> None:
    """Let whatever this process prints, logs or warns of pass through :func:`harmless`.

    Also where output is piped: behind a pipe there is mostly a pager, and then a terminal.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Escaped):
            setattr(sys, name, _Escaped(stream, bars=name == "stderr"))


def unescaped(stream: TextIO) -> TextIO:
    """Return the stream itself, for escape sequences of our own and for text that must be exact."""
    return stream.stream if isinstance(stream, _Escaped) else stream


class _LineByLine:
    """A stream for tqdm that has a line of its own for each state of the bar."""

    def write(self, text: str) -> None:
        if text := text.strip():
            sys.stderr.write(text + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(unit: str, *, seconds: float = 10, **settings: Any) -> tqdm[Any]:
    """Return a bar on standard error; where that is no terminal, lines that say the same.

    Such a line stands at the start, at the end, wherever the description is set, and in between
    every few seconds, as far as something is done.

    Args:
        unit: the word for one of what is counted.
        seconds: time between two such lines.
        **settings: tqdm's, as ``total`` or ``iterable``.
    """
    from tqdm import tqdm

    if not sys.stderr.isatty():
        settings |= {"file": _LineByLine(), "mininterval": seconds, "miniters": 1}
        settings["bar_format"] = _BAR
    return tqdm(unit=unit, **settings)


def advance(bar: tqdm[Any], num: int, told: str = "") -> None:
    """Add ``num`` to a bar; it is shown again after its time even where nothing was added."""
    bar.set_postfix_str(told, refresh=False)
    if not bar.update(num) and time.time() - bar.last_print_t >= bar.mininterval:
        bar.last_print_t = time.time()
        bar.refresh()


@contextlib.contextmanager
def waiting_for(what: str, *, first: float = 3, seconds: float = 10) -> Iterator[None]:
    """While open, print a line now and then, so that nobody takes a long wait for the end.

    Args:
        what: the line's text; behind it stands how long it has been.
        first: seconds before the first line.
        seconds: time between two lines.
    """
    done, start = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = first
        while not done.wait(pause):
            past = time.monotonic() - start
            note(f"{what} ({past:.0f} s)")
            pause = seconds

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class StatusLine:
    """The terminal's last row, kept for one line that changes while text scrolls above it.

    Does nothing where the stream is no terminal, or has too few rows.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = unescaped(stream)
        self._rows = self._columns = 0

    def __enter__(self) -> Self:
        """Take the last row; the cursor must stand at the beginning of a line."""
        self._measure()
        if self._rows:  # a line break first: where the cursor is in the last row, it scrolls
            self._write(f"\n{self._region()}\x1b[1A")
        return self

    def show(self, text: str) -> None:
        """Write ``text`` there, cut to the row."""
        if before := self._rows:
            self._measure()
            region = self._region() if self._rows not in (before, 0) else ""
            line = text[: max(0, self._columns - 1)]
            self._write(f"{region}\x1b7\x1b[{self._rows};1H\x1b[2K{line}\x1b8")

    def __exit__(self, *error: object) -> None:
        """Give the row back, empty."""
        if self._rows:
            self._write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[r\x1b8")
            self._rows = 0

    def _region(self) -> str:
        # setting the region moves the cursor, so it is saved before (ESC 7) and restored (ESC 8)
        return f"\x1b7\x1b[1;{self._rows - 1}r\x1b8"

    def _measure(self) -> None:
        self._rows = self._columns = 0
        with contextlib.suppress(OSError, ValueError):
            if moves_cursor(self.stream):
                columns, rows = os.get_terminal_size(self.stream.fileno())
                self._columns, self._rows = (columns, rows) if rows >= _FEW_ROWS else (0, 0)

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


@contextlib.contextmanager
def keys_of(stream: TextIO) -> Iterator[Callable[[], str]]:
    """While open, echo nothing that is typed, and yield a function that returns what has been.

    It never waits, and Ctrl-C still interrupts. Where ``stream`` is no terminal nothing is seen.
    """
    if not stream.isatty():
        yield lambda: ""
        return
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def typed() -> str:
        ready = select.select([stream], [], [], 0)[0]
        return decode(os.read(stream.fileno(), 4096)) if ready else ""

    before = termios.tcgetattr(stream.fileno())
    tty.setcbreak(stream.fileno(), termios.TCSADRAIN)
    try:
        yield typed
    finally:
        termios.tcsetattr(stream.fileno(), termios.TCSADRAIN, before)


class Lines:
    r"""Lines of standard input: edited on a terminal, as they come elsewhere.

    Args:
        words: words that Tab completes at the beginning of a line.
        keys: key -> line that it enters, in readline's words, as ``{r"\C-p": "/plain"}``.
    """

    def __init__(self, words: Sequence[str] = (), keys: Mapping[str, str] | None = None) -> None:
        self.interactive = sys.stdin.isatty()
        self._ahead = ""
        self._readline: Any = None
        if self.interactive and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline

                # libedit knows other words than GNU's readline
                self._readline = None if "libedit" in (readline.__doc__ or "") else readline
        if self._readline is None:
            return
        for key, line in (keys or {}).items():
            self._readline.parse_and_bind(rf'"{key}": "\C-a\C-k{line}\C-m"')

        def complete(text: str, number: int) -> str | None:
            found = [word for word in words if text and word.startswith(text)]
            return found[number] if number < len(found) else None

        self._readline.set_completer_delims(" ")
        self._readline.set_completer(complete)
        self._readline.parse_and_bind("tab: complete")

    def type_ahead(self, text: str) -> None:
        """Let the next lines begin with ``text``, which was typed before they were asked for."""
        for c in _KEYS.sub("", text).replace("\r", "\n"):
            if c in "\b\x7f":
                self._ahead = self._ahead if self._ahead.endswith("\n") else self._ahead[:-1]
            elif c == "\n" or unicodedata.category(c) != "Cc":
                self._ahead += c

    def read(self, prompt: str) -> str:
        """Return the next line, without its end.

        Raises:
            EOFError: where there is none.
        """
        line, end, self._ahead = self._ahead.partition("\n")
        if end:
            note(f"{prompt}{harmless(line)}")
            return line
        if not self.interactive:
            read = sys.stdin.readline()
            if not read:
                raise EOFError
            return read.removesuffix("\n")
        if self._readline is None:
            print(f"{prompt}{harmless(line)}", end="", file=sys.stderr, flush=True)
            return line + input()
        self._readline.set_startup_hook(lambda: self._readline.insert_text(line))
        try:
            return input(prompt)
        finally:
            self._readline.set_startup_hook(None)


@contextlib.contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """Collect Ctrl-C, so that a turn ends between two passes; the second one ends it at once."""
    pressed: list[int] = []

    def handle(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = None
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs it has the signals
        before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def write(piece: str) -> None:
    """Write to standard output at once, whatever its encoding, and nothing escaped."""
    # A terminal without UTF-8 shows a question mark rather than ending the program.
    out = unescaped(sys.stdout)
    encoding = out.encoding or "utf-8"
    out.write(piece.encode(encoding, "replace").decode(encoding))
    out.flush()


def note(text: str) -> None:
    """Print ``text`` on standard error at once: what is said beside a command's own output."""
    print(text, file=sys.stderr, flush=True)


def lose_stdout() -> None:
    """Let what is left in the buffer of standard output, and all to come, go nowhere.

    After it was closed or its disk is full: what is written at exit must not fail once more.
    """
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def stop(message: str, code: int) -> NoReturn:
    """Print ``message`` as one line on stderr and leave with ``code``."""
    note(f"specheads: {harmless(redact(' '.join(message.split())))}")
    raise SystemExit(code)
