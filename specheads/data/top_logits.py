"""The base model's k most likely next tokens at every position of every document, in files.

With them a draft model is distilled offline: the base runs once, whatever is tried afterwards.
One folder: ``index.json`` (what it was made of, the length of every document, and which documents
each shard holds, in order) and ``top-*.safetensors`` with ``ids`` [n, k] int32, best first, and
``log_probs`` [n, k] float32, at temperature 1 over the whole vocabulary: what is missing to 1 is
the mass of all other tokens. Shards are written whole or not at all, so that an interrupted run
goes on where it was; they are read mapped into memory, and only what a batch needs.

Shapes: B T batch, n tokens of one shard or document, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from specheads.config import ConfigError, RunError
from specheads.data.chat import Encoded
from specheads.data.feature_plan import INDEX, damaged, readable
from specheads.data.features import contents_sha256, locked, packed_states, starts_of
from specheads.data.pack import Batch, PackedBatches
from specheads.data.top_plan import KEY, TopPlan, plan_top_logits
from specheads.files import whole_file
from specheads.fused_loss import rows_at_once
from specheads.models.output import OutputLayer

__all__ = ["TaughtBatches", "TopLogits", "TopPlan", "plan_top_logits", "write_top_logits"]

_FREE_MARGIN = 1 << 20  # bytes for headers, the index and the file system itself

Progress = Callable[[str, int, int], None]


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
    if not plan.missing():
        return
    with locked(plan.folder, KEY):
        missing = plan.missing()
        if not missing:
            return
        _check_room(plan, missing)
        for number in set(range(len(plan.shards))) - set(missing):
            _check_contents(plan, plan.folder / plan.shards[number].file)
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
                tensors = _run(plan, inside, base, output, seq_len, rows, autocast, count)
                about = {"made_of": plan.fingerprint, "sha256": contents_sha256(tensors)}
                with whole_file(plan.folder / shard.file) as path:
                    save_file(tensors, path, metadata=about)
        finally:
            base.train(training)


@torch.no_grad()
def _run(
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


def _check_room(plan: TopPlan, missing: Sequence[int]) -> None:
    needed, free = plan.num_bytes(missing) + _FREE_MARGIN, shutil.disk_usage(plan.folder).free
    if needed > free:
        raise ConfigError(
            f"{KEY}={plan.folder} needs {readable(needed)}, that disk has {readable(free)} free;"
            f" another folder, a smaller draft.stored_top_k (now {plan.top_k}) or fewer records"
            " would do"
        )


def _check_contents(plan: TopPlan, path: Path) -> None:
    """Check a shard that an interrupted run left, number by number."""
    file = _opened(plan, path)
    found = contents_sha256({name: file.get_tensor(name) for name in ("ids", "log_probs")})
    if found != file.metadata()["sha256"]:
        raise damaged(path, "its numbers are not those that were written")


def _opened(plan: TopPlan, path: Path) -> Any:
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
            file = _opened(plan, plan.folder / shard.file)
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
