"""Which tokens are learned: exactly the answers and the token that closes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from specheads.config import ConfigError
from specheads.data.chat import Documents, Encoded, Encoder, encode_records
from specheads.data.schema import Dropped, Tally
from specheads.losses.cross_entropy import IGNORE

EOS = 258
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "one é"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "two €"},
]
RECORD = {"id": "r", "kind": "chat", "messages": TALK}

# ChatML, as most models have it: no markers, and a line break behind the closing token
CHATML = (
    "{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<eos>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
# no closing token at all
BARE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# drops the reasoning of earlier answers, as Qwen3's does
REWRITES = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '[thought]' }}{% endif %}"
    "{{ m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED_OPEN_END = (  # the block closes before the eos
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}"
    "{%- generation -%}{{ m['content'] }}{%- endgeneration -%}{{ '<eos>' }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED_LONG_END = CHATML.replace("{{ '<|' +", "{{ '<|' +").replace(
    "{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<eos>\\n' }}",
    "{{ '<|' + m['role'] + '|>\\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<eos>\\n' }}{% endgeneration %}{% else %}"
    "{{ m['content'] + '<eos>\\n' }}{% endif %}",
)

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


def _learned(encoded: Encoded, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The runs of learned tokens, as text; checks that labels are the tokens themselves."""
    runs: list[list[int]] = []
    previous = IGNORE
    for token, label in zip(encoded.input_ids.tolist(), encoded.labels.tolist(), strict=True):
        assert label in (IGNORE, token)
        if label != IGNORE:
            if previous == IGNORE:
                runs.append([])
            runs[-1].append(token)
        previous = label
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [None, CHATML, MARKED_OPEN_END, MARKED_LONG_END, BARE])
def test_only_answers_and_their_end_are_learned(
    make_byte_tokenizer: MakeTokenizer, byte_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    """A mask that is always true, misses eos, or covers a later repeat of the text goes unseen."""
    tokenizer = make_byte_tokenizer(template) if template else byte_tokenizer
    learned = _learned(Encoder(tokenizer)(RECORD), tokenizer)
    if template == BARE:  # eos is added once, where the record ends with an answer
        assert learned == ["one é\n", "two €\n<eos>"]
    else:
        assert learned == ["one é<eos>", "two €<eos>"]


def test_eos_is_learned_though_it_pads(make_byte_tokenizer: MakeTokenizer) -> None:
    """Masking by token id loses every real eos where pad == eos, and the model never ends."""
    tokenizer = make_byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    assert Encoder(tokenizer)(RECORD).labels.tolist().count(EOS) == 2


def test_a_template_that_rewrites_history_is_refused(make_byte_tokenizer: MakeTokenizer) -> None:
    """Masks found by comparing renderings would land on the wrong tokens."""
    tokenizer = make_byte_tokenizer(REWRITES)
    tokenizer.name_or_path = "org/rewriter"
    with pytest.raises(
        ConfigError, match=r"record r: .*template of org/rewriter rewrites .*message 2"
    ):
        Encoder(tokenizer)(RECORD)
    once = {**RECORD, "messages": TALK[:3]}
    assert _learned(Encoder(tokenizer)(once), tokenizer) == ["[thought]one é<eos>"]


def test_a_template_that_refuses_or_marks_nothing(make_byte_tokenizer: MakeTokenizer) -> None:
    """A template's own exception, missing markers and a missing template are one line each."""
    strict = make_byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="record r: .* refuses it: roles must alternate"):
        Encoder(strict)(RECORD)
    idle = make_byte_tokenizer(
        CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(ConfigError, match="record r: .* marks no token of the answers"):
        Encoder(idle)(RECORD)
    with pytest.raises(ConfigError, match="has no chat template"):
        Encoder(make_byte_tokenizer(None))(RECORD)


def test_prompt_and_completion(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """The prompt must not be learned, and the completion must end."""
    record = {"id": "r", "kind": "completion", "prompt": "ab ", "completion": "cd"}
    encoded = Encoder(byte_tokenizer)(record)
    assert encoded.input_ids.tolist() == [*b"ab cd", EOS]
    assert encoded.labels.tolist() == [IGNORE] * 3 + [*b"cd", EOS]


def test_a_completion_goes_on_where_the_prompt_stops() -> None:
    """Tokenizers that put a space before any text would learn a space that decoding never sees."""
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("▁ab")}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    record = {"id": "r", "kind": "completion", "prompt": "ab ", "completion": "ab"}
    encoded = Encoder(tokenizer)(record)
    assert tokenizer.convert_ids_to_tokens(encoded.input_ids.tolist()) == [*"▁ab▁ab", "<eos>"]
    assert (encoded.labels != IGNORE).tolist() == [False] * 4 + [True] * 3


def test_text_is_learned_whole(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """A document closes with eos, and starts with bos only where the tokenizer does that."""
    record = {"id": "r", "kind": "text", "text": "ab"}
    assert Encoder(byte_tokenizer)(record).labels.tolist() == [*b"ab", EOS]
    byte_tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 257), ("<eos>", EOS)]
    )
    assert Encoder(byte_tokenizer)(record).input_ids.tolist() == [257, *b"ab", EOS]
    assert Encoder(byte_tokenizer).prompt(record) == [257, *b"ab"]


