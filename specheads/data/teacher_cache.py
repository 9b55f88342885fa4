"""A cache of what a frozen base model computes, so that others can train without running it.

Two kinds share one store. A feature cache (``features.dir``) holds hidden states, the final ones
and those at the taps of the heads that are trained from it. A stored teacher (``draft.stored``)
holds the k most likely next tokens at every position, from which a draft model is distilled: the
base runs once, whatever is tried later.

One folder: ``index.json`` (what the numbers were made of, the length of every document, and which
documents each shard holds, in order) and ``*.safetensors`` shards with named tensors, one row per
token, without padding. Packed documents do not see each other, so the numbers of a document depend
on its own tokens alone and serve any order, row length and mask of labels. Shards are written whole
or not at all, so an interrupted run goes on where it was. They are read mapped into memory.

Hidden states may also come from a server that runs the base: :mod:`specheads.data.served`.

Shapes: B T batch, n tokens of one document, d hidden size, k stored tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError, ModelConfig, RunError
from specheads.data.chat import Encoded
from specheads.data.pack import Batch, Mapped, PackedBatches, collate, pack_lengths
from specheads.data.schema import differences, json_digest
from specheads.losses.cross_entropy import IGNORE
from specheads.losses.fused import rows_at_once
from specheads.models.base import input_device
from specheads.models.forward import undisturbed
from specheads.models.manifest import one_line
from specheads.models.names import base_digest
from specheads.models.output import FINAL, OutputLayer, packed_taps
from specheads.system.errors import refuse
from specheads.system.files import locked, whole_file

Corpus = Sequence[Encoded]
INDEX = "index.json"
# of the numbers in one shard, which is held in memory while it fills; one document may have more
SHARD_BYTES = 256 << 20
_FREE_MARGIN = 1 << 20  # bytes that a file system needs beside the files themselves
_DAMAGED = "is damaged; delete it, and the next run writes it again"
# kind -> the setting that names the folder, the files' name, what makes it smaller, here and there
_KINDS = {
    "features": ("features.dir", "features", "features.dtype", "dtype"),
    "stored teacher": ("draft.stored", "top", "draft.stored_top_k", "top_k"),
}


@dataclass(frozen=True)
class Shard:
    """One file of a cache.

    Attributes:
        file: the file's name.
        documents: the first document in it, and the first behind it.
        bytes: the size of its numbers; the file's header comes on top.
    """

    file: str
    documents: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Where a cache lies or is going to lie, what is in it, and its size.

    Attributes:
        kind: ``features`` or ``stored teacher``.
        folder: the cache's folder.
        made_of: everything that decides the numbers, by name; a cache made of anything else is
            refused.
        settings: what the index says beside. Features: ``hidden_size`` d, ``dtype`` of the stored
            numbers (float32, bfloat16, or int8 with a float32 scale per token and tap),
            ``given_as``, the dtype in which the base gives its states and the cache gives them
            back, and ``taps``, where there are others than the final states. A stored teacher:
            ``top_k`` k, and ``vocab_size`` V, the tokens that were chosen from.
        lengths: the number of tokens of each document.
        shards: the files, in order.
        asked: of the hidden states those that are given back, in this order.
    """

    kind: str
    folder: Path
    made_of: dict[str, str]
    settings: dict[str, Any]
    lengths: list[int]
    shards: list[Shard]
    asked: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The setting that names the folder."""
        return _KINDS[self.kind][0]

    @property
    def taps(self) -> tuple[str, ...]:
        """The hidden states of a feature cache, in the order in which they lie side by side."""
        return tuple(self.settings.get("taps", (FINAL,)))

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Name -> dtype and shape per token of a shard's tensors, in the file's order."""
        # safetensors writes wider dtypes first, floats before integers, so that all are aligned
        if self.kind == "features":
            size, num_taps = self.settings["hidden_size"], len(self.taps)
            hidden = {"hidden": (getattr(torch, self.settings["dtype"]), [num_taps * size])}
            per_tap = [] if num_taps == 1 else [num_taps]
            scale: dict[str, tuple[torch.dtype, list[int]]] = {"scale": (torch.float32, per_tap)}
            return scale | hidden if self.settings["dtype"] == "int8" else hidden
        shape = [self.settings["top_k"]]
        return {"log_probs": (torch.float32, shape), "ids": (torch.int32, shape)}

    @property
    def digest(self) -> str:
        """The digest of everything that decides the numbers, which every shard says."""
        return json_digest(self.made_of).hex()

    @property
    def token_bytes(self) -> int:
        """Bytes of the numbers of one token."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all numbers and the index together."""
        return len(self.index()) + sum(shard.bytes for shard in self.shards)

    def index(self) -> bytes:
        """Return the contents of the index."""
        shards = [{"file": shard.file, "documents": shard.documents} for shard in self.shards]
        values = {"format_version": 1, "made_of": self.made_of, **self.settings}
        return json.dumps(values | {"lengths": self.lengths, "shards": shards}).encode() + b"\n"

    def missing(self) -> list[Shard]:
        """Return the shards that are still to be written."""
        return [shard for shard in self.shards if not (self.folder / shard.file).is_file()]

    def describe(self) -> str:
        """Return a few words: what is stored, how large it is, and where."""
        given, count = self.settings, len(self.shards)
        if self.kind == "features":
            dtype = "int8 with a scale per token" if given["dtype"] == "int8" else given["dtype"]
            times = f"{len(self.taps)} x " if len(self.taps) > 1 else ""
            what = f"{times}{given['hidden_size']} as {dtype}"
        else:
            what = f"{given['top_k']} of {given['vocab_size']:,}"
        return (
            f"{self.kind}: {sum(self.lengths):,} tokens x {what}, {readable(self.num_bytes)}"
            f" in {count} shard{'' if count == 1 else 's'}, {self.folder}"
        )


