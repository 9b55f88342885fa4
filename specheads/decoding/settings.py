"""Which of ``generate``'s settings go with a tree of guesses, and how decoding takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode

from specheads.kv_cache import TreeCache

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
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams must be 1, got {config.num_beams}")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"{mode.value} is not available: the drafter proposes, the base decides")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ValueError(f"{name} is not available with a tree of guesses")
    if (config.guidance_scale or 1) != 1:
        raise ValueError("guidance_scale is not available: it reads every token a second time")
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation must be 'dynamic', got {config.cache_implementation!r}:"
            " decoding brings a cache of its own"
        )
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


def longest(config: GenerationConfig, rules: StoppingCriteriaList) -> int:
    """Return how many tokens a padded row may have, prompt and padding included."""
    own = (rule for rule in rules if type(rule) is MaxLengthCriteria)
    return min([config.max_length, *(rule.max_length for rule in own)])


def eos_tokens(rules: StoppingCriteriaList) -> tuple[int, ...]:
    """Return the tokens that end a row."""
    own = (rule for rule in rules if type(rule) is EosTokenCriteria)
    return tuple(int(token) for rule in own for token in rule.eos_token_id)


def other_rules(rules: StoppingCriteriaList) -> StoppingCriteriaList:
    """Return the criteria that are neither a length nor a token."""
    own = (MaxLengthCriteria, EosTokenCriteria)  # exact types: a subclass may do anything
    return StoppingCriteriaList([rule for rule in rules if type(rule) not in own])
