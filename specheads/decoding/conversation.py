"""A conversation that is decoded turn by turn, its KV cache kept, and the talk in a terminal.

Every turn's prompt is the whole conversation, rendered by the chat template as ``generate`` renders
a record of ``messages``. What the cache holds of it is not read again; where a template rewrites
earlier messages, or text comes back as other tokens, the cache forgets what follows, so that a turn
is the one that ``generate`` gives for these messages.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from os.path import commonprefix
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specheads.attention.cache import TreeCache
from specheads.config import ChatConfig, ConfigError
from specheads.data.chat import Encoder
from specheads.decoding.choose import EXACT_DTYPES
from specheads.decoding.generate import SpecDecoder, decode_prompts, room
from specheads.system import terminal
from specheads.system.errors import did_you_mean
from specheads.system.terminal import DIM, RESET, harmless, wants_color, write

PLAIN_KEY = "\x10"  # Ctrl-P
_EVERY = 0.1  # seconds between looks of the status line


class StopTurnError(Exception):
    """Raised by the caller's ``on_step`` to end a turn behind the step at hand."""


@dataclass
class Turn:
    """One answer.

    Attributes:
        prompt: token ids of the whole conversation before it.
        num_read: how many of them were read for it; the cache held the others.
        config: how its tokens were chosen.
        new_tokens: the answer's, an end token included.
        accept_lengths: tokens of every verify step; the prefill's own token is none of them.
        decode_seconds: from the first token to the last.
        finished: ended by itself.
        stopped: ended by :class:`StopTurnError`.
        context_full: ended because the base model has no more positions.
    """

    prompt: list[int]
    num_read: int
    config: ChatConfig
    new_tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    decode_seconds: float = 0.0
    finished: bool = False
    stopped: bool = False
    context_full: bool = False

    @property
    def accept_length(self) -> float:
        """Mean tokens per verify step; 1 for plain decoding, and where there was no step."""
        return fmean(self.accept_lengths or [1])

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first per second of decoding; 0 where there was one token at most."""
        num_tokens = len(self.new_tokens) - 1
        return num_tokens / self.decode_seconds if num_tokens > 0 and self.decode_seconds else 0.0


OnStep = Callable[[Turn, list[int]], None]


class Conversation:
    """Messages, and the cache that holds most of them.

    Args:
        decoder: with its tokenizer; its drafter may be None.
        config: how tokens are chosen, and the limit of an answer; may be replaced between turns.

    Attributes:
        messages: so far, the system's first; edit them as you like between turns.

    Raises:
        ConfigError: if the tokenizer has no chat template.
    """

    def __init__(self, decoder: SpecDecoder, config: ChatConfig) -> None:
        if decoder.tokenizer is None:
            raise ValueError("the decoder needs a tokenizer: SpecDecoder(..., tokenizer=...)")
        self.decoder = decoder
        self.config = config
        self.tokenizer = decoder.tokenizer
        self.cache = TreeCache()
        self._encode = Encoder(self.tokenizer)
        self._plain = replace(decoder, drafter=None, streamer=None)
        self.messages: list[dict[str, str]] = []
        if config.system:
            self.set_system(config.system)

    def set_system(self, text: str) -> None:
        """Begin anew with another system message; an empty one takes it away.

        Raises:
            ConfigError: if the chat template has no place for it; then nothing has changed.
        """
        messages = [{"role": "system", "content": text}] if text else []
        self.prompt([*messages, {"role": "user", "content": "a"}])
        self.messages = messages
        self.cache.reset()

    def reset(self) -> None:
        """Forget every message but the system's, and what the cache holds."""
        self.messages = [each for each in self.messages[:1] if each["role"] == "system"]
        self.cache.reset()

    def undo(self) -> bool:
        """Take back the last question and its answer; say whether there was one."""
        if not self.messages or self.messages[-1]["role"] == "system":
            return False
        self.messages = self.messages[:-2]
        return True

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens that ask for an answer to ``messages``.

        Raises:
            ConfigError: one line, if the chat template refuses them.
        """
        if not messages or messages[-1]["role"] != "user":
            raise ConfigError("the last message must be the user's")
        return self._encode.prompt({"id": "of this conversation", "messages": list(messages)})

    def ask(self, text: str, on_step: OnStep | None = None) -> Turn:
        """Answer ``text``, and keep both; with no token given, keep neither.

        Args:
            text: the user's message.
            on_step: called behind the prefill and every verify step, with the turn as far as it is
                and the step's tokens; may raise :class:`StopTurnError`.

        Raises:
            ConfigError: if the template refuses the messages, or they fill the context; then
                nothing has changed.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        turn = Turn(self.prompt(messages), 0, self.config)
        self._decode(self.decoder, turn, on_step)
        if turn.new_tokens:
            answer = {"role": "assistant", "content": text_of(self.tokenizer, turn.new_tokens)}
            self.messages = [*messages, answer]
        return turn

    def plainly(self, turn: Turn, on_step: OnStep | None = None) -> Turn:
        """Decode a turn again, one token at a time, at most as far as it went; keep nothing.

        The cache is the same: it forgets the answer and holds the same one afterwards.

        Raises:
            ConfigError: what :meth:`ask` raises.
        """
        again = Turn(turn.prompt, 0, turn.config)
        self._decode(self._plain, again, on_step, len(turn.new_tokens) if turn.stopped else None)
        return again

    def _decode(
        self, decoder: SpecDecoder, turn: Turn, on_step: OnStep | None, limit: int | None = None
    ) -> None:
        """Fill in what comes of a turn, whose limit is the settings' unless one is given."""
        left = room(self.decoder.base, turn.prompt, "the conversation")
        if limit is None:
            limit = min(turn.config.max_new_tokens, left)
        held = self.cache.tokens[0] if self.cache.tokens else []
        # the last token is always read
        turn.num_read = len(turn.prompt) - len(commonprefix([held, turn.prompt[:-1]]))
        times: list[float] = []

        def hand_out(row: int, tokens: list[int]) -> None:
            times.append(time.perf_counter())
            if turn.new_tokens:
                turn.accept_lengths.append(len(tokens))
            turn.new_tokens += tokens
            turn.decode_seconds = times[-1] - times[0]
            if on_step is not None:
                on_step(turn, tokens)

        try:
            more = {"past_key_values": self.cache, "on_tokens": hand_out}
            result = decode_prompts(decoder, turn.config, [turn.prompt], limit, **more)
            turn.finished = result.finished
        except StopTurnError:
            turn.stopped = True
        except BaseException:
            self.cache.reset()  # a pass may have been cut off in its middle
            raise
        turn.context_full = len(turn.new_tokens) == left and not turn.finished


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Return tokens as text, without special ones."""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


class GrowingText:
    """The text of tokens as they come; what may become something else is held back.

    Bytes of an unfinished character wait for the step that completes it, and what may be the
    beginning of a stop string for what follows.

    Args:
        tokenizer: the base model's.
        stops: strings that end the text, none of which is shown.

    Attributes:
        tokens: so far.
        shown: the text that was given out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.tokens: list[int] = []
        self.shown = ""

    def add(self, tokens: Sequence[int], *, ended: bool = False) -> str:
        """Return the text that is new, with nothing held back if it has ``ended``."""
        self.tokens += tokens
        text = text_of(self.tokenizer, self.tokens)
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            text = text[: min(found)]
        elif not ended:
            text = text.rstrip("\ufffd")
            held = max(map(len, self.stops), default=1) - 1
            text = text[: len(text) - held] if held else text
        new = text[len(self.shown) :]
        self.shown += new
        return new