def still_missing(*plans: Plan) -> str:
    """Return how much of these caches is still to be written, in a few words."""
    missing = sum(shard.bytes for plan in plans for shard in plan.missing())
    return f"{readable(missing)} still to be written" if missing else "complete"


def readable(num_bytes: float) -> str:
    """Return a size as text, e.g. ``1.6 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def computed_by(model: ModelConfig, autocast: str) -> dict[str, str]:
    """Return ``base model`` and ``computation``, the first part of what a cache is made of."""
    return {
        "base model": base_digest(model.name, revision=model.revision),
        "computation": f"{model.dtype}, quantization {model.quantization}, autocast {autocast}",
    }


def plan_features(
    folder: Path,
    documents: Corpus,
    made_of: dict[str, str],
    *,
    hidden_size: int,
    given_as: torch.dtype,
    dtype: str = "auto",
    taps: Sequence[str] = (FINAL,),
) -> Plan:
    """Lay a feature cache out before anything is run, or read the layout of the one that is there.

    One that holds other hidden states beside those of ``taps`` serves as well.

    Args:
        folder: the cache's folder.
        documents: what the run trains on, in order.
        made_of: the base model and how it computes, see :func:`computed_by`.
        hidden_size: d.
        given_as: the dtype of the base's hidden states.
        dtype: the stored dtype: float32, bfloat16, int8; auto loses nothing.
        taps: which hidden states, see :func:`specheads.models.output.capture_hidden`.

    Raises:
        ConfigError: if ``folder`` holds a cache that was made of something else, naming that.
    """
    if dtype == "auto":
        dtype = "bfloat16" if given_as == torch.bfloat16 else "float32"
    given = str(given_as).removeprefix("torch.")
    settings: dict[str, Any] = {"hidden_size": hidden_size, "dtype": dtype, "given_as": given}
    made_of = {**made_of, "documents": _documents_digest(documents), "dtype": dtype}
    if tuple(taps) != (FINAL,):  # of the final ones alone the index says what it always said
        settings["taps"], made_of["taps"] = list(taps), ", ".join(taps)
    lengths = [len(document.input_ids) for document in documents]
    return _laid_out(Plan("features", folder, made_of, settings, lengths, [], tuple(taps)))


def plan_top_logits(
    folder: Path, documents: Corpus, made_of: dict[str, str], *, vocab_size: int, top_k: int
) -> Plan:
    """Lay a stored teacher out before anything is run, or read the layout of the one there.

    Args:
        folder: the cache's folder.
        documents: what the run trains on, in order.
        made_of: the base model and how it computes, see :func:`computed_by`.
        vocab_size: V, the first tokens of the base's vocabulary that are looked at;
            log-probabilities are over them.
        top_k: tokens per position, below V.

    Raises:
        ConfigError: if ``folder`` holds what was made of something else, naming that; if it is a
            file, or its index is damaged; if ``top_k`` is not in 1..V-1.
    """
    if not 0 < top_k < vocab_size:
        raise ConfigError(f"draft.stored_top_k must be in 1..{vocab_size - 1}, got {top_k}")
    chosen = {"vocabulary": str(vocab_size), "stored_top_k": str(top_k)}
    made_of = {**made_of, "documents": _documents_digest(documents), **chosen}
    settings = {"top_k": top_k, "vocab_size": vocab_size}
    lengths = [len(document.input_ids) for document in documents]
    return _laid_out(Plan("stored teacher", folder, made_of, settings, lengths, []))


def _laid_out(plan: Plan) -> Plan:
    """Return the plan with its shards: those of the index in the folder, where there is one."""
    folder = plan.folder
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{plan.key}={folder} is a file; a folder is expected")
    if (folder / INDEX).is_file():
        places = _stored_places(plan)
    else:
        places, first, tokens = [], 0, 0.0
        for document, length in enumerate([*plan.lengths, math.inf]):
            if tokens and (tokens + length) * plan.token_bytes > SHARD_BYTES:
                name = f"{_KINDS[plan.kind][1]}-{len(places):05d}.safetensors"
                places.append((name, (first, document)))
                first, tokens = document, 0.0
            tokens += length
    for name, inside in places:
        num_bytes = sum(plan.lengths[slice(*inside)]) * plan.token_bytes
        plan.shards.append(Shard(name, inside, num_bytes))
    return plan


def _stored_places(plan: Plan) -> list[tuple[str, tuple[int, int]]]:
    """Return name and documents of the shards of the index in the folder, if it is of the same."""
    path = plan.folder / INDEX
    with one_line(f"{path} is no {plan.kind} index; delete the folder"):
        values = json.loads(path.read_text(encoding="utf-8"))
        there, held = dict(values["made_of"]), values.get("taps")
        if held and set(plan.asked) <= set(held):
            plan.settings["taps"], plan.made_of["taps"] = held, ", ".join(held)
        found = [
            (str(shard["file"]), (int(first), int(stop)))
            for shard in values["shards"]
            for first, stop in [shard["documents"]]
        ]
    if others := differences(there, plan.made_of):
        raise ConfigError(
            f"{plan.key}={plan.folder} was made with another {others}; name another folder, or"
            " delete this one"
        )
    return found


def _documents_digest(documents: Corpus) -> str:
    # names and labels are left out: what the base computes does not depend on them
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{len(document.input_ids)}\n".encode())
        digest.update(np.ascontiguousarray(document.input_ids, dtype=np.int32).data)
    return digest.hexdigest()


@torch.no_grad()
def write_cache(
    plan: Plan,
    documents: Corpus,
    base: PreTrainedModel | None,
    shape: tuple[int, int],
    *,
    served: Callable[[Corpus], Iterable[Tensor]] | None = None,
    output: OutputLayer | None = None,
    autocast: bool = False,
    tell: Callable[[float], object] = lambda share: None,
) -> None:
    """Run the base over the documents and write every shard that is not there yet.

    A second process that is given the same folder waits for the first, and finds it done.

    Args:
        plan: the layout of the cache, for the same documents.
        documents: none longer than a row.
        base: the frozen base model; runs in eval mode, without gradients. None takes for a stored
            teacher what the records bring along.
        shape: rows per pass, and tokens per row as in training, so that the numbers are those of
            training.
        served: gives the hidden states [n, taps * d] of documents in the base's place.
        output: the base's output layer; only a stored teacher needs it.
        autocast: run under bfloat16 autocast, as in training.
        tell: told at the start, and after every document which share is done.

    Raises:
        ConfigError: if the disk has too little room.
        RunError: if the disk fills up, or numbers are not finite; finished shards stay.
    """
    tell(0.0)
    if not plan.missing():
        return  # a complete cache may lie on a disk that cannot be written
    with locked(plan.folder, plan.key):
        missing = plan.missing()  # again: another process may have written them meanwhile
        if not missing:
            return
        _check_room(plan, missing)
        if not (plan.folder / INDEX).is_file():
            with whole_file(plan.folder / INDEX) as path:
                path.write_bytes(plan.index())
        counts = [len(range(*shard.documents)) for shard in missing]
        done = itertools.count(1)
        with undisturbed(base) if base else contextlib.nullcontext():
            for shard in missing:
                inside = [documents[i] for i in range(*shard.documents)]
                starts = _starts([len(document.input_ids) for document in inside])
                tensors = {
                    name: torch.empty(starts[-1], *per_token, dtype=dtype)
                    for name, (dtype, per_token) in plan.tensors.items()
                }
                numbers: Iterator[tuple[int, dict[str, Tensor]]]
                if base is None:
                    numbers = enumerate(_told(document, plan) for document in inside)
                elif served is not None:
                    numbers = enumerate(_quantised(each, plan) for each in served(inside))
                else:
                    numbers = _computed(inside, base, shape, plan, output, autocast)
                for i, found in numbers:
                    for name, values in found.items():
                        if not bool(values.isfinite().all()):
                            what = "logits" if name == "log_probs" else "hidden states"
                            raise RunError(
                                f"the base model's {what} of record {inside[i].id} are not finite"
                            )
                        tensors[name][starts[i] : starts[i + 1]] = values
                    tell(next(done) / sum(counts))
                with whole_file(plan.folder / shard.file) as path:
                    save_file(tensors, path, metadata={"made_of": plan.digest})


def _computed(
    documents: Corpus,
    base: PreTrainedModel,
    shape: tuple[int, int],
    plan: Plan,
    output: OutputLayer | None,
    autocast: bool,
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Run the base over documents; yield the number of each and what is stored of it."""
    (rows, seq_len), device = shape, input_device(base)
    packed = pack_lengths([len(document.input_ids) for document in documents], seq_len)
    for begin in range(0, len(packed), rows):
        places = packed[begin : begin + rows]
        # what stands in the padding is seen by nothing that is kept
        batch = collate([[documents[i] for i in row] for row in places], seq_len, 0)
        ids, positions = (batch[key].to(device) for key in ("input_ids", "position_ids"))
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            _, hidden = packed_taps(base, ids, positions, plan.taps)
        for b, row in enumerate(places):
            lengths = [len(documents[i].input_ids) for i in row]
            for i, states in zip(row, hidden[b, : sum(lengths)].split(lengths), strict=True):
                if output is None:
                    yield i, _quantised(states, plan)
                else:
                    yield i, _likely(states, output, plan, autocast)


