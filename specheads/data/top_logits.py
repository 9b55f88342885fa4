"""The base model's k most likely next tokens at every position of every document, in files.

With them a draft model is distilled offline: the base runs once, whatever is tried afterwards.
One folder: ``index.json`` (what it was made of, the length of every document, and which documents
each shard holds, in order) and ``top-*.safetensors`` with ``ids`` [n, k] int32, best first, and
``log_probs`` [n, k] float32, at temperature 1 over the whole vocabulary: what is missing to 1 is
the mass of all other tokens. Shards are written whole or not at all, so that an interrupted run
goes on where it was; they are read mapped into memory.

Shapes: B T batch, n tokens of one shard or document, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specheads.data.chat import Encoded
from specheads.data.feature_plan import Shard
from specheads.data.pack import Batch, PackedBatches
from specheads.models.output import OutputLayer

SHARD_BYTES = 256 << 20  # of one shard, which is held in memory while it fills

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TopPlan:
    """Where the stored tokens lie or are going to lie, and what is in there.

    Attributes:
        folder: where.
        made_of: everything that decides the numbers, by name.
        top_k: tokens per position.
        vocab_size: V, the tokens that were chosen from.
        lengths: tokens of each document.
        shards: the files, in order.
    """

    folder: Path
    made_of: dict[str, str]
    top_k: int
    vocab_size: int
    lengths: list[int]
    shards: list[Shard]

    def describe(self) -> str:
        """Return one line: what is stored, how large it is, where, and how much is missing."""
        raise NotImplementedError


def plan_top_logits(
    folder: str | Path,
    documents: Sequence[Encoded],
    *,
    base: str,
    computed: str,
    vocab_size: int,
    top_k: int,
    shard_bytes: int = SHARD_BYTES,
) -> TopPlan:
    """Lay the files out before anything is run, or read the layout of those that are there.

    Args:
        folder: of the files.
        documents: what the run trains on, in order.
        base: digest of the base model's weights (``models/digest.py``).
        computed: in words, how the base computes: dtype, quantisation, autocast.
        vocab_size: V, the first tokens of the base's vocabulary that are looked at; log-probabilities
            are over them.
        top_k: tokens per position, below V.
        shard_bytes: of one shard, at most, unless one document has more.

    Raises:
        ConfigError: if ``folder`` holds what was made of something else, naming that; if it is a
            file; if ``top_k`` is not in 1..V-1.
    """
    raise NotImplementedError


def write_top_logits(
    plan: TopPlan,
    documents: Sequence[Encoded],
    base: PreTrainedModel,
    output: OutputLayer,
    *,
    seq_len: int,
    rows: int,
    autocast: bool = False,
    progress: Progress | None = None,
) -> None:
    """Run the base over the documents and write every shard that is not there yet.

    A second process that is given the same folder waits for the first, and finds it done.

    Args:
        plan: from ``plan_top_logits``, for the same documents.
        documents: none longer than ``seq_len``.
        base: the frozen base model; runs in eval mode, without gradients.
        output: its output layer.
        seq_len: tokens per packed row, as in training, so that the numbers are those of training.
        rows: rows per pass.
        autocast: run under bfloat16 autocast, as in training.
        progress: called with a title, tokens done and tokens to do.

    Raises:
        ConfigError: if the disk has too little room, or a shard that is there is damaged.
        RunError: if the disk fills up, or logits are not finite; finished shards stay.
    """
    raise NotImplementedError


class TopLogits:
    """The stored tokens, mapped into memory; any document can be read at any time."""

    def __init__(self, plan: TopPlan) -> None:
        """Map the shards, which must be complete.

        Raises:
            ConfigError: if a shard is missing, damaged, or of another run; names it.
        """
        raise NotImplementedError

    def __getitem__(self, document: int) -> tuple[Tensor, Tensor]:
        """Return ids and log-probabilities [n, k] of a document, by its number."""
        raise NotImplementedError

    def rows(self, places: Sequence[Sequence[int]], seq_len: int) -> Batch:
        """Lay the documents of each row one after the other, as ``pack.collate`` does.

        Args:
            places: for each row the numbers of its documents.
            seq_len: T.

        Returns:
            ``teacher_ids`` [B, T, k] int64 and ``teacher_log_probs`` [B, T, k] float32, 0 in the
            padding.
        """
        raise NotImplementedError


class TaughtBatches:
    """``PackedBatches`` that carry a stored teacher; order and saved place are theirs."""

    def __init__(self, batches: PackedBatches, top: TopLogits) -> None:
        """Take the batches, and what is stored for the same documents in the same order."""
        self.batches, self.top = batches, top

    def __iter__(self) -> TaughtBatches:
        return self

    def __next__(self) -> Batch:
        places = self.batches.take()
        return {**self.batches.lay_out(places), **self.top.rows(places, self.batches.seq_len)}

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data; plain JSON, the same with and without a teacher."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            ConfigError: if the state is of other data, another row length or another seed.
        """
        self.batches.load_state_dict(state)
