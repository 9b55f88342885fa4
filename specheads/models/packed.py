"""Products of few rows with a matrix that lies in memory as a CPU's kernel reads it.

oneDNN multiplies bfloat16 in blocks of its own, and for a weight that lies as torch keeps it, it
copies these blocks together in every call. For the few rows of a decoding step that takes longer
than the product. Laid out once, by torch's ``mkldnn`` operators, a pass over one token takes three
quarters of its time and one over a tree's nodes less than two thirds, with the same bits
(``scripts/bench_packed.py``). In float32 torch asks MKL, whose products of four rows and more take
two to four times as long as those of up to three; packed they hardly take longer, with other bits.
Where all weights of a model lie in the processor's cache, oneDNN's packed products in float32 take
as long as MKL's, and those with a transposed copy three quarters of it. All this is so on Intel's
processors; on AMD's oneDNN is faster with any number of rows. The second copy needs as much memory
as the weights.
"""

from __future__ import annotations

import functools
import operator
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.system.hardware import is_amd

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
# In float32 on Intel's processors, MKL's products of fewer rows take no longer, so a plain step
# stays as it is. On AMD's they take half as long again and more.
_FEWEST_FLOAT32_ROWS = 4
# Weights of a model in float32 of at most so many bytes together lie in the cache of a processor.
_CACHED = 32 * 2**20
# With such a transposed weight, products of more rows take as long as MKL's.
_MOST_CACHED_ROWS = 48
# how often a module was told that it will learn: what was made of its weights is then void
_num_dropped = 0


class PackedLinear(nn.Linear):
    """A linear layer that multiplies with such a copy of its weight, where nothing is trained.

    The copy is made by the first pass over few rows in which no gradients are formed, of a weight
    that does not learn (``requires_grad_(False)``): an optimizer's fused step is seen by no
    counter. It is made again where the weight was replaced, moved or written to since.
    """

    _packed: tuple[tuple[int, int], Callable[[Tensor], Tensor]] | None = None
    _cached = False  # whether all weights of its model fit into the processor's cache

    def forward(self, input: Tensor) -> Tensor:  # the name that torch gives it
        """Map [..., in] to [..., out]."""
        own = self._parameters  # as attributes they are looked for elsewhere first
        weight, bias = cast(Tensor, own["weight"]), own["bias"]
        if torch.compiler.is_compiling():
            return F.linear(input, weight, bias)
        if torch.is_grad_enabled() or weight.requires_grad:
            self._packed = None
            return super().forward(input)
        if input.dtype != weight.dtype or not is_ours(weight):
            return super().forward(input)
        now = state(weight)
        if self._packed is None or self._packed[0] != now:
            if input.numel() > MOST_ROWS * self.in_features:
                return super().forward(input)
            self._packed = now, product(weight, biases=[bias], cached=self._cached)
        return self._packed[1](input)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied with the layer: the copy has no storage that could be."""
        return {key: value for key, value in self.__dict__.items() if key != "_packed"}


def pack_linears(module: nn.Module) -> None:
    """Let linear layers on a CPU multiply with packed weights, where memory allows it.

    In bfloat16 where the processor has it, and in float32 on x86, where it was measured.

    Layers of classes that compute in a way of their own stay as they are.

    Args:
        module: a model or heads, where and as they will be used; changed in place.
    """
    linears = (part for part in module.modules() if isinstance(part, nn.Linear))
    layers = [each for each in linears if type(each).forward is nn.Linear.forward]
    layers = [each for each in layers if is_ours(each.weight) and each.weight.numel() > _SMALL]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    if size <= MOST_MEMORY * _physical_memory():
        for layer in layers:
            layer.__class__ = PackedLinear
            cast(PackedLinear, layer)._cached = size <= _CACHED


def drop_packed(module: nn.Module) -> None:
    """Forget what was laid out of the module's layers: it may change and be frozen again."""
    global _num_dropped
    _num_dropped += 1
    for part in module.modules():
        if isinstance(part, PackedLinear):
            part._packed = None


def product(
    *weights: Tensor, biases: Sequence[Tensor | None] = (), cached: bool = False
) -> Callable[[Tensor], Tensor]:
    """Return the map from [..., in] to the products with weights, side by side, [..., out].

    The weights stay as they are. What it maps may have another dtype, and forms no gradient.

    Args:
        *weights: [out_i, in] each.
        biases: [out_i] each, or None for all; empty for none.
        cached: all weights of the model together fit into the processor's cache.
    """
    apart = list(zip((w.detach() for w in weights), biases or [None] * len(weights), strict=True))
    given = [bias for _, bias in apart if bias is not None]
    weight = apart[0][0] if len(apart) == 1 else torch.cat([each for each, _ in apart])
    bias = torch.cat(given) if given else None
    dtype = weight.dtype
    if not (weight.is_cpu and _has_kernel(dtype)) or weight.numel() <= _SMALL:
        return lambda x: F.linear(x.to(dtype), weight, bias)
    turned = cached and dtype == torch.float32 and not is_amd()
    most = _MOST_CACHED_ROWS * weight.shape[1]
    reorder, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    packed = weight.t().contiguous() if turned else reorder(weight.contiguous(), _FEW_ROWS)

    def multiplied(x: Tensor) -> Tensor:
        x = x.to(dtype)
        if _left_to_mkl(x) or (turned and x.numel() > most):
            # of the weights themselves: a joint one would be a copy more to keep
            found = [F.linear(x, *each) for each in apart]
            return found[0] if len(found) == 1 else torch.cat(found, dim=-1)
        if not turned:
            return cast(Tensor, multiply.default(x, packed, bias, "none", [], ""))
        return x @ packed if bias is None else x @ packed + bias

    return multiplied


class Kept:
    """What was made of some tensors, kept while they stay as they are.

    Of tensors that learn it is made anew every time, as in :class:`PackedLinear`.
    """

    def __init__(self) -> None:
        self._known: tuple[Sequence[Tensor], list[Any], Any] | None = None

    def of(self, sources: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        """Return what ``make`` makes of ``sources``, or made of them before."""
        if any(each.requires_grad or each.is_inference() for each in sources):
            return make()
        now, known = [_num_dropped, *map(state, sources)], self._known
        if known is None or known[1] != now or any(map(operator.is_not, known[0], sources)):
            self._known = known = sources, now, make()
        return known[2]

    def __reduce__(self) -> Any:
        """Return what copies are made by: they know nothing yet, and what is packed has no copy."""
        return Kept, ()


def state(weight: Tensor) -> tuple[int, int]:
    """Return what changes where a tensor moves or is written to, but by a fused optimizer."""
    return weight.data_ptr(), weight._version


@functools.cache
def _has_kernel(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return platform.machine() in ("x86_64", "AMD64")
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_ours(weight: Tensor) -> bool:
    """Say whether a weight is one that may be packed."""
    # what was made in inference mode counts no writes
    return weight.is_cpu and not weight.is_inference() and _has_kernel(weight.dtype)


def _left_to_mkl(x: Tensor) -> bool:
    """Say whether rows [..., in] are so few that MKL multiplies them as fast."""
    few = x.numel() < _FEWEST_FLOAT32_ROWS * x.shape[-1]
    return few and x.dtype == torch.float32 and not is_amd()


def _physical_memory() -> int:
    """Return the machine's memory in bytes, 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
