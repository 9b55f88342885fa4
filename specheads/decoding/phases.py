"""Clock the phases of the decoding loop from outside, so that the loop itself holds no clocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding import loop
from specheads.decoding.result import Output
from specheads.drafters.made import DynamicDrafter, StaticDrafter
from specheads.kv_cache import TreeCache
from specheads.models import compiled
from specheads.models.forward import ModelPass
from specheads.models.output import OutputLayer
from specheads.models.prefix_keys import PrefixKeys
from specheads.models.stepwise import Steps, Walk

FORWARD, HEADS = "base forward", "heads"
PHASES = (FORWARD, HEADS, "propose", "verify", "accept", "emit", "commit", "observe", "replay")


def now(device: torch.device) -> float:
    """Return the time, after whatever the device still does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Phases:
    """Clocks nested calls, each without what it calls that is clocked too, step by step.

    Attributes:
        steps: per step the seconds of every phase, and of the whole as ``step``.

    Args:
        device: waited for before every look at the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self._step: dict[str, float] | None = None  # the one that is going on
        self._begin = 0.0
        self._open: list[list[Any]] = []  # [name, seconds of clocked calls inside]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, clocked as ``name``; a call of propose begins a step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = now(self.device)
            if name == "propose":
                if self._step is not None:
                    self.steps.append({**self._step, "step": start - self._begin})
                self._step, self._begin = dict.fromkeys(PHASES, 0.0), start
            outer = [each[0] for each in self._open]
            self._open.append([name, 0.0])
            try:
                return function(*args, **kwargs)
            finally:
                total = now(self.device) - start
                _, inside = self._open.pop()
                if self._open:
                    self._open[-1][1] += total
                if self._step is not None:  # before the first step there is the prefill
                    label = "replay" if name == FORWARD and "accept" in outer else name
                    self._step[label] += total - inside

        return run

    @contextlib.contextmanager
    def watching(
        self,
        base: PreTrainedModel,
        drafter: StaticDrafter | DynamicDrafter,
        *,
        compile: bool = False,
    ) -> Iterator[None]:
        """Clock the phases of one text decoded while open; its last step is left out.

        Args:
            base: base model.
            drafter: that decodes.
            compile: the passes are compiled ones.
        """
        snapshot, compiled_forward = drafter.heads.snapshot, compiled._compiled_forward

        def clocked_forward(mode: str | None) -> Callable[..., Tensor]:
            return self.timed(FORWARD, compiled_forward(mode))

        def clocked_snapshot(output: OutputLayer) -> Callable[[Tensor], Tensor]:
            return self.timed(HEADS, snapshot(output))

        places: list[tuple[Any, str, str]] = [
            (loop, "propose", "propose"),
            (loop, "accept", "accept"),
            (ModelPass, "verify", "verify"),
            (Output, "emit", "emit"),
            (TreeCache, "commit", "commit"),
            (drafter, "observe", "observe"),
            (Steps, "begin", HEADS),
            (Walk, "logits", HEADS),
            (Walk, "descend", HEADS),
            (PrefixKeys, "append", HEADS),
        ]
        if not compile:  # a forward in place of the model's own would be compiled with it
            places.append((base, "forward", FORWARD))
        with contextlib.ExitStack() as stack:
            for owner, attribute, name in places:
                clocked = self.timed(name, getattr(owner, attribute))
                stack.enter_context(patch.object(owner, attribute, clocked))
            stack.enter_context(patch.object(drafter.heads, "snapshot", clocked_snapshot))
            stack.enter_context(patch.object(compiled, "_compiled_forward", clocked_forward))
            yield
        self._step = None  # nothing tells where it ended
