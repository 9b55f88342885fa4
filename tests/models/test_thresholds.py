"""Models that compute a whole pass differently from some position on: longrope, Llama 4's scaling.

The reference is transformers' generate() for one row alone; trees, batches and conversations are
held to the plain loop of each row.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree, default_tree
from specheads.config import ConfigError
from specheads.config.commands import TextSettings
from specheads.decoding import generate as doors
from specheads.decoding.loop import Settings, decode, plain_decode
from specheads.decoding.stream import Job, Stream, continue_prompts
from specheads.drafters.lookup import NgramDrafter
from specheads.measure import diagnose
from specheads.models import support as support_module
from specheads.models.forward import Thresholds, named_positions, replay, thresholds
from specheads.models.support import compare, tree_support
from specheads.verification.sampling import ROUNDING, Sampler
from tests.ragged import padded
from tests.scripted import ScriptedDrafter, pretend_rounding
from tests.zoo import THRESHOLD, THRESHOLD_MODELS, VOCAB, build

NUM_NEW = 16
SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(temperature=0.9, seed=5)}
# wide at its end, so that nodes in slots behind the threshold have positions before it
WIDE = Tree.from_choices([(0,), (0, 0), *((0, 0, i) for i in range(12)), (0, 0, 0, 0)])


@cache
def model_of(name: str) -> PreTrainedModel:
    """Build a model once for all tests."""
    return build(name, seed=6)


@cache
def prompt(length: int, seed: int = 0) -> Tensor:
    """Return tokens [1, length]."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(VOCAB - 1, (1, length), generator=generator)


@cache
def plain(name: str, length: int, sampling: str = "greedy", row: int = 0) -> list[int]:
    """Return what the plain loop gives to the row, alone."""
    sampler = SAMPLERS[sampling]
    own = Sampler(sampler.temperature, seed=sampler.seed + row)
    return plain_decode(
        model_of(name), prompt(length), max_new_tokens=NUM_NEW, sampler=own
    ).new_tokens


def whole(name: str, length: int, sampling: str = "greedy", row: int = 0) -> list[int]:
    """Return the prompt and what it is continued with."""
    return prompt(length)[0].tolist() + plain(name, length, sampling, row)


# short and long of it, just before it, on it, and across it with the prompt
LENGTHS = (20, THRESHOLD - 6, THRESHOLD - 1, THRESHOLD, THRESHOLD + 1, THRESHOLD + 10)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_the_crossing_is_that_of_generate(name: str, length: int) -> None:
    """Prevents old keys where generate reads the text anew, and new ones where it keeps them."""
    ids = prompt(length)
    theirs = model_of(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
    )
    assert plain(name, length) == theirs[0, length:].tolist()


@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_trees_cross_as_plain_decoding_does(name: str, length: int, sampling: str) -> None:
    """Prevents a guess beyond the threshold that decides for what stands before it."""
    text = whole(name, length, sampling)
    for tree, row_trees in (
        (default_tree(4, 20), sampling == "sampled"),
        (WIDE, sampling == "greedy"),
    ):
        result = decode(
            model_of(name),
            ScriptedDrafter(tree, text, 0.8, row_trees=row_trees),
            prompt(length),
            max_new_tokens=NUM_NEW,
            sampler=SAMPLERS[sampling],
        )
        assert result.new_tokens == plain(name, length, sampling)
        assert result.num_steps < 0.8 * NUM_NEW, "hardly a guess was accepted"


@pytest.mark.parametrize("length", (20, THRESHOLD + 10))
@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_one_side_loses_no_step(name: str, length: int) -> None:
    """Prevents plain steps far from any threshold, and near one that the text does not reach."""
    for start in (length, THRESHOLD - NUM_NEW):
        drafter = ScriptedDrafter(Tree.chain(4), whole(name, start), 1.0)
        result = decode(model_of(name), drafter, prompt(start), max_new_tokens=NUM_NEW)
        assert result.num_steps == (NUM_NEW - 1) / 5


@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_near_ties_are_settled_on_the_same_keys(name: str) -> None:
    """Prevents a replay that crosses otherwise than the text whose tie it settles."""
    length = THRESHOLD - 6
    text = torch.tensor([whole(name, length)])
    before = plain_decode(
        model_of(name), prompt(length), max_new_tokens=NUM_NEW + 1, keep_scores=True
    )
    assert before.logits is not None
    for num in (2, 7, 8, NUM_NEW):
        with torch.no_grad():
            again = replay(model_of(name), text[:, : length + num], length)
        assert again.equal(before.logits[num])


