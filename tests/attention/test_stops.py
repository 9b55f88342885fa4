"""Where a text ends: lengths, tokens, strings and criteria, wherever in a tree they are met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from specheads.attention.cache import TreeCache
from specheads.attention.tree import Tree, default_tree
from specheads.decoding.generate import SpecDecoder
from specheads.decoding.result import Limits, Output
from specheads.drafters.lookup import NgramDrafter
from tests.ragged import NUM_NEW, PAD, ROWS, After, padded, texts_of
from tests.scripted import ScriptedDrafter, build


@pytest.fixture
def llama() -> PreTrainedModel:
    """Return a small random Llama with VOCAB tokens."""
    return build("llama")


def test_lengths_end_inside_the_tree(llama: PreTrainedModel) -> None:
    """Prevents max_length taken for max_new_tokens, and a shorter one of the user being ignored."""
    truth = SpecDecoder(llama, None).generate(ROWS[0], 30)
    drafter = ScriptedDrafter(Tree.chain(4), texts_of(truth, ROWS[:1]), 1.0)
    decoder = SpecDecoder(llama, drafter)
    for length in range(10, 18):
        shorter = StoppingCriteriaList([MaxLengthCriteria(length)])
        for settings in (
            {"max_length": length},
            {"max_new_tokens": length - 9},
            {"generation_config": GenerationConfig(max_length=length)},
            {"max_new_tokens": 20, "stopping_criteria": shorter},
        ):
            result = decoder.generate(ROWS[0], **settings)
            assert result.sequences.equal(truth.sequences[:, :length])
            assert not result.finished
            assert sum(result.accept_lengths) == length - 10
    assert decoder.generate(ROWS[0]).sequences.shape == (1, 29)  # transformers' default: 20 more


def test_the_context_is_a_limit_at_every_depth() -> None:
    """Prevents a lookup of learned positions that do not exist, wherever in the tree they start."""
    model = build("gpt2")
    for length in range(248, 256):
        ids = torch.randint(PAD, (1, length), generator=torch.Generator().manual_seed(length))
        plain = SpecDecoder(model, None).generate(ids, max_length=256)
        drafter = ScriptedDrafter(default_tree(4, 12), texts_of(plain, [ids]), 0.9)
        result = SpecDecoder(model, drafter).generate(ids, max_length=256)
        assert result.sequences.shape == (1, 256)
        assert result.sequences.equal(plain.sequences)


@pytest.fixture
def speaking(make_tiny_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """Return a model of bytes whose text does not repeat itself."""
    return make_tiny_llama(seed=3, std=0.3)


def test_stop_strings_end_the_text_across_steps(
    speaking: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Prevents a stop that is missed where it begins in one step and ends in the next."""
    ids = torch.tensor([byte_tokenizer("def f(x):").input_ids])
    letters = list(range(256, 272)) + list(range(128, 256))
    settings: dict[str, Any] = {"max_new_tokens": 24, "suppress_tokens": letters}
    free = SpecDecoder(speaking, None).generate(ids, **settings)
    drafter = ScriptedDrafter(Tree.chain(4), texts_of(free, [ids]), 1.0, vocab=272)
    decoder = SpecDecoder(speaking, drafter, tokenizer=byte_tokenizer)
    unbound = SpecDecoder(speaking, drafter)
    ends = set()
    for end in range(3, 13):
        stop = bytes(free.new_tokens[end - 3 : end]).decode()
        first = bytes(free.new_tokens).decode("latin-1").index(stop) + 3
        expected = free.new_tokens[:first]
        for result in (
            decoder.generate(ids, stop_strings=stop, **settings),
            unbound.generate(
                ids, stop_strings=["never!", stop], tokenizer=byte_tokenizer, **settings
            ),
            decoder.generate(
                ids, generation_config=GenerationConfig(stop_strings=stop, **settings)
            ),
        ):
            assert result.new_tokens == expected and result.finished
            assert sum(result.accept_lengths) == first - 1
        custom = speaking.generate(ids, custom_generate=decoder, stop_strings=stop, **settings)
        assert custom[0, ids.shape[1] :].tolist() == expected
        theirs = speaking.generate(ids, stop_strings=stop, tokenizer=byte_tokenizer, **settings)
        assert custom.equal(theirs)
        ends.add(first % 5)
    assert len(ends) == 5, "the end should have come at every place in a step"
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        unbound.generate(ids, stop_strings="a", **settings)


class Ninth(StoppingCriteria):
    """Stops when asked for the ninth time; of its tokenizer there is to be one only."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.asked: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Count."""
        self.asked.append(int(input_ids[0, -1]))
        return torch.full((len(input_ids),), len(self.asked) >= 9)


