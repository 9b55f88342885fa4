"""Names of modules that stand elsewhere now: they go on working for one version, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

# what people type after python -m: these two stay
_PROGRAMS = {
    "specheads.torchrun": "specheads.system.launch",
    "specheads.lm_eval_model": "specheads.measure.lm_eval",
}
# what the documents of version 0.1 named
_MOVED = {
    "specheads.acceptance": "specheads.verification.acceptance",
    "specheads.assets": "specheads.system.files",
    "specheads.decoding.deciding": "specheads.decoding.accept",
    "specheads.decoding.html_page": "specheads.measure.render",
    "specheads.decoding.markdown": "specheads.measure.render",
    "specheads.decoding.measure": "specheads.measure.clock",
    "specheads.decoding.plain": "specheads.decoding.loop",
    "specheads.dist": "specheads.system.dist",
    "specheads.drafters.hybrid": "specheads.drafters.merge",
    "specheads.drafters.made": "specheads.drafters.heads",
    "specheads.drafters.suffix": "specheads.drafters.lookup",
    "specheads.files": "specheads.system.files",
    "specheads.hardware": "specheads.system.hardware",
    "specheads.kv_cache": "specheads.attention.cache",
    "specheads.log": "specheads.runs.log",
    "specheads.sampling": "specheads.verification.sampling",
    "specheads.training.describe": "specheads.training.plan",
    "specheads.training.prepare": "specheads.training.setup",
    "specheads.training.reading": "specheads.training.setup",
    "specheads.training.schedule": "specheads.training.engine",
    "specheads.tree": "specheads.attention.tree",
}
# of these modules some names went another way than the rest
_NAMES = {"specheads.decoding.measure": {"end_tokens": "specheads.models.base"}}


class _Loader(Loader):
    """Gives the module under its new name, or its code to ``python -m``."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the new module in the place of the empty one: a class must not exist twice."""
        old = module.__name__
        new = importlib.import_module(_PROGRAMS.get(old) or _MOVED[old])
        if old not in _NAMES:
            sys.modules[old] = new
            return

        def find(name: str) -> Any:
            elsewhere = _NAMES[old].get(name)
            return getattr(importlib.import_module(elsewhere) if elsewhere else new, name)

        vars(module)["__getattr__"] = find

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the new module."""
        spec = importlib.util.find_spec(_PROGRAMS.get(name) or _MOVED[name])
        assert spec is not None and isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = _PROGRAMS.get(name) or _MOVED.get(name)
        if new is None:
            return None
        if name in _MOVED:
            # not a DeprecationWarning, which Python hides from those who run a program
            warnings.warn(
                f"{name} is {new} now; the old name goes with version 0.2",
                FutureWarning,
                stacklevel=2,
            )
        found = importlib.util.find_spec(new)  # its file is the program's name for argparse
        return ModuleSpec(name, _Loader(), origin=found.origin if found else None)


def forward_old_names() -> None:
    """Let imports and ``python -m`` find moved modules under the names they had."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
