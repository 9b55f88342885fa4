"""``python -m specheads.chat``: through a pseudo-terminal, and over pipes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specheads import chat
from specheads.config import ChatConfig, ConfigError, GenerateConfig
from specheads.decoding.conversation import HELP, Chat, Turn
from specheads.generate import run as generate

ROOT = Path(__file__).parents[2]
GOLDEN = str(ROOT / "tests" / "golden" / "export")
# the status line, between saving and restoring the cursor, and colours
ESCAPE = re.compile(r"\x1b7.*?\x1b8|\x1b\[[0-9;?]*[a-zA-Z]")
# the chat itself, made to wait at the third step of two turns until the test has typed
CHILD = """
import time
from specheads import chat
from specheads.decoding.conversation import PLAIN_KEY, Chat

turns, step = [0], Chat.on_step

def waits(self, turn, tokens):
    num_steps = len(turn.accept_lengths)
    turns[0] += not num_steps
    if num_steps == 3 and turns[0] in (2, 5):  # the fourth is plain decoding of the third
        self.status.show(f"[waiting {turns[0]}]")
        while not (PLAIN_KEY in self.typed if turns[0] == 2 else self.pressed):
            time.sleep(0.01)
            self.typed += self.keys()
    step(self, turn, tokens)

Chat.on_step = waits
chat.main()
"""


class Terminal:
    """A program in a terminal of 24 lines with 80 columns."""

    def __init__(self, *argv: str, folder: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(folder)
                env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                env |= {"TERM": "xterm-256color", "LINES": "24", "COLUMNS": "80"}
                env.pop("NO_COLOR", None)
                os.execve(sys.executable, [sys.executable, *argv], env)
            finally:
                os._exit(127)
        import fcntl
        import termios

        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.seen = ""
        self._from = 0

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.fd, text.encode())

    def wait_for(self, text: str, seconds: float = 600) -> str:
        """Return what was written up to ``text``, from where the last call ended."""
        end = time.monotonic() + seconds
        while (found := self.seen.find(text, self._from)) < 0:
            assert time.monotonic() < end, f"no {text!r} in {self.seen[self._from :]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    pytest.fail(f"ended before {text!r}: {self.seen[self._from :]!r}")
        before, self._from = self.seen[self._from : found], found + len(text)
        return before

    def wait(self) -> int:
        """Return the exit code, once there is one."""
        while True:  # what nobody reads would keep it from ending
            try:
                if not os.read(self.fd, 65536):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """Hang up."""
        os.close(self.fd)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Return the chat, in a terminal, with the golden export."""
    opened = Terminal(
        "-c", CHILD, f"checkpoint={GOLDEN}", "max_new_tokens=40", "temperature=0.7", "seed=3",
        folder=tmp_path,
    )  # fmt: skip
    yield opened
    opened.close()


def generated(messages: list[dict[str, str]], folder: Path, **settings: object) -> str:
    """Return what generate answers to these messages."""
    path = folder / "asked.jsonl"
    path.write_text(json.dumps({"id": "turn", "messages": messages}) + "\n")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        generate(GenerateConfig(GOLDEN, prompts=str(path), max_new_tokens=40, **settings))  # type: ignore[arg-type]
    return str(json.loads(out.getvalue())["text"])


def test_turns_in_a_terminal_are_what_generate_gives(terminal: Terminal, tmp_path: Path) -> None:
    """Prevents a chat whose kept cache, keys or interruptions change what the model says."""
    terminal.wait_for("/help lists commands")
    terminal.wait_for("> ")
    terminal.type("def add(a, b):\r")
    shown = terminal.wait_for("; read ")
    assert "\x1b[30;48;5;" in shown, "no colour for the verify steps"
    assert "\x1b[1;23r" in shown and "tokens; Ctrl-C ends" in shown, "no status line"
    terminal.wait_for("> ")
    terminal.type("And again.\r")
    terminal.wait_for("[waiting 2]")
    terminal.type("A third one, typed ahead.\r\x10")  # and Ctrl-P
    compared = terminal.wait_for("tokens are equal")
    assert "one token at a time" in compared and "speculative" in compared
    terminal.wait_for("> A third one, typed ahead.")
    terminal.wait_for("; read ")
    terminal.wait_for("> ")
    terminal.type("class A:\r")
    terminal.wait_for("[waiting 5]")
    terminal.type("\x03")  # Ctrl-C
    terminal.wait_for("; stopped")
    terminal.wait_for("> ")
    terminal.type("\x10")  # Ctrl-P at the prompt
    terminal.wait_for("tokens are equal")
    terminal.wait_for("> ")
    terminal.type("/save talk.jsonl\r")
    terminal.wait_for("wrote talk.jsonl")
    terminal.wait_for("> ")
    terminal.type("/quit\r")
    assert terminal.wait() == 0

    messages = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
    asked = [each["content"] for each in messages if each["role"] == "user"]
    assert asked == ["def add(a, b):", "And again.", "A third one, typed ahead.", "class A:"]
    screen = ESCAPE.sub("", terminal.seen).replace("\r\n", "\n")
    for turn in range(3):
        answer = messages[2 * turn + 1]["content"]
        assert answer and answer in screen
        expected = generated(messages[: 2 * turn + 1], tmp_path, temperature=0.7, seed=3)
        assert answer == expected
    stopped = messages[7]["content"]
    whole = generated(messages[:7], tmp_path, temperature=0.7, seed=3)
    assert whole.startswith(stopped) and len(stopped) < len(whole)


