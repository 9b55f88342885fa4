"""What users of transformers know: every setting of generate(), at both doors, in a tree."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree, default_tree
from specheads.decoding.choose import Chooser, Scored
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.loop import decode
from specheads.decoding.processors import Rows, bind
from specheads.decoding.result import DecodeResult
from specheads.drafters.contract import FINAL, StepResult
from specheads.drafters.lookup import NgramDrafter
from specheads.models.forward import ModelPass
from specheads.models.output import output_layer
from specheads.verification.sampling import Sampler
from tests.ragged import NUM_NEW, PAD, ROWS, After, Alternate, new_tokens, padded, texts_of
from tests.scripted import VOCAB, Recorder, ScriptedDrafter, build

CONTROLS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "penalties": lambda: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "words": lambda: {
        "bad_words_ids": [[27], [24, 43]],
        "sequence_bias": {(5,): 3.0, (8, 9): -4.0},
        "suppress_tokens": [11, 12],
        "begin_suppress_tokens": [3],
    },
    "ends": lambda: {
        "eos_token_id": list(range(0, 60, 5)),
        "min_new_tokens": 7,
        "exponential_decay_length_penalty": (9, 1.2),
    },
    "forced": lambda: {"forced_eos_token_id": 17, "eos_token_id": [17, 40]},
    "allowed": lambda: {
        "prefix_allowed_tokens_fn": lambda _, ids: [(int(ids[-1]) + i) % 60 for i in (1, 2, 5, 9)]
    },
    "unknown": lambda: {"logits_processor": [Alternate()], "repetition_penalty": 1.2},
    "criteria": lambda: {
        "stopping_criteria": StoppingCriteriaList([After(t) for t in range(0, 60, 7)])
    },
    "normal": lambda: {"renormalize_logits": True, "remove_invalid_values": True},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "cold": {"do_sample": True, "temperature": 0.05, "typical_p": 0.95, "epsilon_cutoff": 1e-3},
}


@pytest.fixture
def llama() -> PreTrainedModel:
    """Return a small random Llama with VOCAB tokens."""
    return build("llama")


@cache
def bare(sampling: str) -> list[list[int]]:
    """Return what each row gives without any of CONTROLS."""
    plain = SpecDecoder(build("llama"), None)
    settings = {"max_new_tokens": NUM_NEW, **SAMPLING[sampling]}
    return [plain.generate(row, seed=3 + i, **settings).new_tokens for i, row in enumerate(ROWS)]


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("sampling", ["greedy", "warped"])
def test_both_doors_both_loops_all_rows_alone(
    llama: PreTrainedModel, name: str, sampling: str
) -> None:
    """Prevents a setting that is ignored, or means something else, in a tree, a batch or a door."""
    plain = SpecDecoder(llama, None)
    free = []
    for i, row in enumerate(ROWS):
        settings = {"max_new_tokens": NUM_NEW, **SAMPLING[sampling], **CONTROLS[name]()}
        alone = plain.generate(row, seed=3 + i, pad_token_id=PAD, **settings)
        free.append(alone.new_tokens)
        if sampling == "greedy" and i < 2:
            settings = {"max_new_tokens": NUM_NEW, **SAMPLING[sampling], **CONTROLS[name]()}
            theirs = llama.generate(
                row, pad_token_id=PAD, attention_mask=torch.ones_like(row), **settings
            )
            assert theirs.equal(alone.sequences)
    assert free != bare(sampling) or name in ("nothing", "normal"), "the setting did nothing"
    for rows in (ROWS[:1], ROWS):
        truth = free[: len(rows)]
        texts = [row[0].tolist() + new for row, new in zip(rows, truth, strict=True)]
        drafter = ScriptedDrafter(default_tree(4, 12), texts, 0.7, row_trees=len(rows) > 1)
        decoder = SpecDecoder(llama, drafter)
        for door in (decoder, plain)[: len(rows)]:
            settings = {"max_new_tokens": NUM_NEW, **SAMPLING[sampling], **CONTROLS[name]()}
            settings |= {"pad_token_id": PAD, **padded(rows)}
            ours = door.generate(seed=3, **settings)
            assert new_tokens(ours) == truth
            if name == "unknown":
                (seen,) = settings["logits_processor"]
                assert seen.texts[0] == rows[0][0].tolist()
        assert decoder.last_result is not None
        assert decoder.last_result.accept_length > 1.2 or max(map(len, truth)) < 3
        settings |= CONTROLS[name]()
        theirs = llama.generate(custom_generate=decoder, seed=3, **settings)
        assert theirs.equal(ours.sequences)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_sampled_trees_are_plain_decoding(llama: PreTrainedModel, sampling: str) -> None:
    """Prevents warpers applied twice, not at all, or in another order."""
    settings = {"seed": 5, "max_new_tokens": NUM_NEW, **SAMPLING[sampling], **padded(ROWS)}
    plain = SpecDecoder(llama, None).generate(**settings)
    for tree in (Tree.chain(3), default_tree(4, 16)):
        drafter = ScriptedDrafter(tree, texts_of(plain, ROWS), 0.7)
        assert new_tokens(SpecDecoder(llama, drafter).generate(**settings)) == new_tokens(plain)


def test_near_ties_are_as_wide_as_the_temperature_among_the_processors() -> None:
    """Prevents a low temperature enlarging rounding beyond what is settled."""
    rows = Rows([0], [[1]], [True])
    logits = torch.tensor([[10.0, 9.0, 0.0]])
    scores = torch.tensor([[1000.0, 999.995, 0.0]])
    for temperature, tied in ((0.01, True), (1.0, False)):
        processors = bind(LogitsProcessorList([TemperatureLogitsWarper(temperature)]), [[1]], 1)
        chooser = Chooser(Sampler(1.0), processors, lambda row, text: logits)
        scored = Scored(logits[None], logits[None] / temperature, scores[None])
        path = torch.tensor([[0]])
        assert chooser.near_ties(logits[None], scored, rows, path).tolist() == [[tied]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_first_of_equal_scores_is_chosen_as_by_argmax(dtype: torch.dtype) -> None:
    """In 16 bits equal best scores are common: another one of them is another text."""
    scores = torch.randint(-3, 4, (4, 7, 5000)).to(dtype)
    assert Scored(scores, scores, scores).best().equal(scores.argmax(-1))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_scores_and_logits_are_those_of_transformers(llama: PreTrainedModel, num_rows: int) -> None:
    """Prevents scores with noise, of another node, or of a finished row's neighbour."""
    rows = ROWS[:num_rows]
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
        "pad_token_id": PAD,
        **padded(rows),
    }
    eos = SpecDecoder(llama, None).generate(ROWS[0], 12, repetition_penalty=1.3).new_tokens[6]
    theirs = llama.generate(eos_token_id=eos, **settings)
    plain = SpecDecoder(llama, None).generate(eos_token_id=eos, **settings)
    drafter = ScriptedDrafter(default_tree(4, 12), texts_of(plain, rows), 0.7)
    decoder = SpecDecoder(llama, drafter)
    ours = decoder.generate(eos_token_id=eos, **settings)
    custom = llama.generate(custom_generate=decoder, eos_token_id=eos, **settings)
    assert ours.sequences.equal(theirs.sequences) and custom.sequences.equal(theirs.sequences)
    assert isinstance(custom.past_key_values, TreeCache)
    for name in ("scores", "logits"):
        expected = getattr(theirs, name)
        for found in (getattr(ours, name), getattr(custom, name), getattr(plain, name)):
            assert len(found) == len(expected)
            for i, (a, b) in enumerate(zip(found, expected, strict=True)):
                assert a.dtype == b.dtype and not a.is_inference()
                for row, new in enumerate(ours.rows):
                    if i < len(new.new_tokens):  # transformers 5.17 penalises padding: PAD is last
                        ours_row, theirs_row = a[row, :PAD], b[row, :PAD]
                        torch.testing.assert_close(ours_row, theirs_row, atol=1e-4, rtol=1e-4)
                    else:
                        assert not a[row].any()
    assert decoder.generate(ROWS[0], 4).scores is None


