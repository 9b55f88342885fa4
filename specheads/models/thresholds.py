"""Positions at which a model computes differently, and does so for a whole forward pass at once.

Most models give each token what its own position asks for, whatever else is in the pass. Two
mechanisms of transformers do not:

- ``rope_type=longrope`` (Phi-3, PhiMoE; any model may have it): the largest position of a pass
  decides whether all its tokens get the short or the long frequencies. Keys that are in the cache
  keep what they got, except that the models with a ``prepare_inputs_for_generation`` of their own
  read the text anew where it grows over the threshold.
- Llama 4's ``attn_temperature_tuning``: each ``floor_scale`` tokens the queries are scaled anew, by
  their slots in the cache, which are positions in a chain of one row only.

So no pass may have tokens on both sides of a threshold. Frequencies that grow with the text
(``rope_type=dynamic``) change beyond the model's context only, which no text may leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specheads.config import ConfigError


@dataclass(frozen=True)
class Thresholds:
    """Where the sides of a model's positions begin.

    Attributes:
        name: the setting, for messages.
        starts: the first position of each side but the first, as positions are given.
        period: if not 0, position p lies on side ``(p + 1) // period``, by slots.
    """

    name: str
    starts: tuple[int, ...] = ()
    period: int = 0

    def side(self, position: int) -> int:
        """Return the number of the side that ``position`` lies on."""
        if self.period:
            return (position + 1) // self.period
        return sum(start <= position for start in self.starts)

    def after(self, position: int) -> int | None:
        """Return the first position behind ``position`` that lies on another side."""
        if self.period:
            return (self.side(position) + 1) * self.period - 1
        return min((start for start in self.starts if start > position), default=None)

    def shared_side(self, spans: Sequence[tuple[int, int]]) -> int | None:
        """Return the side on which all tokens of all rows lie that a batch may compute together.

        Args:
            spans: per row the tokens of its prompt, and of its whole text at most.

        Returns:
            None where there are several sides.
        """
        # the last token of a text is never read, and a prompt is read as one pass
        sides = {self.side(n) for prompt, whole in spans for n in (prompt - 1, max(whole, 2) - 2)}
        return sides.pop() if len(sides) == 1 else None


def thresholds(model: PreTrainedModel) -> Thresholds | None:
    """Return the thresholds of ``model``, None for most models."""
    config = model.config.get_text_config()
    starts = set()
    for rope in _rope_settings(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in ("longrope", "su") or "long_mscale" in rope:
            name = "original_max_position_embeddings"
            starts.add(int(rope.get(name) or getattr(config, name)))
    if starts:
        found = tuple(sorted(starts))
        numbers = ", ".join(map(str, found))
        return Thresholds(f"longrope, original_max_position_embeddings={numbers}", found)
    if getattr(config, "attn_temperature_tuning", False) and getattr(config, "floor_scale", 0):
        period = int(config.floor_scale)
        return Thresholds(f"attn_temperature_tuning, floor_scale={period}", period=period)
    return None


def named_positions(model: PreTrainedModel) -> list[int]:
    """Return the positions that the config names, at which something may change; ascending."""
    config = model.config.get_text_config()
    names = ("original_max_position_embeddings", "attention_chunk_size", "sliding_window")
    values = [getattr(config, name, None) for name in (*names, "floor_scale", "keep_window_size")]
    values += [rope.get(names[0]) for rope in _rope_settings(config)]
    return sorted({int(value) for value in values if isinstance(value, int) and value > 0})


def _rope_settings(config: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of rotary embeddings, those of each type of layer too."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(rope, Mapping):
        yield rope
        yield from (own for own in rope.values() if isinstance(own, Mapping))


def groups_by_side(model: PreTrainedModel, spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the rows that may be decoded together, as their numbers; who crosses is alone.

    Args:
        model: the model.
        spans: see :meth:`Thresholds.shared_side`.
    """
    found = thresholds(model)
    if found is None:
        return [list(range(len(spans)))]
    groups: dict[object, list[int]] = {}
    for row, span in enumerate(spans):
        side = found.shared_side([span])
        groups.setdefault(("alone", row) if side is None else side, []).append(row)
    return list(groups.values())


def check_sides(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse a batch with rows on several sides of a threshold, and a text that cannot cross it.

    Raises:
        ConfigError: with the threshold and what to do.
    """
    found = thresholds(model)
    if found is None:
        return
    lengths = [len(prompt) for prompt in prompts]
    if found.shared_side([(length, length + max_new_tokens) for length in lengths]) is not None:
        return
    if len(prompts) == 1:
        last = lengths[0] + max_new_tokens - 2
        for start in found.starts:
            if lengths[0] <= start <= last:
                reads_anew(model, start)  # for its error
    else:
        raise ConfigError(
            f"{type(model).__name__} computes a whole batch differently from position"
            f" {found.after(min(lengths) - 1)} on ({found.name}), and rows of {min(lengths)} to"
            f" {max(lengths)} tokens with max_new_tokens {max_new_tokens} do not all stay on one"
            " side of it: decode them one by one (batch_size=1)"
        )


def reads_anew(model: PreTrainedModel, length: int) -> bool:
    """Tell whether ``generate`` reads the whole text again where its cache holds ``length`` tokens.

    The model itself is asked, with a text of one token more and an empty stand-in for the cache.

    Raises:
        ConfigError: where it forgets the cache and reads the last token only, or does not say.
    """
    cache, name = _Full(length), type(model).__name__
    prepare: Any = model.prepare_inputs_for_generation
    try:
        inputs = prepare(
            torch.zeros(1, length + 1, dtype=torch.long),
            past_key_values=cache,
            next_sequence_length=1,
            use_cache=True,
        )
    except Exception as error:  # whatever a model's own code may raise
        raise ConfigError(
            f"{name} does not say how it goes on where a text grows beyond {length} tokens:"
            f" {type(error).__name__}"
        ) from error
    if inputs.get("past_key_values") is cache:
        return False
    if inputs["input_ids"].shape[1] != length + 1:
        raise ConfigError(
            f"{name} forgets all tokens but the last where a text grows beyond"
            f" {length}: keep prompt and max_new_tokens together at {length + 1} at most"
        )
    return True


class _Full:
    """Says that it holds some tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length
