"""Our drafters of token ids as classes that vLLM imports by name, its method ``custom_class``.

``vllm serve BASE --speculative-config '{"method": "custom_class", "model":
"specheads.vllm_proposer.SuffixProposer", "num_speculative_tokens": 8}'``, in an environment where
both packages are installed. vLLM makes ``Class(vllm_config)`` once, and calls ``propose`` after
every step with the rows of its batch; it verifies what comes back with its own sampler, so what is
proposed changes its speed and never its output. It hands a proposer token ids: these here read
nothing else; heads are in :mod:`specheads.vllm_heads`.

``SuffixProposer`` copies what most often followed the longest suffix of a request's text that
occurred in it before, ``NgramProposer`` what followed its last few tokens, and
``LookaheadPoolProposer`` the n-grams that any request wrote lately. Other settings than the class
attributes below: a subclass in a module of one's own, named in ``model``; of vLLM's settings only
``num_speculative_tokens`` arrives.

Written for the call of vLLM 0.32 and 0.33; nothing of vLLM is imported here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specheads.drafters.lookahead import NgramPool
from specheads.drafters.lookup import NgramRow, SuffixAutomaton

State = TypeVar("State")
Tokens = NDArray[np.integer[Any]]
SPARED = 8  # texts of requests that left the batch are kept for as many rows, or these


def read_rows(
    sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: ArrayLike, tokens: ArrayLike
) -> dict[int, Tokens]:
    """Return the texts of the rows that sampled something, without guesses.

    Args:
        sampled_token_ids: per row what the last step gained; empty while a prompt is being read.
        num_tokens_no_spec: [rows or more], how long the texts are, those tokens included.
        tokens: [rows or more, longest], the texts, with anything behind them.

    Raises:
        TypeError: if the sampled tokens are no lists: with asynchronous scheduling they are not
            there yet.
        ValueError: if the texts do not end with them: vLLM has changed how it calls.
    """
    if not isinstance(sampled_token_ids, list | tuple):
        raise TypeError(
            f"sampled_token_ids is {type(sampled_token_ids).__name__}, expected lists: start vLLM"
            " with --no-async-scheduling"
        )
    lengths, ids = np.asarray(num_tokens_no_spec), np.asarray(tokens)
    texts = {}
    for row, sampled in enumerate(sampled_token_ids):
        if not sampled:
            continue
        texts[row] = text = ids[row, : int(lengths[row])]
        if text[-len(sampled) :].tolist() != list(sampled):
            raise ValueError(
                f"the text of row {row} ends with {text[-len(sampled) :].tolist()}, but"
                f" {list(sampled)} were sampled: not the call of vLLM 0.32 or 0.33"
            )
    return texts


class TextStates(Generic[State]):
    """A state per request.

    vLLM names no requests: it moves them between rows, and takes some out for a while. What names
    one is its text: all of it but the newest tokens is the text that it had when it was seen last.
    """

    def __init__(self) -> None:
        # by text, the latest last; requests of one text have a state each
        self._known: dict[bytes, list[State]] = {}

    def take(self, text: Tokens) -> State | None:
        """Return and forget the state of a text; None if it is not known."""
        if (name := text.tobytes()) not in self._known:
            return None
        state = self._known[name].pop()
        if not self._known[name]:
            del self._known[name]
        return state

    def keep(self, text: Tokens, state: State) -> None:
        """Remember the state of a text."""
        self._known.setdefault(text.tobytes(), []).append(state)

    def forget(self, num_rows: int) -> None:
        """Forget what was kept before all else, but for some more states than there are rows."""
        while sum(map(len, self._known.values())) > num_rows + max(num_rows, SPARED):
            del self._known[next(iter(self._known))]


class Proposer(ABC, Generic[State]):
    """What vLLM calls, for a way to guess that keeps a state per request.

    Args:
        vllm_config: vLLM's settings.

    Attributes:
        num_tokens: how many tokens a step guesses at most.
        max_length: how long a text may become, in tokens.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_length = int(vllm_config.model_config.max_model_len)
        self._states: TextStates[State] = TextStates()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: ArrayLike,
        token_ids_cpu: ArrayLike,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a chain of guesses per row, empty where there is none."""
        del slot_mappings
        texts = read_rows(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        states = {row: self._read(text, len(sampled_token_ids[row])) for row, text in texts.items()}
        self._states.forget(len(sampled_token_ids))
        found: list[list[int]] = [[] for _ in sampled_token_ids]
        for row, text in texts.items():
            # the step that verifies the guesses adds a token of its own
            room = max(min(self.num_tokens, self.max_length - len(text) - 1), 0)
            found[row] = self._guess(states[row], room)
        return found

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Do nothing: vLLM asks every proposer to load its model, and there is none."""

    def _read(self, text: Tokens, num_new: int) -> State:
        """Return the state of a text, ``num_new`` of whose tokens are new."""
        known, state = len(text) - num_new, self._states.take(text[:-num_new])
        if state is None:
            known, state = 0, self._begin()
        self._extend(state, text[known:].tolist())
        self._states.keep(text, state)
        return state

    @abstractmethod
    def _begin(self) -> State:
        """Return the state of an empty text."""

    def _extend(self, state: State, new: list[int]) -> None:
        """Tell a state the tokens that follow."""
        cast(Any, state).extend(new)

    @abstractmethod
    def _guess(self, state: State, limit: int) -> list[int]:
        """Return at most ``limit`` tokens that may follow the state's text."""


