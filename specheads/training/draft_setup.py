"""The draft model, its objective and its batches that the settings ask for."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.config import ConfigError, TrainConfig
from specheads.data.pack import check_isolation
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
from specheads.models.output import output_layer
from specheads.models.support import tree_support
from specheads.system import hardware
from specheads.training.engine import Spread
from specheads.training.setup import check_loss

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
    if draft.on_policy and Spread.from_config(cfg.deepspeed).stage == 3:
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
    check_loss(cfg.loss, output_layer(draft))
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
