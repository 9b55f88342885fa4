"""As much of lm-eval 0.4 as our model meets: its HFLM, its registry, requests, its main."""

from __future__ import annotations

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


class HFLM:
    """lm_eval.models.huggingface.HFLM, without scores: it batches requests and cuts texts."""

    def __init__(
        self, pretrained: Any, tokenizer: Any, max_length: int, batch_size: int | str
    ) -> None:
        self.model, self.tokenizer = pretrained, tokenizer
        self.max_length, self.batch_size = max_length, int(batch_size)
        self.cache_hook = CacheHook()

    @property
    def max_gen_toks(self) -> int:
        """Limit where a task names none."""
        return 256

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Continue contexts, the longest first, those of like settings together."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].args[0]))
        alike: dict[str, list[int]] = {}
        for i in order:
            alike.setdefault(repr(requests[i].args[1]), []).append(i)
        found: dict[int, str] = {}
        for members in alike.values():
            for first in range(0, len(members), self.batch_size):
                batch = members[first : first + self.batch_size]
                found |= self._generate(batch, requests)
        return [found[i] for i in range(len(requests))]

    def _generate(self, batch: list[int], requests: list[Any]) -> dict[int, str]:
        settings = dict(requests[batch[0]].args[1])
        until = settings.pop("until", [])
        until = [*([until] if isinstance(until, str) else until), self.tokenizer.eos_token]
        limits = [settings.pop(key, None) for key in ("max_gen_toks", "max_tokens")]
        limit = next((each for each in limits if each is not None), self.max_gen_toks)
        settings.setdefault("do_sample", settings.get("temperature", 0.0) > 0)
        if not settings["do_sample"]:
            settings["temperature"] = 0.0
        room = self.max_length - limit
        assert room > 0, f"Invalid configuration: requested max tokens to generate ({limit})"
        contexts = [requests[i].args[0] for i in batch]
        self.tokenizer.padding_side = "left"
        given = self.tokenizer(contexts, padding="longest", return_tensors="pt")
        ids, mask = given.input_ids[:, -room:], given.attention_mask[:, -room:]
        whole = self._model_generate(  # type: ignore[attr-defined]
            context=ids,
            attention_mask=mask,
            stop=until,
            max_length=ids.shape[1] + limit,
            **settings,
        )
        found = {}
        for i, tokens in zip(batch, whole.tolist(), strict=True):
            text = self.tokenizer.decode(tokens[ids.shape[1] :], skip_special_tokens=True)
            for term in filter(None, until):
                text = text.split(term)[0]
            found[i] = text
            self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return found

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Any = None) -> Any:
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
            assert issubclass(cls, HFLM)
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

    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.models")}
    registry = ModuleType("lm_eval.api.registry")
    model = ModuleType("lm_eval.models.huggingface")
    program = ModuleType("lm_eval.__main__")
    model.HFLM, registry.register_model = HFLM, register_model  # type: ignore[attr-defined]
    program.cli_evaluate = cli_evaluate  # type: ignore[attr-defined]
    modules |= {each.__name__: each for each in (model, registry, program)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["specheads.measure.lm_eval"].register.cache_clear()
    return registered
