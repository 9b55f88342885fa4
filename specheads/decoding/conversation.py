"""A conversation that is decoded turn by turn, its KV cache kept; no terminal in it.

Every turn's prompt is the whole conversation, rendered by the chat template as ``generate`` renders
a record of ``messages``. What the cache holds of it is not read again; where a template rewrites
earlier messages, or text comes back as other tokens, the cache forgets what follows, so that a turn
is the one that ``generate`` gives for these messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specheads.config import ChatConfig, ConfigError
from specheads.data.chat import Encoder
from specheads.data.rows import Record
from specheads.decoding.asked import decode_arguments
from specheads.decoding.generate import SpecDecoder
from specheads.kv_cache import TreeCache
from specheads.models.base import context_length

OnStep = Callable[[list[int]], None]
NO_LIMIT = 1 << 30


class StopTurnError(Exception):
    """Raised by the caller's ``on_step`` to end a turn behind the step at hand."""


@dataclass
class Turn:
    """One answer.

    Attributes:
        prompt: token ids of the whole conversation before it.
        num_read: how many of them were read for it; the cache held the others.
        config: how its tokens were chosen.
        new_tokens: the answer's, an end token included.
        accept_lengths: tokens of every verify step; the prefill's own token is none of them.
        prefill_seconds: until the first token.
        decode_seconds: from the first token to the last.
        finished: ended by itself.
        stopped: ended by :class:`StopTurnError`.
        context_full: ended because the base model has no more positions.
    """

    prompt: list[int]
    num_read: int
    config: ChatConfig
    new_tokens: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finished: bool = False
    stopped: bool = False
    context_full: bool = False

    @property
    def accept_length(self) -> float:
        """Mean tokens per verify step; 1 for plain decoding, and where there was no step."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first per second of decoding; 0 where there was one token at most."""
        num_tokens = len(self.new_tokens) - 1
        return num_tokens / self.decode_seconds if num_tokens > 0 and self.decode_seconds else 0.0


class Conversation:
    """Messages, and the cache that holds most of them.

    Args:
        decoder: with its tokenizer; its drafter may be None.
        config: how tokens are chosen, and the limit of an answer; may be replaced between turns.

    Attributes:
        messages: so far, the system's first; edit them as you like between turns.

    Raises:
        ConfigError: if the tokenizer has no chat template.
    """

    def __init__(self, decoder: SpecDecoder, config: ChatConfig) -> None:
        if decoder.tokenizer is None:
            raise ValueError("the decoder needs a tokenizer: SpecDecoder(..., tokenizer=...)")
        self.decoder = decoder
        self.config = config
        self.tokenizer = decoder.tokenizer
        self.cache = TreeCache()
        self._encode = Encoder(self.tokenizer)
        self._plain = SpecDecoder(
            decoder.base, None, tokenizer=self.tokenizer, compile=decoder.compile
        )
        self.messages: list[dict[str, str]] = []
        if config.system:
            self.set_system(config.system)

    def set_system(self, text: str) -> None:
        """Begin anew with another system message; an empty one takes it away.

        Raises:
            ConfigError: if the chat template has no place for it; then nothing has changed.
        """
        messages = [{"role": "system", "content": text}] if text else []
        self.prompt([*messages, {"role": "user", "content": "a"}])
        self.messages = messages
        self.cache.reset()

    def reset(self) -> None:
        """Forget every message but the system's, and what the cache holds."""
        self.messages = [each for each in self.messages[:1] if each["role"] == "system"]
        self.cache.reset()

    def undo(self) -> bool:
        """Take back the last question and its answer; say whether there was one."""
        if not self.messages or self.messages[-1]["role"] == "system":
            return False
        self.messages = self.messages[:-2]
        return True

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens that ask for an answer to ``messages``.

        Raises:
            ConfigError: one line, if the chat template refuses them.
        """
        if not messages or messages[-1]["role"] != "user":
            raise ConfigError("the last message must be the user's")
        record: Record = {"id": "of this conversation", "kind": "chat", "messages": list(messages)}
        return self._encode.prompt(record)

    def ask(self, text: str, on_step: OnStep | None = None) -> Turn:
        """Answer ``text``, and keep both; with no token given, keep neither.

        Args:
            text: the user's message.
            on_step: called with the new tokens of the prefill and of every verify step; may raise
                :class:`StopTurnError`.

        Raises:
            ConfigError: if the template refuses the messages, or they fill the context; then
                nothing has changed.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.prompt(messages)
        limit = min(self.config.max_new_tokens, self._room(prompt))
        turn = self._decode(self.decoder, self.config, prompt, limit, on_step)
        if turn.new_tokens:
            answer = {"role": "assistant", "content": self.text(turn.new_tokens)}
            self.messages = [*messages, answer]
        return turn

    def plainly(self, turn: Turn, on_step: OnStep | None = None) -> Turn:
        """Decode a turn again, one token at a time, at most as far as it went; keep nothing.

        The cache is the same: it forgets the answer and holds the same one afterwards.

        Raises:
            ConfigError: what :meth:`ask` raises.
        """
        limit = min(turn.config.max_new_tokens, self._room(turn.prompt))
        if turn.stopped:
            limit = len(turn.new_tokens)
        return self._decode(self._plain, turn.config, turn.prompt, limit, on_step)

    def text(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, without special ones."""
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _room(self, prompt: list[int]) -> int:
        """Return how many tokens the context still takes.

        Raises:
            ConfigError: if none.
        """
        context = context_length(self.decoder.base) or NO_LIMIT
        if len(prompt) >= context:
            raise ConfigError(
                f"the conversation is {len(prompt)} tokens, but the base model's context is"
                f" {context}"
            )
        return context - len(prompt)

    def _decode(
        self,
        decoder: SpecDecoder,
        config: ChatConfig,
        prompt: list[int],
        limit: int,
        on_step: OnStep | None,
    ) -> Turn:
        turn = Turn(prompt, len(prompt) - self._num_known(prompt), config)
        arguments = decode_arguments(config, decoder.base, self.tokenizer, [prompt])
        start = first = last = time.perf_counter()

        def hand_out(row: int, tokens: list[int]) -> None:
            nonlocal first, last
            last = time.perf_counter()
            if turn.new_tokens:
                turn.accept_lengths.append(len(tokens))
            else:
                first = last
            turn.new_tokens += tokens
            if on_step is not None:
                on_step(tokens)

        try:
            result = decoder.generate(
                max_new_tokens=limit,
                seed=config.seed,
                past_key_values=self.cache,
                on_tokens=hand_out,
                **arguments,
            )
            turn.finished = result.finished
        except StopTurnError:
            turn.stopped = True
        except BaseException:
            self.cache.reset()  # a pass may have been cut off in its middle
            raise
        turn.prefill_seconds, turn.decode_seconds = first - start, last - first
        full = len(turn.new_tokens) == self._room(prompt)
        turn.context_full = full and not turn.finished
        return turn

    def _num_known(self, prompt: list[int]) -> int:
        """Return how many tokens of ``prompt`` the cache holds; the last one is always read."""
        held = self.cache.tokens[0] if self.cache.tokens else []
        same = 0
        for ours, theirs in zip(held, prompt[:-1], strict=False):
            if ours != theirs:
                break
            same += 1
        return same
