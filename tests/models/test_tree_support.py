"""What a model can be decoded with is known before it is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from specheads.attention import mask as tree_mask
from specheads.attention.tree import RowTrees, Tree, default_tree
from specheads.config import ConfigError
from specheads.decoding.loop import decode, first_chain, plain_decode
from specheads.drafters.contract import Candidates
from specheads.models import support as support_module
from specheads.models.support import Support, compare, tree_support
from tests.scripted import ScriptedDrafter
from tests.zoo import CHAIN_MODELS, REFUSED_MODELS, TREE_MODELS, VOCAB, build

# the softest limit decides whether a wrong model is seen, the sharpest whether a right one is lost
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("name", TREE_MODELS)
def test_models_that_can_branch_pass(name: str) -> None:
    """Prevents a self-test so strict that rounding fails it, in bfloat16 as well."""
    for dtype in DTYPES:
        support = tree_support(build(name).to(dtype))
        assert support.kind == "tree"
        assert support.error < support.limit / 3, "near its limit, the next model fails it"


@pytest.mark.parametrize("name", CHAIN_MODELS)
def test_models_that_cannot_branch_get_chains(name: str) -> None:
    """Prevents wrong text without a word where attention counts slots; or no text at all."""
    for dtype in DTYPES:
        support = tree_support(build(name).to(dtype))
        assert support.kind == "chain"
        assert ("ALiBi" in support.reason) != (name == "gpt_neo")
        support.check_batch(1)
        with pytest.raises(ValueError, match="chains of 1 row at a time, got 2 rows"):
            support.check_batch(2)


@pytest.mark.parametrize("name", sorted({*CHAIN_MODELS} - {"gpt_neo"}))
def test_the_self_test_finds_alibi_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a list of names as the only guard: the next model is on no list."""
    monkeypatch.setattr(support_module, "_has_alibi", lambda model: False)
    support = tree_support(build(name))
    assert support.kind == "chain"
    assert "fails the tree self-test" in support.reason


@pytest.mark.parametrize(
    "name,reason",
    [
        ("mamba", "recurrent state"),
        ("qwen3_next", "recurrent state"),
        ("lfm2", "recurrent state"),
        ("deepseek_v32", "DynamicIndexedLayer"),
        ("moshi", "a window of 6 tokens, but asks for no mask"),
    ],
)
def test_models_that_cannot_forget_are_refused(name: str, reason: str) -> None:
    """Prevents a rejected guess that stays in the state and changes all text after it."""
    assert name in REFUSED_MODELS
    model = build(name)
    with pytest.raises(ConfigError, match=reason):  # one line in every command
        tree_support(model)
    with pytest.raises(ConfigError, match=reason):  # our cache is no better alone
        plain_decode(model, torch.zeros(1, 4, dtype=torch.long), max_new_tokens=4)


def test_dropout_is_refused_even_after_a_pass(tiny_llama: LlamaForCausalLM) -> None:
    """Prevents a remembered answer for a model that has changed since."""
    assert tree_support(tiny_llama) is tree_support(tiny_llama)
    tiny_llama.train()
    with pytest.raises(ValueError, match="training mode"):
        tree_support(tiny_llama)


@pytest.fixture
def maskless() -> Iterator[str]:
    """Return the name of an attention that is causal and takes no mask, as flash attention is."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(
            key.shape[2] - query.shape[2]
        )
        output = nn.functional.scaled_dot_product_attention(query, key, value, seen)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("maskless", attend)
    AttentionMaskInterface.register("maskless", ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    yield "maskless"


def test_attention_without_masks_gets_chains(maskless: str) -> None:
    """Prevents a tree under flash attention, where all nodes would see each other."""
    model = build("llama")
    model.config._attn_implementation_internal = maskless
    support = tree_support(model)
    assert support.kind == "chain"
    assert "uses maskless attention, which takes no tree's mask" in support.reason


def test_attention_that_cannot_run_is_refused(tiny_llama: LlamaForCausalLM) -> None:
    """Prevents a traceback in the first step of a decoding that was promised to work."""
    tiny_llama.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="step by step with flash_attention_2 attention: "):
        tree_support(tiny_llama)


def test_a_declared_window_must_be_masked() -> None:
    """Prevents text that goes on as if a window were not there, which is transformers' cache's."""
    for model in (build("mistral-window", sliding_window=200), build("llama")):
        model.config.sliding_window = 200
        if isinstance(model, LlamaForCausalLM):
            ids = torch.randint(VOCAB, (1, 9))
            with pytest.raises(ConfigError, match="a window of 200 tokens, but asks for no mask"):
                plain_decode(model, ids, max_new_tokens=4)
            model.config.sliding_window = 256  # no text is longer
        assert tree_support(model).kind == "tree"


def broken_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nodes see each other."""

    def all_seen(tree: Tree, num_cached: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(1, 1, tree.num_nodes, num_cached + tree.num_nodes, dtype=dtype)

    monkeypatch.setattr(tree_mask, "causal_tree_mask", all_seen)


def broken_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore what positions are given."""
    original = LlamaForCausalLM.forward

    def with_slots(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", with_slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_self_test_sees_what_it_is_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a self-test that passes everything."""
    with monkeypatch.context() as patch:
        broken_positions(patch)
        assert "fails the tree self-test" in tree_support(build("llama").to(dtype)).reason
    broken_masks(monkeypatch)
    assert "fails the tree self-test" in tree_support(build("llama").to(dtype)).reason
    monkeypatch.setattr(support_module.TreeCache, "commit", lambda cache, path, counts: None)
    with pytest.raises(ValueError, match="logits in a chain with a rejected guess differ"):
        tree_support(build("llama").to(dtype))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "llama4"])
