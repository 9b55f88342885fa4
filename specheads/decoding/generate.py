"""The doors: ``SpecDecoder.generate`` and transformers' ``generate(custom_generate=decoder)``.

Example::

    decoder = SpecDecoder(base, heads_drafter(base, heads, output_layer(base), tree))
    decoder.generate(input_ids, max_new_tokens=64).sequences
    base.generate(input_ids, custom_generate=decoder, do_sample=False, max_new_tokens=64)

There is one way in: ours calls transformers' ``generate`` (half a millisecond a call), which reads
the settings, builds logits processors and stopping criteria from them, and calls back. So every
setting means here what it means there, and the same settings give the same tokens at both doors.

Which of ``generate``'s settings go with a tree of guesses, and how decoding takes them.

The commands ``generate`` and ``chat`` both decode by :func:`decode_prompts`, so that a turn of a
chat is what ``generate`` gives for the same conversation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from specheads.attention.cache import TreeCache
from specheads.config.commands import DecodeConfig, TextSettings
from specheads.decoding.accept import Acceptance
from specheads.decoding.beams import Beams
from specheads.decoding.exported import Subject, acceptance_rule, choose_drafter, load_subject
from specheads.decoding.loop import Settings, decode
from specheads.decoding.result import DecodedRow, DecodeResult, OnTokens, pad_left
from specheads.drafters.contract import Drafter
from specheads.models.base import context_length, end_tokens, input_device
from specheads.models.forward import thresholds
from specheads.models.support import tree_support
from specheads.system.errors import ConfigError, check, refuse
from specheads.verification.sampling import Sampler

Returned = Tensor | GenerateDecoderOnlyOutput | GenerateBeamDecoderOnlyOutput
# what generate() hands on for its own forward passes
_OF_A_PASS = {"position_ids", "use_cache", "logits_to_keep", "attention_mask", "past_key_values"}


def check_settings(
    config: GenerationConfig, input_ids: Tensor, model_kwargs: dict[str, Any]
) -> None:
    """Refuse what does not go with a tree of guesses.

    Args:
        config: as ``generate`` resolved it.
        input_ids: [B, P].
        model_kwargs: what else ``generate`` hands on.

    Raises:
        ValueError: one line.
    """
    mode = config.get_generation_mode()
    modes = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH
    tree, twice = "a step reads a tree of guesses", "it reads every token a second time"
    encoder = "a causal model has no encoder; repetition_penalty looks at the prompt too"
    unavailable = (
        (mode.value, mode not in modes, "the drafter proposes, the base decides"),
        ("output_attentions", config.output_attentions, tree),
        ("output_hidden_states", config.output_hidden_states, tree),
        ("guidance_scale", (config.guidance_scale or 1) != 1, twice),
        ("encoder_repetition_penalty", (config.encoder_repetition_penalty or 1) != 1, encoder),
        ("encoder_no_repeat_ngram_size", config.encoder_no_repeat_ngram_size, encoder),
    )
    refuse({f"{name} is not available: {why}": given for name, given, why in unavailable})
    cache = config.cache_implementation
    check(cache in (None, "dynamic"), "cache_implementation", cache, "'dynamic'")
    others = {name for name, value in model_kwargs.items() if value is not None} - _OF_A_PASS
    if others:
        raise ValueError(f"{', '.join(sorted(others))}: only input_ids can be continued")
    positions, mask = map(model_kwargs.get, ("position_ids", "attention_mask"))
    if positions is not None:
        mask = torch.ones_like(input_ids[:1]) if mask is None else mask.long()
        if not ((positions == mask.cumsum(-1) - 1) | (mask == 0)).all():
            raise ValueError("position_ids must count each row's tokens from 0")


def tree_cache(cache: object, keep: bool) -> TreeCache | None:
    """Return the cache to use and keep; None for one that nobody will see.

    Raises:
        ValueError: for a cache of transformers that the user has given.
    """
    if isinstance(cache, TreeCache):
        return cache
    filled = getattr(cache, "get_seq_length", int)()
    if getattr(cache, "_is_user_defined", False) or filled:
        raise ValueError(
            f"past_key_values must be a TreeCache, got {type(cache).__name__} of {filled} tokens"
        )
    return TreeCache() if keep else None


def split_rules(
    config: GenerationConfig, rules: StoppingCriteriaList
) -> tuple[int, tuple[int, ...], StoppingCriteriaList]:
    """Return what the criteria of ``generate`` say, as decoding takes it.

    Returns:
        How many tokens a padded row may have, prompt and padding included; the tokens that end a
        row; and the criteria that are neither a length nor a token.
    """
    max_length, eos, others = config.max_length, [], StoppingCriteriaList()
    for rule in rules:  # exact types: a subclass may do anything
        if type(rule) is MaxLengthCriteria:
            max_length = min(max_length, rule.max_length)
        elif type(rule) is EosTokenCriteria:
            eos += [int(token) for token in rule.eos_token_id]
        else:
            others.append(rule)
    return max_length, tuple(eos), others


@dataclass(eq=False, repr=False)
class SpecDecoder:
    """A base model and a drafter, ready to decode.

    Args:
        base: the base model; its own output is what comes out.
        drafter: proposes; changes the speed and nothing else. None decodes plainly, one token at a
            time, with the same settings.
        streamer: fed once per step, for one prompt at a time.
        seed: of the noise, for all calls; see :meth:`generate`.
        tokenizer: reads ``stop_strings``.
        acceptance: the rule by which candidates are accepted; exact if None.
        compile: compile the base's passes; the first of each shape takes a while.
        invariant: see :class:`~specheads.decoding.loop.Settings`.
        decode: is called with what was asked for, as ``generate`` reads it; a server that decodes
            later gives its own.

    ``streamer`` and ``tokenizer`` are bound here for ``base.generate(custom_generate=decoder)``, as
    transformers 5 hands neither of its own to a ``custom_generate`` callable.

    Attributes:
        last_result: the DecodeResult of the latest call, for its accept lengths.

    Raises:
        ValueError: if the base model cannot verify a tree.
    """

    base: PreTrainedModel
    drafter: Drafter | None
    streamer: BaseStreamer | None = None
    seed: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    acceptance: Acceptance | None = None
    compile: bool = field(default=False, kw_only=True)
    invariant: bool = field(default=False, kw_only=True)
    decode: Callable[..., DecodeResult] = field(default=decode, kw_only=True)
    on_tokens: OnTokens | None = field(default=None, init=False)
    last_result: DecodeResult | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.drafter is not None:
            tree_support(self.base)

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str,
        decode: DecodeConfig | None = None,
        *,
        base: str | None = None,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device = "auto",
    ) -> SpecDecoder:
        """Return a decoder with the drafter that the settings ask for.

        Args:
            checkpoint: an export, or a base model: a folder, a name on the hub, tinycode.
            decode: the settings; by default an export's heads, a base model's own suffixes.
            base: where an export's base model is now, if it was moved.
            dtype: of the weights.
            device: where they go: one of torch's, or what :func:`hardware.pick_device` knows.

        Raises:
            ConfigError: if something cannot be found or loaded.
        """
        decode = decode or DecodeConfig()
        subject = load_subject(checkpoint, base=base, dtype=dtype, device=device)
        return cls.of(subject, decode, choose_drafter(subject, decode).drafter)

    @classmethod
    def of(cls, subject: Subject, decode: DecodeConfig, drafter: Drafter | None) -> SpecDecoder:
        """Return a decoder of what is loaded, that accepts by the rule of the settings."""
        return cls(
            subject.base,
            drafter,
            tokenizer=subject.tokenizer,
            acceptance=acceptance_rule(decode),
            compile=decode.compile,
            invariant=decode.invariant,
        )

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int | None = None,
        *,
        temperature: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        streamer: BaseStreamer | None = None,
        on_tokens: OnTokens | None = None,
        **settings: Any,
    ) -> DecodeResult:
        """Decode, with the settings of transformers' ``generate``.

        What is left out is what the base's generation config says, then transformers' defaults
        (20 new tokens; ``top_k`` is 50 when sampling).

        Args:
            input_ids: [B, P], left-padded where prompts differ in length; on any device.
            max_new_tokens: limit per row; or give ``max_length``, which counts the prompt.
            temperature: 0 is greedy, more is sampling.
            tokenizer: the base's, where none was bound.
            streamer: fed once per step, for one prompt at a time; replaces the bound one.
            on_tokens: called with a row's number and its new tokens, for every row and step.
            **settings: ``seed``: same seed, same tokens, as plain decoding with it; row b draws
                what it would draw alone with ``seed + b``. None takes the decoder's seed; where
                that is None too, one is drawn from torch's generator, so that
                ``torch.manual_seed`` rules as usual.
                ``stop_strings``: end a row once its text holds one of them; they need a tokenizer.
                ``attention_mask``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``,
                ``no_repeat_ngram_size``, ``bad_words_ids``, ``min_new_tokens``, ``eos_token_id``,
                ``pad_token_id``, ``num_return_sequences``, ``logits_processor``,
                ``stopping_criteria``, ``generation_config``, any other field of it, ...
                ``past_key_values``: a TreeCache, empty or of an earlier turn of the conversation;
                give all of its tokens as ``input_ids``, and only what is new is read.
                ``num_beams``, ``length_penalty``, ``early_stopping``: transformers' beam search,
                see :mod:`specheads.decoding.beams`.
                ``output_scores``, ``output_logits``: keep them in the result, per new token [B, V].
                ``return_dict_in_generate``: keep the cache in the result, for the next turn.

        Raises:
            ValueError: for what a tree of guesses does not go with (beams that are sampled, other
                assistants, attentions, hidden states), and what ``generate`` refuses.
        """
        check(input_ids.dim() == 2, "input_ids", list(input_ids.shape), "[B, P]")
        input_ids = input_ids.to(device := input_device(self.base))
        if (mask := settings.get("attention_mask")) is not None:
            settings["attention_mask"] = mask.to(device)
        if settings.pop("assistant_model", None) is not None:
            raise ValueError("assistant_model is not available: the drafter proposes")
        if max_new_tokens is not None:
            settings["max_new_tokens"] = max_new_tokens
        if temperature is not None:
            settings.setdefault("do_sample", temperature > 0)
            if settings["do_sample"]:
                settings["temperature"] = float(temperature)
        if settings.get("output_scores") or settings.get("output_logits"):
            settings["return_dict_in_generate"] = True
        if getattr(self.base.generation_config, "stop_strings", None):
            raise ValueError(
                "base.generation_config.stop_strings would need a tokenizer that transformers does"
                " not hand on: set it to None and give stop_strings here"
            )
        config = settings.get("generation_config")
        if config is not None and config.stop_strings:  # taken out for the same reason
            settings["generation_config"] = config = copy.deepcopy(config)
            settings["stop_strings"] = settings.get("stop_strings") or config.stop_strings
            config.stop_strings = None
        call = copy.copy(self)  # so that threads may share a decoder
        call.streamer, call.on_tokens = streamer or self.streamer, on_tokens
        call.tokenizer = tokenizer or self.tokenizer
        self.last_result = None  # a kept cache would stay in memory beside the new one
        self.base.generate(input_ids, custom_generate=call, **settings)  # type: ignore[operator]
        assert call.last_result is not None
        self.last_result = call.last_result
        return self.last_result

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Returned:
        """Serve ``model.generate(..., custom_generate=self)``.

        The names in this signature matter: ``generate`` hands over those that are not its own
        decoder's (``stop_strings``, ``seed``) instead of preparing or refusing them.

        Raises:
            ValueError: for another model than the base, and as :meth:`generate` does.
        """
        config = generation_config
        if model is not self.base:
            raise ValueError("model is not the base model that this SpecDecoder was made for")
        check_settings(config, input_ids, model_kwargs)
        if self.streamer is not None and input_ids.shape[0] > 1:
            raise ValueError(f"streamer takes one prompt at a time, got {input_ids.shape[0]}")
        as_dict = bool(config.return_dict_in_generate)
        pad = config._pad_token_tensor
        if stop_strings:
            if self.tokenizer is None:
                raise ValueError("stop_strings need a tokenizer: SpecDecoder(..., tokenizer=...)")
            stopping_criteria.append(StopStringCriteria(self.tokenizer, stop_strings))
        max_length, eos, others = split_rules(config, stopping_criteria)
        self.last_result = None  # a kept cache would stay in memory beside the new one
        mask = model_kwargs.get("attention_mask")
        cache = tree_cache(model_kwargs.get("past_key_values"), as_dict)
        if (config.num_beams or 1) > 1:
            self._check_beams(config.num_beams)
            beams = Beams(model, self.drafter, input_ids, config, mask, compiled=self.compile)
            return self._returned(beams.search(logits_processor, stopping_criteria), config)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        result = self.decode(
            model,
            self.drafter,
            input_ids,
            max_new_tokens=max_length - input_ids.shape[1],
            attention_mask=mask,
            sampler=self._sampler(config, seed),
            eos_token_ids=eos,
            logits_processor=logits_processor,
            stopping_criteria=others or None,
            on_tokens=self._hand_out if self.streamer or self.on_tokens else None,
            acceptance=self.acceptance,
            cache=cache,
            pad_token_id=0 if pad is None else int(pad),
            keep_scores=as_dict and bool(config.output_scores or config.output_logits),
            compile=self.compile,
            invariant=self.invariant,
        )
        if self.streamer is not None:
            self.streamer.end()
        return self._returned(result, config)

    def _returned(self, result: DecodeResult, config: GenerationConfig) -> Returned:
        """Keep what came out, and return of it what transformers' ``generate`` does."""
        self.last_result = result
        if not config.return_dict_in_generate:
            return result.sequences
        found: dict[str, Any] = {
            "sequences": result.sequences,
            "scores": result.scores if config.output_scores else None,
            "logits": result.logits if config.output_logits else None,
            "past_key_values": result.cache,
        }
        if result.sequences_scores is None:
            return GenerateDecoderOnlyOutput(**found)
        return GenerateBeamDecoderOnlyOutput(sequences_scores=result.sequences_scores, **found)

    def _check_beams(self, num_beams: int) -> None:
        """Refuse what does not go with a search."""
        given = {
            "streamer": self.streamer,
            "on_tokens": self.on_tokens,
            "invariant": self.invariant,
            "a lossy acceptance": self.acceptance and not self.acceptance.lossless,
            "a stream": self.decode is not decode,  # which decodes later, step by step
        }
        asked = f"num_beams={num_beams}"
        refuse({f"{name} does not go with {asked}": there for name, there in given.items()})

    def _sampler(self, config: GenerationConfig, seed: int | None) -> Sampler:
        # generate() has put temperature, top-k and top-p among the processors
        if not config.do_sample:
            return Sampler()
        seed = self.seed if seed is None else seed
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        return Sampler(temperature=1.0, seed=seed)

    def _hand_out(self, row: int, tokens: list[int]) -> None:
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens))
        if self.on_tokens is not None:
            self.on_tokens(row, tokens)


