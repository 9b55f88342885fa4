"""Layers of multi-token prediction as they are built and trained."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.models.mtp import VARIANTS, MtpHeads, block_config, config_from_json
from specheads.models.output import OutputLayer, packed_taps
from tests import zoo

# every kind of attention, mask, norm, rotary table and feed-forward part that a last layer has
ALIKE = (
    "llama", "llama-eager", "qwen2", "qwen2-window", "qwen3", "mistral", "mistral-window",
    "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next",
)  # fmt: skip
UNLIKE = ("gpt2", "gpt_neox", "opt", "falcon", "bloom", "mpt", "mamba", "lfm2")
POSITIONS = torch.cat([torch.arange(12), torch.arange(9)]).expand(2, -1)  # two documents per row


def build(base: PreTrainedModel, variant: str = "parallel", **options: Any) -> MtpHeads:
    """Return two heads for ``base``."""
    return MtpHeads(2, block_config(base.config), zoo.VOCAB, variant=variant, **options).eval()


def run(heads: MtpHeads, base: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the base's final hidden states, and what the heads make of those they read."""
    hidden, tapped = packed_taps(base, ids, POSITIONS, heads.taps)
    heads.read_through(base)
    return hidden, heads.contextual(tapped, POSITIONS, ids)


def random_ids() -> Tensor:
    """Return two rows of tokens."""
    return torch.randint(0, zoo.VOCAB, POSITIONS.shape)


@pytest.mark.parametrize("name", ALIKE)
def test_copies_of_the_last_layer_say_what_the_base_says(name: str) -> None:
    """A layer that masks, rotates or bounds otherwise than the one it copies trains all the same.

    The same after a round through JSON, or exported heads draft with another layer.
    """
    base, ids = zoo.build(name), random_ids()
    for variant in VARIANTS:
        heads = build(base, variant)
        heads.init_from_base(base)
        again = MtpHeads(
            2, config_from_json(json.loads(json.dumps(heads.block))), zoo.VOCAB, variant=variant
        ).eval()
        again.load_state_dict(heads.state_dict())
        with torch.no_grad():
            hidden, found = run(heads, base, ids)
            torch.testing.assert_close(run(again, base, ids)[1], found, rtol=0, atol=0)
        if variant == "parallel":
            for each in found:
                torch.testing.assert_close(each, hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UNLIKE)
def test_models_of_another_build_are_refused(name: str) -> None:
    """A layer called with arguments it does not know fails in the middle of a run."""
    with pytest.raises(ValueError, match="MTP heads need a model built like Llama"):
        build(zoo.build(name))


def test_a_layer_with_a_state_is_refused() -> None:
    """Linear attention knows no packed documents: each would begin in its neighbour's state."""
    base = zoo.build("qwen3_next", layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ValueError, match="is of type linear_attention"):
        build(base)


