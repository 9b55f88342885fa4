"""Answers taken out of records and given anew: the very ids that a template would make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specheads.config import ConfigError
from specheads.data.chat import Encoder
from specheads.data.schema import RecordError
from specheads.decoding.conversation import text_of
from specheads.losses.cross_entropy import IGNORE
from specheads.regeneration.dialogue import (
    Answer,
    Dialogue,
    TurnEncoder,
    check_answer,
    check_answerable,
    dialogue,
    prompt_digest,
    tokens_of,
)

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

# as ChatML: a line break behind what closes a message
BREAKS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<eos>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# nothing closes an answer but the next message
OPEN = BREAKS.replace(" + '<eos>'", "")
# as Qwen3: thoughts are kept in the last answer only
FORGETFUL = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('#')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<eos>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def message(role: str, content: str = "x") -> dict[str, str]:
    """Return one message."""
    return {"role": role, "content": content}


def chat(*roles: str) -> dict[str, Any]:
    """Return a record whose messages say their number."""
    messages = [message(role, f"{role} {i}") for i, role in enumerate(roles)]
    return {"id": "r", "kind": "chat", "messages": messages}


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ("u", [[0]]),
        ("ua", [[0]]),
        ("suaua", [[0, 1], [3]]),
        ("uau", [[0], [2]]),
        ("au", [[1]]),  # an answer that nobody asked for
        ("sau", [[0, 2]]),
        ("uaau", [[0], [3]]),
        ("uuas", [[0, 1]]),  # nothing is asked behind the last answer
    ],
)
def test_which_answers_are_due(roles: str, turns: list[list[int]]) -> None:
    """Real conversations do not alternate; a template would refuse them, or learn from nothing."""
    names = {"u": "user", "a": "assistant", "s": "system"}
    record = chat(*(names[role] for role in roles))
    talk = dialogue(record)
    messages = record["messages"]
    assert talk.turns == [[messages[i] for i in turn] for turn in turns]
    for i in range(len(turns)):
        asked = talk.messages()
        assert asked[-1] == talk.turns[i][-1] and len(asked) == sum(map(len, turns[: i + 1])) + i
        talk.answers.append(Answer(f"new {i}", "stop", 3))
    done = talk.answered({"model": "m"})
    new = [m["content"] for m in done["messages"] if m["role"] == "assistant"]
    assert new == [f"new {i}" for i in range(len(turns))]
    assert done["generation"]["finish_reason"] == ["stop"] * len(turns)
    # the answered record asks for the same again: by this it is known when the run goes on
    assert dialogue(done).turns == talk.turns and prompt_digest(done) == prompt_digest(record)


def test_old_answers_leave_no_trace() -> None:
    """Stored ids of the old answers would be trained on in place of the new ones."""
    record = {
        "id": "r", "kind": "k", "prompt": "p", "completion": "old", "source": "s",
        "tokens": {"ids": [1, 2], "answers": [[1, 2]], "tokenizer": "t"}, "generation": {"old": 1},
    }  # fmt: skip
    talk = dialogue(record)
    talk.answers.append(Answer("new", "stop"))
    assert talk.answered({"model": "m"}) == {
        "id": "r", "kind": "k", "prompt": "p", "completion": "new", "source": "s",
        "generation": {"model": "m", "finish_reason": ["stop"], "num_tokens": [None]},
    }  # fmt: skip


def test_what_cannot_be_answered() -> None:
    """A tool's result belongs to a call that the new answer does not make."""
    for roles in (("system",), ("assistant",), ("user", "assistant", "tool")):
        with pytest.raises(RecordError) as caught:
            dialogue(chat(*roles))
        assert caught.value.reason == "role"
    with pytest.raises(ConfigError, match="record t holds text"):
        check_answerable([chat("user"), {"id": "t", "kind": "text", "text": "x"}])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer("x", "stop"), None),
        (Answer("x", "length", 5), "truncated"),
        (Answer(" \n", "stop"), "empty"),
        (Answer("x", "content_filter"), "unfinished"),
        (Answer("x\ud800", "stop"), "text"),
    ],
)
def test_answers_that_nothing_is_learned_from(answer: Answer, reason: str | None) -> None:
    """An answer cut in the middle teaches heads to stop there."""
    talk = dialogue(chat("user"))
    talk.answers.append(answer)
    if reason is None:
        return check_answer(talk, False)
    with pytest.raises(RecordError) as caught:
        check_answer(talk, False)
    assert caught.value.reason == reason
    if reason == "truncated":
        check_answer(talk, True)
    return None


def say(turns: TurnEncoder, talk: Dialogue, texts: Sequence[str]) -> list[list[int]]:
    """Let a model say ``texts``, each closed by eos; return the ids before each."""
    asked = []
    for text in texts:
        asked.append(list(turns.ask(talk)))
        ids = turns.tokenizer(text, add_special_tokens=False).input_ids
        turns.add(talk, [*ids, turns.tokenizer.eos_token_id], ended=True)
    return asked


