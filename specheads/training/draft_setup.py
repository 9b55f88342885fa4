"""The draft model, its objective and its batches that the settings ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError, TrainConfig
from specheads.data.pack import PackedBatches, check_isolation
from specheads.data.teacher_cache import (
    TaughtBatches,
    TopLogits,
    TopPlan,
    plan_top_logits,
    write_top_logits,
)
from specheads.losses.cross_entropy import count_valid
from specheads.models.base import checkpoint_layers, context_length
from specheads.models.draft import (
    draft_config,
    load_draft,
    new_draft,
    num_ids,
    pruned,
    shared_vocabulary,
    spread,
    take_end_tokens,
    vocab_size,
)
from specheads.models.names import base_digest
from specheads.models.output import OutputLayer, output_layer
from specheads.models.support import tree_support
from specheads.system import hardware
from specheads.training.draft_objective import DraftObjective
from specheads.training.setup import Data, check_loss

Batch = dict[str, Any]


def check_draft(cfg: TrainConfig) -> None:
    """Refuse, before anything is loaded, settings of a draft model that contradict each other.

    Raises:
        ConfigError: naming one of the keys, what was found and what was expected.
    """
    draft, start = cfg.draft, cfg.draft.start
    if draft.hidden and start != "random":
        raise ConfigError(
            f"draft.hidden={draft.hidden} makes a new model narrower, expected draft.start=random,"
            f" got {start}"
        )
    if draft.keep and start != "base":
        raise ConfigError(
            f"draft.keep={draft.keep} names layers of the base, expected draft.start=base,"
            f" got {start}"
        )
    if start == "base" and cfg.model.quantization != "none":
        raise ConfigError(
            f"draft.start=base copies layers of the base, which model.quantization="
            f"{cfg.model.quantization} packs; expected none, or draft.start=random"
        )
    if draft.loss == "labels" and (draft.on_policy or draft.stored):
        key = "on_policy" if draft.on_policy else "stored"
        raise ConfigError(
            f"draft.{key}={getattr(draft, key)} needs the base's distribution as its teacher;"
            " draft.loss=labels learns the data's tokens"
        )
    if cfg.features.dir:
        raise ConfigError(
            f"features.dir={cfg.features.dir} keeps hidden states for heads; what a draft model"
            " learns from is kept by draft.stored"
        )
    if cfg.adapter.kind != "none":
        raise ConfigError(
            f"adapter.kind={cfg.adapter.kind} tunes the base; {cfg.recipe} trains a draft model"
        )
    zero = cfg.deepspeed.get("zero_optimization") or {}
    if draft.on_policy and zero.get("stage") == 3:
        raise ConfigError(
            f"draft.on_policy={draft.on_policy} lets the draft model write, and with"
            " deepspeed=zero3 no rank has whole weights to write with (zero2 has)"
        )
    if draft.stored and cfg.data.growth:
        raise ConfigError("draft.stored needs rows of one length; leave data.growth out")


def build_draft(
    cfg: TrainConfig, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Return the draft model of ``cfg.draft`` in float32, on this rank's device.

    Its texts end as the base's do.

    Raises:
        ConfigError: if it cannot be made or loaded, reads other tokens than the base, is too short
            for the rows, cannot keep packed documents apart, or cannot be decoded with.
    """
    wanted, attn = cfg.draft, cfg.model.attn
    if wanted.start == "random":
        draft = new_draft(draft_config(base.config, wanted.layers, wanted.hidden), attn=attn)
    elif wanted.start == "base":
        total = int(base.config.get_text_config().num_hidden_layers)
        if wanted.layers > total:
            raise ConfigError(f"draft.layers is {wanted.layers}, the base model has {total} layers")
        draft = pruned(base, wanted.keep or spread(total, wanted.layers))
    else:
        draft = load_draft(
            wanted.start,
            tokenizer=tokenizer,
            where="draft.start",
            device="cpu",
            attn=attn,
            trust_remote_code=cfg.model.trust_remote_code,
        )
    draft.to(hardware.pick_device(cfg.device))  # type: ignore[arg-type]
    shared_vocabulary(vocab_size(base), vocab_size(draft), num_ids(tokenizer))
    context = context_length(draft)
    if context is not None and cfg.data.seq_len > context:
        raise ConfigError(
            f"data.seq_len is {cfg.data.seq_len}, longer than the draft model's context of"
            f" {context}"
        )
    check_isolation(draft, backward=True)
    if not attn.startswith("flash"):  # with which nothing is decoded
        tree_support(draft)
    take_end_tokens(draft, base)
    if cfg.model.gradient_checkpointing:
        checkpoint_layers(draft)
    return draft