@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_a_batch_on_one_side_gives_what_its_rows_give_alone(name: str) -> None:
    """Prevents full refusal where the rows agree; and one row that decides for the others."""
    for lengths in ((10, 30, THRESHOLD - NUM_NEW), (THRESHOLD + 1, THRESHOLD + 20, 70)):
        for sampling, sampler in SAMPLERS.items():
            rows = list(enumerate(lengths))
            expected = [plain(name, n, sampling, row) for row, n in rows]
            texts = [whole(name, n, sampling, row) for row, n in rows]
            batch: dict[str, Any] = padded([prompt(n) for n in lengths])
            batch |= {"max_new_tokens": NUM_NEW, "sampler": sampler}
            result = plain_decode(model_of(name), **batch)
            assert [row.new_tokens for row in result.rows] == expected
            drafter = ScriptedDrafter(WIDE, texts, 0.8, row_trees=sampling == "greedy")
            result = decode(model_of(name), drafter, **batch)
            assert [row.new_tokens for row in result.rows] == expected


@pytest.mark.parametrize("lengths", [(10, 120), (THRESHOLD - 6, THRESHOLD - 4), (70, 20, 60)])
@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_a_batch_on_several_sides_is_refused_before_anything_is_read(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a batch whose longest row decides for the others; and minutes before it is told."""
    model = model_of(name)
    tree_support(model)
    monkeypatch.setattr(model, "forward", None)
    for run in (plain_decode, lambda *args, **kw: decode(args[0], NgramDrafter(), **kw)):
        with pytest.raises(ConfigError, match=rf"={THRESHOLD}\).* decode them one by one"):
            run(model, **padded([prompt(n) for n in lengths]), max_new_tokens=NUM_NEW)


@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_neighbours_are_decoded_together_as_far_as_they_may_be(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents a file of prompts that ends with the first one of another side."""
    monkeypatch.setattr(doors, "ending", lambda decoder: {"pad_token_id": 0})
    asked: list[int] = []
    real = doors.decode_prompts

    def counted(decoder: Any, settings: Any, prompts: Any, *rest: Any, **more: Any) -> Any:
        asked.append(len(prompts))
        return real(decoder, settings, prompts, *rest, **more)

    monkeypatch.setattr(doors, "decode_prompts", counted)
    lengths = (10, 30, THRESHOLD - 4, THRESHOLD - 5, THRESHOLD + 1, 70)
    ids = [prompt(n)[0].tolist() for n in lengths]
    decoder, settings = doors.SpecDecoder(model_of(name), None), TextSettings(checkpoint="")
    rows = doors.decode_many(decoder, settings, ids, NUM_NEW, 8)
    assert [row.new_tokens for row in rows] == [plain(name, n) for n in lengths]
    assert asked == [2, 1, 1, 2]


TURNS = {  # tokens of the first prompt, its answer, and what comes behind it
    "stays short": (20, 10, 8),
    "prompt crosses": (30, 10, 40),
    "answer crosses": (THRESHOLD - 4, 14, 6),
    "stays long": (THRESHOLD + 3, 10, 6),
    "last token crosses": (THRESHOLD - 6, 6, 1),
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_a_conversation_goes_on_as_if_read_at_once(name: str, turn: str) -> None:
    """Prevents keys of the short side under a prompt of the long one, and the other way round."""
    first, num_new, more = TURNS[turn]
    model = model_of(name)
    cache = TreeCache()
    answer = plain_decode(model, prompt(first), max_new_tokens=num_new, cache=cache).new_tokens
    text = torch.cat([prompt(first), torch.tensor([answer]), prompt(more, 1)], dim=1)
    short = text[:, : min(first, 40)]
    answers = {ids: plain_decode(model, ids, max_new_tokens=8) for ids in (text, short)}
    for ids in (text, short, text):  # taken back in between
        expected = answers[ids]
        drafter = ScriptedDrafter(default_tree(4, 20), expected.sequences[0].tolist(), 0.8)
        found = decode(model, drafter, ids, max_new_tokens=8, cache=cache)
        assert found.new_tokens == expected.new_tokens
        found = plain_decode(model, ids, max_new_tokens=8, cache=cache)
        assert found.new_tokens == expected.new_tokens


@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_turns_of_ragged_rows(name: str) -> None:
    """Prevents the padding of a turn from reaching over a threshold that no text reaches."""
    model, cache = model_of(name), TreeCache()
    firsts = [prompt(44), prompt(4)]
    said = plain_decode(model, **padded(firsts), max_new_tokens=4, cache=cache).rows
    rows = [
        torch.cat([first, torch.tensor([row.new_tokens]), prompt(more, 1)], dim=1)
        for first, row, more in zip(firsts, said, (2, 40), strict=True)
    ]
    settings: dict[str, Any] = {"max_new_tokens": 8, "keep_scores": True}
    found = plain_decode(model, **padded(rows), cache=cache, **settings)
    assert found.logits is not None
    for number, row in enumerate(rows):
        alone = plain_decode(model, row, **settings)
        assert alone.new_tokens == found.rows[number].new_tokens and alone.logits is not None
        for one, of_batch in zip(alone.logits, found.logits, strict=True):  # tokens may hide it
            torch.testing.assert_close(of_batch[number], one[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_a_stream_keeps_the_sides_apart(name: str) -> None:
    """Prevents thousands of prompts refused for one, or that one decoded wrongly among them."""
    lengths = (10, 60, 12, 90, 62, 11, 80)
    prompts = [prompt(n)[0].tolist() for n in lengths]
    found = continue_prompts(
        model_of(name), prompts, [NUM_NEW] * 7, [0] * 7, temperature=0, batch_size=3
    )
    assert found == [plain(name, n) for n in lengths]
    stream = Stream(model_of(name), None, Settings(), batch_size=3)
    jobs = [Job(ids, NUM_NEW) for ids in prompts]
    assert [stream.num_fitting(jobs[i:]) for i in range(5)] == [1] * 5
    assert stream.num_fitting([jobs[0], jobs[2], jobs[5], jobs[0]]) == 3
    with pytest.raises(ValueError, match="other sides"):
        stream.add(jobs[:2])


@pytest.mark.parametrize("name", THRESHOLD_MODELS)
def test_a_shared_beginning_is_of_the_texts_own_side(name: str) -> None:
    """Prevents keys that were made once for all prompts from going where they would differ."""
    begin, model = prompt(20)[0].tolist(), model_of(name)
    prompts = [begin + prompt(n)[0].tolist() for n in (9, 12, 55, 70, 60, 41, 30)]
    limits, seeds = [NUM_NEW] * 7, [0] * 7
    found = continue_prompts(model, prompts, limits, seeds, temperature=0, batch_size=3)
    for ids, continued in zip(prompts, found, strict=True):
        alone = plain_decode(model, torch.tensor([ids]), max_new_tokens=NUM_NEW)
        assert continued == alone.new_tokens, len(ids)


@pytest.mark.parametrize(
    "name", ["phi3-longrope", pytest.param("llama-longrope", marks=pytest.mark.slow)]
)
def test_compiled_passes_cross_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a fixed shape of tree from reaching beyond the threshold."""
    from specheads.models import forward

    forward._compiled_forward.cache_clear()
    real = torch.compile  # the code generator's work takes minutes
    monkeypatch.setattr(torch, "compile", lambda f, mode=None: real(f, backend="eager"))
    torch._dynamo.reset()
    length = THRESHOLD - 6
    model = build(name, seed=6, num_hidden_layers=1)
    expected = plain_decode(model, prompt(length), max_new_tokens=NUM_NEW).sequences
    drafter = ScriptedDrafter(default_tree(4, 9), expected[0].tolist(), 0.8)
    settings: dict[str, Any] = {"max_new_tokens": NUM_NEW, "compile": True}
    assert decode(model, drafter, prompt(length), **settings).sequences.equal(expected)
    assert plain_decode(model, prompt(length), **settings).sequences.equal(expected)


def test_a_model_that_forgets_its_text_is_refused_at_the_crossing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents half a text from a model whose own generate() goes on from one token there."""
    model = build("llama-longrope", seed=6)
    own = model.prepare_inputs_for_generation

    def forgetful(ids: Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        return own(ids, past_key_values=None, **kwargs)  # as Phi-4-multimodal's

    monkeypatch.setattr(model, "prepare_inputs_for_generation", forgetful)
    with pytest.raises(ConfigError, match="forgets all tokens but the last .* beyond 64"):
        plain_decode(model, prompt(THRESHOLD - 6), max_new_tokens=NUM_NEW)
    assert plain_decode(model, prompt(THRESHOLD - 6), max_new_tokens=7).new_tokens
    assert plain_decode(model, prompt(THRESHOLD + 1), max_new_tokens=7).new_tokens


def scale_whole_passes(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    """Let a Llama scale its embeddings by the largest position of a pass, which nothing names."""
    original = LlamaForCausalLM.forward

    def scaled(self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs["input_ids"]
        last = ids.shape[1] - 1 if position_ids is None else int(position_ids.max())
        factor = 2.0 if last >= start else 1.0
        layer = self.lm_head.register_forward_hook(lambda module, inputs, logits: logits * factor)
        try:
            return original(self, *args, position_ids=position_ids, **kwargs)
        finally:
            layer.remove()

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)


def test_the_self_test_looks_across_what_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the next longrope, by another name, from being trusted because it starts well."""
    scale_whole_passes(monkeypatch, 5000)
    model = build("llama", max_position_embeddings=100_000)
    assert tree_support(model).kind == "tree", "no text of the test is so long"
    model = build("llama", max_position_embeddings=100_000)
    model.config.original_max_position_embeddings = 5000
    with pytest.raises(ConfigError, match="across position 5000, which its config names"):
        tree_support(model)


def test_the_self_test_reads_no_more_for_a_large_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a start that takes minutes, or the memory of a whole context."""
    widest = 0
    original = LlamaForCausalLM.forward

    def watched(self: Any, *args: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        nonlocal widest
        widest = max(widest, input_ids.shape[1])
        return original(self, *args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", watched)
    rope = THRESHOLD_MODELS["llama-longrope"].changes["rope_parameters"]
    for start in (4096, 131_072):
        model = build(
            "llama",
            max_position_embeddings=4 * start,
            rope_parameters=rope | {"original_max_position_embeddings": start},
        )
        assert named_positions(model) == [start]
        assert tree_support(model).kind == "tree"
    assert widest < 64


def test_sides() -> None:
    """Prevents a threshold that is off by one, which no short text shows."""
    longrope, scaling = Thresholds("", starts=(64,)), Thresholds("", period=64)
    assert thresholds(build("llama")) == Thresholds()
    assert [longrope.side(n) for n in (0, 63, 64, 500)] == [0, 0, 1, 1]
    assert [longrope.after(n) for n in (0, 63, 64)] == [64, 64, sys.maxsize]
    assert [scaling.side(n) for n in (0, 62, 63, 126, 127)] == [0, 0, 1, 1, 2]
    assert [scaling.after(n) for n in (0, 62, 63, 127)] == [63, 63, 127, 191]
    assert longrope.shared_side([(64, 65), (10, 12)]) == 0
    assert longrope.shared_side([(64, 66)]) is None
    assert longrope.shared_side([(65, 300), (66, 67)]) == 1
    assert longrope.shared_side([(65, 300), (2, 3)]) is None


def test_measured_rounding_widens_near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a promise of identity that rests on a constant which the model itself refutes."""
    shallow, deep = build("llama"), build("llama", num_hidden_layers=48)
    # two layers measure near the constant, on one of the processors tried a hundredth above it
    assert ROUNDING <= tree_support(shallow).rounding < 2 * ROUNDING
    measured = compare(deep, support_module.TREE).rounding
    assert measured > 0.2 * ROUNDING, "a choice between two logits may be wrong by more"
    support = tree_support(deep)
    assert support.rounding >= support_module.MARGIN * measured > 2 * ROUNDING
    told = next(each for each in diagnose.examine(deep, None) if each.name == "rounding")
    assert "very tokens are not promised" in told.text
    with torch.no_grad():  # each token has a double, as near as that model's rounding is large
        weight = shallow.lm_head.weight
        weight[VOCAB // 2 :] = weight[: VOCAB // 2] * (1 + 3e-5)
    ids = prompt(9)
    for rounding, replays in ((ROUNDING, False), (1e-3, True)):
        pretend_rounding(monkeypatch, shallow, rounding)
        result = decode(shallow, NgramDrafter(), ids, max_new_tokens=NUM_NEW)
        assert (result.num_replays > 0) == replays
        continued = plain_decode(shallow, ids.repeat(2, 1), max_new_tokens=NUM_NEW)
        assert (continued.num_replays > 0) == replays


def test_growing_frequencies_begin_anew_with_every_text() -> None:
    """Prevents what generate() left in a model from changing every later text within its context.

    Dynamic frequencies change beyond the model's context, where no text of ours is.
    """
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = build("llama", seed=6, rope_parameters=rope, max_position_embeddings=THRESHOLD)
    ids, num_new = prompt(20), THRESHOLD - 20
    expected = plain_decode(model, ids, max_new_tokens=num_new).new_tokens
    model.generate(prompt(THRESHOLD), max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert plain_decode(model, ids, max_new_tokens=num_new).new_tokens == expected
    drafter = ScriptedDrafter(default_tree(4, 20), ids[0].tolist() + expected, 0.8)
    assert decode(model, drafter, ids, max_new_tokens=num_new).new_tokens == expected
    with pytest.raises(ValueError, match="context is 64"):
        plain_decode(model, ids, max_new_tokens=num_new + 1)
