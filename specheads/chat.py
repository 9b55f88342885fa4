"""Talk to a model in the terminal: ``python -m specheads.chat checkpoint=<export or base model>``.

Tokens of one verify step share a colour. The KV cache is kept: of every turn only what is new is
read. ``/plain``, or Ctrl-P while an answer comes, decodes the same turn one token at a time and
compares. Without a terminal every line of standard input is a message; answers go to standard
output, everything else to standard error.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.config import ChatConfig, ConfigError
from specheads.config.main import hydra_main
from specheads.system.terminal import (
    DIM,
    RESET,
    Lines,
    StatusLine,
    ctrl_c,
    harmless,
    keys_of,
    unescaped,
    wants_color,
    write,
)

if TYPE_CHECKING:
    from specheads.decoding.conversation import Conversation, OnStep, Turn
    from specheads.decoding.generate import SpecDecoder

HELP = """\
/plain             decode the last answer one token at a time too, and compare
                   (Ctrl-P does the same, and asks for it while an answer comes)
/plain always      compare every answer from now on; /plain never ends that
/temperature 0.7   0 is greedy
/seed 1            of the answers from now on
/system <text>     begin anew with this system message, or with none
/undo              take back the last question and its answer
/reset             begin anew
/save <file>.jsonl append the conversation, as generate prompts=<file>.jsonl reads it
/quit              leave (also Ctrl-D)
Ctrl-C             ends an answer; what was written of it stays in the conversation
\"\"\"                begins and ends a message of several lines
//...              is a message that starts with /"""
COMMANDS = tuple(sorted(set(re.findall(r"^/[a-z]+", HELP, re.MULTILINE))))
PLAIN_KEY = "\x10"  # Ctrl-P
_EVERY = 0.1  # seconds between looks of the status line


def run(config: ChatConfig) -> None:
    """Load, then talk until the input ends."""
    from specheads.decoding.conversation import Conversation

    decoder, about = _load(config)
    conversation = Conversation(decoder, config)
    print(about, file=sys.stderr, flush=True)
    Chat(conversation).talk()


def _load(config: ChatConfig) -> tuple[SpecDecoder, str]:
    """Return the decoder, and a line about it."""
    from specheads.decoding.exported import (
        check_drafter,
        choose_drafter,
        is_plain_model,
        load_subject,
        make_decoder,
    )
    from specheads.models.base import load_tokenizer
    from specheads.system import hardware

    check_drafter(config.decode, has_heads=not is_plain_model(config.checkpoint))
    try:
        path = config.template
        template = Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template={config.template} cannot be read: {error}") from None
    if not template and load_tokenizer(config.checkpoint).chat_template is None:
        raise ConfigError(
            f"{config.checkpoint} has no chat template: give one with template=<file>.jinja, or"
            " continue texts with generate"
        )
    device, dtype, _ = hardware.prepare(config.device, config.dtype)
    subject = load_subject(
        config.checkpoint,
        base=config.base,
        dtype=dtype,
        device=device,
        device_map=config.device_map,
    )
    if template:
        subject.tokenizer.chat_template = template
    chosen = choose_drafter(subject, config.decode)
    return make_decoder(subject, config.decode, chosen.drafter), (
        f"{config.checkpoint}: {chosen.name}, up to {chosen.num_nodes} nodes per verify step,"
        f" {str(dtype).removeprefix('torch.')} on {subject.base.device}. /help lists commands."
    )


class Chat:
    """A conversation in a terminal, or over pipes."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.beside = conversation.config.beside
        self.color = wants_color(conversation.config.color, sys.stdout)
        self.lines = Lines(COMMANDS, {r"\C-p": "/plain"})
        self.last: Turn | None = None
        self._wants_plain = False  # Ctrl-P was pressed while an answer came

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
                    self.turn(text.removeprefix("/") if text.startswith("//") else text)
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
        print(text, file=unescaped(sys.stderr), flush=True)

    def turn(self, text: str) -> None:
        """Answer a message, and show how it went."""
        from specheads.decoding.conversation import summary

        turn = self._decoded(lambda on_step: self.conversation.ask(text, on_step))
        if turn is not None:
            self.last = turn
            self.note(summary(turn))
            if self.beside or self._wants_plain:
                self.compare()

    def compare(self) -> None:
        """Decode the last answer plainly too, and compare tokens and speeds."""
        from specheads.decoding.conversation import comparison

        fast = self.last
        if fast is None or not fast.new_tokens:
            self.note("there is no answer to compare yet")
            return
        self.note("the same turn, one token at a time:")
        plain = self._decoded(lambda on_step: self.conversation.plainly(fast, on_step))
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
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            advice = f"did you mean {close[0]}?" if close else "/help lists them"
            self.note(f"unknown command {name}; {advice}")

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
        prompt = "> " if self.lines.interactive else ""
        text = self.lines.read(prompt)
        if text.strip() != '"""':
            return text
        block: list[str] = []
        while (line := self.lines.read("... " if prompt else "")).strip() != '"""':
            block.append(line)
        text = "\n".join(block)
        return f"/{text}" if text.startswith("/") else text  # no command

    def _decoded(self, decode: Callable[[OnStep], Turn]) -> Turn | None:
        """Run a turn with its text, its status line and its keys; None where it was given up."""
        from specheads.decoding.conversation import StepPrinter

        tokenizer, safe = self.conversation.tokenizer, sys.stdout.isatty()
        printer = StepPrinter(tokenizer, write, color=self.color, safe=safe)
        self._wants_plain = False
        try:
            with StatusLine(sys.stderr) as status, keys_of(sys.stdin) as keys, ctrl_c() as pressed:
                step = _Step(printer, status, keys, pressed)
                try:
                    return decode(step)
                finally:
                    typed = step.typed + keys()
                    self._wants_plain = PLAIN_KEY in typed
                    self.lines.type_ahead(typed.replace(PLAIN_KEY, ""))
                    printer.finish()
                    if printer.text or step.num_tokens:
                        write("\n")
        except KeyboardInterrupt:
            self.note("given up in the middle of a pass: the question is not kept")
        return None


class _Step:
    """What happens behind every verify step: text, the status line, the keys, Ctrl-C."""

    def __init__(
        self,
        printer: Callable[[int, list[int]], None],
        status: StatusLine,
        keys: Callable[[], str],
        pressed: list[int],
    ) -> None:
        self.printer, self.status, self.keys, self.pressed = printer, status, keys, pressed
        self.typed = ""
        self.num_tokens = self.num_steps = 0
        self._first = self._shown = 0.0

    def __call__(self, tokens: list[int]) -> None:
        from specheads.decoding.conversation import StopTurnError

        now = time.perf_counter()
        self.printer(0, tokens)
        if self.num_tokens:
            self.num_steps += 1
        else:
            self._first = now
        self.num_tokens += len(tokens)
        self.typed += self.keys()
        if now - self._shown > _EVERY:
            self._shown = now
            self.status.show(self._line(now))
        if self.pressed:
            raise StopTurnError

    def _line(self, now: float) -> str:
        gained = self.num_tokens - 1
        rate = f"{gained / (now - self._first):.0f} tokens/s, " if now > self._first else ""
        length = f"{gained / self.num_steps:.2f} tokens per step, " if self.num_steps else ""
        asked = "comparing afterwards" if PLAIN_KEY in self.typed else "Ctrl-P compares with plain"
        return f"{rate}{length}{self.num_tokens} tokens; Ctrl-C ends, {asked}"


def main() -> None:
    """Entry point."""
    hydra_main("chat", ChatConfig, run, literal=("system",))


if __name__ == "__main__":
    main()