def draft_objective(
    cfg: TrainConfig,
    draft: PreTrainedModel,
    base: PreTrainedModel | None,
    *,
    compared: int,
    base_output: OutputLayer | None = None,
) -> DraftObjective:
    """Return the objective of ``cfg.draft`` and ``cfg.loss``.

    Args:
        cfg: the run's settings.
        draft: the draft model.
        base: the teacher; None where there is a stored one, or none is needed.
        compared: tokens over which the two are compared.
        base_output: of ``base``.

    Raises:
        ConfigError: if the loss cannot serve this model.
    """
    wanted, loss = cfg.draft, cfg.loss
    output = output_layer(draft)
    check_loss(cfg, output)
    return DraftObjective(
        draft,
        base,
        loss=wanted.loss,
        jsd_beta=wanted.jsd_beta,
        top_k=loss.top_k,
        temperature=loss.temperature,
        eta=loss.lk_eta,
        chunk_size=loss.chunk_size,
        implementation=loss.implementation,
        vocab_size=compared,
        output=output,
        base_output=base_output if base is not None else None,
    )


@torch.no_grad()
def heldout_agreement(objective: DraftObjective, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the draft model's mean figures over held-out rows.

    Args:
        objective: with the base model.
        batches: packed held-out rows (``data/pack.py``).

    Returns:
        ``loss`` and ``top1``, cross entropy and hits of the labels; ``alpha``, the mean over the
        labels of sum_x min(base, draft) at temperature 1; ``distance``, the trained loss.

    Raises:
        ValueError: if no held-out token has a label.
    """
    names = {
        "lm/loss": "loss", "lm/top1": "top1", "draft/alpha": "alpha", "draft/loss": "distance",
    }  # fmt: skip
    num_valid = sum(count_valid(batch["labels"], batch["segment_ids"], 0) for batch in batches)
    if not isinstance(num_valid, Tensor) or not num_valid.any():
        raise ValueError(f"batches hold no learned token in {len(batches)} batches")
    device, training = next(objective.draft.parameters()).device, objective.training
    total = dict.fromkeys(names.values(), 0.0)
    objective.eval()
    try:
        for batch in batches:
            placed = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            _, metrics = objective({**placed, "num_valid": num_valid.to(device)})
            for key, name in names.items():
                total[name] += float(metrics[key])
    finally:
        objective.train(training)
    return total


@dataclass(frozen=True)
class _StandIn:
    """Batches with a teacher that says nothing: what a stored one costs that is not written yet."""

    batches: PackedBatches
    top_k: int

    def __next__(self) -> Batch:
        batch = next(self.batches)
        ids = torch.arange(self.top_k).expand(*batch["input_ids"].shape, -1)
        share = torch.full(ids.shape, 1 / (self.top_k + 1)).log()
        return {**batch, "teacher_ids": ids.clone(), "teacher_log_probs": share}

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state)


class StoredTeacher:
    """The base's most likely tokens at every training position, in ``draft.stored``.

    Args:
        cfg: the run's settings.
        base: the base model, as the settings load it.
        output: its output layer.
        data: the run's data, with rows of one length.
        compared: tokens over which base and draft are compared.

    Raises:
        ConfigError: if the folder was made of something else.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        base: PreTrainedModel,
        output: OutputLayer,
        data: Data,
        *,
        compared: int,
    ) -> None:
        assert isinstance(data.train, PackedBatches)  # check_draft has seen to it
        self.cfg, self.base, self.output, self.batches = cfg, base, output, data.train
        self.plan: TopPlan = plan_top_logits(
            Path(cfg.draft.stored).expanduser(),
            data.train.documents,
            base=base_digest(cfg.model.name, revision=cfg.model.revision),
            computed=f"{cfg.model.dtype}, quantization {cfg.model.quantization},"
            f" autocast {cfg.autocast}",
            vocab_size=compared,
            top_k=cfg.draft.stored_top_k,
        )

    def describe(self) -> str:
        """Return one line: what is stored, how large it is, where, and how much is missing."""
        return self.plan.describe()

    def open(self) -> TaughtBatches:
        """Write what is missing, and return the batches that carry it.

        Raises:
            ConfigError: if the disk has too little room, or a file of the folder is damaged.
            RunError: if the disk fills up; what is finished stays, and the next run goes on there.
        """
        write_top_logits(
            self.plan,
            self.batches.documents,
            self.base,
            self.output,
            seq_len=self.batches.seq_len,
            rows=self.batches.rows,
            autocast=self.cfg.autocast == "bfloat16",
        )
        return TaughtBatches(self.batches, TopLogits(self.plan))

    def stand_in(self) -> _StandIn:
        """Return batches as those of :meth:`open`; nothing is written and the base is not run."""
        return _StandIn(self.batches, self.cfg.draft.stored_top_k)
