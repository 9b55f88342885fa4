"""specheads: train and decode with models that emit several tokens per forward pass."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specheads.system import __version__
from specheads.system.registration import register

if TYPE_CHECKING:
    from specheads.attention.cache import TreeCache
    from specheads.decoding.generate import SpecDecoder
    from specheads.front import Comparison, Generated, Model, Piece, load, run_recipe
    from specheads.models.checkpoint import load_export

__all__ = [
    "Comparison",
    "Generated",
    "Model",
    "Piece",
    "SpecDecoder",
    "TreeCache",
    "__version__",
    "load",
    "load_export",
    "register",
    "run_recipe",
]

# torch and transformers take seconds to import: only what is used is, all of specheads.front but
_ELSEWHERE = {
    "SpecDecoder": "specheads.decoding.generate",
    "TreeCache": "specheads.attention.cache",
    "load_export": "specheads.models.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "specheads.front")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