def _quantised(states: Tensor, plan: Plan) -> dict[str, Tensor]:
    states = states.cpu()
    if plan.settings["dtype"] != "int8":
        return {"hidden": states}
    # symmetric: the largest number of a token becomes 127, so that errors stay below scale / 2
    each = states.float().unflatten(1, (len(plan.taps), -1))
    scale = each.abs().amax(2).clamp_min(1e-30) / 127  # [n, taps]
    rounded = (each / scale[..., None]).round().clamp(-127, 127).flatten(1)
    return {"scale": scale[:, 0] if len(plan.taps) == 1 else scale, "hidden": rounded}


def _likely(states: Tensor, output: OutputLayer, plan: Plan, autocast: bool) -> dict[str, Tensor]:
    """Return ids, best first, and log-probabilities [n, k] at temperature 1 over V tokens.

    What is missing to a probability of 1 is the mass of all other tokens.
    """
    ids, log_probs = [], []
    for part in states.split(rows_at_once(output.weight)):  # V logits per token need the room
        with torch.autocast(states.device.type, torch.bfloat16, enabled=autocast):
            logits = output(part)
        logits = logits[:, : plan.settings["vocab_size"]].float()
        best, where = logits.topk(plan.settings["top_k"], dim=1)
        ids.append(where)
        log_probs.append(best - logits.logsumexp(1, keepdim=True))
    return {"ids": torch.cat(ids), "log_probs": torch.cat(log_probs)}


