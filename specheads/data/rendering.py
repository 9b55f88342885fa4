"""Render chat templates, which are programs of strangers, in a process of their own.

Jinja's sandbox keeps a template from files and from Python, but not from looping for ever or from
filling the memory, and nothing in this process could stop it then. The other process has limits
that the system enforces: on processor time, for each rendering, and on memory. It is started for
the first template that is not specheads' own, and renders with transformers' own function.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# its line breaks are for those who read the file
OUR_TEMPLATE = "".join(Path(__file__).with_name("ours.jinja").read_text("utf-8").splitlines())
_SECONDS = 10  # of processor time for one rendering; those that are meant take a millisecond
_MEMORY = 2 << 30  # bytes of addresses, of which Python and numpy take a third
_FREE = 1 << 20  # characters of a text that are not asked after
_TIMES = 16  # what is longer may have this many times the characters of the messages


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any], **options: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Return what the tokenizer's chat template makes of ``messages``, within limits.

    As ``tokenizer.apply_chat_template(messages, tokenize=False, **options)``.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the conversation, of JSON's types only.
        options: ``add_generation_prompt``, ``continue_final_message``, or
            ``return_assistant_tokens_mask``: find out which characters are the assistant's.

    Returns:
        The text, and ``[start, stop)`` of the assistant's characters if they were asked for.

    Raises:
        TemplateError: if the template refuses the messages.
        RunError: if it takes more than 10 seconds of processor time or 2 GiB of memory, or makes a
            text out of all proportion: it would do so for the next messages too.
        ValueError: if the tokenizer has no template.
    """
    from transformers import PreTrainedTokenizerBase  # not for the other process: it needs no torch

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        # code that came with the tokenizer, and that the user has trusted; it marks nothing
        options.pop("return_assistant_tokens_mask", None)
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options)), []
    given = {
        # as apply_chat_template leaves them out: templates take a missing key, but not a None
        "conversations": [[{k: v for k, v in m.items() if v is not None} for m in messages]],
        "chat_template": tokenizer.get_chat_template(),
        **tokenizer.special_tokens_map,
        **options,
    }
    if given["chat_template"] == OUR_TEMPLATE:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = cast(Any, render_jinja_template(**given))
    else:
        found = _Child.ask(json.dumps(given, default=lambda x: f"<{type(x).__name__}>"))
        if "error" in found:
            raise TemplateError(found["error"])
        if "limit" in found:
            from specheads.config import RunError

            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise RunError(f"the chat template of {name} was stopped: {found['limit']}")
        texts, spans = found["texts"], found["spans"]
    return texts[0], [(start, stop) for start, stop in spans[0]] if spans else []


class _Child:
    """The process that renders: one for this process, made when it is first asked."""

    lock = threading.Lock()
    process: subprocess.Popen[str] | None = None
    made_by = 0  # a fork has its parent's pipes, which are not its own

    @classmethod
    def ask(cls, request: str) -> dict[str, Any]:
        with cls.lock:
            if cls.process is None or cls.made_by != os.getpid():
                cls.process, cls.made_by = _start(), os.getpid()
            assert cls.process.stdin is not None and cls.process.stdout is not None
            line = ""
            try:
                with contextlib.suppress(BrokenPipeError):
                    cls.process.stdin.write(request + "\n")
                    cls.process.stdin.flush()
                    line = cls.process.stdout.readline()
            finally:
                if not line.endswith("\n"):  # it was stopped, or the wait for it was
                    cls.process.kill()
                    code, cls.process = cls.process.wait(), None
        if not line.endswith("\n"):
            late = f"it took more than {_SECONDS} seconds of processor time"
            return {"limit": late if code == -signal.SIGPROF else f"its process ended with {code}"}
        return json.loads(line)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        # without the folder of this file, whose modules have names of libraries
        [sys.executable, "-P", __file__, str(_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="ascii",
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the parent
    )


def _serve(seconds: float) -> None:
    """Answer requests, a line each, until there are no more."""
    from transformers.utils.chat_template_utils import render_jinja_template

    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    with contextlib.suppress(ValueError, OSError):  # a system that has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # then the system ends this process
        try:
            texts, spans = cast(Any, render_jinja_template(**json.loads(line)))
            size = sum(map(len, texts))
            if size > _FREE + _TIMES * len(line):
                found = {"limit": f"it made {size:,} characters of messages of {len(line):,}"}
            else:
                found = {"texts": texts, "spans": spans}
        except MemoryError:
            found = {"limit": f"it took more than {_MEMORY >> 30} GiB of memory"}
        except Exception as error:  # whatever an expression of a template raises
            found = {"error": str(error)[:1000] or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
