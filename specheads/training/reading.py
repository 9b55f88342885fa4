"""Read a run's records, or look at them where they are streamed, before a model is loaded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from specheads import dist
from specheads.config import ConfigError, TrainConfig
from specheads.data.dropped import Dropped
from specheads.data.records import load_records
from specheads.data.rows import Record
from specheads.data.stream import RecordStream


@dataclass(frozen=True)
class Read:
    """A run's records, before they are encoded.

    Attributes:
        train: the training records, or the stream of them.
        heldout: the held-out records.
        dropped: records that could not be used.
    """

    train: list[Record] | RecordStream
    heldout: list[Record]
    dropped: Dropped


class Bars:
    """Progress bars for the slow parts of reading data, on a terminal only."""

    def __init__(self) -> None:
        self.bars: dict[str, tqdm[Any]] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show ``done`` of ``total``."""
        if what not in self.bars:
            quiet = not (sys.stderr.isatty() and dist.is_main())
            self.bars[what] = tqdm(total=total, desc=what, disable=quiet, leave=False)
        bar = self.bars[what]
        bar.total = total
        bar.update(done - bar.n)

    def close(self) -> None:
        """Clear all bars."""
        for bar in self.bars.values():
            bar.close()


def read_data(cfg: TrainConfig) -> Read:
    """Read all records; of streamed ones the beginning, and those that are held out.

    A recipe calls this first: what is wrong with the data is then known before a model is loaded.

    Raises:
        ConfigError: if there is no such data, too many records cannot be used, nothing is left, or
            the run needs all of them at one time and they are streamed.
    """
    dropped = Dropped()
    if cfg.data.streaming:
        check_streaming(cfg)
        stream = RecordStream(cfg.data, dropped)
        return Read(stream, stream.heldout, dropped)
    train, heldout = (
        load_records(cfg.data, split, dropped=dropped) for split in ("train", "heldout")
    )
    return Read(train, heldout, dropped)


def check_streaming(cfg: TrainConfig) -> None:
    """Refuse, with data.streaming, what needs all training documents at one time.

    Raises:
        ConfigError: naming the key.
    """
    needs_all = {
        "data.growth": cfg.data.growth,
        "features.dir": cfg.features.dir,
        "draft.stored": cfg.draft.stored,
        "heads.lm_head": "pruned" if cfg.heads.lm_head == "pruned" else "",
        "tokenizer": "bpe" if cfg.tokenizer == "bpe" else "",
    }
    for key, value in needs_all.items():
        if value:
            raise ConfigError(
                f"{key}={value} needs all training records at one time, which data.streaming=true"
                " does not hold; expected data.streaming=false"
            )