_BACKGROUNDS = (223, 153, 157, 225, 229, 189)  # pale, of the 256-colour palette


@dataclass(eq=False, repr=False)
class StepPrinter:
    """Prints the new tokens of every step as text; give it to a decoding loop as ``on_tokens``.

    Args:
        tokenizer: the base model's.
        write: gets pieces of text; they join to the whole text.
        color: give each step a background of its own.
        safe: write control characters as escapes, for a terminal that would obey them.

    Attributes:
        text: so far, without colours.
    """

    tokenizer: PreTrainedTokenizerBase
    write: Callable[[str], object]
    _: KW_ONLY
    color: bool
    safe: bool = False
    num_steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.text = GrowingText(self.tokenizer)

    def __call__(self, row: int, tokens: list[int]) -> None:
        """Show one step's tokens; there is only one row."""
        assert row == 0
        self._show(self.text.add(tokens))
        self.num_steps += 1

    def finish(self) -> None:
        """Show what was held back; it will not be completed."""
        self._show(self.text.add([], ended=True))

    def _show(self, piece: str) -> None:
        if piece:
            piece = harmless(piece) if self.safe else piece
            self.write(self._paint(piece) if self.color else piece)

    def _paint(self, piece: str) -> str:
        start = f"\x1b[30;48;5;{_BACKGROUNDS[self.num_steps % len(_BACKGROUNDS)]}m"
        # A background that is on at a line break would fill the rest of the line.
        return "\n".join(f"{start}{line}{RESET}" if line else "" for line in piece.split("\n"))


