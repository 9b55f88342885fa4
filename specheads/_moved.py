"""Names of modules that stand elsewhere now: they go on working for one version, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

# what people type: these two stay
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
    "specheads.drafters.made": "specheads.drafters.growing",
    "specheads.drafters.suffix": "specheads.drafters.lookup",
    "specheads.files": "specheads.system.files",
    "specheads.hardware": "specheads.system.hardware",
    "specheads.kv_cache": "specheads.attention.cache",
    "specheads.log": "specheads.runs.log",
    "specheads.sampling": "specheads.verification.sampling",
    "specheads.training.describe": "specheads.training.plan",
    "specheads.training.prepare": "specheads.training.setup",
    "specheads.training.reading": "specheads.training.setup",
    "specheads.tree": "specheads.attention.tree",
}


class _Loader(InspectLoader):
    """Gives the module under its new name, or its code to ``python -m``."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself: a class must not exist twice."""
        module = importlib.import_module(self.new)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what importing under the old name has written on the module."""
        module.__spec__ = self.own_spec

    def get_source(self, fullname: str) -> str | None:
        """Return the source of the new module."""
        return self._found().get_source(self.new)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the new module."""
        return self._found().get_code(self.new)

    def _found(self) -> InspectLoader:
        spec = importlib.util.find_spec(self.new)
        assert spec is not None and isinstance(spec.loader, InspectLoader)
        return spec.loader


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
        found = importlib.util.find_spec(new)
        return ModuleSpec(name, _Loader(new), origin=found.origin if found else None)


def forward_old_names() -> None:
    """Let imports and ``python -m`` find moved modules under the names they had."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
