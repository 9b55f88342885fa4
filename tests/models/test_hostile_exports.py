"""What a stranger may have put into an export: sizes, paths, code. One line, before any harm."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from specheads import generate
from specheads.config import ConfigError
from specheads.formats.write import recorded_dtype
from specheads.models import base
from specheads.models.base import load_base_model, load_tokenizer
from specheads.models.checkpoint import load_export
from specheads.models.digest import weight_files
from specheads.models.manifest import MANIFEST, check_manifest, read_json, write_manifest
from specheads.models.names import base_digest
from specheads.system.terminal import harmless
from tests.export_kinds import build_exports, load, refusal

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Path]:
    """One export of every kind; whoever changes a config puts it back."""
    return build_exports(tmp_path_factory.mktemp("exports"), tiny_model_dir)


@pytest.fixture
def exports(shared: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """The same, to be changed."""
    found = {kind: tmp_path / "exports" / kind for kind in shared}
    for kind, path in shared.items():
        shutil.copytree(path, found[kind])
    return found


def edit(file: Path, changes: dict[str, Any]) -> None:
    """Set nested keys of a JSON file, ``a.b`` for those inside."""
    content = json.loads(file.read_text())
    for path, value in changes.items():
        *above, key = path.split(".")
        inner = content
        for part in above:
            inner = inner.setdefault(part, {})
        inner[key] = value
    file.write_text(json.dumps(content))


def refused(path: Path, complaint: str) -> str:
    """Check that loading is refused at once, without memory; with a manifest that matches."""
    write_manifest(path)
    with bounded():
        line = refusal(path)
    assert line is not None, "loaded"
    assert complaint in line, line
    return line


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Check that what is done takes neither memory nor time."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000, f"{grown} KiB were taken"
    assert time.process_time() - start < 10


HUGE = 10**12
CONFIGS: list[tuple[str, str, dict[str, Any], str]] = [
    ("medusa", "", {"num_heads": 10**9}, "num_heads is 1000000000, expected 1 to 256"),
    ("medusa", "", {"num_heads": True}, "num_heads is True, expected 1 to 256"),
    ("medusa", "", {"num_heads": 2.0}, "num_heads is 2.0, expected 1 to 256"),
    ("medusa", "", {"num_layers": 10**6}, "num_layers is 1000000, expected 0 to 64"),
    ("medusa", "", {"vocab_size": HUGE}, "vocab_size is 1000000000000, expected 1 to"),
    ("medusa", "", {"num_kept": 200}, "has shape [40], expected [200]"),
    ("medusa", "", {"tree.choices": [[0]] * 10**5}, "tree.choices is 100000, expected below 4096"),
    ("medusa", "", {"tree.choices": [[-1]]}, "tree: a choice is [-1], expected a path of ranks"),
    ("medusa", "", {"tree.choices": [[0.5]]}, "a choice is [0.5], expected a path of ranks"),
    ("medusa", "", {"tree.choices": [[True]]}, "a choice is [True], expected a path of ranks"),
    ("medusa", "", {"tree.choices": ["0"]}, "a choice is '0', expected a path of ranks"),
    ("medusa", "", {"tree.choices": [[40]]}, "the tree uses rank 40, the heads know 40 tokens"),
    ("medusa", "", {"tree.choices": [[0], [0]]}, "tree: choices has node (0,) twice"),
    ("medusa", "", {"tree.expected_accept_length": 99}, "expected_accept_length is 99"),
    ("medusa", "", {"base.dtype": "int8"}, "base.dtype is 'int8', expected one of float64"),
    ("medusa", "", {"base.tuned": "yes"}, "base.tuned is 'yes', expected bool"),
    ("medusa", "", {"format_version": True}, "format version True"),
    ("medusa", "", {"kind": ["medusa"]}, "holds kind ['medusa']"),
    ("hydra", "", {"rank": 10**9}, "rank is 1000000000, expected 0 to"),
    ("hydra", "", {"rank": 5}, "has shape [4, 32], expected [5, 32]"),
    ("hydra", "", {"prefix.intermediate_size": 10**9}, "expected [1000000000, 32]"),
    ("hydra", "", {"prefix.hidden_size": 10**9}, "is 1000000000, expected hidden_size 32"),
    ("hydra", "", {"prefix.head_dim": 10**9}, "shape"),
    ("hydra", "", {"prefix.attn_implementation": "some/kernel"}, "is not a size of a prefix layer"),
    ("hydra", "", {"prefix": None}, "prefix_layer is True, expected False, as prefix says"),
    ("mtp", "", {"block.num_hidden_layers": 10**9}, "a head is one layer"),
    ("mtp", "", {"block.head_dim": 10**9}, "shape"),
    ("mtp", "", {"block.intermediate_size": 10**10}, "expected [10000000000, 32]"),
    ("mtp", "", {"block.hidden_size": 10**15}, "size is 1000000000000000, expected at most"),
    ("mtp", "", {"block.attn_implementation": "some/kernel"}, "must not be there"),
    ("mtp", "", {"block.rope_parameters.partial_rotary_factor": 1e9}, "expected 0 to 1"),
    ("mtp", "", {"num_heads": 9}, "lacks 91 of 117 tensors"),
    ("adapter", "adapter/adapter_config", {"r": 10**9}, "r is 1000000000, the tensors have [4]"),
    ("adapter", "adapter/adapter_config", {"lora_alpha": 1e300}, "lora_alpha is 1e+300"),
    ("adapter", "adapter/adapter_config", {"use_rslora": True}, "use_rslora is True, expected"),
    ("adapter", "adapter/adapter_config", {"target_modules": "all-linear"}, "expected names"),
    ("adapter", "adapter/adapter_config", {"target_modules": ["x"]}, "the base has no x"),
    ("medusa", "base/config", {"vocab_size": HUGE}, "its files hold"),
    ("medusa", "base/config", {"intermediate_size": 10**9}, "its files hold"),
    ("medusa", "base/config", {"num_hidden_layers": 10**9}, "expected at most 1024"),
    ("medusa", "base/config", {"num_hidden_layers": 1}, "9 weights are of no use in its files"),
    ("medusa", "base/config", {"num_attention_heads": 0}, "base/config.json describes no model"),
    ("medusa", "base/config", {"model_type": "nothing"}, "base/config.json describes no model"),
    ("medusa", "base/config", {"transformers_weights": "../x.safetensors"}, "must not be there"),
    ("medusa", "base/config", {"quantization_config": {"quant_method": "x"}}, "must not be there"),
    ("medusa", "base/config", {"auto_map": {"AutoConfig": "a--b.C"}}, "auto_map must not be there"),
    ("medusa", "base/config", {"attn_implementation": "a/kernel"}, "asks for the code of a/kernel"),
    ("medusa", "base/generation_config", {"eos_token_id": 10**9}, "eos_token_id is 1000000000"),
    ("draft", "config", {"vocab_size": HUGE}, "its files hold"),
    ("draft", "config", {"num_hidden_layers": 10**9}, "expected at most 1024"),
    ("draft", "specheads", {"format_version": 9}, "format version 9, this specheads reads 2"),
    ("draft", "specheads", {"base.name": "../x"}, "base.name is '../x'"),
    ("draft", "specheads", {"measured": {"alpha": "x"}}, "measured.alpha is 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "changes", "complaint"),
    CONFIGS,
    ids=[f"{c[0]}-{list(c[2])[0]}" for c in CONFIGS],
)
def test_numbers_of_a_config(
    shared: dict[str, Path], kind: str, name: str, changes: dict[str, Any], complaint: str
) -> None:
    """A number in a text file must not take the memory or the hours of a machine."""
    file = shared[kind] / f"{name or 'config'}.json"
    before = file.read_bytes()
    try:
        edit(file, changes)
        assert str(shared[kind]) in refused(shared[kind], complaint)
    finally:
        file.write_bytes(before)
        write_manifest(shared[kind])


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**5}, r"num_hidden_layers is 100000, expected at most 1024"),
    ({"num_hidden_layers": 10**12}, r"num_hidden_layers is 1000000000000, expected at most 1024"),
    ({"text_config.num_hidden_layers": 10**5}, r"num_hidden_layers is 100000, expected"),
    ({"n_layers": 10**5}, r"n_layers is 100000, expected at most 1024"),
    ({"num_local_experts": 10**8}, r"num_local_experts is 100000000, expected at most 65536"),
    ({"vocab_size": HUGE}, r"a model of [\d,]+ weights .* its files hold"),
    ({"intermediate_size": 10**9}, r"a model of [\d,]+ weights .* its files hold"),
    ({"hidden_size": 10**7, "head_dim": 16}, r"a model of [\d,]+ weights .* its files hold"),
]


@pytest.mark.parametrize(("changes", "complaint"), FOREIGN, ids=lambda x: str(x)[:30])
def test_sizes_of_a_foreign_base(
    tiny_model_dir: Path, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    """A number in the config of a model that was downloaded must not take the machine either."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    edit(folder / "config.json", changes)
    with bounded(), pytest.raises(ConfigError, match=complaint) as caught:
        load_base_model(str(folder))
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


