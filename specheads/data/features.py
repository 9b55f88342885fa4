"""A cache of a frozen base model's last hidden states, so that heads can train without the base.

``feature_plan.py`` says what the files hold. Shards are written whole or not at all, so that an
interrupted run goes on where it was; they are read mapped into memory, and only what a batch needs.

Shapes: B T batch, n tokens of one document, d hidden size.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError, RunError
from specheads.data.chat import Encoded
from specheads.data.feature_plan import INDEX, STORED, Plan, Shard, damaged, metadata, readable
from specheads.data.pack import collate, pack_lengths
from specheads.files import whole_file
from specheads.models.base import input_device
from specheads.models.hidden import packed_hidden

_FREE_MARGIN = 1 << 20  # bytes that a file system needs beside the files themselves

Progress = Callable[[str, int, int], None]


def write_features(
    plan: Plan,
    documents: Sequence[Encoded],
    base: PreTrainedModel,
    *,
    seq_len: int,
    rows: int,
    autocast: bool = False,
    progress: Progress | None = None,
) -> None:
    """Run the base over the documents and write every shard that is not there yet.

    A second process that is given the same folder waits for the first, and finds it done.

    Args:
        plan: from ``plan_features``, for the same documents.
        documents: none longer than ``seq_len``.
        base: the frozen base model; runs in eval mode, without gradients.
        seq_len: tokens per packed row, as in training, so that the numbers are those of training.
        rows: rows per pass.
        autocast: run under bfloat16 autocast, as in training.
        progress: called with a title, tokens done and tokens to do.

    Raises:
        ConfigError: if the disk has too little room, or a shard that is there is damaged.
        RunError: if the disk fills up, or hidden states are not finite; finished shards stay.
    """
    if not plan.missing():
        return
    with locked(plan.folder, "features.dir"):
        missing = plan.missing()
        if not missing:
            return
        _check_room(plan, missing)
        for number in set(range(len(plan.shards))) - set(missing):
            _check_contents(plan, plan.shards[number])
        if not (plan.folder / INDEX).is_file():
            with whole_file(plan.folder / INDEX) as path:
                path.write_bytes(plan.index())
        total = sum(plan.shards[number].tokens for number in missing)
        done = 0

        def count(tokens: int) -> None:
            nonlocal done
            done += tokens
            if progress:
                progress("features", done, total)

        training = base.training
        base.eval()
        try:
            for number in missing:
                shard = plan.shards[number]
                tensors = _run(plan, shard, documents, base, seq_len, rows, autocast, count)
                sha256 = contents_sha256(tensors)
                with whole_file(plan.folder / shard.file) as path:
                    save_file(tensors, path, metadata=metadata(plan, sha256))
        finally:
            base.train(training)


@torch.no_grad()
def _run(
    plan: Plan,
    shard: Shard,
    documents: Sequence[Encoded],
    base: PreTrainedModel,
    seq_len: int,
    rows: int,
    autocast: bool,
    count: Callable[[int], None],
) -> dict[str, Tensor]:
    """Return the tensors of one shard."""
    first, stop = shard.documents
    tensors = {"hidden": torch.empty(shard.tokens, plan.hidden_size, dtype=STORED[plan.dtype])}
    if plan.dtype == "int8":
        tensors["scale"] = torch.empty(shard.tokens)
    starts = starts_of(plan.lengths[first:stop])
    inside = [documents[i] for i in range(first, stop)]
    for i, states in packed_states(inside, base, seq_len, rows, autocast, count):
        _store(tensors, starts[i], states.cpu())
    return tensors


def packed_states(
    documents: Sequence[Encoded],
    base: PreTrainedModel,
    seq_len: int,
    rows: int,
    autocast: bool,
    count: Callable[[int], None],
) -> Iterator[tuple[int, Tensor]]:
    """Run the base over documents; yield the number of each and its final hidden states [n, d].

    Raises:
        RunError: if they are not finite, naming the record.
    """
    device = input_device(base)
    packed = pack_lengths([len(document.input_ids) for document in documents], seq_len)
    for begin in range(0, len(packed), rows):
        places = packed[begin : begin + rows]
        # what stands in the padding is seen by nothing that is kept
        batch = collate([[documents[i] for i in row] for row in places], seq_len, 0)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            hidden = packed_hidden(
                base, batch["input_ids"].to(device), batch["position_ids"].to(device)
            )
        for b, row in enumerate(places):
            at = 0
            for i in row:
                length = len(documents[i].input_ids)
                states = hidden[b, at : at + length]
                if not bool(states.isfinite().all()):
                    raise RunError(
                        f"the base model's hidden states of record {documents[i].id} are not finite"
                    )
                yield i, states
                at += length
            count(at)


def _store(tensors: dict[str, Tensor], start: int, states: Tensor) -> None:
    place = slice(start, start + len(states))
    if (scales := tensors.get("scale")) is None:
        tensors["hidden"][place] = states
        return
    # symmetric: the largest number of a token becomes 127, so that errors stay below scale / 2
    scale = states.float().abs().amax(1).clamp_min(1e-30) / 127
    scales[place] = scale
    tensors["hidden"][place] = (states.float() / scale[:, None]).round().clamp(-127, 127)


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Return where each document starts when they lie one after the other, and the end."""
    return [0, *np.cumsum(lengths).tolist()]


