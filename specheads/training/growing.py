"""Rows that become longer while the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specheads import dist
from specheads.data.chat import Encoded
from specheads.data.pack import PackedBatches


class GrowingBatches:
    """Short rows first, long rows later: cheap tokens while there is little context to use.

    Every stage has its own packing of the data; the place in the run decides the stage.
    """

    def __init__(self, stages: Sequence[tuple[int, PackedBatches]]) -> None:
        """Take ``(last micro-batch of the stage, its batches)``, in order."""
        self.stages = list(stages)
        self.taken = 0

    @property
    def current(self) -> PackedBatches:
        """The batches of the stage that the next micro-batch belongs to."""
        later = (batches for end, batches in self.stages if self.taken < end)
        return next(later, self.stages[-1][1])

    @property
    def documents(self) -> Sequence[Encoded]:
        """The documents of the longest rows."""
        return self.stages[-1][1].documents

    def __next__(self) -> dict[str, Any]:
        batches = self.current
        self.taken += 1
        return next(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the run and in every packing, for any number of ranks; plain JSON."""
        taken = self.taken * dist.world_size()  # by all ranks together
        return {"taken": taken, "stages": [b.state_dict() for _, b in self.stages]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place."""
        self.taken = int(state["taken"]) // dist.world_size()
        for (_, batches), inner in zip(self.stages, state["stages"], strict=True):
            batches.load_state_dict(inner)
