"""What a run writes about itself while it lives: console, ``metrics.jsonl``, Weights & Biases.

The console gets one aligned line per ``log.every`` steps, on a terminal a progress bar, and where
nothing else is said for ten seconds a line with what is going on.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from specheads.config import InterruptedRunError, RunError, TrainConfig
from specheads.runs import directory
from specheads.runs.wandb import WandbLog
from specheads.system import dist
from specheads.system.files import write_whole
from specheads.system.redact import redact
from specheads.system.terminal import lose_stdout, note

# What a metric's name is like, and how the console shows it; all metrics are in metrics.jsonl.
_COLUMNS = {
    r".*loss": "{name} {value:7.4f}",
    r".*top1": "{value:5.1%}",
    r"draft/alpha|draft/alpha_top|heldout/alpha": "{name} {value:.4f}",  # of a draft model
    r"lr/.*": "{name} {value:.1e}",
    r"grad_norm": "grad {value:6.3f}",
    r"tokens_per_second": "{value:7.0f} tok/s",
    r"peak_memory": "{gib:5.2f} GiB",
    r"eval/[^/]+|final/(accept_length|alpha|speedup)/[^/]+": "{name} {value:.4g}",
}
_SILENT = 10.0  # seconds after which a line says what is going on


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run shows.

    Attributes:
        figures: for metrics.jsonl.
        samples: texts that were decoded, with the same keys in each, for ``samples.jsonl``.
        tree_svg: a picture of the tree; empty where there is none.
    """

    figures: dict[str, float]
    samples: Sequence[Mapping[str, Any]] = ()
    tree_svg: str = ""


