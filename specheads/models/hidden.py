"""See the base model's hidden states: while it decodes, and of packed documents in training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
)

FINAL = "final"  # tap: what the base hands to its output layer, after the last norm
TRUNK = "trunk"  # tap: what the base's last layer reads


@dataclass
class Captured:
    """What :func:`capture_hidden` saw last, per tap: hidden states [B, T, d]."""

    at: dict[str, Tensor] = field(default_factory=dict)

    @property
    def hidden(self) -> Tensor:
        """Those after the final norm."""
        return self.at[FINAL]


@contextlib.contextmanager
def capture_hidden(
    model: PreTrainedModel, taps: Collection[str] = (FINAL,), *, every_thread: bool = False
) -> Iterator[Captured]:
    """Record hidden states of the model, at every forward while the context is open.

    Hooks see all positions even where logits are asked for one row only, and hold for every
    architecture; ``output_hidden_states`` would keep all layers alive.

    Args:
        model: the base model.
        taps: ``FINAL``, what it hands to its output layer, after the final norm; ``TRUNK``, what
            its last layer reads.
        every_thread: record the forwards of other threads, too, which may run the model at the
            same time. Only such hooks can be compiled.

    Raises:
        ValueError: if the model has no part below its output layer, or no layers for ``TRUNK``.
    """
    captured, thread = Captured(), threading.get_ident()

    def mine() -> bool:
        return every_thread or threading.get_ident() == thread

    def keep_final(_module: nn.Module, _args: Any, output: Any) -> None:
        if mine():
            found = output[0] if isinstance(output, tuple) else output.last_hidden_state
            captured.at[FINAL] = found

    def keep_trunk(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if mine():
            captured.at[TRUNK] = args[0] if args else kwargs["hidden_states"]

    handles = []
    if FINAL in taps:
        handles.append(_decoder(model).register_forward_hook(keep_final))
    if TRUNK in taps:
        layer = last_layer(model)
        handles.append(layer.register_forward_pre_hook(keep_trunk, with_kwargs=True))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def last_layer(model: PreTrainedModel) -> nn.Module:
    """Return the last of the decoder's layers.

    Raises:
        ValueError: if it does not keep them in a list ``layers``.
    """
    layers = getattr(_decoder(model), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise ValueError(f"{type(model).__name__} has no list of layers: its trunk is unknown")
    return layers[-1]


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm behind the decoder's layers.

    Raises:
        ValueError: if it is not called ``norm``.
    """
    norm = getattr(_decoder(model), "norm", None)
    if not isinstance(norm, nn.Module):
        raise ValueError(f"{type(model).__name__} has no final norm that is called so")
    return norm


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
    output = model.base_model(
        input_ids=input_ids.reshape(shape),
        position_ids=position_ids.reshape(shape),
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden.reshape(*input_ids.shape, -1)


def packed_taps(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, tap: str
) -> tuple[Tensor, Tensor]:
    """Return :func:`packed_hidden`, and the hidden states [B, T, d] at another tap beside it.

    Raises:
        ValueError: as :func:`capture_hidden`.
    """
    if tap == FINAL:
        hidden = packed_hidden(model, input_ids, position_ids)
        return hidden, hidden
    with capture_hidden(model, (tap,)) as captured:
        hidden = packed_hidden(model, input_ids, position_ids)
    return hidden, captured.at[tap].reshape(hidden.shape)
