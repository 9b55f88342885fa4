"""Score and continue texts for a harness that knows text only: strings in, strings out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from specheads.config import ConfigError
from specheads.decoding.generate import SpecDecoder
from specheads.measure.clock import pad_left
from specheads.measure.quality import log_likelihood, logits_at
from specheads.models.base import context_length, end_tokens, input_device
from specheads.models.forward import groups_by_side
from specheads.models.support import tree_support

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
        prompts = [torch.tensor([row], device=self.device) for row in rows]
        input_ids, attention_mask = pad_left(prompts)
        pad = self.tokenizer.pad_token_id
        result = self.decoder.generate(
            input_ids,
            limit,
            attention_mask=attention_mask,
            stop_strings=until or None,
            seed=seed,
            eos_token_id=list(self.eos) or None,
            pad_token_id=pad if isinstance(pad, int) else 0,
            **plan["settings"],
        )
        self._lengths += [length for row in result.rows for length in row.accept_lengths]
        texts = self.tokenizer.batch_decode(
            [row.new_tokens for row in result.rows],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return [_before_any(text, until) for text in texts]


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
    if sampled and "temperature" not in given:
        temperature = 1.0
    chosen: dict[str, Any] = {"temperature": 0.0 if sampled is False else temperature}
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