def format_line(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """Return the console line: losses, per-head top-1, rates, in columns that stay aligned."""
    width = len(str(steps))
    parts = [f"step {step:>{width}}/{steps}"]
    for key, value in metrics.items():
        name = key.removeprefix("train/")
        column = next((shape for like, shape in _COLUMNS.items() if re.fullmatch(like, name)), "")
        if column:
            shown = name.removesuffix("/loss").removeprefix("draft/")
            parts.append(column.format(name=shown, value=value, gib=value / 2**30))
    return "  ".join(parts)


class RunLog:
    """The open run directory; rank 0 writes, the other ranks stay silent."""

    def __init__(self, cfg: TrainConfig) -> None:
        """Lock and prepare ``cfg.run_dir``.

        Raises:
            ConfigError: if the directory is in use, or used and ``resume`` is empty.
            RunError: if its disk is full.
        """
        self.cfg = cfg
        self.dir = Path(cfg.run_dir)
        # these begin with the first step, on rank 0
        self._bar: tqdm[Any] | None = None
        self._wandb: WandbLog | None = None
        self._metrics: directory.MetricsFile | None = None
        self._provenance: dict[str, Any] = {}
        self._doing, self._since, self._share = "", 0.0, 0.0
        self._said = time.monotonic()
        self._ended = threading.Event()
        self._step = self._first = 0
        self._begun = 0.0
        if not dist.is_main():
            return
        self._made = not self.dir.exists()
        self.dir.mkdir(parents=True, exist_ok=True)
        self._before = set(self.dir.iterdir())
        self._stepped = directory.is_used(self.dir)  # by an earlier start, or this one
        self._handle = directory.lock(self.dir / "LOCK")
        try:
            directory.refuse_used(self.dir, cfg.resume)
            if not cfg.dry_run:
                self._provenance = directory.describe(self.dir, self._settings())
        except BaseException:
            self._leave(failed=True)
            raise

    def _leave(self, *, failed: bool) -> None:
        """Release the lock; of a dry run, and one that failed before a step, leave nothing."""
        if failed and not self._stepped:
            directory.discard(self.dir, self._before)
        directory.unlock(self.dir, self._handle)
        if self._made and not any(self.dir.iterdir()):
            self.dir.rmdir()

    def _settings(self) -> dict[str, Any]:
        return redact(dataclasses.asdict(self.cfg))

    def __enter__(self) -> Self:
        """Return self; the directory is already locked."""
        if dist.is_main():
            threading.Thread(target=self._break_silence, daemon=True).start()
        return self

    def _break_silence(self) -> None:
        while not self._ended.wait(_SILENT / 10):
            if self._doing and time.monotonic() - self._said >= _SILENT:
                passed, share = time.monotonic() - self._since, self._share
                rest = tqdm.format_interval(passed / share - passed) if share else ""
                left = f", {share:.0%}, {rest} left" if share else ""
                self.say(f"{self._doing}, {tqdm.format_interval(passed)}{left}")

    def doing(self, what: str, share: float = 0.0) -> None:
        """Take note of what goes on, for lines where nothing else is said; empty: nothing.

        Args:
            what: it is.
            share: of it that is done, where that is known.
        """
        if what != self._doing or not share:
            self._since = time.monotonic()
        self._doing, self._share = what, share

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close files, bar and wandb, and release the lock; see :meth:`_leave`.

        Raises:
            RunError: if the run went well, but its last metrics could not be written.
        """
        self._ended.set()
        if not dist.is_main():
            return
        if self._bar is not None:
            self._bar.close()
        lost = self._metrics.close() if self._metrics is not None else 0
        if self._wandb is not None:
            if kind is None:
                self._wandb.export(self.dir / "export")
            interrupted = isinstance(error, InterruptedRunError | KeyboardInterrupt)
            self._wandb.close(failed=kind is not None, interrupted=interrupted)
        trouble = self.trouble
        self._leave(failed=isinstance(error, Exception | KeyboardInterrupt))
        if lost and kind is None:
            raise RunError(f"{trouble}; its last {lost} rows are missing: go on with resume=auto")

    @property
    def trouble(self) -> str:
        """One line about why metrics cannot be written, else empty; the loop then stops."""
        return self._metrics.trouble if self._metrics is not None else ""

    def begin(self, step: int, checkpoint: Path | None = None) -> None:
        """Go on after ``step``: later rows of metrics.jsonl are dropped, the bar starts there.

        Args:
            step: steps taken so far.
            checkpoint: the one that the run goes on from; then the rows are exactly its own.

        Raises:
            RunError: if the disk is full.
        """
        if not dist.is_main() or self._metrics is not None:
            return
        self._metrics = directory.MetricsFile(self.dir / "metrics.jsonl", step, checkpoint)
        settings = {**self._settings(), "provenance": self._provenance}
        self._wandb = WandbLog(self.cfg.log, self.cfg.name, self.dir, settings, self.say)
        quiet = not sys.stderr.isatty()
        self._bar = tqdm(
            total=self.cfg.steps, initial=step, disable=quiet, unit="step", dynamic_ncols=True
        )
        self._step, self._first, self._begun = step, step, time.monotonic()
        self.doing("the first step" if quiet else "")

    def advance(self) -> None:
        """Move the progress bar by one optimizer step."""
        self._stepped = True
        self._step += 1
        if self._doing:  # no bar says it
            self._doing = f"step {self._step}/{self.cfg.steps}"
        if self._bar is not None:
            self._bar.update()

    def training_seconds(self) -> float:
        """Return how long the whole training takes, by this start's steps; inf for none."""
        steps = self._step - self._first
        return (time.monotonic() - self._begun) / steps * self.cfg.steps if steps else math.inf

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row to metrics.jsonl and wandb; a full disk shows in ``trouble``."""
        if self._metrics is None or self._wandb is None:
            return
        self._metrics.append({"step": step, **values})
        self._wandb.log(step, values)
        if any(key.startswith("eval/") for key in values):
            self._wandb.charts(step, self._metrics.path)

    def metrics(self, step: int, values: Mapping[str, float], *, seconds_left: float = 0) -> None:
        """Write one row to metrics.jsonl, wandb and the console."""
        self.record(step, values)
        line = format_line(step, self.cfg.steps, values)
        if seconds_left and not sys.stderr.isatty():  # the bar shows it on a terminal
            line += f"  left {tqdm.format_interval(seconds_left)}"
        self.say(line)

    def outcome(self, step: int, found: Outcome) -> None:
        """Write the last row of metrics, ``samples.jsonl`` and ``tree.svg``.

        Raises:
            RunError: if the disk is full.
        """
        self.metrics(step, found.figures)
        if self._metrics is None or self._wandb is None:
            return
        lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in found.samples]
        for name, text in (("samples.jsonl", "".join(lines)), ("tree.svg", found.tree_svg)):
            if text:
                write_whole(self.dir / name, text)
        self._wandb.charts(step, self._metrics.path)
        self._wandb.outcome(step, found.samples, found.tree_svg)

    def save(self, folder: Path) -> None:
        """Put into a checkpoint which rows of metrics belong to it.

        Raises:
            OSError: if the disk is full.
        """
        if self._metrics is not None:
            self._metrics.save(folder)

    def say(self, text: str) -> None:
        """Print ``text`` on rank 0 without tearing the progress bar."""
        self._said = time.monotonic()
        if not dist.is_main():
            return
        try:
            tqdm.write(redact(text), file=sys.stdout)
            sys.stdout.flush()
        except OSError as error:  # a closed pipe, or a log file on a full disk
            note(
                f"specheads: standard output is lost ({error.strerror}); the run goes on, its "
                f"metrics are in {self.dir / 'metrics.jsonl'}"
            )
            lose_stdout()
