"""What decoding returns, and the one rule by which both loops emit, count and stop."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.models.base import context_length

OnTokens = Callable[[list[int]], None]
Stopping = Callable[..., Tensor]  # transformers: (input_ids [B, T], scores) -> [B] bool


@dataclass(frozen=True)
class DecodeResult:
    """One decoded sequence.

    Attributes:
        sequences: [B, P+L], prompt and new tokens, the end-of-sequence token included.
        num_prompt_tokens: P.
        num_steps: forward passes of the base model after the prefill.
        accept_lengths: per step the tokens it emitted; they sum to L - 1, as the prefill gives one.
        step_ids: per new token the step that gave it; 0 is the prefill, then 1..num_steps.
        finished: ended by an end-of-sequence token or a stopping criterion, not by the limit.
        num_replays: near-ties that were settled by replaying the text plainly.
    """

    sequences: Tensor
    num_prompt_tokens: int
    num_steps: int
    accept_lengths: list[int]
    step_ids: list[int]
    finished: bool
    num_replays: int = 0

    @property
    def new_tokens(self) -> list[int]:
        """The L new tokens."""
        return self.sequences[0, self.num_prompt_tokens :].tolist()

    @property
    def accept_length(self) -> float:
        """Mean tokens per step; 1 for plain decoding."""
        return sum(self.accept_lengths) / max(1, len(self.accept_lengths))


@dataclass
class Output:
    """The tokens so far; says when to stop."""

    input_ids: Tensor  # [1, P]
    max_new_tokens: int
    eos_token_ids: Collection[int] = ()
    stopping_criteria: Stopping | None = None
    on_tokens: OnTokens | None = None
    step_ids: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    finished: bool = False
    num_replays: int = 0

    def __post_init__(self) -> None:
        self._ids = self.input_ids.new_empty(1, self.num_prompt_tokens + self.max_new_tokens)
        self._ids[:, : self.num_prompt_tokens] = self.input_ids
        self._num_steps = 0

    @property
    def num_prompt_tokens(self) -> int:
        """P."""
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """P + L so far."""
        return self.num_prompt_tokens + len(self.step_ids)

    @property
    def ids(self) -> Tensor:
        """[1, P+L], a view of what is there so far."""
        return self._ids[:, : self.num_tokens]

    @property
    def budget(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.step_ids)

    @property
    def done(self) -> bool:
        """Nothing more is to be emitted."""
        return self.finished or self.budget == 0

    def emit(self, tokens: list[int]) -> None:
        """Append what one step gave, up to the token that ends the sequence.

        The first call is the prefill's; later calls each count as a step.
        """
        tokens, kept = tokens[: self.budget], 0
        end = self.num_tokens + len(tokens)
        self._ids[0, self.num_tokens : end] = torch.tensor(tokens)
        for token in tokens:
            self.step_ids.append(self._num_steps)
            kept += 1
            if token in self.eos_token_ids or self._criteria_met():
                self.finished = True
                break
        if self._num_steps:
            self.accept_lengths.append(kept)
        self._num_steps += 1
        if self.on_tokens is not None:
            self.on_tokens(tokens[:kept])

    def _criteria_met(self) -> bool:
        if self.stopping_criteria is None:
            return False
        return bool(self.stopping_criteria(self.ids, None).all())

    def result(self) -> DecodeResult:
        """Freeze."""
        return DecodeResult(
            sequences=self.ids.clone(),
            num_prompt_tokens=self.num_prompt_tokens,
            num_steps=len(self.accept_lengths),
            accept_lengths=self.accept_lengths,
            step_ids=self.step_ids,
            finished=self.finished,
            num_replays=self.num_replays,
        )


def check_request(model: PreTrainedModel, input_ids: Tensor, max_new_tokens: int) -> None:
    """Refuse what decoding cannot do.

    Raises:
        ValueError: for a batch, an empty prompt, or more tokens than the model has positions.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        shape = list(input_ids.shape)
        raise ValueError(f"input_ids must be [1, P] (one sequence at a time), got {shape}")
    if input_ids.shape[1] < 1:
        raise ValueError("input_ids must hold at least 1 token, got 0")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    context = context_length(model)
    num_tokens = input_ids.shape[1] + max_new_tokens
    if context is not None and num_tokens > context:
        raise ValueError(
            f"prompt of {input_ids.shape[1]} plus max_new_tokens {max_new_tokens} is {num_tokens} "
            f"tokens, but the model's context is {context}"
        )
