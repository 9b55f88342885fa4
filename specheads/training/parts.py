"""The heads and the objective that the settings ask for: what the recipes of heads share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads import hardware
from specheads.config import ConfigError, TrainConfig
from specheads.data.chat import Encoded
from specheads.data.streamed import StreamedBatches
from specheads.losses import IGNORE, count_valid
from specheads.models.checkpoint import load_heads
from specheads.models.heads import MedusaHeads
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads
from specheads.models.mtp_layer import block_config
from specheads.models.output import OutputLayer
from specheads.models.prefix import prefix_sizes
from specheads.models.quantize import METHODS, quantization_of
from specheads.training.objectives import HeadsLoss, HeadsObjective
from specheads.training.prepare import Data


def build_heads(
    cfg: TrainConfig, base: PreTrainedModel, output: OutputLayer, data: Data
) -> MedusaHeads:
    """Return the heads of ``cfg.heads`` where the base's last hidden states are.

    They start as the base, or as those of the export ``heads.start``.

    Raises:
        ConfigError: if they cannot be built for this base, or those of the export are others.
    """
    vocab_size, hidden_size = output.weight.shape
    wanted = cfg.heads
    try:
        heads = MedusaHeads(
            wanted.num_heads,
            wanted.num_layers,
            hidden_size,
            vocab_size,
            wanted.lm_head,
            rank=wanted.rank,
            num_kept=wanted.num_kept,
            markov_rank=wanted.markov_rank if wanted.correction == "markov" else 0,
            condition=wanted.condition,
            prefix=prefix_sizes(base.config) if wanted.prefix_layer else None,
        )
    except ValueError as error:
        raise ConfigError(f"heads.{error}") from None
    if wanted.start:
        _start_from(wanted.start, heads)
    else:
        kept = None
        if wanted.lm_head == "pruned":
            assert not isinstance(data.train, StreamedBatches)  # read_data has seen to it
            kept = most_frequent(data.train.documents, vocab_size, wanted.num_kept)
        heads.init_from_output(output.weight, kept)
    return heads.to(_place(output, cfg.device))


def build_mtp_heads(
    cfg: TrainConfig, base: PreTrainedModel, output: OutputLayer, *, start: str
) -> MtpHeads:
    """Return the heads of ``cfg.mtp``, ``mtp.num_heads`` - 1 layers, where the base's output is.

    Args:
        cfg: the run's settings; the heads of the export ``heads.start``, if any, come first.
        base: the base model, with or without an adapter.
        output: its output layer.
        start: ``base``, copies of its last layer, or ``random``.

    Raises:
        ConfigError: if they cannot be built for this base, or its last layer cannot be copied, or
            those of ``heads.start`` are others.
    """
    wanted = cfg.mtp
    try:
        heads = MtpHeads(
            wanted.num_heads - 1,
            block_config(base.config),
            output.weight.shape[0],
            variant=wanted.variant,
            lm_head=wanted.lm_head,
            hidden_first=wanted.hidden_first,
        )
        if cfg.heads.start:
            _start_from(cfg.heads.start, heads)
        elif start == "base":
            method = (quantization_of(base) or {"method": "nf4"})["method"]
            if method not in METHODS:
                raise ValueError(
                    f"start=base copies the base's last layer, which {method} has quantised for"
                    " good: choose mtp.start=random"
                )
            heads.init_from_base(base)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"mtp.{error}") from None
    return heads.to(_place(output, cfg.device))


def check_mtp(cfg: TrainConfig) -> None:
    """Refuse, before anything is loaded, settings of MTP heads that contradict each other.

    Raises:
        ConfigError: if an adapter has nothing to do, or a cache lacks what the heads read.
    """
    if cfg.adapter.kind != "none" and not cfg.mtp.train_base:
        raise ConfigError(
            f"adapter.kind={cfg.adapter.kind} tunes the base, which mtp.train_base=false freezes:"
            " set mtp.train_base=true"
        )
    if cfg.features.dir and not cfg.mtp.train_base and cfg.mtp.variant != "sequential":
        raise ConfigError(
            f"features.dir={cfg.features.dir} keeps the base's final hidden states; heads of"
            f" mtp.variant={cfg.mtp.variant} read its trunk, only sequential ones the final ones"
        )


def _place(output: OutputLayer, device: str) -> torch.device:
    found = output.weight.device
    return found if found.type != "meta" else hardware.pick_device(device)


def _start_from(start: str, heads: Heads) -> None:
    found = load_heads(start)
    ours, theirs = heads.state_dict(), found.state_dict()
    odd = sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape
    )
    if odd:
        sizes = [tuple(s[odd[0]].shape) if odd[0] in s else "none" for s in (theirs, ours)]
        raise ConfigError(
            f"heads.start={start} holds other heads than heads.* describes:"
            f" {odd[0]} is {sizes[0]} there, {sizes[1]} here"
        )
    if isinstance(heads, MtpHeads):  # whose tensors do not say everything
        for key in ("variant", "hidden_first"):
            if (there := getattr(found, key)) != (here := getattr(heads, key)):
                raise ConfigError(
                    f"heads.start={start} holds heads of mtp.{key}={there}, not {here}"
                )
    heads.load_state_dict(theirs)


def most_frequent(documents: Sequence[Encoded], vocab_size: int, num_kept: int) -> Tensor:
    """Return the ``num_kept`` ids that are learned most often, ties by id; [num_kept] long."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        learned = document.labels[document.labels != IGNORE]
        counts += np.bincount(learned, minlength=vocab_size)
    order = torch.from_numpy(counts).sort(descending=True, stable=True).indices
    return order[:num_kept]


def heads_objective(
    cfg: TrainConfig,
    base: PreTrainedModel | None,
    heads: Heads,
    output: OutputLayer,
    *,
    train_base: bool = False,
    embed: Any = None,
) -> HeadsObjective:
    """Return the objective of ``cfg.loss``."""
    loss = cfg.loss
    return HeadsObjective(
        base,
        heads,
        train_base=train_base,
        decay=loss.decay,
        lambda_0=loss.lambda_0,
        average=loss.average,
        heads_loss=HeadsLoss(loss.heads, loss.top_k, loss.temperature, loss.lk_eta),
        distill_base=train_base and loss.base == "distill",
        chunk_size=loss.chunk_size,
        implementation=loss.implementation,
        output=output,
        embed=embed,
    )


@torch.no_grad()
def heads_accuracy(
    base: PreTrainedModel,
    heads: Heads,
    output: OutputLayer,
    batches: Sequence[dict[str, Any]],
) -> dict[str, float]:
    """Return ``head_{i}/loss|top1|top5`` over held-out rows, each a mean over its own labels.

    The loss is cross entropy with the data's tokens, whatever the heads were trained with.

    Args:
        base: the base model as it is exported; not run where the batches carry ``hidden``.
        heads: its heads.
        output: its output layer.
        batches: packed held-out rows (``data/pack.py``).
    """
    objective = HeadsObjective(base, heads, train_base=False, output=output).eval()
    num_heads, device = heads.num_heads, output.weight.device
    num_valid = torch.stack(
        [count_valid(b["labels"], b["segment_ids"], num_heads) for b in batches]
    ).sum(0)
    total: dict[str, float] = {}
    for batch in batches:
        placed = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        _, metrics = objective({**placed, "num_valid": num_valid.to(device)})
        for key, value in metrics.items():
            if key.startswith("head_"):
                total[key] = total.get(key, 0.0) + float(value)
    return total
