"""A base model that does not exist yet: built from ``model.init``, with a tokenizer of its own."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads import hardware
from specheads.config import ConfigError, TrainConfig
from specheads.data.tokenizers import choose_tokenizer, complete_init
from specheads.models.base import build_from_init, check_tokenizer, checkpoint_layers
from specheads.models.output import OutputLayer, output_layer
from specheads.training.prepare import check_loss, check_no_cache


def new_base(
    cfg: TrainConfig, *, fewer_layers: int = 0
) -> tuple[PreTrainedModel, OutputLayer, PreTrainedTokenizerBase]:
    """Return a randomly initialised base on this rank's device, its output layer, its tokenizer.

    Args:
        cfg: the run's settings.
        fewer_layers: layers to leave out of ``model.init``'s, because heads take their place
            (arXiv:2404.19737, section 3: as many parameters with more heads as with one).

    Raises:
        ConfigError: if a setting asks for what a new model cannot have, or too few layers are left.
    """
    _check(cfg)
    tokenizer = choose_tokenizer(cfg)
    init = complete_init(cfg.model.init, tokenizer)
    if fewer_layers:
        init = _shortened(init, fewer_layers)
    base = build_from_init(init, attn=cfg.model.attn)
    base.to(hardware.pick_device(cfg.device))  # type: ignore[arg-type]
    check_tokenizer(tokenizer, base)
    output = output_layer(base)
    check_loss(cfg, output)
    if cfg.model.gradient_checkpointing:
        checkpoint_layers(base)
    return base, output, tokenizer


def _check(cfg: TrainConfig) -> None:
    model = cfg.model
    if not model.init:
        raise ConfigError(f"{cfg.recipe} builds its model from model.init, which is empty")
    if model.dtype != "float32":
        raise ConfigError(
            f"{cfg.recipe} keeps float32 weights, got model.dtype={model.dtype}; "
            "for bfloat16 matrix products set autocast=bfloat16"
        )
    needs_another = {
        "model.quantization": (model.quantization, "none"),
        "adapter.kind": (cfg.adapter.kind, "none"),
        "heads.start": (cfg.heads.start, ""),
    }
    for key, (found, expected) in needs_another.items():
        if found != expected:
            raise ConfigError(
                f"{key}={found} starts from a model that exists; {cfg.recipe} trains a new one"
            )
    check_no_cache(cfg)


def _shortened(init: dict[str, Any], fewer: int) -> dict[str, Any]:
    layers = init.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ConfigError("model.init.num_hidden_layers is missing, which mtp.parity counts from")
    if layers - fewer < 2:
        raise ConfigError(
            f"model.init.num_hidden_layers is {layers}, of which {fewer} become heads"
            f" (mtp.num_heads - 1): {layers - fewer} left, at least 2 are needed;"
            " mtp.parity=false adds heads on top"
        )
    kept: dict[str, Any] = {"num_hidden_layers": layers - fewer}
    for key in ("layer_types", "mlp_layer_types"):
        if types := init.get(key):
            kept[key] = types[: layers - fewer]
    return {**init, **kept}
