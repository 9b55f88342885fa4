"""Heads with taps: what they may see, where they are trained, and what they are built from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from specheads.attention.tree import Tree
from specheads.config import ConfigError, HeadsConfig, LossConfig
from specheads.decoding.loop import decode, plain_decode
from specheads.drafters.heads import heads_drafter
from specheads.losses.cross_entropy import IGNORE, shift_labels
from specheads.models.block import BlockForm, BlockHeads, joined_taps, published_taps
from specheads.models.checkpoint import KINDS
from specheads.models.eagle import EagleHeads
from specheads.models.output import final_norm, output_layer, packed_hidden, packed_taps
from specheads.training.objectives import HeadsObjective, anchors_of
from tests.models.test_heads_contract import FORMS, drawn
from tests.training.test_objectives import random_batch
from tests.zoo import build

TAPPED = [name for name in FORMS if name.startswith(("block", "dflash", "dspark", "eagle3"))]
Tapped = BlockHeads | EagleHeads


@pytest.fixture(params=TAPPED)
def heads(request: pytest.FixtureRequest, tiny_llama: LlamaForCausalLM) -> Tapped:
    """Return heads of one form, every tensor drawn."""
    found: Tapped = drawn(FORMS[request.param](tiny_llama))
    return found


@torch.no_grad()
def made_of(
    heads: Tapped, base: LlamaForCausalLM, ids: Tensor, positions: Tensor, **asked: Any
) -> Tensor:
    """Return ``contextual`` of texts."""
    hidden = packed_taps(base, ids, positions, heads.taps)[1]
    heads.read_through(base)
    return heads.contextual(hidden, positions, ids, **asked)


def test_documents_do_not_see_each_other(tiny_llama: LlamaForCausalLM, heads: Tapped) -> None:
    """Heads that read the document before learn from what they will never see."""
    lengths = (9, 1, 14)
    texts = [torch.randint(0, 256, (1, length)) for length in lengths]
    positions = [torch.arange(length)[None] for length in lengths]
    packed = made_of(heads, tiny_llama, torch.cat(texts, 1), torch.cat(positions, 1))
    start = 0
    for text, places in zip(texts, positions, strict=True):
        alone = made_of(heads, tiny_llama, text, places)
        for i in range(heads.num_heads):
            # where head i reads another document's tokens, it has no label
            end = max(start, start + text.shape[1] - 1 - (i if heads.kind == "eagle3" else 0))
            torch.testing.assert_close(
                packed[i, :, start:end], alone[i, :, : end - start], rtol=1e-4, atol=1e-5
            )
        start += text.shape[1]


@torch.no_grad()
def test_a_guess_knows_nothing_of_what_it_guesses(
    tiny_llama: LlamaForCausalLM, heads: Tapped
) -> None:
    """A guess that saw what it guesses is right in training, and wrong ever after."""
    ids, positions, at = torch.randint(0, 256, (1, 70)), torch.arange(70)[None], 40
    hidden = packed_taps(tiny_llama, ids, positions, heads.taps)[1]
    heads.read_through(tiny_llama)
    found = heads.contextual(hidden, positions, ids)
    states = hidden.clone()
    states[:, at + 1 :].normal_()
    for i in range(heads.num_heads):  # head i of EAGLE-3 is told i tokens behind the root
        others, known = ids.clone(), at + 2 + (i if heads.kind == "eagle3" else 0)
        others[:, known:] = torch.randint(0, 256, others[:, known:].shape)
        again = heads.contextual(states, positions, others)
        assert torch.equal(again[i, :, at], found[i, :, at])
        if i and heads.kind == "eagle3":
            others[:, known - 1] = (others[:, known - 1] + 1) % 256
            again = heads.contextual(states, positions, others)
            assert not torch.allclose(again[i, :, at], found[i, :, at], atol=1e-3)
    for changed in ("root", "state"):
        tokens, states = ids.clone(), hidden.clone()
        if changed == "root":
            tokens[:, at + 1] = (tokens[:, at + 1] + 1) % 256
        else:
            states[:, at].normal_()
        other = heads.contextual(states, positions, tokens)[:, :, at]
        assert not torch.allclose(other, found[:, :, at], atol=1e-3), changed


def test_some_positions_are_those_of_all(tiny_llama: LlamaForCausalLM, heads: Tapped) -> None:
    """A block behind another position than was asked for learns the tokens of a third."""
    ids, positions = torch.randint(0, 256, (2, 80)), torch.arange(80).expand(2, -1).clone()
    positions[1, 50:] -= 50
    places = torch.stack([torch.randperm(80)[:45].sort().values for _ in range(2)])
    whole = made_of(heads, tiny_llama, ids, positions)
    some = made_of(heads, tiny_llama, ids, positions, places=places)
    for row in range(2):
        torch.testing.assert_close(some[:, row], whole[:, row, places[row]], rtol=1e-4, atol=1e-5)


def test_anchors_are_drawn_from_the_rows_themselves() -> None:
    """Positions without a label teach nothing, and others on another rank another model."""
    ids = torch.randint(0, 50_000, (6, 500))
    learned = torch.rand(6, 500) < 0.3
    learned[3] = False
    learned[3, [7, 9]] = True
    found = anchors_of(ids, learned.flatten(), 40)
    assert found.shape == (6, 40)
    assert bool((found[:, 1:] > found[:, :-1]).all())  # in order, none twice
    assert [int(learned[row, found[row]].sum()) for row in range(6)] == [40, 40, 40, 2, 40, 40]
    for row in range(6):
        assert torch.equal(anchors_of(ids[row : row + 1], learned[row], 40)[0], found[row])
    assert anchors_of(ids, learned.flatten(), 900).tolist() == [list(range(500))] * 6
    # evenly: none of ten parts of the row gets half or twice its share over many rows
    many = anchors_of(torch.randint(0, 50_000, (300, 500)), torch.ones(300 * 500).bool(), 50)
    shares = torch.histc(many.float(), 10, 0, 500) / many.numel()
    assert bool(((shares - 0.1).abs() < 0.01).all())


@pytest.mark.parametrize("count", [5, 1000])
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("of", ["block", "eagle3"])
def test_the_loss_is_that_of_the_anchors(
    of: str, count: int, kind: str, tiny_llama: LlamaForCausalLM
) -> None:
    """A mean over all labels of a few positions' losses trains with a tenth of the rate."""
    settings = HeadsConfig(kind=of, num_heads=3, lm_head="shared", options={"anchors": count})
    heads: Any = KINDS[of].from_settings(settings, tiny_llama, output_layer(tiny_llama))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    batch = random_batch(3, num_rows=3)
    loss = LossConfig(heads=kind, chunk_size=16, decay=0.5)
    objective = HeadsObjective(tiny_llama, heads, loss, train_base=False)
    found, metrics = objective(batch)
    learned = shift_labels(batch["labels"], batch["segment_ids"], 2) != IGNORE
    for ahead in (3, 4):
        learned |= shift_labels(batch["labels"], batch["segment_ids"], ahead) != IGNORE
    places = anchors_of(batch["input_ids"], learned.flatten(), count)
    whole, ids = made_of(heads, tiny_llama, batch["input_ids"], batch["position_ids"]), {}
    with torch.no_grad():
        hidden = packed_hidden(tiny_llama, batch["input_ids"], batch["position_ids"])
        base = tiny_llama.lm_head(hidden)
    expected = 0.0
    for i in range(3):
        labels = shift_labels(batch["labels"], batch["segment_ids"], i + 2)
        losses = []
        for row in range(3):
            for at in places[row].tolist():
                if labels[row, at] == IGNORE:
                    continue
                said = (whole[i, row, at] @ tiny_llama.lm_head.weight.T).log_softmax(-1)
                if kind == "hard":
                    losses.append(-said[labels[row, at]])
                else:
                    teacher = base[row, at + i + 1].log_softmax(-1)
                    losses.append((teacher.exp() * (teacher - said)).sum())
        assert losses
        ids[i] = torch.stack(losses).mean()
        expected += 0.5 ** (i + 1) * ids[i]
    torch.testing.assert_close(found.detach(), torch.as_tensor(expected), rtol=1e-4, atol=1e-5)
    if kind == "hard":
        for i, value in ids.items():
            torch.testing.assert_close(metrics[f"head_{i}/loss"], value, rtol=1e-4, atol=1e-5)


