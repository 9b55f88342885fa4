"""Names by which others find us: our models in transformers and vLLM.

Transformers' Auto classes know our models as soon as specheads is imported, for nothing.

Registering them the documented way takes transformers and torch, several seconds, at every
``import specheads`` and so at every ``--help``. transformers has tables of names itself, from which
it imports a model's module when a folder asks for it; our names go there. It may be imported before
or after specheads: where it is not yet, a finder waits for the table, fills it, and is gone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# our classes by their ``model_type``, as specheads.models.mtp_hf has them
CONFIGS = {f"{kind.lower()}_mtp": f"{kind}MtpConfig" for kind in ("Llama", "Mistral", "Qwen3")}
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