def _told(document: Encoded, plan: Plan) -> dict[str, Tensor]:
    """Return what a document's record says of its learned tokens, and even odds elsewhere."""
    assert document.top is not None
    size, top_k = len(document.input_ids), plan.settings["top_k"]
    before = torch.from_numpy((document.labels != IGNORE).nonzero()[0] - 1)
    ids = torch.arange(top_k, dtype=torch.int32).repeat(size, 1)
    log_probs = torch.full((size, top_k), -math.log(top_k + 1))
    ids[before], log_probs[before] = (torch.tensor(x[:, :top_k]) for x in document.top)
    return {"ids": ids, "log_probs": log_probs}


def check_told(documents: Corpus, top_k: int, vocab_size: int) -> str:
    """Return a digest of the likeliest tokens that records bring along; empty where none does.

    Raises:
        ConfigError: if some bring none or too few, or name tokens that are not compared.
    """
    tops = [document.top for document in documents if document.top is not None]
    if not tops:
        return ""
    fewest, largest = min(ids.shape[1] for ids, _ in tops), max(int(ids.max()) for ids, _ in tops)
    silent = len(documents) - len(tops)
    refuse(
        {
            f"{silent:,} of {len(documents):,} training records bring no likeliest tokens along and"
            " the others do; train on those of regenerate logprobs=": silent,
            f"draft.stored_top_k={top_k} is more than the {fewest} tokens that the training records"
            f" bring along; expected at most {fewest}": top_k > fewest,
            f"the training records bring token {largest} along, and {vocab_size:,} are compared"
            " with the draft model": largest >= vocab_size,
        }
    )
    return hashlib.sha256(b"".join(x.tobytes() for top in tops for x in top)).hexdigest()