def test_sizes_of_a_base_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config comes before its weights, and is all that there is to look at."""
    config = {"model_type": "qwen2", "num_hidden_layers": 10**9}
    monkeypatch.setattr(base, "resolve_name", lambda name: name)
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", lambda *args, **kwargs: (config, {}))
    complaint = "model.name=some/model: num_hidden_layers is 1000000000, expected at most 1024"
    for load_it in (load_base_model, recorded_dtype):
        with bounded(), pytest.raises(ConfigError, match=complaint):
            load_it("some/model")


def test_what_is_not_counted_may_be_large(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Widths whose names hold "expert" or "layer" would refuse whole families of models."""
    changes = {
        "shared_expert_intermediate_size": 5632, "vocab_size_per_layer_input": 262_144,
        "expert_ffn_hidden_size": 2048, "block_size": 4096, "num_experts": 16_384,
    }  # fmt: skip
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    edit(folder / "config.json", changes)
    shutil.copytree(folder, folder / "base")
    write_manifest(folder)
    for path in (folder, folder / "base"):  # another's, and an export's own
        assert load_base_model(str(path)).config.block_size == 4096


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": [1e999]}', "1e999 is not a finite number"),
        ('{"a": -Infinity}', "is not a finite number"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested too deeply"),
        ("[" * 10**6, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "cannot read"),
        ("[]", "must hold an object, found list"),
        ("", "cannot read"),
        ("\ufeff{}", "cannot read"),
        ('{"a": "\ud800"}', None),
    ],
)  # fmt: skip
def test_json_that_is_none(tmp_path: Path, text: str, complaint: str | None) -> None:
    """What two programs read in two ways is checked by one and used by the other."""
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_json(file, "no")
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_json_that_is_no_file_or_too_large(tmp_path: Path) -> None:
    """A pipe is waited for without end, a sparse file of a terabyte takes a terabyte."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is no file"):
        read_json(tmp_path / "pipe", "no")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="has 1099511627776 bytes, at most"):
        read_json(tmp_path / "large", "no")


def test_headers_of_tensor_files(exports: dict[str, Path]) -> None:
    """A header may claim ten terabytes, or itself be as long; nothing is allocated for it."""
    file = exports["medusa"] / "model.safetensors"
    whole = file.read_bytes()
    header = json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])
    first = next(key for key in header if key != "__metadata__")
    header[first] |= {"shape": [10**6, 10**7], "data_offsets": [0, 4 * 10**13]}
    claimed = json.dumps(header).encode()
    for start in (
        struct.pack("<Q", len(claimed)) + claimed,
        struct.pack("<Q", 10**13) + b"{}",
        struct.pack("<Q", 2**64 - 1),
        b"",
        b"\0" * 8,
    ):
        file.write_bytes(start)
        refused(exports["medusa"], "model.safetensors is damaged")


def test_tensors_of_another_kind(exports: dict[str, Path]) -> None:
    """Whole numbers or NaN in place of weights decode, and nothing is ever accepted."""
    file = exports["medusa"] / "model.safetensors"
    tensors = load_file(file)
    weight = "heads.0.lm_head.weight"
    for name, value, complaint in (
        (weight, tensors[weight].long(), f"{weight} holds I64, expected F64 or F32"),
        (weight, tensors[weight] / 0.0, f"{weight} holds numbers that are not finite"),
        ("token_map", tensors["token_map"].float(), "token_map holds F32, expected I64"),
        ("token_map", tensors["token_map"] + 240, "40 different tokens, 240 to 279, expected 40"),
        ("token_map", tensors["token_map"] - 1, "40 different tokens, -1 to 38, expected 40"),
        (
            "token_map",
            tensors["token_map"] // 2,
            "token_map holds 20 different tokens, 0 to 19, expected 40",
        ),
    ):
        save_file(tensors | {name: value}, file)
        refused(exports["medusa"], complaint)


@pytest.mark.parametrize(
    "name",
    ["../secret.json", "/etc/hostname", "base/../../x", "a\\b", "./config.json", "", "."],
)
def test_names_in_a_manifest(exports: dict[str, Path], name: str) -> None:
    """Sizes and digests of files anywhere on the machine are nobody's business."""
    file = exports["medusa"] / MANIFEST
    content = json.loads(file.read_text())
    content["files"][name] = {"size": 1, "sha256": "0" * 64}
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="manifest.json lists .* which is no file of that folder"):
        load_export(exports["medusa"])


