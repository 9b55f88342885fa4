"""Whether the other processes of a run are alive; so that one that is not stops all of them.

A collective with a process that is gone, stopped or stuck waits: over NCCL for as long as its
timeout, over gloo until the connection breaks, which a stopped process does not do. So a thread
of every process counts up in the store of the process group, rank 0 watches all counters, and
the others watch rank 0's. A process that ends with an error says so there. Whoever learns that
another is gone ends itself with one line.

The main thread comes first: it has a few seconds to end by an error of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from specheads.system import dist
from specheads.system.errors import EXIT_FAILED, EXIT_INTERRUPTED, InterruptedRunError, RunError

_GONE, _DONE = "gone", "done"
_LAUNCHER = {"rank": 0, "text": "or its launcher is gone", "code": 1}
_GRACE = 5.0  # seconds that the main thread has to end by itself
_COLLECTIVE = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "TCPStore")


class _Heart:
    """The thread of one process."""

    def __init__(self, timeout: float) -> None:
        # a connection of its own: one that waits in the main thread would hold back the beats
        self.store = dist.meeting_place("specheads", 60.0)
        self.timeout = timeout
        self.interval = min(2.0, timeout / 4)
        self.gone: dict[str, Any] = {}  # rank, text and exit code of the first that is gone
        self.ending = threading.Event()  # this process has its own reason to end
        self.watched = range(1, dist.world_size()) if dist.is_main() else range(1)
        now = time.monotonic()
        self.answered = now  # when the store last did
        self.changed = {rank: (0, now) for rank in self.watched}  # their counts, since when
        self.threads = [threading.Thread(target=f, daemon=True) for f in (self._beat, self._judge)]
        for thread in self.threads:
            thread.start()

    def announce(self, rank: int, text: str, code: int) -> None:
        """Tell all processes that ``rank`` is gone; of several the first counts."""
        said = json.dumps({"rank": rank, "text": text, "code": code})
        with contextlib.suppress(RuntimeError, OSError):  # nobody may be left who could be told
            self.store.compare_set(_GONE, "", said)

    def _beat(self) -> None:
        while not self.ending.wait(self.interval):
            try:
                self.store.add(str(dist.rank()), 1)
                for rank in self.watched:
                    count = self.store.add(str(rank), 0)
                    if count != self.changed[rank][0]:
                        self.changed[rank] = count, time.monotonic()
                if self.store.check([_GONE]):
                    gone = json.loads(self.store.get(_GONE))
                    self.gone = gone if gone["rank"] != dist.rank() else {}
                    return
            except (RuntimeError, OSError):
                self.gone = _LAUNCHER
                return
            self.answered = time.monotonic()

    def _judge(self) -> None:
        # a thread of its own: where rank 0 keeps the store and is stopped, the other one waits
        while not self.gone and not self.ending.wait(self.interval):
            late = self.late(self.timeout)
            if late:
                silence = f"has not answered for {self.timeout:g} s (dist_timeout)"
                if late is not _LAUNCHER and dist.is_main():  # the others do not watch that rank
                    self.announce(late["rank"], silence, 1)
                self.gone = {**late, "text": silence}
        if self.ending.wait(_GRACE):
            return
        print(f"specheads: {self.sentence()}", file=sys.stderr, flush=True)
        os._exit(self.gone["code"])

    def late(self, seconds: float) -> dict[str, Any]:
        """Return who has given no sign of life for so long, if anybody."""
        now = time.monotonic()
        if now - self.answered > seconds:
            return _LAUNCHER
        for rank, (_, since) in self.changed.items():
            if now - since > seconds:
                return {"rank": rank, "text": "has died or hangs", "code": 1}
        return {}

    def sentence(self) -> str:
        """Return what to tell the user."""
        return (
            f"rank {dist.rank()} stops, as rank {self.gone['rank']} {self.gone['text']}; "
            "resume=auto goes on from the last checkpoint"
        )

    def look(self) -> dict[str, Any]:
        """Find out within some beats who is gone, if anybody is."""
        # a connection breaks at once, but that its rank was silent shows only after some beats
        deadline = time.monotonic() + 4 * self.interval
        while time.monotonic() < deadline and not self.gone:
            time.sleep(0.05)
        return self.gone or self.late(2.5 * self.interval)


_heart: _Heart | None = None


def start(timeout: float) -> None:
    """Begin to count and to watch, once the process group exists; alone, do nothing.

    Args:
        timeout: seconds without a sign of life after which a process counts as gone.
    """
    global _heart
    if dist.world_size() > 1 and _heart is None:
        _heart = _Heart(timeout)
        atexit.register(stop)  # a thread inside the store's code would abort the interpreter's end


def announce(text: str, code: int) -> None:
    """Tell the other processes that this one is ending, why, and with what exit code."""
    if _heart is not None and not _heart.gone:
        _heart.announce(dist.rank(), f"stopped: {' '.join(text.split())}", code)
        _heart.ending.set()


def stop() -> None:
    """End the thread, as all processes are about to end together."""
    global _heart
    if _heart is not None:
        _heart.ending.set()
        for thread in _heart.threads:
            thread.join(timeout=_GRACE)
        _heart = None


def is_collective(error: BaseException) -> bool:
    """Return whether ``error`` is one of torch's about other processes."""
    from torch.distributed import DistError

    of_torch = isinstance(error, RuntimeError) and any(w in str(error) for w in _COLLECTIVE)
    return isinstance(error, DistError) or of_torch


def explain(error: BaseException) -> RunError:
    """Return what to raise for an error of a collective: who is gone, as far as can be told."""
    if _heart is not None:
        _heart.gone = _heart.look()
        if _heart.gone not in ({}, _LAUNCHER) and dist.is_main():
            _heart.announce(_heart.gone["rank"], _heart.gone["text"], 1)
        _heart.ending.set()
        if _heart.gone:
            return RunError(_heart.sentence())
    first = str(error).strip().splitlines()[0]
    return RunError(f"rank {dist.rank()} stops, as it lost the other processes: {first:.200}")


def wait_for_main() -> None:
    """Wait until rank 0 has done what it does alone, for as long as it is alive; on all ranks.

    Raises:
        RunError: on the others, if rank 0 ends before, or no longer answers.
        InterruptedRunError: on the others, if rank 0 was asked to stop.
    """
    if _heart is None:
        return
    if dist.is_main():
        _heart.store.set(_DONE, "1")
        return
    while not _heart.store.check([_DONE]):
        if _heart.gone:
            _heart.ending.set()
            interrupted = _heart.gone["code"] == EXIT_INTERRUPTED
            raise (InterruptedRunError if interrupted else RunError)(_heart.sentence())
        time.sleep(min(0.5, _heart.interval))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Leave the block together with the other ranks, or tell them that this one cannot go on.

    Raises:
        RunError: if another rank is gone.
    """
    try:
        yield
        wait_for_main()
    except BaseException as error:
        code = getattr(error, "exit_code", None)
        if code is None and dist.world_size() > 1 and is_collective(error):
            raise explain(error) from error
        if getattr(error, "on_every_rank", False) and not (_heart and _heart.gone):
            _leave()
        elif isinstance(error, KeyboardInterrupt):
            announce(str(error), EXIT_INTERRUPTED)
        else:
            text = str(error) if code else f"{type(error).__name__}: {error}"
            announce(text, code or EXIT_FAILED)
        raise
    _leave()


def _leave() -> None:
    stop()
    dist.shutdown()
