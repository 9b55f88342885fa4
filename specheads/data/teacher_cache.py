"""A cache of a frozen base model's last hidden states, so that heads can train without the base.

``feature_plan.py`` says what the files hold. Shards are written whole or not at all, so that an
interrupted run goes on where it was; they are read mapped into memory, and only what a batch needs.

Shapes: B T batch, n tokens of one document, d hidden size.

What a cache of hidden states holds, where, and its exact size, before anything is run.

One folder: ``index.json`` (what the states were made of, the length of every document, and which
documents each shard holds, in order) and ``features-*.safetensors``. A document's states depend on
its own tokens alone, since packed documents do not see each other; so they are stored once per
token, without padding, and serve any order, row length and mask of labels.

What a stored teacher holds, where, and how large it is, before anything is run.

``top_logits.py`` says what the files hold.

The base model's k most likely next tokens at every position of every document, in files.

With them a draft model is distilled offline: the base runs once, whatever is tried afterwards.
One folder: ``index.json`` (what it was made of, the length of every document, and which documents
each shard holds, in order) and ``top-*.safetensors`` with ``ids`` [n, k] int32, best first, and
``log_probs`` [n, k] float32, at temperature 1 over the whole vocabulary: what is missing to 1 is
the mass of all other tokens. Shards are written whole or not at all, so that an interrupted run
goes on where it was; they are read mapped into memory, and only what a batch needs.

Shapes: B T batch, n tokens of one shard or document, V vocabulary.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from specheads.data.pack import Batch, PackedBatches, collate, pack_lengths
from specheads.losses.fused import rows_at_once
from specheads.models.base import input_device
from specheads.models.output import OutputLayer, packed_hidden
from specheads.system.files import whole_file

INDEX = "index.json"
SHARD_BYTES = 256 << 20  # of hidden states in one shard, which is held in memory while it fills
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8"}
_SHA256_LENGTH = 64


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        file: its name.
        documents: the first document in it, and the first behind it.
        tokens: of these documents together.
        bytes: size of the file.
    """

    file: str
    documents: tuple[int, int]
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Where a cache lies or is going to lie, what is in it, and its exact size.

    Attributes:
        folder: where.
        made_of: everything that decides the numbers, by name; a cache made of anything else is
            refused.
        hidden_size: d.
        dtype: of the stored numbers: float32, bfloat16, or int8 with a float32 scale per token.
        given_as: dtype in which the base model gives its states, and the cache gives them back.
        lengths: tokens of each document.
        shards: the files, in order.
    """

    folder: Path
    made_of: dict[str, str]
    hidden_size: int
    dtype: str
    given_as: str
    lengths: list[int]
    shards: list[Shard]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together, to the byte: shards, their headers, and the index."""
        return len(self.index()) + sum(shard.bytes for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return sum(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Digest of ``made_of``, which every shard carries."""
        return digest_of(self.made_of)

    def index(self) -> bytes:
        """Return the contents of the index."""
        values = {"format_version": 1, **asdict(self)}
        del values["folder"]
        return json.dumps(values).encode() + b"\n"

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are still to be written.

        Raises:
            ConfigError: if one is there with another size than it was written with.
        """
        numbers = []
        for number, shard in enumerate(self.shards):
            path = self.folder / shard.file
            if not path.is_file():
                numbers.append(number)
            elif (found := path.stat().st_size) != shard.bytes:
                raise damaged(path, f"it has {found:,} bytes of {shard.bytes:,}")
        return numbers

    def describe(self) -> str:
        """Return one line: what is stored, how large it is, and where."""
        kind = "int8 with a scale per token" if self.dtype == "int8" else self.dtype
        count = len(self.shards)
        return (
            f"features: {self.num_tokens:,} tokens x {self.hidden_size} as {kind},"
            f" {readable(self.num_bytes)} in {count} shard{'' if count == 1 else 's'},"
            f" {self.folder}"
        )


def readable(num_bytes: float) -> str:
    """Return a size as text, e.g. ``1.6 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def documents_digest(documents: Sequence[Encoded]) -> str:
    """Return a sha256 over the token ids of ``documents``, in order.

    Names and labels are left out: hidden states do not depend on them.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{len(document.input_ids)}\n".encode())
        digest.update(np.ascontiguousarray(document.input_ids, dtype=np.int32).data)
    return digest.hexdigest()


def damaged(path: Path, why: str) -> ConfigError:
    """Return the error about a file of a cache that cannot be used."""
    return ConfigError(f"{path} is damaged: {why}; delete it, and the next run writes it again")


def plan_features(
    folder: str | Path,
    documents: Sequence[Encoded],
    *,
    base: str,
    computed: str,
    hidden_size: int,
    given_as: torch.dtype,
    dtype: str = "auto",
    shard_bytes: int = SHARD_BYTES,
) -> Plan:
    """Lay a cache out, before anything is run, or read the layout of the one that is there.

    Args:
        folder: of the cache.
        documents: what the run trains on, in order.
        base: digest of the base model's weights (``models/digest.py``).
        computed: in words, how the base computes: dtype, quantisation, autocast.
        hidden_size: d.
        given_as: dtype of the base's hidden states.
        dtype: how they are stored: float32, bfloat16, int8; auto loses nothing.
        shard_bytes: hidden states in one shard, at most, unless one document has more.

    Raises:
        ConfigError: if ``folder`` holds a cache that was made of something else, naming that.
    """
    if dtype == "auto":
        dtype = "bfloat16" if given_as == torch.bfloat16 else "float32"
    made_of = {
        "base model": base,
        "computation": computed,
        "documents": documents_digest(documents),
        "dtype": dtype,
    }
    folder = Path(folder).expanduser()
    lengths = [len(document.input_ids) for document in documents]
    given = str(given_as).removeprefix("torch.")
    plan = Plan(folder, made_of, hidden_size, dtype, given, lengths, [])
    if (folder / INDEX).is_file():
        return _stored_plan(plan)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"features.dir={folder} is a file; a folder is expected")
    row = hidden_size * STORED[dtype].itemsize + (4 if dtype == "int8" else 0)
    first = tokens = 0
    for document, length in enumerate([*lengths, math.inf]):
        if tokens and (tokens + length) * row > shard_bytes:
            name = f"features-{len(plan.shards):05d}.safetensors"
            size = header_bytes(plan, tokens) + tokens * row
            plan.shards.append(Shard(name, (first, document), tokens, size))
            first, tokens = document, 0
        tokens += 0 if math.isinf(length) else int(length)
    return plan


def _stored_plan(plan: Plan) -> Plan:
    """Return the plan in the index of ``plan.folder``, which has to be of the same things."""
    path = plan.folder / INDEX
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        shards = [Shard(s["file"], tuple(s["documents"]), *_sizes(s)) for s in values["shards"]]
        stored = Plan(
            plan.folder,
            dict(values["made_of"]),
            values["hidden_size"],
            values["dtype"],
            values["given_as"],
            list(values["lengths"]),
            shards,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no index of features ({error!r}); delete the folder"
        ) from None
    check_made_of(f"features.dir={plan.folder}", stored.made_of, plan.made_of)
    return stored


def check_made_of(where: str, there: dict[str, str], here: dict[str, str]) -> None:
    """Refuse a cache that was made of something else.

    Raises:
        ConfigError: naming ``where`` it lies and what differs.
    """
    differences = ", ".join(
        f"{key} ({_short(there.get(key))} there, {_short(value)} here)"
        for key, value in here.items()
        if there.get(key) != value
    )
    if differences:
        raise ConfigError(
            f"{where} was made with another {differences}; name another folder, or delete this one"
        )


def _sizes(shard: dict[str, Any]) -> tuple[int, int]:
    return int(shard["tokens"]), int(shard["bytes"])


def _short(value: str | None) -> str:
    digest = value is not None and len(value) == _SHA256_LENGTH and " " not in value
    return str(value)[:12] if digest else str(value)


def digest_of(values: dict[str, str]) -> str:
    """Return a sha256 over what a cache was made of."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def metadata(plan: Plan, sha256: str) -> dict[str, str]:
    """Return what a shard says about itself: its cache, and the digest of its numbers."""
    return {"made_of": plan.fingerprint, "sha256": sha256}


def header_bytes(plan: Plan, tokens: int) -> int:
    """Return the bytes in front of the numbers of a shard, as safetensors writes them."""
    entries: dict[str, Any] = {"__metadata__": metadata(plan, "0" * _SHA256_LENGTH)}
    offset = 0
    shapes = [("hidden", STORED[plan.dtype], [tokens, plan.hidden_size])]
    if plan.dtype == "int8":  # wider numbers are written first, so that all are aligned
        shapes.insert(0, ("scale", torch.float32, [tokens]))
    for name, dtype, shape in shapes:
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(entries, separators=(",", ":")))
    return 8 + -(-length // 8) * 8


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


KEY = "draft.stored"  # what names the folder in a run's settings
TOP_SHARD_BYTES = 256 << 20  # of one shard, which is held in memory while it fills
_TOKEN_BYTES = 8  # an id and a log-probability


@dataclass(frozen=True)
class TopShard:
    """One file: its name, the first document in it and the first behind it, and its tokens."""

    file: str
    documents: tuple[int, int]
    tokens: int


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
    shards: list[TopShard]

    @property
    def fingerprint(self) -> str:
        """Digest of ``made_of``, which every shard carries."""
        return digest_of(self.made_of)

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are still to be written."""
        files = enumerate(self.shards)
        return [number for number, shard in files if not (self.folder / shard.file).is_file()]

    def num_bytes(self, numbers: Sequence[int]) -> int:
        """Return the bytes of these shards, without their headers."""
        return sum(self.shards[number].tokens for number in numbers) * self.top_k * _TOKEN_BYTES

    def describe(self) -> str:
        """Return one line: what is stored, how large it is, where, and how much is missing."""
        count, missing = len(self.shards), self.missing()
        size = readable(self.num_bytes(range(count)))
        left = f"{readable(self.num_bytes(missing))} still to be written" if missing else "complete"
        return (
            f"stored teacher: {sum(self.lengths):,} tokens x {self.top_k} of {self.vocab_size:,},"
            f" {size} in {count} shard{'' if count == 1 else 's'},"
            f" {self.folder}; {left}"
        )


def plan_top_logits(
    folder: str | Path,
    documents: Sequence[Encoded],
    *,
    base: str,
    computed: str,
    vocab_size: int,
    top_k: int,
    shard_bytes: int = TOP_SHARD_BYTES,
) -> TopPlan:
    """Lay the files out before anything is run, or read the layout of those that are there.

    Args:
        folder: of the files.
        documents: what the run trains on, in order.
        base: digest of the base model's weights (``models/digest.py``).
        computed: in words, how the base computes: dtype, quantisation, autocast.
        vocab_size: V, the first tokens of the base's vocabulary that are looked at;
            log-probabilities are over them.
        top_k: tokens per position, below V.
        shard_bytes: of one shard, at most, unless one document has more.

    Raises:
        ConfigError: if ``folder`` holds what was made of something else, naming that; if it is a
            file, or its index is damaged; if ``top_k`` is not in 1..V-1.
    """
    if not 0 < top_k < vocab_size:
        raise ConfigError(f"draft.stored_top_k must be in 1..{vocab_size - 1}, got {top_k}")
    made_of = {
        "base model": base,
        "computation": computed,
        "documents": documents_digest(documents),
        "vocabulary": str(vocab_size),
        "stored_top_k": str(top_k),
    }
    folder = Path(folder).expanduser()
    lengths = [len(document.input_ids) for document in documents]
    plan = TopPlan(folder, made_of, top_k, vocab_size, lengths, [])
    if (folder / INDEX).is_file():
        return _stored_top_plan(plan)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{KEY}={folder} is a file; a folder is expected")
    first = tokens = 0
    for document, length in enumerate([*lengths, math.inf]):
        if tokens and (tokens + length) * top_k * _TOKEN_BYTES > shard_bytes:
            name = f"top-{len(plan.shards):05d}.safetensors"
            plan.shards.append(TopShard(name, (first, document), tokens))
            first, tokens = document, 0
        tokens += 0 if math.isinf(length) else int(length)
    return plan


def _stored_top_plan(plan: TopPlan) -> TopPlan:
    """Return the plan in the index of ``plan.folder``, which has to be of the same things."""
    path = plan.folder / INDEX
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        made_of = dict(values["made_of"])
        shards = [
            TopShard(str(s["file"]), (int(s["documents"][0]), int(s["documents"][1])), s["tokens"])
            for s in values["shards"]
        ]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} is no index of a stored teacher ({error!r}); delete the folder"
        ) from None
    check_made_of(f"{KEY}={plan.folder}", made_of, plan.made_of)
    return TopPlan(plan.folder, plan.made_of, plan.top_k, plan.vocab_size, plan.lengths, shards)


