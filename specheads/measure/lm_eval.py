r"""The harness lm-eval with our decoder as its model: ``python -m specheads.lm_eval_model``.

::

    python -m specheads.lm_eval_model --model specheads --tasks gsm8k \
        --model_args checkpoint=runs/medusa2/export,acceptance=lossy_typical

Everything behind the module's name is lm-eval's own command line; this registers the model
``specheads`` first. ``generate_until`` goes through the drafter and the acceptance rule that the
arguments name, so that a task's score says what a tuned base or a lossy rule costs; likelihoods are
the base model's own. In Python: ``register()``, or ``SpecheadsLM`` of this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from specheads.config import ConfigError, DecodeConfig, dtype_name, export_of
from specheads.config.main import EXIT_USAGE
from specheads.system.terminal import stop

if TYPE_CHECKING:
    from specheads.measure.harness import Harness

NAME = "specheads"
_MISSING = "lm-eval is not installed: pip install lm-eval"


class _Methods:
    """The three methods of lm-eval's LM, in terms of text; made a subclass of it when asked for."""

    harness: Harness
    tokenizer: Any

    def __init__(self, **arguments: Any) -> None:
        """Load; see :func:`load`."""
        super().__init__()
        self.harness = load(**arguments)
        self.tokenizer = self.harness.tokenizer
        self._device = self.harness.device

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Score continuations."""
        return self._run("loglikelihood", requests, disable_tqdm, self.harness.score_continuations)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts."""

        def score(asked: Sequence[tuple[str]], tick: Any) -> list[float]:
            return self.harness.score_texts([text for (text,) in asked], tick)

        return self._run("loglikelihood_rolling", requests, disable_tqdm, score)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts with the drafter."""
        return self._run("generate_until", requests, disable_tqdm, self.harness.generate)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render few-shot examples for --apply_chat_template; a last answer is to be gone on."""
        from specheads.data.rendering import render

        prompt = add_generation_prompt
        return render(
            self.tokenizer,
            chat_history,
            add_generation_prompt=prompt,
            continue_final_message=not prompt,
        )[0]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template in use, which fingerprints cached requests; None for False.

        Raises:
            ConfigError: if there is none of that name.
        """
        if chat_template is False or chat_template is None:
            return None
        own = self.tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get(chat_template if isinstance(chat_template, str) else "default")
        if not isinstance(own, str):
            raise ConfigError(f"the tokenizer has no chat template {chat_template!r}")
        return own

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for the same fingerprint."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what stands beside the scores."""
        return self.harness.info()

    def _run(
        self, kind: str, requests: Sequence[Any], quiet: bool, ask: Callable[..., list[Any]]
    ) -> list[Any]:
        from tqdm import tqdm

        asked = [request.args for request in requests]
        with tqdm(total=len(asked), unit="request", disable=quiet or None) as bar:
            found = ask(asked, bar.update)
        for request, each in zip(asked, found, strict=True):
            self.cache_hook.add_partial(kind, request, each)  # type: ignore[attr-defined]
        return found


# what load takes beside the keys of decode
_ARGUMENTS = {
    "checkpoint": "",
    "base": "",
    "dtype": "auto",
    "device": None,
    "batch_size": 1,
    "max_gen_toks": 256,
    "max_length": 0,
    "seed": 0,
}


def load(checkpoint: str = "", *, max_batch_size: Any = None, **arguments: Any) -> Harness:
    """Load what lm-eval's ``--model_args`` name.

    Args:
        checkpoint: an export, or a base model: a folder, a hub name, tinycode.
        max_batch_size: not needed; lm-eval hands it over.
        **arguments: ``base``: where an export's base model is now, if it was moved. ``dtype``: of
            the weights; auto is bfloat16 where the processor has it. ``device``: of the model;
            None, or a GPU where there is none, takes what there is. ``batch_size``: rows decoded
            together; ``auto`` is 8. Scored are texts one by one. ``max_gen_toks``: limit where a
            task names none. ``max_length``: context; 0 is the model's own. ``seed``: of the
            sampling, where a task samples. And keys of ``decode``: ``drafter``, ``draft``,
            ``acceptance``, ``epsilon``, ...

    Raises:
        ConfigError: for arguments that are wrong, or what cannot be loaded.
    """
    import torch

    from specheads.decoding.exported import load_decoder
    from specheads.measure.harness import Harness
    from specheads.system import hardware

    del max_batch_size
    if not checkpoint:
        raise ConfigError("--model_args needs checkpoint=<export or base model>")
    given = _ARGUMENTS | arguments
    decode = {key: value for key, value in arguments.items() if key not in _ARGUMENTS}
    known = {field.name: field for field in fields(DecodeConfig)}
    if unknown := sorted(decode.keys() - known.keys()):
        raise ConfigError(
            f"--model_args: unknown key {unknown[0]}; there are {', '.join([*_ARGUMENTS, *known])}"
        )
    device = str(given["device"] or "auto")
    if device.startswith("cuda") and not torch.cuda.is_available():
        device = "auto"  # lm-eval asks for a GPU where its user asked for nothing
    place = hardware.pick_device(device)
    hardware.quiet_loading()
    hardware.pin_threads(None)
    checkpoint, batch_size = export_of(str(checkpoint)), str(given["batch_size"])
    decoder = load_decoder(
        checkpoint,
        DecodeConfig(**{key: _typed(key, value) for key, value in decode.items()}),
        base=str(given["base"]),
        dtype=hardware.pick_dtype(dtype_name("dtype", str(given["dtype"]), "auto"), place),
        device=place,
    )
    return Harness(
        decoder,
        batch_size=8 if batch_size.startswith("auto") else int(batch_size),
        about={"checkpoint": checkpoint, "decode": decode},
        **{key: int(given[key]) for key in ("max_gen_toks", "max_length", "seed")},
    )


def _typed(key: str, value: Any) -> Any:
    """Return a value of ``--model_args`` as the setting's own type; lm-eval guesses."""
    default = getattr(DecodeConfig(), key)
    if isinstance(default, bool):
        if str(value).lower() not in ("true", "false"):
            raise ConfigError(f"--model_args: {key} must be true or false, got {value!r}")
        return str(value).lower() == "true"
    try:
        return type(default)(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"--model_args: {key} must be a {type(default).__name__}, got {value!r}"
        ) from None


def register() -> type:
    """Make ``--model specheads`` known to lm-eval, and return its class.

    Raises:
        ConfigError: if lm-eval is not installed.
    """
    try:
        model = importlib.import_module("lm_eval.api.model")
        registry = importlib.import_module("lm_eval.api.registry")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ConfigError(_MISSING) from None
    known = globals().get("_registered")
    if known is None or not issubclass(known, model.LM):
        known = type("SpecheadsLM", (_Methods, model.LM), {"__doc__": _Methods.__doc__})
        known = registry.register_model(NAME)(known)
        globals()["_registered"] = known
    assert isinstance(known, type)
    return known


def __getattr__(name: str) -> Any:
    if name == "SpecheadsLM":  # for lm-eval's own table of "module:class"
        return register()
    raise AttributeError(f"module {__name__} has no attribute {name}")


def main() -> None:
    """Entry point: register, then lm-eval's own command line."""
    try:
        register()
        importlib.import_module("lm_eval.__main__").cli_evaluate()
    except ConfigError as error:
        stop(str(error), EXIT_USAGE)


if __name__ == "__main__":
    # run as a script this module has another name, under which nothing imports it
    importlib.import_module("specheads.measure.lm_eval").main()
