r"""Score and continue texts for a harness that knows text only: strings in, strings out.

The harness lm-eval with our decoder as its model: ``python -m specheads.lm_eval_model``.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from specheads.config import ConfigError, DecodeConfig, dtype_name, export_of
from specheads.config.main import EXIT_USAGE
from specheads.data.rendering import render
from specheads.decoding.generate import SpecDecoder
from specheads.measure.quality import log_likelihood, logits_at
from specheads.models.base import context_length, end_tokens, input_device
from specheads.models.forward import groups_by_side
from specheads.models.support import tree_support
from specheads.system.terminal import stop

if TYPE_CHECKING:
    pass

Tick = Callable[[], object]
# names that tasks give the limit, and what else they may ask a generation for
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_OTHERS = ("repetition_penalty", "no_repeat_ngram_size")
_UNLIMITED = 1 << 20  # context of a model that does not say


class Harness:
    """A decoder behind the questions that lm-eval asks.

    Args:
        decoder: with a tokenizer bound.
        batch_size: rows decoded together.
        max_gen_toks: limit where a request names none.
        max_length: longest text; 0 is the base model's context.
        seed: of sampled texts; request n of a call is sampled with ``seed + n``.
        about: what stands beside the scores.

    Attributes:
        tokenizer: the base's.
        device: where token ids go.
    """

    def __init__(
        self,
        decoder: SpecDecoder,
        *,
        batch_size: int = 1,
        max_gen_toks: int = 256,
        max_length: int = 0,
        seed: int = 0,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        assert decoder.tokenizer is not None
        self.decoder, self.tokenizer = decoder, decoder.tokenizer
        self.device = input_device(decoder.base)
        self.max_gen_toks, self.seed, self.about = max_gen_toks, seed, dict(about or {})
        context = context_length(decoder.base) or _UNLIMITED
        if max_length > context:
            raise ConfigError(f"max_length is {max_length}, but the model's context is {context}")
        self.max_length = max_length or context
        self.eos = end_tokens(decoder.base, self.tokenizer)
        # a model that verifies chains only decodes its rows alone
        self.batch_size = batch_size if tree_support(decoder.base).kind == "tree" else 1
        self._lengths: list[int] = []

    def encode(self, text: str) -> list[int]:
        """Return a text's ids, with what the tokenizer puts before it unless the text has it."""
        bos = self.tokenizer.bos_token
        templated = isinstance(bos, str) and text.startswith(bos)
        ids = self.tokenizer(text, add_special_tokens=not templated, verbose=False).input_ids
        return list(ids)

    def score_continuations(
        self, pairs: Sequence[tuple[str, str]], tick: Tick = lambda: None
    ) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-likelihood, and whether it is greedy.

        Spaces at the end of a context count to the continuation, as words begin with them. An
        empty context is the token that begins texts. Where both are too long, the beginning of the
        context is left out.

        Raises:
            ValueError: for a continuation that is no token, or longer than the context.
        """
        found = []
        for context, continuation in pairs:
            before, after = self._split(context, continuation)
            found.append(self._score(before, after))
            tick()
        return found

    def score_texts(self, texts: Sequence[str], tick: Tick = lambda: None) -> list[float]:
        """Return the log-likelihood of each whole text, read in windows of the context's length.

        Every token is predicted once; the last window reaches back as far as it can.
        """
        found = []
        for text in texts:
            ids = list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
            windows = rolling_windows(ids, self._first_token(), self.max_length)
            found.append(sum(self._score(before, after)[0] for before, after in windows))
            tick()
        return found

    def generate(
        self, requests: Sequence[tuple[str, Mapping[str, Any]]], tick: Tick = lambda: None
    ) -> list[str]:
        """Continue contexts, each as its settings say, until one of their strings or the end.

        The beginning of a context that leaves no room for the new tokens is left out.

        Raises:
            ConfigError: for settings that this decoder does not have.
        """
        plans = [_plan(settings, self.max_gen_toks) for _, settings in requests]
        texts = [""] * len(requests)
        order = sorted(range(len(requests)), key=lambda n: repr(plans[n]))
        for _, alike in groupby(order, lambda n: repr(plans[n])):
            for numbers in _batches(sorted(alike), self.batch_size, plans):
                contexts = [requests[n][0] for n in numbers]
                continued = self._generate(contexts, plans[numbers[0]], self.seed + numbers[0])
                for n, text in zip(numbers, continued, strict=True):
                    texts[n] = text
                    tick()
        return texts

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Return the chat template's text; without a prompt the last message is to be gone on."""
        return render(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )[0]

    def template(self, chosen: bool | str) -> str | None:
        """Return the chat template called ``chosen``, or the only one; None for False.

        Raises:
            ConfigError: if there is none of that name.
        """
        if chosen is False or chosen is None:
            return None
        own = self.tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get(chosen if isinstance(chosen, str) else "default")
        if not isinstance(own, str):
            raise ConfigError(f"the tokenizer has no chat template {chosen!r}")
        return own

    def info(self) -> dict[str, Any]:
        """Return the arguments, and the accept length of everything generated so far."""
        steps = len(self._lengths)
        mean = sum(self._lengths) / steps if steps else None
        return {**self.about, "accept_length": mean, "num_steps": steps}

    def _first_token(self) -> int:
        bos = self.tokenizer.bos_token_id
        if isinstance(bos, int):
            return bos
        if not self.eos:
            raise ConfigError("the tokenizer has neither a bos nor an eos token to begin a text")
        return self.eos[0]

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
        if not after or len(after) > self.max_length:
            raise ValueError(
                f"a continuation must be 1 to {self.max_length} tokens, got {len(after)}"
            )
        ids = [*before, *after][-(self.max_length + 1) :]  # the last token is only predicted
        places = list(range(len(ids) - len(after) - 1, len(ids) - 1))
        log_probs, best = log_likelihood(logits_at(self.decoder.base, ids[:-1], places), after)
        return float(log_probs.double().sum()), bool(best.all())

    def _generate(self, contexts: Sequence[str], plan: dict[str, Any], seed: int) -> list[str]:
        limit, until = plan["limit"], plan["until"]
        room = self.max_length - limit
        if room < 1:
            raise ConfigError(
                f"a task asks for {limit} new tokens, but the model's context is {self.max_length}"
            )
        rows = [self.encode(context)[-room:] or [self._first_token()] for context in contexts]
        if len(groups_by_side(self.decoder.base, [(len(r), len(r) + limit) for r in rows])) > 1:
            alone = [self._generate([text], plan, seed + i) for i, text in enumerate(contexts)]
            return [text for texts in alone for text in texts]
        longest = max(map(len, rows))
        padded = [[0] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        pad = self.tokenizer.pad_token_id
        result = self.decoder.generate(
            torch.tensor(padded, device=self.device),
            limit,
            attention_mask=torch.tensor(mask, device=self.device),
            stop_strings=until or None,
            seed=seed,
            eos_token_id=list(self.eos) or None,
            pad_token_id=pad if isinstance(pad, int) else 0,
            **plan["settings"],
        )
        self._lengths += [length for row in result.rows for length in row.accept_lengths]
        return [self._text(row.new_tokens, until) for row in result.rows]

    def _text(self, tokens: list[int], until: Sequence[str]) -> str:
        text = str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
        ends = [place for term in until if (place := text.find(term)) >= 0]
        return text[: min(ends)] if ends else text


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


def _batches(
    numbers: Sequence[int], size: int, plans: Sequence[Mapping[str, Any]]
) -> Iterator[list[int]]:
    """Group neighbours; where texts are sampled, only requests whose seeds follow each other."""
    batch: list[int] = []
    for n in numbers:
        sampled = bool(plans[n]["settings"]["temperature"])
        if batch and (len(batch) == size or (sampled and n != batch[-1] + 1)):
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


def _plan(settings: Mapping[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """Return limit, stop strings and sampling of one request."""
    given = dict(settings)
    limits = [int(given.pop(key)) for key in _LIMITS if given.get(key) is not None]
    until = given.pop("until", None) or []
    until = [until] if isinstance(until, str) else list(until)
    sampled = given.pop("do_sample", None)
    temperature = float(given.get("temperature") or 0.0)
    if sampled is None:
        sampled = temperature > 0
    elif sampled and "temperature" not in given:
        temperature = 1.0
    chosen: dict[str, Any] = {"temperature": temperature if sampled else 0.0}
    if chosen["temperature"]:  # transformers' own defaults would cut the distribution
        chosen |= {"top_k": int(given.get("top_k") or 0), "top_p": float(given.get("top_p") or 1.0)}
        if given.get("min_p"):
            chosen["min_p"] = float(given["min_p"])
    chosen |= {key: given[key] for key in _OTHERS if given.get(key) is not None}
    if unknown := sorted(given.keys() - {*_LIMITS, *_SAMPLING, *_OTHERS}):
        raise ConfigError(f"a task asks generation for {unknown[0]}, which this decoder has not")
    return {
        "limit": limits[0] if limits else max_gen_toks,
        "until": [term for term in until if term],
        "settings": chosen,
    }


# MOVED

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
        pairs = [request.args for request in requests]
        with _bar(len(pairs), disable_tqdm) as bar:
            found = self.harness.score_continuations(pairs, bar.update)
        return self._kept("loglikelihood", pairs, found)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts."""
        texts = [request.args for request in requests]
        with _bar(len(texts), disable_tqdm) as bar:
            found = self.harness.score_texts([text for (text,) in texts], bar.update)
        return self._kept("loglikelihood_rolling", texts, found)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts with the drafter."""
        asked = [request.args for request in requests]
        with _bar(len(asked), disable_tqdm) as bar:
            found = self.harness.generate(asked, bar.update)
        return self._kept("generate_until", asked, found)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render few-shot examples for --apply_chat_template."""
        return self.harness.render(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template in use, which fingerprints cached requests."""
        return self.harness.template(chat_template)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for the same fingerprint."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what stands beside the scores."""
        return self.harness.info()

    def _kept(self, kind: str, requests: Sequence[tuple[Any, ...]], found: list[Any]) -> list[Any]:
        for request, each in zip(requests, found, strict=True):
            self.cache_hook.add_partial(kind, request, each)  # type: ignore[attr-defined]
        return found


def load(
    checkpoint: str = "",
    base: str = "",
    dtype: str = "auto",
    device: str | None = None,
    batch_size: int | str = 1,
    max_batch_size: int | None = None,
    max_gen_toks: int | str = 256,
    max_length: int | str = 0,
    seed: int | str = 0,
    **decode: Any,
) -> Harness:
    """Load what lm-eval's ``--model_args`` name.

    Args:
        checkpoint: an export, or a base model: a folder, a hub name, tinycode.
        base: where an export's base model is now, if it was moved.
        dtype: of the weights; auto is bfloat16 where the processor has it.
        device: of the model; None, or a GPU where there is none, takes what there is.
        batch_size: rows decoded together; ``auto`` is 8. Scored are texts one by one.
        max_batch_size: not needed; lm-eval hands it over.
        max_gen_toks: limit where a task names none.
        max_length: context; 0 is the model's own.
        seed: of the sampling, where a task samples.
        **decode: keys of ``decode``: ``drafter``, ``draft``, ``acceptance``, ``epsilon``, ...

    Raises:
        ConfigError: for arguments that are wrong, or what cannot be loaded.
    """
    import torch

    from specheads.decoding.exported import load_decoder
    from specheads.system import hardware

    pass  # MOVED

    del max_batch_size
    if not checkpoint:
        raise ConfigError("--model_args needs checkpoint=<export or base model>")
    known = {field.name: field for field in fields(DecodeConfig)}
    if unknown := sorted(decode.keys() - known.keys()):
        raise ConfigError(
            f"--model_args: unknown key {unknown[0]}; there are checkpoint, base, dtype, device,"
            f" batch_size, max_gen_toks, max_length, seed, {', '.join(known)}"
        )
    if device and device.startswith("cuda") and not torch.cuda.is_available():
        device = None  # lm-eval asks for a GPU where its user asked for nothing
    place = hardware.pick_device(device or "auto")
    hardware.quiet_loading()
    hardware.pin_threads(None)
    checkpoint = export_of(str(checkpoint))
    decoder = load_decoder(
        checkpoint,
        DecodeConfig(**{key: _typed(key, value) for key, value in decode.items()}),
        base=str(base),
        dtype=hardware.pick_dtype(dtype_name("dtype", str(dtype), "auto"), place),
        device=place,
    )
    return Harness(
        decoder,
        batch_size=8 if str(batch_size).startswith("auto") else int(batch_size),
        max_gen_toks=int(max_gen_toks),
        max_length=int(max_length),
        seed=int(seed),
        about={"checkpoint": checkpoint, "decode": decode},
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


def _bar(total: int, disable: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="request", disable=disable or None)


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