class NgramProposer(Proposer[NgramRow]):
    """Proposes the continuation of the latest earlier match of a request's last tokens.

    As ``decode.drafter=lookup`` does.
    """

    max_ngram = 8  # longest suffix to look up; shorter ones are tried after it
    min_ngram = 1

    def _begin(self) -> NgramRow:
        return NgramRow(self.max_ngram, self.num_tokens, self.min_ngram)

    def _guess(self, state: NgramRow, limit: int) -> list[int]:
        return state.look_up()[:limit]


class SuffixProposer(Proposer[SuffixAutomaton]):
    """Proposes what most often followed the longest suffix that occurred before in the text.

    The chain of ``decode.drafter=suffix``, whose trees vLLM cannot verify.
    """

    min_match = 1  # shortest suffix to follow
    per_match = 3.0  # a suffix of n tokens is followed for at most per_match * n
    min_share = 0.3  # ends where the whole chain followed less often than this

    def _begin(self) -> SuffixAutomaton:
        return SuffixAutomaton()

    def _guess(self, state: SuffixAutomaton, limit: int) -> list[int]:
        here = state.match
        matched, share = state.length[here], 1.0
        if matched < self.min_match:
            return []
        found: list[int] = []
        while len(found) < min(limit, int(self.per_match * matched)):
            part, token, here = state.continuations(here)[0]
            share *= part
            if share < self.min_share:
                break
            found.append(token)
        return found


class LookaheadPoolProposer(Proposer[list[int]]):
    """Proposes the n-grams that any request wrote lately, from one pool for all of them.

    The pool of lookahead decoding, filled from the texts: vLLM reads no window for a proposer. A
    request is helped by what others wrote before it, so how fast it runs depends on them; what it
    returns does not. A request's state is the last N - 1 tokens of its text.
    """

    ngram = 4  # tokens of an n-gram
    guesses = 7  # n-grams kept under each first token
    num_kept = 1 << 20  # n-grams after which the older half of the pool begins to be forgotten

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        if self.ngram < 2:
            raise ValueError(f"ngram must be at least 2, got {self.ngram}")
        self._pools = [NgramPool(self.guesses), NgramPool(self.guesses)]  # the newer first
        self._entered = 0

    def _begin(self) -> list[int]:
        return []

    def _extend(self, state: list[int], new: list[int]) -> None:
        """Enter the n-grams that new tokens complete."""
        text = [*state, *new]
        for first in range(len(text) - self.ngram + 1):
            if self._entered == self.num_kept:
                self._pools, self._entered = [NgramPool(self.guesses), self._pools[0]], 0
            self._pools[0].add(text[first], tuple(text[first + 1 : first + self.ngram]))
            self._entered += 1
        state[:] = text[-(self.ngram - 1) :]

    def _guess(self, state: list[int], limit: int) -> list[int]:
        """Copy the rest of the latest n-gram that agrees with most of the last tokens; repeat."""
        text = list(state)
        while len(text) - len(state) < limit and (rest := self._rest(text)):
            text += rest
        return text[len(state) :][:limit]

    def _rest(self, text: list[int]) -> tuple[int, ...]:
        for length in range(min(self.ngram - 1, len(text)), 0, -1):
            first, *known = text[-length:]
            for pool in self._pools:
                for rest in pool.latest(first):
                    if rest[: length - 1] == tuple(known):
                        return rest[length - 1 :]
        return ()
