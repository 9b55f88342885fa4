"""Means of the metrics between two lines of the log, tokens per second, and memory."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping

import torch

from specheads.training.state import Progress


def peak_memory(device: torch.device) -> float:
    """Return bytes: the allocator's peak on a GPU, the process's peak on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


class Meter:
    """Means since the last line, and the rate in tokens per second."""

    def __init__(self, progress: Progress) -> None:
        """Go on with the sums that ``progress`` holds."""
        self.progress = progress
        self.tokens, self.steps = 0.0, 0
        self.since = time.perf_counter()
        self.seconds_per_step = 0.0

    def add(self, metrics: Mapping[str, float], tokens: float) -> None:
        """Count one step; without metrics, one that was left out."""
        self.tokens += tokens
        self.steps += 1
        if not metrics:
            return
        window = self.progress.window
        for key, value in metrics.items():
            window[key] = window.get(key, 0.0) + value
        self.progress.window_steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out of the rate."""
        begin = time.perf_counter()
        yield
        self.since += time.perf_counter() - begin

    def read(self, *, keep: bool) -> dict[str, float]:
        """Return the means; start a new window unless ``keep``.

        Without a step since the last line, as right after a resume, there is no rate.
        """
        steps = self.progress.window_steps
        means = {f"train/{key}": value / steps for key, value in self.progress.window.items()}
        if not keep:
            self.progress.window, self.progress.window_steps = {}, 0
        now = time.perf_counter()
        if self.steps:
            means["train/tokens_per_second"] = self.tokens / (now - self.since)
            self.seconds_per_step = (now - self.since) / self.steps
        self.tokens, self.steps, self.since = 0.0, 0, now
        return means