def summary(turn: Turn) -> str:
    """Return one line about a turn; the first token is the prefill's, and no step's."""
    num_tokens, num_steps = len(turn.new_tokens), len(turn.accept_lengths)
    line = f"1 + {num_tokens - 1} tokens in {num_steps} steps: {turn.accept_length:.2f} per step, "
    line += f"{turn.tokens_per_second:.0f} tokens/s; read {turn.num_read} of"
    line += f" {len(turn.prompt)} prompt tokens"
    if turn.stopped:
        return line + "; stopped"
    if turn.context_full:
        return line + "; the context is full: /undo or /reset makes room"
    return line if turn.finished else line + f"; max_new_tokens={num_tokens} ended it"


def comparison(fast: Turn, plain: Turn, dtype: torch.dtype) -> str:
    """Return both speeds, and whether the tokens are the same.

    Args:
        fast: the turn as it was decoded.
        plain: the same, one token at a time; compared as far as it goes, if it was stopped.
        dtype: of the base model.
    """
    rows = [
        f"{name:<12}{turn.tokens_per_second:7.0f} tokens/s{turn.accept_length:7.2f} tokens per step"
        for name, turn in (("speculative", fast), ("plain", plain))
    ]
    if fast.tokens_per_second and plain.tokens_per_second:
        rows.append(f"{fast.tokens_per_second / plain.tokens_per_second:.2f}x the speed of plain")
    else:
        rows.append("too short to compare speeds")
    ours, theirs = fast.new_tokens, plain.new_tokens
    num = len(theirs) if plain.stopped else max(len(ours), len(theirs))
    same = len(commonprefix([ours, theirs]))
    equal = f"the first {same} of {num} tokens are equal{_why_not_all(fast, dtype)}"
    return "\n".join([*rows, f"all {num} tokens are equal" if same >= num else equal])


def _why_not_all(turn: Turn, dtype: torch.dtype) -> str:
    decode = turn.config.decode
    if decode.acceptance != "exact":
        return f": decode.acceptance={decode.acceptance} is not the base's distribution"
    if decode.draft_sampling == "sampled" and turn.config.temperature > 0:
        return ": decode.draft_sampling=sampled keeps the distribution, not the tokens of a seed"
    if dtype in EXACT_DTYPES:
        return ", which must not be: please report it"
    name = str(dtype).removeprefix("torch.")
    return f": in {name} near-ties fall either way, see docs/decoding.md"


HELP = Path(__file__).with_name("chat_help.txt").read_text(encoding="utf-8").rstrip()
COMMANDS = tuple(sorted(set(re.findall(r"^/[a-z]+", HELP, re.MULTILINE))))