__all__ = ["TaughtBatches", "TopLogits", "TopPlan", "plan_top_logits", "write_top_logits"]

_TOP_FREE_MARGIN = 1 << 20  # bytes for headers, the index and the file system itself

TopProgress = Callable[[str, int, int], None]


def write_top_logits(
    plan: TopPlan,
    documents: Sequence[Encoded],
    base: PreTrainedModel,
    output: OutputLayer,
    *,
    seq_len: int,
    rows: int,
    autocast: bool = False,
    progress: TopProgress | None = None,
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
    if not plan.missing():
        return
    with locked(plan.folder, KEY):
        missing = plan.missing()
        if not missing:
            return
        _check_top_room(plan, missing)
        for number in set(range(len(plan.shards))) - set(missing):
            _check_top_contents(plan, plan.folder / plan.shards[number].file)
        if not (plan.folder / INDEX).is_file():
            with whole_file(plan.folder / INDEX) as path:
                values = {"format_version": 1, **asdict(plan)}
                del values["folder"]
                path.write_text(json.dumps(values) + "\n", encoding="utf-8")
        total = sum(plan.shards[number].tokens for number in missing)
        done = 0

        def count(tokens: int) -> None:
            nonlocal done
            done += tokens
            if progress:
                progress("stored teacher", done, total)

        training = base.training
        base.eval()
        try:
            for number in missing:
                shard = plan.shards[number]
                inside = [documents[i] for i in range(*shard.documents)]
                tensors = _run_top(plan, inside, base, output, seq_len, rows, autocast, count)
                about = {"made_of": plan.fingerprint, "sha256": contents_sha256(tensors)}
                with whole_file(plan.folder / shard.file) as path:
                    save_file(tensors, path, metadata=about)
        finally:
            base.train(training)


@torch.no_grad()
def _run_top(
    plan: TopPlan,
    documents: Sequence[Encoded],
    base: PreTrainedModel,
    output: OutputLayer,
    seq_len: int,
    rows: int,
    autocast: bool,
    count: Callable[[int], None],
) -> dict[str, Tensor]:
    """Return the tensors of one shard."""
    starts = starts_of([len(document.input_ids) for document in documents])
    ids = torch.empty(starts[-1], plan.top_k, dtype=torch.int32)
    log_probs = torch.empty(starts[-1], plan.top_k)
    for i, states in packed_states(documents, base, seq_len, rows, autocast, count):
        at = starts[i]
        for part in states.split(rows_at_once(output.weight)):
            with torch.autocast(states.device.type, torch.bfloat16, enabled=autocast):
                logits = output(part)
            logits = logits[:, : plan.vocab_size].float()
            best, where = logits.topk(plan.top_k, dim=1)
            best = best - logits.logsumexp(1, keepdim=True)
            if not bool(best.isfinite().all()):
                raise RunError(
                    f"the base model's logits of record {documents[i].id} are not finite"
                )
            place = slice(at, at + len(part))
            ids[place], log_probs[place] = where.cpu(), best.cpu()
            at += len(part)
    return {"ids": ids, "log_probs": log_probs}


def _check_top_room(plan: TopPlan, missing: Sequence[int]) -> None:
    needed, free = plan.num_bytes(missing) + _TOP_FREE_MARGIN, shutil.disk_usage(plan.folder).free
    if needed > free:
        raise ConfigError(
            f"{KEY}={plan.folder} needs {readable(needed)}, that disk has {readable(free)} free;"
            f" another folder, a smaller draft.stored_top_k (now {plan.top_k}) or fewer records"
            " would do"
        )


def _check_top_contents(plan: TopPlan, path: Path) -> None:
    """Check a shard that an interrupted run left, number by number."""
    file = _opened_top(plan, path)
    found = contents_sha256({name: file.get_tensor(name) for name in ("ids", "log_probs")})
    if found != file.metadata()["sha256"]:
        raise damaged(path, "its numbers are not those that were written")


def _opened_top(plan: TopPlan, path: Path) -> Any:
    """Map a shard into memory and check that it is of these stored tokens."""
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise damaged(path, str(error)) from None
    if (file.metadata() or {}).get("made_of") != plan.fingerprint:
        raise damaged(path, "it is of another stored teacher")
    return file


class TopLogits:
    """The stored tokens, mapped into memory; any document can be read at any time."""

    def __init__(self, plan: TopPlan) -> None:
        """Map the shards, which must be complete.

        Raises:
            ConfigError: if a shard is missing, damaged, or of another run; names it.
        """
        if missing := plan.missing():
            path = plan.folder / plan.shards[missing[0]].file
            raise ConfigError(f"{path} is missing, and {len(missing) - 1} more shards with it")
        self.plan = plan
        self._shards: list[tuple[Any, Any]] = []  # slices of ids and log_probs
        self._places: list[tuple[int, int]] = []  # of each document: its shard, its first row
        for number, shard in enumerate(plan.shards):
            file = _opened_top(plan, plan.folder / shard.file)
            self._shards.append((file.get_slice("ids"), file.get_slice("log_probs")))
            starts = starts_of(plan.lengths[slice(*shard.documents)])
            self._places += [(number, start) for start in starts[:-1]]

    def __getitem__(self, document: int) -> tuple[Tensor, Tensor]:
        """Return ids (int32) and log-probabilities (float32) [n, k] of a document."""
        number, start = self._places[document]
        rows = slice(start, start + self.plan.lengths[document])
        ids, log_probs = self._shards[number]
        return ids[rows], log_probs[rows]

    def rows(self, places: Sequence[Sequence[int]], seq_len: int) -> Batch:
        """Lay the documents of each row one after the other, as ``pack.collate`` does.

        Args:
            places: for each row the numbers of its documents.
            seq_len: T.

        Returns:
            ``teacher_ids`` [B, T, k] int64 and ``teacher_log_probs`` [B, T, k] float32, 0 in the
            padding.
        """
        shape = (len(places), seq_len, self.plan.top_k)
        ids, log_probs = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        for b, row in enumerate(places):
            at = 0
            for document in row:
                stop = at + self.plan.lengths[document]
                ids[b, at:stop], log_probs[b, at:stop] = self[document]
                at = stop
        return {"teacher_ids": ids, "teacher_log_probs": log_probs}


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
