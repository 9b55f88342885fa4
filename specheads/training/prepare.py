"""What every recipe starts from: records as packed rows, held-out rows, prompts to decode."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads import dist
from specheads.assets import tinycode_dir
from specheads.config import ConfigError, TrainConfig
from specheads.data.chat import Encoded, EncodedRecords, Encoder, encode_records
from specheads.data.dropped import Dropped
from specheads.data.pack import PackedBatches, check_isolation, one_pass
from specheads.data.records import Record, load_records, read_jsonl
from specheads.losses import check_implementation
from specheads.models.adapters import add_adapter, check_tunable, require_grad
from specheads.models.base import (
    check_tokenizer,
    checkpoint_layers,
    context_length,
    load_base_model,
    load_tokenizer,
)
from specheads.models.output import OutputLayer, output_layer


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


@dataclass(frozen=True)
class Data:
    """A run's data.

    Attributes:
        train: endless micro-batches of this rank.
        heldout: packed held-out rows, always the same.
        heldout_records: the records that ``heldout`` is made of.
        summary: counts, for the export.
        rows_per_epoch: rows of ``data.seq_len`` that hold every training document once.
        efficiency: share of their positions that is used.
        dropped: records that could not be used.
    """

    train: PackedBatches | GrowingBatches
    heldout: list[dict[str, Any]]
    heldout_records: list[Record]
    summary: dict[str, Any]
    rows_per_epoch: int
    efficiency: float
    dropped: Dropped

    def quarantine(self, run_dir: Path) -> None:
        """Write the records that could not be used to ``quarantine.jsonl``, if there are any."""
        if self.dropped.rows and dist.is_main():
            self.dropped.write(run_dir / "quarantine.jsonl")


class _Bars:
    """Progress bars for the slow parts of reading data, on a terminal only."""

    def __init__(self) -> None:
        self.bars: dict[str, tqdm[Any]] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
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


def load_base(
    cfg: TrainConfig, *, train_base: bool = False
) -> tuple[PreTrainedModel, OutputLayer, PreTrainedTokenizerBase]:
    """Return the base model on this rank's device, its output layer, and its tokenizer.

    Args:
        cfg: the run's settings.
        train_base: whether it is going to be tuned: by its adapter, if the settings have one,
            which is added here.

    Raises:
        ConfigError: if one of them is missing, or they or the loss do not fit together.
    """
    model = cfg.model
    if cfg.tokenizer:
        raise ConfigError(
            f"tokenizer={cfg.tokenizer} is for models trained from scratch;"
            f" model.name={model.name} has its own"
        )
    if train_base:
        check_tunable(model.quantization, cfg.adapter)
        check_no_cache(cfg)
    tokenizer = load_tokenizer(
        model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    base = load_base_model(
        model.name,
        revision=model.revision,
        dtype=model.dtype,
        device=dist.device(),
        attn=model.attn,
        trust_remote_code=model.trust_remote_code,
        quantization=model.quantization,
    )
    check_tokenizer(tokenizer, base)
    output = output_layer(base)
    check_loss(cfg, output)
    if train_base and cfg.adapter.kind == "lora":
        add_adapter(base, cfg.adapter, seed=cfg.seed)
    if train_base and model.gradient_checkpointing:
        checkpoint_layers(base)
    if not train_base:  # also where a cache of features stands in for it, and nobody else asks
        require_grad(base, False)
    return base, output, tokenizer


def check_no_cache(cfg: TrainConfig) -> None:
    """Refuse a feature cache where the base is trained, and its hidden states with it."""
    if cfg.features.dir:
        raise ConfigError(
            f"features.dir={cfg.features.dir} keeps hidden states of a frozen base, as"
            f" +recipe=medusa1 has; {cfg.recipe} trains it"
        )


def check_loss(cfg: TrainConfig, output: OutputLayer) -> None:
    """Refuse an implementation of the loss that is not installed or cannot serve this model."""
    try:
        check_implementation(cfg.loss.implementation, output.softcap)
    except ValueError as error:
        raise ConfigError(f"loss.{error}") from None


def load_data(
    cfg: TrainConfig,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_base: bool,
    learn_all: bool = False,
) -> Data:
    """Read, encode and pack the training and the held-out records.

    Args:
        cfg: the run's settings.
        base: decides the longest row, and must keep packed documents apart.
        tokenizer: of ``base``.
        train_base: whether gradients go through ``base``.
        learn_all: learn prompts too, as pre-training does.

    Raises:
        ConfigError: if there is nothing to learn from, or ``base`` cannot keep documents apart.
    """
    check_isolation(base, backward=train_base)
    bars, dropped = _Bars(), Dropped()

    def encode(records: Sequence[Record], seq_len: int) -> EncodedRecords:
        found = encode_records(
            records,
            tokenizer,
            seq_len=seq_len,
            context=context_length(base),
            progress=bars,
            max_bad_fraction=cfg.data.max_bad_fraction,
            dropped=dropped,
        )
        if learn_all:
            all_learned = [replace(d, labels=d.input_ids) for d in found.documents]
            found = replace(found, documents=all_learned)
        return found

    pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
    records = load_records(cfg.data, "train", progress=bars, dropped=dropped)
    tokens = cfg.data.rows * cfg.data.seq_len
    stages: list[tuple[int, PackedBatches]] = []
    for length, share in [*cfg.data.growth, [cfg.data.seq_len, 1.0]]:
        seq_len = int(length)
        encoded = encode(records, seq_len)
        batches = PackedBatches(
            encoded.documents,
            seq_len=seq_len,
            rows=tokens // seq_len,
            seed=cfg.seed,
            pad_token_id=pad,
            rank=dist.rank(),
            world=dist.world_size(),
        )
        stages.append((round(share * cfg.steps) * cfg.optim.accumulation, batches))
    heldout_records = load_records(cfg.data, "heldout", progress=bars, dropped=dropped)
    heldout_encoded = encode(heldout_records, cfg.data.seq_len)
    heldout = one_pass(
        heldout_encoded.documents,
        seq_len=cfg.data.seq_len,
        rows=min(cfg.data.rows, 8),
        pad_token_id=pad,
        max_rows=cfg.evaluate.loss_rows,
    )
    bars.close()
    summary = {
        "source": cfg.data.source,
        "path": cfg.data.path,
        "kinds": list(cfg.data.kinds),
        "seq_len": cfg.data.seq_len,
        "train": encoded.counts,
        "heldout": heldout_encoded.counts,
        "dropped": dropped.counts,
    }
    if dist.is_main():
        print(f"train: {encoded.summary()}\nheldout: {heldout_encoded.summary()}", flush=True)
        if dropped:
            print(f"read: {dropped.summary()}", flush=True)
    return Data(
        train=batches if len(stages) == 1 else GrowingBatches(stages),
        heldout=heldout,
        heldout_records=heldout_records,
        summary=summary,
        rows_per_epoch=batches.rows_per_epoch,
        efficiency=batches.efficiency,
        dropped=dropped,
    )


def prompt_records(
    cfg: TrainConfig, data: Data, tokenizer: PreTrainedTokenizerBase, context: int | None = None
) -> list[Record]:
    """Return ``evaluate.num_prompts`` records to decode and to calibrate on, the kinds in turn.

    They are never those of the measured set: the embedded model has a file of its own, otherwise
    they come from the held-out records.

    Args:
        cfg: the run's settings.
        data: the run's data.
        tokenizer: of the base model.
        context: the base model's, of which ``evaluate.max_new_tokens`` are left free.
    """
    records = data.heldout_records
    own = tinycode_dir() / "calibration.jsonl"
    if cfg.model.name == "tinycode" and cfg.data.source == "pycode" and own.is_file():
        records = read_jsonl(own)
    encoder = Encoder(tokenizer)
    longest = cfg.data.seq_len
    if context is not None:
        longest = min(longest, context - cfg.evaluate.max_new_tokens)
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        kind = by_kind.setdefault(record["kind"], [])
        if len(kind) < cfg.evaluate.num_prompts and 0 < len(encoder.prompt(record)) <= longest:
            kind.append(record)
    turns = [
        kind[i]
        for i in range(cfg.evaluate.num_prompts)
        for kind in by_kind.values()
        if i < len(kind)
    ]
    return turns[: cfg.evaluate.num_prompts]