class Chat:
    """A conversation in a terminal, or over pipes: answers to standard output, the rest beside it.

    Attributes:
        last: the last answer, which can be compared with plain decoding.
        typed: what was typed while it came.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.beside = conversation.config.beside
        self.lines = terminal.Lines(COMMANDS, {r"\C-p": "/plain"})
        self.last: Turn | None = None
        self.typed = ""

    def talk(self) -> None:
        """Read messages and commands until the input or the user ends it."""
        while True:
            try:
                text = self._message()
                if text.startswith("/") and not text.startswith("//"):
                    name, _, value = text.partition(" ")
                    if name == "/quit":
                        return
                    self.command(name, value.strip())
                elif text.strip():
                    self.answer(text.removeprefix("/") if text.startswith("//") else text)
            except EOFError:
                return
            except ConfigError as error:
                self.note(str(error))
            except KeyboardInterrupt:
                self.note("\nCtrl-D or /quit leaves")

    def note(self, text: str) -> None:
        """Say something that is not the model's, on standard error."""
        sys.stdout.flush()
        text = harmless(text)
        if wants_color(self.conversation.config.color, sys.stderr):
            text = f"{DIM}{text}{RESET}"
        print(text, file=terminal.unescaped(sys.stderr), flush=True)

    def answer(self, text: str) -> None:
        """Answer a message, and show how it went."""
        turn = self._decoded(partial(self.conversation.ask, text))
        if turn is not None:
            self.last = turn
            self.note(summary(turn))
            if self.beside or PLAIN_KEY in self.typed:
                self.compare()

    def compare(self) -> None:
        """Decode the last answer plainly too, and compare tokens and speeds."""
        fast = self.last
        if fast is None or not fast.new_tokens:
            self.note("there is no answer to compare yet")
            return
        self.note("the same turn, one token at a time:")
        plain = self._decoded(partial(self.conversation.plainly, fast))
        if plain is not None:
            self.note(comparison(fast, plain, self.conversation.decoder.base.dtype))

    def command(self, name: str, value: str) -> None:
        """Do what a line that begins with ``/`` asks for.

        Raises:
            ConfigError: if it cannot be done; nothing has changed then.
        """
        conversation = self.conversation
        if name == "/help":
            self.note(HELP)
        elif name == "/plain" and value in ("always", "never"):
            self.beside = value == "always"
        elif name == "/plain":
            self.compare()
        elif name in ("/temperature", "/seed"):
            try:
                number: Any = float(value) if name == "/temperature" else int(value)
            except ValueError:
                raise ConfigError(f"{name} needs a number, got {value!r}") from None
            conversation.config = replace(conversation.config, **{name[1:]: number})
        elif name == "/save":
            self._save(value)
        elif name == "/undo":
            self.last = None
            self.note("taken back" if conversation.undo() else "there is nothing to take back")
        elif name == "/system":
            conversation.set_system(value)
            self.last = None
            self.note("a new conversation" + (", with this system message" if value else ""))
        elif name == "/reset":
            conversation.reset()
            self.last = None
            self.note("a new conversation")
        else:
            self.note(f"unknown command {name}{did_you_mean(name, COMMANDS, '/help lists them')}")

    def _save(self, path: str) -> None:
        messages = self.conversation.messages
        if not path.endswith(".jsonl") or not messages:
            raise ConfigError(
                "/save needs a file name that ends with .jsonl, and a conversation to write"
            )
        line = json.dumps({"id": "chat", "messages": messages}, ensure_ascii=False)
        try:
            with Path(path).expanduser().open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        self.note(f"wrote {path}")

    def _message(self) -> str:
        first, more = ("> ", "... ") if self.lines.interactive else ("", "")
        text = self.lines.read(first)
        if text.strip() != '"""':
            return text
        block: list[str] = []
        while (line := self.lines.read(more)).strip() != '"""':
            block.append(line)
        text = "\n".join(block)
        return f"/{text}" if text.startswith("/") else text  # no command

    def _decoded(self, decode: Callable[[OnStep], Turn]) -> Turn | None:
        """Run a turn with its text, its status line and its keys; None where it was given up."""
        color, safe = wants_color(self.conversation.config.color, sys.stdout), sys.stdout.isatty()
        self._printer = StepPrinter(self.conversation.tokenizer, write, color=color, safe=safe)
        self.typed, self._shown = "", 0.0
        try:
            with (
                terminal.StatusLine(sys.stderr) as self.status,
                terminal.keys_of(sys.stdin) as self.keys,
                terminal.ctrl_c() as self.pressed,
            ):
                try:
                    return decode(self.on_step)
                finally:
                    # while keys are still ours: later the terminal would echo them into the text
                    self.typed += self.keys()
                    self.lines.type_ahead(self.typed.replace(PLAIN_KEY, ""))
                    self._printer.finish()
                    if self._printer.num_steps:
                        write("\n")
        except KeyboardInterrupt:
            self.note("given up in the middle of a pass: the question is not kept")
        return None

    def on_step(self, turn: Turn, tokens: list[int]) -> None:
        """Show a step's text, how the turn goes, and take keys; end the turn after Ctrl-C."""
        self._printer(0, tokens)
        self.typed += self.keys()
        if (now := time.perf_counter()) - self._shown > _EVERY:
            self._shown = now
            rate = f"{turn.tokens_per_second:.0f} tokens/s, " if turn.tokens_per_second else ""
            length = f"{turn.accept_length:.2f} tokens per step, " if turn.accept_lengths else ""
            asked = PLAIN_KEY in self.typed
            hint = "comparing afterwards" if asked else "Ctrl-P compares with plain"
            self.status.show(f"{rate}{length}{len(turn.new_tokens)} tokens; Ctrl-C ends, {hint}")
        if self.pressed:
            raise StopTurnError