class TooLongError(ConfigError):
    """A prompt that leaves no room for an answer in the base model's context."""


def room(base: PreTrainedModel, prompt: Sequence[int], name: str = "the prompt") -> int:
    """Return how many tokens the context still takes behind a prompt; ``name`` is for the error.

    Raises:
        TooLongError: if none.
    """
    context = context_length(base) or 1 << 30
    if len(prompt) >= context:
        raise TooLongError(
            f"{name} is {len(prompt)} tokens, but the base model's context is {context}"
        )
    return context - len(prompt)


def ending(decoder: SpecDecoder) -> dict[str, Any]:
    """Return what ends and what pads the texts of a decoder with a tokenizer, for ``generate``."""
    assert decoder.tokenizer is not None
    ends, pad = end_tokens(decoder.base, decoder.tokenizer), decoder.tokenizer.pad_token_id
    return {"eos_token_id": [*ends] or None, "pad_token_id": pad if isinstance(pad, int) else 0}


def decode_prompts(
    decoder: SpecDecoder,
    settings: TextSettings,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    **more: Any,
) -> DecodeResult:
    """Decode prompts together; ``generate`` and ``chat`` both come through here.

    Args:
        decoder: decodes; with its tokenizer.
        settings: how tokens are chosen.
        prompts: token ids of each row, padded here on the left.
        max_new_tokens: limit per row.
        **more: further arguments of :meth:`SpecDecoder.generate`; ``seed`` replaces the settings'.
    """
    device = decoder.base.device
    ids = [torch.tensor([[*prompt]], dtype=torch.long, device=device) for prompt in prompts]
    input_ids, mask = pad_left(ids)
    names = ["temperature", "repetition_penalty", "no_repeat_ngram_size", "seed"]
    options: dict[str, Any] = {"attention_mask": mask, **ending(decoder)}
    if settings.temperature > 0:
        names += ["top_k", "top_p"]
        options["min_p"] = settings.min_p or None
    options |= {name: getattr(settings, name) for name in names}
    return decoder.generate(input_ids, max_new_tokens, **(options | more))


