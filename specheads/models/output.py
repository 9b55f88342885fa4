"""The base model's hidden states and logits.

Hooks see the hidden states while the model decodes, and of packed documents in training.
:class:`OutputLayer` turns them into logits as the base does, for heads that share its matrix.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.config import ConfigError
from specheads.losses.fused import Output
from specheads.models.base import input_device, input_embedding

FINAL = "final"  # tap: what the base hands to its output layer, after the last norm
TRUNK = "trunk"  # tap: what the base's last layer reads
LAYER = "layer."  # tap: with a number from 0 on, what that layer of the base puts out


@contextlib.contextmanager
def capture_hidden(
    model: PreTrainedModel, taps: Collection[str] = (FINAL,), *, every_thread: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Record hidden states [B, T, d] by tap, at every forward while the context is open.

    Hooks see all positions even where logits are asked for one row only, and hold for every
    architecture; ``output_hidden_states`` would keep all layers alive.

    Args:
        model: the base model.
        taps: ``FINAL``, what it hands to its output layer, after the final norm; ``TRUNK``, what
            its last layer reads; ``layer.0``, ..., what that layer puts out.
        every_thread: record the forwards of other threads, too, which may run the model at the
            same time. Only such hooks can be compiled.

    Raises:
        ValueError: if the model has no part below its output layer, no list of layers, or no such
            layer; for a tap of another name.
    """
    captured: dict[str, Tensor] = {}
    thread = threading.get_ident()

    def mine() -> bool:
        return every_thread or threading.get_ident() == thread

    def keep_trunk(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if mine():
            captured[TRUNK] = args[0] if args else kwargs["hidden_states"]

    def keep(tap: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if mine():
            found = output[0] if isinstance(output, tuple) else output
            captured[tap] = found.last_hidden_state if tap == FINAL and found is output else found

    handles = []
    try:
        for tap in taps:
            if tap == TRUNK:
                last = layers_of(model)[-1]
                handles.append(last.register_forward_pre_hook(keep_trunk, with_kwargs=True))
            else:
                part = _decoder(model)
                if tap != FINAL:
                    part = layers_of(model)[layers_behind(model, [tap])[0] - 1]
                handles.append(part.register_forward_hook(partial(keep, tap)))
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers.

    Raises:
        ValueError: if it does not keep them in a list ``layers``.
    """
    layers = getattr(_decoder(model), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ValueError(f"{type(model).__name__} has no list of layers: they cannot be tapped")
    return layers


def layers_behind(model: PreTrainedModel, taps: Sequence[str]) -> list[int]:
    """Return of each tap the number of layers that its hidden states have gone through.

    Engines count so; behind the last layer ``FINAL`` is what the final norm makes of it.

    Raises:
        ValueError: as :func:`capture_hidden`.
    """
    last = len(layers_of(model))
    places = {FINAL: last, TRUNK: last - 1} | {f"{LAYER}{i}": i + 1 for i in range(last)}
    if unknown := set(taps) - places.keys():
        raise ValueError(
            f"tap {min(unknown)!r}: expected {FINAL}, {TRUNK} or {LAYER}0 to {LAYER}{last - 1}, one"
            f" of the layers of {type(model).__name__}"
        )
    return [places[tap] for tap in taps]


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm behind the decoder's layers.

    Raises:
        ValueError: if it has none of the names that transformers gives it.
    """
    decoder = _decoder(model)
    for name in ("norm", "final_layer_norm", "final_layernorm"):
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    raise ValueError(f"{type(model).__name__} has no final norm that is called so")


def _decoder(model: PreTrainedModel) -> nn.Module:
    """Return the part whose output the output layer takes."""
    # OPT's forward calls past its base_model; Llama 4 calls itself by the name of one it has not
    parts = (model.get_decoder(), model.base_model, *model.children())
    for part in parts:
        if isinstance(part, PreTrainedModel) and part is not model:
            return part
    raise ValueError(f"model {type(model).__name__} has no decoder below its output layer")


def packed_hidden(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Return the final hidden states [B, T, d] of packed rows, each document seeing only itself.

    transformers reads the documents off ``position_ids`` [B, T], which restart at 0: without a
    cache only, and with flash-attention for a single row only, so that rows are then joined.
    """
    joined = str(model.config._attn_implementation).startswith("flash")
    shape = (1, -1) if joined else input_ids.shape
    ids, positions = input_ids.reshape(shape), position_ids.reshape(shape)
    if getattr(model, "hf_device_map", None):  # they come from where the heads lie, at its end
        ids, positions = (each.to(input_device(model)) for each in (ids, positions))
    output = model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return output.last_hidden_state.reshape(*input_ids.shape, -1)


def side_by_side(hidden: Mapping[str, Tensor], taps: Sequence[str]) -> Tensor:
    """Return the hidden states of several taps, [..., d] each, as [..., number of taps * d].

    A base spread over several devices has them in several places; all come to the last one's.
    """
    if len(taps) == 1:
        return hidden[taps[0]]
    device = hidden[taps[-1]].device
    return torch.cat([hidden[tap].to(device) for tap in taps], dim=-1)


def with_final(taps: Sequence[str]) -> tuple[str, ...]:
    """Return the taps, and ``FINAL`` behind them where it is not one of them."""
    return tuple(taps) if FINAL in taps else (*taps, FINAL)


def packed_taps(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, taps: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return :func:`packed_hidden`, and the hidden states [B, T, ...] at ``taps`` side by side.

    Raises:
        ValueError: as :func:`capture_hidden`.
    """
    if tuple(taps) == (FINAL,):
        hidden = packed_hidden(model, input_ids, position_ids)
        return hidden, hidden
    with capture_hidden(model, taps) as captured:
        hidden = packed_hidden(model, input_ids, position_ids)
    return hidden, side_by_side(captured, taps).reshape(*input_ids.shape, -1)


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
        return cast(Tensor, self.module.weight)

    @property
    def bias(self) -> Tensor | None:
        """The output bias [V], if there is one."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    def parts(self) -> Output:
        """Return matrix, bias, scale and softcap as they are now, for the losses.

        To be asked at every step: ZeRO-3 gathers a matrix when it is read from its module.
        """
        return Output(self.weight, self.bias, self.scale, self.softcap)

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
        hidden = captured[FINAL]
        if hidden.shape[-1] != module.weight.shape[-1]:
            raise ConfigError(
                f"{type(model).__name__}: hidden states have {hidden.shape[-1]} numbers,"
                f" its output matrix takes {module.weight.shape[-1]}"
            )
        products = module(hidden).float().to(logits.device)
    finally:
        model.train(training)
    layers = _candidates(model, products, logits)
    errors = [float((layer.finish(products) - logits).abs().max()) for layer in layers]
    allowed = 16 * torch.finfo(module.weight.dtype).eps * max(float(logits.abs().max()), 1e-6)
    for layer, error in zip(layers, errors, strict=True):
        if error <= allowed:  # what the config declares comes first
            return layer
    raise ConfigError(
        f"{type(model).__name__}: the logits are not scale and softcap of its output matrix"
        f" (they differ by {min(errors):.3g}, {allowed:.3g} is allowed); heads cannot use it"
    )


def _candidates(model: PreTrainedModel, products: Tensor, logits: Tensor) -> list[OutputLayer]:
    """Return output layers with the scales and softcaps that may explain the logits."""
    config, module = model.config.get_text_config(), model.get_output_embeddings()
    caps = [float(cap) for name in _SOFTCAPS if (cap := getattr(config, name, None))]
    scales = []
    if scale := getattr(config, "logit_scale", None):
        scales.append(float(scale))
    if divisor := getattr(config, "logits_scaling", None):
        scales.append(1.0 / float(divisor))
    # whatever else multiplies the logits shows in their ratio
    ratio = (products * logits).sum() / (products * products).sum().clamp_min(1e-30)
    scales += [1.0, float(ratio)]
    return [OutputLayer(module, scale, cap) for cap in (*caps, None) for scale in scales]
