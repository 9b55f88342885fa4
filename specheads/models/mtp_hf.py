"""Models with MTP heads as citizens of transformers: one config and one class per architecture.

They are the plain model, with its forward and its generate, plus either of two things. Heads of any
kind in our own form lie under ``mtp.*`` and come back as ``model.mtp``. Sequential heads in
the transformers MTP standard lie beside the base's layers and are left on disk until
``generate(use_mtp=True)`` reads them. ``import specheads`` suffices for the Auto classes to know
them, see :mod:`specheads.system.registration`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.llama import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.mistral import MistralConfig, MistralForCausalLM, MistralModel
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from specheads.config import ConfigError
from specheads.models.checkpoint import save_as
from specheads.models.mtp import MtpHeads
from specheads.system.files import whole_folder


class LlamaMtpConfig(LlamaConfig):
    """Of a Llama with MTP heads.

    Attributes:
        mtp_heads: how to build the heads under ``mtp.*``; None where there are none.
            ``from_pretrained(folder, mtp_heads=None)`` loads the model without them.
        num_mtp_layers: modules of the MTP standard; None where there are none.
    """

    model_type = "llama_mtp"
    mtp_heads: dict[str, Any] | None = None
    num_mtp_layers: int | None = None


class MistralMtpConfig(MistralConfig):
    """Of a Mistral with MTP heads; for its attributes see :class:`LlamaMtpConfig`."""

    model_type = "mistral_mtp"
    mtp_heads: dict[str, Any] | None = None
    num_mtp_layers: int | None = None

    def get_mtp_config(self) -> PreTrainedConfig:
        """Return the config of the modules, which keep the base's window."""
        config: PreTrainedConfig = super().get_mtp_config()
        if self.sliding_window is not None:
            # Mistral has no layer_types, by which alone transformers' MtpModel knows of a window
            config.layer_types = ["sliding_attention"] * config.num_hidden_layers
        return config


class Qwen3MtpConfig(Qwen3Config):
    """Of a Qwen3 with MTP heads.

    Attributes:
        mtp_heads: as in :class:`LlamaMtpConfig`.
        num_mtp_layers: as there.
        mtp_layer_types: kind of attention per module of the MTP standard.
    """

    model_type = "qwen3_mtp"
    mtp_heads: dict[str, Any] | None = None
    num_mtp_layers: int | None = None
    mtp_layer_types: list[str] | None = None


class _Decoder:
    """The decoder alone, for ``AutoModel``; heads stay on disk."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        _leave_on_disk(self, config, heads=True)


class _WithHeads:
    """A model; ``mtp`` are its heads where the config has ``mtp_heads``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        if config.mtp_heads is not None:
            self.mtp = MtpHeads.from_config(config.mtp_heads)
        _leave_on_disk(self, config, heads=config.mtp_heads is None)


class LlamaMtpModel(_Decoder, LlamaModel):
    """See :class:`_Decoder`."""

    config_class = LlamaMtpConfig


class LlamaMtpForCausalLM(_WithHeads, LlamaForCausalLM):
    """See :class:`_WithHeads`."""

    config_class = LlamaMtpConfig


class MistralMtpModel(_Decoder, MistralModel):
    """See :class:`_Decoder`."""

    config_class = MistralMtpConfig


class MistralMtpForCausalLM(_WithHeads, MistralForCausalLM):
    """See :class:`_WithHeads`."""

    config_class = MistralMtpConfig


class Qwen3MtpModel(_Decoder, Qwen3Model):
    """See :class:`_Decoder`."""

    config_class = Qwen3MtpConfig


class Qwen3MtpForCausalLM(_WithHeads, Qwen3ForCausalLM):
    """See :class:`_WithHeads`."""

    config_class = Qwen3MtpConfig


class Ours(NamedTuple):
    """The classes for one architecture with MTP heads."""

    model: type[PreTrainedModel]
    decoder: type[PreTrainedModel]
    config: type[PreTrainedConfig]


# by the type of the plain model
CLASSES = {
    "llama": Ours(LlamaMtpForCausalLM, LlamaMtpModel, LlamaMtpConfig),
    "mistral": Ours(MistralMtpForCausalLM, MistralMtpModel, MistralMtpConfig),
    "qwen3": Ours(Qwen3MtpForCausalLM, Qwen3MtpModel, Qwen3MtpConfig),
}

for _ours in CLASSES.values():
    AutoConfig.register(_ours.config.model_type, _ours.config, exist_ok=True)
    AutoModel.register(_ours.config, _ours.decoder, exist_ok=True)
    AutoModelForCausalLM.register(_ours.config, _ours.model, exist_ok=True)


def _leave_on_disk(model: Any, config: Any, *, heads: bool) -> None:
    """Name what ``model`` leaves in its files: modules of the MTP standard, and ``heads``."""
    first = config.num_hidden_layers
    # transformers finds the modules of the standard by these patterns, too: number by number
    left = {rf"^(?:model\.)?layers\.{first + k}\." for k in range(config.num_mtp_layers or 0)}
    left |= {r"^mtp\."} if heads else set()
    model._keys_to_ignore_on_load_unexpected = model._keys_to_ignore_on_load_unexpected | left


def our_config(config: PreTrainedConfig, **ours: Any) -> PreTrainedConfig:
    """Return the config of our class for a plain model's ``config``.

    Args:
        config: of type llama, mistral or qwen3.
        **ours: ``mtp_heads``, ``num_mtp_layers``, ``mtp_layer_types``.
    """
    values = config.to_dict()
    for key in ("model_type", "architectures"):
        values.pop(key, None)
    return CLASSES[config.model_type].config(**values, **ours)


def write(
    folder: str | Path, base: PreTrainedModel, heads: MtpHeads, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write base and heads as one model of our class, in the base's dtype; whole or not at all.

    ``AutoModelForCausalLM.from_pretrained(folder)`` loads both, ``mtp_heads=None`` the base alone.

    Args:
        folder: a new one, or one to replace.
        base: the plain model; an adapter is merged in what is written.
        heads: of any variant.
        tokenizer: written beside them.

    Raises:
        ConfigError: if there is no class for such a base.
        RunError: if the disk is full.
    """
    if (kind := base.config.model_type) not in CLASSES:
        known = ", ".join(CLASSES)
        raise ConfigError(
            f"format=hf: the base model is of type {kind!r}, there are classes for {known}"
        )
    extra = {f"mtp.{name}": tensor for name, tensor in heads.state_dict().items()}
    section = {k: v for k, v in heads.to_config().items() if k not in ("kind", "hidden_size")}
    config = our_config(base.config, mtp_heads=section)
    with whole_folder(Path(folder)) as fresh:
        save_as(fresh, CLASSES[kind].model, config, base, extra, tokenizer)
