"""A model is trained from scratch with a tokenizer of its own, and generates with plain classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads.data import tokenizers
from tests.end_to_end.commands import SHORT, start

# vocabulary and token ids follow from the tokenizer
MODEL = (
    "model.init={model_type: llama, vocab_size: 0, hidden_size: 32, intermediate_size: 64,"
    " num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,"
    " max_position_embeddings: 64}"
)


def arguments(folder: Path, name: str) -> list[str]:
    """Return a run of a few seconds on texts that all end alike."""
    data = folder / "data.jsonl"
    texts = [f"item {a}{b} ends." for a in "abcdef" for b in "uvwxyz"]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [
        "+recipe=pretrain",
        f"tokenizer={name}",
        "tokenizer_size=300",
        MODEL,
        "data=jsonl",
        f"data.path={data}",
        "data.growth=[]",
        f"hydra.run.dir={folder / 'run'}",
        *SHORT,
        "steps=40",
        "optim.base_lr=1e-2",
        "autocast=none",
        "log.every=20",
    ]


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_trained_from_scratch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eos must be the tokenizer's in data, model and generation config, or texts never end."""
    given = arguments(tmp_path, name)
    assert start(monkeypatch, *given, "max_steps=20") == 0
    kept = tmp_path / "run" / "tokenizer"
    assert kept.is_dir() == (name == "bpe")
    before = {path.name: path.read_bytes() for path in kept.iterdir()} if kept.is_dir() else {}
    with monkeypatch.context() as patch:
        patch.delattr(tokenizers, "bpe_tokenizer")  # a resumed run learns nothing anew
        assert start(patch, *given, "resume=auto") == 0
    assert before == {name: (kept / name).read_bytes() for name in before}
    export = tmp_path / "run" / "export"
    if name == "bpe":
        assert (export / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    tokenizer = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForCausalLM.from_pretrained(export, dtype="float32")
    assert model.get_input_embeddings().weight.shape[0] == 320
    prompt = tokenizer("item ax", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0].tolist()
    assert out[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert len(out) < 30
    assert tokenizer.decode(out) == "item ax ends.<|eos|>"


def test_embedding_of_the_recipe_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model's 272 rows and a vocabulary of 300: an index error after minutes."""
    given = [word for word in arguments(tmp_path, "bpe") if word != MODEL]
    assert start(monkeypatch, *given, "dry_run=true") == 2
    error = capsys.readouterr().err
    assert "model.init.vocab_size is 272, the tokenizer bpe has 2" in error
    assert not (tmp_path / "run" / "tokenizer").exists()
