"""Every kind of heads keeps the contract of specheads/models/kinds.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from specheads.attention.tree import Tree
from specheads.config import HeadsConfig, MtpConfig
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.heads import heads_drafter
from specheads.models.block import BlockHeads
from specheads.models.blocks import prefix_sizes
from specheads.models.checkpoint import KINDS, as_loaded, named_tensors
from specheads.models.eagle import EagleHeads
from specheads.models.heads import MedusaHeads
from specheads.models.kinds import Heads
from specheads.models.mtp import MtpHeads, block_config
from specheads.models.output import OutputLayer, output_layer, packed_taps
from tests.conftest import build_tiny_llama
from tests.toys import full_logits

NUM_HEADS = 3


def medusa(**options: Any) -> Callable[[LlamaForCausalLM], MedusaHeads]:
    """Return what builds heads on hidden states; ``prefix`` asks for the layer in front."""

    def build(base: LlamaForCausalLM) -> MedusaHeads:
        sizes = prefix_sizes(base.config) if options.get("prefix") else None
        return MedusaHeads(NUM_HEADS, 1, 32, 272, **options | {"prefix": sizes})

    return build


def mtp(**options: Any) -> Callable[[LlamaForCausalLM], MtpHeads]:
    """Return what builds heads of a layer each."""
    return lambda base: MtpHeads(NUM_HEADS, block_config(base.config), 272, **options)


def block(settings: HeadsConfig | None = None, **options: Any) -> Callable[..., BlockHeads]:
    """Return what builds the heads of one block."""

    def build(base: LlamaForCausalLM) -> BlockHeads:
        given = settings or HeadsConfig(lm_head="shared")
        asked = replace(given, kind="block", num_heads=NUM_HEADS, options=options)
        return BlockHeads.from_settings(asked, base, output_layer(base))

    return build


def eagle(settings: HeadsConfig | None = None, **options: Any) -> Callable[..., EagleHeads]:
    """Return what builds an EAGLE-3 head."""

    def build(base: LlamaForCausalLM) -> EagleHeads:
        given = settings or HeadsConfig(lm_head="own")
        asked = replace(given, kind="eagle3", num_heads=NUM_HEADS, options=options)
        return EagleHeads.from_settings(asked, base, output_layer(base))

    return build


FORMS: dict[str, Callable[[LlamaForCausalLM], Heads]] = {
    "medusa": medusa(),
    "shared": medusa(lm_head="shared"),
    "low rank, prefix": medusa(lm_head="low_rank", rank=4, prefix=True),
    "pruned, markov": medusa(lm_head="pruned", num_kept=90, markov_rank=4),
    "rows of the base's": medusa(lm_head="shared_pruned", num_kept=90),
    "rows, markov": medusa(lm_head="shared_pruned", num_kept=90, markov_rank=4),
    "shared, markov": medusa(lm_head="shared", markov_rank=4),
    "hydra": medusa(condition=True, prefix=True),
    "joined": medusa(condition=True, joined=True),
    "mtp parallel": mtp(),
    "mtp causal": mtp(variant="causal", lm_head="own"),
    "mtp sequential": mtp(variant="sequential", hidden_first=True),
    "block": block(),
    "block, narrow": block(HeadsConfig(lm_head="shared_pruned", num_kept=90), injection_rank=4),
    "block, markov": block(
        HeadsConfig(lm_head="pruned", num_kept=90, correction="markov", markov_rank=4), window=5
    ),
    "dflash": block(form="published", sample_from_anchor=False, mask_token_id=256),
    "dspark": block(
        HeadsConfig(lm_head="shared", num_layers=2, correction="markov", markov_rank=4),
        form="published",
        mask_token_id=256,
    ),
    "eagle3": eagle(HeadsConfig(lm_head="pruned", num_kept=90)),
    "eagle3, all norms": eagle(
        taps=[0, 1], norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True
    ),
}


@pytest.fixture(params=FORMS)
def heads(request: pytest.FixtureRequest, tiny_llama: LlamaForCausalLM) -> Heads:
    """Return heads of one form, every tensor drawn."""
    return drawn(FORMS[request.param](tiny_llama))


def drawn(heads: Any) -> Any:
    """Return heads whose every tensor is drawn: what starts as zero or one says something too."""
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.1)
    return heads.eval()


def read(base: LlamaForCausalLM, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return a text [1, T], the base's hidden states there, and what ``features`` takes of them."""
    ids, positions = torch.randint(0, 256, (1, 12)), torch.arange(12)[None]
    hidden = packed_taps(base, ids, positions, heads.taps)[1]
    heads.read_through(base)
    return ids, hidden, heads.contextual(hidden, positions, ids)


def test_heads_are_loaded_in_the_dtype_that_is_fast(heads: Heads) -> None:
    """Block heads in float32 take a third of a step more, and nothing but a clock shows it."""
    base = build_tiny_llama().to(torch.bfloat16)
    wide = torch.bfloat16 if heads.kind == "block" else torch.float32  # small ones, on a CPU
    assert {each.dtype for each in as_loaded(heads, base).parameters()} == {wide}


def test_every_kind_in_the_table_is_tried(tiny_llama: LlamaForCausalLM) -> None:
    """A kind that no form here has would be held to nothing."""
    made = [build(tiny_llama) for build in FORMS.values()]
    assert {each.kind for each in made} == KINDS.keys()
    for each in made:
        assert isinstance(each, nn.Module) and type(each) is KINDS[each.kind]
        asked = {*vars(Heads), *Heads.__annotations__} - {*vars(object)}
        assert not [name for name in asked if name[0] != "_" and not hasattr(each, name)]


