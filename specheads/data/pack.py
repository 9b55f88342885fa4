"""Pack documents into rows of fixed length, the same way on every machine, and feed them.

A row holds whole documents. Each starts at position 0 in its own segment, from which transformers
builds attention that stays inside documents (only where no cache is made: ``use_cache=False``) and
:mod:`specheads.losses.cross_entropy` keeps labels inside them. Padding is a segment of its own; it
is marked by place, never by token id, since many tokenizers pad with eos.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.data.chat import Encoded
from specheads.data.schema import differences, text_digest
from specheads.losses.cross_entropy import IGNORE
from specheads.models.base import input_embedding
from specheads.models.forward import undisturbed
from specheads.models.output import packed_hidden
from specheads.system import dist

Batch = dict[str, Any]


def pack_lengths(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Pack by best fit, longest first: each item goes to the fullest row that still has room.

    Items of equal length are taken in the given order, so that shuffling them first changes which
    documents meet, and never the number of rows.

    Returns:
        For each row the indices of its items.

    Raises:
        ValueError: if an item is empty or longer than ``seq_len``.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free room -> rows that have it
    rooms: list[int] = []  # the keys of open_rows, sorted
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[item]
        if not 0 < length <= seq_len:
            raise ValueError(f"item {item} has {length} tokens, seq_len is {seq_len}")
        place = bisect.bisect_left(rooms, length)  # the smallest room that is large enough
        if place == len(rooms):
            row, room = len(rows), seq_len
            rows.append([])
        else:
            room = rooms[place]
            row = open_rows[room].pop()  # any would do, but saved places rely on this one
            if not open_rows[room]:
                del open_rows[room], rooms[place]
        rows[row].append(item)
        if left := room - length:
            if left not in open_rows:
                bisect.insort(rooms, left)
                open_rows[left] = []
            open_rows[left].append(row)
    return rows


def collate(rows: Sequence[Sequence[Encoded]], seq_len: int, pad_token_id: int) -> Batch:
    """Lay documents out as a batch.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` and ``segment_ids``, all [B, seq_len] long
        (see the module), and ``ids``, the ids of the records in the batch.
    """
    shape = (len(rows), seq_len)
    filled = {"input_ids": pad_token_id, "labels": IGNORE, "position_ids": 0, "segment_ids": 0}
    batch = {name: torch.full(shape, n, dtype=torch.long) for name, n in filled.items()}
    for b, documents in enumerate(rows):
        start = 0
        for segment, document in enumerate(documents, 1):
            stop = start + len(document.input_ids)
            batch["input_ids"][b, start:stop] = torch.from_numpy(document.input_ids)
            batch["labels"][b, start:stop] = torch.from_numpy(document.labels)
            batch["position_ids"][b, start:stop] = torch.arange(stop - start)
            batch["segment_ids"][b, start:stop] = segment
            start = stop
        batch["position_ids"][b, start:] = torch.arange(seq_len - start)
    return {**batch, "ids": [document.id for documents in rows for document in documents]}


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on ``device``."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def number_of(*numbers: int) -> int:
    """Return a number below 2^63 that depends on all of ``numbers``."""
    # hashed, not added: seed 1 in epoch 0 must not be seed 0 in epoch 1
    return int.from_bytes(text_digest(":".join(map(str, numbers)))[:8], "big") >> 1


def digest_of(documents: Iterable[Encoded], start: str = "") -> str:
    """Return 16 digits that depend on names, tokens and labels of documents, and their order."""
    digest = hashlib.sha256(start.encode())
    for document in documents:
        digest.update(f"{document.id}\0{len(document.input_ids)}\n".encode())
        digest.update(document.input_ids.tobytes())
        digest.update(document.labels.tobytes())
    return digest.hexdigest()[:16]


def check_same(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ConfigError if an order of other data or settings is to be gone on with."""
    if others := differences(there, here):
        raise ConfigError(
            f"the checkpoint was made with other training data or settings: {others}; its order"
            " cannot be resumed"
        )


@dataclass(eq=False, repr=False)
class PackedBatches:
    """An endless iterator over packed batches whose place can be saved and restored exactly.

    Every epoch shuffles the documents, packs all of them and shuffles the rows. The rows of all
    epochs form one stream; a global batch is its next ``world * rows`` rows and each rank takes
    its own part of it. So within an epoch nothing is lost or repeated, whatever the sizes, and
    the place in the data is a single number that does not depend on the number of ranks.

    Attributes:
        documents: not empty, none longer than ``seq_len``.
        seq_len: tokens per row (T).
        rows: rows per batch and rank (B).
        seed: decides the order together with the number of the epoch.
        pad_token_id: fills the rest of a row.
        rank: the rank of this process.
        world: the number of processes.
        places: for each row of the latest batch the numbers of its documents.
        rows_per_epoch: rows that all documents fill together.
        efficiency: share of the row positions that hold documents.

    Raises:
        ValueError: if ``documents`` holds one longer than ``seq_len``.
    """

    documents: Sequence[Encoded]
    _: KW_ONLY
    seq_len: int
    rows: int
    seed: int
    pad_token_id: int
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        """Prepare the first epoch."""
        self._lengths = [len(document.input_ids) for document in self.documents]
        self._rows_taken = 0  # of the stream, by all ranks together
        self.places: list[list[int]] = []
        self._order = lru_cache(maxsize=1)(self._packed)  # an epoch's is held until the next
        self.rows_per_epoch = len(self._order(0))
        self.efficiency = sum(self._lengths) / (self.rows_per_epoch * self.seq_len)

    def __next__(self) -> Batch:
        first = self._rows_taken + self.rank * self.rows
        self._rows_taken += self.rows * self.world
        self.places = [self._row(number) for number in range(first, first + self.rows)]
        rows = [[self.documents[i] for i in row] for row in self.places]
        return collate(rows, self.seq_len, self.pad_token_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data; plain JSON."""
        return {"rows_taken": self._rows_taken, "seed": self.seed, "data": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            ConfigError: if the state is of other data, another row length or another seed.
        """
        here = {"seed": self.seed, "data": self._fingerprint}
        check_same({key: state[key] for key in here}, here)
        self._rows_taken = int(state["rows_taken"])

    def _row(self, number: int) -> list[int]:
        epoch, row = divmod(number, self.rows_per_epoch)
        return self._order(epoch)[row]

    def _packed(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(number_of(self.seed, epoch))
        shuffled = torch.randperm(len(self.documents), generator=generator).tolist()
        packed = pack_lengths([self._lengths[i] for i in shuffled], self.seq_len)
        order = torch.randperm(len(packed), generator=generator).tolist()
        return [[shuffled[i] for i in packed[row]] for row in order]

    @cached_property
    def _fingerprint(self) -> str:
        return digest_of(self.documents, f"{self.seq_len}\n")


class Mapped:
    """Batches to each of which a function is applied; order and saved place stay theirs."""

    def __init__(self, batches: Any, fn: Callable[[Batch], Batch]) -> None:
        self.batches, self.fn = batches, fn

    def __next__(self) -> Batch:
        """Return the next batch, changed by the function."""
        return self.fn(next(self.batches))

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data; plain JSON, the same with and without the function."""
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place."""
        self.batches.load_state_dict(state)


def one_pass(
    documents: Sequence[Encoded], *, seq_len: int, rows: int, pad_token_id: int, max_rows: int = 0
) -> list[Batch]:
    """Return every document once, packed, in batches of at most ``rows`` rows; for evaluation.

    With ``max_rows`` only that many rows, drawn at random but always the same ones. A batch also
    has its ``documents``, row by row.
    """
    stream = PackedBatches(documents, seq_len=seq_len, rows=1, seed=0, pad_token_id=pad_token_id)
    total = min(max_rows or stream.rows_per_epoch, stream.rows_per_epoch)
    packed = [[documents[i] for i in stream._row(number)] for number in range(total)]
    some = [packed[first : first + rows] for first in range(0, total, rows)]
    return [{**collate(each, seq_len, pad_token_id), "documents": each} for each in some]


@torch.no_grad()
def check_isolation(model: PreTrainedModel, *, backward: bool = False) -> None:
    """Check on a few tokens that ``model`` keeps packed documents apart.

    Models with ALiBi, recurrent or convolutional layers do not build their masks from positions,
    and would learn from a neighbour's text without any error.

    Args:
        model: a causal language model of transformers.
        backward: the model itself is going to be trained.

    Raises:
        ConfigError: if a document's hidden states depend on its neighbours, or the attention
            implementation cannot be trained on this device.
    """
    weight = input_embedding(model)
    attention = model.config._attn_implementation
    if backward and attention == "flex_attention" and weight.device.type == "cpu":
        raise ConfigError("model.attn=flex_attention has no backward pass on CPU; use sdpa")
    generator = torch.Generator().manual_seed(0)
    lengths = ([7, 5, 3], [4, 11])
    ids = torch.randint(0, weight.shape[0], (2, 15), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with undisturbed(model):
        packed = packed_hidden(model, ids, positions).float()
        parts = [part for row, sizes in zip(ids, lengths, strict=True) for part in row.split(sizes)]
        alone = [packed_hidden(model, part[None], torch.arange(len(part))[None]) for part in parts]
    expected = torch.cat([states[0].float() for states in alone]).view_as(packed)
    error = float((packed - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
    # of hidden states, relative to their largest number
    tolerance = max(1e-3, 16 * torch.finfo(weight.dtype).eps)
    if not error <= tolerance:
        raise ConfigError(
            f"{type(model).__name__} with model.attn={attention} does not keep packed documents"
            f" apart (hidden states differ by {error:.2g}, {tolerance:.2g} is allowed);"
            " it cannot be trained on packed rows"
        )


class GrowingBatches:
    """Short rows first, long rows later: cheap tokens while there is little context to use.

    Every stage has its own packing of the data; the place in the run decides the stage.
    """

    def __init__(self, stages: Sequence[tuple[int, PackedBatches]]) -> None:
        """Take ``(last micro-batch of the stage, its batches)``, in order."""
        self.stages = list(stages)
        self.taken = 0

    @property
    def documents(self) -> Sequence[Encoded]:
        """The documents of the longest rows."""
        return self.stages[-1][1].documents

    def __next__(self) -> dict[str, Any]:
        later = (batches for end, batches in self.stages if self.taken < end)
        batches = next(later, self.stages[-1][1])
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
