"""Names by which others find us: our models in transformers and vLLM, and modules that moved.

Transformers' Auto classes know our models as soon as specheads is imported, for nothing.

Registering them the documented way takes transformers and torch, several seconds, at every
``import specheads`` and so at every ``--help``. transformers has tables of names itself, from which
it imports a model's module when a folder asks for it; our names go there. It may be imported before
or after specheads: where it is not yet, a finder waits for the table, fills it, and is gone.

Modules that stand elsewhere now are found under their old names for one version, with a warning.
"""

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

CONFIGS = {
    "llama_mtp": "LlamaMtpConfig",
    "mistral_mtp": "MistralMtpConfig",
    "qwen3_mtp": "Qwen3MtpConfig",
}
_TABLE = "transformers.models.auto.configuration_auto"
_MODULE = "specheads.models.mtp_hf"


class _Deferred(ModuleType):
    """Where transformers looks for a config's class; the module that has it is imported then."""

    def __getattr__(self, name: str) -> Any:
        if name not in CONFIGS.values():
            raise AttributeError(name)
        return getattr(importlib.import_module(_MODULE), name)


class _Finder:
    """Runs :func:`_fill` once the module with the table has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_fill(module: ModuleType) -> None:
            load(module)
            _fill(module)

        # on this one loader, not on its class, which loads every module of every package
        vars(spec.loader)["exec_module"] = load_and_fill
        return spec


def _fill(table: ModuleType) -> None:
    table.CONFIG_MAPPING_NAMES.update(CONFIGS)
    for model_type in CONFIGS:
        name = f"transformers.models.{model_type}"
        sys.modules.setdefault(name, _Deferred(name))


def register() -> None:
    """Make ``AutoConfig`` and ``AutoModelForCausalLM`` find our models when a folder names one."""
    if _TABLE in sys.modules:
        _fill(sys.modules[_TABLE])
    else:
        sys.meta_path.insert(0, _Finder())


def register_vllm() -> None:
    """Make vLLM serve our models through its transformers backend; it may be called again.

    The entry point ``vllm.general_plugins`` calls this in each of vLLM's processes. vLLM looks an
    architecture up in its own registry, in the package transformers and in a config's ``auto_map``;
    the Auto classes are not asked.
    """
    from vllm.model_executor.models import ModelRegistry

    register()
    for config in CONFIGS.values():
        ModelRegistry.register_model(
            config.replace("Config", "ForCausalLM"),
            "vllm.model_executor.models.transformers:TransformersForCausalLM",
        )


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


class _Door(Loader):
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


class _Doors:
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = _PROGRAMS.get(name) or _MOVED.get(name)
        if new is None:
            return None
        if name in _MOVED:
            text = f"{name} is {new} now; the old name goes with version 0.2"
            # not a DeprecationWarning, which Python hides from those who run a program
            warnings.warn(text, FutureWarning, stacklevel=2)
        found = importlib.util.find_spec(new)  # its file is the program's name for argparse
        return ModuleSpec(name, _Door(), origin=found.origin if found else None)


def forward_old_names() -> None:
    """Let imports and ``python -m`` find moved modules under the names they had."""
    if not any(isinstance(finder, _Doors) for finder in sys.meta_path):
        sys.meta_path.append(_Doors())
