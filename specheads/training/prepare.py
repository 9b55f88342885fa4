"""What every recipe starts from: records as packed rows, held-out rows, prompts to decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads import dist
from specheads.assets import tinycode_dir
from specheads.config import ConfigError, TrainConfig
from specheads.data.chat import Documents, EncodedRecords, Encoder, encode_records
from specheads.data.dropped import Dropped
from specheads.data.pack import PackedBatches, check_isolation, one_pass
from specheads.data.records import read_jsonl
from specheads.data.rows import Record
from specheads.data.stream import RecordStream
from specheads.data.streamed import StreamedBatches
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
from specheads.training.growing import GrowingBatches
from specheads.training.reading import Bars, Read, read_data

Training = PackedBatches | GrowingBatches | StreamedBatches


@dataclass(frozen=True)
class Data:
    """A run's data.

    Attributes:
        train: endless micro-batches of this rank.
        heldout: packed held-out rows, always the same.
        heldout_records: the records that ``heldout`` is made of.
        summary: counts, for the export.
        rows_per_epoch: rows of ``data.seq_len`` that hold every training document once; 0 for a
            stream, whose length nobody knows.
        efficiency: share of their positions that is used; of a stream, in its first rows.
        dropped: records that could not be used.
    """

    train: Training
    heldout: list[dict[str, Any]]
    heldout_records: list[Record]
    summary: dict[str, Any]
    rows_per_epoch: int
    efficiency: float
    dropped: Dropped

    def quarantine(self, run_dir: Path) -> None:
        """Write the records that could not be used to ``quarantine.jsonl``, if there are any.

        A stream goes on with it while it is read, on each rank in a file of its own.
        """
        path = run_dir / "quarantine.jsonl"
        if isinstance(self.train, StreamedBatches):
            self.train.write_quarantine(path)
        elif self.dropped.rows and dist.is_main():
            self.dropped.write(path)
            print(f"quarantine: {len(self.dropped.rows):,} records in {path}", flush=True)


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
        device=cfg.device,
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
    read: Read | None = None,
) -> Data:
    """Encode and pack the training and the held-out records.

    Args:
        cfg: the run's settings.
        base: decides the longest row, and must keep packed documents apart.
        tokenizer: of ``base``.
        train_base: whether gradients go through ``base``.
        learn_all: learn prompts too, as pre-training does.
        read: the records; None reads them now.

    Raises:
        ConfigError: if there is nothing to learn from, or ``base`` cannot keep documents apart.
    """
    check_isolation(base, backward=train_base)
    read = read or read_data(cfg)
    bars, dropped = Bars(), read.dropped

    def encode(records: Sequence[Record], seq_len: int) -> EncodedRecords:
        return encode_records(
            records,
            tokenizer,
            seq_len=seq_len,
            context=context_length(base),
            progress=bars,
            max_bad_fraction=cfg.data.max_bad_fraction,
            dropped=dropped,
            learn_all=learn_all,
        )

    pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
    heldout_encoded = encode(read.heldout, cfg.data.seq_len)
    train: Training
    if isinstance(read.train, RecordStream):
        train = StreamedBatches(
            read.train,
            Documents(
                tokenizer,
                seq_len=cfg.data.seq_len,
                context=context_length(base),
                learn_all=learn_all,
            ),
            rows=cfg.data.rows,
            seed=cfg.seed,
            pad_token_id=pad,
            dropped=dropped,
            rank=dist.rank(),
            world=dist.world_size(),
        )
        rows_per_epoch, efficiency, counts = 0, train.efficiency, train.counts
        said = f"streamed from {read.train.name}, {100 * efficiency:.0f}% of the first rows used"
    else:
        train, encoded = _packed(cfg, read.train, encode, pad)
        last = train if isinstance(train, PackedBatches) else train.stages[-1][1]
        rows_per_epoch, efficiency, counts = last.rows_per_epoch, last.efficiency, encoded.counts
        said = encoded.summary()
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
        "train": counts,  # of a stream: what has been read when this is written
        "heldout": heldout_encoded.counts,
        "dropped": dropped.counts,
    }
    if dist.is_main():
        print(f"train: {said}\nheldout: {heldout_encoded.summary()}", flush=True)
        if dropped:
            print(f"read: {dropped.summary()}", flush=True)
    return Data(
        train=train,
        heldout=heldout,
        heldout_records=read.heldout,
        summary=summary,
        rows_per_epoch=rows_per_epoch,
        efficiency=efficiency,
        dropped=dropped,
    )


def _packed(
    cfg: TrainConfig,
    records: list[Record],
    encode: Callable[[Sequence[Record], int], EncodedRecords],
    pad_token_id: int,
) -> tuple[PackedBatches | GrowingBatches, EncodedRecords]:
    """Return batches of records in memory, and what became of them in rows of ``data.seq_len``."""
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
            pad_token_id=pad_token_id,
            rank=dist.rank(),
            world=dist.world_size(),
        )
        stages.append((round(share * cfg.steps) * cfg.optim.accumulation, batches))
    return (batches if len(stages) == 1 else GrowingBatches(stages)), encoded


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
