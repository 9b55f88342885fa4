"""A conversation whose cache is kept: the tokens of one decoded from scratch, and fewer read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specheads.config import ChatConfig, ConfigError
from specheads.data.chat import Encoder
from specheads.decoding.conversation import (
    Conversation,
    StopTurnError,
    Turn,
    comparison,
    summary,
    text_of,
)
from specheads.decoding.generate import SpecDecoder
from specheads.drafters.lookup import SuffixDrafter

QUESTIONS = ("def add(a, b):", "abcabcabcabcabc", "And again.")


@pytest.fixture
def talks(tiny_llama: LlamaForCausalLM, byte_tokenizer: PreTrainedTokenizerFast) -> Conversation:
    """Return a conversation with a random model; its end token is hard to draw."""
    output = torch.nn.Linear(32, 272)
    with torch.no_grad():  # small letters only, which come back from text as the tokens they were
        output.weight.copy_(tiny_llama.lm_head.weight)
        output.bias.fill_(-100.0)
        output.bias[97:123] = 0
    tiny_llama.lm_head = output
    decoder = SpecDecoder(tiny_llama, SuffixDrafter(), tokenizer=byte_tokenizer)
    return Conversation(decoder, ChatConfig("x", max_new_tokens=20))


@pytest.fixture
def read(talks: Conversation) -> Iterator[list[int]]:
    """Return the numbers of tokens that the base model's passes are given."""
    counts: list[int] = []

    def count(module: object, args: object, given: dict[str, torch.Tensor]) -> None:
        counts.append(given["input_ids"].shape[1])

    hook = talks.decoder.base.register_forward_pre_hook(count, with_kwargs=True)
    yield counts
    hook.remove()


