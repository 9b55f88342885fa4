"""Draft models: made smaller, cut out of the base, loaded, saved; and never of other tokens."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specheads.config import ConfigError
from specheads.models import draft as draft_module
from specheads.models.checkpoint import origin
from specheads.models.draft import (
    check_same_tokenizer,
    draft_config,
    load_draft,
    new_draft,
    num_ids,
    pruned,
    save_draft,
    spread,
    take_end_tokens,
    vocab_size,
)
from specheads.models.manifest import read_provenance
from specheads.models.names import base_digest
from tests.conftest import build_byte_tokenizer, build_tiny_llama
from tests.zoo import TREE_MODELS, build

IDS = torch.randint(64, (2, 11), generator=torch.Generator().manual_seed(3))


def logits_of(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Return the logits without a cache, whose layers are numbered by the original."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def deep(kind: str, layers: int) -> PreTrainedModel:
    """Return a model of ``layers`` layers, every other one with sliding attention where it can."""
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if kind == "gpt2":
        changes["n_layer"] = layers
    if kind == "gemma3":
        kinds = ["full_attention", "sliding_attention"]
        changes["layer_types"] = [kinds[i % 2] for i in range(layers)]
    return build(kind, **changes)


@pytest.mark.parametrize("kind", sorted(set(TREE_MODELS) - {"llama-eager"}))
def test_a_smaller_model_of_every_architecture_runs(kind: str) -> None:
    """A size that is forgotten, or a layer's kind of attention, fails after an hour of loading."""
    base = deep(kind, 4)
    attn = base.config._attn_implementation
    for layers, hidden in ((1, 0), (2, 16), (4, 24)):
        if kind in ("deepseek_v3", "gemma2", "falcon") and hidden:
            continue  # whose other sizes are not the hidden size's
        small = new_draft(draft_config(base.config, layers, hidden), attn=attn)
        assert small.config.num_hidden_layers == layers and not small.training
        assert small.config.hidden_size == (hidden or base.config.hidden_size)
        assert vocab_size(small) == vocab_size(base)
        assert torch.isfinite(logits_of(small)).all()
        assert small.dtype == torch.float32


def test_heads_keep_their_width_and_groups() -> None:
    """Narrower heads than the base's need other kernels; a changed group is another model."""
    base = build_tiny_llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    small = draft_config(base.config, 1, 24)
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (3, 1, 8)
    assert small.intermediate_size == 32
    assert draft_config(base.config, 1, 32).num_key_value_heads == 2  # 4 heads: pairs fit
    assert draft_config(base.config, 2).to_dict() == base.config.to_dict()
    with pytest.raises(ConfigError, match=r"draft.hidden is 20, .* expected a multiple of 8"):
        draft_config(base.config, 1, 20)
    with pytest.raises(ConfigError, match="draft.layers is 3, the base model has 2 layers"):
        draft_config(base.config, 3)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_spread_layers_are_distinct_and_even(sizes: tuple[int, int]) -> None:
    """A layer taken twice, or a gap twice as wide as another, is not what evenly spread says."""
    total, number = sizes
    kept = spread(total, number)
    assert kept[0] == 0 and kept == sorted(set(kept)) and len(kept) == number
    if number > 1:
        gaps = [b - a for a, b in zip(kept, kept[1:], strict=False)]
        assert kept[-1] == total - 1 and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral-window", "gpt_neox", "opt"])
def test_a_pruned_base_is_the_base_without_those_layers(kind: str) -> None:
    """Weights that land one layer off make a model that trains, from worse than nothing."""
    base = deep(kind, 5)
    assert torch.equal(logits_of(pruned(base, range(5))), logits_of(base))
    keep = [0, 2, 4]
    found = pruned(base, keep)
    slow = copy.deepcopy(base)
    owner: Any = next(
        m for m in slow.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList)
    )
    owner.layers = nn.ModuleList([owner.layers[i] for i in keep])
    kinds = getattr(base.config, "layer_types", None)
    if kinds:
        slow.config.layer_types = [kinds[i] for i in keep]
    slow.config.num_hidden_layers = len(keep)
    torch.testing.assert_close(logits_of(found), logits_of(slow))
    assert not torch.equal(logits_of(found), logits_of(base))
    before = logits_of(base)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(1.0)
    assert torch.equal(logits_of(base), before)


@pytest.mark.parametrize("keep", [[], [1, 0], [0, 0], [-1], [2], [0, 5]])
def test_layers_that_are_none_are_refused(keep: list[int]) -> None:
    """Python takes layer -1 for the last one."""
    with pytest.raises(ConfigError, match="draft.keep is .*, expected rising layers .* 0 to 1"):
        pruned(build_tiny_llama(), keep)


def _other(**changes: Any) -> PreTrainedTokenizerFast:
    """Return the byte tokenizer with changes of its file."""
    backend = json.loads(build_byte_tokenizer().backend_tokenizer.to_str())
    backend["model"].update(changes)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token="<eos>"
    )