def test_comparison_holds_beyond_the_window_and_for_any_shape(name: str) -> None:
    """Prevents a doctor who finds sound models ill."""
    model = build(name)
    for tree in (Tree.chain(1), Tree.chain(6), Tree.from_choices([(i,) for i in range(9)])):
        for num_prompt_tokens in (1, 5, 40):
            assert compare(model, tree, num_prompt_tokens).passes


@torch.no_grad()
def test_nothing_changes_for_others(tiny_llama: LlamaForCausalLM) -> None:
    """Prevents a wrapper that leaks into training or into other people's generate()."""
    ids = torch.randint(VOCAB, (1, 6))
    before = tiny_llama(ids).logits
    tree_support(tiny_llama)
    assert tiny_llama(ids).logits.equal(before)


def test_the_self_test_takes_no_time() -> None:
    """Prevents a start that users wait for: it runs before the first token of every new model."""
    model: PreTrainedModel = build("llama")
    tokens: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    tree_support(model)
    assert len(tokens) <= 5 and sum(tokens) <= 300
    tree_support(model)
    assert len(tokens) <= 5, "what was found is not remembered"


def test_first_chain_keeps_what_belongs_together() -> None:
    """Prevents guesses that hang under other guesses than those they were made for."""
    tree = Tree.from_choices([(1,), (2,), (1, 3), (2, 0), (2, 1), (1, 3, 0), (2, 0, 0)])
    tokens = torch.tensor([[9, 10, 20, 13, 21, 22, 30, 40]])
    probs = torch.rand(1, 8, VOCAB)
    rows = RowTrees.from_parents(tree.parents[None], tree.max_depth)
    for shape in (tree, rows):
        chain = first_chain(Candidates(tokens, shape, probs, "without_replacement"))
        assert chain.tokens.tolist() == [[9, 10, 13, 30]]
        assert chain.tree == Tree.chain(3)
        assert chain.draft_probs is not None
        assert chain.draft_probs.equal(probs[:, [0, 1, 3, 6]])
        assert chain.sampling == "chain"


@pytest.mark.parametrize("name", CHAIN_MODELS)
def test_chain_models_decode_exactly_and_alone(name: str) -> None:
    """Prevents trees, or rows of a batch, where masks do not reach."""
    model = build(name)
    ids = torch.randint(VOCAB, (1, 9))
    plain = plain_decode(model, ids, max_new_tokens=20)
    drafter = ScriptedDrafter(default_tree(4, 16), plain.sequences[0].tolist(), 0.7)
    result = decode(model, drafter, ids, max_new_tokens=20)
    assert result.sequences.equal(plain.sequences)
    assert result.accept_length > 1.5
    for run in (plain_decode, partial(decode, drafter=drafter)):
        with pytest.raises(ValueError, match="1 row at a time, got 2 rows"):
            run(model, input_ids=ids.repeat(2, 1), max_new_tokens=4)
        with pytest.raises(ValueError, match="compile=True needs a model that verifies trees"):
            run(model, input_ids=ids, max_new_tokens=4, compile=True)


def test_support_says_what_it_means() -> None:
    """Prevents a batch refused where trees are possible."""
    Support("tree", "", 0.0, 1.0).check_batch(64)
    assert tree_mask.SUPPORTED_ATTENTION == ("sdpa", "eager", "flex_attention")
