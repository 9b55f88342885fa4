"""What every recipe starts from: records as packed rows, held-out rows, prompts to decode."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads import dist
from specheads.assets import tinycode_dir
from specheads.config import TrainConfig
from specheads.data.chat import Encoder, encode_records
from specheads.data.pack import PackedBatches, check_isolation, one_pass
from specheads.data.records import Record, load_records, read_jsonl
from specheads.models.base import (
    check_tokenizer,
    context_length,
    load_base_model,
    load_tokenizer,
)


@dataclass(frozen=True)
class Data:
    """A run's data.

    Attributes:
        train: endless micro-batches of this rank.
        heldout: packed held-out rows, always the same.
        heldout_records: the records that ``heldout`` is made of.
        summary: counts, for the export.
    """

    train: PackedBatches
    heldout: list[dict[str, Any]]
    heldout_records: list[Record]
    summary: dict[str, Any]


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


def load_base(cfg: TrainConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the base model, on this rank's device, and its tokenizer; they belong together.

    Raises:
        ConfigError: if one of them is missing or they do not fit.
    """
    model = cfg.model
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
    )
    check_tokenizer(tokenizer, base)
    return base, tokenizer


def load_data(cfg: TrainConfig, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Read, encode and pack the training and the held-out records.

    Raises:
        ConfigError: if there is nothing to learn from, or ``base`` cannot keep documents apart.
    """
    check_isolation(base)
    bars = _Bars()
    found = {split: load_records(cfg.data, split, progress=bars) for split in ("train", "heldout")}
    encoded = {
        split: encode_records(
            records,
            tokenizer,
            seq_len=cfg.data.seq_len,
            context=context_length(base),
            progress=bars,
        )
        for split, records in found.items()
    }
    pad = tokenizer.pad_token_id
    layout = {"seq_len": cfg.data.seq_len, "pad_token_id": int(pad if pad is not None else 0)}
    train = PackedBatches(
        encoded["train"].documents,
        rows=cfg.data.rows,
        seed=cfg.seed,
        rank=dist.rank(),
        world=dist.world_size(),
        **layout,
    )
    heldout = one_pass(
        encoded["heldout"].documents,
        rows=min(cfg.data.rows, 8),
        max_rows=cfg.evaluate.loss_rows,
        **layout,
    )
    summary = {
        "source": cfg.data.source,
        "path": cfg.data.path,
        "kinds": list(cfg.data.kinds),
        "seq_len": cfg.data.seq_len,
        "train": encoded["train"].counts,
        "heldout": encoded["heldout"].counts,
    }
    if dist.is_main():
        for split in ("train", "heldout"):
            print(f"{split}: {encoded[split].summary()}", flush=True)
    return Data(train, heldout, found["heldout"], summary)


def calibration_prompts(
    cfg: TrainConfig, data: Data, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> list[Tensor]:
    """Return ``evaluate.num_prompts`` prompts [1, P] to calibrate the tree on.

    They are never those of the measured set: the embedded model has a file of its own, otherwise
    they come from the held-out records.
    """
    records = data.heldout_records
    own = tinycode_dir() / "calibration.jsonl"
    if cfg.model.name == "tinycode" and cfg.data.source == "pycode" and own.is_file():
        records = read_jsonl(own)
    encoder = Encoder(tokenizer)
    longest = cfg.data.seq_len
    by_kind: dict[str, list[Tensor]] = {}
    for record in records:
        ids = encoder.prompt(record)
        if 0 < len(ids) <= longest:
            kind = by_kind.setdefault(record["kind"], [])
            if len(kind) < cfg.evaluate.num_prompts:
                kind.append(torch.tensor([ids], device=device))
    turns = [
        kind[i]
        for i in range(cfg.evaluate.num_prompts)
        for kind in by_kind.values()
        if i < len(kind)
    ]
    return turns[: cfg.evaluate.num_prompts]


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def describe_plan(cfg: TrainConfig, data: Data, **parts: nn.Module) -> str:
    """Return what a run is going to do, for ``dry_run=true`` and for the first lines of a run."""
    micro = cfg.data.rows * cfg.data.seq_len
    per_step = micro * cfg.optim.accumulation * dist.world_size()
    rows = data.train.rows_per_epoch
    epochs = cfg.steps * per_step / cfg.data.seq_len / rows
    lines = [
        f"{name}: {count_parameters(part) / 1e6:.2f} M parameters" for name, part in parts.items()
    ]
    lines.append(
        f"{cfg.steps} steps of {per_step:,} tokens ({cfg.data.rows} rows of {cfg.data.seq_len}"
        f" x {cfg.optim.accumulation} micro-batches x {dist.world_size()} processes),"
        f" {epochs:.2f} epochs of {rows:,} rows {100 * data.train.efficiency:.0f}% full"
    )
    lines.append(f"into {cfg.run_dir}")
    return "\n".join(lines)