def _starts(lengths: Sequence[int]) -> list[int]:
    """Return where each document starts when they lie one after the other, and the end."""
    return [0, *itertools.accumulate(lengths)]


def _check_room(plan: Plan, missing: Sequence[Shard]) -> None:
    needed = len(plan.index()) + sum(shard.bytes for shard in missing)
    free = shutil.disk_usage(plan.folder).free
    if needed + _FREE_MARGIN > free:
        _, _, smaller, setting = _KINDS[plan.kind]
        raise ConfigError(
            f"{plan.key}={plan.folder} needs {readable(needed)}, that disk has {readable(free)}"
            f" free; another folder, a smaller {smaller} (now {plan.settings[setting]}) or fewer"
            " records would do"
        )


def _opened(plan: Plan, path: Path) -> Any:
    """Map a shard into memory and check that it is of this cache."""
    with one_line(f"{path} {_DAMAGED}"):
        file = safe_open(path, framework="pt")
    if (file.metadata() or {}).get("made_of") != plan.digest:
        raise ConfigError(f"{path} {_DAMAGED}: it is of another cache")
    return file


class TeacherCache:
    """The numbers of a complete cache; any document can be read at any time."""

    def __init__(self, plan: Plan) -> None:
        """Map the shards into memory; :func:`write_cache` has seen to it that all are there.

        Raises:
            ConfigError: if a shard is damaged, or of another cache; names it.
        """
        self.plan = plan
        self._shards: list[dict[str, Any]] = []  # slices of the tensors
        self._places: list[tuple[int, int]] = []  # of each document: its shard, its first row
        for number, shard in enumerate(plan.shards):
            file = _opened(plan, plan.folder / shard.file)
            self._shards.append({name: file.get_slice(name) for name in plan.tensors})
            starts = _starts(plan.lengths[slice(*shard.documents)])
            self._places += [(number, start) for start in starts[:-1]]

    def __getitem__(self, document: int) -> Batch:
        """Return what is stored for a document, by its number.

        Returns:
            ``hidden`` [n, asked taps * d] in the base's dtype, or ``teacher_ids`` [n, k] int64,
            best first, and ``teacher_log_probs`` [n, k] float32.
        """
        number, start = self._places[document]
        rows = slice(start, start + self.plan.lengths[document])
        stored = {name: part[rows] for name, part in self._shards[number].items()}
        if self.plan.kind != "features":
            return {"teacher_ids": stored["ids"].long(), "teacher_log_probs": stored["log_probs"]}
        states = stored["hidden"].to(getattr(torch, self.plan.settings["given_as"]))
        per_tap = states.view(len(states), len(self.plan.taps), -1)
        if "scale" in stored:
            per_tap.mul_(stored["scale"].view(len(states), -1, 1))
        at = [self.plan.taps.index(tap) for tap in self.plan.asked]
        return {"hidden": per_tap[:, at].flatten(1)}

    def rows(self, places: Sequence[Sequence[int]], seq_len: int) -> Batch:
        """Lay the documents of each row one after the other, as ``pack.collate`` does.

        Args:
            places: for each row the numbers of its documents.
            seq_len: T.

        Returns:
            The tensors of :meth:`__getitem__`, [B, T, ...], 0 in the padding.
        """
        rows = [[self[document] for document in row] for row in places]
        batch: Batch = {}
        for name in rows[0][0]:
            laid = [torch.cat([stored[name] for stored in row]) for row in rows]
            padded = [F.pad(each, (0, 0, 0, seq_len - len(each))) for each in laid]
            batch[name] = torch.stack(padded)
        return batch


def cached_batches(batches: PackedBatches, cache: TeacherCache) -> Mapped:
    """Return the batches with what a cache of the same documents, in their order, holds."""
    return Mapped(batches, lambda batch: batch | cache.rows(batches.places, batches.seq_len))