def test_scores_of_processors_with_a_state(llama: PreTrainedModel) -> None:
    """Prevents bare logits in place of scores where nodes are asked about one by one."""
    settings: dict[str, Any] = {"max_new_tokens": 12, "output_scores": True, "do_sample": False}
    settings["return_dict_in_generate"] = True
    theirs = llama.generate(ROWS[0], logits_processor=[Alternate()], **settings)
    drafter = ScriptedDrafter(default_tree(4, 12), theirs.sequences.tolist(), 0.7)
    ours = SpecDecoder(llama, drafter).generate(ROWS[0], logits_processor=[Alternate()], **settings)
    assert ours.sequences.equal(theirs.sequences) and ours.accept_length > 1.2
    assert ours.scores is not None
    for a, b in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_scores_of_sampling_are_without_noise(llama: PreTrainedModel) -> None:
    """Prevents scores that are no log probabilities of anything."""
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.7, "top_k": 5, "seed": 2}
    plain = SpecDecoder(llama, None).generate(ROWS[0], **settings)
    drafter = ScriptedDrafter(default_tree(4, 12), texts_of(plain, ROWS[:1]), 0.7)
    result = SpecDecoder(llama, drafter).generate(ROWS[0], output_scores=True, **settings)
    assert result.scores is not None and result.logits is not None
    assert result.new_tokens == plain.new_tokens
    for scores, logits, token in zip(result.scores, result.logits, plain.new_tokens, strict=True):
        assert int(scores.isfinite().sum()) == 5 and scores[0, token].isfinite()
        kept = scores.isfinite()
        torch.testing.assert_close(scores[kept], logits[kept] / 0.7)
    sampler = Sampler(temperature=0.7, top_k=5, seed=2)
    direct = decode(llama, drafter, ROWS[0], max_new_tokens=12, sampler=sampler, keep_scores=True)
    assert direct.new_tokens == plain.new_tokens and direct.scores is not None
    for a, b in zip(direct.scores, result.scores, strict=True):
        torch.testing.assert_close(a, b)