@pytest.mark.parametrize("kind", ["state", "function", "time", "eos", "length", "strings"])
def test_rows_of_a_batch_end_as_in_generate(
    speaking: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    """Prevents one criterion's state being moved on by all rows: they would end too early."""
    rows = [torch.tensor([list(map(ord, text))]) for text in ("def f(x):", "abc", "import ")]
    letters = list(range(256, 272)) + list(range(128, 256))
    settings: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False, "pad_token_id": 0}
    settings |= {"suppress_tokens": letters, **padded(rows)}
    free = SpecDecoder(speaking, None).generate(**settings)
    ends = [free.rows[0].new_tokens[6], free.rows[1].new_tokens[3]]
    criteria: dict[str, Callable[[], Any]] = {
        "state": lambda: Ninth(byte_tokenizer),
        "function": lambda: lambda ids, scores: ids[:, -1] == ends[0],
        "time": lambda: MaxTimeCriteria(1.0, initial_timestamp=0.0),
        "eos": lambda: EosTokenCriteria(ends),
        "length": lambda: MaxLengthCriteria(15),
        "strings": lambda: StopStringCriteria(byte_tokenizer, [chr(end) for end in ends]),
    }

    def stop() -> dict[str, Any]:
        return {"stopping_criteria": StoppingCriteriaList([criteria[kind]()])}

    theirs = speaking.generate(**settings, **stop()).tolist()
    for tree in (None, Tree.chain(3), default_tree(4, 12)):
        drafter = tree and ScriptedDrafter(tree, texts_of(free, rows), 0.7, vocab=272)
        decoder = SpecDecoder(speaking, drafter)
        given = stop()
        found = decoder.generate(**settings, **given)
        assert found.sequences.tolist() == theirs
        assert speaking.generate(custom_generate=decoder, **settings, **stop()).tolist() == theirs
        if kind == "state":
            assert [len(row.new_tokens) for row in found.rows] == [9, 9, 9]
            (own,) = given["stopping_criteria"]
            assert own.asked == found.rows[0].new_tokens, "asked once per token, in order"
    if kind not in ("time", "state"):
        assert len({len(row.new_tokens) for row in found.rows}) > 1 or kind == "length"


def test_criteria_share_what_is_heavy(
    llama: PreTrainedModel, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Prevents a tokenizer or a table of the vocabulary per row, and a state shared by rows."""
    output = Output([[1], [2], [3]], torch.device("cpu"), Limits(3))
    assert output.criteria == [[], [], []]
    strings, own = StopStringCriteria(byte_tokenizer, ["a"]), Ninth(byte_tokenizer)
    rules = StoppingCriteriaList([strings, own])
    output = Output([[1], [2], [3]], torch.device("cpu"), Limits(3, stopping_criteria=rules))
    assert output.criteria[0] == [strings, own]
    for row in (1, 2):
        shared, copied = output.criteria[row]
        assert shared is strings and isinstance(copied, Ninth) and copied is not own
        assert copied.asked is not own.asked and copied.tokenizer is byte_tokenizer
    own.generator = (i for i in range(3))  # type: ignore[attr-defined]
    alone = Output([[1]], torch.device("cpu"), Limits(3, stopping_criteria=rules))
    assert alone.criteria == [[strings, own]]
    with pytest.raises(
        ValueError, match="criterion Ninth cannot be copied for row 1 .* one prompt"
    ):
        Output([[1], [2]], torch.device("cpu"), Limits(3, stopping_criteria=rules))


@pytest.mark.parametrize(
    "answer,said",
    [
        (torch.tensor([False, False, True]), r"\[3\]"),
        (torch.tensor([[False]]), r"\[1, 1\]"),
        (torch.zeros(0, dtype=torch.bool), r"\[0\]"),
        (None, "None"),
    ],
)
def test_an_answer_about_other_rows_is_an_error(
    llama: PreTrainedModel, answer: Any, said: str
) -> None:
    """Prevents an answer for a whole batch, taken for one about the row that was asked about."""

    class Whole(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
            return answer

    rules = StoppingCriteriaList([After(61), Whole()])
    for drafter in (None, NgramDrafter()):
        with pytest.raises(ValueError, match=f"criterion Whole .* one row .* \\[1\\], got {said}"):
            SpecDecoder(llama, drafter).generate(
                **padded(ROWS), max_new_tokens=4, stopping_criteria=rules
            )


def test_a_criterion_of_your_own_is_no_length(llama: PreTrainedModel) -> None:
    """Prevents a subclass of a known criterion being read as that and never asked."""

    class Later(MaxLengthCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
            return super().__call__(input_ids[:, :-3], scores, **kwargs)

    rules = StoppingCriteriaList([Later(12)])
    settings: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    theirs = llama.generate(ROWS[0], stopping_criteria=rules, **settings)
    ours = SpecDecoder(llama, None).generate(ROWS[0], stopping_criteria=rules, **settings)
    assert ours.sequences.equal(theirs) and len(ours.new_tokens) == 6


def test_what_is_cut_off_is_in_no_cache(llama: PreTrainedModel) -> None:
    """Prevents a next turn that continues from tokens which were never part of the text."""
    free = SpecDecoder(llama, None).generate(ROWS[0], NUM_NEW).new_tokens
    drafter = ScriptedDrafter(Tree.chain(4), ROWS[0][0].tolist() + free, 1.0)
    end = next(i for i in range(7, NUM_NEW) if free[i - 1] not in free[: i - 1])
    for settings in (
        {"eos_token_id": free[end - 1]},
        {"stopping_criteria": StoppingCriteriaList([After(free[end - 1])])},
        {"max_new_tokens": end},
    ):
        cache = TreeCache()
        result = SpecDecoder(llama, drafter).generate(
            ROWS[0], past_key_values=cache, **{"max_new_tokens": NUM_NEW, **settings}
        )
        assert result.new_tokens == free[:end]
        assert result.cache is cache
        assert cache.tokens == [ROWS[0][0].tolist() + free[: end - 1]]
        assert cache.lengths == [9 + end - 1]