def contents_sha256(tensors: dict[str, Tensor]) -> str:
    """Return a sha256 over the numbers of a shard."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_room(plan: Plan, missing: Sequence[int]) -> None:
    needed = len(plan.index()) + sum(plan.shards[number].bytes for number in missing)
    free = shutil.disk_usage(plan.folder).free
    if needed + _FREE_MARGIN > free:
        raise ConfigError(
            f"features.dir={plan.folder} needs {readable(needed)}, that disk has"
            f" {readable(free)} free; another folder, a smaller features.dtype (now {plan.dtype})"
            " or fewer records would do"
        )


def _check_contents(plan: Plan, shard: Shard) -> None:
    """Check a shard that an interrupted run left, number by number."""
    path = plan.folder / shard.file
    file = _opened(plan, path)
    names = ["hidden", "scale"] if plan.dtype == "int8" else ["hidden"]
    found = contents_sha256({name: file.get_tensor(name) for name in names})
    if found != file.metadata()["sha256"]:
        raise damaged(path, "its numbers are not those that were written")


def _opened(plan: Plan, path: Path) -> Any:
    """Map a shard into memory and check that it is of this cache."""
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise damaged(path, str(error)) from None
    if (file.metadata() or {}).get("made_of") != plan.fingerprint:
        raise damaged(path, "it is of another cache")
    return file


@contextlib.contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Make ``folder`` and hold it locked; the lock dies with its process, others wait for it.

    Raises:
        ConfigError: if it cannot be written, naming the ``key`` that asked for it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "LOCK").open("a")
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(f"{key}={folder} cannot be written: {error}") from None
    with handle:
        yield


class Features:
    """The hidden states of a cache, mapped into memory; any document can be read at any time."""

    def __init__(self, plan: Plan) -> None:
        """Map the shards of a cache that is complete.

        Raises:
            ConfigError: if a shard is missing, damaged, or of another cache; names it.
        """
        if missing := plan.missing():
            path = plan.folder / plan.shards[missing[0]].file
            raise ConfigError(f"{path} is missing, and {len(missing) - 1} more shards with it")
        self.plan = plan
        self.dtype: torch.dtype = getattr(torch, plan.given_as)
        self._shards: list[tuple[Any, Any]] = []  # slices of hidden and scale
        self._places: list[tuple[int, int]] = []  # of each document: its shard, its first row
        for number, shard in enumerate(plan.shards):
            file = _opened(plan, plan.folder / shard.file)
            scale = file.get_slice("scale") if plan.dtype == "int8" else None
            self._shards.append((file.get_slice("hidden"), scale))
            starts = starts_of(plan.lengths[slice(*shard.documents)])
            self._places += [(number, start) for start in starts[:-1]]

    def __getitem__(self, document: int) -> Tensor:
        """Return the hidden states [n, d] of a document, by its number."""
        states = torch.empty(self.plan.lengths[document], self.plan.hidden_size, dtype=self.dtype)
        self._read(document, states)
        return states

    def rows(self, places: Sequence[Sequence[int]], seq_len: int) -> Tensor:
        """Lay the documents of each row one after the other, as ``pack.collate`` does.

        Args:
            places: for each row the numbers of its documents.
            seq_len: T.

        Returns:
            [B, T, d] hidden states, 0 in the padding.
        """
        shape = (len(places), seq_len, self.plan.hidden_size)
        hidden = torch.empty(shape, dtype=self.dtype)
        for b, row in enumerate(places):
            start = 0
            for document in row:
                stop = start + self.plan.lengths[document]
                self._read(document, hidden[b, start:stop])
                start = stop
            hidden[b, start:] = 0
        return hidden

    def _read(self, document: int, states: Tensor) -> None:
        number, start = self._places[document]
        rows = slice(start, start + len(states))
        hidden, scale = self._shards[number]
        states.copy_(hidden[rows])
        if scale is not None:
            states.mul_(scale[rows][:, None])
