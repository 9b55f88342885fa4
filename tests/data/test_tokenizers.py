"""Tokenizers of models trained from scratch: lossless, and the same on every rank and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specheads.config import ConfigError, DataConfig, ModelConfig, TrainConfig
from specheads.data.chat import Encoder
from specheads.data.schema import Record, tokenizer_digest
from specheads.data.tokenizers import (
    NUM_SPECIAL,
    SPECIAL,
    bpe_tokenizer,
    byte_tokenizer,
    choose_tokenizer,
    complete_init,
)
from specheads.losses.cross_entropy import IGNORE
from specheads.models.base import build_from_init, check_tokenizer, input_embedding
from specheads.system import dist
from specheads.system.files import tinycode_dir
from specheads.training.setup import load_base

TEXTS = [f"def add_{n}(a, b):\n    return a + b + {n}\n" for n in range(40)]
TEXTS += [
    f"naïve {a}{b} {b}{a}\n" for a in ("fo", "ba", "qu", "li") for b in ("ré", "zi", "xt", "um")
] * 2
SIZE = 340
LETTERS = " \n()+:,abdefnrtué_0123"
BYTE, BPE = byte_tokenizer(), bpe_tokenizer(TEXTS, SIZE)
BOTH = pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
TINY = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}


def settings(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """Return the settings of a run on a file of ``folder``, which is written if it is missing."""
    data = folder / "data.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return TrainConfig(
        run_dir=str(folder / "run"),
        tokenizer=name,
        tokenizer_size=SIZE,
        data=DataConfig(source="jsonl", path=str(data)),
        model=ModelConfig(init=dict(TINY)),
        **changes,
    )


def anything() -> st.SearchStrategy[str]:
    """Any text that UTF-8 can write, and what looks like special tokens and their pieces."""
    pieces = st.sampled_from([*SPECIAL, "<|reserved_9|>", "<|eos", "|>", "Ġ", "▁", "\ufeff", " \n"])
    return st.lists(st.text() | pieces, max_size=6).map("".join)


@BOTH
@given(text=anything())
def test_nothing_is_lost(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """A normaliser, a prefix space or a clean-up would train on texts that nobody wrote."""
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < len(tokenizer) for i in ids)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids


@BOTH
def test_id_of_a_byte_is_the_byte(tokenizer: PreTrainedTokenizerFast) -> None:
    """The ids are documented; the learner's own order is that of the stand-in characters."""
    characters = [bytes_to_unicode()[byte] for byte in range(256)]
    assert tokenizer.convert_tokens_to_ids(characters) == list(range(256))
    ids = {role: getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
    assert len(set(ids.values())) == 3
    first = len(tokenizer) - NUM_SPECIAL
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == list(range(first, first + 6))
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


@given(text=st.text())
def test_bytes_are_the_bytes(text: str) -> None:
    """The slow reference: a byte tokenizer is ``str.encode``."""
    assert BYTE(text, split_special_tokens=True).input_ids == list(text.encode())


def test_embedded_tokenizer_is_the_byte_tokenizer(tmp_path: Path) -> None:
    """Stored token ids and the embedded weights count on every id and on the template."""
    byte_tokenizer(2048).save_pretrained(tmp_path)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert len(written) == 3
    for name in written:
        assert (tmp_path / name).read_bytes() == (tinycode_dir() / name).read_bytes(), name


def by_hand(text: str, merges: list[tuple[str, str]]) -> list[str]:
    """Apply BPE to the words of ``text`` as the paper says: the earliest merge first."""
    tokens: list[str] = []
    for word, _ in BPE.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text):
        parts = list(word)
        for pair in merges:
            start = 0
            while start + 1 < len(parts):
                if (parts[start], parts[start + 1]) == pair:
                    parts[start : start + 2] = ["".join(pair)]
                start += 1
        tokens += parts
    return tokens


