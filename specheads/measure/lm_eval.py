r"""The harness lm-eval with our decoder as its model: ``python -m specheads.measure.lm_eval``.

::

    python -m specheads.measure.lm_eval --model specheads --tasks gsm8k \
        --model_args checkpoint=runs/medusa2/export,acceptance=lossy_typical

Everything behind the module's name is lm-eval's own command line; this registers the model
``specheads`` first. ``generate_until`` goes through the drafter and the acceptance rule that the
arguments name, so that a task's score says what a tuned base or a lossy rule costs; likelihoods are
the base model's own. In Python: ``register()``, or ``SpecheadsLM`` of this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import groupby
from typing import Any

import torch
from tqdm import tqdm

from specheads.config import ConfigError, DecodeConfig, dtype_name, export_of
from specheads.config.commands import TextSettings
from specheads.data.rendering import render
from specheads.decoding.conversation import text_of
from specheads.decoding.generate import SpecDecoder, decode_many
from specheads.measure.quality import log_likelihood, logits_at
from specheads.models.base import context_length, end_tokens
from specheads.system import hardware
from specheads.system.errors import EXIT_USAGE
from specheads.system.terminal import stop

NAME = "specheads"
# names that tasks give the limit, and what else they may ask a generation for
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OTHERS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size",
)  # fmt: skip
Plan = tuple[TextSettings, list[str]]  # limit and sampling, and stop strings
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
    """The methods of lm-eval's LM over our decoder; made a subclass of it when asked for.

    Args:
        max_batch_size: not needed; lm-eval hands it over.
        **arguments: ``checkpoint``: an export, or a base model: a folder, a hub name, tinycode.
            ``base``: where an export's base model is now, if it was moved. ``dtype``: of the
            weights; auto is bfloat16 where the processor has it. ``device``: of the model; None, or
            a GPU where there is none, takes what there is. ``batch_size``: rows decoded together;
            ``auto`` is 8. Scored are texts one by one. ``max_gen_toks``: limit where a task names
            none. ``max_length``: context; 0 is the model's own. ``seed``: request n of a call is
            sampled with ``seed + n``, where a task samples. And keys of ``decode``: ``drafter``,
            ``draft``, ``acceptance``, ``epsilon``, ...

    Raises:
        ConfigError: for arguments that are wrong, or what cannot be loaded.
    """

    def __init__(self, *, max_batch_size: Any = None, **arguments: Any) -> None:
        super().__init__()
        del max_batch_size
        given = _ARGUMENTS | arguments
        if not given["checkpoint"]:
            raise ConfigError("--model_args needs checkpoint=<export or base model>")
        decode = {key: value for key, value in arguments.items() if key not in _ARGUMENTS}
        known = {field.name: field for field in fields(DecodeConfig)}
        if unknown := sorted(decode.keys() - known.keys()):
            listed = ", ".join([*_ARGUMENTS, *known])
            raise ConfigError(f"--model_args: unknown key {unknown[0]}; there are {listed}")
        device = str(given["device"] or "auto")
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "auto"  # lm-eval asks for a GPU where its user asked for nothing
        named = dtype_name("dtype", str(given["dtype"]), "auto")
        place, dtype, _ = hardware.prepare(device, named)
        checkpoint, batch_size = export_of(str(given["checkpoint"])), str(given["batch_size"])
        chosen = DecodeConfig(**{key: _typed(key, value) for key, value in decode.items()})
        self.decoder = SpecDecoder.from_pretrained(
            checkpoint, chosen, base=str(given["base"]), dtype=dtype, device=place
        )
        assert self.decoder.tokenizer is not None
        self.base, self.tokenizer = self.decoder.base, self.decoder.tokenizer
        self._max_gen_toks, self._seed = int(given["max_gen_toks"]), int(given["seed"])
        self._about = {"checkpoint": checkpoint, "decode": decode}
        context, length = context_length(self.base) or _UNLIMITED, int(given["max_length"])
        if length > context:
            raise ConfigError(f"max_length is {length}, but the model's context is {context}")
        self._max_length = length or context
        self._eos = end_tokens(self.base, self.tokenizer)
        self._batch_size = 8 if batch_size.startswith("auto") else int(batch_size)
        self._lengths: list[int] = []

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-likelihood, and whether it is greedy.

        Spaces at the end of a context count to the continuation, as words begin with them. An
        empty context is the token that begins texts. Where both are too long, the beginning of the
        context is left out.

        Raises:
            ValueError: for a continuation that is no token, or longer than the context.
        """
        scores = (self._score(*self._split(*request.args)) for request in requests)
        return self._run("loglikelihood", requests, disable_tqdm, scores)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text, read in windows of the context's length.

        Every token is predicted once; the last window reaches back as far as it can.
        """
        scores = (self._score_whole(*request.args) for request in requests)
        return self._run("loglikelihood_rolling", requests, disable_tqdm, scores)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts with the drafter, each as its settings say.

        A text goes on until one of their strings, or the end. The beginning of a context that
        leaves no room for the new tokens is left out.

        Raises:
            ConfigError: for settings that this decoder does not have.
        """

        def write() -> Iterator[str]:
            plans = [_plan(request.args[1], self._max_gen_toks) for request in requests]
            for plan, alike in groupby(range(len(plans)), plans.__getitem__):
                numbers = list(alike)
                contexts = [requests[n].args[0] for n in numbers]
                yield from self._generate(contexts, plan, self._seed + numbers[0])

        return self._run("generate_until", requests, disable_tqdm, write())

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render few-shot examples for --apply_chat_template; a last answer is to be gone on."""
        prompt = add_generation_prompt
        how = {"add_generation_prompt": prompt, "continue_final_message": not prompt}
        return render(self.tokenizer, chat_history, **how)[0]

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
        """Return the arguments, and the accept length of everything generated so far."""
        steps = len(self._lengths)
        mean = sum(self._lengths) / steps if steps else None
        return {**self._about, "accept_length": mean, "num_steps": steps}

    def _run(
        self, kind: str, requests: Sequence[Any], quiet: bool, answers: Iterable[Any]
    ) -> list[Any]:
        """Return the answers to all requests, which come in their order."""
        found = list(tqdm(answers, total=len(requests), unit="request", disable=quiet or None))
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)  # type: ignore[attr-defined]
        return found

    def encode(self, text: str) -> list[int]:
        """Return a text's ids, with what the tokenizer puts before it unless the text has it."""
        bos = self.tokenizer.bos_token
        templated = isinstance(bos, str) and text.startswith(bos)
        ids = self.tokenizer(text, add_special_tokens=not templated, verbose=False).input_ids
        return list(ids)

    def _first_token(self) -> int:
        bos = self.tokenizer.bos_token_id
        if isinstance(bos, int):
            return bos
        if not self._eos:
            raise ConfigError("the tokenizer has neither a bos nor an eos token to begin a text")
        return self._eos[0]

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            ids = self.tokenizer(continuation, add_special_tokens=False, verbose=False).input_ids
            return [self._first_token()], list(ids)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:  # nothing but spaces
            return self._split("", continuation)
        before, whole = self.encode(context), self.encode(context + continuation)
        return before, whole[len(before) :]

    def _score(self, before: Sequence[int], after: Sequence[int]) -> tuple[float, bool]:
        if not after or len(after) > self._max_length:
            raise ValueError(
                f"a continuation must be 1 to {self._max_length} tokens, got {len(after)}"
            )
        ids = [*before, *after][-(self._max_length + 1) :]  # the last token is only predicted
        places = list(range(len(ids) - len(after) - 1, len(ids) - 1))
        log_probs, best = log_likelihood(logits_at(self.base, ids[:-1], places), after)
        return float(log_probs.double().sum()), bool(best.all())

    def _score_whole(self, text: str) -> float:
        ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        windows = rolling_windows(ids, self._first_token(), self._max_length)
        return sum(self._score(before, after)[0] for before, after in windows)

    def _generate(self, contexts: Sequence[str], plan: Plan, seed: int) -> Iterator[str]:
        settings, until = plan
        limit = settings.max_new_tokens
        room = self._max_length - limit
        if room < 1:
            raise ConfigError(
                f"a task asks for {limit} new tokens, but the model's context is {self._max_length}"
            )
        rows = [self.encode(context)[-room:] or [self._first_token()] for context in contexts]
        drawn, size, stop = replace(settings, seed=seed), self._batch_size, until or None
        for row in decode_many(self.decoder, drawn, rows, limit, size, stop_strings=stop):
            self._lengths += row.accept_lengths
            yield _before_any(text_of(self.tokenizer, row.new_tokens), until)