def test_a_name_in_a_manifest_does_not_steer_the_terminal(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one line that refuses an export quotes what the stranger wrote."""
    file = exports["medusa"] / MANIFEST
    content = json.loads(file.read_text())
    content["files"]["base/\x1b]0;x\x07\x9b2J\u202e"] = {"size": 1, "sha256": "0"}
    file.write_text(json.dumps(content))
    monkeypatch.setattr("sys.argv", ["generate", f"checkpoint={exports['medusa']}", "prompt=x"])
    with pytest.raises(SystemExit) as stopped:
        generate.main()
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and "base/\\u001b]0;x\\u0007\\u009b2J\\u202e" in err
    assert harmless(err) == err and err.count("\n") == 1


@pytest.mark.parametrize(
    "entry", [None, 3, {}, {"size": "1", "sha256": "0" * 64}, {"size": 1, "sha256": "0" * 63}]
)
def test_entries_of_a_manifest(exports: dict[str, Path], entry: object) -> None:
    """A digest that is no digest would be a traceback, or match nothing."""
    file = exports["medusa"] / MANIFEST
    content = json.loads(file.read_text())
    content["files"]["config.json"] = entry
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="must give config.json a size and a sha256"):
        load_export(exports["medusa"])


@pytest.mark.parametrize(
    "name",
    ["base/pytorch_model.bin", "base/modeling_x.py", "added_tokens.json",
     "base/adapter_config.json", "base/model.safetensors.index.json", "chat_templates/x.jinja"],
)  # fmt: skip
def test_files_that_no_manifest_lists(exports: dict[str, Path], name: str) -> None:
    """Transformers takes whatever lies in a folder under the names that it knows."""
    file = exports["medusa"] / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    with pytest.raises(ConfigError, match=f"holds {name}, which its manifest.json does not list"):
        load_export(exports["medusa"])
    file.unlink()
    (exports["medusa"] / "README.md").write_text("the card stays editable")
    (exports["medusa"] / ".gitattributes").write_text("* text")
    load_export(exports["medusa"])


def test_an_adapter_in_a_base_is_not_loaded(exports: dict[str, Path]) -> None:
    """Transformers would load it by itself, from wherever it says, over the base of the export."""
    (exports["medusa"] / "base" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    refused(exports["medusa"], "holds adapter_config.json, which was not saved with it")


def test_links_do_not_leave_an_export(exports: dict[str, Path], tmp_path: Path) -> None:
    """A link in an unpacked archive reads, or publishes again, what lies elsewhere."""
    path = exports["medusa"]
    for name in ("model.safetensors", "tokenizer.json", "base/config.json"):
        file = path / name
        (tmp_path / "elsewhere").write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(tmp_path / "elsewhere")
        line = refused(path, f"is a link to {tmp_path / 'elsewhere'}, outside of")
        assert str(file) in line
        file.unlink()
        file.write_bytes((tmp_path / "elsewhere").read_bytes())
    refusal(path)


def test_an_export_in_the_cache_of_the_hub(exports: dict[str, Path], tmp_path: Path) -> None:
    """There every file is a link to a blob beside the snapshots, and that is no attack."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    for number, file in enumerate(sorted(exports["medusa"].rglob("*"))):
        if file.is_file():
            blob = tmp_path / "models--a--b" / "blobs" / f"{number:040x}"
            blob.write_bytes(file.read_bytes())
            link = snapshot / file.relative_to(exports["medusa"])
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    assert load_export(snapshot).config["kind"] == "medusa"


@pytest.mark.parametrize(
    "name",
    ["../../x", "./x", "~/x", "a/b/c", "a/../b", "..", ".", "/a/../b", 3, None, "a\0b", "-x y", "http://x/y",
     "C:\\x"],
)  # fmt: skip
def test_names_of_a_base(exports: dict[str, Path], name: object) -> None:
    """A downloaded config must not choose a folder relative to where its user happens to be."""
    edit(exports["mtp"] / "config.json", {"base.name": name})
    refused(exports["mtp"], "which is neither a name on the hub nor the full path of a folder")


@pytest.mark.parametrize("revision", ["../x", "/x", "a//b", "a/../../b", "", 3, "a b"])
def test_revisions_of_a_base(exports: dict[str, Path], revision: object) -> None:
    """A revision is a part of a path in the hub's cache."""
    edit(exports["mtp"] / "config.json", {"base.revision": revision})
    refused(exports["mtp"], "which names no revision")


def test_a_full_path_is_only_compared(
    exports: dict[str, Path], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own exports name the folders of a machine; another's may name any, of any weights."""
    from specheads.models import checkpoint

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("loaded from a path that a stranger chose")

    monkeypatch.setattr(checkpoint, "load_base_model", never)
    monkeypatch.setattr(checkpoint, "load_tokenizer", never)
    edit(exports["mtp"] / "config.json", {"base.name": str(exports["draft"])})
    refused(exports["mtp"], "was trained on other weights than those of")


def test_the_index_of_a_base_names_its_own_files(tmp_path: Path, tiny_model_dir: Path) -> None:
    """``weight_map`` is joined to the folder as it stands."""
    for file in tiny_model_dir.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    for name in (str(tiny_model_dir / "model.safetensors"), "../model.safetensors", "x.bin", 3):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
        with pytest.raises(ConfigError, match="no safetensors file beside it|is damaged"):
            load_base_model(str(tmp_path))
        with pytest.raises(ConfigError, match="no safetensors file beside it|is damaged"):
            base_digest(str(tmp_path))
    for text in ("[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": []}}'):
        index.write_text(text)
        with pytest.raises(ConfigError, match="must hold an object 'weight_map'"):
            weight_files(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt", "model.pth"])
def test_pickle_is_refused(tmp_path: Path, tiny_model_dir: Path, name: str) -> None:
    """A pickle runs code when it is loaded; the folder it comes in looks like any other."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    for file in tiny_model_dir.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({"lm_head.weight": Bomb()}, tmp_path / name)
    with pytest.raises(
        ConfigError, match=f"but {name}: specheads loads safetensors alone"
    ) as caught:
        load_base_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()


def test_kernels_are_code(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A config can ask for attention from the hub, which is Python and machine code."""
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit(tmp_path / "config.json", {"attn_implementation": "someone/kernel"})
    with pytest.raises(ConfigError, match="asks for the code of someone/kernel"):
        load_base_model(str(tmp_path), attn="auto")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": "1.0"}', "[" * 10**5])
def test_tokenizers_are_read_or_refused(tmp_path: Path, tiny_model_dir: Path, text: str) -> None:
    """The library in Rust raises what nobody expects, or panics."""
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_model_dir / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot load a tokenizer of") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_manifest_of_a_draft_model(exports: dict[str, Path]) -> None:
    """A draft model with a flipped bit is slower and nothing else: nobody would look there."""
    path = exports["draft"]
    assert set(check_manifest(path)["files"]) >= {
        "model.safetensors",
        "config.json",
        "specheads.json",
    }
    (path / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="is not a whole export: there is no"):
        load(path)