def from_scratch(talks: Conversation, config: ChatConfig) -> list[int]:
    """Decode the conversation's last answer again, with nothing kept."""
    record = {"id": "r", "kind": "chat", "messages": talks.messages}
    prompt = Encoder(talks.tokenizer).prompt(record)  # type: ignore[arg-type]
    more = {"top_k": 0} if config.temperature else {}
    return (
        SpecDecoder(talks.decoder.base, None)
        .generate(
            torch.tensor([prompt]),
            config.max_new_tokens,
            temperature=config.temperature,
            seed=config.seed,
            eos_token_id=258,
            **more,
        )
        .new_tokens
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_only_what_is_new_is_read(talks: Conversation, read: list[int], temperature: float) -> None:
    """A cache that is dropped between turns is right, and reads the whole talk at every turn."""
    talks.config = config = replace(talks.config, temperature=temperature, seed=3)
    known = 0
    for question in QUESTIONS:
        read.clear()
        turn = talks.ask(question)
        assert turn.new_tokens == from_scratch(talks, config)
        assert len(turn.new_tokens) == 1 + sum(turn.accept_lengths) == 20
        # all but the answer's last token, which no pass has read, is in the cache
        assert read[0] == turn.num_read == len(turn.prompt) - known
        known = len(turn.prompt) + len(turn.new_tokens) - 1
    assert talks.cache.lengths == [known]
    assert turn.num_read < len(turn.prompt) / 2


def test_plain_decoding_beside_it_keeps_the_cache(talks: Conversation, read: list[int]) -> None:
    """A comparison that left another cache behind would change the turns after it."""
    talks.ask(QUESTIONS[0])
    turn = talks.ask(QUESTIONS[1])
    talks.config = replace(talks.config, temperature=0.8, seed=9)  # the turn was greedy
    read.clear()
    plain = talks.plainly(turn)
    assert plain.new_tokens == turn.new_tokens
    assert read == [1] * len(turn.new_tokens), "the prompt was read again, or guesses were made"
    assert plain.accept_length == 1 < turn.accept_length
    after = talks.ask(QUESTIONS[2])
    assert after.num_read == len(after.prompt) - len(turn.prompt) - len(turn.new_tokens) + 1
    assert after.new_tokens == from_scratch(talks, talks.config)


def test_a_turn_that_is_stopped_stays(talks: Conversation) -> None:
    """Prevents a cache that holds guesses nobody accepted, or an answer that nobody saw."""
    seen: list[int] = []

    def stop(turn: Turn, tokens: list[int]) -> None:
        seen.extend(tokens)
        if len(seen) > 5:
            raise StopTurnError

    turn = talks.ask(QUESTIONS[0], stop)
    assert turn.stopped and turn.new_tokens == seen
    assert talks.messages[-1]["content"] == text_of(talks.tokenizer, seen)
    assert seen == from_scratch(talks, talks.config)[: len(seen)]
    assert talks.plainly(turn).new_tokens == seen
    after = talks.ask(QUESTIONS[1])
    assert after.num_read < len(after.prompt)
    assert after.new_tokens == from_scratch(talks, talks.config)


def test_a_turn_that_breaks_leaves_no_trace(talks: Conversation) -> None:
    """Half a pass in the cache would be taken for text by the next turn."""
    talks.ask(QUESTIONS[0])
    before = list(talks.messages)

    def fails(turn: Turn, tokens: list[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talks.ask(QUESTIONS[1], fails)
    assert talks.messages == before and talks.cache.lengths == []
    turn = talks.ask(QUESTIONS[1])
    assert turn.num_read == len(turn.prompt)
    assert turn.new_tokens == from_scratch(talks, talks.config)


def test_messages_are_taken_back(talks: Conversation) -> None:
    """Prevents answers that still know what was taken back."""
    assert not talks.undo()
    first = talks.ask(QUESTIONS[0])
    talks.ask(QUESTIONS[1])
    assert talks.undo()
    again = talks.ask(QUESTIONS[2])
    assert again.new_tokens == from_scratch(talks, talks.config)
    assert again.num_read < len(again.prompt)
    talks.set_system("s")
    assert not talks.undo() and talks.messages == [{"role": "system", "content": "s"}]
    assert talks.ask(QUESTIONS[0]).prompt != first.prompt
    talks.reset()
    assert len(talks.messages) == 1 and talks.cache.lengths == []
    talks.set_system("")
    assert talks.ask(QUESTIONS[0]).new_tokens == first.new_tokens


def test_the_context_ends(talks: Conversation) -> None:
    """Positions beyond the context give nonsense without an error from the model."""
    talks.config = replace(talks.config, max_new_tokens=600)
    turn = talks.ask("x" * 450)
    assert turn.context_full and len(turn.prompt) + len(turn.new_tokens) == 512
    assert "the context is full" in summary(turn)
    before = list(talks.messages)
    with pytest.raises(ConfigError, match=r"the conversation is 5\d\d tokens, .* context is 512"):
        talks.ask("more")
    assert talks.messages == before


def test_what_a_template_refuses_changes_nothing(talks: Conversation) -> None:
    """Prevents a refused system message from staying, so that every later turn fails too."""
    talks.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    talks.ask(QUESTIONS[0])
    before, length = list(talks.messages), talks.cache.lengths
    with pytest.raises(ConfigError, match="refuses it: no system role"):
        talks.set_system("s")
    assert talks.messages == before and talks.cache.lengths == length


def turn_of(tokens: list[int], seconds: float = 1.0, **settings: object) -> Turn:
    """Return a turn with these tokens."""
    config = ChatConfig("x", **settings)  # type: ignore[arg-type]
    return Turn([1], 1, config, tokens, [1] * (len(tokens) - 1), decode_seconds=seconds)


def test_comparisons_say_what_is_true() -> None:
    """Prevents "all tokens are equal" above tokens that are not."""
    fast, plain = turn_of([1, 2, 3, 4], 1.0), turn_of([1, 2, 3, 4], 2.0)
    said = comparison(fast, plain, torch.float32)
    assert "2.00x the speed of plain" in said and "all 4 tokens are equal" in said
    for other in ([1, 2, 9, 4], [1, 2], [1, 2, 9, 4, 5]):
        said = comparison(fast, turn_of(other), torch.float32)
        assert f"the first 2 of {max(4, len(other))} tokens are equal, which must not be" in said
    part = turn_of([1, 2])
    part.stopped = True
    assert "all 2 tokens are equal" in comparison(fast, part, torch.float32)
    half = turn_of([1, 3], dtype="bfloat16")
    assert "in bfloat16 near-ties" in comparison(half, plain, torch.bfloat16)
    assert "too short to compare" in comparison(turn_of([1]), turn_of([1]), torch.float32)
