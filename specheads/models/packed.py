"""Products of few rows with a matrix that lies in memory as a CPU's kernel reads it.

oneDNN multiplies bfloat16 in blocks of its own, and for a weight that lies as torch keeps it, it
copies these blocks together in every call. For the few rows of a decoding step that takes longer
than the product. Laid out once, by torch's ``mkldnn`` operators, a pass over one token takes three
quarters of its time and one over a tree's nodes less than two thirds, with the same bits
(``scripts/bench_packed.py``). The second copy needs as much memory as the weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The copies may take this part of the machine's memory.
MOST_MEMORY = 1 / 8
# A pass over more rows than these does not lay weights out: it gains little, and may be the only
# kind there is, as where features are collected.
MOST_ROWS = 256
# Torch leaves products of no more multiplications than this to another library, which rounds
# otherwise; packed, a weight of no more entries would give other bits than the layer unpacked.
_SMALL = 16**3
# What oneDNN is told of the number of rows, which decides the layout; others may follow.
_FEW_ROWS = 16


class PackedLinear(nn.Linear):
    """A linear layer that multiplies with such a copy of its weight, where nothing is trained.

    The copy is made by the first pass over few rows in which no gradients are formed, of a weight
    that does not learn (``requires_grad_(False)``): an optimizer's fused step is seen by no
    counter. It is made again where the weight was replaced, moved or written to since.
    """

    _packed: tuple[tuple[int, int], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:  # the name that torch gives it
        """Map [..., in] to [..., out]."""
        if torch.compiler.is_compiling():
            return super().forward(input)
        weight = self.weight
        if torch.is_grad_enabled() or weight.requires_grad:
            self._packed = None
            return super().forward(input)
        if input.dtype != weight.dtype or not _is_ours(weight):
            return super().forward(input)
        state = weight.data_ptr(), weight._version
        if self._packed is None or self._packed[0] != state:
            if input.numel() > MOST_ROWS * self.in_features:
                return super().forward(input)
            self._packed = state, _laid_out(weight)
        return _multiplied(input, self._packed[1], self.bias)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied with the layer: the copy has no storage that could be."""
        return {key: value for key, value in self.__dict__.items() if key != "_packed"}


def pack_linears(module: nn.Module) -> None:
    """Let linear layers in bfloat16 on a CPU multiply with packed weights, where memory allows it.

    Layers of classes that compute in a way of their own stay as they are.

    Args:
        module: a model or heads, where and as they will be used; changed in place.
    """
    if not _has_kernel():
        return
    linears = (part for part in module.modules() if isinstance(part, nn.Linear))
    layers = [each for each in linears if type(each).forward is nn.Linear.forward]
    layers = [each for each in layers if _is_ours(each.weight) and each.weight.numel() > _SMALL]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    if size <= MOST_MEMORY * _physical_memory():
        for layer in layers:
            layer.__class__ = PackedLinear


def drop_packed(module: nn.Module) -> None:
    """Forget what was laid out of the module's layers: it may change and be frozen again."""
    for part in module.modules():
        if isinstance(part, PackedLinear):
            part._packed = None


def product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the map from [..., in] to the product with ``weight`` [out, in], which stays as it is.

    What it maps may have another dtype than the weight, and forms no gradient.
    """
    weight = weight.detach()
    here = weight.dtype == torch.bfloat16 and weight.is_cpu and _has_kernel()
    if not here or weight.numel() <= _SMALL:
        return lambda x: F.linear(x.to(weight.dtype), weight)
    packed = _laid_out(weight)
    return lambda x: _multiplied(x.to(weight.dtype), packed, None)


def kept_product() -> Callable[[Tensor], Callable[[Tensor], Tensor]]:
    """Return a function that does what :func:`product` does, and once for weights that are equal.

    Training writes weights in ways that no counter sees: they are compared, which takes a tenth of
    laying them out.
    """
    known: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = []

    def made(weight: Tensor) -> Callable[[Tensor], Tensor]:
        if known and known[0][0].dtype == weight.dtype and known[0][0].device == weight.device:
            if torch.equal(known[0][0], weight):
                return known[0][1]
        copy = weight.detach().clone()
        known[:] = [(copy, product(copy))]
        return known[0][1]

    return made


def _laid_out(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _FEW_ROWS)
    return packed


def _multiplied(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return made


def _has_kernel() -> bool:
    here = torch.backends.mkldnn.is_available()
    return here and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _is_ours(weight: Tensor) -> bool:
    # what was made in inference mode counts no writes
    return weight.dtype == torch.bfloat16 and weight.is_cpu and not weight.is_inference()


def _physical_memory() -> int:
    """Return the machine's memory in bytes, 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