def test_a_config_and_the_tensors_are_all_of_them(
    tiny_llama: LlamaForCausalLM, heads: Heads
) -> None:
    """What config.json leaves out comes back at its default, and only acceptance would show it."""
    config = json.loads(json.dumps(heads.to_config()))
    assert config["kind"] == heads.kind
    assert set(heads.config_keys) <= config.keys()
    with torch.device("meta"):
        found = KINDS[config["kind"]].from_config(config)
    tensors, wanted = named_tensors(heads), named_tensors(found)
    assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in wanted.items()}
    assert all(name.startswith(heads.tensor_prefix) for name in tensors)
    found.make_tables()
    found.load_state_dict(heads.state_dict(), assign=True)
    for key in ("num_heads", "num_outputs", "taps", "sequential", "one_matrix", "needs_embedding"):
        assert getattr(found, key) == getattr(heads, key), key
    for key in heads.unseen_settings:
        assert getattr(found, key) == getattr(heads, key), key
    ids, hidden, source = read(tiny_llama, heads)
    output, found.embed = output_layer(tiny_llama), heads.embed
    other = found.contextual(hidden, torch.arange(12)[None], ids)
    ahead = ids.unfold(1, NUM_HEADS, 1)
    cut = slice(0, ahead.shape[1])
    torch.testing.assert_close(
        found.logits(other[..., cut, :], output, ahead),
        heads.logits(source[..., cut, :], output, ahead),
    )


@torch.no_grad()
def test_what_is_trained_is_what_decodes(tiny_llama: LlamaForCausalLM, heads: Heads) -> None:
    """Heads that decode as others than were trained draft worse, and nothing says why.

    At every position: the product that training scores, ``logits``, and the pass of decoding behind
    the heads' own cache, which has read the text in two pieces.
    """
    output = OutputLayer(tiny_llama.lm_head, scale=0.5, softcap=4.0)
    ids, hidden, source = read(tiny_llama, heads)
    for t in (5, 8):
        tokens = ids[:, t + 1 : t + 1 + NUM_HEADS]
        here = source[..., t, :]
        logits = heads.logits(here, output, tokens)  # [K, 1, V']
        assert logits.shape == (NUM_HEADS, 1, heads.num_outputs)
        for i in range(NUM_HEADS):
            matrix = heads.output_weight(i, output.weight)
            first = heads.output_weight(0, output.weight)
            assert not heads.one_matrix or torch.equal(matrix, first)
            features = heads.features(i, here, tokens).to(matrix.dtype)
            torch.testing.assert_close(heads.finish(F.linear(features, matrix), output), logits[i])
        start, memory = hidden[:, t], heads.memory(1)
        for piece in (slice(0, 4), slice(4, t + 1)) if memory is not None else ():
            after = ids[:, piece.start + 1 : piece.stop + 1]
            assert memory is not None
            memory, start = memory.append(hidden[:, piece], [after.shape[1]], after)
        if not heads.sequential:
            found = heads.snapshot(output)(start)
        else:
            walk, steps = heads.steps(output, NUM_HEADS)()(start, tokens[:, 0], memory), []
            for depth in range(NUM_HEADS):
                if depth:
                    walk.descend(tokens[:, depth : depth + 1], torch.tensor([0]))
                assert walk.depth == depth and walk.tokens.equal(tokens[:, depth : depth + 1])
                steps.append(walk.logits()[:, 0])
            found = torch.stack(steps)
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)


def test_places_and_tokens_are_inverse(heads: Heads) -> None:
    """Places among kept tokens taken for token ids draft nonsense that is never accepted."""
    places = torch.arange(heads.num_outputs)
    tokens = heads.token_ids(places)
    assert heads.map_labels(tokens).equal(places)
    full = full_logits(heads, places.float())
    assert full.shape == (heads.vocab_size,) and full[tokens].equal(places.float())
    if heads.token_map is not None:  # another choice of tokens, in another order
        heads.token_map.copy_(heads.token_map.flip(0))
        assert heads.map_labels(heads.token_ids(places)).equal(places)


def test_decoding_is_plain_decoding(tiny_llama: LlamaForCausalLM, heads: Heads) -> None:
    """A drafter that is made for a kind from what it says must not change the text."""
    drafter = heads_drafter(tiny_llama, heads, output_layer(tiny_llama), Tree.chain(NUM_HEADS))
    prompt = torch.randint(0, 256, (1, 7))
    plain = plain_decode(tiny_llama, prompt, max_new_tokens=12).new_tokens
    assert decode(tiny_llama, drafter, prompt, max_new_tokens=12).new_tokens == plain


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (MedusaHeads, HeadsConfig(num_heads=2, condition=True, prefix_layer=True, rank=4)),
        (MtpHeads, MtpConfig(num_heads=3, variant="causal", lm_head="own")),
    ],
    ids=["heads", "mtp"],
)
def test_the_settings_are_all_taken(tiny_llama: LlamaForCausalLM, kind: Any, settings: Any) -> None:
    """A setting that is not passed on trains other heads than the run's config.yaml says."""
    made = kind.from_settings(settings, tiny_llama, output_layer(tiny_llama))
    config = made.to_config()
    shared = {key: value for key, value in vars(settings).items() if key in config}
    assert made.num_heads == 2 and config["vocab_size"] == 272 and config["hidden_size"] == 32
    # of other forms, n of the paper, or hydra by condition
    skipped = ("num_heads", "rank", "markov_rank", "num_kept", "kind")
    assert all(config[key] == value for key, value in shared.items() if key not in skipped)
    assert made.needs_embedding == getattr(settings, "condition", False)
