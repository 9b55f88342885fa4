"""Exports: everything comes back bit for bit, and nothing wrong is loaded."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specheads.attention.tree import Tree
from specheads.config import ConfigError, HeadsConfig, ModelConfig, RunError
from specheads.models import checkpoint
from specheads.models.base import load_base_model
from specheads.models.checkpoint import (
    load_export,
    load_heads,
    origin,
    read_config,
    save_export,
    save_plain_model,
    set_tree,
)
from specheads.models.heads import MedusaHeads
from specheads.models.manifest import check_manifest, write_manifest
from specheads.models.names import base_digest
from specheads.models.output import OutputLayer
from specheads.training.setup import _start_from
from tests.toys import toy_config

TREE = Tree.from_choices([[0], [1], [0, 0], [0, 0, 0]])
IDS = torch.arange(20)[None]


def _heads(lm_head: str = "own", num_layers: int = 1, **sizes: int) -> MedusaHeads:
    torch.manual_seed(3)
    heads = MedusaHeads(3, num_layers, sizes.get("hidden", 32), sizes.get("vocab", 272), lm_head)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return heads


def _save(path: Path, model_dir: Path, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "heads": _heads(),
        "tokenizer": tokenizer,
        "tree": TREE,
        "info": origin(str(model_dir), {"recipe": "medusa1", "steps": 4}),
        **changes,
    }
    save_export(path, **settings)
    return path


@pytest.fixture
def export(tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A medusa1 export over the tiny model."""
    return _save(tmp_path / "export", tiny_model_dir, byte_tokenizer)


def _edit(path: Path, **changes: Any) -> None:
    """Change config.json as a wrong tool would, manifest included, to reach the later checks."""
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (config[section] if section else config)[name] = value
    (path / "config.json").write_text(json.dumps(config))
    write_manifest(path)


def _edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    write_manifest(path)


