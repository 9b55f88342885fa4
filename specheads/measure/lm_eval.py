r"""The harness lm-eval with our decoder as its model: ``python -m specheads.measure.lm_eval``.

::

    python -m specheads.measure.lm_eval --model specheads --tasks gsm8k \
        --model_args checkpoint=runs/medusa2/export,acceptance=lossy_typical

Everything behind the module's name is lm-eval's own command line; this registers the model
``specheads`` first. It is lm-eval's model ``hf`` over our base model, but that texts are written by
the drafter and the acceptance rule that the arguments name, so that a task's score says what a
tuned base or a lossy rule costs; likelihoods are the base model's own. In Python: ``register()``,
or ``SpecheadsLM`` of this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specheads.config import ConfigError, DecodeConfig, dtype_name, export_of
from specheads.config.commands import TextSettings
from specheads.config.compose import to_config
from specheads.decoding.generate import SpecDecoder, decode_many
from specheads.models.base import context_length
from specheads.system import hardware
from specheads.system.errors import EXIT_USAGE
from specheads.system.terminal import stop as stop_with

NAME = "specheads"
# what tasks may ask a generation for, beside its limit, its ends and whether it is sampled
_SETTINGS = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size",
}  # fmt: skip
_UNLIMITED = 1 << 20  # context of a model that does not say
# what --model_args may name beside the keys of decode
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


class _Methods:
    """What our model does otherwise than lm-eval's HFLM; made a subclass of it when asked for.

    Args:
        max_batch_size: not needed; lm-eval hands it over.
        **arguments: ``checkpoint``: an export, or a base model: a folder, a hub name, tinycode.
            ``base``: where an export's base model is now, if it was moved. ``dtype``: of the
            weights; auto is bfloat16 where the processor has it. ``device``: of the model; None, or
            a GPU where there is none, takes what there is. ``batch_size``: rows decoded or scored
            together; ``auto`` is 8. ``max_gen_toks``: limit where a task names none.
            ``max_length``: context; 0 is the model's own. ``seed``: text n that is written is
            sampled with ``seed + n``, where a task samples. And keys of ``decode``: ``drafter``,
            ``draft``, ``acceptance``, ``epsilon``, ...

    Raises:
        ConfigError: for arguments that are wrong, or what cannot be loaded.
    """

    def __init__(self, *, max_batch_size: Any = None, **arguments: Any) -> None:
        from omegaconf import OmegaConf

        del max_batch_size
        given = _ARGUMENTS | arguments
        if not given["checkpoint"]:
            raise ConfigError("--model_args needs checkpoint=<export or base model>")
        decode = {key: value for key, value in arguments.items() if key not in _ARGUMENTS}
        device = str(given["device"] or "auto")
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "auto"  # lm-eval asks for a GPU where its user asked for nothing
        named = dtype_name("dtype", str(given["dtype"]), "auto")
        place, dtype, _ = hardware.prepare(device, named)
        checkpoint, batch_size = export_of(str(given["checkpoint"])), str(given["batch_size"])
        chosen = to_config(OmegaConf.create(decode), DecodeConfig)
        self.decoder = SpecDecoder.from_pretrained(
            checkpoint, chosen, base=str(given["base"]), dtype=dtype, device=place
        )
        context = context_length(self.decoder.base) or _UNLIMITED
        length = int(given["max_length"])
        if length > context:
            raise ConfigError(f"max_length is {length}, but the model's context is {context}")
        own: dict[str, Any] = {"tokenizer": self.decoder.tokenizer, "max_length": length or context}
        own["batch_size"] = 8 if batch_size.startswith("auto") else int(batch_size)
        super().__init__(pretrained=self.decoder.base, **own)  # type: ignore[call-arg]
        self.max_gen_toks, self._seed = int(given["max_gen_toks"]), int(given["seed"])
        self._about = {"checkpoint": checkpoint, "decode": decode}
        self._lengths: list[int] = []

    max_gen_toks = 0  # of HFLM a property that always says 256

    def get_model_info(self) -> dict[str, Any]:
        """Return the arguments, and the accept length of everything generated so far."""
        steps = len(self._lengths)
        mean = sum(self._lengths) / steps if steps else None
        return {**self._about, "accept_length": mean, "num_steps": steps}

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: Sequence[str],
        *,
        attention_mask: Tensor,
        do_sample: bool = False,
        **settings: Any,
    ) -> Tensor:
        """Continue a batch [B, P] with the drafter; return it with what was written behind it."""
        given = {key: value for key, value in settings.items() if value is not None}
        if unknown := sorted(given.keys() - _SETTINGS):
            raise ConfigError(
                f"a task asks generation for {unknown[0]}, which this decoder has not"
            )
        given["temperature"] = given.get("temperature", 1.0) if do_sample else 0.0
        # transformers' own defaults would cut the distribution: what is not said is not done
        drawn = TextSettings(checkpoint="", seed=self._seed, **given)
        self._seed += len(context)
        rows = [
            ids[seen.bool()].tolist() for ids, seen in zip(context, attention_mask, strict=True)
        ]
        tokenizer: Any = self.decoder.tokenizer
        ends = [
            each for each in stop if each != tokenizer.eos_token
        ] or None  # which ends it anyway
        limit = max_length - context.shape[1]
        written = []
        for row in decode_many(self.decoder, drawn, rows, limit, len(rows), stop_strings=ends):
            self._lengths += row.accept_lengths
            written.append(torch.tensor(row.new_tokens))
        new = pad_sequence(written, batch_first=True, padding_value=tokenizer.pad_token_id)
        return torch.cat([context, new.to(context.device)], dim=1)


@cache
def register() -> type:
    """Make ``--model specheads`` known to lm-eval, and return its class.

    Raises:
        ConfigError: if lm-eval is not installed.
    """
    try:
        hf = importlib.import_module("lm_eval.models.huggingface")
        registry = importlib.import_module("lm_eval.api.registry")
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "accelerate"):
            raise
        raise ConfigError("lm-eval is not installed: pip install 'lm-eval[hf]'") from None
    made = type("SpecheadsLM", (_Methods, hf.HFLM), {"__doc__": _Methods.__doc__})
    registered: type = registry.register_model(NAME)(made)
    return registered


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
        stop_with(str(error), EXIT_USAGE)


if __name__ == "__main__":
    main()