def _before_any(text: str, terms: Sequence[str]) -> str:
    """Return what stands before the first of ``terms``."""
    return text[: min((at for term in terms if (at := text.find(term)) >= 0), default=len(text))]


def rolling_windows(
    ids: Sequence[int], first: int, max_length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (context, tokens to predict) so that every token is predicted once.

    Args:
        ids: a text.
        first: the token before it.
        max_length: tokens that the model reads at once.
    """
    whole = [first, *ids]  # whole[i] predicts ids[i]
    for start in range(0, len(ids), max_length):
        stop = min(start + max_length, len(ids))
        yield whole[max(0, stop - max_length) : start + 1], list(ids[start:stop])


def _plan(settings: Mapping[str, Any], max_gen_toks: int) -> Plan:
    """Return limit and sampling of one request, and its stop strings."""
    given = dict(settings)
    limits = [int(given.pop(key)) for key in _LIMITS if given.get(key) is not None]
    until = given.pop("until", None) or []
    until = [until] if isinstance(until, str) else list(until)
    sampled = given.pop("do_sample", None)
    temperature = float(given.get("temperature") or 0.0)
    if sampled and "temperature" not in given:
        temperature = 1.0
    if unknown := sorted(given.keys() - {*_LIMITS, *_OTHERS}):
        raise ConfigError(f"a task asks generation for {unknown[0]}, which this decoder has not")
    drawn = TextSettings(
        checkpoint="",
        max_new_tokens=limits[0] if limits else max_gen_toks,
        temperature=0.0 if sampled is False else temperature,
        top_k=int(given.get("top_k") or 0),  # transformers' own defaults would cut the distribution
        top_p=float(given.get("top_p") or 1.0),
        min_p=float(given.get("min_p") or 0.0),
        repetition_penalty=float(given.get("repetition_penalty") or 1.0),
        no_repeat_ngram_size=int(given.get("no_repeat_ngram_size") or 0),
    )
    return drawn, [term for term in until if term]


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


@cache
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
        raise ConfigError("lm-eval is not installed: pip install lm-eval") from None
    made = type("SpecheadsLM", (_Methods, model.LM), {"__doc__": _Methods.__doc__})
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
        stop(str(error), EXIT_USAGE)


if __name__ == "__main__":
    main()
