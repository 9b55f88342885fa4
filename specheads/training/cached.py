"""Train heads from a cache of the frozen base's hidden states: the same batches, without the base.

A batch of the cache is that of ``data/pack.py`` with ``hidden`` [B, T, d] beside the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError, TrainConfig
from specheads.data.chat import Encoded
from specheads.data.feature_plan import Plan, plan_features, readable
from specheads.data.features import Features, Progress, write_features
from specheads.data.pack import Batch, PackedBatches
from specheads.models.base import input_device
from specheads.models.digest import base_digest
from specheads.models.hidden import packed_hidden
from specheads.training.describe import clock
from specheads.training.loop import Batches
from specheads.training.plan import StandInFeatures, seconds_per_pass


class CachedBatches:
    """``PackedBatches`` that carry hidden states; its order and its saved place are theirs."""

    def __init__(self, batches: PackedBatches, features: Features) -> None:
        """Take the batches, and features of the same documents in the same order."""
        self.batches, self.features = batches, features

    def __iter__(self) -> CachedBatches:
        return self

    def __next__(self) -> Batch:
        places = self.batches.take()
        hidden = self.features.rows(places, self.batches.seq_len)
        return {**self.batches.lay_out(places), "hidden": hidden}

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data; plain JSON, the same with and without a cache."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            ConfigError: if the state is of other data, another row length or another seed.
        """
        self.batches.load_state_dict(state)


class FeatureCache:
    """The cache of one run, ``features.dir``: training documents, and held-out rows below it."""

    def __init__(
        self,
        cfg: TrainConfig,
        base: PreTrainedModel,
        batches: object,
        heldout: Sequence[Batch] = (),
    ) -> None:
        """Plan the cache, or find the one that is there; runs ``base`` on two tokens only.

        Args:
            cfg: the run's settings.
            base: the frozen base model, as the settings load it.
            batches: the run's training data, with rows of one length.
            heldout: its held-out rows.

        Raises:
            ConfigError: if the cache was made of something else, or data.growth is set.
        """
        if not isinstance(batches, PackedBatches):
            raise ConfigError("features.dir needs rows of one length; leave data.growth out")
        self.cfg, self.batches, self.heldout = cfg, batches, list(heldout)
        folder = Path(cfg.features.dir).expanduser()
        self.plan = self._plan(folder, batches.documents, base)
        self._heldout_documents = [d for batch in heldout for row in _rows(batch) for d in row]
        self.heldout_plan: Plan | None = None
        if self._heldout_documents:
            self.heldout_plan = self._plan(folder / "heldout", self._heldout_documents, base)

    def _plan(self, folder: Path, documents: Sequence[Encoded], base: PreTrainedModel) -> Plan:
        cfg = self.cfg
        sample = _sample(base, autocast=cfg.autocast == "bfloat16")
        return plan_features(
            folder,
            documents,
            base=base_digest(cfg.model.name, revision=cfg.model.revision),
            computed=f"{cfg.model.dtype}, quantization {cfg.model.quantization},"
            f" autocast {cfg.autocast}",
            hidden_size=sample.shape[-1],
            given_as=sample.dtype,
            dtype=cfg.features.dtype,
        )

    @property
    def plans(self) -> list[Plan]:
        """The plan of the training documents, and that of the held-out rows if there are any."""
        return [plan for plan in (self.plan, self.heldout_plan) if plan]

    @property
    def num_bytes(self) -> int:
        """Exact size of all its files."""
        return sum(plan.num_bytes for plan in self.plans)

    def describe(self) -> str:
        """Return one line for before the base is run: what, how large, where, how much is left."""
        missing = sum(plan.shards[i].bytes for plan in self.plans for i in plan.missing())
        left = f"{readable(missing)} still to be written" if missing else "complete"
        heldout = self.heldout_plan
        more = f", held-out rows {readable(heldout.num_bytes)}" if heldout else ""
        return f"{self.plan.describe()}{more}; {left}"

    def open(
        self, base: PreTrainedModel, *, progress: Progress | None = None
    ) -> tuple[CachedBatches, list[Batch]]:
        """Write what is missing and return batches, and held-out rows, that carry ``hidden``.

        Raises:
            ConfigError: if the disk has too little room, or a file of the cache is damaged.
            RunError: if the disk fills up; what is finished stays, and the next run goes on there.
        """
        train = self._open(self.plan, self.batches.documents, base, progress)
        heldout = []
        if self.heldout_plan:
            features = self._open(self.heldout_plan, self._heldout_documents, base, progress)
            first = 0
            for batch in self.heldout:
                places = []
                for row in _rows(batch):
                    places.append(list(range(first, first + len(row))))
                    first += len(row)
                hidden = features.rows(places, batch["input_ids"].shape[1])
                heldout.append({**batch, "hidden": hidden})
        return CachedBatches(self.batches, train), heldout

    def stand_in(self, base: PreTrainedModel) -> tuple[Batches, list[str]]:
        """Return batches as the cache's, without hidden states, and what a plan has to say of it.

        For ``dry_run=true``: nothing is written, ``base`` runs on a few micro-batches.
        """
        batches, cfg = self.batches, self.cfg
        size, dtype = self.plan.hidden_size, base.dtype
        passes = batches.rows_per_epoch / cfg.data.rows
        filling = clock(passes * seconds_per_pass(base, batches))
        notes = [self.describe(), f"time to fill it: {filling}"]
        return StandInFeatures(batches, size, dtype), notes

    def _open(
        self,
        plan: Plan,
        documents: Sequence[Encoded],
        base: PreTrainedModel,
        progress: Progress | None,
    ) -> Features:
        write_features(
            plan,
            documents,
            base,
            seq_len=self.batches.seq_len,
            rows=self.batches.rows,
            autocast=self.cfg.autocast == "bfloat16",
            progress=progress,
        )
        return Features(plan)


def _rows(batch: Batch) -> list[list[Encoded]]:
    """Return the documents of a packed batch, row by row."""
    rows: list[list[Encoded]] = []
    names = iter(batch["ids"])
    for b, segments in enumerate(batch["segment_ids"]):
        row = []
        for segment in range(1, int(segments.max()) + 1):
            inside = segments == segment
            ids, labels = (
                batch[key][b][inside].numpy().astype(np.int32) for key in ("input_ids", "labels")
            )
            row.append(Encoded(next(names), "", ids, labels))
        rows.append(row)
    return rows


@torch.no_grad()
def _sample(base: PreTrainedModel, *, autocast: bool) -> Tensor:
    """Return hidden states of two tokens: their size and their dtype are those of all."""
    device = input_device(base)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        return packed_hidden(base, tokens, torch.arange(2, device=device)[None])