def test_layers_keep_what_the_last_one_is() -> None:
    """Numbered 0, a layer of a model that mixes kinds would be of the first layer's kind."""
    dense = block_config(zoo.build("qwen3_moe", mlp_only_layers=[1]).config)
    assert not hasattr(MtpHeads(1, dense, zoo.VOCAB).layer(0).block.mlp, "experts")
    for step, experts in ((2, True), (3, False)):
        base = zoo.build("qwen3_moe", decoder_sparse_step=step)
        heads = build(base)
        assert hasattr(heads.layer(0).block.mlp, "experts") == experts
        heads.init_from_base(base)
    base = zoo.build("llama")
    base.config.no_rope_layers = [1, 0]
    assert block_config(base.config).no_rope_layers == [0]
    assert base.config.no_rope_layers == [1, 0] and base.config.num_hidden_layers == 2


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("variant", ["parallel", "sequential"])
def test_all_weights_are_drawn(name: str, variant: str) -> None:
    """Parameters of experts are made empty: what memory held before would be their start."""
    config = block_config(zoo.build(name).config)
    config.initializer_range = 0.02
    heads = MtpHeads(2, config, zoo.VOCAB, variant=variant, lm_head="own")
    for key, value in heads.named_parameters():
        if value.ndim > 1:
            assert 0.01 < value.detach().std() < 0.04 and value.detach().mean().abs() < 0.01, key
        else:
            assert bool(((value == 0) | (value == 1)).all()), key


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_positions_stay_exact_in_bfloat16(name: str) -> None:
    """A rotary table rounded to bfloat16 turns late positions by whole radians."""
    base = zoo.build(name)
    heads = build(base)
    tables = {key: value.clone() for key, value in heads.rotary_emb.named_buffers()}
    heads.to(torch.bfloat16).float()
    assert tables
    for key, value in heads.rotary_emb.named_buffers():
        assert value.dtype == torch.float32 and torch.equal(value, tables[key])
    assert not any(key.startswith("rotary") for key in heads.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_is_the_same_in_backward(variant: str) -> None:
    """Layers made again with other units dropped give gradients of another network."""
    base = zoo.build("llama", attention_dropout=0.5)
    heads = build(base, variant).train()
    heads.read_through(base)
    zoo.redraw(heads, seed=2)  # type: ignore[arg-type]
    hidden, ids = torch.randn(*POSITIONS.shape, heads.hidden_size), random_ids()
    grads = []
    for recompute in (True, False):
        if not recompute:  # the layers drop, the heads keep what they made
            heads.eval()
            for layer in heads.layers:
                layer.train()
        torch.manual_seed(5)
        found = heads.contextual(hidden, POSITIONS, ids)
        heads.zero_grad()
        (found * torch.randn(found.shape)).sum().backward()
        grads.append([p.grad.clone() for p in heads.parameters() if p.grad is not None])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_activations_of_one_layer_exist_at_a_time(variant: str) -> None:
    """Kept for all heads at once, they cost as much memory as so many more layers of the trunk."""
    base = zoo.build("llama")
    embedding = base.get_input_embeddings()
    kept: dict[int, int] = {}
    counts = []
    for num_heads in (1, 5):
        heads = MtpHeads(num_heads, block_config(base.config), zoo.VOCAB, variant=variant).train()
        heads.read_through(base)
        hidden = torch.randn(*POSITIONS.shape, heads.hidden_size, requires_grad=True)
        own = {p.data_ptr() for p in [*heads.parameters(), *embedding.parameters()]}
        kept.clear()

        def keep(tensor: Tensor, own: set[int] = own) -> Tensor:
            if tensor.data_ptr() not in own:
                kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = heads.contextual(hidden, POSITIONS, random_ids())
        counts.append(sum(kept.values()))
        del found
    state = POSITIONS.numel() * base.config.hidden_size * 4  # one [B, T, d]
    # what one head hands to the next has to be kept; parallel heads hand on nothing
    allowed = 0 if variant == "parallel" else 4 * state
    assert counts[1] - counts[0] <= allowed


def test_a_start_is_that_of_its_variant() -> None:
    """Sequential heads that start by reading noise first unlearn what the base knows."""
    base, ids = zoo.build("llama"), random_ids()
    for hidden_first in (False, True):
        heads = build(base, "sequential", lm_head="own", hidden_first=hidden_first)
        heads.init_from_base(base)
        with torch.no_grad():
            hidden, found = run(heads, base, ids)
            other = heads.contextual(hidden, POSITIONS, random_ids())
        torch.testing.assert_close(other, found, rtol=0, atol=0)
        matrix = base.get_output_embeddings().weight
        assert all(torch.equal(heads.output_weight(i, matrix * 0), matrix) for i in range(2))
    with pytest.raises(ValueError, match="the base's last layer is of another kind"):
        heads.init_from_base(zoo.build("mixtral"))


def test_logits_are_made_as_the_bases() -> None:
    """Without the base's scale, bias and softcap a head's confidence is not the base's."""
    base = zoo.build("llama")
    output = OutputLayer(torch.nn.Linear(32, zoo.VOCAB), scale=0.5, softcap=3.0)
    hidden = torch.randn(2, 3, 32)
    heads = build(base)
    torch.testing.assert_close(heads.logits(hidden, output), output(hidden))
    own = build(base, lm_head="own")
    expected = [
        output.finish(each @ own.layer(i).lm_head.weight.t() + output.bias)  # type: ignore[union-attr]
        for i, each in enumerate(hidden)
    ]
    torch.testing.assert_close(own.logits(hidden, output), torch.stack(expected))


def test_wrong_use_is_named() -> None:
    """A wrong word must not become a default."""
    config = block_config(zoo.build("llama").config)
    for word, options in (
        ("variant must be one of parallel, causal, sequential", {"variant": "serial"}),
        ("lm_head must be one of shared, own", {"lm_head": "tied"}),
        ("num_heads must be at least 1, got 0", {"num_heads": 0}),
    ):
        with pytest.raises(ValueError, match=word):
            MtpHeads(**{"num_heads": 1, "config": config, "vocab_size": 64, **options})  # type: ignore[arg-type]
    heads = MtpHeads(1, config, 64, variant="sequential")
    with pytest.raises(ValueError, match="embed is None"):
        heads.contextual(torch.zeros(1, 4, 32), torch.arange(4)[None])
    with pytest.raises(ValueError, match=r"block.model_type is 'gpt-6'"):
        config_from_json({"model_type": "gpt-6"})