@pytest.mark.parametrize("template", [None, CHATML, BARE])
def test_the_prompt_is_what_stands_before_the_answer(
    make_byte_tokenizer: MakeTokenizer, byte_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    """Decoding from other tokens than training had before the answer costs acceptance silently."""
    tokenizer = make_byte_tokenizer(template) if template else byte_tokenizer
    pair = {"id": "p", "kind": "completion", "prompt": "ab\n", "completion": "\ncd"}
    for record in (RECORD, {**RECORD, "messages": TALK[:3]}, pair):
        encoded, prompt = Encoder(tokenizer)(record), Encoder(tokenizer).prompt(record)
        assert encoded.input_ids[: len(prompt)].tolist() == prompt
        last = max(t for t in range(len(encoded.labels)) if encoded.labels[t] == IGNORE)
        assert last == len(prompt) - 1 or template == CHATML
        assert encoded.labels[len(prompt)] != IGNORE
        assert encoded.labels[len(prompt) - 1] == IGNORE
    assert Encoder(tokenizer).prompt({**RECORD, "messages": TALK[:2]})


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_question_that_ends_a_record_is_the_one_to_answer(
    make_byte_tokenizer: MakeTokenizer, byte_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    """An answer further up is history; giving it anew drops the question that was asked."""
    tokenizer = make_byte_tokenizer(template) if template else byte_tokenizer
    asked = [*TALK[:3], {"role": "user", "content": "the last question"}]
    prompt = Encoder(tokenizer).prompt({**RECORD, "messages": asked})
    expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
    assert prompt == expected["input_ids"]
    answered = [*asked, {"role": "assistant", "content": "the last answer"}]
    assert Encoder(tokenizer).prompt({**RECORD, "messages": answered}) == prompt


def test_no_eos_no_training(make_byte_tokenizer: MakeTokenizer) -> None:
    """Without eos nothing would teach the model to stop."""
    tokenizer = make_byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has no eos token"):
        Encoder(tokenizer)(RECORD)


def _pair(name: str, prompt: int, completion: int) -> dict[str, Any]:
    return {"id": name, "kind": "c", "prompt": "p" * prompt, "completion": "c" * completion}


def test_long_records_are_counted_not_cut(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """A cut answer teaches never to end; a dropped one must show in the counts."""
    records = [
        _pair("fits", 10, 21),  # 32 with eos
        _pair("long", 10, 22),
        {"id": "text", "kind": "text", "text": "t" * 70},
        {"id": "mute", "kind": "chat", "messages": TALK[:2]},
    ]
    dropped = Dropped()
    documents = Documents(byte_tokenizer, seq_len=32, context=32)
    encoded = encode_records(records, documents, Tally(0.25, dropped))
    assert [row["row"]["id"] for row in dropped.rows.values()] == ["mute"]
    with pytest.raises(ConfigError, match="1 of 4 records cannot .* with nothing to learn, first"):
        encode_records(records, Documents(byte_tokenizer, seq_len=32), Tally(0.24, Dropped()))
    assert [d.id for d in encoded.documents] == ["fits", "text", "text+32", "text+64"]
    assert [len(d.input_ids) for d in encoded.documents] == [32, 32, 32, 7]
    assert encoded.documents[-1].input_ids[-1] == EOS
    assert encoded.counts == {
        "records": 4, "too_long": 1, "unlabelled": 1, "split": 1, "retokenized": 0, "refused": 0,
        "documents": 4, "tokens": 103, "learned": 22 + 71,
    }  # fmt: skip
    assert "1 dropped: longer than data.seq_len" in encoded.summary()
    assert "1 dropped: nothing to learn" in encoded.summary()


def test_unusable_data_sets_are_refused(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Each of these would train on nothing, or give NaN, without a word."""
    mute = {"id": "m", "kind": "chat", "messages": TALK[:2]}
    byte_tokenizer.name_or_path = "org/model"
    with pytest.raises(ConfigError, match="data set is empty"):
        encode_records([], Documents(byte_tokenizer, seq_len=32))
    with pytest.raises(
        ConfigError, match=r"all labels are masked in 2 of 2.*template of org/model"
    ):
        encode_records([mute, mute], Documents(byte_tokenizer, seq_len=32), Tally(1.0, Dropped()))
    with pytest.raises(ConfigError, match="record m: with nothing to learn"):
        encode_records([mute, mute], Documents(byte_tokenizer, seq_len=32))
    with pytest.raises(ConfigError, match="and 1 are longer than data.seq_len=32"):
        encode_records([_pair("long", 10, 22)], Documents(byte_tokenizer, seq_len=32))
    with pytest.raises(ConfigError, match="data.seq_len is 33, longer than .* context of 32"):
        encode_records([_pair("fits", 10, 21)], Documents(byte_tokenizer, seq_len=33, context=32))


def test_all_tiny_records_encode(tiny_jsonl: Any, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Every record of the shared fixture is usable; others tests count on it."""
    records = [json.loads(line) | {"kind": "x"} for line in tiny_jsonl.read_text().splitlines()]
    encoded = encode_records(records, Documents(byte_tokenizer, seq_len=128, context=512))
    assert encoded.counts["documents"] == len(records) == 32