def test_tokenizers_are_compared_by_what_ids_mean() -> None:
    """A draft of another vocabulary is never accepted, and the output is right all the same."""
    base = build_byte_tokenizer()
    check_same_tokenizer(base, build_byte_tokenizer(chat_template=None), "draft=x")
    check_same_tokenizer(base, _other(), "draft=x")  # another end of text is the base's business
    vocabulary = base.get_vocab()
    swapped = {t: i for t, i in vocabulary.items() if len(t) == 1}
    swapped["a"], swapped["b"] = swapped["b"], swapped["a"]
    with pytest.raises(
        ConfigError, match="^draft=x: .* 2 of 262 tokens differ, first 'a', 97 .* 98"
    ):
        check_same_tokenizer(base, _other(vocab=swapped), "draft=x")
    longer = build_byte_tokenizer()
    longer.add_tokens(["<more>"])
    with pytest.raises(ConfigError, match="1 of 262 tokens differ, first '<more>', missing .* 262"):
        check_same_tokenizer(base, longer, "draft=x")


def test_tokenizers_that_cut_otherwise_are_told_apart() -> None:
    """The same tokens under other rules: the draft model knows texts in other pieces."""
    pairs = [("d", "e"), ("de", "f")]
    both = []
    for merges in (pairs, pairs[:1]):
        tokens = _other()
        backend = json.loads(tokens.backend_tokenizer.to_str())
        words = {t: i for t, i in tokens.get_vocab().items() if len(t) == 1}
        backend["model"]["vocab"] = words | {"de": 300, "def": 301}
        backend["model"]["merges"] = [list(pair) for pair in merges]
        both.append(
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))
        )
    check_same_tokenizer(both[0], both[0], "draft=x")
    with pytest.raises(ConfigError, match="cuts texts otherwise: 'def add.*301.*300"):
        check_same_tokenizer(both[0], both[1], "draft=x")
    split = build_byte_tokenizer()
    split.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ConfigError, match="cuts texts otherwise"):
        check_same_tokenizer(build_byte_tokenizer(), split, "draft=x")


def test_another_tokenizer_is_refused_before_the_model_is_loaded(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of loading for a line that the tokenizer's files already give."""
    found = load_draft(str(tiny_model_dir), tokenizer=build_byte_tokenizer())
    assert not found.training and num_ids(build_byte_tokenizer()) == 262
    longer = build_byte_tokenizer()
    longer.add_tokens(["<more>"])
    longer.save_pretrained(tmp_path)
    monkeypatch.setattr(draft_module, "load_base_model", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"^draft\.start=.*: its tokenizer is not the base"):
        load_draft(str(tmp_path), tokenizer=build_byte_tokenizer(), where="draft.start")
    with pytest.raises(ConfigError, match=r"^draft\.start=/no/such: there is no such folder"):
        load_draft("/no/such", tokenizer=build_byte_tokenizer(), where="draft.start")


def test_too_few_outputs_are_refused(tmp_path: Path) -> None:
    """A token that the draft model has no embedding for fails deep in a kernel."""
    build_tiny_llama(vocab_size=259).save_pretrained(tmp_path)
    build_byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has 259 outputs, the tokenizer has 262 token ids"):
        load_draft(str(tmp_path), tokenizer=build_byte_tokenizer())


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_saved_draft_is_an_ordinary_model(dtype: str | None, tmp_path: Path) -> None:
    """What vLLM or llama.cpp read is the folder's config and safetensors, and nothing of ours."""
    base = build_tiny_llama(num_hidden_layers=3)
    base.generation_config.temperature = 0.3  # without sampling: transformers will not save that
    base.generation_config.eos_token_id = [258, 261]
    draft = new_draft(draft_config(base.config, 1))
    take_end_tokens(draft, base)
    info = origin("tinycode", {"recipe": "distill", "steps": 3})
    info |= {"measured": {"final/alpha/t1": 0.5}}
    save_draft(tmp_path / "export", draft, build_byte_tokenizer(), info, dtype=dtype)
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.generation_config.eos_token_id == [258, 261]
    assert loaded.dtype == (torch.bfloat16 if dtype else torch.float32)
    if dtype is None:
        assert torch.equal(logits_of(loaded.eval()), logits_of(draft))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.chat_template == build_byte_tokenizer().chat_template
    found = read_provenance(tmp_path / "export")
    assert found is not None
    assert found["base"] == {
        "name": "tinycode", "revision": None, "digest": base_digest("tinycode"), "dtype": "float32",
    }  # fmt: skip
    assert found["kind"] == "draft" and found["measured"] == {"final/alpha/t1": 0.5}


def test_folders_of_other_make_say_nothing_of_their_origin(tmp_path: Path) -> None:
    """A hub model is as good a draft model as ours; a file of a later version is not guessed at."""
    assert read_provenance(tmp_path) is None
    for content, line in (
        ({"format_version": 3, "kind": "draft"}, "version 3, this specheads reads 2"),
        ({"format_version": 2, "kind": "medusa"}, "kind is 'medusa', expected 'draft'"),
    ):
        (tmp_path / "specheads.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=line):
            read_provenance(tmp_path)