def settings_of(
    decoder: SpecDecoder,
    settings: TextSettings,
    prompt: Sequence[int],
    max_new_tokens: int,
    **more: Any,
) -> Settings:
    """Return how :func:`decode_prompts` would decode one prompt, as ``generate`` reads it.

    Raises:
        ValueError: what ``generate`` refuses.
    """
    asked: list[Settings] = []

    def keep(_model: object, _drafter: object, input_ids: Tensor, **how: Any) -> DecodeResult:
        asked.append(Settings(**how))
        return DecodeResult(input_ids, 0, (DecodedRow(),))

    decode_prompts(replace(decoder, decode=keep), settings, [prompt], max_new_tokens, **more)
    return asked[0]


def decode_many(
    decoder: SpecDecoder,
    settings: TextSettings,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    **more: Any,
) -> Iterator[DecodedRow]:
    """Decode prompts in batches, as the model takes them; yield what came of each, in their order.

    Args:
        decoder: decodes; with its tokenizer.
        settings: how tokens are chosen; prompt n draws with their seed + n.
        prompts: token ids, all with room behind them (:func:`room`).
        max_new_tokens: limit of each, less where the context ends.
        batch_size: prompts of a batch at most. They are neighbours, as seeds follow each other in a
            batch, with the same limit and on the same side of the model's position thresholds.
        **more: see :func:`decode_prompts`.
    """
    base, found = decoder.base, thresholds(decoder.base)
    alike: list[tuple[int, int]] = []
    for number, prompt in enumerate(prompts):
        limit = min(max_new_tokens, room(base, prompt))
        side = found.shared_side([(len(prompt), len(prompt) + limit)])
        alike.append((limit, ~number if side is None else side))  # what crosses one is alone
    rows = batch_size if tree_support(base).kind == "tree" else 1
    for (limit, _), group in groupby(range(len(alike)), alike.__getitem__):
        members = list(group)
        for start in range(0, len(members), rows):
            batch = members[start : start + rows]
            texts, seed = [prompts[i] for i in batch], settings.seed + batch[0]
            yield from decode_prompts(decoder, settings, texts, limit, seed=seed, **more).rows