def test_streamers_are_fed_per_step_at_both_doors(llama: PreTrainedModel) -> None:
    """Prevents a silent streamer, one fed twice, and rows of a batch mixed into one text."""
    plain = SpecDecoder(llama, None).generate(ROWS[0], NUM_NEW)
    drafter = ScriptedDrafter(Tree.chain(4), texts_of(plain, ROWS[:1]), 0.8)
    bound, own = Recorder(), Recorder()
    decoder = SpecDecoder(llama, drafter, streamer=bound)
    llama.generate(ROWS[0], custom_generate=decoder, max_new_tokens=NUM_NEW, do_sample=False)
    tokens: list[tuple[int, list[int]]] = []
    result = SpecDecoder(llama, drafter).generate(
        ROWS[0], NUM_NEW, streamer=own, on_tokens=lambda row, new: tokens.append((row, new))
    )
    for streamer in (bound, own):
        assert sum(streamer.parts, []) == plain.sequences[0].tolist()
        assert streamer.parts[0] == ROWS[0][0].tolist()
        assert streamer.ended == 1
    assert list(map(len, own.parts[1:])) == [1, *result.accept_lengths]
    assert tokens == [(0, part) for part in own.parts[1:]]
    for streamer in (None, own):
        with pytest.raises(ValueError, match="streamer takes one prompt at a time, got 3"):
            decoder.generate(**padded(ROWS), max_new_tokens=4, streamer=streamer)


def test_return_sequences_are_the_seeds_in_a_row(llama: PreTrainedModel) -> None:
    """Prevents n times the same text, and texts that no single call can repeat."""
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_k": 0}
    decoder = SpecDecoder(llama, NgramDrafter())
    many = decoder.generate(ROWS[0], num_return_sequences=3, seed=7, **settings)
    alone = [decoder.generate(ROWS[0], seed=7 + i, **settings).new_tokens for i in range(3)]
    assert new_tokens(many) == alone
    assert len(set(map(tuple, alone))) == 3
    bound = SpecDecoder(llama, NgramDrafter(), seed=8)
    assert bound.generate(ROWS[0], **settings).new_tokens == alone[1]
    assert bound.generate(ROWS[0], seed=9, **settings).new_tokens == alone[2]
    torch.manual_seed(0)
    first, second = (decoder.generate(ROWS[0], **settings).new_tokens for _ in range(2))
    torch.manual_seed(0)
    assert decoder.generate(ROWS[0], **settings).new_tokens == first != second


def test_conversations_go_on_behind_the_cache(llama: PreTrainedModel) -> None:
    """Prevents a second turn that reads everything anew, at either door."""
    num_read: list[int] = []
    read = ModelPass.read

    def watch(base: ModelPass, tokens: Tensor, counts: Any) -> Tensor:
        num_read.append(max(counts))
        return read(base, tokens, counts)

    decoder = SpecDecoder(llama, NgramDrafter())
    settings: dict[str, Any] = {"max_new_tokens": 10, "return_dict_in_generate": True}
    settings["repetition_penalty"] = 1.2
    for door in (
        lambda ids, **more: decoder.generate(ids, **settings, **more),
        lambda ids, **more: llama.generate(ids, custom_generate=decoder, **settings, **more),
    ):
        first = door(ROWS[0])
        cache = first.cache if isinstance(first, DecodeResult) else first.past_key_values
        ids = torch.cat([first.sequences, ROWS[1]], dim=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelPass, "read", watch)
            num_read.clear()
            second = door(ids, past_key_values=cache)
        assert num_read == [1 + ROWS[1].shape[1]]
        assert second.sequences.equal(door(ids).sequences)
    assert decoder.generate(ROWS[0], 4).cache is None, "memory that nobody asked for"


