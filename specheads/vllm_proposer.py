"""A drafter of token ids as a class that vLLM imports by name, its method ``custom_class``.

``vllm serve BASE --speculative-config '{"method": "custom_class", "model":
"specheads.vllm_proposer.SuffixProposer", "num_speculative_tokens": 8}'``, in an environment where
both packages are installed. vLLM makes ``Class(vllm_config)`` once, and calls ``propose`` after
every step with the rows of its batch; it verifies what comes back with its own sampler, so what is
proposed changes its speed and never its output. It hands a proposer token ids: this one reads
nothing else; heads are in :mod:`specheads.vllm_heads`. Copies of the last few tokens' latest
continuation are vLLM's own method ``ngram``.

Other settings than the class attributes below: a subclass in a module of one's own, named in
``model``; of vLLM's settings only ``num_speculative_tokens`` arrives.

Written for the call of vLLM 0.32 and 0.33; nothing of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specheads.drafters.lookup import SuffixAutomaton

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


class SuffixProposer:
    """Proposes what most often followed the longest suffix that occurred before in the text.

    The chain of ``decode.drafter=suffix``, whose trees vLLM cannot verify.

    Args:
        vllm_config: vLLM's settings.

    Attributes:
        num_tokens: how many tokens a step guesses at most.
        max_length: how long a text may become, in tokens.
    """

    min_match = 1  # shortest suffix to follow
    per_match = 3.0  # a suffix of n tokens is followed for at most per_match * n
    min_share = 0.3  # ends where the whole chain followed less often than this

    def __init__(self, vllm_config: Any) -> None:
        self.num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.max_length = int(vllm_config.model_config.max_model_len)
        self._states: TextStates[SuffixAutomaton] = TextStates()

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

    def _read(self, text: Tokens, num_new: int) -> SuffixAutomaton:
        """Return the state of a text, ``num_new`` of whose tokens are new."""
        known, state = len(text) - num_new, self._states.take(text[:-num_new])
        if state is None:
            known, state = 0, SuffixAutomaton()
        state.extend(text[known:].tolist())
        self._states.keep(text, state)
        return state

    def _guess(self, state: SuffixAutomaton, limit: int) -> list[int]:
        """Return at most ``limit`` tokens that may follow the state's text."""
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