def test_the_last_norm_starts_as_strong_as_the_bases(tiny_llama: LlamaForCausalLM) -> None:
    """A layer norm makes nothing of equal numbers: heads asked so would start from silence."""
    heads = FORMS["block"](tiny_llama)
    for name in ("llama", "gpt_neox"):
        base = build(name, hidden_size=heads.hidden_size)
        for what, parameter in final_norm(base).named_parameters():
            torch.nn.init.constant_(parameter, 3.0 if what == "weight" else 0.0)
        heads.start_from(base)
        torch.testing.assert_close(
            heads.norm.weight, torch.full_like(heads.norm.weight, 3.0), rtol=1e-4, atol=0
        )


def test_taps_by_rule() -> None:
    """Other layers than the published ones cost accept length where the weights come from there."""
    assert published_taps(36, 5) == (1, 9, 17, 25, 33)
    assert published_taps(5, 5) == (1, 2) and published_taps(2, 5) == (0,)
    assert published_taps(1, 5) == (0,)
    assert joined_taps(30, 3) == (9, 19, -1) and joined_taps(5, 3) == (1, 2, -1)
    assert joined_taps(1, 3) == (-1,) and joined_taps(30, 1) == (-1,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "dflash"}, "form must be one of joined, published, got 'dflash'"),
        ({"tap": [1]}, "options must be one of taps, num_taps"),
        ({"taps": [0, -2]}, r"options.taps must be numbers of layers, or -1, got \[0, -2\]"),
        ({"taps": 3}, "options.taps must be a tuple, got 3"),
        ({"taps": [-1, 0]}, "taps must be -1, the final state, at the end"),
        ({"anchors": 0}, "anchors must be at least 1, got 0"),
        ({"rope_theta": 0.0}, "rope_theta must be above 0, got 0.0"),
        ({"rope_theta": "10000"}, "options.rope_theta must be a float"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be"),
        ({"form": "published", "mask_token_id": 272}, "mask_token_id must be"),
    ],
)
def test_bad_options_are_one_line(
    options: dict[str, Any], message: str, tiny_llama: LlamaForCausalLM
) -> None:
    """A misspelt option trains the default, and the run's config says otherwise."""
    settings = replace(HeadsConfig(kind="block", lm_head="shared"), options=options)
    with pytest.raises((ValueError, ConfigError), match=message) as caught:
        BlockHeads.from_settings(settings, tiny_llama, output_layer(tiny_llama))
    assert "\n" not in str(caught.value)
    with pytest.raises((ValueError, ConfigError)):
        BlockForm.of({**options, "form": "neither"})


