"""The decoder inside transformers' own generate()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specheads.attention.tree import default_tree
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.loop import plain_decode
from specheads.verification.sampling import Sampler
from tests.scripted import VOCAB, Recorder, ScriptedDrafter, build

IDS = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(9))
ONES = {"attention_mask": torch.ones_like(IDS)}


@pytest.fixture
def llama() -> PreTrainedModel:
    """Return a small random Llama."""
    return build("llama")


@pytest.fixture
def decoder(llama: PreTrainedModel) -> SpecDecoder:
    """Return a decoder whose guesses are often right."""
    truth = plain_decode(llama, IDS, max_new_tokens=50).sequences[0].tolist()
    return SpecDecoder(llama, ScriptedDrafter(default_tree(4, 12), truth, 0.8), seed=5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 20, "eos_token_id": 27},
        {"eos_token_id": [3, 27]},
        {"bad_words_ids": [[27], [24, 43]]},
    ],
    ids=str,
)
def test_generate_gives_what_it_gives_alone(decoder: SpecDecoder, settings: dict[str, Any]) -> None:
    """Prevents a door that ignores what users set in generate()."""
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **ONES, **settings}
    theirs = decoder.base.generate(IDS, **options)
    ours = decoder.base.generate(IDS, custom_generate=decoder, **options)
    assert ours.equal(theirs)
    assert decoder.last_result is not None
    assert decoder.last_result.accept_length > 1


def test_max_length_counts_the_prompt(decoder: SpecDecoder) -> None:
    """Prevents max_length taken for max_new_tokens."""
    ours = decoder.base.generate(IDS, custom_generate=decoder, max_length=30, do_sample=False)
    assert ours.shape == (1, 30)


def test_sampling_is_plain_decoding_with_the_seed(decoder: SpecDecoder) -> None:
    """Prevents warpers applied twice or not at all, and a seed that is not used."""
    ours = decoder.base.generate(
        IDS,
        custom_generate=decoder,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        max_new_tokens=40,
        return_dict_in_generate=True,
        **ONES,
    )
    sampler = Sampler(temperature=0.7, top_k=20, top_p=0.9, seed=5)
    plain = plain_decode(decoder.base, IDS, max_new_tokens=40, sampler=sampler)
    assert ours.sequences.equal(plain.sequences)
    own = decoder.generate(IDS, 40, temperature=0.7, top_k=20, top_p=0.9, seed=5)
    assert own.sequences.equal(plain.sequences)


def test_without_a_seed_torch_rules(decoder: SpecDecoder) -> None:
    """Prevents the same text at every call, or one that torch.manual_seed cannot repeat."""
    decoder.seed = None
    options = {"custom_generate": decoder, "do_sample": True, "max_new_tokens": 20, **ONES}
    torch.manual_seed(1)
    first, second = (decoder.base.generate(IDS, **options) for _ in range(2))
    torch.manual_seed(1)
    again = decoder.base.generate(IDS, **options)
    assert first.equal(again)
    assert not first.equal(second)


def test_eos_comes_from_the_generation_config(decoder: SpecDecoder) -> None:
    """Prevents text that runs on after eos unless it is named by hand."""
    free = decoder.generate(IDS, 40).new_tokens
    assert decoder.base.generation_config is not None
    for eos in (free[7], [free[7], 1]):
        decoder.base.generation_config.eos_token_id = eos
        result = decoder.generate(IDS, 40)
        assert result.finished
        assert result.new_tokens == free[: free.index(free[7]) + 1]


def test_streamer_gets_prompt_steps_and_end(decoder: SpecDecoder) -> None:
    """Prevents a silent streamer: generate() does not hand its own to callables."""
    decoder.streamer = streamer = Recorder()
    ours = decoder.base.generate(
        IDS, custom_generate=decoder, do_sample=False, max_new_tokens=20, **ONES
    )
    assert sum(streamer.parts, []) == ours[0].tolist()
    assert streamer.parts[0] == IDS[0].tolist()
    assert max(map(len, streamer.parts[1:])) > 1
    assert streamer.ended == 1
