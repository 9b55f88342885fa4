"""How a base model turns its last hidden states into logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
)

from specheads.config import ConfigError
from specheads.models.base import input_device, input_embedding
from specheads.models.hidden import capture_hidden


@dataclass(frozen=True)
class OutputLayer:
    """How a base model turns hidden states into logits: softcap(scale * (W z + b)).

    Attributes:
        module: the base's own output embedding, not a copy.
        scale: factor on the logits (Cohere's logit_scale, Granite's 1 / logits_scaling).
        softcap: c in c * tanh(x / c) (Gemma 2), or None.
    """

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @property
    def weight(self) -> Tensor:
        """The output matrix [V, d]."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The output bias [V], if there is one."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of ``hidden`` [..., d] as the base model would."""
        return self.finish(self.module(hidden))

    def finish(self, products: Tensor) -> Tensor:
        """Apply scale and softcap to ``products``, the output of a matrix like this one's."""
        logits = products if self.scale == 1.0 else products * self.scale
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@torch.no_grad()
def output_layer(model: PreTrainedModel) -> OutputLayer:
    """Find how ``model`` makes its logits, and check it against the model's own on a few tokens.

    Raises:
        ConfigError: if matrix, scale and softcap do not explain the model's logits.
    """
    module = model.get_output_embeddings()
    if module is None or getattr(module, "weight", None) is None:
        raise ConfigError(f"{type(model).__name__} has no output matrix that heads could use")
    embedding = input_embedding(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, embedding.shape[0], (1, 12), generator=generator)
    training = model.training
    model.eval()
    try:
        with capture_hidden(model) as captured:
            logits = model(input_ids=ids.to(input_device(model)), use_cache=False).logits.float()
        assert captured.hidden is not None
        if captured.hidden.shape[-1] != module.weight.shape[-1]:
            raise ConfigError(
                f"{type(model).__name__}: hidden states have {captured.hidden.shape[-1]} numbers,"
                f" its output matrix takes {module.weight.shape[-1]}"
            )
        products = module(captured.hidden).float().to(logits.device)
    finally:
        model.train(training)
    layers = [
        OutputLayer(module, scale, cap)
        for cap in _softcaps(model)
        for scale in _scales(model, products, logits)
    ]
    errors = [float((layer.finish(products) - logits).abs().max()) for layer in layers]
    allowed = 16 * torch.finfo(module.weight.dtype).eps * max(float(logits.abs().max()), 1e-6)
    for layer, error in zip(layers, errors, strict=True):
        if error <= allowed:  # what the config declares comes first
            return layer
    raise ConfigError(
        f"{type(model).__name__}: the logits are not scale and softcap of its output matrix"
        f" (they differ by {min(errors):.3g}, {allowed:.3g} is allowed); heads cannot use it"
    )


def _softcaps(model: PreTrainedModel) -> list[float | None]:
    config = model.config.get_text_config()
    declared = [float(cap) for name in _SOFTCAPS if (cap := getattr(config, name, None))]
    return [*declared, None]


def _scales(model: PreTrainedModel, products: Tensor, logits: Tensor) -> list[float]:
    config = model.config.get_text_config()
    scales = []
    if scale := getattr(config, "logit_scale", None):
        scales.append(float(scale))
    if divisor := getattr(config, "logits_scaling", None):
        scales.append(1.0 / float(divisor))
    # whatever else multiplies the logits shows in their ratio
    ratio = (products * logits).sum() / (products * products).sum().clamp_min(1e-30)
    return [*scales, 1.0, float(ratio)]
