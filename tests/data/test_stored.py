"""Token ids that records bring along are trained on as they are, or visibly not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specheads.config import ConfigError
from specheads.data.chat import Documents, Encoder, encode_records
from specheads.data.load import read_jsonl
from specheads.data.schema import packed_top, tokenizer_digest
from specheads.losses.cross_entropy import IGNORE
from specheads.system.files import tinycode_dir

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
TALK = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "ab"},
]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with "ab" beside "a" and "b": a model may well generate the two."""
    vocab = {"a": 0, "b": 1, "ab": 2, "q": 3, "r": 4, ":": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{{ '<eos>' if m['role'] == 'assistant' else ':' }}{% endfor %}"
    )
    return tokenizer


def stored(made_by: PreTrainedTokenizerFast, **changes: Any) -> dict[str, Any]:
    """A record whose answers were generated as a, b, where encoding gives ab."""
    tokens = {
        "ids": [3, 5, 0, 1, 6, 4, 5, 0, 1, 6],
        "answers": [[2, 5], [7, 10]],
        "tokenizer": tokenizer_digest(made_by),
        **changes,
    }
    return {"id": "r", "kind": "chat", "messages": TALK, "tokens": tokens}


def test_generated_ids_are_taken_verbatim() -> None:
    """Encoding the text again trains on tokens that the model never produced."""
    tokenizer = merging_tokenizer()
    record = stored(tokenizer)
    ids = record["tokens"]["ids"]
    again = Encoder(tokenizer)({**record, "tokens": {**record["tokens"], "tokenizer": "x"}})
    assert again.input_ids.tolist() == [3, 5, 2, 6, 4, 5, 2, 6] != ids
    encoded = Encoder(tokenizer)(record)
    assert encoded.input_ids.tolist() == ids
    assert encoded.input_ids.dtype == encoded.labels.dtype == np.int32
    slow = [IGNORE] * len(ids)
    for start, stop in record["tokens"]["answers"]:
        for t in range(start, stop):
            slow[t] = ids[t]
    assert encoded.labels.tolist() == slow
    assert Encoder(tokenizer).prompt(record) == ids[:7]


def test_ids_of_another_tokenizer_are_encoded_again_and_counted(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Ids of another vocabulary are other words; taking them would train on noise."""
    own, foreign = stored(byte_tokenizer), stored(merging_tokenizer())
    plain = {key: value for key, value in foreign.items() if key != "tokens"}
    encoded = encode_records([own, foreign, plain], Documents(byte_tokenizer, seq_len=32))
    assert encoded.counts["retokenized"] == 1
    assert "1 encoded anew" in encoded.summary()
    assert encoded.documents[0].input_ids.tolist() == own["tokens"]["ids"]
    assert encoded.documents[1].input_ids.tolist() == encoded.documents[2].input_ids.tolist()
    assert Encoder(byte_tokenizer).prompt(foreign) == Encoder(byte_tokenizer).prompt(plain)


def test_the_digest_is_of_the_tokenizer_not_of_its_history(
    make_byte_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    """A digest that moves with padding or the folder would throw all stored ids away."""
    tokenizer = make_byte_tokenizer()
    digest = tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == digest
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer_digest(tokenizer) == digest
    tokenizer.save_pretrained(tmp_path / "t")
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path / "t")) == digest
    assert tokenizer_digest(make_byte_tokenizer("{{ messages[0]['content'] }}")) != digest
    tokenizer.add_tokens(["more"])
    assert tokenizer_digest(tokenizer) != digest
    other_end = make_byte_tokenizer()
    other_end.eos_token = "<bos>"
    assert tokenizer_digest(other_end) != digest


def test_the_digest_of_the_embedded_tokenizer_survives_saving(tmp_path: Path) -> None:
    """Regenerated data is read through the copy of the tokenizer in an export."""
    folder = tinycode_dir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path)) == tokenizer_digest(tokenizer)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ids": "abc"}, "tokens.ids must be a list of token ids"),
        ({"ids": [1, -2, 3]}, "tokens.ids must be a list of token ids"),
        ({"ids": [1, True, 3]}, "tokens.ids must be a list of token ids"),
        ({"tokenizer": None}, "tokens.tokenizer must be the digest"),
        ({"answers": []}, r"at least one \[start, stop\]"),
        ({"answers": [[1]]}, r"at least one \[start, stop\]"),
        ({"answers": [[1.0, 2]]}, r"at least one \[start, stop\]"),
        ({"answers": [[3, 3]]}, r"\[3, 3\], which is no span of 10 ids"),
        ({"answers": [[2, 11]]}, r"\[2, 11\], which is no span of 10 ids"),
        ({"answers": [[7, 10], [2, 5]]}, "must rise without overlap"),
        ({"answers": [[2, 5], [4, 10]]}, "must rise without overlap"),
        ({"top": []}, "tokens.top is wrong"),
        ({"top": {"k": 1, "ids": "!", "log_probs": ""}}, "tokens.top is wrong"),
        ({"top": packed_top([[1]] * 5, [[-1]] * 5)}, "tokens.top is wrong"),  # of one token fewer
        ({"top": packed_top([[-1]] * 6, [[-1]] * 6)}, "tokens.top.ids holds negative numbers"),
        ({"top": packed_top([[1]] * 6, [[0.5]] * 6)}, "that are no log-probabilities"),
        ({"top": packed_top([[1]] * 6, [[float("nan")]] * 6)}, "that are no log-probabilities"),
        ({"top": packed_top([[1, 2]] * 6, [[-0.1, -0.2]] * 6)}, "that are no log-probabilities"),
    ],
)
def test_wrong_spans_are_named(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    """Slicing with a wrong span learns the prompt, or nothing, without a word."""
    path = tmp_path / "d.jsonl"
    path.write_text("\n" + json.dumps(stored(merging_tokenizer(), **changes)) + "\n")
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


def test_an_id_beyond_the_vocabulary_is_named() -> None:
    """On a GPU it ends in an assertion of the embedding that names nothing."""
    tokenizer = merging_tokenizer()
    record = stored(tokenizer, ids=[3, 5, 0, 1, 7, 4, 5, 0, 1, 6])
    with pytest.raises(ConfigError, match="record r: tokens.ids holds 7, .* has 7 tokens"):
        Encoder(tokenizer)(record)