@pytest.mark.parametrize("template", [None, BREAKS], ids=["marked", "breaks"])
def test_ids_are_those_of_the_template(make_byte_tokenizer: MakeTokenizer, template: str) -> None:
    """Prompts put together from pieces must be what a server would render for the same texts.

    The slow reference renders the whole conversation anew before each answer.
    """
    tokenizer = make_byte_tokenizer(**({"chat_template": template} if template else {}))
    turns, encoder = TurnEncoder(tokenizer, [258]), Encoder(tokenizer)
    talk = dialogue(chat("system", "user", "assistant", "user", "user", "assistant", "user"))
    texts = ["é one", "two  ", "<eo s"]
    asked = say(turns, talk, texts)
    messages: list[dict[str, str]] = []
    for i, (turn, text) in enumerate(zip(talk.turns, texts, strict=True)):
        messages += turn
        bare = {"id": "r", "kind": "chat", "messages": [*messages, message("assistant")]}
        assert asked[i] == encoder.prompt(bare)
        assert talk.spans[i] == [len(asked[i]), len(asked[i]) + len(text.encode()) + 1]
        messages.append(message("assistant", text))
    done = talk.answered({})
    whole = encoder(done)
    assert talk.ids == whole.input_ids.tolist()[: len(talk.ids)]
    learned = {t for start, stop in talk.spans for t in range(start, stop)}
    assert {t for t, label in enumerate(whole.labels) if label != IGNORE} == learned
    # the spans that are stored where a server gave texts only
    tokens = tokens_of(done, encoder)
    assert tokens["answers"] == talk.spans and tokens["ids"] == whole.input_ids.tolist()
    stored = encoder(done | {"tokens": tokens})
    assert (stored.input_ids == whole.input_ids).all() and (stored.labels == whole.labels).all()


def test_generated_ids_stay_as_they_were(make_byte_tokenizer: MakeTokenizer) -> None:
    """Rendering a conversation anew drops thoughts, and the stored ids would be of other texts."""
    tokenizer = make_byte_tokenizer(chat_template=FORGETFUL)
    turns = TurnEncoder(tokenizer, [258])
    talk = dialogue(chat("user", "assistant", "user"))
    say(turns, talk, ["thought#one", "thought#two"])
    expected = "<|user|>user 0<eos>\n<|assistant|>thought#one<eos>\n<|user|>user 2<eos>\n"
    assert tokenizer.decode(talk.ids) == expected + "<|assistant|>thought#two<eos>"
    assert [answer.text for answer in talk.answers] == ["thought#one", "thought#two"]


def test_ends_that_the_template_has_not(make_byte_tokenizer: MakeTokenizer) -> None:
    """A conversation goes on as a server would render it, whatever token ended the answer."""
    talk = dialogue(chat("user", "assistant", "user"))
    turns = TurnEncoder(make_byte_tokenizer(chat_template=OPEN), [258])
    say(turns, talk, ["one", "two"])
    text = "<|user|>user 0\n<|assistant|>one\n<|user|>user 2\n<|assistant|>two<eos>"
    assert turns.tokenizer.decode(talk.ids) == text
    assert [text_of(turns.tokenizer, talk.ids[a:b]) for a, b in talk.spans] == ["one", "two"]
    # another end token than the one the template closes with
    turns = TurnEncoder(make_byte_tokenizer(chat_template=BREAKS), [258, 33])
    talk = dialogue(chat("user", "assistant", "user"))
    turns.ask(talk)
    turns.add(talk, [*b"one!"], ended=True)
    text = "<|user|>user 0<eos>\n<|assistant|>one<eos>\n<|user|>user 2<eos>\n<|assistant|>"
    assert turns.tokenizer.decode(turns.ask(talk)) == text and talk.answers[0].text == "one"
    assert turns.tokenizer.decode(talk.ids[slice(*talk.spans[0])]) == "one"
    # an answer that reached the limit is closed by the template, and not learned to end there
    talk = dialogue(chat("user", "assistant", "user"))
    turns.ask(talk)
    turns.add(talk, [*b"one"], ended=False)
    assert turns.tokenizer.decode(turns.ask(talk)) == text
    assert turns.tokenizer.decode(talk.ids[slice(*talk.spans[0])]) == "one"


def test_templates_that_refuse(make_byte_tokenizer: MakeTokenizer) -> None:
    """One odd conversation among thousands must not end the run."""
    refusing = "{{ raise_exception('roles must alternate') if messages|length > 2 }}x"
    turns = TurnEncoder(make_byte_tokenizer(chat_template=refusing), [258])
    with pytest.raises(RecordError, match="roles must alternate") as caught:
        turns.ask(dialogue(chat("user", "user", "user")))
    assert caught.value.reason == "template"
    forgetting = "{{ messages[-1]['content'] }}"
    turns = TurnEncoder(make_byte_tokenizer(chat_template=forgetting), [258])
    talk = dialogue(chat("user", "assistant", "user"))
    with pytest.raises(RecordError, match="leaves earlier answers out"):
        say(turns, talk, ["one", "two"])


def test_tokens_that_stand_for_nothing(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Embeddings are padded; an id without a token has no text, and no reader takes it."""
    turns = TurnEncoder(byte_tokenizer, [258])
    talk = dialogue(chat("user"))
    turns.ask(talk)
    with pytest.raises(RecordError, match="token 270 of 262") as caught:
        turns.add(talk, [65, 270, 258], ended=True)
    assert caught.value.reason == "token"