@given(
    text=st.text() | st.lists(st.sampled_from(" \n()+:,abdefnrtué_0123"), max_size=40).map("".join)
)
def test_bpe_applies_its_merges_in_order(text: str) -> None:
    """New ids for tokens are easily given to the wrong ones when a vocabulary is put together."""
    model = json.loads(BPE.backend_tokenizer.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    assert len(BPE) == SIZE and len(merges) >= SIZE - 256 - NUM_SPECIAL
    ids = BPE(text, split_special_tokens=True).input_ids
    assert BPE.convert_ids_to_tokens(ids) == by_hand(text, merges)


def test_bpe_needs_fewer_tokens() -> None:
    """Merges that are kept but never used would cost a vocabulary and give nothing."""
    text = "def add_7(a, b):\n    return a + b + 7\n"
    assert len(BPE(text).input_ids) < 0.5 * len(BYTE(text).input_ids)


def test_bpe_of_little_text_is_small() -> None:
    """Pairs seen once are no vocabulary; rows of the embedding that no text uses never learn."""
    assert len(bpe_tokenizer(["abcdef"], SIZE)) == 256 + NUM_SPECIAL


def test_bpe_is_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash seeds and threads must not decide between pairs that are equally frequent."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    for texts in (TEXTS, TEXTS[::-1], ["".join(TEXTS)]):
        assert tokenizer_digest(bpe_tokenizer(texts, SIZE)) == tokenizer_digest(BPE)


@BOTH
def test_round_trip_through_files(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Users load the export with AutoTokenizer, which must not guess another class or template."""
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.is_fast
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)
    assert again.decode(again(" a  b . \n é", return_tensors="pt").input_ids[0]) == " a  b . \n é"
    batch = again(["a", "add_1 b"], padding=True, return_tensors="pt")
    assert batch.input_ids[0, -1] == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert batch.attention_mask[0].sum() == 1


@BOTH
def test_answers_end_at_eos_and_are_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    """An answer without a learned eos never ends; a learned prompt is not the answer's loss."""
    encoder, eos = Encoder(tokenizer), tokenizer.eos_token

    def learned(record: Record) -> tuple[str, str]:
        encoded = encoder({"id": "x", "kind": "x", **record})
        mask = encoded.labels != IGNORE
        assert (encoded.labels[mask] == encoded.input_ids[mask]).all()
        whole = encoded.input_ids.tolist()
        part = encoded.input_ids[mask].tolist()
        return str(tokenizer.decode(whole)), str(tokenizer.decode(part))

    whole, part = learned({"prompt": "def add_1", "completion": "(a, é):"})
    assert (whole, part) == (f"def add_1(a, é):{eos}", f"(a, é):{eos}")
    assert learned({"text": "naïve"}) == (f"naïve{eos}", f"naïve{eos}")
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": f"{role} {i} é"} for i, role in enumerate(roles)]
    whole, part = learned({"messages": messages})
    assert part == f"assistant 2 é{eos}assistant 4 é{eos}"
    assert whole == (
        "<|bos|><|system|>system 0 é<|user|>user 1 é<|assistant|>assistant 2 é<|eos|>"
        "<|user|>user 3 é<|assistant|>assistant 4 é<|eos|>"
    )
    prompt = tokenizer.decode(encoder.prompt({"id": "x", "kind": "x", "messages": messages}))
    assert whole == f"{prompt}assistant 4 é{eos}"


@BOTH
@pytest.mark.parametrize("given", [{}, {"vocab_size": 0}, {"pad_token_id": None}], ids=str)
def test_model_fits_its_tokenizer(
    tokenizer: PreTrainedTokenizerFast, given: dict[str, Any]
) -> None:
    """With Llama's default ids generation stops at byte 2, and never at the end of a text."""
    model = build_from_init(complete_init({**TINY, **given}, tokenizer))
    check_tokenizer(tokenizer, model)
    rows = input_embedding(model).shape[0]
    assert rows % 64 == 0 and len(tokenizer) <= rows < len(tokenizer) + 64
    for role in ("pad", "bos", "eos"):
        own = getattr(tokenizer, f"{role}_token_id")
        assert getattr(model.config, f"{role}_token_id") == own
        assert getattr(model.generation_config, f"{role}_token_id") == own


def test_given_sizes_and_ids_are_kept_or_refused() -> None:
    """A row short is an index error in the middle of a run; a wrong pad id never learns."""
    ids = {"eos_token_id": [258, 7], "pad_token_id": 256}
    kept = complete_init({**TINY, "vocab_size": 272, **ids}, BYTE)
    assert kept == {**TINY, "vocab_size": 272, **ids, "bos_token_id": 257}
    with pytest.raises(ConfigError, match=r"vocab_size is 271, .* byte has 272 token ids"):
        complete_init({**TINY, "vocab_size": 271}, BYTE)
    with pytest.raises(ConfigError, match=r"pad_token_id is 256, pad .* bpe is 324"):
        complete_init({**TINY, "pad_token_id": 256}, BPE)
    padded_by_eos = byte_tokenizer()
    padded_by_eos.pad_token = padded_by_eos.eos_token
    completed = complete_init(TINY, padded_by_eos)
    assert completed["eos_token_id"] == 258
    assert "pad_token_id" not in completed
    assert complete_init({"model_type": "lama"}, BYTE) == {"model_type": "lama"}


def test_names(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A name that is not understood must not end in a default, nor in another key's error."""
    assert tokenizer_digest(choose_tokenizer(settings(tmp_path, "byte"))) == tokenizer_digest(BYTE)
    assert choose_tokenizer(settings(tmp_path, "byte")).model_max_length == 64
    assert len(choose_tokenizer(settings(tmp_path, str(tiny_model_dir)))) == 262
    assert tokenizer_digest(choose_tokenizer(TrainConfig(run_dir="r"))) == tokenizer_digest(BYTE)
    for name, why in (("bytes", "did you mean byte"), ("./gone", "there is no such folder")):
        with pytest.raises(ConfigError, match=f"tokenizer={name} is neither .*{why}") as error:
            choose_tokenizer(settings(tmp_path, name))
        assert "\n" not in str(error.value) and "model.name" not in str(error.value)
    with pytest.raises(ConfigError, match="tokenizer_size must be more than 272"):
        TrainConfig(run_dir="r", tokenizer_size=256 + NUM_SPECIAL)
    with pytest.raises(ConfigError, match="tokenizer=byte is for models trained from scratch"):
        load_base(settings(tmp_path, "byte"))


def of_run(cfg: TrainConfig) -> str:
    """Return the digest of the tokenizer that a run gets."""
    return tokenizer_digest(choose_tokenizer(cfg))


def test_resumed_run_has_the_very_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that grew between two parts of a run would give every id another meaning."""
    first = of_run(settings(tmp_path, "bpe"))
    run_dir = tmp_path / "run"
    (run_dir / "config.yaml").touch()  # as a run does that has begun
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"other words {n}"}) + "\n" for n in range(30)))
    assert of_run(settings(tmp_path, "bpe", resume="auto")) == first
    assert of_run(settings(tmp_path, "bpe", resume="auto", dry_run=True)) == first
    # a checkpoint of another run brings that run's along
    step = run_dir / "checkpoints" / "step-0000001"
    copy = settings(tmp_path, "bpe", resume=str(step))
    copy.run_dir = str(tmp_path / "copy")
    assert of_run(copy) == first
    (tmp_path / "copy" / "config.yaml").touch()
    copy.resume = "auto"
    assert of_run(copy) == first
    other = settings(tmp_path, "bpe", resume="auto")
    other.tokenizer_size = SIZE + 1
    with pytest.raises(ConfigError, match="no tokenizer in .* tokenizer_size=341"):
        choose_tokenizer(other)
    rules = run_dir / "tokenizer" / "tokenizer.json"
    rules.write_text(rules.read_text().replace("<|user|>", "<|User|>"))
    with pytest.raises(ConfigError, match="was changed"):
        of_run(settings(tmp_path, "bpe", resume="auto"))


def test_new_run_does_not_take_an_old_one(tmp_path: Path) -> None:
    """What an attempt that failed left in the folder was made from other data."""
    first = of_run(settings(tmp_path, "bpe"))
    assert of_run(settings(tmp_path, "bpe")) == first
    (tmp_path / "data.jsonl").write_text('{"text": "new"}\n{"text": "news"}\n' * 20)
    second = of_run(settings(tmp_path, "bpe", resume="auto"))  # nothing to resume yet
    assert second != first
    assert of_run(settings(tmp_path, "bpe", resume="auto")) == second


def test_dry_run_leaves_nothing(tmp_path: Path) -> None:
    """A dry run that writes would be the old attempt of the real one."""
    dry = of_run(settings(tmp_path, "bpe", dry_run=True))
    assert not (tmp_path / "run").exists()
    assert of_run(settings(tmp_path, "bpe")) == dry


def test_other_ranks_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that takes what an earlier attempt left would train on other ids than its peers."""
    choose_tokenizer(settings(tmp_path, "bpe"))
    cfg = settings(tmp_path, "bpe")
    Path(str(cfg.data.path)).write_text('{"text": "new"}\n{"text": "news"}\n' * 20)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_main", lambda: False)
        others = of_run(cfg)
    assert of_run(cfg) == others
    kept = PreTrainedTokenizerFast.from_pretrained(tmp_path / "run" / "tokenizer")
    assert tokenizer_digest(kept) == others, "what is kept is what every rank learned"


def test_padded_rows_are_never_labels() -> None:
    """Ids beyond the tokenizer decode to nothing, so no text may lead to them."""
    rows = complete_init(TINY, BPE)["vocab_size"]
    assert BPE.decode(torch.arange(len(BPE), rows)) == ""