def test_settings_come_from_the_generation_config(llama: PreTrainedModel) -> None:
    """Prevents defaults of our own where the model's makers chose others."""
    decoder = SpecDecoder(llama, NgramDrafter(), seed=1)
    bare = decoder.generate(ROWS[0], NUM_NEW)
    config = llama.generation_config
    assert config is not None
    config.repetition_penalty = 1.5
    punished = decoder.generate(ROWS[0], NUM_NEW)
    assert punished.new_tokens == decoder.generate(ROWS[0], NUM_NEW, temperature=0).new_tokens
    assert punished.new_tokens != bare.new_tokens
    config.do_sample, config.temperature = True, 0.8
    sampled = decoder.generate(ROWS[0], NUM_NEW)
    assert sampled.new_tokens == decoder.generate(ROWS[0], NUM_NEW, temperature=0.8).new_tokens
    assert sampled.new_tokens != punished.new_tokens
    assert decoder.generate(ROWS[0], NUM_NEW, temperature=0).new_tokens == punished.new_tokens


class Checking(NgramDrafter):
    """Checks that the hidden states it is given are those of its own text."""

    taps = (FINAL,)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.layer = output_layer(model)

    def observe(self, state: Any, result: StepResult) -> Any:
        """Compare with what the base model said."""
        logits = self.layer(result.hidden[FINAL])
        assert logits.argmax(-1).equal(result.base_tokens)
        return super().observe(state, result)


def test_threads_share_a_decoder(llama: PreTrainedModel) -> None:
    """Prevents one request's stream, hidden states or result reaching another."""
    plain = SpecDecoder(llama, None)
    expected = [plain.generate(row, 60).new_tokens for row in ROWS]
    decoder = SpecDecoder(llama, Checking(llama))
    found: dict[int, tuple[list[int], list[int]]] = {}

    def work(i: int) -> None:
        streamer = Recorder()
        result = decoder.generate(ROWS[i], 60, streamer=streamer)
        found[i] = result.new_tokens, sum(streamer.parts[1:], [])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(ROWS))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert found == {i: (tokens, tokens) for i, tokens in enumerate(expected)}


def test_what_does_not_go_with_a_tree_is_refused(llama: PreTrainedModel) -> None:
    """Prevents a setting that is quietly ignored."""
    decoder = SpecDecoder(llama, NgramDrafter())
    cache = DynamicCache()
    llama(ROWS[0][:, :4], past_key_values=cache, use_cache=True)
    for settings, message in (
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search is not available"),
        ({"dola_layers": "high"}, "dola_generation is not available"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation is not available"),
        ({"output_attentions": True}, "output_attentions is not available"),
        ({"output_hidden_states": True}, "output_hidden_states is not available"),
        ({"guidance_scale": 1.5}, "guidance_scale is not available"),
        ({"encoder_repetition_penalty": 1.5}, "encoder_repetition_penalty is not available"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size is not available"),
        (
            {"cache_implementation": "static"},
            "cache_implementation must be 'dynamic', got 'static'",
        ),
        ({"past_key_values": cache}, "must be a TreeCache, got DynamicCache of 4 tokens"),
        ({"past_key_values": DynamicCache()}, "must be a TreeCache, got DynamicCache of 0 tokens"),
        ({"position_ids": torch.arange(1, 10)[None]}, "position_ids must count"),
        ({"attention_mask": torch.tensor([[1] * 8 + [0]])}, "not left padding"),
        ({"max_new_tokns": 4}, "max_new_tokns"),
    ):
        with pytest.raises(ValueError, match=message) as ours:
            decoder.generate(ROWS[0], 4, **settings)
        assert "\n" not in str(ours.value) or "not used by the model" in str(ours.value)
        with pytest.raises(ValueError, match=message):
            llama.generate(ROWS[0], custom_generate=decoder, max_new_tokens=4, **settings)
    with pytest.raises(ValueError, match="assistant_model is not available: the drafter"):
        decoder.generate(ROWS[0], 4, assistant_model=llama)
    with pytest.raises(ValueError, match=r"input_ids must be \[B, P\], got \[9\]"):
        decoder.generate(ROWS[0][0], 4)
    embeds = llama.get_input_embeddings()(ROWS[0])
    with pytest.raises(ValueError, match="inputs_embeds: only input_ids can be continued"):
        llama.generate(inputs_embeds=embeds, custom_generate=decoder, max_new_tokens=4)
    assert llama.generation_config is not None
    llama.generation_config.stop_strings = ["a"]
    with pytest.raises(ValueError, match="generation_config.stop_strings would need a tokenizer"):
        decoder.generate(ROWS[0], 4)
    llama.generation_config.stop_strings = None
    other = SpecDecoder(type(llama)(llama.config).eval(), NgramDrafter())
    with pytest.raises(ValueError, match="not the base model"):
        llama.generate(ROWS[0], custom_generate=other)
    assert VOCAB > PAD