def transformers_drafter(heads: BlockHeads) -> MuseGlimmerAssistantModel:
    """Return transformers' own drafter of this form with the heads' weights."""
    form, size = heads.form, heads.hidden_size
    config = MuseGlimmerAssistantConfig(
        hidden_size=size,
        intermediate_size=form.intermediate_size,
        num_hidden_layers=heads.num_inner,
        num_attention_heads=form.num_attention_heads,
        num_key_value_heads=form.num_key_value_heads,
        head_dim=form.head_dim,
        rms_norm_eps=form.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": form.rope_theta},
        layer_types=["full_attention"] * heads.num_inner,
        block_size=heads.num_slots,
        mask_token_id=form.mask_token_id,
        target_layer_ids=list(form.taps),
    )
    model = MuseGlimmerAssistantModel(config).eval()
    renamed = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    state = {}
    for name, tensor in heads.state_dict().items():
        for old, new in renamed.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        state[name] = tensor
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_transformers_drafts_the_same(
    scale: float, tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong layer, position or mask costs engines accept length, and none of them says so.

    transformers has a DFlash loop and a drafter of its own; with these weights it must propose what
    the heads propose, step by step, and write what greedy decoding writes.
    """
    build: Any = FORMS["dflash"]
    heads = build(tiny_llama)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            drawn = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * drawn if "norm" in name else 0.2 * drawn)
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(scale)
    heads.eval()
    proposed: list[list[int]] = []
    own = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(self, input_ids, *args, **kwargs)
        if drafted := found[0][0, input_ids.shape[1] :].tolist():
            proposed.append([*input_ids[0].tolist(), *drafted])
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    prompt, settings = torch.randint(0, 256, (1, 9)), {"max_new_tokens": 24, "do_sample": False}
    settings |= {"eos_token_id": None, "pad_token_id": 0}
    theirs = tiny_llama.generate(
        prompt, assistant_model=transformers_drafter(heads), speculation_type="dflash", **settings
    )
    plain = plain_decode(tiny_llama, prompt, max_new_tokens=24).new_tokens
    assert theirs[0, 9:].tolist() == plain
    drafter = heads_drafter(
        tiny_llama, heads, output_layer(tiny_llama), Tree.chain(heads.num_heads)
    )
    ours: list[list[int]] = []
    propose = drafter.propose

    def recording(state: Any) -> Any:
        found = propose(state)
        ours.append(found.tokens[0].tolist())
        return found

    monkeypatch.setattr(drafter, "propose", recording)
    assert decode(tiny_llama, drafter, prompt, max_new_tokens=24).new_tokens == plain
    assert 5 < len(proposed) <= len(ours)
    for text, tokens in zip(proposed, ours, strict=False):  # ours asks once more at the end
        assert text[-len(tokens) :] == tokens
