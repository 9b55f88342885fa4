"""A device that is not the CPU, made of CPU tensors: operations that mix the two fail on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map_only

CPU = torch.device("cpu")
DEVICE = torch.device("lazy", 0)  # known to torch, and used by nothing here
_aten = torch.ops.aten
# copies, and what asks the other tensor for its shape alone
_COPIES = {_aten.copy_.default, _aten._to_copy.default, _aten.expand_as.default}
# what a GPU indexes may be told by indices on a CPU
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on DEVICE; ``held`` is it on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        """Wrap a tensor."""
        with torch.inference_mode(held.is_inference()):  # a view of a weight is a normal tensor
            found: Elsewhere = torch.Tensor._make_wrapper_subclass(
                cls,
                held.size(),
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=DEVICE,
                requires_grad=held.requires_grad,
            )
        found.held = held
        return found

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        return _run(func, args, dict(kwargs or {}))

    def tolist(self) -> Any:
        """Return the values, as a copy to the CPU has them."""
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"Elsewhere({self.held})"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    there = [each for each in given if isinstance(each, Elsewhere)]
    here = [each for each in given if not isinstance(each, Elsewhere)]
    if there and func not in _COPIES:
        strangers = [each for each in here if each.dim()]
        if func in _INDEXING and isinstance(args[0], Elsewhere):
            strangers = []
        if func.name().startswith(("aten::gather", "aten::scatter", "aten::index_select")):
            strangers = here
        if strangers:
            raise RuntimeError(f"{func} was given tensors on {DEVICE} and on the CPU")
    asked = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.device)]
    wraps = asked[0].type == DEVICE.type if asked else bool(there)
    args, kwargs = tree_map_only(torch.device, lambda _: CPU, (args, kwargs))
    if func in (_aten.copy_.default, _aten.expand_as.default):
        wraps = isinstance(args[0], Elsewhere)
    known = {id(each.held): each for each in there}
    args, kwargs = tree_map_only(Elsewhere, lambda each: each.held, (args, kwargs))
    found = func(*args, **kwargs)
    if not wraps:
        return found
    return tree_map_only(
        Tensor, lambda each: known[id(each)] if id(each) in known else Elsewhere(each), found
    )


def place() -> torch.device:
    """Return DEVICE within :func:`elsewhere`, and the CPU without."""
    return DEVICE if isinstance(_get_current_dispatch_mode(), _Mode) else CPU


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """Make DEVICE usable: tensors are made on it and moved to and from it."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(device=...) moves what it made, then
    try:
        with _Mode():
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
