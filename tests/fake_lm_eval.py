"""As much of lm-eval 0.4 as a model meets: its base class, its registry, requests, its main."""

from __future__ import annotations

import abc
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest


class CacheHook:
    """Remembers answers, as lm-eval's does with --use_cache."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Any, Any]] = []

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """Keep one answer."""
        self.kept.append((attr, req, res))


class LM(abc.ABC):
    """lm_eval.api.model.LM: what the evaluator calls."""

    def __init__(self) -> None:
        self._rank, self._world_size, self._device = 0, 1, None
        self.cache_hook = CacheHook()

    @abc.abstractmethod
    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Score continuations of contexts."""

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Score texts."""

    @abc.abstractmethod
    def generate_until(self, requests: list[Any]) -> list[str]:
        """Continue contexts."""

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Render few-shot examples."""
        raise NotImplementedError

    @property
    def tokenizer_name(self) -> str:
        """Fingerprint a cache."""
        raise NotImplementedError

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template."""
        return ""

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Any = None) -> LM:
        """Parse --model_args as lm_eval.utils.simple_parse_args_string does."""
        pairs = dict(arg.split("=", 1) for arg in arg_string.split(",") if arg)
        more = {k: v for k, v in (additional_config or {}).items() if v is not None}
        return cls(**{key: _guess(value) for key, value in pairs.items()}, **more)


def _guess(value: str) -> Any:
    if value in ("True", "False", "true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


@dataclass
class Instance:
    """A request; ``args`` is a tuple."""

    args: tuple[Any, ...]


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Put the modules where an import finds them; return the registry, name -> class."""
    registered: dict[str, type] = {}

    def register_model(*names: str) -> Any:
        def decorate(cls: type) -> type:
            assert issubclass(cls, LM)
            for name in names:
                assert registered.get(name, cls) is cls, f"{name} is taken"
                registered[name] = cls
            return cls

        return decorate

    def cli_evaluate() -> None:
        """Make the model as the command line does, and ask it one thing."""
        given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        cls = registered[given["--model"]]
        lm = cls.create_from_arg_string(given["--model_args"], {"batch_size": 1, "device": "cpu"})
        print(lm.generate_until([Instance(("a", {"until": ["x"], "max_gen_toks": 4}))]))

    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api")}
    model, registry = ModuleType("lm_eval.api.model"), ModuleType("lm_eval.api.registry")
    program = ModuleType("lm_eval.__main__")
    model.LM, registry.register_model = LM, register_model  # type: ignore[attr-defined]
    program.cli_evaluate = cli_evaluate  # type: ignore[attr-defined]
    modules |= {each.__name__: each for each in (model, registry, program)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["specheads.measure.lm_eval"].register.cache_clear()
    return registered
