"""Chat templates of strangers: rendered as transformers renders them, and stopped in time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from specheads.config import RunError
from specheads.data import rendering
from specheads.data.chat import Encoder
from specheads.data.rendering import OUR_TEMPLATE, render
from specheads.losses.cross_entropy import IGNORE

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "s\u2028\ud800"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "one é", "tool_calls": None},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "two €"},
]
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ m | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MACRO = (
    "{% macro show(m) %}{{ m.role | upper }}: {{ m.content }}{% if 'tool_calls' in m %}!{% endif %}"
    "{% endmacro %}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ show(m) }}{% if m.role == 'user' %}{% continue %}{% endif %};{% endfor %}"
)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": (LOOP, "more than 0.5 seconds of processor time"),
    "loops for one text": (
        "{% for m in messages %}{% if m.content == 'second' %}" + LOOP + "{% endif %}{% endfor %}",
        "more than 0.5 seconds of processor time",
    ),
    "a power": ("{{ (9 ** (9 ** 9)) % 7 }}", "more than 0.5 seconds of processor time"),
    "a product": ("{{ 'a' * 10 ** 11 }}", "more than 2 GiB of memory"),
    "a product of lists": ("{{ ([1] * 10 ** 11) | length }}", "more than 2 GiB of memory"),
    "a format": ("{{ '%2000000000d' % 1 }}", "more than (0.5 seconds|2 GiB)"),
    "a filter": ("{{ 'a' | center(10 ** 11) }}", "more than 2 GiB of memory"),
    "doubling": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
        "{% endfor %}{{ ns.x }}",
        "more than (0.5 seconds|2 GiB)",
    ),
    "a long text": ("{{ 'a' * 2000000 }}", "made 2,000,000 characters of messages of"),
}


@pytest.fixture(autouse=True, scope="module")
def soon_over() -> Iterator[None]:
    """Give these tests a process with a time limit that is soon over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "_SECONDS", 0.5)
        _end_process()
        yield
    _end_process()


def _end_process() -> None:
    if (process := rendering._Child.process) is not None:
        process.kill()
        process.communicate()
        rendering._Child.process = None


@pytest.mark.parametrize("template", [MARKED, MACRO, OUR_TEMPLATE])
def test_the_text_is_that_of_transformers(
    make_byte_tokenizer: MakeTokenizer, template: str
) -> None:
    """Another text than engines and other libraries make is another prompt than was trained on."""
    tokenizer = make_byte_tokenizer(template)
    for count in range(1, len(TALK) + 1):
        for options in (
            {}, {"add_generation_prompt": True}, {"continue_final_message": True}
        ):  # fmt: skip
            expected = tokenizer.apply_chat_template(TALK[:count], tokenize=False, **options)
            assert render(tokenizer, TALK[:count], **options) == (expected, [])
    talk = [*({"role": "user", "content": "é"}, *TALK[1:])]
    if template != MACRO:
        whole = tokenizer.apply_chat_template(
            talk, return_dict=True, return_assistant_tokens_mask=True
        )
        encoded = Encoder(tokenizer)({"id": "r", "messages": talk})
        assert encoded.input_ids.tolist() == whole["input_ids"]
        learned = (encoded.labels != IGNORE).tolist()
        assert any(learned) and learned == [bool(flag) for flag in whole["assistant_masks"]]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(make_byte_tokenizer: MakeTokenizer, name: str) -> None:
    """A downloaded tokenizer would hold the machine, or take all of its memory."""
    template, complaint = HOSTILE[name]
    tokenizer = make_byte_tokenizer(template)
    tokenizer.name_or_path = "org/hostile"
    with pytest.raises(RunError, match=f"template of org/hostile was stopped: it .*{complaint}"):
        Encoder(tokenizer)({"id": "r", "kind": "chat", "messages": TALK})
    good = make_byte_tokenizer(MARKED)  # what comes after it is rendered all the same
    assert render(good, TALK)[0] == good.apply_chat_template(TALK, tokenize=False)


def test_a_refusal_is_told_from_a_limit(make_byte_tokenizer: MakeTokenizer) -> None:
    """A template that takes no system message costs that record, not the run."""
    for template, message in {
        "{{ raise_exception('no system role') }}": "no system role",
        "{{ messages[0].content + 1 }}": "can only concatenate str",
        "{% if %}": "Expected an expression",
        "{{ messages.append(1) }}": "is unsafe",
    }.items():
        with pytest.raises(TemplateError, match=message):
            render(make_byte_tokenizer(template), TALK)


def test_our_own_template_needs_no_process(make_byte_tokenizer: MakeTokenizer) -> None:
    """Commands on the embedded model would all wait for a second Python."""
    _end_process()
    render(make_byte_tokenizer(OUR_TEMPLATE), TALK)
    assert rendering._Child.process is None


def test_a_tokenizer_with_code_of_its_own_is_asked(make_byte_tokenizer: MakeTokenizer) -> None:
    """Trusted code that writes its prompts itself would be passed over, and its model misled."""

    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            return f"{len(conversation)} of {sorted(options)}"

    tokenizer = make_byte_tokenizer(MARKED)
    tokenizer.__class__ = Own
    expected = "5 of ['add_generation_prompt', 'tokenize']"
    assert render(tokenizer, TALK, add_generation_prompt=True) == (expected, [])


def _in_a_fork(tokenizer: PreTrainedTokenizerFast, queue: Any) -> None:
    queue.put((os.getpid(), render(tokenizer, TALK)[0]))


def test_a_fork_has_a_process_of_its_own(make_byte_tokenizer: MakeTokenizer) -> None:
    """Two that write into one pipe would be given each other's texts."""
    tokenizer = make_byte_tokenizer(MARKED)
    text, _ = render(tokenizer, TALK)
    before = rendering._Child.process
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    fork = context.Process(target=_in_a_fork, args=(tokenizer, queue))
    fork.start()
    assert queue.get(timeout=60) == (fork.pid, text)
    fork.join()
    assert render(tokenizer, TALK)[0] == text and rendering._Child.process is before