def talk(
    capsys: pytest.CaptureFixture[str], *lines: str, **settings: object
) -> tuple[list[str], str]:
    """Return the lines of answers and the notes of a chat over pipes."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        chat.run(ChatConfig(GOLDEN, **{"max_new_tokens": 16, **settings}))  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    return out.splitlines(), err


def test_pipes_get_answers_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents prompts, colours and figures in a file that was to hold answers."""
    question = [{"role": "user", "content": "/a\nb"}]
    out, err = talk(capsys, '"""', "/a", "b", '"""')
    expected = generated(question, tmp_path).encode()[:16].decode()
    assert "\n".join(out) == expected
    assert "\x1b" not in err and "tokens/s; read" in err
    monkeypatch.setenv("NO_COLOR", "1")
    colored, _ = talk(capsys, "//a", color="always")
    assert "\x1b[" in "".join(colored), "always is stronger than NO_COLOR"


def test_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Prevents a command that says it did something and changed nothing, or lost the talk."""
    path = tmp_path / "a.jsonl"
    out, err = talk(
        capsys,
        "/plain", "/undo", "/save x.txt", "/temprature 1", "/temperature hot", "/temperature -1",
        "/help", "/temperature 1", "/seed 5", "first", "second", f"/save {path}", "/undo", "third",
        f"/save {path}", "/system Be brief.", "again", f"/save {path}", "/reset", f"/save {path}",
        "/quit", "never",
    )  # fmt: skip
    for note in (
        "there is no answer to compare yet",
        "there is nothing to take back",
        "/save needs a file name that ends with .jsonl",
        "unknown command /temprature; did you mean /temperature?",
        "/temperature needs a number, got 'hot'",
        "temperature must be at least 0, got -1.0",
        HELP,
        "a new conversation, with this system message",
    ):
        assert note in err, note
    saved = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert [[each["content"] for each in m if each["role"] != "assistant"] for m in saved] == [
        ["first", "second"],
        ["first", "third"],
        ["Be brief.", "again"],
        ["Be brief."],
    ]
    assert len("\n".join(out)) == 16 * 4 + 3, "one answer more or less"
    for messages in saved[:3]:
        expected = generated(messages[:-1], tmp_path, temperature=1.0, seed=5)
        assert messages[-1]["content"] == expected[:16]


def test_beside(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents a comparison that compares a thing with itself, or explains nothing."""
    out, err = talk(capsys, "def f(x):", "/plain never", "more", beside=True)
    assert err.count("all 16 tokens are equal") == 1
    assert out[: len(out) // 3] == out[len(out) // 3 : 2 * (len(out) // 3)]
    lossy = {"acceptance": "lossy_typical", "epsilon": 0.0, "delta": 0.0}
    _, err = talk(
        capsys, "def f(x):", "/plain always", "again", temperature=1.0, decode=_decode(**lossy)
    )
    assert "tokens are equal: decode.acceptance=lossy_typical is not the base's" in err


def _decode(**settings: object) -> object:
    from specheads.config import DecodeConfig

    return DecodeConfig(**settings)  # type: ignore[arg-type]


def test_what_cannot_be_said_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Prevents a traceback in the middle of a talk, which would be lost with it."""
    out, err = talk(capsys, "x" * 1100, "def f(x):", max_new_tokens=500)
    assert "the conversation is 1103 tokens, but the base model's context is 1024" in err
    assert out, "the talk went on"
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    out, err = talk(capsys, "/system Be brief.", "a", template=str(template))
    assert "refuses it: roles must alternate" in err and "\nTraceback" not in err
    assert "tokens in" in err, "the talk went on without"
    with pytest.raises(ConfigError, match="refuses it: roles must alternate"):
        talk(capsys, "a", template=str(template), system="Be brief.")
    with pytest.raises(ConfigError, match=r"template=/no/such.jinja cannot be read"):
        talk(capsys, "a", template="/no/such.jinja")


def test_ctrl_c_ends_the_turn_and_not_the_talk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents the wish to stop an answer from costing the whole conversation."""
    step, presses = Chat.on_step, [1, 2]

    def pressed(self: Chat, turn: Turn, tokens: list[int]) -> None:
        if len(turn.accept_lengths) == 2 and presses:
            for _ in range(presses.pop(0)):
                signal.raise_signal(signal.SIGINT)
        step(self, turn, tokens)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Chat, "on_step", pressed)
    out, err = talk(capsys, "def f(x):", "twice", "class A:", max_new_tokens=40)
    assert err.count("; stopped") == 1
    assert "given up in the middle of a pass" in err
    assert len(re.findall(r"^1 \+ \d+ tokens in \d+ steps", err, re.MULTILINE)) == 2
    assert out[-1] and signal.getsignal(signal.SIGINT) is before
