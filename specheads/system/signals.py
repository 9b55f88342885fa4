"""Signals that ask a run to stop: SIGTERM and SIGINT, and Slurm's SIGUSR1.

The first one lets the running step end and be saved, or, where there is nothing to save, interrupts
at once; either way the run ends with exit code 75. A second one ends the process at once, with
128 + its number, like a kill -9: whatever is being written appears whole or not at all. The second
one is taken by a thread of its own, as Python hands a signal to the main thread only once that
returns from whatever it is calling, which in a collective may be never.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, ClassVar

from specheads.system import dist

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# timeout(1), scancel and launchers send one request twice: to the process, and to all of its group
_ONE_REQUEST_SECONDS = 1.0


class StopAsked(KeyboardInterrupt):
    """Raised in the main thread by the first signal where there is nothing to save."""


class StopSignal:
    """Take signals while entered; ``name`` is that of the first one.

    Attributes:
        name: empty until a signal comes.
        at_once: whether a signal raises :class:`StopAsked` in the main thread, instead of waiting
            until somebody looks at ``name``.
        saved: whether all that there is to save has been, so that a second signal finds nothing to
            lose: it ends the process with 75 like the first.
    """

    installed: ClassVar[StopSignal | None] = None

    def __init__(
        self, *, at_once: bool = False, advice: str = "nothing was lost, resume=auto goes on"
    ) -> None:
        """Start without a signal; ``advice`` is what :class:`StopAsked` says besides its name."""
        self.name = ""
        self.at_once, self.advice = at_once, advice
        self.saved = False
        self._raised = False  # there is no step to end then
        self._before: dict[int, Any] = {}
        self._first = (0, 0.0)  # number and time of the first signal, as the thread saw it

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self.name = self.name or signal.Signals(signum).name
        if self.at_once:
            self._raised = True
            self.at_once = False  # what cleans up is not to be interrupted by the same request
            raise StopAsked(f"stopped by {self.name}; {self.advice}")

    def _watch(self, pipe: int) -> None:
        while numbers := os.read(pipe, 64):
            for number in numbers:
                if number in ASKING:
                    self._take(number)
        os.close(pipe)

    def _take(self, number: int) -> None:
        first, when = self._first
        if not first:
            self._first = (number, time.monotonic())
            if dist.is_main() and not (self.at_once or self.saved or self._raised):
                self._say(f"{signal.Signals(number).name}: stopping after this step, then saving")
            return
        if time.monotonic() - when < _ONE_REQUEST_SECONDS:
            return
        if first == signal.SIGUSR1 != number:
            self._first = (number, time.monotonic())  # that was Slurm's warning of this one
            return
        if self.saved:
            os._exit(75)
        self._say(f"a second signal, {signal.Signals(number).name}: leaving without saving")
        os._exit(128 + number)

    @staticmethod
    def _say(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            print(f"specheads: {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> StopSignal:
        """Install the handlers; only the main thread may, elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return self
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        threading.Thread(target=self._watch, args=(reading,), daemon=True).start()
        self._wakeup = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in ASKING}
        self._outer, StopSignal.installed = StopSignal.installed, self
        return self

    def __exit__(self, *error: object) -> None:
        """Put the earlier handlers back."""
        if not self._before:
            return
        self.at_once = False
        StopSignal.installed = self._outer
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._pipe)  # ends the thread

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal interrupt the block at once, one that has come before it too.

        Raises:
            StopAsked: where the signal met the block.
        """
        if self.name:
            raise StopAsked(self.name)
        self.at_once = True
        try:
            yield
        finally:
            self.at_once = False


def _forget_in_child() -> None:
    """Give a forked process the system's handlers: its signals are none of this run's."""
    if StopSignal.installed is not None:
        StopSignal.installed = None
        signal.set_wakeup_fd(-1)
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def saving_first(*, then_at_once: bool) -> Iterator[StopSignal]:
    """Let signals wait for the block to look at them.

    Inside ``StopSignal(at_once=True)``, which a program installs for its whole life, that one is
    used; alone, handlers are installed for the block.

    Args:
        then_at_once: whether a signal may interrupt at once after the block, as everything is
            saved; else it waits for the next block.

    Raises:
        StopAsked: at the end of the block, if a signal came that nobody looked at.
    """
    outer = StopSignal.installed
    if outer is None:
        with StopSignal() as own:
            yield own
        return
    outer.at_once = False
    yield outer
    if then_at_once:
        if outer.name:
            raise StopAsked(f"stopped by {outer.name}; everything is saved, resume=auto goes on")
        outer.at_once = True