@pytest.mark.parametrize(
    ("lm_head", "num_layers"), [("own", 1), ("own", 0), ("own", 2), ("shared", 2)]
)
def test_round_trip(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast,
    tiny_llama: PreTrainedModel, lm_head: str, num_layers: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A tensor that is trained but not saved comes back as its random initial value."""
    heads = _heads(lm_head, num_layers)
    path = _save(tmp_path / "e", tiny_model_dir, byte_tokenizer, heads=heads)
    loaded = load_export(path)
    expected = heads.state_dict()
    assert loaded.heads.state_dict().keys() == expected.keys()
    assert all(torch.equal(v, expected[k]) for k, v in loaded.heads.state_dict().items())
    assert not loaded.heads.training
    assert all(not p.is_meta for p in loaded.heads.parameters())
    assert torch.equal(loaded.base(IDS).logits, tiny_llama(IDS).logits)
    assert loaded.tree == TREE
    assert loaded.tokenizer.chat_template == byte_tokenizer.chat_template
    assert loaded.tokenizer("é<eos>").input_ids == byte_tokenizer("é<eos>").input_ids
    monkeypatch.setattr(checkpoint, "_SMALL_HEADS", 0)
    narrow = load_export(path, dtype="bfloat16")
    assert all(p.dtype is torch.bfloat16 for p in narrow.heads.parameters())
    monkeypatch.undo()
    narrow = load_export(path, dtype="bfloat16")  # small ones are faster so on a CPU
    assert all(p.dtype is torch.float32 for p in narrow.heads.parameters())
    assert narrow.base.dtype is torch.bfloat16


def test_the_schema_is_whole(export: Path) -> None:
    """Other tools read these keys; a missing one breaks them, not us."""
    config = read_config(export)
    assert list(config) == [
        "format_version", "kind", "num_heads", "num_layers", "lm_head", "rank", "num_kept",
        "correction", "markov_rank", "prefix_layer", "prefix", "hidden_size", "vocab_size", "base",
        "tokenizer", "tree", "training",
    ]  # fmt: skip
    assert list(config["base"]) == [
        "name", "tuned", "adapter", "revision", "digest", "dtype", "quantization",
    ]  # fmt: skip
    assert list(config["tree"]) == ["choices", "expected_accept_length", "measured_on"]
    assert config["base"]["dtype"] == "float32"
    assert set(load_file(export / "model.safetensors")) == {
        f"heads.{i}.{name}"
        for i in range(3)
        for name in ("blocks.0.weight", "blocks.0.bias", "lm_head.weight")
    }
    listed = set(check_manifest(export)["files"])
    assert {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"} <= listed


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_tuned_base_comes_back(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast,
    make_tiny_llama: Callable[..., PreTrainedModel], tied: bool, dtype: str | None,
) -> None:  # fmt: skip
    """Heads tuned with a base are useless over the original one, and fail silently there."""
    tuned = make_tiny_llama(seed=5, tie_word_embeddings=tied)
    path = _save(tmp_path / "e", tiny_model_dir, byte_tokenizer, tuned_base=tuned, dtype=dtype)
    loaded = load_export(path)
    assert loaded.base.dtype == (torch.bfloat16 if dtype else torch.float32)
    assert tuned.dtype == torch.float32, "saving must not change the model that goes on training"
    expected = {k: v.to(loaded.base.dtype) for k, v in tuned.state_dict().items()}
    assert loaded.base.state_dict().keys() == expected.keys()
    assert all(torch.equal(v, expected[k]) for k, v in loaded.base.state_dict().items())
    plain = AutoModelForCausalLM.from_pretrained(path / "base")
    assert plain.dtype == loaded.base.dtype
    assert AutoTokenizer.from_pretrained(path / "base")("a").input_ids == [97]
    saved = load_file(path / "base" / "model.safetensors")
    assert ("lm_head.weight" in saved) == (not tied), "a tied matrix is written once"
    info = loaded.config["base"]
    assert (info["name"], info["tuned"]) == (str(tiny_model_dir), True)
    assert info["digest"] == base_digest(str(tiny_model_dir)), "of the original"
    with pytest.raises(ConfigError, match="brings its own tuned base model"):
        load_export(path, base=str(tiny_model_dir))


def test_a_base_in_a_folder_is_found_from_elsewhere(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A relative model.name would be looked for below whatever folder decoding starts in."""
    monkeypatch.chdir(tiny_model_dir.parent)
    path = _save(tmp_path / "e", Path(tiny_model_dir.name), byte_tokenizer)
    monkeypatch.chdir(tmp_path)
    assert load_export(path).config["base"]["name"] == str(tiny_model_dir.resolve())
    _edit(path, base__name=str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="needs its base model: .*gone: there is no such folder"):
        load_export(path)


def _other_base(tmp_path: Path, make: Callable[..., PreTrainedModel], **values: Any) -> str:
    path = tmp_path / "other"
    make(**values).save_pretrained(path)
    return str(path)


def test_a_wrong_base_is_refused(
    export: Path, tmp_path: Path, tiny_model_dir: Path,
    make_tiny_llama: Callable[..., PreTrainedModel], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Heads over other weights of the same shape load well and are never accepted."""
    moved = shutil.copytree(tiny_model_dir, tmp_path / "moved")
    load_export(export, base=str(moved))
    other = _other_base(tmp_path, make_tiny_llama, seed=1)
    digests = (base_digest(str(tiny_model_dir))[:12], base_digest(other)[:12])
    with pytest.raises(ConfigError, match="{} recorded, {} found".format(*digests)):
        load_export(export, base=other)
    load_export(export, base=other, other_base=True)
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "recorded" in each]
    assert "{} recorded, {} found".format(*digests) in line and "tokens stay exact" in line
    other = _other_base(tmp_path, make_tiny_llama, vocab_size=280)
    with pytest.raises(ConfigError, match="with 272 outputs, .* has 280"):
        load_export(export, base=other)
    other = _other_base(tmp_path, make_tiny_llama, hidden_size=64)
    with pytest.raises(ConfigError, match="with 32 hidden numbers, .* has 64"):
        load_export(export, base=other, other_base=True)


def test_heads_start_on_another_base_by_request_alone(
    export: Path, tmp_path: Path, make_tiny_llama: Callable[..., PreTrainedModel]
) -> None:
    """Heads of other weights start worse than none, and a folder is easily mistaken."""
    other = _other_base(tmp_path, make_tiny_llama, seed=1)
    settings = replace(toy_config(tmp_path / "run"), heads=HeadsConfig(start=str(export)))
    settings = replace(settings, model=ModelConfig(name=other))
    heads = load_heads(export)
    with pytest.raises(ConfigError, match=r"other weights.* model\.other_base=true"):
        _start_from(settings, heads)
    settings.model.other_base = True
    _start_from(settings, heads)


def test_a_tokenizer_beyond_the_base_is_refused(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """The tokenizer of another model is an index error at some later prompt."""
    byte_tokenizer.add_tokens([f"<extra{i}>" for i in range(20)])
    path = _save(tmp_path / "e", tiny_model_dir, byte_tokenizer)
    with pytest.raises(ConfigError, match="has 282 token ids, .* has 272 embeddings"):
        load_export(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format_version": 9}, "format version 9, this specheads reads 1"),
        ({"format_version": None}, "is not an export"),
        ({"kind": "draft"}, "kind 'draft', this specheads reads 'medusa', 'hydra', 'mtp'"),
        ({"kind": "mtp"}, "lacks variant"),
        ({"base__name": ""}, "base.name is empty, and the export has no base of its own"),
        ({"tree__choices": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "4 deep, but .* 3 heads"),
        ({"tree__choices": [[0, 0]]}, "tree: .*parent"),
        ({"tree__choices": [[272]]}, "rank 272, the vocabulary has 272"),
        ({"tree__choices": 5}, "tree.choices is 5, expected list"),
        ({"num_heads": 2, "tree__choices": [[0]]}, "9 tensors where 6 are expected"),
        ({"num_heads": 4}, "lacks 3 of 12 tensors, first heads.3.blocks.0.bias"),
        ({"num_layers": 2}, "lacks 6 of 15 tensors"),
        ({"lm_head": "shared"}, "9 tensors where 6 are expected; unexpected: heads.0.lm_head"),
        ({"hidden_size": 16}, r"has shape \[32, 32\], expected \[16, 16\]"),
        ({"base": {}}, "lacks base.name"),
    ],
)
def test_a_wrong_config_is_refused(export: Path, changes: dict[str, Any], complaint: str) -> None:
    """Every disagreement is one line with both numbers, before anything is decoded."""
    _edit(export, **changes)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_export(export)
    assert "\n" not in str(caught.value)
    assert str(export) in str(caught.value)


def test_missing_and_unexpected_tensors_are_refused(export: Path) -> None:
    """Unknown tensors that are skipped leave heads untrained: 0% acceptance in production."""
    _edit_tensors(export, lambda t: t.update({"heads.0.extra": torch.zeros(1)}))
    with pytest.raises(ConfigError, match="10 tensors where 9 .* unexpected: heads.0.extra"):
        load_export(export)
    _edit_tensors(export, lambda t: (t.pop("heads.0.extra"), t.pop("heads.1.lm_head.weight")))
    with pytest.raises(ConfigError, match="lacks 1 of 9 tensors, first heads.1.lm_head.weight"):
        load_export(export)


def test_truncated_and_changed_files_are_refused(export: Path, tmp_path: Path) -> None:
    """A copy that stopped half way, or a file changed by hand, is named."""
    file = export / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(
        ConfigError, match=f"has {len(whole) - 100} bytes, manifest.json says {len(whole)}"
    ):
        load_export(export)
    write_manifest(export)
    with pytest.raises(ConfigError, match="model.safetensors is damaged"):
        load_export(export)
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ConfigError, match="bytes, manifest"):
        load_export(export)
    write_manifest(export)
    file.write_bytes(whole)
    with pytest.raises(ConfigError, match="model.safetensors was changed .*sha256"):
        load_export(export)
    (export / "tokenizer.json").unlink()
    write_manifest(tmp_path)
    with pytest.raises(ConfigError, match="was changed|lacks tokenizer.json"):
        load_export(export)
    (export / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="is not a whole export"):
        load_export(export)
    with pytest.raises(ConfigError, match="is not an export .* there is no"):
        load_export(tmp_path / "none")


def test_a_full_disk_leaves_the_earlier_export(
    export: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast,
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An export that is half overwritten is worse than none; the new one is removed again."""
    before = {p: p.read_bytes() for p in export.rglob("*") if p.is_file()}
    neighbours = sorted(export.parent.iterdir())

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    places = (
        (checkpoint.manifest, "save_tensors"),
        (checkpoint.manifest, "write_json"),
        (checkpoint.manifest, "write_manifest"),
    )
    for module, place in places:
        with monkeypatch.context() as patch:
            patch.setattr(module, place, full)
            with pytest.raises(RunError, match="disk full.*untouched"):
                _save(export, tiny_model_dir, byte_tokenizer, tree=Tree.chain(1))
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        with pytest.raises(RunError, match="disk full"):
            _save(export, tiny_model_dir, byte_tokenizer, tuned_base=tiny_llama)
    assert {p: p.read_bytes() for p in export.rglob("*") if p.is_file()} == before
    assert sorted(export.parent.iterdir()) == neighbours
    assert load_export(export).tree == TREE


def test_saving_again_replaces_everything(
    export: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast,
    tiny_llama: PreTrainedModel,
) -> None:  # fmt: skip
    """A base/ left over from an earlier run must not be picked up by a later one."""
    _save(export, tiny_model_dir, byte_tokenizer, tuned_base=tiny_llama)
    assert (export / "base").is_dir()
    _save(export, tiny_model_dir, byte_tokenizer)
    assert not (export / "base").exists()
    assert not load_export(export).config["base"]["tuned"]


def test_set_tree(export: Path) -> None:
    """A measured tree replaces the old one; heads and manifest stay consistent."""
    tree = Tree.from_choices([[0], [0, 0], [1]])
    set_tree(export, tree, 1.9, {"device": "cpu", "nodes": 4})
    loaded = load_export(export)
    assert loaded.tree == tree
    assert loaded.config["tree"]["expected_accept_length"] == 1.9
    assert loaded.config["tree"]["measured_on"] == {"device": "cpu", "nodes": 4}
    assert not list(export.glob(".*"))
    with pytest.raises(ConfigError, match="4 deep, but there are 3 heads"):
        set_tree(export, Tree.chain(4))
    assert load_export(export).tree == tree


def test_a_tree_deeper_than_the_heads_is_not_saved(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """An export that nobody can load would be found out after the run."""
    with pytest.raises(ValueError, match="4 deep, but there are 3 heads"):
        _save(tmp_path / "e", tiny_model_dir, byte_tokenizer, tree=Tree.chain(4))
    assert not (tmp_path / "e").exists()


def test_plain_model(
    tmp_path: Path, tiny_llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """What pretraining leaves is an ordinary folder that model.name takes."""
    save_plain_model(tmp_path / "m", tiny_llama, byte_tokenizer, dtype="bfloat16")
    model = load_base_model(str(tmp_path / "m"))
    torch.testing.assert_close(model(IDS).logits, tiny_llama(IDS).logits, atol=0.1, rtol=0.1)
    assert load_file(tmp_path / "m" / "model.safetensors").popitem()[1].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"lm_head": "low_rank", "rank": 5},
        {"lm_head": "pruned", "num_kept": 30},
        {"lm_head": "shared_pruned", "num_kept": 30},
        {"condition": True, "prefix": {"hidden_size": 32, "num_attention_heads": 4}},
        {"markov_rank": 6, "condition": True},
    ],
)
def test_every_kind_of_heads_comes_back(
    options: dict[str, Any], tmp_path: Path, tiny_model_dir: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:  # fmt: skip
    """A part that is rebuilt instead of read back is random, and drafts like it."""
    torch.manual_seed(0)
    heads = MedusaHeads(3, 1, 32, 272, **options)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.2)
        if heads.token_map is not None:
            heads.token_map.copy_(torch.arange(100, 130))
    _save(tmp_path / "e", tiny_model_dir, byte_tokenizer, heads=heads)
    loaded = load_export(tmp_path / "e").heads
    assert loaded.kind == heads.kind and loaded.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(v, heads.state_dict()[k]) for k, v in loaded.state_dict().items())
    hidden, tokens = torch.randn(2, 4, 32), torch.randint(0, 272, (2, 4, 3))
    output, heads.embed = OutputLayer(torch.nn.Linear(32, 272)), loaded.embed
    positions = torch.arange(4).expand(2, 4)
    with torch.no_grad():
        expected, found = (
            each.logits(each.contextual(hidden, positions), output, tokens)
            for each in (heads, loaded)
        )
    torch.testing.assert_close(found, expected)  # loaded heads multiply with packed weights


def test_a_tree_uses_no_token_that_pruned_heads_do_not_know(
    tmp_path: Path, tiny_model_dir: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """It would only be found out by the drafter, after a model of many gigabytes was loaded."""
    heads = MedusaHeads(3, 1, 32, 272, "pruned", num_kept=4)
    path = _save(tmp_path / "e", tiny_model_dir, byte_tokenizer, heads=heads)
    wide = Tree.from_choices([[0], [4]])
    with pytest.raises(ConfigError, match="the tree uses rank 4, the heads know 4 tokens"):
        set_tree(path, wide)
    section = {"choices": wide.to_json(), "expected_accept_length": None, "measured_on": None}
    _edit(path, tree=section)
    with pytest.raises(ConfigError, match="the tree uses rank 4, the heads know 4 tokens"):
        load_export(path)
